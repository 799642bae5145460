"""scripts/make_synthetic_index.py: stock's own files, the same for a seed, and the shape that it was fitted to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.ops.reference import centroid_maxsim, decode_residuals, residual_maxsim
from scripts import make_synthetic_index
from scripts.make_synthetic_index import Shape, main, make_index, table
from tests.colbert_fixtures import stock_extensions  # noqa: F401


def make(out: Path, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"passages": 700, "centroids": 512, "queries": 20, "progress": False}
    return make_index(out, **{**arguments, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("synthetic") / "i"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_synthetic_index, "CHUNK_PASSAGES", 300)
        make(out)
    return out


@pytest.mark.parametrize(("nbits", "dim"), [(1, 64), (2, 96), (4, 96), (8, 64), (2, 384)])
def test_every_width_reads_back(tmp_path: Path, nbits: int, dim: int) -> None:
    make(tmp_path / "i", nbits=nbits, dim=dim)
    index = read_index(tmp_path / "i")
    assert (index.num_passages, index.num_centroids, index.nbits, index.dim) == (700, 512, nbits, dim)
    # Each bucket holds its share of the residuals' values.
    values = decode_residuals(index.residuals(), nbits, torch.arange(2.0**nbits), torch.float32)
    shares = torch.bincount(values.flatten().long(), minlength=2**nbits) / values.numel()
    assert (shares * 2**nbits - 1).abs().max() < 0.2
    # The lists are those of the codes.
    owner = torch.arange(700).repeat_interleave(index.doclens.long())
    pairs = torch.unique(index.codes().long() * 700 + owner)
    assert torch.equal(index.ivf_pids, (pairs % 700).int())
    assert torch.equal(index.ivf_offsets.diff(), torch.bincount(pairs // 700, minlength=512))


def test_chunks_and_tail_are_those_of_stock(folder: Path) -> None:
    index = read_index(folder)
    assert [chunk.num_passages for chunk in index.chunks] == [300, 300, 100]
    ivf, lengths = torch.load(folder / "ivf.pid.pt", weights_only=True)
    last_start = int(lengths[:-1].sum())
    assert len(ivf) == int(lengths.sum()) + (int(lengths.max()) if last_start + lengths.max() > lengths.sum() else 0)


def test_embeddings_lie_near_their_centroids(folder: Path) -> None:
    index = read_index(folder)
    weights = decode_residuals(index.residuals(), 2, index.bucket_weights, torch.float32)
    norms = (index.centroids[index.codes().long()].float() + weights).norm(dim=1)
    assert 0.9 < float(norms.min()) < float(norms.max()) < 1.1
    assert abs(float(norms.mean()) - 0.994) < 0.01


def test_queries_hit_the_passage_they_come_from(folder: Path) -> None:
    """The best passage by exact score stands out, and centroid scores alone find it among the first."""
    index = read_index(folder)
    for name in ("queries.pt", "queries.masked.pt"):
        Q = torch.load(folder / name, weights_only=True)
        assert Q.shape == (20, 32, 128)
        assert Q.dtype == torch.float32
        assert torch.allclose(Q.norm(dim=2), torch.ones(20, 32), atol=1e-5)
    Q = torch.load(folder / "queries.pt", weights_only=True)
    sources = json.loads((folder / "synthetic.json").read_text())["passages_of_queries"]
    tokens = (index.codes(), index.residuals(), index.centroids, index.bucket_weights, 2, index.offsets)
    for q, source in zip(Q[:5], sources[:5], strict=True):
        scores = residual_maxsim(q, *tokens, dtype=torch.float32)
        approximate = centroid_maxsim(q, index.codes(), index.centroids, index.offsets, dtype=torch.float32)
        assert int(scores.argmax()) == source
        assert scores[source] > scores.median() + 4
        assert source in approximate.topk(10).indices


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(tmp_path / name, passages=50, centroids=64, seed=seed)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a" / "0.codes.pt").read_bytes() != (tmp_path / "c" / "0.codes.pt").read_bytes()


def test_tiny_sizes(tmp_path: Path) -> None:
    make(tmp_path / "i", passages=1, centroids=1, queries=1)
    assert read_index(tmp_path / "i").num_passages == 1


def test_what_was_measured_is_kept_and_shown(folder: Path) -> None:
    measured = json.loads((folder / "synthetic.json").read_text())
    index = read_index(folder)
    assert measured["tokens"] == index.num_tokens
    assert measured["arguments"]["passages"] == 700
    text = table(measured)
    assert "candidates_share @ 4" in text
    assert "queries.masked" in text


@pytest.mark.slow
def test_shape_at_the_size_it_was_fitted_at(tmp_path: Path) -> None:
    """Lengths, use of centroids, cells and candidates of short queries: within 30% of the real index of Shape."""
    measured = make(tmp_path / "i", passages=18_570, centroids=16_384, queries=50)
    real: dict[str, Any] = make_synthetic_index.REAL
    short = measured["queries.masked.pt"]
    assert measured["index"]["tokens_a_passage"] == pytest.approx(Shape().mean_doclen, rel=0.02)
    for name in ("centroids_a_passage", "log_sigma_of_tokens_a_centroid"):
        assert measured["index"][name] == pytest.approx(real[name], rel=0.3), name
    for name in ("cells", "candidates_share"):
        for nprobe, value in short[name].items():
            assert value == pytest.approx(real[name][nprobe], rel=0.3), (name, nprobe)
    assert short["best_centroid_score"] == pytest.approx(real["best_centroid_score"], rel=0.05)


def test_refusals_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="dim a multiple of 8"):
        make(tmp_path / "i", nbits=4, dim=48)
    with pytest.raises(ValueError, match="passages: expected at least 1, got 0"):
        make(tmp_path / "i", passages=0)
    with pytest.raises(OSError, match="GB of disk space"):
        make(tmp_path / "i", passages=10**12)
    assert main(["--passages", "0", "--out", str(tmp_path / "i")]) == 1
    assert "passages: expected at least 1" in capsys.readouterr().err
    (tmp_path / "j").mkdir()
    with pytest.raises(FileExistsError, match="a path that does not exist"):
        make(tmp_path / "j")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j"]


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(make_synthetic_index, "_write_chunk", full)
    with pytest.raises(OSError, match="disk full"):
        make(tmp_path / "i")
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path: Path) -> None:
    command = "-m scripts.make_synthetic_index --passages 60 --queries 3 --dim 64 --device cpu --out"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *command.split(), str(tmp_path / "i")], cwd=root, capture_output=True, text=True, check=True
    )
    assert "candidates_share @ 1" in done.stdout
    assert read_index(tmp_path / "i").num_centroids == 512


@pytest.mark.slow
@pytest.mark.usefixtures("stock_extensions")
def test_stock_searches_it(folder: Path) -> None:
    """Stock's own scorer agrees with the oracle on what it ranks."""
    from colbert.infra import ColBERTConfig
    from colbert.search.index_storage import IndexScorer

    config = ColBERTConfig.load_from_index(str(folder))
    config.configure(ncells=2, centroid_score_threshold=0.45, ndocs=400)
    assert (config.dim, config.nbits, config.query_maxlen) == (128, 2, 32)
    scorer = IndexScorer(str(folder), use_gpu=False)
    index = read_index(folder)
    tokens = (index.codes(), index.residuals(), index.centroids, index.bucket_weights, 2, index.offsets)
    for q in torch.load(folder / "queries.pt", weights_only=True)[:3]:
        pids, scores = scorer.rank(config, q[None])
        exact = residual_maxsim(q, *tokens).float()
        assert len(pids) == 100
        assert pids[0] == int(exact.argmax())
        # Stock sums 32 similarities in fp32.
        torch.testing.assert_close(exact[pids], torch.tensor(scores), atol=1e-4, rtol=0)
        assert not torch.allclose(exact[pids].flip(0), torch.tensor(scores), atol=1e-1)
