"""The funnel's exact step: MaxSim from what a codec stores, one class each. Both sets of stages call these.

residual   codes and residuals as stock wrote them, from memory or from the index's files
dense      the same embeddings, decompressed: all of them at load, else a round of passages at a time
pq         the codes of a product quantiser
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim.funnel import Pids
from plaid_tilemaxsim.index.mapped import MappedRows
from plaid_tilemaxsim.index.placement import DENSE_SLOTS, dense_passages
from plaid_tilemaxsim.ops import api, cpu, reference
from plaid_tilemaxsim.ops.eager import taken

if TYPE_CHECKING:
    from plaid_tilemaxsim.index.resident import ResidentIndex

# Residual rows of the files sent at once: 32 MB at 2 bits and 128 dimensions.
PIECE_TOKENS = 1 << 20
# Products that turn a query, at once: 64 MB.
ROTATION_PRODUCTS = 1 << 24


class ExactScorer(Protocol):
    """Scores of one query at a time; owns the buffers of one query in flight."""

    scratch_bytes: int  # of those buffers
    waits: bool  # whether the host waits for the device, so that no CUDA graph can hold a search

    def scores(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, out: Tensor) -> None:
        """MaxSim of Q fp32 [LQ, DIM] with ``pids``, into the first of out fp32 [cap]; cs are the scores of all of Q.

        precise: of stock's own data on a GPU, in fp32 throughout; all else has one precision.
        """

    def query(self, Q: Tensor) -> Tensor:
        """Q fp32 [LQ, DIM] as ``embeddings`` want it."""

    def embeddings(self, start: int, end: int) -> Tensor:
        """fp32 [end - start, DIM]: what tokens start .. end - 1 stand for."""


def exact_scorer(index: ResidentIndex, impl: str) -> ExactScorer:
    """The scorer of the index's codec. impl: "triton" or "torch"."""
    if index.codec == "pq":
        return PQScorer(index, impl)
    if index.codec == "dense":
        if index.embeddings is not None:
            return DenseScorer(index, impl)
        return DenseRounds(index) if impl == "triton" else DensePieces(index)
    return DiskScorer(index) if isinstance(index.residuals, MappedRows) else ResidualScorer(index, impl)


class _Stored:
    """What the scorers of stock's own data share."""

    scratch_bytes = 0
    waits = False

    def __init__(self, index: ResidentIndex) -> None:
        self.index = index

    def query(self, Q: Tensor) -> Tensor:
        return Q

    def embeddings(self, start: int, end: int) -> Tensor:
        index = self.index
        assert index.residuals is not None
        return reference.decompress(
            index.codes[start:end], index.residuals[start:end].to(index.device), index.centroids,
            index.bucket_weights, index.nbits, dtype=torch.float32,
        )  # fmt: skip


class ResidualScorer(_Stored):
    """From residuals on the device, or pinned ones that the kernel reads through the bus."""

    def __init__(self, index: ResidentIndex, impl: str) -> None:
        super().__init__(index)
        self.impl = impl

    def scores(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, out: Tensor) -> None:
        index = self.index
        assert isinstance(index.residuals, Tensor)
        if precise and self.impl == "triton":
            api.residual_maxsim_fp32(
                Q, index.centroids, index.codes, index.residuals, index.bucket_weights, index.nbits, index.offsets,
                pids.pids, out, pids.count, impl="triton",
            )  # fmt: skip
            return
        assert index.inv_norms is not None
        api.residual_maxsim(
            Q, cs, index.codes, index.residuals, index.inv_norms, index.inv_norm_lo, index.inv_norm_step,
            index.bucket_weights, index.nbits, index.offsets, pids.pids, out, pids.count, impl=self.impl,
        )  # fmt: skip


class DiskScorer(_Stored):
    """From residuals in the index's files.

    The host learns the pids, reads their rows into pinned memory and sends them over: a wait once a search.
    """

    waits = True

    def __init__(self, index: ResidentIndex) -> None:
        super().__init__(index)
        self._host_offsets = index.offsets.cpu()
        self._staged: Tensor | None = None

    def scores(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, out: Tensor) -> None:
        index = self.index
        assert isinstance(index.residuals, MappedRows)
        assert index.inv_norms is not None
        n = out.numel() if pids.count is None else int(pids.count)
        listed = torch.arange(n) if pids.pids is None else pids.pids[:n].cpu().long()
        begins, ends = self._host_offsets[listed], self._host_offsets[listed + 1]
        for part in _pieces(ends - begins, PIECE_TOKENS):
            rows, offsets = _rows(begins[part], ends[part])
            residuals = index.residuals.ranges(begins[part], ends[part], self._stage(rows.numel()))
            rows, offsets, residuals = (x.to(index.device) for x in (rows, offsets, residuals))
            if precise:
                out[part] = api.residual_maxsim_fp32(
                    Q, index.centroids, index.codes[rows], residuals, index.bucket_weights, index.nbits, offsets,
                    impl="triton",
                )  # fmt: skip
                continue
            out[part] = api.residual_maxsim(
                Q, cs, index.codes[rows], residuals, taken(index.inv_norms, rows), index.inv_norm_lo,
                index.inv_norm_step, index.bucket_weights, index.nbits, offsets, impl="triton",
            )  # fmt: skip

    def _stage(self, tokens: int) -> Tensor:
        """Pinned memory for that many rows, kept from search to search. The copy out of it is waited for."""
        rows = self.index.residuals
        assert isinstance(rows, MappedRows)
        if self._staged is None or len(self._staged) < tokens:
            pinned = self.index.device.type == "cuda"
            self._staged = torch.empty(max(tokens, 1 << 16), rows.width, dtype=torch.uint8, pin_memory=pinned)
        return self._staged


class DenseScorer(_Stored):
    """From the embeddings of the whole index: fp16 on a GPU, as is the query there, fp32 on a CPU."""

    def __init__(self, index: ResidentIndex, impl: str) -> None:
        super().__init__(index)
        assert index.embeddings is not None
        self._embeddings, self.impl = index.embeddings, impl

    def scores(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, out: Tensor) -> None:
        api.dense_maxsim(
            Q.to(self._embeddings.dtype), self._embeddings, offsets=self.index.offsets, pids=pids.pids, out=out,
            count=pids.count, impl=self.impl,
        )  # fmt: skip

    def query(self, Q: Tensor) -> Tensor:
        return Q.to(self._embeddings.dtype).float()

    def embeddings(self, start: int, end: int) -> Tensor:
        return self._embeddings[start:end].float()


class DenseRounds(_Stored):
    """From residuals on a GPU, or pinned, decompressed to fp16 in a buffer that is used again and again.

    A round takes as many passages as the buffer has room for, each with slots for the longest, so the host knows the
    number of rounds; where fewer passages are left than a round takes, the kernels learn that on the device.
    """

    def __init__(self, index: ResidentIndex) -> None:
        super().__init__(index)
        self._round = dense_passages(index.num_passages, index.longest)
        device = index.device
        self._buffer = torch.empty(self._round, max(index.longest, 1), index.dim, dtype=torch.float16, device=device)
        self._lengths = torch.zeros(self._round, dtype=torch.int32, device=device)
        self._left = torch.zeros(1, dtype=torch.int32, device=device)
        self.scratch_bytes = self._buffer.nbytes + self._lengths.nbytes

    def scores(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, out: Tensor) -> None:
        from plaid_tilemaxsim.ops import decompress_kernel

        index = self.index
        assert isinstance(index.residuals, Tensor)
        Q = Q.half()
        for first in range(0, out.numel(), self._round):
            part = out[first : first + self._round]
            embeddings, lengths = self._buffer[: len(part)], self._lengths[: len(part)]
            decompress_kernel.decompress_passages(
                index.codes, index.residuals, index.centroids, index.bucket_weights, index.nbits, index.offsets,
                pids.pids, pids.count, first, embeddings, lengths, self._left,
            )  # fmt: skip
            api.dense_maxsim(Q, embeddings, lengths=lengths, out=part, count=self._left, impl="triton")

    def query(self, Q: Tensor) -> Tensor:
        return Q.half().float()

    def embeddings(self, start: int, end: int) -> Tensor:
        return super().embeddings(start, end).half().float()


class DensePieces(_Stored):
    """From residuals on a CPU, decompressed to fp32 a piece at a time."""

    def __init__(self, index: ResidentIndex) -> None:
        super().__init__(index)
        self._table = cpu.byte_table(index.nbits, index.bucket_weights)

    def scores(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, out: Tensor) -> None:
        index = self.index
        assert isinstance(index.residuals, Tensor)
        listed = torch.arange(out.numel()) if pids.pids is None else pids.pids.long()
        begins, ends = index.offsets[listed], index.offsets[listed + 1]
        for part in _pieces(ends - begins, DENSE_SLOTS // 4):
            rows, offsets = _rows(begins[part], ends[part])
            e = cpu.decompress(index.codes[rows], index.residuals[rows], index.centroids, self._table)
            api.dense_maxsim(Q, normalize(e, dim=-1), offsets=offsets, out=out[part], impl="torch")


class PQScorer:
    """From PQ codes on the device; with OPQ the query is turned as the embeddings were."""

    scratch_bytes = 0
    waits = False

    def __init__(self, index: ResidentIndex, impl: str) -> None:
        assert index.pq_codes is not None
        assert index.pq_codebook is not None
        self.index, self.impl = index, impl
        self._codes, self._codebook = index.pq_codes, index.pq_codebook

    def scores(self, Q: Tensor, cs: api.CentroidScores, pids: Pids, precise: bool, out: Tensor) -> None:
        api.pq_maxsim(
            self._rotated(Q),
            self._codes,
            self._codebook,
            self.index.offsets,
            pids.pids,
            out,
            pids.count,
            impl=self.impl,
        )

    def query(self, Q: Tensor) -> Tensor:
        Q = self._rotated(Q)
        return Q.half().float() if self.impl == "triton" else Q

    def embeddings(self, start: int, end: int) -> Tensor:
        return reference.pq_decode(self._codes[start:end], self._codebook, torch.float32)

    def _rotated(self, Q: Tensor) -> Tensor:
        rotation = self.index.pq_rotation
        if rotation is None:
            return Q
        # Not a matrix product: on a GPU its arithmetic is a setting of the process, and each stream would get 32 MB.
        rows = max(1, ROTATION_PRODUCTS // rotation.numel())
        return torch.cat([(q[:, None] * rotation).sum(-1) for q in Q.split(rows)])


def _pieces(lengths: Tensor, tokens: int) -> Iterator[slice]:
    """Consecutive passages of about that many tokens together, at least one each; lengths int64 [n] on the host."""
    counts = (lengths.cumsum(0) // tokens).unique_consecutive(return_counts=True)[1].tolist()
    first = 0
    for count in counts:
        yield slice(first, first + count)
        first += count


def _rows(begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Token numbers of passages, one after the other, and where each passage starts among them (int64 [n + 1])."""
    lengths = ends - begins
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.arange(int(offsets[-1])) + (begins - offsets[:-1]).repeat_interleave(lengths), offsets
