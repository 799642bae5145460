"""Compressed passages: residuals at 1, 2 and 4 bits, several queries, centroids alone, PQ, and the whole collection."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plaid_tilemaxsim.engine import SearchEngine, with_defaults
from plaid_tilemaxsim.index.resident import ResidentIndex
from plaid_tilemaxsim.ops import api, centroid_kernel, reference

from . import peers
from .bench import OURS, Bench, Shape
from .check import Check, batch_budget, centroid_budget, pq_budget, residual_budget, residual_fp32_budget, sample
from .data import Data, unit_rows

LQ, DIM = 32, 128
QUERIES = 8  # that share a decode
KEPT, FEW_KEPT = 0.2, 0.02  # shares of the centroids above the threshold in the thresholded rows
MS = (8, 16, 32)
RESULTS = 100
# Passages that a search of mode plaid scores in fp32, at k = 10, 100 and 1000; and lists of them in one run.
LISTED, LISTS = (64, 256, 1024), 16
# Most passages of a peer that multiplies 32-bit offsets, or is slow.
LIK_LIMIT, LIK_PADDED_LIMIT, TORCH_LIMIT = 200_000, 100_000, 50_000


def residual_shape(group: str, name: str, data: Data) -> Shape:
    N, T = data.offsets.numel() - 1, data.codes.numel()
    return Shape(group, name, len(data.Q), data.Q.size(1), f"{data.nbits} bits", N, T, data.nbytes)


def residual_check(data: Data) -> Check:
    chosen = sample(data.offsets.numel() - 1, data.codes.device)
    return Check(data.expected(chosen), chosen, residual_budget(data))


def residual_case(bench: Bench, group: str, name: str, data: Data) -> tuple[Shape, Check]:
    """Our kernel over every passage, scores into a poisoned buffer."""
    shape, check = residual_shape(group, name, data), residual_check(data)
    out = torch.full((shape.passages,), math.nan, device=bench.device)
    run = partial(api.residual_maxsim, data.Q, data.cs, *data.compressed, out=out, impl="triton")
    bench.ours(shape, run, check)
    return shape, check


def residual_q8(bench: Bench, Q: Tensor, data: Data) -> Callable[[], Tensor]:
    """Scores fp32 ``[NQ, N]`` of ``Q [NQ, LQ, DIM]`` by the call that decodes once for all."""
    return partial(api.residual_maxsim_batch, Q, data.centroids, *data.compressed)


def run_several(bench: Bench, data: Data) -> None:
    """Several queries: the call that shares a decode, and one query after the other, both from the queries on."""
    N = data.offsets.numel() - 1
    Q = torch.stack([unit_rows(LQ, data.Q.size(1), bench.gen) for _ in range(QUERIES)])
    chosen = sample(N, bench.device, 500)
    want = torch.stack([
        reference.residual_maxsim(
            q, data.codes, data.residuals, data.centroids, data.weights, data.nbits, data.offsets, chosen
        )
        for q in Q
    ])  # fmt: skip
    cmax = data.centroids.float().norm(dim=1).max().item()
    single = Shape("residual", "2 bits, from the query", LQ, data.Q.size(1), "2 bits", N, data.codes.numel(),
                   data.nbytes + data.centroids.nbytes)  # fmt: skip

    def one() -> Tensor:
        cs = api.centroid_scores(Q[0], data.centroids, cmax=cmax, impl="triton")
        return api.residual_maxsim(Q[0], cs, *data.compressed, impl="triton")

    budget = residual_budget(data)
    bench.ours(single, one, Check(want[0], chosen, budget))
    several = Shape("residual", f"2 bits, {QUERIES} queries", LQ, single.DIM, "2 bits", N, single.tokens,
                    single.nbytes)  # fmt: skip
    run = residual_q8(bench, Q, data)

    def sampled() -> Tensor:
        return run()[:, chosen].flatten()

    # the check gathers its sample from every query; the timed run is the call alone
    verdict = Check(want.flatten(), None, batch_budget(data))
    bench.ours(several, run, verdict, checked=sampled, queries=QUERIES)


class Fp32Lists:
    """LISTS lists of n passages each, scored in fp32 one after the other, in one CUDA graph as a search launches it."""

    def __init__(self, data: Data, n: int) -> None:
        N, device = data.offsets.numel() - 1, data.codes.device
        g = torch.Generator(device).manual_seed(n)
        self.pids = torch.randint(N, (LISTS, n), generator=g, device=device).sort().values.int()
        self.out = torch.full((LISTS, n), math.nan, device=device)
        self.tokens = int(data.offsets.diff()[self.pids.long()].sum())
        LQ, DIM = data.Q.shape
        want = data.expected(self.pids.flatten())
        self.check = Check(want, None, residual_fp32_budget(LQ, DIM, want))
        self._data = data

    def launch(self) -> None:
        data = self._data
        for pids, out in zip(self.pids, self.out, strict=True):
            api.residual_maxsim_fp32(
                data.Q, data.centroids, data.codes, data.residuals, data.weights, data.nbits, data.offsets, pids, out,
                impl="triton",
            )  # fmt: skip

    def recorded(self) -> Callable[[], object]:
        """A replay of the launches, with the blocks that are chosen now."""
        self.out.fill_(math.nan)
        self.launch()  # compiles
        if not self.out.is_cuda:
            return self.launch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch()
        return graph.replay


def run_fp32(bench: Bench, data: Data) -> None:
    """The few passages that decide a ranking; a token's centroid counts as read, from the L2 cache at best."""
    width = 4 + data.residuals.size(1) + 2 * data.Q.size(1)
    for n in LISTED:
        lists = Fp32Lists(data, min(n, data.offsets.numel() - 1))
        run = lists.recorded()

        def checked(lists: Fp32Lists = lists, run: Callable[[], object] = run) -> Tensor:
            run()
            return lists.out.flatten()

        shape = Shape("residual", f"fp32, {n} passages", len(data.Q), data.Q.size(1), f"{data.nbits} bits",
                      lists.pids.numel(), lists.tokens, lists.tokens * width)  # fmt: skip
        bench.ours(shape, run, lists.check, checked=checked, lists=LISTS)


def run_residual(bench: Bench) -> None:
    n = bench.sizes.residual
    if bench.wants("fp32"):
        run_fp32(bench, bench.residual_data(2, n))
    for nbits in (2, 1, 4):
        if not bench.wants(f"{nbits} bits"):
            continue
        data = bench.residual_data(nbits, n)
        shape, check = residual_case(bench, "residual", f"{nbits} bits", data)
        if nbits == 2:
            run_several(bench, data)
        if nbits > 1:  # late-interaction-kernels knows 2, 4 and 8
            m = min(LIK_LIMIT, n) // (nbits // 2)
            prepare = partial(peers.lik_residual_varlen, data, m)
            name = "late_interaction_kernels.maxsim_residual_varlen"
            bench.peer(shape, name, prepare, check, passages=m)
        if nbits == 2:
            m = min(LIK_PADDED_LIMIT, n)
            prepare = partial(peers.lik_residual_padded, data, m)
            bench.peer(shape, "late_interaction_kernels.maxsim_residual", prepare, check, passages=m)
        m = min(TORCH_LIMIT, n)
        bench.peer(shape, "torch eager", partial(peers.torch_residual, data, m), check, passages=m)
    bench.forget()


def centroid_case(bench: Bench, name: str, data: Data, cs: api.CentroidScores, want: Tensor, chosen: Tensor) -> Shape:
    N, T = data.offsets.numel() - 1, data.codes.numel()
    shape = Shape("centroid", name, len(data.Q), data.Q.size(1), "int16 table", N, T,
                  data.codes.nbytes + data.offsets.nbytes)  # fmt: skip
    out = torch.full((N,), math.nan, device=bench.device)
    use_keep = cs.keep is not None
    run = partial(api.centroid_maxsim, cs, data.codes, data.offsets, use_keep=use_keep, out=out, impl="triton")
    bench.ours(shape, run, Check(want, chosen, centroid_budget(data)))
    return shape


def threshold_between(data: Data, share: float) -> float:
    """A threshold that about this share of the centroids reach, in a gap wider than the scores' error."""
    best = (data.centroids.double() @ data.Q.double().T).amax(1).sort(descending=True).values
    at = max(1, int(share * len(best)))
    around = max(2, len(best) // 200)
    near = best[max(0, at - around) : at + around]
    wide = int((near[:-1] - near[1:]).argmax())
    return float(near[wide : wide + 2].mean())


def run_centroid(bench: Bench) -> None:
    n = bench.sizes.residual
    data = bench.residual_data(2, n)
    chosen = sample(n, bench.device)
    if bench.wants("scores"):
        scores_case(bench, data)
    if bench.wants("every token"):
        want = reference.centroid_maxsim(data.Q, data.codes, data.centroids, data.offsets, chosen)
        shape = centroid_case(bench, "every token", data, data.cs, want, chosen)
        check = Check(want, chosen, centroid_budget(data))
        bench.peer(shape, "late_interaction_kernels.plaid_approx_score", partial(peers.lik_centroid, data, n), check)
        m = min(4 * TORCH_LIMIT, n)
        bench.peer(shape, "torch eager", partial(peers.torch_centroid, data, m), check, passages=m)
    if bench.wants("thresholded"):
        threshold = threshold_between(data, KEPT)
        cs = api.centroid_scores(data.Q, data.centroids, threshold, impl="triton")
        want = reference.centroid_maxsim(data.Q, data.codes, data.centroids, data.offsets, chosen, threshold)
        centroid_case(bench, "thresholded", data, cs, want, chosen)
    if bench.wants("few kept"):
        few_kept_case(bench, data)
    bench.forget()


def few_kept_case(bench: Bench, data: Data) -> None:
    """A list of passages that lie apart, as mode plaid prunes it, by both kernels."""
    N = data.offsets.numel() - 1
    pids = torch.arange(0, N, 8 if N > 1000 else 1, dtype=torch.int32, device=bench.device)
    tokens = int((data.offsets[1:] - data.offsets[:-1])[pids.long()].sum())
    threshold = threshold_between(data, FEW_KEPT)
    cs = api.centroid_scores(data.Q, data.centroids, threshold, impl="triton")
    chosen = sample(len(pids), bench.device)
    want = reference.centroid_maxsim(data.Q, data.codes, data.centroids, data.offsets, pids[chosen].long(), threshold)
    check = Check(want, chosen, centroid_budget(data))
    shape = Shape("centroid", "few kept", len(data.Q), data.Q.size(1), "int16 table", len(pids), tokens,
                  4 * tokens + 20 * len(pids))  # fmt: skip
    out = torch.full((len(pids),), math.nan, device=bench.device)
    run = partial(api.centroid_maxsim, cs, data.codes, data.offsets, pids, True, out, impl="triton")
    bench.ours(shape, run, check)

    def every_row() -> Tensor:
        centroid_kernel.centroid_maxsim(cs, data.codes, data.offsets, pids, True, out, None)
        return out

    bench.ours(shape, every_row, check, kernel=f"{OURS}, every row")


def scores_case(bench: Bench, data: Data) -> None:
    """The table itself: C centroids with one query; "passages" and "tokens" are centroids."""
    C = len(data.centroids)
    cmax = data.centroids.float().norm(dim=1).max().item()
    nbytes = data.centroids.nbytes + data.cs.table.nbytes
    shape = Shape("centroid", "scores", LQ, data.Q.size(1), "fp16", C, C, nbytes)
    want = (data.centroids.double() @ data.Q.double().T).flatten()

    def table() -> api.CentroidScores:
        return api.centroid_scores(data.Q, data.centroids, cmax=cmax, impl="triton")

    def checked() -> Tensor:
        cs = table()
        return (cs.table[:C, :LQ] * cs.scale.double()).flatten()

    budget = data.cs.scale.item() / 2 + 2.5e-6
    bench.ours(shape, table, Check(want, None, budget), checked=checked)


def run_pq(bench: Bench) -> None:
    """Random codes; entries such that an embedding is about a unit vector."""
    passages, ND = bench.sizes.pq, bench.sizes.tokens
    for M in MS:
        if not bench.wants(f"m{M}"):
            continue
        T = passages * ND
        codes = torch.randint(0, 256, (T, M), generator=bench.gen, device=bench.device, dtype=torch.uint8)
        codebook = (torch.randn(M, 256, DIM // M, generator=bench.gen, device=bench.device) / DIM**0.5).half()
        offsets = torch.arange(passages + 1, device=bench.device) * ND
        Q = unit_rows(LQ, DIM, bench.gen)
        chosen = sample(passages, bench.device)
        check = Check(reference.pq_maxsim(Q, codes, codebook, offsets, chosen), chosen, pq_budget(LQ, DIM))
        shape = Shape("pq", f"m{M}", LQ, DIM, f"PQ {M}", passages, T, codes.nbytes + offsets.nbytes)
        out = torch.full((passages,), math.nan, device=bench.device)
        bench.ours(shape, partial(api.pq_maxsim, Q, codes, codebook, offsets, out=out, impl="triton"), check)
        if M == 16:
            several = torch.stack([Q, *(unit_rows(LQ, DIM, bench.gen) for _ in range(QUERIES - 1))])
            want = torch.stack([reference.pq_maxsim(q, codes, codebook, offsets, chosen) for q in several])
            run = partial(api.pq_maxsim, several, codes, codebook, offsets, impl="triton")
            named = Shape("pq", f"m{M}, {QUERIES} queries", LQ, DIM, f"PQ {M}", passages, T, shape.nbytes)
            bench.ours(
                named, run, Check(want.flatten(), None, pq_budget(LQ, DIM)), queries=QUERIES,
                checked=_columns(run, chosen),
            )  # fmt: skip
        if bench.peers is not None:
            for name, peer in peers.torch_pq(Q, codes, codebook, ND):
                bench.peer(shape, name, _constant(peer), check)


def _columns(run: Callable[[], Tensor], chosen: Tensor) -> Callable[[], Tensor]:
    return lambda: run()[:, chosen].flatten()


def _constant(run: Callable[[], Tensor]) -> Callable[[], Callable[[], Tensor]]:
    return lambda: run


def resident(data: Data) -> ResidentIndex:
    """The data as the search engine reads it, without inverted lists: an exhaustive search needs none."""
    device, C = data.codes.device, len(data.centroids)
    return ResidentIndex(
        device=device,
        placement="gpu" if device.type == "cuda" else "cpu",
        dim=data.Q.size(1),
        nbits=data.nbits,
        num_passages=data.offsets.numel() - 1,
        num_tokens=data.codes.numel(),
        num_centroids=C,
        longest=int(data.offsets.diff().max()),
        centroids=data.centroids,
        bucket_weights=data.weights,
        codes=data.codes,
        residuals=data.residuals,
        inv_norms=data.inv_norms,
        inv_norm_lo=data.lo,
        inv_norm_step=data.step,
        offsets=data.offsets,
        ivf_pids=torch.zeros(0, dtype=torch.int32, device=device),
        ivf_offsets=torch.zeros(C + 1, dtype=torch.int64, device=device),
    )


def run_exhaustive(bench: Bench) -> None:
    """Every passage of an index of MS MARCO's size scored exactly: the kernel, and a search with the best of them."""
    if not bench.wants("exhaustive"):
        return
    bench.forget()
    data = bench.residual_data(2, bench.sizes.exhaustive)
    shape, _ = residual_case(bench, "exhaustive", "kernel", data)
    engine = SearchEngine(resident(data), impl="triton")
    k = min(RESULTS, shape.passages)
    params = with_defaults(k, mode="exhaustive")
    query = data.Q.cpu()
    budget = residual_budget(data)
    every = api.residual_maxsim(data.Q, data.cs, *data.compressed, impl="triton")
    # The i-th best score is within the budget of the i-th best in fp64, whichever of nearly equal passages has it.
    want = data.expected(every.topk(k).indices).sort(descending=True).values

    def search() -> tuple[Tensor, Tensor]:
        return engine.search(query, params)

    def checked() -> Tensor:
        """Scores of the search; NaN unless they are its pids' scores, and each pid is there once."""
        pids, scores = (x.to(every.device) for x in search())
        own = (every[pids.long()] - scores).abs().max().item() <= 2 * budget
        return scores if own and len(pids.unique()) == k else torch.full_like(scores, math.nan)

    named = Shape("exhaustive", "search", LQ, DIM, "2 bits", shape.passages, shape.tokens,
                  shape.nbytes + data.centroids.nbytes)  # fmt: skip
    bench.ours(named, search, Check(want, None, 2 * budget), checked=checked, host=True, k=k)
    engine.close()
    bench.forget()


CASES: dict[str, tuple[str, ...]] = {
    "residual": ("fp32", "2 bits", "1 bits", "4 bits"),
    "centroid": ("scores", "every token", "thresholded", "few kept"),
    "pq": tuple(f"m{M}" for M in MS),
    "exhaustive": ("exhaustive",),
}
RUNS: dict[str, Callable[[Bench], Any]] = {
    "residual": run_residual,
    "centroid": run_centroid,
    "pq": run_pq,
    "exhaustive": run_exhaustive,
}
