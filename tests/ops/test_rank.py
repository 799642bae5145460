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
        scores[2], scores[3], scores[4], scores[5] = torch.nan, -torch.inf, -0.0, 0.0
    # in any order, some twice
    pids = torch.randint(0, max(cap, 2), (cap,), generator=torch.Generator().manual_seed(k), dtype=torch.int32)
    if not listed:
        pids = torch.arange(cap, dtype=torch.int32)
    packed = torch.full((1 + 2 * k,), -9, dtype=torch.int32, device=device)
    count = torch.tensor([n], dtype=torch.int32, device=device)
    rank_kernel.rank(scores.to(device), pids.to(device) if listed else None, count, k, packed)
    packed = packed.cpu()
    scores[:n] = scores[:n].nan_to_num(-torch.inf, neginf=-torch.inf)  # NaN ranks as a passage without tokens
    by_pid = pids[:n].sort(stable=True).indices
    want = by_pid[torch.sort((scores[:n] + 0.0)[by_pid], descending=True, stable=True).indices][:k]
    taken = min(n, k)
    assert packed[0] == taken
    assert torch.equal(packed[1 : 1 + taken], pids[want])
    assert torch.equal(packed[1 + k : 1 + k + taken].view(torch.float32), scores[want] + 0.0)
    assert (packed[1 + taken : 1 + k] == -9).all()
    assert (packed[1 + k + taken :] == -9).all()
