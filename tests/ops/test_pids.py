import pytest
import torch

from plaid_tilemaxsim.ops.pids_kernel import clamp_pids


@pytest.mark.parametrize(
    ("pids", "count", "position"),
    [([0, 9, 5], 3, 0), ([0, 10, 5], 3, 2), ([-1, 3, 12, 5], 4, 3), ([3, 4, 99, -7], 2, 0), ([7] * 3000, 3000, 0)],
)
def test_pids_outside_are_clamped_and_reported(pids, count, position, device):
    given = torch.tensor(pids, dtype=torch.int32, device=device)
    out = torch.full_like(given, -5)
    flag = torch.full((1,), 77, dtype=torch.int32, device=device)
    clamp_pids(given, torch.tensor([count], dtype=torch.int32, device=device), 10, out, flag)
    want = [p if i < count and 0 <= p < 10 else 0 for i, p in enumerate(pids)]
    assert out.tolist() == want
    assert flag.item() == position
