"""Ahead-of-time compilation: every launch compiles for the chips we name, within registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import sanitize

# Largest dynamic shared memory of one program, in bytes (CUDA C++ programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Local loads and stores in the machine code. On the chips that choices were made for the MaxSim kernels have none,
# but for a few saved addresses: of tf32x3 and portable PQ on sm_80; ranking has some on sm_90 under triton 3.6.
SPILLS = {80: 8, 89: 16, 90: 4, 100: 16}
# Under triton 3.9: what is known before its warps part. None under triton 3.6.
WGMMA_SPILLS = 12


def compiled(arch, which):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.aot", str(arch), which]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(arch, kernels):
    def spills(k):
        return WGMMA_SPILLS if k["module"] == "residual_wgmma_kernel" else SPILLS[arch]

    wrong = [k for k in kernels if k["spills"] > spills(k) or k["shared_bytes"] > SHARED_LIMIT[arch]]
    assert not wrong, "\n".join(map(str, wrong))
    # one constant that fp32 cannot hold makes all that it meets fp64
    assert not [k for k in kernels if k["doubles"]]
    assert all(0 < k["registers"] <= 255 for k in kernels)


@pytest.mark.parametrize("arch", [80, 90])
def test_a_launch_of_every_kernel(arch):
    kernels = compiled(arch, "quick")
    of_sm_90 = {"residual_wgmma_kernel._residual_wgmma_kernel", "dense_ring_kernel._dense_ring_kernel"}
    missing = of_sm_90 if arch == 80 else set()
    assert {f"{k['module']}.{k['kernel']}" for k in kernels} == sanitize.kernels() - missing
    check(arch, kernels)
    # 24 single-warp programs of the pruning kernels have to fit the 64 K registers of a multiprocessor
    pruning = ("_centroid_maxsim_kernel", "_centroid_kept_kernel")
    assert all(k["registers"] <= 80 for k in kernels if k["kernel"] in pruning)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dense", "compressed", "fp32", "rest"])
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_every_shape(arch, what):
    check(arch, compiled(arch, what))
