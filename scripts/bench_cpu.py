"""Search on a machine without CUDA: stock PLAID's C++ extensions against the plugin's torch path, per thread count.

    python scripts/bench_cpu.py --index INDEX --queries Q.pt --k 10 100 1000 --threads 1 2 --out cpu.json

``Q.pt`` holds encoded queries, fp32 [n, LQ, DIM], or a dict with them as "Q" (what eval caches). Both systems search
with stock's parameters for each k on one Searcher and answer the same queries in turn, warm-up left out. A time is
that of a user's call, from the encoded query to lists of pids and scores. ratio = stock's p50 / the plugin's. The run
is correct only if on a sample of queries scores are within their budget of the oracle and candidates, survivors and
rankings are stock's outside ties; times of an incorrect run are worth nothing, and it exits with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # stock takes the GPU where it sees one
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from eval.cache import write_json
from eval.compare import Side, compare
from eval.latency import measure_latency
from eval.manifest import environment
from eval.oracle import Oracle
from eval.retrieve import Scored
from eval.systems import Knobs, System, open_systems
from plaid_tilemaxsim.index.files import read_index


def side(system: System, knobs: Knobs, Q: Tensor) -> Side:
    """The system's complete results for the sample."""
    system.use(knobs)
    scored = Scored.from_lists([system.rank(q[None]) for q in Q], [system.candidates(q[None]) for q in Q])
    return Side(system.name, scored, system.tolerance, system.clamps, system.follows_plaid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch's threads, which stock uses too")
    parser.add_argument("--timed", type=int, default=40, help="queries to time")
    parser.add_argument("--checked", type=int, default=5, help="queries to check against the oracle")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    args = parser.parse_args()

    stored = torch.load(args.queries, weights_only=True)
    queries = (stored["Q"] if isinstance(stored, dict) else stored).float()
    index = read_index(args.index)
    oracle = Oracle(index)
    systems = open_systems(["plaid:device=cpu", "tilemaxsim"], args.index).systems
    stock, ours = systems

    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    problems: list[str] = []
    print(f"{'threads':>7} {'k':>5} {'stock p50':>10} {'p95':>8} {'ours p50':>9} {'p95':>8} {'ratio':>6}   ms a query")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for k in args.k:
            knobs, sample = Knobs.defaults(k), queries[: args.checked]
            ids = [str(i) for i in range(len(sample))]
            agreement = compare(side(stock, knobs, sample), side(ours, knobs, sample), oracle, sample, knobs, ids)
            problems += [f"threads {threads}, k {k}: {failure}" for failure in agreement["failures"]]
            times = measure_latency(
                systems, queries[: args.timed], knobs, warmup=args.warmup, repeats=args.repeats
            )  # fmt: skip
            a, b = times[stock.name]["search"], times[ours.name]["search"]
            ratio = a["p50"] / b["p50"]
            name = f"k{k}_threads{threads}"
            figures |= {f"stock_cpu_p50_ms_{name}": a["p50"], f"cpu_p50_ms_{name}": b["p50"], f"ratio_{name}": ratio}
            detail[name] = {"knobs": knobs.to_dict(), "latency": times, "agreement": agreement}
            print(f"{threads:7} {k:5} {a['p50']:10.2f} {a['p95']:8.2f} {b['p50']:9.2f} {b['p95']:8.2f} {ratio:6.2f}",
                  flush=True)  # fmt: skip

    print("correct:", not problems, *problems[:10], sep="\n  ")
    if args.out:
        sizes = {"passages": index.num_passages, "tokens": index.num_tokens, "centroids": index.num_centroids,
                 "dim": index.dim, "nbits": index.nbits}  # fmt: skip
        write_json(args.out, {
            "correct": not problems, "problems": problems, "figures": figures, "detail": detail,
            "index": {"name": args.index.name, **sizes}, "load_average": os.getloadavg(), "environment": environment(),
        })  # fmt: skip
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
