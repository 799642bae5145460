"""Compile the ring of dense tiles for sm_90: its PTX, and its bytes of shared memory.

    python -m tests.ops.dense_ring_ptx FOLDER LQ DIM ND N

Writes FOLDER/0.ptx and FOLDER/shared_bytes, for N passages of ND fp16 tokens with a count. Runs in a process of its
own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from plaid_tilemaxsim.ops import dense_ring_kernel
from tests.ops.aot import compiling_for


def main() -> None:
    folder, (LQ, DIM, ND, n) = Path(sys.argv[1]), map(int, sys.argv[2:])
    with compiling_for(90) as kernels:
        D = torch.zeros(n, ND, DIM, dtype=torch.float16)
        dense_ring_kernel.dense_maxsim(torch.zeros(1, LQ, DIM).half(), D, torch.zeros(1, n), torch.zeros(1).int())
    (kernel,) = kernels
    (folder / "0.ptx").write_text(kernel.asm["ptx"])
    (folder / "shared_bytes").write_text(str(kernel.shared_bytes))


if __name__ == "__main__":
    main()
