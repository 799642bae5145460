"""Residual MaxSim of several queries: its PTX in an interpreter of ours, its resources, and on a GPU the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import api, reference, residual_batch_kernel, tuning, warp_tiles
from plaid_tilemaxsim.ops.residual_batch_kernel import k_order
from tests.ops import ptx_warp
from tests.ops.ragged import LENGTHS, U16, Collection, assert_scores, make_collection, poisoned, quantised

no_gpu = pytest.mark.skipif(not tuning.interpreted(), reason="uses the interpreter: for machines without a GPU")


def tolerance(c, LQ: int) -> float:
    """Four standard deviations: a unit query token, an embedding of norm 1 / inv and a weight, all rounded to fp16."""
    DIM = c.Q.size(1)
    per_token = 3**0.5 * U16 / (3 * DIM) ** 0.5
    return 4 * LQ**0.5 * per_token + 1e-5


def queries(c, NQ: int, LQ: int):
    g = torch.Generator().manual_seed(NQ)
    return normalize(torch.randn(NQ, LQ, c.Q.size(1), generator=g), dim=-1).to(c.device)


def expected(c: Collection, Q, pids=None):
    return torch.stack([reference.residual_maxsim(q, *c.raw, pids=pids) for q in Q])


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("DIM", [32, 64, 96, 128])
def test_k_order_is_a_permutation(nbits, DIM):
    if residual_batch_kernel.supported(nbits, DIM):
        assert sorted(k_order(nbits, DIM)) == list(range(DIM))
    else:
        assert DIM * nbits % 64


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("NQ", "LQ", "DIM"), [(3, 9, 64), (9, 32, 128), (2, 40, 96), (2, 5, 384)])
def test_every_query_scores_like_the_oracle(device, NQ, LQ, DIM, nbits, listed):
    if device == "cpu" and NQ * LQ > 100:
        pytest.skip("hours of the interpreter: for a GPU")
    c = make_collection(device, 32, DIM, nbits)
    Q = queries(c, NQ, LQ)
    pids = torch.tensor([3, 0, 15, 7, 7, 12], dtype=torch.int32, device=device) if listed else None
    count = torch.tensor([4], dtype=torch.int32, device=device) if listed else None
    n = 6 if listed else len(LENGTHS)
    out = torch.stack([poisoned(n, device)] * NQ)
    api.residual_maxsim_batch(
        Q, c.centroids, c.codes, c.residuals, *c.stored, c.bucket_weights, nbits, c.offsets, pids, out, count,
        impl="triton",
    )  # fmt: skip
    if pids is not None:
        assert out[:, 4:].isnan().all()
        out, pids = out[:, :4], pids[:4]
    for got, want in zip(out, expected(c, Q, pids), strict=True):
        assert_scores(got, want, tolerance(c, LQ))


def test_the_torch_path_loops():
    c = make_collection("cpu", 32, 64, 2)
    Q = queries(c, 3, 7)
    got = api.residual_maxsim_batch(
        Q, c.centroids.float(), c.codes, c.residuals, c.inv_norms, 0.0, 1.0, c.bucket_weights, 2, c.offsets
    )
    for scores, want in zip(got, expected(c, Q), strict=True):
        assert_scores(scores, want, 1e-4)


def test_ordered_centroids_follow_their_tensor():
    centroids, order = torch.randn(5, 64).half(), k_order(2, 64)
    first = residual_batch_kernel.ordered_centroids(centroids, order)
    other = residual_batch_kernel.ordered_centroids(centroids, tuple(range(64)))
    assert residual_batch_kernel.ordered_centroids(centroids, order) is first
    assert torch.equal(first, centroids[:, list(order)])
    assert torch.equal(other, centroids)
    centroids.mul_(2)
    assert torch.equal(residual_batch_kernel.ordered_centroids(centroids, order), first * 2)
    held = len(residual_batch_kernel._ordered)
    del centroids
    assert len(residual_batch_kernel._ordered) == held - 2
    with torch.inference_mode():
        centroids = torch.randn(5, 64).half()
        assert torch.equal(residual_batch_kernel.ordered_centroids(centroids, order), centroids[:, list(order)])


@no_gpu
@pytest.mark.parametrize(
    ("blocks", "DIM", "nbits", "listed"),
    [(4, 128, 2, False), (2, 128, 1, True), (3, 96, 2, False), (2, 64, 4, True), (1, 64, 1, False)],
)
def test_ptx(tmp_path: Path, blocks, DIM, nbits, listed):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.residual_batch_ptx", tmp_path, 90, blocks, DIM, nbits, int(listed)]
    done = subprocess.run([str(x) for x in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needs = json.loads((tmp_path / "resources.json").read_text())
    assert needs["spills"] == 0
    assert needs["registers"] * 32 * tuning.residual_batch_blocks(90, nbits, DIM).programs_per_sm <= 65536

    c = make_collection("cpu", 32, DIM, nbits)
    LQ = 20
    Q = queries(c, blocks, LQ)
    pids = torch.tensor([3, 0, 15, 7, 12], dtype=torch.int32) if listed else None
    stored, lo, step = quantised(c.inv_norms)
    out = np.full((blocks, 5 if listed else len(LENGTHS)), np.nan, np.float32)
    memory = ptx_warp.Memory()
    fragments = warp_tiles.query_fragments(Q[:, :, list(k_order(nbits, DIM))])
    arrays = [
        fragments, residual_batch_kernel.weight_table(c.bucket_weights, nbits),
        residual_batch_kernel.ordered_centroids(c.centroids, k_order(nbits, DIM)), c.codes, c.residuals, stored,
    ]  # fmt: skip
    addresses: list[int | float] = [memory.add(x.numpy()) for x in arrays]
    addresses += [lo, step, memory.add(c.offsets.numpy())]
    addresses += [] if pids is None else [memory.add(pids.numpy())]
    addresses += [memory.add(out), out.shape[1], 0, 0]
    kernel = ptx_warp.Kernel((tmp_path / "0.ptx").read_text())
    for program in range(2):
        kernel.run(memory, addresses, (program, 2))
    for got, want in zip(torch.from_numpy(out), expected(c, Q, pids), strict=True):
        assert_scores(got, want, tolerance(c, LQ))
