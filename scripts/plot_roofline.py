"""Writes the tables of docs/roofline.md and its plots (docs/plots/*.svg) from eval/results/h200_kernels.json.

python scripts/plot_roofline.py            # rewrites both (needs matplotlib)
python scripts/plot_roofline.py --check    # exit 1 if the page is not what the results say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.kernels import page
from scripts.kernels.peers import PAPER
from scripts.update_readme import ROOT, rendered

PAGE = ROOT / "docs" / "roofline.md"
PLOTS = ROOT / "docs" / "plots"
# sweep -> what changes in its rows, and its name
SWEEPS: dict[str, tuple[Callable[[dict[str, Any]], float], str]] = {
    "lq": (lambda row: row["LQ"], "query tokens"),
    "tokens": (lambda row: row["tokens"] / row["passages"], "tokens a passage"),
    "dim": (lambda row: row["DIM"], "dimensions"),
    "batch": (lambda row: row["passages"], "passages"),
}


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "plaid_tilemaxsim"  # the same results make the same file
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: Any, name: str) -> Path:
    PLOTS.mkdir(parents=True, exist_ok=True)
    path = PLOTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def once(i: int, label: str) -> str | None:
    """The label of the first of many marks: a legend names each kind once."""
    return label if i == 0 else None


def plot_dense(result: dict[str, Any]) -> Path | None:
    """% of read of every dense shape: ours, the fastest peer, the paper's algorithm."""
    ours = [row for row in result["rows"] if row["ours"] and row["group"] == "dense" and "ms" in row]
    if not ours:
        return None
    papers: dict[str, float] = {}
    for row in result["rows"]:
        if row["group"] == "dense" and PAPER in row["kernel"] and "ms" in row:
            papers[row["name"]] = max(papers.get(row["name"], 0.0), row["pct_of_read"])
    figure, axes = new_figure(1, 1, (8, 0.55 * len(ours) + 1.2))
    axis = axes[0, 0]
    for i, row in enumerate(ours):
        peer = page.best_peer(result, row)
        axis.barh(i - 0.27, row["pct_of_read"], 0.26, color="tab:blue", label=once(i, "plaid_tilemaxsim"))
        beside = 0.0 if peer is None else peer["pct_of_read"]
        axis.barh(i, beside, 0.26, color="tab:orange", label=once(i, "fastest peer"))
        axis.barh(i + 0.27, papers.get(row["name"], 0.0), 0.26, color="tab:gray", label=once(i, PAPER))
    axis.axvline(100, color="black", linewidth=0.8)
    axis.set_yticks(range(len(ours)), [page.name_of(row) for row in ours])
    axis.invert_yaxis()
    axis.set(xlabel="% of read bandwidth")
    figure.legend(loc="outside upper center", ncols=3)
    return save(figure, "dense")


def plot_compressed(result: dict[str, Any]) -> Path | None:
    """Tokens a second of every compressed kernel, and what reading its bytes alone would allow."""
    ours = [row for row in result["rows"] if row["ours"] and row["group"] != "dense" and "ms" in row]
    ours = [row for row in ours if row["name"] != "scores"]
    if not ours:
        return None
    figure, axes = new_figure(1, 1, (8, 0.5 * len(ours) + 1.2))
    axis = axes[0, 0]
    for i, row in enumerate(ours):
        measured = row["gtok_s"] * row.get("queries", 1)
        bound = measured * row["ms"] / row["floor_ms"]
        axis.barh(i, measured, 0.6, color="tab:blue", label=once(i, "measured"))
        axis.plot([bound, bound], [i - 0.35, i + 0.35], color="black", label=once(i, "its bytes alone"))
        peer = page.best_peer(result, row)
        axis.plot(float("nan") if peer is None else peer["gtok_s"], i, "o", color="tab:orange",
                  label=once(i, "fastest peer"))  # fmt: skip
    axis.set_yticks(range(len(ours)), [page.name_of(row) for row in ours])
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="Gtokens/s (times queries that share a decode)")
    figure.legend(loc="outside upper center", ncols=3)
    return save(figure, "compressed")


def plot_sweeps(result: dict[str, Any]) -> Path | None:
    """% of read along each sweep of the dense kernel, and tokens a second of the residual kernel."""
    if not result["sweeps"]:
        return None
    figure, axes = new_figure(2, 3, (13, 7))
    flat = list(axes.flat)
    for axis, (name, (value, label)) in zip(flat, SWEEPS.items()):
        rows = [row for row in result["sweeps"] if row["group"] == f"sweep {name}" and "ms" in row]
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            kernel = PAPER if PAPER in row["kernel"] else row["kernel"]
            kinds.setdefault(f"{kernel}, {row['dtype']}", []).append(row)
        for kind, points in kinds.items():
            points.sort(key=value)
            axis.plot([value(row) for row in points], [row["pct_of_read"] for row in points], "o-", label=kind)
        axis.axhline(100, color="black", linewidth=0.8)
        axis.set(xscale="log", xlabel=label, ylabel="% of read bandwidth", ylim=(0, 110))
        at = sorted({value(row) for row in rows})
        axis.set_xticks(at, [f"{x:,.0f}" for x in at], minor=False)
        axis.set_xticks([], minor=True)
        if kinds:
            axis.legend(fontsize=7)
    residual = [row for row in result["sweeps"] if row["group"] == "sweep residual" and "ms" in row]
    for axis, fixed, field, label in (
        (flat[4], ("dtype", "2 bits"), "DIM", "dimensions, 2 bits"),
        (flat[5], ("DIM", 128), "dtype", "128 dimensions"),
    ):
        points = [row for row in residual if row[fixed[0]] == fixed[1]]
        axis.bar([str(row[field]) for row in points], [row["gtok_s"] for row in points])
        axis.set(xlabel=label, ylabel="Gtokens/s", title="residual")
    return save(figure, "sweeps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = PAGE.read_text()
    wanted = rendered(text, page.tables(), PAGE.name)
    if args.check:
        if text != wanted:
            print("docs/roofline.md is not what the results say: run python scripts/plot_roofline.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted)
    result = page.load()
    if result is None:
        print(f"no {page.RESULTS.name}: no plots", file=sys.stderr)
        return 0
    for plot in (plot_dense, plot_compressed, plot_sweeps):
        path = plot(result)
        print(f"{plot.__name__}: {'nothing to plot' if path is None else path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
