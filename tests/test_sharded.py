"""Several devices against one: the same passages, scores and order to the bit, in every mode and with every filter.

Without a GPU the CPU stands in for all devices, with one it does: its shards have streams and graphs of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim import device_search, sharded, stages_triton
from plaid_tilemaxsim.engine import SearchEngine
from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.graphs import collect, empty_cache
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.lists import build_pid_lists
from plaid_tilemaxsim.index.pq import PQ
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.index.shards import ShardedIndex, load_shards, parts_of, with_inverse_norms
from plaid_tilemaxsim.ops import reference
from plaid_tilemaxsim.replicas import Replicas, build_engine, resolve_devices
from plaid_tilemaxsim.sharded import ShardedEngine
from tests.synthetic import make_index, make_queries

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
N, LQ, DIM = (6000, 32, 64) if ON_GPU else (80, 8, 64)
PLAID: dict[str, Any] = {"ncells": 2, "threshold": 0.3}
MODES = [
    SearchParams(k=10, ndocs=32, **PLAID),
    SearchParams(k=3, ndocs=4, **PLAID),
    SearchParams(k=None, ndocs=100, query_maxlen=LQ - 2, **PLAID),
    SearchParams(k=N + 7, ndocs=4 * N, **PLAID),
    SearchParams(k=10, ndocs=64, ncells=2, threshold=1.5),  # all codes are pruned: every score of the first cut is -inf
    SearchParams(k=10, mode="rerank", **PLAID),
    SearchParams(k=None, mode="rerank", **PLAID),
    SearchParams(k=10, mode="exhaustive"),
    SearchParams(k=N + 7, mode="exhaustive"),
    SearchParams(k=10, mode="exhaustive", prefilter=20),
]

Answer = tuple[Tensor, Tensor]


def same(a: Answer, b: Answer) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1].view(torch.int32), b[1].view(torch.int32))


def interpreted(impl: str) -> bool:
    return impl == "triton" and not ON_GPU


def from_tensors(index: PlaidIndex, codes: Tensor, residuals: Tensor, doclens: Tensor) -> PlaidIndex:
    pids, offsets = build_pid_lists([(codes, doclens)], index.num_centroids)
    return PlaidIndex.from_tensors(
        nbits=index.nbits, centroids=index.centroids, bucket_cutoffs=index.bucket_cutoffs,
        bucket_weights=index.bucket_weights, codes=codes, residuals=residuals, doclens=doclens, ivf=pids,
        ivf_lengths=offsets.diff(),
    )  # fmt: skip


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> PlaidIndex:
    """Every passage is there twice, half an index apart: all scores tie, at the cuts too, across shards."""
    half = read_index(make_index(tmp_path_factory.mktemp("index"), n=N // 2, dim=DIM, C=32, chunk_size=50, empty=0.05))
    twice = ([part, part] for part in (half.codes(), half.residuals(), half.doclens))
    return from_tensors(half, *map(torch.cat, twice))


@pytest.fixture(scope="session")
def queries(index: PlaidIndex) -> Tensor:
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, index.num_tokens, (3 * LQ,), generator=g)
    near = index.centroids[index.codes()[rows].long()].float() + torch.randn(3 * LQ, DIM, generator=g) / 16
    return torch.nn.functional.normalize(near, dim=-1).view(3, LQ, DIM)


def engines(index: PlaidIndex, impl: str, n: int, codec: str = "residual", pq: PQ | None = None) -> Any:
    """(engine of one device, engine of n shards)."""
    one = load_resident(index, DEVICE, codec=codec, pq=pq)
    cut = load_shards(index, [DEVICE] * n, codec=codec, pq=pq)
    if interpreted(impl):  # as on a GPU: centroids in fp16, norms in 16 bits

        def like_a_gpu(shards: list[Any]) -> list[Any]:
            shards = [dataclasses.replace(shard, centroids=shard.centroids.half()) for shard in shards]
            if codec != "residual":
                return shards
            return with_inverse_norms([dataclasses.replace(shard, inv_norms=None) for shard in shards])

        one, cut = like_a_gpu([one])[0], ShardedIndex(tuple(like_a_gpu(list(cut.shards))), cut.starts)
    return SearchEngine(one, impl=impl), ShardedEngine(cut, impl=impl)


@pytest.fixture(scope="module", params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if ON_GPU and request.param == "torch":
        pytest.skip("the torch stages run on the CPU; here the index is on a GPU")
    return str(request.param)


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def pair(request: pytest.FixtureRequest, index: PlaidIndex, impl: str) -> Any:
    if interpreted(impl) and request.param != 3:
        pytest.skip("Triton's interpreter takes a second a search; there 3 shards are enough")
    one, several = engines(index, impl, request.param)
    assert len(several.index.shards) == request.param
    return one, several


@pytest.mark.parametrize("params", MODES, ids=str)
def test_modes(pair: Any, queries: Tensor, params: SearchParams) -> None:
    one, several = pair
    slow = interpreted(one.impl)
    wanted = [one.search(q, params) for q in queries[: 2 if slow else 3]]
    assert all(same(several.search(q, params), want) for q, want in zip(queries, wanted[: 1 if slow else 3]))
    # equal answers mean something: other queries have others
    assert not same(wanted[0], wanted[1])
    if not slow or params == MODES[0]:
        assert all(map(same, several.search_batch(queries[: len(wanted)], params), wanted))


@pytest.mark.parametrize("params", [MODES[0], MODES[5], MODES[7], MODES[9]], ids=str)
def test_filters(pair: Any, queries: Tensor, params: SearchParams) -> None:
    one, several = pair
    if interpreted(one.impl) and params not in (MODES[0], MODES[7]):
        pytest.skip("slow in Triton's interpreter")
    seen: list[Tensor] = []

    def odd(pids: Tensor) -> Tensor:
        seen.append(pids)
        return pids[pids % 2 == 1].flip(0)

    Q = queries[0]
    mask = torch.rand(N, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[: int(0.6 * N)] = False  # no candidates in the first shard or two
    masks = [mask, mask.nonzero()[:, 0], torch.zeros(N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)]
    for allow in masks[: 1 if interpreted(one.impl) else 4]:
        assert same(several.search(Q, params, allow=allow), one.search(Q, params, allow=allow))
        assert same(*(engine.search(Q, params, allow=allow, filter_fn=odd) for engine in (several, one)))

    assert all(torch.equal(*both) for both in zip(seen[::2], seen[1::2], strict=True))
    assert all(pids.dtype == torch.int32 and pids.device == torch.device(DEVICE) for pids in seen)
    found, wanted = (engine.search_batch(queries[:1], params, allow=mask) for engine in (several, one))
    assert all(map(same, found, wanted))


def test_given_pids(pair: Any, queries: Tensor, index: PlaidIndex) -> None:
    one, several = pair
    empty = int((index.doclens == 0).nonzero()[0])
    wanted = [N - 1, 3, 3, empty, 0, N // 2, 3 + N // 2]
    for params in (SearchParams(k=None), MODES[0]):
        for pids in (wanted, [5], [], torch.tensor(wanted))[: 1 if interpreted(one.impl) else 4]:
            assert same(several.search(queries[0], params, pids=pids), one.search(queries[0], params, pids=pids))
    for pids in (wanted, list(range(N)), []):
        assert torch.equal(several.score_pids(queries[:1], pids), one.score_pids(queries[:1], pids))
    aligned = queries[[0, 1, 2, 0, 1, 2, 0]]
    assert torch.equal(several.score_pids(aligned, wanted), one.score_pids(aligned, wanted))
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"expected 0 .. {N - 1}, got {wrong}"):
            several.score_pids(queries[:1], torch.tensor([0, wrong], dtype=torch.int32, device=DEVICE))


def test_candidates(pair: Any, queries: Tensor) -> None:
    one, several = pair
    for Q in queries[:2]:
        found = several.candidates(Q, 3)
        assert found.device == torch.device(DEVICE)
        assert torch.equal(found, one.candidates(Q, 3))


def test_survivors_are_those_of_one_shard_of_many(pair: Any, queries: Tensor) -> None:
    """A host with several devices can be one shard of a cluster."""
    from plaid_tilemaxsim.merge import merge

    one, several = pair
    if interpreted(one.impl):
        queries = queries[:1]
    for params in (MODES[0], MODES[5], MODES[9]):
        for Q, survivors in zip(queries, several.survivors(queries, params), strict=True):
            assert same(merge([survivors], params), one.search(Q, params))


@pytest.mark.parametrize("seed", range(4))
def test_any_cut_and_any_parameters(index: PlaidIndex, queries: Tensor, seed: int) -> None:
    """Shards of any sizes, among them of one passage and of empty ones."""
    g = torch.Generator().manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    cuts = torch.randperm(N - 1, generator=g)[: draw(1, 3, 9)].add(1).sort().values.tolist()
    bounds = [0, *cuts, N]
    shards = [load_resident(part, DEVICE, norms=False) for part in parts_of(index, bounds)]
    one = SearchEngine(load_resident(index, DEVICE))
    several = ShardedEngine(ShardedIndex(tuple(with_inverse_norms(shards)), tuple(bounds[:-1])))
    for _ in range(30):
        mode = draw("plaid", "plaid", "rerank", "exhaustive")
        params = SearchParams(
            k=draw(None, 1, 5, 50, 2 * N), ncells=draw(1, 2, 7), threshold=draw(-1.0, 0.3, 0.6, 2.0),
            ndocs=draw(4, 7, 30, 64, 1000), query_maxlen=draw(None, 3, LQ), mode=mode,
            prefilter=draw(None, 1, 20) if mode == "exhaustive" else None,
        )  # fmt: skip
        filters: dict[str, Any] = draw(
            {},
            {"allow": torch.rand(N, generator=g) < draw(0.02, 0.5)},
            {"pids": torch.randint(N, (draw(1, 20),), generator=g)},
            {"filter_fn": lambda pids: pids[::3]},
        )
        Q = draw(*queries)[: draw(1, 5, LQ)]
        assert same(several.search(Q, params, **filters), one.search(Q, params, **filters)), (bounds, params, filters)


def test_threads(index: PlaidIndex, queries: Tensor) -> None:
    one, several = engines(index, "auto", 3)
    copies = build_engine(index, [[torch.device(DEVICE)] * 2] * 2)
    wanted = {params: [one.search(q, params) for q in queries] for params in (MODES[0], MODES[7])}

    def work(i: int) -> bool:
        params, engine = list(wanted)[i % 2], (several, copies)[i // 2 % 2]
        return all(
            same(engine.search(q, params), want)
            and torch.equal(engine.candidates(q, 2), one.candidates(q, 2))
            and same(engine.search_batch(queries, params)[0], wanted[params][0])
            for q, want in zip(queries, wanted[params], strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))
    copies.close()


@pytest.mark.parametrize("costly", ["host memory", "many in fp32"])
def test_where_scores_cost_only_the_plausible_are_scored(
    index: PlaidIndex, queries: Tensor, device: str, costly: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, several = engines(index, "triton", 2)
    if costly == "many in fp32":
        monkeypatch.setattr(stages_triton, "MOST_AT_ONCE", 8)
    elif ON_GPU:
        several.close()
        several = ShardedEngine(load_shards(index, [DEVICE] * 2, "host"))
    else:  # the interpreter knows no other memory
        for shard in several.index.shards:
            shard.placement = "host"
    for params in (MODES[0], MODES[1]):
        assert same(several.search(queries[0], params), one.search(queries[0], params))
    skipped = several.survivors(queries[:1], MODES[0])[0].exact.isneginf()
    assert 0 < int(skipped.sum()) < len(skipped)


def test_a_shard_less_is_noticed(index: PlaidIndex, queries: Tensor) -> None:
    one, several = engines(index, "auto", 3)
    cut = several.index
    less = ShardedEngine(ShardedIndex(cut.shards[:-1], cut.starts[:-1]))
    assert not all(same(less.search(q, MODES[7]), one.search(q, MODES[7])) for q in queries)


def quantiser(index: PlaidIndex, rotated: bool) -> PQ:
    """Entries are parts of the index's own embeddings, which needs no training."""
    g = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(DIM, DIM, generator=g))[0] if rotated else None
    e = reference.decompress(index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits)
    parts = (e.float() if rotation is None else e.float() @ rotation.T).view(len(e), 8, -1).transpose(0, 1)
    codebook = parts[:, torch.randperm(len(e), generator=g)[:256]].half().contiguous()
    codes = torch.cdist(parts, codebook.float()).argmin(-1).T.to(torch.uint8).contiguous()
    return PQ(8, codes, codebook, rotation)


@pytest.mark.parametrize("codec", ["dense", "pq"])
def test_codecs(index: PlaidIndex, queries: Tensor, impl: str, codec: str) -> None:
    pq = quantiser(index, rotated=impl == "torch") if codec == "pq" else None
    one, several = engines(index, impl, 3, codec, pq)
    for params in MODES[:1] if interpreted(impl) else MODES:
        assert same(several.search(queries[0], params), one.search(queries[0], params))
    wanted = [N - 1, 3, 3, 0]
    assert torch.equal(several.score_pids(queries[:1], wanted), one.score_pids(queries[:1], wanted))
    aligned = queries[[0, 1, 2, 0]]
    assert torch.equal(several.score_pids(aligned, wanted), one.score_pids(aligned, wanted))


@pytest.mark.parametrize("lengths", [[3], [2, 0, 5], [0, 0, 4, 0, 0], [0, 0], [1] * 9], ids=str)
def test_more_shards_than_passages(index: PlaidIndex, queries: Tensor, impl: str, lengths: list[int]) -> None:
    T = sum(lengths)
    small = from_tensors(index, index.codes()[:T], index.residuals()[:T], torch.tensor(lengths))
    one, several = engines(small, impl, 7)
    assert 1 <= len(several.index.shards) <= max(1, sum(length > 0 for length in lengths))
    for params in MODES[:1] if interpreted(impl) else MODES:
        assert same(several.search(queries[0], params), one.search(queries[0], params))


def test_shares_what_other_codecs_hold(index: PlaidIndex) -> None:
    groups = [[torch.device(DEVICE)] * 2]
    first = build_engine(index, groups)
    second = build_engine(index, groups, codec="dense", shared=[first])
    for ours, theirs in zip(second.index.shards, first.index.shards):  # type: ignore[attr-defined]
        assert ours.codes.data_ptr() == theirs.codes.data_ptr()
    first.close()
    second.close()


@pytest.mark.parametrize("groups", [[1, 1], [1, 1, 1], [2, 2]], ids=str)
def test_replicas(index: PlaidIndex, queries: Tensor, groups: list[int]) -> None:
    one = SearchEngine(load_resident(index, DEVICE))
    copies = build_engine(index, [[torch.device(DEVICE)] * n for n in groups])
    assert isinstance(copies, Replicas)
    many = queries[torch.arange(11) % 3]
    for params in (MODES[0], MODES[7]):
        wanted = [one.search(q, params) for q in many]
        for _ in range(2):  # one replica after the other at first, then together
            assert all(map(same, copies.search_batch(many, params), wanted))
        assert all(map(same, copies.search_batch(many[:1], params), wanted[:1]))
        assert same(copies.search(many[0], params), wanted[0])
        if ON_GPU:
            assert all(map(same, copies.search_batch(many.cuda(), params), wanted))
    mask = torch.arange(N) % 2 == 0
    found = copies.search_batch(many, MODES[0], allow=mask)
    assert all(map(same, found, [one.search(q, MODES[0], allow=mask) for q in many]))
    assert torch.equal(copies.candidates(queries[0], 2), one.candidates(queries[0], 2))
    assert torch.equal(copies.score_pids(queries[:1], [3, 0]), one.score_pids(queries[:1], [3, 0]))
    copies.warmup(LQ, MODES[0], batch=True)
    copies.close()


def test_a_replica_that_fails_is_heard(index: PlaidIndex, queries: Tensor, monkeypatch: Any) -> None:
    copies: Any = build_engine(index, [[torch.device(DEVICE)] * 2] * 2)
    many = queries[torch.arange(4) % 3]
    copies.search_batch(many, MODES[0])

    def lost(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(copies.engines[1], "_checked_batch", lost)
    with pytest.raises(RuntimeError, match="the device is lost"):
        copies.search_batch(many, MODES[0])


class TestReplicasFromOneThread:
    """Launches of one query each, two of them ahead of the answers."""

    PARAMS = SearchParams(k=5, ndocs=32, **PLAID)

    @pytest.fixture
    def copies(self, index: PlaidIndex, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(device_search, "BATCH_LANES", 1)
        monkeypatch.setattr(device_search, "MOST_AHEAD", 2)
        copies = Replicas([engines(index, "triton", 1)[0] for _ in range(2)])
        yield copies
        copies.close()

    @pytest.fixture
    def launched(self, copies: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Which replica did, in order."""
        order: list[int] = []

        def noted(i: int, load: Any, *args: Any, **more: Any) -> None:
            order.append(i)
            load(*args, **more)

        for i, engine in enumerate(copies.engines):
            search = engine._device_search
            monkeypatch.setattr(search, "_load", functools.partial(noted, i, search._load))
        return order

    def test_devices_take_turns(self, copies: Any, launched: list[int], queries: Tensor) -> None:
        many = queries[torch.arange(7) % 3]
        found = copies.search_batch(many, self.PARAMS, watch=None, allow=None)
        assert launched == [0, 1, 0, 1, 0, 1, 0]
        wanted = [copies.engines[0].search(q, self.PARAMS) for q in queries]
        assert all(same(answer, wanted[i % 3]) for i, answer in enumerate(found))
        assert not same(wanted[0], wanted[1])

    def test_a_bad_query_is_refused_before_any_launch(self, copies: Any, launched: list[int], queries: Tensor) -> None:
        bad = queries.clone()
        bad[-1, 0, 0] = torch.nan
        with pytest.raises(ValueError, match="expected finite values"):
            copies.search_batch(bad, self.PARAMS)
        with pytest.raises(ValueError, match="ncells"):
            copies.search_batch(queries, SearchParams(ncells=33))
        assert launched == []

    def test_too_little_memory_for_one(
        self, copies: Any, queries: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        search = copies.engines[1]._device_search
        stock, failures = search._recording, [torch.OutOfMemoryError("no")]

        def recording(*args: Any, **more: Any) -> Any:
            if failures:
                raise failures.pop()
            return stock(*args, **more)

        def checked(batch: Any, *args: Any) -> Any:
            assert sys.exc_info()[0] is None  # the error is gone, with what it kept
            return batch(*args)

        monkeypatch.setattr(search, "_recording", recording)
        for engine in copies.engines:
            monkeypatch.setattr(engine, "_checked_batch", functools.partial(checked, engine._checked_batch))
        found = copies.search_batch(queries, self.PARAMS)
        assert "one replica after the other" in caplog.text
        assert not failures
        assert all(same(answer, copies.engines[0].search(q, self.PARAMS)) for answer, q in zip(found, queries))

    def test_after_an_error_in_one_the_other_is_free(
        self, copies: Any, launched: list[int], queries: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(*args: Any, **more: Any) -> None:
            raise RuntimeError("the device is lost")

        with monkeypatch.context() as broken:
            broken.setattr(copies.engines[1]._device_search, "_load", lost)
            with pytest.raises(RuntimeError, match="the device is lost"):
                copies.search_batch(queries, self.PARAMS)
        assert launched == [0]
        with ThreadPoolExecutor(1) as pool:  # what this thread holds, it could take again
            found = pool.submit(copies.search_batch, queries, self.PARAMS).result(timeout=60)
        assert all(same(answer, copies.engines[0].search(q, self.PARAMS)) for answer, q in zip(found, queries))


@pytest.mark.parametrize("groups", [[3], [1, 1], [2, 2]], ids=str)
def test_closed(index: PlaidIndex, queries: Tensor, groups: list[int]) -> None:
    engine = build_engine(index, [[torch.device(DEVICE)] * n for n in groups])
    two = queries[:2]
    engine.search_batch(two, MODES[0])
    engine.close()
    for call in (lambda: engine.search(two[0], MODES[0]), lambda: engine.search_batch(two, MODES[0])):
        with pytest.raises(ValueError, match="expected an open one, got one that was closed"):
            call()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("params", [MODES[0], MODES[5]], ids=str)
def test_closed_during_searches(index: PlaidIndex, queries: Tensor, impl: str, params: SearchParams) -> None:
    if ON_GPU and impl == "torch":
        pytest.skip("the index is on a GPU")
    one, several = engines(index, impl, 2)
    wanted = one.search(queries[0], params)
    ends: list[str] = []

    def run() -> None:
        try:
            while same(several.search(queries[0], params), wanted):
                pass
            ends.append("another answer")
        except (ValueError, AttributeError) as error:
            ends.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    several.close()
    for thread in threads:
        thread.join(60)
    assert ends == 3 * ["search engine: expected an open one, got one that was closed"]


@pytest.mark.gpu
def test_close_gives_the_memory_back(index: PlaidIndex, queries: Tensor) -> None:
    collect()  # what other tests have left
    empty_cache()
    before = torch.cuda.memory_allocated()
    engine = build_engine(index, [[torch.device(DEVICE)] * 3] * 2)
    engine.search_batch(queries, MODES[0])
    assert torch.cuda.memory_allocated() > before + 100_000
    engine.close()
    del engine
    assert torch.cuda.memory_allocated() <= before + 100_000


class TestDevices:
    def test_groups(self) -> None:
        cpu = torch.device("cpu")
        assert resolve_devices(None, 1, False) == [[cpu]]
        assert resolve_devices(None, 2, False) == [[cpu], [cpu]]
        assert resolve_devices(["cpu"] * 6, 2, False) == [[cpu] * 3, [cpu] * 3]

    @pytest.mark.parametrize(
        ("devices", "replicas", "words"),
        [
            (["cuda:77"], 1, r"devices\[0\]: expected one of \['cpu'.*, got 'cuda:77'"),
            (["cpu", "meta"], 1, r"devices\[1\]: expected one of .*, got 'meta'"),
            (["cpu"] * 3, 2, "replicas: expected a divisor of the 3 devices, got 2"),
        ],
    )
    def test_wrong(self, devices: list[str], replicas: int, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            resolve_devices(devices, replicas, False)

    @pytest.mark.gpu
    def test_gpus(self, caplog: pytest.LogCaptureFixture) -> None:
        first = torch.device("cuda:0")
        assert resolve_devices(None, 1, True) == [[torch.device("cuda", torch.cuda.current_device())]]
        assert resolve_devices(["cuda:0", "cuda:0"], 1, True) == [[first, first]]
        assert "more than once" in caplog.text
        with pytest.raises(ValueError, match="only GPUs or only cpu"):
            resolve_devices(["cuda:0", "cpu"], 1, True)
        with pytest.raises(ValueError, match="replicas: expected at most"):
            resolve_devices(None, 99, True)


@pytest.mark.gpu
def test_memory_is_planned_on_all_devices_before_anything_is_laid_out(index: PlaidIndex, monkeypatch: Any) -> None:
    from plaid_tilemaxsim.index import shards

    monkeypatch.setattr(shards, "_free_bytes", lambda device: 1 << 20)
    before = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError, match=r"expected memory for 2 shards, got too little: gpu .*host .*disk"):
        load_shards(index, ["cuda:0"] * 2)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_placements(tmp_path: Path, queries: Tensor, placement: str) -> None:
    whole = read_index(make_index(tmp_path, n=N, dim=DIM, C=32))
    one = SearchEngine(load_resident(whole, "cuda:0"))
    several = ShardedEngine(load_shards(whole, ["cuda:0"] * 3, placement))
    assert several.index.placement == placement
    for params in MODES:
        for Q in queries:
            assert same(several.search(Q, params), one.search(Q, params))


@pytest.mark.gpu
def test_queries_on_the_device_and_other_streams(index: PlaidIndex, queries: Tensor) -> None:
    one, several = engines(index, "triton", 3)
    for params in (MODES[0], MODES[7]):
        wanted = [one.search(q, params) for q in queries]
        for _ in range(5):
            assert all(same(several.search(q.cuda(), params), want) for q, want in zip(queries, wanted))
            with torch.cuda.stream(torch.cuda.Stream()):
                assert all(same(several.search(q, params), want) for q, want in zip(queries, wanted))
                assert all(map(same, several.search_batch(queries.cuda(), params), wanted))
    assert set(several.profile(queries[0], MODES[0])) >= {"centroids", "merge"}


@pytest.mark.gpu
def test_a_query_on_another_gpu_than_the_first(index: PlaidIndex, queries: Tensor) -> None:
    """The shard there waits for what made the query."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    several = ShardedEngine(load_shards(index, ["cuda:0", "cuda:1"]))
    wanted = [several.search(q, MODES[0]) for q in queries]
    weight = torch.randn(4096, 4096, device="cuda:1")
    for Q, want in zip(queries, wanted, strict=True):
        q = Q.to("cuda:1")
        with torch.cuda.device(1):
            late = torch.zeros_like(q)
            for _ in range(20):  # work that takes some milliseconds
                weight = weight @ weight / 4096
            late += q + 0 * weight[0, 0].nan_to_num(0, 0, 0)
        assert same(several.search(late, MODES[0]), want)


@pytest.mark.gpu
def test_replicas_on_two_gpus_leave_the_current_device(
    index: PlaidIndex, queries: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    monkeypatch.setattr(device_search, "BATCH_LANES", 2)
    monkeypatch.setattr(device_search, "MOST_AHEAD", 2)
    one = SearchEngine(load_resident(index, "cuda:0"))
    copies = build_engine(index, [[torch.device("cuda:0")], [torch.device("cuda:1")]])
    many = queries[torch.arange(23) % 3]
    wanted = [one.search(q, MODES[0]) for q in queries]
    for current in (0, 1):
        with torch.cuda.device(current):
            for Q in (many, many.to("cuda:0"), many.to("cuda:1")):
                found = copies.search_batch(Q, MODES[0])
                assert torch.cuda.current_device() == current
                assert all(same(answer, wanted[i % 3]) for i, answer in enumerate(found))
    copies.close()


def test_a_lost_device_is_named(index: PlaidIndex, queries: Tensor, monkeypatch: Any) -> None:
    """Failures come up at the wait for the merge, outside of every shard's own search."""

    class Lost:
        device = torch.device("cuda:1")

        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _, several = engines(index, "triton", 2)
    shards = several._device_search
    several.search(queries[0], MODES[0])
    monkeypatch.setattr(shards, "_streams", [*shards._streams, Lost()])
    monkeypatch.setattr(shards, "_join", Lost().synchronize)
    with pytest.raises(RuntimeError, match="cuda:1: expected it to answer, got RuntimeError: CUDA error"):
        several.search(queries[0].to(DEVICE), MODES[0])


class Graph:
    """Of a replay, what a CUDA graph does."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay


@pytest.mark.parametrize("near", [True, False], ids=["near", "by the host"])
@pytest.mark.parametrize("params", [MODES[0], MODES[5]], ids=str)
def test_one_query_takes_one_graph_of_all(
    index: PlaidIndex, queries: Tensor, params: SearchParams, near: bool, monkeypatch: Any
) -> None:
    """On the CPU by stand-ins for streams and graphs: who runs after whom, and what flows."""
    if ON_GPU:
        pytest.skip("here real ones do")
    one, several = engines(index, "triton", 2)
    shards, log = several._device_search, []
    stream, pinned_Q = SimpleNamespace(synchronize=lambda: log.append("wait")), torch.zeros_like(queries[:1])

    def prepared(shard: Any, name: str, kind: str, lq: int, params: SearchParams) -> Any:
        rec = shard._recording(kind, lq, params)
        host = dataclasses.replace(rec, pinned_Q=pinned_Q, pinned=None if near else torch.zeros_like(rec.output))

        def replay() -> None:
            log.append(name)
            rec.Q.copy_(host.pinned_Q)
            left = host.output if host.pinned is None or name == "shard 0" else host.pinned
            left.copy_(rec.run())

        host.graph = Graph(replay)  # type: ignore[assignment]
        return host

    def record_merge(*args: Any) -> Any:
        merging = real(*args)
        merging.pinned = torch.zeros_like(merging.packed)

        def replay() -> None:
            log.append("merge")
            merging.pinned.copy_(merging.run())

        merging.graph = Graph(replay)
        return merging

    class Joined:
        def __init__(self, first: list[Graph], last: Graph) -> None:
            self.graphs = [*first, last]

        def replay(self, on: Any) -> None:
            assert on is stream
            for graph in self.graphs:
                graph.replay()

    real = shards._record_merge
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(sharded, "Joined", Joined)
    monkeypatch.setattr(shards, "_record_merge", record_merge)
    monkeypatch.setattr(shards, "_joins", True)
    monkeypatch.setattr(shards, "_near", [True, near])
    for s, shard in enumerate(shards._shards):
        monkeypatch.setattr(shard, "prepared", functools.partial(prepared, shard, f"shard {s}"))
        monkeypatch.setattr(shard, "yield_to", lambda stream, s=s: log.append(f"{s} after what it did"))
    for q in queries[:2]:
        log.clear()
        assert same(several.search(q, params), one.search(q, params))
        assert log == ["0 after what it did", "1 after what it did", "shard 1", "shard 0", "merge", "wait"]
    assert len(shards._plans) == 1
    several.close()
    assert not shards._plans


def test_a_batch_of_one_branch_gives_each_query_its_answer(
    index: PlaidIndex, queries: Tensor, monkeypatch: Any
) -> None:
    """As where memory is short; the answer of every launch is left in the same host memory."""
    one, several = engines(index, "triton", 2)
    shards = several._device_search
    real = shards._record_merge

    def record_merge(*args: Any) -> Any:
        merging = real(*args)
        merging.pinned = torch.zeros_like(merging.packed)
        merging.graph = Graph(lambda: merging.pinned.copy_(merging.run()))
        return merging

    if not ON_GPU:
        monkeypatch.setattr(shards, "_record_merge", record_merge)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    for shard in shards._shards:
        monkeypatch.setattr(shard, "batch_lanes", lambda lq, queries: 1)
    found = several.search_batch(queries, MODES[0])
    assert all(same(answer, one.search(q, MODES[0])) for answer, q in zip(found, queries, strict=True))
    assert not same(found[0], found[1])
    several.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("scorer") / "index", n=300)


@pytest.fixture(scope="module")
def ranker(folder: Path) -> Any:
    pytest.importorskip("colbert")
    from plaid_tilemaxsim import TileMaxSimScorer

    return TileMaxSimScorer(str(folder), ON_GPU)


class TestScorer:
    """Through ``scorer_options``, beside each other in one scorer."""

    @staticmethod
    def config(**options: Any) -> Any:
        return SimpleNamespace(
            scorer="tilemaxsim", scorer_options=options, ncells=2, centroid_score_threshold=0.4, ndocs=128,
            query_maxlen=32, interaction="colbert", total_visible_gpus=torch.cuda.device_count(),
        )  # fmt: skip

    @pytest.mark.parametrize("more", [{"devices": [DEVICE] * 3}, {"devices": [DEVICE] * 4, "replicas": 2}], ids=str)
    @pytest.mark.parametrize("mode", ["plaid", "rerank", "exhaustive"])
    def test_the_answers_are_those_of_one(self, ranker: Any, folder: Path, mode: str, more: dict[str, Any]) -> None:
        Q = make_queries(folder, n=3)
        one, several = self.config(mode=mode), self.config(mode=mode, **more)
        for q in Q.split(1):
            assert ranker.rank(several, q, k=10) == ranker.rank(one, q, k=10)
            assert ranker.rank(several, q) == ranker.rank(one, q)
            assert ranker.rank(several, q, pids=[7, 299, 0]) == ranker.rank(one, q, pids=[7, 299, 0])
            kept = [ranker.rank(c, q, k=10, filter_fn=lambda pids: pids[pids > 150]) for c in (several, one)]
            assert kept[0] == kept[1]
        assert ranker.search_batch(several, Q, 10) == ranker.search_batch(one, Q, 10)
        assert torch.equal(ranker.retrieve(several, Q[:1])[0], ranker.retrieve(one, Q[:1])[0])
        assert ranker.num_passages == 300

    def test_engines_are_told_apart_by_devices(self, ranker: Any, folder: Path) -> None:
        Q = make_queries(folder, n=1)
        for options in ({}, {"devices": [DEVICE] * 2}, {"devices": [DEVICE]}, {}):
            ranker.rank(self.config(**options), Q, k=3)
        kinds = {type(engine).__name__ for engine in ranker._engines}
        assert kinds >= {"SearchEngine", "ShardedEngine"}

    def test_a_device_that_is_not_there(self, ranker: Any, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"devices\[0\]: expected one of .*, got 'cuda:99'"):
            ranker.rank(self.config(devices=[99]), make_queries(folder, n=1), k=3)


REAL = "PLAID_TILEMAXSIM_INDEXES"


@pytest.mark.parametrize("n", [2, 5])
def test_real_indexes(n: int) -> None:
    """Folder with real PLAID indexes in PLAID_TILEMAXSIM_INDEXES; queries are perturbed tokens of each."""
    root = os.environ.get(REAL)
    folders = sorted(Path(root).glob("*/metadata.json")) if root else []
    if not folders:
        pytest.skip(f"set {REAL} to a folder that holds PLAID indexes")
    for folder in folders:
        whole = read_index(folder.parent)
        one = SearchEngine(load_resident(whole, DEVICE))
        several = ShardedEngine(load_shards(whole, [DEVICE] * n))
        g = torch.Generator().manual_seed(0)
        rows = torch.randint(0, whole.num_tokens, (4 * 32,), generator=g)
        near = whole.centroids[whole.codes()[rows].long()].float()
        near = near + torch.randn(near.shape, generator=g) / whole.dim**0.5 / 2
        Q = torch.nn.functional.normalize(near, dim=-1).view(4, 32, whole.dim)
        for params in (
            SearchParams(k=10, ncells=1, threshold=0.5, ndocs=256),
            SearchParams(k=100, ncells=2, threshold=0.45, ndocs=1024),
            SearchParams(k=100, mode="rerank"),
            SearchParams(k=1000, mode="exhaustive", prefilter=3000),
        ):
            wanted = one.search_batch(Q, params)
            assert all(map(same, several.search_batch(Q, params), wanted)), (folder.parent.name, params)


def test_the_benchmark_checks_before_it_times(tmp_path: Path, monkeypatch: Any) -> None:
    from scripts import bench_devices

    folder = make_index(tmp_path / "index", n=120, C=32)
    torch.save(make_queries(folder, n=3, LQ=8), tmp_path / "Q.pt")
    device = "0" if ON_GPU else "cpu"
    command = ["--index", str(folder), "--queries", str(tmp_path / "Q.pt"), "--devices", f"{device},{device}"]
    command += ["--k", "10", "--batch", "6", "--repeats", "1", "--queries-checked", "2", "--out"]
    bench_devices.main([*command, str(tmp_path / "good.json")])
    result = json.loads((tmp_path / "good.json").read_text())
    assert result["correct"] is True
    assert {"latency_ratio", "exhaustive_scaling", "batch_scaling"} <= set(result["figures"])
    assert str(tmp_path) not in (tmp_path / "good.json").read_text()

    real = ShardedEngine.search

    def shuffled(self: Any, *args: Any, **kwargs: Any) -> Answer:
        pids, scores = real(self, *args, **kwargs)
        return pids.roll(1), scores

    monkeypatch.setattr(ShardedEngine, "search", shuffled)
    with pytest.raises(SystemExit):
        bench_devices.main([*command, str(tmp_path / "bad.json")])
    assert json.loads((tmp_path / "bad.json").read_text())["correct"] is False
