"""The funnel's steps as kernel launches: fixed-capacity buffers, counts in device scalars, no host synchronisation.

Every launch depends only on sizes that the host knows before the query (number of passages, ndocs, k), so a whole
search can be recorded in a CUDA graph. The candidate buffer holds every passage of the index, so it cannot overflow.
Runs on CPU tensors too, under Triton's interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaid_tilemaxsim.exact import exact_scorer
from plaid_tilemaxsim.funnel import Pids, Ranking
from plaid_tilemaxsim.ops import api, candidates_kernel, merge_kernel, rank_kernel, select_kernel

if TYPE_CHECKING:
    from plaid_tilemaxsim.index.resident import ResidentIndex

# Passages that the GPU scores in fp32 in less time than it finds those whose scores no merge will ask for.
MOST_AT_ONCE = 1024


class TritonStages:
    """The steps for one query at a time; owns the buffers of one query in flight (9 bytes a passage, the codec's)."""

    def __init__(self, index: ResidentIndex, cmax: float) -> None:
        self.index = index
        self.cmax = cmax  # largest centroid norm: scales the centroid scores without asking the device
        device, n = index.device, index.num_passages
        self._bits = torch.zeros(candidates_kernel.bitmap_words(n), dtype=torch.int32, device=device)
        self._block_counts = torch.zeros(candidates_kernel.count_blocks(n), dtype=torch.int32, device=device)
        self._pids = torch.zeros(n, dtype=torch.int32, device=device)
        self._scores = torch.zeros(n, dtype=torch.float32, device=device)
        self._work = select_kernel.select_workspace(device)
        self.exact_scorer = exact_scorer(index, "triton")

    def clean(self) -> None:
        """Makes the buffers right again after a search that ended between two launches: these start from zeros."""
        self._bits.zero_()
        self._work.zero_()

    def centroids(self, Q: Tensor, *, threshold: float | None, ncells: int | None) -> api.CentroidScores:
        return api.centroid_scores(Q, self.index.centroids, threshold, cmax=self.cmax, ncells=ncells, impl="triton")

    def candidates(self, cs: api.CentroidScores, ncells: int, allow: Tensor | None) -> Pids:
        assert cs.cells is not None
        cells = self._new(cs.LQ, ncells, dtype=torch.int32)
        candidates_kernel.select_cells(cs.cells.flatten(0, 1), cells)
        candidates_kernel.mark_lists(cells, self.index.ivf_pids, self.index.ivf_offsets, self._bits)
        total = self._new(1, dtype=torch.int32)
        candidates_kernel.gather_marked(self._bits, self._block_counts, self._pids, total, allow)
        return Pids(self._pids, total)

    def prune(self, cs: api.CentroidScores, pids: Pids, keep: int, *, thresholded: bool) -> Pids:
        return self.select(pids, self.approximate(cs, pids, thresholded=thresholded), keep)[0]

    def approximate(self, cs: api.CentroidScores, pids: Pids, *, thresholded: bool) -> Tensor:
        index, scores = self.index, self._scores_for(pids)
        api.centroid_maxsim(cs, index.codes, index.offsets, pids.pids, thresholded, scores, pids.count, impl="triton")
        return scores

    def select(self, pids: Pids, scores: Tensor, keep: int) -> tuple[Pids, Tensor]:
        if scores.numel() <= rank_kernel.LIMIT:
            best = self._ranked(pids, scores, min(keep, scores.numel()))
            return Pids(best.pids, best.count), best.scores
        return self._select(pids, scores, keep)

    def exact(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool) -> Tensor:
        scores = self._scores_for(pids)
        self.exact_scorer.scores(Q, cs, pids, precise, scores)
        return scores

    def exact_of_plausible(
        self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, first: Tensor, second: Tensor, keep: int
    ) -> Tensor:
        n = first.numel()
        # In GPU memory the fast kernel has scored them all before that would be known.
        costly = self.index.placement in ("host", "disk") or (precise and n > MOST_AT_ONCE)
        if not costly or n > merge_kernel.LIMIT or keep >= n:
            return self.exact(Q, cs, pids, precise)
        assert pids.pids is not None
        assert pids.count is not None
        flags = merge_kernel.plausible(first, second, pids.pids, pids.count, keep)
        order = torch.sort(flags, descending=True, stable=True).indices
        some = Pids(pids.pids[order], flags.sum(dtype=torch.int32).view(1))
        scores = torch.empty_like(first).index_copy_(0, order, self.exact(Q, cs, some, precise))
        return scores.masked_fill_(flags == 0, -torch.inf)

    def topk(self, pids: Pids, scores: Tensor, k: int | None) -> Ranking:
        k = scores.numel() if k is None else min(k, scores.numel())
        if k > rank_kernel.LIMIT:
            return self._sorted(pids, scores, k)
        if scores.numel() > rank_kernel.LIMIT:
            pids, scores = self._select(pids, scores, k)
        return self._ranked(pids, scores, k)

    def _ranked(self, pids: Pids, scores: Tensor, k: int) -> Ranking:
        packed = self._new(1 + 2 * k, dtype=torch.int32)
        rank_kernel.rank(scores, pids.pids, pids.count, k, packed)
        return Ranking(packed[1 : 1 + k], packed[1 + k :].view(torch.float32), packed[:1], packed)

    def _sorted(self, pids: Pids, scores: Tensor, k: int) -> Ranking:
        """More results than the ranking kernel orders."""
        if pids.count is not None:
            behind = torch.arange(scores.numel(), device=scores.device) >= pids.count
            scores = scores.masked_fill(behind, -torch.inf)
        # Stable, and the pids ascend: ties go to the smaller pid, and fillers stay behind empty passages.
        best = torch.sort(scores, descending=True, stable=True)
        order = best.indices[:k]
        chosen = order.int() if pids.pids is None else pids.pids[order]
        count = None if pids.count is None else pids.count.clamp(max=k)
        return Ranking(chosen, best.values[:k], count)

    def _select(self, pids: Pids, scores: Tensor, m: int) -> tuple[Pids, Tensor]:
        m = min(m, scores.numel())
        out_pids, out_count = self._new(m, dtype=torch.int32), self._new(1, dtype=torch.int32)
        out_scores = self._new(m, dtype=torch.float32)
        count = pids.count
        if count is None:
            count = self._new(1, dtype=torch.int32).fill_(scores.numel())
        select_kernel.select_top(scores, pids.pids, count, m, out_pids, out_scores, out_count, self._work)
        return Pids(out_pids, out_count), out_scores

    def _scores_for(self, pids: Pids) -> Tensor:
        cap = self.index.num_passages if pids.pids is None else pids.pids.numel()
        return self._scores[:cap] if cap <= self._scores.numel() else self._new(cap, dtype=torch.float32)

    def _new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.index.device)
