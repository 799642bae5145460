"""Compile the fast residual kernel for a chip that is not here: its PTX, and what it needs.

    python -m tests.ops.residual_fast_ptx FOLDER ARCH LQ DIM NBITS LISTED

A list (LISTED 1) is as long as a number on the device says.
Writes FOLDER/{0,1}.ptx (the first block of query tokens, the later ones) and FOLDER/resources.json. Runs in a process
of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from plaid_tilemaxsim.ops import residual_fast_kernel
from plaid_tilemaxsim.ops.api import CentroidScores, padded_query_length
from tests.ops.aot import compiling_for


def main() -> None:
    folder = Path(sys.argv[1])
    arch, LQ, DIM, nbits, listed = (int(x) for x in sys.argv[2:])
    table = torch.zeros(8, padded_query_length(LQ), dtype=torch.int16)
    pids = torch.zeros(16, dtype=torch.int32) if listed else None
    with compiling_for(arch) as kernels:
        residual_fast_kernel.residual_maxsim(
            torch.zeros(LQ, DIM),
            CentroidScores(table, torch.ones(1), LQ),
            torch.zeros(16, dtype=torch.int32),
            torch.zeros(16, DIM * nbits // 8, dtype=torch.uint8),
            torch.zeros(16, dtype=torch.uint16),
            0.9,
            1e-6,
            torch.zeros(2**nbits),
            nbits,
            torch.zeros(17, dtype=torch.int64),
            pids,
            torch.zeros(16),
            torch.zeros(1, dtype=torch.int32) if listed else None,
        )
    scoring = [kernel for kernel in kernels if kernel.kernel == "_residual_maxsim_kernel"]
    for i, kernel in enumerate(scoring[:2]):
        (folder / f"{i}.ptx").write_text(kernel.asm["ptx"])
    resources = [{"registers": k.registers, "spills": k.spills, "shared_bytes": k.shared_bytes} for k in scoring]
    (folder / "resources.json").write_text(json.dumps(resources))


if __name__ == "__main__":
    main()
