"""One index cut into shards: contiguous passages with about equally many tokens, each an index of its own.

A shard numbers its passages from 0 and knows all centroids. What depends on the whole index is the same in every
shard: inverse norms in 16 bits are steps over the range of all shards, so scores have the bits of one device's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plaid_tilemaxsim.index.checks import check_pid_lists
from plaid_tilemaxsim.index.files import Chunk, PlaidIndex
from plaid_tilemaxsim.index.mapped import MappedRows
from plaid_tilemaxsim.index.placement import CODECS, available_memory, check_codec, plan_for
from plaid_tilemaxsim.index.pq import PQ
from plaid_tilemaxsim.index.resident import (
    ResidentIndex,
    inverse_norm_range,
    load_resident,
    quantised_inverse_norms,
)

log = logging.getLogger("plaid_tilemaxsim")

# Entries of lists that are copied at once: bounds the temporaries, some 32 bytes each.
LIST_ENTRIES = 1 << 22


@dataclass(frozen=True, eq=False)
class ShardedIndex:
    """Resident shards in the order of their passages, with what a caller asks an index about the whole."""

    shards: tuple[ResidentIndex, ...]  # none without passages, unless there is but one
    starts: tuple[int, ...]  # first passage of each shard

    @property
    def device(self) -> torch.device:
        """Of the first shard: where requests come in and results are merged."""
        return self.shards[0].device

    @property
    def placement(self) -> str:
        return self.shards[0].placement

    @property
    def codec(self) -> str:
        return self.shards[0].codec

    @property
    def dim(self) -> int:
        return self.shards[0].dim

    @property
    def num_passages(self) -> int:
        return sum(shard.num_passages for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_centroids(self) -> int:
        return self.shards[0].num_centroids

    @property
    def centroids(self) -> Tensor:
        return self.shards[0].centroids

    @property
    def device_bytes(self) -> int:
        return sum(shard.device_bytes for shard in self.shards)


def shard_bounds(offsets: Tensor, n: int) -> list[int]:
    """Ascending passages at which to cut into at most ``n`` shards, from 0 to N: shards by ``itertools.pairwise``.

    offsets: int64 [N + 1] token offsets. Every shard has tokens (an index without any is one shard), so there are
    fewer than ``n`` where there are fewer passages with tokens. Raises ValueError unless n >= 1.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n: expected an integer >= 1, got {n!r}")
    N, T = offsets.numel() - 1, int(offsets[-1])
    at = (torch.arange(1, n, dtype=torch.float64) * (T / n)).to(offsets.device)
    after = torch.searchsorted(offsets.double(), at).clamp_(max=N)
    before = (after - 1).clamp_(min=0)
    nearer = (at - offsets[before]) <= (offsets[after] - at)
    bounds, tokens = [0], 0
    for cut in torch.where(nearer, before, after).tolist():
        here = int(offsets[cut])
        if tokens < here < T:
            bounds.append(cut)
            tokens = here
    return [*bounds, N]


def part_of(index: PlaidIndex, begin: int, end: int) -> PlaidIndex:
    """Passages ``begin`` .. ``end - 1`` as an index of their own; codes and residuals are views of those of ``index``.

    Raises ValueError for lists that are not strictly ascending within the index, which are read for this.
    """
    if not 0 <= begin <= end <= index.num_passages:
        raise ValueError(f"passages: expected 0 <= begin <= end <= {index.num_passages}, got {begin} and {end}")
    return parts_of(index, [begin, end])[0]


def parts_of(index: PlaidIndex, bounds: Sequence[int]) -> list[PlaidIndex]:
    """``part_of`` for every pair of neighbouring bounds."""
    if list(bounds) == [0, index.num_passages]:
        return [index]
    check_pid_lists(index.ivf_pids, index.ivf_offsets, index.num_passages, index.ivf_file)
    return [unchecked_part(index, begin, end) for begin, end in itertools.pairwise(bounds)]


def unchecked_part(index: PlaidIndex, begin: int, end: int) -> PlaidIndex:
    """``part_of`` for lists that were checked before; holds the part's lists, and reads no others."""
    first, last = int(index.offsets[begin]), int(index.offsets[end])
    chunks = []
    for chunk in index.chunks:
        pid = max(begin, chunk.pid_start), min(end, chunk.pid_start + chunk.num_passages)
        token = max(first, chunk.token_start), min(last, chunk.token_start + chunk.num_tokens)
        if pid[0] < pid[1]:
            rows = slice(token[0] - chunk.token_start, token[1] - chunk.token_start)
            codes, residuals = chunk.codes[rows], chunk.residuals[rows]
            numbers = pid[0] - begin, token[0] - first, pid[1] - pid[0], token[1] - token[0]
            chunks.append(Chunk(chunk.codes_file, *numbers, codes, residuals))
    # The lists ascend, so a shard's share of each is a range of it.
    before = _entries_below(index, begin)
    shares = _entries_below(index, end) - before
    ivf_offsets = torch.zeros_like(index.ivf_offsets)
    torch.cumsum(shares, 0, out=ivf_offsets[1:])
    ivf_pids = torch.empty(int(ivf_offsets[-1]), dtype=index.ivf_pids.dtype)
    # Of every list, how far its share moves to the front.
    moved = index.ivf_offsets[:-1] + before - ivf_offsets[:-1]
    for done in range(0, ivf_pids.numel(), LIST_ENTRIES):
        place = torch.arange(done, min(done + LIST_ENTRIES, ivf_pids.numel()))
        lists = torch.searchsorted(ivf_offsets, place, right=True) - 1
        ivf_pids[place] = index.ivf_pids[place + moved[lists]] - begin
    return replace(
        index,
        doclens=index.doclens[begin:end],
        offsets=index.offsets[begin : end + 1] - first,
        ivf_pids=ivf_pids,
        ivf_offsets=ivf_offsets,
        chunks=tuple(chunks),
        files=(),
    )


def _entries_below(index: PlaidIndex, pid: int) -> Tensor:
    """Of every centroid's list, how many passages are before ``pid``: int64 [C], by bisection of all lists at once."""
    starts, low, high = index.ivf_offsets[:-1], index.ivf_offsets[:-1].clone(), index.ivf_offsets[1:].clone()
    while bool((low < high).any()):
        middle = (low + high) // 2
        # where low == high, middle may lie behind the last list
        below = (low < high) & (index.ivf_pids[middle.clamp(max=index.ivf_pids.numel() - 1)] < pid)
        low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
    return low - starts


def load_shards(
    index: PlaidIndex,
    devices: Sequence[torch.device | str],
    placement: str = "auto",
    progress: bool = True,
    *,
    codec: str = "residual",
    pq: PQ | None = None,
    shared: Sequence[ShardedIndex] = (),
) -> ShardedIndex:
    """Lays the index out over devices of one type, a shard each; a device may be named more than once.

    Memory is planned on all devices before anything is laid out, and placement "auto" is the first that fits on all.
    shared: layouts of the same index on the same devices. The rest is as for ``index.resident.load_resident``; raises
    as that does, and ValueError for devices of several types.
    """
    places = [torch.device(device) for device in devices]
    if len({place.type for place in places}) != 1:
        raise ValueError(f"devices: expected one or more of one type, got {[str(place) for place in places]}")
    check_codec(codec, "auto")
    bounds = shard_bounds(index.offsets, len(places))
    parts = parts_of(index, bounds)
    places = places[: len(parts)]
    layouts = [one for one in shared if [shard.device for shard in one.shards] == places]
    if places[0].type == "cuda" and len(parts) > 1 and not layouts:
        placement = _common_placement(parts, places, placement, codec, None if pq is None else pq.m)
    tokens = index.offsets[bounds].tolist()
    shards: list[ResidentIndex] = []
    for i, (part, place) in enumerate(zip(parts, places, strict=True)):
        codes = None if pq is None else replace(pq, codes=pq.codes[tokens[i] : tokens[i + 1]])
        beside = [one.shards[i] for one in layouts]
        shard = load_resident(part, place, placement, progress, codec=codec, pq=codes, shared=beside, norms=False)
        same = next((other for other in shards if other.device == shard.device), shard)
        shards.append(replace(shard, centroids=same.centroids))
    if codec == "residual":
        shards = with_inverse_norms(shards)
    return ShardedIndex(tuple(shards), tuple(bounds[:-1]))


def with_inverse_norms(shards: Sequence[ResidentIndex]) -> list[ResidentIndex]:
    """The shards with inverse norms in steps over the range of all of them, those that have norms as they are."""
    missing = [shard for shard in shards if shard.inv_norms is None]
    ranges = []
    with torch.inference_mode(False), torch.no_grad():
        for shard in missing:
            with _current(shard.device):
                ranges.append(inverse_norm_range(*_stored(shard)))
        known = [one for one in ranges if one is not None]
        within = (min(low for low, _ in known), max(high for _, high in known)) if known else None
        whole = []
        for shard in shards:
            if shard.inv_norms is None:
                with _current(shard.device):
                    norms, low, step = quantised_inverse_norms(*_stored(shard), within=within)
                shard = replace(shard, inv_norms=norms, inv_norm_lo=low, inv_norm_step=step)
            whole.append(shard)
    return whole


def _stored(shard: ResidentIndex) -> tuple[Tensor, Tensor | MappedRows, Tensor, Tensor, int]:
    assert shard.residuals is not None
    return shard.codes, shard.residuals, shard.centroids, shard.bucket_weights, shard.nbits


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _common_placement(
    parts: Sequence[PlaidIndex], places: Sequence[torch.device], placement: str, codec: str, pq_m: int | None
) -> str:
    """The placement asked for, or for "auto" the first that fits. RuntimeError where none fits on all devices."""
    names = CODECS[codec] if placement == "auto" else (placement,)
    free = {place: _free_bytes(place) for place in places}
    pinnable = available_memory() * 9 // 10
    short = []
    for name in names:
        check_codec(codec, name)
        needed: Counter[torch.device] = Counter()
        pinned = 0
        for part, place in zip(parts, places, strict=True):
            planned = plan_for(part, name, codec, pq_m=pq_m)
            needed[place] += planned.device_bytes
            pinned += planned.host_bytes
        tight = [f"{place}: {size} bytes, {free[place]} free" for place, size in needed.items() if size > free[place]]
        if pinned > pinnable:
            tight.append(f"host memory: {pinned} bytes to pin, {pinnable} available")
        if not tight:
            log.info("%s: %d shards, placement %s, bytes %s", parts[0].path, len(parts), name, dict(needed))
            return name
        short.append(f"{name} ({'; '.join(tight)})")
    raise RuntimeError(f"{parts[0].path}: expected memory for {len(parts)} shards, got too little: {', '.join(short)}")


def _free_bytes(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
