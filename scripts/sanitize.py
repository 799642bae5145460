"""compute-sanitizer over every kernel: memcheck (each tensor an allocation of its own) and racecheck. One GPU.

    python scripts/sanitize.py [--out eval/results/h200_sanitizer.json] [--tools memcheck,racecheck] [--jobs 8]

Parts of sanitize_driver.py run side by side: once without the tool, which compiles the kernels and compares them with
the oracle, then under each, from the cache of that. The result is written after every run, so that one cut off shows
what has passed. Exits 1 when a comparison fails, a tool reports anything, or a kernel of the package was not launched.
Needs compute-sanitizer, which comes with CUDA.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from triton.runtime.jit import KernelInterface

from eval.cache import versions
from eval.manifest import ROOT, commit, write_text
from plaid_tilemaxsim import ops
from scripts import sanitize_driver

TOOLS = ("memcheck", "racecheck")
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
}


def kernels() -> set[str]:
    """Every kernel that the package launches, as module.name."""
    found = set()
    for module in pkgutil.iter_modules(ops.__path__):
        for name, value in vars(importlib.import_module(f"{ops.__name__}.{module.name}")).items():
            if isinstance(value, KernelInterface) and name.endswith("_kernel"):
                found.add(f"{value.fn.__module__.rsplit('.')[-1]}.{name}")
    return found


def reported(tool: str, output: str) -> int | None:
    """Errors or hazards in the tool's summary; None when it printed none."""
    counts = [int(n) for n in SUMMARY[tool].findall(output)]
    return sum(counts) if counts else None


def run_part(tool: str | None, part: str, sanitizer: str, limit: float) -> dict[str, Any]:
    """One part of the driver, under ``tool`` or without: what it launched, what was reported, what it printed."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("sanitize_driver.py")), part]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # there are other processes
    if tool is not None:
        command = [sanitizer, "--tool", tool, "--print-limit", "20", *command]
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
    errors = 0 if tool is None else reported(tool, output)
    row = {
        "tool": tool,
        "part": part,
        "seconds": round(time.perf_counter() - started, 1),
        "errors": errors,
        "passed": status == 0 and errors == 0 and bool(last),
        "launches": json.loads(last[-1]) if last else {},
        "output": output,
    }
    print(f"{part} {tool or 'alone'}: {row['seconds']} s, {'passed' if row['passed'] else 'FAILED'}", flush=True)
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
                if row["tool"] is None and row["passed"]:  # what is wrong without the tool is not looked at with it
                    going |= {pool.submit(run_part, tool, row["part"], sanitizer, limit) for tool in tools}
                yield row


def result_of(rows: Sequence[dict[str, Any]], tools: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
    """What the runs so far came to; correct only when all runs of all parts under all tools have passed."""
    problems, launches, errors = [], Counter[str](), Counter[str]()
    for row in rows:
        if not row["passed"]:
            problems.append(f"{row['part']} {row['tool'] or 'alone'}: {row['errors']} reported; see the log")
        if row["tool"] is None:
            launches.update(row["launches"])
        else:
            # a run that ended without the tool's summary has not been checked
            errors[row["tool"]] += 1 if row["errors"] is None else row["errors"]
    ended = {(row["tool"], row["part"]) for row in rows}
    left = [f"{part} {tool or 'alone'}" for tool in (None, *tools) for part in parts if (tool, part) not in ended]
    every = len(parts) == len(sanitize_driver.PARTS)
    if every and all((None, part) in ended for part in parts):
        problems += [f"{name}: not launched" for name in sorted(kernels() - launches.keys())]
    return {
        "correct": not problems and not left and every and set(tools) == set(TOOLS),
        "problems": problems,
        "not_run": left,
        "figures": {f"{tool}_errors": errors[tool] for tool in tools} | {"kernels": len(launches)},
        "launches": dict(sorted(launches.items())),
        "rows": [{key: row[key] for key in ("tool", "part", "seconds", "errors", "passed")} for row in rows],
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
        if not row["passed"]:
            print(row["output"][:2000], "\n...\n", row["output"][-4000:], flush=True)
        rows.append(row)
        result = result_of(rows, tools, parts) | about
        write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"]), "problems:", result["problems"])
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
