"""Writes the measured tables of README.md from eval/results/*.json, between their markers.

python scripts/update_readme.py            # rewrites README.md
python scripts/update_readme.py --check    # exit 1 if it is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results: {} -->", "<!-- end of results -->"


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "eval" / "results" / f"{name}.json").read_text())
    if result["correct"] is not True:
        raise ValueError(f"{name}.json: expected a run whose checks passed, got correct = {result['correct']}")
    return result


def search_table() -> str:
    """The A/B at MS MARCO's size."""
    result = load("h200_search")
    f = result["figures"]
    rows = ["| | stock PLAID | plugin | |", "|---|---|---|---|"]

    def row(what: str, stock: str | None, ours: str, digits: int) -> None:
        mine = f"{f[ours]:.{digits}f} ms"
        theirs, ratio = ("", "") if stock is None else (f"{f[stock]:.1f} ms", f"{f[stock] / f[ours]:.0f}x")
        rows.append(f"| {what} | {theirs} | {mine} | {ratio} |")

    for k in (10, 100, 1000):
        row(f"search, k = {k}", f"stock_p50_ms_k{k}", f"search_p50_ms_k{k}", 2)
    row("the same with residuals in host memory, k = 1000", None, "host_p50_ms_k1000", 2)
    row("every candidate scored exactly (`rerank`), k = 1000", None, "rerank_p50_ms_k1000", 2)
    row("the whole collection scored exactly (`exhaustive`)", None, "exhaustive_p50_ms", 1)
    row("exact scores of 100,000 given passages", "stock_exact_100k_ms", "exact_100k_ms", 2)
    beside = " / ".join(f"{result['detail'][f'ab_k{k}']['ours_ms']['p50']:.2f}" for k in (10, 100, 1000))
    candidates = " / ".join(f"{f[f'candidates_k{k}']:,.0f}" for k in (10, 100, 1000))
    gpu = result["machine"]["gpus"][0]["name"]
    rate = f"{f['load_gb_per_s']:.1f} GB/s"
    lines = [
        f"{f['passages']:,.0f} passages, {f['tokens']:,.0f} tokens, 2 bits, one {gpu};",
        f"medians from the encoded query to pids and scores on the host; {candidates} candidates (medians):",
        "",
        *rows,
        "",
        f"Query by query in turn with stock, which leaves the caches cold, the plugin takes {beside} ms.",
        f"Batches of 64 run at {f['batch64_qps']:,.0f} queries/s (k = 10). The index takes {f['gpu_gb']:.1f} GB of GPU",
        f"memory, or {f['host_placement_gpu_gb']:.1f} GB with residuals in host memory, and loads in "
        f"{f['load_s']:.1f} s ({rate}).",
        f"Mean error of a score against float64: {f['mean_err_ours']:.1e}, stock's {f['mean_err_stock']:.1e}.",
        "Every figure, and the command: [eval/results/h200_search.json](eval/results/h200_search.json).",
    ]
    return "\n".join(lines)


def quality_table() -> str:
    """Real collections: the same metrics as stock, smaller errors, what the other modes change."""
    result = load("h200_quality")
    f = result["figures"]
    k = 100
    queries = [part["query_shape"][0] for part in result["sets"].values()]
    cut = f"; {' and '.join(result['not_finished'])} were cut off by time" if result["not_finished"] else ""
    lines = [
        "## How good",
        "",
        f"nDCG@10 on {f['sets']:.0f} real collections (k = {k}, 2 bits, {min(queries)} to {max(queries)} queries; a "
        f"small demo encoder, so the numbers compare searches, not models{cut}):",
        "",
        "| | stock, GPU (fp16) | stock, CPU (fp32) | plugin, GPU | `rerank` | `exhaustive` | float64 oracle |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["table"]:
        if (row["nbits"], row["k"]) == (2, k):
            ours = ("tilemaxsim", "tilemaxsim:mode=rerank", "tilemaxsim:mode=exhaustive")
            systems = ("stock-gpu", "stock-cpu", *ours, "oracle")
            values = " | ".join(f"{row['nDCG@10'][system]:.4f}" for system in systems)
            lines.append(f"| {row['set']} | {values} |")
    per_stock = " and ".join(
        f"those of its {where.upper()} search in {f[f'metrics_equal_searches_{where}']:.0f} (largest difference "
        f"{f[f'max_metric_difference_{where}']:.4f})"
        for where in ("cpu", "gpu")
    )
    lines += [
        "",
        f"Of {f['searches']:.0f} searches of a collection at 1, 2 or 4 bits and k = 10, 100 or 1000, all metrics in "
        f"mode `plaid` equal stock's to four decimals: {per_stock}. Candidates, survivors and rankings outside ties "
        f"are equal in all; stock's GPU search rounds scores to fp16, and passages within that rounding change places.",
        f"`rerank` and `exhaustive` are significantly below stock in nDCG@10 in {f['ndcg10_losses_holm']:.0f} of "
        f"{f['ndcg10_tests']:.0f} paired t tests after Holm's correction ({f['ndcg10_losses']:.0f} before it).",
        f"Largest error of a score against float64: {f['max_err_vs_oracle']:.1e}; mean in mode `plaid` "
        f"{f['mean_err_ours']:.1e}, stock's {f['mean_err_stock_gpu']:.1e} on the GPU.",
        "All figures: [eval/results/h200_quality.json](eval/results/h200_quality.json).",
    ]
    return "\n".join(lines)


TABLES = {"search": search_table}
if (ROOT / "eval" / "results" / "h200_quality.json").exists():
    TABLES["quality"] = quality_table


def rendered(text: str, tables: Mapping[str, Callable[[], str]] = TABLES, page: str = "README.md") -> str:
    """The page with each table anew between its markers."""
    for name, table in tables.items():
        start = START.format(name)
        if start not in text:
            raise ValueError(f"{page}: expected the marker {start}")
        before, _, rest = text.partition(start)
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{page}: expected {END} after {start}")
        text = f"{before}{start}\n{table()}\n{END}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    wanted = rendered(text)
    if args.check:
        if text != wanted:
            print("README.md is not what eval/results say: run python scripts/update_readme.py", file=sys.stderr)
            return 1
        return 0
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
