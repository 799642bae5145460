"""Cuts of an index: balanced, complete, each an index of its own; norms on one common scale."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.lists import build_pid_lists
from plaid_tilemaxsim.index.resident import load_resident, quantised_inverse_norms
from plaid_tilemaxsim.index.shards import load_shards, part_of, parts_of, shard_bounds, with_inverse_norms
from tests.synthetic import make_index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PlaidIndex:
    return read_index(make_index(tmp_path_factory.mktemp("index"), n=200, C=32, chunk_size=64, empty=0.1))


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


@pytest.mark.parametrize("n", [1, 2, 3, 7, 150])
def test_shards_are_balanced_and_have_tokens(index: PlaidIndex, n: int) -> None:
    bounds = shard_bounds(index.offsets, n)
    assert (bounds[0], bounds[-1]) == (0, 200)
    assert len(bounds) <= n + 1
    sizes = index.offsets[bounds].diff()
    assert (sizes > 0).all()
    if n < 10:
        assert len(bounds) == n + 1
        assert (sizes - index.num_tokens / n).abs().max() <= int(index.doclens.max())


@pytest.mark.parametrize(
    ("lengths", "n", "bounds"),
    [
        ([], 3, [0, 0]),
        ([0, 0, 0], 2, [0, 3]),
        ([5], 4, [0, 1]),
        ([0, 9, 0, 0], 2, [0, 4]),
        ([1, 1, 1], 5, [0, 1, 2, 3]),
        ([1, 100, 1], 3, [0, 1, 2, 3]),
        ([2, 2, 2, 2], 2, [0, 2, 4]),
    ],
)
def test_bounds_of_odd_indexes(lengths: list[int], n: int, bounds: list[int]) -> None:
    found = shard_bounds(offsets(lengths), n)
    assert (found[0], found[-1]) == (bounds[0], bounds[-1])
    assert len(found) <= len(bounds)
    if len(found) > 2:
        assert (offsets(lengths)[found].diff() > 0).all()


@pytest.mark.parametrize("n", [0, -1, True, 1.5, None])
def test_bounds_want_a_count(n: object) -> None:
    with pytest.raises(ValueError, match="n: expected an integer >= 1"):
        shard_bounds(offsets([1, 1]), n)  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", [[0, 100, 200], [0, 1, 63, 64, 65, 200], [0, 200]])
def test_parts_hold_what_the_index_holds(index: PlaidIndex, bounds: list[int]) -> None:
    parts = parts_of(index, bounds)
    assert torch.equal(torch.cat([part.codes() for part in parts]), index.codes())
    assert torch.equal(torch.cat([part.residuals() for part in parts]), index.residuals())
    assert torch.equal(torch.cat([part.doclens for part in parts]), index.doclens)
    for part in parts:
        part.verify_contents()
        pids, list_offsets = build_pid_lists([(part.codes(), part.doclens)], part.num_centroids)
        assert torch.equal(part.ivf_pids, pids)
        assert torch.equal(part.ivf_offsets, list_offsets)
        assert part.offsets.tolist() == [0, *itertools.accumulate(part.doclens.tolist())]


def test_part_of_wants_passages_of_the_index(index: PlaidIndex) -> None:
    assert torch.equal(part_of(index, 3, 9).doclens, index.doclens[3:9])
    for begin, end in ((-1, 3), (4, 3), (0, 201)):
        with pytest.raises(ValueError, match="passages: expected 0 <= begin <= end <= 200"):
            part_of(index, begin, end)


def test_lists_that_do_not_ascend_are_refused(index: PlaidIndex) -> None:
    wrong = dataclasses.replace(index, ivf_pids=index.ivf_pids.flip(0))
    with pytest.raises(ValueError, match="strictly ascending"):
        parts_of(wrong, [0, 100, 200])


def test_norms_of_all_shards_have_one_scale(index: PlaidIndex, device: str) -> None:
    """The bits of the undivided index, which each shard by its own range does not have."""
    wanted, low, step = quantised_inverse_norms(
        index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits
    )
    shards = [load_resident(part, "cpu") for part in parts_of(index, [0, 7, 100, 200])]
    shards = with_inverse_norms([dataclasses.replace(shard, inv_norms=None) for shard in shards])
    assert {(shard.inv_norm_lo, shard.inv_norm_step) for shard in shards} == {(low, step)}
    assert wanted.dtype == torch.uint16
    assert torch.equal(torch.cat([shard.inv_norms.int() for shard in shards]), wanted.int())
    alone = with_inverse_norms([dataclasses.replace(shards[0], inv_norms=None)])[0]
    assert (alone.inv_norm_lo, alone.inv_norm_step) != (low, step)


def test_load(index: PlaidIndex) -> None:
    sharded = load_shards(index, ["cpu"] * 3)
    assert sharded.starts[0] == 0
    assert len(sharded.shards) == 3
    assert (sharded.num_passages, sharded.num_tokens) == (200, index.num_tokens)
    assert len({shard.centroids.data_ptr() for shard in sharded.shards}) == 1
    dense = load_shards(index, ["cpu"] * 3, codec="dense", shared=[sharded])
    for ours, theirs in zip(dense.shards, sharded.shards, strict=True):
        assert ours.codes.data_ptr() == theirs.codes.data_ptr()


def test_devices_of_one_type(index: PlaidIndex) -> None:
    for devices in ([], ["cpu", "cuda:0"]):
        with pytest.raises(ValueError, match="devices: expected one or more of one type"):
            load_shards(index, devices)
