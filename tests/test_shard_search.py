"""Engines over shards and ``merge`` against one engine over the whole index: the same bits."""

import dataclasses
import itertools

import pytest
import torch

from plaid_tilemaxsim.engine import SearchEngine
from plaid_tilemaxsim.funnel import MOST_PRECISE, SearchParams
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.lists import build_pid_lists
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.merge import merge
from tests.synthetic import make_index

ON_GPU = torch.cuda.is_available()
N, LQ = (3000, 32) if ON_GPU else (300, 8)
PLAID = {"ncells": 2, "threshold": 0.4, "query_maxlen": LQ - 2}
PARAMS = [
    SearchParams(k=10, ndocs=32, **PLAID),
    SearchParams(k=None, ndocs=60, **PLAID),
    SearchParams(k=1000, ndocs=4096, **PLAID),
    SearchParams(k=1000, ndocs=4 * MOST_PRECISE + 4, **PLAID),
    SearchParams(k=10, mode="rerank", **PLAID),
    SearchParams(k=10, mode="exhaustive"),
    SearchParams(k=10, mode="exhaustive", prefilter=30),
]


def part_of(index: PlaidIndex, begin: int, end: int) -> PlaidIndex:
    first, last = int(index.offsets[begin]), int(index.offsets[end])
    codes, doclens = index.codes()[first:last], index.doclens[begin:end]
    pids, offsets = build_pid_lists([(codes, doclens)], index.num_centroids)
    return PlaidIndex.from_tensors(
        nbits=index.nbits, centroids=index.centroids, bucket_cutoffs=index.bucket_cutoffs,
        bucket_weights=index.bucket_weights, codes=codes, residuals=index.residuals()[first:last], doclens=doclens,
        ivf=pids, ivf_lengths=offsets.diff(),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["triton" if ON_GPU else "torch"])
def engines(request, tmp_path_factory, device):
    index = read_index(make_index(tmp_path_factory.mktemp("index"), n=N, dim=64, C=32, seed=1))

    def engine(part: PlaidIndex) -> SearchEngine:
        resident = load_resident(part, torch.device("cuda" if ON_GPU else "cpu"))
        if ON_GPU:  # 16-bit inverse norms depend on the range within the shard
            resident = with_norms_of(index, resident)
        return SearchEngine(resident, impl=request.param)

    cuts = [0, 7, N // 3, N // 3 + 1, N]
    shards = [(a, engine(part_of(index, a, b))) for a, b in itertools.pairwise(cuts)]
    return engine(index), shards, queries(index)


def with_norms_of(index, resident):
    from plaid_tilemaxsim.index.resident import inverse_norms
    from plaid_tilemaxsim.ops.cpu import byte_table

    table = byte_table(index.nbits, resident.bucket_weights)
    norms = inverse_norms(resident.codes, resident.residuals, resident.centroids, table)
    return dataclasses.replace(resident, inv_norms=norms, inv_norm_lo=0.0, inv_norm_step=1.0)


def queries(index):
    """Two queries near tokens of the index, so that some centroids pass the threshold."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, index.num_tokens, (2 * LQ,), generator=g)
    near = index.centroids[index.codes()[rows].long()].float() + torch.randn(2 * LQ, 64, generator=g) / 16
    return torch.nn.functional.normalize(near, dim=-1).view(2, LQ, 64)


def merged(shards, Q, params, **filters):
    """Filters: functions of (first pid, passages)."""
    parts = []
    for first, engine in shards:
        here = {name: f(first, engine.index.num_passages) for name, f in filters.items()}
        found = engine.survivors(Q, params, **here)
        parts.append([dataclasses.replace(one, pids=one.pids + first) for one in found])
    return [merge(of_query, params) for of_query in zip(*parts, strict=True)]


def same(a, b):
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_shards_find_what_the_whole_finds(engines, params):
    whole, shards, Q = engines
    wanted = [whole.search(q, params) for q in Q]
    assert all(map(same, merged(shards, Q, params), wanted))
    assert all(map(same, merged(shards, Q[1:2], params), wanted[1:2]))
    # a shard less is noticed
    assert not all(map(same, merged(shards[:-1], Q, params), wanted))


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_with_filters(engines, params):
    whole, shards, Q = engines
    mask = torch.rand(N, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[:20] = False
    wanted = [whole.search(q, params, allow=mask) for q in Q]
    assert all(map(same, merged(shards, Q, params, allow=lambda a, n: mask[a : a + n]), wanted))
    some = mask.nonzero()[:, 0].int()
    wanted = [whole.search(q, params, filter_fn=lambda pids: some.to(pids.device)) for q in Q]
    found = merged(shards, Q, params, candidates=lambda a, n: some[(some >= a) & (some < a + n)] - a)
    assert all(map(same, found, wanted))
