"""compute-sanitizer over every kernel: memcheck (each tensor an allocation of its own) and racecheck. One GPU.

    python scripts/sanitize.py [--out eval/results/h200_sanitizer.json] [--tools memcheck,racecheck] [--jobs 8]

Parts of sanitize_driver.py run side by side: once without the tool, which compiles the kernels and compares them with
the oracle, then under each, from the cache of that. The result is written after every run, so that one cut off shows
what has passed. Exits 1 when a comparison fails, a tool reports an error, or a kernel of the package was not launched.
Needs compute-sanitizer, which comes with CUDA.

Racecheck also reports how Triton hands partitions to their warps (``gl.warp_specialize``): shared memory of its own,
which the tool attributes to the kernel's ``def`` and to the ``if`` around the call. In the machine code a barrier of
all warps stands between any two such accesses. Reports of nothing else are counted apart if in the same run the part
"dispatch" has the same accesses reported of a kernel whose source uses no shared memory, and a race that two partitions
do have at its own lines (sanitize_dispatch.py); otherwise they are errors, as all others are.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from triton.runtime.jit import KernelInterface

from eval.cache import versions
from eval.manifest import ROOT, commit, write_text
from plaid_tilemaxsim import ops
from scripts import sanitize_dispatch, sanitize_driver

CONTROL = "dispatch"  # the part of sanitize_dispatch, and there the kernel that races
RACE = "sanitize_dispatch._racing_kernel"
PRINTED = 10_000  # reports of one run at most
TOOLS = ("memcheck", "racecheck")
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
}
REPORT = re.compile(r"^=+ \w+: Race reported .*(?:\n=+ {2,}\S.*)*", re.MULTILINE)
ACCESS = re.compile(
    r"=+ +(?:Error: Race reported between|and) (\w+) access at (\w+)\+0x[0-9a-f]+ in (\S+):(\d+)(?: \[\d+ hazards?\])?"
)
Access = tuple[str, str]  # (Read or Write, its place: see places)
Pairs = frozenset[tuple[Access, Access]]


def functions() -> dict[str, Any]:
    """Python functions of :func:`kernels`."""
    return {
        f"{value.fn.__module__.rsplit('.')[-1]}.{name}": value.fn
        for module in pkgutil.iter_modules(ops.__path__)
        for name, value in vars(importlib.import_module(f"{ops.__name__}.{module.name}")).items()
        if isinstance(value, KernelInterface) and name.endswith("_kernel")
    }


def kernels() -> set[str]:
    """Every kernel that the package launches, as module.name."""
    return set(functions())


def dispatch_lines(function: Any) -> dict[int, str]:
    """Lines that a kernel's dispatch to its partitions is attributed to; none where it has no partitions.

    Its ``def``, and an ``if`` around ``warp_specialize`` that calls nothing to decide, and so uses no memory itself.
    """
    lines, start = inspect.getsourcelines(function)
    kernel = ast.parse(textwrap.dedent("".join(lines))).body[0]

    def parts(node: ast.AST) -> bool:
        return any(isinstance(child, ast.Attribute) and child.attr == "warp_specialize" for child in ast.walk(node))

    found = {start - 1 + kernel.lineno: "def"} if parts(kernel) else {}
    for node in ast.walk(kernel):
        if isinstance(node, ast.If) and parts(node) and not any(isinstance(n, ast.Call) for n in ast.walk(node.test)):
            found[start - 1 + node.lineno] = "if"
    return found


@cache
def places() -> dict[tuple[str, str, int], str]:
    """(kernel, file, line) of every dispatch, and of the control's race."""
    control = (sanitize_dispatch._dispatch_kernel.fn, sanitize_dispatch._racing_kernel.fn)
    found = {
        (function.__name__, Path(inspect.getfile(function)).name, line): place
        for function in (*functions().values(), *control)
        for line, place in dispatch_lines(function).items()
    }
    for partition in (sanitize_dispatch._write.fn, sanitize_dispatch._read.fn):
        lines, start = inspect.getsourcelines(partition)
        found |= {("_racing_kernel", "sanitize_dispatch.py", start + i): "race" for i in range(len(lines))}
    return found


def pairs(report: str) -> Pairs:
    """Pairs of accesses that racecheck reports as a race; none when it says anything else or one is at no place."""
    found = []
    for line in report.splitlines():
        access = ACCESS.fullmatch(line)
        place = access and places().get((access[2], access[3], int(access[4])))
        if not access or not place:
            return frozenset()
        found.append((access[1], place))
    return frozenset((min(found[0], other), max(found[0], other)) for other in found[1:])


def kind(report: Pairs) -> str:
    """Of the control's race, of a dispatch, or of anything else."""
    found = {place for pair in report for _, place in pair}
    return "race" if found == {"race"} else "dispatch" if found and "race" not in found else "other"


def reported(tool: str, output: str) -> int | None:
    """Errors or hazards in the tool's summary; None when it printed none."""
    counts = [int(n) for n in SUMMARY[tool].findall(output)]
    return sum(counts) if counts else None


def run_part(tool: str | None, part: str, sanitizer: str, limit: float) -> dict[str, Any]:
    """One part of the driver, under ``tool`` or without: what it launched, what was reported, what it printed.

    ``problem`` says why the run itself does not count, whatever it reports.
    """
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("sanitize_driver.py")), part]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # there are other processes
    if tool is not None:
        command = [sanitizer, "--tool", tool, "--print-limit", str(PRINTED), *command]
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=limit,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
        output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        status = -1
    last = [line for line in output.splitlines() if line.startswith("{")]
    count = 0 if tool is None else reported(tool, output)
    reports = [pairs(report) for report in REPORT.findall(output)] if tool == "racecheck" else []
    problem = None
    if status != 0 or not last:
        problem = f"exit status {status}"
    elif count is None:
        problem = "no summary"
    elif tool == "racecheck" and (len(reports) != count or count >= PRINTED):
        problem = f"{len(reports)} reports of at most {PRINTED} printed, {count} in the summary"
    row = {
        "tool": tool,
        "part": part,
        "seconds": round(time.perf_counter() - started, 1),
        "reported": count,
        "reports": reports if problem is None else [],
        "problem": problem,
        "launches": json.loads(last[-1]) if last else {},
        "output": output,
    }
    print(f"{part} {tool or 'alone'}: {row['seconds']} s, {problem or f'{count} reported'}", flush=True)
    return row


def runs(
    tools: Sequence[str], parts: Sequence[str], sanitizer: str, limit: float, jobs: int
) -> Iterator[dict[str, Any]]:
    """Rows of every part without a tool and, where that has passed, under each, as they end."""
    with ThreadPoolExecutor(jobs) as pool:
        going = {pool.submit(run_part, None, part, sanitizer, limit) for part in parts}
        while going:
            done, going = wait(going, return_when=FIRST_COMPLETED)
            for row in (future.result() for future in done):
                # what is wrong without the tool is not looked at with it
                if row["tool"] is None and row["problem"] is None:
                    going |= {pool.submit(run_part, tool, row["part"], sanitizer, limit) for tool in tools}
                yield row


def result_of(rows: Sequence[dict[str, Any]], tools: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
    """What the runs so far came to; correct only when all runs of all parts under all tools have passed."""
    control = [report for row in rows if row["part"] == CONTROL for report in row["reports"]]
    races = sum(kind(report) == "race" for report in control)
    # where its race is missed, what the tool says of the control means nothing
    shown = {pair for report in control if kind(report) == "dispatch" for pair in report} if races else set()
    problems, launches, errors, table = [], Counter[str](), Counter[str](), []
    dispatched = {True: 0, False: 0}  # of the control, of the package
    for row in rows:
        of_control = row["part"] == CONTROL
        known = sum(kind(report) == "dispatch" and report <= shown for report in row["reports"])
        raced = sum(kind(report) == "race" for report in row["reports"])
        # a run that ended without the tool's summary has not been checked
        wrong = 1 if row["reported"] is None else row["reported"] - known - raced
        problem = row["problem"] or (f"{wrong} reported; see the log" if wrong else None)
        if row["tool"] == "racecheck" and RACE in row["launches"] and not raced:
            problem = problem or "its race was not reported"
        if problem:
            problems.append(f"{row['part']} {row['tool'] or 'alone'}: {problem}")
        if row["tool"] is None:
            launches.update(row["launches"])
        else:
            errors[row["tool"]] += wrong
        dispatched[of_control] += known
        line = {key: row[key] for key in ("tool", "part", "seconds")}
        table.append(line | {"errors": wrong, "dispatch_reports": known, "passed": problem is None})
    ended = {(row["tool"], row["part"]) for row in rows}
    left = [f"{part} {tool or 'alone'}" for tool in (None, *tools) for part in parts if (tool, part) not in ended]
    every = len(parts) == len(sanitize_driver.PARTS)
    if every and all((None, part) in ended for part in parts):
        problems += [f"{name}: not launched" for name in sorted(kernels() - launches.keys())]
    return {
        "correct": not problems and not left and every and set(tools) == set(TOOLS),
        "problems": problems,
        "not_run": left,
        "figures": {f"{tool}_errors": errors[tool] for tool in tools}
        | {
            "racecheck_dispatch_reports": dispatched[False],
            "racecheck_control_reports": dispatched[True],
            "racecheck_control_races": races,
            "kernels": len(kernels() & launches.keys()),
        },
        "launches": dict(sorted(launches.items())),
        "rows": table,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "eval/results/h200_sanitizer.json")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--parts", default=",".join(sanitize_driver.PARTS))
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds that one part may take (default: %(default)s)"
    )
    parser.add_argument("--commit", help="of this code, for the record, where there is no checkout to ask")
    args = parser.parse_args()
    tools, parts = args.tools.split(","), args.parts.split(",")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists() or not torch.cuda.is_available():
        print(f"sanitize: expected a CUDA device and compute-sanitizer, got {sanitizer}", file=sys.stderr)
        return 2

    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": versions("torch", "triton") | {"compute-sanitizer": version.rpartition("Version ")[2].strip()},
        "commit": args.commit or commit(),
        "command": "python " + " ".join(["scripts/sanitize.py", *sys.argv[1:]]),
    }
    rows: list[dict[str, Any]] = []
    for row in runs(tools, parts, sanitizer, args.limit, args.jobs):
        if row["problem"] or row["reported"]:
            print(row["output"][:2000], "\n...\n", row["output"][-4000:], flush=True)
        rows.append(row)
        result = result_of(rows, tools, parts) | about
        write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"]), "problems:", result["problems"])
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
