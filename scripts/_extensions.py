"""Compile the C++ extensions of stock PLAID's CPU search, those of different modules at the same time."""

from __future__ import annotations

import subprocess
import sys

LOADERS = (
    "from colbert.search.index_storage import IndexScorer as Stock",
    "from colbert.search.strided_tensor import StridedTensor as Stock",
    "from colbert.modeling.colbert import ColBERT as Stock",
)


def main() -> int:
    children = [
        subprocess.Popen([sys.executable, "-c", f"{loader}; Stock.try_load_torch_extensions(False)"])
        for loader in LOADERS
    ]
    return max(abs(child.wait()) for child in children)


if __name__ == "__main__":
    sys.exit(main())
