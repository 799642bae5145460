"""What colbert-ai 0.2.22 needs to run beside today's libraries. Nothing is changed where nothing is needed."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import threading
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger("plaid_tilemaxsim")

_GIT_VARIABLE = "GIT_PYTHON_REFRESH"
_lock = threading.RLock()
_set_git_variable = False
_stock_init_weights: Any = None
_deferred: SimpleNamespace | None = None


def apply() -> None:
    """Makes ``import colbert`` and its models work here, and in spawned children that import this too.

    Idempotent; undone by :func:`revert`. Raises ValueError where this transformers cannot be adapted.
    """
    allow_missing_git()
    adapt_transformers()
    defer_maxsim_extension()


def revert() -> None:
    """Undoes :func:`apply`."""
    global _set_git_variable, _stock_init_weights, _deferred
    with _lock:
        if _deferred is not None:
            _restore_maxsim_extension(_deferred)
            _deferred = None
        if _set_git_variable:
            os.environ.pop(_GIT_VARIABLE, None)
            _set_git_variable = False
        if _stock_init_weights is not None:
            from transformers import PreTrainedModel

            setattr(PreTrainedModel, "init_weights", _stock_init_weights)  # noqa: B010
            _stock_init_weights = None


def allow_missing_git() -> None:
    """Lets colbert be imported without a git executable.

    colbert imports GitPython, which raises at import where there is no git, unless this variable is set. It stays
    set since spawned children import colbert as well.
    """
    global _set_git_variable
    with _lock:
        if _GIT_VARIABLE in os.environ or "git" in sys.modules or git_found():
            return
        os.environ[_GIT_VARIABLE] = "quiet"
        _set_git_variable = True


def git_found() -> bool:
    return shutil.which(os.environ.get("GIT_PYTHON_GIT_EXECUTABLE") or "git") is not None


def transformers_version() -> tuple[str, int]:
    import transformers

    version: str = transformers.__version__
    return version, int(version.split(".")[0])


def adapt_transformers() -> None:
    """Lets colbert's models be built by transformers 5.

    colbert calls ``init_weights()`` at the end of a model's constructor. From version 5 on, ``post_init()`` must
    run, which sets ``all_tied_weights_keys`` and calls ``init_weights()`` itself. Only models that were not through
    ``post_init()``, which would fail otherwise, see a difference. Version 4 is left alone.
    """
    global _stock_init_weights
    with _lock:
        version, major = transformers_version()
        if major < 5 or _stock_init_weights is not None:
            return
        from transformers import PreTrainedModel

        if not _loses_tied_keys():
            return
        if major > 5:
            logger.warning("transformers %s is newer than any version tested with colbert-ai (4.x, 5.x)", version)
        stock: Any = PreTrainedModel.init_weights

        @functools.wraps(stock)
        def init_weights(self: Any) -> None:
            if hasattr(self, "all_tied_weights_keys"):
                stock(self)
            else:
                self.post_init()

        setattr(PreTrainedModel, "init_weights", init_weights)  # noqa: B010
        _stock_init_weights = stock
        if _loses_tied_keys():
            revert()
            raise ValueError(
                f"transformers {version} cannot be adapted to colbert-ai: expected post_init() to set "
                "all_tied_weights_keys on a model, found that it does not; install 'transformers>=4.40,<6'"
            )


def transformers_adapted() -> bool:
    return _stock_init_weights is not None


def defer_maxsim_extension() -> None:
    """Lets models be built on a machine without GPU and C++ compiler.

    There colbert compiles with every model an extension that only stock PLAID's scoring calls; it is compiled when
    that happens.
    """
    global _deferred
    with _lock:
        from colbert.modeling.colbert import ColBERT

        if _deferred is not None or hasattr(ColBERT, "loaded_extensions"):
            return
        # Stock's loader puts what it loaded on the class that it is called with: here on this object.
        held = SimpleNamespace(stock=vars(ColBERT)["try_load_torch_extensions"], asked_for=False)

        def try_load_torch_extensions(cls: Any, use_gpu: bool) -> None:
            held.asked_for |= not use_gpu

        def segmented_maxsim(scores: Any, lengths: Any) -> Any:
            with _lock:
                held.stock.__func__(held, False)
            return held.segmented_maxsim(scores, lengths)

        ColBERT.try_load_torch_extensions = classmethod(try_load_torch_extensions)
        ColBERT.segmented_maxsim = staticmethod(segmented_maxsim)
        _deferred = held


def _restore_maxsim_extension(held: SimpleNamespace) -> None:
    from colbert.modeling.colbert import ColBERT

    ColBERT.try_load_torch_extensions = held.stock
    if hasattr(held, "loaded_extensions"):
        ColBERT.segmented_maxsim = held.segmented_maxsim
        ColBERT.loaded_extensions = True
    elif not held.asked_for:
        del ColBERT.segmented_maxsim
    # else a model lives that stock would have loaded the extension for: its first scoring still does


def _loses_tied_keys() -> bool:
    """Whether a model that ends its constructor as colbert's do lacks what ``from_pretrained`` will ask for."""
    from transformers import PretrainedConfig, PreTrainedModel

    class Probe(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            init_weights: Any = self.init_weights
            init_weights()

    try:
        return not hasattr(Probe(), "all_tied_weights_keys")
    except AttributeError:
        return True
