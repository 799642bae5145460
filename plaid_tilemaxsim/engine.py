"""The search engine: PLAID's funnel over a resident index, on plain tensors.

Checks what callers pass, then runs ``funnel.run_funnel`` with the steps of the index's device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from plaid_tilemaxsim.funnel import Pids, SearchParams, Stages, default_params, run_funnel, run_shard
from plaid_tilemaxsim.merge import Survivors, merge
from plaid_tilemaxsim.ops.api import MAX_LQ
from plaid_tilemaxsim.stats import Watch

if TYPE_CHECKING:
    from plaid_tilemaxsim.exact import ExactScorer
    from plaid_tilemaxsim.index.resident import ResidentIndex

__all__ = ["SearchEngine", "SearchParams", "default_params", "with_defaults"]

log = logging.getLogger("plaid_tilemaxsim")

T = TypeVar("T")
FilterFn = Callable[[Tensor], Tensor]
# Norm of a whole query that the kernels' fp16 products take without loss; that of LQ unit vectors is sqrt(LQ).
LEAST_NORM, MOST_NORM = 2.0**-6, 2.0**12
# Centroids per query token that the centroid kernel can report.
MOST_NCELLS = 128
# Where memory is short, a search is not divided into parts of fewer passages than this.
LEAST_PIECE = 4096


class SearchEngine:
    """Searches one resident index. Safe to call from several threads; results do not depend on what ran before.

    index: from ``index.resident.load_resident``. impl: "auto" (triton on CUDA, torch on the CPU), "triton" or
    "torch"; asking for what the device cannot run raises ValueError.
    """

    def __init__(self, index: ResidentIndex, *, impl: str = "auto") -> None:
        self.index = index
        self.device = index.device
        self.impl = self._choose(impl)
        if self.impl == "triton":
            from plaid_tilemaxsim.device_search import DeviceSearch

            self._device_search: DeviceSearch | None = DeviceSearch(index)
            self._stages: Stages = self._device_search.stages
        else:
            from plaid_tilemaxsim.stages_torch import TorchStages

            self._device_search = None
            self._stages = TorchStages(index)

    def _choose(self, impl: str) -> str:
        on_gpu = self.device.type == "cuda"
        if impl == "auto":
            return "triton" if on_gpu else "torch"
        if impl not in ("triton", "torch"):
            raise ValueError(f"impl: expected auto, triton or torch, got {impl!r}")
        if impl == "torch" and on_gpu:
            raise ValueError(f"impl: expected triton or auto for an index on {self.device}, got 'torch'")
        return impl

    def search(
        self,
        Q: Tensor,
        params: SearchParams,
        *,
        pids: Tensor | list[int] | None = None,
        filter_fn: FilterFn | None = None,
        allow: Tensor | None = None,
        watch: Watch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The best passages of one query: (pids int32 [m], scores fp32 [m]) on the CPU, best first.

        Q: [LQ, DIM], floating point, any device. pids: score exactly these (duplicates are kept) and skip candidates
        and pruning. filter_fn: gets the candidates (int32 [n], ascending, on the index's device) before pruning and
        returns those to keep. allow: bool [N], or int pids; only these passages may be found, applied on the device
        before pruning. watch: gets what the search measures. m <= params.k. Ties go to the smaller pid.
        Raises ValueError for a wrong shape or type, IndexError for a pid outside the index.
        """
        Q = self._check_query(Q, 2)
        self._check_ncells(params, given=pids is not None)
        allowed = None if allow is None else self.allow_mask(allow)
        with torch.no_grad():
            if pids is not None:
                wanted = self.check_pids(pids)
                if allowed is not None:
                    wanted = wanted[allowed[wanted.long()]]
                if filter_fn is not None:
                    wanted = self._filtered(filter_fn, wanted)
                # Ascending, so that ties go to the smaller pid as everywhere.
                return self._run_listed("given", Q, wanted.sort().values, params, watch)
            if filter_fn is not None:
                found = self._all_candidates(Q, params, allowed)
                if watch is not None:
                    watch.found(found.numel())
                kept = self._filtered(filter_fn, found)
                return self._run_listed("candidates", Q, kept.sort().values, params, watch)
            if params.mode == "exhaustive" and allowed is not None:
                return self._run_listed("candidates", Q, allowed.nonzero()[:, 0].int(), params, watch)
            try:
                if self._device_search is not None:
                    return self._device_search.search(Q, params, allowed, watch)
                return self._run(Q, params, watch, allow=allowed)
            except torch.OutOfMemoryError as error:
                shortage = str(error)
            self._make_room(shortage)
            return self._run_listed("candidates", Q, self._all_candidates(Q, params, allowed), params, watch)

    def search_batch(
        self, Q: Tensor, params: SearchParams, *, watch: Watch | None = None, **filters: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """``search`` for every query of Q [B, LQ, DIM]; equal to searching one by one, faster on a GPU.

        watch: gets what searches one by one measure.
        """
        return self._checked_batch(self._check_query(Q, 3), params, watch=watch, **filters)

    def _checked_batch(
        self, Q: Tensor, params: SearchParams, *, watch: Watch | None = None, **filters: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """``search_batch`` of what ``_check_query`` gave."""
        if self._device_search is None or len(Q) == 0 or any(value is not None for value in filters.values()):
            return [self.search(q, params, watch=watch, **filters) for q in Q]
        self._check_ncells(params, given=False)
        with torch.no_grad():
            try:
                return self._device_search.search_batch(Q, params)
            except torch.OutOfMemoryError as error:
                shortage = str(error)
            self._make_room(shortage)
            return [self.search(q, params) for q in Q]

    def survivors(
        self,
        Q: Tensor,
        params: SearchParams,
        *,
        candidates: Tensor | list[int] | None = None,
        allow: Tensor | None = None,
    ) -> list[Survivors]:
        """What ``merge.merge`` needs of this index, as one shard of a larger one, for each query of Q [B, LQ, DIM].

        On the CPU; pids are this index's own. candidates: the passages to start from, instead of those that the query
        generates. allow: as in ``search``. Raises as ``search`` does.
        """
        Q = self._check_query(Q, 3)
        self._check_ncells(params, given=candidates is not None)
        allowed = None if allow is None else self.allow_mask(allow)
        with torch.no_grad():
            listed = None if candidates is None else self.check_pids(candidates).sort().values
            if params.mode == "exhaustive" and listed is None and allowed is not None:
                listed = allowed.nonzero()[:, 0].int()
            prunes = _prunes(params)
            if listed is not None and listed.numel() == 0:
                column = torch.zeros(0) if prunes else None
                first = column if params.mode == "plaid" else None
                return [Survivors(_nothing()[0], torch.zeros(0), first, column)] * len(Q)
            if not prunes:
                if listed is not None:
                    return [Survivors(*self._run_listed("candidates", q, listed, params, None)) for q in Q]
                return [Survivors(*found) for found in self.search_batch(Q, params, allow=allow)]
            if self._device_search is not None:
                alone = listed is not None or allowed is not None
                parts = Q.split(1) if alone else (Q,)
                found = [
                    columns
                    for part in parts
                    for columns in self._device_search.survivors(part, params, pids=listed, allow=allowed)
                ]
            else:
                start = None if listed is None else Pids(listed)
                shards = (run_shard(self._stages, q, params, candidates=start, allow=allowed) for q in Q)
                found = [(cast(Tensor, pids.pids), *scores) for pids, scores in shards]
        return [Survivors(pids, exact, first[0] if first else None, second) for pids, *first, second, exact in found]

    def candidates(self, Q: Tensor, ncells: int) -> Tensor:
        """Passages in the lists of the ``ncells`` best centroids of every token of Q [LQ, DIM].

        int32 [n] on the index's device, ascending, each once.
        """
        Q = self._check_query(Q, 2)
        params = SearchParams(ncells=ncells)
        self._check_ncells(params, given=False)
        with torch.no_grad():
            return self._all_candidates(Q, params, None)

    def score_pids(self, Q: Tensor, pids: Tensor | list[int]) -> Tensor:
        """Exact MaxSim: fp32 [n] on the index's device, in the order of ``pids``; -inf for an empty passage.

        Q: [1, LQ, DIM] for all passages alike, or [n, LQ, DIM]: each passage with its own query.
        Raises ValueError for a wrong shape or type, IndexError for a pid outside the index.
        """
        Q = self._check_query(Q, 3)
        # pids on a GPU are checked there, by the search itself
        on_device = isinstance(pids, Tensor) and pids.is_cuda and pids.dtype == torch.int32
        later = on_device and self._device_search is not None and Q.size(0) == 1
        wanted = self._listed(pids) if later else self.check_pids(pids)
        if Q.size(0) not in (1, wanted.numel()):
            raise ValueError(f"Q: expected 1 query or one for each of {wanted.numel()} pids, got {Q.size(0)}")
        with torch.no_grad():
            if Q.size(0) == 1:
                parts = self._in_pieces(wanted, lambda part: self._score(Q[0], part))
                return parts[0] if len(parts) == 1 else torch.cat(parts)
            return self._score_aligned(Q, wanted)

    def profile(self, Q: Tensor, params: SearchParams) -> dict[str, float]:
        """Milliseconds of every stage of one search; on a GPU the device's time in each, without launches."""
        Q = self._check_query(Q, 2)
        self._check_ncells(params, given=False)
        with torch.no_grad():
            if self._device_search is not None:
                return self._device_search.profile(Q, params)
            watch = Watch()
            self._run(Q, params, watch)
            return {name: 1e3 * seconds for name, seconds in watch.stages.items()}

    def warmup(self, lq: int, params: SearchParams, batch: bool = False) -> None:
        """Compile, and on a GPU record, what searches with ``lq`` query tokens and these parameters need."""
        if type(lq) is not int or not 1 <= lq <= MAX_LQ:
            raise ValueError(f"lq: expected 1..{MAX_LQ} query tokens, got {lq!r}")
        g = torch.Generator().manual_seed(0)
        Q = torch.nn.functional.normalize(torch.randn(1, lq, self.index.dim, generator=g), dim=-1)
        self.search(Q[0], params)
        if batch:
            self.search_batch(Q, params)

    def close(self) -> None:
        """Let go of buffers, graphs and the index's tensors; the engine cannot search afterwards."""
        if self._device_search is not None:
            self._device_search.close()
        self.__dict__.pop("_stages", None)
        self.__dict__.pop("index", None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("index", "_stages"):
                raise ValueError("search engine: expected an open one, got one that was closed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _all_candidates(self, Q: Tensor, params: SearchParams, allowed: Tensor | None) -> Tensor:
        if params.mode == "exhaustive":
            everything = torch.arange(self.index.num_passages, dtype=torch.int32, device=self.device)
            return everything if allowed is None else everything[allowed]
        if self._device_search is not None:
            return self._device_search.candidates(Q, params, allowed)
        short = Q if params.query_maxlen is None else Q[: params.query_maxlen]
        cs = self._stages.centroids(short, threshold=None, ncells=params.ncells)
        pids = self._stages.candidates(cs, params.ncells, allowed).pids
        assert pids is not None
        return pids

    def _run_listed(
        self, kind: str, Q: Tensor, pids: Tensor, params: SearchParams, watch: Watch | None
    ) -> tuple[Tensor, Tensor]:
        """Only these pids, int32 ascending on the device. kind: "given" (scored exactly) or "candidates"."""
        if pids.numel() == 0:
            return _nothing()

        def run(part: Tensor) -> Survivors:
            if part is not pids and kind == "candidates" and _prunes(params):
                return self.survivors(Q[None], params, candidates=part)[0]
            if self._device_search is not None:
                return Survivors(*self._device_search.search_listed(kind, Q, part, params, watch))
            return Survivors(*self._run(Q, params, watch, **{kind: Pids(part)}))

        parts = self._in_pieces(pids, run)
        return (parts[0].pids, parts[0].exact) if len(parts) == 1 else merge(parts, params)

    def _in_pieces(self, pids: Tensor, run: Callable[[Tensor], T]) -> list[T]:
        """``run`` of all pids, or where memory is too small for that of as large parts of them as it allows."""
        try:
            return [run(pids)]
        except torch.OutOfMemoryError as error:
            shortage = str(error)
        size = pids.numel()
        while True:
            self._make_room(shortage)
            try:
                return [run(pids)] if size == pids.numel() else [run(part) for part in pids.split(size)]
            except torch.OutOfMemoryError as error:
                shortage = str(error)
            if size <= LEAST_PIECE:
                break
            size = max(LEAST_PIECE, size // 4)
            log.warning("searching %d passages at a time, not %d", size, pids.numel())
        raise torch.OutOfMemoryError(
            f"{self.device}: memory: expected room for a search of {size} passages, got {shortage}; let other "
            'programs or engines free theirs, or load the index with placement "host" or "disk"'
        )

    def _make_room(self, shortage: str) -> None:
        log.warning("%s; freeing what earlier searches left", shortage)
        if self._device_search is not None:
            self._device_search.make_room()

    def _score(self, Q: Tensor, pids: Tensor) -> Tensor:
        if self._device_search is not None:
            return self._device_search.score(Q, pids)
        cs = self._stages.centroids(Q, threshold=None, ncells=None)
        return self._stages.exact(Q, cs, Pids(pids), False)

    def _run(self, Q: Tensor, params: SearchParams, watch: Watch | None, **source: Any) -> tuple[Tensor, Tensor]:
        """The funnel in torch."""
        if watch is None:
            ranking = run_funnel(self._stages, Q, params, **source)
        else:
            ranking = run_funnel(self._stages, Q, params, stage=watch.stage, **source)
            if ranking.candidates is not None and ranking.candidates.pids is not None:
                watch.found(ranking.candidates.pids.numel())
        return ranking.pids, ranking.scores

    def _filtered(self, filter_fn: FilterFn, pids: Tensor) -> Tensor:
        kept = filter_fn(pids)
        if not isinstance(kept, Tensor):
            raise ValueError(f"filter_fn: expected to return a tensor, got {type(kept).__name__}")
        if kept.dtype != torch.int32 or kept.device != pids.device or kept.dim() != 1:
            got = f"{kept.dtype} {list(kept.shape)} on {kept.device}"
            raise ValueError(f"filter_fn: expected to return an int32 [n] tensor on {pids.device}, got {got}")
        return self.check_pids(kept)

    def _check_query(self, Q: Tensor, dim: int) -> Tensor:
        shape = "[LQ, DIM]" if dim == 2 else "[B, LQ, DIM]"
        if not _is_dense(Q) or not Q.is_floating_point() or Q.dim() != dim or Q.size(-1) != self.index.dim:
            raise ValueError(f"Q: expected a floating-point tensor {shape} with DIM {self.index.dim}, got {_kind(Q)}")
        Q = Q.detach()
        if Q.size(-2) == 0:
            raise ValueError("Q: expected at least one query token, got none")
        if Q.size(-2) > MAX_LQ:
            raise ValueError(f"Q: expected at most {MAX_LQ} query tokens, got {Q.size(-2)}")
        if Q.device.type == "cpu":  # a check on the GPU would wait for it; NaN scores then rank last
            norm = _norm(Q)
            if not math.isfinite(norm):
                raise ValueError("Q: expected finite values, got NaN, infinity or values whose squares overflow")
            # Kernels multiply in fp16, whose range would cost such queries their accuracy.
            if self.impl == "triton" and norm and not LEAST_NORM <= norm <= MOST_NORM:
                raise ValueError(
                    f"Q: expected unit vectors, or a norm of all of Q in {LEAST_NORM:g} .. {MOST_NORM:g}, got {norm:g}"
                )
        Q = Q.float() if self.impl == "triton" else Q.to(self.device, torch.float32)
        return Q.contiguous()

    def _check_ncells(self, params: SearchParams, *, given: bool) -> None:
        if given or params.mode == "exhaustive":
            return
        if self.impl == "triton" and params.ncells > MOST_NCELLS:
            raise ValueError(f"ncells: expected at most {MOST_NCELLS} on a GPU, got {params.ncells}")
        if params.ncells > self.index.num_centroids:
            raise ValueError(
                f"ncells: expected at most the index's {self.index.num_centroids} centroids, got {params.ncells}"
            )

    def check_pids(self, pids: Tensor | list[int]) -> Tensor:
        """int32 [n] on the index's device. ValueError for what is no list of integers, IndexError for one outside."""
        wanted = _as_tensor("pids", pids)
        if wanted.numel():
            self._check_range(wanted)
        return self._listed(wanted)

    def _listed(self, pids: Tensor | list[int]) -> Tensor:
        """int32 [n] on the index's device; says nothing of the range."""
        wanted = _as_tensor("pids", pids)
        if wanted.numel() == 0:
            return torch.zeros(0, dtype=torch.int32, device=self.device)
        if wanted.dim() != 1 or wanted.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"pids: expected integers [n], got {wanted.dtype} {list(wanted.shape)}")
        return wanted.to(self.device, torch.int32)

    def _check_range(self, pids: Tensor) -> None:
        """IndexError unless all pids are in the index; one wait where they are on a GPU."""
        if pids.dtype not in (torch.int32, torch.int64):
            return  # _listed says what is wrong with them
        least, most = torch.stack(torch.aminmax(pids)).tolist()
        if least < 0 or most >= self.index.num_passages:
            raise IndexError(f"pids: expected 0 .. {self.index.num_passages - 1}, got {least if least < 0 else most}")

    def allow_mask(self, allow: Tensor) -> Tensor:
        """bool [N] on the index's device of a mask bool [N] or of integer pids [n]. Raises as ``search`` does."""
        allow = _as_tensor("allow", allow)
        if allow.dtype == torch.bool:
            if allow.shape != (self.index.num_passages,):
                raise ValueError(f"allow: expected bool [{self.index.num_passages}], got {list(allow.shape)}")
            return allow.to(self.device)
        mask = torch.zeros(self.index.num_passages, dtype=torch.bool, device=self.device)
        mask[self.check_pids(allow).long()] = True
        return mask

    def _score_aligned(self, Q: Tensor, pids: Tensor) -> Tensor:
        return score_aligned(self.index, self._stages.exact_scorer, Q, pids)


def score_aligned(index: ResidentIndex, exact: ExactScorer, Q: Tensor, pids: Tensor) -> Tensor:
    """fp32 [n] on the index's device: MaxSim of each of ``pids`` int32 [n] with its own query of Q [n, LQ, DIM]."""
    Q = Q.to(index.device)
    scores = torch.empty(pids.numel(), device=index.device)
    starts = index.offsets[pids.long()].tolist()
    ends = index.offsets[pids.long() + 1].tolist()
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        # [L, DIM] of one passage; few passages are scored this way
        D = exact.embeddings(start, end)
        scores[i] = (D @ exact.query(Q[i]).T).amax(0).sum() if end > start else -torch.inf
    return scores


def _as_tensor(name: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected integers, got {type(values).__name__} ({error})") from None
    if not _is_dense(tensor):
        raise ValueError(f"{name}: expected integers, got {_kind(tensor)}")
    return tensor


def _norm(Q: Tensor) -> float:
    """Of all of Q, in this thread alone: torch asks its others for more than 2**15 values, and they are in the way of
    searches in other threads; and in one operation: each lets other threads of Python go first."""
    if Q.numel() <= 1 << 15:
        return float(torch.linalg.vector_norm(Q.float()))
    values = Q.float().reshape(-1).numpy()
    return math.sqrt(np.einsum("i,i->", values, values))


def _is_dense(value: Any) -> bool:
    """Whether it is a tensor with elements in the memory of a CPU or GPU."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type in ("cpu", "cuda")


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)}" + ("" if _is_dense(value) else f" ({value.layout} on {value.device})")


def _prunes(params: SearchParams) -> bool:
    return params.mode == "plaid" or (params.mode == "exhaustive" and params.prefilter is not None)


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.zeros(0, dtype=torch.int32), torch.zeros(0)


def with_defaults(k: int, **explicit: Any) -> SearchParams:
    """Parameters for k results: PLAID's own for what is not given explicitly (None counts as not given)."""
    ncells, threshold, ndocs = default_params(k)
    base = SearchParams(k=k, ncells=ncells, threshold=threshold, ndocs=ndocs)
    return replace(base, **{name: value for name, value in explicit.items() if value is not None})
