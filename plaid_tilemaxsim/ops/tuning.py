"""Block choices: plain functions of the chip and the shape, nothing measured at run time.

``arch`` is the compute capability as one number (80, 89, 90, 100). The choices were measured on sm_90
(H200) where a comment says so; for the others they are a best guess from shared memory, registers and
bandwidth per multiprocessor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch

# Programs that stand for "a multiple of the multiprocessors" in the interpreter, which runs them one by one.
_INTERPRETER_SMS = 3


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (on CPU tensors): set before the kernels are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _properties(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _device_properties(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 90, _INTERPRETER_SMS
    return _properties(torch.cuda.current_device() if device.index is None else device.index)


def arch(device: torch.device) -> int:
    """Compute capability of a CUDA device, for example 90; the interpreter takes the choices of 90."""
    return _device_properties(device)[0]


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device (a small number for the interpreter)."""
    return _device_properties(device)[1]


def dim_block(DIM: int, largest: int) -> int:
    """Largest power of two in 16..``largest`` that divides DIM, else the smallest that covers most of it."""
    block = largest
    while block > 16 and DIM % block:
        block //= 2
    return block if DIM % block == 0 else min(32, largest)


@dataclass(frozen=True)
class CentroidScoresBlocks:
    BLOCK_C: int
    BLOCK_Q: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def centroid_scores_blocks(arch: int, LQP: int, DIM: int) -> CentroidScoresBlocks:
    """32 KB of centroids a stage at DIM = 128, two programs an SM (one with the 99 KB of sm_89).

    wgmma (sm_90) leaves the operands in shared memory: for one tile four warps have registers enough, else eight.
    """
    wgmma = arch >= 90
    return CentroidScoresBlocks(
        BLOCK_C=128,
        BLOCK_Q=min(LQP, 32),
        BLOCK_D=dim_block(DIM, 128 if wgmma or DIM <= 128 else 64),
        num_warps=4 if wgmma and DIM <= 128 and LQP <= 32 else 8,
        num_stages=2,
        programs_per_sm=2,
    )


@dataclass(frozen=True)
class CentroidBlocks:
    BLOCK_Q: int
    BLOCK_N: int
    PACKED: bool
    programs_per_sm: int


def centroid_blocks(arch: int, LQP: int) -> CentroidBlocks:
    """Single-warp programs; a tile of rows is BLOCK_N x BLOCK_Q x 2 bytes of registers (32 per thread at 64 x 32)."""
    return CentroidBlocks(
        BLOCK_Q=min(LQP, 64),
        BLOCK_N=64 if LQP <= 32 else 32,
        PACKED=arch >= 90 and not interpreted(),
        programs_per_sm=24 if arch in (80, 90, 100) else 16,
    )


@dataclass(frozen=True)
class ResidualBlocks:
    BLOCK_N: int
    BLOCK_Q: int
    BLOCK_P: int
    KEEP_Q: bool
    num_warps: int
    num_stages: int
    programs_per_sm: int


def residual_blocks(arch: int, nbits: int, DIM: int, LQP: int) -> ResidualBlocks:
    """The portable kernel. Up to DIM 128 and 32 columns the query's fragments fit one warp's registers (64 of them)."""
    PD = DIM * nbits // 8
    if DIM <= 128:
        return ResidualBlocks(
            BLOCK_N=32,
            BLOCK_Q=min(LQP, 32),
            BLOCK_P=max(16, 1 << (PD - 1).bit_length()),
            KEEP_Q=True,
            num_warps=1,
            num_stages=1,
            programs_per_sm=16 if arch in (80, 90, 100) else 12,
        )
    return ResidualBlocks(
        BLOCK_N=64 if arch >= 90 else 32,
        BLOCK_Q=min(LQP, 32),
        BLOCK_P=dim_block(PD, 32),
        KEEP_Q=False,
        num_warps=4,
        num_stages=2,
        programs_per_sm=4,
    )


def residual_is_fast(arch: int, nbits: int, DIM: int) -> bool:
    """Whether residual MaxSim runs ``residual_fast_kernel`` (inline PTX) or the portable ``residual_kernel``."""
    from . import residual_fast_kernel

    return not interpreted() and arch >= 80 and residual_fast_kernel.supported(nbits, DIM)


@dataclass(frozen=True)
class DenseBlocks:
    LQP: int
    BLOCK_N: int
    BLOCK_Q: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# Shared memory of one multiprocessor left to tiles in flight, in bytes (CUDA C++ programming guide, less a reserve).
_SHARED_BYTES = {80: 150 << 10, 90: 210 << 10, 100: 210 << 10}
_SHARED_BYTES_SMALL = 92 << 10


def dense_blocks(
    arch: int, itemsize: int, DIM: int, LQ: int, NQ: int, fixed_length: int | None, precision: str = "ieee"
) -> DenseBlocks:
    """Dense MaxSim; ``fixed_length`` is the common length of all passages, None where lengths differ.

    Columns: one query of up to 128 tokens, or several short ones up to 128 together. On sm_90, DIM 128, fp16, 32
    columns: 128 x 128 tiles and 4 warps read fixed lengths at the limit; ragged passages (mean 68) do better in
    single-warp programs with 32-row tiles. Wider rows need the query in shared memory: 4 warps.
    """
    BLOCK_D = dim_block(DIM, 256 // itemsize)
    # tf32x3 keeps both parts of its operands
    row = -(-DIM // BLOCK_D) * BLOCK_D * itemsize * (2 if itemsize == 4 and precision == "tf32x3" else 1)
    budget = _SHARED_BYTES.get(arch, _SHARED_BYTES_SMALL)
    columns = 128
    while columns > 16 and columns * row > budget // 2:
        columns //= 2
    LQP = min(columns, max(16, 1 << (LQ - 1).bit_length()))
    BLOCK_Q = LQP * (min(1 << (NQ - 1).bit_length(), columns // LQP) if LQ <= LQP else 1)
    narrow = itemsize == 2 and row <= 256 and BLOCK_Q <= 32
    if narrow and fixed_length is None:
        num_warps, programs, largest = 1, 8, 32
    else:
        num_warps, programs, largest = 4, 2, 128 if narrow else 64
        if itemsize == 4 and (arch < 90 or precision == "ieee"):
            largest = 32
        if fixed_length is not None:
            largest = min(largest, max(32, 1 << (fixed_length - 1).bit_length()))

    def shared_bytes(BLOCK_N: int, stages: int) -> int:
        # wgmma (64 rows or more) reads the query from shared memory, mma.sync from registers
        query = row * BLOCK_Q if arch >= 90 and num_warps > 1 and BLOCK_N >= 64 else 0
        return stages * BLOCK_N * row + query

    tiles = [(n, stages) for n in (128, 64, 32, 16) if n <= largest for stages in (3, 2)]
    tile = next((tile for tile in [*tiles, (16, 1)] if shared_bytes(*tile) <= budget), None)
    if tile is None:
        raise ValueError(
            f"precision: expected ieee or tf32 for fp32 with DIM {DIM} on sm_{arch} (shared memory), got {precision}"
        )
    programs = max(1, min(programs, budget // shared_bytes(*tile)))
    return DenseBlocks(LQP, tile[0], BLOCK_Q, BLOCK_D, num_warps, tile[1], programs)
