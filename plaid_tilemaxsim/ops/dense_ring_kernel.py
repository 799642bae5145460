"""Dense MaxSim for sm_90 of passages of one length: whole tiles by TMA into a ring in shared memory, scores by wgmma.

    score(p) = sum_i max_{t in p} <Q[i], D[t]>

Memory reads at its limit when many bytes are on their way and neighbouring ones are asked for together. So a stage of
the ring is a tile of whole rows, one piece of memory, and is asked for at once as soon as the tile before it in its
place has been multiplied; TMA lays it out as wgmma wants it, 64 dimensions of all rows at a time.

wgmma multiplies 64 rows, and a query has up to 32 tokens: a token is two rows of DIM / 2 values. The other operand is
Q, in registers for the whole launch: in warp w row g is the first half of query token 8 w + g, row g + 8 the second. A
similarity is then the sum of two accumulators of one thread: (row g, even column) and (row g + 8, odd column).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import tuning
from .warp_tiles import share_of

# as triton 3.9 calls it, and 3.6
_load_box = tma.async_load if "async_load" in tma.__all__ else tma.async_copy_global_to_shared
_WIDTH = gl.constexpr(64)  # values of a row in one box: what 128 bytes of swizzle hold


@gluon.jit
def _similarities(acc):
    """[64, 2 T] accumulators as similarities [4, 8, T] of query tokens 8 w + g."""
    T: gl.constexpr = acc.shape[1] // 2
    even, odd = acc.reshape([4, 2, 8, T, 2]).split()
    lower, _ = even.permute((0, 2, 3, 1)).split()
    _, upper = odd.permute((0, 2, 3, 1)).split()
    return lower + upper


@gluon.jit
def _ask(
    desc, tiles, filled, slot, row, pred, CHUNKS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Asks for the 2 TOKENS rows from ``row`` on, in boxes of ROWS rows: neighbouring boxes together."""
    mbarrier.expect(filled.index(slot), CHUNKS * TOKENS * 256, pred=pred)
    for r in gl.static_range(0, 2 * TOKENS, ROWS):
        for c in gl.static_range(CHUNKS):
            place = tiles.index(slot * CHUNKS + c).slice(r, ROWS, dim=0)
            _load_box(desc, [row + r, c * _WIDTH], filled.index(slot), place, pred=pred)


@gluon.jit
def _next_tile(i, t, step, TILES):
    """Passage and tile after tile t of passage i; a program's passages are ``step`` apart."""
    t += 1
    done = t == TILES
    return gl.where(done, i + step, i), gl.where(done, 0, t)


@gluon.jit(do_not_specialize=["n", "programs", "late", "ND", "LQ"])
def _dense_ring_kernel(
    desc, q_ptr, count_ptr, out_ptr, n, programs, late, ND, LQ,
    CHUNKS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    PART: gl.constexpr, HAS_COUNT: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = desc.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    HALF: gl.constexpr = CHUNKS * _WIDTH
    last = n
    if HAS_COUNT:
        last = gl.minimum(gl.load(count_ptr), n)
    i = gl.program_id(0)
    step = gl.num_programs(0)
    end = last
    if PART:
        i, step, end = share_of(last, programs, late, PART, 1)
    TILES = (ND + TOKENS - 1) // TOKENS

    tiles = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, 2 * TOKENS, _WIDTH], desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(filled.index(s), count=1)
    # two walks over the tiles: what is asked for is STAGES ahead
    t = 0
    i_y = i
    t_y = 0
    for s in gl.static_range(STAGES):
        _ask(desc, tiles, filled, s, (i_y * ND + t_y * TOKENS) * 2, i_y < end, CHUNKS, TOKENS, ROWS)
        i_y, t_y = _next_tile(i_y, t_y, step, TILES)

    m = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, A)), 1)
    k = gl.expand_dims(gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, A)), 0)
    query = m // 16 * 8 + m % 8
    at = q_ptr + query * (2 * HALF) + m % 16 // 8 * HALF + k
    qs = ()
    for c in gl.static_range(CHUNKS):
        piece = gl.load(at + c * _WIDTH, mask=(query < LQ) & (k < _WIDTH), other=0.0)
        qs = qs + (piece,)  # type: ignore[assignment]  # noqa: RUF005 (triton knows no unpacking)
    zero = gl.zeros([64, 2 * TOKENS], gl.float32, layout=MMA)
    nothing = gl.full_like(_similarities(zero), float("-inf"))
    inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, nothing.type.layout))
    token = gl.expand_dims(gl.expand_dims(gl.arange(0, TOKENS, layout=inner), 0), 0)
    best = nothing
    slot = 0
    phase = 0
    while i < end:
        mbarrier.wait(filled.index(slot), phase)
        acc = zero
        for c in gl.static_range(CHUNKS):
            rows = tiles.index(slot * CHUNKS + c).permute((1, 0))
            acc = warpgroup_mma(qs[c], rows, acc, use_acc=c > 0, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _ask(desc, tiles, filled, slot, (i_y * ND + t_y * TOKENS) * 2, i_y < end, CHUNKS, TOKENS, ROWS)
        i_y, t_y = _next_tile(i_y, t_y, step, TILES)
        similar = _similarities(acc)
        if not FULL:
            similar = gl.where(token < ND - t * TOKENS, similar, float("-inf"))
        best = gl.maximum(best, similar)
        if t + 1 == TILES:
            gl.store(out_ptr + i, gl.sum(gl.sum(gl.max(best, axis=2), axis=1), axis=0))
            best = nothing
        i, t = _next_tile(i, t, step, TILES)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


def dense_maxsim(Q: Tensor, D: Tensor, out: Tensor, count: Tensor | None) -> None:
    """See :func:`.api.dense_maxsim`; Q ``[1, LQ, DIM]``, D ``[n, ND, DIM]``; writes ``out`` fp32 ``[1, n]``.

    fp16 or bf16, LQ at most 32, DIM a multiple of 128 up to 1024; D is aligned to 16 bytes and has 1 token or more,
    fewer than 2**30. At 128 dimensions a passage is a program, those behind ``count`` too.
    """
    _, LQ, DIM = Q.shape
    n, ND = out.size(1), D.size(1)
    if n == 0:
        return
    blocks = tuning.dense_ring_blocks(DIM)
    programs, late, part = n, 0, 0
    if blocks.programs_per_sm is not None:
        programs = min(n, blocks.programs_per_sm * tuning.num_sms(D.device))
        late, part = tuning.dense_ring_share(n, programs, DIM)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    desc = TensorDescriptor(D, [2 * len(D) * ND, DIM // 2], [DIM // 2, 1], [blocks.rows, 64], layout)
    _dense_ring_kernel[(programs + late,)](
        desc,
        Q,
        count,
        out,
        n,
        programs,
        late,
        ND,
        LQ,
        CHUNKS=DIM // 128,
        TOKENS=blocks.tokens,
        ROWS=blocks.rows,
        STAGES=blocks.stages,
        PART=part,
        HAS_COUNT=count is not None,
        FULL=ND % blocks.tokens == 0,
        num_warps=4,
    )
