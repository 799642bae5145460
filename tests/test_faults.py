"""Memory that runs out, kernels that fail, interrupts and forks in the middle of a search."""

import multiprocessing
import os
import sys

import pytest
import torch
from torch.nn.functional import normalize

from plaid_tilemaxsim import engine as engine_module
from plaid_tilemaxsim import faults
from plaid_tilemaxsim.engine import SearchEngine, SearchParams
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.stages_torch import TorchStages
from plaid_tilemaxsim.stages_triton import TritonStages
from tests.synthetic import make_index
from tests.test_engine import ON_GPU, Case, open_case

PLAID = SearchParams(k=20, ncells=4, threshold=0.3, ndocs=40)
SEARCHES = {
    "plaid": PLAID,
    "plaid, all results": SearchParams(ncells=4, threshold=0.3, ndocs=40),
    "rerank": SearchParams(k=20, ncells=4, mode="rerank"),
    "exhaustive": SearchParams(k=20, mode="exhaustive"),
    "prefilter": SearchParams(k=20, mode="exhaustive", prefilter=30),
}
ROOM = 64
TOKENS = 32 if ON_GPU else 3


@pytest.fixture(scope="module", params=["torch", "triton"])
def case(request, tmp_path_factory, device):
    if ON_GPU and request.param == "torch":
        pytest.skip("the torch stages run on the CPU; here the index is on a GPU")
    return open_case(tmp_path_factory.mktemp("index"), request.param, 2)


def stages(case: Case) -> type:
    return TritonStages if case.engine.impl == "triton" else TorchStages


def failing(monkeypatch, case: Case, step: str, fails, error) -> None:
    """The step raises ``error`` where ``fails(cap)``, cap the number of passages that it has room for."""
    stock = getattr(stages(case), step)

    def failing_step(self, *args, **kwargs):
        pids = args[2] if step == "exact" else args[1]
        if fails(self.index.num_passages if pids.pids is None else pids.pids.numel()):
            raise error
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(stages(case), step, failing_step)


def forget(case: Case) -> None:
    """Recordings of earlier tests would replay what they recorded."""
    if case.engine._device_search is not None:
        case.engine._device_search.make_room()


def assert_equal(found, expected) -> None:
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SEARCHES)
def test_out_of_memory_means_smaller_pieces(case, name, monkeypatch, caplog):
    Q, params = case.queries(1, TOKENS)[0], SEARCHES[name]
    want = case.engine.search(Q, params)
    forget(case)
    monkeypatch.setattr(engine_module, "LEAST_PIECE", 16)
    for step in ("approximate", "exact"):
        failing(monkeypatch, case, step, lambda cap: cap > ROOM, torch.OutOfMemoryError("tried to allocate 1 GiB"))
    assert_equal(case.engine.search(Q, params), want)
    assert "tried to allocate 1 GiB" in caplog.text
    assert "passages at a time" in caplog.text


def test_out_of_memory_with_given_pids(case, monkeypatch):
    Q = case.queries(1, TOKENS)[0]
    pids = [*range(100), 3, 3]
    want, scores = case.engine.search(Q, PLAID, pids=pids), case.engine.score_pids(Q[None], pids)
    forget(case)
    monkeypatch.setattr(engine_module, "LEAST_PIECE", 16)
    failing(monkeypatch, case, "exact", lambda cap: cap > ROOM, torch.OutOfMemoryError("no"))
    assert_equal(case.engine.search(Q, PLAID, pids=pids), want)
    torch.testing.assert_close(case.engine.score_pids(Q[None], pids), scores, rtol=0, atol=1e-6)


def test_out_of_memory_once(case, monkeypatch, caplog):
    """What earlier searches left is freed, and that is enough."""
    Q = case.queries(1, TOKENS)[0]
    want = case.engine.search(Q, PLAID)
    forget(case)
    left = [torch.OutOfMemoryError("no")]
    failing(monkeypatch, case, "exact", lambda cap: bool(left), left[0])
    monkeypatch.setattr(type(case.engine), "_make_room", lambda self, shortage: left.clear())
    assert_equal(case.engine.search(Q, PLAID), want)
    assert "passages at a time" not in caplog.text


def test_out_of_memory_for_good(case, monkeypatch):
    Q = case.queries(1, TOKENS)[0]
    want = case.engine.search(Q, PLAID)
    forget(case)
    with monkeypatch.context() as patch:
        failing(patch, case, "exact", lambda cap: True, torch.OutOfMemoryError("tried to allocate 7 GiB"))
        with pytest.raises(torch.OutOfMemoryError, match=r'expected room .* got tried to .*placement "host"'):
            case.engine.search(Q, PLAID)
    assert_equal(case.engine.search(Q, PLAID), want)


def test_a_batch_out_of_memory(case, monkeypatch, caplog):
    if case.engine.impl == "torch":
        pytest.skip("one by one in any case")
    Q = case.queries(3, TOKENS)
    want = [case.engine.search(q, PLAID) for q in Q]
    forget(case)
    search = case.engine._device_search
    stock = search._recording

    def recording(kind, lq, params, **options):
        if options.get("lanes", 1) > 2:
            raise torch.OutOfMemoryError("no")
        return stock(kind, lq, params, **options)

    monkeypatch.setattr(search, "_recording", recording)
    for found, expected in zip(case.engine.search_batch(Q, PLAID), want, strict=True):
        assert_equal(found, expected)
    assert "2 queries at once, not 4" in caplog.text
    caplog.clear()
    case.engine.search_batch(Q, PLAID)
    assert not ON_GPU or "queries at once" not in caplog.text, "what fits is remembered"


def test_a_batch_out_of_memory_below_the_estimate(case, monkeypatch):
    """An estimate of 4 where 8 were asked for, and 2 that fit."""
    if case.engine.impl == "torch":
        pytest.skip("one by one in any case")
    forget(case)
    search = case.engine._device_search
    tried: list[int] = []

    def recording(kind, lq, params, *, lanes):
        tried.append(lanes)
        assert len(tried) < 5
        if lanes > 2:
            raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(search, "_recording", recording)
    monkeypatch.setattr(search, "_answer", lambda rec, Q: [])
    search._lanes_that_fit[TOKENS, 8] = 4
    search.search_batch(case.queries(6, TOKENS), PLAID)
    assert tried == [4, 2]


class Interrupted(KeyboardInterrupt):
    pass


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (RuntimeError("Triton Error [CUDA]: a reason"), RuntimeError, "kernel on .*a reason.*other searches can go on"),
        (Interrupted("now"), Interrupted, "now"),
    ],
    ids=["launch failure", "interrupt"],
)
def test_a_search_that_ends_between_two_launches_leaves_nothing(case, monkeypatch, error, raised, words):
    """Candidates are marked in a bitmap that the next launch reads and clears."""
    if case.engine.impl == "torch":
        pytest.skip("keeps no state")
    from plaid_tilemaxsim.ops import candidates_kernel

    a, b = case.queries(2, TOKENS)
    want, candidates = case.engine.search(b, PLAID), case.engine.candidates(b, 1)
    if ON_GPU:  # there a recorded search is one launch
        forget(case)

    def gather_marked(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(candidates_kernel, "gather_marked", gather_marked)
        with pytest.raises(raised, match=words):
            case.engine.search(a, PLAID)
    assert torch.equal(case.engine.candidates(b, 1), candidates), "and nothing that was marked before"
    assert_equal(case.engine.search(b, PLAID), want)


def test_a_device_that_no_longer_answers(case, monkeypatch):
    """After an access outside its memory, say: no later call to CUDA succeeds in that process."""
    if case.engine.impl == "torch":
        pytest.skip("no device")

    def lost(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    forget(case)
    monkeypatch.setattr(TritonStages, "candidates", lost)
    monkeypatch.setattr(TritonStages, "clean", lost)
    with pytest.raises(RuntimeError, match=r"illegal memory access.*CUDA cannot be used any more in this process"):
        case.engine.search(case.queries(1, TOKENS)[0], PLAID)


@pytest.mark.gpu
class TestLittleMemory:
    """torch may take no more than a few MB beyond what the engine holds."""

    @pytest.fixture(scope="class")
    def engine(self, tmp_path_factory):
        path = make_index(
            tmp_path_factory.mktemp("index"), n=200_000, dim=64, C=512, mean_doclen=4.0, chunk_size=25_000
        )
        engine = SearchEngine(load_resident(read_index(path), "cuda"))
        yield engine
        engine.close()

    def test_a_batch(self, engine, caplog):
        Q = normalize(torch.randn(64, 32, 64, generator=torch.Generator().manual_seed(1)), dim=-1)
        want = engine.search_batch(Q, PLAID)
        engine._device_search.make_room()
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved() + (40 << 20)  # the buffers of 32 queries take 58 MB
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        try:
            found = engine.search_batch(Q, PLAID)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert "queries at once, not 32" in caplog.text
        for one, expected in zip(found, want, strict=True):
            assert_equal(one, expected)


def test_triton_errors_are_kernel_failures():
    from triton.runtime.errors import OutOfResources

    assert faults.is_kernel_failure(OutOfResources(1 << 20, 1 << 17, "shared memory"))
    assert not faults.is_kernel_failure(torch.OutOfMemoryError("no"))
    assert not faults.is_kernel_failure(ValueError("no"))


def test_an_allocation_that_failed_inside_a_recording():
    error = RuntimeError("capture failed")  # as CUDA ends a recording that is not valid any more
    error.__context__ = torch.OutOfMemoryError("tried to allocate 2 GiB")
    assert faults.memory_shortage(error) == "OutOfMemoryError: tried to allocate 2 GiB"
    assert faults.memory_shortage(RuntimeError("no")) is None
    assert faults.memory_shortage(ValueError("out of memory")) is None


@pytest.mark.parametrize("words", ["Triton Error [CUDA]: out of memory", "CUDA error: out of memory"])
def test_the_driver_out_of_memory(case, monkeypatch, words):
    """It loads kernels and graphs into memory that torch knows nothing of."""
    if case.engine.impl == "torch":
        pytest.skip("no driver")
    Q = case.queries(1, TOKENS)[0]
    want = case.engine.search(Q, PLAID)
    forget(case)
    left = [RuntimeError(words)]
    failing(monkeypatch, case, "exact", lambda cap: bool(left), left[0])
    monkeypatch.setattr(type(case.engine), "_make_room", lambda self, shortage: left.clear())
    assert_equal(case.engine.search(Q, PLAID), want)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_closed_engine_says_so(tmp_path, device, impl):
    if ON_GPU and impl == "torch":
        pytest.skip("the torch stages run on the CPU")
    engine = open_case(tmp_path, impl, 2).engine
    engine.close()
    engine.close()
    Q = torch.ones(1, 4, 64) / 8
    for call in (
        lambda: engine.search(Q[0], PLAID),
        lambda: engine.search_batch(Q, PLAID),
        lambda: engine.score_pids(Q, [1]),
        lambda: engine.index,
    ):
        with pytest.raises(ValueError, match="expected an open one, got one that was closed"):
            call()
    with pytest.raises(AttributeError, match="'SearchEngine' object has no attribute 'indx'"):
        engine.indx  # noqa: B018


def in_a_fork(check) -> str:
    """What ``check`` says in a forked child, or its error's text."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            sender.send(str(check()))
        except Exception as error:  # noqa: BLE001
            sender.send(f"{type(error).__name__}: {error}")
        os._exit(0)
    os.waitpid(child, 0)
    return receiver.recv()


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
class TestFork:
    def test_after_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert in_a_fork(faults.check_fork).startswith("RuntimeError: CUDA: expected a process of its own")
        assert 'multiprocessing.get_context("spawn")' in in_a_fork(faults.check_fork)
        faults.check_fork()

    @pytest.mark.skipif(ON_GPU, reason="this process uses CUDA")
    def test_without_cuda(self):
        assert in_a_fork(faults.check_fork) == "None"

    @pytest.mark.gpu
    def test_an_engine_of_the_parent(self, case):
        Q = case.queries(1, TOKENS)[0]
        want = case.engine.search(Q, PLAID)
        assert "spawn" in in_a_fork(lambda: case.engine.search(Q, PLAID))
        assert_equal(case.engine.search(Q, PLAID), want)
