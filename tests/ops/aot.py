"""Compile what the launchers launch, for a chip that is not here.

    python -m tests.ops.aot ARCH [quick|all]      one JSON object a compiled kernel

Not a test itself: it runs in a process without TRITON_INTERPRET. Inside :func:`compiling_for` a kernel launch compiles
the very specialisation that the launch would need on that chip and lists its resources instead of running, so launchers
are called with small CPU tensors of the real shapes and dtypes.
"""

from __future__ import annotations

import contextlib
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
    centroid_kernel,
    centroid_scores_kernel,
    dense_kernel,
    residual_kernel,
    tuning,
)
from plaid_tilemaxsim.ops.api import CentroidScores, padded_query_length


@dataclass
class Compiled:
    kernel: str
    constants: dict[str, Any]
    registers: int
    spills: int  # loads and stores of local memory in the machine code
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
            meta = kernel.metadata
            compiled.append(
                Compiled(
                    kernel=self.__name__,
                    constants=constants,
                    registers=use["REG"],
                    spills=len(re.findall(r"\b(LDL|STL)\b", _tool("nvdisasm", "-c", cubin=kernel.asm["cubin"]))),
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


def launch_residual(LQ: int, DIM: int, nbits: int, pids: torch.dtype | None, count: bool, stored: torch.dtype) -> None:
    listed, out, n = _lists(pids, count)
    residual_kernel.residual_maxsim(
        torch.zeros(LQ, DIM), _scores(LQ), torch.zeros(1000).int(), torch.zeros(1000, DIM * nbits // 8).byte(),
        torch.zeros(1000).to(stored), 0.9, 1e-5, torch.zeros(2**nbits), nbits, torch.zeros(101).long(), listed, out, n,
    )  # fmt: skip


def launch_dense(NQ: int, LQ: int, DIM: int, dtype: torch.dtype, layout: str, precision: str = "ieee") -> None:
    Q = torch.zeros(NQ, LQ, DIM, dtype=dtype)
    packed, padded = torch.zeros(1000, DIM, dtype=dtype), torch.zeros(64, 128, DIM, dtype=dtype)
    out, offsets, lengths = torch.zeros(NQ, 64), torch.zeros(65).long(), torch.zeros(64).int()
    pids, count = torch.zeros(64).int(), torch.zeros(1).int()
    D, arguments = {
        "full": (padded, (None, None, None, out, None)),
        "lengths": (padded, (lengths, None, None, out, None)),
        "packed": (packed, (None, offsets, None, out, None)),
        "pids": (packed, (None, offsets, pids, out, count)),
    }[layout]
    dense_kernel.dense_maxsim(Q, D, *arguments, precision)


def launch_quick() -> None:
    """What a search with LQ = 32 runs, and one launch of everything else."""
    for DIM in (128, 384):
        launch_centroid_scores(32, DIM, True, 4)
    launch_centroid(32, torch.int32, True, True)
    launch_centroid(32, torch.int32, True, False)
    for nbits in (1, 2, 4):
        launch_residual(32, 128, nbits, torch.int32, True, torch.uint16)
    launch_dense(1, 32, 128, torch.float16, "full")
    launch_dense(1, 32, 128, torch.float16, "pids")


def launch_all() -> None:
    """Every specialisation of the shapes that the tests and the benchmarks use."""
    launch_quick()
    for DIM in (96, 128, 384, 1024):
        for LQ in (32, 1024):
            for keep, ncells in ((False, None), (True, 1), (True, 16)):
                launch_centroid_scores(LQ, DIM, keep, ncells)
    for pids, count in ((None, False), (torch.int32, True), (torch.int64, False)):
        for use_keep in (False, True):
            launch_centroid(32, pids, count, use_keep)
    for LQ in (5, 64, 300):
        launch_centroid(LQ, torch.int32, True, True)
    for nbits in (1, 2, 4, 8):
        for DIM in (64, 96, 128, 384):
            launch_residual(32, DIM, nbits, torch.int32, True, torch.uint16)
        launch_residual(130, 768, nbits, None, False, torch.float32)
    for DIM in (40, 128, 384, 1024):
        for layout in ("full", "lengths", "packed", "pids"):
            launch_dense(1, 32, DIM, torch.float16, layout)
        for NQ, LQ in ((1, 5), (1, 300), (4, 32)):
            launch_dense(NQ, LQ, DIM, torch.bfloat16, "packed")
        for precision in ("ieee", "tf32"):
            launch_dense(1, 32, DIM, torch.float32, "packed", precision)
    launch_dense(1, 32, 128, torch.float32, "packed", "tf32x3")


if __name__ == "__main__":
    with compiling_for(int(sys.argv[1])) as kernels:
        {"quick": launch_quick, "all": launch_all}[sys.argv[2]]()
    for k in kernels:
        fields = {name: value for name, value in vars(k).items() if name != "asm"}
        print(json.dumps(fields | {"constants": {n: str(v) for n, v in k.constants.items()}}))
