"""compute-sanitizer over every kernel: memcheck (each tensor an allocation of its own) and racecheck. One GPU.

    python scripts/sanitize.py [--out eval/results/h200_sanitizer.json] [--tools memcheck,racecheck] [--jobs 8]

Parts of sanitize_driver.py run side by side: once without the tool, which compiles the kernels and compares them with
the oracle, then under it. Exits 1 when a comparison fails, a tool reports anything, or a kernel of the package was not
launched. Needs compute-sanitizer, which comes with CUDA, and takes two to four minutes on an H200.
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
from concurrent.futures import ThreadPoolExecutor
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
    environment = dict(os.environ)
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

    problems: list[str] = []
    launches: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    rows = []
    for tool in (None, *tools):
        with ThreadPoolExecutor(args.jobs) as pool:
            done = list(pool.map(lambda part, tool=tool: run_part(tool, part, sanitizer, args.limit), parts))
        for row in done:
            output = row.pop("output")
            name = f"{row['part']} {tool or 'alone'}"
            if not row["passed"]:
                problems.append(f"{name}: {row['errors']} reported; see the log")
                print(output[:2000], "\n...\n", output[-4000:], flush=True)
            if tool is None:
                launches.update(row["launches"])
            else:
                # a run that ended without the tool's summary has not been checked
                errors[tool] += 1 if row["errors"] is None else row["errors"]
            row.pop("launches")
            rows.append(row)
        if problems and tool is None:
            break  # what is wrong without the tool need not be looked at with it
    missing = sorted(kernels() - launches.keys()) if len(parts) == len(sanitize_driver.PARTS) else []
    problems += [f"{name}: not launched" for name in missing]
    complete = set(tools) == set(TOOLS) and len(parts) == len(sanitize_driver.PARTS)
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    result = {
        "correct": not problems and complete,
        "problems": problems,
        "figures": {f"{tool}_errors": errors[tool] for tool in tools} | {"kernels": len(launches)},
        "launches": dict(sorted(launches.items())),
        "rows": rows,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions("torch", "triton") | {"compute-sanitizer": version.rpartition("Version ")[2].strip()},
        "commit": args.commit or commit(),
        "command": "python " + " ".join(["scripts/sanitize.py", *sys.argv[1:]]),
    }
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"]), "problems:", problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
