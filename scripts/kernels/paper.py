"""The algorithm of the paper's best dense kernel ("V2-MQ") in our words: a program a passage, tiles of query tokens.

    score(p) = sum_i max_t <Q[i], D[p, t]>

A program reads BLOCK_Q query tokens, then all of its passage in tiles of BLOCK_N, then the next query tokens: the
passage is read ceil(LQ / BLOCK_Q) times, once for LQ <= BLOCK_Q. The baseline of ``dense_over_paper``, with the
fastest of CHOICES.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaid_tilemaxsim.ops import tuning


@triton.jit
def _paper_kernel(
    Q_ptr, D_ptr, out_ptr, ND,
    LQ: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    d = tl.arange(0, DIM_P)
    base = D_ptr + tl.cast(p, tl.int64) * ND * DIM
    score = 0.0
    for q0 in tl.static_range(0, LQ, BLOCK_Q):
        q = q0 + tl.arange(0, BLOCK_Q)
        # [BLOCK_Q, DIM_P]
        query = tl.load(Q_ptr + q[:, None] * DIM + d[None, :], mask=(q < LQ)[:, None] & (d < DIM)[None, :], other=0.0)
        best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
        for t0 in range(0, ND, BLOCK_N):
            t = t0 + tl.arange(0, BLOCK_N)
            # [DIM_P, BLOCK_N]
            e = tl.load(base + t[None, :] * DIM + d[:, None], mask=(t < ND)[None, :] & (d < DIM)[:, None], other=0.0)
            s = tl.where((t < ND)[None, :], tl.dot(query, e), float("-inf"))
            best = tl.maximum(best, tl.max(s, 1))
        score += tl.sum(tl.where(q < LQ, best, 0.0), 0)
    tl.store(out_ptr + p, score)


@dataclass(frozen=True)
class PaperBlocks:
    BLOCK_Q: int
    BLOCK_N: int
    num_warps: int


CHOICES = (PaperBlocks(32, 64, 4), PaperBlocks(32, 128, 4), PaperBlocks(16, 64, 4))


def paper_maxsim(Q: Tensor, D: Tensor, blocks: PaperBlocks) -> Tensor:
    """fp32 ``[B]``: one query ``Q [LQ, DIM]`` with passages ``D [B, ND, DIM]``, both fp16 or bf16."""
    B, ND, DIM = D.shape
    if tuning.interpreted() and D.dtype == torch.bfloat16:
        Q, D = Q.float(), D.float()  # as in ops.dense_kernel
    out = torch.empty(B, dtype=torch.float32, device=D.device)
    DIM_P = triton.next_power_of_2(DIM)
    # whole rows in shared memory: fewer of them where they are long
    BLOCK_N, stages = min(blocks.BLOCK_N, 32768 // DIM_P), 3 if DIM_P <= 256 else 2
    _paper_kernel[(B,)](
        Q, D, out, ND, LQ=Q.size(0), DIM=DIM, DIM_P=DIM_P, BLOCK_Q=blocks.BLOCK_Q, BLOCK_N=BLOCK_N,
        num_warps=blocks.num_warps, num_stages=stages,
    )  # fmt: skip
    return out
