"""Centroid -> passage lists from codes: what stock's ivf.pid.pt holds, on any device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def build_pid_lists(chunks: Iterable[tuple[Tensor, Tensor]], num_centroids: int) -> tuple[Tensor, Tensor]:
    """Each centroid's passages: (pids int32 [n], offsets int64 [num_centroids + 1]), all strictly ascending.

    chunks yields, for runs of passages in pid order, (codes int32 [T_i] in [0, num_centroids), doclens [N_i]
    adding up to T_i), all on one device, where the result lies too. Held beside the result: the sort of one
    chunk, one int32 per (centroid, passage) pair and one per (chunk, centroid).
    """
    pieces: list[Tensor] = []
    counts: list[Tensor] = []
    pid_start = 0
    total = torch.zeros(num_centroids, dtype=torch.int64)
    for codes, doclens in chunks:
        pid_end = pid_start + doclens.numel()
        passages = torch.arange(pid_start, pid_end, dtype=torch.int32, device=codes.device)
        pids = torch.repeat_interleave(passages, doclens.to(torch.int64), output_size=codes.numel())
        pid_start = pid_end
        # A stable sort keeps the tokens of a centroid in pid order, so repeats of a pid end up side by side.
        codes, order = torch.sort(codes, stable=True)
        pids = pids[order]
        keep = torch.ones_like(codes, dtype=torch.bool)
        torch.logical_or(codes[1:] != codes[:-1], pids[1:] != pids[:-1], out=keep[1:])
        pieces.append(pids[keep])
        counts.append(torch.bincount(codes[keep], minlength=num_centroids).to(torch.int32))
        total = total.to(codes.device) + counts[-1]

    offsets = torch.zeros(num_centroids + 1, dtype=torch.int64, device=total.device)
    torch.cumsum(total, 0, out=offsets[1:])
    lists = torch.empty(int(offsets[-1]), dtype=torch.int32, device=total.device)
    filled = offsets[:-1].clone()
    pieces.reverse()  # popped from the front: a piece is freed once it has been copied
    for count in counts:
        piece = pieces.pop()
        before = torch.cumsum(count, 0, dtype=torch.int64) - count
        shift = torch.repeat_interleave(filled - before, count, output_size=piece.numel())
        lists[shift.add_(torch.arange(piece.numel(), device=piece.device))] = piece
        filled += count
    return lists, offsets
