"""The merge on the device against the one that ``merge.merge`` makes of the same survivors."""

import itertools

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.merge import Survivors
from plaid_tilemaxsim.merge import merge as merge_lists
from plaid_tilemaxsim.ops import cuts_kernel, merge_kernel

STRIDE = 5000  # first pid of a shard, of the one before
# capacities of the shards' lists and how many passages each holds
SHAPES = [
    ([5], [5]),
    ([40, 40], [40, 40]),
    ([40, 40], [0, 17]),
    ([33, 7, 60], [33, 0, 31]),
    ([1, 1, 1, 1, 1], [1, 0, 1, 1, 0]),
    ([20, 20], [0, 0]),
    ([70, 3, 129, 65], [70, 3, 128, 1]),
    ([12, 7, 30, 9, 64], [12, 7, 30, 9, 64]),
]
# merge_kernel.LIMIT, cuts_kernel.LIMIT, cuts_kernel.ORDERED: where None, as they are
PATHS = {
    "one launch": (None, None, None),
    "cuts, then places": (None, None, 0),
    "places": (None, 0, None),
    "sorts": (8, 0, None),
}
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


def take(path, monkeypatch):
    names = (merge_kernel, "LIMIT"), (cuts_kernel, "LIMIT"), (cuts_kernel, "ORDERED")
    for (module, name), value in zip(names, PATHS[path], strict=True):
        if value is not None:
            monkeypatch.setattr(module, name, value)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    take(request.param, monkeypatch)


def keeps_of(params: SearchParams) -> list[int | None]:
    if params.mode == "plaid":
        return [params.ndocs, params.ndocs // 4, params.k]
    return [params.k] if params.prefilter is None else [params.prefilter, params.k]


def survivors(counts: list[int], columns: int, seed: int) -> list[list[Tensor]]:
    """Pids of each shard's own numbering, then columns with many ties, -inf among them."""
    g = torch.Generator().manual_seed(seed)
    shards = []
    for count in counts:
        pids = torch.randperm(STRIDE, generator=g)[:count].int()
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
        table.append([start, width, cap, STRIDE * s])
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
        parts.append(Survivors(pids + STRIDE * s, columns[-1], first, second))
    return merge_lists(parts, params)


@pytest.mark.parametrize("params", [*PLAID, *OTHERS], ids=str)
@pytest.mark.parametrize(("caps", "counts"), SHAPES)
def test_merge(caps, counts, params, path, device):
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


@pytest.mark.parametrize(("shards", "most", "k"), [(2, 256, 10), (3, 256, 10), (2, 1024, 100), (2, 4096, 1000)])
def test_as_many_as_a_search_has(shards, most, k, device, monkeypatch):
    """Scores as searches have them, in one launch at k = 10 and 100."""
    monkeypatch.setattr(merge_kernel, "_keys_kernel", None)
    if k < 1000:
        monkeypatch.setattr(merge_kernel, "_place_kernel", None)
    params, g = SearchParams(k=k, ndocs=most), torch.Generator().manual_seed(most)
    query = []
    for _ in range(shards):
        first = 14 + 3 * torch.randn(most, generator=g)
        second = first.half().float()  # ties
        exact = second + torch.randn(most, generator=g) / 4
        query.append([torch.randperm(STRIDE, generator=g)[:most].int(), first, second, exact])
    rows, table = as_rows([query], [most] * shards, device)
    packed = merge_kernel.merge(rows, table, most, keeps_of(params), 1).cpu()[0]
    pids, scores = expected(query, params)
    assert packed[:1].tolist() == [k]
    assert torch.equal(packed[1 : 1 + k], pids)
    assert torch.equal(packed[1 + k :].view(torch.float32), scores)


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


@pytest.mark.parametrize("column", [0, 1, 2])
def test_ties_to_the_larger_pid_are_noticed(column, path, device):
    """In each column alone: the others have no ties, and the order of pids is turned round."""
    g = torch.Generator().manual_seed(column)
    columns = [torch.randperm(40, generator=g).float() for _ in range(3)]
    columns[column] = torch.zeros(40)
    pids = torch.randperm(40, generator=g).int()
    params = SearchParams(k=10, ndocs=24 if column else 16) if column < 2 else SearchParams(k=3, ndocs=40)
    for turned in (False, True):
        rows, table = as_rows([[[39 - pids if turned else pids, *columns]]], [40], device)
        packed = merge_kernel.merge(rows, table, 40, keeps_of(params), 1).cpu()[0]
        n = int(packed[0])
        found = 39 - packed[1 : 1 + n] if turned else packed[1 : 1 + n]
        assert (found.tolist() != expected([[pids, *columns]], params)[0].tolist()) == turned


def test_all_ways_agree_on_every_bit(device, monkeypatch):
    """NaN, -0.0, both infinities, subnormals, pids given twice, within and at the cuts."""
    odd = torch.tensor([torch.nan, -0.0, 0.0, -torch.inf, torch.inf, 1e-45, -1e-45, 1.0, -torch.nan])
    g = torch.Generator().manual_seed(0)
    rooms = [64], [30, 50], [9, 60, 33]
    limits: list[list[int | None]] = [[30, 12, 5], [7, None, None], [None, 3, 9], [20, 200, 0], [0, 0, 4], [9]]
    for caps, keeps in itertools.product(rooms, limits):
        shards = []
        for cap in caps:
            pids = torch.randperm(STRIDE, generator=g)[: (2 * cap + 2) // 3].int()
            columns = odd[torch.randint(len(odd), (len(keeps), len(pids)), generator=g)]
            twice = torch.cat([torch.arange(len(pids)), torch.arange(cap - len(pids))])
            twice = twice[torch.randperm(cap, generator=g)]
            shards.append([pids[twice], *columns[:, twice]])
        rows, table = as_rows([shards], caps, device)
        found = []
        for path in PATHS:
            with monkeypatch.context() as patch:
                take(path, patch)
                packed = merge_kernel.merge(rows, table, max(caps), keeps, 1).cpu()[0]
            n, room = int(packed[0]), (len(packed) - 1) // 2
            assert n == min([sum(caps), *(keep for keep in keeps if keep is not None)])
            found.append([packed[1 : 1 + n].tolist(), packed[1 + room :][:n].tolist()])
        assert all(one == found[0] for one in found), (caps, keeps)


def test_cuts_where_most_scores_are_equal(path, device):
    """At each keep: the cut lies among equal scores, whose pids and, for pids given twice, positions decide."""
    pids = torch.tensor([7, 3, 3, 9, 1, 1, 1, 5], dtype=torch.int32)
    scores = torch.tensor([2.0, 2.0, 2.0, 3.0, 2.0, 2.0, 2.0, 1.0])
    last = torch.arange(8.0)  # tells which of those with one pid were taken
    by_rule = [3, 4, 5, 6, 1, 2, 0, 7]
    for keep in range(1, 8):
        rows, table = as_rows([[[pids, scores, last]]], [8], device)
        packed = merge_kernel.merge(rows, table, 8, [keep, None], 1).cpu()[0]
        assert int(packed[0]) == keep
        taken = packed[1 + keep :].view(torch.float32).int().tolist()
        assert taken == sorted(by_rule[:keep], reverse=True)


def test_the_answer_goes_where_it_is_wanted(path, device):
    params, lanes = SearchParams(k=5, ndocs=32), 3
    queries = [survivors([40, 13], 3, seed) for seed in range(lanes)]
    rows, table = as_rows(queries, [40, 40], device)
    want = merge_kernel.merge(rows, table, 40, keeps_of(params), lanes)
    out = torch.full((lanes, 11), -1, dtype=torch.int32, device=device)
    targets = [out, out.cpu().pin_memory()] if device == "cuda" else [out]
    for target in targets:
        assert merge_kernel.merge(rows, table, 40, keeps_of(params), lanes, out=target) is target
        if device == "cuda":
            torch.cuda.synchronize()
        assert target.cpu().tolist() == want.cpu().tolist()
    for wrong in (out[:, :-1], out[:2], out.long(), out.t().contiguous().t()):
        with pytest.raises(ValueError, match="out: expected contiguous int32"):
            merge_kernel.merge(rows, table, 40, keeps_of(params), lanes, out=wrong)


def test_no_room_at_all(device):
    rows, table = as_rows([[[torch.zeros(0).int(), *torch.zeros(3, 0)]] * 2], [0, 0], device)
    assert merge_kernel.merge(rows, table, 0, [4, 1, 3], 1).tolist() == [[0]]


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
    assert packed[:6].tolist() == [5, 7, STRIDE + 7, 5, 5, STRIDE + 5]
    assert list(itertools.accumulate(packed[6:].view(torch.float32).tolist())) == [2.0, 4.0, 5.0, 6.0, 7.0]


def test_of_a_pid_given_twice_with_equal_scores_the_earlier_comes_first(path, device):
    zeros = torch.tensor([5, 5, 7, 5], dtype=torch.int32), torch.tensor([-0.0, 0.0, 1.0, -0.0])
    rows, table = as_rows([[[*zeros]]], [4], device)
    packed = merge_kernel.merge(rows, table, 4, [None], 1).cpu()[0]
    assert packed[:5].tolist() == [4, 7, 5, 5, 5]
    assert packed[6:].view(torch.float32).signbit().tolist() == [True, False, True]
