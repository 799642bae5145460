"""Embeddings from codes and residuals, for the dense kernel to score.

    e(t) = v / |v|,  v[d] = centroid[code_t, d] + w[index(t, d)];  0 for a vector of norm 0

A program decodes tiles of BLOCK_N whole rows, since the norm needs all of one. Neighbouring threads take neighbouring
dimensions: they read the same residual byte (a broadcast), and centroids and embeddings go by in full lines. Sums are
fp32, embeddings are rounded to the type of ``out`` once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tuning

# Values of a tile, 16 registers a thread with four warps.
TILE = 2048
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
# Programs that share a passage: few passages must fill the GPU, and an index's longest passage is no measure of others.
SPLIT = 4
# normalize() divides by at least this; below it a vector counts as zero
ZERO_NORM = 1e-12


@triton.jit
def _embeddings(
    row, inside, d, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr,
    DIM: tl.constexpr, NBITS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, DIM_P] of rows int64 [BLOCK_N, 1] at dimensions [1, DIM_P]; zero outside."""
    SLOTS: tl.constexpr = 8 // NBITS
    code = tl.load(codes_ptr + row, mask=inside, other=0).to(tl.int64)
    at = residuals_ptr + row * (DIM // SLOTS) + d // SLOTS
    bits = tl.load(at, mask=inside, other=0).to(tl.int32) >> (8 - NBITS - d % SLOTS * NBITS)
    # a slot holds its index with the bits reversed
    index = tl.zeros_like(bits)
    for b in tl.static_range(NBITS):
        index |= ((bits >> b) & 1) << (NBITS - 1 - b)
    value = tl.load(centroids_ptr + code * DIM + d, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value + tl.load(weights_ptr + index), 0.0)
    norm = tl.sqrt(tl.sum(value * value, 1))
    return tl.where((norm > ZERO)[:, None], value / tl.maximum(norm, ZERO)[:, None], 0.0)


@triton.jit(do_not_specialize=["n"])
def _rows_kernel(
    codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, out_ptr, n,
    DIM: tl.constexpr, NBITS: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr, DIM_P: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    d = tl.arange(0, DIM_P)[None, :]
    inside = (row < n) & (d < DIM)
    e = _embeddings(row, inside, d, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, DIM, NBITS, ZERO)
    tl.store(out_ptr + row * DIM + d, e.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "n", "ND"])
def _passages_kernel(
    codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, offsets_ptr, pids_ptr, count_ptr,
    out_ptr, lengths_ptr, left_ptr, first, n, ND,
    DIM: tl.constexpr, NBITS: tl.constexpr, ZERO: tl.constexpr, HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr, DIM_P: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    last = n
    if HAS_COUNT:
        last = tl.maximum(tl.minimum(tl.load(count_ptr) - first, n), 0)
    if tl.program_id(0) == 0:
        tl.store(left_ptr, last)
    d = tl.arange(0, DIM_P)[None, :]
    for item in range(tl.program_id(0), last * SPLIT, tl.num_programs(0)):
        i = item // SPLIT
        pid = (first + i).to(tl.int64)
        if HAS_PIDS:
            pid = tl.load(pids_ptr + pid).to(tl.int64)
        start = tl.load(offsets_ptr + pid)
        length = (tl.load(offsets_ptr + pid + 1) - start).to(tl.int32)
        if item % SPLIT == 0:
            tl.store(lengths_ptr + i, length)
        for t in range(item % SPLIT * BLOCK_N, length, SPLIT * BLOCK_N):
            token = (t + tl.arange(0, BLOCK_N))[:, None]
            inside = (token < length) & (d < DIM)
            row = start + token
            e = _embeddings(row, inside, d, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, DIM, NBITS, ZERO)
            slot = tl.cast(i, tl.int64) * ND + token
            tl.store(out_ptr + slot * DIM + d, e.to(out_ptr.dtype.element_ty), mask=inside)


def decompress(
    codes: Tensor, residuals: Tensor, centroids: Tensor, bucket_weights: Tensor, nbits: int, out: Tensor
) -> None:
    """Writes ``out`` fp16 or fp32 [T, DIM] of codes int32 [T] in [0, C) and residuals uint8 [T, DIM * nbits / 8].

    centroids fp16 or fp32 [C, DIM]; bucket_weights fp32 [2**nbits]; all contiguous on one device (residuals: or
    pinned).
    """
    n, DIM = out.shape
    if n == 0:
        return
    DIM_P = triton.next_power_of_2(DIM)
    BLOCK_N = max(1, TILE // DIM_P)
    _rows_kernel[(triton.cdiv(n, BLOCK_N),)](
        codes, residuals, centroids, bucket_weights, out, n,
        DIM=DIM, NBITS=nbits, ZERO=ZERO_NORM, BLOCK_N=BLOCK_N, DIM_P=DIM_P, num_warps=NUM_WARPS,
    )  # fmt: skip


def decompress_passages(
    codes: Tensor,
    residuals: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None,
    count: Tensor | None,
    first: int,
    out: Tensor,
    lengths: Tensor,
    left: Tensor,
) -> None:
    """Passages ``pids[first:]``, at most R of them, as padded embeddings: writes the first ``left`` of ``out``.

    Takes what :func:`decompress` takes of the whole index, ``offsets`` int64 [N + 1], pids int32 or int64 [n] (None:
    every passage in order) and count int32 [1] (None: all) on the device. out fp16 or fp32 [R, ND, DIM], R passages
    from first on must exist, none longer than ND; lengths int32 [R]; left int32 [1]. What lies past a passage's length
    and past ``left`` is left as it was.
    """
    R, ND, DIM = out.shape
    if R == 0:
        left.zero_()
        return
    DIM_P = triton.next_power_of_2(DIM)
    grid = (min(R * SPLIT, PROGRAMS_PER_SM * tuning.num_sms(out.device)),)
    _passages_kernel[grid](
        codes, residuals, centroids, bucket_weights, offsets, pids, count, out, lengths, left, first, R, ND,
        DIM=DIM, NBITS=nbits, ZERO=ZERO_NORM, HAS_PIDS=pids is not None, HAS_COUNT=count is not None,
        BLOCK_N=max(1, TILE // DIM_P), DIM_P=DIM_P, SPLIT=SPLIT, num_warps=NUM_WARPS,
    )  # fmt: skip
