"""Command line of the patches: ``python -m plaid_tilemaxsim.patches apply|revert|status [--target PATH]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from plaid_tilemaxsim.patches.series import (
    Series,
    apply,
    find_target,
    load_series,
    patch_states,
    restore_hint,
    revert,
    status,
)


def _print_status(root: Path, series: Series, command: str) -> int:
    states = patch_states(root, series)
    for name, state in states.items():
        print(f"{name:32} {state}")
    applied = sum(state == "applied" for state in states.values())
    modified = [change.path for change in status(root, series) if change.done is None]
    print(f"colbert-ai {series.version} in {root}: {applied} of {len(series.patches)} patches applied")
    if modified:
        print(f"Neither pristine nor patched: {', '.join(modified)}. {restore_hint(series.version)}")
        return 1
    if applied < len(series.patches):
        print(f"Apply: {command.format('apply')}")
    else:
        print(f"Undo: {command.format('revert')}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m plaid_tilemaxsim.patches",
        description="Put the scorer flag into colbert-ai itself, take it out again, or show where it stands.",
    )
    parser.add_argument("action", choices=["apply", "revert", "status"])
    parser.add_argument(
        "--target",
        metavar="PATH",
        help="a checkout of colbert-ai or a site-packages folder (default: the installed one)",
    )
    args = parser.parse_args(argv)
    command = "python -m plaid_tilemaxsim.patches {}" + (f" --target {args.target}" if args.target else "")
    try:
        root, version = find_target(args.target)
        series = load_series(version)
        if args.action == "status":
            return _print_status(root, series, command)
        changed = (apply if args.action == "apply" else revert)(root, series)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in changed:
        print(f"changed {root / path}")
    print(f"colbert-ai {version}: {len(changed)} files changed" if changed else "Nothing to do.")
    print("Restart running Python processes that use colbert.")
    if args.action == "apply":
        print('ColBERTConfig(scorer="tilemaxsim") now works in programs that do not import plaid_tilemaxsim.')
        print(f"Undo: {command.format('revert')}")
    else:
        print("colbert-ai is as published; programs that call plaid_tilemaxsim.enable() still have the flag.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
