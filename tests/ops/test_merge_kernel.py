"""The merge on the device against the one that ``merge.merge`` makes of the same survivors."""

import itertools

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.merge import Survivors
from plaid_tilemaxsim.merge import merge as merge_lists
from plaid_tilemaxsim.ops import merge_kernel

# capacities of the shards' lists and how many passages each holds
SHAPES = [
    ([5], [5]),
    ([40, 40], [40, 40]),
    ([40, 40], [0, 17]),
    ([33, 7, 60], [33, 0, 31]),
    ([1, 1, 1, 1, 1], [1, 0, 1, 1, 0]),
    ([20, 20], [0, 0]),
]
PLAID = [
    SearchParams(k=10, ndocs=32),
    SearchParams(k=3, ndocs=4),
    SearchParams(k=None, ndocs=64),
    SearchParams(k=100, ndocs=4096),
]
OTHERS = [
    SearchParams(k=7, mode="exhaustive", prefilter=20),
    SearchParams(k=7, mode="rerank"),
    SearchParams(k=None, mode="exhaustive"),
]


def keeps_of(params: SearchParams) -> list[int | None]:
    if params.mode == "plaid":
        return [params.ndocs, params.ndocs // 4, params.k]
    return [params.k] if params.prefilter is None else [params.prefilter, params.k]


def survivors(counts: list[int], columns: int, seed: int) -> list[list[Tensor]]:
    """Pids of each shard's own numbering, then columns with many ties, -inf among them."""
    g = torch.Generator().manual_seed(seed)
    shards = []
    for count in counts:
        pids = torch.randperm(100, generator=g)[:count].int()
        scores = torch.randint(-3, 4, (columns, count), generator=g).float() / 4
        scores[scores < -0.5] = -torch.inf
        shards.append([pids, *scores])
    return shards


def as_rows(queries: list[list[list[Tensor]]], caps: list[int], device: str) -> tuple[Tensor, Tensor]:
    """(rows, table) of queries[lane][shard] = [pids, columns...]; what lies behind a count is garbage."""
    rows: list[Tensor] = []
    table, start = [], 0
    for s, cap in enumerate(caps):
        width = 1 + cap * len(queries[0][s])
        table.append([start, width, cap, 100 * s])
        for query in queries:
            row = torch.full((width,), 0x7F7F7F7F, dtype=torch.int32)
            row[0] = query[s][0].numel()
            for c, column in enumerate(query[s]):
                row[1 + c * cap :][: column.numel()] = column.view(torch.int32)
            rows.append(row)
        start += width * len(queries)
    return torch.cat(rows).to(device), torch.tensor(table, dtype=torch.int64, device=device)


def expected(query: list[list[Tensor]], params: SearchParams) -> tuple[Tensor, Tensor]:
    parts = []
    for s, (pids, *columns) in enumerate(query):
        first = columns[0] if len(columns) == 3 else None
        second = columns[-2] if len(columns) >= 2 else None
        parts.append(Survivors(pids + 100 * s, columns[-1], first, second))
    return merge_lists(parts, params)


@pytest.mark.parametrize("limit", [merge_kernel.LIMIT, 8])
@pytest.mark.parametrize("params", [*PLAID, *OTHERS], ids=str)
@pytest.mark.parametrize(("caps", "counts"), SHAPES)
def test_merge(caps, counts, params, limit, device, monkeypatch):
    monkeypatch.setattr(merge_kernel, "LIMIT", limit)
    keeps = keeps_of(params)
    lanes = 2
    queries = [survivors(counts, len(keeps), seed) for seed in range(lanes)]
    rows, table = as_rows(queries, caps, device)
    packed = merge_kernel.merge(rows, table, max(caps), keeps, lanes).cpu()
    room = (packed.size(1) - 1) // 2
    for row, query in zip(packed, queries, strict=True):
        pids, scores = expected(query, params)
        n = int(row[0])
        assert n == len(pids)
        assert torch.equal(row[1 : 1 + n], pids)
        assert torch.equal(row[1 + room : 1 + room + n].view(torch.float32), scores)


@pytest.mark.parametrize(("cap", "n"), [(1, 1), (70, 70), (70, 33), (300, 0)])
def test_what_no_merge_keeps_is_told(cap, n, device):
    """By brute force; and whatever the other shards have, what is out of a merge is all that is flagged so."""
    g = torch.Generator().manual_seed(cap + n)
    pids = torch.randperm(cap, generator=g).int()
    first, second = torch.randint(-3, 4, (2, cap), generator=g).float()
    first[first < -2] = -torch.inf
    keys = [[(s, -p) for s, p in zip(scores.tolist(), pids.tolist())][:n] for scores in (first, second)]
    there = first.to(device), second.to(device), pids.to(device), torch.tensor([n], dtype=torch.int32, device=device)
    for keep in (1, 5, 64):
        flags = merge_kernel.plausible(*there, keep)
        want = [sum(a > keys[0][i] and b > keys[1][i] for a, b in zip(*keys)) < keep for i in range(n)]
        assert flags.tolist() == [*map(int, want), *[0] * (cap - n)]
        assert n < 33 or 0 < sum(want) <= n
        assert keep > 5 or n < 33 or sum(want) < n


def test_an_order_by_another_column_is_noticed(device):
    params = PLAID[0]
    queries = [survivors([40, 40], 3, 0)]
    rows, table = as_rows([[[pids, b, a, e] for pids, a, b, e in queries[0]]], [40, 40], device)
    packed = merge_kernel.merge(rows, table, 40, keeps_of(params), 1).cpu()[0]
    assert packed[1:9].tolist() != expected(queries[0], params)[0].tolist()


def test_nan_ranks_with_minus_infinity_and_zeros_tie(device):
    pids = torch.arange(4, dtype=torch.int32)
    scores = torch.tensor([torch.nan, -0.0, 0.0, -torch.inf])
    rows, table = as_rows([[[pids, scores]]], [4], device)
    packed = merge_kernel.merge(rows, table, 4, [None], 1).cpu()[0]
    assert packed[1:5].tolist() == [1, 2, 0, 3]


def test_a_pid_given_twice_is_found_twice(device):
    twice = [torch.tensor([5, 5, 7], dtype=torch.int32), torch.tensor([1.0, 1.0, 2.0])]
    rows, table = as_rows([[twice, twice]], [3, 3], device)
    packed = merge_kernel.merge(rows, table, 3, [5], 1).cpu()[0]
    assert packed[:6].tolist() == [5, 7, 107, 5, 5, 105]
    assert list(itertools.accumulate(packed[6:].view(torch.float32).tolist())) == [2.0, 4.0, 5.0, 6.0, 7.0]
