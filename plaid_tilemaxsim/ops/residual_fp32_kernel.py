"""Residual MaxSim over a pid list in fp32 throughout: what a search's last few passages are ranked by.

    score(p) = sum_q max_{t in p} <q, v_t> / |v_t|,  v_t[d] = centroid[codes[t], d] + w[index(t, d)];  0 where |v_t| = 0

Neither the centroid table nor inverse norms, which other kernels read, are precise enough for that: embeddings are put
together and divided by their norm here. A program scores a passage, a tile of BLOCK_N tokens after the other, BLOCK_P
bytes of a row at a time. Lanes past the end repeat the passage's last token, which changes no maximum. As in
``residual_kernel``, slot s of every byte meets Q[:, s::S], S = 8 / NBITS, and nothing is interleaved; a byte's S
centroid values are one load (two of them at 1 bit).

Precision: v, norms and sums are fp32. Products are three of fp16 parts, x = hi + lo, which leave out 2**-22 of a
product. fp16 has few exponents, so each query token and each token's BLOCK_P bytes are multiplied by the power of two
that takes the largest magnitude to 2**14..2**15 (of v a bound, the norm): no part is infinite, and what is below the
smallest one does not count. Powers of two are exact, and undone in the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .decompress_kernel import ZERO_NORM
from .fp32 import _parts
from .residual_kernel import _slot_query_fp32, _weights


@triton.jit
def _exponent(x):
    """floor(log2(x)) of fp32 x > 0, -127 where x is smaller than any normal number."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def _power(e):
    """2**e as fp32, e int32 in -126..127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_pids", "LQ"])
def _residual_fp32_kernel(
    Q_ptr, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr,
    num_pids, LQ,
    DIM: tl.constexpr, NBITS: tl.constexpr, ZERO: tl.constexpr,
    HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_BASE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 8 // NBITS
    PD: tl.constexpr = DIM // SLOTS
    KEEP_Q: tl.constexpr = PD <= BLOCK_P
    # a byte's centroid values are WORDS words of HALVES values
    WORD: tl.constexpr = tl.int16 if NBITS == 8 else tl.int32 if NBITS == 4 else tl.int64
    HALVES: tl.constexpr = 4 if NBITS <= 2 else SLOTS
    WORDS: tl.constexpr = SLOTS // HALVES
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
    w0, w1 = tl.load(weights_ptr), tl.load(weights_ptr + 1)
    w2, w3 = w0, w1
    if NBITS == 2:
        w2, w3 = tl.load(weights_ptr + 2), tl.load(weights_ptr + 3)
    words_ptr = centroids_ptr.to(tl.pointer_type(WORD))

    largest = tl.zeros([BLOCK_P, BLOCK_Q], dtype=tl.float32)
    for j0 in range(0, PD, BLOCK_P):
        for s in tl.static_range(SLOTS):
            largest = tl.maximum(largest, tl.abs(_slot_query_fp32(Q_ptr, j0, LQ, s, SLOTS, DIM, BLOCK_P, BLOCK_Q)))
    # zeros have no exponent
    q_up = 14 - tl.maximum(_exponent(tl.max(largest, 0)), -100)
    q_scale = _power(q_up)[None, :]
    # KEEP_Q: one block of bytes covers DIM and the query's slots are loaded once
    qs = ()
    if KEEP_Q:
        for s in tl.static_range(SLOTS):
            kept = _slot_query_fp32(Q_ptr, 0, LQ, s, SLOTS, DIM, BLOCK_P, BLOCK_Q) * q_scale
            qs += (_parts(kept),)  # type: ignore[assignment]

    tok = tl.arange(0, BLOCK_N)
    q = tl.arange(0, BLOCK_Q)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        pid = tl.cast(i, tl.int64)
        if HAS_PIDS:
            pid = tl.load(pids_ptr + i).to(tl.int64)
        start = tl.load(offsets_ptr + pid)
        length = (tl.load(offsets_ptr + pid + 1) - start).to(tl.int32)
        best = tl.full([BLOCK_N, BLOCK_Q], float("-inf"), dtype=tl.float32)
        for t in range(0, length, BLOCK_N):
            row = start + tl.minimum(t + tok, length - 1)
            code = tl.load(codes_ptr + row).to(tl.int64)
            dot = tl.zeros([BLOCK_N, BLOCK_Q], dtype=tl.float32)
            squares = tl.zeros([BLOCK_N], dtype=tl.float32)
            for j0 in range(0, PD, BLOCK_P):
                j = j0 + tl.arange(0, BLOCK_P)
                inside = (j < PD)[None, :]
                # [BLOCK_N, BLOCK_P]
                packed = tl.load(residuals_ptr + row[:, None] * PD + j[None, :], mask=inside, other=0).to(tl.int32)
                vs = ()
                square = tl.zeros([BLOCK_N, BLOCK_P], dtype=tl.float32)
                for s in tl.static_range(SLOTS):
                    if s % HALVES == 0:
                        at = words_ptr + (code[:, None] * PD + j[None, :]) * WORDS + s // HALVES
                        word = tl.load(at, mask=inside, other=0)
                    c = (word >> (16 * (s % HALVES))).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                    w = _weights(packed >> (8 - NBITS * (s + 1)), weights_ptr, w0, w1, w2, w3, NBITS)
                    v = tl.where(inside, c + w, 0.0)
                    square += v * v
                    vs += (v,)  # type: ignore[assignment]
                block_squares = tl.sum(square, 1)
                squares += block_squares
                # |v| < 2**(15 - up)
                up = 15 - ((_exponent(block_squares) + 2) >> 1)
                scale = _power(up)[:, None]
                part = tl.zeros([BLOCK_N, BLOCK_Q], dtype=tl.float32)
                for s in tl.static_range(SLOTS):
                    if KEEP_Q:
                        q_hi, q_lo = qs[s]  # type: ignore[var-annotated]
                    else:
                        q_hi, q_lo = _parts(_slot_query_fp32(Q_ptr, j0, LQ, s, SLOTS, DIM, BLOCK_P, BLOCK_Q) * q_scale)
                    hi, lo = _parts(vs[s] * scale)
                    part = tl.dot(lo, q_hi, part)
                    part = tl.dot(hi, q_lo, part)
                    part = tl.dot(hi, q_hi, part)
                dot += part * _power(-up)[:, None]
            inverse = tl.where(squares > ZERO * ZERO, tl.rsqrt(tl.maximum(squares, ZERO * ZERO)), 0.0)
            best = tl.maximum(best, dot * inverse[:, None])
        score = tl.sum(tl.where(q < LQ, tl.max(best, 0) * _power(-q_up), 0.0), 0)
        if HAS_BASE:
            score += tl.load(out_ptr + i)
        tl.store(out_ptr + i, score)


def residual_maxsim(
    Q: Tensor,
    centroids: Tensor,
    codes: Tensor,
    residuals: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None,
    out: Tensor,
    count: Tensor | None,
) -> None:
    """See :func:`.api.residual_maxsim_fp32`; writes ``out`` fp32 ``[n]``."""
    n = out.size(0)
    if n == 0:
        return
    LQ, DIM = Q.shape
    blocks = tuning.residual_fp32_blocks(tuning.arch(out.device), DIM, LQ)
    grid = (min(n, blocks.programs_per_sm * tuning.num_sms(out.device)),)
    # one launch a block of query tokens, each adding to what the one before left in `out`
    for col0 in range(0, LQ, blocks.BLOCK_Q):
        _residual_fp32_kernel[grid](
            Q[col0:],
            codes,
            residuals,
            centroids,
            bucket_weights,
            offsets,
            pids,
            count,
            out,
            n,
            LQ - col0,
            DIM=DIM,
            NBITS=nbits,
            ZERO=ZERO_NORM,
            HAS_PIDS=pids is not None,
            HAS_COUNT=count is not None,
            HAS_BASE=col0 > 0,
            BLOCK_N=blocks.BLOCK_N,
            BLOCK_Q=blocks.BLOCK_Q,
            BLOCK_P=max(16, blocks.BLOCK_D * nbits // 8),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
