"""impl="reference": the kernels' formulas on the kernels' inputs, in readable torch, on any device.

Unlike :mod:`.reference`, which starts from an index's raw parts, these take what the kernels take (centroid
scores, inverse norms), so the whole search can run without a kernel and a kernel can be replaced one at a
time. fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .api import CentroidScores
from .reference import _by_chunks, _chunks, _passages, _rows, _sum_of_maxima, decode_residuals, decompress, pq_decode


def taken(inv_norms: Tensor, rows: Tensor) -> Tensor:
    """inv_norms[rows]; indexing of uint16 is not implemented everywhere."""
    if inv_norms.dtype == torch.uint16:
        return inv_norms.view(torch.int16)[rows].view(torch.uint16)
    return inv_norms[rows]


def centroid_scores(Q: Tensor, centroids: Tensor, threshold: float | None) -> CentroidScores:
    """Scores fp32 ``[C, LQ]`` and ``keep`` of ``centroids [C, DIM]`` with ``Q [LQ, DIM]``."""
    table = centroids.float() @ Q.T
    keep = None if threshold is None else (table.amax(1) >= threshold).to(torch.uint8)
    return CentroidScores(table, torch.ones(1, device=Q.device), Q.size(0), keep)


def centroid_maxsim(cs: CentroidScores, codes: Tensor, offsets: Tensor, pids: Tensor | None, use_keep: bool) -> Tensor:
    """See :func:`.api.centroid_maxsim`."""
    first, lengths = _passages(offsets, pids)
    scores = torch.empty(lengths.numel(), device=codes.device)
    for chunk in _chunks(lengths):
        rows, owner = _rows(first[chunk], lengths[chunk])
        code = codes[rows].long()
        if use_keep and cs.keep is not None:
            kept = cs.keep[code].bool()
            code, owner = code[kept], owner[kept]
        similarities = cs.table[code, : cs.LQ] * cs.scale
        scores[chunk] = _sum_of_maxima(similarities, owner, chunk.stop - chunk.start)
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
    pids: Tensor | None,
) -> Tensor:
    """See :func:`.api.residual_maxsim`."""

    def similarities(rows: Tensor) -> Tensor:
        packed = residuals[rows.to(residuals.device)].to(codes.device)
        weights = decode_residuals(packed, nbits, bucket_weights, torch.float32)  # [t, DIM]
        inv = inv_norm_lo + inv_norm_step * taken(inv_norms, rows).float()
        return (cs.table[codes[rows].long(), : cs.LQ] * cs.scale + weights @ Q.T) * inv[:, None]

    return _by_chunks(similarities, offsets, pids, torch.float32)


def residual_maxsim_fp32(
    Q: Tensor,
    centroids: Tensor,
    codes: Tensor,
    residuals: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None,
) -> Tensor:
    """See :func:`.api.residual_maxsim_fp32`."""

    def similarities(rows: Tensor) -> Tensor:
        packed = residuals[rows.to(residuals.device)].to(codes.device)
        return decompress(codes[rows], packed, centroids, bucket_weights, nbits, torch.float32) @ Q.T

    return _by_chunks(similarities, offsets, pids, torch.float32)


def dense_maxsim(Q: Tensor, D: Tensor, lengths: Tensor | None, offsets: Tensor | None, pids: Tensor | None) -> Tensor:
    """See :func:`.api.dense_maxsim`; ``Q [NQ, LQ, DIM]``, scores ``[NQ, n]``."""
    if offsets is not None:
        first, lengths = _passages(offsets, pids)
    else:
        B, ND = D.size(0), D.size(1)
        first = torch.arange(B, device=D.device) * ND
        lengths = torch.full_like(first, ND) if lengths is None else lengths.long()
        D = D.flatten(0, 1)
    n = lengths.numel()
    scores = torch.empty(Q.size(0), n, device=D.device)
    for chunk in _chunks(lengths):
        rows, owner = _rows(first[chunk], lengths[chunk])
        d = D[rows].float()
        for q, row in zip(Q.float(), scores, strict=True):
            row[chunk] = _sum_of_maxima(d @ q.T, owner, chunk.stop - chunk.start)
    return scores


def pq_maxsim(Q: Tensor, codes: Tensor, codebook: Tensor, offsets: Tensor, pids: Tensor | None) -> Tensor:
    """See :func:`.api.pq_maxsim`; ``Q [NQ, LQ, DIM]``, scores ``[NQ, n]``."""
    first, lengths = _passages(offsets, pids)
    scores = torch.empty(Q.size(0), lengths.numel(), device=codes.device)
    for chunk in _chunks(lengths):
        rows, owner = _rows(first[chunk], lengths[chunk])
        d = pq_decode(codes[rows], codebook, torch.float32)
        for q, row in zip(Q, scores, strict=True):
            row[chunk] = _sum_of_maxima(d @ q.T, owner, chunk.stop - chunk.start)
    return scores
