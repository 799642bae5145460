"""The engine of a ``scorer_options`` with devices and replicas: shards, copies, or copies of shards."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plaid_tilemaxsim import faults
from plaid_tilemaxsim.engine import SearchEngine
from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.index.resident import ResidentIndex, load_resident
from plaid_tilemaxsim.index.shards import ShardedIndex, load_shards
from plaid_tilemaxsim.merge import Survivors
from plaid_tilemaxsim.sharded import ShardedEngine

if TYPE_CHECKING:
    from plaid_tilemaxsim.index.files import PlaidIndex
    from plaid_tilemaxsim.index.pq import PQ

log = logging.getLogger("plaid_tilemaxsim")

Answer = tuple[Tensor, Tensor]
Work = tuple[SearchEngine, Tensor]  # and its queries


class Replicas(SearchEngine):
    """Independent copies of an engine, for throughput: batches are split over them, searches go to an idle one.

    engines: equal ones, each a ``SearchEngine``; answers are those of the first. What is returned on a device is on
    the first one's, and a filter_fn, which sees tensors there, is run by it.
    """

    def __init__(self, engines: Sequence[SearchEngine]) -> None:
        self.engines = list(engines)
        self.index, self.device, self.impl = engines[0].index, engines[0].device, engines[0].impl
        self._busy = [0] * len(self.engines)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(len(self.engines), thread_name_prefix="replica")
        self._seen: set[tuple[Any, ...]] = set()
        searches = [engine._device_search for engine in engines]
        self._runs_ahead = all(search is not None and search.runs_ahead for search in searches)

    def search(self, Q: Tensor, params: SearchParams, **filters: Any) -> tuple[Tensor, Tensor]:
        if filters.get("filter_fn") is not None:
            return self.engines[0].search(Q, params, **filters)
        with self._idle() as engine:
            return engine.search(Q, params, **filters)

    def search_batch(self, Q: Tensor, params: SearchParams, **filters: Any) -> list[tuple[Tensor, Tensor]]:
        Q = self._check_query(Q, 3)
        parts = [part for part in Q.tensor_split(len(self.engines)) if len(part)]
        if len(parts) < 2 or filters.get("filter_fn") is not None:
            return self.engines[0]._checked_batch(Q, params, **filters)
        work = list(zip(self.engines, parts))
        if self._runs_ahead and all(value is None for name, value in filters.items() if name != "watch"):
            self._check_ncells(params, given=False)
            answers = []
            try:
                answers = self._in_steps(work, params)
            except torch.OutOfMemoryError as error:
                log.warning("%s; one replica after the other", faults.first_line(error))
            # not while the error is handled: it keeps what was allocated
            answers = answers or [engine._checked_batch(part, params) for engine, part in work]
        else:
            answers = self._in_threads(work, params, filters)
        return [one for part in answers for one in part]

    def _in_steps(self, work: list[Work], params: SearchParams) -> list[list[Answer]]:
        """A launch on every device in turn, from this thread.

        Of threads, one a device, the first to launch would go on to its last launch before another gets to its first:
        it lets go of the interpreter for less time than another takes to wake up.
        """
        answers: list[list[Answer]] = [[] for _ in work]
        with torch.no_grad(), contextlib.ExitStack() as ending:
            going = {}
            for i, (engine, part) in enumerate(work):
                assert engine._device_search is not None
                going[i] = engine._device_search.batch_in_steps(part, params)
                ending.callback(going[i].close)  # after an error in another's
            while going:
                for i, steps in list(going.items()):
                    try:
                        next(steps)
                    except StopIteration as end:
                        answers[i] = end.value
                        del going[i]
        return answers

    def _in_threads(self, work: list[Work], params: SearchParams, filters: dict[str, Any]) -> list[list[Answer]]:
        """For what waits for its device between launches."""
        tasks = [self._task(engine, part, params, filters) for engine, part in work]
        # Not at once what has not run yet: recording a graph waits for devices, which fails beside another recording.
        key = (*(part.shape for _, part in work), params)
        if key not in self._seen:
            answers = [task() for task in tasks]
            self._seen.add(key)
            return answers
        others = [self._pool.submit(task) for task in tasks[1:]]
        return [tasks[0](), *(other.result() for other in others)]

    def candidates(self, Q: Tensor, ncells: int) -> Tensor:
        with self._idle() as engine:
            return engine.candidates(Q, ncells).to(self.device)

    def score_pids(self, Q: Tensor, pids: Tensor | list[int]) -> Tensor:
        with self._idle() as engine:
            return engine.score_pids(Q, pids).to(self.device)

    def survivors(self, Q: Tensor, params: SearchParams, **filters: Any) -> list[Survivors]:
        with self._idle() as engine:
            return engine.survivors(Q, params, **filters)

    def allow_mask(self, allow: Tensor) -> Tensor:
        return self.engines[0].allow_mask(allow)

    def profile(self, Q: Tensor, params: SearchParams) -> dict[str, float]:
        return self.engines[0].profile(Q, params)

    def warmup(self, lq: int, params: SearchParams, batch: bool = False) -> None:
        for engine in self.engines:
            engine.warmup(lq, params, batch)

    def close(self) -> None:
        self._seen.clear()  # so that what comes from here on is not given to the pool
        self._pool.shutdown()
        for engine in self.engines:
            engine.close()
        self.__dict__.pop("index", None)

    @contextlib.contextmanager
    def _idle(self) -> Iterator[SearchEngine]:
        """One that the fewest callers are in."""
        with self._lock:
            chosen = min(range(len(self.engines)), key=self._busy.__getitem__)
            self._busy[chosen] += 1
        try:
            yield self.engines[chosen]
        finally:
            with self._lock:
                self._busy[chosen] -= 1

    def _task(
        self, engine: SearchEngine, Q: Tensor, params: SearchParams, filters: dict[str, Any]
    ) -> Callable[[], list[tuple[Tensor, Tensor]]]:
        ready = torch.cuda.current_stream(Q.device).record_event() if Q.is_cuda else None

        def task() -> list[tuple[Tensor, Tensor]]:
            if ready is not None:  # a thread of the pool has a stream of its own
                torch.cuda.current_stream(Q.device).wait_event(ready)
            return engine._checked_batch(Q, params, **filters)

        return task


def resolve_devices(devices: Sequence[str] | None, replicas: int, on_gpu: bool) -> list[list[torch.device]]:
    """The devices of every replica. devices: names as in ``ScorerConfig``; None: one for each replica, GPUs from the
    current one on where ``on_gpu``.

    A CUDA device that is named twice holds two shards (or copies), which is logged: nothing is gained by it.
    Raises ValueError for a device that is not there, CPU and GPU together, and a number of devices that the replicas
    cannot share equally.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices is None and on_gpu:
        first = torch.cuda.current_device()
        if replicas > there - first:
            raise ValueError(f"scorer option replicas: expected at most {there - first} GPUs' worth, got {replicas}")
        devices = [f"cuda:{first + i}" for i in range(replicas)]
    places = [torch.device(name) for name in devices or ["cpu"] * replicas]
    known = ["cpu", *(f"cuda:{i}" for i in range(there))]
    for i, place in enumerate(places):
        if str(place) not in known:
            raise ValueError(f"scorer option devices[{i}]: expected one of {known}, got {str(place)!r}")
    if len({place.type for place in places}) > 1:
        raise ValueError(f"scorer option devices: expected only GPUs or only cpu, got {[str(p) for p in places]}")
    if len(places) % replicas:
        raise ValueError(f"scorer option replicas: expected a divisor of the {len(places)} devices, got {replicas}")
    if places[0].type == "cuda":
        if len(set(places)) < len(places):
            log.warning("devices: %s names a GPU more than once", [str(place) for place in places])
        kinds = {torch.cuda.get_device_name(place) for place in places}
        if len(kinds) > 1:
            log.warning("devices: %s are of several kinds; scores may differ in their last bits", sorted(kinds))
    size = len(places) // replicas
    return [places[first : first + size] for first in range(0, len(places), size)]


def build_engine(
    index: PlaidIndex,
    groups: Sequence[Sequence[torch.device]],
    placement: str = "auto",
    *,
    codec: str = "residual",
    pq: PQ | None = None,
    impl: str = "auto",
    shared: Sequence[SearchEngine] = (),
) -> SearchEngine:
    """An engine over the devices of ``resolve_devices``: shards where a group has several, replicas of several groups.

    shared: engines of the same index. The rest, and what is raised, is as for ``load_resident`` and ``load_shards``.
    """
    held = [engine.index for one in shared for engine in (one.engines if isinstance(one, Replicas) else [one])]
    engines: list[SearchEngine] = []
    try:
        for places in groups:
            if len(places) == 1:
                whole = [layout for layout in held if isinstance(layout, ResidentIndex)]
                resident = load_resident(index, places[0], placement, codec=codec, pq=pq, shared=whole)
                engines.append(SearchEngine(resident, impl=impl))
            else:
                cut = [layout for layout in held if isinstance(layout, ShardedIndex)]
                sharded = load_shards(index, places, placement, codec=codec, pq=pq, shared=cut)
                engines.append(ShardedEngine(sharded, impl=impl))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return engines[0] if len(engines) == 1 else Replicas(engines)
