"""The systems under test: stock PLAID and the plugin in its modes, behind one interface and on one Searcher.

Queries come encoded, so that all systems get the same Q and encoding is timed apart.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import plaid_tilemaxsim
from plaid_tilemaxsim import compat

# What stock searches with when a user gives only k (colbert-ai 0.2.22, searcher.py): ncells, threshold, ndocs.
STOCK_DEFAULTS = ((10, 1, 0.5, 256), (100, 2, 0.45, 1024))


@dataclass(frozen=True)
class Knobs:
    """Every PLAID search parameter. `centroid_score_threshold` prunes codes, `ndocs // 4` passages are scored."""

    k: int
    ncells: int
    centroid_score_threshold: float
    ndocs: int

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("ncells", 1), ("ndocs", 4)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        if not isinstance(self.centroid_score_threshold, int | float):
            raise ValueError(f"centroid_score_threshold: expected a number, got {self.centroid_score_threshold!r}")

    @classmethod
    def defaults(cls, k: int) -> Knobs:
        """Stock's parameters for this k."""
        for limit, ncells, threshold, ndocs in STOCK_DEFAULTS:
            if k <= limit:
                return cls(k, ncells, threshold, ndocs)
        return cls(k, 4, 0.4, max(4 * k, 4096))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Tolerance:
    """How far a system's numbers may be from the oracle's because of its arithmetic, not its logic.

    score: |score - oracle| allowed (None: reported, not judged). ranking: oracle scores closer than this may be in
    either order. approximate, threshold: the same for sums of centroid scores and for single centroid scores.
    """

    score: float | None
    ranking: float
    approximate: float
    threshold: float


# Stock's GPU branch rounds single similarities and their sum to fp16: steps of 2^-6 at scores of 16 to 32, so two
# scores that are 2^-5 apart can come out reversed. fp32 sums of 32 products of 128 terms are within 1e-5.
STOCK_GPU = Tolerance(score=None, ranking=2**-5, approximate=2**-5, threshold=2**-10)
STOCK_CPU = Tolerance(score=2e-3, ranking=1e-4, approximate=1e-4, threshold=1e-5)
# The kernels' budget is 2e-3 a score; their centroid table has 16 bits.
OURS_GPU = Tolerance(score=2e-3, ranking=4e-3, approximate=2e-3, threshold=1e-5)
OURS_CPU = Tolerance(score=2e-3, ranking=1e-4, approximate=1e-4, threshold=1e-5)


class System(Protocol):
    """A system that answers encoded queries. Q is fp32 [1, LQ, DIM]."""

    name: str
    tolerance: Tolerance
    clamps: bool  # each token's maximum is clamped at 0, as stock's CPU branch does
    follows_plaid: bool  # its results are meant to be stock PLAID's

    def use(self, knobs: Knobs) -> None:
        """Set the search parameters of the calls that follow."""

    def search(self, Q: Tensor) -> tuple[list[int], list[float]]:
        """The k best, as a user's call returns them. This is what latency times."""

    def rank(self, Q: Tensor) -> tuple[list[int], list[float]]:
        """All passages that were scored exactly, best first."""

    def candidates(self, Q: Tensor) -> Tensor:
        """Passages before pruning: integer [n], ascending, on the CPU."""

    def stages(self, Q: Tensor) -> dict[str, float]:
        """Milliseconds by stage of one search, in order."""


class Session:
    """One Searcher over an index, shared by all systems that are compared.

    It has no checkpoint, since queries come encoded, and its index is loaded by each system's first use.
    Raises ValueError when the index folder does not exist.
    """

    def __init__(self, index: Path, *, plugin: bool) -> None:
        if not (index / "metadata.json").exists():
            raise ValueError(f"{index}: expected a PLAID index, found no metadata.json")
        compat.apply()
        if plugin:
            plaid_tilemaxsim.enable()
        from colbert.infra import ColBERTConfig
        from colbert.modeling.colbert import ColBERT
        from colbert.search.index_storage import IndexScorer
        from colbert.searcher import Searcher

        searcher = Searcher.__new__(Searcher)
        searcher.index = str(index)
        searcher.config = ColBERTConfig.from_existing(ColBERTConfig.load_from_index(str(index)))
        self.gpu = searcher.config.total_visible_gpus > 0
        ColBERT.try_load_torch_extensions(self.gpu)  # what loading a checkpoint does, and stock's scoring relies on
        make_ranker = plaid_tilemaxsim.TileMaxSimScorer if plugin else IndexScorer
        searcher.ranker = make_ranker(str(index), self.gpu, False)
        self.searcher = searcher
        self.device = torch.device("cuda" if self.gpu else "cpu")

    def close(self) -> None:
        """Drop the index, so that the next session does not share memory with it."""
        del self.searcher
        if self.gpu:
            torch.cuda.empty_cache()


class Plaid:
    """Stock PLAID: the flag at its default."""

    name = "plaid"
    follows_plaid = True
    scorer = "plaid"
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)

    def __init__(self, session: Session, *, flag: bool = True) -> None:
        """`flag`: the plugin is enabled in this process, so the configuration has a `scorer` field to set."""
        self.session, self.flag = session, flag
        self.clamps = not session.gpu
        self.tolerance = STOCK_GPU if session.gpu else STOCK_CPU
        self.k = 0

    def use(self, knobs: Knobs) -> None:
        values = knobs.to_dict()
        self.k = values.pop("k")
        if self.flag:
            values.update(scorer=self.scorer, scorer_options=self.options)
        self.session.searcher.configure(**values)

    def search(self, Q: Tensor) -> tuple[list[int], list[float]]:
        pids, _, scores = self.session.searcher.dense_search(Q, self.k)
        return pids, scores

    def rank(self, Q: Tensor) -> tuple[list[int], list[float]]:
        pids, scores = self.session.searcher.ranker.rank(self.session.searcher.config, Q)
        return list(pids), list(scores)

    def candidates(self, Q: Tensor) -> Tensor:
        with torch.inference_mode():
            pids, _ = self.session.searcher.ranker.retrieve(self.session.searcher.config, Q)
        return pids.cpu()

    def stages(self, Q: Tensor) -> dict[str, float]:
        with stock_marks(self.session.searcher.ranker, self.session.gpu) as marks:
            start = _now(self.session.gpu)
            self.rank(Q)
            marks.append(("topk", _now(self.session.gpu)))
        stages: dict[str, float] = {}
        for stage, at in marks:
            stages[stage] = stages.get(stage, 0.0) + (at - start) * 1e3
            start = at
        return stages


class TileMaxSim(Plaid):
    """The plugin, with scorer options such as mode and placement."""

    scorer = "tilemaxsim"

    def __init__(self, session: Session, options: dict[str, Any] | None = None) -> None:
        super().__init__(session)
        self.options = dict(options or {})
        self.name = ":".join(["tilemaxsim", ",".join(f"{k}={v}" for k, v in self.options.items())]).rstrip(":")
        self.follows_plaid = self.options.get("mode", "plaid") == "plaid"
        self.clamps = False
        self.tolerance = OURS_GPU if session.gpu else OURS_CPU

    def stages(self, Q: Tensor) -> dict[str, float]:
        searcher = self.session.searcher
        spent: dict[str, float] = searcher.ranker.profile(searcher.config, Q, self.k)
        return spent


def parse_system(name: str) -> tuple[str, dict[str, Any]]:
    """`plaid`, `tilemaxsim` or `tilemaxsim:mode=rerank,placement=host` -> (scorer, options). Else ValueError."""
    scorer, _, rest = name.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if rest else []
    if scorer not in ("plaid", "tilemaxsim") or (scorer == "plaid" and rest) or any(not p[2] for p in pairs):
        raise ValueError(f"system: expected plaid or tilemaxsim[:option=value,...], got {name!r}")
    return scorer, {key: int(value) if value.isdecimal() else value for key, _, value in pairs}


def open_systems(names: Sequence[str], index: Path) -> tuple[Session, list[System], dict[str, float]]:
    """The named systems on one session: (session, systems, seconds until each had answered a first query, by name).

    The plugin is enabled only if one of them needs it. Stock compiles C++ or CUDA extensions the first time that it
    searches on a machine, which takes minutes and is in its seconds then. What loading prints is dropped.
    Raises ValueError for plugin systems that would lay the index out differently: a ranker holds it once, so they
    would load it anew at every turn.
    """
    parsed = [parse_system(name) for name in names]
    layouts = {(o.get("placement"), o.get("impl")) for scorer, o in parsed if scorer == "tilemaxsim"}
    if len(layouts) > 1:
        raise ValueError(f"systems: expected one placement and impl for all in one experiment, got {', '.join(names)}")
    plugin = any(scorer == "tilemaxsim" for scorer, _ in parsed)
    systems: list[System] = []
    seconds = {}
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        session = Session(index, plugin=plugin)
        for name, (scorer, options) in zip(names, parsed):
            system = TileMaxSim(session, options) if scorer == "tilemaxsim" else Plaid(session, flag=plugin)
            system.use(Knobs.defaults(10))
            Q = torch.nn.functional.normalize(torch.ones(1, 4, session.searcher.config.dim), dim=-1)
            started = time.perf_counter()
            system.search(Q.to(session.device))
            seconds[name] = time.perf_counter() - started
            systems.append(system)
    return session, systems, seconds


def _now(gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def stock_marks(ranker: Any, gpu: bool) -> Iterator[list[tuple[str, float]]]:
    """Within the block stock's methods note when a stage ends: (stage, time) in order; the caller adds the last one.

    centroids: until the probed cells are known. candidates: until the pids are unique. prune: until decompression
    starts. decompress: until MaxSim starts. maxsim: until it returns. On a GPU each mark waits for the device.
    """
    from colbert.search import index_storage
    from colbert.search.index_storage import IndexScorer

    marks: list[tuple[str, float]] = []

    def before(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            marks.append((stage, _now(gpu)))
            return function(*args, **kwargs)

        return call

    def after(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            marks.append((stage, _now(gpu)))
            return result

        return call

    packed = index_storage.colbert_score_packed
    instance = {
        "get_cells": after(ranker.get_cells, "centroids"),
        "generate_candidates": after(ranker.generate_candidates, "candidates"),
    }
    if gpu:
        instance["lookup_pids"] = before(ranker.lookup_pids, "prune")
    else:
        decompress = IndexScorer.decompress_residuals
        IndexScorer.decompress_residuals = staticmethod(before(decompress, "prune"))
    index_storage.colbert_score_packed = after(before(packed, "decompress"), "maxsim")
    vars(ranker).update(instance)
    try:
        yield marks
    finally:
        for name in instance:
            del vars(ranker)[name]
        index_storage.colbert_score_packed = packed
        if not gpu:
            IndexScorer.decompress_residuals = decompress
