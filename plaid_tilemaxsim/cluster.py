"""An index on several machines: one Ray actor for each shard that ``plaid-tilemaxsim shard`` wrote.

    coordinator   the query to every actor
    actors        candidates, prune, exact                  each for its shard, as ``SearchEngine.survivors``
    coordinator   the stages' cuts over all shards, topk    ``merge.merge``

A search is one round trip (two with ``filter_fn``) and finds what one machine with the whole index finds, to the bit,
on devices of one kind (on CPUs: with as many threads). A shard that does not answer makes a search fail with
``ShardsMissing``, unless the call asks for ``partial="allow"`` and then names it in its answer. Lost actors are started
again, by whoever notices first: a search or the health check.

Every machine must see the folder of its shards at the same path. Needs ``pip install "plaid-tilemaxsim[cluster]"``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from plaid_tilemaxsim import compat
from plaid_tilemaxsim.config import ScorerConfig
from plaid_tilemaxsim.engine import SearchEngine, SearchParams, with_defaults
from plaid_tilemaxsim.index.split import Shard, check_shard, read_manifest
from plaid_tilemaxsim.merge import Survivors, merge

if TYPE_CHECKING:
    from colbert.data import Ranking

    from plaid_tilemaxsim.index.resident import ResidentIndex

logger = logging.getLogger("plaid_tilemaxsim")

# Options of the scorer that reach the actors, or the parameters of a search.
OPTIONS = ("mode", "codec", "placement", "impl", "verify", "prefilter", "tuning")
# Queries of ``search_all`` that go to the actors in one request.
BATCH = 256
HEALTH = "health"

# Searchers in a Ray that one of them started; the last to close shuts it down.
_sharing: set[ClusterSearcher] = set()
_sharing_lock = threading.Lock()

Found = tuple[list[int], list[int], list[float]]
Range = tuple[float, float]


class ShardsMissing(RuntimeError):
    """Shards did not answer, so there is no answer of the whole index. missing: why, by the shard's folder."""

    def __init__(self, missing: Mapping[str, str], shards: int) -> None:
        self.missing = dict(missing)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        super().__init__(f"{len(missing)} of {shards} shards did not answer: {reasons}")


class Partial(NamedTuple):
    """What ``partial="allow"`` returns: results of the shards that answered, and why others did not, by folder."""

    pids: list[int]
    ranks: list[int]
    scores: list[float]
    missing: dict[str, str]


class ClusterSearcher:
    """Searches the shards in a folder; ``Searcher``'s calls, safe from several threads. Close it, or use ``with``.

    shards: folder with shards.json. checkpoint: of the query encoder, None for the index's own; loaded when text is
    searched first, on a GPU if this process has one. config: a ColBERTConfig whose ncells, centroid_score_threshold,
    ndocs and query_maxlen override the index's; None in the first three means PLAID's for each search's k.
    scorer_options: as in ColBERTConfig, OPTIONS alone, not codec "pq". gpus: GPUs of an actor, 0 to search on CPUs,
    where each gets ``cpus``. actor_options: more of Ray's options for every actor, or a function of the shard's number
    (``{"resources": {"rack-2": 1}}``); Ray spreads actors over machines by itself. address: of a Ray cluster, None
    for the one this process is connected to, or a new one on this machine. timeout: seconds within which a shard must
    answer; load_timeout: within which all must be loaded at first; health_interval: between health checks, in which an
    actor must answer within ``health_timeout``.
    Raises ImportError without Ray, ValueError for wrong arguments, files or a cluster without the GPUs asked for, and
    ShardsMissing where actors do not start.
    """

    def __init__(
        self,
        shards: Path | str,
        *,
        checkpoint: str | None = None,
        config: Any = None,
        scorer_options: Mapping[str, Any] | None = None,
        gpus: float = 0,
        cpus: float = 1,
        actor_options: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        address: str | None = None,
        timeout: float = 30.0,
        load_timeout: float = 1800.0,
        health_interval: float = 5.0,
        health_timeout: float = 30.0,
    ) -> None:
        self._ray = _import_ray()
        self.manifest = read_manifest(shards)
        self.options = _checked(ScorerConfig.from_options(scorer_options))
        self.timeout, self.health_timeout = timeout, health_timeout
        self._load_timeout = load_timeout
        self._checkpoint_name, self._encoder = checkpoint, None
        assigned = getattr(config, "assigned", ())
        self._config = {**self.manifest.config, **{name: getattr(config, name) for name in assigned}}
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._in_use = 0
        self._closed = threading.Event()
        self._range: Range | None = None
        self._health: threading.Thread | None = None
        self._actors: list[Any] = []
        self._loading: list[tuple[Any, float]] = []  # what an actor says once it has loaded, and since when it does
        with _sharing_lock:
            if not self._ray.is_initialized():
                _sharing.clear()  # whose Ray the program has shut down
                self._ray.init(address=address, include_dashboard=False, log_to_driver=False)
                _sharing.add(self)
            elif _sharing:
                _sharing.add(self)
        try:
            held = self._ray.cluster_resources()
            for name, each, there in (("gpus", gpus, held.get("GPU", 0)), ("cpus", cpus, held.get("CPU", 0))):
                needed = each * len(self.manifest.shards)
                if needed > there:
                    raise ValueError(
                        f"{name}: expected at most the {there:g} of this Ray cluster for all shards, got {needed:g}"
                    )
            extra = actor_options if callable(actor_options) else lambda _: actor_options or {}
            self._start_options = [
                {"num_gpus": gpus, "num_cpus": cpus, "scheduling_strategy": "SPREAD", **extra(i)}
                for i in range(len(self.manifest.shards))
            ]
            for i in range(len(self.manifest.shards)):
                actor, loading = self._start(i)
                self._actors.append(actor)
                self._loading.append((loading, time.monotonic()))
            self._await_all()
        except BaseException:
            self.close()
            raise
        self._health = threading.Thread(target=self._watch, args=(health_interval,), daemon=True, name="shard health")
        self._health.start()

    def __enter__(self) -> ClusterSearcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the actors, searches under way (ValueError), and the Ray that searchers started with the last of these.

        Idempotent.
        """
        with self._idle:
            if self._closed.is_set():
                return
            self._closed.set()
            if self._ray.is_initialized():  # or the program has ended Ray, and the actors with it
                for actor in self._actors:
                    self._ray.kill(actor)
            self._actors.clear()
            # Not for long, since what they wait for has ended. What they called after a shutdown would start Ray anew.
            self._idle.wait_for(lambda: self._in_use == 0)
        if self._health is not None:
            self._health.join()
        with _sharing_lock:
            if self in _sharing:
                _sharing.remove(self)
                if not _sharing and self._ray.is_initialized():
                    self._ray.shutdown()

    def encode(self, text: str | list[str], full_length_search: bool = False) -> Tensor:
        """fp32 [B, LQ, DIM] on the CPU: one query, or several, as ``Searcher.encode``."""
        queries = text if isinstance(text, list) else [text]
        encoder = self._load_encoder()
        encoder.query_tokenizer.query_maxlen = self._config["query_maxlen"]
        bsize = 128 if len(queries) > 128 else None
        Q = encoder.queryFromText(queries, bsize=bsize, to_cpu=True, full_length_search=full_length_search)
        return cast(Tensor, Q)

    def search(self, text: str, k: int = 10, full_length_search: bool = False, **options: Any) -> Found | Partial:
        """``dense_search`` for a query in words."""
        return self.dense_search(self.encode(text, full_length_search), k, **options)

    def dense_search(
        self,
        Q: Tensor,
        k: int = 10,
        filter_fn: Callable[[Tensor], Tensor] | None = None,
        pids: Any = None,
        allow: Tensor | None = None,
        partial: str = "error",
    ) -> Found | Partial:
        """(pids, ranks, scores) of the k best passages, best first, ties to the smaller pid.

        Q: [1, LQ, DIM]. pids, allow: as in ``SearchEngine.search``. filter_fn: gets all candidates, int32 [n] ascending
        on the CPU, here and not in the actors. partial: "error" raises ShardsMissing where a shard does not answer;
        "allow" returns a Partial, four fields, whose ``missing`` names those (and still raises where none answers).
        Raises ValueError and IndexError as the engine does.
        """
        _check_partial(partial)
        if not isinstance(Q, Tensor) or Q.dim() != 3 or Q.size(0) != 1:
            got = list(Q.shape) if isinstance(Q, Tensor) else type(Q).__name__
            raise ValueError(f"Q: expected one query [1, LQ, DIM], got {got}")
        params = self._params(k)
        missing: dict[str, str] = {}
        masks = [None] * len(self.manifest.shards) if allow is None else self._allowed(allow)
        if pids is not None:
            given = self._listed("pids", pids)
            if allow is not None:
                given = given[torch.cat(cast(list[Tensor], masks))[given.long()]]
            if filter_fn is not None:
                given = self._filtered(filter_fn, given)
            found = self._found(Q, params, "given", self._local(given), missing, partial)
        elif filter_fn is not None:
            kept = self._filtered(filter_fn, self._candidates(Q, params, masks, missing, partial))
            found = self._found(Q, params, "candidates", self._local(kept), missing, partial)
        else:
            found = self._found(Q, params, "search", dict(enumerate(masks)), missing, partial)
        best, scores = found[0]
        ranks = list(range(1, len(best) + 1))
        if partial == "allow":
            return Partial(best.tolist(), ranks, scores.tolist(), missing)
        return best.tolist(), ranks, scores.tolist()

    def search_all(
        self, queries: Any, k: int = 10, full_length_search: bool = False, partial: str = "error"
    ) -> Ranking | tuple[Ranking, dict[str, str]]:
        """A colbert ``Ranking`` of all queries (as ``Searcher.search_all``); BATCH of them in one round trip.

        partial: as in ``dense_search``; "allow" returns the shards that missed any query beside the Ranking.
        """
        compat.allow_missing_git()
        from colbert.data import Queries, Ranking
        from colbert.infra.provenance import Provenance

        _check_partial(partial)
        queries = Queries.cast(queries)
        Q = self.encode(list(queries.values()), full_length_search)
        missing: dict[str, str] = {}
        data = {}
        qids = list(queries.keys())
        for first in range(0, len(qids), BATCH):
            everyone = dict.fromkeys(range(len(self.manifest.shards)))
            found = self._found(Q[first : first + BATCH], self._params(k), "search", everyone, missing, partial)
            for qid, (best, scores) in zip(qids[first : first + BATCH], found, strict=True):
                data[qid] = list(zip(best.tolist(), range(1, len(best) + 1), scores.tolist(), strict=True))
        provenance = Provenance()
        provenance.source = "ClusterSearcher.search_all"
        provenance.queries = queries.provenance()
        provenance.k = k
        ranking = Ranking(data=data, provenance=provenance)
        return (ranking, missing) if partial == "allow" else ranking

    def health(self) -> dict[str, str]:
        """By the shard's folder: "ok", "loading", or what is wrong. Starts lost actors again."""
        pings, state = {}, {}
        with self._using():
            with self._lock:
                actors = list(enumerate(self._actors))
                loading = {i: self._is_loading(i) for i, _ in actors}
            for i, actor in actors:
                if loading[i]:
                    state[i] = "loading"
                else:
                    pings[i] = actor.ping.options(concurrency_group=HEALTH).remote()
            ready = self._wait(pings.values(), self.health_timeout)
            for i, ping in pings.items():
                state[i] = "ok"
                if ping not in ready:
                    state[i] = f"no answer within {self.health_timeout:g} s"
                else:
                    try:
                        self._ray.get(ping)
                    except self._ray.exceptions.RayError as error:
                        state[i] = _reason(error)
                if state[i] != "ok":
                    self._restart(i, actors[i][1], state[i])
        return {self.manifest.shards[i].folder: state[i] for i, _ in actors}

    def _params(self, k: int) -> SearchParams:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k: expected an integer >= 1, got {k!r}")
        config = self._config
        return with_defaults(
            k,
            ncells=config.get("ncells"),
            threshold=config.get("centroid_score_threshold"),
            ndocs=None if config.get("ndocs") is None else max(4, config["ndocs"]),
            query_maxlen=config.get("query_maxlen"),
            mode=self.options.mode,
            prefilter=self.options.prefilter,
        )

    def _start(self, i: int) -> tuple[Any, Any]:
        """A new actor for a shard, and the future of what it says once it has loaded."""
        remote = self._ray.remote(concurrency_groups={HEALTH: 1})(ShardActor).options(**self._start_options[i])
        shard = self.manifest.shards[i]
        actor = remote.remote(
            str(self.manifest.path.resolve()), shard, self.options, self._start_options[i]["num_gpus"]
        )
        return actor, actor.describe.remote()

    def _await_all(self) -> None:
        waiting = {future: self.manifest.shards[i].folder for i, (future, _) in enumerate(self._loading)}
        deadline, ranges = time.monotonic() + self._load_timeout, []
        while waiting:
            ready = self._ray.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))[0]
            if not ready:
                reason = f"not loaded within {self._load_timeout:g} s"
                raise ShardsMissing(dict.fromkeys(waiting.values(), reason), len(self._loading))
            folder = waiting.pop(ready[0])
            try:
                ranges.append(self._ray.get(ready[0]))
            except self._ray.exceptions.RayError as error:
                raise ShardsMissing({folder: _reason(error)}, len(self._loading)) from None
        known = [one for one in ranges if one is not None]
        if known:
            self._range = min(low for low, _ in known), max(high for _, high in known)

    def _restart(self, i: int, lost: Any, reason: str) -> None:
        with self._lock:
            # Whoever noticed first has started another.
            if self._closed.is_set() or self._actors[i] is not lost:
                return
            logger.warning("%s: %s; starting another actor", self.manifest.shards[i].folder, reason)
            self._ray.kill(lost)
            self._actors[i], loading = self._start(i)
            self._loading[i] = loading, time.monotonic()

    def _is_loading(self, i: int) -> bool:
        """Not longer than it may: an actor that never loads is one that does not answer."""
        future, since = self._loading[i]
        done = self._wait([future], 0)
        return not done and time.monotonic() - since < self._load_timeout

    def _wait(self, futures: Iterable[Any], timeout: float) -> list[Any]:
        """Those that are done, with an answer or an error, once all are or the time is over."""
        waiting = list(futures)
        return self._ray.wait(waiting, num_returns=len(waiting), timeout=timeout)[0] if waiting else []

    def _watch(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self.health()
            except (self._ray.exceptions.RayError, RuntimeError, ValueError) as error:
                if not self._closed.is_set():
                    logger.warning("health check of the shards: %s", error)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ValueError("searcher: expected an open one, got one that was closed")

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Calls to Ray, for whose end ``close`` waits. ValueError once it is closed."""
        with self._idle:
            self._check_open()
            self._in_use += 1
        try:
            yield
        finally:
            with self._idle:
                self._in_use -= 1
                self._idle.notify_all()

    def _ask(
        self, method: str, calls: Mapping[int, tuple[Any, ...]], missing: dict[str, str], partial: str
    ) -> dict[int, Any]:
        """Answers by shard. Puts those that did not answer into ``missing``, and raises unless these are allowed."""
        with self._lock:
            self._check_open()
            actors = {i: self._actors[i] for i in calls}
        futures = {i: getattr(actors[i], method).remote(*arguments) for i, arguments in calls.items()}
        ready = self._wait(futures.values(), self.timeout)
        answers, absent = {}, {}
        for i, future in futures.items():
            name = self.manifest.shards[i].folder
            if future not in ready:
                loading = ", it is being loaded" if self._is_loading(i) else ""
                absent[name] = f"no answer within {self.timeout:g} s{loading}"
                self._ray.cancel(future)
                continue
            try:
                answers[i] = self._ray.get(future)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, (ValueError, IndexError)):  # the caller's, the same in all shards
                    raise error.cause from None
                absent[name] = _reason(error)
            except self._ray.exceptions.RayError as error:
                absent[name] = _reason(error)
                self._restart(i, actors[i], absent[name])
        if absent:
            self._check_open()
        missing.update(absent)
        if absent and (partial == "error" or not answers):
            raise ShardsMissing(absent, len(self.manifest.shards))
        return answers

    def _found(
        self,
        Q: Tensor,
        params: SearchParams,
        kind: str,
        filters: Mapping[int, Any],
        missing: dict[str, str],
        partial: str,
    ) -> list[tuple[Tensor, Tensor]]:
        """(pids, scores) of every query of Q [B, LQ, DIM]. filters: by shard, those of ``ShardActor.find``."""
        if not filters:
            return [(torch.zeros(0, dtype=torch.int32), torch.zeros(0))] * len(Q)
        query = Q.detach().float().cpu().numpy()
        with self._using():
            query = self._ray.put(query) if len(Q) > 1 else query
            calls = {
                i: (query, params, self._range, kind, None if filter_ is None else filter_.numpy())
                for i, filter_ in filters.items()
            }
            answers = self._ask("find", calls, missing, partial)
        if kind == "given":
            params = dataclasses.replace(params, mode="rerank", prefilter=None)
        merged = []
        for b in range(len(Q)):
            parts = []
            for i, answer in answers.items():
                pids, *columns = (None if column is None else torch.tensor(column) for column in answer[b])
                found = Survivors(cast(Tensor, pids) + self.manifest.shards[i].first_pid, *cast(list[Any], columns))
                parts.append(found)
            merged.append(merge(parts, params))
        return merged

    def _candidates(
        self, Q: Tensor, params: SearchParams, masks: list[Any], missing: dict[str, str], partial: str
    ) -> Tensor:
        """int32 [n] ascending: what the query may find, of all shards."""
        query = Q[0].detach().float().cpu().numpy()
        calls = dict.fromkeys(range(len(masks)), (query, params, self._range))
        with self._using():
            answers = self._ask("candidates", calls, missing, partial)
        parts = []
        for i, answer in sorted(answers.items()):
            pids = torch.tensor(answer)
            kept = pids if masks[i] is None else pids[masks[i][pids.long()]]
            parts.append(kept + self.manifest.shards[i].first_pid)
        return torch.cat(parts)

    def _filtered(self, filter_fn: Callable[[Tensor], Tensor], pids: Tensor) -> Tensor:
        kept = filter_fn(pids)
        if not isinstance(kept, Tensor) or kept.dtype != torch.int32 or kept.device.type != "cpu" or kept.dim() != 1:
            got = (
                f"{kept.dtype} {list(kept.shape)} on {kept.device}" if isinstance(kept, Tensor) else type(kept).__name__
            )
            raise ValueError(f"filter_fn: expected to return an int32 [n] tensor on the CPU, got {got}")
        return self._listed("filter_fn", kept)

    def _listed(self, name: str, pids: Any) -> Tensor:
        """int32 [n] ascending; IndexError for one outside the index."""
        try:
            listed = (
                pids if isinstance(pids, Tensor) else torch.as_tensor(pids if hasattr(pids, "dtype") else list(pids))
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}: expected integers [n], got {type(pids).__name__} ({error})") from None
        if listed.numel() == 0:
            return torch.zeros(0, dtype=torch.int32)
        if listed.dim() != 1 or listed.is_floating_point() or listed.dtype == torch.bool or listed.is_complex():
            raise ValueError(f"{name}: expected integers [n], got {listed.dtype} {list(listed.shape)}")
        listed = listed.cpu().long().sort().values
        for pid in (int(listed[0]), int(listed[-1])):
            if not 0 <= pid < self.manifest.num_passages:
                raise IndexError(f"{name}: expected 0 .. {self.manifest.num_passages - 1}, got {pid}")
        return listed.int()

    def _local(self, pids: Tensor) -> dict[int, Tensor]:
        """Ascending pids as those of each shard that has some, in the shard's numbers."""
        firsts = torch.tensor([shard.first_pid for shard in self.manifest.shards[1:]], dtype=torch.int32)
        parts = pids.tensor_split(torch.searchsorted(pids, firsts))
        return {i: part - self.manifest.shards[i].first_pid for i, part in enumerate(parts) if part.numel()}

    def _allowed(self, allow: Any) -> list[Any]:
        """A mask bool [n] for each shard, of a mask bool [N] or of pids."""
        mask = allow if isinstance(allow, Tensor) else torch.as_tensor(allow)
        N = self.manifest.num_passages
        if mask.dtype != torch.bool:
            pids, mask = self._listed("allow", mask), torch.zeros(N, dtype=torch.bool)
            mask[pids.long()] = True
        elif mask.shape != (N,):
            raise ValueError(f"allow: expected bool [{N}], got {list(mask.shape)}")
        return list(mask.cpu().split([shard.num_passages for shard in self.manifest.shards]))

    def _load_encoder(self) -> Any:
        with self._lock:
            if self._encoder is None:
                compat.apply()
                from colbert.infra.config import ColBERTConfig
                from colbert.modeling.checkpoint import Checkpoint

                ours, _ = ColBERTConfig.from_deprecated_args(self._config)
                name = self._checkpoint_name or self._config.get("checkpoint")
                if not name:
                    raise ValueError("checkpoint: expected a name or path, since the index names none, got None")
                config = ColBERTConfig.from_existing(ColBERTConfig.load_from_checkpoint(name), ours)
                encoder = Checkpoint(name, colbert_config=config, verbose=0)
                self._encoder = encoder.cuda() if torch.cuda.is_available() else encoder
            return self._encoder


class ShardActor:
    """One shard in a process of its own. Ray makes an actor of it; nothing here knows Ray."""

    def __init__(self, folder: str, shard: Shard, options: ScorerConfig, gpus: float) -> None:
        from plaid_tilemaxsim.index.files import Verify, read_index
        from plaid_tilemaxsim.index.resident import inverse_norm_range, load_resident

        index = read_index(Path(folder) / shard.folder, verify=cast("Verify", options.verify))
        check_shard(index, shard, contents=options.verify == "full")
        device = torch.device("cuda" if gpus else "cpu")
        if options.tuning is not None:
            from plaid_tilemaxsim.ops import tuning

            tuning.load(options.tuning, device)
        self._options = options
        self._resident: ResidentIndex = load_resident(
            index, device, options.placement, progress=False, codec=options.codec, norms=False
        )
        self._engine: SearchEngine | None = None
        self._range: Range | None = None
        if options.codec == "residual" and self._resident.inv_norms is None:
            self._range = inverse_norm_range(*self._stored())

    def ping(self) -> None:
        """Answers; raises RuntimeError where the GPU no longer does, which only another process can use again."""
        if self._resident.device.type == "cuda":
            torch.cuda.synchronize(self._resident.device)

    def describe(self) -> Range | None:
        """The range of this shard's inverse norms, where they are to be steps over the range of all shards."""
        return self._range

    def find(
        self, Q: np.ndarray, params: SearchParams, within: Range | None, kind: str, filter_: np.ndarray | None
    ) -> list[tuple[np.ndarray | None, ...]]:
        """Fields of ``Survivors`` for each query of Q fp32 [B, LQ, DIM], pids in the shard's numbers.

        within: range of all shards' inverse norms. kind: "search", with a mask bool [n] or None; "candidates" or
        "given", with pids int32, for one query.
        """
        engine, queries = self._ready(within), torch.tensor(Q)
        filter_tensor = None if filter_ is None else torch.tensor(filter_)
        if kind == "given":
            found = [Survivors(*engine.search(queries[0], params, pids=filter_tensor))]
        elif kind == "candidates":
            found = engine.survivors(queries, params, candidates=filter_tensor)
        else:
            found = engine.survivors(queries, params, allow=filter_tensor)
        columns = ((one.pids, one.exact, one.first, one.second) for one in found)
        return [tuple(None if column is None else column.numpy() for column in row) for row in columns]

    def candidates(self, Q: np.ndarray, params: SearchParams, within: Range | None) -> np.ndarray:
        """int32 [n] ascending: candidates of Q fp32 [LQ, DIM] in this shard, before any pruning. within: as above."""
        if params.mode == "exhaustive":
            return np.arange(self._resident.num_passages, dtype=np.int32)
        short = torch.tensor(Q)[: params.query_maxlen]
        return self._ready(within).candidates(short, params.ncells).cpu().numpy()

    def _ready(self, within: Range | None) -> SearchEngine:
        from plaid_tilemaxsim.index.resident import quantised_inverse_norms

        if self._engine is None:
            if self._options.codec == "residual" and self._resident.inv_norms is None:
                stored = self._stored()
                norms, low, step = quantised_inverse_norms(*stored, within=within)
                self._resident = dataclasses.replace(
                    self._resident, inv_norms=norms, inv_norm_lo=low, inv_norm_step=step
                )
            self._engine = SearchEngine(self._resident, impl=self._options.impl)
        return self._engine

    def _stored(self) -> tuple[Tensor, Any, Tensor, Tensor, int]:
        one = self._resident
        return one.codes, one.residuals, one.centroids, one.bucket_weights, one.nbits


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ImportError('plaid_tilemaxsim.cluster needs Ray: pip install "plaid-tilemaxsim[cluster]"') from None


def _checked(options: ScorerConfig) -> ScorerConfig:
    if options.codec == "pq":
        raise ValueError("scorer option codec: expected residual or dense on a cluster, got 'pq'")
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in OPTIONS and value != field.default:
            raise ValueError(f"scorer_options: expected names from {list(OPTIONS)} on a cluster, got {field.name!r}")
    return options


def _check_partial(partial: str) -> None:
    if partial not in ("error", "allow"):
        raise ValueError(f"partial: expected 'error' or 'allow', got {partial!r}")


def _reason(error: BaseException) -> str:
    """The line that says most of an error of Ray, whose texts are pages."""
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    return f"{type(cause or error).__name__}: {last}"[:300]
