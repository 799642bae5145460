"""Runs another project's search engine in that project's own Python environment, for eval.systems.external.

Started as a script by another interpreter: it imports nothing of ours. One JSON object a line comes in on stdin, one
goes out on stdout for each; what the engine prints goes to stderr. Times are taken here, around the engine's own call.

    {"op": "open", "engine", "folder", "vectors", "doclens", "nbits", "device", "options", "threads"}
        -> {"version", "build_seconds" (0 when the index was there), "load_seconds", "index_bytes", "resident_bytes"}
    {"op": "search", "Q": base64 of fp32, "shape": [B, LQ, DIM], "k"} -> {"results": [[pids, scores], ...], "ms"}
Anything that fails -> {"error": "TypeName: message"}.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import sys
import time
from typing import Any


def _passages(vectors: str, doclens: str) -> list[Any]:
    """One fp16 tensor [n_i, DIM] for each passage."""
    import numpy as np
    import torch

    lengths = np.load(doclens).tolist()
    return list(torch.from_numpy(np.load(vectors)).split(lengths))


class FastPlaid:
    distribution = "fast-plaid"

    def __init__(self, request: dict[str, Any]) -> None:
        from fast_plaid.search import FastPlaid as Engine

        self.options, device = request["options"], request["device"]
        self.build_seconds = 0.0
        if not os.path.exists(os.path.join(request["folder"], "metadata.json")):
            passages = _passages(request["vectors"], request["doclens"])
            started = time.perf_counter()
            Engine(index=request["folder"], device=device).create(documents_embeddings=passages, nbits=request["nbits"])
            self.build_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.engine = Engine(index=request["folder"], device=device)
        self.load_seconds = time.perf_counter() - started

    def search(self, Q: Any, k: int) -> Any:
        return self.engine.search(queries_embeddings=Q, top_k=k, show_progress=False, **self.options)


class Warp:
    distribution = "xtr-warp-rs"

    def __init__(self, request: dict[str, Any]) -> None:
        from xtr_warp.search import XTRWarp

        self.options, device = request["options"], request["device"]
        self.threads = request["threads"]
        self.build_seconds = 0.0
        if not os.path.exists(os.path.join(request["folder"], "metadata.json")):
            passages = [passage.float() for passage in _passages(request["vectors"], request["doclens"])]
            started = time.perf_counter()
            XTRWarp(index=request["folder"]).create(
                embeddings_source=passages, device=device, nbits=request["nbits"], show_progress=False
            )
            self.build_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.engine = XTRWarp(index=request["folder"]).load(device=device)
        self.load_seconds = time.perf_counter() - started

    def search(self, Q: Any, k: int) -> Any:
        return self.engine.search(
            queries_embeddings=Q, top_k=k, num_threads=self.threads, show_progress=False, **self.options
        )


ENGINES: dict[str, Any] = {"fast-plaid": FastPlaid, "xtr-warp": Warp}


def _resident_bytes() -> int | None:
    if not os.path.exists("/proc/self/statm"):
        return None
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _folder_bytes(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(root, name)) for root, _, names in os.walk(folder) for name in names)


def _open(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    torch.set_num_threads(request["threads"])
    engine = ENGINES[request["engine"]](request)
    return engine, {
        "version": importlib.metadata.version(engine.distribution),
        "build_seconds": engine.build_seconds,
        "load_seconds": engine.load_seconds,
        "index_bytes": _folder_bytes(request["folder"]),
        "resident_bytes": _resident_bytes(),
    }


def _search(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch

    array = np.frombuffer(base64.b64decode(request["Q"]), dtype=np.float32).reshape(request["shape"])
    Q = torch.from_numpy(array.copy())
    started = time.perf_counter()
    results = engine.search(Q, request["k"])
    milliseconds = (time.perf_counter() - started) * 1e3
    lists = [[[int(pid) for pid, _ in found], [float(score) for _, score in found]] for found in results]
    return {"results": lists, "ms": milliseconds}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "open":
                engine, answer = _open(request)
            else:
                answer = _search(engine, request)
        except Exception as error:  # noqa: BLE001 (the other side raises it)
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
