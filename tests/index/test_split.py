"""Shards on disk: stock-format indexes that hold exactly the source's passages, whole or not at all."""

import json
import shutil

import pytest
import torch

from plaid_tilemaxsim import cli
from plaid_tilemaxsim.index import shards, split
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.lists import build_pid_lists
from plaid_tilemaxsim.index.split import check_shard, read_manifest, split_index
from tests.synthetic import make_index

N = 150


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("source") / "index", n=N, dim=32, C=16, chunk_size=40)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("chunk", [7, 25_000])
def test_shards_hold_the_source(source, tmp_path, n, chunk, monkeypatch):
    monkeypatch.setattr(split, "CHUNK_PASSAGES", chunk)
    monkeypatch.setattr(shards, "LIST_ENTRIES", 10 * chunk)
    before = contents(source)
    whole = read_index(source)
    manifest = split_index(source, n, tmp_path, progress=False)
    parts = [read_index(tmp_path / shard.folder) for shard in manifest.shards]  # reads and checks everything
    assert len(parts) == n
    assert torch.equal(torch.cat([part.doclens for part in parts]), whole.doclens)
    assert torch.equal(torch.cat([part.codes() for part in parts]), whole.codes())
    assert torch.equal(torch.cat([part.residuals() for part in parts]), whole.residuals())
    tokens = [part.num_tokens for part in parts]
    assert max(tokens) - min(tokens) <= 2 * int(whole.doclens.max())
    first = 0
    for part, shard in zip(parts, manifest.shards, strict=True):
        check_shard(part, shard)
        assert shard.first_pid == first
        first += part.num_passages
        pids, offsets = build_pid_lists([(part.codes(), part.doclens)], part.num_centroids)
        assert torch.equal(part.ivf_pids, pids)
        assert torch.equal(part.ivf_offsets, offsets)
        assert torch.equal(part.centroids, whole.centroids)
        assert all(chunk_.num_passages <= chunk for chunk_ in part.chunks)
        assert part.metadata["num_embeddings"] == part.num_tokens
        assert part.metadata["config"] == whole.metadata["config"]
    assert contents(source) == before
    assert read_manifest(tmp_path).shards == manifest.shards


def test_an_interrupted_run_goes_on(source, tmp_path, monkeypatch):
    written, save = [], split._save

    def stop(value, file):
        written.append(file)
        if len(written) == 7:
            raise KeyboardInterrupt
        save(value, file)

    monkeypatch.setattr(split, "_save", stop)
    with pytest.raises(KeyboardInterrupt):
        split_index(source, 3, tmp_path, progress=False)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["shard-000"]  # complete ones only, and no manifest
    with pytest.raises(ValueError, match=r"shards\.json: file: expected"):
        read_manifest(tmp_path)
    kept = contents(tmp_path / "shard-000")
    (tmp_path / ".shard-001.partial").mkdir()  # a run that was killed leaves this
    monkeypatch.setattr(split, "_save", save)
    manifest = split_index(source, 3, tmp_path, progress=False)
    assert contents(tmp_path / "shard-000") == kept
    assert [file.name for file in tmp_path.iterdir() if "partial" in file.name] == []

    def never(*args):
        raise AssertionError("written again")

    monkeypatch.setattr(split, "_save", never)
    assert split_index(source, 3, tmp_path, progress=False).shards == manifest.shards
    monkeypatch.setattr(split, "_save", save)
    shutil.rmtree(tmp_path / "shard-001")
    assert split_index(source, 3, tmp_path, progress=False).shards == manifest.shards
    assert contents(tmp_path / "shard-000") == kept
    assert (tmp_path / "shard-001").exists()


def test_what_does_not_fit_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="shards: expected at most"):
        split_index(source, N + 1, tmp_path / "a", progress=False)
    split_index(source, 2, tmp_path / "b", progress=False)
    with pytest.raises(ValueError, match="expected an empty one, or 3 shards of"):
        split_index(source, 3, tmp_path / "b", progress=False)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        split_index(source, 2, tmp_path / "c", progress=False)
    other = make_index(tmp_path / "other", n=N, dim=32, C=16, seed=1)
    with pytest.raises(ValueError, match="as it is now"):
        split_index(other, 2, tmp_path / "b", progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "version"),
        (lambda m: m["shards"].pop(), "shards: expected"),
        (lambda m: m["shards"].reverse(), r"shards\[0\]"),
        (lambda m: m["shards"][1].update(folder="../elsewhere"), r"shards\[1\]"),
        (lambda m: m["shards"][0].update(num_passages=-1), "num_passages"),
        (lambda m: m["source"].pop("digest"), "source"),
    ],
)
def test_a_wrong_manifest_is_named(source, tmp_path, change, message):
    split_index(source, 2, tmp_path, progress=False)
    file = tmp_path / "shards.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=message):
        read_manifest(tmp_path)


def test_a_shard_of_another_cut_is_noticed(source, tmp_path):
    manifest = split_index(source, 2, tmp_path, progress=False)
    split_index(source, 3, tmp_path / "other", progress=False)
    with pytest.raises(ValueError, match=r"shard\.json: shard: expected"):
        check_shard(read_index(tmp_path / "other" / "shard-000"), manifest.shards[0])


def test_a_damaged_shard_is_not_complete(source, tmp_path):
    manifest = split_index(source, 2, tmp_path, progress=False)
    (tmp_path / "shard-001" / "0.codes.pt").unlink()
    with pytest.raises(ValueError, match=r"shard-001.*0\.codes\.pt"):
        split_index(source, 2, tmp_path, progress=False)
    (tmp_path / "shards.json").unlink()  # an interrupted run, as far as the next one can see
    with pytest.raises(ValueError, match=r"shard-001.*0\.codes\.pt"):
        split_index(source, 2, tmp_path, progress=False)
    shutil.rmtree(tmp_path / "shard-001")
    assert split_index(source, 2, tmp_path, progress=False).shards == manifest.shards


def test_contents_are_those_of_the_manifest(source, tmp_path):
    """Residuals of other tokens have the right shape and, written by torch, the right checksums."""
    manifest = split_index(source, 2, tmp_path, progress=False)
    file = tmp_path / "shard-000" / "0.residuals.pt"
    torch.save(torch.load(file).flip(0).clone(), file)
    index = read_index(tmp_path / "shard-000", verify="full")
    with pytest.raises(ValueError, match="sha256 of the files: expected"):
        check_shard(index, manifest.shards[0], contents=True)
    check_shard(read_index(tmp_path / "shard-001"), manifest.shards[1], contents=True)


def test_one_run_at_a_time(source, tmp_path, monkeypatch):
    save = split._save

    def meanwhile(value, file):
        with pytest.raises(ValueError, match="no other run that writes shards here"):
            split_index(source, 2, tmp_path, progress=False)
        save(value, file)

    monkeypatch.setattr(split, "_save", meanwhile)
    assert len(split_index(source, 2, tmp_path, progress=False).shards) == 2


def test_a_full_disk(source, tmp_path):
    """What the system says, and nothing half written."""
    import resource

    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            split_index(source, 2, tmp_path, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_command(source, tmp_path, capsys):
    index = tmp_path / "index"
    shutil.copytree(source, index)
    assert cli.main(["shard", str(index), "--n", "2"]) == 0
    assert "shard-001" in capsys.readouterr().out
    assert (tmp_path / "index.shards" / "shards.json").exists()
    assert cli.main(["shard", str(index), "--n", "3", "--out", str(tmp_path / "index.shards")]) == 2
    assert "expected an empty one" in capsys.readouterr().err


def test_stock_searches_a_shard(source, tmp_path):
    """Rankings of stock's own scorer on a shard are those of the plugin there."""
    pytest.importorskip("colbert")
    from colbert.infra import ColBERTConfig
    from colbert.modeling.colbert import ColBERT
    from colbert.search.index_storage import IndexScorer

    from plaid_tilemaxsim.scorer import TileMaxSimScorer

    common = make_index(tmp_path / "index", n=N, dim=32, C=16, common=2.0, empty=0.0)
    split_index(common, 2, tmp_path / "shards", progress=False)
    folder = tmp_path / "shards" / "shard-001"
    part = read_index(folder)
    Q = part.centroids[:8].float()[None]
    config = ColBERTConfig(ncells=2, centroid_score_threshold=0.0, ndocs=64, query_maxlen=8)
    ColBERT.try_load_torch_extensions(False)
    theirs = IndexScorer(str(folder), use_gpu=False).rank(config, Q)
    ours = TileMaxSimScorer(str(folder), use_gpu=False).search(config, Q, None)
    assert theirs[0] == ours[0]
    assert torch.allclose(torch.tensor(theirs[1]), torch.tensor(ours[1]), atol=1e-4)
