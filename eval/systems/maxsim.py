"""Exact search of a whole collection by MaxSim over decompressed vectors: the baselines of the kernels, and the oracle.

All hold the vectors that the index stores, decompressed once to fp16 (fp32 on a CPU, where fp16 is slow), and score
every passage. They say what exact MaxSim costs without compression and without PLAID's funnel.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.ops import reference

from ..oracle import DECOMPRESS_TOKENS, Oracle
from .base import Knobs, NotRun, Whole

# Vectors in one padded block: enough work for a GPU, little enough to pad.
BLOCK_TOKENS = 1 << 18
Score = Callable[[Tensor], Tensor]  # q [LQ, DIM] -> scores [N], of all passages in the order of pids


def decompressed(index: PlaidIndex, device: torch.device) -> Tensor:
    """All vectors of an index [T, DIM]: fp16 on a GPU, fp32 on a CPU. NotRun when they would not fit."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    wanted = index.num_tokens * index.dim * dtype.itemsize
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if wanted > 0.8 * free:
            raise NotRun(f"{wanted / 1e9:.1f} GB of decompressed vectors do not fit into {free / 1e9:.1f} GB free")
    codes, residuals = index.codes(), index.residuals()
    centroids, weights = index.centroids.to(device), index.bucket_weights.to(device)
    vectors = torch.empty(index.num_tokens, index.dim, dtype=dtype, device=device)
    for start in range(0, index.num_tokens, DECOMPRESS_TOKENS):
        rows = slice(start, start + DECOMPRESS_TOKENS)
        vectors[rows] = reference.decompress(
            codes[rows].to(device), residuals[rows].to(device), centroids, weights, index.nbits, dtype=torch.float32
        ).to(dtype)
    return vectors


def padded_blocks(vectors: Tensor, offsets: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Passages as (pids [b], vectors [b, L, DIM], is padding [b, L]) blocks of similar lengths; empty ones left out."""
    lengths = offsets.diff()
    order = lengths.argsort(stable=True)
    order = order[lengths[order] > 0]
    blocks = []
    start = 0
    while start < len(order):
        # The last of a block is its longest.
        count = 1
        while start + count < len(order) and (count + 1) * int(lengths[order[start + count]]) <= BLOCK_TOKENS:
            count += 1
        pids = order[start : start + count]
        longest = int(lengths[pids[-1]])
        place = torch.arange(longest)
        padding = place >= lengths[pids, None]
        rows = (offsets[pids, None] + place).clamp(max=len(vectors) - 1)
        blocks.append((pids.to(vectors.device), vectors[rows.to(vectors.device)], padding.to(vectors.device)))
        start += count
    return blocks


def block_scores(q: Tensor, block: Tensor, padding: Tensor) -> Tensor:
    """MaxSim of q [LQ, DIM] with padded passages [b, L, DIM] as one writes it in PyTorch: fp32 [b]."""
    similarities = (block @ q.T).masked_fill(padding[:, :, None], float("-inf"))
    return similarities.amax(1).sum(1, dtype=torch.float32)


def _loop(vectors: Tensor, offsets: Tensor) -> Score:
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist()))

    def score(q: Tensor) -> Tensor:
        worst = torch.full((), float("-inf"), device=vectors.device)
        rows = ((vectors[a:b] @ q.T).amax(0).sum(dtype=torch.float32) if b > a else worst for a, b in spans)
        return torch.stack(list(rows))

    return score


def _blocked(vectors: Tensor, offsets: Tensor, score_block: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Score:
    blocks, n = padded_blocks(vectors, offsets), len(offsets) - 1

    def score(q: Tensor) -> Tensor:
        scores = torch.full((n,), float("-inf"), device=vectors.device)
        for pids, block, padding in blocks:
            scores[pids] = score_block(q, block, padding)
        return scores

    return score


def _eager(vectors: Tensor, offsets: Tensor) -> Score:
    return _blocked(vectors, offsets, block_scores)


def _compile(vectors: Tensor, offsets: Tensor) -> Score:
    compiled: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(block_scores, dynamic=True)
    return _blocked(vectors, offsets, compiled)


def _flash(vectors: Tensor, offsets: Tensor) -> Score:
    score = importlib.import_module("flash_maxsim").flash_maxsim_packed
    cu, longest = offsets.to(vectors.device, torch.int32), int(offsets.diff().max())
    return lambda q: score(q, vectors, cu, longest)


def _late_interaction(vectors: Tensor, offsets: Tensor) -> Score:
    score = importlib.import_module("late_interaction_kernels").maxsim_varlen
    cu, longest = offsets.to(vectors.device, torch.int32), int(offsets.diff().max())

    def run(q: Tensor) -> Tensor:
        scores: Tensor = score(q, vectors, torch.tensor([0, len(q)], dtype=torch.int32, device=q.device), cu,
                               len(q), longest)[0]  # fmt: skip
        return scores

    return run


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor], Score]] = {
    "loop": _loop,
    "eager": _eager,
    "compile": _compile,
    "flash-maxsim": _flash,
    "late-interaction-kernels": _late_interaction,
}
PEERS = {"flash-maxsim": "flash_maxsim", "late-interaction-kernels": "late_interaction_kernels"}


class MaxSim(Whole):
    """Every passage scored by one implementation of MaxSim, the k best kept; ties go to the smaller pid."""

    def __init__(self, index: Path, impl: str) -> None:
        """Raises NotRun where the implementation is not installed, needs a GPU that is not here, or does not fit."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if impl in PEERS:
            if importlib.util.find_spec(PEERS[impl]) is None:
                raise NotRun(f"{impl} is not installed", f"pip install {impl}")
            if self.device.type != "cuda":
                raise NotRun(f"{impl} needs a CUDA GPU")
        self.name, self.k = f"maxsim:impl={impl}", 0
        files = read_index(index, verify="structure")
        vectors = decompressed(files, self.device)
        self.index_bytes = vectors.numel() * vectors.element_size()
        self.dtype, self.num_passages = vectors.dtype, files.num_passages
        self.score = IMPLEMENTATIONS[impl](vectors, files.offsets)

    def use(self, knobs: Knobs) -> None:
        self.k = knobs.k

    def search(self, Q: Tensor) -> tuple[list[int], list[float]]:
        scores = self.score(Q[0].to(self.device, self.dtype)).float()
        scores, pids = scores.sort(descending=True, stable=True)
        return pids[: self.k].tolist(), scores[: self.k].tolist()


class Exact(Whole):
    """The oracle as a system: float64 over the whole collection."""

    def __init__(self, index: Path) -> None:
        self.name, self.k = "oracle", 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        files = read_index(index, verify="structure")
        self.index_bytes = files.nbytes
        self.oracle = Oracle(files, dtype=torch.float64, device=self.device)

    def use(self, knobs: Knobs) -> None:
        self.k = knobs.k

    def search(self, Q: Tensor) -> tuple[list[int], list[float]]:
        pids, scores = self.oracle.topk(Q, self.k)
        return pids.tolist(), scores.tolist()
