"""Merge what the shards of an index found into the answer that the whole index would give.

A shard answers a query with one row of int32: how many passages, their pids (numbered from 0 in every shard), then
one or more columns of fp32 scores, each with the same room. The columns before the last are those that passages are
pruned by; the cut at the best ``keep`` is made here, over all shards, as one device makes it:

    key(p)   = (order-preserving image of the score, -pid)             int64, the smallest one for "no passage"
    place(p) = how many keys are larger                                 a passage with place < keep stays

Places are a permutation, so every passage that stays writes its number and its key of the next column where it belongs
(as ``rank_kernel`` does), and after the last column its pid and score; "no passage" comes last everywhere. Quadratic,
but one short launch a cut; above ``LIMIT`` entries a sort finds the places. Counts are read on the device: nothing
waits for the host.

A shard can tell which of its passages no merge will keep: p is out where ``keep`` of the shard's own passages are ahead
of it in the first column and in the second. Those ahead in the first survive the first cut if p does, and then leave p
no place in the second.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 128  # entries whose keys one program writes
BLOCK_I = 16
BLOCK_J = 256
LIMIT = 8192  # entries that are placed by counting
_NONE = tl.constexpr(-9223372036854775808)  # below the key of every score, -inf included


@triton.jit
def _key(score, pid):
    # as everywhere, NaN counts as -inf and -0.0 as 0.0
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - pid).to(tl.int64)


@triton.jit
def _emit(
    rows_ptr, table_ptr, keys_ptr, ids_ptr, packed_ptr, id, to, mask, lane, most, room,
    COLUMN: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    # entry `id`, number id % most of shard id // most, to place `to`: its key of COLUMN and its id, or the answer
    shard = id // most
    at = table_ptr + 4 * shard
    row = rows_ptr + tl.load(at, mask=mask, other=0) + lane * tl.load(at + 1, mask=mask, other=0)
    cap = tl.load(at + 2, mask=mask, other=0)
    j = id - shard * most
    live = mask & (j < cap)
    live = live & (j < tl.load(row, mask=live, other=0))
    pid = tl.load(row + 1 + j, mask=live, other=0) + tl.load(at + 3, mask=mask, other=0).to(tl.int32)
    bits = tl.load(row + 1 + (1 + COLUMN) * cap + j, mask=live, other=0)
    if LAST:
        tl.store(packed_ptr + 1 + to, pid, mask=live)
        tl.store(packed_ptr + 1 + room + to, bits, mask=live)
    else:
        tl.store(keys_ptr + to, tl.where(live, _key(bits.to(tl.float32, bitcast=True), pid), _NONE), mask=mask)
        tl.store(ids_ptr + to, id, mask=mask)


@triton.jit
def _store_count(rows_ptr, table_ptr, packed_ptr, lane, room, shards, SHARDS_P: tl.constexpr):
    # passages that all shards found and that there is room for, by the first program
    s = tl.arange(0, SHARDS_P)
    at = table_ptr + 4 * s
    row = tl.load(at, mask=s < shards, other=0) + lane * tl.load(at + 1, mask=s < shards, other=0)
    found = tl.sum(tl.load(rows_ptr + row, mask=s < shards, other=0), 0)
    tl.store(packed_ptr, tl.minimum(found, room), mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["n", "most"])
def _keys_kernel(
    rows_ptr, table_ptr, keys_ptr, ids_ptr, n, most, COLUMN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _emit(
        rows_ptr, table_ptr, keys_ptr + lane * n, ids_ptr + lane * n, ids_ptr, i, i, i < n, lane, most, n,
        COLUMN=COLUMN, LAST=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "room", "most", "shards"])
def _place_kernel(
    keys_ptr, ids_ptr, rows_ptr, table_ptr, next_keys_ptr, next_ids_ptr, packed_ptr, n, room, most, shards,
    COLUMN: tl.constexpr, LAST: tl.constexpr, SORTED: tl.constexpr, SHARDS_P: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    id = tl.load(ids_ptr + lane * n + i, mask=i < n, other=0)
    place = i
    if not SORTED:
        key = tl.load(keys_ptr + lane * n + i, mask=i < n, other=_NONE)
        # Equal are the keys of no passage and of a pid that was given twice: of these the earlier is ahead. Only in the
        # block that holds entry i does that take a comparison more. [BLOCK_I, BLOCK_J] throughout: one sum at the end.
        diagonal = tl.program_id(0) * BLOCK_I // BLOCK_J * BLOCK_J
        j = diagonal + tl.arange(0, BLOCK_J)
        other = tl.load(keys_ptr + lane * n + j, mask=j < n, other=_NONE)
        earlier = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        ahead = ((other[None, :] > key[:, None]) | earlier).to(tl.int32)
        for at in range(0, diagonal, BLOCK_J):
            other = tl.load(keys_ptr + lane * n + at + tl.arange(0, BLOCK_J))
            ahead += (other[None, :] >= key[:, None]).to(tl.int32)
        for at in range(diagonal + BLOCK_J, n, BLOCK_J):
            j = at + tl.arange(0, BLOCK_J)
            other = tl.load(keys_ptr + lane * n + j, mask=j < n, other=_NONE)
            ahead += (other[None, :] > key[:, None]).to(tl.int32)
        place = tl.sum(ahead, 1)
    packed_ptr += lane * (1 + 2 * room)
    _emit(
        rows_ptr, table_ptr, next_keys_ptr + lane * room, next_ids_ptr + lane * room, packed_ptr, id, place,
        (i < n) & (place < room), lane, most, room, COLUMN=COLUMN, LAST=LAST,
    )  # fmt: skip
    if LAST:
        _store_count(rows_ptr, table_ptr, packed_ptr, lane, room, shards, SHARDS_P)


@triton.jit(do_not_specialize=["n", "keep"])
def _plausible_kernel(
    first_ptr, second_ptr, pids_ptr, count_ptr, flags_ptr, n, keep, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    count = tl.minimum(tl.load(count_ptr), n)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    pid = tl.load(pids_ptr + i, mask=i < count, other=0)
    first = _key(tl.load(first_ptr + i, mask=i < count, other=0.0), pid)
    second = _key(tl.load(second_ptr + i, mask=i < count, other=0.0), pid)
    ahead = tl.zeros([BLOCK_I, BLOCK_J], dtype=tl.int32)
    for at in range(0, count, BLOCK_J):
        j = at + tl.arange(0, BLOCK_J)
        other = tl.load(pids_ptr + j, mask=j < count, other=0)
        other_first = tl.where(j < count, _key(tl.load(first_ptr + j, mask=j < count, other=0.0), other), _NONE)
        other_second = _key(tl.load(second_ptr + j, mask=j < count, other=0.0), other)
        both = (other_first[None, :] > first[:, None]) & (other_second[None, :] > second[:, None])
        ahead += both.to(tl.int32)
    tl.store(flags_ptr + i, ((tl.sum(ahead, 1) < keep) & (i < count)).to(tl.int32), mask=i < n)


def plausible(
    first: torch.Tensor, second: torch.Tensor, pids: torch.Tensor, count: torch.Tensor, keep: int
) -> torch.Tensor:
    """int32 ``[n]``: 1 for the passages of a shard that cuts by ``first``, then to ``keep`` by ``second``, may leave.

    first, second: fp32 ``[n]``, scores of ``pids`` int32 ``[n]``, of which the first ``count`` int32 ``[1]`` are any.
    """
    n = pids.numel()
    flags = torch.empty_like(pids)
    _plausible_kernel[(triton.cdiv(n, BLOCK_I),)](
        first, second, pids, count, flags, n, keep, BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=8
    )
    return flags


def merge(
    rows: torch.Tensor,
    table: torch.Tensor,
    most: int,
    keeps: Sequence[int | None],
    lanes: int,
) -> torch.Tensor:
    """int32 ``[lanes, 1 + 2 k]``: how many passages are found, their pids, the bits of their scores, best first.

    rows: int32, the shards' rows of every query in flight; table: int64 ``[shards, 4]``: where a shard's first row
    starts in ``rows``, words from one query's row to the next, the room of a column, the shard's first pid. A row is a
    count, pids ``[room]`` and ``len(keeps)`` columns of fp32 ``[room]``; ``most``: the largest room. ``keeps``: how
    many stay after each column, None for all; k is what the last leaves room for. Ties go to the smaller pid.
    """
    shards = table.size(0)
    n = shards * most
    keys, ids = rows.new_empty(lanes, n, dtype=torch.int64), rows.new_empty(lanes, n)
    # a cut that cuts nothing is left out
    cuts = [c for c, keep in enumerate(keeps) if c == len(keeps) - 1 or (keep is not None and keep < n)]
    first = cuts[0]
    _keys_kernel[(triton.cdiv(n, BLOCK), lanes)](
        rows, table, keys, ids, n, most, COLUMN=first, BLOCK=BLOCK, num_warps=4
    )
    packed = rows
    for c, following in zip(cuts, [*cuts[1:], None], strict=True):
        keep = keeps[c]
        room = n if keep is None else min(keep, n)
        last = following is None
        by_sort = n > LIMIT
        if by_sort:
            order = keys.sort(dim=1, descending=True, stable=True).indices[:, :room]
            ids, n = ids.gather(1, order), room
        next_keys, next_ids = (keys, ids) if last else (keys.new_empty(lanes, room), ids.new_empty(lanes, room))
        if last:
            packed = rows.new_empty(lanes, 1 + 2 * room)
        _place_kernel[(triton.cdiv(n, BLOCK_I), lanes)](
            keys, ids, rows, table, next_keys, next_ids, packed, n, room, most, shards,
            COLUMN=c if following is None else following, LAST=last, SORTED=by_sort,
            SHARDS_P=max(16, triton.next_power_of_2(shards)), BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=8,
        )  # fmt: skip
        keys, ids, n = next_keys, next_ids, room
    return packed
