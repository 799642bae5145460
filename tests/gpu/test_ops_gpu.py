"""What only a GPU can show of the kernels; tests/ops runs its own matrix there as well."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from triton.runtime.jit import JITFunction

from plaid_tilemaxsim.ops import api, centroid_kernel, reference, residual_fast_kernel, residual_kernel, tuning
from tests.ops.ragged import (
    Collection,
    assert_scores,
    fast_residual_tolerance,
    flags,
    make_collection,
    poisoned,
    residual_tolerance,
    threshold_at,
)

pytestmark = pytest.mark.gpu

# 3,000 passages with lengths like MS MARCO's (mean 68), a few empty ones among them
LENGTHS = tuple(
    torch.randn(3000, generator=torch.Generator().manual_seed(3)).mul(0.45).add(4.1).exp().int().clamp(max=300)
    .mul(torch.rand(3000, generator=torch.Generator().manual_seed(4)).gt(0.003)).tolist()
)  # fmt: skip


def collection(LQ: int, DIM: int, nbits: int, C: int = 4096) -> Collection:
    return make_collection("cuda", LQ, DIM, nbits, C, LENGTHS)


def exact(
    c: Collection, cs: api.CentroidScores, pids: Tensor | None = None, residuals: Tensor | None = None, **kwargs: Any
) -> Tensor:
    residuals = c.residuals if residuals is None else residuals
    return api.residual_maxsim(
        c.Q, cs, c.codes, residuals, *c.stored, c.bucket_weights, c.nbits, c.offsets, pids, **kwargs
    )


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("DIM", [96, 128, 384, 768])
@pytest.mark.parametrize("LQ", [8, 32, 300])
def test_both_residual_kernels_match_the_oracle(LQ, DIM, nbits):
    c = collection(LQ, DIM, nbits)
    cs = c.centroid_scores()
    want = reference.residual_maxsim(c.Q, *c.raw, dtype=torch.float64)
    pids = torch.randperm(len(LENGTHS), device="cuda")[:1000].int()
    kernels = {residual_kernel: residual_tolerance(c, cs)}
    if residual_fast_kernel.supported(nbits, DIM):
        kernels[residual_fast_kernel] = fast_residual_tolerance(c, cs)
    for kernel, tolerance in kernels.items():
        out = poisoned(len(LENGTHS), "cuda")
        arguments = (c.Q, cs, c.codes, c.residuals, *c.stored, c.bucket_weights, nbits, c.offsets)
        kernel.residual_maxsim(*arguments, None, out, None)
        assert_scores(out, want, tolerance)
        listed = poisoned(1000, "cuda")
        kernel.residual_maxsim(*arguments, pids, listed, None)
        assert_scores(listed, want[pids.long()], tolerance)


def test_the_mean_error_is_far_below_stocks_rounding():
    """Stock sums in fp16 and rounds a score near 16 to 1/64, so its mean error cannot be below 1/256."""
    c = collection(32, 128, 2)
    cs = c.centroid_scores()
    got = exact(c, cs).double()
    want = reference.residual_maxsim(c.Q, *c.raw)
    finite = ~want.isinf()
    assert float((got - want)[finite].abs().mean()) < 1 / 2560
    assert float((got - want)[finite].abs().max()) < 2e-3


def test_residuals_in_pinned_host_memory():
    c = collection(32, 128, 2)
    cs = c.centroid_scores()
    pids = torch.arange(0, len(LENGTHS), 7, device="cuda")
    want = exact(c, cs, pids)
    pinned = c.residuals.cpu().pin_memory()
    assert torch.equal(exact(c, cs, pids, pinned), want)
    with pytest.raises(ValueError, match="residuals: expected cuda:0 or pinned, got pageable memory"):
        exact(c, cs, pids, c.residuals.cpu())


@pytest.mark.parametrize("LQ", [1, 32, 64, 300])
@pytest.mark.parametrize("use_keep", [False, True])
def test_centroid_maxsim_at_size(LQ, use_keep):
    c = collection(LQ, 128, 2)
    threshold = threshold_at(c, 0.05)
    cs = c.centroid_scores(threshold)
    kept = flags(cs).bool()
    assert torch.equal(kept, (c.centroids.double() @ c.Q.double().T).amax(1) >= threshold)
    assert 0.04 < float(kept.double().mean()) < 0.06
    limit = threshold if use_keep else None
    want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, threshold=limit)
    got = api.centroid_maxsim(cs, c.codes, c.offsets, use_keep=use_keep)
    assert_scores(got, want, LQ * (0.51 * float(cs.scale) + 1e-6))


def test_packed_and_portable_maxima_are_equal(monkeypatch):
    c = collection(32, 64, 2)
    cs = c.centroid_scores()
    chosen = tuning.centroid_blocks(tuning.arch(torch.device("cuda")), 32)
    want = api.centroid_maxsim(cs, c.codes, c.offsets)
    for packed in {False, chosen.PACKED}:
        for BLOCK_N in (16, 32, 64, 128):
            for programs in (1, 8, 24):
                blocks = tuning.CentroidBlocks(32, BLOCK_N, packed, programs)
                monkeypatch.setattr(centroid_kernel.tuning, "centroid_blocks", lambda arch, LQP, b=blocks: b)
                assert torch.equal(api.centroid_maxsim(cs, c.codes, c.offsets), want)


@pytest.mark.parametrize("ncells", [1, 2, 4, 16])
def test_cells_over_many_blocks(ncells):
    c = collection(32, 128, 2, C=50_000)
    cells = c.centroid_scores(ncells=ncells).cells
    assert cells is not None
    keys = cells.flatten(0, 1)[:, :32].topk(ncells, 0).values
    got = 0x7FFFFFFF - (keys & 0x7FFFFFFF)
    s = c.centroids.double() @ c.Q.double().T
    # ids may swap where two centroids score the same to fp32; their scores may not differ by more
    assert float((s.gather(0, got) - s.topk(ncells, 0).values).abs().max()) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("DIM", [64, 96, 128, 256, 384, 768, 1024])
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 32), (4, 32), (1, 128), (2, 300)])
def test_dense_at_size(NQ, LQ, DIM, dtype):
    g = torch.Generator("cuda").manual_seed(1)
    Q = normalize(torch.randn(NQ, LQ, DIM, device="cuda", generator=g), dim=-1).to(dtype)
    lengths = torch.tensor(LENGTHS, device="cuda")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    D = normalize(torch.randn(int(offsets[-1]), DIM, device="cuda", generator=g), dim=-1).to(dtype)
    for got, q in zip(api.dense_maxsim(Q, D, offsets=offsets), Q, strict=True):
        assert_scores(got, reference.maxsim(q, D, offsets), LQ * DIM * 2.0**-24)


def every_operation(c: Collection, dense: Tensor, pids: Tensor, count: Tensor) -> list[Tensor]:
    cs = c.centroid_scores(0.25, cmax=1.01, ncells=2)
    outs = [torch.zeros(len(pids), device="cuda") for _ in range(4)]
    api.centroid_maxsim(cs, c.codes, c.offsets, pids, True, outs[0], count)
    api.centroid_maxsim(cs, c.codes, c.offsets, pids, False, outs[1], count)
    exact(c, cs, pids, out=outs[2], count=count)
    api.dense_maxsim(c.Q.half(), dense, offsets=c.offsets, pids=pids, out=outs[3], count=count)
    return outs


def test_no_operation_waits_and_all_can_be_recorded():
    c = collection(32, 128, 2)
    dense = reference.decompress(*c.raw[:5], dtype=torch.float16)
    pids = torch.arange(512, device="cuda", dtype=torch.int32)
    count = torch.tensor([300], device="cuda", dtype=torch.int32)
    every_operation(c, dense, pids, count)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = every_operation(c, dense, pids, count)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = every_operation(c, dense, pids, count)
    graph.replay()
    for got, w in zip(recorded, want, strict=True):
        assert torch.equal(got, w)
        assert (got[300:] == 0).all()
    # the recording follows the buffers: other passages, another count, another query
    pids.copy_(torch.arange(1000, 1512, device="cuda", dtype=torch.int32))
    count.fill_(100)
    c.Q.copy_(c.Q.roll(3, 1))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [r.clone() for r in recorded]
    for got, w in zip(replayed, every_operation(c, dense, pids, count), strict=True):
        assert torch.equal(got, w)
        assert (got[100:] == 0).all()
        assert not torch.equal(got[:100], want[0][:100])


def test_sizes_that_change_compile_nothing(monkeypatch):
    c = collection(32, 128, 2)
    cs = c.centroid_scores(0.25, cmax=1.01, ncells=2)

    def search(n: int) -> None:
        pids = torch.randint(0, len(LENGTHS), (n,), device="cuda", dtype=torch.int32)
        api.centroid_maxsim(cs, c.codes, c.offsets, pids, True)
        exact(c, cs, pids)

    def refuse(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{self.__name__} was compiled again")

    search(513)
    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    for n in (1, 16, 17, 32, 1000, 2999, 64):
        search(n)


def test_runs_repeat_bit_for_bit():
    c = collection(32, 128, 2)
    first = exact(c, c.centroid_scores())
    for _ in range(5):
        assert torch.equal(exact(c, c.centroid_scores()), first)
