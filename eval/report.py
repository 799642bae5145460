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

from . import plots
from .manifest import write_text
from .plots import significant

Results = dict[str, Any]


def write(results: Results, path: Path) -> None:
    """The report of `results` (what eval.pipeline.run returns) as a self-contained HTML file."""
    write_text(path, render(results))


def render(results: Results) -> str:
    base, heading = ran(results)[0], title(results)
    body = [
        f"<header><h1>{escape(heading)}</h1><p>{_subtitle(results)}</p></header>",
        f"<section class=answers>{_same(results)}{_faster(results)}{_where(results)}</section>",
        _latency_section(results, base),
        _costs_section(results),
        _sameness_section(results, base),
        _quality_section(results, base),
        _roofline_section(results),
        _not_run_section(results),
        _details_section(results),
    ]
    data = json.dumps(results).replace("</", "<\\/")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(heading)}</title><style>{_style()}</style>\n<main>{''.join(filter(None, body))}</main>\n"
        f'<script type="application/json" id="results">{data}</script></html>\n'
    )


def title(results: Results) -> str:
    return f"{_names(results)} on {results['dataset']['name']}"


def _style() -> str:
    """report.css, and a colour class for every stage."""
    stages = (f".s-{stage} {{ fill: var(--{stage}); background: var(--{stage}); }}\n" for stage in plots.STAGES)
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8") + "".join(stages)


def label(system: str) -> str:
    """How the page calls a system."""
    kind, _, options = system.partition(":")
    names = {"plaid": "stock PLAID", "tilemaxsim": "TileMaxSim", "maxsim": "MaxSim", "oracle": "float64 oracle",
             "xtr-warp": "WARP"}  # fmt: skip
    words = [_word(*option.partition("=")[::2]) for option in options.split(",") if option]
    return (", " if kind == "maxsim" else " ").join([names.get(kind, kind), *words])


def _word(option: str, value: str) -> str:
    if (option, value) == ("device", "cpu"):
        return "on the CPU"
    if (option, value) == ("codec", "pq"):
        return "PQ"
    if option in ("mode", "impl", "codec", "placement"):
        return value
    return f"M={value}" if option == "pq_m" else f"{option}={value}"


def ran(results: Results) -> list[str]:
    """The systems that ran on every index, in the experiment's order; the first is what others are compared with."""
    return [s for s in results["experiment"]["systems"] if all(s in index["systems"] for index in results["indexes"])]


def another(system: str, compared: dict[str, Any]) -> str:
    """What a system does whose results are not meant to be stock's."""
    if not compared["judged"]:
        return "own vectors"
    return "another mode" if system.startswith("tilemaxsim") else "exact search"


def plugin_of(systems: Sequence[str]) -> str:
    """The system that the page is about: the plugin's first, else the first after the base."""
    return next((system for system in systems[1:] if system.startswith("tilemaxsim")), systems[1])


def times(value: float) -> str:
    return f"{significant(value, 2 if value < 10 else 3)}×"


def percent(share: float) -> str:
    return "100%" if share == 1 else f"{100 * share:.1f}%" if share < 0.9995 else f"{100 * share:.3f}%"


def _names(results: Results) -> str:
    """What the page compares; modes of one scorer are not told apart here."""
    names = list(dict.fromkeys(label(system.partition(":")[0]) for system in ran(results)))
    others = " and ".join(filter(None, (", ".join(names[1:-1]), *names[1:][-1:])))
    return f"{others} against {names[0]}" if others else names[0]


def _subtitle(results: Results) -> str:
    counts, encode, index = results["dataset"]["counts"], results["encode"], results["indexes"][0]
    bits = " and ".join(str(i["nbits"]) for i in results["indexes"])
    return (
        f"{counts['passages']:,} passages ({index['tokens']:,} token vectors, {index['dim']} dims, {bits} bit, "
        f"{index['centroids']:,} centroids), {counts['queries']:,} queries. Encoder: "
        f"{escape(str(results['checkpoint']['name']))}. Machine: {escape(machine(results))}. "
        f"Encoding a query takes {significant(encode['p50'])} ms (median) and is in no other time on this page."
    )


def machine(results: Results) -> str:
    machine = results["environment"]["machine"]
    gpus = [gpu["name"] for gpu in machine["gpus"]]
    threads = machine["threads"]
    return (
        f"{', '.join(gpus)} ({machine['cpu']})" if gpus else f"{machine['cpu']}, {threads} thread{'s' * (threads > 1)}"
    )


def settings(results: Results) -> list[tuple[dict[str, Any], str]]:
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
    for search, _ in settings(results):
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
    systems = ran(results)
    timed = [(search["latency"]["systems"], name) for search, name in settings(results) if search["latency"]]
    if not timed or not systems[1:]:
        return _card(question, "Not timed", "plain", [])
    base, ours = systems[0], plugin_of(systems)
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
    timed = [(search["latency"]["systems"], name) for search, name in settings(results) if search["latency"]]
    if not timed:
        return _card(question, "Not timed", "plain", [])
    by, name = timed[-1]
    lines, answer = [], ""
    for system in [s for s in ran(results) if s in (ran(results)[0], plugin_of([*ran(results), ran(results)[0]]))]:
        figures = by[system]
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
    for search, name in settings(results):
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
    latency = next(search["latency"] for search, _ in settings(results) if search["latency"])
    timing = results["experiment"]["latency"]
    return (
        "<section id=latency><h2>Latency</h2>"
        "<p>From an encoded query to pids and scores on the host, the same queries one "
        f"after the other in turning order, {timing['repeats']} rounds after a warm-up; "
        f"{latency['device'].upper()}, {latency['threads']} thread{'s' * (latency['threads'] > 1)}.</p>"
        + _table(["", "system", "p50 ms", "p95 ms", "p99 ms", "mean ms", f"p50 / {label(base)}", "speed-up",
                  "searches"], rows, text_columns=2)
        + "<h3>By stage</h3><p>Mean milliseconds a search, from a pass of its own (reading clocks between stages adds "
        "a little). Each k has its own scale.</p>"
        + plots.legend([s for s in plots.STAGES if s in stages_seen])
        + plots.stage_bars(groups, "Milliseconds by stage, each system at each k")
        + _tradeoff(results)
        + _throughput(results)
        + "</section>"
    )  # fmt: skip


def _tradeoff(results: Results) -> str:
    """Latency against the share of the exact top k that comes back."""
    found = [
        (label(system), name, search["exhaustive"]["recall"][system], timing["search"]["p50"])
        for search, name in settings(results)
        if search["latency"] and search["exhaustive"]
        for system, timing in search["latency"]["systems"].items()
    ]
    if not found:
        return ""
    return (
        "<h3>Latency against recall</h3><p>One point a system and setting: to the right is closer to exact search of "
        "the whole collection, below is faster. Point at one for its setting.</p>"
        + plots.points(found, "Median latency against recall of the exact top k", "share of the exact top k found",
                       "median ms")
    )  # fmt: skip


def _throughput(results: Results) -> str:
    """Queries a second against batch size, at each setting."""
    figures = []
    for search, name in settings(results):
        timing = (search["latency"] or {}).get("throughput") or {}
        series = [(label(s), [(float(n), v) for n, v in rates.items()]) for s, rates in timing.items() if rates]
        if series:
            plot = plots.lines(series, f"Queries a second by batch size, {name}", "queries a call", "queries a second")
            figures.append(f"<figure><figcaption>{name}</figcaption>{plot}</figure>")
    if not figures:
        return ""
    more = "".join(figures[1:])
    return (
        "<h3>Throughput</h3><p>Queries a second when a call holds several; best of three. Systems without a call for "
        f"batches answer one by one.</p>{figures[0]}"
        + (f"<details><summary>The other settings ({len(figures) - 1})</summary>{more}</details>" if more else "")
    )


def _costs_section(results: Results) -> str:
    rows = []
    for index in results["indexes"]:
        for system, cost in index["costs"].items():
            sizes = [size(cost[key]) for key in ("index_bytes", "gpu_bytes", "gpu_peak_bytes", "host_bytes")]
            seconds = [significant(cost["load_seconds"]), significant(cost["first_query_ms"])]
            rows.append([f"{index['nbits']} bit", label(system), *seconds, *sizes])
    return (
        "<section id=costs><h2>Loading and memory</h2><p>From files to the first answer, in the order in which they "
        "were loaded; systems that share a loaded index cost nothing more. The first query includes what is compiled "
        "or recorded at a first search. Host memory is what the process grew by, mapped files included.</p>"
        + _table(["", "system", "load s", "first query ms", "index", "GPU memory", "GPU peak", "host memory"], rows,
                 text_columns=2)
        + "</section>"
    )  # fmt: skip


def size(count: int | None) -> str:
    """Bytes for people; empty where they are not known."""
    if count is None:
        return ""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{count} B"


def _roofline_section(results: Results) -> str:
    """From a result of scripts/bench_kernels.py: TFLOP/s against operations a byte, under the read bandwidth."""
    kernels = results.get("kernels")
    rows = [row for row in (kernels or {}).get("rows", []) if row.get("ms") and row.get("nbytes")]
    if not rows:
        return ""
    assert kernels is not None
    found = []
    for row in rows:
        operations = 2.0 * row["tokens"] * row["DIM"] * row["LQ"]
        who = "TileMaxSim" if row["ours"] else row["kernel"].split(".")[0].split(",")[0]
        what = f"{row['group']} {row['name']}, {row['kernel']}"
        found.append((who, what, operations / row["nbytes"], operations / row["ms"] / 1e9))
    read = kernels["read"]["gb_s"]
    return (
        "<section id=roofline><h2>Roofline of the kernels</h2><p>A point is a kernel on one shape; the dashed line is "
        f"what reading its input once at {read:,.0f} GB/s allows (measured in the same run, {escape(kernels['gpu'])})."
        "</p>"
        + plots.points(found, "Operations a second against operations a byte", "operations a byte of input",
                       "TFLOP/s", log_x=True, roof=read / 1e3)
        + "</section>"
    )  # fmt: skip


def _not_run_section(results: Results) -> str:
    if not results["not_run"]:
        return ""
    rows = [
        [label(name), escape(why["reason"]), f"<code>{escape(why['remedy'])}</code>" if why["remedy"] else ""]
        for name, why in results["not_run"].items()
    ]
    return (
        "<section id=not-run><h2>Not run</h2>" + _table(["system", "why", "what helps"], rows, text_columns=3)
        + "</section>"
    )  # fmt: skip


def _sameness_section(results: Results, base: str) -> str:
    rows, errors, failures = [], [], []
    histograms: list[tuple[str, str]] = []  # setting, figures of both sides
    figures: list[tuple[str, str]] = []  # system, figure
    listed: set[tuple[str, str]] = set()
    for search, name in settings(results):
        for system, compared in search["compare"].items():
            ranking, n = compared["ranking"], compared["queries"]
            judged = compared["judged"]
            verdict = {True: "<b class=yes>same</b>", False: "<b class=no>differs</b>", None: another(system, compared)}
            rows.append([
                name, label(system), verdict[compared["same"]],
                f"{ranking['same_outside_ties']:,} of {n:,}" if judged else "",
                f"{ranking['pairs_reordered']:,}",
                significant(ranking["worst_inversion"], 2) if judged else "",
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
            both = [(who, error) for who, error in compared["errors"].items() if error["n"] and compared["comparable"]]
            if both:
                plots_of = "".join(
                    "<figure><figcaption>"
                    f"{label(who)}: mean size {significant(error['mean'], 2)}</figcaption>"
                    + plots.histogram(**error["histogram"], title=f"errors of {label(who)}, {name}",
                                      axis=f"score of {label(who)} − oracle")
                    + "</figure>"
                    for who, error in both
                )  # fmt: skip
                histograms.append((name, plots_of))
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
        total = sum(c["num_failures"] for search, _ in settings(results) for c in search["compare"].values())
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
        + (f"<h3>Errors, {histograms[-1][0]}</h3>{histograms[-1][1]}" if histograms else "")
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
    exhaustive = any(search["exhaustive"] for search, _ in settings(results))
    for search, name in settings(results):
        for system, by_measure in search["metrics"].items():
            cells = []
            for m in measures:
                change = search["paired"].get(system, {}).get(m)
                note = "" if change is None else f" <small>{_change(change)}</small>"
                cells.append(f"{by_measure[m]:.4f}{note}")
            exact = search["exhaustive"]
            recall = [percent(exact["recall"][system])] if exact else [""] * exhaustive
            probed = (exact or {}).get("candidates", {}).get(system)
            recall += ([percent(probed)] if probed is not None else [""]) * exhaustive
            rows.append([name, label(system), *cells, *recall])
        points = search["per_query"]["values"]
        for system, by_measure in search["paired"].items():
            m, change = measures[0], by_measure[measures[0]]
            shown = f"{change['better']:,} better, {change['equal']:,} equal, {change['worse']:,} worse"
            plot = plots.query_scatter(
                points[base], points[system], f"{m} of each query, {name}", label(base), label(system)
            )
            figures.append(f"<figure><figcaption><b>{name}</b>: {shown}</figcaption>{plot}</figure>")
    header = ["", "system", *map(escape, measures), *["of the exact top k", "in candidates"] * exhaustive]
    note = "" if not results["verdict"]["of"] else (
        f" In small print: the difference to {label(base)} and on how many queries it shows."
    )  # fmt: skip
    exact = (
        " The last columns are the share of the k best passages, by the oracle's scores of the whole collection, "
        "that the search returned, and that were among its candidates before pruning." if exhaustive else ""
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
             for search, name in settings(results)]  # fmt: skip
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
        "machine": machine(results),
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


def part(results: Results, command: str) -> str:
    """What one command of the evaluation found, as text."""
    lines = []
    for index in results["indexes"]:
        lines.append(f"{index['nbits']} bit: {index['path']}, {size(index['bytes'])}, {index['tokens']:,} vectors")
        for search in index.get("search", []):
            head = f"  k = {search['knobs']['k']}"
            if command == "retrieve":
                lines.append(f"{head}: {', '.join(index['systems'])}")
            for system, values in search.get("metrics", {}).items():
                measured = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
                lines.append(f"{head}, {label(system)}: {measured}")
            for system, compared in search.get("compare", {}).items():
                verdict = {True: "same outside ties", False: "DIFFERS", None: another(system, compared)}[
                    compared["same"]
                ]
                error = compared["errors"][system]
                largest = f", largest error {significant(error['max'], 2)}" if error["n"] else ""
                lines.append(f"{head}, {label(system)}: {verdict}{largest}")
            for system, timing in ((search.get("latency") or {}).get("systems") or {}).items():
                percentiles = ", ".join(f"{p} {significant(timing['search'][p])} ms" for p in ("p50", "p95", "p99"))
                lines.append(f"{head}, {label(system)}: {percentiles}")
    return "\n".join(lines)


def summary(results: Results) -> str:
    """The three answers in a few lines of plain text, for a terminal."""
    systems = ran(results)
    base = systems[0]
    counts = results["dataset"]["counts"]
    lines = [f"{_names(results)}: {results['dataset']['name']}, {counts['passages']:,} passages, "
             f"{counts['queries']:,} queries, {machine(results)}", ""]  # fmt: skip
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
    for search, name in settings(results):
        for system in systems:
            timing = search["latency"]["systems"] if search["latency"] else None
            figures = [significant(timing[system]["search"][p]) for p in ("p50", "p95")] if timing else ["", ""]
            gain = times(timing[base]["search"]["p50"] / timing[system]["search"]["p50"]) if timing else ""
            compared = search["compare"].get(system)
            same = ""
            if compared is not None:
                same = {True: "yes", False: "NO", None: another(system, compared)}[compared["same"]]
            metric = f"{search['metrics'][system][header[5]]:.4f}"
            rows.append([name, label(system), *figures, gain if system != base else "", metric, same])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines += ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
              for row in rows]  # fmt: skip
    lines += [f"{name}: not run: {why['reason']}" + (f" ({why['remedy']})" if why["remedy"] else "")
              for name, why in results["not_run"].items()]  # fmt: skip
    verdict = results["verdict"]
    if verdict["same"] is not None:
        lines += [
            "",
            f"Same passages, order and metrics outside ties: {verdict['passed']} of {verdict['of']} settings.",
        ]
    return "\n".join(lines)
