"""Residual MaxSim, the portable kernel, against the oracle."""

import pytest
import torch

from plaid_tilemaxsim.ops import api, reference, residual_kernel
from tests.ops.ragged import LENGTHS, assert_scores, make_collection, poisoned, quantised, residual_tolerance

# (LQ, DIM, nbits): every bit width, one and several blocks of bytes, of columns, of DIM that is no power of two
SHAPES = [
    (1, 64, 1), (5, 96, 2), (32, 128, 1), (32, 128, 2), (32, 128, 4), (16, 64, 8), (33, 64, 4), (70, 96, 1),
    (32, 384, 2),
]  # fmt: skip
WIDE_SHAPES = [(32, 384, 1), (32, 384, 4), (5, 192, 2), (130, 768, 2), (32, 768, 4), (300, 128, 2)]


def scored(c, cs, pids=None, out=None, count=None, stored=None):
    inv_norms, lo, step = quantised(c.inv_norms) if stored is None else stored
    n = len(LENGTHS) if pids is None else len(pids)
    out = poisoned(n, c.device) if out is None else out
    residual_kernel.residual_maxsim(
        c.Q, cs, c.codes, c.residuals, inv_norms, lo, step, c.bucket_weights, c.nbits, c.offsets, pids, out, count
    )  # fmt: skip
    return out


def check(LQ, DIM, nbits, device, negative=False):
    c = make_collection(device, LQ, DIM, nbits, negative=negative)
    cs = c.centroid_scores()
    want = reference.residual_maxsim(c.Q, *c.raw)
    assert_scores(scored(c, cs), want, residual_tolerance(c, cs))
    assert not negative or (want[1:-1] < 0).all()


@pytest.mark.parametrize(("LQ", "DIM", "nbits"), SHAPES)
def test_matches_the_oracle(LQ, DIM, nbits, device):
    check(LQ, DIM, nbits, device)


@pytest.mark.slow
@pytest.mark.parametrize(("LQ", "DIM", "nbits"), WIDE_SHAPES)
def test_matches_the_oracle_wide(LQ, DIM, nbits, device):
    check(LQ, DIM, nbits, device)


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_negative_similarities_are_not_clamped(nbits, device):
    check(8, 64, nbits, device, negative=True)


def test_inverse_norms_may_be_fp32(device):
    c = make_collection(device, 8, 64)
    cs = c.centroid_scores()
    want = reference.residual_maxsim(c.Q, *c.raw)
    assert_scores(scored(c, cs, stored=(c.inv_norms, 0.0, 1.0)), want, residual_tolerance(c, cs))


def test_a_token_of_norm_zero_has_similarity_zero(device):
    c = make_collection(device, 8, 64, lengths=(3, 4))
    c.centroids.zero_()
    c.bucket_weights.zero_()
    cs = c.centroid_scores()
    zero = torch.zeros_like(c.inv_norms)
    out = poisoned(2, device)
    residual_kernel.residual_maxsim(
        c.Q, cs, c.codes, c.residuals, zero, 0.0, 1.0, c.bucket_weights, 2, c.offsets, None, out, None
    )  # fmt: skip
    assert (out == 0).all()
    assert (reference.residual_maxsim(c.Q, *c.raw) == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pid_lists(dtype, device):
    c = make_collection(device, 32, 64)
    cs = c.centroid_scores()
    everything = scored(c, cs)
    for listed in ([], [5], [13, 0, 5, 5, 15, 1, 5, 12]):
        pids = torch.tensor(listed, dtype=dtype, device=device)
        assert torch.equal(scored(c, cs, pids), everything[pids.long()])


@pytest.mark.parametrize("count", [0, 3, 99])
def test_count_limits_what_is_written(count, device):
    c = make_collection(device, 8, 64)
    cs = c.centroid_scores()
    everything = scored(c, cs)
    pids = torch.arange(8, dtype=torch.int32, device=device)
    out = torch.full((8,), 7.0, device=device)
    scored(c, cs, pids, out, torch.tensor([count], dtype=torch.int32, device=device))
    n = min(count, 8)
    assert torch.equal(out[:n], everything[:n])
    assert (out[n:] == 7.0).all()


def test_byte_addresses_past_int32(device):
    """Residual rows beyond byte 2**31 (67,108,864 tokens of 32 bytes). Memory is reserved, not touched."""
    first = 2**26 + 77
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 4 << 30:
        pytest.skip("needs 4 GB of GPU memory")
    c = make_collection(device, 32, 128, 2)
    cs = c.centroid_scores()
    want = scored(c, cs)
    T = first + len(c.codes)
    stored, lo, step = quantised(c.inv_norms)

    def moved(x):
        big = torch.empty(T, *x.shape[1:], dtype=x.dtype, device=device)
        big[first:] = x
        return big

    out = poisoned(len(LENGTHS), device)
    residual_kernel.residual_maxsim(
        c.Q, cs, moved(c.codes), moved(c.residuals), moved(stored), lo, step, c.bucket_weights, 2,
        torch.cat([c.offsets.new_zeros(1), c.offsets + first]),
        torch.arange(1, len(LENGTHS) + 1, device=device), out, None,
    )  # fmt: skip
    assert torch.equal(out, want)


def test_api_route(device):
    """The public function on the same tensors: whichever kernel it chooses meets the same budget."""
    c = make_collection(device, 32, 128, 2)
    cs = c.centroid_scores()
    stored, lo, step = quantised(c.inv_norms)
    got = api.residual_maxsim(
        c.Q, cs, c.codes, c.residuals, stored, lo, step, c.bucket_weights, 2, c.offsets,
        out=poisoned(len(LENGTHS), device), impl="triton",
    )  # fmt: skip
    assert_scores(got, reference.residual_maxsim(c.Q, *c.raw), residual_tolerance(c, cs))
