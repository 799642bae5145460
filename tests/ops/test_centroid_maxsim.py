"""Centroid-only MaxSim: the kernel against the oracle, and bit for bit against integers."""

import pytest
import torch

from plaid_tilemaxsim.ops import api, centroid_kernel, reference, tuning
from tests.ops.ragged import LENGTHS, assert_scores, flags, make_collection, poisoned, threshold_at

SHAPES = [(1, 64), (5, 96), (32, 128), (33, 64), (64, 64), (130, 64)]


def scored(cs, c, pids=None, use_keep=False, **kwargs):
    n = len(LENGTHS) if pids is None else len(pids)
    out = poisoned(n, c.device)
    got = api.centroid_maxsim(cs, c.codes, c.offsets, pids, use_keep, out=out, impl="triton", **kwargs)
    assert got is out
    return out


@pytest.mark.parametrize(("LQ", "DIM"), SHAPES)
@pytest.mark.parametrize("negative", [False, True])
def test_matches_the_oracle(LQ, DIM, negative, device):
    c = make_collection(device, LQ, DIM, negative=negative)
    cs = c.centroid_scores()
    want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets)
    # half a step a query token, plus fp32 scores
    assert_scores(scored(cs, c), want, LQ * (0.51 * float(cs.scale) + 1e-6))
    assert not negative or (want[1:-1] < 0).all()


@pytest.mark.parametrize(("LQ", "DIM"), SHAPES)
def test_threshold_prunes_tokens(LQ, DIM, device):
    c = make_collection(device, LQ, DIM)
    threshold = threshold_at(c, 0.1)  # most tokens go, some passages lose all
    cs = c.centroid_scores(threshold)
    want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, threshold=threshold)
    assert 2 < int(want.isinf().sum()) < len(LENGTHS) - 2
    assert_scores(scored(cs, c, use_keep=True), want, LQ * (0.51 * float(cs.scale) + 1e-6))


@pytest.mark.parametrize("use_keep", [False, True])
def test_is_exact_on_the_table(use_keep, device):
    """Integers: the same bits as a plain sum of maxima of table entries, for any launch."""
    c = make_collection(device, 32, 64)
    cs = c.centroid_scores(0.25)
    table = cs.table[:, :32].long()
    want = torch.full((len(LENGTHS),), -float("inf"), device=device)
    for pid in range(len(LENGTHS)):
        code = c.codes[c.offsets[pid] : c.offsets[pid + 1]].long()
        code = code[flags(cs)[code].bool()] if use_keep else code
        if len(code):
            want[pid] = table[code].amax(0).sum().float() * cs.scale[0]
    assert torch.equal(scored(cs, c, use_keep=use_keep), want)
    assert not torch.equal(scored(cs, c, use_keep=use_keep), want.roll(1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pid_lists(dtype, device):
    c = make_collection(device, 32, 64)
    cs = c.centroid_scores()
    everything = scored(cs, c)
    for listed in ([], [5], [13, 0, 5, 5, 15, 1, 5, 12, 11, 10, 9, 8]):
        pids = torch.tensor(listed, dtype=dtype, device=device)
        assert torch.equal(scored(cs, c, pids), everything[pids.long()])


@pytest.mark.parametrize("count", [0, 1, 5, 12, 99])
def test_count_limits_what_is_written(count, device):
    c = make_collection(device, 32, 64)
    cs = c.centroid_scores()
    everything = scored(cs, c)
    pids = torch.arange(12, dtype=torch.int32, device=device)
    out = torch.full((12,), 7.0, device=device)
    device_count = torch.tensor([count], dtype=torch.int32, device=device)
    api.centroid_maxsim(cs, c.codes, c.offsets, pids, out=out, count=device_count, impl="triton")
    n = min(count, 12)
    assert torch.equal(out[:n], everything[:n])
    assert (out[n:] == 7.0).all()


@pytest.mark.parametrize("block", [16, 32, 128])
def test_block_size_changes_nothing(block, device, monkeypatch):
    c = make_collection(device, 32, 64)
    cs = c.centroid_scores()
    want = scored(cs, c)
    chosen = tuning.centroid_blocks(90, 32)
    other = tuning.CentroidBlocks(32, block, chosen.PACKED, 1)
    monkeypatch.setattr(centroid_kernel.tuning, "centroid_blocks", lambda arch, LQP: other)
    assert torch.equal(scored(cs, c), want)


def test_token_addresses_past_int32(device):
    """Codes beyond element 2**31: an int32 token number would read elsewhere. Memory is reserved, not touched."""
    first = 2**31 + 77
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of GPU memory")
    c = make_collection(device, 32, 64)
    cs = c.centroid_scores()
    try:
        codes = torch.empty(first + len(c.codes), dtype=torch.int32, device=device)
    except RuntimeError as error:
        pytest.skip(f"cannot reserve 8.6 GB: {error}")
    codes[first:] = c.codes
    offsets = torch.cat([c.offsets.new_zeros(1), c.offsets + first])
    pids = torch.arange(1, len(LENGTHS) + 1, device=device)
    got = api.centroid_maxsim(cs, codes, offsets, pids, impl="triton")
    assert torch.equal(got, scored(cs, c))
