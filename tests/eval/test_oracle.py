"""The oracle against ops.reference and a plain rewriting of PLAID's funnel."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eval.oracle import Oracle
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.ops import reference
from tests.synthetic import make_index, make_queries

ROUNDING = {"rounding": 1e-9, "threshold_rounding": 1e-9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("oracle") / "index", n=300, dim=64, nbits=2, C=64)


@pytest.fixture(scope="module")
def index(folder: Path) -> PlaidIndex:
    return read_index(folder)


@pytest.fixture(scope="module")
def Q(folder: Path) -> Tensor:
    return make_queries(folder, n=4)


@pytest.fixture(scope="module")
def oracle(index: PlaidIndex) -> Oracle:
    return Oracle(index, dtype=torch.float64)


def exact(index: PlaidIndex, Q: Tensor, pids: Tensor | None = None) -> Tensor:
    return reference.residual_maxsim(
        Q, index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits, index.offsets, pids
    )


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_scores_are_the_reference(tmp_path, nbits, keep_bytes):
    folder = make_index(tmp_path / "index", n=150, dim=64, nbits=nbits, C=32, seed=nbits)
    index = read_index(folder)
    Q = make_queries(folder, n=1)[0]
    pids = torch.tensor([3, 149, 0, 3, 77])  # any order, one twice
    true = exact(index, Q, pids)
    assert torch.equal(Oracle(index, dtype=torch.float64, keep_bytes=keep_bytes).scores(Q, pids), true)
    # 32 products of 64 terms of unit vectors: 32 * 64 * 2^-24 is the worst case, its root the usual one
    single = Oracle(index, dtype=torch.float32, keep_bytes=keep_bytes).scores(Q, pids)
    assert (single - true).abs().nan_to_num().max() < 1e-5
    assert (single.flip(0) - true).abs().nan_to_num().max() > 1e-2


def test_empty_passage_and_clamp(index, oracle, Q):
    empty = (index.doclens == 0).nonzero().flatten()
    assert len(empty)
    assert (oracle.scores(Q[0], empty) == float("-inf")).all()
    assert (oracle.scores(Q[0], empty, clamp=True) == 0).all()
    full = (index.doclens > 0).nonzero().flatten()
    maxima = oracle.maxima(Q[0], full)
    assert torch.equal(oracle.scores(Q[0], full, clamp=True), maxima.clamp(min=0).sum(1))
    assert (oracle.scores(-Q[0], full, clamp=True) > oracle.scores(-Q[0], full)).any()


def test_topk_is_the_exact_search(index, oracle, Q):
    pids, scores = oracle.topk(Q[1], 10)
    true = exact(index, Q[1])
    assert torch.equal(scores, true.sort(descending=True).values[:10])
    assert torch.equal(true[pids], scores)


@pytest.mark.parametrize(("shape", "dtype"), [((32, 63), torch.float32), ((2, 32, 64), torch.float32)])
def test_wrong_query_is_refused(oracle, shape, dtype):
    with pytest.raises(ValueError, match=r"Q: expected shape \[LQ, 64\]"):
        oracle.scores(torch.zeros(shape, dtype=dtype), torch.tensor([0]))


def test_wrong_dtype_is_refused(index):
    with pytest.raises(ValueError, match="dtype: expected"):
        Oracle(index, dtype=torch.float16)


def candidates_of(index: PlaidIndex, Q: Tensor, ncells: int) -> Tensor:
    cells = (index.centroids.double() @ Q.double().T).topk(ncells, dim=0).indices.unique()
    o = index.ivf_offsets
    return torch.cat([index.ivf_pids[o[c] : o[c + 1]] for c in cells.tolist()]).unique()


def survivors_of(index: PlaidIndex, Q: Tensor, candidates: Tensor, ndocs: int, threshold: float, last: bool) -> Tensor:
    """Stock's two steps, one passage at a time; at equal scores the last pid first (stock CPU), or the first."""
    cs = index.centroids.double() @ Q.double().T

    def keep(pids: Tensor, n: int, pruned: bool) -> Tensor:
        def score(pid: int) -> float:
            codes = index.codes()[index.offsets[pid] : index.offsets[pid + 1]].long()
            if pruned:
                codes = codes[cs[codes].amax(1) >= threshold]
            return float(cs[codes].amax(0).sum()) if len(codes) else -1e6

        order = sorted(pids.tolist(), key=lambda pid: (-score(pid), -pid if last else pid))
        return torch.tensor(order[:n], dtype=torch.int64)

    return keep(keep(candidates, ndocs, True), ndocs // 4, False)


@pytest.mark.parametrize("ncells", [1, 2, 4, 64])
def test_candidates(index, oracle, Q, ncells):
    for q in Q:
        right = candidates_of(index, q, ncells)
        assert oracle.judge_candidates(q, ncells, right, rounding=1e-9).right
        missing = oracle.judge_candidates(q, ncells, right[1:], rounding=1e-9)
        assert (missing.right, missing.missing) == (False, (int(right[0]),))
        others = torch.tensor([pid for pid in range(index.num_passages) if pid not in set(right.tolist())])
        if len(others):
            foreign = oracle.judge_candidates(q, ncells, torch.cat([right, others[:1]]), rounding=1e-9)
            assert (foreign.right, foreign.foreign) == (False, (int(others[0]),))


def test_candidates_of_tied_centroids(index, Q):
    """Two equal centroids at the cut: the list of either will do, that of neither will not."""
    q = Q[0, :1]
    first, second = (index.centroids.double() @ q[0].double()).topk(2).indices.tolist()
    centroids = index.centroids.clone()
    centroids[second] = centroids[first]
    oracle = Oracle(dataclasses.replace(index, centroids=centroids), dtype=torch.float64)
    lists = [index.ivf_pids[index.ivf_offsets[c] : index.ivf_offsets[c + 1]] for c in (first, second)]
    assert set(lists[0].tolist()) != set(lists[1].tolist())
    for pids in lists:
        assert oracle.judge_candidates(q, 1, pids, rounding=1e-9).right
    assert not oracle.judge_candidates(q, 1, lists[0][:0], rounding=1e-9).right
    assert not oracle.judge_candidates(q, 2, lists[0], rounding=1e-9).right


@pytest.mark.parametrize(("ndocs", "threshold"), [(40, 0.5), (100, 0.3), (4096, 0.4), (64, 0.95), (41, -2.0)])
def test_survivors(index, oracle, Q, ndocs, threshold):
    """0.95 prunes all codes of most passages: step one is then one large tie, which stock and the plugin cut unlike."""
    generator = torch.Generator().manual_seed(0)
    for q in Q:
        candidates = candidates_of(index, q, 4)

        def judge(pids: Tensor, q: Tensor = q, candidates: Tensor = candidates) -> bool:
            verdict = oracle.judge_survivors(q, candidates, pids, ndocs=ndocs, threshold=threshold, **ROUNDING)
            return verdict.right

        right = survivors_of(index, q, candidates, ndocs, threshold, last=False)
        assert judge(right)
        assert judge(survivors_of(index, q, candidates, ndocs, threshold, last=True))
        assert judge(right[torch.randperm(len(right), generator=generator)])
        assert not judge(right[1:])
        assert not judge(torch.cat([right[:1], right[:-1]]))
        rest = candidates[~torch.isin(candidates.long(), right)].long()
        if len(rest) > len(right):
            swapped = right.clone()
            swapped[: len(right) // 2] = rest[torch.randperm(len(rest), generator=generator)][: len(right) // 2]
            assert not judge(swapped)
        outside = torch.tensor([pid for pid in range(index.num_passages) if pid not in set(candidates.tolist())])
        if len(outside):
            assert not judge(torch.cat([right[:-1], outside[:1]]))


def test_survivors_may_differ_only_within_the_rounding(index, oracle, Q):
    """The first passage below the cut of step two takes the place of the last above it."""
    q, ndocs = Q[2], 4096
    candidates = candidates_of(index, q, 4)
    cs = oracle.centroid_scores(q)
    order = candidates[oracle.approximate(cs, candidates).sort(descending=True).indices].long()
    ndocs = 4 * (len(order) // 2)
    gap = oracle.approximate(cs, order[ndocs // 4 - 1 : ndocs // 4 + 1]).diff().abs().item()
    swapped = torch.cat([order[: ndocs // 4 - 1], order[ndocs // 4 : ndocs // 4 + 1]])
    for rounding, right in ((0.6 * gap, True), (0.4 * gap, False)):
        verdict = oracle.judge_survivors(
            q, candidates, swapped, ndocs=ndocs, threshold=-2.0, rounding=rounding, threshold_rounding=0.0
        )
        assert verdict.right is right
