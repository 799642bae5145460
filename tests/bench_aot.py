"""Compile the benchmark's own kernels for a chip that is not here: python -m tests.bench_aot ARCH, a JSON line each."""

from __future__ import annotations

import json
import sys

import torch

from scripts.kernels import paper, stream
from tests.ops.aot import compiling_for

if __name__ == "__main__":
    with compiling_for(int(sys.argv[1])) as kernels:
        x = torch.zeros(1 << 16, dtype=torch.int32)
        for blocks in stream.CHOICES:
            stream.stream(x, torch.zeros(1 << 12, dtype=torch.int32), blocks)
        # what the bench launches
        launches = [(32, 128, torch.float16, blocks) for blocks in paper.CHOICES]
        launches += [(32, DIM, torch.bfloat16, paper.CHOICES[0]) for DIM in (64, 128, 256, 384, 768)]
        launches += [(LQ, 128, torch.float16, paper.CHOICES[0]) for LQ in (8, 128)]
        for LQ, DIM, dtype, chosen in launches:
            D = torch.zeros(16, 128, DIM, dtype=dtype)
            paper.paper_maxsim(torch.zeros(LQ, DIM, dtype=dtype), D, chosen)
    for k in kernels:
        fields = {name: value for name, value in vars(k).items() if name != "asm"}
        wide = 0 if k.kernel != "_stream_kernel" else k.asm["ptx"].count("v4.b32")
        print(json.dumps(fields | {"constants": {n: str(v) for n, v in k.constants.items()}, "wide": wide}))
