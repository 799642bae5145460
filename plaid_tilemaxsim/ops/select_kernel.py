"""Select the m best of n scores, in the order they came, ties at the cut to the earliest.

A radix select on the order-preserving 32-bit image of fp32 scores:

    histogram   of 2,048 bins among the scores that agree with the bits found so far; the program that finishes
                last finds the bin of the threshold and clears the histogram           (3 launches)
    tally       scores above / equal to the threshold in each program's range
    scatter     writes the chosen ones at their offset; their order is the order of the input

Scores differ by little, so the first histogram has bins of 2^22 images, but 256 bins of 2^17 from an eighth to twice
the largest score of a sample: a program counts these by itself (``tl.histogram``, whose time grows with the bins) and
adds them to those of the others. What the next two histograms count, 11 bits of what is left and the rest, are few
scores: atomic additions in the L2 cache, which are fast unless many meet in one bin. So passages without a score, and
all that agree with the first of a tile, are added up before, in the first histogram too.

Since candidates arrive with ascending pids, the result does too, and "ties by pid" needs no second key. n is a device
scalar and the grid is fixed, so nothing waits for the host and nothing recompiles when n changes. For a few thousand
scores ``rank_kernel`` does the same in one launch.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from plaid_tilemaxsim.ops import tuning
from plaid_tilemaxsim.ops.fp32 import _image

BINS = 2048
BLOCK = 2048
HISTOGRAM_BLOCK = 512  # small: 50,000 scores are for 100 programs
SAMPLE = 256
PROGRAMS_PER_SM = 2
# Workspace: histogram; threshold so far, how many are still needed, how many of its bits are open; finished programs;
# tallies.
_STATE = BINS
_DONE = _STATE + 3
_TALLY = _STATE + 8
_NO_SCORE = tl.constexpr(0x007FFFFF)  # the image of -inf


def select_workspace(device: torch.device) -> torch.Tensor:
    """Scratch of ``select_top``, int32, all zero; a select leaves its histogram zero again.

    Its length says how many programs share the work.
    """
    programs = PROGRAMS_PER_SM * tuning.num_sms(device)
    return torch.zeros(_TALLY + 2 * programs, dtype=torch.int32, device=device)


@triton.jit
def _digits(score):
    # the image as uint32: upper digits first, the order stays
    return (_image(score) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _digit(h, need, BINS: tl.constexpr):
    # the bin of histogram h [BINS] in which the need-th largest lies, and how many are still needed inside it
    b = tl.arange(0, BINS)
    at_or_above = tl.cumsum(h, 0, reverse=True)
    bin_ = tl.max(tl.where(at_or_above >= need, b, 0), 0)
    above = tl.sum(tl.where(b > bin_, h, 0), 0)
    return bin_, need - above


@triton.jit
def _counts(digit, live, BINS: tl.constexpr):
    # tl.histogram takes no mask in every version: what does not count goes to bin 0 and is taken off again
    dead = tl.sum((live == 0).to(tl.int32), 0)
    h = tl.histogram(tl.where(live, digit, 0), BINS)
    return h - tl.where(tl.arange(0, BINS) == 0, dead, 0)


@triton.jit
def _sampled_window(scores_ptr, n, SAMPLE: tl.constexpr):
    # the first of the eight values of the upper 10 bits that the first histogram divides
    i = tl.arange(0, SAMPLE) * tl.maximum(n // SAMPLE, 1)
    key = _digits(tl.load(scores_ptr + i, mask=i < n, other=float("-inf")))
    return tl.maximum(tl.max((key >> 22).to(tl.int32), 0) - 6, 0)


@triton.jit
def _first_bin(key, window):
    # ascending with the key
    upper = (key >> 22).to(tl.int32)
    fine = window + ((upper - window) << 5) + ((key >> 17) & 31).to(tl.int32)
    return tl.where(upper < window, upper, tl.where(upper < window + 8, fine, upper + 248))


@triton.jit
def _of_first_bin(bin_, window):
    # the least key in the bin, and how many of its bits are open; the last key for a bin that has none
    fine = bin_ - window
    inside = (fine >= 0) & (fine < 256)
    upper = tl.where(inside, window + (fine >> 5), tl.where(fine < 0, bin_, tl.minimum(bin_ - 248, 1023)))
    return (upper << 22) | tl.where(inside, (fine & 31) << 17, 0), tl.where(inside, 17, 22)


@triton.jit(do_not_specialize=["m"])
def _histogram_kernel(
    scores_ptr, count_ptr, work_ptr, m,
    LEVEL: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, STATE: tl.constexpr,
    DONE: tl.constexpr,
):  # fmt: skip
    n = tl.load(count_ptr)
    need = tl.minimum(m, n)
    shift, window = 0, 0
    if LEVEL == 0:
        window = _sampled_window(scores_ptr, n, SAMPLE)
    else:
        found = tl.load(work_ptr + STATE)
        need = tl.load(work_ptr + STATE + 1)
        open_ = tl.load(work_ptr + STATE + 2)
        agreed = found.to(tl.uint32, bitcast=True) >> open_
        shift = tl.maximum(open_ - 11, 0)
    j = tl.arange(0, BLOCK)
    total = tl.zeros([256], dtype=tl.int32)  # of the bins from `window` on
    for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        live = at + j < n
        key = _digits(tl.load(scores_ptr + at + j, mask=live, other=0.0))
        if LEVEL > 0:
            live = live & ((key >> open_) == agreed)
            bin_ = ((key >> shift) & ((1 << (open_ - shift)) - 1)).to(tl.int32)
        else:
            bin_ = _first_bin(key, window)
            inside = live & (bin_ >= window) & (bin_ < window + 256)
            total += _counts(bin_ - window, inside, 256)
            live = live & (inside == 0)
        none = live & (key == _NO_SCORE)
        first = tl.sum(tl.where(j == 0, bin_, 0), 0)
        same = live & (bin_ == first) & (none == 0)
        tl.atomic_add(work_ptr + bin_, 1, mask=live & (none == 0) & (same == 0), sem="relaxed")
        several = tl.sum(same.to(tl.int32), 0)
        tl.atomic_add(work_ptr + first, several, mask=several > 0, sem="relaxed")
        several = tl.sum(none.to(tl.int32), 0)
        tl.atomic_add(work_ptr + tl.max(tl.where(none, bin_, 0), 0), several, mask=several > 0, sem="relaxed")
    if LEVEL == 0:
        tl.atomic_add(work_ptr + window + tl.arange(0, 256), total, mask=total > 0, sem="relaxed")
    tl.debug_barrier()  # all of this program's counts are out before it says so
    if tl.atomic_add(work_ptr + DONE, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        hist_ptr = work_ptr + tl.arange(0, BINS)
        bin_, need = _digit(tl.load(hist_ptr, cache_modifier=".cg"), need, BINS)
        if LEVEL == 0:
            found, open_ = _of_first_bin(bin_, window)
        else:
            found = found | (bin_ << shift)
            open_ = shift
        tl.store(work_ptr + STATE, found)
        tl.store(work_ptr + STATE + 1, need)
        tl.store(work_ptr + STATE + 2, open_)
        tl.store(work_ptr + DONE, 0)
        tl.store(hist_ptr, tl.zeros([BINS], dtype=tl.int32))


@triton.jit
def _range(n, BLOCK: tl.constexpr):
    # the contiguous range of one program, whole tiles
    tiles = tl.cdiv(tl.cdiv(n, tl.num_programs(0)), BLOCK)
    start = tl.program_id(0) * tiles * BLOCK
    return start, tl.minimum(start + tiles * BLOCK, n)


@triton.jit
def _tally_kernel(scores_ptr, count_ptr, work_ptr, BLOCK: tl.constexpr, STATE: tl.constexpr, TALLY: tl.constexpr):
    n = tl.load(count_ptr)
    threshold = tl.load(work_ptr + STATE).to(tl.uint32, bitcast=True)
    start, end = _range(n, BLOCK)
    above = tl.zeros([BLOCK], dtype=tl.int32)
    equal = tl.zeros([BLOCK], dtype=tl.int32)
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        key = _digits(tl.load(scores_ptr + i, mask=i < end, other=0.0))
        above += ((i < end) & (key > threshold)).to(tl.int32)
        equal += ((i < end) & (key == threshold)).to(tl.int32)
    tally_ptr = work_ptr + TALLY + 2 * tl.program_id(0)
    tl.store(tally_ptr, tl.sum(above, 0))
    tl.store(tally_ptr + 1, tl.sum(equal, 0))


@triton.jit
def _write_chosen(
    scores_ptr, pids_ptr, out_pids_ptr, out_scores_ptr, i, live, score, key, threshold, ties, above, equal,
    HAS_PIDS: tl.constexpr,
):  # fmt: skip
    # scores above the threshold, and the first ``ties`` equal to it; above, equal: how many came before
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
    return above + tl.sum(is_above, 0), equal + tl.sum(is_equal, 0)


@triton.jit(do_not_specialize=["m"])
def _scatter_kernel(
    scores_ptr, pids_ptr, count_ptr, work_ptr, out_pids_ptr, out_scores_ptr, out_count_ptr, m,
    HAS_PIDS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS_P: tl.constexpr, STATE: tl.constexpr, TALLY: tl.constexpr,
):  # fmt: skip
    n = tl.load(count_ptr)
    threshold = tl.load(work_ptr + STATE).to(tl.uint32, bitcast=True)
    ties = tl.load(work_ptr + STATE + 1)
    p = tl.arange(0, PROGRAMS_P)
    earlier = p < tl.program_id(0)
    above = tl.sum(tl.load(work_ptr + TALLY + 2 * p, mask=earlier, other=0), 0)
    equal = tl.sum(tl.load(work_ptr + TALLY + 2 * p + 1, mask=earlier, other=0), 0)
    start, end = _range(n, BLOCK)
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + i, mask=i < end, other=0.0)
        above, equal = _write_chosen(
            scores_ptr, pids_ptr, out_pids_ptr, out_scores_ptr, i, i < end, score, _digits(score), threshold, ties,
            above, equal, HAS_PIDS,
        )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(out_count_ptr, tl.minimum(m, n))


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

    scores: fp32 [cap], NaN counts as -inf, which ranks last; pids: int32 [cap], or None for 0, 1, 2, ...;
    count: int32 [1] on the device; out_pids: int32 [>= m]; out_scores: fp32 [>= m]; out_count: int32 [1], min(m, n);
    work: from ``select_workspace``. What lies behind ``out_count`` is left as it was.
    """
    has_pids = pids is not None
    listed = scores if pids is None else pids
    programs = (work.numel() - _TALLY) // 2
    grid = (programs,)
    for level in range(3):
        _histogram_kernel[grid](
            scores, count, work, m, LEVEL=level, BINS=BINS, BLOCK=HISTOGRAM_BLOCK, SAMPLE=SAMPLE, STATE=_STATE,
            DONE=_DONE, num_warps=4,
        )  # fmt: skip
    _tally_kernel[grid](scores, count, work, BLOCK=BLOCK, STATE=_STATE, TALLY=_TALLY, num_warps=8)
    _scatter_kernel[grid](
        scores, listed, count, work, out_pids, out_scores, out_count, m,
        HAS_PIDS=has_pids, BLOCK=BLOCK, PROGRAMS_P=triton.next_power_of_2(programs), STATE=_STATE, TALLY=_TALLY,
        num_warps=8,
    )  # fmt: skip
