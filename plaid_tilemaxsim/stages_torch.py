"""The funnel's steps in plain torch on the CPU, in fp32; see ``ops.cpu`` for how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaid_tilemaxsim.exact import exact_scorer
from plaid_tilemaxsim.funnel import Pids, Ranking
from plaid_tilemaxsim.ops import api, cpu

if TYPE_CHECKING:
    from plaid_tilemaxsim.index.resident import ResidentIndex


class TorchStages:
    """The steps for one query at a time, without state: any number of threads may share it."""

    def __init__(self, index: ResidentIndex) -> None:
        self.index = index
        self.exact_scorer = exact_scorer(index, "torch")

    def centroids(self, Q: Tensor, *, threshold: float | None, ncells: int | None) -> api.CentroidScores:
        for stamp in self.index.stamps:
            stamp.check()
        return api.centroid_scores(Q, self.index.centroids, threshold, impl="torch")

    def candidates(self, cs: api.CentroidScores, ncells: int, allow: Tensor | None) -> Pids:
        index = self.index
        pids = cpu.candidates(cs, ncells, index.ivf_pids, index.ivf_offsets, index.num_passages)
        return Pids(pids if allow is None else pids[allow[pids.long()]])

    def prune(self, cs: api.CentroidScores, pids: Pids, keep: int, *, thresholded: bool) -> Pids:
        listed = self._listed(pids)
        if keep >= listed.numel():
            return pids
        return Pids(cpu.select_top(self.approximate(cs, pids, thresholded=thresholded), listed, keep)[0])

    def approximate(self, cs: api.CentroidScores, pids: Pids, *, thresholded: bool) -> Tensor:
        return api.centroid_maxsim(cs, self.index.codes, self.index.offsets, pids.pids, thresholded, impl="torch")

    def select(self, pids: Pids, scores: Tensor, keep: int) -> tuple[Pids, Tensor]:
        chosen, best = cpu.select_top(scores, self._listed(pids), keep)
        return Pids(chosen), best

    def exact(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool) -> Tensor:
        scores = torch.empty(self.index.num_passages if pids.pids is None else pids.pids.numel())
        self.exact_scorer.scores(Q, cs, pids, precise, scores)
        return scores

    def exact_of_plausible(
        self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, first: Tensor, second: Tensor, keep: int
    ) -> Tensor:
        return self.exact(Q, cs, pids, precise)

    def topk(self, pids: Pids, scores: Tensor, k: int | None) -> Ranking:
        return Ranking(*cpu.topk(scores, self._listed(pids), scores.numel() if k is None else k))

    def _listed(self, pids: Pids) -> Tensor:
        return torch.arange(self.index.num_passages, dtype=torch.int32) if pids.pids is None else pids.pids
