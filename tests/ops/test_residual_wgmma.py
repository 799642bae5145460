"""Residual MaxSim on wgmma: what the host prepares, its PTX in an interpreter of ours, and on sm_90 the kernel."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton

from plaid_tilemaxsim.ops import api, reference, residual_batch_kernel, tuning
from plaid_tilemaxsim.ops import residual_wgmma_kernel as kernel
from tests.ops.ptx_program import Program
from tests.ops.ptx_warp import Memory
from tests.ops.ragged import LENGTHS, U16, assert_scores, make_collection, poisoned
from tests.ops.test_residual_batch import expected, no_gpu, queries


def tolerance(LQ: int) -> float:
    """Six standard deviations: a unit query token and what decode() rounds of an embedding, to fp16."""
    return 6 * LQ**0.5 * U16 / kernel.DIM**0.5 + 1e-5


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_k_order_is_a_permutation(nbits):
    assert sorted(kernel.k_order(nbits)) == list(range(kernel.DIM))


def test_units():
    offsets = torch.tensor([0, 0, 1, 3, 6, 10])
    assert kernel.unit_starts(offsets, None)[:7].tolist() == [0, 1, 2, 3, 5, 7, 2**31 - 1]
    assert kernel.unit_starts(offsets, torch.tensor([3]))[:7].tolist() == [0, 1, 2, 3, 3, 3, 2**31 - 1]
    assert kernel.unit_starts(offsets, torch.tensor([0]))[:7].tolist() == [0] * 6 + [2**31 - 1]


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


def test_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    shape = {"arch": 90, "nbits": 2, "DIM": 128, "blocks": 8, "tokens": 600_000_000, "passages": 8_800_000}
    assert tuning.residual_batch_is_wgmma(**shape)
    for other in ({"arch": 100}, {"nbits": 8}, {"DIM": 96}, {"blocks": 4}, {"tokens": 2**20 - 1}, {"passages": 2**32}):
        assert not tuning.residual_batch_is_wgmma(**shape | other)
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert not tuning.residual_batch_is_wgmma(**shape)


@no_gpu
@pytest.mark.parametrize(("nbits", "fp32"), [(2, False), (4, True)])
def test_ptx(tmp_path, nbits, fp32):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.residual_wgmma_ptx", tmp_path, nbits, int(fp32)]
    done = subprocess.run([str(x) for x in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    c = make_collection("cpu", 32, kernel.DIM, nbits, lengths=(*LENGTHS, *(3,) * 40, 70))
    Q = queries(c, 5, 20)
    n = len(c.offsets) - 1
    count = torch.tensor([n - 3]) if fp32 else None
    stored, lo, step = (c.inv_norms, 0.0, 1.0) if fp32 else c.stored
    out = np.full((5, n), np.nan, np.float32)
    memory = Memory()
    arrays = [
        kernel.rows_of(Q, nbits), residual_batch_kernel.weight_table(c.bucket_weights, nbits),
        residual_batch_kernel.ordered_centroids(c.centroids, kernel.k_order(nbits)), c.codes, c.residuals, stored,
    ]  # fmt: skip
    addresses: list[int | float] = [memory.add(x.numpy()) for x in arrays]
    addresses += [lo - 1, step, memory.add(c.offsets.numpy())]
    addresses += [memory.add(kernel.unit_starts(c.offsets, count).numpy()), memory.add(out), n, n, 5]
    ptx, shared = (tmp_path / "0.ptx").read_text(), int((tmp_path / "shared_bytes").read_text())
    for program in range(2):
        Program(ptx, memory, addresses, (program, 2), 8 + kernel.WARPS.value, shared, seed=program).run()
    scored = n if count is None else int(count)
    assert np.isnan(out[:, scored:]).all()
    for got, want in zip(torch.from_numpy(out[:, :scored]), expected(c, Q)[:, :scored], strict=True):
        assert_scores(got, want, tolerance(20))


def random_lengths(n: int, longest: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, longest, (n,), generator=torch.Generator().manual_seed(1)).tolist())


@pytest.fixture
def sm_90():
    if tuning.interpreted() or tuning.arch(torch.device("cuda")) != 90:
        pytest.skip("expected sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("stored", ["u16", "fp32"])
@pytest.mark.parametrize(("NQ", "LQ"), [(8, 32), (1, 1), (5, 17), (9, 32), (3, 40)])
@pytest.mark.parametrize("lengths", [LENGTHS, random_lengths(1500, 12), random_lengths(1500, 200)])
def test_every_query_scores_like_the_oracle(lengths, NQ, LQ, stored, nbits, sm_90):
    c = make_collection("cuda", 32, kernel.DIM, nbits, lengths=lengths)
    Q = queries(c, NQ, LQ)
    inverse = c.stored if stored == "u16" else (c.inv_norms, 0.0, 1.0)
    want = expected(c, Q)
    for count in (None, len(lengths) - 3, 0):
        out = torch.stack([poisoned(len(lengths), "cuda")] * NQ)
        counted = None if count is None else torch.tensor([count], dtype=torch.int32, device="cuda")
        kernel.residual_maxsim(
            Q, c.centroids, c.codes, c.residuals, *inverse, c.bucket_weights, nbits, c.offsets, out, counted
        )
        scored = len(lengths) if count is None else count
        assert out[:, scored:].isnan().all()
        for got, w in zip(out[:, :scored], want[:, :scored], strict=True):
            assert_scores(got, w, tolerance(LQ))


@pytest.mark.gpu
def test_query_values_of_one_sign(sm_90):
    c = make_collection("cuda", 32, kernel.DIM, 2, lengths=random_lengths(700, 12), negative=True)
    Q = queries(c, 5, 17).abs()
    out = torch.stack([poisoned(700, "cuda")] * 5)
    kernel.residual_maxsim(Q, c.centroids, c.codes, c.residuals, *c.stored, c.bucket_weights, 2, c.offsets, out, None)
    # there the roundings of weights of 0.06 add up
    for got, want in zip(out, expected(c, Q), strict=True):
        assert_scores(got, want, tolerance(17) + 17 * kernel.DIM**0.5 * 0.06 * U16)


@pytest.mark.gpu
def test_the_api_takes_it_for_an_index(sm_90):
    c = make_collection("cuda", 32, kernel.DIM, 2, lengths=random_lengths(12_000, 200))
    Q = queries(c, 5, 32)
    arguments = (Q, c.centroids, c.codes, c.residuals, *c.stored, c.bucket_weights, 2, c.offsets)
    got, direct = api.residual_maxsim_batch(*arguments), torch.empty(5, 12_000, device="cuda")
    kernel.residual_maxsim(*arguments, direct, None)
    assert torch.equal(got, direct)
    pids = torch.arange(0, 12_000, 50, device="cuda")
    for scores, listed, q in zip(got, api.residual_maxsim_batch(*arguments, pids), Q, strict=True):
        want = reference.residual_maxsim(q, *c.raw, pids=pids)
        assert_scores(scores[pids], want, tolerance(32))
        assert_scores(listed, want, tolerance(32))
