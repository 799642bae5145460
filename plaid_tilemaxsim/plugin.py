"""The seam: registers the scorer with an installed colbert-ai at run time, reversibly.

``enable`` gives ColBERTConfig two fields (``scorer``, ``scorer_options``), makes Searcher use TileMaxSimScorer and
leaves every file of colbert-ai as it is. The scorer is chosen by the config of each call. A colbert-ai that has the
fields and the choice by itself (``patches/``) only gets the checks and defaults that it lacks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from importlib import metadata
from multiprocessing.context import get_spawning_popen
from typing import Any

from plaid_tilemaxsim import compat
from plaid_tilemaxsim.config import ScorerConfig, check_scorer, options_of, scorer_of

logger = logging.getLogger("plaid_tilemaxsim")

KNOWN_VERSIONS = ("0.2.22",)
FIELDS = ("scorer", "scorer_options")

_MISSING = object()
_lock = threading.RLock()
_installed: _Changes | None = None
# Configs that say something else than the default, by id: ``disable`` takes it from them.
_flagged: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_defaults: dict[str, Any] = {"scorer": "plaid", "scorer_options": None}


def enable(*, scorer: str | None = None, scorer_options: Mapping[str, Any] | None = None) -> None:
    """Registers the scorer with colbert-ai in this process. Idempotent and thread-safe; undone by ``disable``.

    Afterwards ``ColBERTConfig(scorer="tilemaxsim", scorer_options={...})`` chooses the scorer; the default is
    "plaid", which is stock. ``scorer`` and ``scorer_options`` change that default for this process and the children
    that it spawns; None leaves it as it is. Imports colbert (and torch), and applies ``compat``.
    Raises ValueError for a colbert-ai version or transformers that this plugin does not know, and for an unknown
    scorer or option; ImportError if colbert-ai is not installed.
    """
    global _installed
    if scorer is not None:
        check_scorer(scorer)
    if scorer_options is not None:
        ScorerConfig.from_options(scorer_options)
    with _lock:
        _check_version()
        changed = {"scorer": scorer, "scorer_options": scorer_options and dict(scorer_options)}
        defaults = _defaults | {name: value for name, value in changed.items() if value is not None}
        if _installed is not None and defaults == _defaults:
            return
        if _installed is not None:
            _installed.check()
            _installed.undo()
            _installed = None
        changes = _Changes()
        try:
            compat.apply()
            _register_fields(changes, defaults)
            _register_scorer(changes)
        except BaseException:
            changes.undo()
            compat.revert()
            raise
        _defaults.update(defaults)
        _installed = changes


def disable() -> None:
    """Undoes ``enable``: colbert-ai is stock again, and existing configs lose the two fields. Idempotent.

    A Searcher made before keeps working and searches as stock does. Raises RuntimeError if something else has
    replaced what ``enable`` put in place.
    """
    global _installed
    with _lock:
        if _installed is None:
            return
        _installed.check()
        _installed.undo()
        _installed = None
        _defaults.update(scorer="plaid", scorer_options=None)
        _forget_flags()
        compat.revert()


def is_enabled() -> bool:
    """Whether the scorer is registered with colbert-ai in this process."""
    return _installed is not None


def _check_version() -> None:
    try:
        version = metadata.version("colbert-ai")
    except metadata.PackageNotFoundError:
        known = " or ".join(KNOWN_VERSIONS)
        raise ImportError(f"colbert-ai is not installed here; install colbert-ai=={known}") from None
    if version not in KNOWN_VERSIONS:
        raise ValueError(f"colbert-ai: expected a version from {list(KNOWN_VERSIONS)}, got {version!r}")


class _Changes:
    """Attributes replaced on classes and modules, and what was there before."""

    def __init__(self) -> None:
        self._log: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self._log.append((owner, name, before, value))

    def check(self) -> None:
        for owner, name, _, value in self._log:
            now = vars(owner).get(name, _MISSING)
            if now is not value and name != "__annotations__":
                raise RuntimeError(
                    f"{owner.__name__}.{name}: expected what plaid_tilemaxsim.enable() put there, got {now!r}; "
                    "undo that change first"
                )

    def undo(self) -> None:
        for owner, name, before, _ in reversed(self._log):
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._log.clear()


def _register_fields(changes: _Changes, defaults: Mapping[str, Any]) -> None:
    """Makes the two fields part of the dataclass ColBERTConfig, in place.

    ``from_existing`` and ``export`` go by the dataclass's fields and colbert names the class itself, so neither a
    plain attribute nor a subclass does. The generated methods come from a twin: at no moment is a config class in
    use without its constructor.
    """
    from colbert.infra.config import ColBERTConfig
    from colbert.infra.config.core_config import DefaultVal

    annotations = {"scorer": str, "scorer_options": dict}
    namespace = {
        "__module__": ColBERTConfig.__module__,
        "__qualname__": ColBERTConfig.__qualname__,
        "__annotations__": annotations,
        **{name: DefaultVal(value) for name, value in defaults.items()},
    }
    twin: Any = dataclasses.dataclass(type(ColBERTConfig.__name__, ColBERTConfig.__bases__, namespace))
    for name, value in defaults.items():
        # The value, not its wrapper: a config made before this has no such attribute of its own and shows this one.
        changes.set(ColBERTConfig, name, value)
    for name, value in _config_methods(ColBERTConfig, defaults).items():
        changes.set(ColBERTConfig, name, value)
    changes.set(ColBERTConfig, "__annotations__", vars(ColBERTConfig).get("__annotations__", {}) | annotations)
    for name in ("__dataclass_fields__", "__init__", "__repr__", "__eq__", "__match_args__", "__doc__"):
        changes.set(ColBERTConfig, name, vars(twin)[name])


def _config_methods(cls: Any, defaults: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Methods of ColBERTConfig that check the two fields when they are set, and keep them out of what stock reads."""
    from colbert.infra.config.core_config import DefaultVal

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name in FIELDS and not isinstance(value, DefaultVal):
            # Where colbert-ai has a registry, other scorers may be installed, with options of their own.
            ours = not _has_registry() or vars(self).get("scorer") == "tilemaxsim"
            if name == "scorer_options" and ours:
                ScorerConfig.from_options(value)
            elif name == "scorer" and not _has_registry():
                check_scorer(value)
            if value != defaults[name]:
                _flagged[id(self)] = self
        super(cls, self).__setattr__(name, value)

    def __post_init__(self: Any) -> None:
        super(cls, self).__post_init__()
        for name in FIELDS:
            if name not in self.assigned:
                setattr(self, name, copy.deepcopy(defaults[name]))

    def export(self: Any) -> dict[str, Any]:
        """Without the two fields unless they were assigned: an index made meanwhile reads as stock wrote it."""
        exported: dict[str, Any] = super(cls, self).export()
        return {name: value for name, value in exported.items() if name not in FIELDS or name in self.assigned}

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        """A pickle that sets up the plugin where it is loaded, if it carries the flag or goes to a spawned child.

        Others are pickled as stock does, and load where the plugin is missing.
        """
        reduced: Any = object.__reduce_ex__(self, protocol)
        make, args, state, *rest = reduced
        flagged = any(name in self.assigned or vars(self).get(name, value) != value for name, value in defaults.items())
        if flagged or get_spawning_popen() is not None:
            return (_make_config, (dict(defaults), make, args), state, *rest)
        return (make, args, {name: value for name, value in state.items() if name not in FIELDS}, *rest)

    methods = (__setattr__, __post_init__, export, __reduce_ex__)
    return {method.__name__: method for method in methods}


def _make_config(defaults: Mapping[str, Any], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Unpickles a config with the plugin enabled; one that is enabled already keeps its defaults."""
    with _lock:
        if not is_enabled():
            enable(**defaults)
    config = make(*args)
    _flagged[id(config)] = config
    return config


def _has_registry() -> bool:
    """Whether this colbert-ai chooses scorers by itself (patches/colbert-ai-0.2.22/02-scorer-registry.patch)."""
    import colbert.searcher

    return hasattr(colbert.searcher, "load_scorer")


def _register_scorer(changes: _Changes) -> None:
    """Makes Searcher use TileMaxSimScorer, which leaves the work to stock unless a call's config says otherwise."""
    import colbert.searcher

    from plaid_tilemaxsim.scorer import TileMaxSimScorer

    Searcher = colbert.searcher.Searcher
    changes.set(Searcher, "encode", _wrap_encode(Searcher.encode))
    for method in (close, refresh, __enter__, __exit__):
        changes.set(Searcher, method.__name__, method)
    if _has_registry():
        return
    # Searcher.__init__ looks this name up when it is called.
    changes.set(colbert.searcher, "IndexScorer", TileMaxSimScorer)
    changes.set(Searcher, "__init__", _wrap_init(Searcher.__init__))
    changes.set(Searcher, "dense_search", _wrap_dense_search(Searcher.dense_search))
    changes.set(Searcher, "configure", _wrap_configure(Searcher.configure))
    changes.set(Searcher, "_search_all_Q", _wrap_search_all(Searcher._search_all_Q))


def _wrap_init(stock: Callable[..., None]) -> Callable[..., None]:
    from plaid_tilemaxsim.scorer import TileMaxSimScorer

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if not isinstance(self.ranker, TileMaxSimScorer):
            return
        self.ranker.prepare(self.config)
        _compare_counts(self)

    return __init__


def _compare_counts(searcher: Any) -> None:
    passages, texts = searcher.ranker.num_passages, len(searcher.collection)
    if passages != texts:
        logger.warning(
            "%s: the index has %d passages and the collection %d; pass collection= as it was indexed "
            "(an index made from a list stores only a stub of it)",
            searcher.index,
            passages,
            texts,
        )


def close(self: Any) -> None:
    """Frees what this Searcher's ranker holds of the index, on the GPU and in memory; later searches raise ValueError.

    Idempotent; ``with Searcher(...) as searcher:`` does so at its end. The checkpoint stays.
    """
    _ranker(self, "close").close()


def refresh(self: Any) -> bool:
    """Loads the index again if its files have changed since; see ``TileMaxSimScorer.refresh``. True if they had.

    The collection stays: set ``searcher.collection`` where that has changed, too.
    """
    refreshed: bool = _ranker(self, "refresh").refresh()
    if refreshed:
        _compare_counts(self)
    return refreshed


def __enter__(self: Any) -> Any:
    return self


def __exit__(self: Any, *exception: object) -> None:
    close(self)


def _ranker(searcher: Any, method: str) -> Any:
    from plaid_tilemaxsim.scorer import TileMaxSimScorer

    if not isinstance(searcher.ranker, TileMaxSimScorer):
        raise ValueError(
            f"{method}: expected a Searcher that was made with plaid_tilemaxsim enabled, got one with the ranker "
            f"{type(searcher.ranker).__name__}"
        )
    return searcher.ranker


def _wrap_encode(stock: Callable[..., Any]) -> Callable[..., Any]:
    from plaid_tilemaxsim.scorer import TileMaxSimScorer

    @functools.wraps(stock)
    def encode(self: Any, text: Any, full_length_search: bool = False) -> Any:
        ours = isinstance(self.ranker, TileMaxSimScorer) and scorer_of(self.config) == "tilemaxsim"
        if not ours or options_of(self.config).encoder == "stock":
            return stock(self, text, full_length_search=full_length_search)
        texts = text if type(text) is list else [text]
        encoder = self.ranker.encoder(self.checkpoint)
        return encoder.encode(texts, self.config.query_maxlen, full_length=full_length_search)

    return encode


def _wrap_dense_search(stock: Callable[..., Any]) -> Callable[..., Any]:
    from plaid_tilemaxsim.scorer import TUNED, TileMaxSimScorer

    @functools.wraps(stock)
    def dense_search(self: Any, Q: Any, k: int = 10, filter_fn: Any = None, pids: Any = None, allow: Any = None) -> Any:
        pinned = vars(self).setdefault("_pinned_by_stock", {})
        if not isinstance(self.ranker, TileMaxSimScorer) or not self.ranker.serves(self.config):
            if allow is not None:
                raise ValueError('allow: expected None with scorer="plaid" (stock knows only filter_fn and pids)')
            unset = [name for name in TUNED if getattr(self.config, name) is None]
            result = stock(self, Q, k, filter_fn=filter_fn, pids=pids)
            # Stock wrote its choice for this k into the config, for all later searches.
            pinned.update((name, getattr(self.config, name)) for name in unset)
            return result
        pids, scores = self.ranker.search(
            self.config, Q, k, filter_fn=filter_fn, pids=pids, allow=allow, unset=_unset(self.config, pinned)
        )
        return pids, list(range(1, len(pids) + 1)), scores

    return dense_search


def _wrap_configure(stock: Callable[..., Any]) -> Callable[..., Any]:
    from plaid_tilemaxsim.scorer import TileMaxSimScorer

    @functools.wraps(stock)
    def configure(self: Any, **kwargs: Any) -> Any:
        # What the user sets is the user's, also where stock had written the same value. Stock writes through this
        # method too, but notes what it pinned afterwards.
        for name in kwargs:
            vars(self).get("_pinned_by_stock", {}).pop(name, None)
        result = stock(self, **kwargs)
        ranker = vars(self).get("ranker")
        if isinstance(ranker, TileMaxSimScorer) and ranker.changed():
            logger.warning("%s: the files have changed since they were loaded; refresh() loads them again", self.index)
        return result

    return configure


def _unset(config: Any, pinned: dict[str, Any]) -> list[str]:
    """Fields whose value stock wrote, not the user."""
    return [name for name, value in pinned.items() if getattr(config, name) == value]


def _wrap_search_all(stock: Callable[..., Any]) -> Callable[..., Any]:
    from plaid_tilemaxsim.scorer import TileMaxSimScorer

    @functools.wraps(stock)
    def _search_all_Q(self: Any, queries: Any, Q: Any, k: int, filter_fn: Any = None, qid_to_pids: Any = None) -> Any:
        ours = isinstance(self.ranker, TileMaxSimScorer) and self.ranker.serves(self.config)
        if not ours or filter_fn is not None or qid_to_pids is not None:
            return stock(self, queries, Q, k, filter_fn=filter_fn, qid_to_pids=qid_to_pids)
        unset = _unset(self.config, vars(self).get("_pinned_by_stock", {}))
        found = iter(self.ranker.search_batch(self.config, Q, k, unset=unset))

        def answer(*args: Any, **kwargs: Any) -> Any:
            pids, scores = next(found)
            return pids, list(range(1, len(pids) + 1)), scores

        # Stock assembles the Ranking, and asks for one query after the other.
        answering = copy.copy(self)
        answering.dense_search = answer
        return stock(answering, queries, Q, k)

    return _search_all_Q


def _forget_flags() -> None:
    """Takes the two fields from the configs that have them: ``from_existing`` fails on a name that is no field."""
    from colbert.infra.config import ColBERTConfig

    configs = list(_flagged.values())
    _flagged.clear()
    if any(field.name in FIELDS for field in dataclasses.fields(ColBERTConfig)):
        return  # this colbert-ai has them by itself
    for config in configs:
        for name in FIELDS:
            vars(config).pop(name, None)
            vars(config).get("assigned", {}).pop(name, None)  # none where its constructor failed
