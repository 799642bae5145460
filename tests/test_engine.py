"""The engine against set arithmetic and float64 scores, with both sets of stages."""

import dataclasses
import threading

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim import engine as engine_module
from plaid_tilemaxsim import exact
from plaid_tilemaxsim.engine import SearchEngine, with_defaults
from plaid_tilemaxsim.funnel import MOST_PRECISE, Pids, SearchParams, run_funnel, run_shard
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.mapped import MappedRows
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.ops import reference
from tests.synthetic import make_index

# |ours - exact| at 32 unit query tokens. Kernels: half a step of the 16-bit centroid table (1.5e-5) and fp16 rounding
# of weights and query (about 1e-5 a token) each times 32 at worst; torch: fp32 sums of a few hundred terms.
BUDGET = {"triton": 2e-3, "torch": 2e-5}
# Mode "plaid": see ragged.fp32_tolerance, for scores of up to 32.
PLAID_BUDGET = 4e-5

# Triton's interpreter takes milliseconds for every program; a GPU can have the shapes that it will meet.
ON_GPU = torch.cuda.is_available()
N, LQ = (3000, 32) if ON_GPU else (130, 8)


@dataclasses.dataclass
class Case:
    engine: SearchEngine
    index: PlaidIndex
    nbits: int

    def queries(self, n: int, lq: int = LQ) -> Tensor:
        """Unit vectors near tokens of the index, so that candidates and thresholds mean something."""
        ix = self.index
        g = torch.Generator().manual_seed(n * 1000 + lq)
        rows = torch.randint(0, ix.num_tokens, (n, lq), generator=g).flatten()
        D = reference.decompress(
            ix.codes()[rows], ix.residuals()[rows], ix.centroids, ix.bucket_weights, ix.nbits, torch.float32
        )
        noise = torch.randn(D.shape, generator=g) / D.size(1) ** 0.5
        return torch.nn.functional.normalize(D + 0.7 * noise, dim=-1).view(n, lq, -1)

    def exact(self, Q: Tensor) -> Tensor:
        ix = self.index
        return reference.residual_maxsim(
            Q, ix.codes(), ix.residuals(), ix.centroids, ix.bucket_weights, ix.nbits, ix.offsets
        )

    def approximate(self, Q: Tensor, threshold: float | None) -> Tensor:
        ix = self.index
        return reference.centroid_maxsim(Q, ix.codes(), ix.centroids, ix.offsets, None, threshold)

    def candidates(self, Q: Tensor, ncells: int) -> Tensor:
        ix = self.index
        cells = (ix.centroids.double() @ Q.double().T).topk(ncells, dim=0).indices.flatten().unique()
        lists = [ix.ivf_pids[ix.ivf_offsets[c] : ix.ivf_offsets[c + 1]] for c in cells.tolist()]
        return torch.cat(lists).unique()


def open_case(folder, impl, nbits):
    index = read_index(make_index(folder, n=N, dim=64, nbits=nbits, C=32, seed=nbits, chunk_size=100))
    resident = load_resident(index, torch.device("cuda" if ON_GPU else "cpu"))
    if impl == "triton":  # kernels read fp16 centroids, also in the interpreter
        resident = dataclasses.replace(resident, centroids=resident.centroids.half())
    return Case(SearchEngine(resident, impl=impl), index, nbits)


@pytest.fixture(scope="module", params=["torch", "triton"])
def case(request, tmp_path_factory, device):
    if ON_GPU and request.param == "torch":
        pytest.skip("the torch stages run on the CPU; here the index is on a GPU")
    return open_case(tmp_path_factory.mktemp("index"), request.param, 2)


def check_scores(case: Case, Q: Tensor, found: tuple[Tensor, Tensor], budget: float | None = None) -> None:
    pids, scores = found
    budget = BUDGET[case.engine.impl] if budget is None else budget
    true = case.exact(Q)[pids.long()]
    assert (true - scores).abs().max() <= budget
    assert (scores.diff() <= 0).all()
    if len(scores) > 3:  # the same scores in another order are wrong
        assert (true - scores.roll(1)).abs().max() > budget


@pytest.mark.parametrize("ncells", [1, 3])
@pytest.mark.parametrize("lq", [1, 5, LQ])
def test_candidates_are_the_union_of_the_probed_lists(case, ncells, lq):
    for Q in case.queries(2, lq):
        assert torch.equal(case.engine.candidates(Q, ncells).cpu(), case.candidates(Q, ncells))


@pytest.mark.parametrize("nbits", [1, 4])
def test_other_widths_of_residuals(nbits, tmp_path, device):
    case = open_case(tmp_path, "triton", nbits)
    Q = case.queries(1)[0]
    found = case.engine.search(Q, SearchParams(k=20, ncells=2, threshold=0.3, ndocs=64))
    check_scores(case, Q, found, PLAID_BUDGET)


@pytest.mark.parametrize("piece", [1 << 20, 100])
def test_residuals_left_in_the_files(piece, tmp_path, device, monkeypatch):
    """The same bits as from memory, also when the rows come in several pieces and from several chunks."""
    monkeypatch.setattr(exact, "PIECE_TOKENS", piece)
    held = open_case(tmp_path, "triton", 2)
    resident = held.engine.index
    mapped = SearchEngine(dataclasses.replace(resident, residuals=MappedRows(held.index.chunks)), impl="triton")
    Q = held.queries(1)[0]
    for params in (
        SearchParams(k=20, ncells=2, threshold=0.3, ndocs=64),
        SearchParams(k=20, ncells=2, threshold=0.3, ndocs=4 * MOST_PRECISE + 4),
        SearchParams(k=None, mode="rerank"),
        SearchParams(k=9, mode="exhaustive"),
    ):
        a, b = held.engine.search(Q, params), mapped.search(Q, params)
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    given = [N - 1, 3, 3, 0]
    assert torch.equal(mapped.score_pids(Q[None], given), held.engine.score_pids(Q[None], given))


def test_exhaustive_finds_the_exact_top(case):
    for Q in case.queries(2):
        pids, scores = case.engine.search(Q, SearchParams(k=20, mode="exhaustive"))
        check_scores(case, Q, (pids, scores))
        best = case.exact(Q).topk(20).values
        assert (best - scores).abs().max() <= BUDGET[case.engine.impl]


def test_rerank_scores_every_candidate(case):
    Q = case.queries(1)[0]
    pids, scores = case.engine.search(Q, SearchParams(k=None, ncells=1, mode="rerank"))
    assert torch.equal(pids.sort().values, case.candidates(Q, 1))
    check_scores(case, Q, (pids, scores))


@pytest.mark.parametrize(("threshold", "ndocs"), [(0.3, 64), (0.5, 40), (-1.0, 80), (0.99, 64)])
def test_plaid_keeps_what_two_prunings_keep(case, threshold, ndocs):
    compared = 0
    for Q in case.queries(4):
        pids, scores = case.engine.search(Q, SearchParams(k=None, ncells=2, threshold=threshold, ndocs=ndocs))
        check_scores(case, Q, (pids, scores), PLAID_BUDGET)
        kept, clear = case.candidates(Q, 2).long(), True
        for limit, cut in ((threshold, ndocs), (None, ndocs // 4)):
            approximate = case.approximate(Q, limit)[kept]
            order = approximate.sort(descending=True, stable=True)
            # Sets are comparable where the cut is clear of rounding; equal scores go by pid.
            clear &= len(kept) <= cut or not 0 < order.values[cut - 1] - order.values[cut] < 1e-3
            kept = kept[order.indices[:cut].sort().values]
        if clear:
            compared += 1
            assert torch.equal(pids.sort().values.long(), kept)
    assert compared >= 2


def test_survivors_of_plaid_are_scored_in_fp32(case):
    """By the parameters alone: not by how many candidates there are, nor by who generates them."""
    asked = []

    class Asked:
        """The stages, and what their exact step is asked for."""

        def __getattr__(self, name):
            return getattr(case.engine._stages, name)

        def exact(self, Q, cs, pids, precise):
            asked.append(precise)
            return case.engine._stages.exact(Q, cs, pids, precise)

        def exact_of_plausible(self, Q, cs, pids, precise, *columns):
            asked.append(precise)
            return case.engine._stages.exact_of_plausible(Q, cs, pids, precise, *columns)

    Q = case.queries(1)[0].to(case.engine.device)
    some = Pids(torch.arange(0, N, 2, dtype=torch.int32, device=case.engine.device))
    few, most, more = (SearchParams(k=9, ndocs=n) for n in (4, 4 * MOST_PRECISE + 3, 4 * MOST_PRECISE + 4))
    wide = [dataclasses.replace(few, mode=mode, prefilter=p) for mode, p in (("rerank", None), ("exhaustive", 40))]
    for params, precise in ((few, True), (most, True), (more, False), *((params, False) for params in wide)):
        for source in ({}, {"candidates": some}, {"given": some}):
            run_funnel(Asked(), Q, params, **source)
            assert asked.pop() == (precise and "given" not in source)
        if params.mode != "rerank":
            run_shard(Asked(), Q, params)
            assert asked.pop() == precise
    assert not asked


def test_two_pass_exhaustive_keeps_the_best_by_centroids(case):
    Q = case.queries(1)[0]
    pids, scores = case.engine.search(Q, SearchParams(k=5, mode="exhaustive", prefilter=50))
    check_scores(case, Q, (pids, scores))
    best = case.approximate(Q, None).topk(50)
    slack = best.values[-1] - 1e-3
    assert (case.approximate(Q, None)[pids.long()] >= slack).all()


def test_given_pids_are_scored_with_duplicates_and_ties_by_pid(case):
    Q = case.queries(1)[0]
    given = [7, 3, 7, 125, 0]
    pids, scores = case.engine.search(Q, SearchParams(k=10), pids=given)
    assert sorted(pids.tolist()) == sorted(given)
    check_scores(case, Q, (pids, scores))
    assert torch.equal(case.engine.score_pids(Q[None], pids).cpu(), scores)
    assert case.engine.search(Q, SearchParams(k=10), pids=[])[0].numel() == 0


def test_each_passage_with_its_own_query(case):
    Q = case.queries(3)
    scores = case.engine.score_pids(Q, [5, 9, 100]).cpu()
    want = torch.stack([case.exact(q)[p] for q, p in zip(Q, (5, 9, 100))])
    assert (scores - want).abs().max() <= BUDGET["torch"]


def test_filters_apply_before_pruning(case):
    Q = case.queries(1)[0]
    even = torch.arange(N) % 2 == 0
    for mode in ("plaid", "rerank", "exhaustive"):
        params = SearchParams(k=12, ncells=3, threshold=0.2, ndocs=80, mode=mode)
        masked = case.engine.search(Q, params, allow=even)
        listed = case.engine.search(Q, params, allow=even.nonzero()[:, 0])
        called = case.engine.search(Q, params, filter_fn=lambda pids: pids[pids % 2 == 0])
        assert (masked[0] % 2 == 0).all()
        assert len(masked[0]) > 3
        for other in (listed, called):
            assert torch.equal(masked[0], other[0])
            assert torch.equal(masked[1], other[1])
    nothing = case.engine.search(Q, SearchParams(k=12), filter_fn=lambda pids: pids[:0])
    assert nothing[0].numel() == nothing[1].numel() == 0


def test_a_first_search_in_inference_mode_leaves_nothing_behind(case):
    Q, params = case.queries(1)[0], SearchParams(k=3, ncells=1, ndocs=40)  # parameters of no other test
    with torch.inference_mode():
        first = case.engine.search(Q, params)
    again = case.engine.search(Q, params)
    assert torch.equal(first[0], again[0])


def test_layouts_and_types_of_a_query(case):
    Q, params = case.queries(1)[0], SearchParams(k=5, ncells=2, threshold=0.3, ndocs=64)
    want = case.engine.search(Q, params)
    for same in (Q.t().contiguous().t(), Q.double(), torch.stack([Q, Q], -1)[..., 0]):
        got = case.engine.search(same, params)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    if case.engine.impl == "triton":
        with pytest.raises(ValueError, match="expected unit vectors"):
            case.engine.search(Q * 1e6, params)


def test_a_batch_equals_one_by_one(case):
    Q = case.queries(11 if ON_GPU else 3)
    params = SearchParams(k=7, ncells=2, threshold=0.3, ndocs=64)
    for q, (pids, scores) in zip(Q, case.engine.search_batch(Q, params), strict=True):
        alone = case.engine.search(q, params)
        assert torch.equal(alone[0], pids)
        assert torch.equal(alone[1], scores)


def test_a_batch_of_more_launches_than_lie_in_host_memory(case, monkeypatch):
    """Launches of 2 queries, 2 launches ahead of the answers, the last one half empty."""
    if case.engine.impl == "torch":
        pytest.skip("one by one in any case")
    from plaid_tilemaxsim import device_search

    monkeypatch.setattr(device_search, "BATCH_LANES", 2)
    monkeypatch.setattr(device_search, "MOST_AHEAD", 2)
    Q, params = case.queries(5), SearchParams(k=7, ncells=2, threshold=0.3, ndocs=64)
    found = case.engine.search_batch(Q, params)
    assert len(found) == len(Q)
    for q, (pids, scores) in zip(Q, found, strict=True):
        alone = case.engine.search(q, params)
        assert torch.equal(alone[0], pids)
        assert torch.equal(alone[1], scores)


@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 0, 3], [2, 1, 2], [0, 0], [3]], ids=str)
@pytest.mark.parametrize("columns", [2, 3])
def test_answers_are_unpacked_alike_whether_there_is_room_for_them(device, counts, columns):
    from plaid_tilemaxsim.device_search import Room, unpacked

    rows = torch.arange(len(counts) * (1 + 4 * columns), dtype=torch.int32).view(len(counts), -1)
    rows[:, 0] = torch.tensor(counts)
    for room in (None, Room(len(counts), columns, 4)):
        found = unpacked(rows, columns, room)
        assert len(found) == len(counts)
        for n, row, (pids, *scores) in zip(counts, rows, found, strict=True):
            for i, column in enumerate([pids, *(score.view(torch.int32) for score in scores)]):
                assert torch.equal(column, row[1 + 4 * i : 1 + 4 * i + n])
            assert all(score.dtype == torch.float32 for score in scores)
    kept = [[column.clone() for column in answer] for answer in found]
    rows.fill_(1)  # as the next launch does
    assert all(torch.equal(a, b) for one, other in zip(found, kept) for a, b in zip(one, other, strict=True))


def test_queries_are_checked_in_whole_batches(case):
    """More values than torch has one thread take the norm of."""
    Q = torch.nn.functional.normalize(torch.ones(20, 32, 64), dim=-1)
    assert case.engine._check_query(Q, 3) is not None
    assert engine_module._norm(Q) == pytest.approx(640**0.5, rel=1e-5)
    Q[19, 31, 63] = torch.inf
    with pytest.raises(ValueError, match="finite"):
        case.engine.search_batch(Q, SearchParams())
    if case.engine.impl == "triton":
        with pytest.raises(ValueError, match="expected unit vectors"):
            case.engine.search_batch(torch.full((20, 32, 64), 1e6), SearchParams())


def test_more_query_tokens_than_take_part_in_pruning(case):
    Q = case.queries(1, LQ + 8)[0]
    short = SearchParams(k=None, ncells=1, threshold=0.3, ndocs=64, query_maxlen=LQ)
    pids, scores = case.engine.search(Q, short)
    first = case.engine.search(Q[:LQ], short)[0]
    assert torch.equal(pids.sort().values, first.sort().values)
    assert (case.exact(Q)[pids.long()] - scores).abs().max() <= PLAID_BUDGET * (LQ + 8) / LQ


def test_threads_get_what_a_single_caller_gets(case):
    Q = case.queries(4)
    params = SearchParams(k=7, ncells=2, threshold=0.3, ndocs=64)
    want = [case.engine.search(q, params) for q in Q]
    wrong = []

    def work(i: int) -> None:
        pids, scores = case.engine.search(Q[i], params)
        if not (torch.equal(pids, want[i][0]) and torch.equal(scores, want[i][1])):
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda e: e.search(torch.ones(4, 63), SearchParams()), ValueError, "DIM 64"),
        (lambda e: e.search(torch.ones(0, 64), SearchParams()), ValueError, "at least one query token"),
        (lambda e: e.search(torch.full((4, 64), torch.nan), SearchParams()), ValueError, "finite"),
        (lambda e: e.search(torch.ones(4, 64, dtype=torch.int32), SearchParams()), ValueError, "floating-point"),
        (lambda e: e.search(torch.ones(4, 64), SearchParams(ncells=33)), ValueError, "32 centroids"),
        (lambda e: e.search(torch.ones(4, 64), SearchParams(), pids=[3, N]), IndexError, f"got {N}"),
        (lambda e: e.search(torch.ones(4, 64), SearchParams(), pids=[-1]), IndexError, "got -1"),
        (lambda e: e.search(torch.ones(4, 64), SearchParams(), filter_fn=lambda p: p.tolist()), ValueError, "tensor"),
        (lambda e: e.search(torch.ones(4, 64), SearchParams(), filter_fn=lambda p: p.long()), ValueError, "int32"),
        (lambda e: e.search(torch.ones(4, 64), SearchParams(), allow=torch.ones(9).bool()), ValueError, f"{N}"),
        (lambda e: e.score_pids(torch.ones(2, 4, 64), [1, 2, 3]), ValueError, "3 pids, got 2"),
        (lambda e: e.search(torch.ones(4, 64, device="meta"), SearchParams()), ValueError, "on meta"),
        (lambda e: e.search(torch.ones(1025, 64), SearchParams()), ValueError, "at most 1024 query tokens, got 1025"),
        (lambda e: e.warmup(-1, SearchParams()), ValueError, "lq: expected 1..1024 query tokens, got -1"),
    ],
)
def test_bad_calls_are_named(case, call, error, words):
    with pytest.raises(error, match=words):
        call(case.engine)


@pytest.mark.parametrize(
    ("field", "value"),
    [("k", 0), ("ncells", 0), ("ndocs", 3), ("mode", "fast"), ("prefilter", 0), ("k", 2.0), ("threshold", "0.4")],
)
def test_bad_parameters_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SearchParams(**{field: value})


def test_defaults_follow_k_and_explicit_values_win():
    assert (with_defaults(10).ncells, with_defaults(10).threshold, with_defaults(10).ndocs) == (1, 0.5, 256)
    assert (with_defaults(100).ncells, with_defaults(100).threshold, with_defaults(100).ndocs) == (2, 0.45, 1024)
    assert (with_defaults(1000).ncells, with_defaults(1000).threshold, with_defaults(1000).ndocs) == (4, 0.4, 4096)
    assert with_defaults(2000).ndocs == 8000
    assert with_defaults(10, ncells=7, ndocs=None).ncells == 7


def test_asking_for_an_implementation_the_device_lacks():
    class Index:
        device = torch.device("cuda")

    with pytest.raises(ValueError, match="impl"):
        SearchEngine(Index(), impl="torch")
    with pytest.raises(ValueError, match="auto, triton or torch"):
        SearchEngine(Index(), impl="cuda")
