"""The search engines of one index: built when options first ask for one, kept side by side while memory allows it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from plaid_tilemaxsim import faults, graphs
from plaid_tilemaxsim.index.files import Verify, read_index
from plaid_tilemaxsim.index.stamps import fingerprint

if TYPE_CHECKING:
    from plaid_tilemaxsim.config import ScorerConfig
    from plaid_tilemaxsim.engine import SearchEngine
    from plaid_tilemaxsim.index.files import PlaidIndex
    from plaid_tilemaxsim.index.pq import PQ
    from plaid_tilemaxsim.stock import State, StockScorer

logger = logging.getLogger("plaid_tilemaxsim")

# Engines of one index that are kept side by side: the newest ones of other codecs, placements and implementations.
MOST_ENGINES = 4
Key = tuple[str, int | None, str, str, str | None, tuple[str, ...] | None, int]


@dataclass(frozen=True)
class _Loaded:
    """Engines over one state of the index. Never changed, only replaced, so whoever reads it sees one state."""

    state: State | None  # stock's tensors that they were built from; None: the files
    digest: str | None  # of the files
    fingerprint: str  # likewise, PQ sidecars included
    options: ScorerConfig  # of the newest engine
    reachable: Tensor | None  # bool [N]: passages in some list, where an update took some out
    engines: Mapping[Key, SearchEngine]


class Engines:
    """Engines of the index in a folder, on the current CUDA device where ``use_gpu`` and there is one, unless options
    name others. Iterating gives those that are kept, each once, the newest last.

    stock, of the methods: the side whose tensors IndexUpdater may have changed, which are searched then instead of the
    files; None: the files. lock: held while engines are built; that of ``stock`` where there is one. Thread-safe.
    """

    def __init__(self, path: str, use_gpu: bool, lock: threading.RLock | None = None) -> None:
        self.path = path
        self._use_gpu = use_gpu
        self._lock = threading.RLock() if lock is None else lock
        self._loaded: _Loaded | None = None

    def __iter__(self) -> Iterator[SearchEngine]:
        loaded = self._loaded
        return iter(() if loaded is None else dict.fromkeys(loaded.engines.values()))

    @property
    def fingerprint(self) -> str | None:
        """Of the files that the engines were built from; None without engines."""
        return None if self._loaded is None else self._loaded.fingerprint

    @property
    def options(self) -> ScorerConfig | None:
        """Those that the newest engine was built for; None without engines."""
        return None if self._loaded is None else self._loaded.options

    def newest(self, stock: StockScorer | None = None) -> SearchEngine | None:
        """The newest engine, if it still fits the index."""
        loaded = self._loaded
        if loaded is None or _stale(loaded, stock):
            return None
        return list(loaded.engines.values())[-1]

    def get(self, options: ScorerConfig, stock: StockScorer | None = None) -> tuple[SearchEngine, Tensor | None]:
        """The engine that the options ask for, built when first needed, and the passages that may be found, bool [N]
        (None: all).

        Engines of one index stay side by side and share what lies at the same place, so that a Searcher can change
        between them at each call; where memory is too small for that, the others go.
        Raises ValueError for files that are no index or change while they are read, a closed ``stock``, and as
        ``replicas.build_engine`` does.
        """
        places = options.devices, options.replicas
        key = options.codec, options.pq_m, options.placement, options.impl, options.tuning, *places
        found = self._find(key, stock)
        if found is not None:
            return found
        with self._lock, torch.inference_mode(False):
            found = self._find(key, stock)
            if found is not None:
                return found
            if stock is not None:
                stock.check_open()
            mark = fingerprint(self.path)
            # Other threads may still search with engines that are let go of here: each goes when they do too.
            loaded = self._loaded
            if loaded is not None and _stale(loaded, stock):
                self._loaded = loaded = None
            state = None if stock is None else stock.updated_state()
            index = self._read(options)
            digest = index.digest()
            if loaded is not None and loaded.digest != digest:
                self._loaded = loaded = None
            reachable = None
            if stock is not None and state is not None:
                index = stock.index_in_memory(index)
                reachable = torch.zeros(index.num_passages, dtype=torch.bool)
                reachable[index.ivf_pids.long()] = True
            kept: dict[Key, SearchEngine] = {} if loaded is None else dict(loaded.engines)
            loaded = None  # so that nothing but ``kept`` holds engines that may have to make room
            same = (one for other, one in kept.items() if other[4:] == key[4:] and _same_engine(one, options))
            engine = next(same, None)
            if engine is None:
                engine = self._build(index, options, kept)
            if fingerprint(self.path) != mark:
                raise ValueError(f"{self.path}: files: expected them to stay while they are read, got others")
            kept[key] = engine
            while len(set(kept.values())) > MOST_ENGINES:
                oldest = next(iter(kept.values()))
                kept = {key: one for key, one in kept.items() if one is not oldest}
            self._loaded = _Loaded(state, digest, mark, options, reachable, kept)
            return engine, reachable

    def check_files(self, options: ScorerConfig) -> None:
        """Raises ValueError for whatever ``get`` would refuse in the files, without loading them."""
        index = self._read(options)
        index.verify_references()
        _read_pq(index, options)

    def forget(self) -> None:
        """Lets go of all engines; searches under way end with theirs."""
        self._loaded = None
        graphs.collect()  # recordings refer to the engine that holds them

    def close(self) -> None:
        """Frees what all engines hold, also under searches."""
        engines, self._loaded = list(self), None
        for engine in engines:
            engine.close()

    def _read(self, options: ScorerConfig) -> PlaidIndex:
        return read_index(self.path, verify=cast(Verify, options.verify))

    def _find(self, key: Key, stock: StockScorer | None) -> tuple[SearchEngine, Tensor | None] | None:
        loaded = self._loaded
        if loaded is None or key not in loaded.engines or _stale(loaded, stock):
            return None
        return loaded.engines[key], loaded.reachable

    def _build(self, index: PlaidIndex, options: ScorerConfig, kept: dict[Key, SearchEngine]) -> SearchEngine:
        """An engine beside those kept, on their device; empties ``kept`` where memory is too small for that."""
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
        self.forget()
        return _build_engine(index, groups, options)

    def _on_gpu(self) -> bool:
        if not self._use_gpu:
            return False
        faults.check_fork()
        if not torch.cuda.is_available():
            logger.warning("%s: use_gpu was asked for, but torch sees no CUDA device; searching on the CPU", self.path)
            self._use_gpu = False
        return self._use_gpu


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
    if device.type == "cuda":
        graphs.empty_cache()
    pq_m = None if pq is None else pq.m
    raise RuntimeError(f"{index.path}: {reason}; {needs(index, device, codec=options.codec, pq_m=pq_m)}")


def _read_pq(index: PlaidIndex, options: ScorerConfig) -> PQ | None:
    from plaid_tilemaxsim.index.pq import read_pq

    return read_pq(index, options.pq_m, verify=cast(Verify, options.verify)) if options.codec == "pq" else None


def _stale(loaded: _Loaded, stock: StockScorer | None) -> bool:
    """Whether the index in memory is another than the one that these engines were built from."""
    return loaded.state != (None if stock is None else stock.updated_state())


def _same_engine(engine: SearchEngine, options: ScorerConfig) -> bool:
    """Whether these options would build the same, their defaults spelled out."""
    on_gpu, where = engine.device.type == "cuda", engine.index.placement
    impl = ("triton" if on_gpu else "torch") if options.impl == "auto" else options.impl
    # What "auto" finds beside an engine with residuals elsewhere is another question each time.
    names = {"cpu": ("auto", "host"), "gpu": ("auto", "gpu")}.get(where, (where,))
    return engine.index.codec == options.codec != "pq" and engine.impl == impl and options.placement in names
