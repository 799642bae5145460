"""Centroid-only MaxSim over the tokens whose centroid a query token came near, if these are few: PLAID's first pruning.

    score(p) = scale * sum_q max_{t in p, kept[codes[t]]} table[codes[t], q]        -inf where no token is kept

Where few tokens are kept, most of the work is to read codes and to find that out. ``centroid_kernel`` spends a row of
its tile on every token; here a warp looks at several passages at once. As many lanes as there are 16-byte pieces in a
row of the table (4 at LQ = 32) form a group that walks passages of its own, PER_LANE codes a lane at a time, the next
ones on their way. Of its codes that are kept a group takes the largest, fetches that row together, and drops the code
wherever it stands; the warp goes on when no group has one left. Nothing is reduced over the whole warp.

Where many are kept that is slower, and only the device knows: both kernels are launched, look at the same sample of
centroids, and one of them returns. Rows of the table are as there: two int16 columns a word, -32768 in none of them.
Maxima and sums of integers are exact: the result does not depend on the kernel.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import tuning
from .api import CentroidScores
from .centroid_kernel import FEW, _max_halves, _token_range, kept_of_sample, launches


@gluon.jit
def _sum_of_halves(words, ones):
    """Sum of the int16 halves of words, of each that has a byte of 1 in the lower half of ``ones`` and not 0."""
    return gl.inline_asm_elementwise(
        "dp2a.lo.s32.s32 $0, $1, $2, 0;", "=r,r,r", [words, ones], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _pid(pids_ptr, i, n, HAS_PIDS: gl.constexpr):
    """Passages number i of the list; 0 past its end."""
    if HAS_PIDS:
        return gl.load(pids_ptr + i, mask=i < n, other=0).to(gl.int32)
    else:
        return gl.where(i < n, i, 0)


@gluon.jit
def _tokens(offsets_ptr, pid, live):
    """First token (int64) and length of passages; none where not ``live``."""
    start, end = _token_range(offsets_ptr, pid, live)
    return start, (end - start).to(gl.int32)


@gluon.jit
def _codes(codes_ptr, start, left, lane, LANES: gl.constexpr, PER_LANE: gl.constexpr):
    """The next LANES * PER_LANE codes of every group, PER_LANE to a lane; -1 past the passage's end."""
    codes = ()
    for j in gl.static_range(PER_LANE):
        t = j * LANES + lane
        codes = codes + (gl.load(codes_ptr + start + t, mask=t < left, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    return codes


@gluon.jit
def _largest(codes):
    """The largest code of every group, -1 if it has none."""
    best = codes[0]
    for j in gl.static_range(1, len(codes)):
        best = gl.maximum(best, codes[j])
    return gl.max(best, 1)


@gluon.jit(do_not_specialize=["num_pids", "keep_words", "LQ"])
def _centroid_kept_kernel(
    words_ptr, scale_ptr, keep_bits_ptr, codes_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr, num_pids, keep_words, LQ,
    W_ROW: gl.constexpr, HAS_PIDS: gl.constexpr, HAS_COUNT: gl.constexpr, HAS_BASE: gl.constexpr,
    PACKED: gl.constexpr, LANES: gl.constexpr, PER_LANE: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = 32 // LANES
    TOKENS: gl.constexpr = LANES * PER_LANE
    # a value a lane, and a piece of a row a lane
    LANE: gl.constexpr = gl.BlockedLayout([1, 1], [GROUPS, LANES], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [GROUPS, LANES], [1, 1], [1, 0])
    NOTHING: gl.constexpr = -2147450880  # twice -32768
    sample = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])) * keep_words // 32
    if kept_of_sample(gl.load(keep_bits_ptr + sample)) > FEW:
        return
    n = num_pids
    if HAS_COUNT:
        n = gl.minimum(gl.load(count_ptr), num_pids)
    step = gl.num_programs(0)
    # All lanes of a group know its passage.
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, LANE))[None, :]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, LANE))[:, None] + lane * 0
    w = gl.arange(0, 4 * LANES, layout=gl.SliceLayout(0, ROW))[None, :]
    nothing = gl.full([GROUPS, 4 * LANES], NOTHING, gl.int32, layout=ROW)
    ones = (2 * w < LQ).to(gl.int32) + (2 * w + 1 < LQ).to(gl.int32) * 256 + nothing * 0
    scale = gl.load(scale_ptr)

    # Each group has a passage, the range of its next one, and the pid of a third; the rest of the program's passages
    # go to whichever groups need one.
    i = gl.program_id(0) + group * step
    i1, i2 = i + GROUPS * step, i + 2 * GROUPS * step
    free = gl.program_id(0) + 3 * GROUPS * step
    start, left = _tokens(offsets_ptr, _pid(pids_ptr, i, n, HAS_PIDS), i < n)
    codes = _codes(codes_ptr, start, left, lane, LANES, PER_LANE)
    start1, left1 = _tokens(offsets_ptr, _pid(pids_ptr, i1, n, HAS_PIDS), i1 < n)
    pid2 = _pid(pids_ptr, i2, n, HAS_PIDS)
    high, low = nothing, nothing << 16
    while gl.min(gl.min(i, 1), 0) < n:
        done = left <= TOKENS
        start = gl.where(done, start1, start + TOKENS)
        left = gl.where(done, left1, left - TOKENS)
        following = _codes(codes_ptr, start, left, lane, LANES, PER_LANE)
        # What a group that is done needs next but one is asked for now, and looked at when this step is over.
        start2, left2 = _tokens(offsets_ptr, pid2, done & (i2 < n))
        rank = gl.associative_scan(done.to(gl.int32), 0, _add)
        i3 = free + (rank - 1) * step
        pid3 = _pid(pids_ptr, gl.where(done, i3, n), n, HAS_PIDS)
        # not past n: groups without a passage go on asking while another one is in a long passage
        free = gl.minimum(free + gl.max(gl.max(rank, 1), 0) * step, n)

        kept = ()
        for j in gl.static_range(PER_LANE):
            code = codes[j]
            bits = gl.load(keep_bits_ptr + (code >> 5), mask=code >= 0, other=0)
            kept = kept + (gl.where(((bits >> (code & 31)) & 1) != 0, code, -1),)  # type: ignore[assignment]  # noqa: RUF005
        chosen = _largest(kept)
        while gl.max(chosen, 0) >= 0:
            row = gl.convert_layout(chosen, gl.SliceLayout(1, ROW), assert_trivial=True)[:, None]
            words = gl.load(words_ptr + row.to(gl.int64) * W_ROW + w, mask=row >= 0, other=NOTHING)
            if PACKED:
                high = _max_halves(high, words)
            else:
                high, low = gl.maximum(high, words), gl.maximum(low, words << 16)
            rest = ()
            for j in gl.static_range(PER_LANE):
                rest = rest + (gl.where(kept[j] == chosen[:, None], -1, kept[j]),)  # type: ignore[assignment]  # noqa: RUF005
            kept = rest
            chosen = _largest(kept)

        best = high
        if not PACKED:
            best = (high & -65536) | ((low >> 16) & 65535)
        total = gl.sum(_sum_of_halves(best, ones), 1)
        score = gl.where(total == -32768 * gl.minimum(LQ, 8 * LANES), float("-inf"), total.to(gl.float32) * scale)
        score = gl.convert_layout(score, gl.SliceLayout(1, LANE), assert_trivial=True)[:, None]
        writes = done & (i < n) & (lane == 0)
        if HAS_BASE:
            score += gl.load(out_ptr + i, mask=writes, other=0.0)
        gl.store(out_ptr + i, score + gl.zeros_like(i).to(gl.float32), mask=writes)
        ended = gl.convert_layout(gl.max(done.to(gl.int32), 1), gl.SliceLayout(1, ROW), assert_trivial=True)
        ended = (ended != 0)[:, None]
        high, low = gl.where(ended, nothing, high), gl.where(ended, nothing << 16, low)
        i, i1, i2 = gl.where(done, i1, i), gl.where(done, i2, i1), gl.where(done, i3, i2)
        start1, left1, pid2 = gl.where(done, start2, start1), gl.where(done, left2, left1), gl.where(done, pid3, pid2)
        codes = following


def centroid_maxsim(
    cs: CentroidScores, codes: Tensor, offsets: Tensor, pids: Tensor | None, out: Tensor, count: Tensor | None
) -> None:
    """See :func:`.api.centroid_maxsim` with ``use_keep``; writes ``out`` fp32 ``[n]`` if few centroids are kept."""
    n = out.size(0)
    if n == 0:
        return
    assert cs.keep_bits is not None
    blocks = tuning.centroid_kept_blocks(tuning.arch(out.device), cs.table.size(1))
    lanes = blocks.BLOCK_Q // 8
    grid = (min(-(-n * lanes // 32), blocks.programs_per_sm * tuning.num_sms(out.device)),)
    for arguments, options in launches(cs, codes, offsets, pids, out, count, blocks.BLOCK_Q):
        _centroid_kept_kernel[grid](
            *arguments,
            **options,
            PACKED=blocks.PACKED,
            LANES=lanes,
            PER_LANE=blocks.PER_LANE,
            maxnreg=65536 // (32 * blocks.programs_per_sm) // 8 * 8,
            num_warps=1,
        )
