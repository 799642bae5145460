"""Radix select against a stable sort."""

import pytest
import torch

from plaid_tilemaxsim.ops import select_kernel as sk


def run(scores, n, m, device):
    cap = len(scores)
    pids = torch.arange(cap, dtype=torch.int32) * 3
    out_pids = torch.full((max(m, 1),), -7, dtype=torch.int32, device=device)
    out_scores = torch.full((max(m, 1),), -99.0, device=device)
    out_count = torch.full((1,), -1, dtype=torch.int32, device=device)
    work = sk.select_workspace(torch.device(device))
    count = torch.tensor([n], dtype=torch.int32, device=device)
    for _ in range(2):  # the first leaves its workspace as the second needs it
        sk.select_top(scores.to(device), pids.to(device), count, m, out_pids, out_scores, out_count, work)
    return pids, out_pids.cpu(), out_scores.cpu(), int(out_count)


@pytest.mark.parametrize(
    ("n", "m"), [(0, 4), (1, 0), (1, 4), (5, 5), (100, 0), (100, 7), (5000, 33), (9000, 4096), (300, 500)]
)
def test_select_is_a_stable_top_in_input_order(n, m, device):
    scores = torch.full((10000,), float("nan"))  # behind n nothing may be read
    scores[:n] = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 5).round() / 4  # many ties
    if n > 10:
        scores[3], scores[4], scores[5] = -float("inf"), -0.0, 0.0
    pids, got, got_scores, taken = run(scores, n, m, device)
    best = torch.sort(scores[:n] + 0.0, descending=True, stable=True).indices[:m].sort().values
    assert taken == min(m, n)
    assert torch.equal(got[:taken], pids[best])
    assert torch.equal(got_scores[:taken], scores[best])
    assert (got[taken:] == -7).all()


def test_all_scores_equal_keeps_the_first_pids(device):
    pids, got, _, taken = run(torch.full((5000,), -1.5), 5000, 10, device)
    assert taken == 10
    assert torch.equal(got, pids[:10])


def test_passages_at_minus_infinity_rank_last_by_pid(device):
    scores = torch.full((64,), -float("inf"))
    scores[50] = -3.0
    pids, got, _, taken = run(scores, 64, 3, device)
    assert taken == 3
    assert got.tolist() == pids[[0, 1, 50]].tolist()


@pytest.mark.parametrize("kind", ["near", "wide", "below the window", "above the window", "bits", "two values"])
@pytest.mark.parametrize("m", [1, 40, 2000])
def test_whatever_the_scores(kind, m, device):
    """The first histogram is made for scores like those of the sample; the sample may mislead."""
    g = torch.Generator().manual_seed(3)
    n = 6000
    scores = {
        "near": 20 + torch.randn(n, generator=g) * 1e-5,
        "wide": torch.randn(n, generator=g) * 10.0 ** torch.randint(-30, 30, (n,), generator=g),
        "below the window": -torch.rand(n, generator=g) * 1e-20,
        "above the window": torch.rand(n, generator=g),
        "bits": torch.randint(-(2**31), 2**31, (n,), generator=g).int().view(torch.float32),
        "two values": torch.randint(0, 2, (n,), generator=g).float(),
    }[kind]
    sampled = torch.arange(sk.SAMPLE) * (n // sk.SAMPLE)
    if kind == "below the window":
        scores[sampled] = torch.arange(sk.SAMPLE) % 3 * 1e30
    if kind == "above the window":
        scores[sampled] = -1e30
    scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    pids, got, got_scores, taken = run(scores, n, m, device)
    best = torch.sort(scores + 0.0, descending=True, stable=True).indices[:m].sort().values
    assert taken == m
    assert torch.equal(got, pids[best])
    assert torch.equal(got_scores, scores[best])
