"""Where an index goes and how many bytes that takes: the plan of load_resident, and the text of `inspect`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.pq import describe_pq

log = logging.getLogger("plaid_tilemaxsim")

PLACEMENTS = ("auto", "gpu", "host", "disk")

# Tokens decompressed together for their norms, on a GPU and on a CPU.
NORM_TOKENS = 1 << 22
NORM_TOKENS_CPU = 1 << 13
# What a search allocates beside the index. Per passage: flags, a pid and scores of candidates. Per centroid: the
# fp32 and int16 scores of 32 query tokens. Fixed: graphs, compiled kernels, small buffers.
PASSAGE_WORKSPACE = 16
CENTROID_WORKSPACE = 32 * (4 + 2)
FIXED_WORKSPACE = 128 << 20


@dataclass(frozen=True)
class Plan:
    """Bytes by part, on the GPU and in pinned host memory, for one placement of one index and one query at a time."""

    placement: str  # "gpu", "host" or "disk"
    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in self.device.items())
        text = f"placement {self.placement}: {_size(self.device_bytes)} of GPU memory ({parts})"
        return f"{text}; {_size(self.host_bytes)} of pinned host memory (residuals, lists)" if self.host else text


def plan(index: PlaidIndex, free_bytes: int, placement: str = "auto") -> Plan:
    """The plan that placement asks for, or for "auto" the first of gpu, host and disk that fits.

    free_bytes: of the GPU. What is pinned must fit into nine tenths of the host's available memory. Logs what it
    chose. Raises ValueError for an unknown placement, and RuntimeError with the bytes needed and free, and the
    placement that would fit, when this one does not.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {PLACEMENTS}, got {placement!r}")
    plans = {name: plan_for(index, name) for name in PLACEMENTS[1:]}
    available = available_memory() * 9 // 10
    fitting = [
        name for name, one in plans.items() if one.device_bytes <= free_bytes and one.host_bytes <= available
    ]
    wanted = list(plans) if placement == "auto" else [placement]
    chosen = next((name for name in wanted if name in fitting), None)
    if chosen is None:
        needs = " or ".join(f"{_size(plans[name].device_bytes)} ({name})" for name in wanted)
        if any(plans[name].device_bytes <= free_bytes for name in wanted):
            pinned = _size(plans[wanted[0]].host_bytes)
            raise RuntimeError(
                f"{index.path}: host memory: expected {pinned} that can be pinned, got {_size(available)} available"
                + (f'; placement "{fitting[0]}" would fit' if fitting else "")
            )
        hint = f'; placement "{fitting[0]}" would fit' if fitting else ""
        raise RuntimeError(f"{index.path}: GPU memory: expected {needs}, got {_size(free_bytes)} free{hint}")
    log.info("%s: %s, of %s free", index.path, plans[chosen], _size(free_bytes))
    return plans[chosen]


def plan_for(index: PlaidIndex, placement: str) -> Plan:
    """The plan of a placement: "gpu" all in GPU memory, "host" residuals and lists in pinned host memory, "disk"
    residuals in the index's files and all else as for "gpu".

    The lists still pass through GPU memory at load, before the inverse norms and the workspace need theirs.
    """
    T, N, C = index.num_tokens, index.num_passages, index.num_centroids
    pinned = {"residuals": T * (index.dim * index.nbits // 8), "lists": 4 * index.ivf_pids.numel()}
    device = {
        "codes": 4 * T,
        "inverse norms": 2 * T,
        "list offsets": 8 * (C + 1),
        "centroids": 2 * C * index.dim,
        "offsets": 8 * (N + 1),
        "workspace": PASSAGE_WORKSPACE * N
        + CENTROID_WORKSPACE * C
        + (20 + index.dim * index.nbits // 8) * min(T, NORM_TOKENS)
        + FIXED_WORKSPACE,
    }
    if placement == "gpu":
        return Plan("gpu", {**pinned, **device}, {})
    if placement == "disk":
        return Plan("disk", {"lists": pinned["lists"], **device}, {})
    return Plan("host", device, pinned)


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping, as the system estimates it."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe(path: Path | str) -> str:
    """What the index in a folder holds, its bytes by part and the memory plans; needs no GPU.

    Reads it with verify="structure". Raises ValueError as read_index does.
    """
    index = read_index(path, verify="structure")
    T, N, C = index.num_tokens, index.num_passages, index.num_centroids
    lists = index.ivf_offsets.diff()
    sizes = {
        "residuals": T * (index.dim * index.nbits // 8),
        "codes": 4 * T,
        "lists": 4 * index.ivf_pids.numel() + 8 * C,
        "centroids": 2 * C * index.dim,
        "doclens": 4 * N,
    }
    empty = int((index.doclens == 0).sum())
    rows = [
        ("embeddings", f"{index.dim} dimensions, {index.nbits} bits each"),
        ("passages", f"{N:,} in {len(index.chunks):,} chunks, {empty:,} of them empty"),
        ("tokens", f"{T:,}"),
        ("tokens a passage", _quantiles(index.doclens)),
        ("centroids", f"{C:,}"),
        ("passages a centroid", f"{_quantiles(lists)}; {int((lists == 0).sum()):,} empty lists"),
        ("bytes searched", f"{index.nbytes:,} = " + ", ".join(f"{k} {v:,}" for k, v in sizes.items())),
    ]
    rows += [("PQ sidecar", line) for line in describe_pq(index)]
    rows += [(f"plan {name}", str(plan_for(index, name)).partition(": ")[2]) for name in ("gpu", "host")]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        rows.append(("this GPU", f"{torch.cuda.get_device_name()}, {_size(free)} free of {_size(total)}"))
        rows.append(("chosen here", plan(index, free).placement))
    else:
        rows.append(("this GPU", "none"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([str(index.path), *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _quantiles(values: Tensor) -> str:
    """Least, median, 95th percentile, most and mean of an integer tensor [n]."""
    if values.numel() == 0:
        return "none"
    ranked = values.sort().values
    low, median, high, most = (int(ranked[int(q * (len(ranked) - 1))]) for q in (0, 0.5, 0.95, 1))
    return f"min {low:,}, median {median:,}, 95% {high:,}, max {most:,}, mean {float(values.double().mean()):.1f}"


def _size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"
