"""Is it the same ranking? Two systems' results compared query by query, with the oracle as the judge of both.

Two rankings are the same outside ties when every pair of passages that they order differently is tied: the order
each system chose is at most its rounding (`Tolerance.ranking`) away from the oracle's. Comparing pairs by the
oracle's scores, not by the systems' own, is what makes a constant or shuffled scorer fail: it declares everything
tied, the oracle does not. Sets (candidates, survivors of pruning) that differ are each held against the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .oracle import Verdict
from .retrieve import Scored
from .systems import Knobs, Tolerance

QUANTILES = (0.5, 0.9, 0.99, 0.999)
HISTOGRAM_BINS = 41
MAX_FAILURES = 20


class Judge(Protocol):
    """What the comparison asks of eval.oracle.Oracle."""

    def maxima(self, Q: Tensor, pids: Tensor) -> Tensor: ...

    def judge_candidates(self, Q: Tensor, ncells: int, candidates: Tensor, *, rounding: float) -> Verdict: ...

    def judge_survivors(
        self,
        Q: Tensor,
        candidates: Tensor,
        survivors: Tensor,
        *,
        ndocs: int,
        threshold: float,
        rounding: float,
        threshold_rounding: float,
    ) -> Verdict: ...


@dataclass(frozen=True)
class Side:
    """One of the two compared systems: its results and how its numbers may deviate."""

    name: str
    scored: Scored
    tolerance: Tolerance
    clamps: bool = False
    follows_plaid: bool = True


@dataclass
class Errors:
    """Signed differences collected over queries, summarised at the end."""

    values: list[np.ndarray] = field(default_factory=list)

    def add(self, values: np.ndarray) -> None:
        self.values.append(values.astype(np.float64))

    def summary(self) -> dict[str, Any]:
        """n, max, mean and quantiles of the absolute values, and a histogram of the signed ones."""
        values = np.concatenate([np.zeros(0), *self.values])
        if not len(values):
            return {"n": 0}
        sizes = np.abs(values)
        largest = float(sizes.max())
        counts, edges = np.histogram(values, HISTOGRAM_BINS, (-largest, largest) if largest else (-1e-12, 1e-12))
        return {
            "n": len(values),
            "max": largest,
            "mean": float(sizes.mean()),
            **{f"p{100 * q:g}": float(v) for q, v in zip(QUANTILES, np.quantile(sizes, QUANTILES))},
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        }


def unordered_pairs(
    a: np.ndarray, b: np.ndarray, truth_a: np.ndarray, truth_b: np.ndarray, tol_a: float, tol_b: float
) -> tuple[int, int, float]:
    """Pairs of items that two rankings order differently.

    a, b [n]: each item's rank in the two rankings; truth_a, truth_b [n]: the scores that each should have ordered by.
    Returns how many pairs are ordered differently, how many of those by more than a tie (some ranking put an item
    above another whose true score is higher by more than its tolerance), and the largest such inversion of either
    ranking over all differently ordered pairs.
    """
    order = np.argsort(a, kind="stable")
    a, b, truth_a, truth_b = a[order], b[order], truth_a[order], truth_b[order]
    # Only items that stand on the wrong side of another can be in such a pair: usually few.
    before, after = np.maximum.accumulate(b), np.minimum.accumulate(b[::-1])[::-1]
    some = (b < before) | (b > after)
    a, b, truth_a, truth_b = a[some], b[some], truth_a[some], truth_b[some]
    i, j = ((a[:, None] < a[None, :]) & (b[:, None] > b[None, :])).nonzero()
    # i above j in a, below it in b: a is wrong by how much j is truly better, b by how much i is
    wrong_a, wrong_b = truth_a[j] - truth_a[i], truth_b[i] - truth_b[j]
    beyond = (wrong_a > tol_a) | (wrong_b > tol_b)
    worst = float(np.maximum(wrong_a, wrong_b).max(initial=0.0))
    return len(i), int(beyond.sum()), worst


def compare(
    base: Side,
    other: Side,
    judge: Judge,
    Q: Tensor,
    knobs: Knobs,
    query_ids: Sequence[str],
    *,
    query_maxlen: int = 32,
    progress: str = "",
) -> dict[str, Any]:
    """Compare `other` with `base` (usually the plugin with stock) over queries Q (fp32 [n, LQ, DIM]).

    Orders are compared on the k best of each system, among passages that both scored. Returns plain JSON:

    - judged: the other's ranking is held to the oracle (its tolerance is finite: it holds the index's vectors);
    - same: every check below passed (sets and order only count where both follow PLAID's funnel);
    - ranking: identical (queries with the same pids in the same order), same_outside_ties, top1_equal, overlap
      (mean shared part of the k best), pairs_reordered, pairs_beyond_ties, worst_inversion (oracle score);
    - candidates, survivors: equal, equal_but_ties, different (numbers of queries);
    - errors: by system |score - oracle|, with `within` its tolerance; difference: other - base;
    - clamped: scores that stock CPU's clamp at zero changes by more than its tolerance;
    - failures: the first few, each with query id, what and detail.
    """
    n = len(Q)
    for side in (base, other):
        if len(side.scored) < n:
            raise ValueError(f"{side.name}: expected results of {n} queries, got {len(side.scored)}")
    failures: list[dict[str, Any]] = []

    def fail(i: int, what: str, detail: str) -> None:
        failures.append({"query": query_ids[i], "what": what, "detail": detail})

    comparable = base.follows_plaid and other.follows_plaid
    errors = {side.name: Errors() for side in (base, other)}
    difference = Errors()
    ranking = {"identical": 0, "same_outside_ties": 0, "top1_equal": 0, "pairs_reordered": 0, "pairs_beyond_ties": 0}
    sets = {what: {"equal": 0, "equal_but_ties": 0, "different": 0} for what in ("candidates", "survivors")}
    overlaps: list[float] = []
    worst, clamped = 0.0, 0
    for i in tqdm(range(n), desc=progress, unit=" queries", disable=not progress):
        pids_a, scores_a = base.scored.query(i)
        pids_b, scores_b = other.scored.query(i)
        union = np.union1d(pids_a, pids_b)
        maxima = judge.maxima(Q[i], torch.from_numpy(union)).double().cpu()
        plain, clamp = maxima.sum(1).numpy(), maxima.clamp(min=0).sum(1).numpy()
        truths = [clamp if side.clamps else plain for side in (base, other)]
        clamped += int((np.abs(truths[0] - truths[1]) > base.tolerance.ranking).sum())

        for side, pids, scores, truth in zip((base, other), (pids_a, pids_b), (scores_a, scores_b), truths):
            true = truth[np.searchsorted(union, pids)]
            # A passage without tokens is -inf or -9999 a token, depending on the system: no error to measure.
            error = (scores - true)[np.isfinite(true)]
            finite = np.isfinite(error)
            errors[side.name].add(error[finite])
            limit = side.tolerance.score
            if not finite.all():
                fail(i, f"{side.name} score", f"{int((~finite).sum())} scores are not finite")
            elif limit is not None and np.abs(error).max(initial=0.0) > limit:
                fail(i, f"{side.name} score", f"off the oracle by {np.abs(error).max():.3g}, allowed {limit:g}")
            if not (scores[:-1] >= scores[1:]).all():
                fail(i, f"{side.name} order", "scores are not descending")
            if len(np.unique(pids)) != len(pids):
                fail(i, f"{side.name} pids", f"{len(pids) - len(np.unique(pids))} returned twice")

        both = np.intersect1d(pids_a, pids_b)
        shared_truths = [t[np.searchsorted(union, both)] for t in truths]
        rank_a, rank_b = _ranks(pids_a, both), _ranks(pids_b, both)
        apart = scores_b[rank_b].astype(np.float64) - scores_a[rank_a]
        difference.add(apart[np.isfinite(apart) & np.isfinite(shared_truths[0])])
        top = (rank_a < knobs.k) | (rank_b < knobs.k)
        reordered, beyond, inversion = unordered_pairs(
            rank_a[top],
            rank_b[top],
            np.nan_to_num(shared_truths[0][top], neginf=-1e9),
            np.nan_to_num(shared_truths[1][top], neginf=-1e9),
            base.tolerance.ranking,
            other.tolerance.ranking,
        )
        top_a, top_b = pids_a[: knobs.k], pids_b[: knobs.k]
        ranking["identical"] += int(np.array_equal(top_a, top_b))
        ranking["top1_equal"] += int(np.array_equal(top_a[:1], top_b[:1]))
        ranking["same_outside_ties"] += int(beyond == 0)
        ranking["pairs_reordered"] += reordered
        ranking["pairs_beyond_ties"] += beyond
        worst = max(worst, inversion)
        overlaps.append(len(np.intersect1d(top_a, top_b)) / max(len(top_a), len(top_b), 1))
        if beyond:
            fail(i, "ranking", f"{beyond} pairs ordered differently beyond ties, worst by {inversion:.3g}")

        if comparable:
            outcome, detail = _compare_sets(
                [base.scored.candidates_of(i), other.scored.candidates_of(i)],
                [_judge_candidates(judge, Q[i, :query_maxlen], knobs, side, i) for side in (base, other)],
            )
            sets["candidates"][outcome] += 1
            if outcome == "different":
                fail(i, "candidates", detail)
            outcome, detail = _compare_sets(
                [np.sort(pids_a), np.sort(pids_b)],
                [_judge_survivors(judge, Q[i, :query_maxlen], knobs, side, i) for side in (base, other)],
            )
            sets["survivors"][outcome] += 1
            if outcome == "different":
                fail(i, "survivors", detail)

    return {
        "base": base.name,
        "other": other.name,
        "comparable": comparable,
        "judged": np.isfinite(other.tolerance.ranking).item(),
        "queries": n,
        "same": not failures if comparable else None,
        "ranking": {**ranking, "overlap": float(np.mean(overlaps)), "worst_inversion": worst,
                    "tolerance": {side.name: _finite(side.tolerance.ranking) for side in (base, other)}},
        "candidates": sets["candidates"] if comparable else None,
        "survivors": sets["survivors"] if comparable else None,
        "errors": {
            side.name: {**errors[side.name].summary(), "allowed": side.tolerance.score} for side in (base, other)
        },
        "difference": difference.summary(),
        "clamped": clamped,
        "failures": failures[:MAX_FAILURES],
        "num_failures": len(failures),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if np.isfinite(value) else None


def _ranks(pids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """First position in `pids` of each pid of `wanted` (all of which occur in it)."""
    order = np.argsort(pids, kind="stable")
    return order[np.searchsorted(pids[order], wanted)]


def _compare_sets(found: list[np.ndarray], judges: list[Callable[[], Verdict]]) -> tuple[str, str]:
    """equal | equal_but_ties | different, and what is wrong. The oracle is asked only where the two differ."""
    if np.array_equal(found[0], found[1]):
        return "equal", ""
    wrong = [verdict.reason for verdict in (judge() for judge in judges) if not verdict.right]
    return ("different", "; ".join(wrong)) if wrong else ("equal_but_ties", "")


def _judge_candidates(judge: Judge, Q: Tensor, knobs: Knobs, side: Side, i: int) -> Callable[[], Verdict]:
    def ask() -> Verdict:
        candidates = torch.from_numpy(side.scored.candidates_of(i))
        verdict = judge.judge_candidates(Q, knobs.ncells, candidates, rounding=side.tolerance.threshold)
        return _named(side, verdict)

    return ask


def _judge_survivors(judge: Judge, Q: Tensor, knobs: Knobs, side: Side, i: int) -> Callable[[], Verdict]:
    def ask() -> Verdict:
        verdict = judge.judge_survivors(
            Q,
            torch.from_numpy(side.scored.candidates_of(i)),
            torch.from_numpy(side.scored.query(i)[0]),
            ndocs=knobs.ndocs,
            threshold=knobs.centroid_score_threshold,
            rounding=side.tolerance.approximate,
            threshold_rounding=side.tolerance.threshold,
        )
        return _named(side, verdict)

    return ask


def _named(side: Side, verdict: Verdict) -> Verdict:
    return Verdict(verdict.right, verdict.missing, verdict.foreign, f"{side.name}: {verdict.reason}")
