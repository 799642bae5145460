"""An index as the kernels read it: on one device, int64 offsets, inverse norms computed once.

inv[t] = 1 / ||centroid[code_t] + bucket_weights[residual_t]|| does not depend on the query. On a GPU it is kept
in 16 bits over the range that occurs in the index (norms lie near 1), which costs less than 1e-5 of a score.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from plaid_tilemaxsim.index.checks import check_pid_lists, check_range
from plaid_tilemaxsim.index.files import PlaidIndex
from plaid_tilemaxsim.index.mapped import MappedRows
from plaid_tilemaxsim.index.placement import (
    NORM_TOKENS,
    NORM_TOKENS_CPU,
    PLACEMENTS,
    available_memory,
    plan,
)
from plaid_tilemaxsim.index.transfer import copy_staged, pin
from plaid_tilemaxsim.ops.cpu import byte_table

log = logging.getLogger("plaid_tilemaxsim")

# A quantised inverse norm is off by at most this share of it; a range too wide for that is kept in fp32.
INV_NORM_ERROR = 1e-5
INV_NORM_LEVELS = 2**16
# Below this norm torch.nn.functional.normalize divides by 1e-12 instead; such a token is a zero vector to us.
ZERO_NORM = 1e-12
# A progress bar appears after this many seconds.
BAR_DELAY = 2


@dataclass(eq=False)
class ResidentIndex:
    """What kernels read. All tensors contiguous and on device, but those that placement "host" pins in host memory."""

    device: torch.device
    placement: str  # "gpu", "host", "disk" or "cpu"
    dim: int
    nbits: int
    num_passages: int
    num_tokens: int
    num_centroids: int
    longest: int  # tokens of the longest passage
    centroids: Tensor  # [C, DIM] fp16, on the CPU fp32
    bucket_weights: Tensor  # fp32 [2**nbits]
    codes: Tensor  # int32 [T], each in [0, C)
    residuals: Tensor | MappedRows  # uint8 [T, DIM * NBITS // 8], stock's bytes; "host": pinned, "disk": in the files
    inv_norms: Tensor  # uint16 [T] or fp32 [T]: 1 / norm = inv_norm_lo + inv_norm_step * inv_norms; 0 for norm 0
    inv_norm_lo: float
    inv_norm_step: float
    offsets: Tensor  # int64 [N + 1]
    ivf_pids: Tensor  # int32 [ivf_offsets[-1]], lists strictly ascending in [0, N); for "host" in pinned host memory
    ivf_offsets: Tensor  # int64 [C + 1]

    @property
    def device_bytes(self) -> int:
        """Bytes of the tensors on device."""
        tensors = (value for value in vars(self).values() if isinstance(value, Tensor))
        return sum(t.nbytes for t in tensors if t.device.type == self.device.type)


def load_resident(
    index: PlaidIndex, device: torch.device | str, placement: str = "auto", progress: bool = True
) -> ResidentIndex:
    """Lays the index out on a device; the result shares no memory with files that fit into memory.

    placement: "gpu" all on the device, "host" residuals and lists in pinned host memory, "disk"
    residuals in the index's files (which must stay as they are), "auto" by free memory; on a CPU
    device only "auto" and "host" are known. Always checks codes and lists (on the device), so an index read with
    verify="structure" is enough. progress: a bar on stderr once this has taken 2 s.
    Raises ValueError for bad contents or an unknown placement, RuntimeError when memory is too small.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {PLACEMENTS}, got {placement!r}")
    # A search may run under inference_mode; what it loads then must outlive it as normal tensors.
    with torch.inference_mode(False), torch.no_grad():
        if device.type == "cuda":
            with torch.cuda.device(device):
                return _load_cuda(index, torch.device("cuda", torch.cuda.current_device()), placement, progress)
        if placement in ("gpu", "disk"):
            raise ValueError(f'placement: expected "auto" or "host" on the CPU, got {placement!r}')
        return _load_cpu(index, progress)


def inverse_norms(codes: Tensor, residuals: Tensor, centroids: Tensor, table: Tensor) -> Tensor:
    """fp32 [n] of codes int [n] in [0, C), residuals uint8 [n, PD], centroids [C, DIM], table = byte_table(...)."""
    embeddings = torch.nn.functional.embedding(residuals.int(), table).view(codes.numel(), -1)
    embeddings += torch.index_select(centroids, 0, codes)
    norms = torch.linalg.vector_norm(embeddings, dim=1)
    return torch.where(norms > ZERO_NORM, 1 / norms, 0)


def quantised_inverse_norms(
    codes: Tensor,
    residuals: Tensor | MappedRows,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    bar: tqdm | None = None,
) -> tuple[Tensor, float, float]:
    """(uint16 [T], low, step) on the device of codes [T]: 1 / norm = low + step * it, off by <= INV_NORM_ERROR.

    fp32 [T], 0, 1 where 16 bits cannot do that. residuals [T, PD] may lie in pinned host memory or in files.
    Two passes, since the range must be known first and the norms in fp32 may not fit beside the index.
    bar: advanced by tokens, twice.
    """
    from plaid_tilemaxsim.ops import norms_kernel

    def blocks() -> Iterator[tuple[slice, Tensor]]:
        for begin in range(0, codes.numel(), NORM_TOKENS):
            block = slice(begin, begin + NORM_TOKENS)
            rows = residuals[block].to(codes.device, non_blocking=True)
            inverse = norms_kernel.inverse_norms(codes[block], rows, centroids, bucket_weights, nbits)
            yield block, inverse
            if bar is not None:
                bar.update(inverse.numel())

    extremes = [torch.stack(torch.aminmax(inverse)) for _, inverse in blocks()]
    if not extremes:
        return torch.empty(0, dtype=torch.uint16, device=codes.device), 0.0, 0.0
    ranges = torch.stack(extremes)
    low, high = float(ranges[:, 0].amin()), float(ranges[:, 1].amax())
    step = (high - low) / (INV_NORM_LEVELS - 1)
    fits = step / 2 <= INV_NORM_ERROR * low
    stored = torch.empty(codes.numel(), dtype=torch.uint16 if fits else torch.float32, device=codes.device)
    for block, inverse in blocks():
        if fits and step > 0:
            inverse = ((inverse - low) / step).round_().clamp_(0, INV_NORM_LEVELS - 1)
        elif fits:
            inverse.zero_()
        stored[block] = inverse.to(torch.int32).to(torch.uint16) if fits else inverse
    return (stored, low, step) if fits else (stored, 0.0, 1.0)


def _load_cpu(index: PlaidIndex, progress: bool) -> ResidentIndex:
    size = index.num_tokens * (8 + index.dim * index.nbits // 8) + 4 * index.ivf_pids.numel()
    available = available_memory()
    if size <= available // 2:
        # Not the maps: a rewrite of the index (stock's updater truncates the files) would take the ground away.
        codes = torch.cat([chunk.codes for chunk in index.chunks])
        residuals = torch.cat([chunk.residuals for chunk in index.chunks])
        ivf_pids = index.ivf_pids.clone()
    elif len(index.chunks) == 1:
        log.warning("%s: %d bytes stay in the files, since %d are available", index.path, size, available)
        codes, residuals, ivf_pids = index.codes(), index.residuals(), index.ivf_pids
    else:
        raise RuntimeError(
            f"{index.path}: host memory: expected twice the {size} bytes of an index in {len(index.chunks)} chunks, "
            f"got {available} available; colbert/utils/coalesce.py makes one chunk of it, which is searched from disk"
        )
    _check_contents(index, codes, ivf_pids, index.ivf_offsets)
    centroids = index.centroids.float()
    table = byte_table(index.nbits, index.bucket_weights)
    inv_norms = torch.empty(index.num_tokens)
    with _bar(index.num_tokens, "inverse norms", progress) as bar:
        for begin in range(0, index.num_tokens, NORM_TOKENS_CPU):
            block = slice(begin, begin + NORM_TOKENS_CPU)
            inv_norms[block] = inverse_norms(codes[block], residuals[block], centroids, table)
            bar.update(inv_norms[block].numel())
    return ResidentIndex(
        device=torch.device("cpu"),
        placement="cpu",
        centroids=centroids,
        bucket_weights=index.bucket_weights.clone(),
        codes=codes,
        residuals=residuals,
        inv_norms=inv_norms,
        inv_norm_lo=0.0,
        inv_norm_step=1.0,
        offsets=index.offsets.clone(),
        ivf_pids=ivf_pids,
        ivf_offsets=index.ivf_offsets.clone(),
        **_counts(index),
    )


def _load_cuda(index: PlaidIndex, device: torch.device, placement: str, progress: bool) -> ResidentIndex:
    began = time.perf_counter()
    # Memory that torch holds but does not use can be given to the index too.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    chosen = plan(index, torch.cuda.mem_get_info(device)[0] + unused, placement).placement

    codes = torch.empty(index.num_tokens, dtype=torch.int32, device=device)
    ivf_pids = torch.empty(index.ivf_pids.numel(), dtype=torch.int32, device=device)
    shape = (index.num_tokens, index.dim * index.nbits // 8)
    residuals: Tensor | MappedRows = MappedRows(index.chunks)
    copies = [(index.ivf_pids, ivf_pids)]
    if chosen != "disk":
        residuals = torch.empty(shape, dtype=torch.uint8, device=device if chosen == "gpu" else "cpu")
    for chunk in index.chunks:
        rows = slice(chunk.token_start, chunk.token_start + chunk.num_tokens)
        copies.append((chunk.codes, codes[rows]))
        if isinstance(residuals, Tensor):
            copies.append((chunk.residuals, residuals[rows]))
    total = sum(source.nbytes for source, _ in copies)
    with _bar(total, "index to the GPU", progress, unit="B") as bar:
        copy_staged(copies, bar)
    del copies  # it holds on to GPU memory

    offsets, ivf_offsets = index.offsets.to(device), index.ivf_offsets.to(device)
    _check_contents(index, codes, ivf_pids, ivf_offsets)
    centroids, weights = index.centroids.to(device), index.bucket_weights.to(device)
    if chosen == "host":
        assert isinstance(residuals, Tensor)
        pin(residuals)
        ivf_pids = ivf_pids.cpu()
        pin(ivf_pids)
    with _bar(2 * index.num_tokens, "inverse norms", progress) as bar:
        inv_norms, low, step = quantised_inverse_norms(codes, residuals, centroids, weights, index.nbits, bar)
    torch.cuda.synchronize(device)
    resident = ResidentIndex(
        device=device,
        placement=chosen,
        centroids=centroids,
        bucket_weights=weights,
        codes=codes,
        residuals=residuals,
        inv_norms=inv_norms,
        inv_norm_lo=low,
        inv_norm_step=step,
        offsets=offsets,
        ivf_pids=ivf_pids,
        ivf_offsets=ivf_offsets,
        **_counts(index),
    )
    seconds = time.perf_counter() - began
    log.info(
        "%s: loaded in %.1f s, %.1f GB/s, %d bytes of GPU memory for an index of %d bytes",
        index.path,
        seconds,
        index.nbytes / seconds / 1e9,
        resident.device_bytes,
        index.nbytes,
    )
    return resident


def _check_contents(index: PlaidIndex, codes: Tensor, ivf_pids: Tensor, ivf_offsets: Tensor) -> None:
    """verify_contents on copies of the index's tensors, wherever they are."""
    if codes.numel():
        least, most = (int(x) for x in torch.aminmax(codes))
        if least < 0 or most >= index.num_centroids:
            for chunk in index.chunks:
                rows = codes[chunk.token_start : chunk.token_start + chunk.num_tokens]
                check_range(rows, chunk.codes_file, "codes", 0, index.num_centroids)
    check_pid_lists(ivf_pids, ivf_offsets, index.num_passages, index.ivf_file)


def _counts(index: PlaidIndex) -> dict[str, Any]:
    return {
        "dim": index.dim,
        "nbits": index.nbits,
        "num_passages": index.num_passages,
        "num_tokens": index.num_tokens,
        "num_centroids": index.num_centroids,
        "longest": int(index.doclens.max()) if index.num_passages else 0,
    }


def _bar(total: int, name: str, progress: bool, unit: str = "") -> tqdm:
    return tqdm(total=total, desc=name, unit=unit, unit_scale=True, delay=BAR_DELAY, disable=not progress)
