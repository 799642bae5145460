"""What a bug report needs to say of a machine: `plaid-tilemaxsim env`."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = ("triton", "colbert-ai", "transformers", "faiss-cpu", "faiss-gpu", "safetensors", "numpy")
# Widths of which `env` names the kernels; ColBERTv2's dimensions.
NBITS, PQ_WIDTHS, DIM = (1, 2, 4, 8), (8, 16, 32, 64), 128


def environment() -> dict[str, str]:
    """Versions, devices and what the plugin makes of them, as text by name."""
    import torch

    from plaid_tilemaxsim import __version__, compat
    from plaid_tilemaxsim.config import ENVIRONMENT_PREFIX
    from plaid_tilemaxsim.plugin import KNOWN_VERSIONS

    found = {
        "plugin": __version__,
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        "torch": torch.__version__,
    }
    for name in PACKAGES:
        found[name] = _version(name)
    if found["colbert-ai"] not in KNOWN_VERSIONS:
        found["colbert-ai"] += f" (this plugin needs {' or '.join(KNOWN_VERSIONS)})"
    if found["transformers"].split(".")[0].isdecimal() and int(found["transformers"].split(".")[0]) >= 5:
        found["transformers"] += " (enable() adapts colbert-ai to it)"
    if not compat.git_found():
        found["git"] = "none (enable() lets colbert-ai be imported without it)"
    found["triton cache"] = _triton_cache()
    options = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
    found["options"] = ", ".join(f"{name}={value}" for name, value in sorted(options.items())) or "none set"
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda}, no usable device"
        threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        return found | {"driver": _driver(), "gpu": f"none: {why}", "scoring": f"torch on the CPU ({threads})"}
    found["driver"] = f"{_driver()}, CUDA {torch.version.cuda}"
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        properties = torch.cuda.get_device_properties(i)
        found[f"gpu {i}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    here = torch.cuda.current_device()
    return found | {"scoring": f"triton on GPU {here}", "kernels": _kernels(torch.device("cuda", here))}


def _kernels(device: torch.device) -> str:
    """Which of the kernels that do the same would run on a GPU."""
    import torch

    from plaid_tilemaxsim.ops import tuning

    arch = tuning.arch(device)
    fast = {f"residual {n} bits": tuning.residual_is_fast(arch, n, DIM) for n in NBITS}
    fast["dense fp16"] = tuning.dense_is_fast(arch, torch.float16, "ieee", DIM, 32, fixed=False)
    fast |= {f"PQ {m} bytes": tuning.pq_is_fast(arch, m, DIM) for m in PQ_WIDTHS}
    return f"for {DIM} dimensions: " + ", ".join(f"{name} {'fast' if fast[name] else 'portable'}" for name in fast)


def _driver() -> str:
    """Version of the NVIDIA kernel driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none seen"
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return version[0] if version else text.splitlines()[0]


def _triton_cache() -> str:
    """Where compiled kernels are kept from one process to the next."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        return f"{folder} ({sum(1 for _ in folder.iterdir())} entries)"
    except FileNotFoundError:
        return f"{folder} (not there yet)"
    except OSError as error:  # then no kernel can be compiled
        return f"{folder} (cannot be read: {error.strerror})"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
