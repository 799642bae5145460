"""What only a GPU can show: searches that never wait, never recompile, and repeat bit for bit."""

import pytest
import torch

from plaid_tilemaxsim.engine import SearchEngine, SearchParams, with_defaults
from plaid_tilemaxsim.funnel import MOST_PRECISE
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from tests.synthetic import make_index

pytestmark = pytest.mark.gpu

MODES = [
    SearchParams(k=10, ncells=2, threshold=0.3, ndocs=256),
    SearchParams(k=10, ncells=2, threshold=0.3, ndocs=4 * MOST_PRECISE + 4),
    SearchParams(k=100, ncells=4, mode="rerank"),
    SearchParams(k=100, mode="exhaustive"),
    SearchParams(k=10, mode="exhaustive", prefilter=300),
]


def queries(n: int, lq: int = 32, dim: int = 64, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(n, lq, dim, generator=g), dim=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("index"), n=20_000, dim=64, C=512, chunk_size=25_000)


@pytest.fixture(scope="module")
def engine(folder):
    engine = SearchEngine(load_resident(read_index(folder), "cuda"))
    yield engine
    engine.close()


@pytest.mark.parametrize("params", MODES, ids=str)
def test_nothing_waits_for_the_device_between_query_and_result(engine, params):
    """The steps as they run without a graph: any hidden wait (an .item(), a copy to pageable memory) raises."""
    from plaid_tilemaxsim.funnel import run_funnel

    stages = engine._device_search.stages
    Q = queries(1)[0].cuda()
    want = engine.search(Q, params)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            ranking = run_funnel(stages, Q, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    n = int(ranking.count)
    assert torch.equal(ranking.pids[:n].cpu(), want[0])
    assert torch.equal(ranking.scores[:n].cpu(), want[1])


def compilations() -> dict[str, int]:
    """Compiled variants of our kernels in this process, by kernel."""
    from triton.runtime.jit import JITFunction

    from plaid_tilemaxsim.ops import (
        candidates_kernel,
        centroid_kernel,
        centroid_scores_kernel,
        pids_kernel,
        rank_kernel,
        residual_fast_kernel,
        residual_fp32_kernel,
        residual_kernel,
        select_kernel,
    )

    modules = (candidates_kernel, centroid_kernel, centroid_scores_kernel, pids_kernel, rank_kernel,
               residual_fast_kernel, residual_fp32_kernel, residual_kernel, select_kernel)  # fmt: skip
    kernels = {
        f"{module.__name__}.{name}": f
        for module in modules
        for name, f in vars(module).items()
        if isinstance(f, JITFunction)
    }
    return {name: sum(len(caches[0]) for caches in f.device_caches.values()) for name, f in kernels.items()}


def test_200_varied_queries_compile_nothing(engine):
    params = with_defaults(100)
    engine.warmup(32, params)
    engine.search(queries(1)[0], params, pids=[3])
    engine.candidates(queries(1)[0], params.ncells)
    before = compilations()
    assert sum(before.values()) > 5
    counts = set()
    for i, Q in enumerate(queries(200, seed=1)):
        # from one distinct token to 32: between a handful and thousands of candidates
        Q[1 + i % 32 :] = Q[0]
        counts.add(engine.candidates(Q, params.ncells).numel())
        engine.search(Q, params)
        engine.search(Q, params, pids=list(range(1 + i)))
    assert len(counts) > 50
    assert compilations() == before


@pytest.mark.parametrize("params", MODES, ids=str)
def test_a_repeated_search_is_equal_to_the_bit(engine, params):
    for Q in queries(5, seed=2):
        first = engine.search(Q, params)
        for _ in range(5):
            again = engine.search(Q, params)
            assert torch.equal(again[0], first[0])
            assert torch.equal(again[1], first[1])


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_other_placements_find_the_same(folder, engine, placement):
    hosted = SearchEngine(load_resident(read_index(folder), "cuda", placement))
    assert hosted.index.placement == placement
    for params in MODES:
        for Q in queries(3, seed=3):
            a, b = engine.search(Q, params), hosted.search(Q, params)
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[1], b[1])
    hosted.close()


def test_queries_on_host_and_device_and_other_streams_agree(engine):
    Q, params = queries(1, seed=4)[0], MODES[0]
    want = engine.search(Q, params)
    for other in (Q.cuda(), Q.half().float(), Q.t().contiguous().t()):
        got = engine.search(other, params)
        if other.dtype == Q.dtype and torch.equal(other.cpu(), Q):
            assert torch.equal(got[0], want[0])
    with torch.cuda.stream(torch.cuda.Stream()):
        got = engine.search(Q, params)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_pid_outside_the_index_is_found_on_the_device(engine):
    pids = torch.arange(100, dtype=torch.int32, device="cuda")
    want = engine.score_pids(queries(1), pids)
    for wrong in (-1, 20_000):
        spoiled = pids.clone()
        spoiled[37] = wrong
        with pytest.raises(IndexError, match=f"got {wrong}"):
            engine.score_pids(queries(1), spoiled)
    assert torch.equal(engine.score_pids(queries(1), pids), want)


def test_close_gives_the_memory_back(folder):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = SearchEngine(load_resident(read_index(folder), "cuda"))
    engine.search(queries(1)[0], MODES[0])
    assert torch.cuda.memory_allocated() > before + 1_000_000
    engine.close()
    del engine
    assert torch.cuda.memory_allocated() <= before + 100_000
