"""Compile the C++ extensions of stock PLAID's search, those of different modules at the same time.

With the argument gpu, those of its GPU search.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

LOAD = "Stock.try_load_torch_extensions(False)"
CPU = (
    f"from colbert.search.index_storage import IndexScorer as Stock; {LOAD}",
    f"from colbert.search.strided_tensor import StridedTensor as Stock; {LOAD}",
    f"from colbert.modeling.colbert import ColBERT as Stock; {LOAD}",
)
# Stock compiles both of these one after the other.
GPU = tuple(
    "import pathlib, colbert.indexing.codecs.residual as stock; "
    "folder = pathlib.Path(stock.__file__).parent.resolve(); "
    f"stock.load(name='{name}_cpp', sources=[str(folder / '{name}.cpp'), str(folder / '{name}.cu')])"
    for name in ("decompress_residuals", "packbits")
)


def main(argv: list[str]) -> int:
    # Each child leads a process group, so that its compilers end with it.
    programs = GPU if argv == ["gpu"] else CPU
    children = [subprocess.Popen([sys.executable, "-c", program], start_new_session=True) for program in programs]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        return max(abs(child.wait()) for child in children)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
