"""Every kernel on this GPU: checked against fp64, timed beside its peers, written to one JSON. A table comes last.

    python scripts/bench_kernels.py                                   # all groups, into eval/results/h200_kernels.json
    python scripts/bench_kernels.py --groups dense,residual --merge   # these, on top of what the file holds
    python scripts/bench_kernels.py --sweeps --groups sweeps --merge  # the sweeps alone
    python scripts/bench_kernels.py --groups dense --only "d128 fp16" --no-peers --out /tmp/one.json

Groups: dense, residual, centroid, pq, exhaustive (and sweeps with --sweeps). The file is rewritten after each row, so a
run that is stopped keeps what it has. "% of read" is of the bandwidth that a streaming kernel reads at in the same
run. First, parallel processes run every case once on small data: that compiles the kernels, ours and the peers'.
Peers: pip install flash-maxsim==0.3.0 late-interaction-kernels==0.4.5; without them their rows say so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from eval.manifest import environment
from scripts.kernels import compressed, dense, peers, sweeps
from scripts.kernels.bench import SMALL, TINY, Bench, Sizes, describe
from scripts.kernels.record import Record

OUT = Path(__file__).resolve().parents[1] / "eval" / "results" / "h200_kernels.json"
RUNS = {"dense": dense.run, **compressed.RUNS, "sweeps": sweeps.run}
CASES = {"dense": dense.CASES, **compressed.CASES, "sweeps": sweeps.CASES}
SIZES = {"full": Sizes(), "small": SMALL, "tiny": TINY}
COMPILE_TIMEOUT = 240
CACHE = Path(tempfile.gettempdir()) / f"plaid-tilemaxsim-bench-{os.getuid()}"


def compile_jobs(groups: list[str], only: str, with_peers: bool) -> list[tuple[str, str, str | None]]:
    """(group, case, peers) of the processes that compile: the main shape's peers one each, the rest by case."""
    jobs: list[tuple[str, str, str | None]] = []
    for group in groups:
        for case in CASES[group]:
            if only not in case:
                continue
            if not with_peers or (group, case) == ("dense", "d128 fp16"):
                jobs.append((group, case, None))
            else:
                jobs.append((group, case, ""))
            if with_peers and (group, case) == ("dense", "d128 fp16"):
                jobs += [(group, case, peers.PAPER)]
                jobs += [(group, case, peer.name) for peer in peers.PADDED_PEERS if "torch" not in peer.name]
    return jobs


def compile_all(jobs: list[tuple[str, str, str | None]]) -> list[str]:
    """Runs each job in a process of its own, as many at a time as there are processors; those that failed.

    They leave machine code in a cache of this script's own. What their autotuners found on small data, beside other
    processes, is removed from it: peers tune again on the data that is timed.
    """

    def one(job: tuple[str, str, str | None]) -> str | None:
        group, case, peer = job
        command = [sys.executable, __file__, "--groups", group, "--only", case, "--sizes", "small", "--compile"]
        command += ["--no-peers"] if peer is None else ["--peers", peer]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            return f"{job}: not compiled within {COMPILE_TIMEOUT} s"
        return None if done.returncode == 0 else f"{job}: {done.stderr.strip()[-300:]}"

    workers = max(1, min(len(jobs), (os.cpu_count() or 2)))
    with ThreadPoolExecutor(workers) as pool:
        failures = [failure for failure in pool.map(one, jobs) if failure]
    for file in CACHE.rglob("*.autotune.json"):
        file.unlink()
    return failures


def table(result: dict[str, Any]) -> str:
    """The figures, then whatever of ours failed or is wrong."""
    lines = [f"{name:32s} {value:10.4g}" for name, value in result["figures"].items()]
    lines += [describe(row) for row in result["rows"] + result["sweeps"] if row["ours"] and "failed" in row]
    return "\n".join([*lines, f"correct: {result['correct']}"])


def measure(args: argparse.Namespace, groups: list[str], device: torch.device) -> dict[str, Any]:
    """Runs the groups one after the other; every row is in the file as soon as it is there."""
    bench = Bench(
        device, SIZES[args.sizes], once=args.compile, only=args.only, peers=None if args.no_peers else args.peers
    )
    where = environment()
    # Names, not places: what is recorded must mean something elsewhere.
    words = [Path(word).name if Path(word).is_absolute() else word for word in where.pop("argv")]
    where["command"] = " ".join(["python", *words])
    if args.commit:
        where["commit"] = args.commit
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none: CPU, interpreted"
    record = Record(None if args.compile else args.out, args.merge, where)
    read = {"gb_s": float("nan")} if args.compile else bench.measure_read()
    print(f"{gpu}, torch {torch.__version__}: read {read['gb_s']:.0f} GB/s", flush=True)
    begun: list[str] = []
    bench.on_row = lambda: record.write(bench.rows, read, begun, gpu)
    for group in groups:
        began = time.perf_counter()
        begun.append(group)
        RUNS[group](bench)
        bench.forget()
        print(f"{group}: {time.perf_counter() - began:.0f} s", flush=True)
    return record.write(bench.rows, read, begun, gpu)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="dense,residual,centroid,pq,exhaustive", help="by commas")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--sweeps", action="store_true", help="also the group sweeps")
    parser.add_argument("--peers", default="", metavar="TEXT", help="only peers whose name contains this")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--merge", action="store_true", help="keep the file's rows that this run does not measure")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--commit", help="of this code, for the record, where there is no checkout to ask")
    parser.add_argument("--sizes", choices=sorted(SIZES), default="full")
    parser.add_argument("--no-compile", action="store_true", help="do not compile in parallel first")
    parser.add_argument("--compile", action="store_true", help="run everything once, untimed, and write nothing")
    args = parser.parse_args(argv)
    groups = [name for name in args.groups.split(",") if name]
    if args.sweeps and "sweeps" not in groups:
        groups.append("sweeps")
    unknown = set(groups) - set(RUNS)
    if unknown:
        parser.error(f"--groups: expected some of {', '.join(RUNS)}, got {', '.join(sorted(unknown))}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not (args.compile or args.no_compile):
        began = time.perf_counter()
        os.environ["TRITON_CACHE_DIR"] = str(CACHE)
        failures = compile_all(compile_jobs(groups, args.only, not args.no_peers))
        print(f"compiled in {time.perf_counter() - began:.0f} s", *failures, sep="\n  ", flush=True)
    result = measure(args, groups, device)
    print(table(result))
    return 0 if result["correct"] else 1


if __name__ == "__main__":
    sys.exit(main())
