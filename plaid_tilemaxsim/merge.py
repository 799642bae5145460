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
from plaid_tilemaxsim.ops import cpu


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

    parts: of shards that share no passage, on one device, where the result lies too.
    Raises ValueError where there are no parts, or where they have not all the same steps.
    """
    steps = {(part.first is None, part.second is None) for part in parts}
    if len(steps) != 1:
        raise ValueError(f"parts: expected one or more with the same steps, got {len(parts)} of {len(steps)} kinds")
    pids = torch.cat([part.pids for part in parts])
    columns = [_joined(parts, name) for name in ("first", "second", "exact")]
    last = params.prefilter if params.mode == "exhaustive" else params.ndocs // 4
    for step, keep in ((0, params.ndocs), (1, last)):
        scores = columns[step]
        if scores is not None and keep is not None and keep < len(pids):
            chosen = cpu.top_mask(scores, pids, keep)
            pids, columns = pids[chosen], [None if column is None else column[chosen] for column in columns]
    assert columns[2] is not None
    return cpu.topk(columns[2], pids, len(pids) if params.k is None else params.k)


def _joined(parts: Sequence[Survivors], name: str) -> Tensor | None:
    columns = [getattr(part, name) for part in parts]
    return None if columns[0] is None else torch.cat(columns)
