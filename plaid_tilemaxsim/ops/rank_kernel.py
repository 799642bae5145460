"""Order a few thousand scores, best first, and write the answer of a search in one piece.

    place(i) = how many j come before i:  score_j > score_i, or equal scores and pid_j < pid_i,
               or equal pids too (a pid that was given twice) and j < i

Places are a permutation, so every element writes itself where it belongs. n^2 comparisons, but all independent: for
n <= 4096 one short launch, where a sort, two gathers and a concatenation take seven.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_I = 32
BLOCK_J = 256
LIMIT = 4096


@triton.jit
def _score(scores_ptr, i, n):
    # NaN ranks like an empty passage: every place must be taken by someone; adding 0.0 makes -0.0 equal to 0.0
    score = tl.load(scores_ptr + i, mask=i < n, other=0.0) + 0.0
    return tl.where(score == score, score, float("-inf"))


@triton.jit(do_not_specialize=["cap", "k"])
def _rank_kernel(
    scores_ptr, pids_ptr, count_ptr, packed_ptr, cap, k,
    HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    n = cap
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), cap)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    score = _score(scores_ptr, i, n)
    pid = i
    if HAS_PIDS:
        pid = tl.load(pids_ptr + i, mask=i < n, other=0)
    place = tl.zeros([BLOCK_I], dtype=tl.int32)
    for at in range(0, n, BLOCK_J):
        j = at + tl.arange(0, BLOCK_J)
        other = _score(scores_ptr, j, n)
        # [BLOCK_I, BLOCK_J]
        earlier = j[None, :] < i[:, None]
        if HAS_PIDS:
            other_pid = tl.load(pids_ptr + j, mask=j < n, other=0)
            same = other_pid[None, :] == pid[:, None]
            earlier = (other_pid[None, :] < pid[:, None]) | (same & earlier)
        before = (other[None, :] > score[:, None]) | ((other[None, :] == score[:, None]) & earlier)
        place += tl.sum((before & (j[None, :] < n)).to(tl.int32), 1)
    ranked = (i < n) & (place < k)
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
        HAS_PIDS=pids is not None, HAS_COUNT=count is not None, BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=4,
    )  # fmt: skip
