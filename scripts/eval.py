"""Stock PLAID, the plugin and others on one collection, end to end: results.json, report.html and report.md.

    python scripts/eval.py --out results/pydocs
    python scripts/eval.py --config msmarco_k10 --out results/msmarco_k10
    python scripts/eval.py --help

What `plaid-tilemaxsim eval` is where the package is installed; see eval/cli.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
