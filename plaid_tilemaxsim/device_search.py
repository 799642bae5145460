"""Searches as CUDA graphs: one replay a query, copies included, and one wait at its end.

A graph is recorded once for every (query length, parameters, kind of input) and replayed from static buffers; a
query in host memory and its answer travel through pinned buffers inside the graph. A recording for batches holds
``lanes`` independent copies of the funnel on parallel branches, so one launch serves that many queries with the same
kernels, hence the same bits, as one query alone. Without CUDA (Triton's interpreter), and where residuals come from
disk, the same code runs the funnel directly.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from plaid_tilemaxsim import faults
from plaid_tilemaxsim.funnel import STAGES, Pids, Ranking, SearchParams, run_funnel, run_shard
from plaid_tilemaxsim.graphs import Recent, Turns, empty_cache, recording
from plaid_tilemaxsim.ops.api import padded_query_length
from plaid_tilemaxsim.ops.pids_kernel import clamp_pids
from plaid_tilemaxsim.stages_triton import TritonStages
from plaid_tilemaxsim.stats import Watch

if TYPE_CHECKING:
    from plaid_tilemaxsim.index.resident import ResidentIndex

log = logging.getLogger("plaid_tilemaxsim")

T = TypeVar("T")
Columns = tuple[Tensor, ...]  # of one query: pids int32 [n], then fp32 [n] each
# Queries of a batch in one launch, and what their buffers and centroid tables may take together of the memory that is
# free when the first batch comes.
BATCH_LANES = 32
BATCH_MEMORY_SHARE = 0.5
# Launches of a batch before the first answer is waited for: their queries and answers lie in pinned memory.
MOST_AHEAD = 4
MAX_GRAPHS = 64


class _Stop(Exception):
    """Ends a funnel after the stage that ``profile`` asked for."""


class _Clock:
    """What a recording measures of itself: CUDA events between the stages, inside its graph; else the host's time."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._seconds: dict[str, float] = {}
        self.candidates: Tensor | None = None  # int32 [1]

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds[name] = time.perf_counter() - began
            return
        if name not in self._events:
            # External: without that, an event inside a recording orders its streams and measures nothing.
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            self._events[name] = begin, end
        begin, end = self._events[name]
        begin.record()
        yield
        end.record()

    def read(self, watch: Watch) -> None:
        """After the search, when the device is done with it."""
        watch.stages.update(self._seconds)
        watch.stages.update({name: begin.elapsed_time(end) / 1e3 for name, (begin, end) in self._events.items()})
        if self.candidates is not None:
            watch.found(int(self.candidates))


@dataclass
class _Recording:
    """Static inputs, outputs and the graph between them (None without CUDA: ``run`` does the work again)."""

    Q: Tensor  # fp32 [lanes, LQ, DIM]
    pids: Tensor | None  # int32 [cap]
    count: Tensor | None  # int32 [1]
    allow: Tensor | None  # int32 [ceil(N / 32)]
    flag: Tensor  # int32 [1]: 1 + position of a pid outside the index, for kind "score"
    run: Callable[[], Any]
    graph: torch.cuda.CUDAGraph | None
    output: Any
    pinned_Q: Tensor | None = None  # fp32 [1, LQ, DIM] in host memory: where the graph takes the query from
    pinned_count: Tensor | None = None  # int32 [1] in host memory: likewise
    pinned: Tensor | None = None  # int32 [1, 1 + 2 k] in host memory: where the graph leaves the answer
    clock: _Clock | None = None

    def replay(self) -> Any:
        if self.graph is None:
            self.output = self.run()
        else:
            self.graph.replay()
        return self.output


class DeviceSearch:
    """Replays recorded searches over one resident index. One search at a time: callers wait on a lock.

    most_pinned: words of one query's answer that end in host memory too; a longer one stays on the device, for a caller
    of ``launch``. joins: graphs of one query in host memory are made for ``graphs.Joined``. queries: where these find
    it, by its length; several that search at the same time, for the same query, may share that.
    """

    def __init__(
        self, index: ResidentIndex, most_pinned: int = sys.maxsize, joins: bool = False,
        queries: dict[int, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self._most_pinned, self._joins = most_pinned, joins
        self._queries = {} if queries is None else queries  # fp32 [1, LQ, DIM] in pinned host memory
        self.device = index.device
        self._turns = Turns(index.device)
        self._cmax = float(index.centroids.float().norm(dim=1).max()) if index.num_centroids else 0.0
        self._lanes: list[TritonStages] = [TritonStages(index, self._cmax)]
        self._recordings: Recent[tuple[Any, ...], _Recording] = Recent(MAX_GRAPHS)
        self._on_gpu = self.device.type == "cuda"
        self.runs_ahead = not self.stages.exact_scorer.waits  # of the device, which is only waited for at the end
        self.records = self._on_gpu and self.runs_ahead
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._lanes_that_fit: dict[tuple[int, int], int] = {}

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine's buffers, for one caller; after an error as if there had been no search."""
        if self._on_gpu:
            faults.check_fork()
        with self._turns.take():
            if not self._lanes:
                raise ValueError("search engine: expected an open one, got one that was closed")
            try:
                yield
            except BaseException as error:
                self.clean_after(error)
                raise

    def clean_after(self, error: BaseException) -> None:
        """Leaves the buffers as the next search expects them; raises from ``error`` what says more than it does."""
        try:
            if self._on_gpu:
                torch.cuda.synchronize(self.device)
            for lane in self._lanes:
                lane.clean()
            if self._on_gpu:
                torch.cuda.synchronize(self.device)  # the next search may come on another stream
        except RuntimeError as lost:
            raise faults.device_lost(lost, self.device) from error
        if isinstance(error, GeneratorExit):  # what went wrong did so on another device
            return
        shortage = faults.memory_shortage(error)
        if shortage is not None and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(shortage) from error
        if shortage is None and faults.is_kernel_failure(error):
            raise faults.kernel_failure(error, self.device) from error

    def make_room(self) -> None:
        """Frees what searches allocated and can allocate again: graphs, and the buffers of all lanes but one."""
        with self._turn():
            self._recordings.clear()
            del self._lanes[1:]
            self._lanes_that_fit.clear()
            if self._on_gpu:
                self._pool = torch.cuda.graph_pool_handle()  # that of graphs which are all gone is not used again
                empty_cache()

    @property
    def stages(self) -> TritonStages:
        return self._lanes[0]

    def search(
        self, Q: Tensor, params: SearchParams, allow: Tensor | None = None, watch: Watch | None = None
    ) -> tuple[Tensor, Tensor]:
        """One query Q [LQ, DIM] (any device) through the whole funnel: pids, scores on the CPU."""
        with self._turn():
            allows, on_host, watched = allow is not None, self._on_host(Q), watch is not None
            rec = self._recording("search", len(Q), params, allow=allows, on_host=on_host, watched=watched)
            return self._answer(rec, Q[None], allow=allow, watch=watch)[0]

    def search_batch(self, Q: Tensor, params: SearchParams) -> list[tuple[Tensor, Tensor]]:
        """Q [B, LQ, DIM]: ``BATCH_LANES`` queries a launch, fewer where memory is short; launches precede answers."""
        while True:
            try:
                with self._turn():
                    lanes = self.batch_lanes(Q.size(1), len(Q))
                    rec = self._recording("search", Q.size(1), params, lanes=lanes)
                    return self._answer(rec, Q)
            except torch.OutOfMemoryError as error:
                if lanes == 1:
                    raise
                shortage = faults.first_line(error)
            log.warning("%s; %d queries at once, not %d", shortage, lanes // 2, lanes)
            with self._turn():
                self.make_room()
                self._lanes_that_fit[Q.size(1), _most_lanes(len(Q))] = lanes // 2

    def batch_in_steps(self, Q: Tensor, params: SearchParams) -> Generator[None, None, list[tuple[Tensor, Tensor]]]:
        """``search_batch`` for a caller who launches on other devices between the steps, which are this one's turn.

        Raises OutOfMemoryError where ``search_batch`` takes fewer queries a launch.
        """

        def launches() -> Generator[None, None, list[Columns]]:
            with self._turn():
                rec = self._recording("search", Q.size(1), params, lanes=self.batch_lanes(Q.size(1), len(Q)))
                return (yield from self._launches(rec, Q, 2))

        def here() -> contextlib.AbstractContextManager[Any]:
            return torch.cuda.device(self.device) if self._on_gpu else contextlib.nullcontext()

        steps = launches()
        try:
            while True:
                with here():
                    try:
                        next(steps)
                    except StopIteration as end:
                        return cast("list[tuple[Tensor, Tensor]]", end.value)
                yield  # the current device is the caller's again
        finally:
            with here():
                steps.close()

    def batch_lanes(self, lq: int, queries: int) -> int:
        """Branches of a batch's graph: a power of two, so that few recordings serve all batches."""
        wanted = lanes = _most_lanes(queries)
        if not self.records or (lq, wanted) in self._lanes_that_fit:
            return self._lanes_that_fit.get((lq, wanted), wanted)
        # candidates, their scores and flags; int16 and key tables of the centroids; what the codec needs
        one = 9 * self.index.num_passages + 3 * self.index.num_centroids * padded_query_length(lq)
        one += self.stages.exact_scorer.scratch_bytes
        free = torch.cuda.mem_get_info(self.device)[0] + len(self._lanes) * one
        while lanes > 1 and lanes * one > BATCH_MEMORY_SHARE * free:
            lanes //= 2
        self._lanes_that_fit[lq, wanted] = lanes
        return lanes

    def search_listed(
        self, kind: str, Q: Tensor, pids: Tensor, params: SearchParams, watch: Watch | None = None
    ) -> tuple[Tensor, Tensor]:
        """``pids`` (int32, ascending, on the device) alone, best k. kind: "given" scores them exactly, "candidates"
        runs the funnel from pruning on."""
        with self._turn():
            cap, on_host, watched = _capacity(pids), self._on_host(Q), watch is not None
            rec = self._recording(kind, len(Q), params, cap=cap, on_host=on_host, watched=watched)
            return self._answer(rec, Q[None], pids=pids, watch=watch)[0]

    def survivors(
        self, Q: Tensor, params: SearchParams, *, pids: Tensor | None = None, allow: Tensor | None = None
    ) -> list[Columns]:
        """``funnel.run_shard`` for each query of Q [B, LQ, DIM]: pids int32 [n] and their scores fp32 [n], on the CPU.

        pids: candidates as in ``search_listed``. Several queries take neither these nor ``allow``.
        """
        with self._turn():
            if pids is not None or allow is not None or len(Q) == 1:
                kind, cap = ("shard", None) if pids is None else ("shard of candidates", _capacity(pids))
                on_host = self._on_host(Q)
                rec = self._recording(kind, Q.size(1), params, cap=cap, allow=allow is not None, on_host=on_host)
            else:
                rec = self._recording("shard", Q.size(1), params, lanes=self.batch_lanes(Q.size(1), len(Q)))
            columns = 4 if params.mode == "plaid" else 3
            return self._columns(rec, Q, columns, pids=pids, allow=allow)

    def launch(
        self, kind: str, Q: Tensor, params: SearchParams, lanes: int, *,
        pids: Tensor | None = None, allow: Tensor | None = None, on_host: bool = False,
    ) -> Tensor:  # fmt: skip
        """What the recording of this kind leaves on the device, without a wait: int32 [lanes, 1 + columns * cap], for
        "score" fp32 [cap]. The next launch overwrites it.

        Q: at most ``lanes`` queries [B, LQ, DIM]; on_host: one, which is in host memory and stays as it is until the
        caller has waited for the current stream.
        """
        with self._turn():
            cap = None if pids is None else _capacity(pids)
            rec = self._recording(
                kind, Q.size(1), params, lanes=lanes, cap=cap, allow=allow is not None, on_host=on_host
            )
            self._load(rec, Q, pids=pids, allow=allow)
            left: Tensor = rec.replay()
            return left

    def prepared(self, kind: str, lq: int, params: SearchParams) -> _Recording:
        """The recording of one query in host memory, for the only caller there is: he replays it as part of another
        graph, without a turn, from ``pinned_Q``, on a stream that ``yield_to`` has wait for what ran here before."""
        with self._turn():
            return self._recording(kind, lq, params, on_host=True)

    def yield_to(self, stream: torch.cuda.Stream) -> None:
        """For what ``prepared`` gave."""
        self._turns.pass_to(stream)

    def score(self, Q: Tensor, pids: Tensor) -> Tensor:
        """fp32 [n] on the device: exact scores in the order of ``pids`` (int32 on the device).

        Waits for the device. IndexError for a pid outside the index.
        """
        with self._turn():
            if pids.numel() == 0:
                return torch.zeros(0, device=self.device)
            rec = self._recording("score", len(Q), SearchParams(), cap=_capacity(pids), on_host=self._on_host(Q))
            self._load(rec, Q[None], pids=pids)
            scores: Tensor = rec.replay()[: pids.numel()].clone()
            wrong = int(rec.flag)
            if wrong:
                raise IndexError(f"pids: expected 0 .. {self.index.num_passages - 1}, got {int(pids[wrong - 1])}")
            return scores

    def candidates(self, Q: Tensor, params: SearchParams, allow: Tensor | None) -> Tensor:
        """int32 [n] on the device, ascending; waits for the device to learn n."""
        with self._turn():
            short = SearchParams(ncells=params.ncells, query_maxlen=params.query_maxlen)
            rec = self._recording("generate", len(Q), short, allow=allow is not None)
            self._load(rec, Q[None], allow=allow)
            found = rec.replay()
            pids: Tensor = found.pids[: int(found.count)]
            return pids.clone()

    def profile(self, Q: Tensor, params: SearchParams, repeats: int = 20) -> dict[str, float]:
        """Milliseconds of device time in every stage: differences between graphs that end one stage later."""
        with self._turn():
            spent: dict[str, float] = {}
            before = 0.0
            for name in STAGES:
                rec = self._recording("until", len(Q), params, until=name)
                if rec.graph is None:
                    raise ValueError(
                        "profile: expected an index in memory and a CUDA device, got "
                        f"{self.index.placement} on {self.device}"
                    )
                self._load(rec, Q[None])
                times = []
                for _ in range(repeats):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    rec.replay()
                    end.record()
                    end.synchronize()
                    times.append(start.elapsed_time(end))
                now = sorted(times)[len(times) // 2]
                spent[name] = max(now - before, 0.0)
                before = max(now, before)
            return spent

    def close(self) -> None:
        with self._turns.take():
            self._recordings.clear()
            self._lanes.clear()
            self.__dict__.pop("index", None)

    def _on_host(self, Q: Tensor) -> bool:
        """Whether a graph itself is to fetch the query from pinned memory."""
        return self.records and Q.device.type == "cpu"

    def _answer(
        self,
        rec: _Recording,
        Q: Tensor,
        pids: Tensor | None = None,
        allow: Tensor | None = None,
        watch: Watch | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        answers = self._columns(rec, Q, 2, pids=pids, allow=allow)
        if watch is not None and rec.clock is not None:
            rec.clock.read(watch)
        return cast("list[tuple[Tensor, Tensor]]", answers)

    def _columns(
        self, rec: _Recording, Q: Tensor, columns: int, pids: Tensor | None = None, allow: Tensor | None = None
    ) -> list[Columns]:
        """Replays as often as Q [B, LQ, DIM] has lanes' worth of queries."""
        if rec.pinned is not None and len(Q) == 1:
            self._load(rec, Q, pids=pids, allow=allow)
            rec.replay()
            torch.cuda.current_stream().synchronize()
            return unpacked(rec.pinned, columns)
        return finished(self._launches(rec, Q, columns, pids=pids, allow=allow))

    def _launches(
        self, rec: _Recording, Q: Tensor, columns: int, pids: Tensor | None = None, allow: Tensor | None = None
    ) -> Generator[None, None, list[Columns]]:
        """A step after every launch, and one after the answers of each while no launch is left."""
        lanes = rec.Q.size(0)
        starts = range(0, len(Q), lanes)
        slots = min(len(starts), MOST_AHEAD)
        # What is not pinned waits for the device. numpy copies in this thread; torch would ask all of its own.
        pinned = None
        if self._on_gpu and not Q.is_cuda:
            pinned = torch.empty(slots, *rec.Q.shape, dtype=torch.float32, pin_memory=True)
        rows = torch.empty(slots, *rec.output.shape, dtype=torch.int32, pin_memory=self._on_gpu)
        done: list[torch.cuda.Event] = []
        rooms: list[Room] = []
        answers: list[Columns] = []

        def collect(i: int) -> None:
            if self._on_gpu:
                done[i].synchronize()
            answers.extend(unpacked(rows[i % slots][: len(Q) - starts[i]], columns, rooms[i]))

        for i, first in enumerate(starts):
            if i >= slots:
                collect(i - slots)  # while the device goes on
            part = Q[first : first + lanes]
            if pinned is not None:
                staged = pinned[i % slots, : len(part)]
                np.copyto(staged.numpy(), part.numpy())
                part = staged
            self._load(rec, part, pids=pids, allow=allow)
            rows[i % slots].copy_(rec.replay(), non_blocking=True)
            if self._on_gpu:
                done.append(torch.cuda.current_stream().record_event())
            yield
            rooms.append(Room(len(part), columns, (rows.size(2) - 1) // columns))  # likewise
        for i in range(len(starts) - slots, len(starts)):
            collect(i)
            if i < len(starts) - 1:
                yield
        return answers

    def _load(self, rec: _Recording, Q: Tensor, pids: Tensor | None = None, allow: Tensor | None = None) -> None:
        if rec.pinned_Q is not None:
            rec.pinned_Q.copy_(Q)
        else:
            rec.Q[: len(Q)].copy_(Q, non_blocking=True)
        if rec.pids is not None:
            assert pids is not None
            assert rec.count is not None
            rec.pids[: pids.numel()].copy_(pids)
            if rec.pinned_count is not None:
                rec.pinned_count.fill_(pids.numel())
            else:
                rec.count.fill_(pids.numel())
        if rec.allow is not None:
            assert allow is not None
            rec.allow.copy_(_bitmap(allow))

    def _recording(
        self,
        kind: str,
        lq: int,
        params: SearchParams,
        *,
        lanes: int = 1,
        cap: int | None = None,
        allow: bool = False,
        until: str | None = None,
        on_host: bool = False,
        watched: bool = False,
    ) -> _Recording:
        key = (kind, lq, params, lanes, cap, allow, until, on_host, watched)
        return self._recordings.of(key, lambda: self._record(*key))

    def _record(
        self,
        kind: str,
        lq: int,
        params: SearchParams,
        lanes: int,
        cap: int | None,
        allow: bool,
        until: str | None,
        on_host: bool,
        watched: bool,
    ) -> _Recording:
        while len(self._lanes) < lanes:
            self._lanes.append(TritonStages(self.index, self._cmax))
        Q = torch.nn.functional.normalize(torch.ones(lanes, lq, self.index.dim, device=self.device), dim=-1)
        pids = None if cap is None else torch.zeros(cap, dtype=torch.int32, device=self.device)
        count = None if cap is None else torch.ones(1, dtype=torch.int32, device=self.device)
        clamped = torch.empty(cap or 0, dtype=torch.int32, device=self.device)
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        bits = None
        if allow:
            bits = torch.zeros((self.index.num_passages + 31) // 32, dtype=torch.int32, device=self.device)
        clock = _Clock(self._on_gpu) if watched else None

        def one(lane: int) -> Any:
            stages, q = self._lanes[lane], Q[lane]
            listed = None if pids is None else Pids(pids, count)
            if kind == "score":
                assert pids is not None
                assert count is not None
                clamp_pids(pids, count, self.index.num_passages, clamped, flag)
                cs = stages.centroids(q, threshold=None, ncells=None)
                return stages.exact(q, cs, Pids(clamped, count), False)
            if kind == "generate":
                short = q if params.query_maxlen is None else q[: params.query_maxlen]
                return stages.candidates(
                    stages.centroids(short, threshold=None, ncells=params.ncells), params.ncells, bits
                )
            if until is not None:
                return _run_until(stages, q, params, until)
            if kind.startswith("shard"):
                return _packed_shard(*run_shard(stages, q, params, candidates=listed, allow=bits))
            source: dict[str, Any] = {} if listed is None else {kind: listed}
            if clock is None:
                return _packed(run_funnel(stages, q, params, allow=bits, **source))
            ranking = run_funnel(stages, q, params, allow=bits, stage=clock.stage, **source)
            if ranking.candidates is not None:
                clock.candidates = ranking.candidates.count
            return _packed(ranking)

        packs = kind in ("search", "given", "candidates", "shard", "shard of candidates")

        def run() -> Any:
            if lanes == 1:
                answer = one(0)
                return answer[None] if packs else answer
            return torch.stack(self._in_parallel([functools.partial(one, lane) for lane in range(lanes)]))

        rec = _Recording(Q, pids, count, bits, flag, run, None, run())  # compiles the kernels; a recording must not
        rec.clock = clock
        if not self.records:
            return rec
        if on_host:
            if lq not in self._queries:
                self._queries[lq] = torch.empty(Q.shape, dtype=Q.dtype, pin_memory=True)
            rec.pinned_Q = self._queries[lq]
            if count is not None:
                rec.pinned_count = torch.ones(1, dtype=torch.int32, pin_memory=True)
        if packs and lanes == 1 and rec.output.numel() <= self._most_pinned:
            rec.pinned = torch.zeros(rec.output.shape, dtype=rec.output.dtype, pin_memory=True)
        try:
            with recording(self.device, self._pool, self._joins and on_host) as graph:
                if rec.pinned_Q is not None:
                    Q.copy_(rec.pinned_Q, non_blocking=True)
                if rec.pinned_count is not None and count is not None:
                    count.copy_(rec.pinned_count, non_blocking=True)
                rec.output = run()
                if rec.pinned is not None:
                    rec.pinned.copy_(rec.output, non_blocking=True)
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # nothing is recorded into the other one any more
            raise
        rec.graph = graph
        return rec

    def _in_parallel(self, tasks: list[Callable[[], Tensor]]) -> list[Tensor]:
        """Each task on a stream of its own, forked from and joined to the current one (a graph keeps the branches)."""
        if not self.records:
            return [task() for task in tasks]
        here = torch.cuda.current_stream(self.device)
        answers, streams = [], [torch.cuda.Stream(self.device) for _ in tasks]
        ready = here.record_event()
        for task, stream in zip(tasks, streams, strict=True):
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                answers.append(task())
        for stream in streams:
            here.wait_stream(stream)
        return answers


def _run_until(stages: TritonStages, Q: Tensor, params: SearchParams, until: str) -> None:
    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        if STAGES.index(name) > STAGES.index(until):
            raise _Stop
        yield

    with contextlib.suppress(_Stop):
        run_funnel(stages, Q, params, stage=stage)


def _packed(ranking: Ranking) -> Tensor:
    """int32 [1 + 2 k]: count, pids, bits of the scores: one copy to the host brings all."""
    if ranking.packed is not None:
        return ranking.packed
    k = ranking.pids.numel()
    count = ranking.count
    if count is None:
        count = torch.full((1,), k, dtype=torch.int32, device=ranking.pids.device)
    return torch.cat([count, ranking.pids, ranking.scores.view(torch.int32)])


def _packed_shard(pids: Pids, scores: list[Tensor]) -> Tensor:
    """int32 [1 + columns * cap], as ``_packed``."""
    assert pids.pids is not None
    count = pids.count
    if count is None:
        count = torch.full((1,), pids.pids.numel(), dtype=torch.int32, device=pids.pids.device)
    return torch.cat([count, pids.pids, *(column.view(torch.int32) for column in scores)])


class Room:
    """Where the answers of several queries come to lie: views of one block, made before the answers are there.

    Several operations a query would be most of what the host does, and the device would be done by then.
    """

    def __init__(self, queries: int, columns: int, most: int) -> None:
        block = torch.empty(queries, columns, most, dtype=torch.int32)
        pids, *rest = block.unbind(1)
        self.block = block.numpy()
        self.views: list[Columns] = list(zip(pids.unbind(), *(one.view(torch.float32).unbind() for one in rest)))


def unpacked(rows: Tensor, columns: int, room: Room | None = None) -> list[Columns]:
    """Of every row of int32 [B, 1 + columns * cap] on the host: pids int32 [n], then fp32 [n] of the other columns.

    room: for B queries with cap answers; used if one has as many, otherwise they get a smaller one.
    """
    cap = (rows.size(1) - 1) // columns
    if len(rows) == 1:
        row = rows[0].clone()
        n = int(row[0])
        first, *others = (row[at : at + n] for at in range(1, row.numel(), cap))
        return [(first, *(column.view(torch.float32) for column in others))]
    packed = rows.numpy()
    counts = packed[:, 0].tolist()
    most = max(counts, default=0)
    if room is None or room.block.shape[2] != most:
        room = Room(len(rows), columns, most)
    np.copyto(room.block, packed[:, 1:].reshape(len(rows), columns, cap)[:, :, :most])
    found = zip(counts, room.views, strict=True)
    return [one if n == most else tuple(column[:n] for column in one) for n, one in found]


def finished(steps: Generator[None, None, T]) -> T:
    """What comes of steps that nothing else goes on between."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)


def _most_lanes(queries: int) -> int:
    """Where memory allows."""
    return min(BATCH_LANES, 1 << (max(queries, 1) - 1).bit_length())


def _capacity(pids: Tensor) -> int:
    """Buffer length for a list of pids: the next power of two, so that few recordings serve all lengths."""
    return max(64, 1 << (pids.numel() - 1).bit_length())


def _bitmap(mask: Tensor) -> Tensor:
    """bool [N] -> int32 [ceil(N / 32)], passage p at bit p % 32 of word p // 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.numel() % 32)).view(-1, 32)
    weights = torch.bitwise_left_shift(
        torch.ones(32, dtype=torch.int64, device=mask.device), torch.arange(32, device=mask.device)
    )
    return (padded.long() * weights).sum(1).to(torch.int32)
