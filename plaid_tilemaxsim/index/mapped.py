"""Residual rows that stay in the index's files: for indexes larger than memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plaid_tilemaxsim.index.files import Chunk
from plaid_tilemaxsim.index.stamps import Stamp, stamp


class MappedRows:
    """The residuals of all chunks as one uint8 [T, PD], read from their maps when rows are asked for."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = [chunk for chunk in chunks if chunk.num_tokens]
        self.starts = torch.tensor([chunk.token_start for chunk in self.chunks], dtype=torch.int64)
        self.width = self.chunks[0].residuals.size(1) if self.chunks else 0
        self.num_rows = sum(chunk.num_tokens for chunk in self.chunks)
        self._stamps = [_stamp(chunk) for chunk in self.chunks]

    def __getitem__(self, block: slice) -> Tensor:
        """Consecutive rows, uint8 [n, PD] in ordinary memory."""
        begin, end, step = block.indices(self.num_rows)
        if step != 1:
            raise ValueError(f"rows: expected consecutive ones, got a step of {step}")
        return self.ranges(torch.tensor([begin]), torch.tensor([max(begin, end)]))

    def ranges(self, begins: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows begins[i] .. ends[i] - 1 for each i in turn: uint8 [sum of lengths, PD].

        begins, ends: int64 [n] on the CPU, each range within the T rows. out: uint8 [>= that many, PD] to fill.
        Raises ValueError for a file that has changed meanwhile.
        """
        total = int((ends - begins).sum())
        rows = torch.empty(total, self.width, dtype=torch.uint8) if out is None else out[:total]
        at = 0
        owners = torch.searchsorted(self.starts, begins, right=True) - 1
        checked: set[int] = set()
        for begin, end, owner in zip(begins.tolist(), ends.tolist(), owners.tolist(), strict=True):
            while begin < end:  # a range may go on in the next chunk
                chunk, known = self.chunks[owner], self._stamps[owner]
                if known is not None and owner not in checked:
                    known.check()
                    checked.add(owner)
                stop = min(end, chunk.token_start + chunk.num_tokens)
                piece = chunk.residuals[begin - chunk.token_start : stop - chunk.token_start]
                rows[at : at + len(piece)] = piece
                at, begin, owner = at + len(piece), stop, owner + 1
        return rows


def _stamp(chunk: Chunk) -> Stamp | None:
    """Of the file that holds the residuals; none for a chunk made from tensors."""
    name = chunk.codes_file.name
    if not name.endswith(".codes.pt"):
        return None
    return stamp(chunk.codes_file.with_name(name.replace(".codes.", ".residuals.")))
