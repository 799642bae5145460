"""Compile what the launchers launch, for a chip that is not here.

    python -m tests.ops.aot ARCH (quick | dense | compressed | rest)      one JSON object a compiled kernel

Not a test itself: it runs in a process without TRITON_INTERPRET. Inside :func:`compiling_for` a kernel launch compiles
the very specialisation that the launch would need on that chip and lists its resources instead of running, so launchers
are called with small CPU tensors of the real shapes and dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from plaid_tilemaxsim.ops import (
    candidates_kernel,
    centroid_kept_kernel,
    centroid_kernel,
    centroid_scores_kernel,
    decompress_kernel,
    dense_fast_kernel,
    dense_kernel,
    dense_ring_kernel,
    merge_kernel,
    norms_kernel,
    pids_kernel,
    pq_fast_kernel,
    pq_kernel,
    rank_kernel,
    residual_batch_kernel,
    residual_fast_kernel,
    residual_fp32_kernel,
    residual_kernel,
    residual_wgmma_kernel,
    select_kernel,
    tuning,
)
from plaid_tilemaxsim.ops.api import CentroidScores, padded_query_length


@dataclass
class Compiled:
    module: str
    kernel: str
    constants: dict[str, Any]
    registers: int
    spills: int  # loads and stores of local memory in the machine code
    doubles: int  # instructions of fp64
    shared_bytes: int
    num_warps: int
    num_stages: int
    asm: dict[str, Any]

    def sass(self) -> str:
        """Disassembly of the kernel."""
        return _tool("nvdisasm", "-c", cubin=self.asm["cubin"])


def _tool(name: str, *args: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        return subprocess.run([tool, *args, f.name], check=True, capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> dict[str, int]:
    usage = _tool("cuobjdump", "-res-usage", cubin=cubin)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


class _Driver:
    """What JITFunction.warmup asks of a driver."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[list[Compiled]]:
    """Launches inside compile for compute capability ``arch`` (for example 90) and are listed, not run."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "kernels are interpreted in this process"
    compiled: list[Compiled] = []

    def launch(self: JITFunction, grid: Any) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            kernel = self.warmup(*args, grid=grid, **kwargs)
            constants = {k: v for k, v in kwargs.items() if k.isupper()}
            use = _resources(kernel.asm["cubin"])
            meta, code = kernel.metadata, _tool("nvdisasm", "-c", cubin=kernel.asm["cubin"])
            compiled.append(
                Compiled(
                    module=self.fn.__module__.rsplit(".")[-1],
                    kernel=self.__name__,
                    constants=constants,
                    registers=use["REG"],
                    spills=len(re.findall(r"\b(LDL|STL)\b", code)),
                    doubles=len(re.findall(r"\bD(ADD|MUL|FMA|SETP)\b|\.F64", code)),
                    shared_bytes=meta.shared,
                    num_warps=meta.num_warps,
                    num_stages=meta.num_stages,
                    asm=kernel.asm,
                )
            )

        return compile_only

    saved = JITFunction.__getitem__, tuning._device_properties
    driver.set_active(_Driver(arch))  # stays: there is no driver to go back to
    JITFunction.__getitem__ = launch
    tuning._device_properties = lambda device: (arch, 132)
    try:
        yield compiled
    finally:
        JITFunction.__getitem__, tuning._device_properties = saved


def _scores(LQ: int) -> CentroidScores:
    table = torch.zeros(101, padded_query_length(LQ), dtype=torch.int16)
    return CentroidScores(table, torch.zeros(1), LQ, torch.zeros(100).byte(), torch.zeros(4).int())


def _lists(pids: torch.dtype | None, count: bool) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """pids, out, count of a launch."""
    listed = None if pids is None else torch.zeros(64, dtype=pids)
    return listed, torch.zeros(100 if pids is None else 64), torch.zeros(1).int() if count else None


def launch_centroid_scores(LQ: int, DIM: int, keep: bool, ncells: int | None) -> None:
    centroids = torch.zeros(1000, DIM).half()
    centroid_scores_kernel.centroid_scores(torch.zeros(LQ, DIM), centroids, 0.4 if keep else None, 1.0, ncells)


def launch_centroid(LQ: int, pids: torch.dtype | None, count: bool, use_keep: bool) -> None:
    listed, out, n = _lists(pids, count)
    codes, offsets = torch.zeros(1000).int(), torch.zeros(101).long()
    centroid_kernel.centroid_maxsim(_scores(LQ), codes, offsets, listed, use_keep, out, n)
    if use_keep:
        centroid_kept_kernel.centroid_maxsim(_scores(LQ), codes, offsets, listed, out, n)


def launch_residual(
    kernel: Any, LQ: int, DIM: int, nbits: int, pids: torch.dtype | None, count: bool, stored: torch.dtype
) -> None:
    listed, out, n = _lists(pids, count)
    kernel.residual_maxsim(
        torch.zeros(LQ, DIM), _scores(LQ), torch.zeros(1000).int(), torch.zeros(1000, DIM * nbits // 8).byte(),
        torch.zeros(1000).to(stored), 0.9, 1e-5, torch.zeros(2**nbits), nbits, torch.zeros(101).long(), listed, out, n,
    )  # fmt: skip


def launch_fp32(LQ: int, DIM: int, nbits: int, pids: torch.dtype | None, count: bool) -> None:
    listed, out, n = _lists(pids, count)
    residual_fp32_kernel.residual_maxsim(
        torch.zeros(LQ, DIM), torch.zeros(100, DIM).half(), torch.zeros(1000).int(),
        torch.zeros(1000, DIM * nbits // 8).byte(), torch.zeros(2**nbits), nbits, torch.zeros(101).long(), listed, out,
        n,
    )  # fmt: skip


def launch_batch(NQ: int, LQ: int, DIM: int, nbits: int, pids: torch.dtype | None, stored: torch.dtype) -> None:
    listed, out, n = _lists(pids, pids is not None)
    residual_batch_kernel.residual_maxsim(
        torch.zeros(NQ, LQ, DIM), torch.zeros(100, DIM).half(), torch.zeros(1000).int(),
        torch.zeros(1000, DIM * nbits // 8).byte(), torch.zeros(1000).to(stored), 0.9, 1e-5, torch.zeros(2**nbits),
        nbits, torch.zeros(101).long(), listed, out.expand(NQ, -1).contiguous(), n,
    )  # fmt: skip


def launch_dense(NQ: int, LQ: int, DIM: int, dtype: torch.dtype, layout: str, precision: str = "tf32x3") -> None:
    """The kernel that api.dense_maxsim chooses."""
    Q = torch.zeros(NQ, LQ, DIM, dtype=dtype)
    n = 150_000 if layout in ("full", "packed") else 64  # enough for groups and late programs, or few
    packed, padded = torch.zeros(1000, DIM, dtype=dtype), torch.zeros(1, 128, DIM, dtype=dtype).expand(n, -1, -1)
    out, offsets, lengths = torch.zeros(NQ, n), torch.zeros(n + 1).long(), torch.zeros(n).int()
    pids, count = torch.zeros(n).int(), torch.zeros(1).int()
    D, arguments = {
        "full": (padded, (None, None, None, out, None)),
        "few": (padded, (None, None, None, out, None)),
        "lengths": (padded, (lengths, None, None, out, None)),
        "packed": (packed, (None, offsets, None, out, None)),
        "pids": (packed, (None, offsets, pids, out, count)),
    }[layout]
    arch, fixed = tuning.arch(D.device), layout in ("full", "few")
    if fixed and tuning.dense_is_ring(arch, dtype, DIM, NQ, LQ, n, 128):
        dense_ring_kernel.dense_maxsim(Q, D, out, None)
        return
    fast = tuning.dense_is_fast(arch, dtype, precision, DIM, NQ * LQ, fixed)
    (dense_fast_kernel if fast else dense_kernel).dense_maxsim(Q, D, *arguments, precision)


def launch_pq(kernel: Any, NQ: int, LQ: int, DIM: int, M: int, pids: torch.dtype | None, count: bool) -> None:
    listed, out, n = _lists(pids, count)
    codebook = torch.zeros(M, 256, DIM // M).half()
    out = out.expand(NQ, -1).contiguous()
    kernel.pq_maxsim(
        torch.zeros(NQ, LQ, DIM), torch.zeros(1000, M).byte(), codebook, torch.zeros(101).long(), listed, out, n
    )


def launch_wgmma(NQ: int, LQ: int, nbits: int, count: bool, stored: torch.dtype) -> None:
    if tuning.arch(torch.device("cpu")) == 90:
        residual_wgmma_kernel.residual_maxsim(
            torch.zeros(NQ, LQ, 128), torch.zeros(100, 128).half(), torch.zeros(1000).int(),
            torch.zeros(1000, 16 * nbits).byte(), torch.zeros(1000).to(stored), 0.9, 1e-5, torch.zeros(2**nbits),
            nbits, torch.zeros(101).long(), torch.zeros(NQ, 100), torch.ones(1).int() if count else None,
        )  # fmt: skip


def launch_lists(ncells: int, nkeys: int) -> None:
    """Candidates, selection, ranking, checked pids, the merge of shards."""
    cells, one = torch.zeros(32, ncells).int(), torch.zeros(1).int()
    candidates_kernel.select_cells(torch.zeros(nkeys, 32).long(), cells)
    words, pids = torch.zeros(4000).int(), torch.zeros(128_000).int()
    candidates_kernel.mark_lists(cells, pids, torch.zeros(9).long(), words)
    scores, packed = torch.zeros(4096), torch.zeros(201).int()
    work = select_kernel.select_workspace(torch.device("cpu"))
    for listed in (pids, None):
        candidates_kernel.gather_marked(words, torch.zeros(32).int(), pids, one, None if listed is None else words)
        select_kernel.select_top(scores, listed, one, 100, pids, scores, one, work)
        for count in (one, None):
            rank_kernel.rank(scores, None if listed is None else listed[:4096], count, 100, packed)
    pids_kernel.clamp_pids(pids, one, 9, pids, one)
    merge_kernel.plausible(scores, scores, pids[:4096], one, 100)
    # by one program, by that and a second launch, by sorting
    for most, keeps in ((256, [256, 64, 10]), (1024, [1024, 256, 100]), (4096, [4096, 1024, 9]), (5000, [256, 64, 10])):
        merge_kernel.merge(torch.zeros(10 * most).int(), torch.zeros(2, 4).long(), most, keeps, 1)


def launch_decompression(DIM: int, nbits: int, dtype: torch.dtype = torch.float16) -> None:
    codes, residuals = torch.zeros(1000).int(), torch.zeros(1000, DIM * nbits // 8).byte()
    parts = codes, residuals, torch.zeros(99, DIM).half(), torch.zeros(2**nbits)
    norms_kernel.inverse_norms(*parts, nbits)
    decompress_kernel.decompress(*parts, nbits, torch.zeros(1000, DIM, dtype=dtype))
    offsets, pids, one = torch.zeros(101).long(), torch.zeros(64).int(), torch.zeros(1).int()
    out = torch.zeros(64, 9, DIM, dtype=dtype)
    for listed in (pids, None):
        decompress_kernel.decompress_passages(*parts, nbits, offsets, listed, one, 0, out, pids, one)


def launch_quick() -> None:
    """What a search with LQ = 32 runs, and one launch of everything else."""
    for DIM in (128, 384):
        launch_centroid_scores(32, DIM, True, 4)
    launch_centroid(32, torch.int32, True, True)
    launch_centroid(32, torch.int32, True, False)
    for nbits in (1, 2, 4):
        launch_residual(residual_kernel, 32, 128, nbits, torch.int32, True, torch.uint16)
        launch_residual(residual_fast_kernel, 32, 128, nbits, torch.int32, True, torch.uint16)
        launch_fp32(32, 128, nbits, torch.int32, True)
    launch_dense(1, 32, 128, torch.float16, "full")
    launch_dense(8, 32, 128, torch.float16, "full")
    launch_dense(1, 32, 768, torch.bfloat16, "full")
    launch_dense(1, 32, 128, torch.float16, "pids")
    for NQ in (1, 8):
        launch_pq(pq_fast_kernel, NQ, 32, 128, 16, torch.int32, True)
    launch_pq(pq_kernel, 1, 32, 128, 16, torch.int32, True)
    launch_batch(8, 32, 128, 2, torch.int32, torch.uint16)
    launch_wgmma(8, 32, 2, False, torch.uint16)
    launch_lists(4, 2048)
    launch_decompression(128, 2)


def launch_dense_matrix() -> None:
    for DIM in (32, 40, 64, 96, 128, 256, 384, 768, 1024):
        for layout in ("full", "few", "lengths", "packed", "pids"):
            launch_dense(1, 32, DIM, torch.float16, layout)
        launch_dense(1, 20, DIM, torch.bfloat16, "full")
        for NQ, LQ in ((1, 5), (1, 128), (1, 300), (4, 32)):
            launch_dense(NQ, LQ, DIM, torch.bfloat16, "packed")
        for precision in ("ieee", "tf32", "tf32x3", "fp16x3"):
            if precision == "fp16x3" and DIM % 16:
                continue  # refused
            launch_dense(1, 32, DIM, torch.float32, "packed", precision)
            launch_dense(1, 32, DIM, torch.float32, "full", precision)
            launch_dense(4, 32, DIM, torch.float32, "pids", precision)


def launch_compressed_matrix() -> None:
    for nbits in (1, 2, 4, 8):
        for DIM in (64, 96, 128, 384):
            launch_residual(residual_kernel, 32, DIM, nbits, torch.int32, True, torch.uint16)
        launch_residual(residual_kernel, 130, 768, nbits, None, False, torch.float32)
    for nbits in (1, 2, 4):
        for DIM in (64, 96, 128, 384, 768):
            for LQ in (16, 32, 70):
                launch_residual(residual_fast_kernel, LQ, DIM, nbits, torch.int32, True, torch.uint16)
        launch_residual(residual_fast_kernel, 32, 128, nbits, None, False, torch.float32)
        for DIM in filter(functools.partial(residual_batch_kernel.supported, nbits), (32, 64, 96, 128)):
            for NQ, LQ in ((1, 32), (3, 20), (8, 32)):
                launch_batch(NQ, LQ, DIM, nbits, torch.int32, torch.uint16)
        launch_batch(4, 40, 128, nbits, None, torch.float32)
        launch_wgmma(5, 32, nbits, True, torch.uint16)
        launch_wgmma(4, 40, nbits, False, torch.float32)
    for M, DIM in ((4, 64), (8, 64), (16, 96), (16, 128), (32, 128), (64, 128), (8, 384), (32, 768)):
        for NQ, LQ in ((1, 32), (8, 32), (3, 20)):
            launch_pq(pq_fast_kernel, NQ, LQ, DIM, M, torch.int32, True)
        launch_pq(pq_kernel, 2, 70, DIM, M, None, False)


def launch_fp32_matrix() -> None:
    for DIM, nbits in itertools.product((64, 96, 128, 384, 768), (1, 2, 4, 8)):
        for LQ in (16, 32, 64):
            launch_fp32(LQ, DIM, nbits, torch.int32, True)
    for DIM in (8, 40, 1024):
        launch_fp32(128, DIM, 2, None, False)


def launch_rest_matrix() -> None:
    for DIM in (96, 128, 384, 1024):
        for LQ in (32, 1024):
            for keep, ncells in ((False, None), (True, 1), (True, 16)):
                launch_centroid_scores(LQ, DIM, keep, ncells)
    for pids, count in ((None, False), (torch.int32, True), (torch.int64, False)):
        for use_keep in (False, True):
            launch_centroid(32, pids, count, use_keep)
    for LQ in (5, 64, 300):
        launch_centroid(LQ, torch.int32, True, True)
    for ncells, nkeys in ((1, 64), (2, 512), (16, 16384)):
        launch_lists(ncells, nkeys)
    for DIM, nbits in ((64, 1), (96, 4), (384, 2), (768, 8), (1024, 4)):
        launch_decompression(DIM, nbits, torch.float32)


WHAT = {
    "quick": launch_quick,
    "dense": launch_dense_matrix,
    "compressed": launch_compressed_matrix,
    "fp32": launch_fp32_matrix,
    "rest": launch_rest_matrix,
}

if __name__ == "__main__":
    with compiling_for(int(sys.argv[1])) as kernels:
        WHAT[sys.argv[2]]()
    for k in kernels:
        fields = {name: value for name, value in vars(k).items() if name != "asm"}
        # PTX texts are constants of the fast kernels
        constants = {n: str(v) for n, v in k.constants.items() if len(str(v)) < 99}
        print(json.dumps(fields | {"constants": constants}))
