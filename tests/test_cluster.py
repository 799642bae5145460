"""A Ray cluster of processes on this machine: one machine's results to the bit; shards that are lost or slow."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from plaid_tilemaxsim import cluster
from plaid_tilemaxsim.config import ScorerConfig
from plaid_tilemaxsim.engine import SearchEngine, with_defaults
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.index.split import split_index
from tests.colbert_fixtures import checkpoint  # noqa: F401
from tests.synthetic import make_index

N, LQ, SHARDS = 400, 8, 3

if importlib.util.find_spec("ray") is None:
    pytest.skip('Ray is not installed: pip install "plaid-tilemaxsim[cluster]"', allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint):  # noqa: F811
    path = tmp_path_factory.mktemp("cluster")
    index = make_index(path / "index", n=N, dim=64, C=32, seed=3, checkpoint=checkpoint)
    split_index(index, SHARDS, path / "shards", progress=False)
    return path


@pytest.fixture(scope="module")
def ray_here(folder):
    ray = importlib.import_module("ray")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray.init(num_cpus=2 * SHARDS, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def searcher(folder, ray_here):
    with cluster.ClusterSearcher(folder / "shards", timeout=20, health_interval=1e6) as one:
        yield one


@pytest.fixture(scope="module")
def whole(folder):
    index = read_index(folder / "index")
    return SearchEngine(load_resident(index, "cpu")), index


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in an actor: products of matrices may have other bits with more
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def queries(whole):
    """Near tokens of the index, so that some centroids pass the threshold."""
    index = whole[1]
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, index.num_tokens, (4 * LQ,), generator=g)
    near = index.centroids[index.codes()[rows].long()].float() + torch.randn(4 * LQ, 64, generator=g) / 16
    return torch.nn.functional.normalize(near, dim=-1).view(4, LQ, 64)


def with_mode(searcher, monkeypatch, **options):
    monkeypatch.setattr(searcher, "options", ScorerConfig(**options))


def same(found, wanted):
    return found[0] == wanted[0].tolist() and found[2] == wanted[1].tolist()


@pytest.mark.parametrize(
    "options", [{}, {"mode": "rerank"}, {"mode": "exhaustive"}, {"mode": "exhaustive", "prefilter": 50}], ids=str
)
def test_equals_one_machine(searcher, whole, queries, options, monkeypatch):
    with_mode(searcher, monkeypatch, **options)
    monkeypatch.setitem(searcher._config, "ndocs", 64)
    for k in (10, 1000):
        params = with_defaults(k, ndocs=64, query_maxlen=32, **options)
        mask = torch.rand(N, generator=torch.Generator().manual_seed(1)) < 0.5
        some = torch.arange(0, N, 3, dtype=torch.int32)
        for Q in queries:
            found = searcher.dense_search(Q[None], k)
            assert same(found, whole[0].search(Q, params))
            assert found[1] == list(range(1, len(found[0]) + 1))
            assert same(searcher.dense_search(Q[None], k, allow=mask), whole[0].search(Q, params, allow=mask))
            given = [N - 1, 0, 7, 7]
            assert same(searcher.dense_search(Q[None], k, pids=given), whole[0].search(Q, params, pids=given))
            seen: list[torch.Tensor] = []

            def keep(pids, seen=seen, some=some):
                seen.append(pids)
                return pids[torch.isin(pids, some)]

            filtered = searcher.dense_search(Q[None], k, filter_fn=keep)
            assert same(filtered, whole[0].search(Q, params, filter_fn=keep))
            assert torch.equal(*seen)  # the same candidates, in one call
    assert not same(searcher.dense_search(queries[:1], 10), whole[0].search(queries[1], with_defaults(10, **options)))


def test_text(searcher, whole):
    pids, ranks, scores = searcher.search("nari bato", k=5)
    wanted = whole[0].search(searcher.encode("nari bato")[0], with_defaults(5, query_maxlen=32))
    assert same((pids, ranks, scores), wanted)
    texts = {7: "nari bato", 9: "kive"}
    ranking, missing = searcher.search_all(texts, k=5, partial="allow")
    assert missing == {}
    assert ranking.todict()[7] == list(zip(pids, ranks, scores, strict=True))
    assert searcher.search_all(texts, k=5).todict() == ranking.todict()


def test_wrong_calls_are_the_callers(searcher, queries):
    Q = queries[:1]
    with pytest.raises(ValueError, match="Q: expected a floating-point tensor"):
        searcher.dense_search(torch.ones(1, LQ, 32))
    with pytest.raises(ValueError, match="Q: expected one query"):
        searcher.dense_search(queries)
    with pytest.raises(IndexError, match=f"pids: expected 0 .. {N - 1}, got {N}"):
        searcher.dense_search(Q, pids=[N])
    with pytest.raises(ValueError, match="filter_fn: expected to return an int32"):
        searcher.dense_search(Q, filter_fn=lambda pids: pids.long())
    with pytest.raises(ValueError, match="partial: expected"):
        searcher.dense_search(Q, partial="maybe")
    with pytest.raises(ValueError, match="k: expected"):
        searcher.dense_search(Q, k=0)
    assert set(searcher.health().values()) == {"ok"}


def test_arguments(folder, ray_here, monkeypatch):
    with pytest.raises(ValueError, match="gpus: expected at most the 0 of this Ray cluster"):
        cluster.ClusterSearcher(folder / "shards", gpus=1)
    with pytest.raises(ValueError, match=r"cpus: expected at most the 6 .* got 9"):
        cluster.ClusterSearcher(folder / "shards", cpus=3)
    with pytest.raises(ValueError, match=r"shards\.json: file: expected"):
        cluster.ClusterSearcher(folder / "index")
    with pytest.raises(ValueError, match="expected residual or dense on a cluster"):
        cluster.ClusterSearcher(folder / "shards", scorer_options={"codec": "pq"})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install .*cluster"):
        cluster.ClusterSearcher(folder / "shards")


def process_of(ray, searcher, i):
    return ray.get(searcher._actors[i].__ray_call__.remote(lambda self: os.getpid()))


def during(ray, searcher, i):
    """Makes the shard's process stop until it is killed, in the middle of the next search."""
    pid = process_of(ray, searcher, i)
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    return killer


def test_an_actor_killed_during_a_search(searcher, whole, queries, ray_here):
    Q = queries[:1]
    wanted = whole[0].search(Q[0], with_defaults(10, query_maxlen=32))
    killer = during(ray_here, searcher, 1)
    with pytest.raises(cluster.ShardsMissing, match="1 of 3 shards did not answer: shard-001: ") as caught:
        searcher.dense_search(Q, 10)
    killer.join()
    assert list(caught.value.missing) == ["shard-001"]
    assert same(searcher.dense_search(Q, 10), wanted)  # waits for the new actor

    killer = during(ray_here, searcher, 2)
    pids, ranks, _, missing = searcher.dense_search(Q, 10, partial="allow")
    killer.join()
    assert list(missing) == ["shard-002"]
    assert len(pids) == len(ranks) == 10
    assert max(pids) < searcher.manifest.shards[2].first_pid
    found = searcher.dense_search(Q, 10, partial="allow")
    assert found.missing == {}
    assert same(found, wanted)

    for i in range(SHARDS):
        os.kill(process_of(ray_here, searcher, i), signal.SIGKILL)
    with pytest.raises(cluster.ShardsMissing, match="3 of 3 shards"):  # nothing is no partial answer
        searcher.dense_search(Q, 10, partial="allow")
    assert same(searcher.dense_search(Q, 10), wanted)


def test_killed_among_many_searches(searcher, whole, queries, ray_here):
    """Every answer is the whole index's or an error: none lacks passages and says nothing."""
    params = with_defaults(10, query_maxlen=32)
    wanted = [whole[0].search(Q, params) for Q in queries]
    outcomes: list[str] = []

    def run(i):
        for _ in range(12):
            try:
                found = searcher.dense_search(queries[i : i + 1], 10)
            except cluster.ShardsMissing as missing:
                outcomes.append("missing" if list(missing.missing) == ["shard-001"] else "another shard")
            else:
                outcomes.append("whole" if same(found, wanted[i]) else "wrong")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(queries))]
    pid = process_of(ray_here, searcher, 1)
    for thread in threads:
        thread.start()
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(outcomes) == 12 * len(queries)
    assert set(outcomes) == {"whole", "missing"}


def test_a_device_that_is_lost(searcher, whole, queries, ray_here):
    """The process lives and its searches fail: the shard is named, and the health check starts another."""

    class Lost:
        @property
        def device(self):
            raise RuntimeError("the device is gone")

    def lose(actor):
        actor._resident = Lost()
        actor._ready = lambda within: actor._resident.device

    ray_here.get(searcher._actors[0].__ray_call__.remote(lose))
    with pytest.raises(cluster.ShardsMissing, match="shard-000: RuntimeError: the device is gone"):
        searcher.dense_search(queries[:1])
    assert searcher.health()["shard-000"] == "RuntimeError: the device is gone"
    wanted = whole[0].search(queries[0], with_defaults(10, query_maxlen=32))
    assert same(searcher.dense_search(queries[:1], 10), wanted)


def test_a_slow_shard(searcher, queries, ray_here, monkeypatch):
    monkeypatch.setattr(searcher, "timeout", 0.5)
    pid = process_of(ray_here, searcher, 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(cluster.ShardsMissing, match=r"shard-000: no answer within 0\.5 s"):
            searcher.dense_search(queries[:1])
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(searcher, "timeout", 20)
    assert len(searcher.dense_search(queries[:1])) == 3


def test_the_health_check_starts_lost_actors(searcher, whole, queries, ray_here):
    os.kill(process_of(ray_here, searcher, 0), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while searcher.health()["shard-000"] in ("ok", "loading"):  # Ray notices after a while
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while set(searcher.health().values()) != {"ok"}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wanted = whole[0].search(queries[0], with_defaults(10, query_maxlen=32))
    assert same(searcher.dense_search(queries[:1], 10), wanted)


def test_a_damaged_shard_is_named(folder, ray_here, tmp_path):
    shutil.copytree(folder / "shards", tmp_path / "shards")
    (tmp_path / "shards" / "shard-001" / "centroids.pt").unlink()
    with pytest.raises(cluster.ShardsMissing, match=r"shard-001: .*centroids\.pt"):
        cluster.ClusterSearcher(tmp_path / "shards", load_timeout=30)


def test_a_shard_with_other_contents_is_named(folder, ray_here, tmp_path):
    shutil.copytree(folder / "shards", tmp_path / "shards")
    file = tmp_path / "shards" / "shard-001" / "0.residuals.pt"
    torch.save(torch.load(file).flip(0).clone(), file)
    with pytest.raises(cluster.ShardsMissing, match=r"shard-001: .*sha256 of the files"):
        cluster.ClusterSearcher(tmp_path / "shards", cpus=0.5, scorer_options={"verify": "full"}, load_timeout=30)


def test_closed(folder, ray_here, queries):
    with cluster.ClusterSearcher(folder / "shards", load_timeout=30) as one:
        pass
    one.close()
    with pytest.raises(ValueError, match="expected an open one"):
        one.dense_search(queries[:1])


def test_closed_during_searches(folder, ray_here, queries):
    """They end at once, as those that begin later, and do not blame the shards."""
    one = cluster.ClusterSearcher(folder / "shards", cpus=0.5, health_interval=0.2)
    ends = []

    def run():
        try:
            while True:
                one.dense_search(queries[:1], partial="allow")
        except (ValueError, RuntimeError) as error:
            ends.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    one.close()
    for thread in threads:
        thread.join(10)
    assert [f"{type(end).__name__}: {end}" for end in ends] == 3 * [
        "ValueError: searcher: expected an open one, got one that was closed"
    ]


ALONE = """
import sys, ray, torch
from plaid_tilemaxsim.cluster import ClusterSearcher
Q = torch.nn.functional.normalize(torch.ones(1, 4, 64), dim=-1)
shards = sys.argv[1]
first, second = (ClusterSearcher(shards, cpus=0.1, health_interval=0.2) for _ in range(2))
first.close()
assert len(second.dense_search(Q)) == 3, "the first one took Ray away"
second.close()
assert not ray.is_initialized()
third = ClusterSearcher(shards, cpus=0.1)
ray.shutdown()
third.close()
assert not ray.is_initialized(), "close started Ray"
"""


def test_the_last_searcher_ends_ray(folder):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder / "shards")], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_on_a_gpu(folder, ray_here, whole, queries):
    """Two shards on one GPU: 16-bit inverse norms are steps over the range of both."""
    one = SearchEngine(load_resident(whole[1], "cuda"))
    params = with_defaults(10, query_maxlen=32)
    split_index(folder / "index", 2, folder / "two", progress=False)
    with cluster.ClusterSearcher(folder / "two", gpus=0.5, load_timeout=120) as searcher:
        for Q in queries:
            assert same(searcher.dense_search(Q[None], 10), one.search(Q, params))
            found = searcher.dense_search(Q[None], 10, filter_fn=lambda pids: pids[::2])
            assert same(found, one.search(Q, params, filter_fn=lambda pids: pids[::2].contiguous()))
