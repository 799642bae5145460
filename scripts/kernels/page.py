"""The tables of docs/roofline.md: every number of the page comes from eval/results/h200_kernels.json."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.cache import read_json
from scripts.kernels.bench import OURS
from scripts.kernels.peers import NOT_RUN, PAPER

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results" / "h200_kernels.json"
NOTHING = "Not measured yet: `python scripts/bench_kernels.py`."
SWEEPS_PLOT = (
    "![% of read bandwidth over query length, passage length, dimensions and batch; residual throughput]"
    "(plots/sweeps.svg)"
)
NO_SWEEPS = "The committed results have no sweeps: `python scripts/bench_kernels.py --groups sweeps --merge`."

# figure -> what it is, its unit, whether more is better, target, stretch
TARGETS: dict[str, tuple[str, str, bool, float, float | None]] = {
    "dense_fp16_pct": ("dense fp16, 100,000 x 128 tokens", "% of read", True, 98, None),
    "dense_over_best_peer": ("the same, over the fastest peer", "x", True, 1, None),
    "dense_packed_pct": ("dense packed, MS MARCO lengths", "% of read", True, 94, 97),
    "dense_d64_pct": ("dense DIM 64, fp16 and bf16", "% of read", True, 94, 97),
    "dense_d256_pct": ("dense DIM 256, fp16 and bf16", "% of read", True, 94, 97),
    "dense_d384_pct": ("dense DIM 384, fp16 and bf16", "% of read", True, 94, 97),
    "dense_d768_pct": ("dense DIM 768, fp16 and bf16", "% of read", True, 94, 97),
    "dense_bf16_pct": ("dense bf16, the least of all DIM", "% of read", True, 94, 97),
    "dense_fp32_pct": ("dense fp32, error <= 1e-5", "% of read", True, 85, None),
    "dense_fp32_max_err": ("its largest error", "", False, 1e-5, None),
    "dense_tf32_pct": ("dense fp32 as TF32", "% of read", True, 97, None),
    "dense_10k_pct": ("dense fp16, 10,000 x 128 tokens", "% of read", True, 90, None),
    "residual2_gtok": ("residual 2 bits", "Gtokens/s", True, 25, 40),
    "residual1_gtok": ("residual 1 bit", "Gtokens/s", True, 28, None),
    "residual4_gtok": ("residual 4 bits", "Gtokens/s", True, 15, None),
    "residual2_q8_speedup": ("residual 2 bits, 8 queries a decode", "x", True, 3, None),
    "centroid_gtok": ("centroids alone", "Gtokens/s", True, 90, None),
    "pq16_mdocs": ("PQ, M = 16, 128 tokens", "Mdocs/s", True, 137, 300),
    "exhaustive_ms": ("search of all of 599 M tokens, 2 bits", "ms", False, 25, 12),
}


def load(path: Path | None = None) -> dict[str, Any] | None:
    """The results; None where there are none. ValueError for a run whose checks failed: it is not shown."""
    path = path or RESULTS
    if not path.exists():
        return None
    result: dict[str, Any] = read_json(path)
    if result["correct"] is not True:
        raise ValueError(f"{path.name}: expected a run whose checks passed, got correct = {result['correct']}")
    return result


def number(value: float) -> str:
    """Three significant digits, plain where that is readable."""
    if value != 0 and abs(value) < 1e-2:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def name_of(row: dict[str, Any]) -> str:
    """What a row of ours scored."""
    variant = row["kernel"].removeprefix(OURS).strip(", ")
    return f"{row['group']} {row['name']}" + (f", {variant}" if variant else "")


def best_peer(result: dict[str, Any], row: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest peer that keeps values as given and scored the same."""
    same = [
        peer
        for peer in result["rows"]
        if (peer["group"], peer["name"]) == (row["group"], row["name"])
        and not peer["ours"]
        and "ms" in peer
        and peer.get("bytes", 2) == 2
    ]
    return max(same, key=lambda peer: peer["mdocs_s"], default=None)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(commit: str | None) -> str:
    return "unknown" if commit is None else commit[:12]


def where(result: dict[str, Any]) -> str:
    """The page's first lines: machine, versions, ceiling."""
    versions, best = result["versions"], result["read"]["best"]
    others = [(group, run["commit"]) for group, run in result["runs"].items() if run["commit"] != result["commit"]]
    older = "".join(f" The group {group} was measured at `{short(commit)}`." for group, commit in others)
    choice = f"{best['BLOCK']} words a block, {best['num_warps']} warps, {best['programs_per_sm']} programs an SM"
    return (
        f"{result['gpu']}, torch {versions['torch']}, triton {versions['triton']}, "
        f"commit `{short(result['commit'])}`.{older}\n"
        f"Read bandwidth in that run: **{result['read']['gb_s']:,.0f} GB/s** over "
        f"{result['read']['bytes'] / 1e9:.1f} GB ({choice}),\n"
        f"and {result['read']['small']['gb_s']:,.0f} GB/s over {result['read']['small']['bytes'] / 1e9:.2f} GB, where "
        f"starting and draining count; the highest of all runs, which floors are of: "
        f"**{result['figures']['read_gb_s']:,.0f} GB/s**."
    )


def targets(result: dict[str, Any]) -> str:
    rows = []
    for figure, (what, unit, more, target, stretch) in TARGETS.items():
        value = result["figures"].get(figure)
        sign = ">=" if more else "<="
        if value is None:
            measured, verdict = "not measured", ""
        else:
            measured = number(value)
            reached = [goal for goal in (target, stretch) if goal is not None and (value >= goal) == more]
            verdict = "stretch" if stretch in reached else "yes" if reached else "no"
        goals = [f"{sign} {target:g} {unit}".strip(), "" if stretch is None else f"{stretch:g}"]
        rows.append([what, f"`{figure}`", *goals, measured, verdict])
    return table(["", "figure", "target", "stretch", "measured", "reached"], rows)


def rate(row: dict[str, Any]) -> str:
    """In the unit of the row's figure."""
    if row["group"] in ("dense", "pq"):
        text = f"{number(row['mdocs_s'])} Mdocs/s"
    elif row["name"] == "scores":
        text = f"{number(row['gtok_s'])} Gcentroids/s"
    else:
        text = f"{number(row['gtok_s'])} Gtok/s"
    return text + (f" x {row['queries']} queries" if "queries" in row else "")


def floors(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        if not row["ours"]:
            continue
        if "ms" not in row:
            rows.append([name_of(row), "", "", row.get("failed", "not timed"), "", "", "", ""])
            continue
        peer = best_peer(result, row)
        beside = "" if peer is None else f"{peer['kernel']}, {row['mdocs_s'] / peer['mdocs_s']:.2f}x"
        rows.append([
            name_of(row), f"{row['nbytes'] / 1e9:.3f}", number(row["floor_ms"]),
            f"{number(row['ms'])} ({number(row['p20'])}-{number(row['p80'])})", f"{row['pct_of_read']:.1f}", rate(row),
            f"{row['max_error']:.1e} <= {row['tolerance']:.1e}", beside,
        ])  # fmt: skip
    header = [
        "kernel",
        "GB",
        "floor ms",
        "ms (p20-p80)",
        "% of read",
        "rate",
        "max error",
        "fastest peer, ours over it",
    ]
    return table(header, rows)


def peer_table(result: dict[str, Any]) -> str:
    """Every peer of every shape, failures with their reasons."""
    rows = []
    for row in result["rows"]:
        if row["ours"]:
            continue
        of = f"{row['group']} {row['name']}"
        if "ms" not in row:
            rows.append([of, row["kernel"], row["failed"].replace("|", "/"), "", "", ""])
            continue
        note = "8-bit values" if row.get("bytes", 2) == 1 else ""
        rows.append([
            of, row["kernel"], number(row["ms"]), f"{row['pct_of_read']:.1f}",
            f"{number(row['mdocs_s'])} Mdocs/s, {number(row['gtok_s'])} Gtok/s",
            f"{row['max_error']:.1e}" + (f" ({note})" if note else ""),
        ])  # fmt: skip
    left = "\n".join(f"- `{name}`: {reason}" for name, reason in NOT_RUN.items())
    return table(["shape", "peer", "ms", "% of read", "rate", "max error"], rows) + f"\n\nNot run:\n\n{left}"


def sweeps(result: dict[str, Any]) -> str:
    """Our rows of every sweep, with the paper's algorithm where it ran."""
    if not result["sweeps"]:
        return NO_SWEEPS
    paper = {(row["group"], row["name"]): row for row in result["sweeps"] if PAPER in row["kernel"] and "ms" in row}
    rows = []
    for row in result["sweeps"]:
        if not row["ours"]:
            continue
        beside = paper.get((row["group"], row["name"]))
        tail = [row.get("failed", "not timed"), "", "", ""]
        if "ms" in row:
            tail = [number(row["ms"]), f"{row['pct_of_read']:.1f}", number(row["gtok_s"]),
                    "" if beside is None else f"{row['mdocs_s'] / beside['mdocs_s']:.2f}x"]  # fmt: skip
        tokens = f"{row['tokens'] / row['passages']:.0f}"
        values = ", ".join([row["dtype"], *row["kernel"].split(", ")[1:]])
        rows.append([row["group"].removeprefix("sweep "), str(row["LQ"]), tokens, str(row["DIM"]), values,
                     f"{row['passages']:,}", *tail])  # fmt: skip
    header = ["sweep", "LQ", "tokens", "DIM", "values", "passages", "ms", "% of read", "Gtok/s", "over the paper's"]
    return f"{table(header, rows)}\n\n{SWEEPS_PLOT}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "where": where,
    "targets": targets,
    "floors": floors,
    "sweeps": sweeps,
    "peers": peer_table,
}


def tables(path: Path | None = None) -> dict[str, Callable[[], str]]:
    """Name of a table -> its text, for update_readme.rendered."""
    result = load(path)
    if result is None:
        return dict.fromkeys(TABLES, lambda: NOTHING)
    return {name: functools.partial(make, result) for name, make in TABLES.items()}
