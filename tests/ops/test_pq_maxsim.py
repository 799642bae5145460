"""PQ MaxSim kernels: the portable one in the interpreter, the fast one's PTX in ours, and both on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plaid_tilemaxsim.ops import api, pq_fast_kernel, pq_kernel, reference, tuning, warp_tiles
from tests.ops import ptx_warp
from tests.ops.ragged import LENGTHS, U16, assert_scores, make_pq, poisoned

# (NQ, LQ, DIM, M)
SHAPES = [
    (1, 32, 128, 16),
    (1, 5, 64, 8),
    (3, 32, 128, 32),
    (2, 33, 96, 16),
    (1, 17, 128, 64),
    (5, 9, 48, 8),
    (1, 130, 384, 32),
]


def tolerance(LQ: int, DIM: int) -> float:
    """Four standard deviations of the roundings of unit query tokens to fp16, and fp32 sums."""
    return 4 * LQ**0.5 * U16 / (3 * DIM) ** 0.5 + 1e-5


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("NQ", "LQ", "DIM", "M"), SHAPES)
def test_portable(device, NQ, LQ, DIM, M, listed):
    check(pq_kernel.pq_maxsim, device, NQ, LQ, DIM, M, listed)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("NQ", "LQ", "DIM", "M"), SHAPES)
def test_fast(device, NQ, LQ, DIM, M, listed):
    if device == "cpu":
        pytest.skip("inline PTX needs a GPU; its PTX is interpreted below")
    assert pq_fast_kernel.supported(M, DIM)
    check(pq_fast_kernel.pq_maxsim, device, NQ, LQ, DIM, M, listed)


def check(run, device, NQ, LQ, DIM, M, listed, negative=False):
    Q, codes, codebook, offsets = make_pq(device, NQ, LQ, DIM, M, negative=negative)
    pids = torch.tensor([3, 0, 15, 7, 7, 12, 1], device=device, dtype=torch.int32) if listed else None
    n = 7 if listed else len(LENGTHS)
    count = torch.tensor([5], dtype=torch.int32, device=device) if listed else None
    out = torch.stack([poisoned(n, device)] * NQ)
    run(Q, codes, codebook, offsets, pids, out, count)
    if pids is not None:
        assert out[:, 5:].isnan().all()
        out, pids = out[:, :5], pids[:5]
    for query, got in zip(Q, out, strict=True):
        want = reference.pq_maxsim(query, codes, codebook, offsets, pids)
        assert_scores(got, want, tolerance(LQ, DIM))


def test_similarities_below_zero_count(device):
    check(pq_kernel.pq_maxsim, device, 1, 32, 128, 16, False, negative=True)
    if device != "cpu":
        check(pq_fast_kernel.pq_maxsim, device, 2, 32, 128, 16, False, negative=True)


def test_no_tokens_at_all(device):
    Q, codes, codebook, _ = make_pq(device, 2, 32, 128, 16)
    got = api.pq_maxsim(Q, codes[:0], codebook, torch.zeros(3, dtype=torch.int64, device=device), impl="triton")
    assert got.shape == (2, 2)
    assert got.isneginf().all()


no_gpu = pytest.mark.skipif(not tuning.interpreted(), reason="uses the interpreter: for machines without a GPU")


def compiled(folder: Path, arch: int, blocks: int, DIM: int, M: int, listed: bool) -> dict[str, int]:
    """PTX of the kernel for a chip that is not here, in ``folder``, and what it needs."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.pq_fast_ptx", folder, arch, blocks, DIM, M, int(listed)]
    done = subprocess.run([str(x) for x in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "resources.json").read_text())


@no_gpu
@pytest.mark.parametrize(
    ("blocks", "DIM", "M", "listed"),
    [
        (1, 128, 16, False),
        (4, 128, 16, True),
        (1, 128, 64, False),
        (2, 64, 32, False),
        (1, 96, 8, True),
        (3, 192, 8, False),
    ],
)
def test_ptx_of_the_fast_kernel(tmp_path, blocks, DIM, M, listed):
    resources = compiled(tmp_path, 90, blocks, DIM, M, listed)
    assert resources["spills"] == 0
    Q, codes, codebook, offsets = make_pq("cpu", blocks, 32 if blocks == 1 else 20, DIM, M)
    pids = torch.tensor([3, 0, 15, 7, 12], dtype=torch.int32) if listed else None
    n = 5 if listed else len(LENGTHS)
    memory = ptx_warp.Memory()
    out = np.full((blocks, n), np.nan, np.float32)
    arrays = [
        warp_tiles.query_fragments(Q).numpy(), codebook.numpy(), codes.numpy(), offsets.numpy(),
        None if pids is None else pids.numpy(), None, out,
    ]  # fmt: skip
    addresses = [0 if array is None else memory.add(array) for array in arrays]
    kernel = ptx_warp.Kernel((tmp_path / "0.ptx").read_text())
    # arguments that triton left out of the signature are not in the PTX's parameter list either
    present = [a for a, array in zip(addresses, arrays, strict=True) if array is not None]
    for program in range(2):
        kernel.run(memory, [*present, n, 0, 0], (program, 2))
    want = torch.stack([reference.pq_maxsim(query, codes, codebook, offsets, pids) for query in Q])
    assert_scores(torch.from_numpy(out).flatten(), want.flatten(), tolerance(32, DIM))
