"""results.json as Markdown tables: what report.html says without its plots, for issues and READMEs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import report
from .manifest import write_text
from .plots import significant

Results = dict[str, Any]


def write(results: Results, path: Path) -> None:
    """The results (what eval.pipeline.run returns) as a Markdown file."""
    write_text(path, render(results))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 2) -> str:
    """Text columns first, numbers to the right."""
    rule = ["---" if i < text_columns else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def render(results: Results) -> str:
    systems = report.ran(results)
    base, settings = systems[0], report.settings(results)
    counts, encode = results["dataset"]["counts"], results["encode"]
    verdict = results["verdict"]
    same = {None: "Not compared.", True: "Yes", False: "No"}[verdict["same"]]
    if verdict["same"] is not None:
        same += f": {verdict['passed']} of {verdict['of']} settings agree in passages, order and metrics outside ties."
    parts = [
        f"# {report.title(results)}",
        f"{counts['passages']:,} passages, {counts['queries']:,} queries; {report.machine(results)}; encoder "
        f"{results['checkpoint']['name']}. Encoding a query takes {significant(encode['p50'])} ms and is in no other "
        "time.",
        f"## Is it the same?\n\n{same}",
    ]
    latency = [
        [name, report.label(system), *(significant(timing["search"][p]) for p in ("p50", "p95", "p99")),
         report.times(search["latency"]["systems"][base]["search"]["p50"] / timing["search"]["p50"])]
        for search, name in settings
        if search["latency"]
        for system, timing in search["latency"]["systems"].items()
    ]  # fmt: skip
    if latency:
        header = ["", "system", "p50 ms", "p95 ms", "p99 ms", f"over {report.label(base)}"]
        parts.append(f"## How much faster?\n\n{table(header, latency)}")
        stages = [
            [name, report.label(system), ", ".join(f"{s} {significant(ms)}" for s, ms in timing["stages"].items())]
            for search, name in settings
            if search["latency"]
            for system, timing in search["latency"]["systems"].items()
        ]
        parts.append(f"## Where does the time go?\n\n{table(['', 'system', 'ms by stage'], stages, text_columns=3)}")
    measures = results["experiment"]["measures"]
    quality = [
        [name, report.label(system), *(f"{values[m]:.4f}" for m in measures),
         *_recall(search["exhaustive"], system)]
        for search, name in settings
        for system, values in search["metrics"].items()
    ]  # fmt: skip
    header = ["", "system", *measures, "of the exact top k", "in candidates"]
    parts.append(f"## Effectiveness\n\n{table(header, quality)}")
    errors = [
        [name, report.label(who), *(significant(error[key], 2) for key in ("mean", "p50", "p99", "max"))]
        for search, name in settings
        for compared in search["compare"].values()
        if compared["comparable"]
        for who, error in compared["errors"].items()
        if error["n"]
    ]
    if errors:
        header = ["", "system", "mean error", "median", "p99", "max"]
        parts.append(f"## Scores against the float64 oracle\n\n{table(header, errors)}")
    costs = [
        [f"{index['nbits']} bit", report.label(system), significant(cost["load_seconds"]),
         significant(cost["first_query_ms"]),
         *(report.size(cost[key]) for key in ("index_bytes", "gpu_bytes", "host_bytes"))]
        for index in results["indexes"]
        for system, cost in index["costs"].items()
    ]  # fmt: skip
    header = ["", "system", "load s", "first query ms", "index", "GPU memory", "host memory"]
    parts.append(f"## Loading and memory\n\n{table(header, costs)}")
    if results["not_run"]:
        rows = [[report.label(name), why["reason"], why["remedy"]] for name, why in results["not_run"].items()]
        parts.append(f"## Not run\n\n{table(['system', 'why', 'what helps'], rows, text_columns=3)}")
    environment = results["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v != "absent")
    parts.append(f"Commit {environment['commit'] or 'unknown'}, {environment['time']}; {versions}.")
    return "\n\n".join(parts) + "\n"


def _recall(exact: dict[str, Any] | None, system: str) -> list[str]:
    if exact is None:
        return ["", ""]
    probed = exact["candidates"].get(system)
    return [report.percent(exact["recall"][system]), "" if probed is None else report.percent(probed)]
