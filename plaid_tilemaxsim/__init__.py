"""ColBERTv2/PLAID search scored by fused GPU kernels, as a plugin for colbert-ai.

    import plaid_tilemaxsim
    plaid_tilemaxsim.enable()

gives ``ColBERTConfig`` the fields ``scorer`` ("plaid", stock and the default, or "tilemaxsim") and
``scorer_options``. Importing this package imports neither torch nor colbert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plaid_tilemaxsim.config import ScorerConfig
    from plaid_tilemaxsim.scorer import TileMaxSimScorer

__version__ = "0.1.0"
__all__ = ["ScorerConfig", "TileMaxSimScorer", "__version__", "disable", "enable", "is_enabled"]


def enable(*, scorer: str | None = None, scorer_options: Mapping[str, Any] | None = None) -> None:
    """Registers the scorer with colbert-ai; see :func:`plaid_tilemaxsim.plugin.enable`."""
    from plaid_tilemaxsim import plugin

    plugin.enable(scorer=scorer, scorer_options=scorer_options)


def disable() -> None:
    """Undoes ``enable``; see :func:`plaid_tilemaxsim.plugin.disable`."""
    from plaid_tilemaxsim import plugin

    plugin.disable()


def is_enabled() -> bool:
    """Whether the scorer is registered with colbert-ai in this process."""
    from plaid_tilemaxsim import plugin

    return plugin.is_enabled()


def __getattr__(name: str) -> Any:
    if name == "ScorerConfig":
        from plaid_tilemaxsim.config import ScorerConfig

        return ScorerConfig
    if name == "TileMaxSimScorer":
        from plaid_tilemaxsim.scorer import TileMaxSimScorer

        return TileMaxSimScorer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
