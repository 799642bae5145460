"""Keeping engines: each is built once, serves until the index changes, and makes room where it must."""

import pytest
import torch

from plaid_tilemaxsim import engines
from plaid_tilemaxsim.config import ScorerConfig
from plaid_tilemaxsim.engine import SearchParams
from plaid_tilemaxsim.engines import Engines
from plaid_tilemaxsim.index.stamps import fingerprint
from tests.synthetic import make_index, make_queries

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
PARAMS = SearchParams(k=10, ncells=2, threshold=0.4, ndocs=128)
# Of one index: names of what is asked for in different words.
PLACES = [{}, {"devices": [DEVICE]}, {"devices": [DEVICE] * 2}, {"devices": [DEVICE] * 2, "replicas": 2}]
PLACES += [{"placement": "host"}, {"placement": "disk"}] if ON_GPU else []


@pytest.fixture
def path(tmp_path):
    return make_index(tmp_path / "index", n=120, dim=64, C=32)


@pytest.fixture
def built(monkeypatch):
    """The options of every engine that is built."""
    found, build = [], engines._build_engine

    def build_engine(index, groups, options, shared=()):
        found.append(options)
        return build(index, groups, options, shared)

    monkeypatch.setattr(engines, "_build_engine", build_engine)
    return found


def get(kept, **options):
    return kept.get(ScorerConfig(**options))[0]


def search(engine, Q):
    pids, scores = engine.search(Q[0], PARAMS)
    return pids.tolist(), scores.tolist()


def test_changing_between_places_builds_each_once(path, built, monkeypatch):
    monkeypatch.setattr(engines, "MOST_ENGINES", len(PLACES))
    kept, Q = Engines(str(path), ON_GPU), make_queries(path, n=1)
    first = [get(kept, **options) for options in PLACES]
    answers = [search(engine, Q) for engine in first]
    assert all(answer == answers[0] for answer in answers)
    for _ in range(2):
        assert [get(kept, **options) for options in PLACES] == first
    assert list(kept) == first
    assert built == [ScorerConfig(**options) for options in PLACES]


def test_only_so_many_are_kept_the_newest(path, built, monkeypatch):
    monkeypatch.setattr(engines, "MOST_ENGINES", 2)
    kept = Engines(str(path), ON_GPU)
    for options in PLACES[:3]:
        get(kept, **options)
    assert len(list(kept)) == 2
    assert kept.newest() is list(kept)[-1] is get(kept, **PLACES[2])
    assert kept.options == ScorerConfig(**PLACES[2])
    get(kept, **PLACES[0])
    assert len(built) == 4


def test_where_memory_is_too_small_for_two(path, built, monkeypatch):
    kept = Engines(str(path), ON_GPU)
    get(kept)
    build = engines._build_engine

    def tight(index, groups, options, shared=()):
        if shared:
            raise RuntimeError("GPU memory: expected more")
        return build(index, groups, options)

    monkeypatch.setattr(engines, "_build_engine", tight)
    for options in ({"codec": "dense"}, {}, {"codec": "dense"}):
        engine = get(kept, **options)
        assert list(kept) == [engine]
    assert len(built) == 4


def test_forget_and_close(path):
    kept, Q = Engines(str(path), ON_GPU), make_queries(path, n=1)
    assert (kept.newest(), kept.options, kept.fingerprint) == (None, None, None)
    engine = get(kept)
    assert kept.fingerprint == fingerprint(path)
    before = search(engine, Q)
    kept.forget()
    assert kept.newest() is None
    assert search(engine, Q) == before
    again = get(kept)
    assert again is not engine
    kept.close()
    assert not list(kept)
    with pytest.raises(ValueError, match="expected an open one, got one that was closed"):
        search(again, Q)


def test_check_files_refuses_what_get_would(path):
    kept = Engines(str(path), ON_GPU)
    kept.check_files(ScorerConfig())
    with pytest.raises(ValueError, match="got none; run `plaid-tilemaxsim pq "):
        kept.check_files(ScorerConfig(codec="pq"))
    codes = torch.load(path / "0.codes.pt")
    torch.save(codes.index_fill(0, torch.tensor([5]), 1 << 20), path / "0.codes.pt")
    for ask in (kept.check_files, kept.get):
        with pytest.raises(ValueError, match="codes: expected values in"):
            ask(ScorerConfig())
