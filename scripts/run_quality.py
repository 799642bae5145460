"""Stock PLAID, the plugin in its modes and the float64 oracle on every collection of a folder: one JSON of quality.

    python scripts/run_quality.py .carry/quality --work /tmp/quality --out eval/results/h200_quality.json

The folder is what scripts/pack_quality.py writes: checkpoint/ and sets/NAME/ (BEIR files, and centroids.pt unless
faiss is there to train them). Each set runs in a process of its own: passages and queries are encoded, a stock index
is built at each number of bits, and every query goes through stock's GPU search (where there is a GPU), stock's CPU
search, the plugin in each mode, and the oracle over the whole collection. Nothing is timed, so sets run side by side.

`figures` of the result:
    sets                    collections that were finished
    max_err_vs_oracle       largest |score - float64| of the plugin, over all modes that score the index's own residuals
    mean_err_dense, _pq     means of the same for the codecs that score fp16 vectors, or PQ codes of the widest index
    mean_err_ours, mean_err_stock_gpu, mean_err_stock_cpu      means of the same over sets, bits, k (plugin: mode plaid)
    metrics_equal_sets      collections on which mode plaid has stock's metrics to four decimals at every width and k,
                            stock being its CPU search, which computes in fp32 as we do, or its GPU search where that
                            is left out; _gpu and _cpu: each alone (a GPU search of stock's rounds scores to fp16)
    ndcg10_losses           (set, bits, k, mode) where rerank or exhaustive is below stock in nDCG@10 with p < 0.05 by
                            a paired t test; _holm: those left by Holm's correction over all such tests
Work in --work is kept: a stopped run goes on with the sets that are missing. --merge goes on from what --out holds,
where that came from another machine. Sets that --limit cut off are named in ``not_finished``; ``correct`` speaks of
those that were finished.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from eval.cache import read_json, write_json
from eval.compare import Errors, Side, compare
from eval.datasets import Dataset, load_beir
from eval.indexing import build_index, encode_queries
from eval.manifest import environment
from eval.measure import MEASURES, means, measure, paired
from eval.oracle import Oracle
from eval.pipeline import METRIC_TOLERANCE
from eval.retrieve import Scored, retrieve
from eval.systems import STOCK_CPU, STOCK_GPU, Knobs, Plaid, Session, TileMaxSim, parse_system, tolerance_of
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.pq import find_pq, write_pq

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
SCORE_BUDGET = 2e-3
SYSTEMS = (
    "tilemaxsim", "tilemaxsim:mode=rerank", "tilemaxsim:mode=exhaustive", "tilemaxsim:codec=dense",
    "tilemaxsim:codec=pq,pq_m=32",
)  # fmt: skip
STOCK_OF_GPU, STOCK_OF_CPU = "stock-gpu", "stock-cpu"
# Both extensions of stock's GPU search, compiled side by side: stock compiles one after the other.
GPU_EXTENSIONS = ("decompress_residuals", "packbits")
_COMPILE = """
import pathlib
from colbert.indexing.codecs import residual
folder = pathlib.Path(residual.__file__).parent.resolve()
residual.load(name="{0}_cpp", sources=[str(folder / "{0}.cpp"), str(folder / "{0}.cu")])
"""


def main() -> int:
    args = parse()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if args.one:
        write_json(args.work / f"{args.one}.json", run_set(args))
        return 0
    if args.stock_cpu:
        stock_on_cpu(args)
        return 0
    return run_all(args)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="indexes, vectors and finished sets; kept")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", help="only these")
    parser.add_argument("--nbits", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--k", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), help="tilemaxsim[:option=value,...]")
    parser.add_argument("--judged", type=int, default=100, help="first queries whose every score is held to the oracle")
    parser.add_argument("--queries", type=int, help="only the first N queries of each set")
    parser.add_argument("--workers", type=int, default=6, help="sets at the same time")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which what is unfinished is given up")
    parser.add_argument("--merge", action="store_true", help="keep the sets that --out holds, and run the others")
    parser.add_argument("--no-stock-cpu", action="store_true", help="leave stock's CPU search out, where a GPU is")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--commit", help="of this code, for the record, where there is no checkout to ask")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--stock-cpu", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.systems:
        if parse_system(name)[0] != "tilemaxsim":
            parser.error(f"--systems: stock runs in any case; expected tilemaxsim[:option=value,...], got {name}")
    return args


# ---- the parent: one process a set


def run_all(args: argparse.Namespace) -> int:
    import torch

    started = time.perf_counter()
    found = sorted(path.name for path in (args.folder / "sets").iterdir())
    wanted = args.sets or found
    if unknown := [name for name in wanted if name not in found]:
        raise ValueError(f"--sets: expected some of {', '.join(found)}, got {', '.join(unknown)}")
    args.work.mkdir(parents=True, exist_ok=True)
    before: dict[str, Any] = read_json(args.out) if args.merge and args.out.exists() else {"sets": {}}
    wanted = [name for name in wanted if name not in before["sets"]]
    gpu = torch.cuda.is_available()
    children = compile_extensions(gpu)
    # The largest first: the last to finish decides when all are done.
    size = {name: sum(file.stat().st_size for file in (args.folder / "sets" / name).glob("*")) for name in wanted}
    waiting = sorted((n for n in wanted if not (args.work / f"{n}.json").exists()), key=lambda n: -size[n])
    running: dict[str, subprocess.Popen[bytes]] = {}
    threads = max(1, len(os.sched_getaffinity(0)) // min(args.workers, max(1, len(waiting))))
    failed: dict[str, str] = {}
    not_finished: list[str] = []
    while waiting or running:
        while waiting and len(running) < args.workers:
            running[waiting[0]] = start_self(args, ["--one", waiting[0]], args.work / f"{waiting[0]}.log", threads)
            waiting.pop(0)
        for name, child in list(running.items()):
            if child.poll() is not None:
                del running[name]
                if child.returncode != 0:
                    failed[name] = (args.work / f"{name}.log").read_text(errors="replace")[-2000:]
                print(f"{time.perf_counter() - started:6.1f} s  {name}: {child.returncode or 'done'}", flush=True)
        if time.perf_counter() - started > args.limit:
            not_finished = sorted([*waiting, *running])
            print(f"not finished after {args.limit:.0f} s: {', '.join(not_finished)}", flush=True)
            for child in running.values():
                child.terminate()
            break
        time.sleep(0.2)
    for child in children:
        child.terminate()
    parts = {name: read_json(args.work / f"{name}.json") for name in wanted if (args.work / f"{name}.json").exists()}
    result = merge({**before["sets"], **parts}, failed, gpu)
    where = environment()
    words = [Path(word).name if Path(word).is_absolute() else word for word in where.pop("argv")]
    where["command"] = " ".join(["python", *words])
    if args.commit:
        where["commit"] = args.commit
    here = {name: where[name] for name in ("commit", "command", "time")}
    result |= {"not_finished": not_finished, "runs": {**before.get("runs", {}), **dict.fromkeys(parts, here)}}
    result |= {"seconds": round(time.perf_counter() - started, 1), **where}
    write_json(args.out, result, indent=None)  # histograms, a number a line, would be most of it
    for name, value in result["figures"].items():
        print(f"{name:32s} {value:.6g}")
    print("correct:", result["correct"], *result["problems"][:12], sep="\n  ")
    return 0 if result["correct"] and not not_finished else 1


def compile_extensions(gpu: bool) -> list[subprocess.Popen[bytes]]:
    """Processes that compile what stock loads at its first search, while texts are encoded."""
    commands = [[sys.executable, str(ROOT / "scripts" / "_extensions.py")]]
    if gpu:
        commands += [[sys.executable, "-c", _COMPILE.format(name)] for name in GPU_EXTENSIONS]
    return [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]


def start_self(
    args: argparse.Namespace, extra: list[str], log: Path, threads: int, *, hide_gpu: bool = False
) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *extra]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if hide_gpu or args.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)


# ---- one set


def open_set(args: argparse.Namespace, name: str) -> tuple[Dataset, Tensor, dict[int, Path]]:
    """(data, encoded queries fp32 [nq, LQ, DIM], index folder by bits), made or found in the work folder."""
    folder = args.folder / "sets" / name
    dataset = load_beir(folder, name=name, progress=False)
    if args.queries is not None:
        dataset = dataset.first_queries(args.queries)
    checkpoint, centroids = args.folder / "checkpoint", folder / "centroids.pt"
    given = centroids if centroids.exists() else None
    Q = encode_queries(checkpoint, dataset, cache=args.work, progress=False).Q
    indexes = {
        nbits: build_index(checkpoint, dataset, nbits=nbits, centroids=given, cache=args.work, progress=False)
        for nbits in args.nbits
    }
    return dataset, Q, indexes


def stock_on_cpu(args: argparse.Namespace) -> None:
    """Everything that stock's CPU search does for one set, into files; its process sees no GPU."""
    name = args.stock_cpu
    _, Q, indexes = open_set(args, name)
    for nbits, index in indexes.items():
        session = Session(index, plugin=False)
        system = Plaid(session, flag=False)
        for k in args.k:
            system.use(Knobs.defaults(k))
            scored, _ = retrieve(system, Q, judged=args.judged)
            scored.save(args.work / f"{name}.{nbits}.{k}.{STOCK_OF_CPU}.npz")
        session.close()


def run_set(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    started = time.perf_counter()
    dataset, Q, indexes = open_set(args, args.one)
    print(f"indexes ready after {time.perf_counter() - started:.0f} s", flush=True)
    gpu = torch.cuda.is_available()
    cpu_too = not (gpu and args.no_stock_cpu)
    threads = torch.get_num_threads()
    log = args.work / f"{args.one}.{STOCK_OF_CPU}.log"
    child = start_self(args, ["--one", "", "--stock-cpu", args.one], log, threads, hide_gpu=True) if cpu_too else None
    found = {}  # of everything but stock on the CPU, which runs meanwhile
    for nbits, index in indexes.items():
        found[nbits] = run_index(args, systems_of(args, nbits), index, Q, gpu)
        print(f"{nbits} bit searched after {time.perf_counter() - started:.0f} s", flush=True)
    if child is not None and child.wait() != 0:
        raise RuntimeError(f"stock on the CPU ended with {child.returncode}: {log.read_text(errors='replace')[-1500:]}")
    results = []
    for nbits, index in indexes.items():
        scored = found[nbits]
        if cpu_too:
            for k in args.k:
                path = args.work / f"{args.one}.{nbits}.{k}.{STOCK_OF_CPU}.npz"
                scored[STOCK_OF_CPU, k] = Scored.load(path)
        results.append(judge_index(args, dataset, index, Q, scored, gpu))
        print(f"{nbits} bit judged after {time.perf_counter() - started:.0f} s", flush=True)
    return {
        "dataset": dataset.identity(),
        "query_shape": list(Q.shape),
        "stock": [name for name in (STOCK_OF_GPU, STOCK_OF_CPU) if any(name == n for n, _ in found[args.nbits[0]])],
        "indexes": results,
        "seconds": round(time.perf_counter() - started, 1),
    }


def systems_of(args: argparse.Namespace, nbits: int) -> list[str]:
    """PQ codes are made from an index's vectors: from the closest ones alone."""
    return [name for name in args.systems if codec_of(name) != "pq" or nbits == max(args.nbits)]


def run_index(
    args: argparse.Namespace, names: Sequence[str], index: Path, Q: Tensor, gpu: bool
) -> dict[tuple[str, int], Scored]:
    """What each system of this process scored, by (system, k)."""
    for name in names:
        if codec_of(name) == "pq" and (m := parse_system(name)[1]["pq_m"]) not in find_pq(index):
            write_pq(read_index(index, verify="structure"), m, progress=False)
    session = Session(index, plugin=True)
    systems: list[tuple[str, Plaid]] = [(STOCK_OF_GPU, Plaid(session))] if gpu else []
    systems += [(name, TileMaxSim(session, parse_system(name)[1])) for name in names]
    found = {}
    for name, system in systems:
        for k in args.k:
            knobs = Knobs.defaults(k)
            # One more than k, in case the query's own passage is among them.
            system.use(knobs if system.follows_plaid else replace(knobs, k=k + 1))
            found[name, k] = retrieve(system, Q.to(session.device), judged=args.judged)[0]
    session.close()
    return found


def judge_index(
    args: argparse.Namespace,
    dataset: Dataset,
    index_path: Path,
    Q: Tensor,
    scored: dict[tuple[str, int], Scored],
    gpu: bool,
) -> dict[str, Any]:
    """Metrics, errors and agreement over one index."""
    import torch

    index = read_index(index_path, verify="structure")
    oracle = Oracle(index, dtype=torch.float64, device="cuda" if gpu else "cpu", keep_bytes=8 << 30)
    judged = Q[: args.judged]
    deepest = max(args.k)
    exact = Scored.from_lists([oracle_topk(oracle, q, deepest + 1) for q in Q], [[] for _ in Q])
    stocks = [name for name in (STOCK_OF_GPU, STOCK_OF_CPU) if any(name == n for n, _ in scored)]
    searches = []
    for k in args.k:
        knobs = Knobs.defaults(k)
        by_name = {name: result for (name, at), result in scored.items() if at == k} | {"oracle": exact}
        values = {n: measure(dataset.qrels, as_run(r, dataset, k), MEASURES) for n, r in by_name.items()}
        errors = {
            name: score_errors(result, oracle, judged, clamp=name == STOCK_OF_CPU)
            for name, result in by_name.items()
            if name != "oracle"
        }
        plain = [n for n in by_name if n.startswith("tilemaxsim") and parse_system(n)[1].get("mode") in (None, "plaid")]
        agreement = {}
        for stock in stocks:
            base = side_of(stock, by_name[stock], gpu)
            for name in plain:
                if codec_of(name) != "pq":
                    other = side_of(name, by_name[name], gpu)
                    agreement[f"{name} against {stock}"] = without_lists(
                        compare(base, other, oracle, judged, knobs, dataset.query_ids, query_maxlen=32)
                    )
        searches.append(
            {
                "knobs": knobs.to_dict(),
                "metrics": {name: rounded(means(by_measure)) for name, by_measure in values.items()},
                "paired": {
                    stock: {
                        name: {m: brief(paired(values[stock][m], values[name][m])) for m in MEASURES}
                        for name in values
                        if name not in stocks
                    }
                    for stock in stocks
                },
                "errors": errors,
                "agreement": agreement,
                "recall_of_exact": {
                    name: recall(exact, result, len(judged), k) for name, result in by_name.items() if name != "oracle"
                },
                "shuffled_refused": refuses_shuffled(by_name[plain[0]], oracle, judged),
            }
        )
    return {
        "nbits": index.nbits,
        "passages": index.num_passages,
        "tokens": index.num_tokens,
        "centroids": index.num_centroids,
        "dim": index.dim,
        "bytes": index.nbytes,
        "digest": index.digest(),
        "search": searches,
    }


def codec_of(system: str) -> str:
    return str(parse_system(system)[1].get("codec", "residual")) if system.startswith("tilemaxsim") else "residual"


def side_of(name: str, scored: Scored, gpu: bool) -> Side:
    if name == STOCK_OF_CPU:
        return Side(name, scored, STOCK_CPU, clamps=True)
    if name == STOCK_OF_GPU:
        return Side(name, scored, STOCK_GPU)
    return Side(name, scored, tolerance_of(parse_system(name)[1], gpu))


def oracle_topk(oracle: Oracle, q: Tensor, k: int) -> tuple[list[int], list[float]]:
    pids, scores = oracle.topk(q, k)
    return pids.tolist(), scores.tolist()


def as_run(scored: Scored, dataset: Dataset, k: int) -> dict[str, dict[str, float]]:
    """Query id -> passage id -> score of the k best, the query's own passage left out."""
    run = {}
    for i, query_id in enumerate(dataset.query_ids):
        pids, scores = scored.query(i)
        own = dataset.own_passage(query_id)
        if own is not None:
            kept = pids != own
            pids, scores = pids[kept], scores[kept]
        run[query_id] = {dataset.passage_ids[p]: s for p, s in zip(pids[:k].tolist(), scores[:k].tolist())}
    return run


def score_errors(scored: Scored, oracle: Oracle, Q: Tensor, *, clamp: bool) -> dict[str, Any]:
    """Summary of |score - float64| over every passage that the first queries' results hold."""
    import torch

    errors = Errors()
    for i, q in enumerate(Q):
        pids, scores = scored.query(i)
        truth = oracle.scores(q, torch.from_numpy(pids), clamp=clamp).numpy()
        errors.add((scores - truth)[np.isfinite(truth)])
    return errors.summary()


def recall(exact: Scored, scored: Scored, n: int, k: int) -> float:
    """Mean share of the collection's k best (by the oracle) among the k best returned, over n queries."""
    shares = []
    for i in range(n):
        best = exact.query(i)[0][:k]
        shares.append(len(np.intersect1d(best, scored.query(i)[0][:k])) / len(best))
    return float(np.mean(shares))


def refuses_shuffled(scored: Scored, oracle: Oracle, Q: Tensor) -> bool:
    """Whether the error check would notice a scorer whose scores belong to other passages."""
    import torch

    pids, scores = scored.query(0)
    wrong = np.roll(scores, len(scores) // 2)
    truth = oracle.scores(Q[0], torch.from_numpy(pids)).numpy()
    return bool(np.abs(wrong - truth)[np.isfinite(truth)].max() > SCORE_BUDGET)


def without_lists(compared: dict[str, Any]) -> dict[str, Any]:
    """Without what score_errors tells already."""
    return {key: value for key, value in compared.items() if key not in ("errors", "difference")}


def brief(test: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in test.items() if key != "differences"}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items()}


# ---- all sets


def merge(parts: dict[str, dict[str, Any]], failed: dict[str, str], gpu: bool) -> dict[str, Any]:
    """The result of all sets: figures, problems and the sets' own results."""
    problems = [f"{name}: {reason}" for name, reason in failed.items()]
    ours: list[float] = []
    largest = 0.0
    by_codec: dict[str, list[float]] = {}
    stock_errors: dict[str, list[float]] = {STOCK_OF_GPU: [], STOCK_OF_CPU: []}
    equal: dict[str, list[str]] = {STOCK_OF_GPU: [], STOCK_OF_CPU: []}
    equal_searches = {STOCK_OF_GPU: 0, STOCK_OF_CPU: 0}  # of one width and k
    differences: dict[str, float] = {STOCK_OF_GPU: 0.0, STOCK_OF_CPU: 0.0}
    tests: list[tuple[float, str]] = []  # p-values of all nDCG@10 tests, 1 where no query differs or ours is better
    for name, part in parts.items():
        base = part["stock"][0]
        differing = dict.fromkeys(part["stock"], False)
        for index in part["indexes"]:
            for search in index["search"]:
                where = f"{name}, {index['nbits']} bit, k={search['knobs']['k']}"
                if not search["shuffled_refused"]:
                    problems.append(f"{where}: the error check accepts shuffled scores")
                for what, agreement in search["agreement"].items():
                    if not agreement["same"]:
                        problems.append(f"{where}: {what}: {agreement['failures'][:2]}")
                for system, error in search["errors"].items():
                    if system in stock_errors:
                        stock_errors[system].append(error["mean"])
                        continue
                    if (codec := codec_of(system)) != "residual":
                        by_codec.setdefault(codec, []).append(error["mean"])
                        continue
                    largest = max(largest, error["max"])
                    if error["max"] > SCORE_BUDGET:
                        problems.append(f"{where}: {system} is off the oracle by {error['max']:.2e}")
                    if system == "tilemaxsim":
                        ours.append(error["mean"])
                for stock, by_system in search["paired"].items():
                    difference = max(
                        (abs(test["mean"]) for test in by_system.get("tilemaxsim", {}).values()), default=0
                    )
                    differences[stock] = max(differences[stock], difference)
                    differing[stock] |= difference >= METRIC_TOLERANCE
                    equal_searches[stock] += difference < METRIC_TOLERANCE
                for system, by_measure in search["paired"][base].items():
                    if "mode=rerank" in system or "mode=exhaustive" in system:
                        test = by_measure["nDCG@10"]
                        loses = test["mean"] < 0 and test["p_value"] is not None
                        tests.append((test["p_value"] if loses else 1.0, f"{where}: {system}"))
        for stock, differs in differing.items():
            if not differs:
                equal[stock].append(name)
    searches = sum(len(index["search"]) for part in parts.values() for index in part["indexes"])
    figures: dict[str, float] = {"sets": len(parts), "searches": searches, "max_err_vs_oracle": largest}
    if ours:
        figures["mean_err_ours"] = float(np.mean(ours))
    figures |= {f"mean_err_{codec}": float(np.mean(means_of)) for codec, means_of in by_codec.items()}
    for stock, errors in stock_errors.items():
        if errors:
            key = stock.replace("-", "_")
            figures[f"mean_err_{key}"] = float(np.mean(errors))
            figures[f"metrics_equal_sets_{key.removeprefix('stock_')}"] = len(equal[stock])
            figures[f"metrics_equal_searches_{key.removeprefix('stock_')}"] = equal_searches[stock]
            figures[f"max_metric_difference_{key.removeprefix('stock_')}"] = differences[stock]
    figures["metrics_equal_sets"] = len(equal[STOCK_OF_CPU if stock_errors[STOCK_OF_CPU] else STOCK_OF_GPU])
    lost = sorted(where for p, where in tests if p < 0.05)
    holm = sorted(where for p, where in holm_rejected(tests))
    figures |= {"ndcg10_tests": len(tests), "ndcg10_losses": len(lost), "ndcg10_losses_holm": len(holm)}
    if gpu and ours and figures["mean_err_ours"] >= figures["mean_err_stock_gpu"]:
        problems.append("the plugin's mean error is not below stock's on the GPU")
    return {
        "correct": bool(parts) and not problems,
        "problems": problems[:60],
        "figures": figures,
        "metrics_equal": equal,
        "ndcg10_losses": lost,
        "ndcg10_losses_holm": holm,
        "table": [row for name, part in parts.items() for row in table_rows(name, part)],
        "sets": parts,
    }


def holm_rejected(tests: list[tuple[float, str]], level: float = 0.05) -> list[tuple[float, str]]:
    """The tests whose null hypothesis falls under Holm's step-down correction."""
    rejected = []
    for i, (p, where) in enumerate(sorted(tests)):
        if p > level / (len(tests) - i):
            break
        rejected.append((p, where))
    return rejected


def table_rows(name: str, part: dict[str, Any]) -> list[dict[str, Any]]:
    """nDCG@10 and recall by system, one row a width and k, and the p-value of each mode against stock."""
    base = part["stock"][0]
    return [
        {
            "set": name,
            "nbits": index["nbits"],
            "k": search["knobs"]["k"],
            "nDCG@10": {system: metrics["nDCG@10"] for system, metrics in search["metrics"].items()},
            "R@100": {system: metrics["R@100"] for system, metrics in search["metrics"].items()},
            "p_nDCG@10": {s: m["nDCG@10"]["p_value"] for s, m in search["paired"][base].items()},
        }
        for index in part["indexes"]
        for search in index["search"]
    ]


if __name__ == "__main__":
    sys.exit(main())
