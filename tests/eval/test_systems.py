"""Stock and the plugin on one Searcher: each does its own work, and the stage marks cover all of stock's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import plaid_tilemaxsim
from eval import systems
from eval.systems import Knobs, Plaid, TileMaxSim, open_systems
from tests.colbert_fixtures import checkpoint, index, stock_extensions  # noqa: F401
from tests.synthetic import make_queries

KNOBS = Knobs(k=10, ncells=2, centroid_score_threshold=0.4, ndocs=200)
NAMES = ["plaid", "tilemaxsim", "tilemaxsim:mode=rerank"]


@pytest.fixture(autouse=True)
def left_as_it_was():
    yield
    plaid_tilemaxsim.disable()


@pytest.fixture
def opened(index: Path, stock_extensions):  # noqa: F811
    session, opened, seconds = open_systems(NAMES, index)
    assert list(seconds) == NAMES
    assert all(value >= 0 for value in seconds.values())
    yield opened
    session.close()


@pytest.fixture
def Q(index: Path):  # noqa: F811
    return make_queries(index, n=2)


def test_each_system_is_who_it_says(opened, Q):
    stock, ours, rerank = opened
    assert (stock.name, ours.name, rerank.name) == tuple(NAMES)
    assert (stock.follows_plaid, ours.follows_plaid, rerank.follows_plaid) == (True, True, False)
    assert (stock.clamps, ours.clamps) == (not torch.cuda.is_available(), False)
    for system in opened:
        system.use(KNOBS)
        pids, scores = system.search(Q[:1])
        assert len(pids) == len(scores) == 10
        ranked, all_scores = system.rank(Q[:1])
        assert (ranked[:10], all_scores[:10]) == (pids, scores)
    stock.use(KNOBS)
    assert len(stock.rank(Q[:1])[0]) == KNOBS.ndocs // 4
    rerank.use(KNOBS)
    assert len(rerank.rank(Q[:1])[0]) == len(rerank.candidates(Q[:1])) > KNOBS.ndocs // 4


def test_both_find_the_same(opened, Q):
    stock, ours, _ = opened
    for i in range(2):
        results = []
        for system in (stock, ours):
            system.use(KNOBS)
            results.append((system.candidates(Q[i : i + 1]), system.rank(Q[i : i + 1])))
        (cells_a, (pids_a, scores_a)), (cells_b, (pids_b, scores_b)) = results
        assert torch.equal(cells_a.long(), cells_b.long())
        assert sorted(pids_a) == sorted(pids_b)
        assert torch.allclose(
            torch.tensor(scores_a), torch.tensor(scores_b), atol=0.04 if torch.cuda.is_available() else 1e-4
        )


def test_stages_are_whole_searches(opened, Q):
    for system, names in zip(
        opened,
        (
            ["centroids", "candidates", "prune", "decompress", "maxsim", "topk"],
            ["centroids", "candidates", "prune", "exact", "topk"],
            ["centroids", "candidates", "exact", "topk"],
        ),
    ):
        system.use(KNOBS)
        stages = system.stages(Q[:1])
        assert list(stages) == names
        assert all(value >= 0 for value in stages.values())


def test_marks_leave_stock_as_it_was(opened, Q):
    from colbert.search import index_storage

    stock = opened[0]
    stock.use(KNOBS)
    ranker = stock.session.searcher.ranker
    before = (
        dict(vars(ranker)),
        dict(vars(index_storage.IndexScorer)),
        index_storage.colbert_score_packed,
        stock.rank(Q[:1]),
    )
    stock.stages(Q[:1])
    with pytest.raises(RuntimeError, match="stop"), systems.stock_marks(ranker, stock.session.gpu):
        raise RuntimeError("stop")
    after = (
        dict(vars(ranker)),
        dict(vars(index_storage.IndexScorer)),
        index_storage.colbert_score_packed,
        stock.rank(Q[:1]),
    )
    assert before == after


def test_stock_alone_does_not_enable_the_plugin(index, stock_extensions, Q):  # noqa: F811
    session, (stock,), _ = open_systems(["plaid"], index)
    assert not plaid_tilemaxsim.is_enabled()
    assert type(stock) is Plaid
    stock.use(KNOBS)
    assert len(stock.search(Q[:1])[0]) == 10
    session.close()


def test_an_option_that_the_plugin_lacks_is_refused(index, stock_extensions):  # noqa: F811
    with pytest.raises(ValueError, match="mode"):
        open_systems(["tilemaxsim:mode=fast"], index)


def test_layouts_are_not_mixed(index):  # noqa: F811
    with pytest.raises(ValueError, match="systems: expected one placement and impl"):
        open_systems(["tilemaxsim", "tilemaxsim:placement=host"], index)


def test_no_index(tmp_path):
    with pytest.raises(ValueError, match=r"expected a PLAID index, found no metadata\.json"):
        open_systems(["plaid"], tmp_path)


def test_names_of_options():
    assert TileMaxSim.scorer == "tilemaxsim"
    with pytest.raises(ValueError, match="system: expected plaid or tilemaxsim"):
        open_systems(["tilemaxsim:mode"], Path())
