"""The centroid score kernel: table, flags and best cells against fp64."""

import pytest
import torch

from plaid_tilemaxsim.ops import api, centroid_scores_kernel
from tests.ops.ragged import flags, make_collection, threshold_at

# fp32 accumulation of exact products and Q's two fp16 parts, unit vectors: a few ulp of 1.
FP32_ERROR = 1e-6


def scores_fp64(c):
    return c.centroids.double() @ c.Q.double().T


@pytest.mark.parametrize(
    ("LQ", "DIM", "C"), [(1, 64, 1), (5, 96, 127), (32, 128, 128), (32, 384, 129), (33, 128, 300), (130, 40, 200)]
)
def test_table_and_keep(LQ, DIM, C, device):
    c = make_collection(device, LQ, DIM, C=C)
    want = scores_fp64(c)
    threshold = threshold_at(c, 0.5)
    cs = c.centroid_scores(threshold)
    assert cs.table.shape == (C + 1, api.padded_query_length(LQ))
    assert (cs.table[C] == -32768).all()
    assert (cs.table[:C, :LQ] > -32768).all()
    scale = float(cs.scale)
    norms = c.Q.double().norm(dim=1).max() * c.centroids.double().norm(dim=1).max()
    assert scale == pytest.approx(float(norms) / 32767, rel=1e-5)
    got = cs.table[:C, :LQ].double() * scale
    # rounding to the step, and the fp32 error of score / scale, whose values reach 32767
    assert float((got - want).abs().max()) <= (0.5 + 32767 * 2**-22) * scale + FP32_ERROR
    assert float((got.roll(1, 0) - want).abs().max()) > scale or C == 1
    assert torch.equal(flags(cs).bool(), want.amax(1) >= threshold)
    assert flags(cs).any()
    assert C == 1 or not flags(cs).all()
    c_ = torch.arange(C, device=device)
    assert cs.keep_bits is not None
    assert torch.equal((cs.keep_bits[c_ // 32] >> (c_ % 32)) & 1, flags(cs).int())


def test_scores_are_fp32_accurate(device):
    """keep follows the fp32 score, far finer than fp16: thresholds just above and below one centroid's best score."""
    c = make_collection(device, 32, 128)
    best = scores_fp64(c).amax(1)
    for pick in (3, 77, 149):
        for delta, kept in ((-2 * FP32_ERROR, 1), (2 * FP32_ERROR, 0)):
            assert int(flags(c.centroid_scores(float(best[pick]) + delta))[pick]) == kept


def best_cells(cs, LQ, ncells):
    """The exact reduction of ``cells``: centroid ids [ncells, LQ], best first."""
    keys = cs.cells.flatten(0, 1)[:, :LQ].sort(0, descending=True).values[:ncells]
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


@pytest.mark.parametrize("ncells", [1, 2, 3, 8, 20])
@pytest.mark.parametrize(("LQ", "C"), [(5, 300), (40, 128)])
def test_cells_hold_the_best_centroids(ncells, LQ, C, device):
    c = make_collection(device, LQ, 64, C=C)
    cs = c.centroid_scores(ncells=ncells)
    want = scores_fp64(c).topk(ncells, 0).indices
    assert torch.equal(best_cells(cs, LQ, ncells), want)


def test_cells_ties_go_to_the_lower_centroid(device):
    c = make_collection(device, 4, 64, C=260)
    c.centroids[130:] = c.centroids[:130]
    c.centroids[7] = c.centroids[201] = c.centroids[3]
    cs = c.centroid_scores(ncells=4)
    s = scores_fp64(c).round(decimals=9)  # equal rows may differ in the last bit of a blocked product
    want = s.sort(dim=0, descending=True, stable=True).indices[:4]
    assert torch.equal(best_cells(cs, 4, 4), want)


def test_cells_order_negative_scores_and_zeros(device):
    c = make_collection(device, 3, 64, C=40, negative=True)
    c.centroids[20] = 0.0
    c.centroids[31] = -0.0
    cs = c.centroid_scores(ncells=3)
    got = best_cells(cs, 3, 3)
    assert (got[0] == 20).all()
    assert (got[1] == 31).all()
    assert torch.equal(got[2], scores_fp64(c).topk(3, 0).indices[2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("C", "ncells"), [(5, 4), (5, 5), (128, 2), (300, 4), (300, 20)])
def test_cells_of_no_query_exist_and_differ(C, ncells, value, device):
    c = make_collection(device, 3, 64, C=C)
    c.Q[1] = value
    c.Q[2, 5] = value
    cs = centroid_scores_kernel.centroid_scores(c.Q, c.centroids, None, 1.0, ncells)  # api refuses it on the CPU
    got = best_cells(cs, 3, ncells)
    assert ((got >= 0) & (got < C)).all()
    assert all(len(column.unique()) == ncells for column in got.T)
    assert torch.equal(got[:, 0], scores_fp64(c)[:, 0].topk(ncells, 0).indices)


def test_cmax_scales_the_table(device):
    c = make_collection(device, 8, 64)
    wide = c.centroid_scores(cmax=4.0)
    assert float(wide.scale) == pytest.approx(4 / 32767, rel=1e-5)
    want = scores_fp64(c)
    got = wide.table[:-1, :8].double() * float(wide.scale)
    assert float((got - want).abs().max()) <= 0.51 * float(wide.scale) + FP32_ERROR


def test_a_zero_query_scores_zero(device):
    c = make_collection(device, 2, 64)
    c.Q.zero_()
    cs = c.centroid_scores(0.0)
    assert float(cs.scale) == 0
    assert (cs.table[:-1, :2] == 0).all()
    assert flags(cs).all()
