"""A plain streaming read: what the memory gives a kernel that does nothing but read.

    out[p] = sum of the int32 words (modulo 2**32) in the blocks p, p + P, p + 2 P, ... of P programs

The ceiling of every "% of read" in the results. Its launch choices are swept, since one of them is the fastest.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaid_tilemaxsim.ops import tuning


@triton.jit
def _stream_kernel(x_ptr, out_ptr, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for b in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        # [BLOCK]
        total += tl.load(x_ptr + tl.cast(b, tl.int64) * BLOCK + tl.arange(0, BLOCK))
    # in 64 bits: triton 3.7's interpreter does not wrap a sum around
    tl.store(out_ptr + tl.program_id(0), tl.sum(total.to(tl.int64), 0).to(tl.int32))


@dataclass(frozen=True)
class StreamBlocks:
    BLOCK: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# Bytes in flight an SM: BLOCK * 4 * programs (* stages).
CHOICES = (
    StreamBlocks(2048, 4, 1, 16),
    StreamBlocks(4096, 4, 1, 8),
    StreamBlocks(4096, 8, 1, 8),
    StreamBlocks(8192, 8, 1, 4),
    StreamBlocks(8192, 4, 3, 2),
    StreamBlocks(8192, 8, 3, 2),
    StreamBlocks(16384, 8, 3, 1),
    StreamBlocks(4096, 4, 4, 4),
)


def words(device: torch.device, nbytes: int) -> Tensor:
    """Random int32 words, a multiple of every BLOCK of CHOICES."""
    largest = max(choice.BLOCK for choice in CHOICES)
    n = max(1, nbytes // 4 // largest) * largest
    return torch.randint(-(1 << 31), 1 << 31, (n,), dtype=torch.int32, device=device)


def stream(x: Tensor, out: Tensor, blocks: StreamBlocks) -> Tensor:
    """Reads int32 ``x [n]``, n a multiple of BLOCK; partial sums in ``out`` int32 ``[programs]``, zero where none."""
    n = x.numel() // blocks.BLOCK
    programs = min(n, programs_of(x.device, blocks))
    _stream_kernel[(programs,)](x, out, n, BLOCK=blocks.BLOCK, STAGES=blocks.num_stages, num_warps=blocks.num_warps)
    return out


def programs_of(device: torch.device, blocks: StreamBlocks) -> int:
    return blocks.programs_per_sm * tuning.num_sms(device)


def candidates(x: Tensor) -> Iterator[tuple[StreamBlocks, Tensor]]:
    """Every launch choice with a zeroed output for it."""
    for blocks in CHOICES:
        yield blocks, torch.zeros(programs_of(x.device, blocks), dtype=torch.int32, device=x.device)
