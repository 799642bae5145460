"""A small compressed collection with awkward passages, and what a comparison has to show."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import api, reference, residual_fast_kernel

# Around the tiles of 16, 32, 64 and 128 tokens; the first and last passages are empty.
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2, 0)
# Unit roundoff of fp16.
U16 = 2.0**-11


@dataclass
class Collection:
    Q: Tensor
    centroids: Tensor
    codes: Tensor
    residuals: Tensor
    bucket_weights: Tensor
    nbits: int
    offsets: Tensor
    inv_norms: Tensor  # fp32 [T]
    device: str

    def __post_init__(self) -> None:
        self.stored = quantised(self.inv_norms)

    @property
    def raw(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor]:
        """Arguments of reference.residual_maxsim after Q."""
        return self.codes, self.residuals, self.centroids, self.bucket_weights, self.nbits, self.offsets

    def centroid_scores(self, threshold: float | None = None, **kwargs) -> api.CentroidScores:
        return api.centroid_scores(self.Q, self.centroids, threshold, impl="triton", **kwargs)


def make_collection(
    device: str,
    LQ: int,
    DIM: int,
    nbits: int = 2,
    C: int = 150,
    lengths: tuple[int, ...] = LENGTHS,
    negative: bool = False,
    seed: int = 0,
) -> Collection:
    """Unit-vector query and centroids, random codes and residuals; ``negative``: every similarity is below zero."""
    g = torch.Generator().manual_seed(seed)
    Q = normalize(torch.randn(LQ, DIM, generator=g), dim=1)
    centroids = normalize(torch.randn(C, DIM, generator=g), dim=1)
    if negative:
        # one half-space for the query, the other for the centroids; the residuals are too short to cross over
        Q, centroids = normalize(Q.abs(), dim=1), normalize(-centroids.abs(), dim=1)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    T = int(offsets[-1])
    bucket_weights = torch.linspace(-0.06, 0.055, 2**nbits) + 0.003 * torch.rand(2**nbits, generator=g)
    residuals = torch.randint(0, 256, (T, DIM * nbits // 8), generator=g).to(torch.uint8)
    codes = torch.randint(0, C, (T,), generator=g).to(torch.int32)
    centroids = centroids.half()
    e = centroids[codes.long()].float() + reference.decode_residuals(residuals, nbits, bucket_weights, torch.float32)
    return Collection(
        Q=Q.to(device),
        centroids=centroids.to(device),
        codes=codes.to(device),
        residuals=residuals.to(device),
        bucket_weights=bucket_weights.to(device),
        nbits=nbits,
        offsets=offsets.to(device),
        inv_norms=(1 / e.norm(dim=1)).to(device),
        device=device,
    )


def make_pq(
    device: str, NQ: int, LQ: int, DIM: int, M: int, lengths: tuple[int, ...] = LENGTHS, negative: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit-vector queries [NQ, LQ, DIM], random codes [T, M], codebook [M, 256, DIM / M], offsets.

    Decoded embeddings have a norm of about 1; ``negative``: every similarity is below zero.
    """
    g = torch.Generator().manual_seed(LQ + DIM + M)
    Q = normalize(torch.randn(NQ, LQ, DIM, generator=g), dim=-1)
    codebook = torch.randn(M, 256, DIM // M, generator=g) / DIM**0.5
    if negative:
        Q, codebook = Q.abs(), -codebook.abs()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    codes = torch.randint(0, 256, (int(offsets[-1]), M), generator=g).to(torch.uint8)
    return Q.to(device), codes.to(device), codebook.half().to(device), offsets.to(device)


def quantised(inv_norms: Tensor) -> tuple[Tensor, float, float]:
    """Inverse norms as uint16 with their lowest value and step."""
    lo, hi = float(inv_norms.min()), float(inv_norms.max())
    step = (hi - lo) / 65535 or 1.0
    return ((inv_norms - lo) / step).round().to(torch.int32).to(torch.uint16), lo, step


def threshold_at(c: Collection, fraction: float) -> float:
    """A threshold that about ``fraction`` of the centroids reach, in a gap wider than fp32's error."""
    best = (c.centroids.double() @ c.Q.double().T).amax(1).sort(descending=True).values.cpu()
    at = max(1, int(fraction * len(best)))
    if at == len(best):
        return float(best[-1]) - 1e-3
    wide = ((best[:-1] - best[1:]) > 1e-5).nonzero().flatten()
    at = int(wide[(wide - at + 1).abs().argmin()])
    return float(best[at : at + 2].mean())


def flags(cs: api.CentroidScores) -> Tensor:
    """``keep`` of scores that were made with a threshold."""
    assert cs.keep is not None
    return cs.keep


def poisoned(n: int, device: str) -> Tensor:
    return torch.full((n,), float("nan"), device=device)


def residual_tolerance(c: Collection, cs: api.CentroidScores, unit: float = 1.0) -> float:
    """What the roundings add up to over a query, see api.residual_maxsim: two standard deviations more than the largest
    of as many passages is expected to be.

    Per query token the table rounds uniformly within a step (step / sqrt(12)) and q_d by a relative U16 / sqrt(3), over
    a unit query. The few bucket weights round once for all tokens, as multiples of ``unit``: what they round by on
    average adds up over every dimension, what they differ by over the query tokens that one token serves. Deviations
    are added, not squared and added, since a maximum prefers errors of one sign. Times the largest inverse norm; 1e-5
    for fp32.
    """
    weights, Q = c.bucket_weights.double(), c.Q.double()
    rounded = weights - (c.bucket_weights / unit).half().double() * unit
    per_token = float(cs.scale) / 12**0.5 + U16 * float(weights.abs().max()) / 3**0.5
    together = max(float(Q.sum(0).norm()), len(Q) ** 0.5) * float(rounded.std(correction=0))
    deviations = 2 + (2 * math.log(len(c.offsets))) ** 0.5
    spread = deviations * (len(Q) ** 0.5 * per_token + together)
    average = float(rounded.mean().abs() * Q.sum(1).abs().sum())
    return (spread + average) * float(c.inv_norms.max()) + 1e-5


def fast_residual_tolerance(c: Collection, cs: api.CentroidScores) -> float:
    """``residual_tolerance`` of weights scaled to at most 1, and what the tensor core truncates.

    It adds 16 products a step and drops what is below the last bit of the largest number among them: of similarities
    up to 1, and at 1 bit of sums of products with 1024.
    """
    DIM, inverse = c.Q.size(1), float(c.inv_norms.max())
    steps, truncated = DIM // 16, 2.0**-23 * inverse
    if c.nbits != 1:
        unit = float(c.bucket_weights.abs().max())
        return residual_tolerance(c, cs, unit) + steps * len(c.Q) * truncated
    slots = [slot for step in residual_fast_kernel.k_order(1, DIM) for lane in step for slot in lane]
    dims, exponents = (torch.tensor(x, device=c.device) for x in zip(*slots, strict=True))
    span = float(c.bucket_weights[1] - c.bucket_weights[0])
    terms = c.Q[:, dims] * 2.0**-exponents * span * 1024
    largest = float(terms.cumsum(1).abs().amax(1).sum())
    return residual_tolerance(c, cs) + steps * largest * truncated


def fp32_tolerance(c: Collection, want: Tensor) -> float:
    """What api.residual_maxsim_fp32 may be off by from scores fp64 ``want``.

    Errors of one sign, relative to a score: the tensor core adds 16 products a step, of three times DIM, and truncates
    to 2**-23 of what it has so far: half of that on average, of two thirds of the similarity if it grows as a random
    walk does; the norm, its inverse and the sum over LQ add a few 2**-24. Errors of random signs, over DIM and LQ: the
    parts of q and v that three products leave out, 2**-22 of a product each, are three deviations together; six of
    these, for unit vectors.
    """
    LQ, DIM = c.Q.shape
    largest = float(want[want.isfinite()].abs().max())
    return largest * (DIM / 8 + 8 + math.log2(LQ)) * 2.0**-24 + 6 * (3 * LQ / DIM) ** 0.5 * 2.0**-22


def assert_scores(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Same -inf, everything else within ``tolerance``; and the comparison would notice passages in another order."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape
    assert not got.isnan().any(), "unwritten or NaN scores"
    assert torch.equal(got.isinf(), want.isinf())
    finite = ~want.isinf()
    got, want = got[finite], want[finite]
    if want.numel():
        worst = float((got - want).abs().max())
        assert worst <= tolerance, f"worst difference {worst}, tolerance {tolerance}"
    if len(want.unique()) > 1:
        order = want.argsort()
        shuffled = torch.empty_like(want)
        shuffled[order] = want[order.roll(1)]
        assert float((got - shuffled).abs().max()) > tolerance, "the tolerance accepts a shuffled scorer"
