"""Residual MaxSim on wgmma: what the host prepares, and on a GPU (sm_90) the kernel."""

import pytest
import torch

from plaid_tilemaxsim.ops import residual_wgmma_kernel as kernel
from plaid_tilemaxsim.ops import tuning
from tests.ops.ragged import LENGTHS, assert_scores, make_collection, poisoned
from tests.ops.test_residual_batch import expected, queries, tolerance


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_k_order_is_a_permutation(nbits):
    assert sorted(kernel.k_order(nbits)) == list(range(kernel.DIM))


def test_units():
    offsets = torch.tensor([0, 0, 1, 3, 6, 10])
    assert kernel.unit_starts(offsets, None, None)[:7].tolist() == [0, 1, 2, 3, 5, 7, 2**31 - 1]
    pids, count = torch.tensor([4, 0, 2]), torch.tensor([2])
    assert kernel.unit_starts(offsets, pids, count)[:5].tolist() == [0, 2, 3, 3, 2**31 - 1]


def test_rows():
    Q = torch.randn(3, 40, kernel.DIM)
    rows = kernel.rows_of(Q, 2)
    assert rows.shape == (1, 2, kernel.BLOCKS, 16, kernel.DIM)
    ordered = Q[:, :, list(kernel.k_order(2))].half()
    assert torch.equal(rows[0, 0, 2], ordered[1, :16])
    assert torch.equal(rows[0, 1, 2], ordered[1, 16:32])
    assert torch.equal(rows[0, 0, 3, :8], ordered[1, 32:])
    assert not rows[0, 0, 3, 8:].any()
    assert not rows[0, 1, 3].any()
    assert not rows[0, :, 6:].any()
    assert kernel.rows_of(Q[:1].expand(5, -1, -1), 2).shape[0] == 2


@pytest.mark.gpu
@pytest.mark.skipif(tuning.interpreted(), reason="Gluon has no interpreter: for a GPU")
@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("stored", ["u16", "fp32"])
@pytest.mark.parametrize(("NQ", "LQ"), [(8, 32), (1, 1), (5, 17), (9, 32), (3, 40)])
@pytest.mark.parametrize("lengths", [LENGTHS, "short", "long"])
def test_every_query_scores_like_the_oracle(lengths, NQ, LQ, stored, listed, nbits):
    if tuning.arch(torch.device("cuda")) != 90:
        pytest.skip("expected sm_90")
    if isinstance(lengths, str):
        g = torch.Generator().manual_seed(1)
        lengths = tuple(torch.randint(0, 12 if lengths == "short" else 200, (1500,), generator=g).tolist())
    c = make_collection("cuda", 32, kernel.DIM, nbits, lengths=lengths)
    Q = queries(c, NQ, LQ)
    pids, count, n = None, None, len(lengths)
    if listed:
        pids = torch.arange(len(lengths) - 1, -1, -1, device="cuda").int()
        n -= 3
        count = torch.tensor([n], dtype=torch.int32, device="cuda")
    out = torch.stack([poisoned(len(lengths), "cuda")] * NQ)
    inverse = c.stored if stored == "u16" else (c.inv_norms, 0.0, 1.0)
    kernel.residual_maxsim(
        Q, c.centroids, c.codes, c.residuals, *inverse, c.bucket_weights, nbits, c.offsets, pids, out, count
    )
    assert out[:, n:].isnan().all()
    for got, want in zip(out[:, :n], expected(c, Q, None if pids is None else pids[:n]), strict=True):
        assert_scores(got, want, tolerance(c, LQ))
