"""Compile the C++ extensions of stock PLAID's CPU search, those of different modules at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

LOADERS = (
    "from colbert.search.index_storage import IndexScorer as Stock",
    "from colbert.search.strided_tensor import StridedTensor as Stock",
    "from colbert.modeling.colbert import ColBERT as Stock",
)


def main() -> int:
    # Each child leads a process group, so that its compilers end with it.
    children = [
        subprocess.Popen(
            [sys.executable, "-c", f"{loader}; Stock.try_load_torch_extensions(False)"], start_new_session=True
        )
        for loader in LOADERS
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        return max(abs(child.wait()) for child in children)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
