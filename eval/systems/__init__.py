"""The systems under test behind one interface (`base.System`), by name:

| name | what |
|---|---|
| `plaid`, `plaid:device=cpu` | stock PLAID: its GPU search where a GPU is, its CPU search |
| `tilemaxsim[:option=value,...]` | the plugin, with any of its scorer options: mode, placement, codec, ... |
| `oracle` | float64 over the whole collection |
| `maxsim:impl=I` | exact search over decompressed vectors: I is loop, eager, compile, flash-maxsim, |
| | late-interaction-kernels |
| `fast-plaid[:option=value,...]`, `xtr-warp[:...]` | those engines, in environments of their own (`external`) |

A system that cannot run here is reported with the reason and a remedy, and the others go on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plaid_tilemaxsim.config import ScorerConfig

from ..indexing import Embeddings
from ..oracle import Oracle
from .base import OTHERS, OURS_CPU, OURS_GPU, STOCK_CPU, STOCK_GPU, Knobs, NotRun, System, Tolerance, Whole
from .external import ENGINES, External, find_python
from .maxsim import IMPLEMENTATIONS, PEERS, Exact, MaxSim
from .plaid import Plaid, Session, TileMaxSim, stock_marks, tolerance_of

__all__ = [
    "ENGINES", "OTHERS", "OURS_CPU", "OURS_GPU", "STOCK_CPU", "STOCK_GPU", "Exact", "External", "Knobs", "MaxSim",
    "NotRun", "Opened", "Oracle", "Plaid", "Session", "System", "TileMaxSim", "Tolerance", "Whole", "open_systems",
    "parse_system", "stock_marks", "tolerance_of", "unavailable",
]  # fmt: skip

KINDS = ("plaid", "tilemaxsim", "oracle", "maxsim", *ENGINES)
# Options of the plugin that change how a search goes over a loaded index, not how the index is laid out.
_SEARCH_OPTIONS = ("mode", "prefilter")


def parse_system(name: str) -> tuple[str, dict[str, Any]]:
    """NAME or NAME:option=value,... -> (kind, options); numbers become ints. ValueError for what does not exist."""
    kind, _, rest = name.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if rest else []
    if kind not in KINDS or any(not value for _, _, value in pairs):
        raise ValueError(f"system: expected {', '.join(KINDS)}, each with [:option=value,...], got {name!r}")
    options = {key: int(value) if value.isdecimal() else value for key, _, value in pairs}
    if kind == "tilemaxsim":
        ScorerConfig.from_options(options)
        if options.get("codec") == "pq" and "pq_m" not in options:
            raise ValueError(f"system: expected pq_m=M with codec=pq, got {name!r}")
    elif kind == "plaid" and options not in ({}, {"device": "cpu"}):
        raise ValueError(f"system: expected plaid or plaid:device=cpu, got {name!r}")
    elif kind == "oracle" and options:
        raise ValueError(f"system: expected oracle without options, got {name!r}")
    elif kind == "maxsim" and (options.keys() != {"impl"} or options["impl"] not in IMPLEMENTATIONS):
        raise ValueError(f"system: expected maxsim:impl=I with I among {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return kind, options


def unavailable(name: str, cache: str | os.PathLike[str] | None = None) -> NotRun | None:
    """Why a system cannot run on this machine, told without loading anything, or None."""
    kind, options = parse_system(name)
    if kind in ENGINES:
        try:
            find_python(ENGINES[kind], cache)
        except NotRun as reason:
            return reason
    if kind == "maxsim" and options["impl"] in PEERS:
        if importlib.util.find_spec(PEERS[options["impl"]]) is None:
            return NotRun(f"{options['impl']} is not installed", f"pip install {options['impl']}")
        if not torch.cuda.is_available():
            return NotRun(f"{options['impl']} needs a CUDA GPU")
    return None


@dataclass
class Opened:
    """Systems over one index. costs: by name, what loading took (see open_systems). not_run: by name, why not."""

    systems: list[System] = field(default_factory=list)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_run: dict[str, NotRun] = field(default_factory=dict)

    def close(self) -> None:
        for system in self.systems:
            system.close()
        self.systems.clear()


def open_systems(
    names: Sequence[str],
    index: Path,
    *,
    embeddings: Callable[[], Embeddings] | None = None,
    nbits: int = 2,
    cache: str | os.PathLike[str] | None = None,
) -> Opened:
    """Loads the named systems and lets each answer one query.

    embeddings: gives the collection's vectors, for engines that build an index of their own (NotRun without).
    Costs of each: load_seconds; first_query_ms, which includes what is compiled or recorded at a first search;
    gpu_bytes held and gpu_peak_bytes while loading (None without a GPU); host_bytes by which the process's resident
    memory grew (None where nobody tells); index_bytes. Of systems that share one loaded index the first pays. Stock
    compiles C++ or CUDA extensions the first time it runs on a machine, which takes minutes and is in its
    load_seconds then. What loading prints is dropped.
    Raises ValueError for a name that is no system and a folder that is no PLAID index.
    """
    parsed = [parse_system(name) for name in names]
    for kind, _ in parsed:
        if kind in ("plaid", "tilemaxsim") and not (index / "metadata.json").exists():
            raise ValueError(f"{index}: expected a PLAID index, found no metadata.json")
    plugin = any(kind == "tilemaxsim" for kind, _ in parsed)
    sessions: dict[tuple[Any, ...], Session] = {}

    def session_of(kind: str, options: dict[str, Any]) -> Session:
        """Stock and the plugin's default layout share a Searcher; each other layout has its own ranker."""
        layout: tuple[Any, ...] = tuple(sorted((k, v) for k, v in options.items() if k not in _SEARCH_OPTIONS))
        if layout not in sessions:
            on_cpu = kind == "plaid" and bool(options)
            sessions[layout] = Session(index, plugin=plugin and not on_cpu, gpu=not on_cpu)
        return sessions[layout]

    def make(kind: str, options: dict[str, Any]) -> System:
        if kind == "plaid":
            stock = Plaid(session_of(kind, options), flag=plugin and not options)
            stock.load()
            return stock
        if kind == "tilemaxsim":
            ours = TileMaxSim(session_of(kind, options), options)
            ours.use(Knobs.defaults(10))
            ours.load()
            return ours
        if kind == "oracle":
            return Exact(index)
        if kind == "maxsim":
            return MaxSim(index, options["impl"])
        if embeddings is None:
            raise NotRun("it builds an index of its own, from vectors that were not given")
        return External(ENGINES[kind], options, embeddings, nbits=nbits, cache=cache)

    opened = Opened()
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        for name, (kind, options) in zip(names, parsed):
            cost = _Cost()
            try:
                system = make(kind, options)
            except NotRun as reason:
                opened.not_run[name] = reason
                continue
            system.name = name
            cost.loaded()
            system.use(Knobs.defaults(10))
            opened.costs[name] = cost.answered(system, _any_query(index))
            opened.systems.append(system)
    return opened


def _any_query(index: Path) -> torch.Tensor:
    from plaid_tilemaxsim.index.files import read_index

    dim = read_index(index, verify="structure").dim
    return torch.nn.functional.normalize(torch.ones(1, 4, dim), dim=-1)


class _Cost:
    """Clock and memory around a system's loading and first answer."""

    def __init__(self) -> None:
        self.gpu = torch.cuda.is_available()
        if self.gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
        self.resident = _resident_bytes()
        self.started = time.perf_counter()

    def loaded(self) -> None:
        self.load_seconds = time.perf_counter() - self.started

    def answered(self, system: System, Q: torch.Tensor) -> dict[str, Any]:
        started = time.perf_counter()
        system.search(Q.to(system.device))
        first = (time.perf_counter() - started) * 1e3
        now = _resident_bytes()
        costs: dict[str, Any] = {
            "load_seconds": self.load_seconds,
            "first_query_ms": first,
            "gpu_bytes": torch.cuda.memory_allocated() - self.held if self.gpu else None,
            "gpu_peak_bytes": torch.cuda.max_memory_allocated() - self.held if self.gpu else None,
            "host_bytes": None if now is None or self.resident is None else now - self.resident,
            "index_bytes": system.index_bytes,
        }
        if isinstance(system, External):  # another process: what it says of itself
            said = system.opened
            costs |= {"load_seconds": said["load_seconds"], "build_seconds": said["build_seconds"],
                      "host_bytes": said["resident_bytes"], "gpu_bytes": None, "gpu_peak_bytes": None,
                      "version": said["version"]}  # fmt: skip
        return costs


def _resident_bytes() -> int | None:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None
