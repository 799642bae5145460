"""Compile the launch of ``centroid_kept_kernel`` for a chip: its PTX.

    python -m tests.ops.centroid_kept_ptx FILE ARCH LQ (pids | all)

Runs in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from plaid_tilemaxsim.ops import centroid_kept_kernel
from tests.ops.aot import _lists, _scores, compiling_for


def main() -> None:
    file, arch, LQ, listed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "pids"
    pids, out, count = _lists(torch.int32 if listed else None, listed)
    with compiling_for(arch) as kernels:
        centroid_kept_kernel.centroid_maxsim(
            _scores(LQ), torch.zeros(1000).int(), torch.zeros(101).long(), pids, out, count
        )
    file.write_text(kernels[0].asm["ptx"])


if __name__ == "__main__":
    main()
