"""Index folders as an attacker or a broken disk would leave them.

Each mutation of a real index is refused by a ValueError that names file, field, expected and got, or changes no result
of a search; with verify="structure", which does not read all bytes, it may change results but never fails otherwise.
What a file claims is never allocated, and no pickle runs.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
import resource
import shutil
import struct
import time
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim import cli
from plaid_tilemaxsim.engine import SearchEngine, with_defaults
from plaid_tilemaxsim.index import files
from plaid_tilemaxsim.index.archive import check_sums
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.pq import read_pq, write_pq
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.index.stamps import fingerprint
from tests.synthetic import make_index, make_queries

N, C, DIM, M, CHUNKS = 90, 24, 32, 8, 3
SINGLE = ("metadata.json", "centroids.pt", "buckets.pt", "avg_residual.pt", "ivf.pid.pt")
PER_CHUNK = ("{}.codes.pt", "{}.residuals.pt", "{}.metadata.json", "doclens.{}.json")
STOCK = (*SINGLE, *(name.format(i) for i in range(CHUNKS) for name in PER_CHUNK))
PT = tuple(name for name in STOCK if name.endswith(".pt"))
JSON = tuple(name for name in STOCK if name.endswith(".json"))
SIDECAR = ("pq8.json", "pq8.*.safetensors")

Do = Callable[[Path], object]
Ranking = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Mutation:
    """What is done to a folder, and what must come of it.

    Refused for ``file`` and ``field``, harmless, or, where neither is given, one of both.
    """

    name: str
    do: Do
    file: str = ""
    field: str = ""
    harmless: bool = False

    @property
    def codec(self) -> str:
        return "pq" if "pq8" in self.name else "residual"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chunks and a PQ sidecar."""
    pytest.importorskip("faiss")
    folder = make_index(tmp_path_factory.mktemp("index") / "i", n=N, dim=DIM, C=C, chunk_size=32, mean_doclen=9)
    write_pq(read_index(folder), M, sample=400, progress=False)
    return folder


@pytest.fixture(scope="module")
def expected(index: Path) -> dict[str, Ranking]:
    return {codec: rank(index, codec, "full") for codec in ("residual", "pq")}


@pytest.fixture
def folder(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the index, in a working directory of its own, where payloads would leave their mark."""
    place = index.parent / "copy"
    copied = Path(shutil.copytree(index, place / "i"))
    monkeypatch.chdir(place)
    yield copied
    shutil.rmtree(place)


def rank(folder: Path, codec: str, verify: Any) -> Ranking:
    """What searches of an index find, from its files to pids and scores."""
    index = read_index(folder, verify=verify)
    pq = read_pq(index, verify=verify) if codec == "pq" else None
    engine = SearchEngine(load_resident(index, "cpu", codec=codec, pq=pq, progress=False))
    found = []
    for mode in ("plaid", "exhaustive"):
        for Q in QUERIES:
            pids, scores = engine.search(Q, with_defaults(10, mode=mode))
            found.append((pids.tolist(), scores.tolist()))
    return found


def refusal(folder: Path, codec: str, verify: str) -> str | Ranking:
    fingerprint(folder)  # as a scorer does before it reads anything
    try:
        return rank(folder, codec, verify)
    except ValueError as error:
        return str(error)


def check_form(message: str, folder: Path) -> None:
    assert re.match(rf"{re.escape(str(folder))}(/[^:]+)?: [^:]+: expected .+, got .+", message, re.DOTALL), message


# How files are changed.


def at(folder: Path, name: str) -> Path:
    return next(folder.glob(name)) if "*" in name else folder / name


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


def save(name: str, change: Callable[[Any], Any]) -> Do:
    """A tensor file written anew by torch.save, so that zip and checksums are right."""
    return lambda folder: torch.save(change(load(folder / name)), folder / name)


def put(where: Any, value: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[where] = value
        return tensor

    return change


def of(at: int, change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    return lambda pair: tuple(change(value) if i == at else value for i, value in enumerate(pair))


def edit(name: str, change: Callable[[Any], Any]) -> Do:
    """A JSON file with its value changed in place, or replaced by what ``change`` returns."""

    def do(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        changed = change(value)
        (folder / name).write_text(json.dumps(value if changed is None else changed))

    return do


def key(path: str, value: Any) -> Callable[[Any], None]:
    def change(held: Any) -> None:
        *above, last = path.split(".")
        for part in above:
            held = held[part]
        if value is MISSING:
            del held[last]
        else:
            held[last] = value

    return change


def write(name: str, content: bytes) -> Do:
    return lambda folder: at(folder, name).write_bytes(content)


def unlink(*names: str) -> Do:
    return both(*(lambda folder, name=name: at(folder, name).unlink() for name in names))


def zeros(name: str) -> Do:
    return lambda folder: (folder / name).write_bytes(bytes((folder / name).stat().st_size))


def copy(name: str, to: str) -> Do:
    return lambda folder: shutil.copy(folder / name, folder / to)


def link_to(target: str) -> Callable[[Path], object]:
    return lambda file: file.symlink_to(target)


def cut(name: str, share: float, but: int = 0) -> Do:
    def do(folder: Path) -> None:
        file = at(folder, name)
        os.truncate(file, max(0, int(file.stat().st_size * share) - but))

    return do


def flip(name: str, place: float, bit: int) -> Do:
    """place: in [0, 1) a share of the file, else a byte, from the end if negative."""

    def do(folder: Path) -> None:
        file = at(folder, name)
        content = bytearray(file.read_bytes())
        content[int(place * len(content)) if 0 <= place < 1 else int(place)] ^= 1 << bit
        file.write_bytes(content)

    return do


def swap(a: str, b: str) -> Do:
    def do(folder: Path) -> None:
        (folder / a).rename(folder / "swapped")
        (folder / b).rename(folder / a)
        (folder / "swapped").rename(folder / b)

    return do


def link_out(name: str) -> Do:
    """The same content, but through a link to outside the folder."""

    def do(folder: Path) -> None:
        file = at(folder, name)
        moved = folder.parent / file.name
        file.rename(moved)
        file.symlink_to(moved)

    return do


def instead(name: str, make: Callable[[Path], object]) -> Do:
    def do(folder: Path) -> None:
        file = at(folder, name)
        file.unlink()
        make(file)

    return do


def entry(name: str, record: str, field: int, value: bytes) -> Do:
    """Bytes of the directory entry of a record of a zip; field: their offset in the entry."""

    def do(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        start = content.rfind(record.encode()) - 46 - len(name.removesuffix(".pt") + "/")
        assert content[start : start + 4] == b"PK\1\2"
        content[start + field : start + field + len(value)] = value
        (folder / name).write_bytes(content)

    return do


def rezip(name: str, change: Callable[[dict[str, bytes]], dict[str, bytes]], method: int = zipfile.ZIP_STORED) -> Do:
    def do(folder: Path) -> None:
        with zipfile.ZipFile(folder / name) as zipped:
            records = {info.filename: zipped.read(info) for info in zipped.infolist()}
        with zipfile.ZipFile(folder / name, "w", method) as zipped:
            for record, content in change(records).items():
                zipped.writestr(record, content)

    return do


def pickled(change: Callable[[bytes], bytes]) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda records: {name: change(x) if name.endswith("data.pkl") else x for name, x in records.items()}


def tensors(**changes: Callable[[Tensor], Tensor | None]) -> Do:
    """The sidecar's tensors, some of them others; ``new`` makes one more."""

    def do(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = at(folder, "pq8.*.safetensors")
        held = load_file(file)
        held = {name: held.get(name, torch.zeros(1)) for name in (*held, *(["new"] if "new" in changes else []))}
        made = {name: changes.get(name, lambda x: x)(tensor) for name, tensor in held.items()}
        save_file({name: tensor.contiguous() for name, tensor in made.items() if tensor is not None}, file)

    return do


def header(change: Callable[[dict[str, Any]], object]) -> Do:
    """The JSON header of the sidecar's safetensors file."""

    def do(folder: Path) -> None:
        file = at(folder, "pq8.*.safetensors")
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        value = json.loads(content[8 : 8 + length])
        change(value)
        text = json.dumps(value).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return do


def both(*steps: Do) -> Do:
    return lambda folder: [step(folder) for step in steps]


class Call:
    """A pickle of this calls ``function`` where it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class _Missing:
    """Its name is in the names of tests, the same in every process."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Any = _Missing()
NAN, INF = float("nan"), float("inf")
OWNED = Call(os.system, "echo owned > owned")
PAYLOADS: dict[str, Callable[[Path], object]] = {
    "zip": lambda file: torch.save(OWNED, file),
    "in a list": lambda file: torch.save([torch.zeros(3), OWNED], file),
    "beside tensors": lambda file: torch.save((torch.zeros(3), {"x": OWNED}), file),
    "eval": lambda file: torch.save(Call(eval, "open('owned', 'w')"), file),
    "import": lambda file: torch.save(Call(__import__, "antigravity"), file),
    "legacy": lambda file: torch.save(OWNED, file, _use_new_zipfile_serialization=False),
    "protocol 0": lambda file: file.write_bytes(pickle.dumps(OWNED, 0)),
    "protocol 4": lambda file: file.write_bytes(pickle.dumps(OWNED, 4)),
    "zip, protocol 4": lambda file: torch.save(OWNED, file, pickle_protocol=4),
}


def mutations() -> Iterator[Mutation]:
    everywhere = (*STOCK, *SIDECAR)
    for name in everywhere:
        shown = name.replace("*", "X")
        for share in (0.0, 0.3, 0.7):
            yield Mutation(f"{shown} cut to {share:.0%}", cut(name, share), shown, "content")
        yield Mutation(f"{shown} without its last byte", cut(name, 1, 1))
        missing = Mutation(f"{shown} missing", unlink(name), shown, "file")
        if name == "pq8.json":
            missing = Mutation(missing.name, missing.do, "", "PQ sidecar")
        yield missing
        yield Mutation(f"{shown} linked out of the folder", link_out(name), shown, "file")
    for name in PT:
        yield Mutation(f"{name} as zeros", zeros(name), name)
        # Two bits each in the local header, the pickle, the data, the directory and the end.
        for place in (3, 40, 130, 200, 0.5, -400, -300, -140, -90, -50, -10):
            yield Mutation(f"{name} bit flipped at {place}", flip(name, place, int(abs(place * 10)) % 8))
    for name in (*JSON, "pq8.json"):
        for place in (0, 0.1, 0.4, 0.8):
            yield Mutation(f"{name} bit flipped at {place}", flip(name, place, int(place * 10) % 7))
    for place in (0, 6, 9, 40, 0.2, 0.9):
        yield Mutation(f"pq8.X.safetensors bit flipped at {place}", flip("pq8.*.safetensors", place, 2))
    for kind, make in PAYLOADS.items():
        for name in ("centroids.pt", "1.codes.pt", "ivf.pid.pt", "pq8.*.safetensors"):
            shown = name.replace("*", "X")
            yield Mutation(f"{shown} a payload: {kind}", instead(name, make), shown, "content")
    yield Mutation(
        "avg_residual.pt a payload", instead("avg_residual.pt", PAYLOADS["zip"]), "avg_residual.pt", "content"
    )

    yield from of_places()
    yield from of_metadata()
    yield from of_chunks()
    yield from of_tensors()
    yield from of_archives()
    yield from of_lists()
    yield from of_sidecars()


def of_places() -> Iterator[Mutation]:
    """What lies where a file is expected."""
    inside = both(lambda f: (f / "0.codes.pt").rename(f / "inside"), lambda f: (f / "0.codes.pt").symlink_to("inside"))
    yield Mutation("0.codes.pt linked inside the folder", inside, harmless=True)
    for name, target in (("ivf.pid.pt", "nowhere"), ("buckets.pt", "buckets.pt")):
        yield Mutation(f"{name} linked to {target}", instead(name, link_to(target)), name, "file")
    device = instead("doclens.0.json", link_to("/dev/zero"))
    yield Mutation("doclens.0.json linked to a device", device, "doclens.0.json", "file")
    up = instead("metadata.json", link_to("../../../../../../etc/passwd"))
    yield Mutation("metadata.json linked upwards", up, "metadata.json", "file")
    for name in ("metadata.json", "1.residuals.pt", "pq8.json"):
        yield Mutation(f"{name} a folder", instead(name, Path.mkdir), name, "file")
        yield Mutation(f"{name} a pipe", instead(name, os.mkfifo), name, "file")
    yield Mutation("plan.json missing", unlink("plan.json"), harmless=True)
    yield Mutation("plan.json broken", write("plan.json", b"{"), harmless=True)
    more = both(lambda f: (f / "notes.txt").write_text("x"), lambda f: (f / "9.metadata.json").write_text("x"))
    yield Mutation("other files in the folder", more, harmless=True)
    old = both(lambda f: (f / "ivf.pid.pt").rename(f / "ivf.pt"))
    yield Mutation("only ivf.pt", old, harmless=True)
    yield Mutation("a payload in an unread ivf.pt", lambda f: PAYLOADS["zip"](f / "ivf.pt"), harmless=True)
    dangling = both(lambda f: (f / "ivf.pid.pt").rename(f / "ivf.pt"), lambda f: (f / "ivf.pid.pt").symlink_to("x"))
    yield Mutation("ivf.pid.pt linked to nothing beside ivf.pt", dangling, "ivf.pid.pt", "file")


def of_metadata() -> Iterator[Mutation]:
    name = "metadata.json"
    value: Any
    for content in (b"null", b"[]", b'"x"', b"{}{}", b'{"config": NaN}', b"\xff\xfe{\0}\0", b"[" * 100_000, b"{}"):
        yield Mutation(f"{name} as {content[:20]!r}", write(name, content), name)
    for value in (None, [], "x", 5, MISSING):
        yield Mutation(f"{name} config {value!r:.20}", edit(name, key("config", value)), name, "config")
    for value in (0, 3, 16, -2, 2**70, 2.0, "2", True, None, [2], MISSING):
        yield Mutation(f"{name} nbits {value!r:.20}", edit(name, key("config.nbits", value)), name, "config.nbits")
    for value in (0, -32, 31, 32.0, "32", True, None, {}, MISSING):
        yield Mutation(f"{name} dim {value!r:.20}", edit(name, key("config.dim", value)), name, "config.dim")
    for value in (16, 64, 2**40, 2**80):
        yield Mutation(f"{name} dim {value}", edit(name, key("config.dim", value)), "centroids.pt", "centroids")
    for value in (1, 4):
        yield Mutation(f"{name} nbits {value}", edit(name, key("config.nbits", value)), "buckets.pt", "bucket_cutoffs")
    for value in (0, -1, 2, 4, 10**15, 3.0, "3", False, None, MISSING):
        yield Mutation(f"{name} num_chunks {value!r:.20}", edit(name, key("num_chunks", value)), name, "num_chunks")
    for value in (23, -24, 10**15, "24", None):
        change = edit(name, key("num_partitions", value))
        yield Mutation(f"{name} num_partitions {value!r:.20}", change, name, "num_partitions")
    for path, value in (("num_embeddings", 10**15), ("num_embeddings", "x"), ("avg_doclen", -1), ("x", [[]])):
        yield Mutation(f"{name} {path} {value!r}, which nobody reads", edit(name, key(path, value)), harmless=True)


def of_chunks() -> Iterator[Mutation]:
    for first, second in ((0, 1), (1, 2), (0, 2)):
        for kind in PER_CHUNK:
            a, b = kind.format(first), kind.format(second)
            yield Mutation(f"{a} swapped with {b}", swap(a, b))
        whole = both(*(swap(kind.format(first), kind.format(second)) for kind in PER_CHUNK))
        yield Mutation(f"chunks {first} and {second} swapped", whole, f"{first}.metadata.json", "passage_offset")
        tensor_files = both(*(swap(kind.format(first), kind.format(second)) for kind in PER_CHUNK[:2]))
        yield Mutation(f"codes and residuals of {first} and {second} swapped", tensor_files)
    for more in ("3", "00", "01", "\u0663", "7", "99999999999999999999"):
        another_chunk = copy("0.codes.pt", f"{more}.codes.pt")
        yield Mutation(f"another chunk {more!a}", another_chunk, "metadata.json", "num_chunks")
    twice = both(*(copy(kind.format(2), kind.format(3)) for kind in PER_CHUNK))
    yield Mutation("the last chunk twice", twice, "metadata.json", "num_chunks")
    counted = both(twice, edit("metadata.json", key("num_chunks", 4)))
    yield Mutation("the last chunk twice, and counted", counted, "3.metadata.json", "passage_offset")
    for kept, last in ((2, 2), (0, 0)):
        gone = unlink(*(kind.format(last) for kind in PER_CHUNK))
        yield Mutation(f"chunk {last} missing", gone, "metadata.json", "num_chunks")
        fewer = both(gone, edit("metadata.json", key("num_chunks", 2)))
        yield Mutation(f"chunk {last} missing, and not counted", fewer, "ivf.pid.pt" if kept else "metadata.json")

    name = "1.metadata.json"
    for field, values in (
        ("passage_offset", (0, 31, -32, 2**63, 32.0, "32", None, MISSING)),
        ("num_passages", (31, 33, -32, 2**63, 32.0, True, None, MISSING)),
        ("num_embeddings", (0, -1, 10**15, 1.5, "x", None, MISSING)),
    ):
        for value in values:
            yield Mutation(f"{name} {field} {value!r:.20}", edit(name, key(field, value)), name, field)
    yield Mutation(
        f"{name} embedding_offset, which nobody reads", edit(name, key("embedding_offset", -1)), harmless=True
    )
    yield Mutation(f"{name} a list", write(name, b"[1]"), name, "content")

    name = "doclens.1.json"
    changes: dict[str, Callable[[list[int]], Any]] = {
        "negative": lambda x: [-1, x[0] + x[1] + 1, *x[2:]],
        "one more token": lambda x: [x[0] + 1, *x[1:]],
        "one passage less": lambda x: x[:-1],
        "huge": lambda x: [2**31, *x[1:]],
        "beyond 64 bits": lambda x: [2**64 + x[0], *x[1:]],
        "sum that wraps": lambda x: [2**63, 2**63, *x],
        "beyond all digits": lambda x: [10**300, *x[1:]],
        "a float": lambda x: [float(x[0]), *x[1:]],
        "a boolean": lambda x: [*x, True],
        "a string": lambda x: [str(x[0]), *x[1:]],
        "null": lambda x: [*x, None],
        "nested": lambda x: [x],
        "infinite": lambda x: [*x, INF],
        "an object": lambda x: {"0": x},
        "empty": lambda x: [],
    }
    for what, change in changes.items():
        yield Mutation(f"{name} {what}", edit(name, change), name)
    empty_passage = edit(name, lambda x: [*x, 0])
    yield Mutation(f"{name} an empty passage more", empty_passage, "1.metadata.json", "num_passages")
    backwards = edit(name, lambda x: x[::-1])
    yield Mutation(f"{name} backwards", backwards, "ivf.pid.pt", "pids of centroid ")
    for content in (b"1" * 10_000, b"[1e400]", b"[1,]", b"\xef\xbb\xbf[]", b"[0]\n\0"):
        yield Mutation(f"{name} as {content[:10]!r}", write(name, content), name)


def of_tensors() -> Iterator[Mutation]:
    name = "centroids.pt"
    for value in (NAN, INF, -INF):
        yield Mutation(f"{name} {value}", save(name, put((3, 5), value)), name, "centroids")
    for what, change in {
        "fp32": Tensor.float, "int16": lambda x: x.view(torch.int16), "bf16": Tensor.bfloat16,
        "complex": lambda x: x.to(torch.complex64), "flat": lambda x: x.view(-1), "transposed": lambda x: x.T,
        "one dimension less": lambda x: x[:, 1:].clone(), "strided": lambda x: x.T.contiguous().T,
        "a list": lambda x: [x], "a dict": lambda x: {"x": x}, "None": lambda x: None, "a number": lambda x: 5,
        "empty rows": lambda x: x[:, :0],
        "one row for all": lambda x: x[:1].expand(C, DIM), "sparse": Tensor.to_sparse, "meta": lambda x: x.to("meta"),
        "quantised": lambda x: torch.quantize_per_tensor(x.float(), 1, 0, torch.qint8),
        "a parameter": torch.nn.Parameter, "negated lazily": lambda x: torch._neg_view(x),
    }.items():  # fmt: skip
        yield Mutation(f"{name} {what}", save(name, change), name)
    for what, change in {
        "fewer": lambda x: x[:-1].clone(),
        "more": lambda x: x.repeat(2, 1),
        "none": lambda x: x[:0],
    }.items():
        yield Mutation(f"{name} {what} rows", save(name, change), "metadata.json", "num_partitions")

    name = "buckets.pt"
    for at, field in ((0, "bucket_cutoffs"), (1, "bucket_weights")):
        for what, change in {
            "NaN": put(1, NAN), "infinite": put(0, -INF), "beyond fp16": put(-1, 1e38),
            "descending": lambda x: x.flip(0),
            "fp64": Tensor.double, "int64": Tensor.long, "one less": lambda x: x[1:], "2-d": lambda x: x[None],
            "strided": lambda x: x.repeat_interleave(2)[::2], "a list": Tensor.tolist,
        }.items():  # fmt: skip
            yield Mutation(f"{name} {field} {what}", save(name, of(at, change)), name, field)
    for what, change in {
        "one": lambda x: x[0],
        "three": lambda x: (*x, x[0]),
        "none": lambda x: (),
        "swapped": lambda x: x[::-1],
    }.items():
        yield Mutation(f"{name} {what}", save(name, change), name)

    name = "avg_residual.pt"
    for what, change in {
        "NaN": lambda x: x * NAN, "infinite": lambda x: x * INF, "of two": lambda x: x.repeat(2), "int64": Tensor.long,
        "a number": float, "expanded": lambda x: x.expand(DIM), "2-d": lambda x: x.view(1, 1),
    }.items():  # fmt: skip
        yield Mutation(f"{name} {what}", save(name, change), name, "avg_residual")
    yield Mutation(f"{name} another value, which nobody reads", save(name, lambda x: x + 1), harmless=True)

    name = "1.codes.pt"
    for value in (C, -1, 2**31 - 1, -(2**31)):
        yield Mutation(f"{name} {value}", save(name, put(7, value)), name, "codes")
    yield Mutation(f"{name} another code", save(name, lambda x: put(7, (x[7] + 1) % (C - 1))(x)), "ivf.pid.pt")
    yield Mutation(f"{name} sorted", save(name, lambda x: x.sort().values), "ivf.pid.pt", "pids of centroid ")
    for what, change in {
        "int64": Tensor.long, "int16": Tensor.short, "float32": Tensor.float, "2-d": lambda x: x[:, None],
        "0-d": lambda x: x[0], "strided": lambda x: x.repeat_interleave(2)[::2],
        "one for all": lambda x: x[:1].expand(len(x)),
        "a pair": lambda x: (x, x),
    }.items():  # fmt: skip
        yield Mutation(f"{name} {what}", save(name, change), name, "codes")
    for what, change in {
        "none": lambda x: x[:0],
        "one less": lambda x: x[:-1],
        "one more": lambda x: torch.cat((x, x[:1])),
    }.items():
        yield Mutation(f"{name} {what}", save(name, change), "1.residuals.pt", "residuals")
    yield Mutation(f"{name} a slice of more", save(name, lambda x: torch.cat((x, x))[: len(x)]), harmless=True)

    name = "1.residuals.pt"
    for what, change in {
        "int8": lambda x: x.to(torch.int8), "bool": Tensor.bool, "int32": Tensor.int,
        "narrower": lambda x: x[:, :4].clone(), "wider": lambda x: x.repeat(1, 2), "flat": lambda x: x.view(-1),
        "one row less": lambda x: x[1:], "one for all": lambda x: x[:1].expand(x.shape),
        "transposed": lambda x: x.T, "strided": lambda x: x.repeat(1, 2)[:, : x.size(1)], "none": lambda x: x[:0],
    }.items():  # fmt: skip
        yield Mutation(f"{name} {what}", save(name, change), name, "residuals")


def of_archives() -> Iterator[Mutation]:
    """Zips and pickles that torch would take, or would have to be stopped at."""
    name = "1.codes.pt"
    for what, do in {
        "deflated": rezip(name, dict, zipfile.ZIP_DEFLATED),
        "with a record twice": rezip(name, lambda x: x | {k.upper(): v for k, v in x.items() if k.endswith(".pkl")}),
        "of two folders": rezip(name, lambda x: x | {"other/data.pkl": b""}),
        "of TorchScript": rezip(name, lambda x: x | {"1.codes/constants.pkl": pickle.dumps(OWNED)}),
        "without a pickle": rezip(name, lambda x: {k: v for k, v in x.items() if "pkl" not in k}),
        "with a pickle of other bytes": rezip(name, pickled(lambda x: b"\x80\x02" + bytes(100))),
        "with a pickle that does not end": rezip(name, pickled(lambda x: x[:-1])),
        "with a pickle of a megabyte": rezip(name, pickled(lambda x: x[:-1] + b"0N" * (1 << 19) + b".")),
        "with an unknown pickle opcode": rezip(name, pickled(lambda x: x[:2] + b"\x82\x01" + x[2:])),
        "without data": rezip(name, lambda x: {k: v for k, v in x.items() if "/data/" not in k}),
        "of version 99": rezip(name, lambda x: x | {"1.codes/version": b"99\n"}),
        "with a comment": lambda f: (f / name).write_bytes((f / name).read_bytes()[:-2] + b"\1\0x"),
        "with bytes behind it": lambda f: (f / name).write_bytes((f / name).read_bytes() + b"x"),
        "with bytes before it": lambda f: (f / name).write_bytes(b"x" + (f / name).read_bytes()),
        "in a zip": lambda f: (f / name).write_bytes(zipped((f / name).read_bytes())),
        "encrypted": entry(name, "data/0", 8, b"\1"),
        "of method 12": entry(name, "data/0", 10, b"\14"),
        "of no signature": entry(name, "data/0", 0, b"XX"),
        "of names too long": entry(name, "data/0", 28, b"\xff\xff"),
        "of data elsewhere": entry(name, "data/0", 42, b"\x10\0\0\0"),
        "of data beyond the end": entry(name, "data/0", 42, b"\xff\xff\xff\x7f"),
        "in the legacy form": lambda f: torch.save(load(f / name), f / name, _use_new_zipfile_serialization=False),
    }.items():  # fmt: skip
        yield Mutation(f"{name} {what}", do, name, "content")
    crc = Mutation(f"{name} of another checksum", entry(name, "data/0", 16, b"\0\0\0\0"), name, "1.codes/data/0")
    yield crc
    yield Mutation(f"{name} of other times", entry(name, "data/0", 12, b"\1\1\1\1"), harmless=True)
    other = "1.residuals.pt"
    yield Mutation(f"{other} zipped by another program", rezip(other, dict), harmless=True)
    yield Mutation(f"{other} in place of codes", lambda f: shutil.copy(f / other, f / name), name, "codes")
    yield Mutation(
        "a JSON file in place of codes", lambda f: shutil.copy(f / "metadata.json", f / name), name, "content"
    )


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as outer:
        outer.writestr("1.codes.pt", content)
    return file.getvalue()


def of_lists() -> Iterator[Mutation]:
    name = "ivf.pid.pt"
    for what, at, change, field in (
        ("beyond the passages", 0, put(4, N), "pids"),
        ("negative", 0, put(4, -1), "pids"),
        ("descending", 0, lambda x: x.flip(0), "pids of centroid 0"),
        ("twice", 0, lambda x: torch.cat((x[:1], x[:-1])), "pids of centroid 0"),
        ("another passage", 0, lambda x: another(x), "pids of centroid 0"),
        ("too few", 0, lambda x: x[:50], "lengths"),
        ("none", 0, lambda x: x[:0], "lengths"),
        ("fp32", 0, Tensor.float, "pids"),
        ("int16", 0, Tensor.short, "pids"),
        ("2-d", 0, lambda x: x[None], "pids"),
        ("strided", 0, lambda x: x.repeat_interleave(2)[::2], "pids"),
        ("64 bits that wrap", 0, lambda x: x.long() + 2**32, "pids"),
        ("list", 0, Tensor.tolist, "pids"),
        ("lengths negative", 1, put(0, -1), "lengths"),
        ("lengths beyond the passages", 1, put(0, N + 1), "lengths"),
        ("lengths of 2**62", 1, put(0, 2**62), "lengths"),
        ("lengths that wrap", 1, lambda x: torch.full_like(x, 2**62), "lengths"),
        ("lengths of everything", 1, lambda x: torch.full_like(x, N), "lengths"),
        ("lengths one less", 1, lambda x: x[:-1], "lengths"),
        ("lengths one more", 1, lambda x: torch.cat((x, x[:1])), "lengths"),
        ("lengths fp32", 1, Tensor.float, "lengths"),
        ("lengths int8", 1, lambda x: x.to(torch.int8), "lengths"),
        ("lengths moved", 1, lambda x: put(1, x[1] - 1)(put(0, x[0] + 1)(x)), "pids of centroid "),
        ("lengths that end early", 1, lambda x: put(C - 2, x[C - 2] - 1)(x), f"pids of centroid {C - 2}"),
        ("lengths of no list", 1, torch.zeros_like, "pids of centroid "),
        ("lengths reversed", 1, lambda x: x.flip(0), "pids of centroid "),
    ):
        yield Mutation(f"{name} {what}", save(name, of(at, change)), name, field)
    for what, change in {
        "one": lambda x: x[0],
        "three": lambda x: (*x, x[0]),
        "swapped": lambda x: x[::-1],
        "none": lambda x: [],
    }.items():
        yield Mutation(f"{name} {what} of the pair", save(name, change), name)
    tail = save(name, lambda x: (put(slice(int(x[1].sum()), None), -7)(x[0]), x[1]))
    yield Mutation(f"{name} garbage behind the lists", tail, harmless=True)
    yield Mutation(f"{name} 64 bits", save(name, lambda x: (x[0].long(), x[1].int())), harmless=True)


def another(pids: Tensor) -> Tensor:
    """The first pid of the first list replaced by one that keeps it ascending, but is not in it."""
    return put(0, int(pids[0]) - 1 if pids[0] > 0 else int(pids[1]) - 1)(pids)


def of_sidecars() -> Iterator[Mutation]:
    value: Any
    name, data = "pq8.json", "pq8.X.safetensors"
    for path, values in (
        ("version", (2, True, "1", MISSING)),
        ("m", (16, 8.0, None, MISSING)),
        ("dim", (64, 0, "32", MISSING)),
        ("num_passages", (N + 1, -1, True)),
        ("num_tokens", (1, 10**15, None)),
        ("opq", (1, "no", None)),
        ("index", ({}, None, {"digest": "0" * 64})),
        ("tensors.file", ("../x.safetensors", "/etc/passwd", "pq8.json", None)),
        ("tensors.sha256", ({}, [], {"codes": 5})),
    ):
        for value in values:
            yield Mutation(f"{name} {path} {value!r:.30}", edit(name, key(path, value)), name, path)
    other = both(edit(name, key("index.digest", "0" * 64)), edit(name, key("index.sha256", "1" * 64)))
    yield Mutation(f"{name} of another index", other, name, "index")
    yield Mutation(f"{name} of files with other times", edit(name, key("index.digest", "0" * 64)), harmless=True)
    stale = save("2.residuals.pt", put((0, 0), 0))
    yield Mutation(f"{name} older than the residuals", stale, name, "index")
    yield Mutation(f"{name} older than the centroids", save("centroids.pt", lambda x: x / 2), name, "index")
    yield Mutation(f"{name} says OPQ", edit(name, key("opq", True)), name, "tensors.sha256")
    yield Mutation(f"{name} training, which nobody reads", edit(name, key("training", "x")), harmless=True)
    gone = edit(name, key("tensors.file", "pq8.00000000.safetensors"))
    yield Mutation(f"{name} of tensors that are not there", gone, "pq8.00000000.safetensors", "file")
    for record in ("codes", "codebook"):
        yield Mutation(
            f"{name} sha256 of {record}", edit(name, key(f"tensors.sha256.{record}", "0" * 64)), data, record
        )
    for what, changes in {
        "NaN": {"codebook": lambda x: x * NAN}, "fp32": {"codebook": Tensor.float},
        "of 255": {"codebook": lambda x: x[:, :255]}, "doubled": {"codebook": lambda x: x * 2},
        "gone": {"codebook": lambda x: None}, "flat": {"codebook": lambda x: x.view(-1)},
    }.items():  # fmt: skip
        yield Mutation(f"{data} codebook {what}", tensors(**changes), data, "tensors" if what == "gone" else "codebook")
    for what, change in {
        "int32": Tensor.int, "one row less": lambda x: x[1:], "one row more": lambda x: torch.cat((x, x[:1])),
        "narrower": lambda x: x[:, :4], "transposed": lambda x: x.T, "others": lambda x: x + 1,
        "of another order": lambda x: x.flip(0),
    }.items():  # fmt: skip
        yield Mutation(f"{data} codes {what}", tensors(codes=change), data, "codes")
    yield Mutation(f"{data} codes gone", tensors(codes=lambda x: None), data, "tensors")
    yield Mutation(f"{data} one tensor more", tensors(new=lambda x: x), data, "tensors")
    for what, change in {
        "offsets that overlap": lambda h: h["codes"].update(data_offsets=h["codebook"]["data_offsets"]),
        "offsets beyond the end": lambda h: h["codes"].update(data_offsets=[0, 2**50]),
        "offsets backwards": lambda h: h["codes"]["data_offsets"].reverse(),
        "another shape": lambda h: h["codes"].update(shape=[M, h["codes"]["shape"][0]]),
        "a shape that overflows": lambda h: h["codes"].update(shape=[2**33, 2**33]),
        "an unknown dtype": lambda h: h["codes"].update(dtype="X8"),
        "a negative shape": lambda h: h["codes"].update(shape=[-1, M]),
        "another dtype": lambda h: h["codebook"].update(dtype="BF16"),
    }.items():  # fmt: skip
        yield Mutation(f"{data} {what}", header(change), data)


# Claims: numbers that would have much allocated, with few bytes behind them, or with a file's holes alone.

BIG = 2**38
# A private map needs that much memory and swap, though it touches none of it.
HOLE = 2**31


@dataclass(frozen=True)
class Storage:
    kind: Any
    key: str
    count: int


class TensorPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", value.kind, value.key, "cpu", value.count) if isinstance(value, Storage) else None


def tensor(
    kind: Any, *shape: int, key: str = "0", count: int | None = None, start: int = 0, stride: Any = None
) -> Call:
    """What torch.save pickles for a tensor, but of any numbers."""
    strides = tuple(torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))) if stride is None else stride
    storage = Storage(kind, key, torch.Size(shape).numel() if count is None else count)
    return Call(torch._utils._rebuild_tensor_v2, storage, start, shape, strides, False, OrderedDict())


def archive(name: str, value: Any, *sizes: int, stated: int | None = None, head: tuple[bytes, ...] = ()) -> Do:
    """A zip as of torch.save of a pickle of ``value`` and data records of ``sizes`` bytes: ``head``, then a hole.

    stated: their size in the directory, if another.
    """

    def do(folder: Path) -> None:
        pickled = io.BytesIO()
        TensorPickler(pickled, 2, fix_imports=False).dump(value)
        heads = dict(enumerate(head))
        records = [("x/data.pkl", pickled.getvalue(), 0), ("x/version", b"3\n", 0)]
        records += [(f"x/data/{i}", heads.get(i, b""), size) for i, size in enumerate(sizes or (64,))]
        directory = b""
        with (folder / name).open("wb") as out:
            for record, content, hole in records:
                size = max(len(content), hole)
                start, crc = out.tell(), zlib.crc32(content)
                pad = bytes(-(start + 30 + len(record)) % 64)
                local = (20, 0, 0, 0, 0, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(record), len(pad))
                out.write(struct.pack("<4s5H3I2H", b"PK\3\4", *local) + record.encode() + pad + content)
                out.seek(size - len(content), os.SEEK_CUR)
                said = stated if hole and stated else size
                extra = struct.pack("<2H3Q", 1, 24, said, said, start)
                entry = (20, 20, 0, 0, 0, 0, crc, *[0xFFFFFFFF] * 2, len(record), len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
                directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *entry) + record.encode() + extra
            start = out.tell()
            end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 20, 20, 0, 0, *[len(records)] * 2, len(directory), start)
            end += struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
            out.write(directory + end + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0))

    return do


def sparse(name: str) -> Do:
    return lambda folder: os.truncate(at(folder, name), BIG)


def header_of(length: int) -> Do:
    def do(folder: Path) -> None:
        file = at(folder, "pq8.*.safetensors")
        file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])

    return do


def inflating(record: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda held: held | {name: bytes(1 << 27) for name in held if name.endswith(record)}


def nested(levels: int) -> Any:
    """A tuple that takes few bytes in a pickle, and 2**levels if anything looks at all of it."""
    value: Any = ()
    for _ in range(levels):
        value = (value, value)
    return value


def claims() -> Iterator[Mutation]:
    codes, residuals, ivf = "0.codes.pt", "0.residuals.pt", "ivf.pid.pt"
    int32, uint8, int64, half = torch.IntStorage, torch.ByteStorage, torch.LongStorage, torch.HalfStorage
    for what, value in {
        "a tensor": tensor(int32, BIG), "a tensor of a small storage": tensor(int32, BIG, count=16),
        "less than nothing": tensor(int32, 16, count=-16), "a start": tensor(int32, 16, start=BIG, count=16),
        "a start before": tensor(int32, 16, start=-4), "negative sizes": tensor(int32, -4, -4, count=16),
        "a stride": tensor(int32, 16, stride=(BIG,)), "another record": tensor(int32, 16, key="7"),
        "a record outside": tensor(int32, 16, key="../../version"),
        "bytes": Call(bytearray, 10**10), "a tensor made": Call(torch.Tensor, 10**10),
        "an empty tensor": Call(torch.empty, 10**10), "a counter": Call(Counter, "x" * 10), "a size": torch.Size([BIG]),
        "a long number": 1 << 3000, "a long text": "x" * (1 << 17), "nested tuples": nested(60),
    }.items():  # fmt: skip
        yield Mutation(f"{codes} claims {what}", archive(codes, value), codes)
    yield Mutation(
        f"{codes} claims one for all", archive(codes, tensor(int32, BIG, count=1, stride=(0,))), codes, "codes"
    )
    yield Mutation(f"{codes} claims a record", archive(codes, tensor(int32, 16), stated=BIG), codes, "content")
    yield Mutation(
        f"{codes} claims more than all", archive(codes, tensor(int32, 16), stated=2**63 + 9), codes, "content"
    )
    yield Mutation("buckets.pt nested tuples", archive("buckets.pt", nested(60)), "buckets.pt", "bucket_cutoffs")
    wide = archive("centroids.pt", tensor(half, 2**31, DIM))
    yield Mutation("centroids.pt claims rows", wide, "centroids.pt", "content")
    for record, name in (("data.pkl", codes), ("data/0", residuals)):
        bomb = rezip(name, inflating(record), zipfile.ZIP_DEFLATED)
        yield Mutation(f"{name} inflates {record}", bomb, name, "content")
    for name in (*JSON[:4], "pq8.json"):
        yield Mutation(f"{name} of holes", sparse(name), name, "content")
    for name in (*PT[:4], codes, "pq8.*.safetensors"):
        yield Mutation(f"{name.replace('*', 'X')} ends in a hole", sparse(name), name.replace("*", "X"), "content")
    for length in (0, 7, 99_000_000, 2**40, 2**64 - 1):
        yield Mutation(f"pq8.X.safetensors header of {length}", header_of(length), "pq8.X.safetensors", "content")

    # Files of holes as large as they say: mapped, not read.
    many = archive(codes, tensor(int32, HOLE // 4), HOLE)
    yield Mutation(f"{codes} with holes", many, residuals, "residuals")
    as_many = both(many, archive(residuals, tensor(uint8, HOLE // 4, DIM // 4), HOLE // 4 * DIM // 4))
    yield Mutation(f"{codes} and {residuals} with holes", as_many, "doclens.0.json", "doclens")
    rows = archive("centroids.pt", tensor(half, HOLE // (2 * DIM), DIM), HOLE)
    yield Mutation("centroids.pt with holes", rows, "metadata.json", "num_partitions")
    counted = both(rows, edit("metadata.json", key("num_partitions", HOLE // (2 * DIM))))
    yield Mutation("centroids.pt with holes, and counted", counted, ivf, "lengths")
    long = archive(ivf, (tensor(int32, 8), tensor(int64, HOLE // 8, key="1")), 32, HOLE)
    yield Mutation(f"{ivf} with holes for lengths", long, ivf, "lengths")

    def longer(folder: Path) -> None:
        head = tuple(x.numpy().tobytes() for x in load(folder / ivf))
        archive(ivf, (tensor(int32, HOLE // 4), tensor(int64, C, key="1")), HOLE, 8 * C, head=head)(folder)

    yield Mutation(f"{ivf} with holes behind the lists", longer, harmless=True)


CLAIMS = list(claims())


@contextmanager
def bounds(megabytes: int, seconds: float, mapped: bool) -> Iterator[None]:
    """Few megabytes are touched (by the peak of resident memory) and, unless holes are mapped, few are asked for."""
    clear = Path("/proc/self/clear_refs")
    if not os.access(clear, os.W_OK):
        pytest.skip("needs /proc/self/clear_refs, which resets the peak of resident memory")

    def status(name: str) -> int:
        return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) << 10

    limits = resource.getrlimit(resource.RLIMIT_AS)
    clear.write_text("5")
    before, began = status("VmHWM"), time.perf_counter()
    if not mapped:
        resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (megabytes << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert status("VmHWM") - before <= megabytes << 20
    assert time.perf_counter() - began <= seconds


QUERIES: list[Tensor] = []
MUTATIONS = list(mutations())


@pytest.fixture(scope="module", autouse=True)
def queries(index: Path) -> None:
    QUERIES[:] = make_queries(index, n=3, LQ=8)


def test_there_are_many_and_distinct() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 200


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_refused_or_harmless(
    mutation: Mutation, folder: Path, expected: dict[str, Ranking], capsys: pytest.CaptureFixture[str]
) -> None:
    mutation.do(folder)
    full, structure = (refusal(folder, mutation.codec, verify) for verify in ("full", "structure"))
    if isinstance(full, str):
        assert not mutation.harmless, full
        check_form(full, folder)
        file = re.escape(mutation.file).replace("X", "[0-9a-f]{8}")
        where = rf"{re.escape(str(folder))}/?{file}.*: {re.escape(mutation.field)}"
        assert re.match(where, full), full
        if mutation.field != "PQ sidecar":  # an index may have none
            assert cli.main(["inspect", str(folder)]) == 2
            assert full.partition(", got ")[0] in capsys.readouterr().err
    else:
        assert not mutation.file
        assert full == expected[mutation.codec]
    if isinstance(structure, str):
        check_form(structure, folder)
        assert isinstance(full, str)
    assert not Path("owned").exists()
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("mutation", CLAIMS, ids=[mutation.name for mutation in CLAIMS])
def test_nothing_is_allocated_from_claims(mutation: Mutation, folder: Path, expected: dict[str, Ranking]) -> None:
    mutation.do(folder)
    with bounds(32, 2, mapped=" with holes" in mutation.name or "safetensors" in mutation.name):
        found = refusal(folder, mutation.codec, "structure")
    if mutation.harmless:
        assert found == expected[mutation.codec]
        return
    assert isinstance(found, str)
    check_form(found, folder)
    named, _, got = found.removeprefix(f"{folder}/").partition(": ")
    assert re.fullmatch(re.escape(mutation.file).replace("X", "[0-9a-f]{8}"), named), found
    assert got.startswith(mutation.field), found
    assert not re.search("alloc|memory", got, re.IGNORECASE), found


def test_the_bounds_of_claims_see_memory(expected: dict[str, Ranking]) -> None:
    # more than earlier tests can have left to the allocator
    with pytest.raises(AssertionError), bounds(32, 2, mapped=True):
        torch.ones(1 << 28)
    with pytest.raises(RuntimeError, match="alloc"), bounds(32, 2, mapped=False):
        torch.empty(1 << 30)


def test_every_byte_of_a_tensor_file(folder: Path) -> None:
    """One bit of it flipped, it is refused or changes nothing that is read."""
    file = folder / "buckets.pt"
    content = file.read_bytes()
    cutoffs, weights = load(file)
    refused = 0
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        try:
            check_sums(file)
            found = files._check_buckets(files._load(file), 2, file)
        except ValueError as error:
            check_form(str(error), folder)
            refused += 1
            continue
        assert torch.equal(found[0], cutoffs)
        assert torch.equal(found[1], weights)
    # Most of the file is padding, which nobody reads.
    assert len(content) // 4 < refused < len(content)


def test_no_unpickler_in_the_code() -> None:
    """torch.load is weights_only everywhere, numpy.load takes no pickles, and nothing else reads any."""
    root = Path(files.__file__).parents[2]
    seen = 0
    for source in (*root.glob("plaid_tilemaxsim/**/*.py"), *root.glob("eval/**/*.py"), *root.glob("scripts/**/*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            where = f"{source}:{node.lineno}"
            assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load"), where
            if called == "torch.load":
                assert given.get("weights_only") == "True", where
                seen += 1
            if called in ("np.load", "numpy.load"):
                assert given.get("allow_pickle", "False") == "False", where
    assert seen >= 2
