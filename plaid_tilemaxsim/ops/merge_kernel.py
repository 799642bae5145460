"""Merge what the shards of an index found into the answer that the whole index would give.

A shard answers a query with one row of int32: how many passages, their pids (numbered from 0 in every shard), then
one or more columns of fp32 scores, each with the same room. The columns before the last are those that passages are
pruned by; the cut at the best ``keep`` is made here, over all shards, as one device makes it:

    key(p)   = (order-preserving image of the score, -pid)             int64, the smallest one for "no passage"
    place(p) = how many keys are larger                                 a passage with place < keep stays

Up to ``LIMIT`` entries one program makes all cuts, its entries in registers. A cut asks for no places, only for

    t = the largest image that at least ``keep`` reach                  by bisection: a count a bit
    where more than ``keep`` reach t: of those at t the smallest pids, of a pid that was given twice the earliest

and what stays of the last cut is moved together. Up to ``ORDERED`` passages the same program finds their places in the
last column, by counting, and writes the answer: one launch in all. More are ordered by the programs of a second one.

Above ``LIMIT`` entries a sort finds the places. They are a permutation, so every passage that stays writes its number
and its key of the next column where it belongs (as ``rank_kernel`` does), and after the last column its pid and score;
"no passage" comes last everywhere. Counts are read on the device: nothing waits for the host.

A shard can tell which of its passages no merge will keep: p is out where ``keep`` of the shard's own passages are ahead
of it in the first column and in the second. Those ahead in the first survive the first cut if p does, and then leave p
no place in the second.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 128  # entries whose keys one program writes
BLOCK_I = 16
BLOCK_J = 256
LIMIT = 8192  # entries that one program cuts, two words of each in registers, or that are placed by counting
ORDERED = 256  # passages whose places one program counts: 3 instructions a pair take it less than another launch
_NONE = tl.constexpr(-9223372036854775808)  # below the key of every score, -inf included
_LEAST = tl.constexpr(-2147483648)  # below every image
_MOST = tl.constexpr(2147483647)


@triton.jit
def _image(score):
    # as everywhere, NaN counts as -inf and -0.0 as 0.0
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(score, pid):
    return (_image(score).to(tl.int64) << 32) | (0x7FFFFFFF - pid).to(tl.int64)


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


@triton.jit
def _reaching(value, stays, keep):
    # Of those in `stays` the ones that reach t, the largest number that at least `keep` of them reach; t; how many
    # they are. They are more than `keep` only where several have the value t itself; all stay where there are fewer.
    least = tl.min(tl.where(stays, value, _MOST))
    most = tl.max(tl.where(stays, value, _LEAST))
    count = tl.sum(stays.to(tl.int32))
    value = tl.where(stays, value, _LEAST)
    while (count > keep) & (least < most):
        middle = (least | most) - ((least ^ most) >> 1)  # their mean, rounded up
        reach = tl.sum((value >= middle).to(tl.int32))
        enough = reach >= keep
        count = tl.where(enough, reach, count)
        least = tl.where(enough, middle, least)
        most = tl.where(enough, most, middle - 1)
    return stays & (value >= least), least, count


@triton.jit
def _cut(score, pid, id, stays, keep):
    image = _image(score)
    stays, t, count = _reaching(image, stays, keep)
    if count > keep:
        tied = image == t
        stays, t, count = _reaching(tl.where(tied, -1 - pid, 0), stays, keep)
        if count > keep:
            stays, t, count = _reaching(tl.where(tied & (-1 - pid == t), -1 - id, 0), stays, keep)
    return stays


@triton.jit(do_not_specialize=["most", "shards", "keep", "then_keep", "room", "k"])
def _cuts_kernel(
    rows_ptr, table_ptr, keys_ptr, ids_ptr, packed_ptr, most, shards, keep, then_keep, room, k,
    COLUMN: tl.constexpr, THEN: tl.constexpr, LAST: tl.constexpr, ORDERS: tl.constexpr,
    SHARDS_P: tl.constexpr, MOST_P: tl.constexpr, ROOM_P: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    # cuts by COLUMN and by THEN (-1 for none), which leave room for `room` passages, then the k best by LAST
    lane = tl.program_id(1).to(tl.int64)
    s = tl.arange(0, SHARDS_P)[:, None]
    j = tl.arange(0, MOST_P)[None, :]
    at = table_ptr + 4 * s
    start = tl.load(at, mask=s < shards, other=0) + lane * tl.load(at + 1, mask=s < shards, other=0)
    cap = tl.load(at + 2, mask=s < shards, other=0)
    pid = tl.load(at + 3, mask=s < shards, other=0).to(tl.int32)
    count = tl.load(rows_ptr + start, mask=s < shards, other=0)
    # [SHARDS_P, MOST_P]. What lies behind a count is read too, so that no load waits for the count.
    there = j < cap
    entry = rows_ptr + start + 1 + j
    pid += tl.load(entry, mask=there, other=0)
    if COLUMN >= 0:
        score = tl.load(entry + (1 + COLUMN) * cap, mask=there, other=0).to(tl.float32, bitcast=True)
    if THEN >= 0:
        then_score = tl.load(entry + (1 + THEN) * cap, mask=there, other=0).to(tl.float32, bitcast=True)
    last_score = tl.load(entry + (1 + LAST) * cap, mask=there, other=0).to(tl.float32, bitcast=True)
    id = s * most + j
    stays = there & (j < count)
    if COLUMN >= 0:
        stays = _cut(score, pid, id, stays, keep)
    if THEN >= 0:
        stays = _cut(then_score, pid, id, stays, then_keep)

    moved = tl.reshape(stays, [SHARDS_P * MOST_P]).to(tl.int32)
    to = tl.reshape(tl.cumsum(moved, 0) - 1, [SHARDS_P, MOST_P])
    kept = tl.minimum(tl.sum(moved, 0), room)
    keys_ptr += lane * room
    ids_ptr += lane * room
    tl.store(keys_ptr + to, _key(last_score, pid), mask=stays & (to < room))
    tl.store(ids_ptr + to, id, mask=stays & (to < room))
    m = tl.arange(0, ROOM_P)
    if not ORDERS:
        tl.store(keys_ptr + m, tl.full([ROOM_P], _NONE, tl.int64), mask=(m >= kept) & (m < room))
        tl.store(ids_ptr + m, tl.zeros([ROOM_P], dtype=tl.int32), mask=(m >= kept) & (m < room))
    else:
        tl.debug_barrier()  # what was moved together is read by other threads of this program
        key = tl.load(keys_ptr + m, mask=m < kept, other=_NONE)
        # [ROOM_P, BLOCK_J] throughout: one sum at the end
        ahead = tl.zeros([ROOM_P, BLOCK_J], dtype=tl.int32)
        for at_j in range(0, kept, BLOCK_J):
            n = at_j + tl.arange(0, BLOCK_J)
            other = tl.load(keys_ptr + n, mask=n < kept, other=_NONE)
            ahead += (other[None, :] > key[:, None]).to(tl.int32)
        place = tl.sum(ahead, 1)
        if 2 * tl.sum(tl.where(m < kept, place, 0), 0) < kept * (kept - 1):  # a pid was given twice
            for at_j in range(0, kept, BLOCK_J):
                n = at_j + tl.arange(0, BLOCK_J)
                other = tl.load(keys_ptr + n, mask=n < kept, other=_NONE)
                earlier = (other[None, :] == key[:, None]) & (n[None, :] < m[:, None])
                place += tl.sum(earlier.to(tl.int32), 1)
        packed_ptr += lane * (1 + 2 * k)
        _emit(
            rows_ptr, table_ptr, keys_ptr, ids_ptr, packed_ptr, tl.load(ids_ptr + m, mask=m < kept, other=0), place,
            (m < kept) & (place < k), lane, most, k, COLUMN=LAST, LAST=True,
        )  # fmt: skip
        tl.store(packed_ptr, tl.minimum(tl.sum(count), k))


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
    starts in ``rows``, words from one query's row to the next, the room of a column, the shard's first pid. A row is a
    count, pids ``[room]`` and ``len(keeps)`` columns of fp32 ``[room]``; ``most``: the largest room. ``keeps``: how
    many stay after each column, None for all; k is what the last leaves room for. Ties go to the smaller pid.
    out: where the answer goes and what is returned, contiguous, on the rows' device or in pinned host memory; what lies
    behind the passages found is left. Raises ValueError where it is of another shape or dtype.
    """
    shards = table.size(0)
    n = shards * most
    # a cut that cuts nothing is left out
    cuts = [c for c, keep in enumerate(keeps) if c == len(keeps) - 1 or (keep is not None and keep < n)]
    rooms = list(itertools.accumulate((n if keeps[c] is None else keeps[c] for c in cuts), min, initial=n))[1:]
    shape = lanes, 1 + 2 * rooms[-1]
    packed = rows.new_empty(shape) if out is None else out
    if packed.shape != shape or packed.dtype != torch.int32 or not packed.is_contiguous():
        raise ValueError(f"out: expected contiguous int32 {list(shape)}, got {packed.dtype} {list(packed.shape)}")
    left = [n, *rooms][-2]  # passages that the last column orders
    shards_p, most_p, room_p = triton.next_power_of_2(shards), triton.next_power_of_2(most), triton.next_power_of_2(left)
    entries = shards_p * max(most_p, 128)
    if entries <= LIMIT and len(cuts) <= 3 and (len(cuts) > 1 or n <= ORDERED):
        column, then = [*cuts[:-1], -1, -1][:2]
        keys, ids = rows.new_empty(lanes, left, dtype=torch.int64), rows.new_empty(lanes, left)
        _cuts_kernel[(1, lanes)](
            rows, table, keys, ids, packed, most, shards, rooms[0], [*rooms, 0][1], left, rooms[-1],
            COLUMN=column, THEN=then, LAST=cuts[-1], ORDERS=left <= ORDERED,
            SHARDS_P=shards_p, MOST_P=max(most_p, 128), ROOM_P=max(room_p, 64), BLOCK_J=16,
            num_warps=min(max(entries // 128, 4), 32),
        )  # fmt: skip
        if left <= ORDERED:
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
        _place_kernel[(triton.cdiv(n, BLOCK_I), lanes)](
            keys, ids, rows, table, next_keys, next_ids, packed, n, room, most, shards,
            COLUMN=c if following is None else following, LAST=last, SORTED=by_sort,
            SHARDS_P=max(16, shards_p), BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=8,
        )  # fmt: skip
        keys, ids, n = next_keys, next_ids, room
    return packed
