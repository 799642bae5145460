"""What the kernels are measured on: synthetic passages in the layouts that they read, made on the device.

Lengths of ragged passages are lognormal with MS MARCO's mean, 67.7 tokens. Centroids and query tokens are unit
vectors; the residuals' norm is about 0.4, as in real indexes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import api, norms_kernel, reference

MEAN_LENGTH, SIGMA, LONGEST = 67.7, 0.40, 180
# Tokens made at once.
CHUNK = 1 << 21


@dataclass
class Data:
    """A synthetic index in the layout that the kernels read, and one query."""

    nbits: int
    Q: Tensor
    cs: api.CentroidScores
    centroids: Tensor
    weights: Tensor
    codes: Tensor
    residuals: Tensor
    inv_norms: Tensor
    lo: float
    step: float
    offsets: Tensor

    @property
    def compressed(self) -> tuple[Tensor, Tensor, Tensor, float, float, Tensor, int, Tensor]:
        """Arguments of api.residual_maxsim after Q and its centroid scores."""
        return (
            self.codes, self.residuals, self.inv_norms, self.lo, self.step, self.weights, self.nbits, self.offsets,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """What scoring every passage reads once: codes, residuals, inverse norms, offsets. Table rows stay in L2."""
        return sum(x.nbytes for x in (self.codes, self.residuals, self.inv_norms, self.offsets))

    def expected(self, pids: Tensor) -> Tensor:
        """Scores in fp64 from the decompressed embeddings."""
        return reference.residual_maxsim(
            self.Q, self.codes, self.residuals, self.centroids, self.weights, self.nbits, self.offsets, pids
        )


def unit_rows(n: int, DIM: int, gen: torch.Generator) -> Tensor:
    return normalize(torch.randn(n, DIM, generator=gen, device=gen.device), dim=-1)


def ragged_offsets(passages: int, gen: torch.Generator) -> Tensor:
    """int64 ``[passages + 1]`` token offsets, lengths 1 to LONGEST."""
    noise = torch.randn(passages, generator=gen, device=gen.device)
    lengths = (noise * SIGMA + math.log(MEAN_LENGTH) - SIGMA**2 / 2).exp().round().long().clamp(1, LONGEST)
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def make(
    nbits: int, DIM: int, LQ: int, passages: int, C: int, seed: int = 0, device: str = "cuda", impl: str = "triton"
) -> Data:
    """Random codes and residual bytes; weights are quantiles of a normal distribution, not quite symmetric."""
    gen = torch.Generator(device).manual_seed(seed)
    offsets = ragged_offsets(passages, gen)
    T = int(offsets[-1])
    centroids = unit_rows(C, DIM, gen).half()
    Q = unit_rows(LQ, DIM, gen)
    levels = (torch.arange(2**nbits, device=device) + 0.5) / 2**nbits
    weights = (torch.special.ndtri(levels) * 0.4 / DIM**0.5 + 3e-4).float()
    codes = torch.randint(0, C, (T,), generator=gen, device=device, dtype=torch.int32)
    residuals = torch.empty(T, DIM * nbits // 8, dtype=torch.uint8, device=device)
    inverse = torch.empty(T, device=device)
    for a in range(0, T, CHUNK):
        part = slice(a, a + CHUNK)
        rows = residuals[part]
        rows.copy_(torch.randint(0, 256, rows.shape, generator=gen, device=device, dtype=torch.uint8))
        inverse[part] = norms_kernel.inverse_norms(codes[part], rows, centroids, weights, nbits)
    lo, hi = inverse.min().item(), inverse.max().item()
    step = (hi - lo) / 65535
    inv_norms = torch.empty(T, dtype=torch.uint16, device=device)
    for a in range(0, T, CHUNK):
        part = slice(a, a + CHUNK)
        inv_norms[part] = ((inverse[part] - lo) / step).round().to(torch.int32).to(torch.uint16)
    cs = api.centroid_scores(Q, centroids, impl=impl)
    return Data(nbits, Q, cs, centroids, weights, codes, residuals, inv_norms, lo, step, offsets)
