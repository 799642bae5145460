"""Product quantisation of an index's embeddings (codec "pq"), kept in a sidecar among the index's files.

    pq16.json                   what it is, what index it belongs to; written last: without it nothing counts
    pq16.0123abcd.safetensors   rotation fp32 [DIM, DIM] (OPQ only), codebook fp16 [M, 256, DIM / M], codes uint8 [T, M]

A token's embedding is decompressed and normalised as stock does, turned by the rotation, cut into M parts, and each
part replaced by the nearest of its 256 codebook entries. Trained by faiss (Jegou, Douze and Schmid 2011; OPQ: Ge et al.
2013), read without it. Stock's files are not touched, and stock takes no notice of ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from plaid_tilemaxsim.index.checks import check_file, check_finite, check_int, check_tensor, invalid
from plaid_tilemaxsim.index.files import PlaidIndex, Verify, read_json
from plaid_tilemaxsim.ops.cpu import byte_table, decompress

VERSION = 1
WIDTHS = (8, 16, 32, 64)
ENTRIES = 256
# As many vectors as faiss's k-means looks at by default: 256 for each of the 256 entries.
SAMPLE = 1 << 16
# Tokens decompressed and encoded together.
ENCODE_TOKENS = 1 << 15
# Rows times columns of a rotation are off from the identity by this at most.
ROTATION_ERROR = 1e-3
_DTYPES = {"rotation": ("F32", 4), "codebook": ("F16", 2), "codes": ("U8", 1)}


@dataclass(frozen=True, eq=False)
class PQ:
    """A product quantiser and what it made of an index. CPU tensors; codes from a sidecar are a map of its file."""

    m: int
    codes: Tensor  # uint8 [T, M]
    codebook: Tensor  # fp16 [M, 256, DIM / M]
    rotation: Tensor | None  # fp32 [DIM, DIM]: codes stand for rotation @ embedding, so for scores it turns the query


def train(
    index: PlaidIndex, m: int, *, opq: bool = False, sample: int = SAMPLE, seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    """(codebook, rotation) as in ``PQ`` from ``sample`` random tokens; faiss's k-means, the same for the same seed.

    Raises ValueError for an m that is not of WIDTHS or does not divide DIM, and for fewer than 256 tokens.
    """
    _check_m(m, index.dim)
    for name, value, least in (("sample", sample, ENTRIES), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ValueError(f"{name}: expected an integer in [{least}, 2**31), got {value!r}")
    if index.num_tokens < ENTRIES:
        raise ValueError(f"{index.path}: tokens: expected at least {ENTRIES} to train on, got {index.num_tokens}")
    faiss = _faiss()
    x = _sample(index, sample, seed).numpy()
    rotation = None
    if opq:
        matrix = faiss.OPQMatrix(index.dim, m)
        matrix.max_train_points = len(x)
        inner = _quantiser(faiss, index.dim, m, len(x), seed)  # the matrix only borrows it
        matrix.pq = inner
        matrix.train(x)
        rotation = torch.from_numpy(faiss.vector_to_array(matrix.A).reshape(index.dim, index.dim).copy())
        x = (torch.from_numpy(x) @ rotation.T).numpy()
    quantiser = _quantiser(faiss, index.dim, m, len(x), seed)
    quantiser.train(x)
    entries = torch.from_numpy(faiss.vector_to_array(quantiser.centroids).copy())
    return entries.view(m, ENTRIES, index.dim // m).half(), rotation


def encode(index: PlaidIndex, codebook: Tensor, rotation: Tensor | None, bar: tqdm | None = None) -> Iterator[Tensor]:
    """Codes uint8 [n, M] of all tokens in order, a block at a time; bar: advanced by tokens."""
    faiss = _faiss()
    # The entries as they will be read, so that codes name the nearest of them.
    quantiser = faiss.ProductQuantizer(index.dim, codebook.size(0), 8)
    faiss.copy_array_to_vector(codebook.float().flatten().numpy(), quantiser.centroids)
    for chunk in index.chunks:
        for begin in range(0, chunk.num_tokens, ENCODE_TOKENS):
            block = slice(begin, begin + ENCODE_TOKENS)
            x = _embeddings(index, chunk.codes[block], chunk.residuals[block])
            if rotation is not None:
                x = x @ rotation.T
            yield torch.from_numpy(quantiser.compute_codes(x.numpy()))
            if bar is not None:
                bar.update(len(x))


def quantise(
    index: PlaidIndex, m: int, *, opq: bool = False, sample: int = SAMPLE, seed: int = 0, progress: bool = False
) -> PQ:
    """``train`` and ``encode``, in memory."""
    codebook, rotation = train(index, m, opq=opq, sample=sample, seed=seed)
    with tqdm(total=index.num_tokens, desc=f"PQ codes, M = {m}", unit_scale=True, disable=not progress) as bar:
        codes = torch.cat(list(encode(index, codebook, rotation, bar)))
    return PQ(m, codes, codebook, rotation)


def write_pq(
    index: PlaidIndex,
    m: int,
    *,
    opq: bool = False,
    sample: int = SAMPLE,
    seed: int = 0,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Trains, encodes and writes the sidecar of width m; returns its JSON file. Holds one block of codes in memory.

    Interrupted at any point it leaves the sidecar that was there, or none. One that still belongs to the index is
    replaced only with ``force``. Raises ValueError as ``train`` does, and for an index that was not read from files.
    """
    _check_m(m, index.dim)
    file = _file(index.path, m)
    if file.exists() and not force and not _is_useless(index, m):
        raise ValueError(f"{file}: sidecar: expected none, or force=True (--force) to replace it, got one in order")
    owner = {"digest": index.digest(), "sha256": index.content_digest()}
    codebook, rotation = train(index, m, opq=opq, sample=sample, seed=seed)
    small = {"codebook": codebook} if rotation is None else {"rotation": rotation, "codebook": codebook}
    temporary = index.path / f".pq{m}.{secrets.token_hex(4)}.tmp"
    try:
        with tqdm(total=index.num_tokens, desc=f"PQ codes, M = {m}", unit_scale=True, disable=not progress) as bar:
            sums = _write_tensors(temporary, small, (index.num_tokens, m), encode(index, codebook, rotation, bar))
        if index.digest() != owner["digest"]:
            raise ValueError(f"{index.path}: files: expected them to stay as they are, got other ones in the meantime")
        tensors = index.path / f"pq{m}.{sums['codes'][:8]}.safetensors"
        os.replace(temporary, tensors)
        description = {
            "version": VERSION,
            "m": m,
            "dim": index.dim,
            "opq": opq,
            "num_passages": index.num_passages,
            "num_tokens": index.num_tokens,
            "index": owner,
            "tensors": {"file": tensors.name, "sha256": sums},
            "training": {"sample": min(sample, index.num_tokens), "seed": seed, "faiss": _faiss().__version__},
        }
        with temporary.open("w") as out:
            out.write(json.dumps(description, indent=1) + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    for old in index.path.glob(f"pq{m}.*.safetensors"):
        if old != tensors:
            old.unlink()
    return file


def find_pq(path: Path | str) -> list[int]:
    """Widths of the sidecars in an index's folder, ascending; says nothing of what they hold."""
    names = (re.fullmatch(r"pq([1-9]\d{0,3})\.json", file.name) for file in Path(path).iterdir())
    return sorted(int(name[1]) for name in names if name)


def read_pq(index: PlaidIndex, m: int | None = None, *, verify: Verify = "structure") -> PQ:
    """The sidecar of width m, or the only one; the codes are a map of its file.

    Sizes, types, and all of codebook and rotation are checked; with verify="full" the sha256 of the codes too. Every
    byte is a valid code. Raises ValueError when there is none or no such one, naming those there, when the index is
    another than it was made from, and for contents that are wrong.
    """
    there = find_pq(index.path)
    if m is None and len(there) != 1:
        got = f"those of M = {', '.join(map(str, there))}; choose with pq_m" if there else "none"
        hint = "" if there else f"; run `plaid-tilemaxsim pq {index.path} --m 16`"
        raise ValueError(f"{index.path}: PQ sidecar: expected one, got {got}{hint}")
    if m is not None and m not in there:
        got = f"M = {', '.join(map(str, there))}" if there else "none"
        hint = f"run `plaid-tilemaxsim pq {index.path} --m {m}`"
        raise ValueError(f"{index.path}: PQ sidecar: expected one of M = {m}, got {got}; {hint}")
    chosen = there[0] if m is None else m
    file = _file(index.path, chosen)
    described = _read_description(file, chosen)
    if not _belongs(index, described["index"]):
        raise ValueError(
            f"{file}: index: expected the files that it was made from, got others; run "
            f"`plaid-tilemaxsim pq {index.path} --m {chosen}{' --opq' if described['opq'] else ''}` again"
        )
    for name, expected in (
        ("dim", index.dim), ("num_passages", index.num_passages), ("num_tokens", index.num_tokens)
    ):  # fmt: skip
        if described[name] != expected:
            raise invalid(file, name, f"{expected}, as in the index", described[name])
    _check_m(chosen, index.dim)
    return _read_tensors(index, described, chosen, verify)


def describe_pq(index: PlaidIndex, verify: Verify = "structure") -> tuple[list[str], list[str]]:
    """A line for every sidecar, and the messages of those that cannot be used."""
    lines, problems = [], []
    for m in find_pq(index.path):
        try:
            pq = read_pq(index, m, verify=verify)
        except ValueError as error:
            lines.append(f"M = {m}: cannot be used: {error}")
            problems.append(str(error))
            continue
        kind = "PQ" if pq.rotation is None else "OPQ"
        lines.append(f"M = {m}: {kind}, {m} bytes a token, {pq.codes.numel():,} bytes of codes")
    return lines, problems


def _check_m(m: Any, dim: int) -> None:
    fitting = [width for width in WIDTHS if dim % width == 0]
    if type(m) is not int or m not in fitting:
        raise ValueError(f"m: expected one of {fitting}, which divide the {dim} dimensions, got {m!r}")


def _file(path: Path, m: int) -> Path:
    return path / f"pq{m}.json"


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("training PQ needs faiss: pip install 'plaid-tilemaxsim[cpu]' (or [gpu])") from error
    return faiss


def _quantiser(faiss: Any, dim: int, m: int, points: int, seed: int) -> Any:
    quantiser = faiss.ProductQuantizer(dim, m, 8)
    quantiser.cp.seed = seed
    # All of the sample, and no warning where it is small.
    quantiser.cp.max_points_per_centroid = -(-points // ENTRIES)
    quantiser.cp.min_points_per_centroid = 1
    return quantiser


def _sample(index: PlaidIndex, sample: int, seed: int) -> Tensor:
    """Normalised embeddings fp32 [n, DIM] of random tokens, all when there are no more than ``sample``."""
    T = index.num_tokens
    if sample >= T:
        tokens = torch.arange(T)
    else:
        # Drawn twice is taken once: of few among many that hardly happens, and no permutation of T is held.
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(T, (sample,), generator=generator).unique()
        if len(tokens) < min(0.9 * sample, T):
            tokens = torch.randperm(T, generator=generator)[:sample].sort().values
    parts = []
    for chunk in index.chunks:
        inside = (tokens >= chunk.token_start) & (tokens < chunk.token_start + chunk.num_tokens)
        rows = tokens[inside] - chunk.token_start
        parts.append(_embeddings(index, chunk.codes[rows], chunk.residuals[rows]))
    return torch.cat(parts)


def _embeddings(index: PlaidIndex, codes: Tensor, residuals: Tensor) -> Tensor:
    table = byte_table(index.nbits, index.bucket_weights)
    return normalize(decompress(codes, residuals, index.centroids, table), dim=-1)


def _is_useless(index: PlaidIndex, m: int) -> bool:
    """Whether there is a sidecar that no search would take: made from another index, or damaged."""
    try:
        read_pq(index, m)
    except ValueError:
        return True
    return False


def _belongs(index: PlaidIndex, owner: dict[str, str]) -> bool:
    """Names, sizes and times tell at once; files that were copied since are read."""
    if not index.files:
        raise ValueError(
            f"{index.path}: index: expected one as in its files for PQ codes, got one updated in memory; save it and "
            "run `plaid-tilemaxsim pq` again"
        )
    return index.digest() == owner["digest"] or index.content_digest() == owner["sha256"]


def _write_tensors(
    file: Path, small: dict[str, Tensor], shape: tuple[int, int], codes: Iterator[Tensor]
) -> dict[str, str]:
    """A safetensors file (8 bytes of header length, JSON header, data), the codes as they come; sha256 by tensor."""
    header, at = {}, 0
    sizes = {**{name: list(tensor.shape) for name, tensor in small.items()}, "codes": list(shape)}
    for name, size in sizes.items():
        dtype, width = _DTYPES[name]
        end = at + width * torch.Size(size).numel()
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sums = {name: _sha256(tensor) for name, tensor in small.items()}
    digest = hashlib.sha256()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in small.values():
            out.write(tensor.numpy().tobytes())
        for block in codes:
            data = block.numpy().tobytes()
            digest.update(data)
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return {**sums, "codes": digest.hexdigest()}


def _read_description(file: Path, m: int) -> dict[str, Any]:
    value = read_json(file, dict)
    if value.get("version") != VERSION or type(value["version"]) is not int:
        raise invalid(file, "version", VERSION, repr(value.get("version"))[:80])
    check_int(value.get("m"), file, "m", m, m)
    check_int(value.get("dim"), file, "dim", 1)
    for name in ("num_passages", "num_tokens"):
        check_int(value.get(name), file, name, 0)
    if type(value.get("opq")) is not bool:
        raise invalid(file, "opq", "true or false", repr(value.get("opq"))[:80])
    names = ["codebook", "codes", *(["rotation"] if value["opq"] else [])]
    _check_sums(value.get("index"), ["digest", "sha256"], file, "index")
    tensors = value.get("tensors")
    stored = tensors.get("file") if isinstance(tensors, dict) else None
    if not isinstance(stored, str) or not re.fullmatch(rf"pq{m}\.[0-9a-f]{{8}}\.safetensors", stored):
        raise invalid(file, "tensors.file", f"a name like pq{m}.0123abcd.safetensors", repr(stored)[:80])
    assert isinstance(tensors, dict)
    _check_sums(tensors.get("sha256"), names, file, "tensors.sha256")
    return dict(value)


def _check_sums(value: Any, names: list[str], file: Path, field: str) -> None:
    fits = isinstance(value, dict) and sorted(value) == sorted(names)
    if not fits or not all(isinstance(s, str) and re.fullmatch("[0-9a-f]{64}", s) for s in value.values()):
        raise invalid(file, field, f"sha256 of {', '.join(names)}", repr(value)[:80])


def _read_tensors(index: PlaidIndex, described: dict[str, Any], m: int, verify: Verify) -> PQ:
    from safetensors import safe_open

    file, sums = index.path / described["tensors"]["file"], described["tensors"]["sha256"]
    check_file(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            names = sorted(stored.keys())
            found = {name: stored.get_tensor(name) for name in names if name in sums}
    except Exception as error:  # whatever a damaged or hostile file provokes in the reader
        raise invalid(file, "content", "tensors as safetensors writes them", f"{error}"[:200]) from error
    if names != sorted(sums):
        raise invalid(file, "tensors", ", ".join(sorted(sums)), ", ".join(names)[:80])
    shape = (m, ENTRIES, index.dim // m)
    codebook = check_tensor(found["codebook"], file, "codebook", (torch.float16,), shape)
    codes = check_tensor(found["codes"], file, "codes", (torch.uint8,), (index.num_tokens, m))
    rotation = None
    check_finite(codebook, file, "codebook")
    if described["opq"]:
        rotation = check_tensor(found["rotation"], file, "rotation", (torch.float32,), (index.dim, index.dim))
        check_finite(rotation, file, "rotation")
        off = float((rotation @ rotation.T - torch.eye(index.dim)).abs().max())
        if not off <= ROTATION_ERROR:
            raise invalid(file, "rotation", "an orthogonal matrix", f"products off by {off:.3g}")
    for name in sums:
        if (name != "codes" or verify == "full") and _sha256(found[name]) != sums[name]:
            raise invalid(file, name, f"data of sha256 {sums[name]}", "other data")
    return PQ(m, codes, codebook, rotation)


def _sha256(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for block in tensor.view(-1).split(1 << 24):
        digest.update(block.numpy().tobytes())
    return digest.hexdigest()
