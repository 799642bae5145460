"""An index as the kernels read it: on one device, int64 offsets, inverse norms computed once.

inv[t] = 1 / ||centroid[code_t] + bucket_weights[residual_t]|| does not depend on the query. On a GPU it is kept
in 16 bits over the range that occurs in the index (norms lie near 1), which costs less than 1e-5 of a score.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from plaid_tilemaxsim.index.checks import check_pid_lists, check_range
from plaid_tilemaxsim.index.files import Chunk, PlaidIndex
from plaid_tilemaxsim.index.mapped import MappedRows
from plaid_tilemaxsim.index.placement import (
    NORM_TOKENS,
    NORM_TOKENS_CPU,
    PLACEMENTS,
    available_memory,
    check_codec,
    plan,
)
from plaid_tilemaxsim.index.pq import PQ
from plaid_tilemaxsim.index.stamps import Stamp, stamp
from plaid_tilemaxsim.index.transfer import copy_staged, pin
from plaid_tilemaxsim.ops.cpu import byte_table, decompress

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
    # uint8 [T, DIM * NBITS // 8], stock's bytes; "host": pinned, "disk": in the files; None where the codec needs none
    residuals: Tensor | MappedRows | None
    # uint16 [T] or fp32 [T]: 1 / norm = inv_norm_lo + inv_norm_step * inv_norms; 0 for norm 0. Codec "residual" only
    inv_norms: Tensor | None
    inv_norm_lo: float
    inv_norm_step: float
    offsets: Tensor  # int64 [N + 1]
    ivf_pids: Tensor  # int32 [ivf_offsets[-1]], lists strictly ascending in [0, N); for "host" in pinned host memory
    ivf_offsets: Tensor  # int64 [C + 1]
    codec: str = "residual"
    embeddings: Tensor | None = None  # codec "dense" where all fit: [T, DIM] fp16, on the CPU fp32
    pq_codes: Tensor | None = None  # codec "pq": uint8 [T, M]
    pq_codebook: Tensor | None = None  # fp16 [M, 256, DIM // M]
    pq_rotation: Tensor | None = None  # fp32 [DIM, DIM], which turns a query; None: no OPQ
    stamps: tuple[Stamp, ...] = ()  # of files that tensors on a CPU are maps of

    @property
    def device_bytes(self) -> int:
        """Bytes of the tensors on device."""
        tensors = (value for value in vars(self).values() if isinstance(value, Tensor))
        return sum(t.nbytes for t in tensors if t.device.type == self.device.type)


def load_resident(
    index: PlaidIndex,
    device: torch.device | str,
    placement: str = "auto",
    progress: bool = True,
    *,
    codec: str = "residual",
    pq: PQ | None = None,
    shared: Sequence[ResidentIndex] = (),
    norms: bool = True,
) -> ResidentIndex:
    """Lays the index out on a device; the result shares no memory with files that fit into memory.

    placement: "gpu" all on the device, "host" residuals and lists in pinned host memory, "disk"
    residuals in the index's files (which must stay as they are), "auto" by free memory; on a CPU
    device only "auto" and "host" are known. codec: what passages are scored exactly from: "residual", "dense"
    (embeddings of the whole index where they fit, else residuals), "pq" (the codes of ``pq``, from index.pq.read_pq);
    on a GPU "dense" knows no "disk", and "pq" neither that nor "host". shared: what this function made of the same
    index; tensors that lie where they are needed are taken from there. Always checks codes and lists (on the device),
    so an index read with verify="structure" is enough. progress: a bar on stderr once this has taken 2 s.
    norms: False leaves inverse norms on a GPU to the caller, who knows their range (index.shards).
    Raises ValueError for bad contents, an unknown placement or codec, RuntimeError when memory is too small.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {PLACEMENTS}, got {placement!r}")
    check_codec(codec, "auto")
    if (pq is not None) != (codec == "pq"):
        raise ValueError(f"pq: expected {'a product quantiser' if pq is None else None} with codec {codec!r}, got {pq}")
    # A search may run under inference_mode; what it loads then must outlive it as normal tensors.
    with torch.inference_mode(False), torch.no_grad():
        if device.type == "cuda":
            check_codec(codec, placement)
            with torch.cuda.device(device):
                device = torch.device("cuda", torch.cuda.current_device())
                return _load_cuda(index, device, placement, progress, codec, pq, _Shared(shared, device), norms)
        if placement in ("gpu", "disk"):
            raise ValueError(f'placement: expected "auto" or "host" on the CPU, got {placement!r}')
        return _load_cpu(index, progress, codec, pq, _Shared(shared, device))


class _Shared:
    """Tensors of other layouts of the same index, found by name and place."""

    def __init__(self, layouts: Sequence[ResidentIndex], device: torch.device) -> None:
        self.layouts = [layout for layout in layouts if layout.device == device]
        self.device = device

    def find(self, name: str, pinned: bool = False) -> Tensor | None:
        """On the device, or in pinned memory."""
        for layout in self.layouts:
            value = getattr(layout, name)
            if isinstance(value, Tensor) and (value.device == self.device) != pinned:
                return value
        return None

    def norms(self) -> tuple[Tensor, float, float] | None:
        for layout in self.layouts:
            if layout.inv_norms is not None:
                return layout.inv_norms, layout.inv_norm_lo, layout.inv_norm_step
        return None

    def pq_codes(self, pq: PQ) -> Tensor | None:
        """Those of the same quantiser, by its small parts: width, codebook and rotation."""
        for layout in self.layouts:
            book, rotation = layout.pq_codebook, layout.pq_rotation
            if book is None or book.shape != pq.codebook.shape or (rotation is None) != (pq.rotation is None):
                continue
            pairs = [(book, pq.codebook)]
            if rotation is not None and pq.rotation is not None:
                pairs.append((rotation, pq.rotation))
            if all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs):
                return layout.pq_codes
        return None

    def held(self, pq: PQ | None) -> dict[str, int]:
        """Bytes on the device by the names of a ``Plan``."""
        parts = {
            "codes": "codes", "residuals": "residuals", "embeddings": "embeddings", "inverse norms": "inv_norms",
            "lists": "ivf_pids", "list offsets": "ivf_offsets", "centroids": "centroids", "offsets": "offsets",
        }  # fmt: skip
        found = {part: self.find(name) for part, name in parts.items()}
        found["PQ codes"] = None if pq is None else self.pq_codes(pq)
        return {part: tensor.nbytes for part, tensor in found.items() if tensor is not None}


def inverse_norms(codes: Tensor, residuals: Tensor, centroids: Tensor, table: Tensor) -> Tensor:
    """fp32 [n] of codes int [n] in [0, C), residuals uint8 [n, PD], centroids [C, DIM], table = byte_table(...)."""
    norms = torch.linalg.vector_norm(decompress(codes, residuals, centroids, table), dim=1)
    return torch.where(norms > ZERO_NORM, 1 / norms, 0)


def inverse_norm_range(
    codes: Tensor,
    residuals: Tensor | MappedRows,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    bar: tqdm | None = None,
) -> tuple[float, float] | None:
    """The least and the largest inverse norm of codes [T] on a device; None without tokens. Arguments as below."""
    blocks = _inverse_norm_blocks(codes, residuals, centroids, bucket_weights, nbits, bar)
    extremes = [torch.stack(torch.aminmax(inverse)) for _, inverse in blocks]
    if not extremes:
        return None
    ranges = torch.stack(extremes)
    return float(ranges[:, 0].amin()), float(ranges[:, 1].amax())


def quantised_inverse_norms(
    codes: Tensor,
    residuals: Tensor | MappedRows,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    bar: tqdm | None = None,
    within: tuple[float, float] | None = None,
) -> tuple[Tensor, float, float]:
    """(uint16 [T], low, step) on the device of codes [T]: 1 / norm = low + step * it, off by <= INV_NORM_ERROR.

    fp32 [T], 0, 1 where 16 bits cannot do that. residuals [T, PD] may lie in pinned host memory or in files.
    Two passes, since the range must be known first and the norms in fp32 may not fit beside the index; one where
    ``within`` says it. bar: advanced by tokens, each pass.
    """
    if within is None:
        within = inverse_norm_range(codes, residuals, centroids, bucket_weights, nbits, bar)
    if within is None:
        return torch.empty(0, dtype=torch.uint16, device=codes.device), 0.0, 0.0
    low, high = within
    step = (high - low) / (INV_NORM_LEVELS - 1)
    fits = step / 2 <= INV_NORM_ERROR * low
    stored = torch.empty(codes.numel(), dtype=torch.uint16 if fits else torch.float32, device=codes.device)
    for block, inverse in _inverse_norm_blocks(codes, residuals, centroids, bucket_weights, nbits, bar):
        if fits and step > 0:
            inverse = ((inverse - low) / step).round_().clamp_(0, INV_NORM_LEVELS - 1)
        elif fits:
            inverse.zero_()
        stored[block] = inverse.to(torch.int32).to(torch.uint16) if fits else inverse
    return (stored, low, step) if fits else (stored, 0.0, 1.0)


def _inverse_norm_blocks(
    codes: Tensor,
    residuals: Tensor | MappedRows,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    bar: tqdm | None,
) -> Iterator[tuple[slice, Tensor]]:
    from plaid_tilemaxsim.ops import norms_kernel

    for begin in range(0, codes.numel(), NORM_TOKENS):
        block = slice(begin, begin + NORM_TOKENS)
        rows = residuals[block].to(codes.device, non_blocking=True)
        inverse = norms_kernel.inverse_norms(codes[block], rows, centroids, bucket_weights, nbits)
        yield block, inverse
        if bar is not None:
            bar.update(inverse.numel())


def _load_cpu(index: PlaidIndex, progress: bool, codec: str, pq: PQ | None, shared: _Shared) -> ResidentIndex:
    T, width = index.num_tokens, index.dim * index.nbits // 8
    available = available_memory()
    common = 4 * T + 4 * index.ivf_pids.numel()
    whole = codec == "dense" and common + 4 * T * index.dim <= available // 2
    by_codec = {"residual": 4 + width, "dense": 4 * index.dim if whole else width, "pq": pq.m if pq else 0}
    size = common + T * by_codec[codec]
    stored = codec == "residual" or (codec == "dense" and not whole)
    if size > available // 2 and len(index.chunks) != 1:
        raise RuntimeError(
            f"{index.path}: host memory: expected twice the {size} bytes of an index in {len(index.chunks)} chunks, "
            f"got {available} available; colbert/utils/coalesce.py makes one chunk of it, which is searched from disk"
        )
    # Not the maps: a rewrite of the index (stock's updater truncates the files) would take the ground away.
    copied = size <= available // 2
    if not copied:
        log.warning("%s: %d bytes stay in the files, since %d are available", index.path, size, available)

    def laid_out(name: str, parts: list[Tensor]) -> Tensor:
        there = shared.find(name)
        if there is not None:
            return there
        return torch.cat(parts) if copied else parts[0]

    codes = laid_out("codes", [chunk.codes for chunk in index.chunks])
    ivf_pids = laid_out("ivf_pids", [index.ivf_pids])
    residuals = laid_out("residuals", [chunk.residuals for chunk in index.chunks]) if stored else None
    _check_contents(index, codes, ivf_pids, index.ivf_offsets)
    centroids = index.centroids.float()
    table = byte_table(index.nbits, index.bucket_weights)
    resident = ResidentIndex(
        device=torch.device("cpu"),
        placement="cpu",
        centroids=centroids,
        bucket_weights=index.bucket_weights.clone(),
        codes=codes,
        residuals=residuals,
        inv_norms=None,
        inv_norm_lo=0.0,
        inv_norm_step=1.0,
        offsets=index.offsets.clone(),
        ivf_pids=ivf_pids,
        ivf_offsets=index.ivf_offsets.clone(),
        codec=codec,
        stamps=() if copied else tuple(stamp(file) for file in index.files if file.suffix == ".pt"),
        **_counts(index),
    )
    if pq is not None:
        there = shared.pq_codes(pq)
        kept = pq.codes.clone() if copied else pq.codes
        resident.pq_codes = kept if there is None else there
        resident.pq_codebook, resident.pq_rotation = pq.codebook, pq.rotation
    elif whole:
        resident.embeddings = shared.find("embeddings")
        if resident.embeddings is None:
            resident.embeddings = torch.empty(T, index.dim)
            with _bar(T, "embeddings", progress) as bar:
                for begin, rows in _blocks(index, NORM_TOKENS_CPU):
                    block = slice(begin, begin + len(rows))
                    e = decompress(codes[block], rows, centroids, table)
                    torch.nn.functional.normalize(e, dim=-1, out=resident.embeddings[block])
                    bar.update(len(rows))
    elif residuals is not None and codec == "residual":
        norms = shared.norms()
        resident.inv_norms = torch.empty(T) if norms is None else norms[0]
        if norms is None:
            with _bar(T, "inverse norms", progress) as bar:
                for begin in range(0, T, NORM_TOKENS_CPU):
                    block = slice(begin, begin + NORM_TOKENS_CPU)
                    resident.inv_norms[block] = inverse_norms(codes[block], residuals[block], centroids, table)
                    bar.update(len(codes[block]))
    return resident


def _load_cuda(
    index: PlaidIndex,
    device: torch.device,
    placement: str,
    progress: bool,
    codec: str,
    pq: PQ | None,
    shared: _Shared,
    with_norms: bool,
) -> ResidentIndex:
    began = time.perf_counter()
    # Memory that torch holds but does not use can be given to the index too.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    planned = plan(
        index,
        torch.cuda.mem_get_info(device)[0] + unused,
        placement,
        codec=codec,
        pq_m=None if pq is None else pq.m,
        held=shared.held(pq),
    )
    chosen, on_host = planned.placement, planned.placement == "host"
    T = index.num_tokens
    copies: list[tuple[Tensor, Tensor]] = []

    codes = shared.find("codes")
    if codes is None:
        codes = torch.empty(T, dtype=torch.int32, device=device)
        copies += [(chunk.codes, codes[_rows(chunk)]) for chunk in index.chunks]
    ivf_pids = shared.find("ivf_pids", pinned=on_host)
    new_lists = ivf_pids is None
    if ivf_pids is None:
        ivf_pids = torch.empty(index.ivf_pids.numel(), dtype=torch.int32, device=device)
        copies.append((index.ivf_pids, ivf_pids))
    residuals: Tensor | MappedRows | None = None
    if chosen == "disk":
        residuals = MappedRows(index.chunks)
    elif codec != "pq" and not planned.whole:
        residuals = shared.find("residuals", pinned=on_host)
    new_residuals = residuals is None and codec != "pq" and not planned.whole
    if new_residuals:
        shape = (T, index.dim * index.nbits // 8)
        residuals = torch.empty(shape, dtype=torch.uint8, device="cpu" if on_host else device)
        copies += [(chunk.residuals, residuals[_rows(chunk)]) for chunk in index.chunks]
    pq_codes = None if pq is None else shared.pq_codes(pq)
    if pq is not None and pq_codes is None:
        pq_codes = torch.empty(pq.codes.shape, dtype=torch.uint8, device=device)
        copies.append((pq.codes, pq_codes))
    total = sum(source.nbytes for source, _ in copies)
    with _bar(total, "index to the GPU", progress, unit="B") as bar:
        copy_staged(copies, bar)
    del copies  # it holds on to GPU memory

    offsets, ivf_offsets = index.offsets.to(device), index.ivf_offsets.to(device)
    if new_lists:  # what is shared was checked when it came
        _check_contents(index, codes, ivf_pids, ivf_offsets)
    centroids, weights = index.centroids.to(device), index.bucket_weights.to(device)
    if on_host and new_residuals:
        assert isinstance(residuals, Tensor)
        pin(residuals)
    if on_host and new_lists:
        ivf_pids = ivf_pids.cpu()
        pin(ivf_pids)
    norms: tuple[Tensor | None, float, float] = (None, 0.0, 1.0)
    if codec == "residual":
        assert residuals is not None
        norms = shared.norms() or norms
        if norms[0] is None and with_norms:
            with _bar(2 * T, "inverse norms", progress) as bar:
                norms = quantised_inverse_norms(codes, residuals, centroids, weights, index.nbits, bar)
    embeddings = shared.find("embeddings") if planned.whole else None
    if planned.whole and embeddings is None:
        from plaid_tilemaxsim.ops import decompress_kernel

        embeddings = torch.empty(T, index.dim, dtype=torch.float16, device=device)
        with _bar(T, "embeddings", progress) as bar:
            for begin, rows in _blocks(index, NORM_TOKENS):
                block = slice(begin, begin + len(rows))
                decompress_kernel.decompress(
                    codes[block], rows.to(device), centroids, weights, index.nbits, embeddings[block]
                )
                bar.update(len(rows))
    torch.cuda.synchronize(device)
    resident = ResidentIndex(
        device=device,
        placement=chosen,
        centroids=_first(shared.find("centroids"), centroids),
        bucket_weights=weights,
        codes=codes,
        residuals=residuals,
        inv_norms=norms[0],
        inv_norm_lo=norms[1],
        inv_norm_step=norms[2],
        offsets=_first(shared.find("offsets"), offsets),
        ivf_pids=ivf_pids,
        ivf_offsets=_first(shared.find("ivf_offsets"), ivf_offsets),
        codec=codec,
        embeddings=embeddings,
        pq_codes=pq_codes,
        pq_codebook=None if pq is None else pq.codebook.to(device),
        pq_rotation=None if pq is None or pq.rotation is None else pq.rotation.to(device),
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


def _first(there: Tensor | None, new: Tensor) -> Tensor:
    return new if there is None else there


def _rows(chunk: Chunk) -> slice:
    return slice(chunk.token_start, chunk.token_start + chunk.num_tokens)


def _blocks(index: PlaidIndex, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """Residual rows of the files in blocks of at most ``tokens``, each with the number of its first token."""
    for chunk in index.chunks:
        for begin in range(0, chunk.num_tokens, tokens):
            yield chunk.token_start + begin, chunk.residuals[begin : begin + tokens]


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
