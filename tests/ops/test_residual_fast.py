"""The fast residual kernel: its PTX in an interpreter of ours, its resources, and on a GPU the kernel itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plaid_tilemaxsim.ops import reference, residual_fast_kernel, residual_kernel, tuning
from plaid_tilemaxsim.ops.residual_fast_kernel import k_order, pieces
from tests.ops import ptx_warp
from tests.ops.ragged import (
    LENGTHS,
    assert_scores,
    fast_residual_tolerance,
    make_collection,
    poisoned,
    quantised,
    residual_tolerance,
)

# (LQ, DIM, nbits): all widths of loads, one and several blocks of query tokens, Q in registers and not
SHAPES = [
    (32, 128, 2), (32, 128, 1), (32, 128, 4), (5, 64, 2), (16, 96, 2), (20, 96, 1), (32, 96, 4), (33, 32, 2),
    (70, 64, 1), (32, 384, 2), (9, 768, 4), (32, 160, 1),
]  # fmt: skip


no_gpu = pytest.mark.skipif(not tuning.interpreted(), reason="uses the interpreter: for machines without a GPU")


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("DIM", [32, 64, 96, 128, 384, 768, 1024])
def test_k_order_is_a_permutation(nbits, DIM):
    order = k_order(nbits, DIM)
    assert len(order) == DIM // 16
    assert sorted(dim for step in order for lane in step for dim, _ in lane) == list(range(DIM))
    assert sum(4 * size for _, size in pieces(nbits, DIM)) == DIM * nbits // 8


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_decode_puts_the_weights_that_k_order_names_into_the_fragments(nbits, size):
    """Every lane decodes its own bytes to the weights of its dims, in slot order; e is the factor 2**e."""
    if (nbits, size) in ((2, 1), (4, 1), (4, 2)):
        pytest.skip("no DIM that is a multiple of 32 needs this load")
    DIM = 32 * size // nbits
    assert pieces(nbits, DIM) == [(0, size)]
    rng = np.random.default_rng(nbits * 10 + size)
    row = torch.from_numpy(rng.integers(0, 256, (1, 4 * size), dtype=np.uint8))
    index = reference.decode_residuals(row, nbits, torch.arange(2.0**nbits), torch.float64)[0].numpy()
    words = np.zeros(32, np.uint64)
    for lane in range(32):
        words[lane] = int.from_bytes(row[0, size * (lane % 4) : size * (lane % 4 + 1)].numpy().tobytes(), "little")

    def reverse(v):
        return int(f"{v:0{nbits}b}"[::-1], 2)

    patterns = np.array([0x3C00 + 75 * k for k in range(16)], np.uint16)
    fp16 = patterns.view(np.float16)
    table = []
    if nbits > 1:
        for part in (0, 8):
            for k in range(2**nbits // 4):
                table.append(sum((int(patterns[reverse(4 * k + v)]) >> part & 255) << (8 * v) for v in range(4)))

    p = residual_fast_kernel.Ptx()
    tables = [f"${2 + i}" for i in range(len(table))]
    pairs = residual_fast_kernel._DECODE[nbits](p, "$1", size, tables)
    registers = {"in1": words} | {f"in{2 + i}": np.full(32, t, np.uint64) for i, t in enumerate(table)}
    ptx_warp.Kernel(".entry decode() {\n" + p.text().replace("$", "in") + "\n}").run(
        ptx_warp.Memory(), [], registers=registers
    )
    order = k_order(nbits, DIM)
    assert len(pairs) == len(order)
    for step, pair in zip(order, pairs, strict=True):
        values = np.stack([registers[r].astype(np.uint32).view(np.float16).reshape(32, 2) for r in pair], 1)
        for lane in range(32):
            for i, (dim, e) in enumerate(step[lane % 4]):
                bucket = int(index[dim])
                want = 1024 + 2**e * bucket if nbits == 1 else fp16[bucket]
                assert values[lane, i // 2, i % 2] == want


def compile_for(folder, arch, LQ, DIM, nbits, listed):
    """PTX of the kernel into ``folder``; nothing spills, and as many programs as are launched fit an SM."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.residual_fast_ptx", folder, arch, LQ, DIM, nbits, int(listed)]
    subprocess.run([str(x) for x in command], check=True, env=environment, cwd=Path(__file__).parents[2])
    programs = residual_fast_kernel.launch_for(arch, nbits, DIM, LQ).programs_per_sm
    for needs in json.loads((folder / "resources.json").read_text()):
        assert needs["spills"] == 0
        assert needs["shared_bytes"] == 0
        assert programs * 32 * (-(-needs["registers"] // 8) * 8) <= 65536


def emulate(c, cs, folder, pids, programs=3, n=None):
    """Scores by the PTX of the kernel, block after block of query tokens as the launcher goes; of the first n pids."""
    memory = ptx_warp.Memory()
    stored, lo, step = quantised(c.inv_norms)
    cap = len(LENGTHS) if pids is None else len(pids)
    n = cap if n is None else n
    out = poisoned(cap, "cpu").numpy()
    workspace = residual_fast_kernel.prepare(c.Q, cs, c.bucket_weights, c.nbits)
    NT = 2 if cs.table.size(1) == 16 else 4
    table, scale, codes, residuals, inv_norms, offsets = (
        memory.add(x.numpy()) for x in (cs.table, cs.scale, c.codes, c.residuals, stored, c.offsets)
    )
    listed = [] if pids is None else [memory.add(pids.numpy()), memory.add(np.array([n], np.int32))]
    out_at = memory.add(out)
    for block, words in enumerate(workspace):
        inputs: list[int | float] = [
            memory.add(words.numpy()),
            table + 16 * NT * block,
            scale,
            codes,
            residuals,
            inv_norms,
        ]
        inputs += [lo, step, offsets, *listed, out_at, cap, len(c.Q) - 8 * NT * block, 0, 0]
        kernel = ptx_warp.Kernel((folder / f"{min(block, 1)}.ptx").read_text())
        for program in range(programs):
            kernel.run(memory, inputs, (program, programs))
    return torch.from_numpy(out)


def check_ptx(tmp_path, LQ, DIM, nbits, listed):
    compile_for(tmp_path, 90, LQ, DIM, nbits, listed)
    c = make_collection("cpu", LQ, DIM, nbits)
    cs = c.centroid_scores()
    pids = torch.tensor([13, 0, 5, 5, 15, 1, 3, 12], dtype=torch.int32) if listed else None
    want = reference.residual_maxsim(c.Q, *c.raw, pids=pids)
    assert_scores(emulate(c, cs, tmp_path, pids), want, residual_tolerance(c, cs))


@no_gpu
def test_the_ptx_scores_like_the_oracle(tmp_path):
    check_ptx(tmp_path, 32, 128, 2, listed=True)


@no_gpu
def test_the_ptx_follows_no_pid_of_an_empty_list(tmp_path):
    """After a filter that leaves nothing the list is memory that nobody wrote."""
    compile_for(tmp_path, 90, 32, 128, 2, listed=True)
    c = make_collection("cpu", 32, 128, 2)
    unwritten = torch.full((8,), 2**31 - 1, dtype=torch.int32)
    assert emulate(c, c.centroid_scores(), tmp_path, unwritten, n=0).isnan().all()


@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize(("LQ", "DIM", "nbits"), SHAPES)
def test_the_ptx_scores_like_the_oracle_in_all_shapes(LQ, DIM, nbits, tmp_path):
    check_ptx(tmp_path, LQ, DIM, nbits, listed=False)


@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89])
def test_other_chips(arch, tmp_path):
    compile_for(tmp_path, arch, 32, 128, 2, listed=True)


def scored(c, cs, pids=None, out=None, count=None, stored=None):
    inv_norms, lo, step = quantised(c.inv_norms) if stored is None else stored
    n = len(LENGTHS) if pids is None else len(pids)
    out = poisoned(n, c.device) if out is None else out
    residual_fast_kernel.residual_maxsim(
        c.Q, cs, c.codes, c.residuals, inv_norms, lo, step, c.bucket_weights, c.nbits, c.offsets, pids, out, count
    )  # fmt: skip
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("LQ", "DIM", "nbits"), [*SHAPES, (300, 128, 2), (64, 1024, 1), (1, 128, 4)])
def test_matches_the_oracle_and_the_portable_kernel(LQ, DIM, nbits, negative):
    c = make_collection("cuda", LQ, DIM, nbits, negative=negative)
    cs = c.centroid_scores()
    got = scored(c, cs)
    assert_scores(got, reference.residual_maxsim(c.Q, *c.raw), fast_residual_tolerance(c, cs))
    portable = poisoned(len(LENGTHS), "cuda")
    residual_kernel.residual_maxsim(
        c.Q, cs, c.codes, c.residuals, *quantised(c.inv_norms), c.bucket_weights, nbits, c.offsets, None, portable, None
    )  # fmt: skip
    assert_scores(got, portable, residual_tolerance(c, cs) + fast_residual_tolerance(c, cs))
    assert torch.equal(got, scored(c, cs)), "two runs differ"


@pytest.mark.gpu
def test_many_passages_in_groups():
    """Enough passages that neighbours go to one program, most of them short or empty."""
    g = torch.Generator().manual_seed(1)
    lengths = tuple(torch.randint(0, 40, (300_000,), generator=g).tolist())
    c = make_collection("cuda", 32, 128, 2, lengths=lengths)
    cs = c.centroid_scores()
    out = poisoned(len(lengths), "cuda")
    pids = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
    everything = scored(c, cs, out=out)
    assert torch.equal(everything, scored(c, cs, pids))
    some = torch.arange(0, len(lengths), 97, device="cuda")
    want = reference.residual_maxsim(c.Q, *c.raw, pids=some)
    assert_scores(everything[some], want, residual_tolerance(c, cs))


@pytest.mark.gpu
def test_inverse_norms_may_be_fp32():
    c = make_collection("cuda", 8, 64)
    cs = c.centroid_scores()
    want = reference.residual_maxsim(c.Q, *c.raw)
    assert_scores(scored(c, cs, stored=(c.inv_norms, 0.0, 1.0)), want, residual_tolerance(c, cs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pid_lists(dtype):
    c = make_collection("cuda", 32, 64)
    cs = c.centroid_scores()
    everything = scored(c, cs)
    for listed in ([], [5], [13, 0, 5, 5, 15, 1, 5, 12]):
        pids = torch.tensor(listed, dtype=dtype, device="cuda")
        assert torch.equal(scored(c, cs, pids), everything[pids.long()])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 3, 99])
def test_count_limits_what_is_written(count):
    c = make_collection("cuda", 40, 64)
    cs = c.centroid_scores()
    everything = scored(c, cs)
    pids = torch.arange(8, dtype=torch.int32, device="cuda")
    out = torch.full((8,), 7.0, device="cuda")
    scored(c, cs, pids, out, torch.tensor([count], dtype=torch.int32, device="cuda"))
    n = min(count, 8)
    assert torch.equal(out[:n], everything[:n])
    assert (out[n:] == 7.0).all()


@pytest.mark.gpu
def test_byte_addresses_past_int32():
    """Residual rows beyond byte 2**31 (67,108,864 tokens of 32 bytes). Memory is reserved, not touched."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of GPU memory")
    c = make_collection("cuda", 32, 128, 2)
    cs = c.centroid_scores()
    want = scored(c, cs)
    stored, lo, step = quantised(c.inv_norms)
    first = 2**28 + 77  # past byte 2**33 of the residuals, 2**30 of the codes
    T = first + len(c.codes)

    def moved(x):
        big = torch.empty(T, *x.shape[1:], dtype=x.dtype, device="cuda")
        big[first:] = x
        return big

    out = poisoned(len(LENGTHS), "cuda")
    residual_fast_kernel.residual_maxsim(
        c.Q, cs, moved(c.codes), moved(c.residuals), moved(stored), lo, step, c.bucket_weights, 2,
        torch.cat([c.offsets.new_zeros(1), c.offsets + first]),
        torch.arange(1, len(LENGTHS) + 1, device="cuda"), out, None,
    )  # fmt: skip
    assert torch.equal(out, want)
