"""Block choices: plain functions of the chip and the shape, nothing measured at run time.

``arch`` is the compute capability as one number (80, 89, 90, 100). The choices were measured on sm_90
(H200) where a comment says so; for the others they are a best guess from shared memory, registers and
bandwidth per multiprocessor. ``plaid-tilemaxsim tune`` measures others for the chip that it runs on (:func:`load`):
those of the fields that a function is marked with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from . import tuned
from .tuned import tunable

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


def load(path: str | os.PathLike[str], device: torch.device | str = "cuda") -> None:
    """Takes the choices of a file of ``plaid-tilemaxsim tune``, made on a chip of the device's kind, for this process.

    See :func:`.tuned.load`. Raises ValueError with the file, the field, what was expected and found.
    """
    from . import residual_fast_kernel  # noqa: F401 (its choice function lives there)

    device = torch.device(device)
    if device.type != "cuda" and not interpreted():
        raise ValueError(f"{os.fspath(path)}: expected a CUDA device to take its choices for, got {device}")
    tuned.load(path, arch(device))


def dim_block(DIM: int, largest: int) -> int:
    """Largest power of two in 16..``largest`` that divides DIM, else the smallest that covers most of it."""
    block = largest
    while block > 16 and DIM % block:
        block //= 2
    return block if DIM % block == 0 else min(32, largest)


def late_share(n: int, programs: int, fixed: bool) -> tuple[int, int]:
    """(late, part): the last 1 / part of n passages goes, in equal runs, to ``late`` programs beyond the resident ones.

    (0, 0): none. The ``programs`` resident ones share the rest. The hardware starts a late one wherever another has
    ended, which evens out what equal counts leave uneven: the lengths of passages or, where these are ``fixed``, how
    fast multiprocessors are. Starting costs about what reading a passage does, so runs have several, longer ones where
    there would be too many programs, and lists on which a run would exceed the unevenness have none.
    """
    part, run, least = (20, 4, 128) if fixed else (10, 8, 32)
    late = min(8 * programs, n // (part * run)) if n >= least * programs else 0
    return (late, part) if late else (0, 0)


@dataclass(frozen=True)
class CentroidScoresBlocks:
    BLOCK_C: int
    BLOCK_Q: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@tunable("centroid_scores", num_warps=(4, 8), num_stages=(1, 2, 3), programs_per_sm=(1, 2, 3, 4))
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


@tunable("centroid", BLOCK_N=(16, 32, 64, 128), programs_per_sm=(8, 12, 16, 20, 24, 28, 32))
def centroid_blocks(arch: int, LQP: int) -> CentroidBlocks:
    """Single-warp programs; a tile of rows is BLOCK_N x BLOCK_Q x 2 bytes of registers (32 per thread at 64 x 32).

    Measured on an H200 (sm_90) at 32 columns: 132 Gtokens/s, at 24 programs 129, with 128 rows 112.
    """
    return CentroidBlocks(
        BLOCK_Q=min(LQP, 64),
        BLOCK_N=64 if LQP <= 32 else 32,
        PACKED=arch >= 90 and not interpreted(),
        programs_per_sm=32 if arch in (80, 90, 100) else 16,
    )


@dataclass(frozen=True)
class CentroidKeptBlocks:
    BLOCK_Q: int
    PER_LANE: int  # codes that a lane looks at together
    PACKED: bool
    programs_per_sm: int


@tunable("centroid_kept", PER_LANE=(4, 8, 12), programs_per_sm=(12, 16, 20, 24, 32))
def centroid_kept_blocks(arch: int, LQP: int) -> CentroidKeptBlocks:
    """``centroid_kept_kernel``: single-warp programs, with as many registers as leave room for that number of them."""
    return CentroidKeptBlocks(
        BLOCK_Q=min(LQP, 64),
        PER_LANE=8,
        PACKED=arch >= 90,
        programs_per_sm=24 if arch in (80, 90, 100) else 16,
    )


def centroid_kept_is_fast(arch: int) -> bool:
    """Whether centroid-only MaxSim over kept tokens runs ``centroid_kept_kernel`` (Gluon) where few are kept."""
    return _runs_gluon() and arch >= 80


@dataclass(frozen=True)
class ResidualBlocks:
    BLOCK_N: int
    BLOCK_Q: int
    BLOCK_P: int
    KEEP_Q: bool
    num_warps: int
    num_stages: int
    programs_per_sm: int


@tunable(
    "residual_portable",
    BLOCK_N=(16, 32, 64),
    num_warps=(1, 2, 4),
    num_stages=(1, 2, 3),
    programs_per_sm=(2, 4, 8, 12, 16),
)
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


@dataclass(frozen=True)
class ResidualFp32Blocks:
    BLOCK_N: int
    BLOCK_Q: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@tunable("residual_fp32", BLOCK_N=(16, 32, 64), num_warps=(4, 8), num_stages=(1, 2, 3), programs_per_sm=(1, 2, 3, 4))
def residual_fp32_blocks(arch: int, DIM: int, LQ: int) -> ResidualFp32Blocks:
    """``residual_fp32_kernel``. Never by the number of passages: tiles order sums, and bits must not depend on that.

    BLOCK_D: dimensions of a row at a time; rows of no more keep the query. wgmma (sm_90) takes 64 rows and reads it
    from shared memory; elsewhere fragments of it fill registers. The fastest choice of a prototype on an H200 at 2 bits
    and DIM 128, where three programs have registers enough; a guess for other chips.
    """
    wgmma = arch == 90
    return ResidualFp32Blocks(
        BLOCK_N=64 if wgmma else 32,
        BLOCK_Q=min(32, max(16, 1 << (LQ - 1).bit_length())),
        BLOCK_D=min(128 if wgmma or DIM <= 128 else 64, 1 << (DIM - 1).bit_length()),
        num_warps=4,
        num_stages=1,
        programs_per_sm=3 if wgmma else 2,
    )


def residual_is_fast(arch: int, nbits: int, DIM: int) -> bool:
    """Whether residual MaxSim runs ``residual_fast_kernel`` (inline PTX) or the portable ``residual_kernel``."""
    from . import residual_fast_kernel

    return not interpreted() and arch >= 80 and residual_fast_kernel.supported(nbits, DIM)


@dataclass(frozen=True)
class ResidualBatchBlocks:
    BLOCKS: int  # blocks of 32 query tokens that share a decode
    group: int  # consecutive passages to one program, when there are many
    maxnreg: int | None
    programs_per_sm: int


@tunable("residual_batch", BLOCKS=(2, 4, 8), group=(1, 16, 64), maxnreg=(None, 168), programs_per_sm=(8, 12))
def residual_batch_blocks(arch: int, nbits: int, DIM: int) -> ResidualBatchBlocks:
    """``residual_batch_kernel``: of several queries. Measured on an H200 (sm_90); 8 blocks are faster, but spill.

    A guess elsewhere, from what the assembler makes of it: rows of 64 dimensions with four blocks spill too, and those
    of 96 do on sm_80 unless they get all the registers that eight programs have.
    """
    BLOCKS = 3 if arch != 90 and DIM == 64 and nbits > 1 else 4
    maxnreg = 255 if arch == 80 and DIM == 96 else None
    return ResidualBatchBlocks(BLOCKS, group=16, maxnreg=maxnreg, programs_per_sm=8)


def residual_batch_is_fast(arch: int, nbits: int, DIM: int) -> bool:
    """Whether several queries share a decode (``residual_batch_kernel``) or are scored one by one."""
    from . import residual_batch_kernel

    return not interpreted() and arch >= 80 and residual_batch_kernel.supported(nbits, DIM)


def _runs_gluon() -> bool:
    """Whether there is Gluon as our kernels use it."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) and not interpreted()


def residual_batch_is_wgmma(arch: int, nbits: int, DIM: int, blocks: int, tokens: int, passages: int) -> bool:
    """Whether ``residual_wgmma_kernel`` scores all passages with these blocks of 32 query tokens.

    Up to four leave half of it idle, and few tokens do not pay for the launches before it. Measured on an H200, with
    Gluon as it is since triton 3.6.
    """
    fast = blocks > 4 and tokens >= 2**20 and tokens + passages < 2**32 - 2**16
    return _runs_gluon() and arch == 90 and nbits in (1, 2, 4) and DIM == 128 and fast


@dataclass(frozen=True)
class PQBlocks:
    BLOCKS: int  # blocks of 32 query tokens that share a decode
    tiles: int  # of 16 tokens that share the fragments of Q
    group: int  # consecutive passages to one program, when there are many
    maxnreg: int | None
    programs_per_sm: int


@tunable(
    "pq",
    BLOCKS=(1, 2, 4),
    group=(1, 16, 64),
    maxnreg=(None, 128, 168),
    programs_per_sm=(8, 12, 16),
)
def pq_blocks(arch: int, DIM: int, blocks: int) -> PQBlocks:
    """The fast kernel (``pq_fast_kernel``) for a number of blocks of 32 query tokens; DIM 128 measured on an H200."""
    if blocks == 1:
        return PQBlocks(1, 1, group=16, maxnreg=168 if DIM <= 128 else None, programs_per_sm=12)
    if DIM <= 128:
        return PQBlocks(BLOCKS=4, tiles=2, group=16, maxnreg=None, programs_per_sm=8)
    # a tile's centroids stay in DIM / 4 registers until the last block has used them
    together = 4 if DIM <= 256 else 2 if DIM <= 512 else 1
    return PQBlocks(BLOCKS=together, tiles=1, group=16, maxnreg=None, programs_per_sm=8)


@dataclass(frozen=True)
class PQPortableBlocks:
    LQP: int
    BLOCK_N: int
    BLOCK_Q: int
    BLOCK_D: int
    programs_per_sm: int


def pq_portable_blocks(DIM: int, LQ: int, NQ: int) -> PQPortableBlocks:
    """The portable kernel: up to 128 columns, a few short queries together; the query takes at most 48 KB."""
    columns = 128
    while columns > 16 and columns * DIM * 2 > 48 << 10:
        columns //= 2
    LQP = min(columns, max(16, 1 << (LQ - 1).bit_length()))
    BLOCK_Q = LQP * (min(1 << (NQ - 1).bit_length(), columns // LQP) if LQ <= LQP else 1)
    return PQPortableBlocks(LQP=LQP, BLOCK_N=32, BLOCK_Q=BLOCK_Q, BLOCK_D=dim_block(DIM, 128), programs_per_sm=4)


def pq_is_fast(arch: int, M: int, DIM: int) -> bool:
    """Whether PQ MaxSim runs ``pq_fast_kernel`` (inline PTX) or the portable ``pq_kernel``."""
    from . import pq_fast_kernel

    return not interpreted() and arch >= 80 and pq_fast_kernel.supported(M, DIM)


@dataclass(frozen=True)
class DenseFastBlocks:
    rows: int  # a tile is this many times 16 tokens
    words: int  # 4-byte words of a row in a chunk
    q_registers: int  # Q fragments stay in registers up to this many
    group: int  # consecutive passages to one program, when there are many
    maxnreg: int | None
    programs_per_sm: int


@tunable(
    "dense_fast",
    rows=(1, 2),
    group=(1, 16, 64),
    maxnreg=(None, 128, 168),
    programs_per_sm=(8, 12, 16, 20),
)
def dense_fast_blocks(arch: int, kind: str, words: int, fixed: bool) -> DenseFastBlocks:
    """``dense_fast_kernel`` for rows of ``words`` 4-byte words; ``kind``: fp16, bf16, tf32, tf32x3 or fp16x3.

    ``fixed``: passages of one length. Measured on an H200 (sm_90). Rows of at most 256 bytes keep Q in registers and
    take 32 tokens at a time; of wider ones 16 tokens and 256 bytes at a time (three fp16 products: 512), since longer
    pieces of a row suit the memory better. Each quarter of a multiprocessor has 16,384 registers: single warps go 2, 3,
    4 or 5 to a quarter with up to 255, 168, 128 or 96 of them, and nothing between is of use.
    """
    chunk = next(w for w in range(64, 0, -16) if words % w == 0)
    maxnreg: int | None
    rows, maxnreg, programs, group = 1, 168, 12, 16
    if kind in ("fp16", "bf16") and words <= 32:
        rows, maxnreg, programs = 2, 128, 16
    elif kind in ("fp16", "bf16") and words <= 64:
        rows, maxnreg, programs, group = 2, 255, 8, 8
    elif kind == "fp16x3" and words <= 256:  # wider ones spill
        chunk, maxnreg, programs = next(w for w in range(128, 0, -16) if words % w == 0), 255, 8
    elif kind in ("tf32x3", "fp16x3"):
        maxnreg, programs = None, 16
    elif fixed:
        maxnreg, programs, group = 128, 16, 1
    return DenseFastBlocks(rows, chunk, q_registers=64, group=group, maxnreg=maxnreg, programs_per_sm=programs)


def dense_is_fast(arch: int, dtype: torch.dtype, precision: str, DIM: int, columns: int, fixed: bool) -> bool:
    """Whether dense MaxSim runs ``dense_fast_kernel`` (inline PTX) or ``dense_kernel``.

    ``columns``: query tokens in all; ``fixed``: passages of one length. As measured on an H200: ``dense_kernel`` reads
    at the limit where whole tiles of one length fit its pipeline, and reads once for up to 128 columns.
    """
    from . import dense_fast_kernel

    if interpreted() or arch < 80 or not dense_fast_kernel.supported(dtype, DIM):
        return False
    if dtype == torch.float32 and precision != "tf32":
        return precision == "fp16x3" or (precision == "tf32x3" and (columns <= 32 or DIM >= 256))
    return columns <= 32 and not (fixed and DIM * dtype.itemsize <= 768)


@dataclass(frozen=True)
class DenseRingBlocks:
    tokens: int  # of a stage; each is two rows of it
    rows: int  # of a box of TMA
    stages: int
    programs_per_sm: int | None  # None: one for every passage


def dense_ring_blocks(DIM: int) -> DenseRingBlocks:
    """``dense_ring_kernel``: two programs a multiprocessor, up to 108 KB on their way to each. As measured.

    At 128 dimensions a passage is one or a few tiles: the hardware starts a program where another has ended, whose
    start the others' reads cover, and no list is so short that the shares come out uneven.
    """
    if DIM == 128:
        return DenseRingBlocks(64, rows=128, stages=2, programs_per_sm=None)
    tokens = 64 if DIM < 384 else 32 if DIM <= 768 else 16
    return DenseRingBlocks(tokens, rows=2 * tokens, stages=(108 << 10) // (tokens * DIM * 2), programs_per_sm=2)


def dense_ring_share(n: int, programs: int, DIM: int) -> tuple[int, int]:
    """(late, part) as of :func:`late_share`, for rows so wide that one or two passages cover what a start costs."""
    run = 1 if DIM > 384 else 2
    return (min(8 * programs, n // (20 * run)), 20) if n >= 32 * run * programs else (0, 0)


def dense_is_ring(arch: int, dtype: torch.dtype, DIM: int, NQ: int, LQ: int, n: int, ND: int) -> bool:
    """Whether ``dense_ring_kernel`` scores ``n`` passages of ND tokens: of rows too wide for ``dense_kernel``'s
    pipeline, or of whole tiles of 128 tokens."""
    fits = dtype.itemsize == 2 and DIM % 128 == 0 and DIM <= 1024 and LQ <= 32
    # Half a token is a row, and their number a positive int32.
    fits = fits and n * ND < 2**30 and (DIM > 128 or ND % 128 == 0)
    return _runs_gluon() and arch == 90 and fits and NQ == 1


@dataclass(frozen=True)
class DenseBlocks:
    LQP: int
    BLOCK_N: int
    BLOCK_Q: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    maxnreg: int | None


# Shared memory of one multiprocessor left to tiles in flight, in bytes (CUDA C++ programming guide, less a reserve).
_SHARED_BYTES = {80: 150 << 10, 90: 220 << 10, 100: 220 << 10}
_SHARED_BYTES_SMALL = 92 << 10


@tunable(
    "dense",
    BLOCK_N=(16, 32, 64, 128),
    num_warps=(1, 2, 4, 8),
    num_stages=(2, 3, 4),
    programs_per_sm=(1, 2, 3, 4, 6, 8, 12),
)
def dense_blocks(
    arch: int, itemsize: int, DIM: int, LQ: int, NQ: int, fixed_length: int | None, precision: str = "ieee"
) -> DenseBlocks:
    """Dense MaxSim; ``fixed_length`` is the common length of all passages, None where lengths differ.

    Columns: one query of up to 128 tokens, or several short ones up to 128 together. On sm_90, DIM 128, fp16, 32
    columns: 128 x 128 tiles and 4 warps read fixed lengths at the limit; ragged passages (mean 68) do better in
    single-warp programs with 32-row tiles. Wider rows need the query in shared memory: 4 warps.
    """
    # fp32 outside the tensor core keeps the query in registers: of wide rows the compiler can place pieces of 32
    wide = precision == "ieee" and itemsize == 4 and DIM > 512
    BLOCK_D = dim_block(DIM, 32 if wide else 256 // itemsize)
    # tf32x3 keeps both parts of its operands
    row = -(-DIM // BLOCK_D) * BLOCK_D * itemsize * (2 if itemsize == 4 and precision == "tf32x3" else 1)
    budget = _SHARED_BYTES.get(arch, _SHARED_BYTES_SMALL)
    # wider blocks spill: fp32 outside the tensor core, which is bound by its arithmetic anyway, and in three products
    columns = {"ieee": 32, "tf32x3": 64}.get(precision, 128) if itemsize == 4 else 128
    while columns > 16 and columns * row > budget // 2:
        columns //= 2
    LQP = min(columns, max(16, 1 << (LQ - 1).bit_length()))
    BLOCK_Q = LQP * (min(1 << (NQ - 1).bit_length(), columns // LQP) if LQ <= LQP else 1)
    narrow = itemsize == 2 and row <= 256 and BLOCK_Q <= 32
    if narrow and fixed_length is None:
        num_warps, programs, largest = 1, 8, 32
    else:
        num_warps, programs, largest = 8 if arch == 100 and BLOCK_Q > 64 else 4, 2, 128 if narrow else 64
        if itemsize == 4 and (arch < 90 or precision == "ieee"):
            largest = 32
        if fixed_length is not None:
            largest = min(largest, max(32, 1 << (fixed_length - 1).bit_length()))

    def shared_bytes(BLOCK_N: int, stages: int) -> int:
        # wgmma (64 rows or more) reads the query from shared memory, mma.sync from registers
        query = row * BLOCK_Q if arch >= 90 and num_warps > 1 and BLOCK_N >= 64 else 0
        return stages * BLOCK_N * row + query

    tiles = [(n, stages) for n in (128, 64, 32, 16) if n <= largest for stages in (3, 2)]
    if fixed_length is not None and 256 < row <= 768 and (arch == 90 or largest >= 64):
        # measured on an H200 (sm_90) for DIM 256 and 384 in fp16 and 128 in fp32: one program with four tiles in flight
        tiles.insert(0, (64, 4))
    tile = next((tile for tile in [*tiles, (16, 1)] if shared_bytes(*tile) <= budget), None)
    if tile is None:
        raise ValueError(
            f"precision: expected ieee or tf32 for fp32 with DIM {DIM} on sm_{arch} (shared memory), got {precision}"
        )
    programs = max(1, min(programs, budget // shared_bytes(*tile)))
    return DenseBlocks(LQP, tile[0], BLOCK_Q, BLOCK_D, num_warps, tile[1], programs, maxnreg=255 if wide else None)
