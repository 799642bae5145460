"""Ranking against a stable sort."""

import pytest
import torch

from plaid_tilemaxsim.ops import rank_kernel


@pytest.mark.parametrize(("cap", "n", "k"), [(1, 1, 1), (40, 0, 10), (40, 7, 10), (300, 300, 300), (520, 500, 33)])
@pytest.mark.parametrize("listed", [True, False])
def test_rank_is_a_stable_sort(cap, n, k, listed, device):
    scores = torch.full((cap,), torch.nan)  # behind n nothing may be read
    scores[:n] = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 5).round() / 4  # many ties
    if n > 6:
        scores[3], scores[4], scores[5] = -torch.inf, -0.0, 0.0
    pids = torch.arange(cap, dtype=torch.int32) * 7
    packed = torch.full((1 + 2 * k,), -9, dtype=torch.int32, device=device)
    count = torch.tensor([n], dtype=torch.int32, device=device)
    rank_kernel.rank(scores.to(device), pids.to(device) if listed else None, count, k, packed)
    packed = packed.cpu()
    want = torch.sort(scores[:n] + 0.0, descending=True, stable=True)
    taken = min(n, k)
    assert packed[0] == taken
    assert torch.equal(packed[1 : 1 + taken], pids[want.indices[:k]] if listed else want.indices[:k].int())
    assert torch.equal(packed[1 + k : 1 + k + taken].view(torch.float32), want.values[:k])
    assert (packed[1 + taken : 1 + k] == -9).all()
    assert (packed[1 + k + taken :] == -9).all()
