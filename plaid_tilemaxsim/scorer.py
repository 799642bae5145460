"""ColBERT's words in, ColBERT's words out: an IndexScorer that leaves scoring to the search engine.

A TileMaxSimScorer serves the calls whose config says ``scorer="tilemaxsim"`` and is stock's IndexScorer for all
others. Either side loads its copy of the index when first needed, so that a process pays for what it uses.
"""

from __future__ import annotations

import gc
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from plaid_tilemaxsim import compat, faults, is_enabled
from plaid_tilemaxsim.config import ScorerConfig, options_of, scorer_of
from plaid_tilemaxsim.index.stamps import fingerprint
from plaid_tilemaxsim.stats import SearchStats, Watch

compat.allow_missing_git()

from colbert.search.index_storage import IndexScorer  # noqa: E402

if TYPE_CHECKING:
    from plaid_tilemaxsim.encoder import QueryEncoder
    from plaid_tilemaxsim.engine import SearchEngine, SearchParams
    from plaid_tilemaxsim.index.files import PlaidIndex
    from plaid_tilemaxsim.index.pq import PQ

logger = logging.getLogger("plaid_tilemaxsim")

FilterFn = Callable[[Tensor], Tensor]
# Fields of ColBERTConfig that follow from k unless the user sets them.
TUNED = ("ncells", "centroid_score_threshold", "ndocs")
_NEEDED = {"plaid": TUNED, "rerank": TUNED[:1], "exhaustive": ()}
# What stock's constructor loads, and its callers (IndexUpdater, for one) read.
_STOCK_ATTRIBUTES = frozenset({"codec", "ivf", "doclens", "embeddings", "embeddings_strided", "offsets"})


# Rows behind the embeddings that stock makes room for.
STOCK_PADDING = 512
# Engines of one index that are kept side by side: the newest ones of other codecs, placements and implementations.
MOST_ENGINES = 4
Key = tuple[str, int | None, str, str, str | None, tuple[str, ...] | None, int]


@dataclass(frozen=True)
class _Loaded:
    """Engines over one state of the index. Never changed, only replaced, so whoever reads it sees one state."""

    state: tuple[Any, ...] | None  # stock's tensors that they were built from; None: the files
    digest: str | None  # of the files
    fingerprint: str  # likewise, PQ sidecars included
    options: ScorerConfig  # of the newest engine
    reachable: Tensor | None  # bool [N]: passages in some list, where an update took some out
    engines: Mapping[Key, SearchEngine]


def _build_engine(
    index: PlaidIndex, groups: list[list[torch.device]], options: ScorerConfig, shared: Sequence[SearchEngine] = ()
) -> SearchEngine:
    """On the devices of ``replicas.resolve_devices``. shared: engines of the same index."""
    from plaid_tilemaxsim.index.placement import needs
    from plaid_tilemaxsim.replicas import build_engine

    device = groups[0][0]
    if options.tuning is not None:
        from plaid_tilemaxsim.ops import tuning

        tuning.load(options.tuning, device)
    pq = _read_pq(index, options)
    try:
        return build_engine(
            index, groups, options.placement, codec=options.codec, pq=pq, impl=options.impl, shared=shared
        )
    except torch.OutOfMemoryError as error:
        reason = faults.first_line(error)
    # The plan had found room for it; what it holds is freed by now.
    pq_m = None if pq is None else pq.m
    raise RuntimeError(f"{index.path}: {reason}; {needs(index, device, codec=options.codec, pq_m=pq_m)}")


def _read_index(path: str, options: ScorerConfig) -> PlaidIndex:
    from plaid_tilemaxsim.index.files import Verify, read_index

    return read_index(path, verify=cast(Verify, options.verify))


def _read_pq(index: PlaidIndex, options: ScorerConfig) -> PQ | None:
    from plaid_tilemaxsim.index.files import Verify
    from plaid_tilemaxsim.index.pq import read_pq

    return read_pq(index, options.pq_m, verify=cast(Verify, options.verify)) if options.codec == "pq" else None


class TileMaxSimScorer(IndexScorer):
    """Scores passages of a stock PLAID index; stock's surface, for ``Searcher`` and for direct use.

    index_path: folder of the index. use_gpu: search on the current CUDA device if there is one. load_index_with_mmap
    is stock's and matters to stock's side only.
    Q is [1, LQ, DIM], floating point on any device; more than ``config.query_maxlen`` tokens are scored in full,
    and candidates come from the first ``query_maxlen``, as in stock. Safe to call from several threads, also with
    different ``scorer_options``; what these need of the index stays loaded until ``close``, which a ``with``
    statement calls.

    Searches use the index as it was when it was loaded. What IndexUpdater changes in this object's memory is seen at
    once; what other processes write is seen by ``changed``, and searched after ``refresh``.

    on_search: called after every search or batch of searches that succeeded, in the thread that made it, with a
    ``SearchStats``; what it raises reaches the caller of the search. last_search_stats: the same of this thread's
    latest call with the scorer option ``stats``, None before.
    """

    on_search: Callable[[SearchStats], None] | None = None

    def __init__(self, index_path: str, use_gpu: bool = True, load_index_with_mmap: bool = False) -> None:
        self.index_path = str(index_path)
        self.use_gpu = use_gpu
        self.load_index_with_mmap = load_index_with_mmap
        self._revision = 0
        self._loaded_state: tuple[Any, ...] | None = None  # stock's tensors as they came from the files
        self._stock_fingerprint: str | None = None  # of those files
        self._start_without_engine()

    def _start_without_engine(self) -> None:
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self._loaded: _Loaded | None = None
        self._encoder: QueryEncoder | None = None
        self._told = threading.local()
        self._closed = False

    def __enter__(self) -> TileMaxSimScorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def last_search_stats(self) -> SearchStats | None:
        return getattr(self._told, "stats", None)

    def serves(self, config: Any) -> bool:
        """Whether a call with this config is ours. ValueError for an unknown scorer."""
        if scorer_of(config) != "tilemaxsim":
            return False
        if getattr(config, "interaction", "colbert") == "flipr":
            self._once(logging.INFO, 'interaction="flipr" is scored by stock PLAID')
            return False
        return True

    def prepare(self, config: Any) -> None:
        """Loads the index for the scorer that this config asks for, instead of at its first search."""
        if self.serves(config):
            self._get_engine(options_of(config))
        else:
            self._load_stock()

    @property
    def num_passages(self) -> int:
        """Passages of the index, removed ones included."""
        engine = self._engine
        if engine is not None:
            return engine.index.num_passages
        return len(self.doclens)

    @property
    def _engine(self) -> SearchEngine | None:
        """The newest engine that still fits the index."""
        loaded = self._loaded
        if loaded is None or self._stale(loaded):
            return None
        return list(loaded.engines.values())[-1]

    def rank(
        self,
        config: Any,
        Q: Tensor,
        filter_fn: FilterFn | None = None,
        pids: Any = None,
        k: int | None = None,
    ) -> tuple[list[int], list[float]]:
        """Passages and their scores, best first; ties go to the smaller pid. At most ``k`` of them when given.

        pids: score exactly these, duplicates included, instead of searching. filter_fn: gets the candidates (int32
        on the ranker's device) before pruning and returns those to keep, in the same dtype and place. Q of n > 1
        queries needs n pids, and scores each passage with its own query.
        Raises ValueError for a Q, filter or config that does not fit, IndexError for a pid outside the index.
        """
        if not self.serves(config):
            ranked, scores = super().rank(config, Q, filter_fn=filter_fn, pids=pids)
            return ranked[:k], scores[:k]
        return self.search(config, Q, k, filter_fn=filter_fn, pids=pids)

    def search(
        self,
        config: Any,
        Q: Tensor,
        k: int | None,
        *,
        filter_fn: FilterFn | None = None,
        pids: Any = None,
        allow: Tensor | None = None,
        unset: Collection[str] = (),
    ) -> tuple[list[int], list[float]]:
        """``rank`` by the engine, whatever ``config.scorer`` says.

        allow: bool [N] or integer pids on any device: only these passages are found; applied where the index is,
        before pruning. unset: TUNED fields to take as None.
        """
        options = options_of(config)
        k = None if k is None else _count("k", k)
        Q = _check_queries(Q)
        engine, reachable = self._get(options)
        watch = Watch() if options.stats else None
        began = time.perf_counter()
        if pids is not None:
            pids = _as_pids(pids)
        if Q.size(0) != 1:
            if pids is None or filter_fn is not None or allow is not None:
                raise ValueError(
                    f"Q: expected 1 query, or several aligned with as many pids and no filter, got {Q.size(0)}"
                )
            ranked, scores = _ranked_aligned(engine, Q, pids, k)
        elif k == 0:
            return [], []
        else:
            params = self._params(config, options, k, unset, given=pids is not None)
            # Passages that an update removed have tokens but are in no list.
            if reachable is not None and pids is None and options.mode == "exhaustive":
                allow = reachable if allow is None else reachable & engine.allow_mask(allow).cpu()
            ranked, scores = engine.search(Q[0], params, pids=pids, filter_fn=filter_fn, allow=allow, watch=watch)
        answer = ranked.tolist(), scores.tolist()
        if watch is not None or self.on_search is not None:
            mode = options.mode if pids is None else "pids"
            self._tell(engine, mode, k, len(Q), len(answer[0]), time.perf_counter() - began, watch)
        return answer

    def search_batch(
        self, config: Any, Q: Tensor, k: int, *, unset: Collection[str] = ()
    ) -> list[tuple[list[int], list[float]]]:
        """``search`` for every query of Q [B, LQ, DIM], many in one launch on a GPU; equal to one by one."""
        k, Q = _count("k", k), _check_queries(Q, least=0)
        if k == 0 or len(Q) == 0:
            return [([], [])] * len(Q)
        options = options_of(config)
        engine, reachable = self._get(options)
        params = self._params(config, options, k, unset, given=False)
        allow = reachable if options.mode == "exhaustive" else None
        watch = Watch() if options.stats else None
        began = time.perf_counter()
        found = engine.search_batch(Q, params, watch=watch, allow=allow)
        answers = [(pids.tolist(), scores.tolist()) for pids, scores in found]
        if watch is not None or self.on_search is not None:
            results = sum(len(pids) for pids, _ in answers)
            self._tell(engine, options.mode, k, len(Q), results, time.perf_counter() - began, watch)
        return answers

    def _tell(
        self, engine: SearchEngine, mode: str, k: int | None, queries: int, results: int, seconds: float,
        watch: Watch | None,
    ) -> None:  # fmt: skip
        index = engine.index
        stats = SearchStats(mode, index.codec, index.placement, k, queries, results, seconds)
        if watch is not None:
            stats = replace(stats, candidates=watch.candidates, stages=watch.stages)
            self._told.stats = stats
        if self.on_search is not None:
            self.on_search(stats)

    def encoder(self, checkpoint: Any) -> QueryEncoder:
        """The recorded encoder of colbert-ai's Checkpoint, the same at every call for one checkpoint."""
        from plaid_tilemaxsim.encoder import QueryEncoder

        with self._lock:
            self._check_open()
            if self._encoder is None or self._encoder.checkpoint is not checkpoint:
                self._encoder = QueryEncoder(checkpoint)
            return self._encoder

    def warmup(self, config: Any, k: int, lq: int | None = None) -> None:
        """Load the index and compile, and on a GPU record, searches for k results with ``lq`` query tokens.

        lq None: ``config.query_maxlen``, which is what colbert-ai encodes a query to.
        """
        options = options_of(config)
        params = self._params(config, options, _count("k", k), (), given=False)
        self._get_engine(options).warmup(lq or config.query_maxlen, params, batch=True)

    def profile(self, config: Any, Q: Tensor, k: int) -> dict[str, float]:
        """Milliseconds of every stage of one search of Q [1, LQ, DIM]; on a GPU the device's time."""
        options = options_of(config)
        params = self._params(config, options, _count("k", k), (), given=False)
        return self._get_engine(options).profile(_check_queries(Q)[0], params)

    def score_pids(
        self, config: Any, Q: Tensor, pids: Any, centroid_scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(scores fp32 [m], pids int32 [m]) on the ranker's device.

        Q is [1, LQ, DIM], or [n, LQ, DIM] with each query for its own passage. Without ``centroid_scores`` all pids
        are scored, in the order given. With those of ``retrieve`` the pids are pruned first, as stock does, and come
        best first; the values are computed from Q again.
        """
        if not self.serves(config):
            of_stock: tuple[Tensor, Tensor] = super().score_pids(config, Q, pids, centroid_scores)
            return of_stock
        options = options_of(config)
        Q = _check_queries(Q)
        engine = self._get_engine(options)
        wanted = _as_pids(pids)
        if centroid_scores is None or options.mode != "plaid":
            scores = engine.score_pids(Q, wanted)
            return scores, wanted.to(engine.device, torch.int32)
        if Q.size(0) != 1:
            raise ValueError(f"Q: expected 1 query to prune pids by centroid_scores, got {Q.size(0)}")
        params = self._params(config, options, None, (), given=False)
        outside = wanted[(wanted < 0) | (wanted >= engine.index.num_passages)]
        if outside.numel():
            raise IndexError(f"pids: expected 0 .. {engine.index.num_passages - 1}, got {outside[0].item()}")
        candidates = wanted.to(engine.device, torch.int32)
        kept, scores = engine.search(Q[0], params, filter_fn=lambda _: candidates)
        return scores.to(engine.device), kept.to(engine.device)

    def retrieve(self, config: Any, Q: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of one query [1, LQ, DIM]: (pids int32 [n] ascending, centroid scores fp32 [C, LQ]) on the
        ranker's device, from the first ``config.query_maxlen`` tokens."""
        if not self.serves(config):
            of_stock: tuple[Tensor, Tensor] = super().retrieve(config, Q)
            return of_stock
        Q = _check_queries(Q)
        if Q.size(0) != 1:
            raise ValueError(f"Q: expected 1 query, got {Q.size(0)}")
        engine = self._get_engine(options_of(config))
        if config.ncells is None:
            raise ValueError("config.ncells: expected an integer >= 1, got None")
        short = Q[0, : config.query_maxlen].to(engine.device, torch.float32)
        centroids = engine.index.centroids.float()
        return engine.candidates(short, _count("ncells", config.ncells)), centroids @ short.T

    def set_embeddings_strided(self) -> None:
        """Stock's hook: IndexUpdater calls it after changing codes, residuals or doclens, and the constructor."""
        if self._loaded_state is None and not self.load_index_with_mmap:
            self._trim_stock()
        super().set_embeddings_strided()
        self._revision += 1

    def changed(self) -> bool:
        """Whether the index's files are others than those that were loaded; reads only their names, sizes and times."""
        loaded = self._loaded
        marks = {self._stock_fingerprint, None if loaded is None else loaded.fingerprint} - {None}
        return bool(marks) and marks != {fingerprint(self.index_path)}

    def refresh(self) -> bool:
        """Loads the index again if its files have changed; returns whether they had.

        Searches of other threads end with the index that they began with. What IndexUpdater changed in memory and did
        not save is lost. ValueError for files that are no index (now), or without the product quantiser that is in use:
        then searches go on as before.
        """
        with self._lock, torch.inference_mode(False):
            self._check_open()
            if not self.changed():
                return False
            loaded = self._loaded
            options = ScorerConfig.from_options(None) if loaded is None else loaded.options
            # What loading would refuse is refused here: the old index has to make room before the new one is laid out.
            index = _read_index(self.index_path, options)
            index.verify_references()
            if loaded is not None:
                _read_pq(index, options)
            del index
            if self._updated_state() is not None:
                logger.warning("%s: loaded again; changes in memory that were not saved are gone", self.index_path)
            had_engine = loaded is not None
            self._loaded = loaded = None
            self._forget_stock()
            gc.collect()  # recordings refer to the engine that holds them
            if had_engine:
                self._get_engine(options)
            return True

    def close(self) -> None:
        """Frees what engines, encoder and stock's side hold; later searches raise ValueError. Idempotent."""
        with self._lock:
            self._closed = True
            loaded, self._loaded = self._loaded, None
            for engine in () if loaded is None else set(loaded.engines.values()):
                engine.close()
            self._forget_stock()
            if self._encoder is not None:
                self._encoder.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.index_path}: scorer: expected an open one, got one that was closed")

    def _forget_stock(self) -> None:
        self._loaded_state = self._stock_fingerprint = None
        for name in (*_STOCK_ATTRIBUTES, "_metadata"):
            self.__dict__.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        """Stock's attributes, as stock pickles them; the engine is built again where it is needed."""
        ours = ("_lock", "_warned", "_loaded", "_encoder", "_told", "on_search")
        return {name: value for name, value in vars(self).items() if name not in ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_without_engine()

    def __getattr__(self, name: str) -> Any:
        if name in _STOCK_ATTRIBUTES and self.__dict__.get("_loaded_state") is None and "_lock" in self.__dict__:
            self._load_stock()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _load_stock(self) -> None:
        """Everything that stock's constructor loads, including its extensions."""
        with self._lock:
            if self._loaded_state is not None:
                return
            self._check_open()
            mark = fingerprint(self.index_path)
            # Stock's tensors must outlive a search's inference mode.
            with torch.inference_mode(False):
                super().__init__(self.index_path, self.use_gpu, self.load_index_with_mmap)
            self._loaded_state, self._stock_fingerprint = self._stock_state(), mark
            if self.load_index_with_mmap:
                self._check_stock_maps()

    def _trim_stock(self) -> None:
        """Takes away uninitialised rows: IndexUpdater counts embeddings twice where it saves them, stock makes room for
        those that it counted, and the next IndexUpdater.add would put its own behind them and save what lies before."""
        rows = int(self.doclens.sum()) + STOCK_PADDING
        embeddings = self.embeddings
        if len(embeddings.codes) > rows:
            embeddings.codes, embeddings.residuals = embeddings.codes[:rows], embeddings.residuals[:rows]

    def _check_stock_maps(self) -> None:
        """Says so when stock maps its files at a wrong place: it skips a header of fixed length, torch's differ."""
        path = os.path.join(self.index_path, "0.codes.pt")
        codes = torch.load(path, map_location="cpu", mmap=True, weights_only=True)[:1024]
        if not torch.equal(self.embeddings.codes[: len(codes)], codes):
            logger.error(
                "%s: colbert-ai reads this index wrongly with load_index_with_mmap=True, so scorer='plaid' ranks "
                "at random; scorer='tilemaxsim' is not affected",
                self.index_path,
            )

    def _stock_state(self) -> tuple[Any, ...]:
        held = self.__dict__
        embeddings = held["embeddings"]
        return held["ivf"], held["doclens"], embeddings.codes, embeddings.residuals, self._revision

    def _updated_state(self) -> tuple[Any, ...] | None:
        """Stock's tensors where some have been replaced (by IndexUpdater) since they came from the files."""
        before = self._loaded_state
        if before is None:
            return None
        try:
            now = self._stock_state()
        except KeyError:  # another thread is letting go of them
            return None
        return None if _same(before, now) else now

    def _stale(self, loaded: _Loaded) -> bool:
        """Whether the index in memory is another than the one that these engines were built from."""
        now = self._updated_state()
        return now is not loaded.state and (now is None or loaded.state is None or not _same(now, loaded.state))

    def _get_engine(self, options: ScorerConfig) -> SearchEngine:
        return self._get(options)[0]

    def _get(self, options: ScorerConfig) -> tuple[SearchEngine, Tensor | None]:
        """The engine that the options ask for, built when first needed, and the passages that may be found (None: all).

        Engines of one index stay side by side and share what lies at the same place, so that a Searcher can change
        between them at each call; where memory is too small for that, the others go.
        """
        places = options.devices, options.replicas
        key = options.codec, options.pq_m, options.placement, options.impl, options.tuning, *places
        found = self._find(key)
        if found is not None:
            return found
        with self._lock, torch.inference_mode(False):
            found = self._find(key)
            if found is not None:
                return found
            self._check_open()
            mark = fingerprint(self.index_path)
            # Other threads may still search with engines that are let go of here: each goes when they do too.
            loaded = self._loaded
            if loaded is not None and self._stale(loaded):
                self._loaded = loaded = None
            state = self._updated_state()
            index = _read_index(self.index_path, options)
            digest = index.digest()
            if loaded is not None and loaded.digest != digest:
                self._loaded = loaded = None
            reachable = None
            if state is not None:
                index = self._index_in_memory(index)
                reachable = torch.zeros(index.num_passages, dtype=torch.bool)
                reachable[index.ivf_pids.long()] = True
            kept: dict[Key, SearchEngine] = {} if loaded is None else dict(loaded.engines)
            loaded = None  # so that nothing but ``kept`` holds engines that may have to make room
            same = (one for other, one in kept.items() if other[4:] == key[4:] and _same_engine(one, options))
            engine = next(same, None)
            if engine is None:
                engine = self._build(index, options, kept)
            if fingerprint(self.index_path) != mark:
                raise ValueError(f"{self.index_path}: files: expected them to stay while they are read, got others")
            kept[key] = engine
            while len(set(kept.values())) > MOST_ENGINES:
                oldest = next(iter(kept.values()))
                kept = {key: one for key, one in kept.items() if one is not oldest}
            self._loaded = _Loaded(state, digest, mark, options, reachable, kept)
            return engine, reachable

    def _build(self, index: PlaidIndex, options: ScorerConfig, kept: dict[Key, SearchEngine]) -> SearchEngine:
        """An engine beside those kept, on their device; empties ``kept`` where memory is too small for that."""
        if options.encoder == "fast" and not is_enabled():
            self._once(logging.WARNING, 'encoder="fast" needs plaid_tilemaxsim.enable(); until then stock encodes')
        from plaid_tilemaxsim.replicas import resolve_devices

        on_gpu = options.devices is None and self._on_gpu()
        groups = resolve_devices(options.devices, options.replicas, on_gpu)
        if (options.devices, options.replicas) == (None, 1):
            # Not the GPU that happens to be the current one now.
            groups = [[one.device] for key, one in kept.items() if key[5:] == (None, 1)][:1] or groups
        others = list(kept.values())
        if not others:
            return _build_engine(index, groups, options)
        try:
            return _build_engine(index, groups, options, others)
        except RuntimeError:
            kept.clear()
            others.clear()
            self._loaded = None
        gc.collect()  # recordings refer to the engine that holds them
        return _build_engine(index, groups, options)

    def _find(self, key: Key) -> tuple[SearchEngine, Tensor | None] | None:
        loaded = self._loaded
        if loaded is None or key not in loaded.engines or self._stale(loaded):
            return None
        return loaded.engines[key], loaded.reachable

    def _index_in_memory(self, stored: PlaidIndex) -> PlaidIndex:
        """The index as IndexUpdater left it in stock's tensors; centroids and buckets never change."""
        if self.load_index_with_mmap:
            raise ValueError(
                f"{self.index_path}: expected load_index_with_mmap=False to search an updated index, got True"
            )
        return type(stored).from_tensors(
            nbits=stored.nbits,
            centroids=stored.centroids,
            bucket_cutoffs=stored.bucket_cutoffs,
            bucket_weights=stored.bucket_weights,
            codes=self.embeddings.codes,
            residuals=self.embeddings.residuals,
            doclens=self.doclens,
            ivf=self.ivf.tensor,
            ivf_lengths=self.ivf.lengths,
            metadata=stored.metadata,
            path=stored.path,
            verify="structure",
        )

    def _on_gpu(self) -> bool:
        if self.use_gpu:
            faults.check_fork()
        if self.use_gpu and not torch.cuda.is_available():
            self._once(logging.WARNING, "use_gpu was asked for, but torch sees no CUDA device; searching on the CPU")
            return False
        return bool(self.use_gpu)

    def _params(
        self, config: Any, options: ScorerConfig, k: int | None, unset: Collection[str], *, given: bool
    ) -> SearchParams:
        from plaid_tilemaxsim.engine import SearchParams, default_params

        values: dict[str, Any] = {name: None if name in unset else getattr(config, name, None) for name in TUNED}
        needed = [name for name in _NEEDED[options.mode] if values[name] is None]
        if needed and k is None and not given:
            raise ValueError(f"config.{needed[0]}: expected a value, since rank() without k has no default, got None")
        defaults: dict[str, Any] = dict(zip(TUNED, default_params(k or 1)))
        ncells, threshold, ndocs = (defaults[n] if values[n] is None else values[n] for n in TUNED)
        ndocs = _count("ndocs", ndocs)
        if ndocs < 4:
            self._once(logging.WARNING, f"ndocs={ndocs} keeps no passage (ndocs // 4 are scored); taken as 4")
            ndocs = 4
        query_maxlen = getattr(config, "query_maxlen", None)
        return SearchParams(
            k=k,
            ncells=_count("ncells", ncells),
            threshold=threshold,
            ndocs=ndocs,
            query_maxlen=None if query_maxlen is None else _count("query_maxlen", query_maxlen),
            mode=options.mode,
            prefilter=options.prefilter,
        )

    def _once(self, level: int, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.log(level, "%s: %s", self.index_path, message)


def _same_engine(engine: SearchEngine, options: ScorerConfig) -> bool:
    """Whether these options would build the same, their defaults spelled out."""
    on_gpu, where = engine.device.type == "cuda", engine.index.placement
    impl = ("triton" if on_gpu else "torch") if options.impl == "auto" else options.impl
    # What "auto" finds beside an engine with residuals elsewhere is another question each time.
    names = {"cpu": ("auto", "host"), "gpu": ("auto", "gpu")}.get(where, (where,))
    return engine.index.codec == options.codec != "pq" and engine.impl == impl and options.placement in names


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Identity, not equality: stock replaces what it changes, and comparing tensors would read them."""
    return all(x is y or (isinstance(x, int) and x == y) for x, y in zip(a, b, strict=True))


def _count(name: str, value: Any) -> int:
    try:
        n = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected an integer >= 0, got {value!r}") from None
    if n < 0:
        raise ValueError(f"{name}: expected an integer >= 0, got {n}")
    return n


def _ranked_aligned(engine: SearchEngine, Q: Tensor, pids: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """Each passage by its own query."""
    scores, pids = engine.score_pids(Q, pids).cpu(), pids.cpu()
    order = pids.argsort(stable=True)
    order = order[scores[order].argsort(descending=True, stable=True)][:k]
    return pids[order], scores[order]


def _check_queries(Q: Any, least: int = 1) -> Tensor:
    if not isinstance(Q, Tensor) or Q.dim() != 3 or not Q.is_floating_point():
        got = f"{Q.dtype} {list(Q.shape)}" if isinstance(Q, Tensor) else type(Q).__name__
        raise ValueError(f"Q: expected a floating-point tensor [1, LQ, DIM], got {got}")
    if Q.layout != torch.strided or Q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"Q: expected a dense tensor on a CPU or GPU, got {Q.layout} on {Q.device}")
    if Q.size(0) < least or Q.size(1) == 0:
        raise ValueError(f"Q: expected at least one query with at least one token, got {list(Q.shape)}")
    return Q


def _as_pids(pids: Any) -> Tensor:
    """int [n]; range-checked by the engine. Lists, ranges, arrays and tensors are taken."""
    try:
        tensor = pids if isinstance(pids, Tensor) else torch.as_tensor(pids if hasattr(pids, "dtype") else list(pids))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"pids: expected integers [n], got {type(pids).__name__} ({error})") from None
    if tensor.numel() == 0:
        return tensor.to(torch.int32).reshape(-1)
    if tensor.dim() != 1 or tensor.dtype not in (torch.int16, torch.int32, torch.int64, torch.uint8):
        raise ValueError(f"pids: expected integers [n], got {tensor.dtype} {list(tensor.shape)}")
    return tensor.to(torch.int64)
