"""Where an index goes and how many bytes that takes: the plan of load_resident, and the text of `inspect`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plaid_tilemaxsim.index.files import PlaidIndex, Verify, read_index
from plaid_tilemaxsim.index.pq import describe_pq

log = logging.getLogger("plaid_tilemaxsim")

PLACEMENTS = ("auto", "gpu", "host", "disk")
# What passages can be scored exactly from, and the placements on a GPU that each knows.
CODECS = {"residual": ("gpu", "host", "disk"), "dense": ("gpu", "host"), "pq": ("gpu",)}

# Tokens decompressed together for their norms, on a GPU and on a CPU.
NORM_TOKENS = 1 << 22
NORM_TOKENS_CPU = 1 << 13
# What a search allocates beside the index. Per passage: flags, a pid and scores of candidates. Per centroid: the
# fp32 and int16 scores of 32 query tokens. Fixed: graphs, compiled kernels, small buffers.
PASSAGE_WORKSPACE = 16
CENTROID_WORKSPACE = 32 * (4 + 2)
FIXED_WORKSPACE = 128 << 20
# Tokens that codec "dense" has room for where it decompresses survivors: 64 MB at 128 dimensions, about a third of
# which is touched, since each passage gets the slots of the longest. So embeddings are read back from the L2 cache.
DENSE_SLOTS = 1 << 18


@dataclass(frozen=True)
class Plan:
    """Bytes by part, on the GPU and in pinned host memory, for one placement of one index and one query at a time."""

    placement: str  # "gpu", "host" or "disk"
    device: Mapping[str, int]
    host: Mapping[str, int]
    codec: str = "residual"
    whole: bool = False  # codec "dense": all embeddings at load, not those of each search's survivors

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def name(self) -> str:
        return f"{self.placement}, all decompressed" if self.whole else self.placement

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in self.device.items())
        text = f"placement {self.name}: {_size(self.device_bytes)} of GPU memory ({parts})"
        return f"{text}; {_size(self.host_bytes)} of pinned host memory (residuals, lists)" if self.host else text


def plan(
    index: PlaidIndex,
    free_bytes: int,
    placement: str = "auto",
    *,
    codec: str = "residual",
    pq_m: int | None = None,
    held: Mapping[str, int] | None = None,
) -> Plan:
    """The plan that placement asks for, or for "auto" the first of those that ``codec`` knows (CODECS) that fits.

    With codec "dense" the whole index is decompressed where that fits. pq_m: bytes a token of codec "pq". free_bytes:
    of the GPU. held: bytes by part that are on the GPU already and will be shared. What is pinned must fit into nine
    tenths of the host's available memory. Logs what it chose. Raises ValueError for an unknown placement, and
    RuntimeError with the bytes needed and free, and the placement that would fit, when this one does not.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {PLACEMENTS}, got {placement!r}")
    check_codec(codec, placement)
    plans = [
        plan_for(index, name, codec, pq_m=pq_m, whole=whole, held=held)
        for name in CODECS[codec]
        for whole in ((True, False) if (codec, name) == ("dense", "gpu") else (False,))
    ]
    available = available_memory() * 9 // 10
    fitting = [one for one in plans if one.device_bytes <= free_bytes and one.host_bytes <= available]
    wanted = plans if placement == "auto" else [one for one in plans if one.placement == placement]
    chosen = next((one for one in wanted if one in fitting), None)
    if chosen is None:
        hint = f'; placement "{fitting[0].placement}" would fit' if fitting else ""
        tight = next((one for one in wanted if one.device_bytes <= free_bytes), None)
        if tight is not None:
            pinned = _size(tight.host_bytes)
            got = f"{_size(available)} available"
            raise RuntimeError(f"{index.path}: host memory: expected {pinned} that can be pinned, got {got}{hint}")
        needs = " or ".join(f"{_size(one.device_bytes)} ({one.name})" for one in wanted)
        raise RuntimeError(f"{index.path}: GPU memory: expected {needs}, got {_size(free_bytes)} free{hint}")
    log.info("%s: codec %s, %s, of %s free", index.path, codec, chosen, _size(free_bytes))
    return chosen


def needs(index: PlaidIndex, device: torch.device, *, codec: str = "residual", pq_m: int | None = None) -> str:
    """What each placement of an index on a GPU needs, what is free now, and which of them that would do for."""
    if device.type != "cuda":
        return f"{_size(available_memory())} of host memory are available"
    free = torch.cuda.mem_get_info(device)[0]
    plans = [plan_for(index, name, codec, pq_m=pq_m) for name in CODECS[codec]]
    fitting = [one.placement for one in plans if one.device_bytes <= free]
    sizes = ", ".join(f'{_size(one.device_bytes)} for placement "{one.placement}"' for one in plans)
    return f"{_size(free)} of GPU memory are free, needed are {sizes}; would fit: {', '.join(fitting) or 'none'}"


def plan_for(
    index: PlaidIndex,
    placement: str,
    codec: str = "residual",
    *,
    pq_m: int | None = None,
    whole: bool = False,
    held: Mapping[str, int] | None = None,
) -> Plan:
    """The plan of a placement: "gpu" all in GPU memory, "host" residuals and lists in pinned host memory, "disk"
    residuals in the index's files and all else as for "gpu".

    The lists still pass through GPU memory at load, before the inverse norms and the workspace need theirs.
    """
    T, N, C = index.num_tokens, index.num_passages, index.num_centroids
    width = index.dim * index.nbits // 8
    stored, work = {"residuals": T * width}, (20 + width) * min(T, NORM_TOKENS)
    norms = {"inverse norms": 2 * T} if codec == "residual" else {}
    if codec == "pq":
        assert pq_m is not None
        stored, work = {"PQ codes": T * pq_m}, 0
    elif whole:
        stored, work = {"embeddings": 2 * T * index.dim}, width * min(T, NORM_TOKENS)
    elif codec == "dense":
        longest = int(index.doclens.max()) if N else 0
        work = 2 * dense_passages(N, longest) * longest * index.dim
    lists = {"lists": 4 * index.ivf_pids.numel()}
    device = {
        "codes": 4 * T,
        **norms,
        "list offsets": 8 * (C + 1),
        "centroids": 2 * C * index.dim,
        "offsets": 8 * (N + 1),
        "workspace": PASSAGE_WORKSPACE * N + CENTROID_WORKSPACE * C + work + FIXED_WORKSPACE,
    }
    host: dict[str, int] = {}
    if placement == "gpu":
        device = {**stored, **lists, **device}
    elif placement == "disk":
        device = {**lists, **device}
    else:
        host = {**stored, **lists}
    device = {name: max(0, size - (held or {}).get(name, 0)) for name, size in device.items()}
    return Plan(placement, device, host, codec, whole)


def dense_passages(num_passages: int, longest: int) -> int:
    """Passages that codec "dense" decompresses in one round where not all fit: each has ``longest`` slots."""
    return max(1, min(num_passages, DENSE_SLOTS // max(longest, 1)))


def check_codec(codec: str, placement: str) -> None:
    """ValueError unless it is a codec of CODECS that knows the placement, or "auto"."""
    if codec not in CODECS:
        raise ValueError(f"codec: expected one of {list(CODECS)}, got {codec!r}")
    if placement not in ("auto", *CODECS[codec]):
        raise ValueError(
            f"placement: expected one of {['auto', *CODECS[codec]]} with codec {codec!r}, got {placement!r}"
        )


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping, as the system estimates it."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe(path: Path | str, verify: Verify = "structure") -> tuple[str, list[str]]:
    """What the index in a folder holds, its bytes by part and the memory plans, needing no GPU; and what is wrong.

    Wrong can be sidecars, without which the index is searched all the same. Raises ValueError as read_index does.
    """
    index = read_index(path, verify=verify)
    sidecars, problems = describe_pq(index, verify)
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
    if verify == "structure":
        rows.append(
            ("checked", "small files and all sizes; codes and lists when they are loaded; the rest by --verify full")
        )
    else:
        rows.append(("checked", "every byte"))
    if not (index.path / "plan.json").is_file():
        others = 'colbert-ai\'s coalesce.py does, and indexing with overwrite="resume" plans anew'
        rows.append(("plan.json", f"none: searches and IndexUpdater need none; {others}"))
    rows += [("PQ sidecar", line) for line in sidecars]
    rows += [(f"plan {name}", str(plan_for(index, name)).partition(": ")[2]) for name in ("gpu", "host")]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        rows.append(("this GPU", f"{torch.cuda.get_device_name()}, {_size(free)} free of {_size(total)}"))
        rows.append(("chosen here", plan(index, free).placement))
    else:
        rows.append(("this GPU", "none"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([str(index.path), *(f"  {name:<{width}}  {text}" for name, text in rows)]), problems


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
