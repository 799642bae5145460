"""The oracle: MaxSim over a PLAID index in plain torch, from raw ragged inputs.

For a query ``Q`` and the tokens ``t`` of a passage (Khattab and Zaharia 2020; PLAID: Santhanam et al. 2022):

    score = sum_i max_t <q_i, e_t>,     e_t = normalize(centroid[code_t] + bucket_weights[index(residual_t)])

The kernels are judged against these functions, so nothing here is shared with them: no padding, no inverse
norms, no packed tables. ``dtype`` is the arithmetic (float64 in tests). A passage without (kept) tokens
scores -inf; maxima are not clamped at zero. All tensors of a call live on one device, which may be any.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

# Tokens scored at once by residual_maxsim and centroid_maxsim: bounds memory at 64 K x DIM x 8 bytes.
_CHUNK_TOKENS = 1 << 16


def decode_residuals(residuals: Tensor, nbits: int, bucket_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 ``[T, DIM * nbits / 8]`` -> bucket weights ``[T, DIM]`` in ``dtype``.

    The stream holds each dimension's bucket index least significant bit first, packed into bytes most
    significant bit first (colbert-ai 0.2.22, ``indexing/codecs/residual.py``).
    """
    T = residuals.size(0)
    msb_first = torch.arange(7, -1, -1, device=residuals.device, dtype=torch.uint8)
    bits = (residuals.unsqueeze(-1) >> msb_first) & 1  # [T, PD, 8]
    bits = bits.reshape(T, residuals.size(1) * 8 // nbits, nbits).long()  # [T, DIM, nbits]
    index = (bits << torch.arange(nbits, device=residuals.device)).sum(-1)
    return bucket_weights.to(dtype)[index]


def decompress(
    codes: Tensor,
    residuals: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Embeddings ``[T, DIM]``: centroid plus decoded residual, L2-normalised (a zero vector stays zero)."""
    e = centroids[codes.long()].to(dtype) + decode_residuals(residuals, nbits, bucket_weights, dtype)
    return torch.nn.functional.normalize(e, dim=-1)


def _passages(offsets: Tensor, pids: Tensor | None) -> tuple[Tensor, Tensor]:
    """First token and length of every scored passage, int64 ``[n]`` each."""
    lengths = offsets.diff()
    if pids is None:
        return offsets[:-1], lengths
    return offsets[pids.long()], lengths[pids.long()]


def _chunks(lengths: Tensor) -> list[slice]:
    """Consecutive runs of passages that hold about ``_CHUNK_TOKENS`` tokens (at least one passage each)."""
    run = (lengths.cumsum(0) // _CHUNK_TOKENS).unique_consecutive(return_counts=True)[1].tolist()
    ends = torch.tensor([0, *run]).cumsum(0).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _rows(first: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Token numbers of the passages, one after the other, and the passage (0..n-1) that each belongs to."""
    owner = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    within = torch.arange(owner.numel(), device=lengths.device) - (lengths.cumsum(0) - lengths)[owner]
    return first[owner] + within, owner


def _sum_of_maxima(similarities: Tensor, owner: Tensor, n: int) -> Tensor:
    """Similarities ``[T, LQ]``, the passage of each row -> maxima per passage, summed over LQ, ``[n]``."""
    maxima = similarities.new_full((n, similarities.size(1)), float("-inf"))
    return maxima.scatter_reduce_(0, owner[:, None].expand_as(similarities), similarities, "amax").sum(1)


def _by_chunks(
    similarities: Callable[[Tensor], Tensor], offsets: Tensor, pids: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Scores ``[n]`` from ``similarities`` of token numbers, fp ``[T, LQ]``, a chunk of passages at a time."""
    first, lengths = _passages(offsets, pids)
    scores = torch.empty(lengths.numel(), dtype=dtype, device=offsets.device)
    for chunk in _chunks(lengths):
        rows, owner = _rows(first[chunk], lengths[chunk])
        scores[chunk] = _sum_of_maxima(similarities(rows), owner, chunk.stop - chunk.start)
    return scores


def maxsim(
    Q: Tensor, D: Tensor, offsets: Tensor, pids: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """MaxSim of ``Q [LQ, DIM]`` with passages of packed ``D [T, DIM]``; scores ``[n]`` in ``dtype``.

    ``offsets`` int64 ``[N + 1]`` are token offsets, ``pids`` ``[n]`` the passages to score (None: all).
    """
    first, lengths = _passages(offsets, pids)
    rows, owner = _rows(first, lengths)
    return _sum_of_maxima(D[rows].to(dtype) @ Q.to(dtype).T, owner, lengths.numel())


def residual_maxsim(
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """MaxSim over compressed passages: :func:`maxsim` of :func:`decompress`; scores ``[n]`` in ``dtype``."""

    def similarities(rows: Tensor) -> Tensor:
        return decompress(codes[rows], residuals[rows], centroids, bucket_weights, nbits, dtype) @ Q.to(dtype).T

    return _by_chunks(similarities, offsets, pids, dtype)


def centroid_maxsim(
    Q: Tensor,
    codes: Tensor,
    centroids: Tensor,
    offsets: Tensor,
    pids: Tensor | None = None,
    threshold: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Approximate MaxSim: each token replaced by its centroid, as stored; scores ``[n]`` in ``dtype``.

    With ``threshold`` only tokens whose centroid reaches ``max_i <q_i, centroid> >= threshold`` take part.
    """
    cs = centroids.to(dtype) @ Q.to(dtype).T  # [C, LQ]
    if threshold is not None:
        cs[cs.amax(1) < threshold] = float("-inf")
    return _by_chunks(lambda rows: cs[codes[rows].long()], offsets, pids, dtype)


def pq_decode(codes: Tensor, codebook: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Embeddings ``[T, DIM]``: entry ``codes[t, m]`` of every ``codebook[m]`` in turn; not normalised.

    ``codes`` uint8 ``[T, M]``, ``codebook`` ``[M, 256, DIM / M]`` (Jegou, Douze and Schmid 2011; faiss's 8-bit PQ).
    """
    parts = [entries[code.long()] for entries, code in zip(codebook.to(dtype), codes.T, strict=True)]
    return torch.cat(parts, 1)


def pq_maxsim(
    Q: Tensor,
    codes: Tensor,
    codebook: Tensor,
    offsets: Tensor,
    pids: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """MaxSim over product-quantised passages: :func:`maxsim` of :func:`pq_decode`; scores ``[n]`` in ``dtype``."""
    return _by_chunks(lambda rows: pq_decode(codes[rows], codebook, dtype) @ Q.to(dtype).T, offsets, pids, dtype)
