"""Stock PLAID and the plugin on one index, in one process: latency, stages, memory, and whether they agree.

    python scripts/ab_latency.py --index INDEX --queries Q.pt --k 10 100 1000 --mode plaid rerank exhaustive \
        --out eval/results/h200_search.json

``Q.pt`` holds encoded queries, fp32 [n, LQ, DIM], or a dict with them as "Q" (what eval caches). Everything is timed
from the encoded query to pids and scores on the host, exact scores of given pids to scores on the device. First the
plugin runs alone (load, memory, latency of every mode), then stock is loaded and both answer the same queries in turn.
The run counts as correct only if the scoring kernels match float64, if on a sample of queries every score is within
2e-3 of the oracle, and if candidates, survivors of pruning and rankings equal stock's outside ties (eval.compare).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from eval.cache import write_json
from eval.compare import Side, compare
from eval.latency import summary
from eval.manifest import environment
from eval.oracle import Oracle
from eval.retrieve import Scored
from eval.systems import OURS_CPU, OURS_GPU, STOCK_CPU, STOCK_GPU, Knobs, stock_marks
from plaid_tilemaxsim.engine import SearchEngine, SearchParams, with_defaults
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.ops import api, reference

SCORE_BUDGET = 2e-3


def timed(work: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of one call that ends with its result on the host; letting go of that is not counted."""
    start = time.perf_counter()
    result = work(*args)
    spent = time.perf_counter() - start
    del result
    return spent * 1e3


def gpu_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class Judge:
    """Float64 scores from the index's own bytes; knows nothing of inverse norms or tables."""

    def __init__(self, engine: SearchEngine) -> None:
        self.index = engine.index

    def __call__(self, Q: Tensor, pids: Tensor) -> Tensor:
        ix = self.index
        assert isinstance(ix.residuals, Tensor)
        pids = pids.to(ix.device).long()
        residuals, codes, offsets, listed = ix.residuals, ix.codes, ix.offsets, pids
        if residuals.device != ix.device:  # in host memory: bring the rows of these passages alone
            rows = torch.cat([torch.arange(int(offsets[p]), int(offsets[p + 1])) for p in pids.tolist()])
            residuals, codes = residuals[rows].to(ix.device), codes[rows.to(ix.device)]
            lengths = (offsets[pids + 1] - offsets[pids]).cumsum(0)
            offsets = torch.cat([lengths.new_zeros(1), lengths])
            listed = torch.arange(len(pids), device=ix.device)
        return reference.residual_maxsim(
            Q.to(ix.device), codes, residuals, ix.centroids, ix.bucket_weights, ix.nbits, offsets, listed
        ).cpu()


def kernel_errors(engine: SearchEngine, Q: Tensor) -> dict[str, float]:
    """Largest difference of each scoring kernel from float64 over passages spread across the index.

    Dense: the passages decompressed to fp16, against the same fp16 values.
    """
    ix = engine.index
    assert isinstance(ix.residuals, Tensor)
    assert ix.inv_norms is not None
    pids = torch.linspace(0, ix.num_passages - 1, min(2000, ix.num_passages)).int().to(ix.device)
    pids = pids[ix.offsets[pids.long() + 1] > ix.offsets[pids.long()]]
    q = Q.to(ix.device)
    impl = "triton" if ix.device.type == "cuda" else "torch"
    cs = api.centroid_scores(q, ix.centroids, impl=impl)
    got = {
        "centroid": api.centroid_maxsim(cs, ix.codes, ix.offsets, pids, impl=impl),
        "residual": api.residual_maxsim(
            q, cs, ix.codes, ix.residuals, ix.inv_norms, ix.inv_norm_lo, ix.inv_norm_step, ix.bucket_weights,
            ix.nbits, ix.offsets, pids, impl=impl,
        ),
    }  # fmt: skip
    want = {
        "centroid": reference.centroid_maxsim(q, ix.codes, ix.centroids, ix.offsets, pids),
        "residual": reference.residual_maxsim(
            q, ix.codes, ix.residuals, ix.centroids, ix.bucket_weights, ix.nbits, ix.offsets, pids
        ),
    }
    few = pids[:200].long()
    spans = zip(ix.offsets[few].tolist(), ix.offsets[few + 1].tolist())
    rows = torch.cat([torch.arange(a, b) for a, b in spans]).to(ix.device)
    D = reference.decompress(
        ix.codes[rows], ix.residuals[rows], ix.centroids, ix.bucket_weights, ix.nbits, torch.float32
    ).half()
    offsets = torch.cat([few.new_zeros(1), (ix.offsets[few + 1] - ix.offsets[few]).cumsum(0)])
    if impl == "triton":
        got["dense"] = api.dense_maxsim(q.half(), D, offsets=offsets)
        want["dense"] = reference.maxsim(q.half(), D, offsets)
    return {name: (got[name] - want[name]).abs().max().item() for name in got}


def scored(results: list[tuple[Any, Any]], candidates: list[Any]) -> Scored:
    return Scored.from_lists([(list(map(int, p)), list(map(float, s))) for p, s in results], candidates)


def agreement(
    stock: Any, config: Any, engine: SearchEngine, params: SearchParams, oracle: Oracle, queries: Tensor
) -> dict[str, Any]:
    """``compare`` of stock's IndexScorer and the engine on queries [n, LQ, DIM], at the same parameters."""
    on_gpu = engine.device.type == "cuda"
    queries, everything = queries.cpu(), replace(params, k=None)
    ours_side = Side(
        "ours",
        scored(
            [engine.search(q, everything) for q in queries],
            [engine.candidates(q, params.ncells).cpu() for q in queries],
        ),
        OURS_GPU if on_gpu else OURS_CPU,
    )
    on_device = queries.to(engine.device).split(1)
    with torch.inference_mode():
        stock_candidates = [stock.retrieve(config, q)[0].cpu() for q in on_device]
    stock_side = Side(
        "stock",
        scored([stock.rank(config, q) for q in on_device], stock_candidates),
        STOCK_GPU if on_gpu else STOCK_CPU,
        clamps=not on_gpu,
    )
    assert params.k is not None
    knobs = Knobs(params.k, params.ncells, params.threshold, params.ndocs)
    return compare(stock_side, ours_side, oracle, queries, knobs, [str(i) for i in range(len(queries))])


def described(path: Path, index: PlaidIndex) -> dict[str, Any]:
    return {
        "path": path.name,
        "passages": index.num_passages,
        "tokens": index.num_tokens,
        "centroids": index.num_centroids,
        "dim": index.dim,
        "nbits": index.nbits,
        "bytes": index.nbytes,
    }


def recorded(commit: str | None) -> dict[str, Any]:
    """Where and how this process runs, in words that mean something elsewhere: names, not places."""
    where = environment()
    words = [Path(word).name if Path(word).is_absolute() else word for word in where.pop("argv")]
    return {**where, "command": " ".join(["python", *words]), **({"commit": commit} if commit else {})}


def conclude(result: dict[str, Any], out: Path | None) -> None:
    """Writes and prints a result; the process ends with 1 if it has problems."""
    result = {"correct": not result["problems"], **result}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, result)
    for name, value in result["figures"].items():
        print(f"{name:32s} {value:.4f}")
    print("correct:", result["correct"], *result["problems"][:10], sep="\n  ")
    if result["problems"]:
        sys.exit(1)


def plot(result: dict[str, Any], path: Path) -> None:
    """Latency of both by k, and where the plugin's time goes, as one picture (svg, png or pdf by its suffix)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    detail = result["detail"]
    ks = [int(name.removeprefix("ab_k")) for name in detail if name.startswith("ab_k")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for offset, (side, label) in enumerate((("stock_ms", "stock PLAID"), ("ours_ms", "plugin"))):
        at = [i + 0.36 * offset for i in range(len(ks))]
        p50 = [detail[f"ab_k{k}"][side]["p50"] for k in ks]
        p99 = [detail[f"ab_k{k}"][side]["p99"] for k in ks]
        left.bar(at, p50, 0.34, yerr=[[0] * len(ks), [b - a for a, b in zip(p50, p99)]], capsize=3, label=label)
    left.set_xticks([i + 0.18 for i in range(len(ks))], [f"k = {k}" for k in ks])
    left.set(yscale="log", ylabel="ms, median to 99th percentile", title="encoded query to results on the host")
    left.legend()
    names = [name for name in detail if "stages_ms" in detail[name]]
    bottom = [0.0] * len(names)
    for stage in detail[names[0]]["stages_ms"] if names else []:
        heights = [detail[name]["stages_ms"][stage] for name in names]
        right.bar(names, heights, bottom=bottom, label=stage)
        bottom = [a + b for a, b in zip(bottom, heights)]
    right.set(ylabel="ms", title="the plugin, by stage")
    right.tick_params(axis="x", rotation=45)
    if names:
        right.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--mode", nargs="+", default=["plaid"], choices=["plaid", "rerank", "exhaustive"])
    parser.add_argument("--queries-timed", type=int, default=50)
    parser.add_argument("--queries-checked", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--exact", type=int, default=100_000, help="pids to score exactly without a search; 0: none")
    parser.add_argument("--host-placement", action="store_true", help="also measure residuals in host memory")
    parser.add_argument("--no-stock", action="store_true", help="the plugin alone")
    parser.add_argument("--commit", help="of this code, for the record, where there is no checkout to ask")
    parser.add_argument("--plot", type=Path, help="picture of the comparison: .svg, .png or .pdf (needs matplotlib)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    queries = torch.load(args.queries, weights_only=True)
    queries = (queries["Q"] if isinstance(queries, dict) else queries).float()
    timed_queries = queries[: args.queries_timed]
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    problems: list[str] = []

    start = time.perf_counter()
    plaid_index = read_index(args.index, verify="structure")
    resident = load_resident(plaid_index, device, "gpu" if on_gpu else "auto")
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    figures["load_gb_per_s"] = plaid_index.nbytes / seconds / 1e9
    figures["load_s"] = seconds
    figures["passages"], figures["tokens"] = resident.num_passages, resident.num_tokens
    engine = SearchEngine(resident)
    judge = Judge(engine)
    detail["kernel_errors"] = kernel_errors(engine, queries[0])
    for kernel, error in detail["kernel_errors"].items():
        figures[f"{kernel}_kernel_max_error"] = error
        if not error <= SCORE_BUDGET:
            problems.append(f"{kernel} kernel: error {error:.2e}")
    print(f"loaded {plaid_index.nbytes / 1e9:.2f} GB in {seconds:.1f} s", flush=True)

    # ---- the plugin alone
    for mode in args.mode:
        for k in args.k if mode != "exhaustive" else [min(args.k[-1], 1000)]:
            params = with_defaults(k, mode=mode)
            for q in queries[: args.warmup]:
                engine.search(q, params)
            runs = 1 if mode == "exhaustive" else args.repeats
            times = [timed(engine.search, q, params) for _ in range(runs) for q in timed_queries]
            detail[f"{mode}_k{k}"] = {"search_ms": summary(times)}
            if on_gpu or mode == "plaid":
                stages = [engine.profile(q, params) for q in queries[:3]]
                detail[f"{mode}_k{k}"]["stages_ms"] = {s: statistics.median(x[s] for x in stages) for s in stages[0]}
            errors = []
            for q in queries[: args.queries_checked]:
                pids, scores = engine.search(q, params)
                errors.append((judge(q, pids) - scores).abs().max().item())
                again = engine.search(q, params)
                if not (torch.equal(again[0], pids) and torch.equal(again[1], scores)):
                    problems.append(f"{mode} k={k}: a repeated search differs")
            detail[f"{mode}_k{k}"]["max_error"] = max(errors)
            if max(errors) > SCORE_BUDGET:
                problems.append(f"{mode} k={k}: score error {max(errors):.2e}")
            p50, p99 = detail[f"{mode}_k{k}"]["search_ms"]["p50"], detail[f"{mode}_k{k}"]["search_ms"]["p99"]
            if mode == "plaid":
                figures[f"search_p50_ms_k{k}"], figures[f"search_p99_ms_k{k}"] = p50, p99
                counts = [engine.candidates(q, params.ncells).numel() for q in timed_queries]
                figures[f"candidates_k{k}"] = statistics.median(counts)
            elif mode == "rerank":
                figures[f"rerank_p50_ms_k{k}"] = p50
            else:
                figures["exhaustive_p50_ms"] = p50
            stages_text = {s: round(v, 3) for s, v in detail[f"{mode}_k{k}"].get("stages_ms", {}).items()}
            print(f"{mode} k={k}: p50 {p50:.3f} p99 {p99:.3f} ms, error {max(errors):.1e}, {stages_text}", flush=True)

    if args.exact:
        wanted = torch.randperm(resident.num_passages, generator=torch.Generator().manual_seed(0))[: args.exact]
        wanted = wanted.int().to(device)

        def exact(q: Tensor) -> Tensor:
            scores = engine.score_pids(q[None], wanted)
            if on_gpu:
                torch.cuda.synchronize()
            return scores

        for q in queries[:100]:
            exact(q)
        times = [timed(exact, q) for q in timed_queries]
        figures["exact_100k_ms" if args.exact == 100_000 else f"exact_{args.exact}_ms"] = statistics.median(times)
        some = torch.arange(0, len(wanted), max(1, len(wanted) // 500), device=device)
        error = (judge(queries[0], wanted[some]) - exact(queries[0])[some].cpu()).abs()
        if error[torch.isfinite(error)].max() > SCORE_BUDGET:
            problems.append(f"exact: score error {error.max():.2e}")

    if args.batch:
        params = with_defaults(10)
        batch = queries[torch.arange(args.batch) % len(queries)]
        together = engine.search_batch(batch, params)
        for q, (pids, scores) in zip(batch[:16], together):
            alone = engine.search(q, params)
            if not (torch.equal(alone[0], pids) and torch.equal(alone[1], scores)):
                problems.append("batch: a query's results differ from those alone")
                break
        times = [timed(engine.search_batch, batch, params) for _ in range(20)]
        figures[f"batch{args.batch}_qps"] = args.batch / statistics.median(times) * 1e3

    if on_gpu:
        figures["gpu_bytes_over_index_bytes"] = torch.cuda.max_memory_allocated(device) / plaid_index.nbytes
        figures["gpu_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    print({name: round(value, 4) for name, value in figures.items()}, flush=True)

    # ---- stock beside it
    if not args.no_stock:
        import plaid_tilemaxsim

        plaid_tilemaxsim.enable()  # makes colbert-ai run with today's transformers; stock's code is as it is
        from colbert.infra import ColBERTConfig
        from colbert.search.index_storage import IndexScorer

        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before = gpu_bytes(device)
        start = time.perf_counter()
        stock = IndexScorer(str(args.index), on_gpu)
        figures["stock_load_s"] = time.perf_counter() - start
        print(f"stock loaded in {figures['stock_load_s']:.0f} s", flush=True)
        base = ColBERTConfig.load_from_index(str(args.index))
        oracle = Oracle(plaid_index, dtype=torch.float64, device=device)
        checked = queries[: args.queries_checked]
        side_errors: dict[str, list[dict[str, float]]] = {"ours": [], "stock": []}
        for k in args.k:
            params = with_defaults(k)
            config = ColBERTConfig.from_existing(
                base, ColBERTConfig(ncells=params.ncells, centroid_score_threshold=params.threshold, ndocs=params.ndocs)
            )
            on_device = queries.to(device)
            for q in on_device[: args.warmup]:
                stock.rank(config, q[None])
            times_stock, times_ours = [], []
            for i in range(len(timed_queries)):
                if i % 2:
                    times_ours.append(timed(engine.search, queries[i], params))
                times_stock.append(timed(stock.rank, config, on_device[i : i + 1]))
                if not i % 2:
                    times_ours.append(timed(engine.search, queries[i], params))
            figures[f"stock_p50_ms_k{k}"] = statistics.median(times_stock)
            detail[f"ab_k{k}"] = {"stock_ms": summary(times_stock), "ours_ms": summary(times_ours)}
            passes: list[dict[str, float]] = []
            for i in range(3):
                with stock_marks(stock, on_gpu) as marks:
                    began = time.perf_counter()
                    stock.rank(config, on_device[i : i + 1])
                    marks.append(("topk", time.perf_counter()))
                spent: dict[str, float] = {}
                for stage, at in marks:
                    spent[stage] = spent.get(stage, 0.0) + (at - began) * 1e3
                    began = at
                passes.append(spent)
            detail[f"ab_k{k}"]["stock_stages_ms"] = {s: statistics.median(p[s] for p in passes) for s in passes[0]}
            agreed = agreement(stock, config, engine, params, oracle, checked)
            problems += [f"k={k}: {failure}" for failure in agreed["failures"]]
            detail[f"ab_k{k}"]["agreement"] = agreed
            for side, error in agreed["errors"].items():
                side_errors[side].append(error)
            print(f"k={k}: stock p50 {figures[f'stock_p50_ms_k{k}']:.2f} ms, ours beside it "
                  f"{statistics.median(times_ours):.3f} ms", flush=True)  # fmt: skip
        figures["max_err_vs_oracle"] = max(error["max"] for error in side_errors["ours"])
        figures["mean_err_ours"] = statistics.mean(error["mean"] for error in side_errors["ours"])
        figures["max_err_stock"] = max(error["max"] for error in side_errors["stock"])
        figures["mean_err_stock"] = statistics.mean(error["mean"] for error in side_errors["stock"])
        if on_gpu and figures["mean_err_ours"] > figures["mean_err_stock"]:
            problems.append("our mean error is above stock's")
        if on_gpu:
            figures["stock_gpu_gb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e9
        if args.exact:
            config = ColBERTConfig.from_existing(base)
            given = wanted.tolist()
            listed = torch.tensor(given, dtype=torch.int32, device=device)

            def stock_exact(q: Tensor) -> Tensor:
                with torch.inference_mode():
                    scores: Tensor = stock.score_pids(config, q[None], listed, None)[0]
                    if on_gpu:
                        torch.cuda.synchronize()
                    return scores

            for q in on_device[:2]:
                stock_exact(q)
            times = [timed(stock_exact, q) for q in on_device[:5]]
            name = "stock_exact_100k_ms" if args.exact == 100_000 else f"stock_exact_{args.exact}_ms"
            figures[name] = statistics.median(times)
        del stock, oracle

    if args.host_placement and on_gpu:
        found = [engine.search(q, with_defaults(k)) for k in args.k for q in queries[: args.queries_checked]]
        engine.close()
        del engine, resident, judge
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = gpu_bytes(device)
        hosted = SearchEngine(load_resident(plaid_index, device, "host"))
        repeated = [hosted.search(q, with_defaults(k)) for k in args.k for q in queries[: args.queries_checked]]
        if not all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(found, repeated)):
            problems.append("host placement: results differ from gpu placement")
        for k in args.k:
            params = with_defaults(k)
            times = [timed(hosted.search, q, params) for _ in range(args.repeats) for q in timed_queries]
            figures[f"host_p50_ms_k{k}"] = statistics.median(times)
        figures["host_placement_gpu_gb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e9

    result = {
        "problems": problems[:40],
        "figures": figures,
        "detail": detail,
        "index": described(args.index, plaid_index),
        "queries": len(timed_queries),
        **recorded(args.commit),
    }
    if args.plot:
        plot(result, args.plot)
    conclude(result, args.out)


if __name__ == "__main__":
    main()
