"""PLAID's funnel: its steps, what flows between them and the order they run in.

    centroids   scores of all centroids with the query's tokens
    candidates  passages in the inverted lists of the best ``ncells`` centroids of every token
    prune       approximate MaxSim from the centroids alone: the ``ndocs`` best by the centroids over the threshold,
                of these the ``ndocs // 4`` best by all of their centroids
    exact       MaxSim from centroid and residual, or from what another codec stores (see ``exact``)
    topk        score descending, pid ascending

``plaid`` runs all five, ``rerank`` leaves out the pruning, ``exhaustive`` scores the whole index (with ``prefilter``
only its best passages by centroid scores) and needs no candidates. ``stages_torch`` implements the steps for the
CPU, ``stages_triton`` for the GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from plaid_tilemaxsim.exact import ExactScorer

MODES = ("plaid", "rerank", "exhaustive")
# Survivors of mode "plaid" that are scored in fp32 throughout at most, so that near ties are ranked as stock ranks them
# on a CPU: stock's own number for k = 4096. More are scored by the fast kernel, since for so many fp32 arithmetic takes
# longer than all steps before.
MOST_PRECISE = 4096
STAGES = ("centroids", "candidates", "prune", "exact", "topk")


@dataclass(frozen=True)
class SearchParams:
    """How far one search looks. Every field takes part in the choice of a CUDA graph, so none is a tensor.

    k: results wanted; None for all that are scored exactly. ncells: centroids probed per query token.
    threshold: a passage's centroid counts in the first pruning step if its best score over the query's tokens is at
    least this. ndocs: passages kept by that step; a quarter of them by the second. query_maxlen: query tokens that
    take part in candidates and pruning (all take part in the exact scores); None for all. prefilter: in
    ``exhaustive`` mode, passages kept by their centroid scores before exact scoring; None for no such step.
    """

    k: int | None = None
    ncells: int = 1
    threshold: float = 0.5
    ndocs: int = 256
    query_maxlen: int | None = None
    mode: str = "plaid"
    prefilter: int | None = None

    @property
    def precise(self) -> bool:
        """Whether survivors of pruning are scored in fp32. Of parameters alone, so that shards decide alike."""
        return self.mode == "plaid" and self.ndocs // 4 <= MOST_PRECISE

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        for name, least in (("k", 1), ("ncells", 1), ("ndocs", 4), ("query_maxlen", 1), ("prefilter", 1)):
            value = getattr(self, name)
            if value is None and name in ("k", "query_maxlen", "prefilter"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        if not isinstance(self.threshold, Real) or not math.isfinite(self.threshold):
            raise ValueError(f"threshold: expected a finite number, got {self.threshold!r}")


def default_params(k: int) -> tuple[int, float, int]:
    """(ncells, threshold, ndocs) that PLAID uses for k results (colbert-ai 0.2.22, searcher.py)."""
    if k <= 10:
        return 1, 0.5, 256
    if k <= 100:
        return 2, 0.45, 1024
    return 4, 0.4, max(4 * k, 4096)


@dataclass
class Pids:
    """Passages in flight between two stages: the first ``count`` of ``pids``, all of it where count is None.

    pids: int32 [cap], on the index's device, or None for every passage of the index in order. Ascending before and
    between prunings of more than a few thousand.
    count: int32 [1] on the device.
    """

    pids: Tensor | None
    count: Tensor | None = None


@dataclass
class Ranking:
    """What ``topk`` leaves on the device: the first ``count`` entries (all where None), best first."""

    pids: Tensor  # int32 [cap]
    scores: Tensor  # fp32 [cap]
    count: Tensor | None = None  # int32 [1]
    packed: Tensor | None = None  # int32 [1 + 2 cap]: count, pids and bits of the scores in one piece, if at hand
    candidates: Pids | None = None  # that were generated


class Stages(Protocol):
    """One implementation of the five steps for one query at a time. Tensors stay on the index's device."""

    exact_scorer: ExactScorer

    def centroids(self, Q: Tensor, *, threshold: float | None, ncells: int | None) -> Any: ...

    def candidates(self, cs: Any, ncells: int, allow: Tensor | None) -> Pids: ...

    def prune(self, cs: Any, pids: Pids, keep: int, *, thresholded: bool) -> Pids: ...

    def approximate(self, cs: Any, pids: Pids, *, thresholded: bool) -> Tensor: ...

    def select(self, pids: Pids, scores: Tensor, keep: int) -> tuple[Pids, Tensor]: ...

    def exact(self, Q: Tensor, cs: Any, pids: Pids, precise: bool) -> Tensor:
        """precise: in fp32 throughout, where the codec has that."""

    def exact_of_plausible(
        self, Q: Tensor, cs: Any, pids: Pids, precise: bool, first: Tensor, second: Tensor, keep: int
    ) -> Tensor:
        """``exact``, and anything for what cuts by ``first`` and then to ``keep`` by ``second`` cannot leave."""

    def topk(self, pids: Pids, scores: Tensor, k: int | None) -> Ranking: ...


def run_funnel(
    stages: Stages,
    Q: Tensor,
    params: SearchParams,
    *,
    given: Pids | None = None,
    candidates: Pids | None = None,
    allow: Tensor | None = None,
    stage: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda name: contextlib.nullcontext(),
) -> Ranking:
    """One query through the steps that its mode asks for.

    Q: fp32 [LQ, DIM] on the device. given: passages to score exactly, nothing else is looked at. candidates: take
    these (ascending) in the place of those that the query would generate. allow: the stages' form of a filter.
    stage: called with the name of every step that runs, for timing.
    """
    generates = given is None and candidates is None and params.mode != "exhaustive"
    prunes = given is None and params.mode == "plaid"
    with stage("centroids"):
        cs_short, cs = _centroid_scores(stages, Q, params, thresholded=prunes, generates=generates)
    pids = given if given is not None else candidates
    if pids is None:
        with stage("candidates"):
            pids = stages.candidates(cs_short, params.ncells, allow) if generates else Pids(None)
    generated = pids if generates else None
    if prunes:
        with stage("prune"):
            pids = stages.prune(cs_short, pids, params.ndocs, thresholded=True)
            pids = stages.prune(cs_short, pids, params.ndocs // 4, thresholded=False)
    elif given is None and params.mode == "exhaustive" and params.prefilter is not None:
        with stage("prune"):
            pids = stages.prune(cs, pids, params.prefilter, thresholded=False)
    with stage("exact"):
        scores = stages.exact(Q, cs, pids, prunes and params.precise)
    with stage("topk"):
        ranking = stages.topk(pids, scores, params.k)
    ranking.candidates = generated
    return ranking


def run_shard(
    stages: Stages, Q: Tensor, params: SearchParams, *, candidates: Pids | None = None, allow: Tensor | None = None
) -> tuple[Pids, list[Tensor]]:
    """A mode that prunes, on one shard of an index: what ``merge.merge`` needs to do as ``run_funnel`` on the whole.

    Passages and their scores fp32 [cap] each: over the threshold (mode "plaid" alone), by all codes, exact.
    """
    plaid = params.mode == "plaid"
    generates = candidates is None and plaid
    cs_short, cs = _centroid_scores(stages, Q, params, thresholded=plaid, generates=generates)
    pids = candidates
    if pids is None:
        pids = stages.candidates(cs_short, params.ncells, allow) if generates else Pids(None)
    if plaid:
        pids, first = stages.select(pids, stages.approximate(cs_short, pids, thresholded=True), params.ndocs)
        second = stages.approximate(cs_short, pids, thresholded=False).clone()
        keep = params.ndocs // 4
        return pids, [first, second, stages.exact_of_plausible(Q, cs, pids, params.precise, first, second, keep)]
    assert params.prefilter is not None
    pids, second = stages.select(pids, stages.approximate(cs, pids, thresholded=False), params.prefilter)
    return pids, [second, stages.exact(Q, cs, pids, False)]


def _centroid_scores(
    stages: Stages, Q: Tensor, params: SearchParams, *, thresholded: bool, generates: bool
) -> tuple[Any, Any]:
    """Centroid scores of the first query_maxlen tokens, with which stock generates and prunes, and of all tokens."""
    short = Q if params.query_maxlen is None else Q[: params.query_maxlen]
    threshold, ncells = params.threshold if thresholded else None, params.ncells if generates else None
    cs_short = stages.centroids(short, threshold=threshold, ncells=ncells)
    return cs_short, cs_short if len(short) == len(Q) else stages.centroids(Q, threshold=None, ncells=None)
