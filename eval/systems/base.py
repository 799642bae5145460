"""What every system under test has in common: search parameters, tolerances, and one interface."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# What stock searches with when a user gives only k (colbert-ai 0.2.22, searcher.py): ncells, threshold, ndocs.
STOCK_DEFAULTS = ((10, 1, 0.5, 256), (100, 2, 0.45, 1024))


@dataclass(frozen=True)
class Knobs:
    """Every PLAID search parameter. `centroid_score_threshold` prunes codes, `ndocs // 4` passages are scored."""

    k: int
    ncells: int
    centroid_score_threshold: float
    ndocs: int

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("ncells", 1), ("ndocs", 4)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        if not isinstance(self.centroid_score_threshold, int | float):
            raise ValueError(f"centroid_score_threshold: expected a number, got {self.centroid_score_threshold!r}")

    @classmethod
    def defaults(cls, k: int) -> Knobs:
        """Stock's parameters for this k."""
        for limit, ncells, threshold, ndocs in STOCK_DEFAULTS:
            if k <= limit:
                return cls(k, ncells, threshold, ndocs)
        return cls(k, 4, 0.4, max(4 * k, 4096))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Tolerance:
    """How far a system's numbers may be from the oracle's because of its arithmetic, not its logic.

    score: |score - oracle| allowed (None: reported, not judged). ranking: oracle scores closer than this may be in
    either order (infinite: nothing of the ranking is judged). approximate, threshold: the same for sums of centroid
    scores and for single centroid scores.
    """

    score: float | None
    ranking: float
    approximate: float
    threshold: float


# Stock's GPU branch rounds single similarities to fp16 (2^-12 each between 1/2 and 1, 2^-7 over 32) and their sum (2^-7
# between 16 and 32), so two scores that are 2^-5 apart can come out reversed; embeddings and queries in fp16 come on
# top of it for exact scores, as below. fp32 sums of 32 products of 128 terms are within 1e-5.
STOCK_GPU = Tolerance(score=None, ranking=2**-5 + 8e-3, approximate=2**-5, threshold=2**-10)
STOCK_CPU = Tolerance(score=2e-3, ranking=1e-4, approximate=1e-4, threshold=1e-5)
# The kernels' budget is 2e-3 a score; their centroid table has 16 bits.
OURS_GPU = Tolerance(score=2e-3, ranking=4e-3, approximate=2e-3, threshold=1e-5)
# Mode plaid ranks by fp32 arithmetic: 32 unit query tokens at DIM 128 are off by 6e-5 at worst, since a tensor core
# truncates each of DIM / 8 additions to 2^-23 of a sum of which half is there on average.
OURS_GPU_PLAID = Tolerance(score=1e-4, ranking=1e-4, approximate=2e-3, threshold=1e-5)
# Embeddings and queries in fp16: a similarity of unit vectors rounds by 2^-11 * sqrt(2 / 3) / sqrt(DIM), 3.5e-5 at DIM
# 128; where all of 32 query tokens meet one token of a passage, three deviations of it add up to 3.4e-3.
OURS_DENSE_GPU = Tolerance(score=4e-3, ranking=8e-3, approximate=2e-3, threshold=1e-5)
OURS_CPU = Tolerance(score=2e-3, ranking=1e-4, approximate=1e-4, threshold=1e-5)
# Systems that hold other vectors than the index: its oracle says how far they are, and judges nothing.
OTHERS = Tolerance(score=None, ranking=float("inf"), approximate=float("inf"), threshold=float("inf"))
# Exact MaxSim over the index's vectors, decompressed to fp16 on a GPU: it rounds as stock does there.
EXACT = STOCK_GPU


class NotRun(Exception):
    """A system cannot run here. `reason` says why, `remedy` what to do about it (a command, where one helps)."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}{'; ' if remedy else ''}{remedy}")
        self.reason, self.remedy = reason, remedy


class System(Protocol):
    """A system that answers encoded queries. Q is fp32 [1, LQ, DIM], best on `device`."""

    name: str
    device: torch.device
    tolerance: Tolerance
    clamps: bool  # each token's maximum is clamped at 0, as stock's CPU branch does
    follows_plaid: bool  # its results are meant to be stock PLAID's
    index_bytes: int  # of what it loads
    own_ms: float | None  # the last search by the system's own clock, where a call here is not what a user would time

    def use(self, knobs: Knobs) -> None:
        """Set the search parameters of the calls that follow."""

    def search(self, Q: Tensor) -> tuple[list[int], list[float]]:
        """The k best, as a user's call returns them. This is what latency times."""

    def search_batch(self, Q: Tensor) -> list[tuple[list[int], list[float]]]:
        """`search` for each query of Q [B, LQ, DIM], together where the system has a call for that."""

    def rank(self, Q: Tensor) -> tuple[list[int], list[float]]:
        """All passages that were scored exactly, best first."""

    def candidates(self, Q: Tensor) -> Tensor:
        """Passages before pruning: integer [n], ascending, on the CPU."""

    def stages(self, Q: Tensor) -> dict[str, float]:
        """Milliseconds by stage of one search, in order."""

    def close(self) -> None:
        """Free what it holds."""


class Whole:
    """What a system does that has no stages to tell apart, no candidates and no batches: the parts of `System` that
    follow from `search`."""

    clamps = False
    follows_plaid = False
    tolerance = EXACT
    own_ms: float | None = None

    def search(self, Q: Tensor) -> tuple[list[int], list[float]]:
        raise NotImplementedError

    def search_batch(self, Q: Tensor) -> list[tuple[list[int], list[float]]]:
        return [self.search(Q[i : i + 1]) for i in range(len(Q))]

    def rank(self, Q: Tensor) -> tuple[list[int], list[float]]:
        return self.search(Q)

    def candidates(self, Q: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.int32)

    def stages(self, Q: Tensor) -> dict[str, float]:
        from ..latency import timed

        milliseconds, _ = timed(self, Q)  # type: ignore[arg-type]
        return {"search": milliseconds}

    def close(self) -> None:
        """Nothing to free but Python's references."""
