"""Block choices, as plain host functions of the chip and the shape."""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (on CPU tensors): set before the kernels are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
