"""Compile the wgmma kernel of several queries for sm_90: its PTX, and its bytes of shared memory.

    python -m tests.ops.residual_wgmma_ptx FOLDER NBITS FP32

Writes FOLDER/0.ptx and FOLDER/shared_bytes. FP32: how inverse norms are stored. Runs in a process of its own, without
TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.ops.aot import compiling_for, launch_wgmma


def main() -> None:
    folder = Path(sys.argv[1])
    with compiling_for(90) as kernels:
        launch_wgmma(8, 32, int(sys.argv[2]), False, torch.float32 if int(sys.argv[3]) else torch.uint16)
    (kernel,) = kernels
    (folder / "0.ptx").write_text(kernel.asm["ptx"])
    (folder / "shared_bytes").write_text(str(kernel.shared_bytes))


if __name__ == "__main__":
    main()
