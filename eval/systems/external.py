"""fast-plaid and WARP, each in an environment of its own: their pinned torch versions need not be ours.

    python -m venv CACHE/peers/fast-plaid && CACHE/peers/fast-plaid/bin/pip install fast-plaid
    python -m venv CACHE/peers/xtr-warp && CACHE/peers/xtr-warp/bin/pip install xtr-warp-rs

Each builds its own index from the same vectors as stock's, with as many bits, and searches with its own defaults unless
the system's name says otherwise (`fast-plaid:n_ivf_probe=4`). WARP is made for XTR encoders and is run here on the
vectors of the checkpoint at hand all the same. A search's time is the engine's own call, by `own_ms`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache import atomic_folder, cache_root, sha256_json
from ..indexing import Embeddings
from .base import OTHERS, Knobs, NotRun, Whole


@dataclass(frozen=True)
class Engine:
    """module: what must be importable in the environment; package: what pip calls it."""

    name: str
    module: str
    package: str


ENGINES = {
    engine.name: engine
    for engine in (Engine("fast-plaid", "fast_plaid", "fast-plaid"), Engine("xtr-warp", "xtr_warp", "xtr-warp-rs"))
}


def find_python(engine: Engine, cache: str | os.PathLike[str] | None) -> str:
    """The interpreter of the engine's environment: CACHE/peers/NAME, else this one if it has the package.

    Raises NotRun with the command that makes the environment.
    """
    folder = cache_root(cache) / "peers" / engine.name
    own = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    remedy = f"python -m venv {folder} && {folder / 'bin' / 'pip'} install {engine.package}"
    python = str(own) if own.exists() else sys.executable
    found = subprocess.run([python, "-c", f"import {engine.module}"], capture_output=True, text=True)
    if found.returncode == 0:
        return python
    if not own.exists():
        raise NotRun(f"{engine.package} is not installed", remedy)
    lines = found.stderr.strip().splitlines() or ["no message"]
    raise NotRun(f"{own} cannot import {engine.module}: {lines[-1]}", remedy)


class External(Whole):
    """One engine over the vectors of a collection. Raises NotRun (see find_python), and what the engine raises."""

    tolerance = OTHERS

    def __init__(
        self,
        engine: Engine,
        options: Mapping[str, Any],
        vectors: Callable[[], Embeddings],
        *,
        nbits: int,
        cache: str | os.PathLike[str] | None,
    ) -> None:
        """vectors: gives the collection's encoding, called only once an environment is found."""
        self.name, self.k = engine.name, 0
        self.own_ms: float | None = None
        python = find_python(engine, cache)
        options = dict(options)
        device = str(options.pop("device", "cuda" if torch.cuda.is_available() else "cpu"))
        nbits = int(options.pop("nbits", nbits))
        self.device = torch.device("cpu")  # queries cross a pipe
        embeddings = vectors()
        arrays = _as_arrays(embeddings)
        folder = arrays.parent / f"{engine.name}.{nbits}bit.{device}"
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("worker.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.opened = self._ask(
            op="open", engine=engine.name, folder=str(folder), vectors=str(arrays / "vectors.npy"),
            doclens=str(arrays / "doclens.npy"), nbits=nbits, device=device, options=options,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        self.index_bytes = int(self.opened["index_bytes"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def use(self, knobs: Knobs) -> None:
        self.k = knobs.k

    def search_batch(self, Q: Tensor) -> list[tuple[list[int], list[float]]]:
        data = base64.b64encode(Q.cpu().float().contiguous().numpy().tobytes()).decode()
        answer = self._ask(op="search", Q=data, shape=list(Q.shape), k=self.k)
        self.own_ms = answer["ms"]
        return [(pids, scores) for pids, scores in answer["results"]]

    def search(self, Q: Tensor) -> tuple[list[int], list[float]]:
        return self.search_batch(Q)[0]

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def _as_arrays(embeddings: Embeddings) -> Path:
    """A folder with vectors.npy (fp16 [T, DIM]) and doclens.npy (int64 [N]), written once."""
    key = sha256_json([path.name for path in embeddings.shards])[:8]
    folder = embeddings.folder / f"arrays.{key}"
    if not folder.exists():
        vectors, doclens = embeddings.all()
        with atomic_folder(folder) as temporary:
            np.save(temporary / "vectors.npy", vectors.numpy())
            np.save(temporary / "doclens.npy", doclens.long().numpy())
    return folder
