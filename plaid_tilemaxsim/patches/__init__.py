"""The scorer flag inside colbert-ai itself: patch files, and what applies, reverts and checks them.

    python -m plaid_tilemaxsim.patches apply|revert|status [--target PATH]

The patch files lie in the top-level folder ``patches/`` of the source tree, and in ``data/`` beside this file
once installed.
"""

from plaid_tilemaxsim.patches.series import (
    Change,
    Series,
    apply,
    find_target,
    load_series,
    patch_states,
    revert,
    status,
)

__all__ = ["Change", "Series", "apply", "find_target", "load_series", "patch_states", "revert", "status"]
