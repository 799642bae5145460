"""Writes the shards of an index: folders in stock's format, of contiguous passages with about equally many tokens.

    OUT/shard-000 ...   a stock index each, numbered from passage 0, with the centroids and buckets of the source
    OUT/shards.json     the manifest, written last: which passages each shard has, and what it was made from

A shard is written under another name and renamed once it is complete, and a second run goes on after the last one
that is. The source is read chunk by chunk and never written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from plaid_tilemaxsim.index.checks import check_int, check_pid_lists, check_range, invalid
from plaid_tilemaxsim.index.files import INT32_MAX, PlaidIndex, read_index, read_json
from plaid_tilemaxsim.index.shards import shard_bounds, unchecked_part

VERSION = 1
MANIFEST, SHARD = "shards.json", "shard.json"
# Passages of a chunk at most, as colbert-ai writes them: bounds the memory of those who read and write chunk by chunk.
CHUNK_PASSAGES = 25_000
_SHARED_FILES = ("centroids.pt", "buckets.pt", "avg_residual.pt")
_COUNTS = ("first_pid", "num_passages", "num_tokens")


@dataclass(frozen=True)
class Shard:
    """One shard as the manifest names it. first_pid: the source's number of its passage 0."""

    folder: str
    first_pid: int
    num_passages: int
    num_tokens: int
    sha256: str  # ``PlaidIndex.content_digest`` of the shard


@dataclass(frozen=True, eq=False)
class Manifest:
    """``shards.json``: the shards in the order of their passages."""

    path: Path  # of the folder
    shards: tuple[Shard, ...]
    source: Mapping[str, Any]  # digest, num_passages, num_tokens of the index that was cut
    config: Mapping[str, Any]  # of the source, without its collection

    @property
    def num_passages(self) -> int:
        return int(self.source["num_passages"])


def split_index(path: Path | str, n: int, out: Path | str, *, progress: bool = True) -> Manifest:
    """Cuts the index in a folder into ``n`` shards under ``out``, or completes what an earlier run left there.

    Holds one chunk of at most CHUNK_PASSAGES passages, the lists of one shard and 12 bytes a passage in memory. A shard
    that is there and was made from the same state of the same index is kept. progress: a bar on stderr, of tokens.
    Raises ValueError for an index that is out of order or has fewer than n passages with tokens, where ``out`` holds
    something else, a shard without all of its files or another run's work, or where the disk has too little room.
    """
    index, out = read_index(path, verify="structure"), Path(out)
    bounds = shard_bounds(index.offsets, n)
    if len(bounds) - 1 < n:
        raise invalid(index.path, "shards", f"at most {len(bounds) - 1}, since each needs passages with tokens", n)
    source = {"digest": index.digest(), "num_passages": index.num_passages, "num_tokens": index.num_tokens}
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        return _split(index, source, bounds, out, progress)


def _split(index: PlaidIndex, source: Mapping[str, Any], bounds: list[int], out: Path, progress: bool) -> Manifest:
    n, same = len(bounds) - 1, False
    if (out / MANIFEST).exists():
        found = read_manifest(out)
        same = found.source == source and [shard.first_pid for shard in found.shards] == bounds[:-1]
        if same and all(_complete(out / shard.folder) == shard for shard in found.shards):
            return found
    ours = {MANIFEST} if same else set()
    strangers = [file.name for file in out.iterdir() if file.name not in ours and not _is_ours(file, source, bounds)]
    if strangers:
        raise invalid(out, "folder", f"an empty one, or {n} shards of {index.path} as it is now", sorted(strangers)[0])
    done = [_complete(out / _name(i)) for i in range(n)]
    missing = sum(int(index.offsets[b] - index.offsets[a]) for (a, b), shard in _pairs(bounds, done) if shard is None)
    needed = missing * (4 + index.dim * index.nbits // 8) + 4 * index.ivf_pids.numel()
    if shutil.disk_usage(out).free < needed:
        raise invalid(out, "disk", f"room for {needed} bytes", f"{shutil.disk_usage(out).free} free")
    check_pid_lists(index.ivf_pids, index.ivf_offsets, index.num_passages, index.ivf_file)
    shards: list[Shard] = []
    with tqdm(total=missing, desc="shards", unit=" tokens", unit_scale=True, disable=not progress) as bar:
        for (begin, end), shard in _pairs(bounds, done):
            name = _name(len(shards))
            shards.append(shard or _write_shard(index, begin, end, out / name, source, bar))
    config = {name: value for name, value in index.metadata["config"].items() if name != "collection"}
    manifest = Manifest(out, tuple(shards), source, config)
    partial = out / (MANIFEST + ".partial")
    _write_json(partial, {"version": VERSION, "source": source, "shards": [*map(asdict, shards)], "config": config})
    partial.replace(out / MANIFEST)
    return manifest


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest in a folder; the shards themselves are not looked at. ValueError names what is wrong."""
    file = Path(folder) / MANIFEST
    value = read_json(file, dict)
    check_int(value.get("version"), file, "version", VERSION, VERSION)
    source, config, listed = value.get("source"), value.get("config"), value.get("shards")
    if not isinstance(source, dict) or not isinstance(config, dict) or not isinstance(listed, list) or not listed:
        raise invalid(file, "content", "source, config and at least one shard", ", ".join(value)[:80])
    _check_source(source, file)
    shards, first = [], 0
    for i, entry in enumerate(listed):
        shard = _check_shard(entry, file, f"shards[{i}]")
        if shard.first_pid != first or shard.folder != _name(i):
            raise invalid(file, f"shards[{i}]", f"{_name(i)} from passage {first}", repr(entry)[:80])
        shards.append(shard)
        first += shard.num_passages
    totals = first, sum(shard.num_tokens for shard in shards)
    if totals != (source["num_passages"], source["num_tokens"]):
        raise invalid(file, "shards", f"{source['num_passages']} passages, {source['num_tokens']} tokens", totals)
    return Manifest(file.parent, tuple(shards), source, config)


def check_shard(index: PlaidIndex, shard: Shard, contents: bool = False) -> None:
    """ValueError unless this index is that shard, by its counts and what it says of itself; contents: by all bytes."""
    own = _read_shard(index.path)
    counts = index.num_passages, index.num_tokens
    if own != shard or counts != (shard.num_passages, shard.num_tokens):
        raise invalid(index.path / SHARD, "shard", shard, f"{own} with {counts} passages and tokens")
    if contents and (digest := index.content_digest()) != shard.sha256:
        raise invalid(index.path, "sha256 of the files", shard.sha256, digest)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One run at a time writes to a folder; a lock that ends with the process."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise invalid(folder, "folder", "no other run that writes shards here", "one") from None
        yield
    finally:
        os.close(held)


def _write_shard(index: PlaidIndex, begin: int, end: int, folder: Path, source: Mapping[str, Any], bar: tqdm) -> Shard:
    partial = folder.with_name("." + folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_index(unchecked_part(index, begin, end), index.path, partial, bar)
        written = read_index(partial, verify="structure")
        shard = Shard(folder.name, begin, written.num_passages, written.num_tokens, written.content_digest())
        _write_json(partial / SHARD, {"source": source, "shard": asdict(shard)})
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return shard


def _write_index(part: PlaidIndex, source: Path, folder: Path, bar: tqdm) -> None:
    for name in _SHARED_FILES:
        shutil.copyfile(source / name, folder / name)
    number = 0
    for chunk in part.chunks:
        check_range(chunk.codes, chunk.codes_file, "codes", 0, part.num_centroids)
        for first in range(chunk.pid_start, chunk.pid_start + chunk.num_passages, CHUNK_PASSAGES):
            last = min(first + CHUNK_PASSAGES, chunk.pid_start + chunk.num_passages)
            tokens = part.offsets[first] - chunk.token_start, part.offsets[last] - chunk.token_start
            rows = slice(*map(int, tokens))
            # Copies: torch.save writes all that lies under a view.
            _save(chunk.codes[rows].clone(), folder / f"{number}.codes.pt")
            _save(chunk.residuals[rows].clone(), folder / f"{number}.residuals.pt")
            _write_json(folder / f"doclens.{number}.json", part.doclens[first:last].tolist())
            counts = {
                "passage_offset": first,
                "num_passages": last - first,
                "num_embeddings": rows.stop - rows.start,
                "embedding_offset": int(part.offsets[first]),
            }
            _write_json(folder / f"{number}.metadata.json", counts)
            number += 1
            bar.update(rows.stop - rows.start)
    lists, lengths = part.ivf_pids.contiguous(), part.ivf_offsets.diff()
    # Stock reads lists as rows of one length, the last of them too, so it pads where they would end behind the file.
    if lists.numel() - int(lengths[-1]) + int(lengths.max()) > lists.numel():
        lists = torch.cat([lists, torch.zeros(int(lengths.max()), dtype=lists.dtype)])
    _save((lists.clone(), lengths), folder / "ivf.pid.pt")
    counts = {
        "num_chunks": number,
        "num_partitions": part.num_centroids,
        "num_embeddings": part.num_tokens,
        "avg_doclen": part.num_tokens / part.num_passages,
    }
    _write_json(folder / "metadata.json", {**part.metadata, **counts})


def _save(value: Any, file: Path) -> None:
    with file.open("wb") as out:
        try:
            torch.save(value, out)
        except RuntimeError as error:  # torch's own, in the place of what the system said
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        out.flush()
        os.fsync(out.fileno())


def _write_json(file: Path, value: Any) -> None:
    with file.open("w") as out:
        json.dump(value, out, indent=None if isinstance(value, list) else 4)
        out.flush()
        os.fsync(out.fileno())


def _name(i: int) -> str:
    return f"shard-{i:03d}"


def _pairs(bounds: list[int], done: list[Shard | None]) -> list[tuple[tuple[int, int], Shard | None]]:
    return list(zip(itertools.pairwise(bounds), done, strict=True))


def _is_ours(file: Path, source: Mapping[str, Any], bounds: list[int]) -> bool:
    """Whether a file of the output folder is a shard of this cut, or what an interrupted run left of one."""
    if file.name == MANIFEST + ".partial" or (file.name.startswith(".shard-") and file.name.endswith(".partial")):
        return True
    names = {_name(i): begin for i, begin in enumerate(bounds[:-1])}
    if file.name not in names or not (file / SHARD).is_file():
        return False
    shard, value = _read_shard(file), read_json(file / SHARD, dict)
    end = bounds[bounds.index(names[file.name]) + 1]
    return (
        shard is not None
        and value.get("source") == source
        and (shard.first_pid, shard.first_pid + shard.num_passages) == (names[file.name], end)
    )


def _read_shard(folder: Path) -> Shard | None:
    """What a shard says of itself; None where there is none."""
    file = folder / SHARD
    if not file.exists():
        return None
    value = read_json(file, dict)
    source = value.get("source")
    if not isinstance(source, dict):
        raise invalid(file, "source", "an object", repr(source)[:80])
    _check_source(source, file)
    return _check_shard(value.get("shard"), file, "shard")


def _complete(folder: Path) -> Shard | None:
    """``_read_shard``, once all of its files are there with the sizes they should have."""
    shard = _read_shard(folder)
    if shard is not None:
        check_shard(read_index(folder, verify="structure"), shard)
    return shard


def _check_source(source: dict[str, Any], file: Path) -> None:
    if sorted(source) != ["digest", "num_passages", "num_tokens"] or not isinstance(source["digest"], str):
        raise invalid(file, "source", "digest, num_passages and num_tokens", repr(source)[:80])
    for name in ("num_passages", "num_tokens"):
        check_int(source[name], file, f"source.{name}", 0)


def _check_shard(value: Any, file: Path, field: str) -> Shard:
    names = sorted(("folder", "sha256", *_COUNTS))
    if not isinstance(value, dict) or sorted(value) != names:
        raise invalid(file, field, ", ".join(names), repr(value)[:80])
    for name in ("folder", "sha256"):
        if not isinstance(value[name], str):
            raise invalid(file, f"{field}.{name}", "text", repr(value[name])[:80])
    for name in _COUNTS:
        check_int(value[name], file, f"{field}.{name}", 0, None if name == "num_tokens" else INT32_MAX)
    return Shard(**value)
