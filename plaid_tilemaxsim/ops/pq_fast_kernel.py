"""MaxSim of product-quantised passages for sm_80 and later, one warp per program, the tile written in PTX.

    score(q, p) = sum_i max_{t in p} sum_m Q[q, i, m] . codebook[m, codes[t, m]]

A lookup table of every query token with every centroid (the usual way to search PQ codes) would be read LQ * M times a
token. Here a code fetches its centroid once and the tensor core multiplies it with all query tokens. As in
``residual_fast_kernel`` 16 tokens are the rows of ``mma.sync.m16n8k16`` and lane ``4 g + t`` owns a quarter of rows g
and g + 8, here the dimensions of M / 4 consecutive subspaces: its codes are one load, each code's centroid is one load
(16 bytes for 8 dimensions) that lands in the registers which ``mma`` multiplies, and Q is permuted to match. The
codebook (64 KB for DIM = 128) stays in L1.

Several blocks of query tokens, of one query or of several, share a tile's centroids. One block keeps Q in registers,
several read it from L1. A passage's last tile repeats its last token, which leaves maxima as they are.
"""

# ruff: noqa: RUF005 (triton 3.6 has no starred tuples)

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .warp_tiles import (
    NT,
    Ptx,
    add_blocks,
    advance,
    best_of_blocks,
    dealt,
    first_tile,
    load,
    load_once,
    query_fragments,
    reduction,
    sum_of_maxima,
)

# Q fragments stay in registers up to this many, else they are read from L1 for every tile.
_MAX_Q_REGISTERS = 64


def supported(M: int, DIM: int) -> bool:
    """Whether this kernel takes the shape: M codes a token of DIM / M dimensions each."""
    return M in (4, 8, 16, 32, 64) and DIM % (2 * M) == 0 and DIM % 16 == 0


@dataclass(frozen=True)
class Tile:
    """PTX of one shape with its constraints, and counts of registers."""

    q_registers: int
    asm: str
    constraints: str


@lru_cache
def tile(M: int, DIM: int, blocks: int, tiles: int) -> Tile:
    """PTX that turns the codes of ``tiles`` times 16 tokens into running maxima of ``blocks`` blocks of query tokens.

    Operands: 2 NT maxima of every block out; code words of rows g, g + 8, ...; address of the lane's codebooks; maxima
    in; Q fragments of the block (or their address).
    """
    p = Ptx()
    codes = M // 4  # of a row and lane
    words = max(codes // 4, 1)
    centroid = DIM // M * 2  # bytes
    width = next(w for w in (16, 8, 4) if centroid % w == 0)
    ksteps = DIM // 16
    q_registers = ksteps * NT * 2
    in_registers = blocks == 1 and q_registers <= _MAX_Q_REGISTERS
    number = iter(range(10000))

    def operands(n: int) -> list[str]:
        return [f"${next(number)}" for _ in range(n)]

    out = operands(2 * NT * blocks)
    rows = [operands(words) for _ in range(2 * tiles)]
    book = operands(1)[0]
    maxima = operands(2 * NT * blocks)
    q = operands(q_registers if in_registers else 1)
    inputs = next(number) - len(out)

    p.lines.append(".reg .b64 a;")
    values: list[list[str]] = [[] for _ in rows]
    for j in range(codes):
        for row in range(len(rows)):
            code = p("bfe.u32", rows[row][j // 4], str(j % 4 * 8), "8")
            p.lines.append(f"mad.wide.u32 a, {code}, {centroid}, {book};")
            for at in range(0, centroid, width):
                loaded = [p.new() for _ in range(width // 4)]
                into = loaded[0] if width == 4 else f"{{{', '.join(loaded)}}}"
                kind = {4: "b32", 8: "v2.b32", 16: "v4.b32"}[width]
                p.lines.append(f"ld.global.nc.{kind} {into}, [a+{j * 256 * centroid + at}];")
                values[row] += loaded

    best_of_blocks(p, [values[2 * i : 2 * i + 2] for i in range(tiles)], [], q, blocks, NT, maxima, out)
    in_constraints = ["r"] * inputs
    in_constraints[len(rows) * words] = "l"
    if not in_registers:
        in_constraints[-1] = "l"
    return Tile(
        q_registers=q_registers if in_registers else 0,
        asm=p.text(),
        constraints=",".join(["=&r"] * len(out) + in_constraints),
    )


@triton.jit
def _load_codes(codes_at, start, left, row, M: tl.constexpr, ROWS: tl.constexpr):
    """Code words of rows g, g + 8, ... of a tile; past the passage's end its last token."""
    words = ()
    for r in tl.static_range(ROWS):
        token = start + tl.minimum(left - 1, row + 8 * r)
        words = words + load_once(codes_at, token, M, M // 4)
    return words


@triton.jit(do_not_specialize=["num_pids"])
def _pq_maxsim_kernel(
    q_ptr, codebook_ptr, codes_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr, num_pids,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, REDUCE_ASM: tl.constexpr, REDUCE_CONSTRAINTS: tl.constexpr,
    M: tl.constexpr, DIM: tl.constexpr, NT: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
    Q_REGISTERS: tl.constexpr, HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
    step = tl.num_programs(0)
    lane = tl.arange(0, 32)
    row, t = lane // 4, lane % 4
    zero = tl.zeros([32], dtype=tl.int32)
    q_address = (q_ptr + lane * 4).to(tl.int64)
    if Q_REGISTERS:
        q = ()
        for k in tl.static_range(0, Q_REGISTERS, 4):
            q = q + load(q_address, zero + k * 32, 4, "v4.b32", 4)
    else:
        q = (q_address,)  # type: ignore[assignment]
    lowest = zero + -8388608  # the bits of -inf
    nothing = (lowest,) * (2 * NT * BLOCKS)
    book = (codebook_ptr + t * (256 * DIM // 4)).to(tl.int64)
    codes_at = (codes_ptr + t * (M // 4)).to(tl.int64)

    # The walk: tile x is computed, of y the codes are being loaded; passage a comes after y's, b after a.
    i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = first_tile(offsets_ptr, pids_ptr, n, step, HAS_PIDS, GROUP)
    i_x, left_x = i_y, left_y
    x = _load_codes(codes_at, start_y, left_y, row, M, 2 * TILES)
    i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = advance(
        i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b,
        offsets_ptr, pids_ptr, n, step, 0, HAS_PIDS, GROUP, 16 * TILES, "packed",
    )  # fmt: skip
    maxima = nothing
    while i_x < n:
        y = _load_codes(codes_at, start_y, left_y, row, M, 2 * TILES)
        maxima = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, x + (book,) + maxima + q, dtype=(tl.int32,) * (2 * NT * BLOCKS), is_pure=True, pack=1
        )
        if left_x <= 16 * TILES:
            for block in tl.static_range(BLOCKS):
                block_maxima = maxima[2 * NT * block : 2 * NT * (block + 1)]
                score = sum_of_maxima(block_maxima, lane, REDUCE_ASM, REDUCE_CONSTRAINTS)
                score = tl.where(left_x <= 0, float("-inf"), score)
                tl.store(out_ptr + block * num_pids.to(tl.int64) + i_x, score, mask=i_x < n)
            maxima = nothing
        i_x, left_x, x = i_y, left_y, y
        i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = advance(
            i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b,
            offsets_ptr, pids_ptr, n, step, 0, HAS_PIDS, GROUP, 16 * TILES, "packed",
        )  # fmt: skip


# ---- launcher


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
    NQ, _, DIM = Q.shape
    n = out.size(1)
    if n == 0:
        return
    M = codes.size(1)
    fragments = query_fragments(Q)
    blocks = fragments.size(0)
    launch = tuning.pq_blocks(tuning.arch(Q.device), DIM, blocks)
    # one row of scores for every block of query tokens; a query of one block writes where it belongs
    rows = out if blocks == NQ else torch.zeros(blocks, n, device=Q.device)
    programs, group = dealt(launch.programs_per_sm, launch.group, pids, n, Q.device)
    reduce_asm, reduce_constraints = reduction(NT, "max.f32")
    for first in range(0, blocks, launch.BLOCKS):
        together = min(launch.BLOCKS, blocks - first)
        shape = tile(M, DIM, together, launch.tiles)
        _pq_maxsim_kernel[(programs,)](
            fragments[first],
            codebook,
            codes,
            offsets,
            pids,
            count,
            rows[first],
            n,
            ASM=shape.asm,
            CONSTRAINTS=shape.constraints,
            REDUCE_ASM=reduce_asm,
            REDUCE_CONSTRAINTS=reduce_constraints,
            M=M,
            DIM=DIM,
            NT=NT,
            BLOCKS=together,
            TILES=launch.tiles,
            Q_REGISTERS=shape.q_registers,
            HAS_PIDS=pids is not None,
            HAS_COUNT=count is not None,
            GROUP=group,
            maxnreg=launch.maxnreg,
            num_warps=1,
        )
    if rows is not out:
        add_blocks(rows, out, count)
