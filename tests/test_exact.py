"""Every codec through the engine: against the oracle of what it stores, on both sets of stages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim import exact
from plaid_tilemaxsim.engine import SearchEngine
from plaid_tilemaxsim.exact import DensePieces, DenseRounds, DenseScorer, PQScorer
from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.index import placement, resident
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.placement import plan, plan_for
from plaid_tilemaxsim.index.pq import PQ
from plaid_tilemaxsim.index.resident import ResidentIndex, load_resident
from plaid_tilemaxsim.ops import reference
from tests.synthetic import make_index

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter takes milliseconds for every program.
N, LQ, DIM = (2000, 32, 64) if ON_GPU else (90, 8, 64)
CODECS = ["dense", "dense in pieces", "pq", "opq"]
MODES = [
    SearchParams(k=None, ncells=2, threshold=0.3, ndocs=80),
    SearchParams(k=30, ncells=2, mode="rerank"),
    SearchParams(k=20, mode="exhaustive"),
    SearchParams(k=20, mode="exhaustive", prefilter=40),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PlaidIndex:
    return read_index(make_index(tmp_path_factory.mktemp("index") / "i", n=N, dim=DIM, C=32, chunk_size=70))


@pytest.fixture(scope="module")
def quantisers(index: PlaidIndex) -> dict[str, PQ]:
    """Entries are parts of 256 of the index's embeddings, which needs no training; for "opq" after a rotation."""
    g = torch.Generator().manual_seed(1)
    e = reference.decompress(index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits)
    made = {}
    for name in ("pq", "opq"):
        rotation = torch.linalg.qr(torch.randn(DIM, DIM, generator=g))[0] if name == "opq" else None
        parts = (e.float() if rotation is None else e.float() @ rotation.T).view(len(e), 16, -1).transpose(0, 1)
        codebook = parts[:, torch.randperm(len(e), generator=g)[:256]].half().contiguous()
        codes = torch.cdist(parts, codebook.float()).argmin(-1).T.to(torch.uint8).contiguous()
        made[name] = PQ(16, codes, codebook, rotation)
    return made


class Case:
    def __init__(self, index: PlaidIndex, codec: str, impl: str, made: PQ | None) -> None:
        self.index, self.codec, self.pq = index, codec, made
        held = load_resident(index, DEVICE, codec=codec.split()[0].replace("opq", "pq"), pq=made)
        if codec == "dense in pieces":
            held.embeddings, held.residuals = None, index.residuals().to(DEVICE)
        if impl == "triton":  # kernels read fp16, also in the interpreter
            held = dataclasses.replace(held, centroids=held.centroids.half())
            if held.embeddings is not None:
                held.embeddings = held.embeddings.half()
        self.engine = SearchEngine(held, impl=impl)
        D = reference.decompress(index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits)
        self.exactly = D
        if made is not None:
            D = reference.pq_decode(made.codes, made.codebook)
            if made.rotation is not None:  # codes stand for what was turned
                D = D @ made.rotation.double()
        self.D = D

    @property
    def budget(self) -> float:
        """At LQ = 32 fp16 kernels stay within 2e-3 of what the codec stores; torch adds up a few hundred fp32 terms."""
        return 2e-3 if self.engine.impl == "triton" else 2e-5

    def queries(self, n: int) -> Tensor:
        g = torch.Generator().manual_seed(n)
        near = self.exactly[torch.randint(0, len(self.exactly), (n, LQ), generator=g)].float()
        noise = torch.randn(near.shape, generator=g) / DIM**0.5
        return torch.nn.functional.normalize(near + 0.7 * noise, dim=-1)

    def oracle(self, Q: Tensor) -> Tensor:
        return reference.maxsim(Q, self.D, self.index.offsets)

    def check(self, Q: Tensor, pids: Tensor, scores: Tensor) -> None:
        want, scores = self.oracle(Q)[pids.cpu().long()], scores.cpu().double()
        assert torch.equal(want.isinf(), scores.isinf())
        finite = ~want.isinf()
        assert (want[finite] - scores[finite]).abs().max() <= self.budget
        assert (want[finite] - scores[finite].roll(1)).abs().max() > self.budget, "a shuffle would pass"


@pytest.fixture(scope="module", params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if ON_GPU and request.param == "torch":
        pytest.skip("the torch stages run on the CPU; here the index is on a GPU")
    return str(request.param)


@pytest.fixture(scope="module", params=CODECS)
def case(request: pytest.FixtureRequest, index: PlaidIndex, quantisers: dict[str, PQ], impl: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # Room for 9 passages a round, and pieces of a few passages: no search of the tests fits into one.
        patch.setattr(placement, "DENSE_SLOTS", 9 * int(index.doclens.max()))
        patch.setattr(exact, "DENSE_SLOTS", 400)
        case = Case(index, request.param, impl, quantisers.get(request.param))
        yield case
        case.engine.close()


def test_the_scorer_is_the_codecs(case: Case) -> None:
    pieces = DenseRounds if case.engine.impl == "triton" else DensePieces
    expected = {"dense": DenseScorer, "dense in pieces": pieces, "pq": PQScorer, "opq": PQScorer}[case.codec]
    scorer = case.engine._stages.exact_scorer
    assert type(scorer) is expected
    assert (case.engine.index.residuals is None) == (case.codec != "dense in pieces")
    assert case.engine.index.inv_norms is None
    if isinstance(scorer, DenseRounds):
        assert scorer._buffer.size(0) == 9 < N
        assert scorer.scratch_bytes >= scorer._buffer.nbytes


@pytest.mark.parametrize("params", MODES, ids=lambda p: f"{p.mode}{p.prefilter or ''}")
def test_scores_are_those_of_what_the_codec_stores(case: Case, params: SearchParams) -> None:
    Q = case.queries(1)[0]
    pids, scores = case.engine.search(Q, params)
    assert len(pids) >= 20
    case.check(Q, pids, scores)
    assert (scores.diff() <= 0).all()
    if params.mode == "exhaustive" and params.prefilter is None:
        best = case.oracle(Q).topk(20).values
        assert (best - scores).abs().max() <= case.budget


def test_dense_finds_what_residuals_find(case: Case, index: PlaidIndex) -> None:
    """The same embeddings: scores within both budgets of each other, and survivors of pruning are the same."""
    held = load_resident(index, DEVICE)
    if case.engine.impl == "triton":
        held = dataclasses.replace(held, centroids=held.centroids.half())
    stock = SearchEngine(held, impl=case.engine.impl)
    Q = case.queries(1)[0]
    for params in MODES[:2]:
        params = dataclasses.replace(params, k=None)
        pids, scores = case.engine.search(Q, params)
        others, theirs = stock.search(Q, params)
        assert torch.equal(pids.sort().values, others.sort().values)
        if "dense" in case.codec:
            ordered = scores[pids.argsort()], theirs[others.argsort()]
            assert (ordered[0] - ordered[1]).abs().max() <= 2 * case.budget
    stock.close()


def test_given_pids_repeat_and_may_be_empty(case: Case, index: PlaidIndex) -> None:
    empty = (index.doclens == 0).nonzero()[:, 0].tolist()
    assert empty
    given = [7, 3, 7, N - 1, 0, empty[0], 11, 12, 13, 14, 15, 16]
    Q = case.queries(1)[0]
    scores = case.engine.score_pids(Q[None], given)
    case.check(Q, torch.tensor(given), scores)
    pids, ranked = case.engine.search(Q, SearchParams(k=12), pids=given)
    case.check(Q, pids, ranked)
    assert sorted(pids.tolist()) == sorted(given)


def test_each_passage_with_its_own_query(case: Case) -> None:
    Q = case.queries(4)
    given = [5, 9, 80, 5]
    scores = case.engine.score_pids(Q, given).cpu()
    want = torch.stack([case.oracle(q)[p] for q, p in zip(Q, given)])
    assert (scores - want).abs().max() <= case.budget
    one_by_one = torch.cat([case.engine.score_pids(q[None], [p]).cpu() for q, p in zip(Q, given)])
    # The same arithmetic: products of the same rounded numbers, added up in fp32 in another order.
    assert (scores - one_by_one).abs().max() <= 2e-5
    assert (scores - one_by_one.roll(1)).abs().max() > 1e-2


def test_a_batch_equals_one_by_one(case: Case) -> None:
    Q = case.queries(9 if ON_GPU else 2)
    for q, (pids, scores) in zip(Q, case.engine.search_batch(Q, MODES[0]), strict=True):
        alone = case.engine.search(q, MODES[0])
        assert torch.equal(alone[0], pids)
        assert torch.equal(alone[1], scores)


def test_filters(case: Case) -> None:
    Q, even = case.queries(1)[0], torch.arange(N) % 2 == 0
    pids, scores = case.engine.search(Q, MODES[0], allow=even)
    assert (pids % 2 == 0).all()
    case.check(Q, pids, scores)


@pytest.mark.parametrize("lq", [1, 5, 200])
def test_a_turned_query_is_the_product_with_the_rotation(lq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "ROTATION_PRODUCTS", 3 * 16 * 16)
    g = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=g))[0]
    scorer = PQScorer.__new__(PQScorer)
    scorer.index = type("Index", (), {"pq_rotation": rotation})()
    Q = torch.randn(lq, 16, generator=g)
    assert (scorer._rotated(Q) - Q.double() @ rotation.double().T).abs().max() < 1e-5


class TestLayout:
    """What load_resident makes of a codec."""

    def test_memory_decides_how_dense_is_stored(self, index: PlaidIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        if ON_GPU:
            pytest.skip("host memory decides on a CPU only")
        whole = load_resident(index, "cpu", codec="dense")
        assert whole.embeddings is not None
        assert (whole.embeddings.dtype, whole.residuals) == (torch.float32, None)
        want = reference.decompress(
            index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits
        )
        assert (whole.embeddings - want).abs().max() < 1e-6
        needed = 4 * index.num_tokens * (1 + DIM) + index.ivf_pids.nbytes
        monkeypatch.setattr(resident, "available_memory", lambda: 2 * needed - 1)
        pieces = load_resident(index, "cpu", codec="dense")
        assert pieces.embeddings is None
        assert torch.equal(pieces.residuals, index.residuals())
        Q = want[:LQ].float()
        for params in MODES[:3]:
            a, b = (SearchEngine(held).search(Q, params) for held in (whole, pieces))
            assert torch.equal(a[0], b[0])
            assert (a[1] - b[1]).abs().max() < 2e-5

    def test_layouts_share_their_tensors(self, index: PlaidIndex, quantisers: dict[str, PQ]) -> None:
        first = load_resident(index, DEVICE)
        dense = load_resident(index, DEVICE, codec="dense", shared=[first])
        coded = load_resident(index, DEVICE, codec="pq", pq=quantisers["opq"], shared=[dense, first])
        again = load_resident(index, DEVICE, codec="pq", pq=quantisers["opq"], shared=[first, dense, coded])
        other = load_resident(index, DEVICE, codec="pq", pq=quantisers["pq"], shared=[coded])
        stock = load_resident(index, DEVICE, shared=[coded, dense, first])

        def same(a: ResidentIndex, b: ResidentIndex, *names: str) -> bool:
            return all(getattr(a, name).data_ptr() == getattr(b, name).data_ptr() for name in names)

        assert same(first, dense, "codes", "ivf_pids")
        assert same(first, coded, "codes", "ivf_pids")
        assert same(first, stock, "codes", "ivf_pids", "residuals", "inv_norms")
        assert same(coded, again, "pq_codes")
        assert not same(coded, other, "pq_codes")
        assert torch.equal(other.pq_codes.cpu(), quantisers["pq"].codes)
        assert (first.codec, dense.codec, coded.codec) == ("residual", "dense", "pq")

    def test_wrong_arguments(self, index: PlaidIndex, quantisers: dict[str, PQ]) -> None:
        with pytest.raises(ValueError, match=r"codec: expected one of \['residual', 'dense', 'pq'\], got 'opq'"):
            load_resident(index, "cpu", codec="opq")
        with pytest.raises(ValueError, match="pq: expected a product quantiser with codec 'pq', got None"):
            load_resident(index, "cpu", codec="pq")
        with pytest.raises(ValueError, match="pq: expected None with codec 'residual'"):
            load_resident(index, "cpu", pq=quantisers["pq"])

    def test_plans(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        index = read_index(make_index(tmp_path / "i", n=3000, dim=128, C=32))
        T = index.num_tokens
        whole = plan_for(index, "gpu", "dense", whole=True)
        pieces, host = plan_for(index, "gpu", "dense"), plan_for(index, "host", "dense")
        coded = plan_for(index, "gpu", "pq", pq_m=16)
        assert whole.device["embeddings"] == 256 * T
        assert pieces.device["residuals"] == 32 * T
        assert coded.device["PQ codes"] == 16 * T
        assert "residuals" not in {**whole.device, **coded.device, **host.device}
        assert not any("inverse norms" in one.device for one in (whole, pieces, host, coded))
        # 64 MB of slots, and the index's passages need fewer
        longest = int(index.doclens.max())
        room = 2 * placement.dense_passages(3000, longest) * longest * 128
        assert pieces.device["workspace"] - coded.device["workspace"] == room < 64 << 20
        monkeypatch.setattr(placement, "available_memory", lambda: 1 << 40)

        def chosen(free: int, name: str = "auto", **kwargs: Any) -> str:
            return plan(index, free, name, codec="dense", **kwargs).name

        ordered = sorted([whole, pieces, host], key=lambda one: -one.device_bytes)
        assert ordered[-1] is host
        assert chosen(whole.device_bytes) == "gpu, all decompressed"
        assert chosen(ordered[1].device_bytes, "gpu") == ordered[1].name
        assert chosen(host.device_bytes) == "host"
        assert chosen(host.device_bytes, "host") == "host"
        # What is on the device already costs nothing.
        held = {"codes": 4 * T, "embeddings": 256 * T}
        assert chosen(whole.device_bytes - 260 * T, held=held) == "gpu, all decompressed"
        with pytest.raises(RuntimeError, match=r"GPU memory: expected .* \(gpu, all decompressed\) or .* \(gpu\) or"):
            chosen(1000)
        with pytest.raises(RuntimeError, match=r"GPU memory: expected .* \(gpu\), got 1000 B free$"):
            plan(index, 1000, codec="pq", pq_m=16)
        with pytest.raises(ValueError, match=r"placement: .* \['auto', 'gpu'\] with codec 'pq', got 'disk'"):
            plan(index, 1 << 40, "disk", codec="pq", pq_m=16)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["dense", "pq"])
def test_a_plan_counts_what_a_codec_takes(index: PlaidIndex, quantisers: dict[str, PQ], codec: str) -> None:
    made = quantisers["pq"] if codec == "pq" else None
    held = load_resident(index, "cuda", codec=codec, pq=made)
    planned = plan_for(index, "gpu", codec, pq_m=16, whole=codec == "dense")
    small = held.bucket_weights.nbytes + (0 if held.pq_codebook is None else held.pq_codebook.nbytes)
    assert held.device_bytes - small == planned.device_bytes - planned.device["workspace"]


@pytest.mark.gpu
@pytest.mark.parametrize("order", [("gpu", "host"), ("host", "gpu"), ("host", "host")])
def test_placements_share_what_lies_at_the_same_place(index: PlaidIndex, order: tuple[str, str]) -> None:
    first = load_resident(index, "cuda", order[0])
    second = load_resident(index, "cuda", order[1], shared=[first])
    assert second.codes.data_ptr() == first.codes.data_ptr()
    assert second.inv_norms.data_ptr() == first.inv_norms.data_ptr()
    same = order[0] == order[1]
    for name in ("residuals", "ivf_pids"):
        assert (getattr(first, name).data_ptr() == getattr(second, name).data_ptr()) == same
        assert torch.equal(getattr(first, name).cpu(), getattr(second, name).cpu())


@pytest.mark.gpu
def test_dense_from_pinned_residuals(index: PlaidIndex) -> None:
    held = load_resident(index, "cuda", "host", codec="dense")
    assert held.residuals.is_pinned()
    on_gpu = load_resident(index, "cuda", "gpu", codec="dense")
    on_gpu.embeddings, on_gpu.residuals = None, index.residuals().cuda()
    a, b = SearchEngine(held), SearchEngine(on_gpu)
    Q = Case(index, "dense", "triton", None).queries(1)[0]
    for params in MODES:
        for x, y in zip(a.search(Q, params), b.search(Q, params)):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_no_wait_between_query_and_result(index: PlaidIndex, quantisers: dict[str, PQ], codec: str) -> None:
    from plaid_tilemaxsim.funnel import run_funnel

    case = Case(index, codec, "triton", quantisers.get(codec))
    Q = case.queries(1)[0].cuda()
    for params in MODES:
        want = case.engine.search(Q, params)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():
                ranking = run_funnel(case.engine._stages, Q, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        n = int(ranking.count) if ranking.count is not None else len(ranking.pids)
        assert torch.equal(ranking.pids[:n].cpu(), want[0])
        assert torch.equal(ranking.scores[:n].cpu(), want[1])
