"""Compile the fast dense kernel for a chip that is not here: its PTX, and what it needs.

    python -m tests.ops.dense_fast_ptx FOLDER ARCH DTYPE PRECISION LQ DIM LAYOUT N

Writes FOLDER/0.ptx (and 1.ptx: later blocks of query tokens) and FOLDER/resources.json. Runs in a process of its own,
without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from plaid_tilemaxsim.ops import dense_fast_kernel
from tests.ops.aot import compiling_for


def main() -> None:
    folder, arch, dtype = Path(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
    precision, LQ, DIM, layout = sys.argv[4], int(sys.argv[5]), int(sys.argv[6]), sys.argv[7]
    n, packed, listed = int(sys.argv[8]), layout in ("packed", "listed", "counted"), layout in ("listed", "counted")
    D = torch.zeros(16, DIM, dtype=dtype) if packed else torch.zeros(n, 3, DIM, dtype=dtype)
    with compiling_for(arch) as kernels:
        dense_fast_kernel.dense_maxsim(
            torch.zeros(1, LQ, DIM, dtype=dtype),
            D,
            torch.zeros(n, dtype=torch.int32) if layout == "padded" else None,
            torch.zeros(n + 1, dtype=torch.int64) if packed else None,
            torch.zeros(n, dtype=torch.int32) if listed else None,
            torch.zeros(1, n),
            torch.zeros(1, dtype=torch.int32) if layout == "counted" else None,
            precision,
        )
    for i, kernel in enumerate(kernels[:2]):
        (folder / f"{i}.ptx").write_text(kernel.asm["ptx"])
    resources = [{"registers": k.registers, "spills": k.spills, "shared_bytes": k.shared_bytes} for k in kernels]
    (folder / "resources.json").write_text(json.dumps(resources))


if __name__ == "__main__":
    main()
