"""Compile the fast PQ kernel for a chip that is not here: its PTX, and what it needs.

    python -m tests.ops.pq_fast_ptx FOLDER ARCH BLOCKS DIM M LISTED

Writes FOLDER/0.ptx and FOLDER/resources.json. Runs in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from plaid_tilemaxsim.ops import pq_fast_kernel
from tests.ops.aot import compiling_for


def main() -> None:
    folder = Path(sys.argv[1])
    arch, blocks, DIM, M, listed = (int(x) for x in sys.argv[2:])
    pids = torch.zeros(16, dtype=torch.int32) if listed else None
    with compiling_for(arch) as kernels:
        pq_fast_kernel.pq_maxsim(
            torch.zeros(blocks, 32, DIM),
            torch.zeros(16, M, dtype=torch.uint8),
            torch.zeros(M, 256, DIM // M, dtype=torch.float16),
            torch.zeros(17, dtype=torch.int64),
            pids,
            torch.zeros(blocks, 16),
            None,
        )
    (kernel,) = kernels
    (folder / "0.ptx").write_text(kernel.asm["ptx"])
    resources = {"registers": kernel.registers, "spills": kernel.spills, "shared_bytes": kernel.shared_bytes}
    (folder / "resources.json").write_text(json.dumps(resources))


if __name__ == "__main__":
    main()
