"""Candidate generation: the union of the probed inverted lists, each passage once, in ascending order.

PLAID's step 2 takes the ``ncells`` best centroids of every query token and unites their inverted lists. Here the
union is a bitmap of one bit a passage, so its memory is bounded by the collection, duplicates cost one atomic OR, and
reading the bits back in order yields the pids sorted without a sort:

    cells   per query token the ncells largest keys            keys [NKEYS, LQP] -> cells [LQ, ncells]
    mark    bit pid of every pid in the lists of the cells      OR into bits [ceil(N / 32)]
    count   set bits of every block of words                   counts [nblocks]
    gather  pids of the set bits at the block's offset; clears the bits for the next query

Nothing waits for the host: the number of candidates stays in a device scalar.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 128  # words of 32 passages that one program of `count` and `gather` reads
LIST_BLOCK = 512  # pids of an inverted list that one program of `mark` reads at a time
LIST_SPLITS = 4  # programs that share one inverted list
MAX_KEYS = 16384  # keys of one query token that fit the registers of one program of `cells`


@triton.jit
def _cells_kernel(keys_ptr, cells_ptr, nkeys, LQP, NCELLS: tl.constexpr, BLOCK_K: tl.constexpr):
    q = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    # [BLOCK_K] int64; the smallest int64 is no key
    lowest = -9223372036854775808
    keys = tl.load(keys_ptr + k.to(tl.int64) * LQP + q, mask=k < nkeys, other=lowest)
    for j in tl.static_range(NCELLS):
        best = tl.max(keys, 0)
        tl.store(cells_ptr + q * NCELLS + j, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32))
        keys = tl.where(keys == best, lowest, keys)


@triton.jit
def _mark_kernel(
    cells_ptr, ivf_pids_ptr, ivf_offsets_ptr, bits_ptr, ncells_total,
    CELLS_P: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    cell = tl.load(cells_ptr + i)
    # a centroid that several query tokens probe is marked by the first of them alone
    earlier = tl.arange(0, CELLS_P)
    others = tl.load(cells_ptr + earlier, mask=earlier < i, other=-1)
    if tl.max((others == cell).to(tl.int32), 0) == 0:
        start = tl.load(ivf_offsets_ptr + cell)
        end = tl.load(ivf_offsets_ptr + cell + 1)
        first = start + tl.program_id(1) * BLOCK
        for at in range(first, end, SPLITS * BLOCK):
            at_ = at + tl.arange(0, BLOCK)
            live = at_ < end
            pids = tl.load(ivf_pids_ptr + at_, mask=live, other=0)
            tl.atomic_or(bits_ptr + (pids >> 5), (1 << (pids & 31)).to(tl.int32), mask=live, sem="relaxed")


@triton.jit
def _popcount(x):
    # x: int32; set bits of each word
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _count_kernel(bits_ptr, allow_ptr, counts_ptr, nwords, HAS_ALLOW: tl.constexpr, BLOCK: tl.constexpr):
    w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bits_ptr + w, mask=w < nwords, other=0)
    if HAS_ALLOW:
        words = words & tl.load(allow_ptr + w, mask=w < nwords, other=0)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(_popcount(words), 0))


@triton.jit
def _gather_kernel(
    bits_ptr, allow_ptr, counts_ptr, pids_ptr, total_ptr, nwords,
    HAS_ALLOW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    # passages before this block: every program adds up the counts itself, a few KB that stay in L2
    before = tl.zeros([BLOCK_B], dtype=tl.int32)
    for b in range(0, block, BLOCK_B):
        b_ = b + tl.arange(0, BLOCK_B)
        before += tl.load(counts_ptr + b_, mask=b_ < block, other=0)
    base = tl.sum(before, 0)

    w = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bits_ptr + w, mask=w < nwords, other=0)
    tl.store(bits_ptr + w, tl.zeros([BLOCK], dtype=tl.int32), mask=w < nwords)
    if HAS_ALLOW:
        words = words & tl.load(allow_ptr + w, mask=w < nwords, other=0)
    ones = _popcount(words)
    first = base + tl.cumsum(ones, 0) - ones
    # [BLOCK, 32]: one column a bit of the word
    bit = tl.arange(0, 32)[None, :]
    flag = ((words[:, None] >> bit) & 1) != 0
    below = _popcount(words[:, None] & ((1 << bit) - 1))
    tl.store(pids_ptr + first[:, None] + below, w[:, None] * 32 + bit, mask=flag)
    if block == tl.num_programs(0) - 1:
        tl.store(total_ptr, base + tl.sum(ones, 0))


def bitmap_words(num_passages: int) -> int:
    """Words of 32 passages in a bitmap of ``num_passages``."""
    return -(-num_passages // 32)


def count_blocks(num_passages: int) -> int:
    """Blocks of words of a bitmap of ``num_passages``: the length that ``counts`` must have."""
    return max(1, -(-bitmap_words(num_passages) // BLOCK_WORDS))


def select_cells(keys: torch.Tensor, cells: torch.Tensor) -> None:
    """Write the best centroids of every query token into ``cells``.

    keys: int64 [NKEYS, LQP], order-preserving image of the score in the high half, ``0x7fffffff - centroid`` in the
    low half, each key once a column; cells: int32 [LQ, ncells], LQ <= LQP. Ties go to the smaller centroid id.
    """
    nkeys, lqp = keys.shape
    lq, ncells = cells.shape
    if nkeys > MAX_KEYS:
        top = torch.topk(keys[:, :lq], ncells, dim=0).values.t()
        cells.copy_(0x7FFFFFFF - (top & 0x7FFFFFFF))
        return
    _cells_kernel[(lq,)](
        keys, cells, nkeys, lqp, NCELLS=ncells, BLOCK_K=triton.next_power_of_2(max(nkeys, 16)), num_warps=8
    )


def mark_lists(cells: torch.Tensor, ivf_pids: torch.Tensor, ivf_offsets: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the bit of every passage in the inverted lists of ``cells``.

    cells: int32, any shape; ivf_pids: int32 [P]; ivf_offsets: int64 [C + 1]; bits: int32 [ceil(N / 32)].
    """
    n = cells.numel()
    _mark_kernel[(n, LIST_SPLITS)](
        cells, ivf_pids, ivf_offsets, bits, n,
        CELLS_P=triton.next_power_of_2(max(n, 16)), BLOCK=LIST_BLOCK, SPLITS=LIST_SPLITS, num_warps=4,
    )  # fmt: skip


def gather_marked(
    bits: torch.Tensor, counts: torch.Tensor, pids: torch.Tensor, total: torch.Tensor, allow: torch.Tensor | None
) -> None:
    """Turn the bitmap into ascending pids and clear it.

    bits: int32 [W]; counts: int32 [count_blocks(N)] scratch; pids: int32 [>= N] out; total: int32 [1] out, the number
    of pids; allow: int32 [W] bitmap of the passages that may be returned, or None for all.
    """
    nwords, nblocks = bits.numel(), counts.numel()
    has_allow = allow is not None
    allow_ = allow if allow is not None else bits
    _count_kernel[(nblocks,)](bits, allow_, counts, nwords, HAS_ALLOW=has_allow, BLOCK=BLOCK_WORDS, num_warps=4)
    _gather_kernel[(nblocks,)](
        bits, allow_, counts, pids, total, nwords,
        HAS_ALLOW=has_allow, BLOCK=BLOCK_WORDS, BLOCK_B=1024, num_warps=4,
    )  # fmt: skip
