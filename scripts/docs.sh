#!/usr/bin/env bash
# Builds the documentation into results/site, every warning an error (tests/test_docs.py does so too).
#
#   bash scripts/docs.sh [arguments of mkdocs build]
#   bash scripts/docs.sh serve      # shows it at http://127.0.0.1:8000 and follows changes
set -euo pipefail
unset PYTHONPATH
export PYTHONNOUSERSITE=1

source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
cd "$root"
enter_venv

if [ "${1:-}" = serve ]; then
    shift
    exec mkdocs serve "$@"
fi
python scripts/update_docs.py --check || die "a page is not what its sources say; see above."
mkdocs build --strict "$@" || die "the documentation has the faults above."
say "results/site/index.html"
