"""Scorers over time: many threads, closing, indexes that change on disk, loads that fail or are interrupted."""

import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import plaid_tilemaxsim
from plaid_tilemaxsim import TileMaxSimScorer, compat, engines, faults
from plaid_tilemaxsim.engine import SearchEngine, SearchParams
from plaid_tilemaxsim.index import resident
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.mapped import MappedRows
from plaid_tilemaxsim.index.pq import write_pq
from plaid_tilemaxsim.index.stamps import fingerprint
from plaid_tilemaxsim.index.transfer import copy_staged
from tests.colbert_fixtures import checkpoint, collection, enabled, index, stock_extensions  # noqa: F401
from tests.synthetic import make_index, make_queries

pytestmark = pytest.mark.usefixtures("device")  # on a GPU where there is one
USE_GPU = torch.cuda.is_available()


def settings(*, k_fields=(2, 0.4, 128), scorer="tilemaxsim", **options):
    ncells, threshold, ndocs = k_fields
    return SimpleNamespace(
        scorer=scorer, scorer_options=options, ncells=ncells, centroid_score_threshold=threshold, ndocs=ndocs,
        query_maxlen=32, interaction="colbert", total_visible_gpus=torch.cuda.device_count(),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return make_index(tmp_path / "index")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("plain") / "index")


def together(n: int, work) -> None:
    """work(i) in n threads that start at the same moment; raises what one of them raised."""
    barrier, errors = threading.Barrier(n), []

    def start(i: int) -> None:
        barrier.wait()
        try:
            work(i)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def calls(ranker, Q):
    """Searches of every kind, as functions of a query's number."""
    kinds = [
        lambda i: ranker.rank(settings(), Q[i : i + 1], k=10),
        lambda i: ranker.rank(settings(mode="rerank"), Q[i : i + 1], k=100),
        lambda i: ranker.rank(settings(mode="exhaustive", stats=True), Q[i : i + 1], k=5),
        lambda i: ranker.rank(settings(), Q[i : i + 1], pids=[i, 7, 7, 250]),
        lambda i: ranker.rank(settings(), Q[i : i + 1], k=10, filter_fn=lambda pids: pids[pids % 2 == 0]),
        lambda i: ranker.search_batch(settings(), Q[i : i + 3], 10),
    ]
    return [(kind, i) for i in range(len(Q) - 2) for kind in kinds]


class TestThreads:
    @pytest.mark.parametrize(
        "searches", [40, pytest.param(1000, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.gpu)]
    )
    def test_eight_threads_find_what_one_finds(self, plain, searches):
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=8)
        todo = calls(ranker, Q)
        want = [call(i) for call, i in todo]

        def work(thread: int) -> None:
            for step in range(searches):
                n = (thread * 13 + step * 7) % len(todo)
                call, i = todo[n]
                assert call(i) == want[n]

        together(8, work)

    def test_a_first_search_in_every_thread(self, plain, monkeypatch):
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=8)
        built, build = [], engines._build_engine

        def counted(*args):
            built.append(args)
            return build(*args)

        monkeypatch.setattr(engines, "_build_engine", counted)
        found: dict[int, object] = {}

        def work(i: int) -> None:
            ranker.warmup(settings(), 10)
            found[i] = ranker.rank(settings(), Q[i : i + 1], k=10)

        together(8, work)
        assert len(built) == 1
        other = TileMaxSimScorer(str(plain), USE_GPU)
        assert found == {i: other.rank(settings(), Q[i : i + 1], k=10) for i in range(8)}

    def test_two_scorers_on_two_indexes(self, plain, tmp_path):
        """Each warmed up while the other searches."""
        paths = [plain, make_index(tmp_path / "other", n=200, dim=128, nbits=4, seed=5)]
        queries = [make_queries(path, n=4) for path in paths]
        want = [
            [TileMaxSimScorer(str(path), USE_GPU).rank(settings(), q[None], k=10) for q in Q]
            for path, Q in zip(paths, queries, strict=True)
        ]
        assert want[0] != want[1]
        rankers = [TileMaxSimScorer(str(path), USE_GPU) for path in paths]

        def work(i: int) -> None:
            which = i % 2
            for _ in range(5):
                assert [rankers[which].rank(settings(), q[None], k=10) for q in queries[which]] == want[which]

        together(4, work)


class TestClose:
    def test_later_searches_say_so(self, plain):
        Q = make_queries(plain, n=2)
        with TileMaxSimScorer(str(plain), USE_GPU) as ranker:
            assert ranker.rank(settings(), Q[:1], k=3)[0]
        ranker.close()
        for call in (
            lambda: ranker.rank(settings(), Q[:1], k=3),
            lambda: ranker.rank(settings(scorer="plaid"), Q[:1], k=3),
            lambda: ranker.search_batch(settings(), Q, 3),
            lambda: ranker.score_pids(settings(), Q[:1], [1]),
            lambda: ranker.retrieve(settings(), Q[:1]),
            lambda: ranker.warmup(settings(), 3),
            lambda: ranker.prepare(settings()),
            lambda: ranker.refresh(),
            lambda: ranker.doclens,
        ):
            with pytest.raises(ValueError, match="scorer: expected an open one, got one that was closed"):
                call()

    def test_while_threads_search(self, plain):
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=1)
        want = ranker.rank(settings(), Q, k=10)
        refused: list[str] = []

        def work(i: int) -> None:
            if i == 0:
                ranker.close()
                return
            try:
                while True:
                    assert ranker.rank(settings(), Q, k=10) == want
            except ValueError as error:
                refused.append(str(error))

        together(5, work)
        assert len(refused) == 4
        assert all("expected an open one, got one that was closed" in words for words in refused)

    @pytest.mark.gpu
    def test_memory_comes_back(self, plain):
        Q = make_queries(plain, n=1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        ranker = TileMaxSimScorer(str(plain), USE_GPU)
        ranker.rank(settings(), Q, k=10)
        ranker.rank(settings(codec="dense"), Q, k=10)
        assert torch.cuda.memory_allocated() > before + 100_000
        ranker.close()
        assert torch.cuda.memory_allocated() <= before + 50_000

    def test_memory_of_stocks_side(self, plain, stock_extensions):  # noqa: F811
        ranker = TileMaxSimScorer(str(plain), USE_GPU)
        ranker.prepare(settings(scorer="plaid"))
        assert "embeddings" in vars(ranker)
        ranker.close()
        assert not {"embeddings", "codec", "ivf", "doclens"} & vars(ranker).keys()


def rewrite(path: Path, **changes) -> None:
    """Another index in the folder, as re-indexing with overwrite leaves it."""
    shutil.rmtree(path)
    make_index(path, **changes)


class TestRefresh:
    def test_an_index_that_stays(self, path):
        ranker = TileMaxSimScorer(str(path), USE_GPU)
        assert not ranker.changed()
        assert not ranker.refresh()
        ranker.rank(settings(), make_queries(path, n=1), k=3)
        engine = ranker._engine
        assert not ranker.changed()
        assert not ranker.refresh()
        assert ranker._engine is engine

    def test_indexed_again(self, path):
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        before = ranker.rank(settings(), Q, k=10)
        rewrite(path, n=200, seed=7)
        assert ranker.changed()
        assert ranker.rank(settings(), Q, k=10) == before, "copied when it was loaded"
        assert ranker.refresh()
        assert not ranker.changed()
        assert ranker.num_passages == 200
        after = ranker.rank(settings(), Q, k=10)
        assert after == TileMaxSimScorer(str(path), USE_GPU).rank(settings(), Q, k=10) != before

    def test_an_index_that_is_being_written(self, path):
        """The old one is searched until the new one is complete."""
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        before = ranker.rank(settings(), Q, k=10)
        (path / "ivf.pid.pt").unlink()
        with pytest.raises(ValueError, match=r"ivf\.pid\.pt"):
            ranker.refresh()
        assert ranker.rank(settings(), Q, k=10) == before

    def test_an_index_that_only_loading_refuses(self, path):
        """Codes out of range pass the structure's checks, as does a product quantiser of the index before."""
        pytest.importorskip("faiss")
        write_pq(read_index(path), 16, sample=600, progress=False)
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        config = settings(codec="pq")
        before = ranker.rank(config, Q, k=10)
        codes = torch.load(path / "0.codes.pt")
        torch.save(codes.index_fill(0, torch.tensor([5]), 1 << 20), path / "0.codes.pt")
        with pytest.raises(ValueError, match=r"0\.codes\.pt: codes: expected values in .* got 1048576 at position 5"):
            ranker.refresh()
        assert ranker.rank(config, Q, k=10) == before
        torch.save(codes.flip(0), path / "0.codes.pt")
        with pytest.raises(ValueError, match=r"pq16\.json: index: expected the files that it was made from"):
            ranker.refresh()
        assert ranker.changed()
        assert ranker.rank(config, Q, k=10) == before
        torch.save(codes, path / "0.codes.pt")
        assert ranker.refresh()
        assert ranker.rank(config, Q, k=10) == before

    def test_files_that_change_during_a_load(self, path, monkeypatch):
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        build = engines._build_engine

        def build_slowly(*args):
            os.utime(path / "0.codes.pt")
            return build(*args)

        with monkeypatch.context() as patch:
            patch.setattr(engines, "_build_engine", build_slowly)
            with pytest.raises(ValueError, match="expected them to stay while they are read, got others"):
                ranker.rank(settings(), Q, k=10)
        assert len(ranker.rank(settings(), Q, k=10)[0]) == 10

    def test_other_threads_search_meanwhile(self, path):
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        before = ranker.rank(settings(), Q, k=10)
        rewrite(path, n=200, seed=7)
        after = TileMaxSimScorer(str(path), USE_GPU).rank(settings(), Q, k=10)
        done = threading.Event()

        def work(i: int) -> None:
            if i == 0:
                ranker.refresh()
                done.set()
                return
            while not done.is_set():
                assert ranker.rank(settings(), Q, k=10) in (before, after)
            assert ranker.rank(settings(), Q, k=10) == after

        together(4, work)

    def test_stocks_side_is_loaded_again_too(self, path, stock_extensions):  # noqa: F811
        ranker = TileMaxSimScorer(str(path), USE_GPU)
        ranker.prepare(settings(scorer="plaid"))
        assert len(ranker.doclens) == 300
        (path / "ivf.pid.pt").unlink()
        with pytest.raises(ValueError, match=r"ivf\.pid\.pt"):
            ranker.refresh()
        assert len(ranker.doclens) == 300
        rewrite(path, n=200)
        assert ranker.changed()
        assert ranker.refresh()
        assert len(ranker.doclens) == 200
        assert not ranker.changed()

    def test_a_search_while_stocks_side_is_let_go_of(self, path, stock_extensions):  # noqa: F811
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        ranker.prepare(settings(scorer="plaid"))
        before = ranker.rank(settings(), Q, k=10)
        del ranker.ivf
        assert ranker.rank(settings(), Q, k=10) == before

    def test_unsaved_updates_are_named(self, path, stock_extensions, caplog):  # noqa: F811
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        before = ranker.rank(settings(), Q, k=10)
        ranker.ivf = type(ranker.ivf)(ranker.ivf.tensor[:1], (ranker.ivf.lengths * 0), use_gpu=False)
        assert ranker.rank(settings(), Q, k=10) == ([], [])
        assert not ranker.refresh(), "the files are as they were"
        assert ranker.rank(settings(), Q, k=10) == ([], [])
        os.utime(path / "0.codes.pt")
        assert ranker.refresh()
        assert "not saved are gone" in caplog.text
        assert ranker.rank(settings(), Q, k=10) == before

    def test_fingerprints(self, path):
        first = fingerprint(path)
        (path / "notes.txt").write_text("of no concern")
        assert fingerprint(path) == first
        (path / "pq16.json").write_text("{}")
        assert fingerprint(path) != first
        assert fingerprint(path / "none") == ""


class TestSearcher:
    @pytest.fixture
    def searcher(self, path, checkpoint, collection, enabled):  # noqa: F811
        from colbert import Searcher
        from colbert.infra import ColBERTConfig

        config = ColBERTConfig(scorer="tilemaxsim", ncells=2, centroid_score_threshold=0.4, ndocs=128)
        return Searcher(
            index=path.name, index_root=str(path.parent), checkpoint=str(checkpoint), collection=collection,
            config=config, verbose=0,
        )  # fmt: skip

    def test_with(self, searcher):
        with searcher as same:
            assert same is searcher
            assert len(searcher.search("baro tena", k=3)[0]) == 3
        searcher.close()
        with pytest.raises(ValueError, match="got one that was closed"):
            searcher.search("baro tena", k=3)

    def test_a_changed_index(self, searcher, path, caplog):
        searcher.search("baro tena", k=3)
        searcher.configure(ncells=3)
        assert not searcher.refresh()
        assert "have changed" not in caplog.text
        rewrite(path, n=200)
        searcher.configure(ncells=4)
        assert "the files have changed since they were loaded; refresh()" in caplog.text
        assert searcher.refresh()
        assert "the index has 200 passages and the collection 300" in caplog.text
        assert max(searcher.search("baro tena", k=200)[0]) < 200

    def test_disabled_again(self, searcher):
        plaid_tilemaxsim.disable()
        assert not hasattr(searcher, "close")
        assert not hasattr(type(searcher), "__enter__")
        searcher.ranker.close()

    def test_a_searcher_of_before(self, path, checkpoint, collection, stock_extensions):  # noqa: F811
        compat.apply()
        from colbert import Searcher

        searcher = Searcher(
            index=path.name, index_root=str(path.parent), checkpoint=str(checkpoint), collection=collection, verbose=0
        )
        plaid_tilemaxsim.enable()
        try:
            with pytest.raises(ValueError, match="close: expected a Searcher that was made with plaid_tilemaxsim"):
                searcher.close()
        finally:
            plaid_tilemaxsim.disable()


class TestLoad:
    def test_memory_that_runs_out_in_spite_of_the_plan(self, path, monkeypatch):
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        with monkeypatch.context() as patch:

            def load(*args, **kwargs):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")

            patch.setattr(SearchEngine, "__init__", load)
            expected = "would fit: gpu, host, disk" if USE_GPU else "of host memory are available"
            with pytest.raises(RuntimeError, match=f"index: .*Tried to allocate 7 GiB; .*{expected}"):
                ranker.rank(settings(), Q, k=3)
        assert len(ranker.rank(settings(), Q, k=3)[0]) == 3

    @pytest.mark.parametrize("where", ["_check_contents", "byte_table", "SearchEngine"])
    def test_interrupted(self, path, monkeypatch, where):
        """The next search loads again, and nothing was written."""
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        before = fingerprint(path)

        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        owner = SearchEngine if where == "SearchEngine" else resident
        with monkeypatch.context() as patch:
            patch.setattr(owner, "__init__" if where == "SearchEngine" else where, interrupt)
            if where == "byte_table" and USE_GPU:
                pytest.skip("of the CPU")
            with pytest.raises(KeyboardInterrupt):
                ranker.rank(settings(), Q, k=3)
        assert ranker._engine is None
        assert len(ranker.rank(settings(), Q, k=3)[0]) == 3
        assert fingerprint(path) == before

    def test_interrupted_between_threads_that_copy(self):
        """Those that have begun end, the others do not begin; nobody waits for ever."""
        source = torch.arange(100, dtype=torch.uint8).repeat(1000)
        copies = [(source, torch.zeros_like(source)) for _ in range(50)]

        def interrupt(count: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            copy_staged(copies, SimpleNamespace(update=interrupt))
        assert not all(torch.equal(a, b) for a, b in copies)

    def test_after_a_fork(self, path, monkeypatch):
        """A CPU search instead of the one asked for would be a silent one: CUDA looks absent there."""
        monkeypatch.setattr(faults, "_forked", True)
        with pytest.raises(RuntimeError, match=r'get_context\("spawn"\)'):
            TileMaxSimScorer(str(path), True).rank(settings(), make_queries(path, n=1), k=3)


class TestFilesUnderAMap:
    """Indexes larger than memory are searched in their files. A map of a file that was cut off kills the process."""

    def damage(self, file: Path, how: str) -> None:
        if how == "gone":
            file.unlink()
        elif how == "cut off":
            os.truncate(file, 100)
        else:
            os.utime(file, ns=(1, 1))

    @pytest.mark.parametrize(("how", "got"), [("gone", "No such file"), ("cut off", "100 bytes"), ("other", "later")])
    def test_placement_disk(self, path, how, got, device):
        index = read_index(path)  # noqa: F811
        rows = MappedRows(index.chunks)
        expected = rows[0:10].clone()
        self.damage(path / "1.residuals.pt", how)
        assert torch.equal(rows[0:10], expected), "another chunk's file"
        with pytest.raises(ValueError, match=rf"1\.residuals\.pt: file: expected the \d+ bytes .*got .*{got}.*refresh"):
            rows[0 : rows.num_rows]

    @pytest.mark.parametrize("how", ["gone", "cut off"])
    def test_a_large_index_on_a_cpu(self, tmp_path, how, monkeypatch):
        path = make_index(tmp_path / "index", chunk_size=1000)
        monkeypatch.setattr(resident, "available_memory", lambda: 1000)
        engine = SearchEngine(resident.load_resident(read_index(path), "cpu"))
        Q = make_queries(path, n=1)[0]
        assert len(engine.search(Q, SearchParams(k=5))[0]) == 5
        self.damage(path / "0.residuals.pt", how)
        with pytest.raises(ValueError, match=r"0\.residuals\.pt: file: expected the"):
            engine.search(Q, SearchParams(k=5))

    @pytest.mark.parametrize("how", ["gone", "cut off"])
    def test_what_fits_into_memory_is_copied(self, path, how):
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        before = ranker.rank(settings(), Q, k=10)
        for file in path.glob("*.pt"):
            self.damage(file, how)
        assert ranker.rank(settings(), Q, k=10) == before
        assert ranker.changed()


def test_one_namespace_of_logging(plain, caplog):
    with caplog.at_level(logging.DEBUG):
        TileMaxSimScorer(str(plain), True).rank(settings(k_fields=(2, 0.4, 1)), make_queries(plain, n=1), k=3)
    names = {record.name for record in caplog.records if "site-packages" not in record.pathname}
    assert {name.partition(".")[0] for name in names} == {"plaid_tilemaxsim"}
