"""Select the m best of n scores, in the order they came, ties at the cut to the earliest.

A radix select on the order-preserving 32-bit image of fp32 scores, in three digits of 11, 11 and 10 bits:

    histogram   of the digit among the scores that agree with the digits found so far    (3 launches)
    tally       scores above / equal to the threshold in each program's range
    scatter     writes the chosen ones at their offset; their order is the order of the input

Since candidates arrive with ascending pids, the result does too, and "ties by pid" needs no second key. n is a device
scalar and the grid is fixed, so nothing waits for the host and nothing recompiles when n changes. Every program finds
the threshold digits itself from the histograms (2,048 numbers in L2), which is cheaper than a launch.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from plaid_tilemaxsim.ops import tuning

BINS = 2048
BLOCK = 2048
PROGRAMS_PER_SM = 2


def select_workspace(device: torch.device) -> torch.Tensor:
    """Scratch of one select: int32 [3 * BINS + 2 * programs], which also says how many programs share the work."""
    programs = PROGRAMS_PER_SM * tuning.num_sms(device)
    return torch.zeros(3 * BINS + 2 * programs, dtype=torch.int32, device=device)


@triton.jit
def _image(score):
    # fp32 -> uint32 with the same order; -0.0 counts as 0.0
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _digit(hist_ptr, need, BINS: tl.constexpr):
    # the bin in which the need-th largest lies, and how many are still needed inside it
    b = tl.arange(0, BINS)
    h = tl.load(hist_ptr + b)
    at_or_above = tl.cumsum(h, 0, reverse=True)
    bin_ = tl.max(tl.where(at_or_above >= need, b, 0), 0)
    above = tl.sum(tl.where(b > bin_, h, 0), 0)
    return bin_, need - above


@triton.jit
def _threshold(work_ptr, need, LEVEL: tl.constexpr, BINS: tl.constexpr):
    # digits of the threshold found by the first LEVEL histograms, as a number, and what is still needed
    prefix = tl.zeros([], dtype=tl.uint32)
    if LEVEL > 0:
        d0, need = _digit(work_ptr, need, BINS)
        prefix = d0.to(tl.uint32)
    if LEVEL > 1:
        d1, need = _digit(work_ptr + BINS, need, BINS)
        prefix = (prefix << 11) | d1.to(tl.uint32)
    if LEVEL > 2:
        d2, need = _digit(work_ptr + 2 * BINS, need, BINS)
        prefix = (prefix << 10) | d2.to(tl.uint32)
    return prefix, need


@triton.jit
def _histogram_kernel(
    scores_ptr, count_ptr, work_ptr, m, LEVEL: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.load(count_ptr)
    prefix, _ = _threshold(work_ptr, tl.minimum(m, n), LEVEL, BINS)
    total = tl.zeros([BINS], dtype=tl.int32)
    b = tl.arange(0, BINS)
    for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        key = _image(tl.load(scores_ptr + i, mask=i < n, other=0.0))
        if LEVEL == 0:
            digit = key >> 21
            live = i < n
        elif LEVEL == 1:
            digit = (key >> 10) & 2047
            live = (i < n) & ((key >> 21) == prefix)
        else:
            digit = key & 1023
            live = (i < n) & ((key >> 10) == prefix)
        # tl.histogram takes no mask here: what does not count goes to bin 0 and is taken off again
        dead = tl.sum((live == 0).to(tl.int32), 0)
        h = tl.histogram(tl.where(live, digit.to(tl.int32), 0), BINS)
        total += h - tl.where(b == 0, dead, 0)
    tl.atomic_add(work_ptr + LEVEL * BINS + b, total, mask=total > 0, sem="relaxed")


@triton.jit
def _range(n, BLOCK: tl.constexpr):
    # the contiguous range of one program, whole tiles
    tiles = tl.cdiv(tl.cdiv(n, tl.num_programs(0)), BLOCK)
    start = tl.program_id(0) * tiles * BLOCK
    return start, tl.minimum(start + tiles * BLOCK, n)


@triton.jit
def _tally_kernel(scores_ptr, count_ptr, work_ptr, m, BINS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.load(count_ptr)
    threshold, _ = _threshold(work_ptr, tl.minimum(m, n), 3, BINS)
    start, end = _range(n, BLOCK)
    above = tl.zeros([BLOCK], dtype=tl.int32)
    equal = tl.zeros([BLOCK], dtype=tl.int32)
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        key = _image(tl.load(scores_ptr + i, mask=i < end, other=0.0))
        above += ((i < end) & (key > threshold)).to(tl.int32)
        equal += ((i < end) & (key == threshold)).to(tl.int32)
    tally_ptr = work_ptr + 3 * BINS + 2 * tl.program_id(0)
    tl.store(tally_ptr, tl.sum(above, 0))
    tl.store(tally_ptr + 1, tl.sum(equal, 0))


@triton.jit
def _scatter_kernel(
    scores_ptr, pids_ptr, count_ptr, work_ptr, out_pids_ptr, out_scores_ptr, out_count_ptr, m,
    HAS_PIDS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS_P: tl.constexpr,
):  # fmt: skip
    n = tl.load(count_ptr)
    take = tl.minimum(m, n)
    threshold, ties = _threshold(work_ptr, take, 3, BINS)
    p = tl.arange(0, PROGRAMS_P)
    earlier = p < tl.program_id(0)
    above = tl.sum(tl.load(work_ptr + 3 * BINS + 2 * p, mask=earlier, other=0), 0)
    equal = tl.sum(tl.load(work_ptr + 3 * BINS + 2 * p + 1, mask=earlier, other=0), 0)
    start, end = _range(n, BLOCK)
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        live = i < end
        score = tl.load(scores_ptr + i, mask=live, other=0.0)
        key = _image(score)
        is_above = (live & (key > threshold)).to(tl.int32)
        is_equal = (live & (key == threshold)).to(tl.int32)
        above_before = above + tl.cumsum(is_above, 0) - is_above
        equal_before = equal + tl.cumsum(is_equal, 0) - is_equal
        chosen = (is_above != 0) | ((is_equal != 0) & (equal_before < ties))
        to = above_before + tl.minimum(equal_before, ties)
        if HAS_PIDS:
            pid = tl.load(pids_ptr + i, mask=chosen, other=0)
        else:
            pid = i
        tl.store(out_pids_ptr + to, pid, mask=chosen)
        tl.store(out_scores_ptr + to, score, mask=chosen)
        above += tl.sum(is_above, 0)
        equal += tl.sum(is_equal, 0)
    if tl.program_id(0) == 0:
        tl.store(out_count_ptr, take)


def select_top(
    scores: torch.Tensor,
    pids: torch.Tensor | None,
    count: torch.Tensor,
    m: int,
    out_pids: torch.Tensor,
    out_scores: torch.Tensor,
    out_count: torch.Tensor,
    work: torch.Tensor,
) -> None:
    """Keep the ``m`` best of the first ``count`` scores, in input order; ties at the cut go to the earliest.

    scores: fp32 [cap], no NaN (-inf is allowed and ranks last); pids: int32 [cap], or None for 0, 1, 2, ...;
    count: int32 [1] on the device; out_pids: int32 [>= m]; out_scores: fp32 [>= m]; out_count: int32 [1], min(m, n);
    work: from ``select_workspace``. What lies behind ``out_count`` is left as it was.
    """
    work[: 3 * BINS].zero_()
    programs = (work.numel() - 3 * BINS) // 2
    grid = (programs,)
    for level in range(3):
        _histogram_kernel[grid](scores, count, work, m, LEVEL=level, BINS=BINS, BLOCK=BLOCK, num_warps=8)
    _tally_kernel[grid](scores, count, work, m, BINS=BINS, BLOCK=BLOCK, num_warps=8)
    _scatter_kernel[grid](
        scores, pids if pids is not None else scores, count, work, out_pids, out_scores, out_count, m,
        HAS_PIDS=pids is not None, BINS=BINS, BLOCK=BLOCK, PROGRAMS_P=triton.next_power_of_2(programs), num_warps=8,
    )  # fmt: skip
