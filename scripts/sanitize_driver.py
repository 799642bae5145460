"""Every kernel at odd shapes, compared with the oracle: what compute-sanitizer watches (see sanitize.py).

    python scripts/sanitize_driver.py PART [PART ...]        one JSON line: kernels and how often each was launched

Oracles run on the CPU, so that the tool instruments our kernels and little else. Parts can run side by side.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.merge import Survivors, merge
from plaid_tilemaxsim.ops import (
    api,
    candidates_kernel,
    decompress_kernel,
    dense_fast_kernel,
    dense_kernel,
    dense_ring_kernel,
    merge_kernel,
    norms_kernel,
    pids_kernel,
    pq_fast_kernel,
    pq_kernel,
    rank_kernel,
    reference,
    residual_batch_kernel,
    residual_fast_kernel,
    residual_fp32_kernel,
    residual_kernel,
    residual_wgmma_kernel,
    select_kernel,
    tuning,
)
from scripts import sanitize_dispatch
from tests.ops.ragged import (
    Collection,
    assert_scores,
    fast_residual_tolerance,
    fp32_tolerance,
    make_collection,
    make_pq,
    poisoned,
    residual_tolerance,
)

Form = TypeVar("Form")
DEVICE = "cpu" if tuning.interpreted() else "cuda"
LENGTHS = (300, 0, 1, 15, 16, 17, 0)  # the last passage is empty: nothing lies behind the last token
LQS = (1, 7, 32, 33, 128)
FULL = (128, 7)  # DIM and LQ that meet every form of a list
PIDS = (3, 0, 6, 5, 5, 2, 1, 4, 4, 3)  # duplicates, an empty one last
COUNT = 7


def shapes(seed: int) -> list[tuple[int, int]]:
    """(DIM, LQ): DIM 128 with one and with two blocks of query tokens, others with an LQ that changes with the seed.

    Compiling takes most of the time, so there is one shape for each way through the code.
    """
    return [FULL, (128, 33), *((DIM, (1, 128, 32)[(seed + i) % 3]) for i, DIM in enumerate((64, 96, 384)))]


def some(forms: Sequence[Form], DIM: int, LQ: int) -> Sequence[Form]:
    """All forms of a list or layout at the shape ``FULL``; a third of them, not always the same, at others."""
    return forms if (DIM, LQ) == FULL else forms[(DIM // 32 + LQ) % 3 :: 3]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def lists(n: int) -> list[tuple[Tensor | None, Tensor | None, Tensor]]:
    """(pids, count, the passages that are scored, on the CPU): all of n, a list, a list with a count."""
    listed = torch.tensor(PIDS)
    return [
        (None, None, torch.arange(n)),
        (listed.to(DEVICE), None, listed),
        (int32(*PIDS), int32(COUNT), listed[:COUNT]),
    ]


def check(out: Tensor, want: Tensor, tolerance: float) -> None:
    """The scores that are wanted, nothing written behind them."""
    assert_scores(out[: len(want)], want, tolerance)
    assert out[len(want) :].isnan().all()


def moved(DIM: int, LQ: int, nbits: int) -> tuple[Collection, Collection]:
    """A collection on the CPU and where the kernels run."""
    c = make_collection("cpu", LQ, DIM, nbits, lengths=LENGTHS)
    there = copy.copy(c)
    for name, value in vars(c).items():
        if isinstance(value, Tensor):
            setattr(there, name, value.to(DEVICE))
    there.device = DEVICE
    stored, lo, step = c.stored
    there.stored = stored.to(DEVICE), lo, step
    return c, there


def residual(nbits: int) -> None:
    for DIM, LQ in shapes(nbits):
        host, c = moved(DIM, LQ, nbits)
        cs = c.centroid_scores(cmax=1.01)
        scores = dataclasses.replace(cs, scale=cs.scale.cpu())
        want = reference.residual_maxsim(host.Q, *host.raw)
        arguments = (c.Q, cs, c.codes, c.residuals, *c.stored, c.bucket_weights, nbits, c.offsets)
        kernels: list[Any] = [(residual_kernel, residual_tolerance(host, scores))]
        if tuning.residual_is_fast(tuning.arch(c.Q.device), nbits, DIM):
            kernels.append((residual_fast_kernel, fast_residual_tolerance(host, scores)))
        for (kernel, tolerance), (pids, count, scored) in itertools.product(
            kernels, some(lists(len(LENGTHS)), DIM, LQ)
        ):
            out = poisoned(len(PIDS) if pids is not None else len(LENGTHS), DEVICE)
            kernel.residual_maxsim(*arguments, pids, out, count)
            check(out, want[scored], tolerance)


def residual_fp32(nbits: int) -> None:
    for DIM, LQ in shapes(nbits):
        host, c = moved(DIM, LQ, nbits)
        want = reference.residual_maxsim(host.Q, *host.raw)
        arguments = (c.Q, c.centroids, c.codes, c.residuals, c.bucket_weights, nbits, c.offsets)
        for pids, count, scored in some(lists(len(LENGTHS)), DIM, LQ):
            out = poisoned(len(PIDS) if pids is not None else len(LENGTHS), DEVICE)
            residual_fp32_kernel.residual_maxsim(*arguments, pids, out, count)
            check(out, want[scored], fp32_tolerance(host, want))


def residual_batch(nbits: int) -> None:
    arch = tuning.arch(torch.device(DEVICE))
    for NQ, (DIM, LQ) in itertools.product((1, 5), shapes(nbits)):
        if not tuning.residual_batch_is_fast(arch, nbits, DIM):
            continue
        host, c = moved(DIM, LQ, nbits)
        Q = torch.stack([host.Q.roll(7 * i, 1) for i in range(NQ)])
        want = torch.stack([reference.residual_maxsim(q, *host.raw) for q in Q])
        # unit query tokens, embeddings and weights rounded to fp16: six standard deviations of a sum over LQ
        tolerance = 6 * LQ**0.5 * 2.0**-11 / DIM**0.5 + 1e-5
        arguments = (
            Q.to(DEVICE), c.centroids, c.codes, c.residuals, *c.stored, c.bucket_weights, nbits, c.offsets
        )  # fmt: skip
        for pids, count, scored in some(lists(len(LENGTHS)), DIM, LQ):
            size = len(PIDS) if pids is not None else len(LENGTHS)
            out = torch.full((NQ, size), math.nan, device=DEVICE)
            residual_batch_kernel.residual_maxsim(*arguments, pids, out, count)
            for got, w in zip(out, want):
                check(got, w[scored], tolerance)
        if arch != 90 or DIM != residual_wgmma_kernel.DIM:
            continue  # what the next kernel is made for
        for count, size in ((None, len(LENGTHS)), (int32(5), 5)):
            out = torch.full((NQ, len(LENGTHS)), math.nan, device=DEVICE)
            residual_wgmma_kernel.residual_maxsim(*arguments, out, count)
            for got, w in zip(out, want):
                check(got, w[:size], tolerance)


def centroids() -> None:
    for seed, ncells in ((0, 1), (1, 4), (3, 16)):
        for DIM, LQ in shapes(seed):
            host, c = moved(DIM, LQ, 2)
            scores = host.centroids.double() @ host.Q.double().T
            threshold = float(scores.amax(1).median()) + 1e-4
            cs = c.centroid_scores(threshold, cmax=1.01, ncells=ncells)
            scale = float(cs.scale)
            assert float((cs.table[:-1, :LQ].cpu() * scale - scores).abs().max()) <= 0.51 * scale + 2e-6
            assert cs.keep is not None
            assert cs.cells is not None
            assert torch.equal(cs.keep.cpu().bool(), scores.amax(1) >= threshold)
            cells = torch.empty(LQ, ncells, dtype=torch.int32, device=DEVICE)
            candidates_kernel.select_cells(cs.cells.flatten(0, 1), cells)
            best = scores.T.gather(1, cells.cpu().long())
            assert float((best - scores.T.topk(ncells).values).abs().max()) < 2e-6
            for use_keep, (pids, count, scored) in itertools.product((False, True), some(lists(len(LENGTHS)), DIM, LQ)):
                limit = threshold if use_keep else None
                want = reference.centroid_maxsim(host.Q, host.codes, host.centroids, host.offsets, threshold=limit)
                out = poisoned(len(PIDS) if pids is not None else len(LENGTHS), DEVICE)
                api.centroid_maxsim(cs, c.codes, c.offsets, pids, use_keep, out, count, impl="triton")
                check(out, want[scored], LQ * (0.51 * scale + 2e-6))


def dense(dtype: torch.dtype, precisions: tuple[str, ...]) -> None:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    N, longest = len(LENGTHS), max(LENGTHS)
    for seed, (precision, NQ) in enumerate(itertools.product(precisions, (1, 3))):
        # fp32 outside the tensor core takes longest to compile
        for DIM, LQ in shapes(seed)[1:2] if NQ > 1 else shapes(seed)[:: 4 if precision == "ieee" else 1]:
            g = torch.Generator().manual_seed(DIM + LQ)
            # decoded values of about one norm
            Q = torch.randn(NQ, LQ, DIM, generator=g).div(DIM**0.5).to(dtype)
            D = torch.randn(int(offsets[-1]), DIM, generator=g).div(DIM**0.5).to(dtype)
            padded = torch.full((N, longest, DIM), math.nan, dtype=dtype)
            for i, length in enumerate(LENGTHS):
                padded[i, :length] = D[offsets[i] : offsets[i] + length]
            full = D[:288].view(9, 32, DIM)
            want = torch.stack([reference.maxsim(q, D, offsets) for q in Q])
            want_full = torch.stack([reference.maxsim(q, D, torch.arange(10) * 32) for q in Q])
            per_token = 1e-3 if precision == "tf32" else DIM * 2.0**-24 + 4e-6
            if tuning.interpreted() or dtype != torch.float32:
                per_token = DIM * 2.0**-24
            # unit vectors were assumed; these have norms up to 1.6
            tolerance = 3 * LQ * per_token

            kernels: list[Any] = [] if precision == "fp16x3" else [dense_kernel]
            fast = not tuning.interpreted() and dense_fast_kernel.supported(dtype, DIM)
            if fast and (dtype != torch.float32 or precision != "ieee"):
                kernels.append(dense_fast_kernel)

            def run(
                D: Tensor,
                wanted: Tensor,
                size: int,
                lengths: Tensor | None = None,
                offsets: Tensor | None = None,
                pids: Tensor | None = None,
                count: Tensor | None = None,
            ) -> None:
                for kernel in kernels:  # noqa: B023
                    out = torch.full((NQ, size), math.nan, device=DEVICE)  # noqa: B023
                    kernel.dense_maxsim(Q.to(DEVICE), D, lengths, offsets, pids, out, count, precision)  # noqa: B023
                    for got, w in zip(out, wanted):
                        check(got, w, tolerance)  # noqa: B023

            there, rows = D.to(DEVICE), full.to(DEVICE)
            layouts = [
                partial(
                    run, there, want[:, scored], len(PIDS) if pids is not None else N,
                    offsets=offsets.to(DEVICE), pids=pids, count=count,
                )
                for pids, count, scored in lists(N)
            ]  # fmt: skip
            layouts += [
                partial(run, padded.to(DEVICE), want, N, lengths=int32(*LENGTHS)),
                partial(run, rows, want_full, 9),
                partial(run, rows, want_full[:, :5], 9, count=int32(5)),
            ]
            for layout in some(layouts, DIM, LQ):
                layout()


def dense_ring() -> None:
    arch = tuning.arch(torch.device(DEVICE))
    dtypes = (torch.float16, torch.bfloat16)
    wide = itertools.product(dtypes, (32, 37), (512, 768, 1024), (1, 7, 32))
    whole = itertools.product(dtypes, (128, 256), (128,), (7, 32, 1))
    for i, (dtype, ND, DIM, LQ) in enumerate([*wide, *whole]):
        if i % 2 or not tuning.dense_is_ring(arch, dtype, DIM, 1, LQ, 9, ND):
            continue
        g = torch.Generator().manual_seed(i)
        Q = torch.randn(1, LQ, DIM, generator=g).div(DIM**0.5).to(dtype)
        D = torch.randn(9, ND, DIM, generator=g).div(DIM**0.5).to(dtype)
        want = reference.maxsim(Q[0], D.view(-1, DIM), torch.arange(10) * ND)
        for count in (None, int32(5)):
            out = torch.full((1, 9), math.nan, device=DEVICE)
            dense_ring_kernel.dense_maxsim(Q.to(DEVICE), D.to(DEVICE), out, count)
            # unit vectors were assumed; these have norms up to 1.6
            check(out[0], want if count is None else want[:5], 3 * LQ * DIM * 2.0**-24)


def pq() -> None:
    combinations = [(8, 64), (16, 96), (16, 128), (32, 128), (64, 128), (8, 384), (32, 384)]
    for i, (M, DIM) in enumerate(combinations):
        sizes = [(1, LQS[i % 5]), (3, LQS[(i + 2) % 5]), (5, 7)]
        for NQ, LQ in sizes if (M, DIM) == (16, 128) else sizes[i % 3 :][:1]:
            Q, codes, codebook, offsets = make_pq("cpu", NQ, LQ, DIM, M, lengths=LENGTHS)
            want = torch.stack([reference.pq_maxsim(q, codes, codebook, offsets) for q in Q])
            tolerance = 6 * LQ**0.5 * 2.0**-11 / (3 * DIM) ** 0.5 + 1e-5
            kernels: list[Any] = [pq_kernel]
            if tuning.pq_is_fast(tuning.arch(torch.device(DEVICE)), M, DIM):
                kernels.append(pq_fast_kernel)
            there = tuple(x.to(DEVICE) for x in (Q, codes, codebook, offsets))
            for kernel, (pids, count, scored) in itertools.product(kernels, some(lists(len(LENGTHS)), DIM, LQ)):
                size = len(PIDS) if pids is not None else len(LENGTHS)
                out = torch.full((NQ, size), math.nan, device=DEVICE)
                kernel.pq_maxsim(*there, pids, out, count)
                for got, w in zip(out, want):
                    check(got, w[scored], tolerance)


def decompression() -> None:
    for nbits, DIM in ((1, 128), (2, 128), (4, 128), (8, 128), (1, 64), (2, 96), (4, 384), (8, 96)):
        host, c = moved(DIM, 1, nbits)
        parts = (c.codes, c.residuals, c.centroids, c.bucket_weights, nbits)
        raw = reference.decode_residuals(host.residuals, nbits, host.bucket_weights, torch.float64)
        norms = (host.centroids[host.codes.long()].double() + raw).norm(dim=-1)
        inverse = norms_kernel.inverse_norms(c.codes, c.residuals, c.centroids, c.bucket_weights, nbits)
        assert float((inverse.cpu() * norms - 1).abs().max()) < DIM * 2.0**-24
        want = reference.decompress(*host.raw[:5])
        rows = torch.empty(len(want), DIM, dtype=torch.float16, device=DEVICE)
        decompress_kernel.decompress(*parts, rows)
        close = 2.0**-11 + DIM * 2.0**-24
        assert float((rows.cpu().double() - want).abs().max()) <= close
        for count in (None, int32(COUNT), int32(0)):
            out = torch.full((len(PIDS), 300, DIM), math.nan, dtype=torch.float16, device=DEVICE)
            lengths, left = torch.zeros_like(int32(*PIDS)), int32(-1)
            decompress_kernel.decompress_passages(*parts, c.offsets, int32(*PIDS), count, 0, out, lengths, left)
            assert int(left) == (len(PIDS) if count is None else int(count))
            for i, pid in enumerate(PIDS[: int(left)]):
                first, length = int(host.offsets[pid]), LENGTHS[pid]
                assert int(lengths[i]) == length
                embeddings = out[i, :length].cpu().double()
                assert length == 0 or float((embeddings - want[first : first + length]).abs().max()) <= close
                assert out[i, length:].isnan().all()


def candidate_lists() -> None:
    g = torch.Generator().manual_seed(0)
    for N, allowed in itertools.product((1, 31, 32, 33, 4097), (False, True)):
        lists_ = [torch.randperm(N, generator=g)[: n % (N + 1)].sort().values.int() for n in (0, 1, 700, 17, 513, 3)]
        ivf_offsets = torch.tensor([0, *(len(x) for x in lists_)]).cumsum(0)
        words = candidates_kernel.bitmap_words(N)
        bits = torch.zeros(words, dtype=torch.int32, device=DEVICE)
        allow = torch.full_like(bits, 0x55555555) if allowed else None
        counts = torch.empty(candidates_kernel.count_blocks(N), dtype=torch.int32, device=DEVICE)
        pids, total = torch.full((N,), -1, dtype=torch.int32, device=DEVICE), int32(-1)
        cells = [5, 0, 2, 2, 1, 4, 5]
        candidates_kernel.mark_lists(
            int32(*cells).view(7, 1), torch.cat(lists_).to(DEVICE), ivf_offsets.to(DEVICE), bits
        )
        candidates_kernel.gather_marked(bits, counts, pids, total, allow)
        want = torch.cat([lists_[cell] for cell in cells]).unique()
        want = want[want % 2 == 0] if allowed else want
        assert int(total) == len(want)
        assert torch.equal(pids[: len(want)].cpu(), want)
        assert not bits.cpu().any()


def selections() -> None:
    work = select_kernel.select_workspace(torch.device(DEVICE))
    g = torch.Generator().manual_seed(0)
    for cap, n, m in ((1, 1, 1), (1, 0, 1), (40, 7, 40), (2048, 2048, 2047), (5000, 4097, 33), (5000, 300, 500)):
        scores = (torch.randn(cap, generator=g) * 5).round() / 4
        pids = torch.arange(cap, dtype=torch.int32) * 3
        order = torch.sort(scores[:n] + 0.0, descending=True, stable=True).indices[:m]
        for listed in (True, False):
            given, out_pids = pids if listed else torch.arange(cap).int(), int32(*[-7] * m)
            out_scores, out_count = torch.full((m,), math.nan, device=DEVICE), int32(-1)
            there = given.to(DEVICE) if listed else None
            select_kernel.select_top(scores.to(DEVICE), there, int32(n), m, out_pids, out_scores, out_count, work)
            assert int(out_count) == min(m, n)
            assert torch.equal(out_pids[: min(m, n)].cpu(), given[order.sort().values])
            assert (out_pids[min(m, n) :] == -7).all()
            if cap <= rank_kernel.LIMIT and m <= cap:
                for count in (int32(n), None) if n == cap else (int32(n),):
                    packed = int32(*[-9] * (1 + 2 * m))
                    rank_kernel.rank(scores.to(DEVICE), there, count, m, packed)
                    assert int(packed[0]) == min(m, n)
                    assert torch.equal(packed[1 : 1 + min(m, n)].cpu(), given[order])
    for pids_, live, flag in (([0, 9, 5], 3, 0), ([0, 10, 5], 3, 2), ([-1, 3, 12, 5], 4, 3), ([7] * 3001, 2, 0)):
        out, found = torch.full_like(int32(*pids_), -5), int32(77)
        pids_kernel.clamp_pids(int32(*pids_), int32(live), 10, out, found)
        assert out.tolist() == [p if i < live and 0 <= p < 10 else 0 for i, p in enumerate(pids_)]
        assert int(found) == flag


def merges() -> None:
    """Three shards of two queries, by counting and by sorting, against the merge in torch."""
    g = torch.Generator().manual_seed(0)
    for caps, counts in (([33, 7, 60], [33, 0, 31]), ([1, 1, 1], [0, 1, 1]), ([3000, 2900, 2800], [3000, 2900, 7])):
        rows: list[torch.Tensor] = []
        table, parts = [], []
        for s, (cap, n) in enumerate(zip(caps, counts)):
            table.append([sum(map(len, rows)), 1 + 4 * cap, cap, s * 10_000])
            pids, scores = torch.randperm(cap, generator=g).int(), torch.randn(3, cap, generator=g).round() / 4
            rows += [torch.cat([torch.tensor([n]).int(), pids, scores.flatten().view(torch.int32)])] * 2
            first, second, exact = scores[:, :n]
            parts.append(Survivors(pids[:n] + s * 10_000, exact, first, second))
            a, b = ((column, -pids) for column in scores[:2])
            ahead = [(c[:n] > c[:n, None]) | ((c[:n] == c[:n, None]) & (t[:n] > t[:n, None])) for c, t in (a, b)]
            want_flags = torch.zeros(cap).bool()
            want_flags[:n] = (ahead[0] & ahead[1]).sum(1) < 16
            flags = merge_kernel.plausible(scores[0].to(DEVICE), scores[1].to(DEVICE), pids.to(DEVICE), int32(n), 16)
            assert torch.equal(flags.cpu().bool(), want_flags)
        want = merge(parts, SearchParams(k=10, ndocs=64))
        packed = merge_kernel.merge(
            torch.cat(rows).to(DEVICE), torch.tensor(table, device=DEVICE), max(caps), [64, 16, 10], 2
        ).cpu()
        for row in packed:
            n = int(row[0])
            assert torch.equal(row[1 : 1 + n], want[0])
            assert torch.equal(row[1 + (len(row) - 1) // 2 :][:n].view(torch.float32), want[1])


def dispatch() -> None:
    """Controls, of no kernel of the package: see sanitize_dispatch."""
    if tuning.interpreted() or tuning.arch(torch.device(DEVICE)) != 90:
        return
    first = torch.arange(132)
    last = first + first % 4  # none in every fourth program
    want = 3 * last.view(-1, 1, 1) - 3 + torch.arange(3).view(3, 1) + torch.arange(128)
    want[last == first] = -1
    shares = torch.stack([first, last], 1).int().to(DEVICE)
    for barriers in (False, True):
        out = torch.full(want.shape, -1, dtype=torch.int32, device=DEVICE)
        sanitize_dispatch.dispatch(shares, out, barriers)
        assert torch.equal(out.cpu().long(), want)
    sanitize_dispatch.race(shares[:8], torch.zeros(8, 128, dtype=torch.int64, device=DEVICE))


PARTS: dict[str, Callable[[], None]] = {
    "residual1": lambda: residual(1),
    "residual2": lambda: residual(2),
    "residual4": lambda: residual(4),
    "residual8": lambda: residual(8),
    "fp32_1": lambda: residual_fp32(1),
    "fp32_2": lambda: residual_fp32(2),
    "fp32_4": lambda: residual_fp32(4),
    "fp32_8": lambda: residual_fp32(8),
    "batch1": lambda: residual_batch(1),
    "batch2": lambda: residual_batch(2),
    "batch4": lambda: residual_batch(4),
    "centroids": centroids,
    "dense_fp16": lambda: dense(torch.float16, ("tf32x3",)),
    "dense_bf16": lambda: dense(torch.bfloat16, ("tf32x3",)),
    "dense_ring": dense_ring,
    "dense_ieee": lambda: dense(torch.float32, ("ieee",)),
    "dense_tf32": lambda: dense(torch.float32, ("tf32",)),
    "dense_tf32x3": lambda: dense(torch.float32, ("tf32x3",)),
    "dense_fp16x3": lambda: dense(torch.float32, ("fp16x3",)),
    "pq": pq,
    "decompression": decompression,
    "candidates": candidate_lists,
    "selections": selections,
    "merges": merges,
    "dispatch": dispatch,
}


def main(parts: list[str]) -> None:
    launches: Counter[str] = Counter()
    launcher = KernelInterface.__getitem__

    def counted(self: Any, grid: Any) -> Any:
        launches[f"{self.fn.__module__.rsplit('.')[-1]}.{self.fn.__name__}"] += 1
        return launcher(self, grid)

    KernelInterface.__getitem__ = counted
    try:
        for part in parts:
            PARTS[part]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    finally:
        KernelInterface.__getitem__ = launcher
    print(json.dumps(launches))


if __name__ == "__main__":
    main(sys.argv[1:] or list(PARTS))
