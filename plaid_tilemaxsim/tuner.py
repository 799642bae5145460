"""The offline tuner behind ``plaid-tilemaxsim tune``: block choices by measurement, for the GPU of this machine.

For every kernel and class of shapes it starts from the choice of :mod:`.ops.tuning` and changes one field at a time,
keeping what is faster. Every candidate scores against the fp64 oracle before it is timed; the one that is kept is timed
once more beside the default, and has to win by 1%. Data are synthetic, with passage lengths like MS MARCO's (mean 68)
and far larger than the L2 cache.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import normalize
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from .ops import api, norms_kernel, reference, residual_batch_kernel, tuned, tuning

# What a candidate may fail with: too much shared memory or too many registers, or a shape its layout does not know.
REFUSED = (OutOfResources, CompilationError, PTXASError)
GAIN = 0.99


@dataclass(frozen=True)
class Size:
    """How much a case scores."""

    tokens: int = 1 << 25  # of 128 bytes; fewer where a token has more
    centroids: int = 1 << 18
    sample: int = 1000  # passages or centroids compared with the oracle


@dataclass
class Case:
    """One kernel on one class of shapes. ``run`` writes or returns scores, ``error`` compares them with the oracle."""

    kernel: str
    shape: dict[str, Any]
    run: Callable[[], Tensor]
    sample: Tensor
    want: Tensor
    tolerance: float

    def correct(self) -> bool:
        """Whether scores are the oracle's, and would not be in another order."""
        got = self.run()[self.sample].double()
        finite = ~self.want.isinf()
        if not torch.equal(got.isinf(), ~finite):
            return False
        got, want = got[finite], self.want[finite]
        worst, shuffled = (float((got - w).abs().max()) for w in (want, want.roll(1, 0)))
        return worst <= self.tolerance < shuffled


class Data:
    """Synthetic passages on a device; a seed of their own for every tensor."""

    def __init__(self, device: torch.device, size: Size) -> None:
        self.device, self.size = device, size
        self.generator = torch.Generator(device).manual_seed(0)

    def unit(self, *shape: int) -> Tensor:
        return normalize(torch.randn(*shape, device=self.device, generator=self.generator), dim=-1)

    def integers(self, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randint(high, shape, device=self.device, generator=self.generator, dtype=dtype)

    def offsets(self, token_bytes: int) -> Tensor:
        """Token offsets of passages with lognormal lengths (mean 68), int64 ``[N + 1]``."""
        passages = max(2, self.size.tokens * 128 // max(128, token_bytes) // 68)
        lengths = torch.randn(passages, device=self.device, generator=self.generator).mul(0.4).add(4.14).exp().long()
        return torch.cat([lengths.new_zeros(1), lengths.clamp(1, 180).cumsum(0)])

    def spread(self, n: int) -> Tensor:
        """Numbers of a sample of n things."""
        return torch.linspace(0, n - 1, min(n, self.size.sample), device=self.device).long()

    def scores(self, LQ: int, DIM: int) -> tuple[Tensor, Tensor, api.CentroidScores]:
        """Query, centroids and their scores."""
        Q, centroids = self.unit(LQ, DIM), self.unit(self.size.centroids, DIM).half()
        return Q, centroids, api.centroid_scores(Q, centroids, cmax=1.01, impl="triton")

    def compressed(self, centroids: Tensor, nbits: int) -> tuple[Tensor, Tensor, Tensor, float, float, Tensor, Tensor]:
        """Codes, residuals, inverse norms (uint16, lowest, step), bucket weights, offsets."""
        C, DIM = centroids.shape
        offsets = self.offsets(DIM * nbits // 8)
        codes = self.integers(C, (int(offsets[-1]),), torch.int32)
        residuals = self.integers(256, (len(codes), DIM * nbits // 8), torch.uint8)
        levels = (torch.arange(2**nbits, device=self.device) + 0.5) / 2**nbits
        weights = (torch.special.ndtri(levels) * 0.4 / DIM**0.5 + 3e-4).float()
        inverse = norms_kernel.inverse_norms(codes, residuals, centroids, weights, nbits)
        lo, step = float(inverse.min()), float(inverse.max() - inverse.min()) / 65535
        stored = inverse.sub_(lo).div_(step).round_().to(torch.int32).to(torch.uint16)
        return codes, residuals, stored, lo, step, weights, offsets


def dense(
    data: Data,
    LQ: int,
    DIM: int,
    dtype: torch.dtype = torch.float16,
    fixed: int | None = None,
    precision: str = "tf32x3",
) -> Case:
    Q = data.unit(1, LQ, DIM).to(dtype)
    offsets = data.offsets(DIM * dtype.itemsize)
    if fixed is not None:
        offsets = torch.arange(int(offsets[-1]) // fixed + 1, device=data.device) * fixed
    D = data.unit(int(offsets[-1]), DIM).to(dtype)
    n = len(offsets) - 1
    out = torch.empty(1, n, device=data.device)
    sample = data.spread(n)
    # additions in fp32; products by TF32's 10 bits, or by three products of twice as many
    per_token = 5e-4 if precision == "tf32" else DIM * 2.0**-24 + 4e-6 * (precision != "ieee")

    def run() -> Tensor:
        out.fill_(math.nan)
        packed, given = (D, offsets) if fixed is None else (D.view(n, fixed, DIM), None)
        return api.dense_maxsim(Q, packed, offsets=given, out=out, precision=precision, impl="triton")[0]

    want = reference.maxsim(Q[0], D, offsets, sample)
    if tuning.dense_is_fast(tuning.arch(data.device), dtype, precision, DIM, LQ, fixed is not None):
        kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, precision)
        shape: dict[str, Any] = {"kind": kind, "words": DIM * dtype.itemsize // 4, "fixed": fixed is not None}
        return Case("dense_fast", shape, run, sample, want, LQ * per_token)
    shape = {
        "itemsize": dtype.itemsize, "DIM": DIM, "LQ": LQ, "NQ": 1, "fixed_length": fixed, "precision": precision,
    }  # fmt: skip
    return Case("dense", shape, run, sample, want, LQ * per_token)


def centroid_scores(data: Data, LQ: int, DIM: int) -> Case:
    Q, centroids, cs = data.scores(LQ, DIM)
    LQP = cs.table.size(1)
    sample = data.spread(len(centroids))

    def run() -> Tensor:
        # the table of the run before has gone back to the allocator, and this one may be the same memory
        torch.full_like(cs.table, -1)
        scores = api.centroid_scores(Q, centroids, 0.4, cmax=1.01, ncells=4, impl="triton")
        return scores.table[:, :LQ]

    steps = centroids[sample].double() @ Q.double().T / cs.scale.double()
    # half a step, and what fp32 sums and the fp16 parts of Q leave
    return Case("centroid_scores", {"LQP": LQP, "DIM": DIM}, run, sample, steps, 0.51 + 2e-6 / float(cs.scale))


def centroid(data: Data, LQ: int) -> Case:
    DIM = 128
    Q, centroids, cs = data.scores(LQ, DIM)
    offsets = data.offsets(4)
    codes = data.integers(len(centroids), (int(offsets[-1]),), torch.int32)
    out = torch.empty(len(offsets) - 1, device=data.device)
    sample = data.spread(len(out))

    def run() -> Tensor:
        out.fill_(math.nan)
        return api.centroid_maxsim(cs, codes, offsets, out=out, impl="triton")

    want = reference.centroid_maxsim(Q, codes, centroids, offsets, sample)
    tolerance = LQ * (0.51 * float(cs.scale) + 2e-6)
    return Case("centroid", {"LQP": cs.table.size(1)}, run, sample, want, tolerance)


def centroid_kept(data: Data, LQ: int) -> Case:
    """A list of passages over 2% of the centroids, as mode plaid prunes."""
    DIM = 128
    Q, centroids = data.unit(LQ, DIM), data.unit(data.size.centroids, DIM).half()
    best = (centroids.double() @ Q.double().T).amax(1).sort(descending=True).values
    threshold = float(best[len(best) // 50 - 1 : len(best) // 50 + 1].mean())  # between two, whatever rounds
    cs = api.centroid_scores(Q, centroids, threshold, cmax=1.01, impl="triton")
    offsets = data.offsets(4)
    codes = data.integers(len(centroids), (int(offsets[-1]),), torch.int32)
    pids = torch.arange(0, len(offsets) - 1, 2, dtype=torch.int32, device=data.device)
    out = torch.empty(len(pids), device=data.device)
    sample = data.spread(len(out))

    def run() -> Tensor:
        out.fill_(math.nan)
        return api.centroid_maxsim(cs, codes, offsets, pids, True, out, impl="triton")

    want = reference.centroid_maxsim(Q, codes, centroids, offsets, pids[sample], threshold)
    tolerance = LQ * (0.51 * float(cs.scale) + 2e-6)
    return Case("centroid_kept", {"LQP": cs.table.size(1)}, run, sample, want, tolerance)


def residual(data: Data, LQ: int, DIM: int, nbits: int) -> Case:
    Q, centroids, cs = data.scores(LQ, DIM)
    codes, residuals, stored, lo, step, weights, offsets = data.compressed(centroids, nbits)
    out = torch.empty(len(offsets) - 1, device=data.device)
    sample = data.spread(len(out))
    fast = tuning.residual_is_fast(tuning.arch(data.device), nbits, DIM)

    def run() -> Tensor:
        out.fill_(math.nan)
        return api.residual_maxsim(
            Q, cs, codes, residuals, stored, lo, step, weights, nbits, offsets, out=out, impl="triton"
        )

    # api.residual_maxsim: table and fp16 roundings with random signs, four standard deviations of a sum over LQ
    per_token = float(cs.scale) / 12**0.5 + (2 / 3) ** 0.5 * 2.0**-11 * float(weights.abs().max())
    tolerance = 4 * LQ**0.5 * per_token * (lo + 65535 * step) + 1e-5
    shape = {"nbits": nbits, "DIM": DIM} | ({"LQ": LQ} if fast else {"LQP": cs.table.size(1)})
    want = reference.residual_maxsim(Q, codes, residuals, centroids, weights, nbits, offsets, sample)
    return Case("residual" if fast else "residual_portable", shape, run, sample, want, tolerance)


def residual_fp32(data: Data, LQ: int, DIM: int, nbits: int) -> Case:
    """As few passages as a search leaves for it, spread over the index."""
    Q, centroids = data.unit(LQ, DIM), data.unit(data.size.centroids, DIM).half()
    codes, residuals, _, _, _, weights, offsets = data.compressed(centroids, nbits)
    pids = data.spread(len(offsets) - 1).int()
    out = torch.empty(len(pids), device=data.device)

    def run() -> Tensor:
        out.fill_(math.nan)
        return api.residual_maxsim_fp32(
            Q, centroids, codes, residuals, weights, nbits, offsets, pids, out, impl="triton"
        )

    want = reference.residual_maxsim(Q, codes, residuals, centroids, weights, nbits, offsets, pids)
    # api.residual_maxsim_fp32: a tensor core truncates each of 3 DIM / 16 additions, to a third of 2**-23 on average
    tolerance = LQ * (DIM / 8 + 16) * 2.0**-24
    return Case("residual_fp32", {"DIM": DIM, "LQ": LQ}, run, data.spread(len(pids)), want, tolerance)


def residual_batch(data: Data, NQ: int, LQ: int, DIM: int, nbits: int) -> Case:
    Q, centroids = data.unit(NQ, LQ, DIM), data.unit(data.size.centroids, DIM).half()
    codes, residuals, stored, lo, step, weights, offsets = data.compressed(centroids, nbits)
    out = torch.empty(NQ, len(offsets) - 1, device=data.device)
    sample = data.spread(out.size(1))

    def run() -> Tensor:
        out.fill_(math.nan)
        arguments = (Q, centroids, codes, residuals, stored, lo, step, weights, nbits, offsets)
        if tuning.residual_batch_is_fast(tuning.arch(data.device), nbits, DIM):
            # by name: the API has another kernel for a whole index on sm_90
            residual_batch_kernel.residual_maxsim(*arguments, None, out, None)
        else:
            api.residual_maxsim_batch(*arguments, out=out, impl="triton")
        return out.T

    raw = codes, residuals, centroids, weights, nbits, offsets
    want = torch.stack([reference.residual_maxsim(q, *raw, sample) for q in Q], 1)
    # query tokens, embeddings and weights rounded to fp16: six standard deviations of a sum over LQ
    tolerance = 6 * LQ**0.5 * 2.0**-11 / DIM**0.5 + 1e-5
    return Case("residual_batch", {"nbits": nbits, "DIM": DIM}, run, sample, want, tolerance)


def pq(data: Data, NQ: int, LQ: int, DIM: int, M: int) -> Case:
    Q = data.unit(NQ, LQ, DIM)
    codebook = (torch.randn(M, 256, DIM // M, device=data.device, generator=data.generator) / DIM**0.5).half()
    offsets = data.offsets(M)
    codes = data.integers(256, (int(offsets[-1]), M), torch.uint8)
    out = torch.empty(NQ, len(offsets) - 1, device=data.device)
    sample = data.spread(out.size(1))

    def run() -> Tensor:
        out.fill_(math.nan)
        return api.pq_maxsim(Q, codes, codebook, offsets, out=out, impl="triton").T

    want = torch.stack([reference.pq_maxsim(q, codes, codebook, offsets, sample) for q in Q], 1)
    # api.pq_maxsim: Q rounded to fp16, six standard deviations of a sum over LQ
    tolerance = 6 * LQ**0.5 * 2.0**-11 / (3 * DIM) ** 0.5 + 1e-5
    # blocks of 32 query tokens
    return Case("pq", {"DIM": DIM, "blocks": NQ * -(-LQ // 32)}, run, sample, want, tolerance)


def cases(data: Data, quick: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    """(kernel, how to make the case): what a search with LQ = 32 and DIM = 128 runs, then the other shapes."""
    arch = tuning.arch(data.device)

    def residuals(LQ: int, DIM: int, nbits: int) -> tuple[str, Callable[[], Case]]:
        fast = tuning.residual_is_fast(arch, nbits, DIM)
        return "residual" if fast else "residual_portable", partial(residual, data, LQ, DIM, nbits)

    def dense_case(
        LQ: int,
        DIM: int,
        dtype: torch.dtype = torch.float16,
        fixed: int | None = None,
        precision: str = "tf32x3",
    ) -> tuple[str, Callable[[], Case]]:
        fast = tuning.dense_is_fast(arch, dtype, precision, DIM, LQ, fixed is not None)
        return "dense_fast" if fast else "dense", partial(dense, data, LQ, DIM, dtype, fixed, precision)

    yield "centroid_scores", partial(centroid_scores, data, 32, 128)
    yield "centroid", partial(centroid, data, 32)
    if tuning.centroid_kept_is_fast(arch):
        yield "centroid_kept", partial(centroid_kept, data, 32)
    for nbits in (2, 1, 4):
        yield residuals(32, 128, nbits)
    yield "residual_fp32", partial(residual_fp32, data, 32, 128, 2)
    yield dense_case(32, 128)
    yield dense_case(32, 128, fixed=128)
    if tuning.pq_is_fast(arch, 16, 128):
        yield "pq", partial(pq, data, 1, 32, 128, 16)
        yield "pq", partial(pq, data, 8, 32, 128, 16)
    for nbits in (2, 1, 4):
        if tuning.residual_batch_is_fast(arch, nbits, 128):
            yield "residual_batch", partial(residual_batch, data, 8, 32, 128, nbits)
    if quick:
        return
    for DIM in (96, 384, 768):
        yield "centroid_scores", partial(centroid_scores, data, 32, DIM)
        yield residuals(32, DIM, 2)
    for LQ in (16, 64, 128):
        yield "centroid_scores", partial(centroid_scores, data, LQ, 128)
        yield "centroid", partial(centroid, data, LQ)
        if tuning.centroid_kept_is_fast(arch):
            yield "centroid_kept", partial(centroid_kept, data, LQ)
    for LQ in (64, 128):
        yield dense_case(LQ, 128)
    yield residuals(32, 128, 8)
    for LQ, DIM in ((16, 128), (64, 128), (32, 96), (32, 384), (32, 768)):
        yield "residual_fp32", partial(residual_fp32, data, LQ, DIM, 2)
    for DIM in (64, 256, 384, 768):
        yield dense_case(32, DIM)
        if not tuning.dense_is_ring(arch, torch.float16, DIM, 1, 32, 1, 128):
            yield dense_case(32, DIM, fixed=128)
    for precision in ("tf32x3", "ieee", "tf32"):
        yield dense_case(32, 128, torch.float32, None, precision)


def milliseconds(run: Callable[[], Any], repeats: int = 9) -> float:
    """Median time of ``run`` on the current CUDA device."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def tune_case(
    case: Case, arch: int, measure: Callable[[Callable[[], Any]], float], passes: int = 2
) -> tuple[dict[str, Any], dict[str, int]]:
    """An entry of the file, and how many candidates were timed, refused by the compiler, or wrong.

    Raises RuntimeError when the default itself is refused or wrong.
    """
    marked = tuned.TUNABLE[case.kernel]
    shape = tuned.shape_class(case.shape)
    allowed = marked.allowed(marked.choose(arch, **shape))
    default = {name: values[0] for name, values in allowed.items()}
    counts = {"timed": 0, "refused": 0, "wrong": 0}
    known: dict[tuple[Any, ...], float] = {}

    def attempt(choice: dict[str, Any]) -> float:
        key = tuple(choice.values())
        if key not in known:
            known[key] = math.inf
            with tuned.trying(case.kernel, arch, shape, choice):
                try:
                    correct = case.correct()
                except REFUSED:
                    counts["refused"] += 1
                    return math.inf
                if not correct:
                    counts["wrong"] += 1
                    return math.inf
                counts["timed"] += 1
                known[key] = measure(case.run)
        return known[key]

    best, best_ms = default, attempt(default)
    if best_ms == math.inf:
        raise RuntimeError(f"{case.kernel} {shape}: the default choice {default} does not give the oracle's scores")
    for _ in range(passes):
        before = best
        for name, values in allowed.items():
            for value in values:
                ms = attempt(best | {name: value})
                if ms < best_ms:
                    best, best_ms = best | {name: value}, ms
        if best == before:
            break
    with tuned.trying(case.kernel, arch, shape, default):
        default_ms = measure(case.run)
    with tuned.trying(case.kernel, arch, shape, best):
        best_ms = measure(case.run)
    if best_ms > GAIN * default_ms:
        best, best_ms = default, default_ms
    entry = {"kernel": case.kernel, "shape": shape, "choice": best, "ms": best_ms, "default_ms": default_ms}
    return entry, counts


def tune(
    device: torch.device,
    only: set[str] | None = None,
    quick: bool = False,
    size: Size | None = None,
    measure: Callable[[Callable[[], Any]], float] | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """What a file holds. ``only``: these kernels; ``quick``: one pass over the shapes of an ordinary search.

    Raises ValueError for unknown kernels, RuntimeError when a kernel's default choice scores wrongly.
    """
    if device.type != "cuda" and not tuning.interpreted():
        raise ValueError(f"tune: expected a CUDA device, got {device}")
    unknown = (only or set()) - set(tuned.TUNABLE)
    if unknown:
        raise ValueError(f"only: expected names from {sorted(tuned.TUNABLE)}, got {sorted(unknown)[0]!r}")
    arch = tuning.arch(device)
    tuned.unload()  # the defaults are the functions', not an earlier file's
    entries = []
    for kernel, make in cases(Data(device, size or Size()), quick):
        if only and kernel not in only:
            continue
        case = make()
        entry, counts = tune_case(case, arch, measure or milliseconds, passes=1 if quick else 2)
        entries.append(entry)
        default = tuned.TUNABLE[kernel].choose(arch, **entry["shape"])
        changed = [f"{name}={value}" for name, value in entry["choice"].items() if value != getattr(default, name)]
        shape = " ".join(f"{name}={value}" for name, value in entry["shape"].items())
        tried = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        times = f"{entry['default_ms']:.4f} -> {entry['ms']:.4f} ms"
        report(f"{kernel} {shape}: {times} {' '.join(changed) or 'the default'} ({tried})")
        del case
    return {
        "version": tuned.VERSION,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter",
        "arch": arch,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "entries": entries,
    }


def write(path: str | os.PathLike[str], table: dict[str, Any]) -> None:
    """Writes a file that :func:`.tuning.load` reads; a reader never sees half of it."""
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
