"""Centroid-only MaxSim over a pid list, straight from the index: PLAID's two pruning steps.

    score(p) = scale * sum_q max_{t in p} table[codes[t], q]            integers until the last product

A token costs its 4-byte code and one row of the int16 table (64 bytes at LQ = 32), which stays in L2; that traffic is
the bound, so the rest is kept out of its way:
- single-warp programs walk the passages program_id, + num_programs, ...; while the rows of one passage are gathered,
  the codes of the next, the offsets of the one after and the pid of the third are already on their way;
- a 32-bit word of the table holds two columns. max over words is right for the high half (the low half only breaks
  ties), max over words shifted left by 16 is right for the low half, and nothing is unpacked per token;
- -32768 never occurs in the rows of centroids: row C of the table is full of it and stands for "no token", so lanes
  past the end and pruned codes read that row (always in L1) and nothing needs a mask.
Integer maxima and sums are exact: the result does not depend on the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .api import CentroidScores

# Kept centroids of a sample of 1,024 up to which ``centroid_kept_kernel`` scores: measured on an H200.
FEW = tl.constexpr(128)


@triton.jit
def _max_halves(a, b):
    """Maximum of both int16 halves of int32 words (sm_90 and later)."""
    return tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def kept_of_sample(bits):
    """How many bits of 32 words of ``keep_bits``, taken from all over, are set: of 1,024 centroids."""
    ones = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)
    return tl.sum(ones, 0)


@triton.jit
def _tile_max(words, PACKED: tl.constexpr):
    """Maxima over the rows of int32 words [BLOCK_N, W]: packed halves, or (high in bits 31..16, low in bits 31..16)."""
    if PACKED:
        best = tl.reduce(words, 0, _max_halves)
        return best, best << 16
    else:
        return tl.max(words, 0), tl.max(words << 16, 0)


@triton.jit
def _gather(code, words_ptr, keep_bits_ptr, w, C, W_ROW: tl.constexpr, USE_KEEP: tl.constexpr):
    """Rows of the table for codes [BLOCK_N] in 0..C: int32 words [BLOCK_N, BLOCK_W]; row C where not kept."""
    if USE_KEEP:
        kept = (tl.load(keep_bits_ptr + (code >> 5), mask=code < C, other=0) >> (code & 31)) & 1
        code = tl.where(kept != 0, code, C)
    return tl.load(words_ptr + code.to(tl.int64)[:, None] * W_ROW + w[None, :])


@triton.jit(do_not_specialize=["num_pids", "keep_words", "C", "LQ"])
def _centroid_maxsim_kernel(
    words_ptr, scale_ptr, keep_bits_ptr, codes_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr,
    num_pids, keep_words, C, LQ,
    W_ROW: tl.constexpr, HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_BASE: tl.constexpr,
    USE_KEEP: tl.constexpr, UNLESS_FEW: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if UNLESS_FEW:  # noqa: SIM102 (triton would compile the second condition in any case)
        if kept_of_sample(tl.load(keep_bits_ptr + tl.arange(0, 32) * keep_words // 32)) <= FEW:
            return
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    tok = tl.arange(0, BLOCK_N)
    w = tl.arange(0, BLOCK_W)
    low_valid, high_valid = 2 * w < LQ, 2 * w + 1 < LQ
    nothing = -32768 * tl.minimum(LQ, 2 * BLOCK_W)
    scale = tl.load(scale_ptr)

    # Passage `first` with its codes, `first + step` with its range, `first + 2 step` with its pid.
    pid = _pid(pids_ptr, first, n, HAS_PIDS)
    start, end = _token_range(offsets_ptr, pid, first < n)
    length = (end - start).to(tl.int32)
    code = tl.load(codes_ptr + start + tok, mask=tok < length, other=C)
    pid = _pid(pids_ptr, first + step, n, HAS_PIDS)
    start1, end1 = _token_range(offsets_ptr, pid, first + step < n)
    pid2 = _pid(pids_ptr, first + 2 * step, n, HAS_PIDS)
    for i in range(first, n, step):
        length1 = (end1 - start1).to(tl.int32)
        code1 = tl.load(codes_ptr + start1 + tok, mask=tok < length1, other=C)
        start2, end2 = _token_range(offsets_ptr, pid2, i + 2 * step < n)
        pid2 = _pid(pids_ptr, i + 3 * step, n, HAS_PIDS)

        # [BLOCK_W] words: two columns each
        words = _gather(code, words_ptr, keep_bits_ptr, w, C, W_ROW, USE_KEEP)
        high, low = _tile_max(words, PACKED)
        for t in range(BLOCK_N, length, BLOCK_N):
            more = tl.load(codes_ptr + start + t + tok, mask=t + tok < length, other=C)
            words = _gather(more, words_ptr, keep_bits_ptr, w, C, W_ROW, USE_KEEP)
            high_t, low_t = _tile_max(words, PACKED)
            high, low = tl.maximum(high, high_t), tl.maximum(low, low_t)
        total = tl.sum(tl.where(high_valid, high >> 16, 0) + tl.where(low_valid, low >> 16, 0), 0)
        score = tl.where(total == nothing, float("-inf"), total.to(tl.float32) * scale)
        if HAS_BASE:
            score += tl.load(out_ptr + i)
        tl.store(out_ptr + i, score)

        start, length, code = start1, length1, code1
        start1, end1 = start2, end2


@triton.jit
def _pid(pids_ptr, i, n, HAS_PIDS: tl.constexpr):
    """Passage number i of the list, int64; 0 past the end."""
    pid = tl.cast(i, tl.int64)
    if HAS_PIDS:
        pid = tl.load(pids_ptr + i, mask=i < n, other=0).to(tl.int64)
    return pid


@triton.jit
def _token_range(offsets_ptr, pid, live):
    """First token and end of a passage, int64; empty where not ``live``."""
    return tl.load(offsets_ptr + pid, mask=live, other=0), tl.load(offsets_ptr + pid + 1, mask=live, other=0)


def launches(
    cs: CentroidScores,
    codes: Tensor,
    offsets: Tensor,
    pids: Tensor | None,
    out: Tensor,
    count: Tensor | None,
    BLOCK_Q: int,
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """What both kernels take, of a launch for each block of query tokens; each adds to what the one before left."""
    LQP = cs.table.size(1)
    words = cs.table.view(codes.dtype)
    keep_words = 0 if cs.keep_bits is None else cs.keep_bits.numel()
    for col0 in range(0, cs.LQ, BLOCK_Q):
        rows = words[:, col0 // 2 :]
        yield (
            [rows, cs.scale, cs.keep_bits, codes, offsets, pids, count, out, out.size(0), keep_words],
            {
                "LQ": cs.LQ - col0,
                "W_ROW": LQP // 2,
                "HAS_PIDS": pids is not None,
                "HAS_COUNT": count is not None,
                "HAS_BASE": col0 > 0,
            },
        )


def centroid_maxsim(
    cs: CentroidScores,
    codes: Tensor,
    offsets: Tensor,
    pids: Tensor | None,
    use_keep: bool,
    out: Tensor,
    count: Tensor | None,
    unless_few: bool = False,
) -> None:
    """See :func:`.api.centroid_maxsim`; writes ``out`` fp32 ``[n]``, with ``unless_few`` if many centroids are kept."""
    n = out.size(0)
    if n == 0:
        return
    blocks = tuning.centroid_blocks(tuning.arch(out.device), cs.table.size(1))
    grid = (min(n, blocks.programs_per_sm * tuning.num_sms(out.device)),)
    for arguments, options in launches(cs, codes, offsets, pids, out, count, blocks.BLOCK_Q):
        _centroid_maxsim_kernel[grid](
            *arguments,
            C=cs.table.size(0) - 1,
            **options,
            USE_KEEP=use_keep,
            UNLESS_FEW=unless_few,
            PACKED=blocks.PACKED,
            BLOCK_W=blocks.BLOCK_Q // 2,
            BLOCK_N=blocks.BLOCK_N,
            num_warps=1,
        )
