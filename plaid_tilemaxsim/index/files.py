"""Reads and checks the files of a stock PLAID index (colbert-ai 0.2.22 writes them). Trusts none of them.

metadata.json; centroids.pt, buckets.pt, avg_residual.pt; for each chunk of passages N.codes.pt,
N.residuals.pt, N.metadata.json, doclens.N.json; ivf.pid.pt, or only ivf.pt in old indexes. Nothing in the
folder is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from plaid_tilemaxsim.index.archive import check_sums, read_records
from plaid_tilemaxsim.index.checks import (
    check_file,
    check_finite,
    check_int,
    check_pid_lists,
    check_range,
    check_same_lists,
    check_tensor,
    invalid,
)
from plaid_tilemaxsim.index.lists import build_pid_lists
from plaid_tilemaxsim.index.stamps import SMALL_FILE

NBITS = (1, 2, 4, 8)
INT32_MAX = 2**31 - 1
FLOAT16_MAX = 65504.0
FLOATS = (torch.float32, torch.float16)
INTS = (torch.int32, torch.int64)

Verify = Literal["full", "structure"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Passages pid_start .. pid_start + num_passages - 1 as stock wrote them: one pair of files."""

    codes_file: Path
    pid_start: int
    token_start: int
    num_passages: int
    num_tokens: int
    codes: Tensor  # int32 [num_tokens], mapped from the file
    residuals: Tensor  # uint8 [num_tokens, DIM * NBITS // 8], mapped from the file


@dataclass(frozen=True, eq=False)
class PlaidIndex:
    """A checked stock PLAID index. CPU tensors; those read from files are private maps of them (torch mmap).

    A map shows what its file holds when it is touched: copy what must outlive a rewrite of the index.
    """

    path: Path
    dim: int
    nbits: int
    centroids: Tensor  # fp16 [C, DIM]
    bucket_cutoffs: Tensor  # fp32 [2**nbits - 1]
    bucket_weights: Tensor  # fp32 [2**nbits]
    doclens: Tensor  # int32 [N], 0 for a removed or empty passage
    offsets: Tensor  # int64 [N + 1], first token of each passage, then the number of tokens
    ivf_file: Path
    ivf_pids: Tensor  # int32 [ivf_offsets[-1]], each centroid's passages, ascending
    ivf_offsets: Tensor  # int64 [C + 1]
    chunks: tuple[Chunk, ...]
    metadata: Mapping[str, Any] = field(repr=False)
    files: tuple[Path, ...] = field(repr=False)  # every file read; none for an index made from tensors

    @property
    def num_passages(self) -> int:
        return self.doclens.numel()

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_centroids(self) -> int:
        return self.centroids.size(0)

    @property
    def nbytes(self) -> int:
        """Bytes of what a search needs, as the files hold it: 4 bytes a doclen, 8 a list length."""
        small = (self.centroids, self.bucket_cutoffs, self.bucket_weights, self.doclens, self.ivf_pids)
        tokens = self.num_tokens * (4 + self.dim * self.nbits // 8)
        return sum(t.numel() * t.element_size() for t in small) + 8 * self.num_centroids + tokens

    def codes(self) -> Tensor:
        """int32 [T]: the file's map when there is one chunk, else a copy of T * 4 bytes."""
        return _joined([chunk.codes for chunk in self.chunks])

    def residuals(self) -> Tensor:
        """uint8 [T, DIM * NBITS // 8]: the file's map when there is one chunk, else a copy of its size."""
        return _joined([chunk.residuals for chunk in self.chunks])

    def digest(self) -> str:
        """sha256 hex over names, sizes, modification times and contents of small files: cheap, not a proof.

        A copy with other file times has another digest. Raises ValueError for an index without files.
        """
        if not self.files:
            raise invalid(self.path, "files", "an index read from files", "one made from tensors")
        digest = hashlib.sha256()
        for file in sorted(self.files):
            stat = file.stat()
            digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
            if stat.st_size <= SMALL_FILE:
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def content_digest(self) -> str:
        """sha256 hex over names and contents of all files: the same for every copy, at the cost of reading it all."""
        if not self.files:
            raise invalid(self.path, "files", "an index read from files", "one made from tensors")
        digest = hashlib.sha256()
        for file in sorted(self.files):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as data:
                while block := data.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()

    def verify_contents(self) -> None:
        """Reads every byte and sorts the codes of every chunk, which takes minutes for hundreds of millions of tokens.

        ValueError unless data are those of the CRC-32 that torch.save wrote, codes lie in [0, C), and the list of
        each centroid is that of the passages with its code, strictly ascending. (IndexUpdater.remove takes passages
        from the lists alone until it saves them, so an index in memory after that is refused.)
        """
        for file in self.files:
            if file.suffix == ".pt":
                check_sums(file)
        self.verify_references()
        runs = (
            (chunk.codes, self.doclens[chunk.pid_start : chunk.pid_start + chunk.num_passages]) for chunk in self.chunks
        )
        pids, offsets = build_pid_lists(runs, self.num_centroids)
        check_same_lists(self.ivf_pids, self.ivf_offsets, pids, offsets, self.ivf_file)

    def verify_references(self) -> None:
        """What "structure" leaves to load_resident, without a device: reads all codes and lists, seconds for hundreds
        of millions of tokens.

        ValueError unless codes lie in [0, C) and lists in [0, N), strictly ascending.
        """
        for chunk in self.chunks:
            check_range(chunk.codes, chunk.codes_file, "codes", 0, self.num_centroids)
        check_pid_lists(self.ivf_pids, self.ivf_offsets, self.num_passages, self.ivf_file)

    @classmethod
    def from_tensors(
        cls,
        *,
        nbits: int,
        centroids: Tensor,
        bucket_cutoffs: Tensor,
        bucket_weights: Tensor,
        codes: Tensor,
        residuals: Tensor,
        doclens: Tensor,
        ivf: Tensor,
        ivf_lengths: Tensor,
        metadata: Mapping[str, Any] | None = None,
        path: Path | str = "memory",
        verify: Verify = "full",
    ) -> PlaidIndex:
        """An index from tensors on any device (copied to the CPU if need be), checked as files are.

        centroids [C, DIM] fp16, or fp32 that fp16 holds exactly; bucket_cutoffs and bucket_weights fp16
        or fp32; codes int32 [>= T] and residuals uint8 [>= T, DIM * nbits // 8] with T = sum(doclens), rows
        beyond T ignored (stock pads both); doclens [N], ivf [>= sum(ivf_lengths)] and ivf_lengths [C], each
        int32 or int64. Raises ValueError as read_index does, with path for the file.
        """
        path = Path(path)
        _check_verify(verify)
        if type(nbits) is not int or nbits not in NBITS:
            raise invalid(path, "nbits", f"one of {NBITS}", repr(nbits))
        centroids = check_tensor(centroids.cpu(), path, "centroids", FLOATS, (None, None))
        dim = centroids.size(1)
        _check_dim(dim, nbits, path, "dim of centroids")
        half = _check_centroids(centroids.half(), path)
        if not torch.equal(half.to(centroids.dtype), centroids):
            raise invalid(path, "centroids", "values that float16 holds exactly", "others")
        cutoffs, weights = _check_buckets((bucket_cutoffs.cpu(), bucket_weights.cpu()), nbits, path)
        doclens = check_tensor(doclens.cpu(), path, "doclens", INTS, (None,))
        check_range(doclens, path, "doclens", 0, INT32_MAX)
        num_tokens = int(doclens.sum())
        codes = check_tensor(codes.cpu(), path, "codes", (torch.int32,), (None,))
        residuals = check_tensor(residuals.cpu(), path, "residuals", (torch.uint8,), (None, dim * nbits // 8))
        for name, tensor in (("codes", codes), ("residuals", residuals)):
            if tensor.size(0) < num_tokens:
                raise invalid(path, name, f"the {num_tokens} rows that doclens add up to", tensor.size(0))
        lists = (ivf.cpu(), ivf_lengths.cpu())
        ivf_pids, ivf_offsets = _check_ivf(lists, half.size(0), doclens.numel(), num_tokens, path)
        codes, residuals = codes[:num_tokens], residuals[:num_tokens]
        index = cls(
            path=path,
            dim=dim,
            nbits=nbits,
            centroids=half,
            bucket_cutoffs=cutoffs,
            bucket_weights=weights,
            doclens=doclens.to(torch.int32),
            offsets=_offsets(doclens),
            ivf_file=path,
            ivf_pids=ivf_pids,
            ivf_offsets=ivf_offsets,
            chunks=(Chunk(path, 0, 0, doclens.numel(), num_tokens, codes, residuals),),
            metadata=dict(metadata or {}),
            files=(),
        )
        if verify == "full":
            index.verify_contents()
        return index


def read_index(path: Path | str, *, verify: Verify = "full") -> PlaidIndex:
    """Reads and checks the stock PLAID index in a folder; codes, residuals and lists are mapped, not copied.

    "structure" checks presence, types, dtypes, shapes, counts, doclens, list lengths and all small tensors, and no
    size is believed that bytes in the file do not back. "full" also runs verify_contents. Whoever skips that must
    check codes and pids before indexing by them (load_resident does, on the device). Symbolic links must stay in the
    folder (check_file says which else). No file of stock tells residuals of the same shape apart: exchanged between two
    chunks, or written anew, they are another index in order.
    The metadata's num_embeddings is not used, since stock's IndexUpdater gets it wrong: sizes come from codes
    and doclens. Raises ValueError naming file, field, expected and got.
    """
    _check_verify(verify)
    folder = Path(path)
    if not folder.is_dir():
        # where colbert-ai puts an index of that name
        near = [str(place) for place in sorted(Path("experiments").glob(f"*/indexes/{folder.name}")) if folder.name]
        got = f"none; did you mean {' or '.join(near)}?" if near else "none"
        raise invalid(folder, "folder", "a folder that holds a PLAID index", got)

    metadata_file = folder / "metadata.json"
    metadata = read_json(metadata_file, dict)
    config = metadata.get("config")
    if not isinstance(config, dict):
        raise invalid(metadata_file, "config", "an object", repr(config)[:80])
    nbits = config.get("nbits")
    if type(nbits) is not int or nbits not in NBITS:
        raise invalid(metadata_file, "config.nbits", f"one of {NBITS}", repr(nbits)[:80])
    dim = check_int(config.get("dim"), metadata_file, "config.dim", 1)
    _check_dim(dim, nbits, metadata_file, "config.dim")
    num_chunks = check_int(metadata.get("num_chunks"), metadata_file, "num_chunks", 1)
    _check_chunk_files(folder, num_chunks, metadata_file)

    centroids_file = folder / "centroids.pt"
    value = _load(centroids_file)
    centroids = check_tensor(value, centroids_file, "centroids", (torch.float16,), (None, dim))
    num_centroids = centroids.size(0)
    if metadata.get("num_partitions", num_centroids) != num_centroids:
        got = repr(metadata["num_partitions"])[:80]
        raise invalid(metadata_file, "num_partitions", f"{num_centroids}, the rows of centroids.pt", got)
    buckets_file = folder / "buckets.pt"
    cutoffs, weights = _check_buckets(_load(buckets_file), nbits, buckets_file)
    average_file = folder / "avg_residual.pt"
    _check_avg_residual(_load(average_file), dim, average_file)

    files = [metadata_file, centroids_file, buckets_file, average_file]
    chunks: list[Chunk] = []
    parts: list[Tensor] = []
    pid_start = token_start = 0
    for number in range(num_chunks):
        chunk, part = _read_chunk(folder, number, pid_start, token_start, dim * nbits // 8)
        files += _chunk_files(folder, number)
        chunks.append(chunk)
        parts.append(part)
        pid_start += chunk.num_passages
        token_start += chunk.num_tokens
    check_int(pid_start, folder, "number of passages", 0, INT32_MAX)

    ivf_file = folder / "ivf.pid.pt"
    if not os.path.lexists(ivf_file) and (folder / "ivf.pt").exists():
        # The old file lists embedding ids, which codes and doclens tell too. Stock would write to the folder.
        for chunk in chunks:
            check_range(chunk.codes, chunk.codes_file, "codes", 0, num_centroids)
        runs = zip((chunk.codes for chunk in chunks), parts, strict=True)
        ivf_pids, ivf_offsets = build_pid_lists(runs, num_centroids)
    else:
        files.append(ivf_file)
        ivf_pids, ivf_offsets = _check_ivf(_load(ivf_file), num_centroids, pid_start, token_start, ivf_file)

    # After all shapes: this is the first to read a file of any size.
    _check_centroids(centroids, centroids_file)

    doclens = torch.cat(parts)
    index = PlaidIndex(
        path=folder,
        dim=dim,
        nbits=nbits,
        centroids=centroids,
        bucket_cutoffs=cutoffs,
        bucket_weights=weights,
        doclens=doclens,
        offsets=_offsets(doclens),
        ivf_file=ivf_file,
        ivf_pids=ivf_pids,
        ivf_offsets=ivf_offsets,
        chunks=tuple(chunks),
        metadata=metadata,
        files=tuple(files),
    )
    if verify == "full":
        index.verify_contents()
    return index


def _chunk_files(folder: Path, number: int) -> tuple[Path, Path, Path, Path]:
    return (
        folder / f"{number}.codes.pt",
        folder / f"{number}.residuals.pt",
        folder / f"{number}.metadata.json",
        folder / f"doclens.{number}.json",
    )


def _check_chunk_files(folder: Path, num_chunks: int, metadata_file: Path) -> None:
    """The folder has the files of chunks 0 .. num_chunks - 1 and of no other chunk."""
    pattern = re.compile(r"(\d+)\.(?:codes|residuals)\.pt")
    # By name, not by number: 00.codes.pt is no other name for 0.codes.pt.
    found = {match[1] for file in folder.iterdir() if (match := pattern.fullmatch(file.name))}
    if len(found) != num_chunks or found != set(map(str, range(num_chunks))):
        got = ", ".join(sorted(found, key=lambda number: (len(number), number))[:20]) or "none"
        expected = f"files of {num_chunks} chunks, numbered from 0"
        raise invalid(metadata_file, "num_chunks", expected, f"chunks {got}")


def _read_chunk(folder: Path, number: int, pid_start: int, token_start: int, width: int) -> tuple[Chunk, Tensor]:
    """A chunk and its doclens, int32 [num_passages]; width: bytes of a residual row."""
    codes_file, residuals_file, metadata_file, doclens_file = _chunk_files(folder, number)
    codes = check_tensor(_load(codes_file), codes_file, "codes", (torch.int32,), (None,))
    num_tokens = codes.numel()
    if num_tokens > INT32_MAX:
        raise invalid(codes_file, "codes", f"at most {INT32_MAX} tokens in a chunk", num_tokens)
    value = _load(residuals_file)
    residuals = check_tensor(value, residuals_file, "residuals", (torch.uint8,), (num_tokens, width))

    lengths = read_json(doclens_file, list)
    if not set(map(type, lengths)) <= {int}:
        odd = next(length for length in lengths if type(length) is not int)
        raise invalid(doclens_file, "doclens", "integers", repr(odd)[:80])
    if lengths and (min(lengths) < 0 or max(lengths) > num_tokens):
        odd = next(length for length in lengths if not 0 <= length <= num_tokens)
        raise invalid(doclens_file, "doclens", f"lengths in [0, {num_tokens}]", str(odd)[:80])
    if sum(lengths) != num_tokens:
        raise invalid(doclens_file, "doclens", f"lengths adding up to the {num_tokens} codes", sum(lengths))

    metadata = read_json(metadata_file, dict)
    counts = {"passage_offset": pid_start, "num_passages": len(lengths), "num_embeddings": num_tokens}
    for name, expected in counts.items():
        if type(metadata.get(name)) is not int or metadata[name] != expected:
            raise invalid(metadata_file, name, expected, repr(metadata.get(name))[:80])
    chunk = Chunk(codes_file, pid_start, token_start, len(lengths), num_tokens, codes, residuals)
    return chunk, torch.tensor(lengths, dtype=torch.int32)


def _check_verify(verify: str) -> None:
    if verify not in ("full", "structure"):
        raise ValueError(f"verify: expected 'full' or 'structure', got {verify!r}")


def _check_dim(dim: int, nbits: int, file: Path, name: str) -> None:
    if dim == 0 or dim % (8 * nbits):
        raise invalid(file, name, f"a multiple of {8 * nbits}, as residuals of {nbits} bits need", dim)


def _check_centroids(centroids: Tensor, file: Path) -> Tensor:
    if centroids.size(0) == 0:
        raise invalid(file, "centroids", "at least one", 0)
    check_finite(centroids, file, "centroids")
    return centroids


def _check_buckets(value: Any, nbits: int, file: Path) -> tuple[Tensor, Tensor]:
    """(cutoffs fp32 [2**nbits - 1], weights fp32 [2**nbits]); stock saves the weights in fp16 from a GPU."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise invalid(file, "buckets", "a pair (cutoffs, weights)", type(value).__name__)
    cutoffs = check_tensor(value[0], file, "bucket_cutoffs", FLOATS, (2**nbits - 1,)).float()
    weights = check_tensor(value[1], file, "bucket_weights", FLOATS, (2**nbits,)).float()
    check_finite(cutoffs, file, "bucket_cutoffs")
    check_finite(weights, file, "bucket_weights")
    for name, values in (("bucket_cutoffs", cutoffs), ("bucket_weights", weights)):
        if bool((values[1:] < values[:-1]).any()):
            raise invalid(file, name, "ascending values", values.tolist()[:8])
        # Stock holds them in float16 on a GPU. Larger ones would make norms and scores infinite, then NaN.
        if bool((values.abs() > FLOAT16_MAX).any()):
            raise invalid(file, name, "values within float16", values.tolist()[:8])
    return cutoffs, weights


def _check_avg_residual(value: Any, dim: int, file: Path) -> None:
    """Search does not use it, but stock refuses to load without it, and wrote [], [1] or [DIM] over time."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if shape not in ((), (1,), (dim,)):
        raise invalid(file, "avg_residual", f"shape [], [1] or [{dim}]", list(shape))
    check_finite(check_tensor(value, file, "avg_residual", FLOATS, shape), file, "avg_residual")


def _check_ivf(value: Any, num_centroids: int, num_passages: int, num_tokens: int, file: Path) -> tuple[Tensor, Tensor]:
    """(pids int32 [n], offsets int64 [C + 1]) without the tail that stock pads the pids with."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise invalid(file, "ivf", "a pair (pids, lengths)", type(value).__name__)
    pids = check_tensor(value[0], file, "pids", INTS, (None,))
    lengths = check_tensor(value[1], file, "lengths", INTS, (num_centroids,))
    # Each length first: then the sum cannot wrap.
    check_range(lengths, file, "lengths", 0, min(pids.numel(), num_passages) + 1)
    offsets = _offsets(lengths)
    total = int(offsets[-1])
    if total > pids.numel():
        raise invalid(file, "lengths", f"lists within the {pids.numel()} pids", f"a sum of {total}")
    if total > num_tokens:  # a passage is in the list of a centroid for one of its tokens at least
        raise invalid(file, "lengths", f"lists of no more pids than the {num_tokens} tokens", f"a sum of {total}")
    pids = pids[:total]
    if pids.dtype is torch.int64:
        check_range(pids, file, "pids", 0, num_passages)
        pids = pids.to(torch.int32)
    return pids, offsets


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def _load(file: Path) -> Any:
    """torch.load of a file that can only hold tensors; what goes wrong inside is a ValueError that names the file."""
    read_records(file)
    try:
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file provokes in the reader
        raise invalid(file, "content", "tensors as torch.save writes them", _first_line(error)) from error


def read_json(file: Path, kind: type) -> Any:
    """The JSON value in a file, of type ``kind`` (dict or list); ValueError that names the file otherwise."""
    check_file(file)
    blocks = []
    try:
        with file.open("rb") as data:
            while block := data.read(1 << 20):
                if 0 in block:  # as the holes of a sparse file, whose size says nothing of what is there
                    raise ValueError("a zero byte")
                blocks.append(block)
        value = json.loads(b"".join(blocks), parse_constant=_refuse_constant)
    except (ValueError, RecursionError, OSError) as error:
        raise invalid(file, "content", "valid JSON", _first_line(error)) from error
    if type(value) is not kind:
        expected = "a JSON object" if kind is dict else "a JSON array"
        raise invalid(file, "content", expected, type(value).__name__)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the constant {name}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"[:200]
