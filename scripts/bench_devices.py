"""One index on several devices beside one of them, in one process: equal answers first, then times.

    python scripts/bench_devices.py --index INDEX --queries Q.pt --devices 0,1 --out eval/results/h200_x2.json

``Q.pt`` holds encoded queries, fp32 [n, LQ, DIM], or a dict with them as "Q". The run counts as correct only if shards
and replicas return the bits of one device in every mode, alone and in batches, with a mask, a filter and given pids,
and if the same check rejects the answers of another query. Figures:

    latency_ratio        median of a search in mode plaid on all devices over that on one: the worst k
    exhaustive_scaling   median of a scan of the whole index on one device over that on all
    batch_scaling        queries a second of batches over replicas, one a device, over those on one device: of the first
                         size of --batch, and of every size as batch_scaling_SIZE

The detail says where a sharded search in mode plaid spends its time: ``host_us``, microseconds of the host between the
steps of one search; ``device_us``, each graph by itself on its device, launched before it may start; ``alone_us``, each
launched and waited for by itself. Likewise ``launch`` of a batch, in milliseconds, on each device and on all at once,
and ``batch.shares_ms``, of each replica's share of the batch by itself.

With one GPU, ``--devices 0,0`` checks the same code: two shards, and two replicas, on that GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from eval.latency import summary
from plaid_tilemaxsim.config import ScorerConfig
from plaid_tilemaxsim.device_search import unpacked
from plaid_tilemaxsim.engine import SearchEngine, SearchParams, with_defaults
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.replicas import Replicas, build_engine, resolve_devices
from plaid_tilemaxsim.sharded import ShardedEngine, _keeps
from scripts.ab_latency import conclude, described, recorded, timed

Answer = tuple[Tensor, Tensor]


def same(a: Answer, b: Answer) -> bool:
    """To the bit."""
    return torch.equal(a[0], b[0]) and torch.equal(a[1].view(torch.int32), b[1].view(torch.int32))


def differences(one: SearchEngine, several: SearchEngine, queries: Tensor, params: SearchParams) -> list[str]:
    """What the engines answer differently."""
    N = one.index.num_passages
    mask = torch.rand(N, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[: N // 3] = False
    given = torch.randint(0, N, (1000,), generator=torch.Generator().manual_seed(1))
    calls: dict[str, dict[str, Any]] = {
        "search": {},
        "mask": {"allow": mask},
        "filter": {"filter_fn": lambda pids: pids[pids % 3 == 0]},
        "pids": {"pids": given},
    }
    found = []
    for name, filters in calls.items():
        wanted = [one.search(q, params, **filters) for q in queries]
        if not all(same(several.search(q, params, **filters), want) for q, want in zip(queries, wanted)):
            found.append(name)
        if len(queries) > 1 and same(wanted[0], wanted[1]):
            found.append(f"{name}: the answers of two queries are not told apart")
    wanted = [one.search(q, params) for q in queries]
    if not all(map(same, several.search_batch(queries, params), wanted)):
        found.append("batch")
    if one.device.type == "cuda":
        on_device = queries.to(one.device)
        if not all(same(several.search(q, params), want) for q, want in zip(on_device, wanted)):
            found.append("queries on the device")
    if not torch.equal(several.score_pids(queries[:1], given).cpu(), one.score_pids(queries[:1], given).cpu()):
        found.append("score_pids")
    return found


def in_turns(engines: dict[str, SearchEngine], work: Any, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of ``work(engine)``, a list of them, of each engine in turn; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeats + 1):
        for name, engine in engines.items():
            spent = work(engine)
            if turn:
                times[name] += spent
    return times


def on_device(graph: Any, stream: torch.cuda.Stream, repeats: int = 20) -> dict[str, float]:
    """Microseconds of a replay: on the device, on the host until it has been launched, and until it is done."""
    spent: dict[str, list[float]] = {"device": [], "enqueue": [], "alone": []}
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # about a millisecond, so that what follows is there when it ends
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            spent["device"].append(begin.elapsed_time(end) * 1e3)
            began = time.perf_counter()
            graph.replay()
            spent["enqueue"].append((time.perf_counter() - began) * 1e6)
            stream.synchronize()
            spent["alone"].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(us) for name, us in spent.items()}


def breakdown(several: SearchEngine, queries: Tensor, params: SearchParams) -> dict[str, dict[str, float]]:
    """Medians in microseconds of one search over shards; nothing where it takes other ways than a graph a shard."""
    shards: Any = several._device_search
    if not shards._joins:
        return {}
    keeps = _keeps(params)
    steps: dict[str, list[float]] = {}
    last = 0.0

    def mark(step: str) -> None:
        nonlocal last
        steps.setdefault(step, []).append((time.perf_counter() - last) * 1e6)
        last = time.perf_counter()

    with torch.no_grad(), shards._turn():
        plan = shards._plan("shard" if len(keeps) > 1 else "search", queries.size(1), params, keeps)
        if plan is None:
            return {}
        for Q in queries.split(1):
            last = time.perf_counter()
            shards._planned(plan, Q, mark)
        graphs = {f"shard {s}": on_device(one, shards._streams[s]) for s, one in enumerate(plan.recordings)}
        both = {"merge": plan.merging, "whole": plan.whole}
        graphs |= {name: on_device(one, shards._streams[0]) for name, one in both.items()}
    return {
        "host_us": {step: statistics.median(us) for step, us in steps.items()},
        **{f"{what}_us": {name: us[what] for name, us in graphs.items()} for what in ("device", "enqueue", "alone")},
    }


def launch(engine: SearchEngine, batch: Tensor, params: SearchParams) -> dict[str, Any]:
    """Milliseconds of one launch of a batch, of four in a row until each is enqueued, and of unpacking answers."""
    search: Any = engine._device_search
    with torch.no_grad(), search._turn():
        lanes = search.batch_lanes(batch.size(1), len(batch))
        recording = search._recording("search", batch.size(1), params, lanes=lanes)
        spent = on_device(recording, torch.cuda.current_stream())
        in_a_row = [timed(recording.replay) for _ in range(4)]
        rows = recording.output.cpu()
    unpacking = statistics.median(timed(unpacked, rows, 2) for _ in range(20))
    milliseconds = {name: us / 1e3 for name, us in spent.items()}
    return {"lanes": lanes, **milliseconds, "in_a_row": in_a_row, "unpack": unpacking}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--devices", required=True, help="GPU numbers or cpu, with commas; the first one is also alone")
    parser.add_argument("--placement", default="auto", choices=["auto", "gpu", "host", "disk"])
    parser.add_argument("--k", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 256], help="queries (default: %(default)s)")
    parser.add_argument("--queries-timed", type=int, default=50)
    parser.add_argument("--queries-checked", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="of this code, for the record, where there is no checkout to ask")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)

    words = [int(word) if word.isdecimal() else word for word in args.devices.split(",")]
    places = resolve_devices(ScorerConfig(devices=words).devices, 1, False)[0]  # type: ignore[arg-type]
    queries = torch.load(args.queries, weights_only=True)
    queries = (queries["Q"] if isinstance(queries, dict) else queries).float()
    timed_queries, checked = queries[: args.queries_timed], queries[: args.queries_checked]
    figures: dict[str, float] = {"devices": len(places), "distinct_devices": len(set(places))}
    detail: dict[str, Any] = {"devices": [str(place) for place in places]}
    problems: list[str] = []

    index = read_index(args.index, verify="structure")
    one = SearchEngine(load_resident(index, places[0], args.placement))
    began = time.perf_counter()
    several = build_engine(index, [places], args.placement)
    figures["shards_load_s"] = time.perf_counter() - began
    detail["shard_bytes"] = [shard.device_bytes for shard in getattr(several.index, "shards", ())]
    engines = {"one": one, "shards": several}

    modes = {f"plaid_k{k}": with_defaults(k) for k in args.k}
    modes["rerank"] = with_defaults(100, mode="rerank")
    modes["exhaustive"] = with_defaults(1000, mode="exhaustive")
    modes["prefilter"] = with_defaults(100, mode="exhaustive", prefilter=10_000)
    for name, params in modes.items():
        problems += [f"shards: {name}: {what}" for what in differences(one, several, checked, params)]
    print(f"checked {len(modes)} modes on {len(places)} shards: {problems or 'equal'}", flush=True)
    for name, params in modes.items():
        few = timed_queries if name.startswith("plaid") else timed_queries[:10]
        times = in_turns(engines, lambda e: [timed(e.search, q, params) for q in few], args.repeats)  # noqa: B023
        detail[name] = {engine: summary(ms) for engine, ms in times.items()}
        for engine, ms in times.items():
            figures[f"{name}_p50_ms_{engine}"] = statistics.median(ms)
        if name.startswith("plaid") and places[0].type == "cuda":
            stages = [several.profile(q, params) for q in queries[:3]]
            detail[name]["stages_ms"] = {s: statistics.median(x[s] for x in stages) for s in stages[0]}
            alone = [one.profile(q, params) for q in queries[:3]]
            detail[name]["stages_ms_one"] = {s: statistics.median(x[s] for x in alone) for s in alone[0]}
            if isinstance(several, ShardedEngine):
                detail[name] |= breakdown(several, timed_queries, params)
            print(name, {what: detail[name].get(what) for what in ("host_us", "device_us", "alone_us")}, flush=True)
        print(name, {e: round(statistics.median(ms), 4) for e, ms in times.items()}, flush=True)

    params = with_defaults(args.k[0])
    batches = [queries[torch.arange(size) % len(queries)] for size in args.batch]
    shards_ms = in_turns(engines, lambda e: [timed(e.search_batch, batches[0], params)], args.repeats)
    figures["batch_qps_shards"] = args.batch[0] / statistics.median(shards_ms["shards"]) * 1e3
    several.close()
    del several, engines
    gc.collect()
    copies = Replicas([one, *(SearchEngine(load_resident(index, place, args.placement)) for place in places[1:])])
    for name, params in modes.items():
        problems += [f"replicas: {name}: {what}" for what in differences(one, copies, checked, params)]
    params = with_defaults(args.k[0])
    both = {"one": one, "replicas": copies}
    for batch in reversed(batches):  # the first one's figures stay
        size = len(batch)
        if not all(map(same, copies.search_batch(batch, params), one.search_batch(batch, params))):
            problems.append(f"replicas: a batch of {size}")
        batch_ms = in_turns(both, lambda e: [timed(e.search_batch, batch, params)], args.repeats)  # noqa: B023
        qps = {engine: size / statistics.median(ms) * 1e3 for engine, ms in batch_ms.items()}
        figures |= {f"batch_qps_{engine}": value for engine, value in qps.items()}
        figures["batch_scaling"] = figures[f"batch_scaling_{size}"] = qps["replicas"] / qps["one"]
        # What each replica gets of it, by itself: beyond the longest, the batch takes what they cost each other.
        shares = [
            statistics.median(timed(engine.search_batch, part, params) for _ in range(args.repeats + 1))
            for engine, part in zip(copies.engines, batch.tensor_split(len(copies.engines)))
        ]
        detail["batch"] = detail[f"batch_{size}"] = {
            "queries": size, "k": args.k[0], **{e: summary(ms) for e, ms in batch_ms.items()}, "shares_ms": shares,
        }  # fmt: skip
        print(f"batch of {size}", qps, "shares", shares, flush=True)
    if places[0].type == "cuda":
        with ThreadPoolExecutor(len(copies.engines)) as pool:
            each = list(pool.map(lambda engine: launch(engine, batch, params), copies.engines))
        detail["launch"] = {"alone": [launch(engine, batch, params) for engine in copies.engines], "at_once": each}
        detail["peers"] = [torch.cuda.can_device_access_peer(a, b) for a in places for b in places if a != b]
        print("launch", detail["launch"], "peers", detail["peers"], flush=True)

    ratios = {k: figures[f"plaid_k{k}_p50_ms_shards"] / figures[f"plaid_k{k}_p50_ms_one"] for k in args.k}
    figures |= {f"latency_ratio_k{k}": ratio for k, ratio in ratios.items()}
    figures["latency_ratio"] = max(ratios.values())
    figures["rerank_scaling"] = figures["rerank_p50_ms_one"] / figures["rerank_p50_ms_shards"]
    figures["exhaustive_scaling"] = figures["exhaustive_p50_ms_one"] / figures["exhaustive_p50_ms_shards"]
    conclude(
        {
            "problems": problems[:40],
            "figures": figures,
            "detail": detail,
            "index": described(args.index, index),
            "queries": len(timed_queries),
            **recorded(args.commit),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
