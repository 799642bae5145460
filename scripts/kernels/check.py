"""Whether a kernel's scores are the oracle's: error budgets, and what a comparison has to reject."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import Data

U16, U24 = 2.0**-11, 2.0**-24  # unit roundoff of fp16 and of fp32
SAMPLE = 2000  # passages compared with fp64


def sample(n: int, device: torch.device, most: int = SAMPLE) -> Tensor:
    """At most ``most`` passages spread over all n, first and last among them."""
    return torch.linspace(0, n - 1, min(most, n), device=device, dtype=torch.float64).round().long()


@dataclass(frozen=True)
class Verdict:
    max_error: float
    correct: bool
    reason: str = ""


@dataclass(frozen=True)
class Check:
    """``want`` fp64 ``[m]`` are the scores of passages ``sample`` (None: of all), ``tolerance`` the budget.

    tolerance None is for peers, whose precision is their own: any error is right that is below half of what a
    shuffled result is off by, so that it scored these passages and nothing else; it is recorded.
    """

    want: Tensor
    sample: Tensor | None
    tolerance: float | None

    def __call__(self, got: Tensor) -> Verdict:
        """Right where no score is NaN, the sample is within the budget and a shuffled result would not be."""
        if bool(got.isnan().any()):
            return Verdict(math.nan, False, "unwritten or NaN scores")
        got = (got if self.sample is None else got[self.sample]).double()
        finite = ~self.want.isinf()
        if not torch.equal(got.isinf(), ~finite):
            return Verdict(math.inf, False, "-inf at other passages than the oracle")
        got, want = got[finite], self.want[finite]
        if len(got) < 2:
            return Verdict(math.nan, False, "fewer than two finite scores to compare")
        error = (got - want).abs().max().item()
        shuffled = (got.roll(max(1, len(got) // 2)) - want).abs().median().item()
        limit = shuffled / 2 if self.tolerance is None else self.tolerance
        if not shuffled > limit:
            return Verdict(error, False, f"a shuffled result is off by {shuffled:.1e}, within {limit:.1e}")
        return Verdict(error, error <= limit, "" if error <= limit else f"expected an error <= {limit:.1e}")

    def of_peer(self, passages: int | None = None) -> Check:
        """The same for a peer; ``passages``: it scored the first so many (None: all)."""
        if passages is None:
            return Check(self.want, self.sample, None)
        chosen = torch.arange(len(self.want), device=self.want.device) if self.sample is None else self.sample
        inside = chosen < passages
        return Check(self.want[inside], chosen[inside], None)


def dense_budget(LQ: int, DIM: int, precision: str = "ieee", want: Tensor | None = None) -> float:
    """DIM additions of products of unit vectors in fp32, for every query token.

    tf32x3 and fp16x3 drop the product of the two small parts, 2**-22 of a product. tf32 truncates each operand, by a
    share spread over 0 to 2**-10: together below 2**-9 of a score (``want``, the largest counts), and four standard
    deviations of what differs between dimensions.
    """
    fp32 = LQ * DIM * U24
    if precision in ("tf32x3", "fp16x3"):
        return fp32 + LQ * 2.0**-22
    if precision == "tf32":
        assert want is not None
        return fp32 + 2.0**-9 * want.abs().max().item() + 4 * (LQ / DIM) ** 0.5 * 2.0**-10
    return fp32


def residual_budget(data: Data) -> float:
    """Four standard deviations of what the roundings add up to over a query (api.residual_maxsim), fp32 aside.

    Per query token: half a step of the table, uniform; q and w rounded to fp16 each.
    """
    w = data.weights
    table = data.cs.scale.item() / 12**0.5
    rounded = (2 / 3) ** 0.5 * U16 * w.abs().max().item()
    largest = data.lo + 65535 * data.step
    per_token = (table**2 + rounded**2) ** 0.5
    return 4 * len(data.Q) ** 0.5 * per_token * largest + 1e-5


def residual_fp32_budget(LQ: int, DIM: int, want: Tensor) -> float:
    """Of unit vectors and scores ``want``. Relative to a score: the tensor core adds 16 products a step, of three times
    DIM, and truncates to 2**-23 of what it has so far, half of that on average, of two thirds of the similarity; norm,
    its inverse and the sum over LQ a few 2**-24. And six deviations of the parts of q and v that three products leave
    out.
    """
    largest = want[want.isfinite()].abs().max().item()
    return largest * (DIM / 8 + 8 + math.log2(LQ)) * U24 + 6 * (3 * LQ / DIM) ** 0.5 * 2.0**-22


def centroid_budget(data: Data) -> float:
    """Half a step of the table and the table's own error for every query token; the kernel adds integers."""
    return len(data.Q) * (data.cs.scale.item() / 2 + 2.5e-6)


def batch_budget(data: Data) -> float:
    """Four standard deviations: q, an embedding and parts of it rounded to fp16 (api.residual_maxsim_batch)."""
    return 4 * (len(data.Q) / data.Q.size(1)) ** 0.5 * U16 + 1e-5


def pq_budget(LQ: int, DIM: int) -> float:
    """Four standard deviations of q rounded to fp16 (api.pq_maxsim), and DIM additions in fp32."""
    return 4 * LQ**0.5 * U16 / (3 * DIM) ** 0.5 + LQ * DIM * U24
