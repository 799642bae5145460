"""How much memory an index needs, on how many GPUs, and how fast searches will be: ``plaid-tilemaxsim plan``.

Memory is counted as ``index.placement`` does. Times are sums of measured pieces, each scaled by what it depends on:

    centroids    centroids, at each k
    candidates   passages, and never below what was measured
    prune        tokens of the candidates, on the line through what the least and the largest k took
    exact        tokens scored, after a time that any number takes
    topk         passages scored
    host         from the call to the first launch and from the last to the lists, once a search

Candidates follow from the mean length of the lists, as many lists being read as were measured. A shard has its share of
passages, tokens and candidates, and all centroids; it scores four times as many passages exactly (see ``merge``).
``measured.json`` holds the pieces and the results file of each: kernels by themselves, and the device's time in the
stages of a search. The measured searches check the sums (tests/test_plan.py).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from plaid_tilemaxsim.funnel import default_params
from plaid_tilemaxsim.index.files import INT32_MAX
from plaid_tilemaxsim.index.placement import plan_for

DIM = 128  # the dimensions that were measured
NBITS = (1, 2, 4)
KS = (10, 100, 1000)
PLACEMENTS = ("gpu", "host")
MOST_TOKENS = 2**20  # of a passage; no encoder makes as many
# Memory of a GPU that the plan counts on; the rest is for CUDA itself, batches and the time of loading.
USABLE = 0.9


def measured(gpu: str) -> dict[str, Any]:
    """The pieces of a GPU by name. ValueError with the names of those that were measured."""
    files = json.loads(resources.files("plaid_tilemaxsim").joinpath("measured.json").read_text())
    if gpu not in files:
        raise ValueError(f"gpu: expected one that was measured, of {sorted(files)}, got {gpu!r}")
    return {name: piece["value"] for name, piece in files[gpu].items()}


@dataclass(frozen=True)
class Sizes:
    """What ``index.placement.plan_for`` asks of an index."""

    num_passages: int
    num_tokens: int
    num_centroids: int
    nbits: int
    entries: int  # of all lists
    dim: int = DIM

    @property
    def ivf_pids(self) -> Tensor:
        return torch.empty(self.entries, dtype=torch.int32, device="meta")

    def shard(self, n: int) -> Sizes:
        """The largest of n shards."""
        passages, tokens, entries = (-(-size // n) for size in (self.num_passages, self.num_tokens, self.entries))
        return Sizes(passages, tokens, self.num_centroids, self.nbits, entries, self.dim)


@dataclass(frozen=True)
class Search:
    """One search of the largest shard. Times in milliseconds; those of the GPU by stage."""

    mode: str
    k: int
    candidates: float
    stages: Mapping[str, float]
    host: float
    sending: float  # to all shards and back, and the merge; 0 for one shard
    merging: float  # the part of it that is the coordinator's work
    beside: float  # searches of a batch that a GPU does in the time of one alone

    @property
    def gpu(self) -> float:
        return sum(self.stages.values())

    @property
    def latency(self) -> float:
        return self.gpu + self.host + self.sending

    @property
    def queries_per_s(self) -> float:
        """Of batches, which keep the GPUs busy, where enough coordinators merge."""
        return 1e3 / self.gpu * self.beside

    @property
    def coordinators(self) -> int:
        """Threads that merge as fast as the GPUs answer."""
        return max(1, math.ceil(self.merging / self.gpu * self.beside))


def sizes_of(passages: int, avg_len: float, nbits: int, gpu: str, centroids: int | None = None) -> Sizes:
    """centroids: None for as many as colbert-ai takes, the power of two below 16 sqrt(tokens). Raises ValueError."""
    for name, value in (
        ("passages", passages),
        ("avg-len", avg_len),
        ("centroids", 1 if centroids is None else centroids),
    ):
        if not value >= 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if passages > INT32_MAX:
        raise ValueError(
            f"passages: expected at most {INT32_MAX}, since an index numbers them in int32, got {passages}"
        )
    if avg_len > MOST_TOKENS:
        raise ValueError(f"avg-len: expected at most {MOST_TOKENS} tokens, got {avg_len:g}")
    if nbits not in NBITS:
        raise ValueError(f"nbits: expected one of {NBITS}, which were measured, got {nbits}")
    tokens = round(passages * avg_len)
    if centroids is None:
        centroids = 2 ** int(math.log2(16 * math.sqrt(tokens)))
    return Sizes(passages, tokens, centroids, nbits, round(tokens * _entries(measured(gpu)) / measured(gpu)["tokens"]))


def memory(sizes: Sizes, placement: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part on the GPU and in pinned host memory."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {PLACEMENTS}, got {placement!r}")
    planned = plan_for(sizes, placement)  # type: ignore[arg-type]
    return dict(planned.device), dict(planned.host)


def shards_needed(sizes: Sizes, placement: str, gpu: str) -> int:
    """The fewest shards of which each fits into USABLE of a GPU. ValueError where centroids alone do not."""
    room = USABLE * measured(gpu)["memory_bytes"]

    def needs(n: int) -> int:
        return sum(memory(sizes.shard(n), placement)[0].values())

    if needs(sizes.num_passages) > room:
        raise ValueError(f"centroids: expected what fits into {room:.0f} bytes, got {sizes.num_centroids}")
    n = max(1, int(needs(1) // room))
    while needs(n) > room:
        n += 1
    return n


def search(sizes: Sizes, shards: int, mode: str, k: int, gpu: str, placement: str = "gpu") -> Search | None:
    """What a search will take; None where nothing was measured that tells (host memory, in other modes than plaid)."""
    m = measured(gpu)
    if placement == "host" and mode != "plaid":
        return None
    part = sizes.shard(shards)
    length = part.num_tokens / part.num_passages
    lists = (part.entries / part.num_centroids) / (_entries(m) / m["centroids"])
    candidates = min(m[f"candidates_k{k}"] * lists, part.num_passages)
    # Tokens of passages taken from here and there, and of all in their order, a millisecond.
    whole = 1e6 * m[f"residual{part.nbits}_gtok"]
    scattered = 100_000 * m["tokens"] / m["passages"] / m["exact_100k_ms"] * whole / (1e6 * m["residual2_gtok"])
    grown = part.num_passages / m["passages"]
    centroids, ndocs = part.num_centroids / m["centroids"], default_params(k)[2]
    stages_ms, lengthened = m[f"plaid_k{k}_stages_ms"], length * m["passages"] / m["tokens"]
    stages = {"centroids": stages_ms["centroids"] * centroids, "candidates": stages_ms["candidates"] * max(1, grown)}
    if mode == "plaid":
        few, many = (m[f"plaid_k{one}_stages_ms"]["prune"] for one in (KS[0], KS[-1]))
        fewest, most = (m[f"candidates_k{one}"] for one in (KS[0], KS[-1]))
        each = (many - few) / (most - fewest)
        stages["prune"] = few + (candidates * lengthened - fewest) * each
        kept = min(ndocs, candidates)
        scored = kept if shards > 1 else min(ndocs // 4, kept)
        each = (m["residual_fp32_us_1024"] - m["residual_fp32_us_64"]) / (1024 - 64) / 1e3
        stages["exact"] = m["plaid_k10_stages_ms"]["exact"] + max(0, scored * lengthened - 64) * each
        stages["topk"] = stages_ms["topk"]
        if placement == "host":
            fetched = m[f"host_p50_ms_k{k}"] - m[f"search_p50_ms_k{k}"]
            stages["host memory"] = fetched * (4 if shards > 1 else 1)
    elif mode == "rerank":
        stages["exact"] = candidates * length / scattered
        stages["topk"] = m["rerank_topk_ms"]
    elif mode == "exhaustive":
        candidates = part.num_passages
        stages = {"centroids": m["centroid_scores_ms"] * centroids, "exact": part.num_tokens / whole}
        stages["topk"] = m["exhaustive_topk_ms"] * grown
    else:
        raise ValueError(f"mode: expected plaid, rerank or exhaustive, got {mode!r}")
    host = statistics.median(m[f"search_p50_ms_k{one}"] - sum(m[f"plaid_k{one}_stages_ms"].values()) for one in KS)
    # What one search leaves idle, others of its batch use; not where one reads the memory at its limit.
    beside = m["batch64_qps"] / 1e3 * sum(m["plaid_k10_stages_ms"].values()) if mode == "plaid" else 1.0
    sending = merging = 0.0
    if shards > 1:
        # Answers of plaid hold ndocs passages, which was measured, others k.
        share = shards / m["shards_merged"] * (1 if mode == "plaid" else k / ndocs)
        merging = m[f"merge_ms_k{k}"] * share
        sending = m[f"round_trip_ms_k{k}"] + merging
    return Search(mode, k, candidates, stages, host, sending, merging, beside)


def describe(
    passages: int,
    avg_len: float,
    nbits: int = 2,
    gpu: str = "h200",
    *,
    placement: str = "gpu",
    centroids: int | None = None,
    shards: int | None = None,
    gpus_per_machine: int = 8,
) -> str:
    """The plan as text. shards: None for as few as fit. Raises ValueError for what was not measured."""
    m, sizes = measured(gpu), sizes_of(passages, avg_len, nbits, gpu, centroids)
    for name, value in (("shards", 1 if shards is None else shards), ("gpus-per-machine", gpus_per_machine)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    n = shards_needed(sizes, placement, gpu) if shards is None else shards
    if n > passages:
        raise ValueError(f"shards: expected at most one for each of the {passages} passages, got {n}")
    on_gpu, on_host = memory(sizes.shard(n), placement)
    room = USABLE * m["memory_bytes"]
    # Centroids and what else does not depend on the passages is in every shard.
    total = {name: n * size for name, size in on_gpu.items()}
    lines = [
        f"{sizes.num_passages:,} passages of {avg_len:g} tokens, {nbits} bits, {DIM} dimensions, on {m['name']}",
        f"  tokens      {sizes.num_tokens:,}",
        f"  centroids   {sizes.num_centroids:,}",
        f"  lists       {sizes.entries:,} entries",
        "",
        f"memory, GB, placement {placement}   {'all shards':>12} {'one of ' + str(n):>12}",
    ]
    lines += [f"  {name:<29} {total[name] / 1e9:12.1f} {size / 1e9:12.2f}" for name, size in on_gpu.items()]
    device = sum(on_gpu.values())
    lines.append(f"  {'GPU':<29} {n * device / 1e9:12.1f} {device / 1e9:12.2f}")
    if on_host:
        pinned = sum(on_host.values())
        lines.append(f"  {'pinned on the host':<29} {n * pinned / 1e9:12.1f} {pinned / 1e9:12.2f}")
    fits = "" if device <= room else "; a shard DOES NOT FIT"
    machines = -(-n // gpus_per_machine)
    loaded = (device + sum(on_host.values())) / 1e9 / m["load_gb_per_s"]
    lines += [
        "",
        f"shards      {n}, a GPU each; machines of {gpus_per_machine} GPUs: {machines}; {room / 1e9:.1f} of a GPU's "
        f"{m['memory_bytes'] / 1e9:.1f} GB are counted on{fits}",
        f"loading     {loaded:.0f} s a shard, side by side",
        "",
        f"ms a search, 32 tokens   {'candidates':>12} {'GPU':>8} {'host':>8} {'sending':>8} {'latency':>8} "
        f"{'queries/s':>10} {'mergers':>8}",
    ]
    for mode in ("plaid", "rerank", "exhaustive"):
        for k in KS if mode != "exhaustive" else KS[-1:]:
            found = search(sizes, n, mode, k, gpu, placement)
            name = f"  {mode + ', k = ' + str(k):<22}"
            if found is None:
                lines.append(f"{name} not measured with residuals in host memory")
                continue
            lines.append(
                f"{name} {found.candidates:12,.0f} {found.gpu:8.2f} {found.host:8.2f} {found.sending:8.2f} "
                f"{found.latency:8.2f} {found.queries_per_s:10,.0f} {found.coordinators:8}"
            )
    lines += [
        "",
        "candidates are those of one shard; queries/s are of batches, by all shards together, with as many threads to",
        "merge as the last column says.",
    ]
    if n > 1:
        lines += [
            f"sending: a Ray request and the merge of {n} answers, measured between processes of one machine with CPUs",
            "alone: no network, no GPUs.",
        ]
    if sizes.num_centroids > m["centroids"]:
        table, known = (2 * 32 * count / 1e6 for count in (sizes.num_centroids, m["centroids"]))
        lines += [
            f"Beyond what was measured: a query's table of centroid scores takes {table:.0f} MB, in the measurements",
            f"{known:.0f} MB, which the L2 cache holds. Expect prune and exact to take longer than this, or make an",
            f"index with {m['centroids']:,} centroids (--centroids), whose lists are longer.",
        ]
    return "\n".join(lines)


def _entries(m: Mapping[str, Any]) -> float:
    """Of all lists of the measured index, from the bytes of its files (see ``PlaidIndex.nbytes``)."""
    tokens, passages, centroids, dim, nbits = (m[name] for name in ("tokens", "passages", "centroids", "dim", "nbits"))
    buckets = 4 * (2 ** (nbits + 1) - 1)
    rest = 2 * centroids * dim + buckets + 4 * passages + 8 * centroids + tokens * (4 + dim * nbits // 8)
    return float((m["index_bytes"] - rest) / 4)
