"""The operations on CPU tensors: against the oracle, and against stock PLAID's C++ extensions."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim import compat
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.ops import api, cpu, reference
from tests.colbert_fixtures import stock_extensions  # noqa: F401
from tests.ops.ragged import LENGTHS, Collection, assert_scores, make_collection, make_pq, quantised
from tests.synthetic import make_index, make_queries

compat.allow_missing_git()

# Unit roundoff of fp32.
U32 = 2.0**-24
SHAPES = [(1, 64, 1), (5, 96, 2), (32, 128, 1), (32, 128, 2), (32, 128, 4), (16, 64, 8), (129, 64, 2), (300, 32, 4)]


def tolerance(c: Collection) -> float:
    """Five standard deviations of a score's fp32 error.

    A similarity adds DIM products and as many table entries as a residual has bytes, each rounding by U32 / sqrt(3)
    of a partial sum, which is at most 1 + |w|; LQ similarities add up.
    """
    additions = c.Q.size(1) + c.residuals.size(1) + 4
    reach = (1 + float(c.bucket_weights.abs().max()) * c.Q.size(1) ** 0.5) * float(c.inv_norms.max())
    return 5 * (len(c.Q) * additions / 3) ** 0.5 * U32 * reach


def centroid_scores(c: Collection, threshold: float | None = None) -> api.CentroidScores:
    return api.centroid_scores(c.Q, c.centroids.float(), threshold, impl="torch")


def residual_maxsim(
    c: Collection, pids: Tensor | None = None, stored: tuple[Tensor, float, float] | None = None
) -> Tensor:
    norms, lo, step = (c.inv_norms, 0.0, 1.0) if stored is None else stored
    return api.residual_maxsim(
        c.Q,
        centroid_scores(c),
        c.codes,
        c.residuals,
        norms,
        lo,
        step,
        c.bucket_weights,
        c.nbits,
        c.offsets,
        pids,
        impl="torch",
    )


@pytest.fixture(params=["large tiles", "small tiles", "small tiles, two threads"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As they are (one tile holds most of a test); so small that every border is met, with two threads in blocks."""
    if request.param != "large tiles":
        monkeypatch.setattr(cpu, "_TILE_SIMILARITIES", 1 << 13)
        monkeypatch.setattr(cpu, "_PARALLEL", 1 << 12)
        monkeypatch.setattr(cpu, "_TILE_LEAST", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if "two" in request.param else 1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("LQ", [1, 5, 200])
def test_tiles_hold_every_passage_once_and_only_its_own_tokens(LQ, monkeypatch):
    monkeypatch.setattr(cpu, "_TILE_LEAST", 100)
    monkeypatch.setattr(cpu, "_TILE_SIMILARITIES", 1000)
    monkeypatch.setattr(cpu, "_PARALLEL", 300)
    lengths = torch.tensor(LENGTHS)
    first = torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]
    seen = []
    for passages, tokens in cpu._tiles(first, lengths, LQ):
        assert len(passages) == 1 or tokens.numel() < 300
        assert len(passages) == 1 or tokens.numel() * LQ <= 1000 * torch.get_num_threads()
        assert len(passages) == 1 or len(passages) * LQ < 300
        for i, row in zip(passages.tolist(), tokens):
            want = torch.arange(int(lengths[i])) + first[i]
            assert torch.equal(row[: len(want)], want)
            assert (row[len(want) :] == want[-1]).all()
            seen.append(i)
    assert sorted(seen) == [i for i, length in enumerate(LENGTHS) if length]
    assert list(cpu._tiles(first[:0], lengths[:0], LQ)) == []


@pytest.mark.parametrize(("LQ", "DIM", "nbits"), SHAPES)
@pytest.mark.parametrize("negative", [False, True])
def test_residual_maxsim_matches_the_oracle(LQ, DIM, nbits, negative, tiles):
    c = make_collection("cpu", LQ, DIM, nbits, negative=negative)
    want = reference.residual_maxsim(c.Q, *c.raw)
    assert_scores(residual_maxsim(c), want, tolerance(c))
    assert not negative or nbits == 8 or (want[1:-1] < 0).all()


def test_inverse_norms_may_be_uint16():
    c = make_collection("cpu", 32, 128)
    stored = quantised(c.inv_norms)
    want = reference.residual_maxsim(c.Q, *c.raw)
    half_step = stored[2] / 2 / float(c.inv_norms.min())
    assert_scores(residual_maxsim(c, stored=stored), want, tolerance(c) + 32 * half_step)


def test_a_token_of_norm_zero_has_similarity_zero():
    c = make_collection("cpu", 8, 64, lengths=(3, 4))
    c.centroids.zero_()
    c.bucket_weights.zero_()
    assert (residual_maxsim(c, stored=(torch.zeros_like(c.inv_norms), 0.0, 1.0)) == 0).all()


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("NQ", "LQ", "DIM", "M"), [(1, 1, 64, 8), (3, 5, 96, 16), (1, 32, 128, 64), (2, 129, 64, 1), (1, 300, 32, 32)]
)
@pytest.mark.parametrize("negative", [False, True])
def test_pq_maxsim_matches_the_oracle(NQ, LQ, DIM, M, negative, impl, tiles):
    Q, codes, codebook, offsets = make_pq("cpu", NQ, LQ, DIM, M, negative=negative)
    got = api.pq_maxsim(Q, codes, codebook, offsets, impl=impl)
    largest = float(reference.pq_decode(codes, codebook).norm(dim=1).max())
    for q, scores in zip(Q, got, strict=True):
        want = reference.pq_maxsim(q, codes, codebook, offsets)
        # five standard deviations: DIM additions a similarity, each off by U32 / sqrt(3) of at most |q| |e|
        assert_scores(scores, want, 5 * (LQ * DIM / 3) ** 0.5 * U32 * largest)
        assert not negative or (want[1:-1] < 0).all()
    pids = torch.tensor([13, 0, 5, 5, 15, 1])
    assert_scores(api.pq_maxsim(Q[0], codes, codebook, offsets, pids, impl=impl), got[0][pids], 1e-5)
    out, count = torch.full((NQ, 6), 7.0), torch.tensor([2], dtype=torch.int32)
    api.pq_maxsim(Q, codes, codebook, offsets, pids, out, count, impl=impl)
    assert (out[:, 2:] == 7).all()
    assert torch.equal(out[:, :2].isinf(), got[:, pids[:2]].isinf())
    assert api.pq_maxsim(Q, codes, codebook, offsets, pids[:0], impl=impl).shape == (NQ, 0)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(("NQ", "LQ", "DIM"), [(1, 1, 64), (3, 5, 96), (1, 130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_dense_maxsim_matches_the_oracle(NQ, LQ, DIM, dtype, sign, impl, tiles):
    g = torch.Generator().manual_seed(LQ)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    Q = normalize(torch.randn(NQ, LQ, DIM, generator=g), dim=-1)
    D = normalize(torch.randn(int(offsets[-1]), DIM, generator=g), dim=-1)
    if sign < 0:
        Q, D = Q.abs(), -D.abs()
    Q, D = Q.to(dtype), D.to(dtype)
    got = api.dense_maxsim(Q, D, offsets=offsets, impl=impl)
    padded = D.new_full((len(LENGTHS), max(LENGTHS), DIM), torch.nan)
    for row, start, length in zip(padded, offsets.tolist(), LENGTHS):
        row[:length] = D[start : start + length]
    same = api.dense_maxsim(Q, padded, lengths=torch.tensor(LENGTHS), impl=impl)
    pids = torch.tensor([13, 0, 5, 5, 15, 1], dtype=torch.int32)
    out, count = torch.full((NQ, 6), 7.0), torch.tensor([4], dtype=torch.int32)
    api.dense_maxsim(Q, D, offsets=offsets, pids=pids, out=out, count=count, impl=impl)
    assert (out[:, 4:] == 7).all()
    for q, scores, again, some in zip(Q, got, same, out, strict=True):
        want = reference.maxsim(q, D, offsets)
        # five standard deviations: DIM additions a similarity, each off by U32 / sqrt(3) of at most 1
        tolerance = 5 * (LQ * DIM / 3) ** 0.5 * U32
        assert_scores(scores, want, tolerance)
        assert_scores(again, want, tolerance)
        assert_scores(some[:4], want[pids[:4].long()], tolerance)
        assert sign > 0 or (want[1:-1] < 0).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_decompress_is_the_oracles_before_it_normalises(bits):
    c = make_collection("cpu", 1, 64, bits)
    got = cpu.decompress(c.codes, c.residuals, c.centroids.float(), cpu.byte_table(bits, c.bucket_weights))
    want = reference.decompress(c.codes, c.residuals, c.centroids, c.bucket_weights, bits)
    assert (normalize(got.double(), dim=1) - want).abs().max() <= 2 * U32
    assert (normalize(got.double(), dim=1).roll(1, 0) - want).abs().max() > 1e-3


@pytest.mark.parametrize("kept", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("LQ", "DIM"), [(1, 64), (5, 96), (32, 128), (300, 32)])
def test_centroid_maxsim_matches_the_oracle(LQ, DIM, kept, negative, tiles):
    c = make_collection("cpu", LQ, DIM, negative=negative)
    best = (c.centroids.double() @ c.Q.double().T).amax(1).sort(descending=True).values
    count = round(kept * len(best))
    # half way to the next centroid, so that no rounding moves one over the threshold
    threshold = float(best[0] + 1 if count == 0 else best[count - 1 : count + 1].mean() if count < len(best) else -2)
    cs = centroid_scores(c, threshold)
    assert cs.keep is not None
    assert int(cs.keep.sum()) == count
    for use_keep in (False, True):
        got = api.centroid_maxsim(cs, c.codes, c.offsets, None, use_keep, impl="torch")
        want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, None, threshold if use_keep else None)
        assert_scores(got, want, tolerance(c))
        # some passages must lose all their tokens, else the threshold shows little
        assert not use_keep or kept > 0.5 or want[1:-1].isinf().any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pids", [[], [5], [0], [13, 0, 5, 5, 15, 1, 5, 12]])
def test_pid_lists(pids, dtype, tiles):
    c = make_collection("cpu", 32, 64)
    pids = torch.tensor(pids, dtype=dtype)
    assert_scores(residual_maxsim(c, pids), residual_maxsim(c)[pids.long()], 0)
    for threshold in (-1.0, 0.2, 0.3):
        cs = centroid_scores(c, threshold)
        everything = api.centroid_maxsim(cs, c.codes, c.offsets, None, True, impl="torch")
        got = api.centroid_maxsim(cs, c.codes, c.offsets, pids, True, impl="torch")
        assert torch.equal(got, everything[pids.long()])


def test_count_leaves_the_rest_of_out():
    c = make_collection("cpu", 8, 64)
    out = torch.full((4,), 7.0)
    count = torch.tensor([2], dtype=torch.int32)
    api.centroid_maxsim(centroid_scores(c), c.codes, c.offsets, torch.tensor([4, 5, 6, 7]), out=out, count=count)
    assert_scores(out[:2], reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, torch.tensor([4, 5])), 1e-5)
    assert (out[2:] == 7).all()


def test_runs_under_inference_mode_and_with_several_threads():
    c = make_collection("cpu", 32, 128)
    want = reference.residual_maxsim(c.Q, *c.raw)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with torch.inference_mode():
                assert_scores(residual_maxsim(c), want, tolerance(c))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("C", "ncells"), [(40, 1), (40, 7), (40, 40), (256, 1), (256, 3), (256, 4), (256, 256), (300, 2)]
)
def test_candidates_are_the_union_of_the_best_lists(C, ncells):
    g = torch.Generator().manual_seed(ncells)
    N = 500
    lengths = torch.randint(0, 12, (C,), generator=g)  # some lists are empty
    lists = [torch.randperm(N, generator=g)[:n].sort().values for n in lengths.tolist()]
    table = torch.randn(C, 5, generator=g)
    want: set[int] = set()
    for column in table.T:
        for cell in column.argsort(descending=True)[:ncells].tolist():
            want.update(lists[cell].tolist())
    cs = api.CentroidScores(table=table, scale=torch.ones(1), LQ=5)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    got = cpu.candidates(cs, ncells, torch.cat(lists).int(), offsets, N)
    assert got.dtype == torch.int32
    assert got.tolist() == sorted(want)


def test_candidates_of_empty_lists_are_none_and_too_many_cells_are_an_error():
    cs = api.CentroidScores(table=torch.randn(4, 3), scale=torch.ones(1), LQ=3)
    none = torch.zeros(0, dtype=torch.int32)
    offsets = torch.zeros(5, dtype=torch.int64)
    assert cpu.candidates(cs, 2, none, offsets, 10).tolist() == []
    for ncells in (0, 5):
        with pytest.raises(ValueError, match=rf"ncells: expected 1\.\.4.*got {ncells}"):
            cpu.candidates(cs, ncells, none, offsets, 10)


@pytest.mark.parametrize("k", [0, 1, 2, 10, 39, 40, 60])
@pytest.mark.parametrize("values", [1, 3, 1000])
def test_topk_orders_by_score_then_pid(k, values):
    g = torch.Generator().manual_seed(k + values)
    scores = torch.randint(-values, values, (40,), generator=g).float()
    scores[::7] = -torch.inf
    pids = torch.randperm(100, generator=g)[:40].int()
    want = sorted(zip(pids.tolist(), scores.tolist()), key=lambda pair: (-pair[1], pair[0]))[:k]
    got_pids, got_scores = cpu.topk(scores, pids, k)
    assert list(zip(got_pids.tolist(), got_scores.tolist())) == want
    kept_pids, kept_scores = cpu.select_top(scores, pids, k)
    assert set(kept_pids.tolist()) == {pid for pid, _ in want}
    in_order = [pair for pair in zip(pids.tolist(), scores.tolist()) if pair in want]
    assert list(zip(kept_pids.tolist(), kept_scores.tolist())) == in_order


class Funnel:
    """The steps over one index on the CPU, ours and stock's."""

    def __init__(self, path):
        from colbert.search.index_storage import IndexScorer

        self.plaid = read_index(path)
        self.index = load_resident(self.plaid, "cpu")
        self.stock = IndexScorer(str(path), use_gpu=False)
        plaid = self.plaid
        self.embeddings = reference.decompress(
            plaid.codes(), plaid.residuals(), plaid.centroids, plaid.bucket_weights, plaid.nbits
        )

    def check(self, Q: Tensor, ncells: int, threshold: float, ndocs: int) -> int:
        """Candidates, survivors and scores of one query against stock's; returns how many passages were pruned."""
        index, ranker = self.index, self.stock
        config = SimpleNamespace(
            ncells=ncells, centroid_score_threshold=threshold, ndocs=ndocs, query_maxlen=len(Q),
            interaction="colbert", total_visible_gpus=0,
        )  # fmt: skip
        cs = api.centroid_scores(Q, index.centroids, threshold)
        pids = cpu.candidates(cs, ncells, index.ivf_pids, index.ivf_offsets, index.num_passages)
        stock_pids, stock_cs = ranker.retrieve(config, Q[None])
        assert torch.equal(pids, stock_pids.int())

        keep = stock_cs.max(-1).values >= threshold
        doclens = ranker.doclens
        survivors = ranker.filter_pids(
            stock_pids, stock_cs, ranker.embeddings.codes, doclens, ranker.offsets, keep, ndocs
        )
        approximate = api.centroid_maxsim(cs, index.codes, index.offsets, pids, True)
        first = cpu.select_top(approximate, pids, ndocs)[0]
        full = api.centroid_maxsim(cs, index.codes, index.offsets, first)
        ours = cpu.select_top(full, first, ndocs // 4)[0]
        assert len(ours) == len(survivors)
        # Passages that only one side keeps are tied at one of the cuts, within fp32 sums in another order.
        known = dict(zip(pids.tolist(), approximate.tolist()))
        known_full = dict(zip(first.tolist(), full.tolist()))
        cut = min(known[pid] for pid in first.tolist())
        full_cut = min(known_full[pid] for pid in ours.tolist())
        for pid in set(ours.tolist()) ^ set(survivors.tolist()):
            assert isclose(known[pid], cut, abs_tol=1e-4) or isclose(known_full[pid], full_cut, abs_tol=1e-4)

        stock_ranked, stock_scores = ranker.rank(config, Q[None])
        assert isinstance(index.residuals, Tensor)
        exact = api.residual_maxsim(
            Q, cs, index.codes, index.residuals, index.inv_norms, index.inv_norm_lo, index.inv_norm_step,
            index.bucket_weights, index.nbits, index.offsets, torch.tensor(stock_ranked, dtype=torch.int32),
        )  # fmt: skip
        maxima = self.maxima(Q)[stock_ranked]
        assert_scores(exact, maxima.sum(1), 1e-5)
        # Stock clamps each maximum at zero, where it also starts for an empty passage.
        assert_scores(torch.tensor(stock_scores), maxima.clamp(min=0).sum(1), 1e-4)
        positive = (maxima > 0).all(1)
        assert_scores(exact[positive], torch.tensor(stock_scores)[positive], 1e-4)
        return len(pids) - len(ours)

    def maxima(self, Q: Tensor) -> Tensor:
        """fp64 [N, LQ]: the best similarity of each query token in each passage; -inf without tokens."""
        similarities = self.embeddings @ Q.double().T
        owner = torch.arange(self.plaid.num_passages).repeat_interleave(self.plaid.doclens)
        best = torch.full((self.plaid.num_passages, len(Q)), -torch.inf, dtype=torch.float64)
        return best.scatter_reduce_(0, owner[:, None].expand_as(similarities), similarities, "amax")


# (ncells, threshold, ndocs) of k = 10, 100 and 1000, and settings that prune hard in a small collection
SETTINGS = [(1, 0.5, 256), (2, 0.45, 1024), (4, 0.4, 4096), (2, 0.6, 64), (4, 0.3, 40)]


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.skipif(torch.cuda.is_available(), reason="stock uses the GPU where there is one")
def test_steps_agree_with_stock(nbits, tmp_path, stock_extensions):  # noqa: F811
    path = make_index(tmp_path / "index", n=400, dim=64, nbits=nbits, C=96, common=1.0)
    funnel = Funnel(path)
    pruned = [funnel.check(Q, *knobs) for Q in make_queries(path, n=3) for knobs in SETTINGS]
    assert max(pruned) > 100


@pytest.mark.parametrize("nbits", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["scifact", pytest.param("msmarco-mini", marks=pytest.mark.slow)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="stock uses the GPU where there is one")
def test_steps_agree_with_stock_on_real_text(name, nbits, dataset_folder, stock_extensions):  # noqa: F811
    pytest.importorskip("faiss")
    from eval.checkpoint import make_checkpoint
    from eval.datasets import load_dataset
    from eval.indexing import build_index, encode_queries

    dataset = load_dataset(f"{dataset_folder(name)}[:300]", progress=False)
    try:
        checkpoint = make_checkpoint(progress=False)
    except RuntimeError as error:
        pytest.skip(f"no package index in reach: {error}")
    funnel = Funnel(build_index(checkpoint, dataset, nbits=nbits, progress=False))
    queries = encode_queries(checkpoint, dataset, progress=False).Q[:5]
    pruned = [funnel.check(Q, *knobs) for Q in queries for knobs in SETTINGS]
    assert max(pruned) > 20
