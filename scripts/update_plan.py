"""Writes plaid_tilemaxsim/measured.json, the pieces of `plaid-tilemaxsim plan`, and the plans in docs/scale.md.

python scripts/update_plan.py            # rewrites both from eval/results
python scripts/update_plan.py --check    # exit 1 if they are not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plaid_tilemaxsim import plan
from scripts import update_readme

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "plaid_tilemaxsim" / "measured.json"
PAGE = ROOT / "docs" / "scale.md"
BILLION = {"--passages": "1000000000", "--avg-len": "67.6"}
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
        **{f"plaid_k{k}_stages_ms": ("h200_search", f"detail.plaid_k{k}.stages_ms") for k in (10, 100, 1000)},
        "batch64_qps": ("h200_search", "figures.batch64_qps"),
        "rerank_topk_ms": ("h200_search", "detail.rerank_k100.stages_ms.topk"),
        "exhaustive_topk_ms": ("h200_search", "detail.exhaustive_k1000.stages_ms.topk"),
        "exact_100k_ms": ("h200_search_steps", "figures.exact_100k_kernel_ms"),
        "centroid_scores_ms": ("h200_kernels", "figures.centroid_scores_ms"),
        **{f"residual_fp32_us_{n}": ("h200_kernels", f"figures.residual_fp32_us_{n}") for n in (64, 1024)},
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


def planned(**options: str) -> str:
    """A command and what it prints."""
    words = BILLION | {f"--{name}": value for name, value in options.items()}
    numbers = {"passages": int, "avg_len": float, "nbits": int}
    arguments = {name[2:].replace("-", "_"): value for name, value in words.items()}
    text = plan.describe(**{name: numbers.get(name, str)(value) for name, value in arguments.items()})
    command = " ".join(f"{name} {value}" for name, value in words.items())
    return f"```\n$ plaid-tilemaxsim plan {command}\n{text}\n```"


def model() -> str:
    """The measured searches beside the plan's."""
    figures = update_readme.load("h200_search")["figures"]
    passages, tokens = round(figures["passages"]), round(figures["tokens"])
    sizes = plan.sizes_of(passages, tokens / passages, 2, "h200")
    rows = [f"| one H200, {passages:,} passages | measured | plan | |", "|---|---|---|---|"]

    def row(name: str, measured: float, expected: float, unit: str, digits: int) -> None:
        change = f"{100 * (expected / measured - 1):+.0f}%"
        rows.append(f"| {name} | {measured:,.{digits}f} {unit} | {expected:,.{digits}f} {unit} | {change} |")

    for mode, figure in (("plaid", "search_p50_ms_k{}"), ("rerank", "rerank_p50_ms_k{}"), ("host", "host_p50_ms_k{}")):
        for k in plan.KS:
            where = ("plaid", "host") if mode == "host" else (mode, "gpu")
            found = plan.search(sizes, 1, where[0], k, "h200", where[1])
            assert found is not None
            name = f"{where[0]}, k = {k}" + (", residuals in host memory" if mode == "host" else "")
            row(name, figures[figure.format(k)], found.latency, "ms", 2)
    whole, ten = plan.search(sizes, 1, "exhaustive", 1000, "h200"), plan.search(sizes, 1, "plaid", 10, "h200")
    assert whole is not None
    assert ten is not None
    row("exhaustive", figures["exhaustive_p50_ms"], whole.latency, "ms", 1)
    row("plaid, k = 10, batches", figures["batch64_qps"], ten.queries_per_s, "queries/s", 0)
    for placement, figure in (("gpu", "gpu_gb"), ("host", "host_placement_gpu_gb")):
        size = sum(plan.memory(sizes, placement)[0].values()) / 1e9
        row(f"GPU memory, placement {placement}", figures[figure], size, "GB", 1)
    return "\n".join(rows)


def cluster() -> str:
    result = update_readme.load("cpu_cluster")
    f = result["figures"]
    times = " / ".join(f"{f[f'round_trip_ms_k{k}']:.1f}" for k in plan.KS)
    merges = " / ".join(f"{f[f'merge_ms_k{k}']:.2f}" for k in plan.KS)
    return (
        f"{f['searches']} searches of {f['shards']} shards, {f['searches_different']} that differ in a pid, a score or "
        f"the order.\nOn {result['machine']['cpus']} cores a request to all of them takes {times} ms at k = 10 / 100 / "
        f"1000, and the merge\nof {f['shards_merged']} answers {merges} ms."
    )


def gpus() -> str:
    f = update_readme.load("h200_x2")["figures"]
    rows = [("plaid, k = 10", "plaid_k10"), ("plaid, k = 100", "plaid_k100"), ("plaid, k = 1000", "plaid_k1000"),
            ("rerank", "rerank"), ("exhaustive", "exhaustive"), ("exhaustive, prefilter", "prefilter")]  # fmt: skip
    lines = ["| 8,841,823 passages, ms | one H200 | two | |", "|---|---|---|---|"]
    for name, key in rows:
        one, two = f[f"{key}_p50_ms_one"], f[f"{key}_p50_ms_shards"]
        lines.append(f"| {name} | {one:.2f} | {two:.2f} | {one / two:.2f}x |")
    one = f["batch_qps_one"]
    for name, key in (("shards", "batch_qps_shards"), ("replicas", "batch_qps_replicas")):
        lines.append(f"| batches, queries/s, {name} | {one:,.0f} | {f[key]:,.0f} | {f[key] / one:.2f}x |")
    return "\n".join(lines)


TABLES = {
    "gpus": gpus,
    "cluster": cluster,
    "model": model,
    "billion": planned,
    "billion on hosts": lambda: planned(placement="host"),
    "billion at 1 bit": lambda: planned(nbits="1"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    same = FILE.exists() and FILE.read_text() == rendered()
    if not check:
        FILE.write_text(rendered())
    text = PAGE.read_text()
    wanted = update_readme.rendered(text, TABLES, PAGE.name)
    if not check:
        PAGE.write_text(wanted)
    return int(check and not (same and text == wanted))


if __name__ == "__main__":
    sys.exit(main())
