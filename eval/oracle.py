"""The judge of scores: decompresses an index from its files and scores any (query, passage), apart from all kernels.

It also judges PLAID's funnel: which candidate and survivor sets are right up to ties of centroid scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plaid_tilemaxsim.index.files import PlaidIndex
from plaid_tilemaxsim.ops import reference

# Tokens decompressed at once (the bits of so many stay in cache), tokens multiplied at once, and the size up to
# which a whole collection is kept decompressed.
DECOMPRESS_TOKENS = 1 << 12
CHUNK_TOKENS = 1 << 17
KEEP_BYTES = 2 << 30


@dataclass(frozen=True)
class Verdict:
    """Whether a set of passages is a right outcome of a funnel step; if not, what is wrong with it."""

    right: bool
    missing: tuple[int, ...] = ()  # pids that belong in the set beyond any tie
    foreign: tuple[int, ...] = ()  # pids that do not belong in it beyond any tie
    reason: str = ""


class Oracle:
    """MaxSim over a PLAID index by `ops.reference`: float64 decompression, kept and multiplied in `dtype`.

    Small collections (up to `keep_bytes` decompressed) are decompressed once, larger ones passage by passage. In
    float32 a score of 32 unit vectors is within about 5e-6 of the float64 one.
    """

    def __init__(
        self,
        index: PlaidIndex,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
        self.index, self.dtype, self.device = index, dtype, torch.device(device)
        self.codes, self.residuals, self.offsets = index.codes(), index.residuals(), index.offsets
        self._kept: Tensor | None = None
        if index.num_tokens * index.dim * dtype.itemsize <= keep_bytes:
            self._kept = self._decompress(self.codes, self.residuals)
        self._centroids: Tensor | None = None

    def _decompress(self, codes: Tensor, residuals: Tensor) -> Tensor:
        """Unit vectors [T, DIM] in the oracle's dtype, on its device."""
        centroids, weights = self.index.centroids.to(self.device), self.index.bucket_weights.to(self.device)
        vectors = torch.empty(codes.numel(), self.index.dim, dtype=self.dtype, device=self.device)
        for start in range(0, codes.numel(), DECOMPRESS_TOKENS):
            rows = slice(start, start + DECOMPRESS_TOKENS)
            vectors[rows] = reference.decompress(
                codes[rows].to(self.device),
                residuals[rows].to(self.device),
                centroids,
                weights,
                self.index.nbits,
                dtype=torch.float64,
            ).to(self.dtype)
        return vectors

    def _rows(self, pids: Tensor) -> tuple[Tensor, Tensor]:
        """Token numbers of the passages, one passage after the other, and the passages' lengths (int64, CPU)."""
        pids = pids.long().cpu()
        first, lengths = self.offsets[pids], self.offsets[pids + 1] - self.offsets[pids]
        shift = first - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths), lengths

    def _maxima(self, rows_of_similarity: Tensor, lengths: Tensor) -> Tensor:
        """[T, LQ] -> the maximum over each passage's rows, [n, LQ]; -inf for a passage without rows."""
        return torch.segment_reduce(
            rows_of_similarity, "max", lengths=lengths.to(self.device), axis=0, initial=float("-inf")
        )

    def maxima(self, Q: Tensor, pids: Tensor) -> Tensor:
        """Best similarity of each query token in each passage: [n, LQ] in the oracle's dtype, on its device.

        Q [LQ, DIM] or [1, LQ, DIM], any float dtype; pids integer [n]. -inf for a passage without tokens.
        """
        q = self._query(Q)
        out = torch.empty(pids.numel(), q.size(0), dtype=self.dtype, device=self.device)
        lengths = self.offsets.diff()[pids.long().cpu()]
        run = (lengths.cumsum(0) // CHUNK_TOKENS).unique_consecutive(return_counts=True)[1].tolist()
        start = 0
        for count in run:
            rows, lens = self._rows(pids[start : start + count])
            if self._kept is not None:
                vectors = self._kept[rows.to(self.device)]
            else:
                vectors = self._decompress(self.codes[rows], self.residuals[rows])
            out[start : start + count] = self._maxima(vectors @ q.T, lens)
            start += count
        return out

    def scores(self, Q: Tensor, pids: Tensor, *, clamp: bool = False) -> Tensor:
        """MaxSim of Q with each passage: float64 [n] on the CPU. Q [LQ, DIM] or [1, LQ, DIM]; pids integer [n].

        A passage without tokens scores -inf. With `clamp` each token's maximum is at least 0, which is how stock's
        CPU branch sums (there an empty passage scores 0).
        """
        maxima = self.maxima(Q, pids).double()
        return (maxima.clamp(min=0) if clamp else maxima).sum(1).cpu()

    def topk(self, Q: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Exact search of the whole collection: (pids int64 [m], scores float64 [m]), score descending, pid ascending.

        m = min(k, passages).
        """
        scores = self.scores(Q, torch.arange(self.index.num_passages))
        order = scores.sort(descending=True, stable=True).indices[:k]
        return order, scores[order]

    def _query(self, Q: Tensor) -> Tensor:
        if Q.dim() == 3 and Q.size(0) == 1:
            Q = Q[0]
        if Q.dim() != 2 or Q.size(1) != self.index.dim:
            raise ValueError(f"Q: expected shape [LQ, {self.index.dim}], got {list(Q.shape)}")
        return Q.to(self.device, self.dtype)

    def centroid_scores(self, Q: Tensor) -> Tensor:
        """Similarities of all centroids with all query tokens: [C, LQ] in the oracle's dtype."""
        if self._centroids is None:
            self._centroids = self.index.centroids.to(self.device, self.dtype)
        return self._centroids @ self._query(Q).T

    def approximate(self, cs: Tensor, pids: Tensor) -> Tensor:
        """MaxSim with each token replaced by its centroid, from a table [C, LQ]: float64 [n] on the CPU.

        Rows of -inf in `cs` take no part (pruned codes).
        """
        rows, lengths = self._rows(pids)
        return self._maxima(cs[self.codes[rows].long().to(self.device)], lengths).double().sum(1).cpu()

    def judge_candidates(self, Q: Tensor, ncells: int, candidates: Tensor, *, rounding: float) -> Verdict:
        """Whether `candidates` is the union of the lists of the `ncells` best centroids of each row of Q.

        Centroid scores closer than `rounding` may be ordered either way. Q: the rows that stock generates from, its
        first query_maxlen ones.
        """
        cs = self.centroid_scores(Q)
        possible = cs >= cs.topk(ncells, dim=0).values[-1] - rounding
        certain = torch.ones_like(possible)
        if ncells < cs.size(0):
            # Not even all that could come before a certain centroid fill the ncells places.
            certain = cs > cs.topk(ncells + 1, dim=0).values[-1] + rounding
        got = torch.zeros(self.index.num_passages, dtype=torch.bool)
        got[candidates.long().cpu()] = True
        missing = (self._union(certain.any(1)) & ~got).nonzero().flatten()
        foreign = (got & ~self._union(possible.any(1))).nonzero().flatten()
        verdict = _verdict(missing, foreign, "candidates")
        # Of centroids that tie at the cut, enough must have been probed.
        owner = torch.arange(cs.size(0)).repeat_interleave(self.index.ivf_offsets.diff())
        absent = torch.zeros(cs.size(0), dtype=torch.int64).index_add_(
            0, owner, (~got[self.index.ivf_pids.long()]).long()
        )
        probed = (possible & (absent == 0).to(possible.device)[:, None]).sum(0)
        if verdict.right and (probed < ncells).any():
            return Verdict(False, reason=f"candidates: {int((probed < ncells).sum())} query tokens with fewer than "
                           f"{ncells} of their best centroids probed")  # fmt: skip
        return verdict

    def _union(self, cells: Tensor) -> Tensor:
        """Mask over all passages of those in the lists of the masked centroids."""
        offsets = self.index.ivf_offsets
        mask = torch.zeros(self.index.num_passages, dtype=torch.bool)
        for cell in cells.cpu().nonzero().flatten().tolist():
            mask[self.index.ivf_pids[offsets[cell] : offsets[cell + 1]].long()] = True
        return mask

    def judge_survivors(
        self,
        Q: Tensor,
        candidates: Tensor,
        survivors: Tensor,
        *,
        ndocs: int,
        threshold: float,
        rounding: float,
        threshold_rounding: float,
    ) -> Verdict:
        """Whether `survivors` can be what PLAID's two pruning steps keep of `candidates`.

        Step one keeps the `ndocs` best by centroid scores of the codes that reach `threshold`, step two the
        `ndocs // 4` best of those by all their codes. Sums closer than `rounding`, and code maxima closer than
        `threshold_rounding` to the threshold, may be decided either way; any choice of step one within its ties is
        followed into step two.
        """
        candidates, kept = candidates.long().cpu(), survivors.long().cpu().unique()
        n, n_kept = candidates.numel(), min(ndocs // 4, ndocs, candidates.numel())
        if kept.numel() != survivors.numel() or kept.numel() != n_kept:
            return Verdict(False, reason=f"survivors: expected {n_kept} distinct passages, got {kept.numel()} "
                           f"distinct of {survivors.numel()}")  # fmt: skip
        foreign = kept[~torch.isin(kept, candidates)]
        if foreign.numel():
            return _verdict(kept[:0], foreign, "survivors that are no candidates")
        cs = self.centroid_scores(Q)
        best = cs.amax(1, keepdim=True)
        prune = torch.tensor(float("-inf"), dtype=cs.dtype, device=cs.device)
        low = self.approximate(torch.where(best >= threshold + threshold_rounding, cs, prune), candidates) - rounding
        high = self.approximate(torch.where(best >= threshold - threshold_rounding, cs, prune), candidates) + rounding
        if ndocs < n:
            # A passage is certain when fewer than ndocs others can beat it, possible when fewer than ndocs must.
            cut_high, cut_low = high.topk(ndocs + 1).values[-1], low.topk(ndocs).values[-1]
            certain, possible = low > cut_high, high >= cut_low
        else:
            certain = possible = torch.ones(n, dtype=torch.bool)
        free = ndocs - int(certain.sum()) if ndocs < n else 0  # places of step one that its ties fill
        full = self.approximate(cs, candidates)
        mask = torch.isin(candidates, kept)
        cut = full[mask].min() if n_kept else torch.tensor(float("inf"), dtype=torch.float64)
        foreign = candidates[mask & ~possible]
        missing = candidates[certain & ~mask & (full > cut + 2 * rounding)]
        if foreign.numel() or missing.numel():
            return _verdict(missing, foreign, "survivors")
        tied = possible & ~certain
        taken = int((tied & mask).sum())
        # Tied passages outside the set that step two would have kept: step one must have dropped them.
        dropped = int((tied & ~mask & (full > cut + 2 * rounding)).sum())
        if taken > free or int(tied.sum()) - dropped < free:
            return Verdict(False, reason=f"survivors: no choice among {int(tied.sum())} ties for {free} places of "
                           f"step one explains them ({taken} taken, {dropped} dropped)")  # fmt: skip
        return Verdict(True)


def _verdict(missing: Tensor, foreign: Tensor, what: str) -> Verdict:
    if not missing.numel() and not foreign.numel():
        return Verdict(True)
    return Verdict(
        False,
        tuple(missing.tolist()),
        tuple(foreign.tolist()),
        f"{what}: {missing.numel()} missing, {foreign.numel()} foreign",
    )
