#!/usr/bin/env bash
# All checks, from nothing but python3: makes its own environment, then ruff, mypy and pytest.
#
#   bash scripts/test.sh [--slow] [--gpu] [pytest arguments]
#
# --slow also runs the full matrices. PLAID_TILEMAXSIM_DATA names a folder of collections (<name>.tar.gz or <name>/ in
# BEIR form); tests that read one are skipped without it. scripts/_venv.sh lists the settings of the environment.
set -euo pipefail
unset PYTHONPATH
export PYTHONNOUSERSITE=1

source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
cd "$root"
enter_venv
trap stop_extensions EXIT
start_extensions

say "ruff"
ruff check . || die "ruff found the problems above." "Many mend themselves: $venv/bin/ruff check --fix ."
say "mypy"
mypy || die "mypy found the problems above."
wait_for_extensions

say "pytest $*"
if [ -n "${PLAID_TILEMAXSIM_DATA:-}" ]; then
    note "collections: $PLAID_TILEMAXSIM_DATA"
else
    note "PLAID_TILEMAXSIM_DATA is not set: tests on real collections are skipped"
fi
python -m pytest "$@" || die "tests failed." "One of them again: bash scripts/test.sh -x 'tests/FILE.py::NAME'"
