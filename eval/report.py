"""results.json as one HTML page that needs nothing else: no script, no font, no network.

It answers, in this order: is it the same, how much faster, where does the time go. Every number is taken from the
results, which the page also carries whole, in `<script type="application/json" id="results">`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eval import plots
from eval.manifest import write_text
from eval.plots import significant

Results = dict[str, Any]


def write(results: Results, path: Path) -> None:
    """The report of `results` (what eval.pipeline.run returns) as a self-contained HTML file."""
    write_text(path, render(results))


def render(results: Results) -> str:
    base = results["experiment"]["systems"][0]
    title = f"{_names(results)} on {results['dataset']['name']}"
    body = [
        f"<header><h1>{escape(title)}</h1><p>{_subtitle(results)}</p></header>",
        f"<section class=answers>{_same(results)}{_faster(results)}{_where(results)}</section>",
        _latency_section(results, base),
        _sameness_section(results, base),
        _quality_section(results, base),
        _details_section(results),
    ]
    data = json.dumps(results).replace("</", "<\\/")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_style()}</style>\n<main>{''.join(filter(None, body))}</main>\n"
        f'<script type="application/json" id="results">{data}</script></html>\n'
    )


def _style() -> str:
    """report.css, and a colour class for every stage."""
    stages = (f".s-{stage} {{ fill: var(--{stage}); background: var(--{stage}); }}\n" for stage in plots.STAGES)
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8") + "".join(stages)


def label(system: str) -> str:
    """How the page calls a system."""
    scorer, _, options = system.partition(":")
    name = {"plaid": "stock PLAID", "tilemaxsim": "TileMaxSim"}.get(scorer, scorer)
    words = [option.removeprefix("mode=") for option in options.split(",") if option]
    return " ".join([name, *words])


def times(value: float) -> str:
    return f"{significant(value, 2 if value < 10 else 3)}×"


def percent(share: float) -> str:
    return "100%" if share == 1 else f"{100 * share:.1f}%" if share < 0.9995 else f"{100 * share:.3f}%"


def _names(results: Results) -> str:
    """What the page compares; modes of one scorer are not told apart here."""
    names = list(dict.fromkeys(label(system.partition(":")[0]) for system in results["experiment"]["systems"]))
    return f"{' and '.join(names[1:])} against {names[0]}" if names[1:] else names[0]


def _subtitle(results: Results) -> str:
    counts, encode, index = results["dataset"]["counts"], results["encode"], results["indexes"][0]
    bits = " and ".join(str(i["nbits"]) for i in results["indexes"])
    return (
        f"{counts['passages']:,} passages ({index['tokens']:,} token vectors, {index['dim']} dims, {bits} bit, "
        f"{index['centroids']:,} centroids), {counts['queries']:,} queries. Encoder: "
        f"{escape(str(results['checkpoint']['name']))}. Machine: {escape(_machine(results))}. "
        f"Encoding a query takes {significant(encode['p50'])} ms (median) and is in no other time on this page."
    )


def _machine(results: Results) -> str:
    machine = results["environment"]["machine"]
    gpus = [gpu["name"] for gpu in machine["gpus"]]
    threads = machine["threads"]
    return (
        f"{', '.join(gpus)} ({machine['cpu']})" if gpus else f"{machine['cpu']}, {threads} thread{'s' * (threads > 1)}"
    )


def _settings(results: Results) -> list[tuple[dict[str, Any], str]]:
    """Every (search, what to call it): by k, and by bits where there are several."""
    several = len(results["indexes"]) > 1
    return [
        (search, (f"{index['nbits']} bit, " if several else "") + f"k = {search['knobs']['k']}")
        for index in results["indexes"]
        for search in index["search"]
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """Cells are HTML. The first `text_columns` columns are text, the others numbers. A first cell is not repeated."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{'' if i < text_columns else ' class=n'}>{cell}</{tag}>" for i, cell in enumerate(row))

    body: list[str] = []
    first = None
    for row in rows:
        starts = row[0] != first
        body.append(f"<tr{' class=first' * starts}>{cells('td', row if starts else ['', *row[1:]])}</tr>")
        first = row[0]
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f"<div class=scroll><table>{head}<tbody>{''.join(body)}</tbody></table></div>"


def _card(question: str, answer: str, tone: str, lines: Iterable[str]) -> str:
    text = "".join(f"<p>{line}</p>" for line in lines)
    return f"<article class={tone}><h2>{question}</h2><p class=big>{answer}</p>{text}</article>"


def _same(results: Results) -> str:
    question, verdict = "Is it the same?", results["verdict"]
    if verdict["same"] is None:
        return _card(question, "Not compared", "plain", ["No two systems ran that should give the same results."])
    judged = 0
    errors: dict[str, float] = {}
    for search, _ in _settings(results):
        for compared in search["compare"].values():
            if compared["comparable"]:
                judged += compared["queries"]
                for name, error in compared["errors"].items():
                    errors[name] = max(errors.get(name, 0.0), error.get("max", 0.0))
    worst = ", ".join(f"{label(name)} {significant(value, 2)}" for name, value in errors.items())
    oracle = f"Largest error of a score against the oracle: {worst}."
    if not verdict["same"]:
        wrong = verdict["of"] - verdict["passed"]
        return _card(
            question, "No", "bad", [f"{wrong} of {verdict['of']} settings differ: <a href=#same>how</a>.", oracle]
        )
    return _card(
        question,
        "Yes",
        "good",
        [f"{judged:,} searches in {verdict['of']} setting{'s' * (verdict['of'] > 1)}: the same passages in the same "
         "order outside ties, every metric equal to four decimals.", oracle],
    )  # fmt: skip


def _faster(results: Results) -> str:
    question = "How much faster?"
    systems = results["experiment"]["systems"]
    timed = [(search["latency"]["systems"], name) for search, name in _settings(results) if search["latency"]]
    if not timed or not systems[1:]:
        return _card(question, "Not timed", "plain", [])
    base, ours = systems[0], systems[1]
    gains = [(by[base]["search"]["p50"] / by[ours]["search"]["p50"], by, name) for by, name in timed]
    low, high = min(g[0] for g in gains), max(g[0] for g in gains)
    answer = times(low) if times(low) == times(high) else f"{times(low)} to {times(high)}"
    lines = [
        f"{name}: {significant(by[base]['search']['p50'])} → {significant(by[ours]['search']['p50'])} ms, "
        f"<b>{times(gain)}</b>"
        for gain, by, name in gains
    ]
    what = f"{label(ours)}, median search."
    if results["verdict"]["same"] is False:
        return _card(question, answer, "bad", [f"{what} But the results differ.", "<br>".join(lines)])
    return _card(question, answer, "good" if low >= 1 else "bad", [what, "<br>".join(lines)])


def _where(results: Results) -> str:
    question = "Where does the time go?"
    timed = [(search["latency"]["systems"], name) for search, name in _settings(results) if search["latency"]]
    if not timed:
        return _card(question, "Not timed", "plain", [])
    by, name = timed[-1]
    lines, answer = [], ""
    for system, figures in list(by.items())[:2]:
        stage, spent = max(figures["stages"].items(), key=lambda item: item[1])
        share = spent / figures["stages_total"]
        what = plots.STAGES[stage]
        answer = answer or f"{what[0].upper()}{what[1:]}"
        lines.append(
            f"{label(system)} spends {100 * share:.0f}% in {what}: {significant(spent)} of "
            f"{significant(figures['stages_total'])} ms."
        )
    lines[0] = f"At {name} {lines[0]}"
    return _card(question, answer, "plain", lines)


def _latency_section(results: Results, base: str) -> str:
    rows, groups = [], []
    stages_seen: dict[str, None] = {}
    for search, name in _settings(results):
        if not search["latency"]:
            continue
        systems = search["latency"]["systems"]
        bars = []
        for system, figures in systems.items():
            timing = figures["search"]
            ratio = timing["p50"] / systems[base]["search"]["p50"]
            compared = [significant(ratio, 3), times(1 / ratio)] if system != base else ["", ""]
            numbers = [significant(timing[p]) for p in ("p50", "p95", "p99", "mean")]
            rows.append([name, label(system), *numbers, *compared, f"{timing['n']:,}"])
            bars.append((label(system), figures["stages"]))
            stages_seen.update(dict.fromkeys(figures["stages"]))
        groups.append((name, bars))
    if not rows:
        return ""
    latency = next(search["latency"] for search, _ in _settings(results) if search["latency"])
    timing = results["experiment"]["latency"]
    return (
        "<section id=latency><h2>Latency</h2>"
        "<p>From an encoded query to pids and scores on the host, all systems on one Searcher, the same queries one "
        f"after the other in turning order, {timing['repeats']} rounds after a warm-up; "
        f"{latency['device'].upper()}, {latency['threads']} thread{'s' * (latency['threads'] > 1)}.</p>"
        + _table(["", "system", "p50 ms", "p95 ms", "p99 ms", "mean ms", f"p50 / {label(base)}", "speed-up",
                  "searches"], rows, text_columns=2)
        + "<h3>By stage</h3><p>Mean milliseconds a search, from a pass of its own (reading clocks between stages adds "
        "a little). Each k has its own scale.</p>"
        + plots.legend([s for s in plots.STAGES if s in stages_seen])
        + plots.stage_bars(groups, "Milliseconds by stage, each system at each k")
        + "</section>"
    )  # fmt: skip


def _sameness_section(results: Results, base: str) -> str:
    rows, errors, failures = [], [], []
    figures: list[tuple[str, str]] = []  # system, figure
    listed: set[tuple[str, str]] = set()
    for search, name in _settings(results):
        for system, compared in search["compare"].items():
            ranking, n = compared["ranking"], compared["queries"]
            verdict = {True: "<b class=yes>same</b>", False: "<b class=no>differs</b>", None: "another mode"}
            rows.append([
                name, label(system), verdict[compared["same"]], f"{ranking['same_outside_ties']:,} of {n:,}",
                f"{ranking['pairs_reordered']:,}",
                significant(ranking["worst_inversion"], 2),
                *[_sets(compared[what], n) for what in ("candidates", "survivors")], percent(ranking["overlap"]),
            ])  # fmt: skip
            for who, error in compared["errors"].items():
                if error["n"] and (name, who) not in listed:
                    listed.add((name, who))
                    numbers = [significant(error[key], 2) for key in ("mean", "p50", "p99", "max")]
                    allowed = "" if error["allowed"] is None else significant(error["allowed"], 2)
                    errors.append([name, label(who), *numbers, allowed, f"{error['n']:,}"])
            for failure in compared["failures"]:
                failures.append([name, label(system), escape(str(failure["query"])), escape(failure["what"]),
                                 escape(failure["detail"])])  # fmt: skip
            difference = compared["difference"]
            if difference["n"]:
                axis = f"score of {label(system)} − score of {label(base)}"
                largest = f"largest {significant(difference['max'], 2)}, mean size {significant(difference['mean'], 2)}"
                caption = f"{name}: {difference['n']:,} scores of passages that both scored, {largest}"
                plot = plots.histogram(**difference["histogram"], title=f"{axis}, {name}", axis=axis)
                figures.append((system, f"<figure><figcaption>{caption}</figcaption>{plot}</figure>"))
    if not rows:
        return ""
    # In view: the first other system where it scored the most; the rest on request.
    shown = [i for i, (system, _) in enumerate(figures) if system == figures[0][0]][-1:]
    rest = "".join(figure for i, (_, figure) in enumerate(figures) if i not in shown)
    more = f"<details><summary>The other settings ({len(figures) - 1})</summary>{rest}</details>" if rest else ""
    wrong = ""
    if failures:
        total = sum(c["num_failures"] for search, _ in _settings(results) for c in search["compare"].values())
        wrong = f"<h3>What differs</h3><p>The first {len(failures)} of {total} findings.</p>" + _table(
            ["", "system", "query", "what", "detail"], failures, text_columns=5
        )
    return (
        f"<section id=same><h2>The same as {label(base)}?</h2>"
        "<p>The oracle decompresses the index in float64 and judges both. Two passages in another order count as tied "
        "when no system put one above another that the oracle scores higher by more than that system's rounding. "
        "Candidates (before pruning) and survivors (scored exactly) must be the same sets, or differ "
        "only by passages whose centroid scores tie at the cut (counted as tied).</p>"
        + _table(["", "system", "verdict", "same outside ties", "pairs reordered",
                  "worst inversion", "candidates", "survivors", "overlap@k"], rows, text_columns=3)
        + wrong
        + "<h3>Scores against the oracle</h3>"
        + _table(["", "system", "mean |error|", "median", "p99", "max", "allowed", "scores"], errors, text_columns=2)
        + "<h3>Score differences</h3>" + "".join(figures[i][1] for i in shown) + more + "</section>"
    )  # fmt: skip


def _sets(sets: dict[str, int] | None, n: int) -> str:
    if sets is None:
        return ""
    parts = ["equal"] if sets["equal"] == n else [f"{sets['equal']:,} equal"]
    if sets["equal_but_ties"]:
        parts.append(f"{sets['equal_but_ties']:,} tied")
    if sets["different"]:
        parts.append(f"<b class=no>{sets['different']:,} differ</b>")
    return "<br>".join(parts)


def _quality_section(results: Results, base: str) -> str:
    measures = results["experiment"]["measures"]
    rows, figures = [], []
    exhaustive = any(search["exhaustive"] for search, _ in _settings(results))
    for search, name in _settings(results):
        for system, by_measure in search["metrics"].items():
            cells = []
            for m in measures:
                change = search["paired"].get(system, {}).get(m)
                note = "" if change is None else f" <small>{_change(change)}</small>"
                cells.append(f"{by_measure[m]:.4f}{note}")
            recall = [percent(search["exhaustive"]["recall"][system])] if search["exhaustive"] else [""] * exhaustive
            rows.append([name, label(system), *cells, *recall])
        points = search["per_query"]["values"]
        for system, by_measure in search["paired"].items():
            m, change = measures[0], by_measure[measures[0]]
            shown = f"{change['better']:,} better, {change['equal']:,} equal, {change['worse']:,} worse"
            plot = plots.query_scatter(
                points[base], points[system], f"{m} of each query, {name}", label(base), label(system)
            )
            figures.append(f"<figure><figcaption><b>{name}</b>: {shown}</figcaption>{plot}</figure>")
    header = ["", "system", *map(escape, measures), *["of the exact top k"] * exhaustive]
    note = "" if not results["verdict"]["of"] else (
        f" In small print: the difference to {label(base)} and on how many queries it shows."
    )  # fmt: skip
    exact = (
        " The last column is the share of the k best passages, by the oracle's scores of the whole collection, "
        "that the search returned." if exhaustive else ""
    )  # fmt: skip
    return (
        "<section id=quality><h2>Effectiveness</h2>"
        f"<p>{results['dataset']['counts']['judgments']:,} judgments, measured by ir_measures from "
        "TREC runs. A judged query without results counts as 0; a query's own passage is left out of its "
        f"results.{note}{exact}</p>"
        + _table(header, rows, text_columns=2)
        + (
            f"<h3>{escape(measures[0])}, query by query</h3><p>A point on the diagonal is a query, or "
            f"several, with the same value in both.</p><div class=row>{''.join(figures)}</div>"
            if figures
            else ""
        )
        + "</section>"
    )


def _change(change: dict[str, Any]) -> str:
    differing = change["better"] + change["worse"]
    if not differing:
        return "equal"
    p = "" if change["p_value"] is None else f", p = {significant(change['p_value'], 2)}"
    size = f"{change['mean']:+.4f}" if abs(change["mean"]) >= 5e-5 else f"{change['mean']:+.0e}"
    return f"{size} on {differing:,}{p}"


def _details_section(results: Results) -> str:
    experiment, environment = results["experiment"], results["environment"]
    knobs = [[name, *(f"{search['knobs'][key]:g}" for key in ("ncells", "centroid_score_threshold", "ndocs"))]
             for search, name in _settings(results)]  # fmt: skip
    indexes = [
        [f"{i['nbits']}", f"{i['bytes'] / 1e6:,.1f}", f"{i['tokens']:,}", f"{i['centroids']:,}", f"{i['dim']}",
         f"<code>{escape(i['digest'][:16])}</code>"]
        for i in results["indexes"]
    ]  # fmt: skip
    facts = {
        "dataset": f"{results['dataset']['name']} {results['dataset']['split']}".strip(),
        "passages sha256": results["dataset"]["sha256"]["passages"],
        "queries sha256": results["dataset"]["sha256"]["queries"],
        "judgments sha256": results["dataset"]["sha256"]["qrels"],
        "checkpoint": f"{results['checkpoint']['name']}, sha256 {results['checkpoint']['sha256']}",
        "machine": _machine(results),
        "platform": environment["platform"],
        "versions": ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v != "absent"),
        "commit": environment["commit"] or "unknown",
        "time": environment["time"],
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return (
        "<section id=details><h2>What ran</h2>"
        + _table(["", "ncells", "threshold", "ndocs"], knobs)
        + _table(["bits", "MB", "token vectors", "centroids", "dims", "digest"], indexes)
        + f"<dl>{listed}</dl><details><summary>The experiment's configuration</summary>"
        f"<pre>{escape(json.dumps(experiment, indent=1))}</pre></details></section>"
    )


def summary(results: Results) -> str:
    """The three answers in a few lines of plain text, for a terminal."""
    systems = results["experiment"]["systems"]
    base = systems[0]
    counts = results["dataset"]["counts"]
    lines = [f"{_names(results)}: {results['dataset']['name']}, {counts['passages']:,} passages, "
             f"{counts['queries']:,} queries, {_machine(results)}", ""]  # fmt: skip
    header = [
        "setting",
        "system",
        "p50 ms",
        "p95 ms",
        "speed-up",
        results["experiment"]["measures"][0],
        "same as stock",
    ]
    rows = [header]
    for search, name in _settings(results):
        for system in systems:
            timing = search["latency"]["systems"] if search["latency"] else None
            figures = [significant(timing[system]["search"][p]) for p in ("p50", "p95")] if timing else ["", ""]
            gain = times(timing[base]["search"]["p50"] / timing[system]["search"]["p50"]) if timing else ""
            compared = search["compare"].get(system)
            same = "" if compared is None else {True: "yes", False: "NO", None: "another mode"}[compared["same"]]
            metric = f"{search['metrics'][system][header[5]]:.4f}"
            rows.append([name, label(system), *figures, gain if system != base else "", metric, same])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines += ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
              for row in rows]  # fmt: skip
    verdict = results["verdict"]
    if verdict["same"] is not None:
        lines += [
            "",
            f"Same passages, order and metrics outside ties: {verdict['passed']} of {verdict['of']} settings.",
        ]
    return "\n".join(lines)
