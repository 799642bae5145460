"""The search's operations for CPU tensors: fp32, plain torch, nothing to compile.

    residual MaxSim   sum_i max_t (CS[code_t, i] + <q_i, w[residual_t]>) * inv_norm_t
    centroid MaxSim   sum_i max_t CS[code_t, i]
    PQ MaxSim         sum_i max_t sum_m <q_i[m], codebook[m, code_tm]>

Two ideas make it fast. Residuals and PQ codes are never decoded: a byte adds one of 256 values to the product with
each query token, so the products of all bytes with the query are tabulated (PD x 256 rows of LQ floats, in cache)
and a token is the sum of PD of these rows, which torch's embedding_bag adds up. And passages are scored in tiles of
similar length, padded by repeating a passage's own last token (no maximum changes), so that one vectorised ``amax``
takes the maxima of a whole tile while it is in cache.

Arguments are those of :mod:`.api`, which checks them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from plaid_tilemaxsim.ops.api import CentroidScores

# Similarities of one tile for each of torch's threads: 2 MB of fp32 stay in the outer caches, and smaller tiles pay
# more for each torch call.
_TILE_SIMILARITIES = 1 << 19
# Torch spreads an operation on this many elements or more over its threads. Where an operation takes microseconds,
# waiting for them costs more than they save, and milliseconds where other processes want the cores. So what runs once
# a tile stays below it, in blocks of the tile if need be: all but embedding_bag, which gains.
_PARALLEL = 1 << 15
# Beyond its first _TILE_LEAST tokens a tile takes no passage shorter than this share of its longest: the padding
# of so many tokens costs about what another tile's calls do.
_TILE_FILL = 0.75
_TILE_LEAST = 1 << 13
# Query tokens whose byte products are tabulated at once: 4 MB at 32 residual bytes.
_QUERY_BLOCK = 128
# Centroids of which one maximum is taken in the search for the best ones.
_CELL_BLOCK = 64
# Up to this share of kept centroids the surviving tokens are packed; above, pruned rows are -inf in a copy.
_SPARSE_KEEP = 0.2


def centroid_scores(Q: Tensor, centroids: Tensor, threshold: float | None = None) -> CentroidScores:
    """Scores fp32 ``[C, LQ]`` of ``centroids [C, DIM]`` with ``Q [LQ, DIM]``; keep: rows whose best >= threshold."""
    table = centroids.to(Q.dtype) @ Q.T
    keep = None if threshold is None else (_amax(table) >= threshold).to(torch.uint8)
    return CentroidScores(table=table, scale=torch.ones(1), LQ=Q.size(0), keep=keep)


def candidates(cs: CentroidScores, ncells: int, ivf_pids: Tensor, ivf_offsets: Tensor, num_passages: int) -> Tensor:
    """Passages in the lists of each query token's ``ncells`` best centroids: int32, ascending, each once.

    ``ivf_pids`` int32, list of centroid c: ``ivf_pids[ivf_offsets[c] : ivf_offsets[c + 1]]``; pids < ``num_passages``.
    Which of equally good centroids is probed at the cut is unspecified. ValueError unless 1 <= ncells <= C.
    """
    C = cs.table.size(0)
    if not 1 <= ncells <= C:
        raise ValueError(f"ncells: expected 1..{C}, the number of centroids, got {ncells}")
    cells = _best_cells(cs.table, ncells).unique()
    first = ivf_offsets.index_select(0, cells)
    lists = ivf_pids.index_select(0, _rows(first, ivf_offsets.index_select(0, cells + 1) - first))
    found = torch.zeros(num_passages, dtype=torch.bool).index_fill_(0, lists.long(), True)
    return found.nonzero().view(-1).to(torch.int32)


def centroid_maxsim(
    cs: CentroidScores, codes: Tensor, offsets: Tensor, pids: Tensor | None = None, use_keep: bool = False
) -> Tensor:
    """Approximate MaxSim fp32 ``[n]`` from ``cs``; with ``use_keep`` over tokens whose centroid is kept."""
    table = cs.table
    first, lengths = _passages(offsets, pids)
    if not use_keep:
        return _table_maxsim(table, codes, first, lengths)
    assert cs.keep is not None
    keep = cs.keep.bool()
    kept = int(keep.count_nonzero())
    if kept == keep.numel():
        return _table_maxsim(table, codes, first, lengths)
    if kept > _SPARSE_KEEP * keep.numel():
        penalty = torch.where(keep, 0.0, -torch.inf)
        return _table_maxsim(table + penalty[:, None], codes, first, lengths)
    survivors, owners, counts = [], [], []
    for passages, tokens in _tiles(first, lengths, 1):
        tile = _at(codes, tokens)
        alive = _at(keep, tile)
        survivors.append(tile.masked_select(alive))
        counts.append(alive.sum(1))
        owners.append(passages)
    scores = torch.full(lengths.shape, -torch.inf)
    if survivors:
        lengths = torch.cat(counts)
        packed_first = lengths.cumsum(0) - lengths
        scores[torch.cat(owners)] = _table_maxsim(table, torch.cat(survivors), packed_first, lengths)
    return scores


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
    pids: Tensor | None = None,
) -> Tensor:
    """Exact MaxSim of compressed passages, fp32 ``[n]``; error about 1e-6 a query token for unit vectors."""
    first, lengths = _passages(offsets, pids)
    PD, per_byte = residuals.size(1), 8 // nbits
    weights = byte_table(nbits, bucket_weights)  # [256, per_byte]
    row = torch.arange(PD, dtype=torch.int32) * 256
    scores = torch.where(lengths > 0, 0.0, -torch.inf)
    for block in range(0, Q.size(0), _QUERY_BLOCK):
        q = Q[block : block + _QUERY_BLOCK]
        LQ = q.size(0)
        table = cs.table if LQ == cs.LQ else cs.table[:, block : block + LQ].contiguous()
        # [PD, 256, LQ]: row p * 256 + b is the product of byte b at place p with the block's query tokens
        products = (weights @ q.view(LQ, PD, per_byte).permute(1, 2, 0)).view(PD * 256, LQ)
        for passages, tokens in _tiles(first, lengths, LQ):
            m, L = tokens.shape
            index = torch.empty(m, L, PD, dtype=torch.int32)
            step = _block(L * PD)
            for part, index_part in zip(tokens.split(step), index.split(step)):
                torch.add(torch.embedding(residuals, part), row, out=index_part)
            tile = embedding_bag(index.view(m * L, PD), products, mode="sum").view(m, L, LQ)
            inverse = _inverse_norms(inv_norms, inv_norm_lo, inv_norm_step, tokens).unsqueeze(2)
            maxima = torch.empty(m, LQ)
            parts = (x.split(_block(L * LQ)) for x in (tile, _at(codes, tokens), inverse, maxima))
            for tile_part, codes_part, inverse_part, maxima_part in zip(*parts):
                similarities = tile_part.add_(torch.embedding(table, codes_part)).mul_(inverse_part)
                torch.amax(similarities, 1, out=maxima_part)
            scores[passages] += maxima.sum(1)
    return scores


def residual_maxsim_fp32(
    Q: Tensor,
    centroids: Tensor,
    codes: Tensor,
    residuals: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None = None,
) -> Tensor:
    """The same from the centroids, without their scores and inverse norms: embeddings, a tile at a time."""
    first, lengths = _passages(offsets, pids)
    table = byte_table(nbits, bucket_weights)
    scores = torch.where(lengths > 0, 0.0, -torch.inf)
    for passages, tokens in _tiles(first, lengths, Q.size(1)):
        listed = tokens.view(-1)
        d = decompress(_at(codes, tokens).view(-1), torch.embedding(residuals, listed), centroids, table)
        d = normalize(d, dim=1).view(*tokens.shape, -1)
        for q in Q.split(_QUERY_BLOCK):
            scores[passages] += _amax(d @ q.T).sum(1)
    return scores


def pq_maxsim(Q: Tensor, codes: Tensor, codebook: Tensor, offsets: Tensor, pids: Tensor | None = None) -> Tensor:
    """MaxSim of product-quantised passages, fp32 ``[NQ, n]``: a token is the sum of M rows of tabulated products."""
    first, lengths = _passages(offsets, pids)
    M = codes.size(1)
    row = torch.arange(M, dtype=torch.int32) * 256
    scores = torch.where(lengths > 0, 0.0, -torch.inf).repeat(Q.size(0), 1)
    for query, sums in zip(Q, scores):
        for q in query.split(_QUERY_BLOCK):
            LQ = q.size(0)
            # [M, 256, LQ]: products of every entry with its part of the query tokens
            products = (codebook.float() @ q.view(LQ, M, -1).permute(1, 2, 0)).view(M * 256, LQ)
            for passages, tokens in _tiles(first, lengths, LQ):
                m, L = tokens.shape
                index = torch.empty(m, L, M, dtype=torch.int32)
                step = _block(L * M)
                for part, index_part in zip(tokens.split(step), index.split(step)):
                    torch.add(torch.embedding(codes, part), row, out=index_part)
                tile = embedding_bag(index.view(m * L, M), products, mode="sum").view(m, L, LQ)
                sums[passages] += _amax(tile).sum(1)
    return scores


def dense_maxsim(Q: Tensor, D: Tensor, lengths: Tensor | None, offsets: Tensor | None, pids: Tensor | None) -> Tensor:
    """MaxSim of embeddings, padded or packed as in :func:`.api.dense_maxsim`, in fp32: ``[NQ, n]``."""
    if offsets is not None:
        first, lengths = _passages(offsets, pids)
    else:
        B, ND = D.size(0), D.size(1)
        first = torch.arange(B) * ND
        lengths = torch.full_like(first, ND) if lengths is None else lengths.long()
        D = D.flatten(0, 1)
    scores = torch.where(lengths > 0, 0.0, -torch.inf).repeat(Q.size(0), 1)
    for query, sums in zip(Q, scores):
        for q in query.float().split(_QUERY_BLOCK):
            for passages, tokens in _tiles(first, lengths, len(q)):
                tile = torch.embedding(D, tokens).float() @ q.T  # [m, L, LQ]
                sums[passages] += _amax(tile).sum(1)
    return scores


def select_top(scores: Tensor, pids: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The ``m`` best (pids, scores) in input order; of those tied at the cut, the smallest pids.

    ``scores`` fp32 ``[n]``, NaN counts as -inf, ``pids`` ``[n]``. All n when m >= n; n is what it returns then.
    """
    if m >= scores.numel():
        return pids, scores
    chosen = top_mask(scores, pids, m)
    return pids[chosen], scores[chosen]


def top_mask(scores: Tensor, pids: Tensor, m: int) -> Tensor:
    """bool ``[n]``: which ``select_top`` takes, for m < n."""
    if m <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = _without_nan(scores)
    cut = scores.topk(m, sorted=False).values.amin()
    chosen = scores > cut
    tied = (scores == cut).nonzero().view(-1)
    room = m - int(chosen.count_nonzero())
    if room < tied.numel():
        tied = tied[pids[tied].argsort(stable=True)[:room]]
    chosen[tied] = True
    return chosen


def topk(scores: Tensor, pids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best (pids, scores): score descending, then pid ascending, also at the cut; all when k >= n.

    ``scores`` fp32 ``[n]``, NaN counts as -inf, ``pids`` ``[n]`` in any order; a pid given twice is returned twice.
    """
    pids, scores = select_top(_without_nan(scores), pids, k)
    by_pid = pids.argsort(stable=True)
    order = by_pid[scores[by_pid].argsort(descending=True, stable=True)]
    return pids[order], scores[order]


def _without_nan(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _best_cells(table: Tensor, ncells: int) -> Tensor:
    """The ``ncells`` best centroids of each column of ``table [C, LQ]``, int64 ``[LQ * ncells]``."""
    C, LQ = table.shape
    B = _CELL_BLOCK
    if C % B or ncells >= C // B:
        return table.topk(ncells, dim=0, sorted=False).indices.flatten()
    # They lie in the ncells blocks with the best maxima. topk of whole columns takes ten times as long.
    blocks = table.view(C // B, B, LQ)
    best = _amax(blocks).topk(ncells, dim=0).indices  # [ncells, LQ]
    scores = blocks[best, :, torch.arange(LQ)].transpose(0, 1).reshape(LQ, ncells * B)
    within = scores.topk(ncells, dim=1).indices  # [LQ, ncells]
    return (best.T.gather(1, within // B) * B + within % B).flatten()


def _passages(offsets: Tensor, pids: Tensor | None) -> tuple[Tensor, Tensor]:
    """First token and number of tokens of each passage to score, int64 ``[n]``."""
    if pids is None:
        return offsets[:-1], offsets.diff()
    first = offsets.index_select(0, pids)
    return first, offsets.index_select(0, pids + 1) - first


def _rows(first: Tensor, lengths: Tensor) -> Tensor:
    """The numbers first[i] .. first[i] + lengths[i] - 1 for each i in turn."""
    shift = first - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


def _tiles(first: Tensor, lengths: Tensor, LQ: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All passages that have tokens, the longest first, in tiles for ``LQ`` similarities a token.

    Yields (passages int64 ``[m]`` as indices of ``lengths``, tokens int64 ``[m, L]``). A row holds the token numbers
    of a passage and repeats the last one up to the tile's longest passage.
    """
    lengths, order = lengths.sort(descending=True)
    size = min(_PARALLEL - 1, _TILE_SIMILARITIES * torch.get_num_threads() // LQ)
    most = (_PARALLEL - 1) // LQ
    first, last = first.index_select(0, order), lengths - 1
    ascending = lengths.flip(0)
    start, end = 0, int(lengths.count_nonzero())
    while start < end:
        L = int(lengths[start])
        similar = lengths.numel() - int(torch.searchsorted(ascending, int(_TILE_FILL * L)))
        stop = min(max(similar, start + _TILE_LEAST // L), start + min(size // L, most), end)
        stop = max(stop, start + 1)
        tokens = torch.minimum(torch.arange(L), last[start:stop, None]).add_(first[start:stop, None])
        yield order[start:stop], tokens
        start = stop


def _block(elements: int) -> int:
    """How many rows (of a tile: passages) with so many elements each to work on at once (see ``_PARALLEL``)."""
    return 2**31 if torch.get_num_threads() == 1 else max(1, (_PARALLEL - 1) // elements)


def _amax(rows: Tensor) -> Tensor:
    """``rows.amax(1)``, a block of rows at a time."""
    maxima = rows.new_empty(rows.size(0), *rows.shape[2:])
    step = _block(rows[:1].numel())
    for part, maxima_part in zip(rows.split(step), maxima.split(step)):
        torch.amax(part, 1, out=maxima_part)
    return maxima


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    """``values[tokens]`` for 1-d values and 2-d tokens."""
    return values.index_select(0, tokens.view(-1)).view_as(tokens)


def _table_maxsim(table: Tensor, codes: Tensor, first: Tensor, lengths: Tensor) -> Tensor:
    """Sums of maxima of the table's rows of each passage's codes, fp32 ``[n]``; -inf without tokens."""
    LQ = table.size(1)
    scores = torch.full(lengths.shape, -torch.inf)
    for passages, tokens in _tiles(first, lengths, LQ):
        m, L = tokens.shape
        maxima = torch.empty(m, LQ)
        step = _block(L * LQ)
        for codes_part, maxima_part in zip(_at(codes, tokens).split(step), maxima.split(step)):
            torch.amax(torch.embedding(table, codes_part), 1, out=maxima_part)
        scores[passages] = maxima.sum(1)
    return scores


def byte_table(nbits: int, bucket_weights: Tensor) -> Tensor:
    """fp32 [256, 8 // nbits]: the weights that a residual byte stands for, in the order of its dimensions.

    Slots run from the high bits down, and each slot holds its bucket index with the bits reversed.
    """
    byte = torch.arange(256, device=bucket_weights.device)[:, None]
    slot = torch.arange(8 // nbits, device=bucket_weights.device)
    index = torch.zeros_like(byte * slot)
    for bit in range(nbits):
        # The least significant bit of an index is the highest of its slot.
        index |= ((byte >> (7 - bit - slot * nbits)) & 1) << bit
    return bucket_weights.float()[index]


def decompress(codes: Tensor, residuals: Tensor, centroids: Tensor, table: Tensor) -> Tensor:
    """fp32 [n, DIM] of codes int [n], residuals uint8 [n, PD], centroids [C, DIM], table = byte_table(...).

    Centroid plus residual, not normalised.
    """
    embeddings = torch.embedding(table, residuals.int()).view(codes.numel(), centroids.size(1))
    return embeddings.add_(torch.index_select(centroids, 0, codes))


def _inverse_norms(inv_norms: Tensor, lo: float, step: float, tokens: Tensor) -> Tensor:
    """Decoded inverse norms of ``tokens``: fp32, or uint16 steps of ``step`` from ``lo``."""
    if inv_norms.dtype == torch.uint16:
        steps = _at(inv_norms.view(torch.int16), tokens).to(torch.int32) & 0xFFFF
        return steps.to(torch.float32).mul_(step).add_(lo)
    stored = _at(inv_norms, tokens)
    return stored if (lo, step) == (0.0, 1.0) else stored * step + lo
