"""Residual MaxSim in fp32 throughout, against the oracle."""

from dataclasses import replace

import pytest
import torch

from plaid_tilemaxsim.ops import api, reference, residual_fp32_kernel
from tests.ops.ragged import LENGTHS, assert_scores, fp32_tolerance, make_collection, poisoned

# (LQ, DIM, nbits): every bit width, one and several blocks of dimensions and of columns, DIM that no block divides
SHAPES = [
    (1, 64, 1), (5, 96, 2), (32, 128, 1), (32, 128, 2), (32, 128, 4), (16, 64, 8), (33, 64, 4), (70, 96, 1),
    (3, 8, 1), (17, 40, 2), (32, 384, 2),
]  # fmt: skip
WIDE_SHAPES = [(32, 384, 1), (32, 384, 4), (5, 192, 2), (130, 768, 2), (32, 1024, 4), (300, 128, 2), (1024, 16, 8)]


def scored(c, pids=None, out=None, count=None, residuals=None):
    out = poisoned(len(LENGTHS) if pids is None else len(pids), c.device) if out is None else out
    residual_fp32_kernel.residual_maxsim(
        c.Q, c.centroids, c.codes, c.residuals if residuals is None else residuals, c.bucket_weights, c.nbits,
        c.offsets, pids, out, count,
    )  # fmt: skip
    return out


def check(LQ, DIM, nbits, device, negative=False):
    c = make_collection(device, LQ, DIM, nbits, negative=negative)
    want = reference.residual_maxsim(c.Q, *c.raw)
    assert_scores(scored(c), want, fp32_tolerance(c, want))
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


@pytest.mark.parametrize("what", ["bucket_weights", "Q"])
def test_the_budget_does_not_cover_fp16(what, device):
    """What the fast kernel rounds, and one product of fp16 or TF32 does too: fp32 is what is asked for."""
    c = make_collection(device, 32, 128)
    want = reference.residual_maxsim(c.Q, *c.raw)
    setattr(c, what, getattr(c, what).half().float())
    off = (scored(c) - want)[1:-1].abs()
    assert off.max() > 2 * fp32_tolerance(c, want)


@pytest.mark.parametrize(("query", "token"), [(2.0**-90, 1), (1e17, 1), (1, 6e4), (1, 2e-4), (3e5, 3e4)])
@pytest.mark.parametrize(("DIM", "nbits"), [(128, 2), (48, 1), (384, 4)])
def test_magnitudes_far_from_those_of_fp16(DIM, nbits, query, token, device):
    c = make_collection(device, 5, DIM, nbits, lengths=(3, 20, 0, 66))
    weights = c.bucket_weights
    c.Q, c.centroids, c.bucket_weights = c.Q * query, (c.centroids.float() * token).half(), weights * token
    want = reference.residual_maxsim(c.Q, *c.raw) / query
    assert_scores(scored(c, out=poisoned(4, device)) / query, want, fp32_tolerance(c, want))


def test_every_query_token_has_its_own_magnitude(device):
    c = make_collection(device, 6, 64)
    scales = 2.0 ** torch.tensor([0, 30, -60, 7, -9, 60], device=device)
    alone = [scored(replace(c, Q=c.Q[i : i + 1])) for i in range(6)]
    scaled = [scored(replace(c, Q=c.Q[i : i + 1] * scales[i])) / scales[i] for i in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(alone, scaled, strict=True))
    c.Q = c.Q * scales[:, None]
    want = reference.residual_maxsim(c.Q, *c.raw)
    assert_scores(scored(c) / scales.max(), want / scales.max(), fp32_tolerance(c, want / scales.max()))


def test_zeros_in_the_query_add_nothing(device):
    c = make_collection(device, 5, 64)
    c.Q[1:] = 0
    assert torch.equal(scored(c), scored(replace(c, Q=c.Q[:1])))


def test_a_token_of_norm_zero_has_similarity_zero(device):
    c = make_collection(device, 8, 64, lengths=(3, 4))
    c.centroids.zero_()
    c.bucket_weights.zero_()
    assert (scored(c, out=poisoned(2, device)) == 0).all()
    assert (reference.residual_maxsim(c.Q, *c.raw) == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bits_do_not_depend_on_the_list(dtype, device):
    c = make_collection(device, 40, 64)
    everything = scored(c)
    for listed in ([], [5], [13, 0, 5, 5, 15, 1, 5, 12]):
        pids = torch.tensor(listed, dtype=dtype, device=device)
        assert torch.equal(scored(c, pids), everything[pids.long()])


@pytest.mark.parametrize("count", [0, 3, 99])
def test_count_limits_what_is_written(count, device):
    c = make_collection(device, 40, 64)
    everything = scored(c)
    pids = torch.arange(8, dtype=torch.int32, device=device)
    out = torch.full((8,), 7.0, device=device)
    scored(c, pids, out, torch.tensor([count], dtype=torch.int32, device=device))
    n = min(count, 8)
    assert torch.equal(out[:n], everything[:n])
    assert (out[n:] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("DIM", "nbits"), [(128, 2), (96, 1), (64, 8)])
def test_pinned_residuals_have_the_same_bits(DIM, nbits):
    c = make_collection("cuda", 32, DIM, nbits)
    assert torch.equal(scored(c, residuals=c.residuals.cpu().pin_memory()), scored(c))


@pytest.mark.parametrize("impl", ["triton", "reference", "torch"])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_api_routes(impl, nbits, device):
    if device == "cuda" and impl == "torch":
        pytest.skip("torch is for CPU tensors")
    c = make_collection(device, 5, 48, nbits)
    pids = torch.tensor([3, 0, 9, 9, 12, 15], device=device)
    count = torch.tensor([5], dtype=torch.int32, device=device)
    out = api.residual_maxsim_fp32(
        c.Q, c.centroids, c.codes, c.residuals, c.bucket_weights, nbits, c.offsets, pids, poisoned(6, device), count,
        impl=impl,
    )  # fmt: skip
    want = reference.residual_maxsim(c.Q, *c.raw)
    assert_scores(out[:5], want[pids[:5]], fp32_tolerance(c, want))
    assert out[5].isnan()
    everything = api.residual_maxsim_fp32(
        c.Q, c.centroids, c.codes, c.residuals, c.bucket_weights, nbits, c.offsets, impl=impl
    )
    assert_scores(everything, want, fp32_tolerance(c, want))


def test_wrong_arguments(device):
    c = make_collection(device, 5, 64)
    given = {
        "Q": c.Q, "centroids": c.centroids, "codes": c.codes, "residuals": c.residuals,
        "bucket_weights": c.bucket_weights, "nbits": 2, "offsets": c.offsets,
    }  # fmt: skip
    wrong = {
        "Q": c.Q[:0], "centroids": c.centroids[:, :32], "codes": c.codes.long(), "residuals": c.residuals[:, :8],
        "bucket_weights": c.bucket_weights[:2], "nbits": 3, "offsets": c.offsets.int(),
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"(LQ|{name}\S*): expected"):
            api.residual_maxsim_fp32(**{**given, name: value}, impl="triton")
    with pytest.raises(ValueError, match=r"centroids\.dtype: expected torch\.float16"):
        api.residual_maxsim_fp32(**{**given, "centroids": c.centroids.float()}, impl="triton")
