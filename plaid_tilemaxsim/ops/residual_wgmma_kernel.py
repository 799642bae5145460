"""Residual MaxSim of several queries for sm_90, on ``wgmma``: query tokens are the rows, passages' tokens the columns.

    score(q, p) = sum_i max_{t in p} Q[q, i] . (centroids[codes[t]] + w[residuals[t]]) * inv_norms[t]

``mma.sync`` bounds ``residual_batch_kernel``. Here eight blocks of 32 query tokens are 256 rows that stay in the
registers of two warpgroups (A), and other warps decompress tiles of 64 tokens, normalised, into a ring in shared memory
(B). A row's scores lie in the registers of four lanes, two neighbouring tokens in one lane, so that a maximum costs one
instruction a score and no exchange before its passage ends. Passages follow each other without a gap, but for a last
token repeated where their number is odd: two tokens of one passage are a unit, and passages may start at any.

A warpgroup multiplies the two halves of its rows one after the other and reduces the first half meanwhile. A block's
first 16 tokens are in one half and its last 16 in the other, in rows of the same warp, whose threads write the first
sum and add the second.
"""

# ruff: noqa: RUF005 (triton 3.6 has no starred tuples)
# Kernels' tuples grow.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import tuning
from .residual_batch_kernel import indices, ordered_centroids, weight_table
from .residual_fast_kernel import decode4, decode_nibbles
from .warp_tiles import Ptx, add_blocks, load

DIM = 128
BLOCKS = 8  # of 32 query tokens in a launch
UNIT = 2  # consecutive tokens of one passage
LANES = 8  # that decode a token, 16 dimensions each
STAGES = gl.constexpr(4)  # tiles of 64 tokens between the warps that decompress and those that score
WARPS = gl.constexpr(4)  # that decompress; 8 score
REGISTERS = gl.constexpr(168)  # of every thread: one program a multiprocessor
_LAST = 2**31 - 1


# ---- order of K


@lru_cache
def k_order(nbits: int) -> tuple[int, ...]:
    """The dimension at every place of a row in shared memory: a lane's first 8 in the first half, the others in the
    second."""
    size = 2 * nbits  # bytes of a lane
    halves: list[list[int]] = [[], []]
    for lane in range(LANES):
        dims = []
        for word in range(0, size, 4):
            for shift in range(0, 4, nbits):
                for half in range(min(size, 4) // 2):
                    for nibble in range(4):
                        bit = 8 * word + 16 * half + 4 * nibble + shift
                        # within a byte dimensions run from the high bits down
                        dims.append((size * lane + bit // 8) * (8 // nbits) + (8 - nbits - bit % 8) // nbits)
        halves[0] += dims[:8]
        halves[1] += dims[8:]
    return tuple(halves[0] + halves[1])


@lru_cache
def decode(nbits: int) -> tuple[str, str]:
    """PTX and constraints: 16 dimensions of a normalised token as fp16 pairs, ``c + (c d + (w + w d))``.

    Only the last addition rounds a number as large as the sum. Operands: 8 words out; residual words; 8 words of the
    centroid; d = inverse norm - 1 twice; decode table, for 1 and 2 bits its four weights as two pairs.
    """
    p = Ptx()
    words, tables = max(1, nbits // 2), 2 if nbits < 4 else 8
    at = iter(range(100))
    out, x, c = ([f"${next(at)}" for _ in range(n)] for n in (8, words, 8))
    d = f"${next(at)}"
    table = [f"${next(at)}" for _ in range(tables)]
    weights = []
    if nbits < 4:
        scaled = [p("fma.rn.f16x2", pair, d, pair) for pair in table]
        table = [p("prmt.b32", *scaled, "0x6420"), p("prmt.b32", *scaled, "0x7531")]
    for word in x:
        pairs = decode4(p, word, 4, table) if nbits == 4 else decode_nibbles(p, nbits, word, 2 * nbits, table)
        weights += [weight for pair in pairs for weight in pair]
    for o, centroid, weight in zip(out, c, weights, strict=True):
        if nbits == 4:
            weight = p("fma.rn.f16x2", weight, d, weight)
        p.lines.append(f"add.rn.f16x2 {o}, {centroid}, {p('fma.rn.f16x2', centroid, d, weight)};")
    return p.text(), ",".join(["=&r"] * 8 + ["r"] * (words + 9 + tables))


# ---- kernel

_load = gluon.jit(load.fn)
# public since triton 3.7 or later
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def _first_passage(starts_ptr, unit, n):
    """How many of n passages start before a unit."""
    low = unit * 0
    high = n
    while low < high:
        middle = (low + high) // 2
        if gl.load(starts_ptr + middle) < unit:
            low = middle + 1
        else:
            high = middle
    return low


@gluon.jit
def _warp(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, operands):
    """An int32 of every thread from what the lanes of its warp hold: tensors have one element a thread."""
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _from_lane(x, lane):
    return _warp("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, lane])


@gluon.jit
def _tile(words):
    """A tile int32 [64, 64] of threads' words: 8 of each token of unit lane // 8 of groups warp and warp + 4."""
    groups = ()
    for i in gl.static_range(2):
        tokens = ()
        for r in gl.static_range(2):
            w = words[(2 * i + r) * 8 : (2 * i + r + 1) * 8]
            quads = ()
            for k in gl.static_range(0, 8, 4):
                quads = quads + (gl.join(gl.join(w[k], w[k + 2]), gl.join(w[k + 1], w[k + 3])),)
            tokens = tokens + (gl.join(quads[0], quads[1]),)
        groups = groups + (gl.join(tokens[0], tokens[1]),)
    # [warp, unit, lane % 8, word // 2 % 2, word % 2, word // 4, token, group // 4]
    x = gl.join(groups[0], groups[1]).reshape([WARPS, 4, 8, 2, 2, 2, 2, 2])
    return x.permute((7, 0, 1, 6, 5, 2, 3, 4)).reshape([64, 64])


@gluon.jit
def _store(i, slots, x, c, d, table, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, WORDS: gl.constexpr):
    """Decompresses tile i, of which x, c and d are a thread's residuals, centroids and inverse norms, into its slot."""
    tiles, filled, emptied = slots
    s = i & (STAGES - 1)
    mbarrier.wait(emptied.index(s), (i // STAGES & 1) ^ 1)
    words = ()
    for k in gl.static_range(4):
        operands = x[WORDS * k : WORDS * (k + 1)] + c[8 * k : 8 * (k + 1)] + d[k : k + 1] + table
        words = words + gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, operands, dtype=(gl.int32,) * 8, is_pure=True, pack=1
        )
    tiles.index(s).store(_tile(words))
    fence_async_shared()
    mbarrier.arrive(filled.index(s), count=1)


@gluon.jit
def _produce(
    slots, share, starts_ptr, offsets_ptr, decoding,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, NBITS: gl.constexpr, INV_BYTES: gl.constexpr,
):  # fmt: skip
    """Decompresses units first..last - 1 into tiles, and maybe a tile past them that nobody reads.

    Loads run ahead: a tile takes one of six steps an iteration, its stores first, so that their fence awaits no load of
    the same iteration. Two iterations a loop body: registers change roles uncopied.

    A thread has 16 dimensions of the two tokens of unit lane // 8 of a group of four units; a tile is eight groups, a
    warp has two of them. What a token needs once, one lane finds: token lane % 16 of the warp's.
    """
    first, last, passage, p_last = share
    table_ptr, centroids_ptr, codes_ptr, residuals_ptr, inv_norms_ptr, d_lo, d_step = decoding
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    WORDS: gl.constexpr = 2 if NBITS == 4 else 1
    KIND: gl.constexpr = "L1::no_allocate." + ("u16" if NBITS == 1 else "b32" if NBITS == 2 else "v2.b32")
    zero = gl.zeros([WARPS, 32], gl.int32, layout=L)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, L)), 1) + zero
    lane = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, L)), 0) + zero
    t = lane % 8
    source = lane // 8 * 2  # lane of the first token
    token_in_unit = lane % 2
    unit_in_tile = (warp + lane % 16 // 8 * WARPS) * 4 + t // 2
    upto = (2 << unit_in_tile) - 1
    table = ()
    if NBITS == 4:
        for k in gl.static_range(8):
            table = table + (gl.load(table_ptr + k) + zero,)
    else:
        low = gl.load(table_ptr) + zero
        high = gl.load(table_ptr + 1) + zero
        table = (
            _warp("prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high]),
            _warp("prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high]),
        )
    zero64 = zero.to(gl.int64)
    starts_at = starts_ptr.to(gl.int64) + zero64
    codes_at = codes_ptr.to(gl.int64) + zero64
    inv_norms_at = inv_norms_ptr.to(gl.int64) + zero64
    residuals_at = residuals_ptr.to(gl.int64) + (t * (2 * NBITS)).to(gl.int64)
    centroids_at = centroids_ptr.to(gl.int64) + (t * 16).to(gl.int64)

    first_of_tile = passage + zero  # and starts: of the passages after it, one a lane
    (starts,) = _load(starts_at, first_of_tile + 1 + lane, 4, "b32", 1)
    pid = zero64
    behind = first - 32 + zero  # tile -1 is of passage 0, from its start: tokens there are
    skip = zero
    off = zero64
    off_end = zero64
    left = zero
    code = zero
    inverse = zero
    # of tiles i..i + 2 and i, i + 1
    x = (lane,) * (12 * WORDS)
    c = (lane,) * 64
    d = (lane,) * 8
    for two in range(-5, (last - first + 31) // 32, 2):
        for odd in gl.static_range(2):
            i = two + odd
            if i >= 0:
                _store(i, slots, x[: 4 * WORDS], c[:32], d[:4], table, ASM, CONSTRAINTS, WORDS)
            # centroids of tile i + 2
            if INV_BYTES == 2:
                stored = inverse.to(gl.float32)
            else:
                stored = inverse.to(gl.float32, bitcast=True)
            # an embedding that is not a number leaves maxima as they are: -inf is the score of an empty passage
            less = gl.where(left > 0, gl.minimum(d_lo + d_step * stored, 60000.0), float("nan"))
            both = _warp("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [less])
            c = c[32:]
            d = d[4:]
            for k in gl.static_range(4):
                code_k = _from_lane(code, source + (k // 2 * 8 + k % 2))
                d = d + (_from_lane(both, source + (k // 2 * 8 + k % 2)),)
                for half in gl.static_range(2):
                    c = c + _load(centroids_at + 128 * half, code_k, 256, "v4.b32", 4)
            # codes, residuals and inverse norms of tile i + 3
            left = (off_end - off).to(gl.int32) - skip
            token = gl.where(left > 0, off.to(gl.int32) + skip + gl.minimum(left - 1, token_in_unit), 0)
            (code,) = _load(codes_at, token, 4, "b32", 1)
            (inverse,) = _load(inv_norms_at, token, INV_BYTES, "u16" if INV_BYTES == 2 else "b32", 1)
            x = x[4 * WORDS :]
            for k in gl.static_range(4):
                x = x + _load(residuals_at, _from_lane(token, source + (k // 2 * 8 + k % 2)), 16 * NBITS, KIND, WORDS)
            # offsets of tile i + 4
            unit = first + 32 * (i + 4)
            skip = 2 * (unit + unit_in_tile - behind)
            off = gl.load(offsets_ptr + pid)
            off_end = gl.load(offsets_ptr + pid + 1)
            # passages of tile i + 5
            at = starts - (unit + 32)
            bits = _warp("{.reg .b32 b; shl.b32 b, 1, $1; redux.sync.or.b32 $0, b, -1;}", "=r,r", [at])
            p = gl.minimum(
                first_of_tile + _warp("{.reg .b32 b; and.b32 b, $1, $2; popc.b32 $0, b;}", "=r,r,r", [bits, upto]),
                p_last - 1,
            )
            first_of_tile += _warp(
                "{.reg .pred p; .reg .b32 b; setp.le.s32 p, $1, 32; vote.sync.ballot.b32 b, p, -1; popc.b32 $0, b;}",
                "=r,r", [at],
            )  # fmt: skip
            (starts,) = _load(starts_at, first_of_tile + 1 + lane, 4, "b32", 1)
            (behind,) = _load(starts_at, p, 4, "b32", 1)
            pid = p.to(gl.int64)


@gluon.jit
def _halves(x):
    """Two halves of [64, n, 4] along n."""
    n: gl.constexpr = x.shape[1]
    return x.reshape([64, 2, n // 2, 4]).permute((0, 2, 3, 1)).split()


@gluon.jit
def _maxima(acc):
    """Scores [64, 64] as eight groups of units: tuple of [64, 4], maxima of two neighbours."""
    a, b = acc.reshape([64, 8, 4, 2]).split()
    lo, hi = _halves(gl.maximum(a, b))
    quarters = _halves(lo) + _halves(hi)
    groups = ()
    for k in gl.static_range(4):
        lo, hi = _halves(quarters[k])
        groups = groups + (lo.reshape([64, 4]), hi.reshape([64, 4]))
    return groups


@gluon.jit
def _score(best):
    """Sums over a warp's rows of their maxima [64, 4]."""
    return gl.sum(gl.max(best, axis=1).reshape([4, 16]), axis=1)


@gluon.jit
def _reduce(acc, best, ends, out, wanted, ADD: gl.constexpr):
    """Running maxima [64, 4] of the rows after a tile, in whose units ``ends`` (a bit each) passages end.

    Their scores are written to ``out`` [4] and on.
    """
    groups = _maxima(acc)
    nothing = gl.full_like(best, float("-inf"))
    bit = gl.expand_dims(1 << gl.arange(0, 4, layout=gl.SliceLayout(0, best.type.layout)), 0)
    for half in gl.static_range(2):
        rest = groups[4 * half : 4 * half + 4]
        here = (ends >> (16 * half)) & 65535
        while here != 0:
            low = here & -here
            over = ()
            for j in gl.static_range(4):
                upto = (bit << (4 * j)) <= low
                best = gl.maximum(best, gl.where(upto, rest[j], nothing))
                over = over + (gl.where(upto, nothing, rest[j]),)
            rest = over
            score = _score(best)
            if ADD:
                gl.atomic_add(out, score, mask=wanted, sem="relaxed")
            else:
                gl.store(out, score, mask=wanted)
            out += 1
            best = nothing
            here ^= low
        for j in gl.static_range(4):
            best = gl.maximum(best, rest[j])
    return best


@gluon.jit
def _consume(slots, share, starts_ptr, scoring, FIRST: gl.constexpr):
    """Scores of passages ``passage``..p_last - 1, the units first..last - 1, with blocks FIRST..FIRST + 3."""
    tiles, filled, emptied = slots
    first, last, passage, p_last = share
    q_ptr, out_ptr, stride, blocks = scoring
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    m = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, A)), 1)
    k = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, A)), 0)
    q0 = gl.load(q_ptr + FIRST * 2048 + m * 128 + k)
    q1 = gl.load(q_ptr + 16384 + FIRST * 2048 + m * 128 + k)
    nothing = gl.zeros([64, 64], gl.float32, layout=MMA)
    best0 = gl.full_like(_maxima(nothing)[0], float("-inf"))
    best1 = best0
    block = FIRST + gl.arange(0, 4, layout=_score(best0).type.layout)
    out = out_ptr + block.to(gl.int64) * stride
    wanted = block < blocks
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    starts = gl.load(starts_ptr + passage + 1 + lane)
    unit = first
    for i in range((last - first + 31) // 32):
        s = i & (STAGES - 1)
        mbarrier.wait(filled.index(s), i // STAGES & 1)
        tile = _reinterpret(tiles.index(s), gl.float16, [64, 128], B).permute((1, 0))
        acc0 = warpgroup_mma(q0, tile, nothing, use_acc=False, is_async=True)
        acc1 = warpgroup_mma(q1, tile, nothing, use_acc=False, is_async=True)
        at = starts - (unit + 1)
        ending = (at < 32) & (passage + lane < p_last)
        ends = gl.reduce_or(gl.where(ending, 1 << (at & 31), 0), axis=0)
        passage_next = passage + gl.sum(ending.to(gl.int32), axis=0)
        starts = gl.load(starts_ptr + passage_next + 1 + lane)
        done0 = warpgroup_mma_wait(1, deps=[acc0])
        best0 = _reduce(done0, best0, ends, out + passage, wanted, False)
        done1 = warpgroup_mma_wait(0, deps=[acc1])
        mbarrier.arrive(emptied.index(s), count=1)
        best1 = _reduce(done1, best1, ends, out + passage, wanted, True)
        passage = passage_next
        unit += 32


@gluon.jit(do_not_specialize=["n", "stride", "blocks"], do_not_specialize_on_alignment=["q_ptr", "out_ptr"])
def _residual_wgmma_kernel(
    q_ptr, table_ptr, centroids_ptr, codes_ptr, residuals_ptr, inv_norms_ptr, d_lo, d_step,
    offsets_ptr, starts_ptr, out_ptr, n, stride, blocks,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, NBITS: gl.constexpr, INV_BYTES: gl.constexpr,
):  # fmt: skip
    total = gl.load(starts_ptr + n)
    program = gl.program_id(0)
    units = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    passage = _first_passage(starts_ptr, gl.minimum(program * units, total), n)
    p_last = _first_passage(starts_ptr, gl.minimum(program * units + units, total), n)
    first = gl.load(starts_ptr + passage)
    last = gl.load(starts_ptr + p_last)
    if passage < p_last:
        tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 64], gl.NVMMASharedLayout(128, 32, rank=2))
        filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(filled.index(s), count=1)
            mbarrier.init(emptied.index(s), count=2)
        slots = (tiles, filled, emptied)
        share = (first, last, passage, p_last)
        scoring = (q_ptr, out_ptr, stride, blocks)
        decoding = (table_ptr, centroids_ptr, codes_ptr, residuals_ptr, inv_norms_ptr, d_lo, d_step)
        gl.warp_specialize(
            [
                (_consume, (slots, share, starts_ptr, scoring, 0)),
                (_consume, (slots, share, starts_ptr, scoring, 4)),
                (
                    _produce,
                    (slots, share, starts_ptr, offsets_ptr, decoding, ASM, CONSTRAINTS, NBITS, INV_BYTES),
                ),
            ],
            [4, WARPS],
            [REGISTERS, REGISTERS],
        )


# ---- launcher


def unit_starts(offsets: Tensor, count: Tensor | None) -> Tensor:
    """The unit where each passage starts, then their number: int32 [N + 33], filled up with 2**31 - 1.

    A passage has one at least; passages past ``count`` have none.
    """
    units = ((offsets[1:] - offsets[:-1] + (UNIT - 1)) // UNIT).clamp_(min=1)
    n = len(units)
    if count is not None:
        units *= torch.arange(n, device=units.device) < count
    starts = torch.full((n + 33,), _LAST, dtype=torch.int32, device=offsets.device)
    starts[:1] = 0
    torch.cumsum(units, 0, dtype=torch.int32, out=starts[1 : n + 1])
    return starts


def rows_of(Q: Tensor, nbits: int) -> Tensor:
    """Q fp32 [NQ, LQ, 128] as fp16 [launches, 2, 128, 128]: halves of blocks of 32 query tokens, in the kernel's order.

    Zero past a query's end and past the last block.
    """
    NQ, LQ, dim = Q.shape
    blocks = triton.cdiv(LQ, 32)
    launches = triton.cdiv(NQ * blocks, BLOCKS)
    padded = torch.zeros(NQ, blocks * 32, dim, dtype=torch.float16, device=Q.device)
    padded[:, :LQ] = Q[:, :, indices(k_order(nbits), Q.device)]
    rows = torch.zeros(launches, 2, BLOCKS, 16, dim, dtype=torch.float16, device=Q.device)
    for at, block in enumerate(padded.view(-1, 2, 16, dim).split(BLOCKS)):
        rows[at, :, : len(block)] = block.transpose(0, 1)
    return rows


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
    out: Tensor,
    count: Tensor | None,
) -> None:
    """See :func:`.api.residual_maxsim_batch`, of all passages; writes ``out`` fp32 ``[NQ, N]``.

    Needs a token, DIM 128, and fewer than 2**32 - 2**16 tokens and passages together: units are numbered in 31 bits.
    """
    NQ, LQ, _ = Q.shape
    n = out.size(1)
    if n == 0:
        return
    blocks = NQ * triton.cdiv(LQ, 32)
    rows = out if blocks == NQ else torch.zeros(blocks, n, device=Q.device)
    q = rows_of(Q, nbits)
    starts = unit_starts(offsets, count)
    ordered, table = ordered_centroids(centroids, k_order(nbits)), weight_table(bucket_weights, nbits)
    asm, constraints = decode(nbits)
    programs = min(tuning.num_sms(Q.device), n)
    for at in range(len(q)):
        _residual_wgmma_kernel[(programs,)](
            q[at],
            table,
            ordered,
            codes,
            residuals,
            inv_norms,
            inv_norm_lo - 1,
            inv_norm_step,
            offsets,
            starts,
            rows[at * BLOCKS],
            n,
            n,
            min(BLOCKS, blocks - at * BLOCKS),
            ASM=asm,
            CONSTRAINTS=constraints,
            NBITS=nbits,
            INV_BYTES=inv_norms.element_size(),
            num_warps=4,
            maxnreg=REGISTERS.value,
        )
    if rows is not out:
        add_blocks(rows, out, count)
