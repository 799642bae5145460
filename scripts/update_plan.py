"""Writes plaid_tilemaxsim/measured.json, the pieces of `plaid-tilemaxsim plan`, from eval/results.

python scripts/update_plan.py            # rewrites it
python scripts/update_plan.py --check    # exit 1 if it is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "plaid_tilemaxsim" / "measured.json"
# By GPU and name: the results file and the path to the value in it.
PIECES = {
    "h200": {
        "name": ("h200_search", "machine.gpus.0.name"),
        "memory_bytes": ("h200_search", "machine.gpus.0.memory_bytes"),
        "passages": ("h200_search", "index.passages"),
        "tokens": ("h200_search", "index.tokens"),
        "centroids": ("h200_search", "index.centroids"),
        "dim": ("h200_search", "index.dim"),
        "nbits": ("h200_search", "index.nbits"),
        "index_bytes": ("h200_search", "index.bytes"),
        "load_gb_per_s": ("h200_search", "figures.load_gb_per_s"),
        **{f"candidates_k{k}": ("h200_search", f"figures.candidates_k{k}") for k in (10, 100, 1000)},
        **{f"search_p50_ms_k{k}": ("h200_search", f"figures.search_p50_ms_k{k}") for k in (10, 100, 1000)},
        **{f"host_p50_ms_k{k}": ("h200_search", f"figures.host_p50_ms_k{k}") for k in (10, 100, 1000)},
        "plaid_k10_stages_ms": ("h200_search", "detail.plaid_k10.stages_ms"),
        "exact_least_ms": ("h200_search", "detail.plaid_k10.stages_ms.exact"),
        "topk_least_ms": ("h200_search", "detail.plaid_k10.stages_ms.topk"),
        "exhaustive_topk_ms": ("h200_search", "detail.exhaustive_k1000.stages_ms.topk"),
        "centroids_keep_cells_ms": ("h200_search_steps", "figures.centroids_keep_cells_ms"),
        "candidates_ms": ("h200_search_steps", "figures.candidates_ms"),
        "prune_gtok": ("h200_search_steps", "figures.prune_thresholded_gtok"),
        "select_ms": ("h200_search_steps", "figures.select_large_ms"),
        "exact_100k_ms": ("h200_search_steps", "figures.exact_100k_kernel_ms"),
        "centroid_scores_ms": ("h200_kernels", "figures.centroid_scores_ms"),
        "centroid_gtok": ("h200_kernels", "figures.centroid_gtok"),
        **{f"residual{b}_gtok": ("h200_kernels", f"figures.residual{b}_gtok") for b in (1, 2, 4)},
        "shards_merged": ("cpu_cluster", "figures.shards_merged"),
        **{f"round_trip_ms_k{k}": ("cpu_cluster", f"figures.round_trip_ms_k{k}") for k in (10, 100, 1000)},
        **{f"merge_ms_k{k}": ("cpu_cluster", f"figures.merge_ms_k{k}") for k in (10, 100, 1000)},
    }
}


def rendered() -> str:
    """ValueError for results whose checks failed, KeyError for what they lack."""
    results = {}
    for name in {file for pieces in PIECES.values() for file, _ in pieces.values()}:
        results[name] = json.loads((ROOT / "eval" / "results" / f"{name}.json").read_text())
        if results[name]["correct"] is not True:
            raise ValueError(f"{name}.json: expected a run whose checks passed, got {results[name]['correct']}")
    found: dict[str, dict[str, Any]] = {}
    for gpu, pieces in PIECES.items():
        found[gpu] = {}
        for piece, (file, path) in pieces.items():
            value: Any = results[file]
            for word in path.split("."):
                value = value[int(word)] if isinstance(value, list) else value[word]
            found[gpu][piece] = {"value": value, "file": f"eval/results/{file}.json", "key": path}
    return json.dumps(found, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = rendered()
    if parser.parse_args().check:
        return int(FILE.read_text() != text)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
