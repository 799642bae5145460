"""Compile what the launchers launch, for a chip that is not here.

Not a test itself: run as a module in a process without TRITON_INTERPRET. Inside :func:`compiling_for` a kernel launch
compiles the very specialisation that the launch would need on that chip and appends its resource use instead of
running, so launchers are called with small CPU tensors of the real shapes and dtypes.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from plaid_tilemaxsim.ops import tuning

# Largest dynamic shared memory of one program, in bytes (CUDA C++ programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


@dataclass
class Compiled:
    kernel: str
    constants: dict[str, Any]
    registers: int
    local_bytes: int  # stack and spills of one thread
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
                    local_bytes=use["STACK"] + use["LOCAL"],
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
