"""Centroid-only MaxSim over the tokens whose centroid a query token came near: PLAID's first pruning step.

    score(p) = scale * sum_q max_{t in p, kept[codes[t]]} table[codes[t], q]        -inf where no token is kept

Where few tokens are kept, most of the work is to read codes and to find that out. ``centroid_kernel`` spends a row of
its tile on every token; here a warp looks at several passages at once. As many lanes as there are 16-byte pieces in a
row of the table (4 at LQ = 32) form a group that walks passages of its own, PER_LANE codes a lane at a time, the next
ones on their way. Of its codes that are kept a group takes the largest, fetches that row together, and drops the code
wherever it stands; the warp goes on when no group has one left. If MANY of its codes are kept, it fetches the row of
each in turn, which asks for all at once. Nothing is reduced over the whole warp.

Rows of the table are as there: two int16 columns a word, -32768 in none of them. Maxima and sums of integers are exact:
the result does not depend on the launch.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import tuning
from .api import CentroidScores
from .centroid_kernel import _max_halves


@gluon.jit
def _passage(pids_ptr, offsets_ptr, i, n, HAS_PIDS: gl.constexpr):
    """First token (int64) and length of passages number i of the list; no tokens past its end."""
    pid = i.to(gl.int64)
    if HAS_PIDS:
        pid = gl.load(pids_ptr + i, mask=i < n, other=0).to(gl.int64)
    start = gl.load(offsets_ptr + pid, mask=i < n, other=0)
    return start, (gl.load(offsets_ptr + pid + 1, mask=i < n, other=0) - start).to(gl.int32)


@gluon.jit
def _codes(codes_ptr, start, left, lane, LANES: gl.constexpr, PER_LANE: gl.constexpr):
    """The next LANES * PER_LANE codes of every group, PER_LANE to a lane; -1 past the passage's end."""
    codes = ()
    for j in gl.static_range(PER_LANE):
        t = j * LANES + lane
        codes = codes + (gl.load(codes_ptr + start + t, mask=t < left, other=-1),)  # noqa: RUF005
    return codes


@gluon.jit
def _largest(codes):
    """The largest code of every group, -1 if it has none."""
    best = codes[0]
    for j in gl.static_range(1, len(codes)):
        best = gl.maximum(best, codes[j])
    return gl.max(best, 1)


@gluon.jit
def _with_row(high, low, words_ptr, code, w, W_ROW: gl.constexpr, PACKED: gl.constexpr):
    """Maxima [GROUPS, 4 LANES] with the row of each group's ``code`` [GROUPS, 1]; none below 0."""
    words = gl.load(words_ptr + code.to(gl.int64) * W_ROW + w, mask=code >= 0, other=-2147450880)
    if PACKED:
        return _max_halves(high, words), low
    else:
        return gl.maximum(high, words), gl.maximum(low, words << 16)


@gluon.jit(do_not_specialize=["num_pids", "LQ"])
def _centroid_kept_kernel(
    words_ptr, scale_ptr, keep_bits_ptr, codes_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr, num_pids, LQ,
    W_ROW: gl.constexpr, HAS_PIDS: gl.constexpr, HAS_COUNT: gl.constexpr, HAS_BASE: gl.constexpr,
    PACKED: gl.constexpr, LANES: gl.constexpr, PER_LANE: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = 32 // LANES
    TOKENS: gl.constexpr = LANES * PER_LANE
    # a value a lane, and a piece of a row a lane
    LANE: gl.constexpr = gl.BlockedLayout([1, 1], [GROUPS, LANES], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [GROUPS, LANES], [1, 1], [1, 0])
    n = num_pids
    if HAS_COUNT:
        n = gl.minimum(gl.load(count_ptr), num_pids)
    step = gl.num_programs(0) * GROUPS
    # All lanes of a group know its passage.
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, LANE))[None, :]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, LANE))[:, None]
    i = gl.program_id(0) * GROUPS + group + lane * 0
    w = gl.arange(0, 4 * LANES, layout=gl.SliceLayout(0, ROW))[None, :]
    nothing = gl.full([GROUPS, 4 * LANES], -2147450880, gl.int32, layout=ROW)  # twice -32768
    scale = gl.load(scale_ptr)

    start, left = _passage(pids_ptr, offsets_ptr, i, n, HAS_PIDS)
    codes = _codes(codes_ptr, start, left, lane, LANES, PER_LANE)
    start1, left1 = _passage(pids_ptr, offsets_ptr, i + step, n, HAS_PIDS)
    high, low = nothing, nothing << 16
    while gl.min(gl.min(i, 1), 0) < n:
        done = left <= TOKENS
        start = gl.where(done, start1, start + TOKENS)
        left = gl.where(done, left1, left - TOKENS)
        following = _codes(codes_ptr, start, left, lane, LANES, PER_LANE)

        kept = ()
        number = lane * 0 + group * 0
        for j in gl.static_range(PER_LANE):
            code = codes[j]
            bits = gl.load(keep_bits_ptr + (code >> 5), mask=code >= 0, other=0)
            kept = kept + (gl.where(((bits >> (code & 31)) & 1) != 0, code, -1),)  # noqa: RUF005
            number += (kept[j] >= 0).to(gl.int32)
        if gl.sum(gl.sum(number, 1), 0) > MANY:
            # every token's row, in the order of the passage
            for t in gl.static_range(TOKENS):
                row = gl.convert_layout(gl.gather(kept[t // LANES], group * 0 + t % LANES, 1), ROW, assert_trivial=True)
                high, low = _with_row(high, low, words_ptr, row, w, W_ROW, PACKED)
        else:
            chosen = _largest(kept)
            while gl.max(chosen, 0) >= 0:
                row = gl.convert_layout(chosen, gl.SliceLayout(1, ROW), assert_trivial=True)[:, None]
                high, low = _with_row(high, low, words_ptr, row, w, W_ROW, PACKED)
                rest = ()
                for j in gl.static_range(PER_LANE):
                    rest = rest + (gl.where(kept[j] == chosen[:, None], -1, kept[j]),)  # noqa: RUF005
                kept = rest
                chosen = _largest(kept)

        if PACKED:
            low = high << 16
        total = gl.sum(gl.where(2 * w + 1 < LQ, high >> 16, 0) + gl.where(2 * w < LQ, low >> 16, 0), 1)
        score = gl.where(total == -32768 * gl.minimum(LQ, 8 * LANES), float("-inf"), total.to(gl.float32) * scale)
        score = gl.convert_layout(score, gl.SliceLayout(1, LANE), assert_trivial=True)[:, None]
        writes = done & (i < n) & (lane == 0)
        if HAS_BASE:
            score += gl.load(out_ptr + i, mask=writes, other=0.0)
        gl.store(out_ptr + i, score + gl.zeros_like(i).to(gl.float32), mask=writes)
        i = gl.where(done, i + step, i)
        ended = gl.max(done.to(gl.int32), 1)
        if gl.max(ended, 0) != 0:
            start2, left2 = _passage(pids_ptr, offsets_ptr, gl.where(done, i + step, n), n, HAS_PIDS)
            start1, left1 = gl.where(done, start2, start1), gl.where(done, left2, left1)
        ended = gl.convert_layout(ended, gl.SliceLayout(1, ROW), assert_trivial=True)[:, None] != 0
        high, low = gl.where(ended, nothing, high), gl.where(ended, nothing << 16, low)
        codes = following


def centroid_maxsim(
    cs: CentroidScores, codes: Tensor, offsets: Tensor, pids: Tensor | None, out: Tensor, count: Tensor | None
) -> None:
    """See :func:`.api.centroid_maxsim` with ``use_keep``; writes ``out`` fp32 ``[n]``."""
    n = out.size(0)
    if n == 0:
        return
    LQP = cs.table.size(1)
    device = out.device
    blocks = tuning.centroid_kept_blocks(tuning.arch(device), LQP)
    lanes = blocks.BLOCK_Q // 8
    grid = (min(-(-n * lanes // 32), blocks.programs_per_sm * tuning.num_sms(device)),)
    words = cs.table.view(codes.dtype)
    # one launch a block of query tokens, each adding to what the one before left in `out`
    for col0 in range(0, cs.LQ, blocks.BLOCK_Q):
        _centroid_kept_kernel[grid](
            words[:, col0 // 2 :],
            cs.scale,
            cs.keep_bits,
            codes,
            offsets,
            pids,
            count,
            out,
            n,
            cs.LQ - col0,
            W_ROW=LQP // 2,
            HAS_PIDS=pids is not None,
            HAS_COUNT=count is not None,
            HAS_BASE=col0 > 0,
            PACKED=blocks.PACKED,
            LANES=lanes,
            PER_LANE=blocks.PER_LANE,
            MANY=blocks.MANY,
            maxnreg=64,  # what 32 programs of a multiprocessor can have
            num_warps=1,
        )
