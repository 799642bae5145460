"""colbert-ai's IndexUpdater itself, beside scorers that hold the same index."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from plaid_tilemaxsim import TileMaxSimScorer
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.placement import describe
from plaid_tilemaxsim.index.pq import read_pq, write_pq
from tests.colbert_fixtures import checkpoint, collection, enabled, index, stock_extensions  # noqa: F401

pytestmark = pytest.mark.usefixtures("device", "enabled", "stock_extensions")
USE_GPU = torch.cuda.is_available()


@pytest.fixture
def path(index, tmp_path):  # noqa: F811
    """A copy whose lists have no padding: with it, IndexUpdater.add fails."""
    copy = shutil.copytree(index, tmp_path / "index")
    pids, lengths = torch.load(copy / "ivf.pid.pt", weights_only=True)
    torch.save((pids[: int(lengths.sum())].clone(), lengths), copy / "ivf.pid.pt")
    return copy


@pytest.fixture
def searcher(path, checkpoint, collection):  # noqa: F811
    from colbert import Searcher
    from colbert.infra import ColBERTConfig

    config = ColBERTConfig(scorer="tilemaxsim", ncells=4, centroid_score_threshold=0.0, ndocs=512)
    with Searcher(
        index=path.name, index_root=str(path.parent), checkpoint=str(checkpoint), collection=collection, config=config,
        verbose=0,
    ) as searcher:  # fmt: skip
        yield searcher


@pytest.fixture
def other(path, searcher):
    """As in another process: it sees what is on disk."""
    with TileMaxSimScorer(str(path), USE_GPU) as scorer:
        scorer.prepare(searcher.config)
        yield scorer


def updater(searcher, checkpoint=None):  # noqa: F811
    from colbert import IndexUpdater

    return IndexUpdater(searcher.config, searcher, checkpoint and str(checkpoint))


@pytest.fixture
def planless(path):
    (path / "plan.json").unlink()


def found(searcher, Q, k=10):
    return searcher.dense_search(Q, k=k)[0]


def test_remove(searcher, other):
    Q = searcher.encode("baro tena kuri")
    before = found(searcher, Q)
    update = updater(searcher)
    update.remove(before[:3])
    assert found(searcher, Q, k=7) == before[3:], "seen at once"
    assert not other.changed()
    assert other.rank(searcher.config, Q, k=10)[0] == before

    update.persist_to_disk()
    assert other.changed()
    assert other.rank(searcher.config, Q, k=10)[0] == before
    assert other.refresh()
    assert other.rank(searcher.config, Q, k=7)[0] == before[3:]
    assert searcher.refresh()
    assert found(searcher, Q, k=7) == before[3:]


def test_add(searcher, other, checkpoint):  # noqa: F811
    text = "kuri kuri tena mosina"
    Q = searcher.encode(text)
    update = updater(searcher, checkpoint)
    added = update.add([text, text])
    assert added == [300, 301]
    after = found(searcher, Q, k=300)
    assert set(added) <= set(after)
    scores = dict(zip(*searcher.dense_search(Q, k=300)[::2], strict=True))
    assert scores[300] == pytest.approx(scores[301])
    assert not other.changed()
    update.persist_to_disk()
    assert other.refresh()
    assert other.num_passages == 302
    assert other.rank(searcher.config, Q, k=300)[0] == after


def test_an_index_that_was_updated_before(searcher, other, path, checkpoint):  # noqa: F811
    """By itself stock saves uninitialised memory the second time."""
    text = "kuri kuri tena mosina"
    Q = searcher.encode(text)
    for pid in (300, 301):
        assert updater_adds(searcher, checkpoint, text) == [pid]
        score = dict(zip(*searcher.dense_search(Q, k=300)[::2], strict=True))[pid]
        assert searcher.refresh()
        assert other.refresh()
        read_index(path, verify="full")
        assert dict(zip(*other.rank(searcher.config, Q, k=300), strict=True))[pid] == score
    scores = dict(zip(*other.rank(searcher.config, Q, k=300), strict=True))
    assert scores[300] == scores[301]


def updater_adds(searcher, checkpoint, text):  # noqa: F811
    update = updater(searcher, checkpoint)
    added = update.add([text])
    update.persist_to_disk()
    return added


def test_a_pq_sidecar_of_before_is_refused(searcher, path):
    pytest.importorskip("faiss")
    write_pq(read_index(path), 16, sample=600, progress=False)
    Q = searcher.encode("baro tena kuri")
    searcher.refresh()  # the sidecar is new
    searcher.configure(scorer_options={"codec": "pq"})
    before = found(searcher, Q)
    update = updater(searcher)
    update.remove(before[:1])
    with pytest.raises(ValueError, match="got one updated in memory; save it and run `plaid-tilemaxsim pq` again"):
        found(searcher, Q)
    update.persist_to_disk()
    with pytest.raises(ValueError, match="index: expected the files that it was made from, got others; run"):
        read_pq(read_index(path))
    searcher.configure(scorer_options={})
    searcher.refresh()
    searcher.configure(scorer_options={"codec": "pq"})
    with pytest.raises(ValueError, match=f"got others; run `plaid-tilemaxsim pq {path} --m 16` again"):
        found(searcher, Q)
    write_pq(read_index(path), 16, sample=600, progress=False)
    assert before[0] not in found(searcher, Q)


def test_what_needs_plan_json(planless, path, searcher, other, tmp_path):
    """Neither loading, searching nor updating, of stock's; coalesce.py does, as `inspect` says."""
    from colbert.utils import coalesce

    Q = searcher.encode("baro tena kuri")
    (best, *_) = found(searcher, Q)
    searcher.configure(scorer="plaid")
    assert best in found(searcher, Q)
    update = updater(searcher)
    update.remove([best])
    update.persist_to_disk()
    assert best not in found(searcher, Q)
    searcher.configure(scorer="tilemaxsim")
    assert other.refresh()
    assert best not in other.rank(searcher.config, Q)[0]
    assert not (path / "plan.json").exists()
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        coalesce.main(SimpleNamespace(input=str(path), output=str(tmp_path / "out")))
    text, problems = describe(path, "full")
    assert "plan.json" in text
    assert "coalesce.py" in text
    assert not problems
