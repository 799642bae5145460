"""Centroid-only MaxSim over kept tokens: the kernel's PTX for sm_80 and sm_90, and on a device, against integers."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from plaid_tilemaxsim.ops import api, centroid_kernel, tuning
from tests.ops.ptx_program import Program
from tests.ops.ptx_warp import Memory
from tests.ops.ragged import LENGTHS, make_collection, poisoned

C = 150
MANY = LENGTHS * 3  # several rounds of all groups of a program
SCALE = np.full(1, 1e-3, np.float32)


def expected(table, scale, keep, codes, offsets, LQ):
    """Bit for bit: sums of maxima of table entries."""
    want = np.full(len(offsets) - 1, -np.inf, np.float32)
    for pid, (first, end) in enumerate(itertools.pairwise(offsets)):
        code = codes[first:end]
        code = code[keep[code]]
        if len(code):
            want[pid] = np.float32(table[code, :LQ].max(0).astype(np.int64).sum()) * scale
    return want


@pytest.fixture(
    scope="module", params=[(90, 32, True), (90, 16, False), (90, 60, True), (90, 45, False), (80, 32, True)], ids=str
)
def launch(request, tmp_path_factory):
    """(PTX, LQ, whether there is a list) of one launch."""
    arch, LQ, listed = request.param
    file = tmp_path_factory.mktemp("kept") / "kernel.ptx"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.ops.centroid_kept_ptx",
        file,
        str(arch),
        str(LQ),
        "pids" if listed else "all",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return file.read_text(), LQ, listed


def scored(launch, table, keep, codes, offsets, pids, count, programs, of=None, first=0):
    """out fp32, at first 7, after programs 0 .. programs - 1 of ``of``; the codes before ``first`` are not there."""
    ptx, LQ, listed = launch
    bits = np.packbits(np.pad(keep, (0, -len(keep) % 32)), bitorder="little").view(np.int32)
    out = np.full(len(pids), 7.0, np.float32)
    memory = Memory()
    arrays = table, SCALE, bits, codes, offsets + first, pids, np.array([count], np.int32), out
    at_words, at_scale, at_bits, at_codes, at_offsets, at_pids, at_count, at_out = map(memory.add, arrays)
    params = [at_words, at_scale, at_bits, at_codes - 4 * first, at_offsets]
    params += [at_pids, at_count] if listed else []
    params += [at_out, len(pids), len(bits), LQ, 0, 0]
    for program in range(programs):
        Program(ptx, memory, params, (program, of or programs), 1, 0).run()
    return out


def random_table(g, LQ):
    table = g.integers(-32767, 32768, (C + 1, api.padded_query_length(LQ))).astype(np.int16)
    table[C] = -32768
    return table


@pytest.mark.parametrize("share", [0.0, 0.04, 0.1, 0.3])
@pytest.mark.parametrize("programs", [1, 3])
def test_ptx(launch, share, programs):
    _, LQ, listed = launch
    g = np.random.default_rng(LQ)
    table = random_table(g, LQ)
    keep = np.arange(C) % 25 < 25 * share
    offsets = np.cumsum([0, *MANY]).astype(np.int64)
    codes = g.integers(0, C, offsets[-1]).astype(np.int32)
    codes[:300] = codes[0]  # what occurs twice in a group is dropped at once
    if share == 0.1:  # few centroids, many tokens
        codes[::2] = g.choice(np.flatnonzero(keep), len(codes[::2]))
    pids = g.permutation(len(MANY)).astype(np.int32)
    count = len(pids) - 2 if listed else len(pids)
    out = scored(launch, table, keep, codes, offsets, pids, count, programs)
    want = expected(table, SCALE[0], keep, codes, offsets, LQ)[pids if listed else slice(None)]
    if share > 0.2:  # the other kernel's
        count = 0
    np.testing.assert_array_equal(out[:count], want[:count])
    assert (out[count:] == 7.0).all()


@pytest.mark.parametrize("first", [0, 2**31 - 100, 2**33])
def test_ptx_one_long_passage(launch, first):
    """Of a large index; the other groups have none. That many programs are not launched, but count as far soon."""
    _, LQ, _ = launch
    g = np.random.default_rng(LQ)
    table = random_table(g, LQ)
    keep = np.arange(C) % 25 < 1
    offsets = np.array([0, 1500, 1501], np.int64)
    codes = g.integers(0, C, 1501).astype(np.int32)
    out = scored(launch, table, keep, codes, offsets, np.arange(2, dtype=np.int32), 2, 1, 1 << 24, first)
    assert out.tolist() == [expected(table, SCALE[0], keep, codes, offsets, LQ)[0], 7.0]


@pytest.mark.parametrize("count", [0, -3])
def test_ptx_nothing_to_score(launch, count):
    """The list and its ranges may be anything."""
    _, LQ, listed = launch
    keep, offsets = np.zeros(C, bool), np.full(4, 1 << 40, np.int64)
    if listed:
        pids = np.full(3, 1 << 30, np.int32)
        table = random_table(np.random.default_rng(0), LQ)
        assert (scored(launch, table, keep, np.zeros(1, np.int32), offsets, pids, count, 1) == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("per_lane", [2, 4, 8, 12])
@pytest.mark.parametrize("LQ", [1, 16, 32, 40, 64, 130])
def test_equals_the_portable_kernel(LQ, per_lane, device, monkeypatch):
    from plaid_tilemaxsim.ops import centroid_kept_kernel

    c = make_collection(device, LQ, 64, C=2000, lengths=LENGTHS * 40)
    chosen = tuning.centroid_kept_blocks(90, api.padded_query_length(LQ))
    other = tuning.CentroidKeptBlocks(chosen.BLOCK_Q, per_lane, chosen.PACKED, 2)
    monkeypatch.setattr(tuning, "centroid_kept_blocks", lambda arch, LQP: other)
    pids = torch.randperm(len(c.offsets) - 1, device=device).int()
    count = torch.tensor([len(pids) - 5], dtype=torch.int32, device=device)
    best = (c.centroids.float() @ c.Q.T).amax(1).sort(descending=True).values
    for share in (0.0, 0.01, 0.05, 0.3, 1.0):
        cs = c.centroid_scores(float(best[int(share * 1999)]))
        for listed, n in ((None, None), (pids, count)):
            got, rest, want, either = (poisoned(len(pids), device) for _ in range(4))
            centroid_kept_kernel.centroid_maxsim(cs, c.codes, c.offsets, listed, got, n)
            centroid_kernel.centroid_maxsim(cs, c.codes, c.offsets, listed, True, rest, n, unless_few=True)
            centroid_kernel.centroid_maxsim(cs, c.codes, c.offsets, listed, True, want, n)
            api.centroid_maxsim(cs, c.codes, c.offsets, listed, True, either, n, impl="triton")
            scored, untouched = (got, rest) if share < 0.2 else (rest, got)
            assert torch.equal(scored.view(torch.int32), want.view(torch.int32))
            assert torch.equal(either.view(torch.int32), want.view(torch.int32))
            assert untouched.isnan().all()
