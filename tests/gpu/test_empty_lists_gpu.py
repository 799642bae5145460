"""Lists of which ``count`` says that they hold nothing: no kernel may follow what lies in them.

That is what a filter leaves that no candidate passes. A pid far outside, if it were followed, would be an illegal
address, and the process could not use its GPU any more.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim.engine import SearchEngine
from plaid_tilemaxsim.funnel import SearchParams
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.ops import (
    api,
    dense_fast_kernel,
    dense_kernel,
    pq_fast_kernel,
    pq_kernel,
    residual_fast_kernel,
    residual_kernel,
)
from tests.ops.ragged import LENGTHS, make_collection
from tests.synthetic import make_index, make_queries

pytestmark = pytest.mark.gpu

CASES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {}


def case(run: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[Tensor, Tensor, Tensor], object]:
    CASES[run.__name__] = run
    return run


@case
def residuals(pids: Tensor, count: Tensor, out: Tensor) -> None:
    c = make_collection("cuda", 32, 128, 2)
    cs = c.centroid_scores()
    arguments = (c.Q, cs, c.codes, c.residuals, *c.stored, c.bucket_weights, 2, c.offsets, pids, out[0], count)
    residual_fast_kernel.residual_maxsim(*arguments)
    residual_kernel.residual_maxsim(*arguments)


@case
def several_queries(pids: Tensor, count: Tensor, out: Tensor) -> None:
    c = make_collection("cuda", 32, 128, 2)
    Q = c.Q.expand(len(out), -1, -1).contiguous()
    arguments = (Q, c.centroids, c.codes, c.residuals, *c.stored, c.bucket_weights, 2, c.offsets, pids, out, count)
    api.residual_maxsim_batch(*arguments, impl="triton")


@case
def centroids(pids: Tensor, count: Tensor, out: Tensor) -> None:
    c = make_collection("cuda", 32, 128, 2)
    api.centroid_maxsim(c.centroid_scores(), c.codes, c.offsets, pids, False, out[0], count, impl="triton")


@case
def dense(pids: Tensor, count: Tensor, out: Tensor) -> None:
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    D = torch.randn(sum(LENGTHS), 128, device="cuda").half()
    Q = torch.randn(1, 32, 128, device="cuda").half()
    for kernel in (dense_fast_kernel, dense_kernel):
        kernel.dense_maxsim(Q, D, None, offsets, pids, out[:1], count, "ieee")


@case
def pq(pids: Tensor, count: Tensor, out: Tensor) -> None:
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    codes = torch.zeros(sum(LENGTHS), 16, dtype=torch.uint8, device="cuda")
    codebook = torch.randn(16, 256, 8, device="cuda").half()
    Q = torch.randn(1, 32, 128, device="cuda")
    for kernel in (pq_fast_kernel, pq_kernel):
        kernel.pq_maxsim(Q, codes, codebook, offsets, pids, out[:1], count)


@pytest.mark.parametrize("name", CASES)
def test_kernels(name):
    pids = torch.full((64,), 2**31 - 1, dtype=torch.int32, device="cuda")
    out = torch.full((2, 64), 7.0, device="cuda")
    CASES[name](pids, torch.zeros(1, dtype=torch.int32, device="cuda"), out)
    assert (out == 7).all()


@pytest.mark.parametrize("mode", ["plaid", "rerank"])
def test_a_search_whose_filter_leaves_nothing(mode, tmp_path):
    path = make_index(tmp_path, n=6000, dim=128, C=256, chunk_size=4000)
    engine = SearchEngine(load_resident(read_index(path), "cuda"))
    Q = make_queries(path, 2, 32)
    params = SearchParams(k=10, mode=mode)
    want = engine.search(Q[0], params)
    assert want[0].numel() == 10
    pids, scores = engine.search(Q[0], params, allow=torch.zeros(6000, dtype=torch.bool))
    assert pids.numel() == scores.numel() == 0
    assert torch.equal(engine.search(Q[0], params)[0], want[0])
