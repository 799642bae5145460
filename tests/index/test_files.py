"""read_index: what stock writes is read exactly, and every damaged or hostile file is refused by name."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.lists import build_pid_lists
from tests.synthetic import make_index

N, C, DIM = 300, 40, 64


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chunks, some empty passages, the last centroid without a passage, a padded ivf."""
    return make_index(tmp_path_factory.mktemp("index") / "i", n=N, dim=DIM, nbits=2, C=C, empty=0.1)


@pytest.fixture
def folder(stock: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stock, tmp_path / "copy"))


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


def raw_pieces(folder: Path) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """codes, residuals and doclens of all chunks, read without the package."""
    codes = torch.cat([load(folder / f"{i}.codes.pt") for i in range(3)])
    residuals = torch.cat([load(folder / f"{i}.residuals.pt") for i in range(3)])
    doclens = [x for i in range(3) for x in json.loads((folder / f"doclens.{i}.json").read_text())]
    return codes, residuals, doclens


@pytest.mark.parametrize("verify", ["full", "structure"])
@pytest.mark.parametrize(("dim", "nbits"), [(64, 1), (128, 2), (96, 4), (64, 8), (384, 2), (8, 1)])
def test_reads_what_stock_wrote(tmp_path: Path, dim: int, nbits: int, verify: Any) -> None:
    folder = make_index(tmp_path / "i", n=N, dim=dim, nbits=nbits, C=C, empty=0.1)
    index = read_index(folder, verify=verify)
    codes, residuals, doclens = raw_pieces(folder)
    ivf, lengths = load(folder / "ivf.pid.pt")
    assert (index.dim, index.nbits, index.num_passages, index.num_centroids) == (dim, nbits, N, C)
    assert index.num_tokens == len(codes)
    assert 0 in doclens
    assert lengths[-1] == 0
    assert len(ivf) > lengths.sum()
    for got, expected in (
        (index.centroids, load(folder / "centroids.pt")),
        (index.bucket_cutoffs, load(folder / "buckets.pt")[0]),
        (index.bucket_weights, load(folder / "buckets.pt")[1]),
        (index.doclens, torch.tensor(doclens, dtype=torch.int32)),
        (index.offsets, torch.tensor([0, *doclens]).cumsum(0)),
        (index.ivf_pids, ivf[: lengths.sum()]),
        (index.ivf_offsets.diff(), lengths),
        (index.codes(), codes),
        (index.residuals(), residuals),
    ):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert [chunk.pid_start for chunk in index.chunks] == [0, 128, 256]
    assert [chunk.token_start for chunk in index.chunks] == index.offsets[[0, 128, 256]].tolist()
    assert residuals.size(1) == dim * nbits // 8
    assert index.nbytes == (
        codes.nbytes
        + residuals.nbytes
        + 4 * N
        + 8 * C
        + 2 * dim * C
        + 4 * int(lengths.sum())
        + 4 * (2 ** (nbits + 1) - 1)
    )


def test_one_chunk_is_not_copied(tmp_path: Path) -> None:
    index = read_index(make_index(tmp_path / "i", n=20, chunk_size=20))
    assert index.codes() is index.chunks[0].codes
    assert index.residuals() is index.chunks[0].residuals


def test_stock_reads_the_same_lists(stock: Path) -> None:
    codes, _, doclens = raw_pieces(stock)
    index = read_index(stock)
    owner = torch.arange(N).repeat_interleave(torch.tensor(doclens))
    for centroid in range(C):
        begin, end = index.ivf_offsets[centroid : centroid + 2].tolist()
        assert index.ivf_pids[begin:end].tolist() == sorted(set(owner[codes == centroid].tolist()))


@pytest.mark.parametrize("cuts", [[N], [0, 1, 1, 150, N], list(range(N + 1))])
def test_build_pid_lists(stock: Path, cuts: list[int]) -> None:
    index = read_index(stock)
    bounds = [0, *cuts]
    runs = [
        (index.codes()[index.offsets[a] : index.offsets[b]], index.doclens[a:b]) for a, b in itertools.pairwise(bounds)
    ]
    pids, offsets = build_pid_lists(runs, C)
    assert torch.equal(pids, index.ivf_pids)
    assert torch.equal(offsets, index.ivf_offsets)
    assert pids.dtype == torch.int32


def test_build_pid_lists_of_nothing() -> None:
    pids, offsets = build_pid_lists([], 3)
    assert pids.numel() == 0
    assert offsets.tolist() == [0, 0, 0, 0]


# Variants that stock, its updater and older versions leave behind, and that must be read.


def test_only_the_old_ivf(folder: Path) -> None:
    expected = read_index(folder)
    codes, _, _ = raw_pieces(folder)
    order = codes.sort(stable=True)
    torch.save((order.indices, torch.bincount(codes, minlength=C)), folder / "ivf.pt")
    (folder / "ivf.pid.pt").unlink()
    before = sorted(folder.iterdir())
    index = read_index(folder)
    assert torch.equal(index.ivf_pids, expected.ivf_pids)
    assert torch.equal(index.ivf_offsets, expected.ivf_offsets)
    assert sorted(folder.iterdir()) == before


def test_int64_ivf(folder: Path) -> None:
    expected = read_index(folder).ivf_pids.clone()
    ivf, lengths = load(folder / "ivf.pid.pt")
    torch.save((ivf.long(), lengths.int()), folder / "ivf.pid.pt")
    index = read_index(folder)
    assert index.ivf_pids.dtype == torch.int32
    assert torch.equal(index.ivf_pids, expected)


def test_garbage_in_the_tail_of_the_ivf(folder: Path) -> None:
    expected = read_index(folder).ivf_pids.clone()
    ivf, lengths = load(folder / "ivf.pid.pt")
    ivf[lengths.sum() :] = -7
    torch.save((ivf, lengths), folder / "ivf.pid.pt")
    assert torch.equal(read_index(folder).ivf_pids, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (DIM,)])
def test_average_residual(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.save(torch.full(shape, 0.02, dtype=dtype), folder / "avg_residual.pt")
    read_index(folder)


def test_weights_saved_by_a_gpu_in_fp16(folder: Path) -> None:
    cutoffs, weights = load(folder / "buckets.pt")
    torch.save((cutoffs, weights.half()), folder / "buckets.pt")
    index = read_index(folder)
    assert index.bucket_weights.dtype == torch.float32
    assert torch.equal(index.bucket_weights, weights.half().float())


def test_num_embeddings_of_the_updater(folder: Path) -> None:
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["num_embeddings"] *= 2
    (folder / "metadata.json").write_text(json.dumps(metadata))
    assert read_index(folder).num_tokens == metadata["num_embeddings"] // 2


def test_codes_saved_as_a_view(folder: Path) -> None:
    """The updater saves slices, and torch.save then writes the whole storage behind them."""
    expected = read_index(folder).codes().clone()
    codes, _, _ = raw_pieces(folder)
    n = len(load(folder / "0.codes.pt"))
    torch.save(codes[n : n + len(load(folder / "1.codes.pt"))], folder / "1.codes.pt")
    assert torch.equal(read_index(folder).codes(), expected)


def test_symbolic_links_as_in_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    """snapshots/<revision>/i/<file> -> blobs/<digest>; the same links from anywhere else leave the folder."""
    blobs, links = tmp_path / "blobs", tmp_path / "snapshots" / "0123" / "i"
    elsewhere = tmp_path / "i"
    expected = read_index(folder).codes().clone()
    folder.rename(blobs)
    for place in (links, elsewhere):
        place.mkdir(parents=True)
        for file in blobs.iterdir():
            (place / file.name).symlink_to(os.path.relpath(file, place))
    assert torch.equal(read_index(links).codes(), expected)
    with pytest.raises(ValueError, match=r"metadata\.json: file: expected a file of this folder, got a symbolic link"):
        read_index(elsewhere)


def test_all_passages_removed(tmp_path: Path) -> None:
    folder = make_index(tmp_path / "i", n=5, C=4, chunk_size=5)
    for name in ("0.codes.pt", "0.residuals.pt"):
        torch.save(load(folder / name)[:0], folder / name)
    (folder / "doclens.0.json").write_text("[0, 0, 0, 0, 0]")
    edit("0.metadata.json", set_at("num_embeddings", 0))(folder)
    torch.save((torch.empty(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)), folder / "ivf.pid.pt")
    index = read_index(folder)
    assert (index.num_tokens, index.num_passages, index.ivf_pids.numel()) == (0, 5, 0)


def test_reading_writes_nothing_and_maps_are_private(folder: Path) -> None:
    before = {file: file.read_bytes() for file in folder.iterdir()}
    index = read_index(folder)
    index.chunks[0].codes.fill_(-1)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


# Damage: (what is done to the folder, file, field, part of the rest of the message).

Break = Callable[[Path], object]
SINGLE_FILES = ("metadata.json", "centroids.pt", "buckets.pt", "avg_residual.pt", "ivf.pid.pt")
CHUNK_FILES = ("0.codes.pt", "0.residuals.pt", "0.metadata.json", "doclens.0.json")


def save(name: str, change: Callable[[Any], Any]) -> Break:
    return lambda folder: torch.save(change(load(folder / name)), folder / name)


def edit(name: str, change: Callable[[Any], Any]) -> Break:
    def do(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        changed = change(value)
        (folder / name).write_text(json.dumps(value if changed is None else changed))

    return do


def set_at(key: str, value: Any) -> Callable[[Any], Any]:
    def change(metadata: Any) -> None:
        *path, last = key.split(".")
        for part in path:
            metadata = metadata[part]
        metadata[last] = value

    return change


def remove(*names: str) -> Break:
    def do(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return do


def truncate(name: str) -> Break:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def write(name: str, content: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content)


def put(index: Any, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


def of_pair(at: int, change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    return lambda pair: tuple(change(value) if i == at else value for i, value in enumerate(pair))


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.system, ("echo owned > owned",))


def add(at: int, amount: int) -> Callable[[list[int]], None]:
    return lambda values: values.__setitem__(at, values[at] + amount)


DAMAGE: list[tuple[Break, str, str, str]] = [
    *[
        (remove(name), name, "file", "expected a file, got none")
        for name in (*SINGLE_FILES, "1.metadata.json", "doclens.2.json")
    ],
    (remove("1.codes.pt"), "1.codes.pt", "file", "got none"),
    (remove("1.residuals.pt"), "1.residuals.pt", "file", "got none"),
    (
        remove("2.codes.pt", "2.residuals.pt"),
        "metadata.json",
        "num_chunks",
        "0, 1",
    ),
    (lambda f: shutil.copy(f / "2.codes.pt", f / "3.codes.pt"), "metadata.json", "num_chunks", "0, 1, 2, 3"),
    *[(truncate(name), name, "content", "torch.save") for name in ("0.codes.pt", "1.residuals.pt", "centroids.pt")],
    *[(write(name, b""), name, "content", "torch.save") for name in ("0.codes.pt", "ivf.pid.pt", "buckets.pt")],
    *[
        (truncate(name), name, "content", "valid JSON")
        for name in ("metadata.json", "doclens.1.json", "0.metadata.json")
    ],
    (write("metadata.json", b"[]"), "metadata.json", "content", "JSON object, got list"),
    (write("metadata.json", b"\xff\xfe"), "metadata.json", "content", "valid JSON"),
    (write("metadata.json", b'{"config": NaN}'), "metadata.json", "content", "constant NaN"),
    (write("metadata.json", b"[" * 100_000), "metadata.json", "content", "valid JSON"),
    (write("doclens.0.json", b"1" * 10_000), "doclens.0.json", "content", "valid JSON"),
    (write("doclens.0.json", b"{}"), "doclens.0.json", "content", "JSON array, got dict"),
    (edit("metadata.json", set_at("config", [1])), "metadata.json", "config", "an object"),
    *[
        (
            edit("metadata.json", set_at("config.nbits", x)),
            "metadata.json",
            "config.nbits",
            r"one of \(1, 2, 4, 8\)",
        )
        for x in (3, 0, True, "2", 2.0, None, 16)
    ],
    *[
        (edit("metadata.json", set_at("config.dim", x)), "metadata.json", "config.dim", re.escape(expected))
        for x, expected in (
            (0, ">= 1"),
            (-64, ">= 1"),
            (64.0, ">= 1"),
            (None, ">= 1"),
            (60, "a multiple of 16"),
        )
    ],
    (
        edit("metadata.json", set_at("config.dim", 128)),
        "centroids.pt",
        "centroids",
        "any, 128], got .* \\[40, 64\\]",
    ),
    # A width of 1 or 4 bits passes the check of dim, so the buckets are the first to disagree.
    (edit("metadata.json", set_at("config.nbits", 4)), "buckets.pt", "bucket_cutoffs", "shape \\[15\\]"),
    (edit("metadata.json", set_at("config.nbits", 1)), "buckets.pt", "bucket_cutoffs", "shape \\[1\\]"),
    *[
        (edit("metadata.json", set_at("num_chunks", x)), "metadata.json", "num_chunks", expected)
        for x, expected in (
            (0, ">= 1"),
            (3.0, ">= 1"),
            (10**12, "got chunks 0, 1, 2"),
            (2, "got chunks 0, 1, 2"),
        )
    ],
    (edit("metadata.json", set_at("num_partitions", 41)), "metadata.json", "num_partitions", "40.* got 41"),
    *[
        (edit("1.metadata.json", set_at(key, x)), "1.metadata.json", key, f"got {re.escape(str(x))}")
        for key, x in (
            ("passage_offset", 0),
            ("num_passages", 127),
            ("num_embeddings", 1),
            ("num_passages", 128.0),
        )
    ],
    (
        save("centroids.pt", lambda x: x.float()),
        "centroids.pt",
        "centroids",
        "float16 .*got a contiguous float32",
    ),
    (save("centroids.pt", lambda x: x[:0]), "metadata.json", "num_partitions", "0, the rows of centroids.pt, got 40"),
    (save("centroids.pt", lambda x: x.T.contiguous().T), "centroids.pt", "centroids", "non-contiguous"),
    (save("centroids.pt", lambda x: [x]), "centroids.pt", "centroids", "got list"),
    (save("centroids.pt", put((3, 5), float("nan"))), "centroids.pt", "centroids", "finite numbers, got 1 "),
    (save("centroids.pt", put((0, 0), float("inf"))), "centroids.pt", "centroids", "finite numbers, got 1 "),
    (save("centroids.pt", lambda x: x.to_sparse()), "centroids.pt", "content", "_rebuild_sparse_tensor"),
    (save("centroids.pt", lambda x: x.to("meta")), "centroids.pt", "content", "_rebuild_meta_tensor"),
    (save("buckets.pt", lambda x: x[0]), "buckets.pt", "buckets", "a pair"),
    (save("buckets.pt", of_pair(1, lambda x: x[:3])), "buckets.pt", "bucket_weights", "shape \\[4\\]"),
    (save("buckets.pt", of_pair(1, put(2, float("nan")))), "buckets.pt", "bucket_weights", "finite"),
    (save("buckets.pt", of_pair(0, lambda x: x.flip(0))), "buckets.pt", "bucket_cutoffs", "ascending"),
    (save("buckets.pt", of_pair(0, lambda x: x.long())), "buckets.pt", "bucket_cutoffs", "float32"),
    (save("avg_residual.pt", lambda x: x.expand(2)), "avg_residual.pt", "avg_residual", "got \\[2\\]"),
    (save("avg_residual.pt", lambda x: 0.02), "avg_residual.pt", "avg_residual", "got float"),
    (save("avg_residual.pt", lambda x: x * float("nan")), "avg_residual.pt", "avg_residual", "finite"),
    (save("1.codes.pt", lambda x: x.long()), "1.codes.pt", "codes", "int32 .*got a contiguous int64"),
    (save("1.codes.pt", lambda x: x[:, None]), "1.codes.pt", "codes", "shape \\[any\\]"),
    (save("1.codes.pt", lambda x: x[:1].expand(10**12)), "1.codes.pt", "codes", "non-contiguous"),
    (save("1.codes.pt", lambda x: x[:-1]), "1.residuals.pt", "residuals", "expected .*, got .*"),
    (save("1.residuals.pt", lambda x: x[:-1]), "1.residuals.pt", "residuals", "expected .*, got .*"),
    (
        save("1.residuals.pt", lambda x: x[:, :8].clone()),
        "1.residuals.pt",
        "residuals",
        ", 16\\], got .*, 8\\]",
    ),
    (save("1.residuals.pt", lambda x: x.to(torch.int8)), "1.residuals.pt", "residuals", "uint8"),
    (save("1.codes.pt", put(7, C)), "1.codes.pt", "codes", r"values in \[0, 40\), got 40 at position 7"),
    (save("1.codes.pt", put(0, -1)), "1.codes.pt", "codes", r"values in \[0, 40\), got -1 at position 0"),
    (edit("doclens.1.json", add(0, 1)), "doclens.1.json", "doclens", "adding up to the"),
    (edit("doclens.1.json", lambda x: x[:-2]), "doclens.1.json", "doclens", "adding up to the"),
    (edit("doclens.1.json", lambda x: [-1, x[0] + x[1] + 1, *x[2:]]), "doclens.1.json", "doclens", "got -1"),
    (edit("doclens.1.json", lambda x: [float(x[0]), *x[1:]]), "doclens.1.json", "doclens", "integers"),
    (edit("doclens.1.json", lambda x: [*x, True]), "doclens.1.json", "doclens", "integers, got True"),
    (edit("doclens.1.json", lambda x: [*x, 10**30]), "doclens.1.json", "doclens", "got 1000"),
    (edit("doclens.1.json", lambda x: [*x, 0]), "1.metadata.json", "num_passages", "129, got 128"),
    (save("ivf.pid.pt", lambda x: x[0]), "ivf.pid.pt", "ivf", "a pair"),
    (save("ivf.pid.pt", of_pair(0, lambda x: x.float())), "ivf.pid.pt", "pids", "int32 or int64"),
    (save("ivf.pid.pt", of_pair(1, lambda x: x[:-1])), "ivf.pid.pt", "lengths", "shape \\[40\\]"),
    (save("ivf.pid.pt", of_pair(1, put(0, -1))), "ivf.pid.pt", "lengths", "got -1"),
    (save("ivf.pid.pt", of_pair(1, put(0, 2**62))), "ivf.pid.pt", "lengths", "got 4611686018427387904"),
    (save("ivf.pid.pt", of_pair(0, lambda x: x[:100])), "ivf.pid.pt", "lengths", "within the 100 pids"),
    (
        save("ivf.pid.pt", of_pair(0, put(0, N))),
        "ivf.pid.pt",
        "pids",
        r"in \[0, 300\), got 300 at position 0",
    ),
    (save("ivf.pid.pt", of_pair(0, put(5, -3))), "ivf.pid.pt", "pids", "got -3 at position 5"),
    (save("ivf.pid.pt", lambda x: (x[0].long() + 2**32, x[1])), "ivf.pid.pt", "pids", "got 42949"),
    (
        save("ivf.pid.pt", of_pair(0, lambda x: torch.cat((x[:1], x[:-1])))),
        "ivf.pid.pt",
        "pids of centroid 0",
        "strictly",
    ),
    (save("ivf.pid.pt", of_pair(0, lambda x: x.flip(0))), "ivf.pid.pt", "pids of centroid 0", "ascending"),
    (lambda f: torch.save(Payload(), f / "ivf.pid.pt"), "ivf.pid.pt", "content", "a pickle with GLOBAL posix system"),
    (lambda f: torch.save([Payload()], f / "0.codes.pt"), "0.codes.pt", "content", "a pickle with GLOBAL posix system"),
    (
        lambda f: torch.save(load(f / "1.codes.pt"), f / "1.codes.pt", _use_new_zipfile_serialization=False),
        "1.codes.pt",
        "content",
        "no zip",
    ),
]


@pytest.mark.parametrize(("damage", "file", "field", "rest"), DAMAGE, ids=[f"{i}-{d[1]}" for i, d in enumerate(DAMAGE)])
def test_damage_is_refused_by_name(
    folder: Path, damage: Break, file: str, field: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    damage(folder)
    message = f"{re.escape(str(folder / file))}: {re.escape(field)}: expected .*, got "
    with pytest.raises(ValueError, match=message) as caught:
        read_index(folder)
    assert re.search(rest, str(caught.value)), str(caught.value)
    assert not Path("owned").exists()
    assert not (folder / "owned").exists()


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: folder: expected a folder"):
        read_index(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="verify: expected 'full' or 'structure', got 'deep'"):
        read_index(tmp_path, verify="deep")  # type: ignore[arg-type]


def test_structure_skips_contents_only(folder: Path) -> None:
    save("1.codes.pt", put(7, C))(folder)
    save("ivf.pid.pt", of_pair(0, put(0, N)))(folder)
    index = read_index(folder, verify="structure")
    with pytest.raises(ValueError, match=r"1\.codes\.pt: codes: expected values in \[0, 40\), got 40"):
        index.verify_contents()
    save("1.codes.pt", lambda x: x.long())(folder)
    with pytest.raises(ValueError, match=r"1\.codes\.pt: codes"):
        read_index(folder, verify="structure")


def test_old_ivf_with_a_code_out_of_range(folder: Path) -> None:
    (folder / "ivf.pid.pt").rename(folder / "ivf.pt")
    save("2.codes.pt", put(0, 10**9))(folder)
    with pytest.raises(ValueError, match=r"2\.codes\.pt: codes: .*got 1000000000 at position 0"):
        read_index(folder, verify="structure")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*SINGLE_FILES, *CHUNK_FILES]), data=st.data())
def test_any_byte_may_be_wrong(stock: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Bytes changed or cut anywhere: a ValueError that names a file, or an index within its own bounds."""
    folder = tmp_path / "fuzz"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(stock, folder)
    content = bytearray((folder / name).read_bytes())
    # The structure of a zip lies at both ends.
    near = st.integers(0, min(len(content) - 1, 700))
    for place in data.draw(st.lists(st.tuples(near, st.booleans(), st.integers(0, 255)), min_size=1, max_size=4)):
        content[place[0] if place[1] else -1 - place[0]] = place[2]
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (folder / name).write_bytes(content)
    refusal = ""
    try:
        index = read_index(folder)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(str(folder))
        return
    codes, residuals = index.codes(), index.residuals()
    assert int(index.doclens.sum()) == len(codes) == len(residuals) == index.num_tokens
    assert bool(((codes >= 0) & (codes < index.num_centroids)).all())
    assert bool(((index.ivf_pids >= 0) & (index.ivf_pids < index.num_passages)).all())
    assert bool(torch.isfinite(index.centroids).all())


def test_zip_that_claims_more_than_it_holds(folder: Path) -> None:
    """A pickle inside the zip that asks for far more elements than the file has bytes."""
    file = folder / "1.codes.pt"
    with zipfile.ZipFile(file) as zipped:
        entries = {info.filename: zipped.read(info) for info in zipped.infolist()}
    n = len(load(file))
    [pickled] = [name for name in entries if name.endswith("data.pkl")]
    assert n.to_bytes(2, "little") in entries[pickled]
    # BININT2 n -> BININT 2**31 - 1, wherever a size is written
    entries[pickled] = entries[pickled].replace(b"M" + n.to_bytes(2, "little"), b"J\xff\xff\xff\x7f")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as zipped:
        for name, content in entries.items():
            zipped.writestr(name, content)
    with pytest.raises(ValueError, match=r"1\.codes\.pt: "):
        read_index(folder)


# In memory, as stock holds an index after its updater changed it.


def in_memory(index: PlaidIndex) -> dict[str, Any]:
    """Stock pads codes and residuals with 512 rows that nobody wrote."""
    return {
        "nbits": index.nbits,
        "centroids": index.centroids.float(),
        "bucket_cutoffs": index.bucket_cutoffs,
        "bucket_weights": index.bucket_weights,
        "codes": torch.cat((index.codes(), torch.full((512,), -1, dtype=torch.int32))),
        "residuals": torch.cat((index.residuals(), index.residuals()[:512])),
        "doclens": index.doclens.long(),
        "ivf": torch.cat((index.ivf_pids.long(), torch.full((9,), -1))),
        "ivf_lengths": index.ivf_offsets.diff(),
    }


def test_from_tensors(stock: Path) -> None:
    index = read_index(stock)
    copy = PlaidIndex.from_tensors(**in_memory(index))
    for name in (
        "centroids",
        "bucket_cutoffs",
        "bucket_weights",
        "doclens",
        "offsets",
        "ivf_pids",
        "ivf_offsets",
    ):
        assert torch.equal(getattr(copy, name), getattr(index, name)), name
        assert getattr(copy, name).dtype == getattr(index, name).dtype
    assert torch.equal(copy.codes(), index.codes())
    assert torch.equal(copy.residuals(), index.residuals())
    assert copy.nbytes == index.nbytes
    with pytest.raises(ValueError, match="memory: files: expected an index read from files"):
        copy.digest()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nbits", lambda x: 3, "nbits: expected one of"),
        ("nbits", lambda x: 4, "bucket_cutoffs: expected"),
        ("centroids", lambda x: x + 1e-5, "float16 holds exactly"),
        ("centroids", lambda x: x * float("nan"), "finite"),
        ("centroids", lambda x: x[:, :60].contiguous(), "a multiple of 16"),
        ("codes", lambda x: x[:100], "codes: expected the .* rows that doclens add up to, got 100"),
        ("residuals", lambda x: x[:100], "residuals: expected the .* rows"),
        ("codes", lambda x: x * 0 + C, r"codes: expected values in \[0, 40\)"),
        ("doclens", lambda x: x - 1, "doclens: expected values in"),
        ("ivf", lambda x: x + 1, "ascending|values in"),
    ],
)
def test_from_tensors_refuses(stock: Path, name: str, change: Callable[[Any], Any], message: str) -> None:
    tensors = in_memory(read_index(stock))
    with pytest.raises(ValueError, match=f"memory: .*({message})"):
        PlaidIndex.from_tensors(**{**tensors, name: change(tensors[name])})


def test_digest(folder: Path) -> None:
    digest = read_index(folder).digest()
    assert digest == read_index(folder, verify="structure").digest()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    os.utime(folder / "2.residuals.pt", ns=(1, 1))
    assert read_index(folder).digest() != digest
