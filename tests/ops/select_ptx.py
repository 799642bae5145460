"""Compile the launches of ``select_top`` for sm_90: their PTX, and their bytes of shared memory.

    python -m tests.ops.select_ptx FOLDER PROGRAMS

Writes FOLDER/0.ptx to 4.ptx and 0.shared_bytes to 4.shared_bytes, for a workspace of PROGRAMS programs. Runs in a
process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from plaid_tilemaxsim.ops import select_kernel
from tests.ops.aot import compiling_for


def main() -> None:
    folder, programs = Path(sys.argv[1]), int(sys.argv[2])
    ints = torch.zeros(10_000, dtype=torch.int32)
    work = ints[: select_kernel._TALLY + 2 * programs]
    with compiling_for(90) as kernels:
        select_kernel.select_top(ints.float(), ints, ints, 100, ints, ints.float(), ints, work)
    for launch, kernel in enumerate(kernels):
        (folder / f"{launch}.ptx").write_text(kernel.asm["ptx"])
        (folder / f"{launch}.shared_bytes").write_text(str(kernel.shared_bytes))


if __name__ == "__main__":
    main()
