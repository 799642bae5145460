"""Compile the residual kernel of several queries for a chip that is not here: its PTX, and what it needs.

    python -m tests.ops.residual_batch_ptx FOLDER ARCH BLOCKS DIM NBITS LISTED

Writes FOLDER/0.ptx and FOLDER/resources.json. Runs in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from plaid_tilemaxsim.ops import residual_batch_kernel
from tests.ops.aot import compiling_for


def main() -> None:
    folder = Path(sys.argv[1])
    arch, blocks, DIM, nbits, listed = (int(x) for x in sys.argv[2:])
    with compiling_for(arch) as kernels:
        residual_batch_kernel.residual_maxsim(
            torch.zeros(blocks, 32, DIM),
            torch.zeros(8, DIM, dtype=torch.float16),
            torch.zeros(16, dtype=torch.int32),
            torch.zeros(16, DIM * nbits // 8, dtype=torch.uint8),
            torch.zeros(16, dtype=torch.uint16),
            0.9,
            1e-6,
            torch.zeros(2**nbits),
            nbits,
            torch.zeros(17, dtype=torch.int64),
            torch.zeros(16, dtype=torch.int32) if listed else None,
            torch.zeros(blocks, 16),
            None,
        )
    (kernel,) = kernels
    (folder / "0.ptx").write_text(kernel.asm["ptx"])
    resources = {"registers": kernel.registers, "spills": kernel.spills, "shared_bytes": kernel.shared_bytes}
    (folder / "resources.json").write_text(json.dumps(resources))


if __name__ == "__main__":
    main()
