"""Residual MaxSim for sm_80 and later, one warp per program, the tile written in PTX.

    score(p) = sum_q max_{t in p} (CS[codes[t], q] + Q[q] . w[residuals[t]]) * inv_norms[t]

A warp scores 16 tokens at a time with ``mma.sync.m16n8k16``: tokens are the rows (A), query tokens the
columns (B). The order of K inside a dot product is free, so it is chosen for the loads: lane ``4 g + t`` loads
the bytes of rows g and g + 8 that it will itself multiply (for 2 bits and DIM = 128 bytes ``8 t .. 8 t + 7``,
one 8-byte load), decodes them in registers, and Q is permuted to match (:func:`k_order`). Columns are permuted
too, so that the table entries that start a lane's accumulators are 16 consecutive bytes. Nothing passes through
shared memory.

Decoding looks up fp16 weights byte by byte, for 2 and 4 bits; all are scaled to at most 1 and the factor goes into Q.
For 1 bit it gives ``1024 + h`` with h = 0 or a power of two, ``w = o + s h``, without a table: s and the power go into
Q, o and 1024 into one constant per query token, added while the table entry is converted. A passage's last
tile repeats its last token, which leaves maxima as they are. Maxima are taken on the bits of positive floats (a
constant is added), where sm_90 has a three-input integer maximum.

Loads run ahead of the arithmetic along the whole walk, across passages: the residuals and table rows of the next
tile, the codes of the one after, the offsets of the passage after that, and its successor's pid.
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
from .api import CentroidScores
from .tuned import tunable
from .warp_tiles import (
    Ptx,
    advance,
    dealt,
    first_tile,
    load,
    load_once,
    reduction,
    tile_tokens,
)

# The workspace of a block of query tokens, in words: decode table at 0, BIAS at 8, a constant per query token at 32, Q
# fragments from 64 on.
# Q fragments stay in registers up to this many, else they are read from L1 for every tile.
_MAX_Q_REGISTERS = 64


# ---- order of K


def pieces(nbits: int, DIM: int) -> list[tuple[int, int]]:
    """(first byte, bytes per lane) of the loads that cover a residual row: 4 lanes read 4 times as many bytes."""
    row = DIM * nbits // 8
    done, loads = 0, []
    for size in (8, 4, 2, 1):
        while row - done >= 4 * size and row % size == 0 and done % size == 0:
            loads.append((done, size))
            done += 4 * size
    assert done == row
    return loads


def _bit_positions(nbits: int, size: int) -> list[list[tuple[int, int]]]:
    """[k-step of 16][value 0..3] -> (lowest bit within the lane's ``size`` bytes, power of two it is scaled by)."""
    bits = 8 * size
    if nbits == 4:
        return [[(16 * s + 4 * i, 0) for i in range(4)] for s in range(bits // 16)]
    if nbits == 2:
        steps = []
        for word in range(0, bits, 32):
            halves = (0, 16) if bits >= 32 else (0,)
            steps += [[(word + half + field + 4 * i, 0) for i in range(4)] for field in (0, 2) for half in halves]
        return steps
    steps = []
    for word in range(0, bits, 32):
        half = min(bits, 32) // 2  # the pair of values in a register is `half` bits apart
        for j in range(0, half, 2):
            steps.append([(word + b + half * hi, b % 10) for b in (j, j + 1) for hi in (0, 1)])
    return steps


def k_order(nbits: int, DIM: int) -> list[list[list[tuple[int, int]]]]:
    """``[k-step][t][i] -> (dim, e)``: lane t of a quad multiplies in k-step and slot i (k = 2t, 2t+1, 2t+8, 2t+9) the
    dimension ``dim`` whose decoded integer carries a factor 2**e."""
    order = []
    for first, size in pieces(nbits, DIM):
        for step in _bit_positions(nbits, size):
            lanes = []
            for t in range(4):
                lane = []
                for bit, exponent in step:
                    byte, shift = first + size * t + bit // 8, bit % 8
                    # within a byte dimensions run from the high bits down
                    lane.append((byte * (8 // nbits) + (8 - nbits - shift) // nbits, exponent))
                lanes.append(lane)
            order.append(lanes)
    return order


# ---- PTX of one tile


def decode_nibbles(p: Ptx, nbits: int, x: str, size: int, table: list[str]) -> list[tuple[str, str]]:
    """1 or 2 bits: a field of every nibble selects a byte of both tables, low bytes of fp16 weights and high ones."""
    mask = {1: "0x11111111", 2: "0x33333333"}[nbits]
    pairs = []
    for shift in range(0, 4, nbits):
        field = p("and.b32", p("shr.u32", x, str(shift)) if shift else x, mask)
        for half in range(min(size, 4) // 2):
            selector = p("shr.u32", field, "16") if half else field
            low, high = p("prmt.b32", table[0], table[0], selector), p("prmt.b32", table[1], table[1], selector)
            pairs.append((p("prmt.b32", low, high, "0x5140"), p("prmt.b32", low, high, "0x7362")))
    return pairs


def _decode2(p: Ptx, x: str, size: int, table: list[str]) -> list[tuple[str, str]]:
    return decode_nibbles(p, 2, x, size, table)


def _decode1(p: Ptx, x: str, size: int, table: list[str]) -> list[tuple[str, str]]:
    """1 bit: bits j and j + 16 of a word, where they are, are mantissa bits of two fp16 numbers 1024 + 2**j h."""
    if size == 2:
        x = p("prmt.b32", x, "0", "0x4140")
    if size == 1:
        x = p("lop3.b32", p("shl.b32", x, "12"), x, "0x000f0000", "0xec")
    half = min(4, size) * 4
    pairs = []
    for j in range(half):
        if j == 10:
            x = p("shr.u32", x, "10")
        pairs.append(p("lop3.b32", x, f"0x{0x10001 << (j % 10):08x}", "0x64006400", "0xea"))
    return [(pairs[j], pairs[j + 1]) for j in range(0, half, 2)]


def decode4(p: Ptx, x: str, size: int, table: list[str]) -> list[tuple[str, str]]:
    """4 bits: the low and the high byte of 16 fp16 weights, 8 + 8 of each, the top bit of the nibble chooses."""
    low3 = p("and.b32", x, "0x77777777")
    top = p("and.b32", p("shr.u32", x, "3"), "0x11111111")
    steps = []
    for half in range(2):
        if half:
            low3, top = p("shr.u32", low3, "16"), p("shr.u32", top, "16")
        mask = p("prmt.b32", "0xff00", "0", top)
        byte = []
        for k in (0, 4):
            first = p("prmt.b32", table[k], table[k + 1], low3)
            second = p("prmt.b32", table[k + 2], table[k + 3], low3)
            byte.append(p("lop3.b32", mask, second, first, "0xca"))
        steps.append((p("prmt.b32", byte[0], byte[1], "0x5140"), p("prmt.b32", byte[0], byte[1], "0x7362")))
    return steps


_DECODE = {1: _decode1, 2: _decode2, 4: decode4}
_TABLES = {1: 0, 2: 2, 4: 8}  # words of the decode table


@dataclass(frozen=True)
class Tile:
    """What the kernel needs to know of one shape: PTX texts with their constraints, and counts of registers."""

    NT: int  # column tiles of 8 query tokens
    KSTEPS: int
    words: int  # residual words of a row and lane
    q_registers: int
    tables: int
    asm: str
    constraints: str
    reduce_asm: str
    reduce_constraints: str


@lru_cache
def tile(nbits: int, DIM: int, NT: int) -> Tile:
    """PTX that turns loaded words into running maxima of 16 tokens x 8 NT query tokens.

    Operands: 2 NT maxima out; words of row g, of row g + 8; NT table words of row g, of row g + 8; inverse norms
    of both; BIAS; 2 NT constants; decode table; 2 NT maxima in; Q fragments (or their int64 address).
    """
    p = Ptx()
    loads = pieces(nbits, DIM)
    words = sum(max(size // 4, 1) for _, size in loads)
    ksteps = DIM // 16
    q_registers = ksteps * NT * 2
    in_registers = q_registers <= _MAX_Q_REGISTERS
    number = iter(range(10000))

    def operands(n: int) -> list[str]:
        return [f"${next(number)}" for _ in range(n)]

    out = operands(2 * NT)
    rows = operands(words), operands(words)
    entries = operands(NT), operands(NT)
    inverse = operands(2)
    bias = operands(1)[0]
    constants = operands(2 * NT)
    table = operands(_TABLES[nbits])
    maxima = operands(2 * NT)
    q = operands(q_registers if in_registers else 1)
    inputs = next(number) - 2 * NT

    acc = []
    for n in range(NT):
        quad = []
        for row in range(2):
            p.lines.append(f"mov.b32 {{h0, h1}}, {entries[row][n]};")
            for half in range(2):
                value = p("cvt.rn.f32.s16", f"h{half}")
                quad.append(p("add.f32", value, constants[2 * n + half]))
        acc.append(quad)

    decode = _DECODE[nbits]
    step = word = 0
    for _, size in loads:
        for _ in range(max(size // 4, 1)):
            decoded = [decode(p, rows[row][word], size, table) for row in range(2)]
            word += 1
            for (a0, a2), (a1, a3) in zip(*decoded, strict=True):
                fragments = []
                for j in range(step * 2 * NT, (step + 1) * 2 * NT, 4):
                    if in_registers:
                        fragments += q[j : j + 4]
                    else:
                        four = [p.new() for _ in range(4)]
                        p.lines.append(f"ld.global.v4.b32 {{{', '.join(four)}}}, [{q[0]}+{j * 128}];")
                        fragments += four
                for n in range(NT):
                    d = ", ".join(acc[n])
                    b = f"{fragments[2 * n]}, {fragments[2 * n + 1]}"
                    p.lines.append(
                        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                        f"{{{d}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b}}}, {{{d}}};"
                    )
                step += 1
    for n in range(NT):
        for half in range(2):
            values = [p("fma.rn.f32", acc[n][2 * row + half], inverse[row], bias) for row in range(2)]
            best = p("max.s32", p("max.s32", values[0], values[1]), maxima[2 * n + half])
            p.lines.append(f"mov.b32 {out[2 * n + half]}, {best};")
    in_constraints = ["r"] * inputs
    if not in_registers:
        in_constraints[-1] = "l"
    constraints = ",".join(["=&r"] * (2 * NT) + in_constraints)
    reduce_asm, reduce_constraints = reduction(NT, "max.s32")
    return Tile(
        NT=NT,
        KSTEPS=ksteps,
        words=words,
        q_registers=q_registers if in_registers else 0,
        tables=len(table),
        asm=p.text(),
        constraints=constraints,
        reduce_asm=reduce_asm,
        reduce_constraints=reduce_constraints,
    )


# ---- kernels


@triton.jit
def _reverse(v, NBITS: tl.constexpr):
    """The NBITS low bits of v in reverse order."""
    r = v & 1
    for i in tl.static_range(1, NBITS):
        r = r * 2 + ((v >> i) & 1)
    return r


@triton.jit
def _write_constants(
    Q_ptr, order_ptr, out_ptr, block, LQ, w, bucket, o, s, center, unit,
    NBITS: tl.constexpr, DIM: tl.constexpr, NT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Head of the workspace: decode table, BIAS, and what starts the accumulators of each query token."""
    # constant of q: unit * (o + s c) * sum_k Q - sum_k Q' * (1024 + 2**e c), with Q' as rounded above
    rows = tl.arange(0, 8 * NT)
    q_row = block * 8 * NT + rows
    constant = tl.zeros([8 * NT], dtype=tl.float32)
    square = tl.zeros([8 * NT], dtype=tl.float32)
    for d0 in range(0, DIM, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        # [8 NT, BLOCK_D]
        x = tl.load(
            Q_ptr + q_row[:, None] * DIM + d[None, :],
            mask=(q_row < LQ)[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        square += tl.sum(x * x, 1)
        if NBITS == 1:
            exponent = tl.load(order_ptr + DIM + d, mask=d < DIM, other=0).to(tl.float32)
            rounded = (x * (s * unit) * tl.exp2(-exponent)[None, :]).to(tl.float16).to(tl.float32)
            constant += tl.sum(x * (unit * (o + s * center)), 1)
            constant -= tl.sum(rounded * (1024 + tl.exp2(exponent) * center)[None, :], 1)
    tl.store((out_ptr + 32).to(tl.pointer_type(tl.float32)) + rows, constant)
    # above any |similarity| in units of the table, so that adding it makes all similarities positive
    bias = 1.25 * tl.sqrt(tl.max(square, 0)) * unit + 1
    tl.store((out_ptr + 8).to(tl.pointer_type(tl.float32)), bias)
    if NBITS == 2:
        # the slot's bits are reversed: byte v of both tables is of the weight at reverse(v)
        code = (w / s).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        shift = 8 * _reverse(bucket, 2)
        tl.store(out_ptr, tl.sum((code & 255) << shift, 0))
        tl.store(out_ptr + 1, tl.sum(((code >> 8) & 255) << shift, 0))
    if NBITS == 4:
        code = (w / s).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        at4 = _reverse(bucket, 4)
        for k in tl.static_range(4):
            shift = tl.where(at4 // 4 == k, 8 * (at4 % 4), 0)
            low = tl.where(at4 // 4 == k, code & 255, 0)
            high = tl.where(at4 // 4 == k, (code >> 8) & 255, 0)
            tl.store(out_ptr + k, tl.sum(low << shift, 0))
            tl.store(out_ptr + 4 + k, tl.sum(high << shift, 0))


@triton.jit
def _prepare_kernel(
    Q_ptr, scale_ptr, weights_ptr, order_ptr, out_ptr, LQ, Q_WORDS,
    NBITS: tl.constexpr, DIM: tl.constexpr, NT: tl.constexpr, OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Workspace of one block of 8 NT query tokens: program (block, part) writes BLOCK words of Q, part 0 the rest."""
    block, part = tl.program_id(0), tl.program_id(1)
    out_ptr += block * OUT_STRIDE
    scale = tl.load(scale_ptr)
    unit = tl.where(scale > 0, 1 / scale, 0.0)

    # w = o + s h: for 1 bit h is 0 or 1, else o = 0 and h is fp16
    bucket = tl.arange(0, 1 << NBITS)
    w = tl.load(weights_ptr + bucket)
    o = tl.min(w, 0)
    if NBITS == 1:
        s = tl.max(w, 0) - o
        center = 0.5
    else:
        o, center = 0.0, 0.0
        s = tl.maximum(tl.max(tl.abs(w), 0), 1e-30)

    at = part * BLOCK + tl.arange(0, BLOCK)
    live = at < Q_WORDS
    # word j of a lane = B register `pair` of column tile n in k-step: see tile()
    lane, j = (at // 4) % 32, (at // 128) * 4 + at % 4
    k_step, n, pair = j // (2 * NT), (j // 2) % NT, j % 2
    column = (lane // 4 // 2) * 2 * NT + 2 * n + (lane // 4) % 2
    q = block * 8 * NT + column
    word = tl.zeros([BLOCK], dtype=tl.int32)
    slot = order_ptr + (k_step * 4 + lane % 4) * 4 + 2 * pair
    for i in tl.static_range(2):
        order = tl.load(slot + i, mask=live, other=0)
        value = tl.load(Q_ptr + q * DIM + order % 65536, mask=live & (q < LQ), other=0.0)
        half = (value * (s * unit) * tl.exp2(-(order // 65536).to(tl.float32))).to(tl.float16)
        bits = half.to(tl.int16, bitcast=True).to(tl.int32) & 65535
        word |= bits << (16 * i)
    tl.store(out_ptr + 64 + at, word, mask=live)

    if part == 0:
        _write_constants(Q_ptr, order_ptr, out_ptr, block, LQ, w, bucket, o, s, center, unit, NBITS, DIM, NT, BLOCK_D)


@triton.jit
def _load_tile(
    tokens, codes, table, residuals, inv_norms,
    NT: tl.constexpr, LOADS: tl.constexpr, LQP: tl.constexpr, ROW_BYTES: tl.constexpr, INV_BYTES: tl.constexpr,
):  # fmt: skip
    """(residual words, table words, inverse norms as stored) of rows g and g + 8 of a tile."""
    entries = ()
    words = ()
    inverse = ()
    for r in tl.static_range(2):
        entries = entries + load(table, codes[r], LQP * 2, "v4.b32" if NT == 4 else "v2.b32", NT)
        for k in tl.static_range(len(LOADS)):
            words = words + load_once(residuals[k], tokens[r], ROW_BYTES, LOADS[k])
        inverse = inverse + load(inv_norms, tokens[r], INV_BYTES, "u16" if INV_BYTES == 2 else "b32", 1)
    return words, entries, inverse


@triton.jit(do_not_specialize=["num_pids", "LQ"])
def _residual_maxsim_kernel(
    workspace_ptr, table_ptr, scale_ptr, codes_ptr, residuals_ptr, inv_norms_ptr, inv_norm_lo, inv_norm_step,
    offsets_ptr, pids_ptr, count_ptr, out_ptr, num_pids, LQ,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, REDUCE_ASM: tl.constexpr, REDUCE_CONSTRAINTS: tl.constexpr,
    NT: tl.constexpr, Q_REGISTERS: tl.constexpr, TABLES: tl.constexpr, LOADS: tl.constexpr,
    LOADS_AT: tl.constexpr, LQP: tl.constexpr, ROW_BYTES: tl.constexpr, INV_BYTES: tl.constexpr,
    HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr,
    ADD: tl.constexpr, GROUP: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
    step = tl.num_programs(0)
    lane = tl.arange(0, 32)
    row, t = lane // 4, lane % 4
    scale = tl.load(scale_ptr)

    # one register per lane each
    zero = tl.zeros([32], dtype=tl.int32)
    table = ()
    for k in tl.static_range(TABLES):
        table = table + (tl.load(workspace_ptr + k) + zero,)  # type: ignore[assignment]
    bias = tl.load(workspace_ptr + 8)
    constants = ()
    for k in tl.static_range(2 * NT):
        constants = constants + (tl.load(workspace_ptr + 32 + t * 2 * NT + k),)  # type: ignore[assignment]
    q_address = (workspace_ptr + 64 + lane * 4).to(tl.int64)
    if Q_REGISTERS:
        q = ()
        for k in tl.static_range(0, Q_REGISTERS, 4):
            q = q + load(q_address, zero + k * 32, 4, "v4.b32", 4)
    else:
        q = (q_address,)  # type: ignore[assignment]
    nothing = (zero,) * (2 * NT)

    zero64 = zero.to(tl.int64)
    codes_at = codes_ptr.to(tl.int64) + zero64
    inv_norms_at = inv_norms_ptr.to(tl.int64) + zero64
    table_at = (table_ptr + t * (2 * NT)).to(tl.int64)
    residuals_at = ()
    for k in tl.static_range(len(LOADS)):
        residuals_at = residuals_at + ((residuals_ptr + LOADS_AT[k] + t * LOADS[k]).to(tl.int64),)  # type: ignore[assignment]

    # The walk: tile x is computed, y is being loaded, of z the codes; passage a comes after z's, b after a.
    i_z, start_z, left_z, i_a, start_a, left_a, i_b, pid_b = first_tile(
        offsets_ptr, pids_ptr, n, step, HAS_PIDS, GROUP, tl.int32
    )
    i_x, left_x = i_z, left_z
    tokens = tile_tokens(start_z, left_z, row)
    codes = load(codes_at, tokens[0], 4, "b32", 1) + load(codes_at, tokens[1], 4, "b32", 1)
    x = _load_tile(tokens, codes, table_at, residuals_at, inv_norms_at, NT, LOADS, LQP, ROW_BYTES, INV_BYTES)
    i_z, start_z, left_z, i_a, start_a, left_a, i_b, pid_b = advance(
        i_z, start_z, left_z, i_a, start_a, left_a, i_b, pid_b,
        offsets_ptr, pids_ptr, n, step, 0, HAS_PIDS, GROUP, 16, "packed", tl.int32,
    )  # fmt: skip
    i_y, left_y = i_z, left_z
    tokens = tile_tokens(start_z, left_z, row)
    codes = load(codes_at, tokens[0], 4, "b32", 1) + load(codes_at, tokens[1], 4, "b32", 1)
    i_z, start_z, left_z, i_a, start_a, left_a, i_b, pid_b = advance(
        i_z, start_z, left_z, i_a, start_a, left_a, i_b, pid_b,
        offsets_ptr, pids_ptr, n, step, 0, HAS_PIDS, GROUP, 16, "packed", tl.int32,
    )  # fmt: skip
    maxima = nothing
    while i_x < n:
        for _ in tl.static_range(UNROLL):
            y = _load_tile(tokens, codes, table_at, residuals_at, inv_norms_at, NT, LOADS, LQP, ROW_BYTES, INV_BYTES)
            tokens = tile_tokens(start_z, left_z, row)
            codes = load(codes_at, tokens[0], 4, "b32", 1) + load(codes_at, tokens[1], 4, "b32", 1)

            words, entries, stored = x
            inverse = (
                _inverse_norm(stored[0], inv_norm_lo, inv_norm_step, INV_BYTES),
                _inverse_norm(stored[1], inv_norm_lo, inv_norm_step, INV_BYTES),
            )
            maxima = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, words + entries + inverse + (bias,) + constants + table + maxima + q,
                dtype=(tl.int32,) * (2 * NT), is_pure=True, pack=1,
            )  # fmt: skip
            if left_x <= 16:
                best = tl.inline_asm_elementwise(
                    REDUCE_ASM, REDUCE_CONSTRAINTS, maxima + (lane,), dtype=tl.int32, is_pure=True, pack=1
                )
                # the registers were halved by lane bits 4, 3, 2 (by 4, 3 when NT is 2: every value twice)
                if NT == 4:
                    column = 8 * t + 4 * (lane // 16) + 2 * (lane // 8 % 2) + lane // 4 % 2
                    valid = column < LQ
                else:
                    column = 4 * t + 2 * (lane // 16) + lane // 8 % 2
                    valid = (column < LQ) & (lane // 4 % 2 == 0)
                best = best.to(tl.float32, bitcast=True) - bias.to(tl.float32, bitcast=True)
                score = tl.sum(tl.where(valid, best, 0.0), 0) * scale
                score = tl.where(left_x <= 0, float("-inf"), score)
                if ADD:
                    score += tl.load(out_ptr + i_x, mask=i_x < n, other=0.0)
                tl.store(out_ptr + i_x, score, mask=i_x < n)
                maxima = nothing
            i_x, left_x, x = i_y, left_y, y
            i_y, left_y = i_z, left_z
            i_z, start_z, left_z, i_a, start_a, left_a, i_b, pid_b = advance(
                i_z, start_z, left_z, i_a, start_a, left_a, i_b, pid_b,
                offsets_ptr, pids_ptr, n, step, 0, HAS_PIDS, GROUP, 16, "packed", tl.int32,
            )  # fmt: skip


@triton.jit
def _inverse_norm(stored, lo, step, INV_BYTES: tl.constexpr):
    if INV_BYTES == 2:
        return lo + step * stored.to(tl.float32)
    else:
        return lo + step * stored.to(tl.float32, bitcast=True)


# ---- launcher


def supported(nbits: int, DIM: int) -> bool:
    """Whether this kernel takes the shape."""
    return nbits in (1, 2, 4) and DIM % 32 == 0


@lru_cache
def _order(nbits: int, DIM: int, device: torch.device) -> Tensor:
    """int32: ``dim + 65536 e`` of every slot of :func:`k_order`, as far as DIM; then e of every dimension."""
    slots = [slot for step in k_order(nbits, DIM) for lane in step for slot in lane]
    exponents = [0] * DIM
    for dim, exponent in slots:
        exponents[dim] = exponent
    return torch.tensor([d + 65536 * e for d, e in slots[: 16 * DIM]] + exponents, dtype=torch.int32).to(device)


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched: none of it changes results by more than rounding."""

    programs_per_sm: int
    unroll: int  # tiles in a loop body
    group: int  # consecutive passages to one program, when there are many
    maxnreg: int | None


@tunable("residual", programs_per_sm=(8, 12, 14, 16), unroll=(1, 2), group=(1, 16, 64), maxnreg=(None, 128, 168))
def launch_for(arch: int, nbits: int, DIM: int, LQ: int) -> Launch:
    """Choice for a chip and a shape."""
    if DIM > 128:  # Q is read from L1 for every tile, so registers are no constraint; not measured
        return Launch(programs_per_sm=12, unroll=1, group=16, maxnreg=None)
    # Measured on an H200 (sm_90) at DIM 128, eval/results/h200_residual_variants.json: the fastest at 1 and 2 bits,
    # 31.8 and 29.4 Gtokens/s; 18.1 at 4 bits, within 1% of the fastest. Other chips are not measured.
    if nbits == 4 or arch in (86, 89, 90):
        return Launch(programs_per_sm=12, unroll=1, group=16, maxnreg=168)
    return Launch(programs_per_sm=16, unroll=1, group=16, maxnreg=128)  # what registers allow


def prepare(Q: Tensor, cs: CentroidScores, bucket_weights: Tensor, nbits: int) -> Tensor:
    """Workspace of the kernel for one query: int32 ``[blocks of query tokens, words]``, see the constants above."""
    LQ, DIM = Q.shape
    shape = tile(nbits, DIM, _column_tiles(cs))
    blocks = triton.cdiv(LQ, 8 * shape.NT)
    q_words = shape.KSTEPS * shape.NT * 64
    workspace = torch.empty(blocks, 64 + q_words, dtype=torch.int32, device=Q.device)
    _prepare_kernel[(blocks, triton.cdiv(q_words, 1024))](
        Q,
        cs.scale,
        bucket_weights,
        _order(nbits, DIM, Q.device),
        workspace,
        LQ,
        q_words,
        NBITS=nbits,
        DIM=DIM,
        NT=shape.NT,
        OUT_STRIDE=64 + q_words,
        BLOCK=1024,
        BLOCK_D=128,
        num_warps=4,
    )
    return workspace


def _column_tiles(cs: CentroidScores) -> int:
    """Column tiles of 8 query tokens that a program scores: 4, or 2 for tables of 16 columns."""
    return 2 if cs.table.size(1) == 16 else 4


def residual_maxsim(
    Q: Tensor,
    cs: CentroidScores,
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
    *,
    launch: Launch | None = None,
) -> None:
    """See :func:`.api.residual_maxsim`; writes ``out`` fp32 ``[n]``. ``residuals`` rows must be 8-byte aligned."""
    n = out.size(0)
    LQ, DIM = Q.shape
    launch = launch or launch_for(tuning.arch(Q.device), nbits, DIM, LQ)
    if n == 0:
        return
    NT = _column_tiles(cs)
    shape = tile(nbits, DIM, NT)
    workspace = prepare(Q, cs, bucket_weights, nbits)
    programs, group = dealt(launch.programs_per_sm, launch.group, pids, n, Q.device)
    for block in range(workspace.size(0)):
        _residual_maxsim_kernel[(programs,)](
            workspace[block],
            cs.table[:, 8 * NT * block :],
            cs.scale,
            codes,
            residuals,
            inv_norms,
            inv_norm_lo,
            inv_norm_step,
            offsets,
            pids,
            count,
            out,
            n,
            LQ - 8 * NT * block,
            ASM=shape.asm,
            CONSTRAINTS=shape.constraints,
            REDUCE_ASM=shape.reduce_asm,
            REDUCE_CONSTRAINTS=shape.reduce_constraints,
            NT=NT,
            Q_REGISTERS=shape.q_registers,
            TABLES=shape.tables,
            LOADS=tuple(size for _, size in pieces(nbits, DIM)),
            LOADS_AT=tuple(first for first, _ in pieces(nbits, DIM)),
            LQP=cs.table.size(1),
            ROW_BYTES=DIM * nbits // 8,
            INV_BYTES=inv_norms.element_size(),
            HAS_PIDS=pids is not None,
            HAS_COUNT=count is not None,
            ADD=block > 0,
            GROUP=group,
            UNROLL=launch.unroll,
            maxnreg=launch.maxnreg,
            num_warps=1,
        )
