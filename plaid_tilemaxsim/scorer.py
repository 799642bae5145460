"""ColBERT's words in, ColBERT's words out: an IndexScorer that leaves scoring to the search engine.

A TileMaxSimScorer serves the calls whose config says ``scorer="tilemaxsim"`` and is stock's IndexScorer for all
others. Either side loads its copy of the index when first needed, so that a process pays for what it uses.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plaid_tilemaxsim import is_enabled
from plaid_tilemaxsim.config import ScorerConfig, options_of, scorer_of
from plaid_tilemaxsim.engines import Engines
from plaid_tilemaxsim.index.stamps import fingerprint
from plaid_tilemaxsim.stats import SearchStats, Watch
from plaid_tilemaxsim.stock import StockScorer

if TYPE_CHECKING:
    from plaid_tilemaxsim.encoder import QueryEncoder
    from plaid_tilemaxsim.engine import SearchEngine, SearchParams

logger = logging.getLogger("plaid_tilemaxsim")

FilterFn = Callable[[Tensor], Tensor]
# Fields of ColBERTConfig that follow from k unless the user sets them.
TUNED = ("ncells", "centroid_score_threshold", "ndocs")
_NEEDED = {"plaid": TUNED, "rerank": TUNED[:1], "exhaustive": ()}


class TileMaxSimScorer(StockScorer):
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
    _transient = (*StockScorer._transient, "_warned", "_engines", "_encoder", "_told", "on_search")

    def _start(self) -> None:
        super()._start()
        self._warned: set[str] = set()
        self._engines = Engines(self.index_path, self.use_gpu, self._lock)
        self._encoder: QueryEncoder | None = None
        self._told = threading.local()

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
            self.load_stock()

    @property
    def num_passages(self) -> int:
        """Passages of the index, removed ones included."""
        engine = self._engine
        if engine is not None:
            return engine.index.num_passages
        return len(self.doclens)

    @property
    def _engine(self) -> SearchEngine | None:
        return self._engines.newest(self)

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
            self.check_open()
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
        candidates = engine.check_pids(wanted)
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
        short = Q[0, : config.query_maxlen]  # where it is: queries in host memory are checked
        pids = engine.candidates(short, _count("ncells", config.ncells))
        return pids, engine.index.centroids.float() @ short.to(engine.device, torch.float32).T

    def changed(self) -> bool:
        """Whether the index's files are others than those that were loaded; reads only their names, sizes and times."""
        marks = {self.stock_fingerprint, self._engines.fingerprint} - {None}
        return bool(marks) and marks != {fingerprint(self.index_path)}

    def refresh(self) -> bool:
        """Loads the index again if its files have changed; returns whether they had.

        Searches of other threads end with the index that they began with. What IndexUpdater changed in memory and did
        not save is lost. ValueError for files that are no index (now), or without the product quantiser that is in use:
        then searches go on as before.
        """
        with self._lock, torch.inference_mode(False):
            self.check_open()
            if not self.changed():
                return False
            options = self._engines.options
            # What loading would refuse is refused here: the old index has to make room before the new one is laid out.
            self._engines.check_files(options or ScorerConfig())
            if self.updated_state() is not None:
                logger.warning("%s: loaded again; changes in memory that were not saved are gone", self.index_path)
            self._engines.forget()
            self.forget_stock()
            if options is not None:
                self._get_engine(options)
            return True

    def close(self) -> None:
        """Frees what engines, encoder and stock's side hold; later searches raise ValueError. Idempotent."""
        with self._lock:
            self._closed = True
            self._engines.close()
            self.forget_stock()
            if self._encoder is not None:
                self._encoder.close()

    def _get_engine(self, options: ScorerConfig) -> SearchEngine:
        return self._get(options)[0]

    def _get(self, options: ScorerConfig) -> tuple[SearchEngine, Tensor | None]:
        """The engine that the options ask for, and the passages that may be found, as ``Engines.get`` has them."""
        if options.encoder == "fast" and not is_enabled():
            self._once(logging.WARNING, 'encoder="fast" needs plaid_tilemaxsim.enable(); until then stock encodes')
        return self._engines.get(options, self)

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
