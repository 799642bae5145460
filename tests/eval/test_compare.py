"""The comparison accepts reorderings within ties and nothing else: constant and shuffled scorers fail."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.compare import Side, compare, unordered_pairs
from eval.oracle import Verdict
from eval.retrieve import Scored
from eval.systems import OURS_CPU, STOCK_CPU, STOCK_GPU, Knobs, Tolerance

QUERIES, PASSAGES, LQ = 6, 400, 8
KNOBS = Knobs(k=20, ncells=2, centroid_score_threshold=0.4, ndocs=400)
IDS = [f"q{i}" for i in range(QUERIES)]
Q = torch.arange(QUERIES, dtype=torch.float32)[:, None, None].expand(QUERIES, LQ, 4)


class FakeOracle:
    """Known maxima; query i is recognised by its value. Sets are right if they are the first `ndocs // 4` pids."""

    def __init__(self, seed: int = 0, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        # scores of 20 to 24 as of 32 query tokens: hundreds of passages within one fp16 step of a neighbour
        self.table = 2.5 + spread * torch.rand(QUERIES, PASSAGES, LQ, generator=generator, dtype=torch.float64)
        self.asked = 0

    def maxima(self, Q: Tensor, pids: Tensor) -> Tensor:
        return self.table[int(Q[0, 0])][pids.long()]

    def scores(self, i: int) -> np.ndarray:
        return self.table[i].sum(1).numpy()

    def judge_candidates(self, Q: Tensor, ncells: int, candidates: Tensor, *, rounding: float) -> Verdict:
        self.asked += 1
        return Verdict(bool((candidates < 200).all()), reason="candidates: foreign")

    def judge_survivors(self, Q: Tensor, candidates: Tensor, survivors: Tensor, **limits: float) -> Verdict:
        self.asked += 1
        return Verdict(bool((survivors < 101).all()), reason="survivors: foreign")


@pytest.fixture
def oracle() -> FakeOracle:
    return FakeOracle()


Scorer = Callable[[int, np.ndarray], np.ndarray]


def system(oracle: FakeOracle, scorer: Scorer, pids: np.ndarray | None = None) -> Scored:
    """Passages 0..99 of each query ranked by what `scorer(query, true scores)` makes of the true scores."""
    pids = np.arange(100) if pids is None else pids
    results = []
    for i in range(QUERIES):
        scores = scorer(i, oracle.scores(i)[pids]).astype(np.float32)
        order = np.lexsort((pids, -scores))
        results.append((pids[order].tolist(), scores[order].tolist()))
    return Scored.from_lists(results, [np.arange(200)] * QUERIES)


def exact(i: int, scores: np.ndarray) -> np.ndarray:
    return scores


def judged(oracle: FakeOracle, other: Scored, base: Scored | None = None, tolerance: Tolerance = STOCK_CPU, **sides):
    base = system(oracle, exact) if base is None else base
    return compare(
        Side("plaid", base, tolerance), Side("ours", other, OURS_CPU, **sides), oracle, Q, KNOBS, IDS, query_maxlen=32
    )


def test_equal_results_are_the_same(oracle):
    result = judged(oracle, system(oracle, exact))
    assert result["same"] is True
    assert result["ranking"]["identical"] == result["ranking"]["same_outside_ties"] == QUERIES
    assert result["ranking"]["overlap"] == 1.0
    assert result["candidates"]["equal"] == result["survivors"]["equal"] == QUERIES
    assert result["errors"]["ours"]["max"] < 2e-6
    assert oracle.asked == 0  # equal sets need no judge


def test_rounding_reorders_within_ties(oracle):
    """float16 scores, as stock's GPU branch gives: other orders, all of them within its steps of 2^-6."""
    half = system(oracle, lambda i, s: s.astype(np.float16))
    result = judged(oracle, system(oracle, exact), half, STOCK_GPU)
    assert result["ranking"]["pairs_reordered"] > 0
    assert result["ranking"]["worst_inversion"] <= 2**-6
    assert result["same"] is True
    assert not judged(oracle, system(oracle, exact), half, STOCK_CPU)["same"]  # a fp32 system may not do this


def shuffled(i: int, scores: np.ndarray) -> np.ndarray:
    return np.random.default_rng(i).permutation(scores)


@pytest.mark.parametrize("tolerance", [STOCK_CPU, STOCK_GPU])
@pytest.mark.parametrize(
    "scorer",
    [
        pytest.param(shuffled, id="shuffled"),
        pytest.param(lambda i, s: np.full_like(s, s.mean()), id="constant"),
        pytest.param(lambda i, s: np.zeros_like(s), id="zero"),
        pytest.param(lambda i, s: -s, id="reversed"),
        pytest.param(lambda i, s: np.roll(s, 1), id="off by one"),
        pytest.param(lambda i, s: np.round(s), id="coarse"),
        pytest.param(lambda i, s: np.full_like(s, np.nan), id="nan"),
    ],
)
def test_a_wrong_scorer_fails(oracle, scorer, tolerance):
    base = system(oracle, (lambda i, s: s.astype(np.float16)) if tolerance is STOCK_GPU else exact)
    result = judged(oracle, system(oracle, scorer), base, tolerance)
    assert result["same"] is False
    assert result["num_failures"] >= QUERIES
    assert {"ours score"} <= {failure["what"] for failure in result["failures"]}


@pytest.mark.parametrize("tolerance", [STOCK_CPU, STOCK_GPU])
def test_a_shuffled_order_fails_by_its_order_alone(oracle, tolerance):
    """Every passage is tied with its neighbour, all of them in one chain: comparing neighbours would let this pass."""
    places = torch.stack([torch.randperm(PASSAGES) for _ in range(QUERIES)])
    oracle.table = (2.5 + 0.002 * places)[:, :, None].expand(-1, -1, LQ).double()  # steps of 0.016 < 2^-5
    right = system(oracle, exact)
    pids = np.concatenate([np.random.default_rng(i).permutation(right.query(i)[0]) for i in range(QUERIES)])
    other = dataclasses.replace(right, pids=pids, scores=np.full_like(right.scores, 24.0))
    ours = Side("ours", other, dataclasses.replace(OURS_CPU, score=None))
    result = compare(Side("plaid", right, tolerance), ours, oracle, Q, KNOBS, IDS)
    assert result["same"] is False
    assert {failure["what"] for failure in result["failures"]} == {"ranking"}
    assert result["ranking"]["same_outside_ties"] == 0


def test_one_swap_beyond_the_tie_is_found(oracle):
    right = system(oracle, exact)
    pids, scores = right.pids.copy(), right.scores.copy()
    pids[[3, 4]] = pids[[4, 3]]  # query 0
    other = dataclasses.replace(right, pids=pids, scores=scores)
    gap = float(np.abs(np.diff(oracle.scores(0)[pids[3:5]]))[0])
    result = judged(oracle, other)
    assert (result["ranking"]["pairs_reordered"], result["ranking"]["pairs_beyond_ties"]) == (1, 1)
    assert result["ranking"]["worst_inversion"] == pytest.approx(gap)
    wide = dataclasses.replace(STOCK_CPU, ranking=2 * gap)
    loose = compare(Side("a", right, wide), Side("b", other, wide), oracle, Q, KNOBS, IDS)
    assert loose["ranking"]["pairs_beyond_ties"] == 0


def test_a_passage_lost_from_the_top_is_found(oracle):
    """The best passage of query 2 is missing from what the other scored: a difference of survivors."""
    pids = [np.arange(100)] * QUERIES
    best = int(oracle.scores(2)[:100].argmax())
    other = system(oracle, exact)
    keep = ~((np.repeat(np.arange(QUERIES), 100) == 2) & (other.pids == best))
    offsets = other.offsets.copy()
    offsets[3:] -= 1
    other = dataclasses.replace(other, pids=other.pids[keep], scores=other.scores[keep], offsets=offsets)
    result = judged(oracle, other)
    assert result["survivors"] == {"equal": QUERIES - 1, "equal_but_ties": 1, "different": 0}
    assert len(pids) == QUERIES
    assert result["ranking"]["overlap"] < 1
    foreign = system(oracle, exact, np.arange(1, 102))  # passage 101 for passage 0
    result = judged(oracle, foreign)
    assert result["survivors"]["different"] == QUERIES
    assert result["same"] is False


def test_candidates_that_differ_are_judged(oracle):
    right = system(oracle, exact)
    tied = dataclasses.replace(right, candidates=np.where(right.candidates == 7, 8, right.candidates))
    assert judged(oracle, tied)["candidates"]["equal_but_ties"] == QUERIES
    wrong = dataclasses.replace(right, candidates=np.where(right.candidates == 7, 300, right.candidates))
    result = judged(oracle, wrong)
    assert result["candidates"]["different"] == QUERIES
    assert result["same"] is False


def test_duplicates_and_ascending_scores_are_found(oracle):
    right = system(oracle, exact)
    twice = dataclasses.replace(right, pids=right.pids.copy())
    twice.pids[1] = twice.pids[0]
    assert "ours pids" in {f["what"] for f in judged(oracle, twice)["failures"]}
    ascending = dataclasses.replace(right, scores=right.scores.copy())
    ascending.scores[:2] = ascending.scores[:2][::-1]
    assert "ours order" in {f["what"] for f in judged(oracle, ascending)["failures"]}


def test_clamping_is_no_difference_of_order():
    """Stock's CPU branch clamps maxima at zero: each system is held against its own sum."""
    oracle = FakeOracle(spread=6.0)
    oracle.table -= 5.0
    clamped = system(oracle, lambda i, s: oracle.table[i].clamp(min=0).sum(1).numpy()[: len(s)])
    plain = system(oracle, exact)
    ours = Side("ours", plain, OURS_CPU)
    result = compare(Side("plaid", clamped, STOCK_CPU, clamps=True), ours, oracle, Q, KNOBS, IDS)
    assert result["clamped"] > 0
    assert result["ranking"]["pairs_reordered"] > 0
    assert result["same"] is True
    assert not compare(Side("plaid", clamped, STOCK_CPU), ours, oracle, Q, KNOBS, IDS)["same"]


def test_other_modes_are_not_held_to_plaid(oracle):
    more = system(oracle, exact, np.arange(300))
    result = judged(oracle, more, follows_plaid=False)
    assert result["same"] is None
    assert result["candidates"] is None
    assert result["ranking"]["overlap"] < 1


def test_missing_results_are_refused(oracle):
    few = Scored.from_lists([([1], [1.0])], [[1]])
    with pytest.raises(ValueError, match="ours: expected results of 6 queries, got 1"):
        judged(oracle, few)


@pytest.mark.parametrize("seed", range(20))
def test_unordered_pairs_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    truth_a = rng.normal(size=n)
    truth_b = truth_a + rng.normal(size=n) * 0.1 * (seed % 3)
    a = np.argsort(np.argsort(truth_a + rng.normal(size=n) * 0.3))
    b = np.argsort(np.argsort(truth_b + rng.normal(size=n) * 0.3))
    reordered = beyond = 0
    worst = 0.0
    for i, j in itertools.permutations(range(n), 2):
        if a[i] < a[j] and b[i] > b[j]:
            wrong = truth_a[j] - truth_a[i], truth_b[i] - truth_b[j]
            reordered += 1
            beyond += wrong[0] > 0.2 or wrong[1] > 0.1
            worst = max(worst, *wrong)
    found = unordered_pairs(a, b, truth_a, truth_b, 0.2, 0.1)
    assert found[:2] == (reordered, beyond)
    assert found[2] == pytest.approx(worst)
