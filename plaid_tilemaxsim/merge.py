"""One ranking from the answers of an index's shards, equal to that of the undivided index.

The funnel's limits hold for the whole index: a shard cannot know which of its passages the others push out. So each
shard keeps as many as the whole index would, scores all of them in every step and returns the lot; what the whole
index would have kept is among it, and ``merge`` finds that by the same rule (score descending, then pid ascending).
That is one round trip, and a shard scores up to four times as many passages exactly as it would alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaid_tilemaxsim.funnel import SearchParams


@dataclass(frozen=True, eq=False)
class Survivors:
    """What one shard kept of one query, in any order; all tensors on one device.

    pids: int32 [n], numbers of the whole index. exact: fp32 [n]. first: fp32 [n], approximate scores by the centroids
    over the threshold, of the ``params.ndocs`` best by these (mode "plaid"; else None). second: fp32 [n], approximate
    scores by all centroids (mode "plaid", and "exhaustive" with ``params.prefilter``; else None). Without either the
    ``params.k`` best by exact scores are enough.
    """

    pids: Tensor
    exact: Tensor
    first: Tensor | None = None
    second: Tensor | None = None


def merge(parts: Sequence[Survivors], params: SearchParams) -> tuple[Tensor, Tensor]:
    """(pids int32 [m], scores fp32 [m]) of all shards together, best first, ties to the smaller pid; m <= params.k.

    parts: of shards that share no passage, on one device, where the result lies too. Never waits for the device.
    A filler among the survivors has scores of -inf and a pid beyond all others, and comes last.
    Raises ValueError where there are no parts, or where they have not all the same steps.
    """
    steps = {(part.first is None, part.second is None) for part in parts}
    if len(steps) != 1:
        raise ValueError(f"parts: expected one or more with the same steps, got {len(parts)} of {len(steps)} kinds")
    pids, order = torch.cat([part.pids for part in parts]).sort(stable=True)
    exact = torch.cat([part.exact for part in parts])[order]
    last = params.prefilter if params.mode == "exhaustive" else params.ndocs // 4
    for name, keep in (("first", params.ndocs), ("second", last)):
        values = [getattr(part, name) for part in parts]
        if values[0] is None or keep is None or keep >= len(order):
            continue
        chosen = _best(torch.cat(values)[order], keep).sort().values
        pids, order, exact = pids[chosen], order[chosen], exact[chosen]
    best = _best(exact, len(order) if params.k is None else params.k)
    return pids[best], exact[best]


def _best(scores: Tensor, m: int) -> Tensor:
    """Positions of the ``m`` best, best first, ties in the order they came; NaN counts as -inf, as in the kernels."""
    return scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True, stable=True).indices[:m]
