"""The oracle against loops, and impl="reference" against the oracle."""

import pytest
import torch

from plaid_tilemaxsim.ops import api, reference
from tests.ops.ragged import LENGTHS, assert_scores, make_collection


def decode_by_hand(row, nbits):
    """Bucket indices of one residual row: the bit stream as text, each index least significant bit first."""
    stream = "".join(f"{byte:08b}" for byte in row)
    return [int(stream[i : i + nbits][::-1], 2) for i in range(0, len(stream), nbits)]


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_decode_residuals_reads_the_bit_stream(nbits):
    rows = torch.randint(0, 256, (5, 24), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    weights = torch.arange(2.0**nbits)
    got = reference.decode_residuals(rows, nbits, weights, torch.float64)
    assert got.tolist() == [decode_by_hand(row, nbits) for row in rows.tolist()]


def test_decode_residuals_of_a_known_byte():
    byte = torch.tensor([[0b01011101]], dtype=torch.uint8)
    assert reference.decode_residuals(byte, 2, torch.arange(4.0), torch.float32).tolist() == [[2, 2, 3, 2]]


def test_decompress_normalises_and_keeps_zero():
    centroids = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).half()
    residuals = torch.zeros(2, 1, dtype=torch.uint8)
    weights = torch.zeros(16)
    got = reference.decompress(torch.tensor([0, 1]), residuals, centroids, weights, 4)
    assert torch.allclose(got, torch.tensor([[0.6, 0.8], [0.0, 0.0]], dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("pids", [None, [3, 3, 0, 7, 1], []])
@pytest.mark.parametrize("chunk", [40, 1 << 16])
def test_maxsim_is_the_loop(pids, chunk, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_TOKENS", chunk)
    c = make_collection("cpu", LQ=5, DIM=64)
    D = reference.decompress(*c.raw[:5])
    wanted = range(len(LENGTHS)) if pids is None else pids
    want = torch.empty(len(wanted), dtype=torch.float64)
    by_centroid = torch.empty(len(wanted), dtype=torch.float64)
    for i, pid in enumerate(wanted):
        tokens = slice(int(c.offsets[pid]), int(c.offsets[pid + 1]))
        total = approximate = 0.0
        for q in c.Q.double():
            total += max((float(q @ e) for e in D[tokens]), default=-float("inf"))
            kept = [e for e in c.centroids[c.codes[tokens].long()].double() if float((c.Q.double() @ e).max()) >= 0.2]
            approximate += max((float(q @ e) for e in kept), default=-float("inf"))
        want[i], by_centroid[i] = total, approximate
    selected = None if pids is None else torch.tensor(pids, dtype=torch.int32)
    assert_scores(reference.maxsim(c.Q, D, c.offsets, selected), want, 1e-9)
    assert_scores(reference.residual_maxsim(c.Q, *c.raw, selected), want, 1e-9)
    got = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, selected, threshold=0.2)
    assert_scores(got, by_centroid, 1e-9)


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_eager_agrees_with_the_oracle(nbits):
    c = make_collection("cpu", LQ=7, DIM=64, nbits=nbits)
    cs = api.centroid_scores(c.Q, c.centroids, 0.2, impl="reference")
    pids = torch.tensor([5, 5, 0, 13])
    for selected in (None, pids):
        got = api.residual_maxsim(
            c.Q, cs, c.codes, c.residuals, c.inv_norms, 0.0, 1.0, c.bucket_weights, nbits, c.offsets, selected,
            impl="reference",
        )  # fmt: skip
        assert_scores(got, reference.residual_maxsim(c.Q, *c.raw, selected), 1e-5)
        for use_keep in (False, True):
            got = api.centroid_maxsim(cs, c.codes, c.offsets, selected, use_keep, impl="reference")
            threshold = 0.2 if use_keep else None
            want = reference.centroid_maxsim(c.Q, c.codes, c.centroids, c.offsets, selected, threshold)
            assert_scores(got, want, 1e-5)
    D = reference.decompress(*c.raw[:5], dtype=torch.float32)
    got = api.dense_maxsim(torch.stack([c.Q, -c.Q]), D, offsets=c.offsets, impl="reference")
    assert_scores(got[0], reference.maxsim(c.Q, D, c.offsets), 1e-5)
    assert_scores(got[1], reference.maxsim(-c.Q, D, c.offsets), 1e-5)
