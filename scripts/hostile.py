"""Hostile calls to every public operation, the engine and the scorer, as tests/hostile draws them, and their number.

    python scripts/hostile.py --out eval/results/cpu_hostile.json                  # on a machine without a GPU
    python scripts/hostile.py --seconds 75 --jobs 16 --out eval/results/h200_hostile.json

Every case ends in the float64 oracle's result, within an error budget that must not accept the scores in another
order, or in an error that names the argument, with nothing written. Each kind of call has a process of its own, so that
a crash or a hang is one kind's failure. With a GPU everything runs on it; without one the torch path runs on the CPU,
and a twentieth as many cases of the kernels in Triton's interpreter. ``--seconds`` ends a kind early; the cases that it
had count. On a GPU compiling takes most of the time, although ``--seed`` picks a few shapes of the many that there are;
a second run finds them compiled. Exits with 1 if anything failed, or a kind had no case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from eval.manifest import environment, write_text

INTERPRETED_SHARE = 0.05
SHARP_SHARE = 0.9


def run_here(name: str, where: str, cases: int, first_seed: int, seconds: float) -> int:
    """One kind of calls in this process; the last line printed is what they came to."""
    from tests.hostile import calls
    from tests.hostile.searches import OPERATIONS

    place = {"cpu": calls.CPU, "interpreter": calls.INTERPRETER, "cuda": calls.CUDA}[where]
    tally = calls.run(OPERATIONS[name], place, cases, first_seed, seconds)
    print(json.dumps(dataclasses.asdict(tally)))
    return 0


def run_apart(args: argparse.Namespace, name: str, where: str, cases: int) -> dict[str, Any]:
    """The same in a process of its own: a row of the result, with what it printed where it failed."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--where", where, "--cases", str(cases)]
    command += ["--seed", str(args.seed), "--seconds", str(args.seconds)]
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if args.jobs > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    if where == "interpreter":
        variables["TRITON_INTERPRET"] = "1"
    began = time.perf_counter()
    row: dict[str, Any] = {"operation": name, "where": where, "cases": 0, "failures": 1}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        row["output"] = f"no end after {args.limit:g} s"
    else:
        if done.returncode == 0:
            row |= json.loads(done.stdout.splitlines()[-1]) | {"failures": 0}
        else:
            # what was drawn comes last and may be long
            errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
            said = "\n".join([f"exit status {done.returncode}", *(line[:500] for line in errors)])
            row["output"] = f"{said}\n{(done.stdout + done.stderr)[-6000:]}"
    row["seconds"] = round(time.perf_counter() - began, 1)
    what = "FAILED" if row["failures"] else f"{row['cases']} cases, {row['refused']} refused"
    print(f"{name} ({where}): {what}, {row['seconds']} s", row.get("output", ""), flush=True)
    return row


def result_of(rows: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
    problems = [
        f"{row['operation']} ({row['where']}): {row.get('output', 'no case in time')}"
        for row in rows
        if row["failures"] or not row["cases"]
    ]
    total = {key: sum(row.get(key, 0) for row in rows) for key in ("cases", "failures", "refused", "compared", "sharp")}
    if total["sharp"] < SHARP_SHARE * total["compared"]:
        problems.append(f"budgets reject another order in {total['sharp']} of {total['compared']} comparisons alone")
    figures = {f"hostile_{key}" if key == "cases" else key: value for key, value in total.items()}
    figures |= {f"cases_{row['where']}_{row['operation'].replace('.', '_')}": row["cases"] for row in rows}
    where = environment()
    words = [Path(word).name if Path(word).is_absolute() else word for word in where.pop("argv")]
    return {
        "correct": not problems and complete, "problems": problems, "figures": figures, "rows": rows, **where,
        "command": " ".join(["python", *words]),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12000, help="of all kinds together (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that one kind may take (default: no limit)")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a kind counts as hanging")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (default: %(default)s)")
    parser.add_argument("--only", default="", help="only kinds whose name contains this")
    parser.add_argument("--where", choices=("cpu", "interpreter", "cuda"), help="only there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of this code, for the record, where there is no checkout to ask")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return run_here(args.one, args.where, args.cases, args.seed, args.seconds)

    from tests.hostile.searches import KERNELS, OPERATIONS

    on_gpu = torch.cuda.is_available()
    each = math.ceil(args.cases / len(OPERATIONS))
    kinds = [(name, "cuda" if on_gpu else "cpu", each) for name in OPERATIONS]
    if not on_gpu:
        kinds += [(name, "interpreter", math.ceil(INTERPRETED_SHARE * each)) for name in KERNELS]
    chosen = [kind for kind in kinds if args.only in kind[0] and args.where in (None, kind[1])]
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(partial(run_apart, args), *zip(*chosen)))
    result = result_of(rows, complete=len(chosen) == len(kinds))
    if args.commit:
        result["commit"] = args.commit
    if args.out:
        write_text(args.out, json.dumps(result, indent=1) + "\n")
    counts = ("hostile_cases", "failures", "refused", "compared", "sharp")
    print(json.dumps({key: result["figures"][key] for key in counts}))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
