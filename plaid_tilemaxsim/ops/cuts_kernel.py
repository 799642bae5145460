"""Make the cuts of a merge in one program, and the answer too where few passages are left: one launch in all.

``merge_kernel`` says what the rows of shards are, and the order: score descending, pid ascending. A program holds all
entries of one query in registers. A cut needs no places; what stays are the passages that reach

    t = the largest image of a score that at least ``keep`` of them reach

found by counting those above two numbers that split what is left of the range of t: 6 to 9 counts for 512 to 8192
scores, which end as soon as exactly ``keep`` stay. Where more have the score t than there is room for, the same is done
with their pids, and with the positions of a pid that was given twice. What stays of the last cut is moved together, and

    place(p) = how many keys of the last column are larger
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .fp32 import _NONE, _image, _key

LIMIT = 8192  # entries whose pids and two scores are the registers of 16 warps; two counts of them fit one word
ORDERED = 256  # passages: their pairs, 3 instructions each, take one program less than another launch
BLOCK_J = 8
_BELOW = tl.constexpr(-2147483648)  # below the image of every score
_ABOVE = tl.constexpr(2147483647)


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
def _reaching(value, stays, keep):
    # Of those in `stays` the ones that reach t, the largest number that at least `keep` reach; t; how many they are.
    # They are more than `keep` only where several have the value t itself. All stay where there are fewer.
    least = tl.min(tl.where(stays, value, _ABOVE))
    most = tl.max(tl.where(stays, value, _BELOW))
    count = tl.sum(stays.to(tl.int32))
    value = tl.where(stays, value, _BELOW)
    while (count > keep) & (least < most):  # least <= t <= most; count: how many reach least
        third = (most.to(tl.uint32, bitcast=True) - least.to(tl.uint32, bitcast=True)) // 3
        third = tl.maximum(third.to(tl.int32, bitcast=True), 1)
        low = least + third
        high = low + third
        counts = tl.sum((value >= low).to(tl.int32) + tl.where(value >= high, 1 << 16, 0))  # one reduction for both
        reach_low, reach_high = counts & 0xFFFF, counts >> 16
        most = tl.where(reach_high >= keep, most, tl.where(reach_low >= keep, high - 1, low - 1))
        least = tl.where(reach_high >= keep, high, tl.where(reach_low >= keep, low, least))
        count = tl.where(reach_high >= keep, reach_high, tl.where(reach_low >= keep, reach_low, count))
    return stays & (value >= least), least, count


@triton.jit
def _cut(score, pid, id, stays, keep):
    # the `keep` best of those in `stays`: hardly ever is more to do than with the images
    image = _image(score)
    stays, t, count = _reaching(image, stays, keep)
    if count > keep:
        tied = image == t
        stays, t, count = _reaching(tl.where(tied, -1 - pid, 0), stays, keep)
        if count > keep:
            stays, t, count = _reaching(tl.where(tied & (-1 - pid == t), -1 - id, 0), stays, keep)
    return stays


@triton.jit
def _places(keys_ptr, count, M: tl.constexpr, BLOCK_J: tl.constexpr):
    # of keys [M], of which the first `count` are any
    m = tl.arange(0, M)
    key = tl.load(keys_ptr + m, mask=m < count, other=_NONE)
    # [M, BLOCK_J] throughout: one sum at the end
    ahead = tl.zeros([M, BLOCK_J], dtype=tl.int32)
    for at in range(0, count, BLOCK_J):
        j = at + tl.arange(0, BLOCK_J)
        other = tl.load(keys_ptr + j, mask=j < count, other=_NONE)
        ahead += (other[None, :] > key[:, None]).to(tl.int32)
    place = tl.sum(ahead, 1)
    if 2 * tl.sum(tl.where(m < count, place, 0), 0) < count * (count - 1):
        # a place is taken twice, by a pid that was given twice: the earlier is ahead
        for at in range(0, count, BLOCK_J):
            j = at + tl.arange(0, BLOCK_J)
            other = tl.load(keys_ptr + j, mask=j < count, other=_NONE)
            place += tl.sum(((other[None, :] == key[:, None]) & (j[None, :] < m[:, None])).to(tl.int32), 1)
    return place


@triton.jit(do_not_specialize=["most", "shards", "keep", "then_keep", "room", "k"])
def _cuts_kernel(
    rows_ptr, table_ptr, keys_ptr, ids_ptr, packed_ptr, most, shards, keep, then_keep, room, k,
    COLUMN: tl.constexpr, THEN: tl.constexpr, LAST: tl.constexpr, ORDERS: tl.constexpr,
    SHARDS_P: tl.constexpr, MOST_P: tl.constexpr, ROOM_P: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    # cuts by COLUMN and by THEN (-1 for none) leave room for `room` passages; ORDERS: then the k best by LAST
    lane = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SHARDS_P)[:, None]
    j = tl.arange(0, MOST_P)[None, :]
    at = table_ptr + 4 * s
    start = tl.load(at, mask=s < shards, other=0) + lane * tl.load(at + 1, mask=s < shards, other=0)
    cap = tl.load(at + 2, mask=s < shards, other=0)
    found = tl.load(rows_ptr + start, mask=s < shards, other=0)
    # [SHARDS_P, MOST_P]. What lies behind a count is loaded too, so that no load waits for the count.
    there = j < cap
    entry = rows_ptr + start + 1 + j
    pid = tl.load(entry, mask=there, other=0) + tl.load(at + 3, mask=s < shards, other=0).to(tl.int32)
    if COLUMN >= 0:
        score = tl.load(entry + (1 + COLUMN) * cap, mask=there, other=0).to(tl.float32, bitcast=True)
    if THEN >= 0:
        then_score = tl.load(entry + (1 + THEN) * cap, mask=there, other=0).to(tl.float32, bitcast=True)
    if ORDERS:
        last_score = tl.load(entry + (1 + LAST) * cap, mask=there, other=0).to(tl.float32, bitcast=True)
    id = s * most + j
    stays = there & (j < found)
    if COLUMN >= 0:
        stays = _cut(score, pid, id, stays, keep)
    if THEN >= 0:
        stays = _cut(then_score, pid, id, stays, then_keep)

    flat = tl.reshape(stays, [SHARDS_P * MOST_P]).to(tl.int32)
    kept = tl.minimum(tl.sum(flat, 0), room)
    to = tl.reshape(tl.cumsum(flat, 0) - 1, [SHARDS_P, MOST_P])
    stays = stays & (to < room)
    keys_ptr += lane * room
    ids_ptr += lane * room
    packed_ptr += lane * (1 + 2 * k)
    tl.store(ids_ptr + to, id, mask=stays)
    if ORDERS:
        tl.store(keys_ptr + to, _key(last_score, pid), mask=stays)
    tl.debug_barrier()  # what was moved together is loaded by other threads of this program
    m = tl.arange(0, ROOM_P)
    id = tl.load(ids_ptr + m, mask=m < kept, other=0)
    place = m
    live = m < kept
    if ORDERS:
        place = _places(keys_ptr, kept, ROOM_P, BLOCK_J)
        live = live & (place < k)
        tl.store(packed_ptr, tl.minimum(tl.sum(found), k))
    else:
        tl.store(keys_ptr + m, tl.full([ROOM_P], _NONE, tl.int64), mask=(m >= kept) & (m < room))
        tl.store(ids_ptr + m, id, mask=(m >= kept) & (m < room))
    _emit(
        rows_ptr, table_ptr, keys_ptr, ids_ptr, packed_ptr, id, place, live, lane, most, k, COLUMN=LAST, LAST=ORDERS
    )  # fmt: skip


def supported(shards: int, most: int) -> bool:
    """Whether one program holds the entries of that many shards with room for at most ``most``."""
    return _entries(shards, most) <= LIMIT


def _entries(shards: int, most: int) -> int:
    return int(triton.next_power_of_2(shards) * max(triton.next_power_of_2(most), 128))


def make_cuts(
    rows: torch.Tensor,
    table: torch.Tensor,
    most: int,
    columns: Sequence[int],
    keeps: Sequence[int],
    packed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut by all of ``columns`` but the last, at most two, and order what stays by the last, at most ``ORDERED``.

    rows, table, most: as ``merge_kernel.merge`` has them, and ``supported``. keeps: how many stay after each of
    ``columns``, none more than before. packed: int32 ``[lanes, 1 + 2 keeps[-1]]`` out.
    Returns what stays before the last column, int64 ``[lanes, room]`` and int32 ``[lanes, room]``: for room >
    ``ORDERED``, where ``packed`` is not written, keys by the last column and numbers of the entries.
    """
    lanes, shards = packed.size(0), table.size(0)
    room = keeps[-2] if len(keeps) > 1 else shards * most
    keys, ids = rows.new_empty(lanes, room, dtype=torch.int64), rows.new_empty(lanes, room)
    column, then = [*columns[:-1], -1, -1][:2]
    entries, shards_p = _entries(shards, most), triton.next_power_of_2(shards)
    _cuts_kernel[(lanes,)](
        rows, table, keys, ids, packed, max(most, 1), shards, keeps[0], keeps[min(1, len(keeps) - 1)], room, keeps[-1],
        COLUMN=column, THEN=then, LAST=columns[-1], ORDERS=room <= ORDERED,
        SHARDS_P=shards_p, MOST_P=entries // shards_p, ROOM_P=max(triton.next_power_of_2(room), 64), BLOCK_J=BLOCK_J,
        num_warps=min(max(entries // 256, 4), 16),
    )  # fmt: skip
    return keys, ids
