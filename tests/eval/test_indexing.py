from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from eval import indexing
from eval.cache import read_json
from eval.datasets import Dataset
from eval.indexing import build_index, encode_passages, encode_queries, encode_texts
from plaid_tilemaxsim.index.files import read_index
from tests.synthetic import make_checkpoint, make_collection

DIM = 64
FILES = ("centroids.pt", "buckets.pt", "avg_residual.pt", "0.codes.pt", "0.residuals.pt", "ivf.pid.pt")

pytest.importorskip("faiss")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), dim=DIM)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """60 passages: one empty, one twice, one with the white space that a TSV cannot hold."""
    texts = make_collection(60)
    texts[7], texts[11], texts[13] = "", texts[3], texts[13].replace(" ", "\n\t")
    ids = [f"d{i}" for i in range(len(texts))]
    queries = [" ".join(texts[i].split()[:4]) for i in (0, 20, 40)]
    return Dataset("tiny", ids, texts, ["q0", "q1", "q2"], queries, {f"q{i}": {f"d{20 * i}": 1} for i in range(3)})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def indexes(checkpoint: Path, dataset: Dataset, cache: Path) -> dict[int, Path]:
    return {nbits: build_index(checkpoint, dataset, nbits=nbits, cache=cache, progress=False) for nbits in (1, 2, 4)}


def load(folder: Path, name: str):
    loaded = torch.load(folder / name, weights_only=True)
    return loaded if isinstance(loaded, tuple) else (loaded,)


def test_every_index_holds_the_collection(indexes: dict[int, Path], checkpoint: Path, dataset: Dataset) -> None:
    vectors, doclens = encode_texts(checkpoint, dataset.passages, progress=False)
    assert doclens[7] == 3  # an empty passage is its markers
    errors = {}
    for nbits, folder in indexes.items():
        index = read_index(folder)
        assert (index.nbits, index.dim, index.num_passages) == (nbits, DIM, 60)
        assert torch.equal(index.doclens, doclens)
        rows = decode(index)
        errors[nbits] = (rows - vectors.float()).norm(dim=1).mean()
        assert (rows.roll(1, 0) - vectors.float()).norm(dim=1).mean() > 2 * errors[nbits]
    assert errors[4] < errors[2] < errors[1] < 0.5


def decode(index) -> torch.Tensor:
    """Vectors fp32 [T, DIM] of an index, bit by bit as DESIGN says: LSB first in a value, MSB first in a byte."""
    bits = (index.residuals()[:, :, None].int() >> torch.arange(7, -1, -1)) & 1
    values = bits.view(-1, index.dim, index.nbits)
    buckets = (values << torch.arange(index.nbits)).sum(-1)
    rows = index.centroids.float()[index.codes().long()] + index.bucket_weights[buckets].float()
    return torch.nn.functional.normalize(rows, dim=1)


def test_bit_for_bit_what_stock_builds(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's Indexer with its own encoder and k-means, from texts that both sides put in one batch alike."""
    texts = sorted(make_collection(60, seed=3), key=len)
    dataset = Dataset("one-batch", [str(i) for i in range(60)], texts, ["q"], ["x"], {"q": {"0": 1}})
    monkeypatch.setattr(indexing, "BATCH", 64)
    ours = build_index(checkpoint, dataset, nbits=2, cache=tmp_path / "cache", progress=False)

    from colbert import Indexer
    from colbert.infra import ColBERTConfig, Run, RunConfig

    run = RunConfig(nranks=1, avoid_fork_if_possible=True, root=str(tmp_path), index_root=str(tmp_path / "stock"))
    with Run().context(run):
        Indexer(str(checkpoint), ColBERTConfig(nbits=2), verbose=0).index("stock", texts)
    for name in FILES:
        for mine, stock in zip(load(ours, name), load(tmp_path / "stock" / "stock", name), strict=True):
            assert torch.equal(mine, stock), name


def test_two_builds_are_equal(indexes: dict[int, Path], checkpoint: Path, dataset: Dataset, tmp_path: Path) -> None:
    again = build_index(checkpoint, dataset, nbits=2, cache=tmp_path, progress=False)
    assert again.name == indexes[2].name
    for name in FILES:
        for first, second in zip(load(indexes[2], name), load(again, name), strict=True):
            assert torch.equal(first, second), name


def test_indexes_share_encoding_and_centroids(indexes: dict[int, Path], cache: Path) -> None:
    assert len(list((cache / "embeddings").iterdir())) == 1
    assert len(list((cache / "embeddings").glob("*/centroids.*.pt"))) == 1
    centroids = [load(folder, "centroids.pt")[0] for folder in indexes.values()]
    assert torch.equal(centroids[0], centroids[1])
    assert torch.equal(centroids[0], centroids[2])
    assert len(list((cache / "embeddings").glob("*/codes.*.pt"))) == 2  # of the held-out vectors and of all


def test_a_searcher_finds_checkpoint_and_texts_by_the_index_alone(indexes, checkpoint: Path, dataset: Dataset) -> None:
    from colbert.data import Collection
    from colbert.infra import ColBERTConfig

    config = ColBERTConfig.load_from_index(str(indexes[2]))
    assert config.checkpoint == str(checkpoint)
    assert config.index_path_ == str(indexes[2])
    assert list(Collection.cast(config.collection)) == [" ".join(text.split()) for text in dataset.passages]
    manifest = read_json(indexes[2] / "manifest.json")
    assert manifest["seeds"]["faiss"] == 123
    assert manifest["dataset"]["sha256"]["passages"] == dataset.passages_digest
    assert (indexes[2] / "build.log").stat().st_size > 0


def test_a_cached_index_costs_nothing(indexes, checkpoint: Path, dataset: Dataset, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(indexing, "encode_passages", lambda *_, **__: pytest.fail("encoded again"))
    assert build_index(checkpoint, dataset, nbits=2, cache=cache, progress=False) == indexes[2]


def test_an_interrupted_encoding_goes_on(checkpoint: Path, dataset: Dataset, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(indexing, "SHARD", 16)
    encode, calls = indexing._Encoder.passages, []

    def failing(self, texts, bar):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, texts, bar)

    monkeypatch.setattr(indexing._Encoder, "passages", failing)
    with pytest.raises(KeyboardInterrupt):
        encode_passages(checkpoint, dataset, cache=tmp_path, progress=False)
    embeddings = encode_passages(checkpoint, dataset, cache=tmp_path, progress=False)
    assert calls == [16, 16, 16, 16, 12]
    vectors, doclens = embeddings.all()
    expected, lengths = encode_texts(checkpoint, dataset.passages, progress=False)
    assert torch.equal(doclens, lengths)
    # Other batches pad otherwise: fp32 rounding, then at most one step of fp16 near 1.
    torch.testing.assert_close(vectors.float(), expected.float(), atol=2**-10, rtol=0)
    assert not list(embeddings.folder.glob("*.tmp"))


def test_a_failed_build_leaves_no_index(checkpoint: Path, dataset: Dataset, tmp_path: Path, monkeypatch) -> None:
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(indexing, "_remembered", fail)
    environment = dict(os.environ)
    with pytest.raises(OSError, match="disk full"):
        build_index(checkpoint, dataset, nbits=2, cache=tmp_path, progress=False)
    assert [path.suffix for path in (tmp_path / "indexes").iterdir()] == [".log"]
    assert dict(os.environ) == environment
    import colbert.indexing.collection_indexer as stock

    assert stock.CollectionEncoder.__module__ == "colbert.indexing.collection_encoder"
    assert stock.compute_faiss_kmeans.__module__ == stock.__name__
    assert stock.ResidualCodec.compress_into_codes.__module__ == "colbert.indexing.codecs.residual"


@pytest.mark.parametrize("nbits", [0, 3, 16])
def test_nbits_that_do_not_fit(checkpoint: Path, dataset: Dataset, tmp_path: Path, nbits: int) -> None:
    with pytest.raises(ValueError, match=f"expected nbits 1, 2, 4 or 8 .* got {nbits} at DIM 64"):
        build_index(checkpoint, dataset, nbits=nbits, cache=tmp_path, progress=False)


def test_no_checkpoint(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none: expected a ColBERT checkpoint"):
        build_index(tmp_path / "none", dataset, cache=tmp_path, progress=False)


def test_queries(checkpoint: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode_queries(checkpoint, dataset, cache=tmp_path, progress=False)
    assert encoded.ids == ("q0", "q1", "q2")
    assert encoded.Q.shape == (3, 32, DIM)
    assert encoded.Q.dtype == torch.float32
    assert len(encoded.milliseconds) == 3
    assert min(encoded.milliseconds) > 0
    # Unit vectors up to fp32 rounding.
    torch.testing.assert_close(encoded.Q.norm(dim=-1), torch.ones(3, 32), atol=1e-5, rtol=0)

    from colbert.infra import ColBERTConfig
    from colbert.modeling.checkpoint import Checkpoint

    stock = Checkpoint(str(checkpoint), colbert_config=ColBERTConfig.load_from_checkpoint(str(checkpoint)), verbose=0)
    expected = stock.queryFromText(list(dataset.queries))
    torch.testing.assert_close(encoded.Q, expected, atol=1e-5, rtol=0)
    assert (encoded.Q - expected.roll(1, 0)).abs().max() > 1e-2
    saved = torch.load(encoded.path, weights_only=True)
    assert saved["ids"] == ["q0", "q1", "q2"]

    monkeypatch.setattr(indexing, "_Encoder", lambda *_, **__: pytest.fail("encoded again"))
    again = encode_queries(checkpoint, dataset, cache=tmp_path, progress=False)
    assert torch.equal(again.Q, encoded.Q)
    assert again.milliseconds == encoded.milliseconds


def test_settings_make_other_caches(checkpoint: Path, dataset: Dataset, tmp_path: Path) -> None:
    short = encode_queries(checkpoint, dataset, query_maxlen=8, cache=tmp_path, progress=False)
    assert short.Q.shape == (3, 8, DIM)
    long = encode_queries(checkpoint, dataset, cache=tmp_path, progress=False)
    assert long.path != short.path
    cut = encode_passages(checkpoint, dataset, doc_maxlen=9, cache=tmp_path, progress=False)
    whole = encode_passages(checkpoint, dataset, cache=tmp_path, progress=False)
    assert cut.folder != whole.folder
    assert cut.all()[1].max() == 9
    assert whole.all()[1].max() > 9
    assert json.loads((cut.folder / "manifest.json").read_text())["doc_maxlen"] == 9


def test_given_centroids_need_no_faiss(
    indexes: dict[int, Path], checkpoint: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    trained = indexes[2] / "centroids.pt"
    built = build_index(checkpoint, dataset, nbits=1, centroids=trained, cache=tmp_path, progress=False)
    assert built.name != indexes[1].name  # a cache must not take one for the other
    before, after = load(indexes[2], "centroids.pt")[0].float(), load(built, "centroids.pt")[0].float()
    assert (before - after).abs().max() <= 2**-11  # stock normalises them again: one step of fp16 near 1
    decoded = decode(read_index(built))
    vectors, _ = encode_texts(checkpoint, dataset.passages, progress=False)
    assert (decoded - vectors.float()).norm(dim=1).mean() < 0.5
    short = tmp_path / "short.pt"
    torch.save(load(indexes[2], "centroids.pt")[0][:-1], short)
    with pytest.raises(ValueError, match=r"expected centroids \["):
        build_index(checkpoint, dataset, nbits=2, centroids=short, cache=tmp_path, progress=False)
    with pytest.raises(ValueError, match="faiss"):
        build_index(checkpoint, dataset, nbits=2, cache=tmp_path, progress=False)
