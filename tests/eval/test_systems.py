"""Stock and the plugin on one Searcher: each does its own work, and the stage marks cover all of stock's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import plaid_tilemaxsim
from eval import systems
from eval.systems import Knobs, Plaid, TileMaxSim, open_systems, unavailable
from eval.systems.maxsim import block_scores, padded_blocks
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
    opened = open_systems(NAMES, index)
    assert list(opened.costs) == NAMES
    assert opened.not_run == {}
    for cost in opened.costs.values():
        assert cost["load_seconds"] >= 0
        assert cost["first_query_ms"] > 0
        assert cost["index_bytes"] > 10_000
        assert (cost["gpu_bytes"] is None) == (not torch.cuda.is_available())
    yield opened.systems
    opened.close()


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
    opened = open_systems(["plaid"], index)
    (stock,) = opened.systems
    assert not plaid_tilemaxsim.is_enabled()
    assert type(stock) is Plaid
    stock.use(KNOBS)
    assert len(stock.search(Q[:1])[0]) == 10
    opened.close()


def test_an_option_that_the_plugin_lacks_is_refused(index, stock_extensions):  # noqa: F811
    with pytest.raises(ValueError, match="mode"):
        open_systems(["tilemaxsim:mode=fast"], index)


def test_each_layout_has_a_ranker_of_its_own(index, stock_extensions, Q):  # noqa: F811
    opened = open_systems(["plaid", "tilemaxsim", "tilemaxsim:mode=rerank", "tilemaxsim:impl=torch"], index)
    _, ours, _, other = opened.systems
    rankers = [system.session for system in opened.systems]  # type: ignore[attr-defined]
    assert rankers[0] is rankers[1] is rankers[2] is not rankers[3]
    for system in (ours, other):
        system.use(KNOBS)
    assert ours.search(Q[:1])[0] == other.search(Q[:1])[0]
    opened.close()


def test_stock_on_the_cpu(index, stock_extensions, Q):  # noqa: F811
    opened = open_systems(["tilemaxsim", "plaid:device=cpu"], index)
    ours, stock = opened.systems
    assert (stock.name, stock.device.type, stock.clamps) == ("plaid:device=cpu", "cpu", True)
    from colbert.infra.config.settings import RunSettings

    assert RunSettings.total_visible_gpus == torch.cuda.device_count()
    for system in (ours, stock):
        system.use(KNOBS)
    assert sorted(stock.rank(Q[:1])[0]) == sorted(ours.rank(Q[:1])[0])
    assert list(stock.stages(Q[:1]))[-1] == "topk"
    opened.close()


def test_batches_are_single_searches(opened, Q):
    for system in opened:
        system.use(KNOBS)
        assert [pids for pids, _ in system.search_batch(Q)] == [system.search(q)[0] for q in Q.split(1)]


EXACT = ["oracle", "maxsim:impl=loop", "maxsim:impl=eager", "maxsim:impl=compile"]


def test_exact_systems_agree(index, Q):  # noqa: F811
    opened = open_systems(EXACT, index)
    assert [system.name for system in opened.systems] == EXACT
    found = []
    for system in opened.systems:
        system.use(KNOBS)
        found.append(system.search(Q[:1]))
        assert list(system.stages(Q[:1])) == ["search"]
        assert len(system.candidates(Q[:1])) == 0
    (best, truth), *others = found
    limit = 0.03 if torch.cuda.is_available() else 1e-4
    for pids, scores in others:
        assert len(set(pids) & set(best)) >= len(best) - 1
        assert scores == pytest.approx(truth, abs=limit)
    # the same passages in another order are not the same search
    wrong = [truth[-1], *truth[:-1]]
    assert wrong != pytest.approx(truth, abs=limit)
    opened.close()


def test_padding_scores_nothing():
    vectors = torch.nn.functional.normalize(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    offsets = torch.tensor([0, 5, 5, 6, 12])
    blocks = padded_blocks(vectors, offsets)
    assert sorted(pid for pids, *_ in blocks for pid in pids.tolist()) == [0, 2, 3]
    q = -vectors[:2]  # every similarity with the padding of a passage could be its best
    for pids, block, padding in blocks:
        for pid, score in zip(pids.tolist(), block_scores(q, block, padding).tolist()):
            a, b = int(offsets[pid]), int(offsets[pid + 1])
            assert score == pytest.approx(float((vectors[a:b] @ q.T).amax(0).sum()), abs=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they may run where there is a GPU")
@pytest.mark.parametrize("impl", ["flash-maxsim", "late-interaction-kernels"])
def test_what_is_not_installed_is_told(index, impl):  # noqa: F811
    opened = open_systems(["oracle", f"maxsim:impl={impl}"], index)
    assert list(opened.costs) == ["oracle"]
    why = opened.not_run[f"maxsim:impl={impl}"]
    assert why.reason
    assert unavailable(f"maxsim:impl={impl}").reason == why.reason
    assert unavailable("oracle") is None


def test_no_index(tmp_path):
    with pytest.raises(ValueError, match=r"expected a PLAID index, found no metadata\.json"):
        open_systems(["plaid"], tmp_path)


def test_names_of_options():
    assert TileMaxSim.scorer == "tilemaxsim"
    with pytest.raises(ValueError, match="system: expected plaid, tilemaxsim"):
        open_systems(["tilemaxsim:mode"], Path())
