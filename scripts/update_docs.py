"""Writes what docs/ takes from elsewhere, between its markers: figures from eval/results, options from the code.

python scripts/update_docs.py            # rewrites the pages
python scripts/update_docs.py --check    # exit 1 if one is not what its sources say
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Before this folder, whose eval.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plaid_tilemaxsim import config
from plaid_tilemaxsim.serve_requests import Limits
from scripts.update_readme import ROOT, load, rendered

DOCS = ROOT / "docs"
MODES = {
    "plaid": "plaid",
    "rerank": "rerank",
    "exhaustive_prefilter": "exhaustive, prefilter",
    "exhaustive": "exhaustive",
}
SETS = {"msmarco_mini": "msmarco-mini", "scifact": "SciFact", "pydocs_2000": "pydocs"}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def source(name: str) -> str:
    return f"[{name}.json](../eval/results/{name}.json)"


def meanings() -> dict[str, str]:
    """Name of an option -> what the docstring of ScorerConfig says of it."""
    text: dict[str, str] = {}
    names = {field.name for field in dataclasses.fields(config.ScorerConfig)}
    name = None
    for line in (config.ScorerConfig.__doc__ or "").splitlines():
        found = re.match(r" {4}(\w+) {2,}(\S.*)", line)
        if found is not None and found[1] in names:
            name, text[found[1]] = found[1], found[2]
        elif name is not None and line.startswith(" " * 16):
            text[name] += " " + line.strip()
        else:
            name = None
    if text.keys() != names:
        raise ValueError(f"ScorerConfig: expected a docstring of {sorted(names)}, got one of {sorted(text)}")
    return text


def options() -> str:
    said = meanings()
    rows = []
    for field in dataclasses.fields(config.ScorerConfig):
        values = config.choices(field.name)
        rows.append([
            f"`{field.name}`", f"`{field.default!r}`".replace("'", '"'),
            ", ".join(f"`{value}`" for value in values) if values else "", said[field.name],
        ])  # fmt: skip
    return table(["option", "default", "values", "meaning"], rows)


def limits() -> str:
    defaults = vars(Limits())
    rows = [
        [f"`--{limit.name.replace('_', '-')}`", f"{defaults[limit.name]:,}", str(limit.metadata["help"])]
        for limit in dataclasses.fields(Limits)
    ]
    return table(["option", "default", "what"], rows)


def modes_gpu() -> str:
    result = load("h200_search")
    f = result["figures"]
    rows = [
        [f"k = {k}", f"{f[f'candidates_k{k}']:,.0f}",
         *(f"{f[f'{mode}_p50_ms_k{k}']:.2f} ms" for mode in ("search", "rerank", "host")),
         f"{f['exhaustive_p50_ms']:.1f} ms", f"{f[f'stock_p50_ms_k{k}']:.1f} ms"]
        for k in (10, 100, 1000)
    ]  # fmt: skip
    header = ["", "candidates", "`plaid`", "`rerank`", "`plaid`, `host`", "`exhaustive`", "stock PLAID"]
    return (
        f"Medians of one query on one {result['machine']['gpus'][0]['name']}: {f['passages']:,.0f} synthetic passages, "
        f"{f['tokens']:,.0f} tokens, 2 bits ({source('h200_search')}).\n\n{table(header, rows)}\n\n"
        f"GPU memory: {f['gpu_gb']:.1f} GB with all of the index there, {f['host_placement_gpu_gb']:.1f} GB with "
        f'`placement="host"`, which leaves residuals in host memory; stock\'s '
        f"search uses {f['stock_gpu_gb']:.1f} GB, without residuals. Batches of 64 "
        f"queries: {f['batch64_qps']:,.0f} queries/s (k = 10)."
    )


def modes_cpu() -> str:
    result = load("cpu_modes")
    f, detail = result["figures"], result["detail"]

    def cell(key: str) -> str:
        return f"{f[f'{key}_nDCG@10']:.3f} / {f[f'{key}_R@100']:.3f} / {f[f'{key}_p50_ms']:.0f} ms"

    rows = [
        [f"{name}, {detail[key.replace('_', '-')]['queries']} queries", *(cell(f"{key}_{mode}") for mode in MODES)]
        for key, name in SETS.items()
    ]
    scores = {key: [f[f"{key}_{mode}_nDCG@10"] for mode in MODES] for key in SETS}
    spread = max(max(values) - min(values) for values in scores.values())
    return (
        "nDCG@10 / R@100 / median time of a query, one CPU thread, k = 100, 2 bits, encoder splade-tiny "
        f"({source('cpu_modes')}):\n\n"
        f"{table(['', *(f'`{mode}`' for mode in MODES.values())], rows)}\n\n"
        f"With the small demo encoder scoring more passages finds little more: the modes are within {spread:.3f} "
        "nDCG@10 of each other on every collection, and none is best on all."
    )


def codecs() -> str:
    f = load("pq_quality")["figures"]
    systems = {f"pq{m}": f"PQ {m}" for m in (8, 16, 32, 64)} | {f"opq{m}": f"OPQ {m}" for m in (8, 16)}
    systems = {"residual2": f"2 bits, {f['scifact_residual2_bytes_per_token']}"} | systems
    names = {"cranfield": "cranfield", **SETS}
    header = ["", *systems.values()]
    rows = [[name, *(f"{f[f'{key}_{system}_nDCG@10']:.3f}" for system in systems)] for key, name in names.items()]

    def several(system: str) -> str:
        values = [f"{f[f'{key}_{system}_nDCG@10']:.3f}" for key in names if f"{key}_residual1_nDCG@10" in f]
        return ", ".join(values[:-1]) + f" and {values[-1]}"

    gains = {key: f[f"{key}_opq16_nDCG@10"] - f[f"{key}_pq16_nDCG@10"] for key in names}
    most = max(gains, key=lambda key: gains[key])
    others = [gain for key, gain in gains.items() if key != most]
    worst = max(abs(f[f"{key}_residual2_nDCG@10"] - f[f"{key}_pq64_nDCG@10"]) for key in names)
    one_bit = f["scifact_residual1_bytes_per_token"]
    return (
        f"nDCG@10 by bytes a token that the exact step reads, mode `plaid`, stock's parameters for k = 100, encoder "
        f"splade-tiny; PQ is made of the 2-bit index ({source('pq_quality')} has R@100 too):\n\n"
        f"{table(header, rows)}\n\n"
        f"At the same size residuals are better: 1 bit ({one_bit} bytes, beside the code that pruning reads anyway) "
        f"has {several('residual1')} on the last three, where PQ 16 has {several('pq16')}. "
        f"PQ 64 is within {worst:.3f} of the 2-bit index it was made of. What OPQ adds to PQ 16 depends on the "
        f"collection: {gains[most]:.3f} on {names[most]}, between {min(others):.3f} and {max(others):.3f} on the rest."
    )


def pq_gpu() -> str:
    """PQ of the 4-bit index beside stock's search on a GPU, k = 100."""
    systems = {"stock-gpu": "stock PLAID", "tilemaxsim": "4 bits"}
    systems |= {f"tilemaxsim:codec=pq,pq_m={m}": f"PQ {m}" for m in (64, 32, 16)}
    rows = [
        [row["set"], *(f"{row['nDCG@10'][system]:.3f} / {row['R@100'][system]:.3f}" for system in systems)]
        for row in load("h200_quality_pq")["table"]
        if row["k"] == 100
    ]
    return (
        f"nDCG@10 / R@100 on an H200 beside stock's GPU search, k = 100, PQ made of the 4-bit index, at most 100 "
        f"queries a set ({source('h200_quality_pq')}):\n\n{table(['', *systems.values()], rows)}"
    )


def cpu() -> str:
    result = load("cpu_scifact")
    f = result["figures"]
    rows = [
        [f"k = {k}, {n} thread{'s' * (n > 1)}", f"{f[f'stock_cpu_p50_ms_k{k}_threads{n}']:.1f} ms",
         f"{f[f'cpu_p50_ms_k{k}_threads{n}']:.1f} ms", f"{f[f'ratio_k{k}_threads{n}']:.1f}x"]
        for n in (1, 2) for k in (10, 100, 1000)
    ]  # fmt: skip
    return (
        f"SciFact, {result['index']['passages']:,} passages, {result['machine']['cpu']} ({source('cpu_scifact')}):\n\n"
        + table(["", "stock PLAID", "plugin", ""], rows)
    )


def server() -> str:
    """The newest run: on a GPU where there is one."""
    name = "h200_serve" if (ROOT / "eval" / "results" / "h200_serve.json").exists() else "cpu_serve"
    result = load(name)
    f, machine = result["figures"], result["machine"]
    where = machine["gpus"][0]["name"] if machine.get("gpus") else f"{machine['cpu']}, {machine['threads']} thread"
    rows = [
        [str(n), f"{f[f'serve_p50_ms_clients{n}']:.1f} ms", f"{f[f'serve_p99_ms_clients{n}']:.1f} ms",
         f"{f[f'serve_qps_clients{n}']:.0f}"]
        for n in result["clients"]
    ]  # fmt: skip
    return (
        f"{result['index']['passages']:,} passages, k = {result['k']}, text in and pids out over loopback, {where} "
        f"({source(name)}); the same searches without a server take {f['direct_p50_ms']:.1f} ms:\n\n"
        + table(["clients", "p50", "p99", "queries/s"], rows)
    )


def encoder() -> str:
    if not (ROOT / "eval" / "results" / "h200_text.json").exists():
        return "Not measured yet: `python scripts/bench_text.py`."
    f = load("h200_text")["figures"]
    return (
        f"Text to results, median of one query ({source('h200_text')}): {f['text_p50_ms']:.2f} ms with "
        f'`encoder="fast"`, {f["stock_text_p50_ms"]:.2f} ms in stock.'
    )


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "options.md": {"options": options, "limits": limits},
    "modes.md": {
        "modes-gpu": modes_gpu,
        "modes-cpu": modes_cpu,
        "codecs": codecs,
        "pq-gpu": pq_gpu,
        "cpu": cpu,
        "encoder": encoder,
        "server": server,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for name, tables in PAGES.items():
        page = DOCS / name
        text = page.read_text(encoding="utf-8")
        wanted = rendered(text, tables, f"docs/{name}")
        if wanted != text:
            stale.append(name)
            if not args.check:
                page.write_text(wanted, encoding="utf-8")
    if args.check and stale:
        print(f"docs/{stale[0]} is not what its sources say: run python scripts/update_docs.py", file=sys.stderr)
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
