"""Addresses past 2**31 and 2**32 bytes, element numbers past 2**31: every kernel, every array that can get that long.

The data lie at the end of arrays that are zero before it, so an address that wraps around finds other passages. Offsets
start at the first token that counts.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim.ops import (
    api,
    candidates_kernel,
    decompress_kernel,
    dense_fast_kernel,
    dense_kernel,
    dense_ring_kernel,
    norms_kernel,
    pids_kernel,
    pq_fast_kernel,
    pq_kernel,
    reference,
    residual_batch_kernel,
    residual_fast_kernel,
    residual_fp32_kernel,
    residual_kernel,
    residual_wgmma_kernel,
    select_kernel,
    tuning,
)
from tests.ops.ragged import (
    LENGTHS,
    Collection,
    assert_scores,
    fp32_tolerance,
    make_collection,
    make_pq,
    poisoned,
    residual_tolerance,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BYTES = 2**32
LIST = 2**29  # numbers or scores of four bytes: past 2**31 bytes
N = len(LENGTHS)
PIDS = (3, 14, 0, 13, 13, 7, 1)


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest) -> None:
    """Skips what does not fit; the mark ``gigabytes(n)`` says what a test takes."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    needed = request.node.get_closest_marker("gigabytes").args[0]
    if free < needed:
        pytest.skip(f"needs {needed} GB of GPU memory, {free:.0f} are free")


def behind(x: Tensor, first: int) -> Tensor:
    """``first`` rows of zeros, then x."""
    big = torch.zeros(first + len(x), *x.shape[1:], dtype=x.dtype, device=DEVICE)
    big[first:] = x
    return big


def shift(row_bytes: int) -> int:
    """Rows after which a byte address has passed ``BYTES``; odd."""
    return BYTES // row_bytes + 77


def both_lists() -> list[Tensor | None]:
    return [None, torch.tensor(PIDS, device=DEVICE, dtype=torch.int32)]


def residual(c: Collection, cs: api.CentroidScores, kernel: Any, first: int, want: Tensor) -> None:
    stored, lo, step = c.stored
    arrays = behind(c.codes, first), behind(c.residuals, first), behind(stored, first)
    for pids in both_lists():
        out = poisoned(N if pids is None else len(pids), DEVICE)
        kernel.residual_maxsim(
            c.Q, cs, *arrays, lo, step, c.bucket_weights, c.nbits, c.offsets + first, pids, out, None
        )
        assert_scores(out, want if pids is None else want[pids.long()], residual_tolerance(c, cs))


@pytest.mark.gigabytes(7)
@pytest.mark.parametrize("kernel", [residual_kernel, residual_fast_kernel])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_residuals(nbits, kernel):
    if kernel is residual_fast_kernel and nbits == 8:
        pytest.skip("the fast kernel has no 8 bits")
    c = make_collection(DEVICE, 32, 128, nbits)
    residual(c, c.centroid_scores(), kernel, shift(128 * nbits // 8), reference.residual_maxsim(c.Q, *c.raw))


@pytest.mark.parametrize("kernel", [residual_kernel, residual_fast_kernel])
@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(BYTES // 4, marks=pytest.mark.gigabytes(12), id="2**30"),
        pytest.param(BYTES // 2, marks=pytest.mark.gigabytes(23), id="2**31"),
    ],
)
def test_tokens(tokens, kernel):
    """Codes and inverse norms past 2**32 bytes; token numbers past int32."""
    c = make_collection(DEVICE, 32, 32, 1)
    residual(c, c.centroid_scores(), kernel, tokens + 77, reference.residual_maxsim(c.Q, *c.raw))


def fp32(c: Collection, first: int, pids: Tensor | None) -> None:
    """``first`` tokens of zeros before the collection."""
    at = torch.arange(N, device=DEVICE) if pids is None else ends(pids)
    out = torch.empty(N if pids is None else len(pids), device=DEVICE)
    out[at] = torch.nan
    residual_fp32_kernel.residual_maxsim(
        c.Q, c.centroids, behind(c.codes, first), behind(c.residuals, first), c.bucket_weights, c.nbits,
        c.offsets + first, pids, out, None,
    )  # fmt: skip
    want = reference.residual_maxsim(c.Q, *c.raw, pids=at if pids is None else pids[at])
    assert_scores(out[at], want, fp32_tolerance(c, want))


@pytest.mark.gigabytes(7)
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_residuals_in_fp32(nbits):
    fp32(make_collection(DEVICE, 32, 128, nbits), shift(128 * nbits // 8), None)


@pytest.mark.gigabytes(18)
def test_tokens_in_fp32():
    fp32(make_collection(DEVICE, 32, 32, 1), BYTES // 2 + 77, None)


@pytest.mark.gigabytes(10)
def test_centroids_in_fp32():
    """Centroids past 2**32 bytes."""
    c = make_collection(DEVICE, 32, 128)
    first = shift(256)
    c.centroids, c.codes = behind(c.centroids, first), c.codes + first
    fp32(c, 0, None)


@pytest.mark.gigabytes(6)
def test_long_lists_in_fp32():
    fp32(make_collection(DEVICE, 16, 64), 0, long_list())


def batch(
    c: Collection, first: int, pids: Tensor | None, NQ: int = 3, kernel: ModuleType = residual_batch_kernel
) -> None:
    """Several queries, ``first`` tokens of zeros before the collection."""
    if kernel is residual_wgmma_kernel and tuning.arch(torch.device(DEVICE)) != 90:
        pytest.skip("the wgmma kernel is for sm_90")
    Q = torch.stack([c.Q.roll(7 * i, 1) for i in range(NQ)])
    stored, lo, step = c.stored
    arrays = behind(c.codes, first), behind(c.residuals, first), behind(stored, first)
    n = len(c.offsets) - 1 if pids is None else len(pids)
    out = torch.empty(NQ, n, device=DEVICE)
    at = torch.arange(N, device=DEVICE) if n == N else ends(out[0])
    out[:, at] = torch.nan
    listed = () if kernel is residual_wgmma_kernel else (pids,)
    kernel.residual_maxsim(
        Q, c.centroids, *arrays, lo, step, c.bucket_weights, c.nbits, c.offsets + first, *listed, out, None
    )
    LQ, DIM = c.Q.shape
    for got, q in zip(out, Q, strict=True):
        want = reference.residual_maxsim(q, *c.raw, pids=at if pids is None else pids[at])
        assert_scores(got[at], want, 6 * LQ**0.5 * 2.0**-11 / DIM**0.5 + 1e-5)


SEVERAL = pytest.mark.parametrize("kernel", [residual_batch_kernel, residual_wgmma_kernel])


@pytest.mark.gigabytes(7)
@SEVERAL
@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_residuals_of_several_queries(nbits, kernel):
    batch(make_collection(DEVICE, 32, 128, nbits), shift(128 * nbits // 8), None, 3, kernel)


@pytest.mark.gigabytes(23)
def test_tokens_of_several_queries():
    batch(make_collection(DEVICE, 32, 64, 1), BYTES // 2 + 77, None)


@pytest.mark.gigabytes(50)
def test_tokens_on_wgmma():
    batch(make_collection(DEVICE, 32, 128, 1), BYTES // 2 + 77, None, 3, residual_wgmma_kernel)


@pytest.mark.gigabytes(40)
def test_passages_on_wgmma():
    """Element numbers of the scores past 2**31; all passages but the last are empty."""
    c = make_collection(DEVICE, 16, 128)
    c.offsets = behind(c.offsets, LIST + 77)
    batch(c, 0, None, 5, residual_wgmma_kernel)


@pytest.mark.gigabytes(15)
def test_long_lists_of_several_queries():
    batch(make_collection(DEVICE, 16, 64), 0, long_list(), 5)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(BYTES // 4, marks=pytest.mark.gigabytes(5), id="2**30"),
        pytest.param(BYTES // 2, marks=pytest.mark.gigabytes(9), id="2**31"),
    ],
)
def test_codes_of_centroid_maxsim(tokens):
    c = make_collection(DEVICE, 32, 128)
    cs = c.centroid_scores()
    want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets)
    codes = behind(c.codes, tokens + 77)
    for pids in both_lists():
        out = poisoned(N if pids is None else len(pids), DEVICE)
        api.centroid_maxsim(cs, codes, c.offsets + tokens + 77, pids, out=out, impl="triton")
        assert_scores(out, want if pids is None else want[pids.long()], 32 * (0.51 * float(cs.scale) + 2e-6))


@pytest.mark.gigabytes(15)
def test_centroids_tables_and_cells():
    """Centroids, their table and the keys past 2**32 bytes each; the MaxSim kernels look up the table's end."""
    c = make_collection(DEVICE, 128, 128)
    first = shift(256) // 128 * 128 + 3
    centroids, ncells = behind(c.centroids, first), 32
    exact = c.centroids.double() @ c.Q.double().T
    threshold = float(exact.amax(1).median()) + 1e-4
    cs = api.centroid_scores(c.Q, centroids, threshold, cmax=1.01, ncells=ncells, impl="triton")
    assert cs.keep is not None
    assert cs.keep_bits is not None
    assert cs.cells is not None
    assert cs.table.nbytes > BYTES < cs.cells.nbytes
    scale = float(cs.scale)
    assert float((cs.table[first:-1] * scale - exact).abs().max()) <= 0.51 * scale + 2e-6
    assert (cs.table[-1] == -32768).all()
    assert not cs.table[:first].any()
    kept = exact.amax(1) >= threshold
    assert torch.equal(cs.keep[first:].bool(), kept)
    number = torch.arange(first, len(centroids), device=DEVICE)
    assert torch.equal((cs.keep_bits[number // 32] >> (number % 32).int()) & 1 != 0, kept)
    keys = cs.cells[-2:].flatten(0, 1).topk(ncells, 0).values  # the data lie in the last two blocks
    best = exact.gather(0, 0x7FFFFFFF - (keys & 0x7FFFFFFF) - first)
    assert float((best - exact.topk(ncells, 0).values).abs().max()) < 2e-6

    codes = c.codes + first
    out = poisoned(N, DEVICE)
    want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, threshold=threshold)
    api.centroid_maxsim(cs, codes, c.offsets, use_keep=True, out=out, impl="triton")
    assert_scores(out, want, 128 * (0.51 * scale + 2e-6))
    want = reference.residual_maxsim(c.Q, *c.raw)
    for kernel in (residual_kernel, residual_fast_kernel):
        arguments = (c.Q, cs, codes, c.residuals, *c.stored, c.bucket_weights, c.nbits, c.offsets)
        kernel.residual_maxsim(*arguments, None, out.fill_(torch.nan), None)  # type: ignore[attr-defined]
        assert_scores(out, want, residual_tolerance(c, cs))


@pytest.mark.gigabytes(10)
@SEVERAL
def test_centroids_of_several_queries(kernel):
    """The kernel keeps a copy of the centroids in its own order: twice 4.3 GB."""
    c = make_collection(DEVICE, 32, 128)
    first = shift(256)
    c.centroids, c.codes = behind(c.centroids, first), c.codes + first
    batch(c, 0, None, 3, kernel)


def packed(dtype: torch.dtype, NQ: int, LQ: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Q [NQ, LQ, 128], embeddings [T, 128], offsets, scores [NQ, N] and their tolerance."""
    g = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0)
    Q = torch.nn.functional.normalize(torch.randn(NQ, LQ, 128, generator=g), dim=-1).to(DEVICE, dtype)
    D = torch.nn.functional.normalize(torch.randn(int(offsets[-1]), 128, generator=g), dim=-1).to(DEVICE, dtype)
    return Q, D, offsets, torch.stack([reference.maxsim(q, D, offsets) for q in Q]), LQ * 128 * 2.0**-23


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float16, marks=pytest.mark.gigabytes(6)),
        pytest.param(torch.float32, marks=pytest.mark.gigabytes(11)),
    ],
)
@pytest.mark.parametrize("kernel", [dense_kernel, dense_fast_kernel])
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 32), (3, 32), (1, 200)])
def test_dense(NQ, LQ, kernel, dtype):
    """Packed embeddings whose element numbers pass 2**31, all passages and a list; the same bytes padded."""
    Q, D, offsets, want, tolerance = packed(dtype, NQ, LQ)
    first = BYTES // 2 // 128 + 77
    first += -(first + len(D)) % 64  # so that the bytes are also whole passages of 64 tokens
    D = behind(D, first)
    for pids in both_lists():
        got = torch.full((NQ, N if pids is None else len(pids)), torch.nan, device=DEVICE)
        kernel.dense_maxsim(Q, D, None, offsets + first, pids, got, None, "tf32x3")
        for score, w in zip(got, want, strict=True):
            assert_scores(score, w if pids is None else w[pids.long()], tolerance)
    padded = D.view(-1, 64, 128)
    last = torch.arange(len(padded) - 11, len(padded), device=DEVICE)
    lengths = torch.full((len(padded),), 64, dtype=torch.int32, device=DEVICE)
    lengths[-5:] = torch.tensor([63, 1, 0, 17, 64])
    ends = (last * 64 + lengths[last]).tolist()
    for given in (None, lengths):
        got = torch.full((NQ, len(padded)), torch.nan, device=DEVICE)
        kernel.dense_maxsim(Q, padded, given, None, None, got, None, "tf32x3")
        for score, q in zip(got, Q, strict=True):
            assert not score[: len(padded) // 2].any()
            tokens = [D[int(p) * 64 : (int(p) + 1) * 64 if given is None else e] for p, e in zip(last, ends)]
            assert_scores(score[last], reference.maxsim(q, torch.cat(tokens), lengths_to_offsets(tokens)), tolerance)


@pytest.mark.gigabytes(6)
def test_dense_ring():
    """Element numbers of wide rows pass 2**31."""
    if not tuning.dense_is_ring(tuning.arch(torch.device(DEVICE)), torch.float16, 768, 1, 32, 2**16, 64):
        pytest.skip("expected sm_90")
    g = torch.Generator(DEVICE).manual_seed(1)
    D = torch.zeros(2**31 // (64 * 768) + 12, 64, 768, dtype=torch.float16, device=DEVICE)
    D[-11:] = torch.randn(11, 64, 768, generator=g, device=DEVICE) / 768**0.5
    Q = (torch.randn(1, 32, 768, generator=g, device=DEVICE) / 768**0.5).half()
    got = torch.full((1, len(D)), torch.nan, device=DEVICE)
    dense_ring_kernel.dense_maxsim(Q, D, got, None)
    assert not got[0, :-11].any()
    want = reference.maxsim(Q[0], D[-11:].reshape(-1, 768), torch.arange(12, device=DEVICE) * 64)
    assert_scores(got[0, -11:], want, 3 * 32 * 768 * 2.0**-23)


def lengths_to_offsets(tokens: list[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, tokens)], device=DEVICE).cumsum(0)


@pytest.mark.parametrize("kernel", [pq_kernel, pq_fast_kernel])
@pytest.mark.parametrize(
    ("M", "tokens"),
    [
        pytest.param(16, BYTES // 16, marks=pytest.mark.gigabytes(5)),
        pytest.param(64, BYTES // 64, marks=pytest.mark.gigabytes(5)),
        pytest.param(8, BYTES // 2, marks=pytest.mark.gigabytes(18)),
    ],
)
def test_pq(M, tokens, kernel):
    Q, codes, codebook, offsets = make_pq(DEVICE, 2, 32, 128, M)
    first = tokens + 77
    codes = behind(codes, first)
    for pids in both_lists():
        out = torch.full((2, N if pids is None else len(pids)), torch.nan, device=DEVICE)
        kernel.pq_maxsim(Q, codes, codebook, offsets + first, pids, out, None)
        for got, q in zip(out, Q, strict=True):
            want = reference.pq_maxsim(q, codes[first:], codebook, offsets, pids)
            assert_scores(got, want, 4 * 32**0.5 * 2.0**-11 / (3 * 128) ** 0.5 + 1e-5)


@pytest.mark.gigabytes(15)
def test_decompression():
    """Residuals past 2**32 bytes into embeddings past 2**33; and into padded slots past 2**32."""
    c = make_collection(DEVICE, 1, 128, 8)
    first = shift(128)
    codes, residuals = behind(c.codes, first), behind(c.residuals, first)
    parts = (codes, residuals, c.centroids, c.bucket_weights, c.nbits)
    want = reference.decompress(*c.raw[:5])
    close = 2.0**-11 + 128 * 2.0**-24
    out = torch.empty(len(codes), 128, dtype=torch.float16, device=DEVICE)
    decompress_kernel.decompress(*parts, out)
    assert float((out[first:].double() - want).abs().max()) <= close
    inverse = norms_kernel.inverse_norms(*parts[:4], c.nbits)
    assert float((inverse[first:] - c.inv_norms).abs().max()) < 1e-5
    del out

    slots = torch.empty(BYTES // (130 * 256) + 77, 130, 128, dtype=torch.float16, device=DEVICE)
    pids = torch.ones(len(slots), dtype=torch.int32, device=DEVICE)  # a passage of one token
    pids[-len(PIDS) :] = torch.tensor(PIDS)
    lengths, left = torch.empty_like(pids), torch.empty_like(pids[:1])
    decompress_kernel.decompress_passages(*parts, c.offsets + first, pids, None, 0, slots, lengths, left)
    assert int(left) == len(slots)
    assert (lengths[: -len(PIDS)] == 1).all()
    for slot, pid in zip(slots[-len(PIDS) :], PIDS, strict=True):
        at, length = int(c.offsets[pid]), LENGTHS[pid]
        if length:
            assert float((slot[:length].double() - want[at : at + length]).abs().max()) <= close


@pytest.mark.gigabytes(14)
def test_inverse_norms():
    c = make_collection(DEVICE, 1, 32, 1)
    first = shift(4)
    inverse = norms_kernel.inverse_norms(
        behind(c.codes, first), behind(c.residuals, first), c.centroids, c.bucket_weights, 1
    )
    assert float((inverse[first:] - c.inv_norms).abs().max()) < 1e-5
    assert float((inverse[first:] - c.inv_norms.roll(1)).abs().max()) > 1e-4
    assert torch.equal(inverse[: first // 2], inverse[:1].expand(first // 2))


def long_list() -> Tensor:
    """Passages 1 (of one token), then PIDS: int32 past 2**31 bytes."""
    pids = torch.ones(LIST + 77, dtype=torch.int32, device=DEVICE)
    pids[-len(PIDS) :] = torch.tensor(PIDS)
    return pids


def ends(pids: Tensor) -> Tensor:
    """Where to look: the start, both sides of the middle, the end of a list."""
    middle = torch.arange(len(pids) // 2 - 2, len(pids) // 2 + 2, device=DEVICE)
    return torch.cat([torch.arange(3, device=DEVICE), middle, torch.arange(len(pids) - 9, len(pids), device=DEVICE)])


@pytest.mark.gigabytes(6)
@pytest.mark.parametrize("kernel", [residual_kernel, residual_fast_kernel])
def test_long_lists_of_residual_maxsim(kernel):
    c = make_collection(DEVICE, 16, 64)
    cs, pids = c.centroid_scores(), long_list()
    out, at = poisoned(len(pids), DEVICE), ends(pids)
    arguments = (c.Q, cs, c.codes, c.residuals, *c.stored, c.bucket_weights, c.nbits, c.offsets)
    kernel.residual_maxsim(*arguments, pids, out, None)
    assert_scores(out[at], reference.residual_maxsim(c.Q, *c.raw, pids=pids[at]), residual_tolerance(c, cs))


@pytest.mark.gigabytes(6)
def test_long_lists_of_centroid_maxsim():
    c = make_collection(DEVICE, 16, 64)
    cs, pids = c.centroid_scores(), long_list()
    out, at = poisoned(len(pids), DEVICE), ends(pids)
    api.centroid_maxsim(cs, c.codes, c.offsets, pids, out=out, impl="triton")
    want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, pids[at])
    assert_scores(out[at], want, 16 * (0.51 * float(cs.scale) + 2e-6))


@pytest.mark.gigabytes(15)
@pytest.mark.parametrize("kernel", [dense_kernel, dense_fast_kernel])
def test_long_lists_of_dense_maxsim(kernel):
    """Five queries: element numbers of the scores pass 2**31."""
    Q, D, offsets, want, tolerance = packed(torch.float16, 5, 16)
    pids = long_list()
    at = ends(pids)
    got = torch.empty(5, len(pids), device=DEVICE)
    got[:, at] = torch.nan
    kernel.dense_maxsim(Q, D, None, offsets, pids, got, None, "tf32x3")
    for score, w in zip(got, want, strict=True):
        assert_scores(score[at], w[pids[at].long()], tolerance)


@pytest.mark.gigabytes(15)
@pytest.mark.parametrize("kernel", [pq_kernel, pq_fast_kernel])
def test_long_lists_of_pq_maxsim(kernel):
    Q, codes, codebook, offsets = make_pq(DEVICE, 5, 16, 64, 8)
    pids = long_list()
    out, at = torch.empty(5, len(pids), device=DEVICE), ends(pids)
    out[:, at] = torch.nan
    kernel.pq_maxsim(Q, codes, codebook, offsets, pids, out, None)
    for got, q in zip(out, Q, strict=True):
        want = reference.pq_maxsim(q, codes, codebook, offsets, pids[at])
        assert_scores(got[at], want, 4 * 16**0.5 * 2.0**-11 / (3 * 64) ** 0.5 + 1e-5)


@pytest.mark.gigabytes(15)
def test_candidates():
    """Inverted lists past 2**32 bytes; then all of 2**30 passages as candidates."""
    passages = 2 * LIST + 77
    lists = [torch.tensor([5, 40, passages - 1]), torch.arange(1000) * 7, torch.tensor([40, passages - 2])]
    first = shift(4)
    ivf_pids = behind(torch.cat(lists).int().to(DEVICE), first)
    ivf_offsets = torch.tensor([first, first + 3, first + 1003, first + 1005], device=DEVICE)
    bits = torch.zeros(candidates_kernel.bitmap_words(passages), dtype=torch.int32, device=DEVICE)
    counts = torch.empty(candidates_kernel.count_blocks(passages), dtype=torch.int32, device=DEVICE)
    pids, total = torch.empty(passages, dtype=torch.int32, device=DEVICE), torch.zeros_like(counts[:1])
    cells = torch.tensor([[2], [1], [0]], dtype=torch.int32, device=DEVICE)
    candidates_kernel.mark_lists(cells, ivf_pids, ivf_offsets, bits)
    candidates_kernel.gather_marked(bits, counts, pids, total, None)
    want = torch.cat(lists).unique().int().to(DEVICE)
    assert int(total) == len(want)
    assert torch.equal(pids[: len(want)], want)
    del ivf_pids

    bits.fill_(-1)
    bits[-1] = (1 << passages % 32) - 1
    candidates_kernel.gather_marked(bits, counts, pids, total, None)
    assert int(total) == passages
    assert torch.equal(pids, torch.arange(passages, dtype=torch.int32, device=DEVICE))


@pytest.mark.gigabytes(10)
@pytest.mark.parametrize("listed", [False, True])
def test_selection(listed):
    n = 2 * LIST + 77
    scores = torch.zeros(n, device=DEVICE)
    scores[-500:] = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores[LIST : LIST + 3] = 4.0
    pids = torch.arange(n, dtype=torch.int32, device=DEVICE).flip(0) if listed else None
    out_pids, out_scores = torch.empty(100, dtype=torch.int32, device=DEVICE), torch.empty(100, device=DEVICE)
    out_count = torch.zeros_like(out_pids[:1])
    work = select_kernel.select_workspace(torch.device(DEVICE))
    count = torch.tensor([n], dtype=torch.int32, device=DEVICE)
    select_kernel.select_top(scores, pids, count, 100, out_pids, out_scores, out_count, work)
    best = scores[-500:].topk(97).indices.sort().values + n - 500
    best = torch.cat([torch.arange(LIST, LIST + 3, device=DEVICE), best])
    assert int(out_count) == 100
    assert torch.equal(out_pids.long(), n - 1 - best if listed else best)
    assert torch.equal(out_scores, scores[best])


@pytest.mark.gigabytes(10)
def test_clamped_pids():
    pids = torch.full((2 * LIST + 77,), 5, dtype=torch.int32, device=DEVICE)
    pids[-3:] = torch.tensor([9, 12, -1])
    out, flag = torch.full_like(pids, -7), torch.zeros_like(pids[:1])
    pids_kernel.clamp_pids(pids, torch.tensor([len(pids) - 1], dtype=torch.int32, device=DEVICE), 10, out, flag)
    assert int(flag) == len(pids) - 1
    assert out[-4:].tolist() == [5, 9, 0, 0]
    assert (out[:-3] == 5).all()
