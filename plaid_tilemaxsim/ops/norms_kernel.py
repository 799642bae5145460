"""Inverse norms of compressed embeddings, once at load.

    inv(t) = 1 / sqrt(sum_d (centroid[code_t, d] + w[index(t, d)])^2),  0 for a vector of norm 0

A program decodes BLOCK_N rows slot by slot; the dimensions of slot p are p, p + 8 / NBITS, ..., so a slot's centroid
values are one strided load that hits L1 for all slots but the first. Formula of ``torch.nn.functional.normalize``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

# Residual bytes of a tile, and rows at most: wider tiles spill.
TILE = 4096
BLOCK_N = 32
# normalize() divides by at least this; below it a vector counts as zero
ZERO_NORM = 1e-12


@triton.jit(do_not_specialize=["n"])
def _inverse_norms_kernel(
    codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, out_ptr, n,
    DIM: tl.constexpr, NBITS: tl.constexpr, PD: tl.constexpr, PD_P: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = t < n
    code = tl.load(codes_ptr + t, mask=live, other=0).to(tl.int64)
    j = tl.arange(0, PD_P)
    inside = live[:, None] & (j < PD)[None, :]
    # [BLOCK_N, PD_P]
    packed = tl.load(residuals_ptr + t[:, None] * PD + j[None, :], mask=inside, other=0).to(tl.int32)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for p in tl.static_range(8 // NBITS):
        slot = packed >> (8 - NBITS * (p + 1))
        index = tl.zeros_like(packed)
        for b in tl.static_range(NBITS):
            index |= ((slot >> b) & 1) << (NBITS - 1 - b)
        weight = tl.load(weights_ptr + index)
        at = code[:, None] * DIM + j[None, :] * (8 // NBITS) + p
        value = tl.load(centroids_ptr + at, mask=inside, other=0.0).to(tl.float32) + weight
        total += tl.sum(tl.where(inside, value * value, 0.0), 1)
    norm = tl.sqrt(total)
    tl.store(out_ptr + t, tl.where(norm > ZERO, 1.0 / norm, 0.0), mask=live)


def inverse_norms(
    codes: torch.Tensor, residuals: torch.Tensor, centroids: torch.Tensor, bucket_weights: torch.Tensor, nbits: int
) -> torch.Tensor:
    """fp32 [n]. codes int32 [n] in [0, C); residuals uint8 [n, PD] on the device or pinned; centroids fp16 or fp32
    [C, DIM]; bucket_weights fp32 [2**nbits]; all contiguous."""
    n, width = residuals.shape
    out = torch.empty(n, dtype=torch.float32, device=codes.device)
    if n:
        PD_P = triton.next_power_of_2(width)
        block_n = min(BLOCK_N, TILE // PD_P)
        _inverse_norms_kernel[(triton.cdiv(n, block_n),)](
            codes, residuals, centroids, bucket_weights, out, n,
            DIM=centroids.size(1), NBITS=nbits, PD=width, PD_P=PD_P, ZERO=ZERO_NORM, BLOCK_N=block_n,
            num_warps=4,
        )  # fmt: skip
    return out
