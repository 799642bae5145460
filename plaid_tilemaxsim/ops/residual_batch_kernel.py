"""Residual MaxSim of several queries for sm_80 and later: a token is decompressed once for all of them.

    score(q, p) = sum_i max_{t in p} Q[q, i] . (centroids[codes[t]] + w[residuals[t]]) * inv_norms[t]

One query takes its centroid's scores from a table (``residual_fast_kernel``); for many the tables would outgrow the L2
and cost more than the centroid itself, 2 DIM bytes a token. So here an embedding is put together in fp16 in the
registers that ``mma`` multiplies, 32 tokens a warp, and meets one block of 32 query tokens after the other, whose
fragments come from L1: one load of them serves two tiles. As in ``residual_fast_kernel`` lane ``4 g + t`` decodes the
bytes that it loads; the centroids lie in the order of that decoding (:func:`ordered_centroids`), and Q is permuted to
match. Weights are looked up as fp16 numbers, byte by byte.
"""

# ruff: noqa: RUF005 (triton 3.6 has no starred tuples)

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .residual_fast_kernel import decode4, decode_nibbles, pieces
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

TILES = 2  # of 16 tokens that share the fragments of Q


def supported(nbits: int, DIM: int) -> bool:
    """Whether this kernel takes the shape: a lane loads two bytes of a row or more at a time."""
    return nbits in (1, 2, 4) and DIM % 32 == 0 and DIM <= 128 and DIM * nbits % 64 == 0


# ---- order of K


@lru_cache
def k_order(nbits: int, DIM: int) -> tuple[int, ...]:
    """The dimension at every place of a row as the kernel multiplies it: lane t of a quad has the t-th quarter."""
    quarters: list[list[int]] = [[], [], [], []]
    for first, size in pieces(nbits, DIM):
        for word in range(0, size, 4):
            for shift in range(0, 4, nbits):
                for half in range(min(size, 4) // 2):
                    for nibble in range(4):
                        bit = 8 * word + 16 * half + 4 * nibble + shift
                        for t in range(4):
                            byte = first + size * t + bit // 8
                            # within a byte dimensions run from the high bits down
                            quarters[t].append(byte * (8 // nbits) + (8 - nbits - bit % 8) // nbits)
    return tuple(dim for quarter in quarters for dim in quarter)


@lru_cache
def indices(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64: sent to the device once, since a copy from pageable memory waits for it."""
    return torch.tensor(values).to(device)


_ordered: dict[tuple[int, tuple[int, ...]], tuple[weakref.ref[Tensor], int, Tensor]] = {}


def ordered_centroids(centroids: Tensor, order: tuple[int, ...]) -> Tensor:
    """Centroids fp16 [C, DIM], dimensions in ``order``; made once for a tensor and kept as long as it lives.

    Each time for a tensor of ``torch.inference_mode``.
    """
    if centroids.is_inference():  # of which nobody knows whether they changed
        return centroids[:, indices(order, centroids.device)]
    key, version = (id(centroids), order), centroids._version
    held = _ordered.get(key)
    if held is not None and held[0]() is centroids and held[1] == version:
        return held[2]
    ordered = centroids[:, indices(order, centroids.device)]
    _ordered[key] = (weakref.ref(centroids, lambda _: _ordered.pop(key, None)), version, ordered)
    return ordered


def weight_table(bucket_weights: Tensor, nbits: int) -> Tensor:
    """int32 [2] or [8]: low bytes of the fp16 weights, then high bytes, where the bits of a slot, reversed, say."""
    reverse = tuple(int(f"{v:0{nbits}b}"[::-1], 2) for v in range(2**nbits))
    halves = bucket_weights[indices(reverse, bucket_weights.device)].half().view(torch.int16).int()
    halves = torch.nn.functional.pad(halves, (0, max(0, 4 - 2**nbits))).view(-1, 4)
    shifts = torch.arange(0, 32, 8, device=halves.device)
    return torch.cat([((halves >> at & 255) << shifts).sum(1) for at in (0, 8)]).to(torch.int32)


# ---- PTX


@dataclass(frozen=True)
class Tile:
    """PTX of one shape with its constraints, and the residual words of a row and lane."""

    words: int
    tables: int
    asm: str
    constraints: str


@lru_cache
def tile(nbits: int, DIM: int, blocks: int) -> Tile:
    """PTX that turns 32 tokens' codes and residuals into running maxima of ``blocks`` blocks of query tokens.

    Operands: 2 NT maxima of every block out; of rows g, g + 8, ...: code, residual words, inverse norm; decode table;
    address of the lane's quarter of the centroids; maxima in; address of the Q fragments.
    """
    p = Ptx()
    loads = pieces(nbits, DIM)
    words = sum(max(size // 4, 1) for _, size in loads)
    number = iter(range(10000))

    def operands(n: int) -> list[str]:
        return [f"${next(number)}" for _ in range(n)]

    out = operands(2 * NT * blocks)
    codes, residuals, inverse = [], [], []
    for _ in range(2 * TILES):
        codes += operands(1)
        residuals.append(operands(words))
        inverse += operands(1)
    table = operands(2 if nbits < 4 else 8)
    centroids = operands(1)[0]
    maxima = operands(2 * NT * blocks)
    q = operands(1)

    p.lines.append(".reg .b64 a;")
    a: list[list[str]] = []
    for row in range(2 * TILES):
        p.lines.append(f"mad.wide.u32 a, {codes[row]}, {2 * DIM}, {centroids};")
        row_words = []
        for at in range(0, DIM // 2, 16):
            four = [p.new() for _ in range(4)]
            p.lines.append(f"ld.global.nc.v4.b32 {{{', '.join(four)}}}, [a+{at}];")
            row_words += four
        a.append(row_words)
    for row in range(2 * TILES):
        word = at = 0
        for _, size in loads:
            for _ in range(max(size // 4, 1)):
                x = residuals[row][word]
                pairs = decode4(p, x, size, table) if nbits == 4 else decode_nibbles(p, nbits, x, size, table)
                word += 1
                for pair in pairs:
                    for weight in pair:
                        a[row][at] = p("add.rn.f16x2", a[row][at], weight)
                        at += 1
    tiles = [[a[2 * i], a[2 * i + 1]] for i in range(TILES)]
    norms = [[inverse[2 * i], inverse[2 * i + 1]] for i in range(TILES)]
    best_of_blocks(p, tiles, norms, q, blocks, NT, maxima, out)

    inputs = next(number) - len(out)
    constraints = ["r"] * inputs
    constraints[-1] = "l"
    constraints[-2 - len(maxima)] = "l"
    return Tile(words, len(table), p.text(), ",".join(["=&r"] * len(out) + constraints))


# ---- kernel


@triton.jit
def _load_rows(
    start, left, row, codes_at, residuals_at, inv_norms_at, lo, step,
    LOADS: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, INV_BYTES: tl.constexpr,
):  # fmt: skip
    """Code, residual words and inverse norm of rows g, g + 8, ... of a tile; past the passage's end its last token."""
    rows = ()
    for r in tl.static_range(ROWS):
        token = start + tl.minimum(left - 1, row + 8 * r)
        rows = rows + load(codes_at, token, 4, "b32", 1)
        for k in tl.static_range(len(LOADS)):
            rows = rows + load_once(residuals_at[k], token, ROW_BYTES, LOADS[k])
        if INV_BYTES == 2:
            stored = load(inv_norms_at, token, 2, "u16", 1)[0].to(tl.float32)
        else:
            stored = load(inv_norms_at, token, 4, "b32", 1)[0].to(tl.float32, bitcast=True)
        rows = rows + ((lo + step * stored).to(tl.int32, bitcast=True),)
    return rows


@triton.jit(do_not_specialize=["num_pids"])
def _residual_batch_kernel(
    q_ptr, table_ptr, centroids_ptr, codes_ptr, residuals_ptr, inv_norms_ptr, inv_norm_lo, inv_norm_step,
    offsets_ptr, pids_ptr, count_ptr, out_ptr, num_pids,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, REDUCE_ASM: tl.constexpr, REDUCE_CONSTRAINTS: tl.constexpr,
    NT: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr, TABLES: tl.constexpr,
    LOADS: tl.constexpr, LOADS_AT: tl.constexpr, DIM: tl.constexpr, ROW_BYTES: tl.constexpr, INV_BYTES: tl.constexpr,
    HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
    step = tl.num_programs(0)
    lane = tl.arange(0, 32)
    row, t = lane // 4, lane % 4
    zero = tl.zeros([32], dtype=tl.int32)
    q = ((q_ptr + lane * 4).to(tl.int64),)
    table = ()
    for k in tl.static_range(TABLES):
        table = table + (tl.load(table_ptr + k) + zero,)  # type: ignore[assignment]
    centroids = ((centroids_ptr + t * (DIM // 4)).to(tl.int64),)
    nothing = (zero + -8388608,) * (2 * NT * BLOCKS)  # the bits of -inf
    zero64 = zero.to(tl.int64)
    codes_at = codes_ptr.to(tl.int64) + zero64
    inv_norms_at = inv_norms_ptr.to(tl.int64) + zero64
    residuals_at = ()
    for k in tl.static_range(len(LOADS)):
        residuals_at = residuals_at + ((residuals_ptr + LOADS_AT[k] + t * LOADS[k]).to(tl.int64),)  # type: ignore[assignment]
    ROWS: tl.constexpr = 2 * TILES
    TOKENS: tl.constexpr = 16 * TILES

    # The walk: tile x is computed, y is being loaded; passage a comes after y's, b after a.
    i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = first_tile(offsets_ptr, pids_ptr, n, step, HAS_PIDS, GROUP)
    i_x, left_x = i_y, left_y
    x = _load_rows(
        start_y, left_y, row, codes_at, residuals_at, inv_norms_at, inv_norm_lo, inv_norm_step,
        LOADS, ROWS, ROW_BYTES, INV_BYTES,
    )  # fmt: skip
    i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = advance(
        i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b,
        offsets_ptr, pids_ptr, n, step, 0, HAS_PIDS, GROUP, TOKENS, "packed",
    )  # fmt: skip
    maxima = nothing
    while i_x < n:
        y = _load_rows(
            start_y, left_y, row, codes_at, residuals_at, inv_norms_at, inv_norm_lo, inv_norm_step,
            LOADS, ROWS, ROW_BYTES, INV_BYTES,
        )  # fmt: skip
        maxima = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, x + table + centroids + maxima + q,
            dtype=(tl.int32,) * (2 * NT * BLOCKS), is_pure=True, pack=1,
        )  # fmt: skip
        if left_x <= TOKENS:
            for block in tl.static_range(BLOCKS):
                block_maxima = maxima[2 * NT * block : 2 * NT * (block + 1)]
                score = sum_of_maxima(block_maxima, lane, REDUCE_ASM, REDUCE_CONSTRAINTS)
                score = tl.where(left_x <= 0, float("-inf"), score)
                tl.store(out_ptr + block * num_pids.to(tl.int64) + i_x, score, mask=i_x < n)
            maxima = nothing
        i_x, left_x, x = i_y, left_y, y
        i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = advance(
            i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b,
            offsets_ptr, pids_ptr, n, step, 0, HAS_PIDS, GROUP, TOKENS, "packed",
        )  # fmt: skip


# ---- launcher


def residual_maxsim(
    Q: Tensor,
    centroids: Tensor,
    codes: Tensor,
    residuals: Tensor,
    inv_norms: Tensor,
    inv_norm_lo: float,
    inv_norm_step: float,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None,
    out: Tensor,
    count: Tensor | None,
) -> None:
    """See :func:`.api.residual_maxsim_batch`; writes ``out`` fp32 ``[NQ, n]``."""
    NQ, _, DIM = Q.shape
    n = out.size(1)
    if n == 0:
        return
    fragments = query_fragments(Q[:, :, indices(k_order(nbits, DIM), Q.device)])
    blocks = fragments.size(0)
    launch = tuning.residual_batch_blocks(tuning.arch(Q.device), nbits, DIM)
    # one row of scores for every block of query tokens; a query of one block writes where it belongs
    rows = out if blocks == NQ else torch.zeros(blocks, n, device=Q.device)
    programs, group = dealt(launch.programs_per_sm, launch.group, pids, n, Q.device)
    ordered, table = ordered_centroids(centroids, k_order(nbits, DIM)), weight_table(bucket_weights, nbits)
    reduce_asm, reduce_constraints = reduction(NT, "max.f32")
    for first in range(0, blocks, launch.BLOCKS):
        together = min(launch.BLOCKS, blocks - first)
        shape = tile(nbits, DIM, together)
        _residual_batch_kernel[(programs,)](
            fragments[first],
            table,
            ordered,
            codes,
            residuals,
            inv_norms,
            inv_norm_lo,
            inv_norm_step,
            offsets,
            pids,
            count,
            rows[first],
            n,
            ASM=shape.asm,
            CONSTRAINTS=shape.constraints,
            REDUCE_ASM=reduce_asm,
            REDUCE_CONSTRAINTS=reduce_constraints,
            NT=NT,
            BLOCKS=together,
            TILES=TILES,
            TABLES=shape.tables,
            LOADS=tuple(size for _, size in pieces(nbits, DIM)),
            LOADS_AT=tuple(first for first, _ in pieces(nbits, DIM)),
            DIM=DIM,
            ROW_BYTES=DIM * nbits // 8,
            INV_BYTES=inv_norms.element_size(),
            HAS_PIDS=pids is not None,
            HAS_COUNT=count is not None,
            GROUP=group,
            maxnreg=launch.maxnreg,
            num_warps=1,
        )
    if rows is not out:
        add_blocks(rows, out, count)
