"""The funnel on a GPU when the residuals stay on disk: all steps but the exact one as usual.

The exact scores need the residuals of the passages that survived pruning, so the host learns their pids, reads their
rows from the index's files into pinned memory and sends them over. That waits for the device once a search, which no
CUDA graph can hold; everything before and after runs as launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaid_tilemaxsim.funnel import Pids
from plaid_tilemaxsim.index.mapped import MappedRows
from plaid_tilemaxsim.ops import api
from plaid_tilemaxsim.stages_triton import TritonStages

if TYPE_CHECKING:
    from plaid_tilemaxsim.index.resident import ResidentIndex

# Residual rows sent at once: 32 MB at 2 bits and 128 dimensions.
PIECE_TOKENS = 1 << 20


class DiskStages(TritonStages):
    """``TritonStages`` whose exact step reads residuals from ``MappedRows``."""

    def __init__(self, index: ResidentIndex, cmax: float) -> None:
        super().__init__(index, cmax)
        self._host_offsets = index.offsets.cpu()
        self._staged: Tensor | None = None

    def exact(self, Q: Tensor, cs: api.CentroidScores, pids: Pids) -> Tensor:
        index = self.index
        assert isinstance(index.residuals, MappedRows)
        scores = self._scores_for(pids)
        n = scores.numel() if pids.count is None else int(pids.count)
        listed = torch.arange(n) if pids.pids is None else pids.pids[:n].cpu().long()
        begins, ends = self._host_offsets[listed], self._host_offsets[listed + 1]
        lengths = ends - begins
        pieces = (lengths.cumsum(0) // PIECE_TOKENS).unique_consecutive(return_counts=True)[1].tolist()
        first = 0
        for count in pieces:
            part = slice(first, first + count)
            offsets = torch.cat([lengths.new_zeros(1), lengths[part].cumsum(0)])
            total = int(offsets[-1])
            rows = torch.arange(total) + (begins[part] - offsets[:-1]).repeat_interleave(lengths[part])
            residuals = index.residuals.ranges(begins[part], ends[part], self._stage(total))
            rows = rows.to(index.device)
            scores[part] = api.residual_maxsim(
                Q, cs, index.codes[rows], residuals.to(index.device), _rows(index.inv_norms, rows),
                index.inv_norm_lo, index.inv_norm_step, index.bucket_weights, index.nbits,
                offsets.to(index.device), impl="triton",
            )  # fmt: skip
            first += count
        return scores

    def _stage(self, tokens: int) -> Tensor:
        """Pinned memory for that many rows, kept from search to search. The copy out of it is waited for."""
        rows = self.index.residuals
        assert isinstance(rows, MappedRows)
        if self._staged is None or len(self._staged) < tokens:
            pinned = self.index.device.type == "cuda"
            self._staged = torch.empty(max(tokens, 1 << 16), rows.width, dtype=torch.uint8, pin_memory=pinned)
        return self._staged


def _rows(inv_norms: Tensor, rows: Tensor) -> Tensor:
    """inv_norms[rows]; indexing of uint16 is not implemented everywhere."""
    if inv_norms.dtype == torch.uint16:
        return inv_norms.view(torch.int16)[rows].view(torch.uint16)
    return inv_norms[rows]
