"""PQ sidecars: what they hold, that nothing wrong or stale is read, that an interrupted run leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plaid_tilemaxsim.index import pq
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.placement import describe
from plaid_tilemaxsim.ops import reference
from tests.synthetic import make_index

faiss = pytest.importorskip("faiss")


def embeddings(index: PlaidIndex) -> Tensor:
    return reference.decompress(index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits)


def loss(index: PlaidIndex, made: pq.PQ) -> float:
    """Mean squared distance of embeddings from what their codes stand for."""
    e = embeddings(index)
    if made.rotation is not None:
        e = e @ made.rotation.double().T
    return float(((reference.pq_decode(made.codes, made.codebook) - e) ** 2).sum(1).mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("index") / "i", n=200, dim=64, C=32, empty=0.1)


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    """The same with a sidecar of 8 bytes a token."""
    copy = shutil.copytree(folder, folder.parent / "written")
    pq.write_pq(read_index(copy), 8, sample=1000, progress=False)
    return copy


@pytest.fixture
def sidecar(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "copy")


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_codes_name_the_nearest_entries(tmp_path: Path, nbits: int) -> None:
    index = read_index(make_index(tmp_path / "i", n=60, dim=64, nbits=nbits, C=32, chunk_size=25))
    made = pq.quantise(index, 16, sample=600)
    assert (made.codes.dtype, made.codes.shape) == (torch.uint8, (index.num_tokens, 16))
    assert (made.codebook.dtype, made.codebook.shape) == (torch.float16, (16, 256, 4))
    parts = embeddings(index).view(-1, 16, 4)
    for m in range(16):
        distances = torch.cdist(parts[:, m], made.codebook[m].double())
        chosen = distances.gather(1, made.codes[:, m : m + 1].long())[:, 0]
        # fp32 distances of vectors no longer than 1
        assert (chosen - distances.amin(1) <= 1e-4).all()
        assert (chosen.roll(1) - distances.amin(1) > 1e-4).any()


def test_more_bytes_and_a_rotation_lose_less(folder: Path) -> None:
    index = read_index(folder)
    losses = [loss(index, pq.quantise(index, m)) for m in (8, 16, 32, 64)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] < 1
    turned = pq.quantise(index, 8, opq=True, sample=1000)
    assert turned.rotation is not None
    assert (turned.rotation @ turned.rotation.T - torch.eye(64)).abs().max() < 1e-4
    assert loss(index, turned) < loss(index, pq.quantise(index, 8, sample=1000))


def test_a_seed_decides(folder: Path) -> None:
    index = read_index(folder)
    one, same, other = (pq.quantise(index, 8, sample=500, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.codes, same.codes)
    assert torch.equal(one.codebook, same.codebook)
    assert not torch.equal(one.codes, other.codes)


@pytest.mark.parametrize("opq", [False, True])
def test_written_and_read(folder: Path, tmp_path: Path, opq: bool) -> None:
    copy = shutil.copytree(folder, tmp_path / "i")
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    index = read_index(copy)
    file = pq.write_pq(index, 16, opq=opq, sample=1000, seed=2, progress=False)
    want = pq.quantise(index, 16, opq=opq, sample=1000, seed=2)
    for verify in ("structure", "full"):
        got = pq.read_pq(index, verify=verify)  # type: ignore[arg-type]
        assert got.m == 16
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.codebook, want.codebook)
        assert (got.rotation is None) == (want.rotation is None) == (not opq)
        assert not opq or torch.equal(got.rotation, want.rotation)
    from safetensors.torch import load_file

    stored = json.loads(file.read_text())
    loaded = load_file(copy / stored["tensors"]["file"])
    assert torch.equal(loaded["codes"], want.codes)
    assert {name: (copy / name).read_bytes() for name in before} == before
    assert sorted(file.name for file in copy.iterdir()) == sorted([*before, file.name, stored["tensors"]["file"]])
    assert read_index(copy).digest() == index.digest()


def test_the_narrowest_of_several_must_be_named(sidecar: Path) -> None:
    index = read_index(sidecar)
    assert pq.read_pq(index).m == 8
    pq.write_pq(index, 16, sample=600, progress=False)
    assert pq.find_pq(sidecar) == [8, 16]
    assert (pq.read_pq(index, 8).m, pq.read_pq(index, 16).m) == (8, 16)
    with pytest.raises(ValueError, match=r"expected one, got those of M = 8, 16; choose with pq_m"):
        pq.read_pq(index)
    with pytest.raises(ValueError, match=r"expected one of M = 32, got M = 8, 16; run `plaid-tilemaxsim pq .* --m 32`"):
        pq.read_pq(index, 32)
    (sidecar / "pq16.json").write_text("{}")
    text, problems = describe(sidecar)
    assert "M = 8: PQ, 8 bytes a token" in text
    assert "M = 16: " in text
    assert "version: expected 1" in text
    assert [problem for problem in problems if "pq16.json: version" in problem] == problems


def test_none(folder: Path) -> None:
    assert pq.find_pq(folder) == []
    with pytest.raises(ValueError, match=r"expected one, got none; run `plaid-tilemaxsim pq .* --m 16`"):
        pq.read_pq(read_index(folder))


def test_one_in_order_is_replaced_only_by_force(sidecar: Path) -> None:
    index = read_index(sidecar)
    with pytest.raises(ValueError, match=r"pq8\.json: sidecar: expected none, or force=True"):
        pq.write_pq(index, 8, progress=False)
    before = pq.read_pq(index).codes.clone()
    pq.write_pq(index, 8, sample=700, seed=9, force=True, progress=False)
    assert not torch.equal(pq.read_pq(index).codes, before)
    assert len(list(sidecar.glob("pq8.*.safetensors"))) == 1
    (sidecar / "pq8.json").write_text("{}")
    pq.write_pq(index, 8, sample=700, progress=False)


def test_a_copy_with_other_times_is_the_same_index(sidecar: Path) -> None:
    old = read_index(sidecar).digest()
    for file in sidecar.iterdir():
        os.utime(file, ns=(1, 1))
    index = read_index(sidecar)
    assert index.digest() != old
    assert pq.read_pq(index).m == 8


def test_another_index_is_refused(sidecar: Path) -> None:
    residuals = torch.load(sidecar / "1.residuals.pt", weights_only=True)
    residuals[3, 2] ^= 1
    torch.save(residuals, sidecar / "1.residuals.pt")
    index = read_index(sidecar)
    words = (
        r"pq8\.json: index: expected the files that it was made from, got others; run `plaid-tilemaxsim pq .* --m 8`"
    )
    with pytest.raises(ValueError, match=words):
        pq.read_pq(index)
    assert "again" in describe(sidecar)[1][0]
    pq.write_pq(index, 8, sample=600, progress=False)
    assert pq.read_pq(index).m == 8


def test_an_index_in_memory_has_none(written: Path) -> None:
    stored = read_index(written)
    index = PlaidIndex.from_tensors(
        nbits=stored.nbits, centroids=stored.centroids, bucket_cutoffs=stored.bucket_cutoffs,
        bucket_weights=stored.bucket_weights, codes=stored.codes(), residuals=stored.residuals(),
        doclens=stored.doclens, ivf=stored.ivf_pids, ivf_lengths=stored.ivf_offsets.diff(), path=written,
    )  # fmt: skip
    with pytest.raises(ValueError, match="got one updated in memory; save it"):
        pq.read_pq(index)


@pytest.mark.parametrize("at", ["training", "the first block", "the last block", "the description"])
def test_an_interrupted_run_leaves_nothing(sidecar: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: file.read_bytes() for file in sidecar.iterdir()}
    monkeypatch.setattr(pq, "ENCODE_TOKENS", 500)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    if at == "training":
        monkeypatch.setattr(pq, "train", interrupted)
    elif at == "the description":
        monkeypatch.setattr(pq.json, "dumps", lambda *a, **k: interrupted() if "indent" in k else "{}")
    else:
        encode = pq.encode

        def encodes_some(*args, **kwargs):
            blocks = list(encode(*args, **kwargs))
            yield from blocks[: 0 if at == "the first block" else -1]
            raise KeyboardInterrupt

        monkeypatch.setattr(pq, "encode", encodes_some)
    with pytest.raises(KeyboardInterrupt):
        pq.write_pq(read_index(sidecar), 8, sample=600, seed=5, force=True, progress=False)
    monkeypatch.undo()
    after = {file.name: file.read_bytes() for file in sidecar.iterdir()}
    assert before.items() <= after.items()
    assert not [name for name in after if name.endswith(".tmp")]
    assert pq.read_pq(read_index(sidecar), verify="full").m == 8


def changed(name: str, value: object):
    def change(folder: Path) -> None:
        described = json.loads((folder / "pq8.json").read_text())
        inner = described
        *path, last = name.split(".")
        for part in path:
            inner = inner[part]
        inner[last] = value
        (folder / "pq8.json").write_text(json.dumps(described))

    return change


def text(words: str):
    return lambda folder: (folder / "pq8.json").write_text(words)


def tensors(**changes):
    """The tensors again, some of them others; the description is right but for their sums."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        described = json.loads((folder / "pq8.json").read_text())
        file = folder / described["tensors"]["file"]
        held = load_file(file)
        held = {name: changes.get(name, lambda x: x)(tensor) for name, tensor in held.items()}
        save_file({name: tensor.contiguous() for name, tensor in held.items() if tensor is not None}, file)

    return change


def truncated(folder: Path) -> None:
    file = next(folder.glob("pq8.*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])


def a_flipped_code(folder: Path) -> None:
    file = next(folder.glob("pq8.*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "pq8.json").write_text("["), r"pq8\.json: content: expected valid JSON"),
        (
            lambda folder: (folder / "pq8.json").write_text("[]"),
            r"pq8\.json: content: expected a JSON object, got list",
        ),
        (changed("version", 2), r"version: expected 1, got 2"),
        (changed("version", True), r"version: expected 1, got True"),
        (changed("m", 16), r"m: expected an integer in \[8, 8\], got 16"),
        (changed("dim", 128), r"dim: expected 64, as in the index, got 128"),
        (changed("num_tokens", 5), r"num_tokens: expected \d+, as in the index, got 5"),
        (changed("num_passages", -1), r"num_passages: expected an integer >= 0, got -1"),
        (changed("opq", 1), r"opq: expected true or false, got 1"),
        (changed("opq", True), r"tensors\.sha256: expected sha256 of codebook, codes, rotation"),
        (changed("index", {}), r"index: expected sha256 of digest, sha256, got {}"),
        (changed("index.digest", 5), r"index: expected sha256 of digest, sha256"),
        (changed("tensors", None), r"tensors\.file: expected a name like pq8\.0123abcd\.safetensors, got None"),
        (changed("tensors.file", "../x.safetensors"), r"tensors\.file: expected a name like"),
        (changed("tensors.file", "pq8.00000000.safetensors"), r"pq8\.00000000\.safetensors: file: expected a file"),
        (changed("tensors.sha256.codebook", "0" * 64), r"codebook: expected data of sha256 0000"),
        (truncated, r"safetensors: content: expected tensors as safetensors writes them"),
        (tensors(codes=lambda x: x[:-1]), r"codes: expected a contiguous uint8 tensor of shape"),
        (tensors(codes=lambda x: x.to(torch.int32)), r"codes: expected a contiguous uint8 tensor"),
        (tensors(codes=lambda x: x[:, :4]), r"codes: expected a contiguous uint8 tensor"),
        (tensors(codes=lambda x: None), r"tensors: expected codebook, codes, got codebook"),
        (tensors(codebook=lambda x: x[:, :255]), r"codebook: expected a contiguous float16 tensor"),
        (tensors(codebook=lambda x: x.float()), r"codebook: expected a contiguous float16 tensor"),
        (tensors(codebook=lambda x: x * torch.nan), r"codebook: expected finite numbers"),
        (tensors(codebook=lambda x: x * 2), r"codebook: expected data of sha256"),
    ],
)
def test_what_is_wrong_is_named(sidecar: Path, change, message: str) -> None:
    change(sidecar)
    with pytest.raises(ValueError, match=message):
        pq.read_pq(read_index(sidecar), 8)


def test_full_verification_reads_the_codes(sidecar: Path) -> None:
    a_flipped_code(sidecar)
    index = read_index(sidecar)
    assert pq.read_pq(index).m == 8
    with pytest.raises(ValueError, match="codes: expected data of sha256"):
        pq.read_pq(index, verify="full")


def test_a_rotation_must_be_one(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "i")
    index = read_index(copy)
    pq.write_pq(index, 8, opq=True, sample=600, progress=False)
    tensors(rotation=lambda x: 2 * x)(copy)
    with pytest.raises(ValueError, match="rotation: expected an orthogonal matrix, got products off by 3"):
        pq.read_pq(index)


@pytest.mark.parametrize("m", [0, 7, 64, True, 16.0, "16"])
def test_widths(tmp_path: Path, m: object) -> None:
    index = read_index(make_index(tmp_path / "i", n=30, dim=96))
    with pytest.raises(ValueError, match=r"m: expected one of \[8, 16, 32\], which divide the 96 dimensions, got"):
        pq.write_pq(index, m, progress=False)  # type: ignore[arg-type]


def test_training_needs_tokens_and_numbers(folder: Path, tmp_path: Path) -> None:
    few = read_index(make_index(tmp_path / "i", n=3, dim=64, C=8))
    with pytest.raises(ValueError, match="tokens: expected at least 256 to train on"):
        pq.train(few, 8)
    for wrong in ({"sample": 100}, {"sample": 2.5}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected an integer"):
            pq.train(read_index(folder), 8, **wrong)
