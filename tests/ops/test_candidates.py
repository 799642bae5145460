"""Candidate generation against plain set arithmetic."""

import pytest
import torch

from plaid_tilemaxsim.ops import candidates_kernel as ck


def make_lists(num_passages, num_lists, generator):
    """Ascending inverted lists, some of them empty."""
    lists = []
    for _ in range(num_lists):
        n = int(torch.randint(0, min(num_passages, 700) + 1, (1,), generator=generator))
        lists.append(torch.randperm(num_passages, generator=generator)[:n].sort().values.int())
    offsets = torch.tensor([0] + [len(x) for x in lists]).cumsum(0)
    return lists, torch.cat(lists), offsets


def make_keys(scores):
    """Order-preserving keys of fp32 scores [C, LQP], ties to the smaller centroid."""
    image = scores.view(torch.int32).long()
    image = torch.where(image < 0, image ^ 0x7FFFFFFF, image)
    return ((image << 32) | (0x7FFFFFFF - torch.arange(len(scores)))[:, None]).contiguous()


@pytest.mark.parametrize("ncells", [1, 2, 5])
@pytest.mark.parametrize("max_keys", [16384, 8])
def test_select_cells_takes_the_best_centroids(ncells, max_keys, monkeypatch, device):
    monkeypatch.setattr(ck, "MAX_KEYS", max_keys)  # 8: the path for more keys than one program holds
    scores = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    scores[7] = scores[3]
    scores[3:8:4, 0] = 9.0  # a tie at the top: the smaller centroid comes first
    cells = torch.full((9, ncells), -1, dtype=torch.int32, device=device)
    ck.select_cells(make_keys(scores).to(device), cells)
    order = scores[:, :9].sort(dim=0, descending=True, stable=True).indices[:ncells].t()
    assert torch.equal(cells.cpu().long(), order)


@pytest.mark.parametrize("num_passages", [1, 31, 32, 33, 4097, 20000])
@pytest.mark.parametrize("allowed", [None, "even", "none"])
def test_union_of_lists_is_sorted_unique_and_leaves_a_clean_bitmap(num_passages, allowed, device):
    g = torch.Generator().manual_seed(num_passages)
    lists, ivf_pids, ivf_offsets = make_lists(num_passages, 50, g)
    pattern = {None: None, "even": 0x55555555, "none": 0}[allowed]
    nwords = ck.bitmap_words(num_passages)
    bits = torch.zeros(nwords, dtype=torch.int32, device=device)
    allow = None if pattern is None else torch.full((nwords,), pattern, dtype=torch.int32, device=device)
    counts = torch.full((ck.count_blocks(num_passages),), -5, dtype=torch.int32, device=device)
    for _ in range(2):  # the second query must find the bitmap clean
        cells = torch.randint(0, 50, (9, 2), generator=g).int()
        pids = torch.full((num_passages,), -1, dtype=torch.int32, device=device)
        total = torch.full((1,), -1, dtype=torch.int32, device=device)
        ck.mark_lists(cells.to(device), ivf_pids.to(device), ivf_offsets.to(device), bits)
        ck.gather_marked(bits, counts, pids, total, allow)
        want = torch.cat([lists[c] for c in cells.flatten().tolist()]).unique()
        if allowed is not None:
            want = want[want % 2 == 0] if pattern else want[:0]
        assert total.item() == len(want)
        assert torch.equal(pids[: len(want)].cpu(), want)
        assert (pids[len(want) :] == -1).all()
        assert not bits.any()
