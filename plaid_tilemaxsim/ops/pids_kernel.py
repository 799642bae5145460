"""Check a list of pids on the device: clamp what is outside the index and remember where that was.

Lets a launch go ahead with pids that nobody has looked at: whoever reads the result reads the flag with it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["cap", "num_passages"])
def _clamp_kernel(pids_ptr, count_ptr, out_ptr, flag_ptr, cap, num_passages, BLOCK: tl.constexpr):
    n = tl.minimum(tl.load(count_ptr), cap)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pid = tl.load(pids_ptr + i, mask=i < n, other=0)
    outside = (pid < 0) | (pid >= num_passages)
    tl.store(out_ptr + i, tl.where(outside, 0, pid), mask=i < cap)
    tl.atomic_max(flag_ptr + tl.zeros([BLOCK], dtype=tl.int32), i + 1, mask=outside & (i < n), sem="relaxed")


def clamp_pids(
    pids: torch.Tensor, count: torch.Tensor, num_passages: int, out: torch.Tensor, flag: torch.Tensor
) -> None:
    """out: int32 [cap], pids [cap] with 0 for those outside [0, num_passages) or behind ``count`` (int32 [1]).

    flag: int32 [1], 0 if all of the first ``count`` are inside, else 1 + the last position of one that is not.
    """
    flag.zero_()
    cap = pids.numel()
    _clamp_kernel[(triton.cdiv(cap, BLOCK),)](pids, count, out, flag, cap, num_passages, BLOCK=BLOCK, num_warps=4)
