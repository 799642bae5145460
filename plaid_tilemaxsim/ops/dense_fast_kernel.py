"""Dense MaxSim for sm_80 and later, one warp per program, embeddings loaded straight into the tensor core's fragments.

    score(p) = sum_i max_{t in p} <Q[i], D[t]>

Wide rows and short passages starve a kernel that stages tiles in shared memory: few tiles fit, and the pipeline drains
at every passage. Here a warp walks 16 or 32 tokens at a time across passages, with the next chunk of up to 256 bytes a
row already on its way. The order of K inside a dot product is free, so lane ``4 g + t`` takes bytes ``64 j + 16 t ..``
of rows g, g + 8, ...: 16-byte loads, of which a quad covers 64 consecutive bytes, are the operands of ``mma`` as they
land, in fp16 and bf16 (two values a register, k16) and in fp32 as TF32 (one value, k8) alike. Q is permuted to match:
by the kernel where it is two values a word and stays in registers, else before; what exceeds them is read from L1.

fp32 comes in three precisions. "tf32": both factors rounded to TF32. "tf32x3": x = hi + lo with hi the upper bits, and
hi hi + hi lo + lo hi. "fp16x3" does the same with two fp16 numbers, in half as many ``mma``; an embedding's lo is exact
to 2**-25, and Q is scaled by a power of two to the middle of fp16's range. The tensor core truncates when it
accumulates: in both it starts a chunk's sum from zero, which is added in fp32 proper.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .warp_tiles import (
    NT,
    TOKENS,
    Ptx,
    advance,
    dealt,
    load,
    next_passage,
    pid_at,
    reduction,
    share_of,
    sum_of_maxima,
    token_range,
)

_KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "tf32"}
_MMA = {
    "fp16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
}
_MMA["tf32x3"], _MMA["fp16x3"] = _MMA["tf32"], _MMA["fp16"]
SPLIT = ("tf32x3", "fp16x3")
_UPPER = "0xffffe000"  # sign, exponent and the 10 bits of mantissa that TF32 has


def supported(dtype: torch.dtype, DIM: int) -> bool:
    """Whether this kernel takes rows of DIM values: whole 64-byte pieces."""
    return DIM * dtype.itemsize % 64 == 0


@dataclass(frozen=True)
class Piece:
    """PTX of one chunk of a tile with its constraints."""

    asm: str
    constraints: str
    outputs: int


@lru_cache
def piece(kind: str, words: int, rows: int, q_registers: int, first: bool, last: bool) -> Piece:
    """PTX that multiplies ``words`` words a row of 16 ``rows`` tokens with a block of query tokens.

    Operands: sums out (4 NT a row of 16), or 2 NT maxima if this is the ``last`` chunk; words of a lane, row after row;
    sums in unless ``first``; maxima in if ``last``; Q fragments if they are in ``q_registers``, else their address.
    """
    p = Ptx()
    number = iter(range(10000))

    def operands(n: int) -> list[str]:
        return [f"${next(number)}" for _ in range(n)]

    sums = rows * NT * 4
    out = operands(2 * NT if last else sums)
    a = [operands(words // 4) for _ in range(2 * rows)]
    before = [] if first else operands(sums)
    maxima = operands(2 * NT) if last else []
    q = operands(q_registers or 1)
    inputs = next(number) - len(out)

    split = kind in SPLIT
    high: list[list[str]] = []
    low: list[list[str]] = []
    if kind == "fp16x3":
        p.lines.append(".reg .b16 x<2>;")
        for row in a:
            high.append([])
            low.append([])
            for x in zip(row[::2], row[1::2], strict=True):
                h = p("cvt.rn.f16x2.f32", x[1], x[0])
                p.lines.append(f"mov.b32 {{x0, x1}}, {h};")
                rest = [p("sub.f32", x[i], p("cvt.f32.f16", f"x{i}")) for i in range(2)]
                high[-1].append(h)
                low[-1].append(p("cvt.rn.f16x2.f32", rest[1], rest[0]))
        a = high
    elif split:
        high = [[p("and.b32", x, _UPPER) for x in row] for row in a]
        low = [[p("sub.f32", x, h) for x, h in zip(xs, hs, strict=True)] for xs, hs in zip(a, high, strict=True)]
        a = high
    elif kind == "tf32":
        a = [[p("cvt.rna.tf32.f32", x) for x in row] for row in a]

    zero = p("mov.b32", "0")
    chained = not (first or split)  # sums of earlier chunks start the chain
    acc = [
        [before[(r * NT + n) * 4 : (r * NT + n + 1) * 4] if chained else [zero] * 4 for n in range(NT)]
        for r in range(rows)
    ]
    fresh = [[True] * NT for _ in range(rows)]

    def multiply(r: int, n: int, operand: list[list[str]], step: int, b: list[str]) -> None:
        four = ", ".join(operand[2 * r + row][2 * step + half] for half in range(2) for row in range(2))
        into = [p.new() for _ in range(4)] if fresh[r][n] else acc[r][n]
        p.lines.append(
            f"{_MMA[kind]} {{{', '.join(into)}}}, {{{four}}}, {{{b[0]}, {b[1]}}}, {{{', '.join(acc[r][n])}}};"
        )
        acc[r][n], fresh[r][n] = into, False

    per_step = 2 * NT * (2 if split else 1)
    for step in range(len(a[0]) // 2):
        b = []
        for j in range(step * per_step, (step + 1) * per_step, 4):
            if q_registers:
                b += q[j : j + 4]
            else:
                four = [p.new() for _ in range(4)]
                p.lines.append(f"ld.global.v4.b32 {{{', '.join(four)}}}, [{q[0]}+{j * 128}];")
                b += four
        for n in range(NT):
            for r in range(rows):
                if split:
                    b_high, b_low = b[4 * n : 4 * n + 2], b[4 * n + 2 : 4 * n + 4]
                    multiply(r, n, low, step, b_high)
                    multiply(r, n, a, step, b_low)
                    multiply(r, n, a, step, b_high)
                else:
                    multiply(r, n, a, step, b[2 * n : 2 * n + 2])
    if split and not first:
        acc = [
            [[p("add.f32", x, before[(r * NT + n) * 4 + i]) for i, x in enumerate(acc[r][n])] for n in range(NT)]
            for r in range(rows)
        ]
    if last:
        for n in range(NT):
            for half in range(2):
                best = maxima[2 * n + half]
                for r in range(rows):
                    best = p("max.f32", p("max.f32", acc[r][n][half], acc[r][n][2 + half]), best)
                p.lines.append(f"mov.b32 {out[2 * n + half]}, {best};")
    else:
        flat = [x for row in acc for quad in row for x in quad]
        p.lines += [f"mov.b32 {o}, {x};" for o, x in zip(out, flat, strict=True)]
    in_constraints = ["r"] * inputs
    if not q_registers:
        in_constraints[-1] = "l"
    return Piece(p.text(), ",".join(["=&r"] * len(out) + in_constraints), len(out))


@triton.jit
def _load_chunk(
    base, start, left, row, chunk: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, ROW_BYTES: tl.constexpr
):
    """A lane's words of one chunk: of rows g, g + 8, ... of a tile; past the passage's end its last token again."""
    words = ()
    for r in tl.static_range(2 * ROWS):
        token = start + tl.minimum(left - 1, row + 8 * r)
        for j in tl.static_range(WORDS // 16):
            # read once: not kept in L1
            words = words + load(
                base + (chunk * WORDS * 4 + j * 64), token, ROW_BYTES, "L1::no_allocate.L2::128B.v4.b32", 4
            )
    return words


@triton.jit
def _query_fragments(q_ptr, row, t, LQ, WORDS: tl.constexpr, NT: tl.constexpr):
    """Of Q [LQ, WORDS words of two values] the B fragments of its first 8 NT tokens; zero past LQ."""
    q = ()
    base = q_ptr.to(tl.int64) + t.to(tl.int64) * 16
    for s in tl.static_range(WORDS // 16):
        # 16 bytes of a row are both registers of a column tile for two steps
        first, second = (), ()
        for n in tl.static_range(NT):
            token = row // 2 * 2 * NT + 2 * n + row % 2
            four = load(base + s * 64, tl.minimum(token, LQ - 1), WORDS * 4, "v4.b32", 4)
            wanted = token < LQ
            first += (tl.where(wanted, four[0], 0), tl.where(wanted, four[1], 0))  # type: ignore[assignment]
            second += (tl.where(wanted, four[2], 0), tl.where(wanted, four[3], 0))  # type: ignore[assignment]
        q = q + first + second
    return q


@triton.jit(do_not_specialize=["num_pids", "ND", "programs", "late", "LQ"])
def _dense_maxsim_kernel(
    q_ptr, scale_ptr, D_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr, num_pids, ND, programs, late, LQ,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, OUTPUTS: tl.constexpr,
    REDUCE_ASM: tl.constexpr, REDUCE_CONSTRAINTS: tl.constexpr, NT: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, CHUNKS: tl.constexpr, Q_REGISTERS: tl.constexpr, Q_BYTES: tl.constexpr,
    LAYOUT: tl.constexpr, HAS_PIDS: tl.constexpr, HAS_COUNT: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
    SCALED: tl.constexpr, DIRECT: tl.constexpr, PART: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    n = num_pids
    if HAS_COUNT:
        n = tl.minimum(tl.load(count_ptr), num_pids)
        if n <= 0:  # known here, the compiler needs fewer registers after it
            return
    step, end = tl.num_programs(0), n
    lane = tl.arange(0, 32)
    row, t = lane // 4, lane % 4
    zero = tl.zeros([32], dtype=tl.int32)
    q_address = (q_ptr + lane * 4).to(tl.int64)
    q = ()
    if not DIRECT:
        for k in tl.static_range(0, Q_REGISTERS, 4):
            q = q + load(q_address, zero + k * 32, 4, "v4.b32", 4)
    nothing = (zero + -8388608,) * (2 * NT)  # the bits of -inf
    base = D_ptr.to(tl.int64) + t.to(tl.int64) * 16
    TOKENS: tl.constexpr = 16 * ROWS
    ROW_BYTES: tl.constexpr = WORDS * CHUNKS * 4

    # The walk: tile x is computed, y comes next; passage a after y's, b after a. Its start is first_tile written out:
    # with the call, triton 3.9's ptxas takes fewer registers for fp16x3 at DIM 80, and spills. So it does at DIM 768
    # where another argument comes between num_pids and ND, or this is the one dealing.
    i_y = tl.program_id(0) * GROUP
    if PART:
        i_y, step, end = share_of(n, programs, late, PART, GROUP)
    i_a = next_passage(i_y, step, GROUP)
    i_b = next_passage(i_a, step, GROUP)
    pid_b = pid_at(pids_ptr, i_b, end, HAS_PIDS, tl.int32)
    start_y, left_y = token_range(offsets_ptr, pid_at(pids_ptr, i_y, end, HAS_PIDS, tl.int32), ND, LAYOUT)
    start_a, left_a = token_range(offsets_ptr, pid_at(pids_ptr, i_a, end, HAS_PIDS, tl.int32), ND, LAYOUT)
    if DIRECT:  # after the walk, whose loads wait for each other
        q = _query_fragments(q_ptr, row, t, LQ, WORDS, NT)
    i_x, start_x, left_x = i_y, start_y, left_y
    words = _load_chunk(base, start_x, left_x, row, 0, ROWS, WORDS, ROW_BYTES)
    i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = advance(
        i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b, offsets_ptr, pids_ptr, end, step, ND, HAS_PIDS, GROUP,
        TOKENS, LAYOUT, tl.int32, AGAIN,
    )  # fmt: skip
    maxima = nothing
    while i_x < end:
        sums = ()
        for c in tl.static_range(CHUNKS):
            if c + 1 < CHUNKS:
                following = _load_chunk(base, start_x, left_x, row, c + 1, ROWS, WORDS, ROW_BYTES)
            else:
                following = _load_chunk(base, start_y, left_y, row, 0, ROWS, WORDS, ROW_BYTES)
            q_here = q
            if Q_REGISTERS == 0:
                q_here = (q_address + c * Q_BYTES,)  # type: ignore[assignment]
            if c + 1 < CHUNKS:
                sums = tl.inline_asm_elementwise(
                    ASM[c], CONSTRAINTS[c], words + sums + q_here, dtype=(tl.int32,) * OUTPUTS, is_pure=True, pack=1
                )
            else:
                maxima = tl.inline_asm_elementwise(
                    ASM[c], CONSTRAINTS[c], words + sums + maxima + q_here,
                    dtype=(tl.int32,) * (2 * NT), is_pure=True, pack=1,
                )  # fmt: skip
            words = following
        if left_x <= TOKENS:
            score = sum_of_maxima(maxima, lane, REDUCE_ASM, REDUCE_CONSTRAINTS)
            if SCALED:
                score *= tl.load(scale_ptr)
            score = tl.where(left_x <= 0, float("-inf"), score)
            if ADD:
                score += tl.load(out_ptr + i_x, mask=i_x < end, other=0.0)
            tl.store(out_ptr + i_x, score, mask=i_x < end)
            maxima = nothing
        i_x, start_x, left_x = i_y, start_y, left_y
        i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b = advance(
            i_y, start_y, left_y, i_a, start_a, left_a, i_b, pid_b, offsets_ptr, pids_ptr, end, step, ND, HAS_PIDS,
            GROUP, TOKENS, LAYOUT, tl.int32, AGAIN,
        )  # fmt: skip


# ---- launcher


@lru_cache
def _fragments(words: int, wide: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(token of the block, word) of every B register in order: int64 [words / 4, 32, 4] at NT = 4.

    Of 4 registers the first two belong to one column tile, the others to the next. ``wide``: a word of Q stands for two
    words of an embedding, as fp16 for fp32.
    """
    j = torch.arange(words // 8 * 2 * NT).view(-1, 1, 4)
    lane = torch.arange(32).view(1, 32, 1)
    g, t = lane // 4, lane % 4
    step, n, half = j // (2 * NT), j // 2 % NT, j % 2
    # a lane's columns are 2 NT consecutive query tokens
    token = g // 2 * 2 * NT + 2 * n + g % 2
    word = step * 8 + 2 * t + half if wide else step // 2 * 16 + 4 * t + step % 2 * 2 + half
    token, word = torch.broadcast_tensors(token, word)
    return token.to(device), word.to(device)


def prepare(Q: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Q [NQ, LQ, DIM] as blocks of B fragments: int32 [NQ * blocks of query tokens, words], zero past a query's end.

    Also the fp32 [1] factor of the scores, where there is one.
    """
    NQ, LQ, DIM = Q.shape
    blocks = triton.cdiv(LQ, TOKENS)
    padded = torch.zeros(NQ, blocks * TOKENS, DIM, dtype=Q.dtype, device=Q.device)
    padded[:, :LQ] = Q
    padded = padded.view(NQ * blocks, TOKENS, DIM)
    if kind not in SPLIT:
        words = padded.view(torch.int32)
        token, word = _fragments(words.size(2), False, Q.device)
        if kind == "tf32":  # round to nearest: half a unit of the last place that stays
            words = (words + 0x1000) & ~0x1FFF
        return words[:, token, word].flatten(1), None
    factor = None
    if kind == "tf32x3":
        high = padded.view(torch.int32) & ~0x1FFF
        low = (padded - high.view(torch.float32)).view(torch.int32)
    else:
        # the largest value goes to 2**10 .. 2**11
        exponent = 11 - torch.frexp(padded.abs().amax().reshape(1)).exponent
        padded = torch.ldexp(padded, exponent)
        factor = torch.ldexp(torch.ones(1, device=Q.device), -exponent)
        half = padded.half()
        high, low = half.view(torch.int32), (padded - half.float()).half().view(torch.int32)
    token, word = _fragments(high.size(2), kind == "fp16x3", Q.device)
    both = torch.stack([high, low], 1)[:, :, token, word]  # [blocks, 2, -1, 32, 4]
    # of every column tile: its two registers of high words, then the two of low ones
    return both.unflatten(4, (2, 2)).permute(0, 2, 4, 3, 1, 5).flatten(1).contiguous(), factor


def dense_maxsim(
    Q: Tensor,
    D: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    pids: Tensor | None,
    out: Tensor,
    count: Tensor | None,
    precision: str,
) -> None:
    """See :func:`.api.dense_maxsim`; Q ``[NQ, LQ, DIM]``, D not empty, writes ``out`` fp32 ``[NQ, n]``."""
    NQ, LQ, DIM = Q.shape
    n = out.size(1)
    if n == 0:
        return
    kind = _KINDS[D.dtype] if D.dtype != torch.float32 else precision
    words = DIM * D.element_size() // 4
    layout = "packed" if offsets is not None else "fixed" if lengths is None else "padded"
    launch = tuning.dense_fast_blocks(tuning.arch(D.device), kind, words, layout == "fixed")
    chunks = words // launch.words
    per_chunk = launch.words * (2 if kind == "tf32x3" else 1) * NT // 4
    q_registers = per_chunk if chunks == 1 and per_chunk <= launch.q_registers else 0
    direct = q_registers > 0 and kind in ("fp16", "bf16")
    blocks, factor = triton.cdiv(LQ, TOKENS), None
    if direct:
        Q = Q if Q.data_ptr() % 16 == 0 else Q.clone()
    else:
        prepared, factor = prepare(Q, kind)
    pieces = [piece(kind, launch.words, launch.rows, q_registers, c == 0, c == chunks - 1) for c in range(chunks)]
    programs, group = dealt(launch.programs_per_sm, launch.group, pids, n, D.device)
    late, part = tuning.late_share(n, programs, layout == "fixed")
    reduce_asm, reduce_constraints = reduction(NT, "max.f32")
    for query, block in itertools.product(range(NQ), range(blocks)):
        _dense_maxsim_kernel[(programs + late,)](
            Q[query, block * TOKENS :] if direct else prepared[query * blocks + block],
            factor,
            D,
            lengths if offsets is None else offsets,
            pids,
            count,
            out[query],
            n,
            D.size(1) if offsets is None else 0,
            programs,
            late,
            LQ - block * TOKENS,
            ASM=tuple(p.asm for p in pieces),
            CONSTRAINTS=tuple(p.constraints for p in pieces),
            OUTPUTS=launch.rows * NT * 4,
            REDUCE_ASM=reduce_asm,
            REDUCE_CONSTRAINTS=reduce_constraints,
            NT=NT,
            ROWS=launch.rows,
            WORDS=launch.words,
            CHUNKS=chunks,
            Q_REGISTERS=q_registers,
            Q_BYTES=per_chunk * 128,
            LAYOUT=layout,
            HAS_PIDS=pids is not None,
            HAS_COUNT=count is not None,
            ADD=block > 0,
            GROUP=group,
            SCALED=factor is not None,
            DIRECT=direct,
            PART=part,
            AGAIN=layout == "fixed" and kind == "tf32",
            maxnreg=launch.maxnreg,
            num_warps=1,
        )
