"""Dense MaxSim: uncompressed embeddings, padded, packed, or a pid list over packed ones.

    score(q, p) = sum_i max_{t in p} <Q[q, i], D[t]>

Every embedding is read once for a block of query columns, which may hold several queries: column c is token c % LQP of
query c // LQP. Persistent programs load their columns of Q once and walk their share of the passages; the loads of the
next tiles are in flight while one is multiplied. DIM is cut into BLOCK_D pieces that divide it (3 x 32
for 96, 3 x 128 for 384), all of one row in one tile. Tokens past the end are masked to -inf, so a similarity below
zero counts. Products of fp16 and bf16 are exact in fp32 and accumulate there; fp32 by ``precision``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .warp_tiles import share_of

# Passages of one length and fewer bytes go to programs in equal counts.
LEAST_BYTES = 1 << 15


@triton.jit
def query_block(
    Q_ptr, d0, NQ, LQ, query_stride,
    DIM: tl.constexpr, LQP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Q^T [BLOCK_D, BLOCK_Q]; zero where a column or dimension does not exist."""
    c = tl.arange(0, BLOCK_Q)
    d = d0 + tl.arange(0, BLOCK_D)
    query, token = c // LQP, c % LQP
    at = Q_ptr + (query * query_stride + token * DIM)[None, :] + d[:, None]
    return tl.load(at, mask=((query < NQ) & (token < LQ))[None, :] & (d < DIM)[:, None], other=0.0)


@triton.jit
def _tile_best(
    D_ptr, qs, start, t, length,
    DIM: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Maxima over tokens t.. of one passage, fp32 [BLOCK_Q]."""
    row = tl.arange(0, BLOCK_N)
    tok = t + row
    base = D_ptr + (start + t) * DIM
    s = tl.zeros([BLOCK_N, BLOCK_Q], dtype=tl.float32)
    for k in tl.static_range(PIECES):
        d = k * BLOCK_D + tl.arange(0, BLOCK_D)
        at = base + (row * DIM)[:, None] + d[None, :]
        # [BLOCK_N, BLOCK_D]
        if FULL and DIM % BLOCK_D == 0:
            e = tl.load(at)
        elif DIM % BLOCK_D == 0:
            e = tl.load(at, mask=(tok < length)[:, None], other=0.0)
        else:
            e = tl.load(at, mask=(tok < length)[:, None] & (d < DIM)[None, :], other=0.0)
        s = tl.dot(e, qs[k], s, input_precision=PRECISION)
    if not FULL:
        s = tl.where((tok < length)[:, None], s, float("-inf"))
    return tl.max(s, 0)


@triton.jit
def write_scores(
    best, out_ptr, i, n, NQ, LQ, HAS_BASE: tl.constexpr, LQP: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """Sums the maxima of each query's columns into out[query, i]."""
    token = tl.arange(0, BLOCK_Q) % LQP
    # [queries, LQP]
    sums = tl.sum(tl.reshape(tl.where(token < LQ, best, 0.0), [BLOCK_Q // LQP, LQP]), 1)
    query = tl.arange(0, BLOCK_Q // LQP)
    at = out_ptr + query.to(tl.int64) * n + i
    if HAS_BASE:
        sums += tl.load(at, mask=query < NQ, other=0.0)
    tl.store(at, sums, mask=query < NQ)


@triton.jit(do_not_specialize=["n", "programs", "late", "ND", "NQ", "LQ"])
def _dense_maxsim_kernel(
    Q_ptr, D_ptr, lengths_ptr, offsets_ptr, pids_ptr, count_ptr, out_ptr,
    n, programs, late, ND, NQ, LQ, query_stride,
    DIM: tl.constexpr, LQP: tl.constexpr, PADDED: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_PIDS: tl.constexpr,
    HAS_COUNT: tl.constexpr, HAS_BASE: tl.constexpr, FULL: tl.constexpr, ONE_TILE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    last = n
    if HAS_COUNT:
        last = tl.maximum(tl.minimum(tl.load(count_ptr), n), 0)
    first, step, end = tl.program_id(0), tl.num_programs(0), last
    if PART:
        first, step, end = share_of(last, programs, late, PART, GROUP)
    qs = ()
    for k in tl.static_range(PIECES):
        piece = query_block(Q_ptr, k * BLOCK_D, NQ, LQ, query_stride, DIM, LQP, BLOCK_Q, BLOCK_D)
        qs = qs + (piece,)  # type: ignore[assignment]  # noqa: RUF005 (triton knows no unpacking)
    if ONE_TILE:
        # padded, ND <= BLOCK_N: the loads run ahead from passage to passage
        for i in tl.range(first, end, step, num_stages=STAGES):
            length = ND
            if HAS_LENGTHS:
                length = tl.minimum(tl.load(lengths_ptr + i).to(tl.int32), ND)
            start = tl.cast(i, tl.int64) * ND
            best = _tile_best(D_ptr, qs, start, 0, length, DIM, FULL, PRECISION, BLOCK_N, BLOCK_Q, BLOCK_D, PIECES)
            write_scores(best, out_ptr, i, n, NQ, LQ, HAS_BASE, LQP, BLOCK_Q)
    elif PADDED and not HAS_LENGTHS:
        # padded, all of one length: one loop over the tiles of all passages, so that loads run ahead likewise
        TILES = tl.cdiv(ND, BLOCK_N)
        rest = tl.maximum(end - first, 0)
        rounds = rest // (step * GROUP)
        mine = rounds * GROUP + tl.minimum(rest - rounds * step * GROUP, GROUP)
        best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
        for j in tl.range(0, mine * TILES, num_stages=STAGES):
            mth = j // TILES
            i = first + mth // GROUP * GROUP * step + mth % GROUP
            t = j % TILES * BLOCK_N
            start = tl.cast(i, tl.int64) * ND
            tile = _tile_best(D_ptr, qs, start, t, ND, DIM, FULL, PRECISION, BLOCK_N, BLOCK_Q, BLOCK_D, PIECES)
            best = tl.where(t == 0, tile, tl.maximum(best, tile))
            if t + BLOCK_N >= ND:
                write_scores(best, out_ptr, i, n, NQ, LQ, HAS_BASE, LQP, BLOCK_Q)
    else:
        for i in range(first, end, step):
            pid = tl.cast(i, tl.int64)
            if PADDED:
                start = pid * ND
                length = ND
                if HAS_LENGTHS:
                    length = tl.minimum(tl.load(lengths_ptr + i).to(tl.int32), ND)
            else:
                if HAS_PIDS:
                    pid = tl.load(pids_ptr + i).to(tl.int64)
                start = tl.load(offsets_ptr + pid)
                length = (tl.load(offsets_ptr + pid + 1) - start).to(tl.int32)
            best = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
            for t in tl.range(0, length, BLOCK_N, num_stages=STAGES):
                tile = _tile_best(D_ptr, qs, start, t, length, DIM, FULL, PRECISION, BLOCK_N, BLOCK_Q, BLOCK_D, PIECES)
                best = tl.maximum(best, tile)
            write_scores(best, out_ptr, i, n, NQ, LQ, HAS_BASE, LQP, BLOCK_Q)


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
    """See :func:`.api.dense_maxsim`; Q ``[NQ, LQ, DIM]``, writes ``out`` fp32 ``[NQ, n]``."""
    NQ, LQ, DIM = Q.shape
    n = out.size(1)
    if n == 0:
        return
    if tuning.interpreted() and D.dtype == torch.bfloat16:
        # the interpreter multiplies the bit patterns of bf16; fp32 holds the same values
        Q, D = Q.float(), D.float()
    padded = offsets is None
    ND = D.size(1) if padded else 0
    fixed_length = ND if padded and lengths is None else None
    arch = tuning.arch(D.device)
    blocks = tuning.dense_blocks(arch, D.element_size(), DIM, LQ, NQ, fixed_length, precision)
    LQP, queries = blocks.LQP, blocks.BLOCK_Q // blocks.LQP
    programs = min(n, blocks.programs_per_sm * tuning.num_sms(D.device))
    # ragged lists come here for their many columns, and are bound by arithmetic; small passages by what a walk costs
    shares = fixed_length is not None and ND * DIM * D.element_size() >= LEAST_BYTES
    late, part = tuning.late_share(n, programs, True) if shares else (0, 0)
    for query in range(0, NQ, queries):
        # long queries: one launch a block of their tokens, each adding to what the one before left in `out`
        for token in range(0, LQ, LQP):
            _dense_maxsim_kernel[(programs + late,)](
                Q[query, token:],
                D,
                lengths,
                offsets,
                pids,
                count,
                out[query:],
                n,
                programs,
                late,
                ND,
                NQ - query,
                LQ - token,
                LQ * DIM,
                DIM=DIM,
                LQP=LQP,
                PADDED=padded,
                HAS_LENGTHS=lengths is not None,
                HAS_PIDS=pids is not None,
                HAS_COUNT=count is not None,
                HAS_BASE=token > 0,
                FULL=padded and lengths is None and ND % blocks.BLOCK_N == 0,
                ONE_TILE=padded and ND <= blocks.BLOCK_N and (lengths is not None or late == 0),
                PRECISION=precision,
                BLOCK_N=blocks.BLOCK_N,
                BLOCK_Q=blocks.BLOCK_Q,
                BLOCK_D=blocks.BLOCK_D,
                PIECES=triton.cdiv(DIM, blocks.BLOCK_D),
                STAGES=blocks.num_stages,
                GROUP=4 if late else 1,
                PART=part,
                maxnreg=blocks.maxnreg,
                num_warps=blocks.num_warps,
                num_stages=blocks.num_stages,
            )
