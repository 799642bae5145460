"""Radix select against a stable sort."""

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from plaid_tilemaxsim.ops import select_kernel as sk
from plaid_tilemaxsim.ops import tuning
from tests.ops.ptx_program import Program
from tests.ops.ptx_warp import Memory


def run(scores, n, m, device):
    cap = len(scores)
    pids = torch.arange(cap, dtype=torch.int32) * 3
    out_pids = torch.full((max(m, 1),), -7, dtype=torch.int32, device=device)
    out_scores = torch.full((max(m, 1),), -99.0, device=device)
    out_count = torch.full((1,), -1, dtype=torch.int32, device=device)
    work = sk.select_workspace(torch.device(device))
    count = torch.tensor([n], dtype=torch.int32, device=device)
    for _ in range(2):  # the first leaves its workspace as the second needs it
        sk.select_top(scores.to(device), pids.to(device), count, m, out_pids, out_scores, out_count, work)
    return pids, out_pids.cpu(), out_scores.cpu(), int(out_count)


@pytest.mark.parametrize(
    ("n", "m"), [(0, 4), (1, 0), (1, 4), (5, 5), (100, 0), (100, 7), (5000, 33), (9000, 4096), (300, 500)]
)
def test_select_is_a_stable_top_in_input_order(n, m, device):
    scores = torch.full((10000,), float("nan"))  # behind n nothing may be read
    scores[:n] = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 5).round() / 4  # many ties
    if n > 10:
        scores[3], scores[4], scores[5] = -float("inf"), -0.0, 0.0
    pids, got, got_scores, taken = run(scores, n, m, device)
    best = torch.sort(scores[:n] + 0.0, descending=True, stable=True).indices[:m].sort().values
    assert taken == min(m, n)
    assert torch.equal(got[:taken], pids[best])
    assert torch.equal(got_scores[:taken], scores[best])
    assert (got[taken:] == -7).all()


def test_all_scores_equal_keeps_the_first_pids(device):
    pids, got, _, taken = run(torch.full((5000,), -1.5), 5000, 10, device)
    assert taken == 10
    assert torch.equal(got, pids[:10])


def test_passages_at_minus_infinity_rank_last_by_pid(device):
    scores = torch.full((64,), -float("inf"))
    scores[50] = -3.0
    pids, got, _, taken = run(scores, 64, 3, device)
    assert taken == 3
    assert got.tolist() == pids[[0, 1, 50]].tolist()


@pytest.mark.parametrize("kind", ["near", "wide", "below the window", "above the window", "bits", "two values"])
@pytest.mark.parametrize("m", [1, 40, 2000])
def test_whatever_the_scores(kind, m, device):
    """The first histogram is made for scores like those of the sample; the sample may mislead."""
    g = torch.Generator().manual_seed(3)
    n = 6000
    scores = {
        "near": 20 + torch.randn(n, generator=g) * 1e-5,
        "wide": torch.randn(n, generator=g) * 10.0 ** torch.randint(-30, 30, (n,), generator=g),
        "below the window": -torch.rand(n, generator=g) * 1e-20,
        "above the window": torch.rand(n, generator=g),
        "bits": torch.randint(-(2**31), 2**31, (n,), generator=g).int().view(torch.float32),
        "two values": torch.randint(0, 2, (n,), generator=g).float(),
    }[kind]
    sampled = torch.arange(sk.SAMPLE) * (n // sk.SAMPLE)
    if kind == "below the window":
        scores[sampled] = torch.arange(sk.SAMPLE) % 3 * 1e30
    if kind == "above the window":
        scores[sampled] = -1e30
    scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    pids, got, got_scores, taken = run(scores, n, m, device)
    best = torch.sort(scores + 0.0, descending=True, stable=True).indices[:m].sort().values
    assert taken == m
    assert torch.equal(got, pids[best])
    assert torch.equal(got_scores, scores[best])


PROGRAMS = 3


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """PTX and bytes of shared memory of the five launches on sm_90."""
    folder = tmp_path_factory.mktemp("select")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.select_ptx", str(folder), str(PROGRAMS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [((folder / f"{i}.ptx").read_text(), int((folder / f"{i}.shared_bytes").read_text())) for i in range(5)]


def run_ptx(launches, scores, n, m, seed):
    """All programs of a launch, the next one of chance where one counts itself as finished; two selects."""
    memory, order = Memory(), random.Random(seed)
    pids = np.arange(len(scores), dtype=np.int32) * 3
    out_pids, out_scores = np.full(m + 1, -7, np.int32), np.full(m + 1, -99, np.float32)
    out_count, work = np.full(1, -1, np.int32), np.zeros(sk._TALLY + 2 * PROGRAMS, np.int32)
    arrays = (scores, np.array([n], np.int32), work, pids, out_pids, out_scores, out_count)
    at_scores, at_count, at_work, at_pids, *at_out = map(memory.add, arrays)
    histogram, tally = [at_scores, at_count, at_work, m], [at_scores, at_count, at_work]
    scatter = [at_scores, at_pids, at_count, at_work, *at_out, m]
    for params, (ptx, shared) in 2 * list(zip([histogram] * 3 + [tally, scatter], launches, strict=True)):
        warps = int(*re.findall(r"\.reqntid (\d+)", ptx)) // 32
        running = [
            Program(ptx, memory, [*params, 0, 0], (program, PROGRAMS), warps, shared, order.randrange(99)).turns()
            for program in range(PROGRAMS)
        ]
        while running:
            program, finished = order.choice(running), int(work[sk._DONE])
            for _ in program:
                if work[sk._DONE] != finished:  # it has counted itself: another may go on
                    break
            else:
                running.remove(program)
        assert not work[: sk.BINS].any()
        assert work[sk._DONE] == 0
    return pids, out_pids, out_scores, int(out_count[0])


def _ptx_scores(kind, n):
    g = np.random.default_rng(n)
    scores = {
        "ties": np.round(g.normal(size=n) * 5) / 4,
        "near": 20 + g.normal(size=n) * 1e-5,
        "wide": g.normal(size=n) * 10.0 ** g.integers(-30, 30, n),
        "below the window": -g.random(n) * 1e-20,
        "above the window": g.random(n),
        "none": np.full(n, -np.inf),
    }[kind].astype(np.float32)
    sampled = np.arange(sk.SAMPLE) * max(n // sk.SAMPLE, 1)
    if kind == "below the window":
        scores[sampled] = np.arange(sk.SAMPLE) % 3 * 1e30
    if kind == "above the window":
        scores[sampled] = -1e30
    scores[7::41], scores[8::43], scores[9::47] = -np.inf, np.nan, -0.0
    return scores


@pytest.mark.skipif(not tuning.interpreted(), reason="uses the interpreter: for machines without a GPU")
@pytest.mark.parametrize(
    ("kind", "n", "m"),
    [
        ("ties", 0, 4), ("ties", 3, 5), ("ties", 700, 0), ("ties", 1000, 430), ("ties", 3000, 2990),
        ("ties", 8321, 100), ("near", 2000, 77), ("near", 900, 700), ("wide", 2500, 300), ("none", 1500, 30),
        ("below the window", 1800, 1000), ("above the window", 1900, 50),
    ],
)  # fmt: skip
def test_ptx(launches, kind, n, m):
    scores = np.append(_ptx_scores(kind, n), np.full(600, 1e35, np.float32))  # behind n nothing may count
    pids, got, got_scores, taken = run_ptx(launches, scores, n, m, seed=n)
    key = np.where(np.isnan(scores[:n]), -np.inf, scores[:n]) + 0.0
    best = np.sort(np.argsort(-key, kind="stable")[:m])
    assert taken == min(m, n)
    np.testing.assert_array_equal(got[:taken], pids[best])
    np.testing.assert_array_equal(got_scores[:taken], scores[best])
    assert (got[taken:] == -7).all()
