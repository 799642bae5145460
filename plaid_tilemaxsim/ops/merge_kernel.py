"""Merge what the shards of an index found into the answer that the whole index would give.

A shard answers a query with one row of int32: how many passages, their pids (numbered from 0 in every shard), then
one or more columns of fp32 scores, each with the same room. The columns before the last are those that passages are
pruned by; the cut at the best ``keep`` is made here, over all shards, as one device makes it:

    key(p)   = (order-preserving image of the score, -pid)             int64, the smallest one for "no passage"
    place(p) = how many keys are larger                                 a passage with place < keep stays

Up to 8192 entries ``cuts_kernel`` makes the cuts, and the answer too where few passages are left: one launch. More of
these are ordered by a second launch. Otherwise each cut is one: places are a permutation, so every passage that stays
writes its number and its key of the next column where it belongs (as ``rank_kernel`` does), and after the last column
its pid and score; "no passage" comes last everywhere. Places are counted, above ``LIMIT`` entries a sort finds them.
Counts are read on the device: nothing waits for the host.

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

from plaid_tilemaxsim.ops import cuts_kernel
from plaid_tilemaxsim.ops.cuts_kernel import _emit
from plaid_tilemaxsim.ops.fp32 import _NONE, _key

BLOCK = 128  # entries whose keys one program writes
BLOCK_I = 16
BLOCK_J = 256
LIMIT = 8192  # entries that are placed by counting


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 ``[lanes, 1 + 2 k]``: how many passages are found, their pids, the bits of their scores, best first.

    rows: int32, the shards' rows of every query in flight; table: int64 ``[shards, 4]``: where a shard's first row
    starts, in words from ``rows`` on (also in another tensor or in pinned memory, which the caller keeps), words from
    one query's row to the next, the room of a column, the shard's first pid. A row is a count, pids ``[room]`` and
    ``len(keeps)`` columns of fp32 ``[room]``; ``most``: the largest room. ``keeps``: how many stay after each column,
    None for all; k is what the last leaves room for. Ties go to the smaller pid.
    out: contiguous, on the rows' device or in pinned host memory; where the answer is written, and returned. What lies
    behind the passages found is any. Raises ValueError where it is none of this shape and dtype.
    """
    shards = table.size(0)
    n = shards * most
    # a cut that cuts nothing is left out
    cuts = [c for c, keep in enumerate(keeps) if c == len(keeps) - 1 or (keep is not None and keep < n)]
    rooms = [n]
    for c in cuts:
        keep = keeps[c]
        rooms.append(rooms[-1] if keep is None else min(keep, rooms[-1]))
    left, rooms = rooms[-2], rooms[1:]  # left: how many the last column orders
    shape = (lanes, 1 + 2 * rooms[-1])
    packed = rows.new_empty(shape) if out is None else out
    if packed.shape != shape or packed.dtype != torch.int32 or not packed.is_contiguous():
        raise ValueError(f"out: expected contiguous int32 {list(shape)}, got {packed.dtype} {list(packed.shape)}")
    if cuts_kernel.supported(shards, most) and len(cuts) <= 3 and (len(cuts) > 1 or n <= cuts_kernel.ORDERED):
        keys, ids = cuts_kernel.make_cuts(rows, table, most, cuts, rooms, packed)
        if left <= cuts_kernel.ORDERED:
            return packed
        cuts, rooms, n = cuts[-1:], rooms[-1:], left
    else:
        keys, ids = rows.new_empty(lanes, n, dtype=torch.int64), rows.new_empty(lanes, n)
        _keys_kernel[(triton.cdiv(n, BLOCK), lanes)](
            rows, table, keys, ids, n, most, COLUMN=cuts[0], BLOCK=BLOCK, num_warps=4
        )
    for c, room, following in zip(cuts, rooms, [*cuts[1:], None], strict=True):
        last = following is None
        by_sort = n > LIMIT
        if by_sort:
            order = keys.sort(dim=1, descending=True, stable=True).indices[:, :room]
            ids, n = ids.gather(1, order), room
        next_keys, next_ids = (keys, ids) if last else (keys.new_empty(lanes, room), ids.new_empty(lanes, room))
        _place_kernel[(max(triton.cdiv(n, BLOCK_I), 1), lanes)](
            keys, ids, rows, table, next_keys, next_ids, packed, n, room, most, shards,
            COLUMN=c if following is None else following, LAST=last, SORTED=by_sort,
            SHARDS_P=max(16, triton.next_power_of_2(shards)), BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=8,
        )  # fmt: skip
        keys, ids, n = next_keys, next_ids, room
    return packed
