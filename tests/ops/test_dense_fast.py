"""The fast dense kernel: its PTX in an interpreter of ours, its resources, and on a GPU the kernel itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import dense_fast_kernel, reference, tuning
from tests.ops import ptx_warp
from tests.ops.ragged import LENGTHS, assert_scores, poisoned

# (dtype, precision, LQ, DIM, layout): one and several chunks, Q in registers and not, all ways to pass passages
SHAPES = [
    (torch.float16, "ieee", 32, 128, "packed"), (torch.float16, "ieee", 7, 256, "listed"),
    (torch.bfloat16, "ieee", 32, 96, "padded"), (torch.float16, "ieee", 40, 64, "fixed"),
    (torch.float32, "tf32x3", 32, 128, "packed"), (torch.float32, "tf32", 9, 48, "listed"),
    (torch.float32, "tf32x3", 5, 16, "padded"), (torch.float32, "fp16x3", 32, 128, "packed"),
    (torch.float32, "fp16x3", 35, 80, "fixed"), (torch.float16, "ieee", 32, 768, "fixed"),
]  # fmt: skip
FIXED = 37
no_gpu = pytest.mark.skipif(not tuning.interpreted(), reason="uses the interpreter: for machines without a GPU")


def tolerance(dtype: torch.dtype, precision: str, LQ: int, DIM: int) -> float:
    """Unit vectors. Products are exact but for TF32, whose factors keep 11 bits; sums are fp32 (truncated): DIM
    additions of a relative 2**-23 each, of partial sums below 1."""
    per_token = DIM * 2.0**-23
    if precision == "tf32":
        per_token += 4 * 2.0**-11 / DIM**0.5  # four standard deviations of DIM products of relative error 2**-11
    return LQ * per_token


def make(dtype: torch.dtype, LQ: int, DIM: int, layout: str, device: str) -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(DIM + LQ)

    def unit(*shape: int) -> Tensor:
        return normalize(torch.randn(*shape, DIM, generator=g), dim=-1).to(dtype).to(device)

    data: dict[str, Tensor | None] = {"Q": unit(1, LQ), "lengths": None, "offsets": None, "pids": None}
    if layout in ("packed", "listed"):
        data["offsets"] = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
        data["D"] = unit(sum(LENGTHS))
        if layout == "listed":
            data["pids"] = torch.tensor([3, 0, 15, 7, 7, 12], dtype=torch.int32, device=device)
    else:
        data["D"] = unit(9, FIXED)
        if layout == "padded":
            data["lengths"] = torch.tensor([0, 1, 16, 17, 31, 32, 33, 37, 5], dtype=torch.int32, device=device)
    return data


def expected(data) -> Tensor:
    """fp64 scores of the one query."""
    D, offsets = data["D"], data["offsets"]
    if offsets is None:
        lengths = data["lengths"] if data["lengths"] is not None else torch.full((len(D),), FIXED)
        rows = [d[: int(m)] for d, m in zip(D, lengths, strict=True)]
        D, offsets = torch.cat(rows), torch.tensor([0, *map(len, rows)], device=D.device).cumsum(0)
    return reference.maxsim(data["Q"][0], D, offsets, data["pids"])


def compiled(folder: Path, arch: int, dtype, precision, LQ, DIM, layout, n: int = 16) -> list[dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.dense_fast_ptx", folder, arch, str(dtype).split(".")[1], precision]
    done = subprocess.run(
        [str(x) for x in [*command, LQ, DIM, layout, n]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "resources.json").read_text())


@no_gpu
@pytest.mark.parametrize(("dtype", "precision", "LQ", "DIM", "layout"), SHAPES)
def test_the_ptx_scores_like_the_oracle(tmp_path, dtype, precision, LQ, DIM, layout):
    for needs in compiled(tmp_path, 90, dtype, precision, LQ, DIM, layout):
        assert needs["spills"] <= 4  # as test_aot allows: none under triton 3.9, two at DIM 768 under 3.6 and 3.7
        assert needs["shared_bytes"] == 0
    data = make(dtype, LQ, DIM, layout, "cpu")
    want = expected(data)
    out = np.full(len(want), np.nan, np.float32)
    for block in range(-(-LQ // dense_fast_kernel.TOKENS)):
        ptx = ptx_warp.Kernel((tmp_path / f"{min(block, 1)}.ptx").read_text())
        launch(ptx, data, precision, out, len(want), 2, 0, block)
    assert_scores(torch.from_numpy(out), want, tolerance(dtype, precision, LQ, DIM))


def launch(
    ptx: ptx_warp.Kernel, data, precision: str, out: np.ndarray, n: int, programs: int, late: int, block: int = 0
) -> None:
    """What the launcher passes, for n passages of the data, which the programs then score one after the other."""
    memory = ptx_warp.Memory()

    def placed(x: Tensor | None) -> list[int]:
        if x is None:
            return []
        return [memory.add((x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy())]

    Q, D, packed = data["Q"], data["D"], data["offsets"] is not None
    LQ = Q.size(1) - block * dense_fast_kernel.TOKENS
    kind = dense_fast_kernel._KINDS[D.dtype] if D.dtype != torch.float32 else precision
    if kind in ("fp16", "bf16") and Q.size(2) <= 128:  # as it is
        q, factor = Q[0, -LQ:], None
    else:
        blocks, factor = dense_fast_kernel.prepare(Q, kind)
        q = blocks[block]
    ranges = data["offsets"] if packed else data["lengths"]
    pointers = [q, factor, D, ranges, data["pids"], data.get("count")]
    addresses = [address for x in pointers for address in placed(x)]
    scalars = [n, 0 if packed else FIXED, programs, late, LQ, 0, 0]
    for program in range(programs + late):
        ptx.run(memory, [*addresses, memory.add(out), *scalars], (program, programs + late))


@no_gpu
@pytest.mark.parametrize("layout", ["packed", "counted"])
def test_the_dealing_changes_no_bit(tmp_path, layout):
    compiled(tmp_path, 90, torch.float16, "ieee", 20, 32, layout, 150_000)  # long enough for groups
    ptx = ptx_warp.Kernel((tmp_path / "0.ptx").read_text())
    g = torch.Generator().manual_seed(1)
    data = make(torch.float16, 20, 32, "packed", "cpu")
    n = 61
    if layout == "counted":
        data["pids"] = torch.randint(16, (n,), generator=g, dtype=torch.int32)
    else:
        lengths = torch.tensor(LENGTHS)[torch.randint(16, (n,), generator=g)]
        data["offsets"] = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        data["D"] = normalize(torch.randn(int(lengths.sum()), 32, generator=g), dim=-1).half()
    want = expected(data)
    once = None
    # passages, resident programs, late ones: runs of 6, 3 and 1, fewer passages than programs, none
    for m, programs, late in (
        (n, 1, 1),
        (n, 5, 1),
        (n, 2, 2),
        (n - 1, 3, 6),
        (7, 4, 2),
        (3, 5, 1),
        (1, 1, 3),
        (0, 2, 1),
    ):
        here = dict(data)
        if layout == "counted":
            assert data["pids"] is not None
            here["count"] = torch.tensor([m], dtype=torch.int32)
            here["pids"] = torch.where(torch.arange(n) < m, data["pids"], 2**31 - 1)  # nobody may follow the rest
        elif m == 0:
            continue  # the launcher returns
        out = np.full(n, np.nan, np.float32)
        launch(ptx, here, "ieee", out, n if layout == "counted" else m, programs, late)
        if once is None:
            once = out
            assert_scores(torch.from_numpy(out), want, tolerance(torch.float16, "ieee", 20, 32))
        assert (out[:m] == once[:m]).all()
        assert np.isnan(out[m:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "listed", "padded", "fixed"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float16, "ieee"),
        (torch.bfloat16, "ieee"),
        (torch.float32, "tf32"),
        (torch.float32, "tf32x3"),
        (torch.float32, "fp16x3"),
    ],
)
@pytest.mark.parametrize(("LQ", "DIM"), [(32, 128), (70, 160), (8, 384), (32, 768)])
def test_matches_the_oracle(LQ, DIM, dtype, precision, layout):
    data = make(dtype, LQ, DIM, layout, "cuda")
    want = expected(data)
    out = poisoned(len(want), "cuda")[None]
    count = None
    if layout == "listed":
        count = torch.tensor([4], dtype=torch.int32, device="cuda")
    dense_fast_kernel.dense_maxsim(
        data["Q"], data["D"], data["lengths"], data["offsets"], data["pids"], out, count, precision
    )
    if count is not None:
        assert out[0, 4:].isnan().all()
        out, want = out[:, :4], want[:4]
    assert_scores(out[0], want, tolerance(dtype, precision, LQ, DIM))
