"""Dense MaxSim from a ring of tiles: where it is chosen, its PTX in an interpreter of ours, and on sm_90 the kernel."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import api, reference, tuning
from plaid_tilemaxsim.ops import dense_ring_kernel as kernel
from tests.ops.ptx_program import Program, TensorMap
from tests.ops.ptx_warp import Memory
from tests.ops.ragged import assert_scores, poisoned

no_gpu = pytest.mark.skipif(not tuning.interpreted(), reason="uses the interpreter: for machines without a GPU")


def make(n, ND, LQ, DIM, dtype, device):
    g = torch.Generator(device).manual_seed(n + ND + DIM)
    Q, D = (normalize(torch.randn(*s, DIM, generator=g, device=device), dim=-1) for s in ((1, LQ), (n, ND)))
    return Q.to(dtype), D.to(dtype)


def expected(Q, D):
    n, ND, DIM = D.shape
    return reference.maxsim(Q[0], D.reshape(-1, DIM), torch.arange(n + 1, device=D.device) * ND)


def tolerance(LQ, DIM):
    """Unit vectors, exact products, fp32 sums (truncated): DIM additions of a relative 2**-23 each."""
    return LQ * DIM * 2.0**-23


def test_where_it_is_chosen(monkeypatch):
    chosen: list[Any] = [90, torch.float16, 768, 1, 32, 2**20 - 1, 2**10]
    assert not tuning.dense_is_ring(*chosen)
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    assert tuning.dense_is_ring(*chosen)
    for at, value in enumerate((100, torch.float32, 192, 2, 33, 2**20)):
        assert not tuning.dense_is_ring(*(value if i == at else x for i, x in enumerate(chosen)))
    assert [ND for ND in range(1, 300) if tuning.dense_is_ring(90, torch.bfloat16, 128, 1, 32, 5, ND)] == [128, 256]


@pytest.mark.parametrize("DIM", range(128, 1025, 128))
def test_blocks_fit(DIM):
    blocks = tuning.dense_ring_blocks(DIM)
    assert 2 * blocks.tokens % blocks.rows == 0 == blocks.rows % 8
    used = blocks.stages * (blocks.tokens * DIM * 2 + 8) + 1024
    if blocks.programs_per_sm is None:
        assert used <= 228 << 10
        return
    assert blocks.stages > 1
    assert blocks.programs_per_sm * used <= 228 << 10
    for programs in (1, 264):
        assert tuning.dense_ring_share(32 * programs - 1, programs, DIM) == (0, 0)
        for n in (64 * programs, 20_000, 2**31 - 1):
            late, part = tuning.dense_ring_share(max(n, 64 * programs), programs, DIM)
            assert 0 < late <= 8 * programs
            assert n // (part * late) >= 1


@no_gpu
@pytest.mark.parametrize(
    ("LQ", "DIM", "ND", "n"), [(32, 256, 64, 5), (20, 768, 37, 5), (7, 512, 9, 400), (31, 128, 256, 3)]
)
def test_ptx(tmp_path, LQ, DIM, ND, n):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.dense_ring_ptx", tmp_path, LQ, DIM, ND, 60_000 if n > 99 else n]
    done = subprocess.run([str(x) for x in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # compiled for a list that has late programs, or too short for them
    programs, late, n = n if DIM == 128 else 2, 3 if n > 99 else 0, min(n, 11)
    scored = n - 1
    Q, D = make(n, ND, LQ, DIM, torch.float16, "cpu")
    out = np.full(n, np.nan, np.float32)
    memory = Memory()
    rows = TensorMap(D.view(-1, DIM // 2).numpy().view(np.uint8), tuning.dense_ring_blocks(DIM).rows)
    count = memory.add(np.array([scored], np.int32))
    params = [rows, 0, 0, 0, 0, memory.add(Q.numpy()), count, memory.add(out), n, programs, late, ND, LQ, 0, 0]
    ptx, shared = (tmp_path / "0.ptx").read_text(), int((tmp_path / "shared_bytes").read_text())
    for program in range(programs + late):
        Program(ptx, memory, params, (program, programs + late), 4, shared, seed=program).run()
    assert np.isnan(out[scored:]).all()
    assert_scores(torch.from_numpy(out[:scored]), expected(Q, D)[:scored], tolerance(LQ, DIM))


@pytest.mark.gpu
@pytest.mark.skipif(tuning.interpreted(), reason="Gluon has no interpreter: for a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("DIM", [128, 256, 384, 512, 640, 768, 1024])
@pytest.mark.parametrize(
    ("n", "ND", "LQ"), [(1, 1, 1), (3, 128, 32), (300, 37, 7), (9001, 64, 32), (9001, 17, 31), (1000, 256, 32)]
)
def test_matches_the_oracle(n, ND, LQ, DIM, dtype):
    if tuning.arch(torch.device("cuda")) != 90:
        pytest.skip("expected sm_90")
    Q, D = make(n, ND, LQ, DIM, dtype, "cuda")
    want = expected(Q, D)
    for scored in (n, n // 2):
        out = poisoned(n, "cuda")
        count = None if scored == n else torch.tensor([scored], dtype=torch.int32, device="cuda")
        kernel.dense_maxsim(Q, D, out[None], count)
        assert out[scored:].isnan().all()
        assert_scores(out[:scored], want[:scored], tolerance(LQ, DIM))


@pytest.mark.gpu
def test_api():
    Q, D = make(300, 128, 32, 768, torch.bfloat16, "cuda")
    assert_scores(api.dense_maxsim(Q[0], D, impl="triton"), expected(Q, D), tolerance(32, 768))
