"""Centroid scores: one pass over the centroids gives the score table, the pruning flags and the best cells.

    S = centroids @ Q^T                            [C, LQ] fp32, never stored
    table[c, q] = round(S[c, q] / scale)           int16, scale = max_q |Q_q| * cmax / 32767; row C: -32768
    keep[c]     = max_q S[c, q] >= threshold       PLAID's first pruning step
    cells[b]    = the NCELLS best keys of block b, per q        candidate generation (reduced elsewhere)

The tensor core multiplies fp16; to keep fp32's accuracy Q is split into two fp16 parts, q = hi + lo +
O(2^-22 q), and both products accumulate in fp32. int16 with one step for the whole table is 16 times finer
than fp16 near 1 and needs no conversion in the MaxSim kernels, which take maxima of the integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .api import CentroidScores, padded_query_length
from .fp32 import _key, _parts


@triton.jit
def _query_tile(Q_ptr, q0, d0, LQ, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """Q^T tile [BLOCK_D, BLOCK_Q] fp32; zero outside the query."""
    q = q0 + tl.arange(0, BLOCK_Q)
    d = d0 + tl.arange(0, BLOCK_D)
    return tl.load(Q_ptr + q[None, :] * DIM + d[:, None], mask=(q < LQ)[None, :] & (d < DIM)[:, None], other=0.0)


@triton.jit
def _take_largest(s, row, C, at):
    """Writes the key of the largest score of every column and returns the rest; s [BLOCK_C, BLOCK_Q], -inf for none.

    The smaller row of equal ones, below C even where none is left.
    """
    top = tl.max(s, 0)
    first = tl.minimum(tl.min(tl.where(s == top[None, :], row[:, None], C - 1), 0), C - 1)
    tl.store(at, _key(top, first))
    return tl.where(row[:, None] == first[None, :], float("-inf"), s)


@triton.jit(do_not_specialize=["C", "LQ"])
def _centroid_scores_kernel(
    Q_ptr, centroids_ptr, table_ptr, scale_ptr, keep_ptr, keep_bits_ptr, cells_ptr,
    C, LQ, threshold, cmax,
    DIM: tl.constexpr, LQP: tl.constexpr, HAS_KEEP: tl.constexpr, NCELLS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    norm2 = 0.0
    for q0 in range(0, LQP, BLOCK_Q):
        squares = tl.zeros([BLOCK_Q], dtype=tl.float32)
        for d0 in range(0, DIM, BLOCK_D):
            q = _query_tile(Q_ptr, q0, d0, LQ, DIM, BLOCK_Q, BLOCK_D)
            squares += tl.sum(q * q, 0)
        norm2 = tl.maximum(norm2, tl.max(squares, 0))
    scale = tl.sqrt(norm2) * cmax / 32767.0
    # 1e-38, which fp32 cannot hold as a normal number, would make this and what it multiplies fp64
    per_step = tl.where(scale > 0, 1.0 / tl.maximum(scale, 1e-37), 0.0)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
        tl.store(table_ptr + C.to(tl.int64) * LQP + tl.arange(0, LQP), tl.full([LQP], -32768, dtype=tl.int16))

    # A query of one tile is split once: from inside the loop it would be read again for every block.
    ONE: tl.constexpr = LQP == BLOCK_Q and DIM <= BLOCK_D
    if ONE:
        hi_all, lo_all = _parts(_query_tile(Q_ptr, 0, 0, LQ, DIM, BLOCK_Q, BLOCK_D))

    for block in range(tl.program_id(0), tl.cdiv(C, BLOCK_C), tl.num_programs(0)):
        c = block * BLOCK_C + tl.arange(0, BLOCK_C)
        row = c.to(tl.int64)
        best = tl.full([BLOCK_C], float("-inf"), dtype=tl.float32)
        for q0 in range(0, LQP, BLOCK_Q):
            # [BLOCK_C, BLOCK_Q]
            s = tl.zeros([BLOCK_C, BLOCK_Q], dtype=tl.float32)
            for d0 in range(0, DIM, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                live = (c < C)[:, None] & (d < DIM)[None, :]
                e = tl.load(centroids_ptr + row[:, None] * DIM + d[None, :], mask=live, other=0.0)
                if ONE:
                    hi, lo = hi_all, lo_all
                else:
                    hi, lo = _parts(_query_tile(Q_ptr, q0, d0, LQ, DIM, BLOCK_Q, BLOCK_D))
                s = tl.dot(e, hi, s)
                s = tl.dot(e, lo, s)
            col = q0 + tl.arange(0, BLOCK_Q)
            # The clamp only meets rounding of the norms. In 1.5 * 2^23 + x the last bits are x, rounded to even: a
            # conversion would take eight times as long.
            steps = tl.minimum(tl.maximum(s * per_step, -32767.0), 32767.0) + 12582912.0
            steps = steps.to(tl.int32, bitcast=True).to(tl.int16)
            tl.store(table_ptr + row[:, None] * LQP + col[None, :], steps, mask=(c < C)[:, None])
            if HAS_KEEP:
                best = tl.maximum(best, tl.max(tl.where((col < LQ)[None, :], s, float("-inf")), 1))
            if NCELLS > 0:
                # Not NaN nor -inf: what is a score goes before what is none, so that as many keys differ.
                rest = tl.where((c < C)[:, None], tl.maximum(s, -3.4028234e38), float("-inf"))
                at = cells_ptr + tl.cast(block, tl.int64) * NCELLS * LQP + col
                # unrolled while short: an inner loop would keep the loads of the next block from being
                # started
                if NCELLS <= 4:
                    for j in tl.static_range(NCELLS):
                        rest = _take_largest(rest, c, C, at + j * LQP)
                else:
                    for j in range(NCELLS):
                        rest = _take_largest(rest, c, C, at + j * LQP)
        if HAS_KEEP:
            keep = ((best >= threshold) & (c < C)).to(tl.int32)
            tl.store(keep_ptr + c, keep.to(tl.uint8), mask=c < C)
            # [BLOCK_C / 32, 32]: bit i of word w is centroid 32 w + i
            flags = tl.reshape(keep, [BLOCK_C // 32, 32]) << tl.arange(0, 32)[None, :]
            word = block * (BLOCK_C // 32) + tl.arange(0, BLOCK_C // 32)
            tl.store(keep_bits_ptr + word, tl.sum(flags, 1), mask=word * 32 < C)


def centroid_scores(
    Q: Tensor, centroids: Tensor, threshold: float | None, cmax: float | None, ncells: int | None
) -> CentroidScores:
    """See :func:`.api.centroid_scores`: Q fp32 ``[LQ, DIM]``, centroids fp16 ``[C, DIM]``, both contiguous."""
    LQ, DIM = Q.shape
    C, device = centroids.size(0), Q.device
    if cmax is None:
        cmax = float(torch.linalg.vector_norm(centroids, dim=1, dtype=torch.float32).max())
    LQP = padded_query_length(LQ)
    blocks = tuning.centroid_scores_blocks(tuning.arch(device), LQP, DIM)
    nblocks = triton.cdiv(C, blocks.BLOCK_C)
    NCELLS = 0 if ncells is None else triton.next_power_of_2(ncells)

    table = torch.empty(C + 1, LQP, dtype=torch.int16, device=device)
    scale = torch.empty(1, dtype=torch.float32, device=device)
    keep = keep_bits = cells = None
    if threshold is not None:
        keep = torch.empty(C, dtype=torch.uint8, device=device)
        keep_bits = torch.empty(triton.cdiv(C, 32), dtype=torch.int32, device=device)
    if ncells is not None:
        cells = torch.empty(nblocks, NCELLS, LQP, dtype=torch.int64, device=device)
    grid = (min(nblocks, blocks.programs_per_sm * tuning.num_sms(device)),)
    _centroid_scores_kernel[grid](
        Q,
        centroids,
        table,
        scale,
        keep,
        keep_bits,
        cells,
        C,
        LQ,
        0.0 if threshold is None else float(threshold),
        float(cmax),
        DIM=DIM,
        LQP=LQP,
        HAS_KEEP=threshold is not None,
        NCELLS=NCELLS,
        BLOCK_C=blocks.BLOCK_C,
        BLOCK_Q=blocks.BLOCK_Q,
        BLOCK_D=blocks.BLOCK_D,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return CentroidScores(table, scale, LQ, keep, keep_bits, cells)
