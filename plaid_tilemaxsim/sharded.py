"""One index on several devices, searched as if it lay on one: the same passages, scores and order, to the bit.

    host       the query to every device
    shards     centroids, candidates, prune, exact                each on its device, for its own passages
    merge      the stages' cuts over all shards, topk             on the first device

A shard cannot know which of its passages those of others push out of a cut. So each keeps as many as the whole index
would (``funnel.run_shard``), scores all of these, and sends pids and scores, some KB, in one copy to the first device.
There the cuts are made as one device makes them. That is the only exchange, nothing waits for the host, and what it
costs is up to four times as many exact scores, of a few thousand passages at most with stock's parameters; where
reading them takes long, a shard leaves out those that it can tell no merge will keep.
One host thread launches everything: a CUDA graph a device, the copies, the graph of the merge, and one wait. For one
query in host memory that is a single launch: the shards' graphs fetch it from pinned memory, the merge's reads their
rows where these lie, and all are parts of one graph. Of a device whose memory the first one cannot read, the rows come
by pinned memory too. Where the parts cannot be joined (``graphs.can_join``) they are launched one by one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from plaid_tilemaxsim import faults
from plaid_tilemaxsim.engine import SearchEngine, score_aligned
from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.graphs import Joined, Recent, Turns, can_join, recording
from plaid_tilemaxsim.index.resident import ResidentIndex
from plaid_tilemaxsim.index.shards import ShardedIndex
from plaid_tilemaxsim.merge import Survivors, merge

if TYPE_CHECKING:
    from plaid_tilemaxsim.device_search import DeviceSearch, _Recording
    from plaid_tilemaxsim.exact import ExactScorer
    from plaid_tilemaxsim.stats import Watch

log = logging.getLogger("plaid_tilemaxsim")

Answer = tuple[Tensor, Tensor]
MAX_MERGES = 64
# Words of a shard's row that the merge reads afar or by host memory; of a longer one a copy is worth more launches.
MOST_PINNED = 1 << 18
# Words of a row in host memory that the merge reads there, each of them about twice.
MOST_OVER_BUS = 1 << 15


class ShardedEngine(SearchEngine):
    """A ``SearchEngine`` over the shards of an index.

    index: from ``index.shards.load_shards``. What is returned on "the index's device" is on the first shard's.
    """

    index: ShardedIndex  # type: ignore[assignment]

    def __init__(self, index: ShardedIndex, *, impl: str = "auto") -> None:
        self.index = index
        self.device = index.device
        self.impl = self._choose(impl)
        shards = DeviceShards(index) if self.impl == "triton" else HostShards(index)
        self._device_search: Any = shards
        self._shards: Shards = shards

    def _score_aligned(self, Q: Tensor, pids: Tensor) -> Tensor:
        scores = torch.empty(pids.numel(), device=self.device)
        for s, at, local in self._shards.owned(pids):
            shard = self.index.shards[s]
            part = score_aligned(shard, self._shards.exact_scorer(s), Q[at.to(Q.device)], local.to(shard.device))
            scores[at] = part.to(self.device)
        return scores


class Shards:
    """What ``SearchEngine`` asks of a ``DeviceSearch``, from the engines of all shards. A watch learns nothing."""

    runs_ahead = False  # a batch of ``Replicas`` is not launched in steps

    def __init__(self, index: ShardedIndex) -> None:
        self.index = index
        self.device = index.device
        ends = [start + shard.num_passages for start, shard in zip(index.starts, index.shards, strict=True)]
        self._ends = torch.tensor(ends[:-1], dtype=torch.int32, device=self.device)

    def search(
        self, Q: Tensor, params: SearchParams, allow: Tensor | None = None, watch: Watch | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._found("search", Q[None], params, allow=allow)[0]

    def search_batch(self, Q: Tensor, params: SearchParams) -> list[tuple[Tensor, Tensor]]:
        return self._found("search", Q, params)

    def search_listed(
        self, kind: str, Q: Tensor, pids: Tensor, params: SearchParams, watch: Watch | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._found(kind, Q[None], params, lists=self._cut(pids))[0]

    def score(self, Q: Tensor, pids: Tensor) -> Tensor:
        scores = torch.empty(pids.numel(), device=self.device)
        owned = self.owned(pids)
        for (_, at, _), part in zip(owned, self._scored(Q, [(s, local) for s, _, local in owned]), strict=True):
            scores[at] = part
        return scores

    def survivors(
        self, Q: Tensor, params: SearchParams, *, pids: Tensor | None = None, allow: Tensor | None = None
    ) -> list[tuple[Tensor, ...]]:
        """As of one device: pids and columns of all shards, on the CPU."""
        lists, masks = None if pids is None else self._cut(pids), self._slices(allow)
        queries: list[list[tuple[Tensor, ...]]] = [[] for _ in Q]
        for s, start in enumerate(self.index.starts):
            if lists is None or lists[s].numel():
                found = self._survivors(s, Q, params, None if lists is None else lists[s], masks[s])
                for query, (local, *columns) in zip(queries, found, strict=True):
                    query.append((local + start, *columns))
        return [tuple(torch.cat(column) for column in zip(*query, strict=True)) for query in queries]

    def candidates(self, Q: Tensor, params: SearchParams, allow: Tensor | None) -> Tensor:
        masks = self._slices(allow)
        parts = [self._candidates(s, Q, params, mask) for s, mask in enumerate(masks)]
        return torch.cat([part.to(self.device) + start for part, start in zip(parts, self.index.starts, strict=True)])

    def owned(self, pids: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """(shard, positions int64 in ``pids``, pids int32 in the shard) of every shard that has some, all on the first
        device.

        pids: int32 [n] on the first device, any order. Raises IndexError for one outside the index.
        """
        outside = (pids < 0) | (pids >= self.index.num_passages)
        if bool(outside.any()):
            raise IndexError(f"pids: expected 0 .. {self.index.num_passages - 1}, got {int(pids[outside][0])}")
        owner = torch.bucketize(pids, self._ends, right=True)
        found = []
        for s, start in enumerate(self.index.starts):
            at = (owner == s).nonzero()[:, 0]
            if at.numel():
                found.append((s, at, pids[at] - start))
        return found

    def exact_scorer(self, shard: int) -> ExactScorer:
        raise NotImplementedError

    def profile(self, Q: Tensor, params: SearchParams) -> dict[str, float]:
        raise NotImplementedError

    def make_room(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.__dict__.pop("index", None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "index":
                raise ValueError("search engine: expected an open one, got one that was closed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _found(
        self,
        kind: str,
        Q: Tensor,
        params: SearchParams,
        *,
        lists: list[Tensor] | None = None,
        allow: Tensor | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """The answers of Q [B, LQ, DIM]. kind: "search", or "given" or "candidates" with lists of every shard's pids;
        with these or allow, B is 1."""
        raise NotImplementedError

    def _scored(self, Q: Tensor, lists: list[tuple[int, Tensor]]) -> list[Tensor]:
        """Exact scores on the first device of each shard's pids."""
        raise NotImplementedError

    def _survivors(
        self, shard: int, Q: Tensor, params: SearchParams, pids: Tensor | None, allow: Tensor | None
    ) -> list[tuple[Tensor, ...]]:
        raise NotImplementedError

    def _candidates(self, shard: int, Q: Tensor, params: SearchParams, allow: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _cut(self, pids: Tensor) -> list[Tensor]:
        """Each shard's part of ascending pids, in its own numbers, still on the first device. Waits for that."""
        cuts = torch.searchsorted(pids, self._ends).tolist()
        parts = pids.tensor_split(cuts)
        return [part - start for part, start in zip(parts, self.index.starts, strict=True)]

    def _slices(self, allow: Tensor | None) -> list[Tensor] | list[None]:
        """Each shard's part of a mask, still on the first device."""
        if allow is None:
            return [None] * len(self.index.shards)
        return list(allow.split([shard.num_passages for shard in self.index.shards]))


class HostShards(Shards):
    """Shards in host memory, one after the other."""

    def __init__(self, index: ShardedIndex) -> None:
        super().__init__(index)
        self._engines = [SearchEngine(shard, impl="torch") for shard in index.shards]

    def exact_scorer(self, shard: int) -> ExactScorer:
        return self._engines[shard]._stages.exact_scorer

    def profile(self, Q: Tensor, params: SearchParams) -> dict[str, float]:
        spent: dict[str, float] = {}
        for engine in self._engines:
            for stage, ms in engine.profile(Q, params).items():
                spent[stage] = spent.get(stage, 0.0) + ms
        return spent

    def make_room(self) -> None:
        pass

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        super().close()

    def _found(
        self,
        kind: str,
        Q: Tensor,
        params: SearchParams,
        *,
        lists: list[Tensor] | None = None,
        allow: Tensor | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        parts: list[list[Survivors]] = [[] for _ in Q]
        for s, (engine, start, mask) in enumerate(zip(self._engines, self.index.starts, self._slices(allow))):
            if lists is not None and lists[s].numel() == 0:
                continue
            if kind == "given":
                assert lists is not None
                found = [Survivors(*engine.search(q, params, pids=lists[s])) for q in Q]
            else:
                found = engine.survivors(Q, params, candidates=None if lists is None else lists[s], allow=mask)
            for query, one in zip(parts, found, strict=True):
                query.append(replace(one, pids=one.pids + start))
        if kind == "given":
            params = replace(params, mode="rerank", prefilter=None)
        return [merge(query, params) for query in parts]

    def _scored(self, Q: Tensor, lists: list[tuple[int, Tensor]]) -> list[Tensor]:
        return [self._engines[s].score_pids(Q[None], local) for s, local in lists]

    def _survivors(
        self, shard: int, Q: Tensor, params: SearchParams, pids: Tensor | None, allow: Tensor | None
    ) -> list[tuple[Tensor, ...]]:
        found = self._engines[shard].survivors(Q, params, candidates=pids, allow=allow)
        columns = ([one.pids, one.first, one.second, one.exact] for one in found)
        return [tuple(column for column in query if column is not None) for query in columns]

    def _candidates(self, shard: int, Q: Tensor, params: SearchParams, allow: Tensor | None) -> Tensor:
        engine = self._engines[shard]
        return engine._all_candidates(Q, params, allow)


def _on_device(index: ResidentIndex, most_pinned: int, joins: bool, queries: dict[int, Tensor]) -> DeviceSearch:
    from plaid_tilemaxsim.device_search import DeviceSearch

    return DeviceSearch(index, most_pinned, joins, queries)


def _lets_in(device: torch.device, other: torch.device) -> bool:
    """Whether kernels on ``device`` can read memory of ``other``; from here on they may."""
    if device == other:
        return True
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    # torch has a device let into another's memory when it first copies there
    torch.empty(1, device=other).copy_(torch.empty(1, device=device))
    return True


@dataclass
class _Merge:
    """Static input, output and the graph between them (None without CUDA)."""

    parts: list[Tensor]  # of every shard int32 [lanes, 1 + columns * room]
    run: Callable[[], Tensor]
    packed: Tensor  # int32 [lanes, 1 + 2 k]
    graph: torch.cuda.CUDAGraph | None = None
    pinned: Tensor | None = None  # packed, where it is in host memory: of one lane

    def replay(self) -> Tensor:
        if self.graph is None:
            self.packed = self.run()
        else:
            self.graph.replay()
        return self.packed


@dataclass
class _Plan:
    """One query in host memory: every shard's graph and a merge that fetches their rows, as one graph."""

    recordings: list[_Recording]
    merging: _Merge
    whole: Joined


class DeviceShards(Shards):
    """Shards on GPUs (or in Triton's interpreter). One search at a time: callers wait on a lock."""

    def __init__(self, index: ShardedIndex) -> None:
        super().__init__(index)
        self._turns = Turns(self.device)
        self._on_gpu = self.device.type == "cuda"
        joins = self._on_gpu and can_join()
        queries: dict[int, Tensor] = {}
        # whose memory the merge reads
        self._near = [not s or (joins and _lets_in(self.device, shard.device)) for s, shard in enumerate(index.shards)]
        self._shards = [
            _on_device(shard, 0 if near else MOST_PINNED, joins, queries)
            for shard, near in zip(index.shards, self._near)
        ]
        self._records = all(shard.records for shard in self._shards)
        self._joins = joins and self._records
        if self._on_gpu and not joins:
            log.warning(
                "devices: expected torch 2.8 or later and cuda-bindings (pip install cuda-bindings); without them a "
                "search is a launch a device"
            )
        self._streams = [torch.cuda.Stream(shard.device) for shard in index.shards] if self._on_gpu else []
        self._merges: Recent[tuple[Any, ...], _Merge] = Recent(MAX_MERGES)
        self._plans: Recent[tuple[Any, ...], _Plan | None] = Recent(MAX_MERGES)
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None

    def exact_scorer(self, shard: int) -> ExactScorer:
        return self._shards[shard].stages.exact_scorer

    def profile(self, Q: Tensor, params: SearchParams) -> dict[str, float]:
        """The longest of all shards in every stage, and the merge."""
        spent: dict[str, float] = {}
        with self._turn():
            for shard in self._shards:
                for stage, ms in shard.profile(Q, params).items():
                    spent[stage] = max(spent.get(stage, 0.0), ms)
            self.search(Q.to(self.device), params)
            merging = next(reversed(self._merges.values()))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                merging.replay()
            end.record()
            end.synchronize()
            spent["merge"] = begin.elapsed_time(end) / 20
        return spent

    def make_room(self) -> None:
        with self._turn():
            self._merges.clear()
            self._plans.clear()
            if self._on_gpu:
                self._pool = torch.cuda.graph_pool_handle()
            for shard in self._shards:
                shard.make_room()

    def close(self) -> None:
        with self._turns.take():
            self._merges.clear()
            self._plans.clear()
            for shard in self._shards:
                shard.close()
            super().close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """All devices for one caller, after the work of the caller before."""
        if self._on_gpu:
            faults.check_fork()
        with self._turns.take():
            try:
                yield
            except BaseException as error:
                mergers = [torch.cuda.current_stream()] if self._on_gpu else []
                for stream in [*self._streams, *mergers]:  # what is under way reads buffers that the next search writes
                    try:
                        stream.synchronize()
                    except RuntimeError as lost:
                        raise faults.device_lost(lost, stream.device) from error
                raise

    def _apart(self, shard: int) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside runs on the shard's stream."""
        return torch.cuda.stream(self._streams[shard]) if self._on_gpu else contextlib.nullcontext()

    def _fork(self) -> None:
        """The shards' streams go on after what the caller's has been given."""
        if self._on_gpu:
            here = torch.cuda.current_stream().record_event()
            for stream in self._streams:
                stream.wait_event(here)

    def _reachable(self, Q: Tensor) -> Tensor:
        """Where ``_fork`` has the shards wait for it: in host memory, or on the first device."""
        return Q.to(self.device) if Q.is_cuda else Q

    def _join(self) -> None:
        if self._on_gpu:
            here = torch.cuda.current_stream()
            for stream in self._streams:
                here.wait_stream(stream)

    def _found(
        self,
        kind: str,
        Q: Tensor,
        params: SearchParams,
        *,
        lists: list[Tensor] | None = None,
        allow: Tensor | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        keeps = [params.k] if kind == "given" else _keeps(params)
        if len(keeps) > 1:
            kind = "shard" if lists is None else "shard of candidates"
        with self._turn():
            if self._joins and len(Q) == 1 and Q.device.type == "cpu" and lists is None and allow is None:
                plan = self._plan(kind, Q.size(1), params, keeps)
                if plan is not None:
                    return self._planned(plan, Q)
            lanes = 1 if len(Q) == 1 else min(shard.batch_lanes(Q.size(1), len(Q)) for shard in self._shards)
            on_host = self._records and lanes == len(Q) == 1 and Q.device.type == "cpu"
            Q, masks = self._reachable(Q), self._slices(allow)
            # The first shard is next to the merge, the last one's row has a way to go.
            last_to_first = range(len(self._shards) - 1, -1, -1)
            queries = [Q] * len(self._shards)
            rounds = []
            for first in range(0, len(Q), lanes):
                self._fork()
                rows: list[Tensor | None] = [None] * len(self._shards)
                for s in last_to_first:
                    listed, shard = None if lists is None else lists[s], self._shards[s]
                    if listed is None or listed.numel():
                        with self._apart(s):
                            if first == 0 and not on_host:
                                queries[s] = Q.to(shard.device)
                            part = queries[s][first : first + lanes]
                            rows[s] = shard.launch(
                                kind, part, params, lanes, pids=listed, allow=masks[s], on_host=on_host
                            )
                merging = self._merge(lanes, keeps, tuple(0 if row is None else row.size(1) for row in rows))
                for s in last_to_first:
                    row = rows[s]
                    if row is not None:
                        with self._apart(s):
                            merging.parts[s].copy_(row, non_blocking=True)
                self._join()
                packed = merging.replay()
                if merging.pinned is None:
                    rounds.append(packed.clone())
                else:
                    torch.cuda.current_stream().synchronize()
                    rounds.append(merging.pinned.clone())
            return _answers(torch.cat(rounds)[: len(Q)].cpu())

    def _planned(self, plan: _Plan, Q: Tensor, mark: Callable[[str], None] = lambda step: None) -> list[Answer]:
        """mark: called after every step, with its name."""
        here = torch.cuda.current_stream()
        try:
            for shard in self._shards:
                shard.yield_to(here)
            pinned_Q = plan.recordings[0].pinned_Q  # that of all
            assert pinned_Q is not None
            pinned_Q.copy_(Q)
            mark("query")
            plan.whole.replay(here)
            mark("launch")
            here.synchronize()
            mark("wait")
        except BaseException as error:
            with contextlib.ExitStack() as cleaning:  # all of them, whatever the first one says
                for shard in self._shards:
                    cleaning.callback(shard.clean_after, error)
            raise
        assert plan.merging.pinned is not None
        found = _answers(plan.merging.pinned)
        mark("answer")
        return found

    def _plan(self, kind: str, lq: int, params: SearchParams, keeps: list[int | None]) -> _Plan | None:
        """None for rows that are too long."""

        def record() -> _Plan | None:
            found = [shard.prepared(kind, lq, params) for shard in self._shards]
            rows: list[Tensor] = []
            for one, near in zip(found, self._near):
                row = one.output if near else one.pinned
                if row is None or (rows and row.numel() > MOST_PINNED):
                    return None
                rows.append(row)
            merging = self._record_merge(1, keeps, tuple(row.size(1) for row in rows), rows)
            assert merging.graph is not None
            # the others first: their rows have a way to go
            return _Plan(found, merging, Joined([one.graph for one in found[::-1] if one.graph], merging.graph))

        return self._plans.of((kind, lq, params), record)

    def _merge(self, lanes: int, keeps: list[int | None], widths: tuple[int, ...]) -> _Merge:
        """That of shards whose rows have these widths, 0 for a shard without passages to look at."""
        return self._merges.of((lanes, tuple(keeps), widths), lambda: self._record_merge(lanes, keeps, widths))

    def _record_merge(
        self, lanes: int, keeps: list[int | None], widths: tuple[int, ...], sources: Sequence[Tensor] = ()
    ) -> _Merge:
        """sources: the shards' rows, which the graph is to fetch."""
        from plaid_tilemaxsim.ops import merge_kernel

        columns = 1 + len(keeps)
        if sources:
            # A kernel reads a few KB over the bus in less time than a copy takes to start.
            near = [source.is_cuda or source.numel() <= MOST_OVER_BUS for source in sources]
            parts = [s if here else torch.zeros_like(s, device=self.device) for s, here in zip(sources, near)]
            rows = parts[0]
        else:
            sizes = [lanes * max(width, 1) for width in widths]
            rows = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
            parts = [part.view(lanes, -1) for part in rows.split(sizes)]
        table = [
            [(part.data_ptr() - rows.data_ptr()) // 4, part.size(1), (part.size(1) - 1) // columns, start]
            for part, start in zip(parts, self.index.starts, strict=True)
        ]
        most = max(room for _, _, room, _ in table)
        placed = torch.tensor(table, dtype=torch.int64, device=self.device)

        def run(out: Tensor | None = None) -> Tensor:
            for part, source in zip(parts, sources):
                if part is not source:
                    part.copy_(source, non_blocking=True)
            return merge_kernel.merge(rows, placed, most, keeps, lanes, out)

        merging = _Merge(parts, run, run())  # compiles the kernels
        if not self._on_gpu:
            return merging
        if lanes == 1:
            merging.pinned = torch.zeros(merging.packed.shape, dtype=torch.int32, pin_memory=True)
        try:
            with recording(self.device, self._pool, bool(sources)) as graph:
                merging.packed = run(merging.pinned)
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # nothing is recorded into the other one any more
            raise
        merging.graph = graph
        return merging

    def _scored(self, Q: Tensor, lists: list[tuple[int, Tensor]]) -> list[Tensor]:
        with self._turn():
            Q = self._reachable(Q)
            # Of the caller's stream: memory of a shard's stream would be another caller's as soon as it is let go of.
            found = [torch.empty(local.numel(), device=self.device) for _, local in lists]
            self._fork()
            for (s, local), scores in zip(lists, found, strict=True):
                with self._apart(s):
                    row = self._shards[s].launch("score", Q[None], SearchParams(), 1, pids=local)
                    scores.copy_(row[: local.numel()], non_blocking=True)
            self._join()
        return found

    def _survivors(
        self, shard: int, Q: Tensor, params: SearchParams, pids: Tensor | None, allow: Tensor | None
    ) -> list[tuple[Tensor, ...]]:
        place = self.index.shards[shard].device
        pids, allow = (None if x is None else x.to(place) for x in (pids, allow))
        with self._turn():
            return self._shards[shard].survivors(Q, params, pids=pids, allow=allow)

    def _candidates(self, shard: int, Q: Tensor, params: SearchParams, allow: Tensor | None) -> Tensor:
        place = self.index.shards[shard].device
        with self._turn():
            return self._shards[shard].candidates(Q, params, None if allow is None else allow.to(place))


def _keeps(params: SearchParams) -> list[int | None]:
    """How many passages each column of the shards' scores leaves, the last one's being the answer."""
    if params.mode == "plaid":
        return [params.ndocs, params.ndocs // 4, params.k]
    if params.mode == "exhaustive" and params.prefilter is not None:
        return [params.prefilter, params.k]
    return [params.k]


def _answers(rows: Tensor) -> list[Answer]:
    """(pids int32 [n], scores fp32 [n]) of every row of int32 [B, 1 + 2 k] on the host."""
    from plaid_tilemaxsim.device_search import unpacked

    return cast("list[Answer]", unpacked(rows, 2))
