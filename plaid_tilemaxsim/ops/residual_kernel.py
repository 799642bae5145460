"""Residual MaxSim over a pid list, straight from the index, in portable Triton (it also runs in the interpreter).

    score(p) = sum_q max_{t in p} (scale * table[codes[t], q] + sum_d Q[q, d] * w[index(t, d)]) * inv_norm[t]

No centroid vector is read: <q, centroid> is the table's. A byte holds S = 8 / NBITS dimensions, from the high bits
down, each slot bit-reversed. The order of K inside a dot is free, so slot s of every byte meets Q[:, s::S] and nothing
is interleaved; the reversal only permutes the weights. Lanes past the end repeat the passage's last token, which
changes no maximum, so no mask is needed.

Precision: table int16 (half a step of ``scale``), Q and w rounded to fp16 for the dot, everything else fp32.
``residual_fast_kernel`` does the same with table look-ups in inline PTX; :mod:`.tuning` chooses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .api import CentroidScores


@triton.jit
def _weights(bits, weights_ptr, w0, w1, w2, w3, NBITS: tl.constexpr):
    """Weights fp32 of what the low NBITS of int32 ``bits`` hold: bucket indices with their bits reversed."""
    if NBITS == 1:
        w = tl.where((bits & 1) != 0, w1, w0)
    elif NBITS == 2:
        # the slot's high bit is the index's low bit
        odd, upper = (bits & 2) != 0, (bits & 1) != 0
        w = tl.where(upper, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    else:
        index = tl.zeros_like(bits)
        for b in tl.static_range(NBITS):
            index |= ((bits >> b) & 1) << (NBITS - 1 - b)
        w = tl.load(weights_ptr + index)
    return w


@triton.jit
def _slot_weights(packed, weights_ptr, w0, w1, w2, w3, SLOT: tl.constexpr, NBITS: tl.constexpr):
    """Weights fp16 [BLOCK_N, BLOCK_P] of one slot of bytes int32 [BLOCK_N, BLOCK_P]."""
    bits = packed >> (8 - NBITS * (SLOT + 1))
    return _weights(bits, weights_ptr, w0, w1, w2, w3, NBITS).to(tl.float16)


@triton.jit
def _slot_query_fp32(
    Q_ptr, j0, LQ,
    SLOT: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Q[:, SLOT::SLOTS]^T of bytes j0.., fp32 [BLOCK_P, BLOCK_Q]; zero outside the query: padding bytes add nothing."""
    d = (j0 + tl.arange(0, BLOCK_P)) * SLOTS + SLOT
    q = tl.arange(0, BLOCK_Q)
    at = Q_ptr + q[None, :] * DIM + d[:, None]
    return tl.load(at, mask=(d < DIM)[:, None] & (q < LQ)[None, :], other=0.0)


@triton.jit
def _slot_query(
    Q_ptr, j0, LQ,
    SLOT: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The same in fp16."""
    return _slot_query_fp32(Q_ptr, j0, LQ, SLOT, SLOTS, DIM, BLOCK_P, BLOCK_Q).to(tl.float16)


@triton.jit(do_not_specialize=["num_pids", "LQ"])
def _residual_maxsim_kernel(
    Q_ptr, table_ptr, scale_ptr, codes_ptr, residuals_ptr, inv_norms_ptr, weights_ptr, offsets_ptr, pids_ptr,
    count_ptr, out_ptr,
    num_pids, LQ, inv_norm_lo, inv_norm_step,
    DIM: tl.constexpr, NBITS: tl.constexpr, LQP: tl.constexpr,
    HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_BASE: tl.constexpr, KEEP_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 8 // NBITS
    PD: tl.constexpr = DIM // SLOTS
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
    scale = tl.load(scale_ptr)
    w0, w1 = tl.load(weights_ptr), tl.load(weights_ptr + 1)
    w2, w3 = w0, w1
    if NBITS == 2:
        w2, w3 = tl.load(weights_ptr + 2), tl.load(weights_ptr + 3)
    # KEEP_Q: one block of bytes covers DIM and the query's slots stay in registers
    if KEEP_Q:
        q0 = _slot_query(Q_ptr, 0, LQ, 0, SLOTS, DIM, BLOCK_P, BLOCK_Q)
        if SLOTS >= 2:
            q1 = _slot_query(Q_ptr, 0, LQ, 1, SLOTS, DIM, BLOCK_P, BLOCK_Q)
        if SLOTS >= 4:
            q2 = _slot_query(Q_ptr, 0, LQ, 2, SLOTS, DIM, BLOCK_P, BLOCK_Q)
            q3 = _slot_query(Q_ptr, 0, LQ, 3, SLOTS, DIM, BLOCK_P, BLOCK_Q)
        if SLOTS >= 8:
            q4 = _slot_query(Q_ptr, 0, LQ, 4, SLOTS, DIM, BLOCK_P, BLOCK_Q)
            q5 = _slot_query(Q_ptr, 0, LQ, 5, SLOTS, DIM, BLOCK_P, BLOCK_Q)
            q6 = _slot_query(Q_ptr, 0, LQ, 6, SLOTS, DIM, BLOCK_P, BLOCK_Q)
            q7 = _slot_query(Q_ptr, 0, LQ, 7, SLOTS, DIM, BLOCK_P, BLOCK_Q)

    tok = tl.arange(0, BLOCK_N)
    q = tl.arange(0, BLOCK_Q)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        pid = tl.cast(i, tl.int64)
        if HAS_PIDS:
            pid = tl.load(pids_ptr + i).to(tl.int64)
        start = tl.load(offsets_ptr + pid)
        length = (tl.load(offsets_ptr + pid + 1) - start).to(tl.int32)
        best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
        for t in range(0, length, BLOCK_N):
            row = start + tl.minimum(t + tok, length - 1)
            code = tl.load(codes_ptr + row).to(tl.int64)
            inv = tl.load(inv_norms_ptr + row).to(tl.float32) * inv_norm_step + inv_norm_lo
            # [BLOCK_N, BLOCK_Q]
            cs = tl.load(table_ptr + code[:, None] * LQP + q[None, :])
            dot = tl.zeros([BLOCK_N, BLOCK_Q], dtype=tl.float32)
            for j0 in range(0, PD, BLOCK_P):
                j = j0 + tl.arange(0, BLOCK_P)
                at = residuals_ptr + row[:, None] * PD + j[None, :]
                # [BLOCK_N, BLOCK_P]
                packed = tl.load(at, mask=(j < PD)[None, :], other=0).to(tl.int32)
                if KEEP_Q:
                    dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 0, NBITS), q0, dot)
                    if SLOTS >= 2:
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 1, NBITS), q1, dot)
                    if SLOTS >= 4:
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 2, NBITS), q2, dot)
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 3, NBITS), q3, dot)
                    if SLOTS >= 8:
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 4, NBITS), q4, dot)
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 5, NBITS), q5, dot)
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 6, NBITS), q6, dot)
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, 7, NBITS), q7, dot)
                else:
                    for s in tl.static_range(SLOTS):
                        qs = _slot_query(Q_ptr, j0, LQ, s, SLOTS, DIM, BLOCK_P, BLOCK_Q)
                        dot = tl.dot(_slot_weights(packed, weights_ptr, w0, w1, w2, w3, s, NBITS), qs, dot)
            similarity = (cs.to(tl.float32) * scale + dot) * inv[:, None]
            best = tl.maximum(best, tl.max(similarity, 0))
        score = tl.sum(tl.where(q < LQ, best, 0.0), 0)
        if HAS_BASE:
            score += tl.load(out_ptr + i)
        tl.store(out_ptr + i, score)


def residual_maxsim(
    Q: Tensor,
    cs: CentroidScores,
    codes: Tensor,
    residuals: Tensor,
    inv_norms: Tensor,
    inv_norm_lo: float,
    inv_norm_step: float,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None,
    out: Tensor,
    count: Tensor | None,
) -> None:
    """See :func:`.api.residual_maxsim`; writes ``out`` fp32 ``[n]``."""
    n = out.size(0)
    if n == 0:
        return
    DIM = Q.size(1)
    LQP = cs.table.size(1)
    blocks = tuning.residual_blocks(tuning.arch(out.device), nbits, DIM, LQP)
    grid = (min(n, blocks.programs_per_sm * tuning.num_sms(out.device)),)
    # one launch a block of query tokens, each adding to what the one before left in `out`
    for col0 in range(0, cs.LQ, blocks.BLOCK_Q):
        _residual_maxsim_kernel[grid](
            Q[col0:],
            cs.table[:, col0:],
            cs.scale,
            codes,
            residuals,
            inv_norms,
            bucket_weights,
            offsets,
            pids,
            count,
            out,
            n,
            cs.LQ - col0,
            inv_norm_lo,
            inv_norm_step,
            DIM=DIM,
            NBITS=nbits,
            LQP=LQP,
            HAS_PIDS=pids is not None,
            HAS_COUNT=count is not None,
            HAS_BASE=col0 > 0,
            KEEP_Q=blocks.KEEP_Q,
            BLOCK_N=blocks.BLOCK_N,
            BLOCK_Q=blocks.BLOCK_Q,
            BLOCK_P=blocks.BLOCK_P,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )
