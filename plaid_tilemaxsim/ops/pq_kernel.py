"""MaxSim of product-quantised passages, portable: for every chip that Triton knows, and for the interpreter.

    score(q, p) = sum_i max_{t in p} sum_m Q[q, i, m] . codebook[m, codes[t, m]]

Codes are replaced by their centroids on the way to the tensor core; persistent programs hold a block of query columns,
of one query or of several, and walk the passages. ``pq_fast_kernel`` does the same with the fragments of ``mma`` as the
target of its loads; :mod:`.tuning` chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .dense_kernel import query_block, write_scores


@triton.jit(do_not_specialize=["n", "NQ", "LQ"])
def _pq_maxsim_kernel(
    Q_ptr, codebook_ptr, codes_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr, n, NQ, LQ, query_stride,
    M: tl.constexpr, DIM: tl.constexpr, LQP: tl.constexpr, HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr,
    HAS_BASE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    last = n
    if HAS_COUNT:
        last = tl.minimum(tl.load(count_ptr), n)
    SUB: tl.constexpr = DIM // M
    tok = tl.arange(0, BLOCK_N)
    for i in range(tl.program_id(0), last, tl.num_programs(0)):
        pid = tl.cast(i, tl.int64)
        if HAS_PIDS:
            pid = tl.load(pids_ptr + i).to(tl.int64)
        start = tl.load(offsets_ptr + pid)
        length = (tl.load(offsets_ptr + pid + 1) - start).to(tl.int32)
        best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
        for t in range(0, length, BLOCK_N):
            live = t + tok < length
            s = tl.zeros([BLOCK_N, BLOCK_Q], dtype=tl.float32)
            for k in tl.static_range(PIECES):
                d = k * BLOCK_D + tl.arange(0, BLOCK_D)
                # [BLOCK_N, BLOCK_D]
                mask = live[:, None] & (d < DIM)[None, :]
                code = tl.load(codes_ptr + (start + t + tok)[:, None] * M + (d // SUB)[None, :], mask=mask, other=0)
                at = codebook_ptr + ((d // SUB * 256)[None, :] + code) * SUB + (d % SUB)[None, :]
                e = tl.load(at, mask=mask, other=0.0)  # dimensions past DIM meet zeros of q, and must not be NaN
                q = query_block(Q_ptr, k * BLOCK_D, NQ, LQ, query_stride, DIM, LQP, BLOCK_Q, BLOCK_D)
                s = tl.dot(e, q, s)
            best = tl.maximum(best, tl.max(tl.where(live[:, None], s, float("-inf")), 0))
        write_scores(best, out_ptr, i, n, NQ, LQ, HAS_BASE, LQP, BLOCK_Q)


def pq_maxsim(
    Q: Tensor,
    codes: Tensor,
    codebook: Tensor,
    offsets: Tensor,
    pids: Tensor | None,
    out: Tensor,
    count: Tensor | None,
) -> None:
    """See :func:`.api.pq_maxsim`; Q fp32 ``[NQ, LQ, DIM]``, writes ``out`` fp32 ``[NQ, n]``."""
    NQ, LQ, DIM = Q.shape
    n = out.size(1)
    if n == 0:
        return
    Q = Q.to(torch.float16)
    blocks = tuning.pq_portable_blocks(DIM, LQ, NQ)
    queries = blocks.BLOCK_Q // blocks.LQP
    grid = (min(n, blocks.programs_per_sm * tuning.num_sms(Q.device)),)
    for query in range(0, NQ, queries):
        # long queries: one launch a block of their tokens, each adding to what the one before left in `out`
        for token in range(0, LQ, blocks.LQP):
            _pq_maxsim_kernel[grid](
                Q[query, token:],
                codebook,
                codes,
                offsets,
                pids,
                count,
                out[query:],
                n,
                NQ - query,
                LQ - token,
                LQ * DIM,
                M=codes.size(1),
                DIM=DIM,
                LQP=blocks.LQP,
                HAS_PIDS=pids is not None,
                HAS_COUNT=count is not None,
                HAS_BASE=token > 0,
                BLOCK_N=blocks.BLOCK_N,
                BLOCK_Q=blocks.BLOCK_Q,
                BLOCK_D=blocks.BLOCK_D,
                PIECES=triton.cdiv(DIM, blocks.BLOCK_D),
                num_warps=4,
                num_stages=1,  # more would keep the query in shared memory as often
            )
