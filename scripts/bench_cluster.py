"""A cluster of processes on this machine: its results against one process's, bit for bit, and what sending costs.

    python scripts/bench_cluster.py --index INDEX ... --queries QUERIES ... --n 3 --out eval/results/cpu_cluster.json

An index each with its queries: a BEIR queries.jsonl, encoded by the index's checkpoint, or a file of encoded ones (fp32
[n, LQ, DIM], or a dict with "Q"). Each index is cut by ``plaid-tilemaxsim shard`` into a temporary folder. The run is
correct only if pids, scores and order are equal for every query, in every mode and k. Times: a request that carries one
query to every actor and brings back answers of the size that k results need (actors work on nothing meanwhile), and the
merge of such answers of ``--shards-merged`` shards. With ``--gpus`` both sides search on GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from eval.cache import write_json
from eval.latency import summary
from eval.manifest import environment
from plaid_tilemaxsim.cluster import ClusterSearcher
from plaid_tilemaxsim.engine import SearchEngine, with_defaults
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.index.split import split_index
from plaid_tilemaxsim.merge import Survivors, merge

ray: Any = importlib.import_module("ray")
MODES = ("plaid", "rerank", "exhaustive")
KS = (10, 100, 1000)


class Echo:
    """Answers with as many bytes as it is asked for."""

    def answer(self, Q: np.ndarray, ndocs: int) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros(ndocs, dtype=np.float32) for _ in range(4))


def encoded(searcher: ClusterSearcher, file: Path, n: int) -> Tensor:
    if file.suffix == ".jsonl":
        lines = file.read_text().splitlines()[:n]
        return searcher.encode([json.loads(line)["text"] for line in lines])
    stored = torch.load(file, weights_only=True)
    Q: Tensor = stored["Q"] if isinstance(stored, dict) else stored
    return Q[:n].float()


def compared(index: Path, queries: Path, n: int, count: int, gpus: float) -> tuple[dict[str, Any], list[str]]:
    """Sizes, how many searches were compared, those that differ, and p50 of both by mode and k."""
    engine = SearchEngine(load_resident(read_index(index), "cuda" if gpus else "cpu"))
    problems: list[str] = []
    times: dict[str, dict[str, float]] = {}
    searches = 0
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        manifest = split_index(index, n, folder)
        seconds = time.perf_counter() - began
        for mode in MODES:
            with ClusterSearcher(folder, scorer_options={"mode": mode}, gpus=gpus) as searcher:
                Q = encoded(searcher, queries, count)
                for k in KS if mode == "plaid" else KS[:1]:
                    params = with_defaults(k, mode=mode, query_maxlen=manifest.config["query_maxlen"])
                    searcher.dense_search(Q[:1], k)
                    engine.search(Q[0], params)
                    spent: dict[str, list[float]] = {"cluster": [], "one": []}
                    for i, q in enumerate(Q):
                        began = time.perf_counter()
                        pids, _, scores = searcher.dense_search(q[None], k)[:3]
                        answered = time.perf_counter()
                        wanted = engine.search(q, params)
                        spent["cluster"].append(1e3 * (answered - began))
                        spent["one"].append(1e3 * (time.perf_counter() - answered))
                        searches += 1
                        if pids != wanted[0].tolist() or scores != wanted[1].tolist():
                            problems.append(f"{index.name}, {mode}, k = {k}, query {i}: other pids or scores")
                    times[f"{mode}_k{k}"] = {f"{name}_p50_ms": summary(ms)["p50"] for name, ms in spent.items()}
    sizes = {
        "passages": manifest.num_passages,
        "tokens": manifest.source["num_tokens"],
        "shards": n,
        "split_s": seconds,
    }
    return {**sizes, "searches": searches, "different": len(problems), "times": times}, problems


def sending(n: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a request to n actors, by k."""
    actors = [ray.remote(num_cpus=0)(Echo).remote() for _ in range(n)]
    Q = np.zeros((1, 32, 128), dtype=np.float32)
    found = {}
    for k in KS:
        ndocs, times = with_defaults(k).ndocs, []
        for _ in range(repeats + 20):
            began = time.perf_counter()
            ray.get([actor.answer.remote(Q, ndocs) for actor in actors])
            times.append(1e3 * (time.perf_counter() - began))
        found[f"round_trip_ms_k{k}"] = summary(times[20:])["p50"]
    for actor in actors:
        ray.kill(actor)
    return found


def merging(shards: int, repeats: int) -> dict[str, float]:
    """Milliseconds of merging the answers of so many shards, by k."""
    g = torch.Generator().manual_seed(0)
    found = {}
    for k in KS:
        params = with_defaults(k)
        parts = []
        for i in range(shards):
            pids = i * 10**6 + torch.randperm(10**6, generator=g)[: params.ndocs].int()
            parts.append(Survivors(pids, *(torch.rand(params.ndocs, generator=g) for _ in range(3))))
        times = []
        for _ in range(repeats + 5):
            began = time.perf_counter()
            merge(parts, params)
            times.append(1e3 * (time.perf_counter() - began))
        found[f"merge_ms_k{k}"] = summary(times[5:])["p50"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, nargs="+", required=True)
    parser.add_argument("--queries", type=Path, nargs="+", required=True)
    parser.add_argument("--n", type=int, default=3, help="shards of each index")
    parser.add_argument("--gpus", type=float, default=0, help="of an actor; 0.5 puts two on one (default: CPUs)")
    parser.add_argument("--count", type=int, default=20, help="queries of each index")
    parser.add_argument("--shards-merged", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if len(args.index) != len(args.queries):
        parser.error(f"--queries: expected one file for each of {len(args.index)} indexes, got {len(args.queries)}")

    torch.set_num_threads(1)  # as an actor has
    ray.init(num_cpus=args.n, include_dashboard=False, log_to_driver=False)
    detail, problems = {}, []
    for index, queries in zip(args.index, args.queries, strict=True):
        detail[index.name], wrong = compared(index, queries, args.n, args.count, args.gpus)
        problems += wrong
        print(index.name, detail[index.name], flush=True)
    figures: dict[str, float] = {
        "shards": args.n,
        "searches": sum(one["searches"] for one in detail.values()),
        "searches_different": len(problems),
        "shards_merged": args.shards_merged,
        **sending(args.n, args.repeats),
        **merging(args.shards_merged, args.repeats),
    }
    print(json.dumps(figures, indent=1), *problems[:10], sep="\n")
    if args.out:
        named = [
            "--index",
            *(f.name for f in args.index),
            "--queries",
            *(f"{f.parent.name}/{f.name}" for f in args.queries),
        ]
        rest = [
            "--n",
            args.n,
            "--gpus",
            f"{args.gpus:g}",
            "--count",
            args.count,
            "--shards-merged",
            args.shards_merged,
            "--repeats",
            args.repeats,
        ]
        command = " ".join(map(str, ["python scripts/bench_cluster.py", *named, *rest]))
        where = {name: value for name, value in environment().items() if name != "argv"}
        result = {"correct": not problems, "problems": problems, "figures": figures, "detail": detail}
        write_json(args.out, {**result, **where, "command": command})
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
