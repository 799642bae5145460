"""Inverse norms against decompression in float64."""

import pytest
import torch

from plaid_tilemaxsim.ops import norms_kernel, reference


@pytest.mark.parametrize(("dim", "nbits"), [(64, 1), (128, 2), (96, 4), (64, 8), (384, 2)])
@pytest.mark.parametrize("n", [1, 32, 77])
def test_inverse_norms(dim, nbits, n, device):
    g = torch.Generator().manual_seed(n)
    centroids = torch.nn.functional.normalize(torch.randn(9, dim, generator=g), dim=-1).half()
    weights = torch.randn(2**nbits, generator=g) / 20
    codes = torch.randint(0, 9, (n,), generator=g, dtype=torch.int32)
    residuals = torch.randint(0, 256, (n, dim * nbits // 8), generator=g, dtype=torch.uint8)
    got = norms_kernel.inverse_norms(
        codes.to(device), residuals.to(device), centroids.to(device), weights.to(device), nbits
    ).cpu()
    D = centroids[codes.long()].double() + reference.decode_residuals(residuals, nbits, weights, torch.float64)
    want = 1 / D.norm(dim=-1)
    # fp32 sums of dim squares: dim / 2 roundings of 2^-24 at worst
    assert ((got - want).abs() <= want * dim * 2.0**-24).all()
    if n > 1:
        assert ((got.roll(1) - want).abs() > want * dim * 2.0**-24).any()


def test_a_zero_vector_gets_zero(device):
    zeros = torch.zeros(1, 64, dtype=torch.float16, device=device)
    residuals = torch.zeros(1, 16, dtype=torch.uint8, device=device)
    codes = torch.zeros(1, dtype=torch.int32, device=device)
    assert norms_kernel.inverse_norms(codes, residuals, zeros, torch.zeros(4, device=device), 2).item() == 0
