"""Residual MaxSim over a pid list in fp32 throughout: what a search's last few passages are ranked by.

    score(p) = sum_q max_{t in p} <q, v_t> / |v_t|,  v_t[d] = centroid[codes[t], d] + w[index(t, d)];  0 where |v_t| = 0

Neither the centroid table nor inverse norms, which other kernels read, are precise enough for that: embeddings are put
together and divided by their norm here. A program scores a passage, a tile of BLOCK_N tokens after the other, BLOCK_D
dimensions at a time. Bytes are loaded once and spread over their slots, as the bus that pinned residuals come through
asks for. Lanes past the end repeat the passage's last token, which changes no maximum.

Precision: v and sums are fp32, products three TF32 ones ("tf32x3"): what they leave out is 2**-22 of a product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .decompress_kernel import ZERO_NORM
from .residual_kernel import _weights


@triton.jit(do_not_specialize=["num_pids", "LQ"])
def _residual_fp32_kernel(
    Q_ptr, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr,
    num_pids, LQ,
    DIM: tl.constexpr, NBITS: tl.constexpr, ZERO: tl.constexpr,
    HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_BASE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 8 // NBITS
    PD: tl.constexpr = DIM // SLOTS
    BLOCK_P: tl.constexpr = BLOCK_D // SLOTS
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
    w0, w1 = tl.load(weights_ptr), tl.load(weights_ptr + 1)
    w2, w3 = w0, w1
    if NBITS == 2:
        w2, w3 = tl.load(weights_ptr + 2), tl.load(weights_ptr + 3)

    tok = tl.arange(0, BLOCK_N)
    q = tl.arange(0, BLOCK_Q)
    shift = 8 - NBITS - NBITS * tl.arange(0, SLOTS)
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
            for d0 in range(0, DIM, BLOCK_D):
                j = d0 // SLOTS + tl.arange(0, BLOCK_P)
                at = residuals_ptr + row[:, None] * PD + j[None, :]
                # [BLOCK_N, BLOCK_P]
                packed = tl.load(at, mask=(j < PD)[None, :], other=0).to(tl.int32)
                # [BLOCK_N, BLOCK_D]
                bits = tl.reshape(packed[:, :, None] >> shift[None, None, :], [BLOCK_N, BLOCK_D])
                d = d0 + tl.arange(0, BLOCK_D)
                inside = (d < DIM)[None, :]
                c = tl.load(centroids_ptr + code[:, None] * DIM + d[None, :], mask=inside, other=0.0)
                v = tl.where(inside, c.to(tl.float32) + _weights(bits, weights_ptr, w0, w1, w2, w3, NBITS), 0.0)
                squares += tl.sum(v * v, 1)
                # Q^T [BLOCK_D, BLOCK_Q]
                at_q = Q_ptr + q[None, :] * DIM + d[:, None]
                qs = tl.load(at_q, mask=(d < DIM)[:, None] & (q < LQ)[None, :], other=0.0)
                dot = tl.dot(v, qs, dot, input_precision="tf32x3")
            norm = tl.sqrt(squares)[:, None]
            best = tl.maximum(best, tl.where(norm > ZERO, dot / tl.maximum(norm, ZERO), 0.0))
        score = tl.sum(tl.where(q < LQ, tl.max(best, 0), 0.0), 0)
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
            BLOCK_D=blocks.BLOCK_D,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
