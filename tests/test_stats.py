"""What searches say of themselves: on_search, last_search_stats, and nothing where nobody asks."""

import threading
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch

from plaid_tilemaxsim import TileMaxSimScorer
from plaid_tilemaxsim.stats import SearchStats, Watch
from tests.synthetic import make_index, make_queries

pytestmark = pytest.mark.usefixtures("device")  # on a GPU where there is one
USE_GPU = torch.cuda.is_available()
EXPECTED = {
    "plaid": ["centroids", "candidates", "prune", "exact", "topk"],
    "rerank": ["centroids", "candidates", "exact", "topk"],
    "exhaustive": ["centroids", "candidates", "exact", "topk"],
}


def settings(**options):
    return SimpleNamespace(
        scorer="tilemaxsim", scorer_options=options, ncells=2, centroid_score_threshold=0.4, ndocs=128, query_maxlen=32
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("index") / "plain")


@pytest.fixture
def ranker(path):
    return TileMaxSimScorer(str(path), USE_GPU)


@pytest.fixture(scope="module")
def Q(path):
    return make_queries(path, n=3)


def test_stats_are_frozen():
    stats = SearchStats("plaid", "residual", "gpu", 10, 1, 10, 0.1)
    with pytest.raises(FrozenInstanceError):
        stats.mode = "rerank"  # type: ignore[misc]


def test_nothing_is_measured_unless_asked(ranker, Q, monkeypatch):
    monkeypatch.setattr(Watch, "__init__", lambda self: pytest.fail("nobody asked"))
    ranker.rank(settings(), Q[:1], k=10)
    ranker.search_batch(settings(), Q, 10)
    assert ranker.last_search_stats is None


@pytest.mark.parametrize("mode", EXPECTED)
def test_stages_of_a_search(ranker, Q, mode):
    config = settings(stats=True, mode=mode)
    want = ranker.rank(settings(mode=mode), Q[:1], k=10)
    assert ranker.last_search_stats is None
    assert ranker.rank(config, Q[:1], k=10) == want
    stats = ranker.last_search_stats
    assert stats is not None
    assert stats == replace(
        SearchStats(mode, "residual", "gpu" if USE_GPU else "cpu", 10, 1, 10, stats.seconds),
        candidates=None if mode == "exhaustive" else ranker.retrieve(config, Q[:1])[0].numel(),
        stages=stats.stages,
    )
    assert list(stats.stages) == EXPECTED[mode]
    assert all(seconds > 0 for name, seconds in stats.stages.items() if name != "candidates")
    assert sum(stats.stages.values()) < stats.seconds


def test_the_hook_hears_of_every_call(ranker, Q):
    heard: list[SearchStats] = []
    ranker.on_search = heard.append
    ranker.rank(settings(), Q[:1], k=10)
    ranker.rank(settings(mode="exhaustive"), Q[:1], k=5)
    ranker.rank(settings(), Q[:1], pids=[1, 2, 3])
    ranker.rank(settings(), Q, pids=[1, 2, 3])
    ranker.search_batch(settings(), Q, 10)
    with pytest.raises(ValueError, match="Q: expected"):
        ranker.rank(settings(), Q[0, :1], k=10)
    found = [(stats.mode, stats.k, stats.queries, stats.results) for stats in heard]
    assert found == [
        ("plaid", 10, 1, 10), ("exhaustive", 5, 1, 5), ("pids", None, 1, 3), ("pids", None, 3, 3), ("plaid", 10, 3, 30)
    ]  # fmt: skip
    assert all(stats.stages == {} and stats.candidates is None and stats.seconds > 0 for stats in heard)


def test_the_hook_gets_the_stages_too(ranker, Q):
    heard: list[SearchStats] = []
    ranker.on_search = heard.append
    ranker.rank(settings(stats=True), Q[:1], k=10)
    assert heard == [ranker.last_search_stats]
    assert list(heard[0].stages) == EXPECTED["plaid"]
    ranker.rank(settings(stats=True), Q[:1], pids=[1, 2])
    assert list(heard[1].stages) == ["centroids", "exact", "topk"]
    ranker.rank(settings(stats=True), Q[:1], k=3, filter_fn=lambda pids: pids[::2])
    assert heard[2].candidates == heard[0].candidates
    assert "candidates" not in heard[2].stages


def test_each_thread_sees_its_own(ranker, Q):
    ranker.rank(settings(stats=True), Q[:1], k=7)
    seen = []
    other = threading.Thread(target=lambda: seen.append(ranker.last_search_stats))
    other.start()
    other.join()
    assert seen == [None]
    assert ranker.last_search_stats.k == 7
