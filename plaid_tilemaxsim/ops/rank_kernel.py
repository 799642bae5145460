"""Order a few thousand scores, best first, and write the answer of a search in one piece.

    key(i)   = (order-preserving image of the score, -pid)              int64
    place(i) = how many keys are larger, or equal (a pid that was given twice) and of an earlier j < i

Places are a permutation, so every element writes itself where it belongs. n^2 comparisons, but all independent: for
n <= 4096 one short launch, where a sort, two gathers and a concatenation take seven.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from plaid_tilemaxsim.ops.fp32 import _NONE, _key

BLOCK_I = 16
BLOCK_J = 256
LIMIT = 4096


@triton.jit
def _entry(scores_ptr, pids_ptr, i, n, HAS_PIDS: tl.constexpr):
    score = tl.load(scores_ptr + i, mask=i < n, other=0.0)
    pid = i
    if HAS_PIDS:
        pid = tl.load(pids_ptr + i, mask=i < n, other=0)
    return score, pid, tl.where(i < n, _key(score, pid), _NONE)


@triton.jit(do_not_specialize=["cap", "k"])
def _rank_kernel(
    scores_ptr, pids_ptr, count_ptr, packed_ptr, cap, k,
    HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    n = cap
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), cap)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    score, pid, key = _entry(scores_ptr, pids_ptr, i, n, HAS_PIDS)
    # Equal keys are looked at only in the block that holds entry i. [BLOCK_I, BLOCK_J] throughout: one sum at the end.
    diagonal = tl.program_id(0) * BLOCK_I // BLOCK_J * BLOCK_J
    j = diagonal + tl.arange(0, BLOCK_J)
    _, _, other = _entry(scores_ptr, pids_ptr, j, n, HAS_PIDS)
    earlier = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
    ahead = ((other[None, :] > key[:, None]) | earlier).to(tl.int32)
    for at in range(0, tl.minimum(diagonal, n), BLOCK_J):
        _, _, other = _entry(scores_ptr, pids_ptr, at + tl.arange(0, BLOCK_J), n, HAS_PIDS)
        ahead += (other[None, :] >= key[:, None]).to(tl.int32)
    for at in range(diagonal + BLOCK_J, n, BLOCK_J):
        _, _, other = _entry(scores_ptr, pids_ptr, at + tl.arange(0, BLOCK_J), n, HAS_PIDS)
        ahead += (other[None, :] > key[:, None]).to(tl.int32)
    place = tl.sum(ahead, 1)
    ranked = (i < n) & (place < k)
    score = tl.where(score == score, score, float("-inf")) + 0.0  # NaN ranks like an empty passage, -0.0 like 0.0
    tl.store(packed_ptr + 1 + place, pid, mask=ranked)
    tl.store(packed_ptr + 1 + k + place, score.to(tl.int32, bitcast=True), mask=ranked)
    if tl.program_id(0) == 0:
        tl.store(packed_ptr, tl.minimum(n, k))


def rank(
    scores: torch.Tensor, pids: torch.Tensor | None, count: torch.Tensor | None, k: int, packed: torch.Tensor
) -> None:
    """Write the ``k`` best of the first ``count`` scores, best first, ties to the smaller pid; k <= cap <= 4096.

    scores: fp32 [cap], NaN counts as -inf; pids: int32 [cap], None for 0, 1, 2, ...; count: int32 [1] on the device,
    None for all.
    packed: int32 [1 + 2 k] out: how many (at most k), their pids, the bits of their scores; the rest is left.
    """
    cap = scores.numel()
    assert k <= cap <= LIMIT
    _rank_kernel[(triton.cdiv(cap, BLOCK_I),)](
        scores, scores if pids is None else pids, scores if count is None else count, packed, cap, k,
        HAS_PIDS=pids is not None, HAS_COUNT=count is not None, BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=8,
    )  # fmt: skip
