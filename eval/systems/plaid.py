"""Stock PLAID and the plugin in its modes, on one Searcher over a stock index.

Queries come encoded, so that all systems get the same Q and encoding is timed apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import plaid_tilemaxsim
from plaid_tilemaxsim import compat

from .base import (
    OTHERS,
    OURS_CPU,
    OURS_DENSE_GPU,
    OURS_GPU,
    OURS_GPU_PLAID,
    STOCK_CPU,
    STOCK_GPU,
    Knobs,
    Tolerance,
    Whole,
)


class Session:
    """One Searcher over an index, shared by all systems that are compared.

    It has no checkpoint, since queries come encoded. Its index is loaded by `load` of each system.
    gpu: False keeps to the CPU on a machine with a GPU. Raises ValueError when the index folder does not exist.
    """

    def __init__(self, index: Path, *, plugin: bool, gpu: bool = True) -> None:
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
        with nullcontext() if gpu else _no_gpus():
            searcher.config = ColBERTConfig.from_existing(ColBERTConfig.load_from_index(str(index)))
            self.gpu = searcher.config.total_visible_gpus > 0
            # what loading a checkpoint does, and stock's scoring relies on
            ColBERT.try_load_torch_extensions(self.gpu)
            make_ranker = plaid_tilemaxsim.TileMaxSimScorer if plugin else IndexScorer
            searcher.ranker = make_ranker(str(index), self.gpu, False)
        if not gpu:
            searcher.config.total_visible_gpus = 0
        self.searcher = searcher
        self.device = torch.device("cuda" if self.gpu else "cpu")
        self.index_bytes = sum(file.stat().st_size for file in index.iterdir() if file.suffix in (".pt", ".json"))

    def close(self) -> None:
        """Drop the index, so that the next session does not share memory with it. May be called again."""
        self.__dict__.pop("searcher", None)
        if self.gpu:
            torch.cuda.empty_cache()


@contextmanager
def _no_gpus() -> Iterator[None]:
    """Within the block stock takes the machine for one without GPUs: it asks a class attribute."""
    from colbert.infra.config.settings import RunSettings

    visible = RunSettings.total_visible_gpus
    RunSettings.total_visible_gpus = 0
    try:
        yield
    finally:
        RunSettings.total_visible_gpus = visible


class Plaid(Whole):
    """Stock PLAID: the flag at its default."""

    name = "plaid"
    follows_plaid = True
    scorer = "plaid"
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)

    def __init__(self, session: Session, *, flag: bool = True) -> None:
        """`flag`: the plugin is enabled in this process, so the configuration has a `scorer` field to set."""
        self.session, self.flag, self.device = session, flag, session.device
        self.index_bytes = session.index_bytes
        self.clamps = not session.gpu
        self.tolerance = STOCK_GPU if session.gpu else STOCK_CPU
        self.k = 0

    def use(self, knobs: Knobs) -> None:
        values = knobs.to_dict()
        self.k = values.pop("k")
        if self.flag:
            values.update(scorer=self.scorer, scorer_options=self.options)
        self.session.searcher.configure(**values)

    def load(self) -> None:
        """Read the index for this system; without it the first search does."""
        if self.flag:
            self.session.searcher.ranker.prepare(self.session.searcher.config)

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

    def close(self) -> None:
        self.session.close()


def tolerance_of(options: dict[str, Any], gpu: bool) -> Tolerance:
    """What the plugin with these scorer options may be off by."""
    codec = options.get("codec", "residual")
    if codec == "pq":
        return OTHERS  # other vectors than the index's own
    if not gpu:
        return OURS_CPU
    if codec == "dense":
        return OURS_DENSE_GPU
    return OURS_GPU_PLAID if options.get("mode", "plaid") == "plaid" else OURS_GPU


class TileMaxSim(Plaid):
    """The plugin, with scorer options such as mode and placement."""

    scorer = "tilemaxsim"

    def __init__(self, session: Session, options: dict[str, Any] | None = None) -> None:
        super().__init__(session)
        self.options = dict(options or {})
        self.name = ":".join(["tilemaxsim", ",".join(f"{k}={v}" for k, v in self.options.items())]).rstrip(":")
        self.tolerance = tolerance_of(self.options, session.gpu)
        self.follows_plaid = self.tolerance is not OTHERS and self.options.get("mode", "plaid") == "plaid"
        self.clamps = False

    def search_batch(self, Q: Tensor) -> list[tuple[list[int], list[float]]]:
        searcher = self.session.searcher
        found: list[tuple[list[int], list[float]]] = searcher.ranker.search_batch(searcher.config, Q, self.k)
        return found

    def stages(self, Q: Tensor) -> dict[str, float]:
        searcher = self.session.searcher
        spent: dict[str, float] = searcher.ranker.profile(searcher.config, Q, self.k)
        return spent


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
