"""What kernels of one warp a program share: PTX text, wide loads, and the walk over 16-token tiles of passages.

The walk deals passages to programs. Where it stands is four things, so that loads run ahead of the arithmetic: the
tile that is next, passage ``a`` after it by its tokens, passage ``b`` after that by its pid.
"""

# ruff: noqa: RUF005 (triton 3.6 has no starred tuples)

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning

NT = 4  # column tiles of 8 query tokens in a block
TOKENS = 8 * NT


class Ptx:
    """Lines of PTX; calling it appends one instruction and returns its new destination register."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.n = 0

    def new(self) -> str:
        self.n += 1
        return f"r{self.n}"

    def __call__(self, op: str, *operands: str) -> str:
        d = self.new()
        self.lines.append(f"{op} {', '.join((d, *operands))};")
        return d

    def text(self) -> str:
        return "{\n" + f".reg .b32 r<{self.n + 1}>;\n.reg .b16 h<2>;\n.reg .pred p;\n" + "\n".join(self.lines) + "\n}"


def reduction(NT: int, maximum: str) -> tuple[str, str]:
    """PTX and constraints of a ``maximum`` over the 8 lanes of a column.

    The maxima come spread: lane ``4 g + t`` gets query token ``2 NT t + c(g)``.

    Operands: 1 maximum out, 2 NT maxima and the lane in. Lanes halve their registers at each exchange.
    """
    p = Ptx()
    regs, lane = [f"${1 + i}" for i in range(2 * NT)], f"${1 + 2 * NT}"
    for distance in (16, 8, 4):
        half = len(regs) // 2
        if half:
            bit = p("and.b32", lane, str(distance))
            p.lines.append(f"setp.ne.b32 p, {bit}, 0;")
            kept = [p("selp.b32", hi, lo, "p") for lo, hi in zip(regs[:half], regs[half:], strict=True)]
            sent = [p("selp.b32", lo, hi, "p") for lo, hi in zip(regs[:half], regs[half:], strict=True)]
        else:
            kept = sent = regs
        got = [p("shfl.sync.bfly.b32", s, str(distance), "0x1f", "0xffffffff") for s in sent]
        regs = [p(maximum, k, g) for k, g in zip(kept, got, strict=True)]
    p.lines.append(f"mov.b32 $0, {regs[0]};")
    return p.text(), ",".join(["=r"] + ["r"] * (2 * NT + 1))


def best_of_blocks(
    p: Ptx,
    a: Sequence[Sequence[list[str]]],
    inverse: Sequence[Sequence[str]],
    q: list[str],
    blocks: int,
    NT: int,
    maxima: list[str],
    out: list[str],
) -> None:
    """PTX of ``out = max(maxima, products)`` for tiles of 16 tokens and ``blocks`` blocks of query tokens.

    ``a[tile][half]``: registers of fp16 pairs of rows g (half 0) and g + 8, two a k-step; ``inverse[tile][half]``: what
    the products of the row are multiplied with, nothing where it is empty. ``q``: fragments of the one block, or the
    address of those of all. ``maxima`` and ``out``: 2 NT registers a block.
    """
    ksteps = len(a[0][0]) // 2
    registers = ksteps * NT * 2
    zero = p("mov.b32", "0")
    for block in range(blocks):
        acc = [[[zero] * 4 for _ in range(NT)] for _ in a]
        for step in range(ksteps):
            b = []
            for j in range(step * 2 * NT, (step + 1) * 2 * NT, 4):
                if len(q) > 1:
                    b += q[j : j + 4]
                else:
                    four = [p.new() for _ in range(4)]
                    at = (block * registers + j) * 128
                    p.lines.append(f"ld.global.v4.b32 {{{', '.join(four)}}}, [{q[0]}+{at}];")
                    b += four
            for n in range(NT):
                for tile, rows in enumerate(a):
                    operand = ", ".join(rows[row][2 * step + half] for half in range(2) for row in range(2))
                    before = ", ".join(acc[tile][n])
                    if step == 0:
                        acc[tile][n] = [p.new() for _ in range(4)]
                    p.lines.append(
                        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                        f"{{{', '.join(acc[tile][n])}}}, {{{operand}}}, {{{b[2 * n]}, {b[2 * n + 1]}}}, {{{before}}};"
                    )
        for n in range(NT):
            for half in range(2):
                at = (block * NT + n) * 2 + half
                best = maxima[at]
                for tile in range(len(a)):
                    pair = [acc[tile][n][half], acc[tile][n][2 + half]]
                    if inverse:
                        pair = [p("mul.f32", x, y) for x, y in zip(pair, inverse[tile], strict=True)]
                    best = p("max.f32", p("max.f32", *pair), best)
                p.lines.append(f"mov.b32 {out[at]}, {best};")


@lru_cache
def _fragments(DIM: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(token of the block, dimension) of every fp16 in the order of registers: int64 [DIM / 8, 32, 4, 2] at NT = 4."""
    j = torch.arange(DIM // 16 * 2 * NT).view(-1, 1, 4, 1)
    lane = torch.arange(32).view(1, 32, 1, 1)
    i = torch.arange(2).view(1, 1, 1, 2)
    g, t = lane // 4, lane % 4
    step, n, half = j // (2 * NT), j // 2 % NT, j % 2
    # a lane's columns are 2 NT consecutive query tokens, its dimensions DIM / 4 consecutive ones
    token = g // 2 * 2 * NT + 2 * n + g % 2
    dim = t * (DIM // 4) + 4 * step + 2 * half + i
    token, dim = torch.broadcast_tensors(token, dim)
    return token.to(device), dim.to(device)


def query_fragments(Q: Tensor) -> Tensor:
    """Q fp32 [NQ, LQ, DIM] as fp16 B fragments of its blocks of query tokens: int32 [NQ * blocks, 16 DIM].

    For lanes whose A fragments are a quarter of a row each, in order. Zero past a query's end.
    """
    NQ, LQ, DIM = Q.shape
    blocks = triton.cdiv(LQ, TOKENS)
    padded = torch.zeros(NQ, blocks * TOKENS, DIM, dtype=torch.float16, device=Q.device)
    padded[:, :LQ] = Q
    token, dim = _fragments(DIM, Q.device)
    return padded.view(NQ * blocks, TOKENS, DIM)[:, token, dim].flatten(1).view(torch.int32)


@triton.jit
def load(base, index, STRIDE: tl.constexpr, KIND: tl.constexpr, N: tl.constexpr):
    """N int32 tensors by one load of ``KIND`` at int64 ``base`` + ``index`` (uint32 bits) * STRIDE bytes."""
    REGISTERS: tl.constexpr = "$0" if N == 1 else ("{$0, $1}" if N == 2 else "{$0, $1, $2, $3}")
    ASM: tl.constexpr = (
        f"{{.reg .b64 a; mad.wide.u32 a, ${N + 1}, {STRIDE}, ${N}; ld.global.nc.{KIND} {REGISTERS}, [a];}}"
    )
    CONSTRAINTS: tl.constexpr = "=r," * N + "l,r"
    if N == 1:
        return (tl.inline_asm_elementwise(ASM, CONSTRAINTS, [base, index], dtype=tl.int32, is_pure=True, pack=1),)
    else:
        return tl.inline_asm_elementwise(ASM, CONSTRAINTS, [base, index], dtype=(tl.int32,) * N, is_pure=True, pack=1)


@triton.jit
def load_once(base, index, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Int32 tensors that hold the ``BYTES`` (1, 2, 4, 8 or 16) there; read once, so not kept in L1."""
    if BYTES == 1:
        return load(base, index, STRIDE, "L1::no_allocate.u8", 1)
    elif BYTES == 2:
        return load(base, index, STRIDE, "L1::no_allocate.u16", 1)
    elif BYTES == 4:
        return load(base, index, STRIDE, "L1::no_allocate.b32", 1)
    elif BYTES == 8:
        return load(base, index, STRIDE, "L1::no_allocate.v2.b32", 2)
    else:
        return load(base, index, STRIDE, "L1::no_allocate.v4.b32", 4)


@triton.jit
def next_passage(i, step, GROUP: tl.constexpr):
    """The passage of the list after i for one program: groups of GROUP consecutive ones are dealt out in turn."""
    i += 1
    if GROUP > 1:
        return tl.where(i % GROUP == 0, i + (step - 1) * GROUP, i)
    else:
        return i + step - 1


@triton.jit
def share_of(n, programs, late, PART: tl.constexpr, GROUP: tl.constexpr):
    """(first passage, step, end) of this program's walk over n passages, dealt as :func:`.tuning.late_share` says.

    The first ``programs`` take groups of GROUP in turn, each of the ``late`` others consecutive ones (none of few).
    """
    run = n // (PART * late)
    dealt = n - late * run
    k = tl.program_id(0) - programs
    first = tl.where(k < 0, tl.program_id(0) * GROUP, dealt + k * run)
    return first, tl.where(k < 0, programs, 1), tl.where(k < 0, dealt, first + run)


@triton.jit
def pid_at(pids_ptr, i, n, HAS_PIDS: tl.constexpr, INDEX: tl.constexpr = tl.int64):
    """Passage number i of the list, as INDEX; past the end the last one, of an empty list passage 0.

    INDEX: int32 or int64, whichever the compiler needs fewer registers for in a kernel.
    """
    pid = tl.maximum(tl.minimum(i, n - 1), 0).to(INDEX)
    if HAS_PIDS:
        # nobody wrote the list when count is 0, and a walk looks ahead before it knows
        pid = tl.load(pids_ptr + pid, mask=n > 0, other=0).to(INDEX)
    return pid


@triton.jit
def token_range(offsets_ptr, pid, ND, LAYOUT: tl.constexpr):
    """First token (uint32 bits, as int32) and length of a passage.

    "packed" passages lie between ``offsets``; "padded" ones have ND tokens, of which ``offsets`` (int [N] then) says
    how many count, or all ("fixed").

    Rows of a tile read tokens ``start + min(row, left - 1)``: for an empty passage the token before it, which its score
    does not use; token 0 when it is the first.
    """
    if LAYOUT == "packed":
        start = tl.load(offsets_ptr + pid)
        length = (tl.load(offsets_ptr + pid + 1) - start).to(tl.int32)
    else:
        start = pid * ND
        length = tl.cast(ND, tl.int32)
        if LAYOUT == "padded":
            length = tl.minimum(tl.load(offsets_ptr + pid).to(tl.int32), length)
    start = tl.where((length == 0) & (start == 0), 1, start)
    return start.to(tl.int32), length


@triton.jit
def first_tile(
    offsets_ptr, pids_ptr, n, step, HAS_PIDS: tl.constexpr, GROUP: tl.constexpr, INDEX: tl.constexpr = tl.int64
):  # fmt: skip
    """Where a program's walk over packed passages starts, in the form of :func:`advance`."""
    i = tl.program_id(0) * GROUP
    i_a = next_passage(i, step, GROUP)
    i_b = next_passage(i_a, step, GROUP)
    pid_b = pid_at(pids_ptr, i_b, n, HAS_PIDS, INDEX)
    start, left = token_range(offsets_ptr, pid_at(pids_ptr, i, n, HAS_PIDS, INDEX), 0, "packed")
    start_a, left_a = token_range(offsets_ptr, pid_at(pids_ptr, i_a, n, HAS_PIDS, INDEX), 0, "packed")
    return i, start, left, i_a, start_a, left_a, i_b, pid_b


@triton.jit
def advance(
    i, start, left, i_a, start_a, left_a, i_b, pid_b, offsets_ptr, pids_ptr, n, step, ND,
    HAS_PIDS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, LAYOUT: tl.constexpr,
    INDEX: tl.constexpr = tl.int64, AGAIN: tl.constexpr = False,
):  # fmt: skip
    """The next tile: TOKENS on, or the start of passage a; then b becomes a and its successor's pid is loaded.

    AGAIN: passage a's range is made again from its number, which takes fewer registers where nothing has to be loaded.
    """
    if left > TOKENS:
        start += TOKENS
        left -= TOKENS
    else:
        i, start, left = i_a, start_a, left_a
        if AGAIN:
            start, left = token_range(offsets_ptr, pid_at(pids_ptr, i_a, n, HAS_PIDS, INDEX), ND, LAYOUT)
        i_a = i_b
        start_a, left_a = token_range(offsets_ptr, pid_b, ND, LAYOUT)
        i_b = next_passage(i_b, step, GROUP)
        pid_b = pid_at(pids_ptr, i_b, n, HAS_PIDS, INDEX)
    return i, start, left, i_a, start_a, left_a, i_b, pid_b


@triton.jit
def tile_tokens(start, left, row):
    """Tokens of rows g and g + 8 of a tile with ``left`` tokens to the passage's end: past it, the last one again."""
    return start + tl.minimum(left - 1, row), start + tl.minimum(left - 1, row + 8)


@triton.jit
def sum_of_maxima(maxima, lane, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Score of a passage from the maxima of one block (:func:`reduction` by max.f32), if it has tokens."""
    best = tl.inline_asm_elementwise(ASM, CONSTRAINTS, maxima + (lane,), dtype=tl.int32, is_pure=True, pack=1)
    # columns past the query's end are zero for every token
    return tl.sum(best.to(tl.float32, bitcast=True), 0)


# ---- launchers


def dealt(programs_per_sm: int, group: int, pids: Tensor | None, n: int, device: torch.device) -> tuple[int, int]:
    """(programs, consecutive passages to one of them): neighbours share cache lines, so groups when there are many."""
    programs = programs_per_sm * tuning.num_sms(device)
    return min(programs, n), group if pids is None and n >= 4 * group * programs else 1


def add_blocks(rows: Tensor, out: Tensor, count: Tensor | None) -> None:
    """Scores of blocks of query tokens fp32 [NQ * blocks, n], summed into out [NQ, n]; its first ``count`` columns."""
    total = rows.view(len(out), -1, out.size(1)).sum(1)
    if count is None:
        out.copy_(total)
    else:
        torch.where(torch.arange(out.size(1), device=out.device) < count, total, out, out=out)
