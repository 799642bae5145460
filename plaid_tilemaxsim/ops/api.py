"""The operations' one boundary: check every argument, choose the implementation.

``impl`` is one of
    "triton"     the GPU kernels (on CPU tensors only under TRITON_INTERPRET=1, which is for tests)
    "torch"      :mod:`.cpu`, for CPU tensors
    "reference"  :mod:`.eager`, the kernels' formulas in readable torch, on any device
    "auto"       "triton" for CUDA tensors, "torch" for CPU tensors

Common rules. Scores are fp32, a sum over query tokens of maxima over a passage's tokens, not clamped at
zero; a passage without tokens, or without tokens that pass the threshold, scores -inf. ``pids`` (int32 or
int64 ``[n]``) are passage numbers below N, in any order, also twice. ``count`` (int32 ``[1]`` on the device) makes
only the first ``count`` pids be scored (none below 0, all past n) and leaves the rest of ``out`` as it was. ``out`` is
written to, nothing else; no gradients. Nothing here waits for the device, except where a docstring says so. Sizes that
change with the query are run-time arguments of the kernels.

Shapes, types, layouts, devices and numbers are always checked. What tensors hold is looked at on the CPU alone, where
that is cheap: Q finite, the first ``count`` pids inside, ``lengths`` in their range, the ends of ``offsets``. On a GPU
that would wait for the device: there non-finite queries give meaningless scores, and pids, lengths and offsets out of
range are undefined behaviour; the engine checks pids itself. Codes in [0, C) and ascending offsets are the index's
promise (checked when it is read) and never looked at here. Errors come before anything is written: ValueError, or
IndexError for a pid outside, saying name, expected and got.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

IMPLS = ("auto", "triton", "torch", "reference")
PRECISIONS = ("tf32x3", "fp16x3", "ieee", "tf32")
MAX_LQ = 1024
MAX_DIM = 1024


@dataclass(frozen=True)
class CentroidScores:
    """Scores of every centroid with every token of one query, as the MaxSim operations read them.

    table      int16 ``[C + 1, LQP]``: row c < C is ``round(score / scale)``, LQP is LQ padded to a power of two
               >= 16 (columns past LQ hold unspecified values), row C is -32768 ("no token"); on CPU and from
               impl="reference" fp32 ``[C, LQ]``
    scale      fp32 ``[1]`` on the device: score = table * scale (1 for fp32 tables)
    LQ         number of query tokens
    keep       uint8 ``[C]``: 1 where the largest fp32 score over the LQ tokens is >= threshold; None without one
    keep_bits  int32 ``[ceil(C / 32)]``: the same as bit c % 32 of word c // 32; None on CPU
    cells      int64 ``[nblocks, NCELLS, LQP]`` when asked for: for every block of centroids and query token the
               NCELLS (>= ncells) largest keys in descending order, key = ordered(score) << 32 | 0x7fffffff - c with
               ``ordered`` the order-preserving int32 image of the fp32 score; fillers are the smallest int64. The
               ncells largest keys over all blocks are the ncells best centroids, ties to the lower id
    """

    table: Tensor
    scale: Tensor
    LQ: int
    keep: Tensor | None = None
    keep_bits: Tensor | None = None
    cells: Tensor | None = None


def padded_query_length(LQ: int) -> int:
    """Columns of a table for LQ query tokens: the next power of two, at least 16."""
    return max(16, 1 << (LQ - 1).bit_length())


@torch.no_grad()
def centroid_scores(
    Q: Tensor,
    centroids: Tensor,
    threshold: float | None = None,
    *,
    cmax: float | None = None,
    ncells: int | None = None,
    impl: str = "auto",
) -> CentroidScores:
    """Scores of ``centroids [C, DIM]`` (fp16; fp32 on CPU) with ``Q [LQ, DIM]`` fp32, LQ and DIM <= 1024.

    The kernel splits Q in two fp16 parts and accumulates in fp32, so |score - exact| <= 2e-6 * |q| * |c|;
    the table then rounds to half a step of ``scale = max_i |q_i| * cmax / 32767`` (1.5e-5 for unit
    vectors), while ``keep`` and ``cells`` use the unrounded fp32 scores. Finite values with |q| < 65504 are
    required. ``cmax``: largest centroid norm; None computes it, which waits for the device. ``threshold``:
    also fill ``keep``. ``ncells`` (1..128): also fill ``cells`` (kernel only; elsewhere ``cells`` stays
    None).
    """
    _check("Q", Q, (None, None), (torch.float32,))
    _check("centroids", centroids, (None, Q.size(1)), (torch.float16, torch.float32), Q.device)
    _query_limits(Q)
    _require("centroids", 1 <= centroids.size(0) < 2**31, "1..2**31 - 1 rows", centroids.size(0))
    _require("ncells", ncells is None or (type(ncells) is int and 1 <= ncells <= 128), "None or 1..128", ncells)
    _require("threshold", threshold is None or _finite(threshold), "None or finite", threshold)
    _require("cmax", cmax is None or (_finite(cmax) and cmax >= 0), "None or finite, >= 0", cmax)
    chosen = _choose(impl, Q)
    if chosen == "torch":
        from . import cpu

        return cpu.centroid_scores(Q, centroids, threshold)
    if chosen == "reference":
        from . import eager

        return eager.centroid_scores(Q, centroids, threshold)
    _require("centroids.dtype", centroids.dtype == torch.float16, "torch.float16", centroids.dtype)
    _require("DIM", Q.size(1) % 8 == 0, "a multiple of 8", Q.size(1))
    from . import centroid_scores_kernel

    return centroid_scores_kernel.centroid_scores(Q, centroids, threshold, cmax, ncells)


@torch.no_grad()
def centroid_maxsim(
    cs: CentroidScores,
    codes: Tensor,
    offsets: Tensor,
    pids: Tensor | None = None,
    use_keep: bool = False,
    out: Tensor | None = None,
    count: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Approximate MaxSim of passages from the centroid scores of their tokens; fp32 ``[n]``.

    ``codes`` int32 ``[T]``, ``offsets`` int64 ``[N + 1]`` token offsets, ``pids`` the passages (None: all N).
    ``use_keep`` leaves out tokens whose centroid is below the threshold of ``cs``. The kernel adds
    integers, so the result depends on the table alone, whatever the order (error: LQ half steps of
    ``cs.scale``).
    """
    device = _scores_device(cs)
    _check("codes", codes, (None,), (torch.int32,), device)
    _require("use_keep", not use_keep or cs.keep is not None, "centroid scores made with a threshold", "none")
    pids, out = _selection(offsets, pids, out, count, codes)
    chosen = _choose(impl, cs.table)
    _check_scores(cs, chosen, use_keep)
    if codes.size(0) == 0:
        return _all_empty(out, count)
    if chosen == "triton":
        from . import centroid_kernel, tuning

        fast = use_keep and tuning.centroid_kept_is_fast(tuning.arch(device))
        if fast:
            from . import centroid_kept_kernel

            centroid_kept_kernel.centroid_maxsim(cs, codes, offsets, pids, out, count)
        centroid_kernel.centroid_maxsim(cs, codes, offsets, pids, use_keep, out, count, unless_few=fast)
        return out
    n = _host_count(out.size(0), count)
    selected = None if pids is None else pids[:n]
    if chosen == "torch":
        from . import cpu

        out[:n] = cpu.centroid_maxsim(cs, codes, offsets, selected, use_keep)[:n]
    else:
        from . import eager

        out[:n] = eager.centroid_maxsim(cs, codes, offsets, selected, use_keep)[:n]
    return out


@torch.no_grad()
def residual_maxsim(
    Q: Tensor,
    cs: CentroidScores,
    codes: Tensor,
    residuals: Tensor,
    inv_norms: Tensor,
    inv_norm_lo: float,
    inv_norm_step: float,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None = None,
    out: Tensor | None = None,
    count: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Exact MaxSim of compressed passages; fp32 ``[n]``. Similarity of a query token and a token of a
    passage:

        (centroid_score[code] + <q, bucket_weights[residual]>) * inv_norm

    ``Q`` fp32 ``[LQ, DIM]`` made ``cs``; ``codes`` int32 ``[T]``; ``residuals`` uint8 ``[T, DIM * nbits /
    8]`` in ColBERT's bit order (for CUDA also pinned host memory; a view into other bytes must start at a
    multiple of 8); ``inv_norms`` uint16 or fp32 ``[T]``, whose value is ``inv_norm_lo + inv_norm_step *
    inv_norms``; ``bucket_weights`` fp32 ``[2**nbits]``; nbits 1, 2, 4 or 8; ``offsets`` int64 ``[N + 1]``
    token offsets; ``pids`` the passages (None: all N).
    Kernel error for unit query tokens, per query token: half a step of ``cs.scale``, and the roundings of q and w to
    fp16, each a relative 2**-11 of the products q_d w_d with random signs: 1.4e-5 (standard deviation) for weights of
    0.05, about 1e-4 over LQ = 32.
    """
    device = _scores_device(cs)
    _check("Q", Q, (cs.LQ, None), (torch.float32,), device)
    _query_limits(Q)
    DIM = Q.size(1)
    _compressed(DIM, codes, residuals, inv_norms, inv_norm_lo, inv_norm_step, bucket_weights, nbits, device)
    pids, out = _selection(offsets, pids, out, count, codes)
    chosen = _choose(impl, Q)
    _check_scores(cs, chosen)
    if codes.size(0) == 0:
        return _all_empty(out, count)
    inverse_norms = (inv_norms, float(inv_norm_lo), float(inv_norm_step))  # kernels specialise on int and float
    if chosen == "triton":
        from . import residual_fast_kernel, residual_kernel, tuning

        fast = tuning.residual_is_fast(tuning.arch(device), nbits, DIM)
        if fast:
            # its addresses: vector loads of residual rows and of table rows, tokens numbered in 32 bits
            _aligned("residuals", residuals, max(size for _, size in residual_fast_kernel.pieces(nbits, DIM)))
            _aligned("cs.table", cs.table, 16)
            _require("codes", codes.size(0) < 2**32, "fewer than 2**32 tokens", codes.size(0))
        launch = residual_fast_kernel.residual_maxsim if fast else residual_kernel.residual_maxsim
        launch(Q, cs, codes, residuals, *inverse_norms, bucket_weights, nbits, offsets, pids, out, count)
        return out
    n = _host_count(out.size(0), count)
    selected = None if pids is None else pids[:n]
    if chosen == "torch":
        from . import cpu

        scores = cpu.residual_maxsim(Q, cs, codes, residuals, *inverse_norms, bucket_weights, nbits, offsets, selected)
    else:
        from . import eager

        scores = eager.residual_maxsim(
            Q, cs, codes, residuals, *inverse_norms, bucket_weights, nbits, offsets, selected
        )
    out[:n] = scores[:n]
    return out


@torch.no_grad()
def residual_maxsim_fp32(
    Q: Tensor,
    centroids: Tensor,
    codes: Tensor,
    residuals: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None = None,
    out: Tensor | None = None,
    count: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Exact MaxSim of compressed passages in fp32, slower than :func:`residual_maxsim`; fp32 ``[n]``. Similarity:

        <q, v> / |v|,  v = centroid[code] + bucket_weights[residual];  0 where |v| is at most 1e-12

    ``Q`` fp32 ``[LQ, DIM]``; ``centroids`` fp16 ``[C, DIM]`` (fp32 on CPU); the rest as for :func:`residual_maxsim`.
    Squares of ``v`` must be finite. Kernel error for unit query tokens, per query token: fp32 sums over DIM, and three
    products of fp16 parts in the place of one, which leave out a relative 2**-22, whatever the magnitudes. A passage's
    bits depend on nothing else in the call.
    """
    _check("Q", Q, (None, None), (torch.float32,))
    _query_limits(Q)
    device, DIM = Q.device, Q.size(1)
    _check("centroids", centroids, (None, DIM), (torch.float16, torch.float32), device)
    _tokens(DIM, codes, residuals, bucket_weights, nbits, device)
    pids, out = _selection(offsets, pids, out, count, codes)
    chosen = _choose(impl, Q)
    if codes.size(0) == 0:
        return _all_empty(out, count)
    if chosen == "triton":
        _require("centroids.dtype", centroids.dtype == torch.float16, torch.float16, centroids.dtype)
        if device.type == "cuda":
            # the compiler widens loads as addresses allow, and the order of a norm's sum follows
            _aligned("residuals", residuals, 16)
            _aligned("centroids", centroids, 16)
        from . import residual_fp32_kernel

        residual_fp32_kernel.residual_maxsim(
            Q, centroids, codes, residuals, bucket_weights, nbits, offsets, pids, out, count
        )
        return out
    from . import cpu, eager

    n = _host_count(out.size(0), count)
    run = cpu.residual_maxsim_fp32 if chosen == "torch" else eager.residual_maxsim_fp32
    selected = None if pids is None else pids[:n]
    out[:n] = run(Q, centroids, codes, residuals, bucket_weights, nbits, offsets, selected)[:n]
    return out


@torch.no_grad()
def residual_maxsim_batch(
    Q: Tensor,
    centroids: Tensor,
    codes: Tensor,
    residuals: Tensor,
    inv_norms: Tensor,
    inv_norm_lo: float,
    inv_norm_step: float,
    bucket_weights: Tensor,
    nbits: int,
    offsets: Tensor,
    pids: Tensor | None = None,
    out: Tensor | None = None,
    count: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Exact MaxSim of compressed passages with several queries, which share the decompression; fp32 ``[NQ, n]``.

    ``Q`` fp32 ``[NQ, LQ, DIM]``; ``centroids`` fp16 ``[C, DIM]`` (fp32 on CPU); the rest as for
    :func:`residual_maxsim`. The kernel (1, 2 and 4 bits, DIM up to 128, rows of a multiple of 8 bytes) puts embeddings
    together in fp16: their rounding adds about 2**-12 / sqrt(DIM) a similarity of unit vectors. It keeps a copy of the
    centroids in its own order for as long as ``centroids`` lives. Another one, on ``wgmma``, scores whole indexes where
    :func:`.tuning.residual_batch_is_wgmma` says so. Other shapes are scored query by query, which waits for the device.
    """
    _check("Q", Q, (None, None, None), (torch.float32,))
    _query_limits(Q)
    device = Q.device
    NQ, LQ, DIM = Q.shape
    _check("centroids", centroids, (None, DIM), (torch.float16, torch.float32), device)
    _compressed(DIM, codes, residuals, inv_norms, inv_norm_lo, inv_norm_step, bucket_weights, nbits, device)
    pids, out = _selection(offsets, pids, out, count, codes, (NQ,))
    arguments = (codes, residuals, inv_norms, float(inv_norm_lo), float(inv_norm_step), bucket_weights, nbits, offsets)
    chosen = _choose(impl, Q)
    if codes.size(0) == 0:
        return _all_empty(out, count)
    if chosen == "triton":
        _require("centroids.dtype", centroids.dtype == torch.float16, torch.float16, centroids.dtype)
        from . import residual_batch_kernel, residual_fast_kernel, tuning

        if tuning.residual_batch_is_fast(tuning.arch(device), nbits, DIM):
            _aligned("residuals", residuals, max(size for _, size in residual_fast_kernel.pieces(nbits, DIM)))
            _require("codes", codes.size(0) < 2**32, "fewer than 2**32 tokens", codes.size(0))
            shape = (nbits, DIM, NQ * math.ceil(LQ / 32), codes.size(0), offsets.size(0) - 1)
            if pids is None and tuning.residual_batch_is_wgmma(tuning.arch(device), *shape):
                from . import residual_wgmma_kernel

                residual_wgmma_kernel.residual_maxsim(Q, centroids, *arguments, out, count)
            else:
                residual_batch_kernel.residual_maxsim(Q, centroids, *arguments, pids, out, count)
            return out
    cmax = float(centroids.float().norm(dim=1).max())
    for q, scores in zip(Q, out, strict=True):
        cs = centroid_scores(q, centroids, cmax=cmax, impl=chosen)
        residual_maxsim(q, cs, *arguments, pids, scores, count, impl=chosen)
    return out


@torch.no_grad()
def dense_maxsim(
    Q: Tensor,
    D: Tensor,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    pids: Tensor | None = None,
    out: Tensor | None = None,
    count: Tensor | None = None,
    precision: str = "tf32x3",
    impl: str = "auto",
) -> Tensor:
    """MaxSim with uncompressed embeddings; fp32 ``[n]``, or ``[NQ, n]`` for ``Q [NQ, LQ, DIM]``.

    ``D`` is padded ``[B, ND, DIM]`` with ``lengths`` int32 or int64 ``[B]`` in 0..ND (None: all ND), or
    packed ``[T, DIM]`` with ``offsets`` int64 ``[N + 1]`` and optionally ``pids``. Q and D share one dtype:
    fp16, bf16 or fp32; products accumulate in fp32. ``precision`` (fp32 on the GPU, others ignore it): "tf32x3" three
    TF32 products, an error as fp32 sums have (2e-7 a similarity of unit vectors); "fp16x3" the same from three fp16
    products and faster, for values up to 65,504, of which it takes 22 bits or to 2**-25, and DIM a multiple of 16;
    "ieee" fp32 products without the tensor core; "tf32" one TF32 product (about 1e-4 a similarity).
    """
    Q3 = _queries(Q, (torch.float16, torch.bfloat16, torch.float32))
    device, queries = Q.device, Q.shape[:-2]
    _require("precision", precision in PRECISIONS, PRECISIONS, precision)
    if offsets is None:
        _check("D (without offsets: padded)", D, (None, None, Q.size(-1)), (Q.dtype,), device)
        _require("pids", pids is None, "None for padded D", "pids")
        if lengths is not None:
            _check("lengths", lengths, (D.size(0),), (torch.int32, torch.int64), device)
            _check_range("lengths", lengths, D.size(1), ValueError)
        _check_count(count, device)
        out = _output(D.size(0), out, device, queries)
    else:
        _check("D (with offsets: packed)", D, (None, Q.size(-1)), (Q.dtype,), device)
        _require("lengths", lengths is None, "None for packed D", "lengths")
        pids, out = _selection(offsets, pids, out, count, D, queries)
    n, shape = out.size(-1), out.shape
    out = out.view(Q3.size(0), n)
    chosen = _choose(impl, D)
    if D.numel() == 0:
        return _all_empty(out, count).view(shape)
    if chosen == "triton":
        _require("DIM", Q.size(-1) % 8 == 0, "a multiple of 8", Q.size(-1))
        from . import dense_fast_kernel, dense_kernel, tuning

        fixed, columns = offsets is None and lengths is None, Q3.size(0) * Q3.size(1)
        fast = tuning.dense_is_fast(tuning.arch(device), D.dtype, precision, Q.size(-1), columns, fixed)
        fast = fast and D.numel() // Q.size(-1) < 2**32  # tokens, which it numbers in 32 bits
        NQ, LQ, DIM = Q3.shape
        ring = fixed and tuning.dense_is_ring(tuning.arch(device), D.dtype, DIM, NQ, LQ, len(D), D.size(1))
        aligned = D.data_ptr() % 16 == 0
        if ring and aligned:
            from . import dense_ring_kernel

            dense_ring_kernel.dense_maxsim(Q3, D, out, count)
        elif fast and aligned:
            dense_fast_kernel.dense_maxsim(Q3, D, lengths, offsets, pids, out, count, precision)
        else:
            if precision == "fp16x3":
                ignored = D.dtype != torch.float32 or tuning.interpreted()  # the interpreter's products are fp32
                _require("precision", ignored, "tf32x3, ieee or tf32 for this chip, DIM and D", precision)
                precision = "ieee"
            dense_kernel.dense_maxsim(Q3, D, lengths, offsets, pids, out, count, precision)
    else:
        from . import cpu, eager

        run = cpu.dense_maxsim if chosen == "torch" else eager.dense_maxsim
        m = _host_count(n, count)
        out[:, :m] = run(Q3, D, lengths, offsets, None if pids is None else pids[:m])[:, :m]
    return out.view(shape)


@torch.no_grad()
def pq_maxsim(
    Q: Tensor,
    codes: Tensor,
    codebook: Tensor,
    offsets: Tensor,
    pids: Tensor | None = None,
    out: Tensor | None = None,
    count: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """MaxSim with product-quantised embeddings; fp32 ``[n]``, or ``[NQ, n]`` for ``Q [NQ, LQ, DIM]``.

        score = sum_i max_t <q_i, concat_m codebook[m, codes[t, m]]>

    ``Q`` fp32; ``codes`` uint8 ``[T, M]``; ``codebook`` fp16 ``[M, 256, DIM / M]``; ``offsets`` int64 ``[N + 1]``
    token offsets; ``pids`` the passages (None: all N). Nothing is normalised: a decoded embedding counts as it is. On
    the CPU products and sums are fp32; the kernel rounds Q to fp16, multiplies in fp16 and adds up in fp32: for unit
    vectors about 2**-11 / sqrt(3 DIM) a similarity (standard deviation), 1.4e-4 over LQ = 32 at DIM = 128.
    """
    Q3 = _queries(Q, (torch.float32,))
    device = Q.device
    _check("codes", codes, (None, None), (torch.uint8,), device)
    M, DIM = codes.size(1), Q.size(-1)
    _require("codes.shape", M >= 1 and DIM % M == 0, f"[*, M] with M dividing DIM {DIM}", list(codes.shape))
    _check("codebook", codebook, (M, 256, DIM // M), (torch.float16,), device)
    pids, out = _selection(offsets, pids, out, count, codes, Q.shape[:-2])
    chosen = _choose(impl, Q)
    if codes.size(0) == 0:
        return _all_empty(out, count)
    rows = out.view(Q3.size(0), out.size(-1))
    if chosen == "triton":
        from . import pq_fast_kernel, pq_kernel, tuning

        fast = tuning.pq_is_fast(tuning.arch(device), M, DIM)
        if fast:
            _aligned("codes", codes, M // 4)
            _aligned("codebook", codebook, 16)
            _require("codes", codes.size(0) < 2**32, "fewer than 2**32 tokens", codes.size(0))
        launch = pq_fast_kernel.pq_maxsim if fast else pq_kernel.pq_maxsim
        launch(Q3, codes, codebook, offsets, pids, rows, count)
        return out
    n = _host_count(rows.size(1), count)
    selected = None if pids is None else pids[:n]
    if chosen == "torch":
        from . import cpu

        scores = cpu.pq_maxsim(Q3, codes, codebook, offsets, selected)
    else:
        from . import eager

        scores = eager.pq_maxsim(Q3, codes, codebook, offsets, selected)
    rows[:, :n] = scores[:, :n]
    return out


def _choose(impl: str, tensor: Tensor) -> str:
    _require("impl", impl in IMPLS, IMPLS, impl)
    _require("device", tensor.device.type in ("cpu", "cuda"), "cpu or cuda", tensor.device)
    on_cuda = tensor.device.type == "cuda"
    if impl == "auto":
        return "triton" if on_cuda else "torch"
    if impl == "torch":
        _require('device for impl="torch"', not on_cuda, "cpu", tensor.device)
    if impl == "triton" and not on_cuda:
        from . import tuning

        expected = "cuda (cpu only under TRITON_INTERPRET=1)"
        _require('device for impl="triton"', tuning.interpreted(), expected, tensor.device)
    return impl


def _require(name: str, condition: bool, expected: object, got: object) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _finite(value: object) -> bool:
    """Whether it is one finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def _check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Shape (None = any size), dtype, device and layout of one tensor."""
    expected = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
    _require(name, isinstance(tensor, Tensor), f"a tensor {expected}", type(tensor).__name__)
    matches = tensor.dim() == len(shape) and all(
        size is None or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    _require(f"{name}.shape", matches, expected, list(tensor.shape))
    _require(f"{name}.dtype", tensor.dtype in dtypes, " or ".join(map(str, dtypes)), tensor.dtype)
    _require(f"{name}.device", device is None or tensor.device == device, device, tensor.device)
    _require(f"{name}.layout", tensor.layout == torch.strided, torch.strided, tensor.layout)
    _require(name, tensor.is_contiguous(), "contiguous", f"strides {tensor.stride()}")


def _check_range(name: str, values: Tensor, most: int, error: type[ValueError] | type[IndexError] = IndexError) -> None:
    """Integers in 0..``most``, if they lie where looking at them waits for nothing."""
    if values.device.type != "cpu" or values.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(values))
    if low < 0 or high > most:
        raise error(f"{name}: expected 0..{most}, got {low if low < 0 else high}")


def _compressed(
    DIM: int,
    codes: Tensor,
    residuals: Tensor,
    inv_norms: Tensor,
    inv_norm_lo: float,
    inv_norm_step: float,
    bucket_weights: Tensor,
    nbits: int,
    device: torch.device,
) -> None:
    """Checks what compressed tokens consist of: tensors on ``device``, residuals there or in pinned memory."""
    _tokens(DIM, codes, residuals, bucket_weights, nbits, device)
    _require("inv_norm_lo", _finite(inv_norm_lo), "a finite number", inv_norm_lo)
    _require("inv_norm_step", _finite(inv_norm_step), "a finite number", inv_norm_step)
    _check("inv_norms", inv_norms, (codes.size(0),), (torch.uint16, torch.float32), device)


def _tokens(
    DIM: int, codes: Tensor, residuals: Tensor, bucket_weights: Tensor, nbits: int, device: torch.device
) -> None:
    """``_compressed`` without inverse norms."""
    _require("nbits", type(nbits) is int and nbits in (1, 2, 4, 8), "1, 2, 4 or 8", nbits)
    _require("DIM", DIM % (8 // nbits) == 0, f"a multiple of {8 // nbits} at {nbits} bits", DIM)
    _check("codes", codes, (None,), (torch.int32,), device)
    _check("residuals", residuals, (codes.size(0), DIM * nbits // 8), (torch.uint8,))
    on_host = device.type == "cuda" and residuals.device.type == "cpu"
    _require("residuals", not on_host or residuals.is_pinned(), f"{device} or pinned", "pageable memory")
    _require("residuals.device", on_host or residuals.device == device, device, residuals.device)
    _check("bucket_weights", bucket_weights, (2**nbits,), (torch.float32,), device)


def _aligned(name: str, tensor: Tensor, nbytes: int) -> None:
    past = tensor.data_ptr() % nbytes
    _require(name, past == 0, f"an address that is a multiple of {nbytes} bytes", f"one {past} bytes past it")


def _queries(Q: Tensor, dtypes: Sequence[torch.dtype]) -> Tensor:
    """[NQ, LQ, DIM] of one query or several."""
    is_tensor = isinstance(Q, Tensor)
    got = list(Q.shape) if is_tensor else type(Q).__name__
    _require("Q", is_tensor and Q.dim() in (2, 3), "[LQ, DIM] or [NQ, LQ, DIM]", got)
    _check("Q", Q, (None,) * Q.dim(), dtypes)
    _query_limits(Q)
    return Q if Q.dim() == 3 else Q.unsqueeze(0)


def _query_limits(Q: Tensor) -> None:
    """Q [LQ, DIM] or [NQ, LQ, DIM]."""
    _require("NQ", Q.dim() == 2 or Q.size(0) >= 1, "at least 1", Q.size(0))
    _require("LQ", 1 <= Q.size(-2) <= MAX_LQ, f"1..{MAX_LQ} query tokens", Q.size(-2))
    _require("DIM", 1 <= Q.size(-1) <= MAX_DIM, f"1..{MAX_DIM}", Q.size(-1))
    if Q.device.type == "cpu":
        norm = float(torch.linalg.vector_norm(Q, dtype=torch.float32))
        _require("Q", math.isfinite(norm), "finite values, whose squares are finite too", f"a norm of {norm}")


def _scores_device(cs: CentroidScores) -> torch.device:
    is_scores = isinstance(cs, CentroidScores)
    _require("cs", is_scores, "CentroidScores", type(cs).__name__)
    _require("cs.table", isinstance(cs.table, Tensor), "a tensor", type(cs.table).__name__)
    _require("cs.LQ", type(cs.LQ) is int and 1 <= cs.LQ <= MAX_LQ, f"1..{MAX_LQ}", cs.LQ)
    return cs.table.device


def _check_scores(cs: CentroidScores, chosen: str, use_keep: bool = False) -> None:
    """The form that the implementation reads: the kernels int16, torch fp32, the reference both."""
    device = cs.table.device
    packed = chosen == "triton" or (chosen == "reference" and cs.table.dtype == torch.int16)
    LQP, dtype = (padded_query_length(cs.LQ), torch.int16) if packed else (cs.LQ, torch.float32)
    _check("cs.table", cs.table, (None, LQP), (dtype,))
    _check("cs.scale", cs.scale, (1,), (torch.float32,), device)
    C = cs.table.size(0) - packed
    if use_keep and cs.keep is not None:
        _check("cs.keep", cs.keep, (C,), (torch.uint8,), device)
        if chosen == "triton":
            assert cs.keep_bits is not None
            _check("cs.keep_bits", cs.keep_bits, ((C + 31) // 32,), (torch.int32,), device)


def _check_count(count: Tensor | None, device: torch.device) -> None:
    if count is not None:
        _check("count", count, (1,), (torch.int32,), device)


def _selection(
    offsets: Tensor,
    pids: Tensor | None,
    out: Tensor | None,
    count: Tensor | None,
    tokens: Tensor,
    queries: Sequence[int] = (),
) -> tuple[Tensor | None, Tensor]:
    """Checks what every operation on passages of packed ``tokens`` takes; returns pids and the output [*queries, n]."""
    device = tokens.device
    _check("offsets", offsets, (None,), (torch.int64,), device)
    _require("offsets", offsets.size(0) >= 1, "[N + 1]", "[0]")
    _check_range("offsets", offsets[:: max(1, offsets.size(0) - 1)], tokens.size(0), ValueError)
    _check_count(count, device)
    N = n = offsets.size(0) - 1
    if pids is not None:
        _check("pids", pids, (None,), (torch.int32, torch.int64), device)
        n = pids.size(0)
    out = _output(n, out, device, queries)
    if pids is not None and device.type == "cpu":
        _check_range("pids", pids[: _host_count(n, count)], N - 1)
    return pids, out


def _output(n: int, out: Tensor | None, device: torch.device, queries: Sequence[int]) -> Tensor:
    if out is None:
        return torch.empty(*queries, n, dtype=torch.float32, device=device)
    _check("out", out, (*queries, n), (torch.float32,), device)
    return out


def _all_empty(out: Tensor, count: Tensor | None) -> Tensor:
    """Scores [..., n] of passages without tokens, which no kernel is asked for: it would have nothing to read."""
    if count is None:
        return out.fill_(-math.inf)
    return out.masked_fill_(torch.arange(out.size(-1), device=out.device) < count, -math.inf)


def _host_count(n: int, count: Tensor | None) -> int:
    """How many of n to score, on the host: for CPU tensors free, for impl="reference" on CUDA it waits."""
    return n if count is None else max(0, min(n, int(count)))
