"""Merged shards against the funnel's steps on the undivided scores, written out with Python's sort."""

import itertools

import pytest
import torch

from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.merge import Survivors, merge


def whole(n, seed):
    """Scores with many ties, as dict rows (pid, first, second, exact); some -inf."""
    g = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, 12, (n,), generator=g).float() for _ in range(3)]
    columns[0][::7] = -torch.inf
    return list(zip(range(n), *(column.tolist() for column in columns), strict=True))


def best(rows, column, m):
    return sorted(rows, key=lambda row: (-row[column], row[0]))[:m]


def expected(rows, params):
    if params.mode == "plaid":
        rows = best(best(rows, 1, params.ndocs), 2, params.ndocs // 4)
    elif params.prefilter is not None:
        rows = best(rows, 2, params.prefilter)
    return best(rows, 3, len(rows) if params.k is None else params.k)


def shard(rows, params, generator):
    if params.mode == "plaid":
        rows = best(rows, 1, params.ndocs)
    elif params.prefilter is not None:
        rows = best(rows, 2, params.prefilter)
    else:
        rows = best(rows, 3, len(rows) if params.k is None else params.k)
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    pids, first, second, exact = (torch.tensor([row[i] for row in rows]) for i in range(4))
    plaid, scored = params.mode == "plaid", params.mode == "plaid" or params.prefilter is not None
    return Survivors(pids.int(), exact.float(), first.float() if plaid else None, second.float() if scored else None)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize(
    "params",
    [
        SearchParams(k=7, ndocs=64),
        SearchParams(k=100, ndocs=64),
        SearchParams(k=None, ndocs=4),
        SearchParams(k=9, ndocs=1 << 20),
        SearchParams(k=9, mode="rerank"),
        SearchParams(k=None, mode="exhaustive"),
        SearchParams(k=9, mode="exhaustive", prefilter=31),
    ],
)
def test_equals_the_undivided_funnel(params, shards):
    for n in (0, 3, 300):
        rows = whole(n, seed=n + shards)
        g = torch.Generator().manual_seed(n)
        cuts = [0, *sorted(torch.randint(0, n + 1, (shards - 1,), generator=g).tolist()), n]
        parts = [shard(rows[a:b], params, g) for a, b in itertools.pairwise(cuts)]
        pids, scores = merge(parts, params)
        wanted = expected(rows, params)
        assert pids.tolist() == [row[0] for row in wanted]
        assert scores.tolist() == [row[3] for row in wanted]
        assert pids.dtype == torch.int32


def test_a_shard_that_prunes_by_itself_would_be_wrong():
    """Why shards return all ndocs: the second limit, applied within a shard, loses passages of the whole."""
    params = SearchParams(k=1, ndocs=4)
    ones = [Survivors(torch.tensor([p]).int(), torch.tensor([1.0 - p]), torch.tensor([s]), torch.tensor([float(p)]))
            for p, s in ((0, 9.0), (1, 8.0), (2, 7.0), (3, 6.0), (4, 1.0))]  # fmt: skip
    # passage 4 is best by all centroids but not among the four best over the threshold
    assert merge(ones, params)[0].tolist() == [3]
    assert merge(ones[:3] + ones[4:], params)[0].tolist() == [4]


def test_nan_comes_last():
    a = Survivors(torch.tensor([5, 6]).int(), torch.tensor([torch.nan, -torch.inf]))
    b = Survivors(torch.tensor([7, 8]).int(), torch.tensor([1.0, -torch.inf]))
    assert merge([a, b], SearchParams(k=3, mode="rerank"))[0].tolist() == [7, 5, 6]


def test_parts_must_fit():
    a = Survivors(torch.zeros(1).int(), torch.zeros(1))
    b = Survivors(torch.zeros(1).int(), torch.zeros(1), torch.zeros(1), torch.zeros(1))
    for parts in ([], [a, b]):
        with pytest.raises(ValueError, match="parts: expected"):
            merge(parts, SearchParams(k=1))
