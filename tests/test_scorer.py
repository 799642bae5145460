"""TileMaxSimScorer: stock's surface over the engine, on stock's files."""

import copy
import logging
import pickle
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import plaid_tilemaxsim
from plaid_tilemaxsim import compat, engines, scorer
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.pq import read_pq, write_pq
from plaid_tilemaxsim.ops import reference
from tests.colbert_fixtures import DIM, PASSAGES, checkpoint, collection, enabled, index, stock_extensions  # noqa: F401
from tests.synthetic import make_index, make_queries

compat.allow_missing_git()

from colbert.infra import ColBERTConfig  # noqa: E402
from colbert.search.index_storage import IndexScorer  # noqa: E402
from colbert.search.strided_tensor import StridedTensor  # noqa: E402

TileMaxSimScorer = plaid_tilemaxsim.TileMaxSimScorer
USE_GPU = torch.cuda.is_available()
DEVICE = "cuda" if USE_GPU else "cpu"
# DESIGN.md's budget at LQ = 32 and unit vectors; a CPU score is off by 32 fp32 sums only, a GPU score by fp16 inputs.
ATOL = 2e-3


def settings(**fields):
    """A config that a direct user might write."""
    default = {
        "scorer": "tilemaxsim",
        "scorer_options": None,
        "ncells": 2,
        "centroid_score_threshold": 0.4,
        "ndocs": 128,
        "query_maxlen": 32,
        "interaction": "colbert",
        "total_visible_gpus": torch.cuda.device_count(),
    }
    return SimpleNamespace(**(default | fields))


def oracle(path, Q, pids=None):
    """fp64 [n]"""
    index = read_index(path)  # noqa: F811
    return reference.residual_maxsim(
        Q.double(),
        index.codes(),
        index.residuals(),
        index.centroids,
        index.bucket_weights,
        index.nbits,
        index.offsets,
        None if pids is None else torch.as_tensor(pids),
    )


def assert_scores(scores, expected):
    scores, expected = torch.as_tensor(scores).double(), torch.as_tensor(expected).double().cpu()
    torch.testing.assert_close(scores, expected, rtol=0, atol=ATOL)
    shuffled = scores.roll(1)
    assert len(scores) < 2 or not torch.allclose(shuffled, expected, rtol=0, atol=ATOL), "a shuffle would pass"


@pytest.fixture(scope="module", params=[1, 2, 4])
def any_index(request, tmp_path_factory):
    """Negative similarities, empty passages and an empty inverted list."""
    return make_index(tmp_path_factory.mktemp("bits") / str(request.param), nbits=request.param, seed=request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("plain") / "index")


@pytest.fixture(scope="module")
def ranker(plain):
    return TileMaxSimScorer(str(plain), USE_GPU)


class TestRank:
    @pytest.mark.parametrize("k", [None, 1, 10, 1000])
    @pytest.mark.parametrize("mode", ["plaid", "rerank", "exhaustive"])
    def test_scores_are_the_oracles(self, any_index, mode, k):
        ranker = TileMaxSimScorer(str(any_index), USE_GPU)
        config = settings(scorer_options={"mode": mode})
        for Q in make_queries(any_index, n=3).split(1):
            pids, scores = ranker.rank(config, Q, k=k)
            found = {"plaid": 32, "rerank": len(ranker.retrieve(config, Q)[0]), "exhaustive": PASSAGES}[mode]
            assert len(pids) == len(scores) == min(k or found, found)
            assert len(set(pids)) == len(pids)
            assert scores == sorted(scores, reverse=True)
            assert_scores(scores, oracle(any_index, Q[0], pids))

    def test_exhaustive_finds_the_best(self, plain, ranker):
        for Q in make_queries(plain, n=3).split(1):
            expected = oracle(plain, Q[0]).topk(20)
            pids, scores = ranker.rank(settings(scorer_options={"mode": "exhaustive"}), Q, k=20)
            assert_scores(scores, expected.values)
            for i in range(19):
                if expected.values[i] - expected.values[i + 1] > 2 * ATOL:
                    assert set(pids[: i + 1]) == set(expected.indices[: i + 1].tolist())

    @pytest.mark.parametrize("nbits", [1, 2, 4])
    @pytest.mark.usefixtures("stock_extensions")
    def test_same_as_stock(self, tmp_path, nbits):
        """On similarities that are all positive, where stock's CPU and GPU branches mean the same."""
        path = make_index(tmp_path / "index", nbits=nbits, common=2.0)
        stock, ours = IndexScorer(str(path), USE_GPU), TileMaxSimScorer(str(path), USE_GPU)
        config = settings(centroid_score_threshold=0.82, ndocs=64)
        for Q in make_queries(path, n=5).split(1):
            assert set(stock.retrieve(config, Q)[0].tolist()) == set(ours.retrieve(config, Q)[0].tolist())
            stock_pids, stock_scores = stock.rank(config, Q)
            pids, scores = ours.rank(config, Q)
            assert len(pids) == len(stock_pids) == 16
            atol = 2**-5 if USE_GPU else ATOL
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(stock_scores), rtol=0, atol=atol)
            separated = [i for i in range(15) if scores[i] - scores[i + 1] > 2 * atol]
            for i in separated:
                assert set(pids[: i + 1]) == set(stock_pids[: i + 1])
            assert len(separated) > 5

    def test_more_tokens_than_query_maxlen(self, plain, ranker):
        Q = make_queries(plain, n=1, LQ=70)
        config = settings(query_maxlen=8, scorer_options={"mode": "rerank"})
        pids, scores = ranker.rank(config, Q)
        assert sorted(pids) == ranker.retrieve(config, Q[:, :8])[0].tolist()
        assert_scores(scores, oracle(plain, Q[0], pids))

    def test_half_bfloat_and_double(self, plain, ranker):
        Q = make_queries(plain, n=1)
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            pids, scores = ranker.rank(settings(), Q.to(dtype), k=10)
            assert_scores(scores, oracle(plain, Q[0].to(dtype), pids))

    def test_in_inference_mode(self, plain):
        ranker = TileMaxSimScorer(str(plain), USE_GPU)
        Q = make_queries(plain, n=1)
        with torch.inference_mode():
            first = ranker.rank(settings(), Q, k=10)
        assert ranker.rank(settings(), Q, k=10) == first
        engine = ranker._engine
        assert engine is not None
        assert not engine.index.codes.is_inference()

    def test_threads(self, plain):
        ranker = TileMaxSimScorer(str(plain), USE_GPU)
        queries = make_queries(plain, n=16).split(1)
        expected = [TileMaxSimScorer(str(plain), USE_GPU).rank(settings(), Q, k=10) for Q in queries[:2]]
        found: dict[int, tuple[list[int], list[float]]] = {}

        def work(i):
            found[i] = ranker.rank(settings(), queries[i], k=10)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(queries))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[0], found[1]] == expected
        assert all(len(pids) == 10 for pids, _ in found.values())
        assert len(found) == len(queries)

    def test_options_are_read_per_call(self, plain, ranker):
        Q = make_queries(plain, n=1)
        few = ranker.rank(settings(), Q)
        everything = ranker.rank(settings(scorer_options={"mode": "exhaustive"}), Q)
        assert (len(few[0]), len(everything[0])) == (32, PASSAGES)
        assert ranker.rank(settings(), Q) == few


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    pytest.importorskip("faiss")
    path = make_index(tmp_path_factory.mktemp("quantised") / "index")
    stored = read_index(path)
    write_pq(stored, 16, sample=1000, progress=False)
    write_pq(stored, 32, opq=True, sample=1000, progress=False)
    return path


class TestCodecs:
    """scorer_options={"codec": ...}: what each stores, and that one Searcher can change between them."""

    def pq_oracle(self, path, m, Q, pids):
        stored = read_index(path)
        made = read_pq(stored, m)
        Q = Q.double() if made.rotation is None else Q.double() @ made.rotation.double().T
        return reference.pq_maxsim(Q, made.codes, made.codebook, stored.offsets, torch.as_tensor(pids))

    @pytest.mark.parametrize("mode", ["plaid", "rerank", "exhaustive"])
    @pytest.mark.parametrize("codec", ["dense", "16", "32"])
    def test_scores_are_the_oracles(self, quantised, codec, mode):
        ranker = TileMaxSimScorer(str(quantised), USE_GPU)
        options = {"mode": mode} | ({"codec": "dense"} if codec == "dense" else {"codec": "pq", "pq_m": int(codec)})
        Q = make_queries(quantised, n=1)
        pids, scores = ranker.rank(settings(scorer_options=options), Q)
        stock = ranker.rank(settings(scorer_options={"mode": mode}), Q)
        assert sorted(pids) == sorted(stock[0]), "candidates and pruning do not depend on the codec"
        if codec == "dense":
            assert_scores(scores, oracle(quantised, Q[0], pids))
        else:
            expected = self.pq_oracle(quantised, int(codec), Q[0], pids)
            assert_scores(scores, expected)
            off = (expected - oracle(quantised, Q[0], pids))[:20].abs().max()
            assert off > ATOL, "PQ is not what residuals are"
            aligned = ranker.score_pids(settings(scorer_options=options), Q.expand(5, -1, -1), pids[:5])[0]
            assert_scores(aligned, expected[:5])

    def test_sidecars_are_named(self, quantised, plain):
        Q = make_queries(plain, n=1)
        with pytest.raises(ValueError, match=r"got those of M = 16, 32; choose with pq_m"):
            TileMaxSimScorer(str(quantised), USE_GPU).rank(settings(scorer_options={"codec": "pq"}), Q)
        with pytest.raises(ValueError, match=r"expected one of M = 8, got M = 16, 32"):
            TileMaxSimScorer(str(quantised), USE_GPU).rank(settings(scorer_options={"codec": "pq", "pq_m": 8}), Q)
        with pytest.raises(ValueError, match=r"got none; run `plaid-tilemaxsim pq "):
            TileMaxSimScorer(str(plain), USE_GPU).rank(settings(scorer_options={"codec": "pq"}), Q)

    def test_changing_between_them_builds_each_once(self, quantised, monkeypatch):
        built = []
        build = engines._build_engine

        def counted(*args):
            built.append(args)
            return build(*args)

        monkeypatch.setattr(engines, "_build_engine", counted)
        ranker, Q = TileMaxSimScorer(str(quantised), USE_GPU), make_queries(quantised, n=1)
        every = [{}, {"codec": "dense"}, {"codec": "pq", "pq_m": 16}, {"codec": "pq", "pq_m": 32}]
        first = [ranker.rank(settings(scorer_options=options), Q) for options in every]
        kept = list(ranker._engines)
        assert len({engine.index.codes.data_ptr() for engine in kept}) == 1
        for _ in range(2):
            assert [ranker.rank(settings(scorer_options=options), Q) for options in every] == first
        assert len(built) == len(kept) == 4
        # Another word for the same engine.
        ranker.rank(settings(scorer_options={"impl": "triton" if USE_GPU else "torch"}), Q)
        ranker.rank(settings(scorer_options={"placement": "gpu" if USE_GPU else "host", "codec": "dense"}), Q)
        assert len(built) == 4
        monkeypatch.setattr(engines, "MOST_ENGINES", 2)
        ranker.rank(settings(scorer_options={"codec": "pq", "pq_m": 16, "verify": "full", "placement": "gpu"}
                             if USE_GPU else {"impl": "torch", "codec": "pq", "pq_m": 16}), Q)  # fmt: skip
        assert len(list(ranker._engines)) == 2
        ranker.close()
        assert not list(ranker._engines)

    def test_threads_that_change_between_them(self, quantised):
        ranker, Q = TileMaxSimScorer(str(quantised), USE_GPU), make_queries(quantised, n=1)
        every = [{}, {"codec": "dense"}, {"codec": "pq", "pq_m": 16}, {"mode": "exhaustive", "codec": "dense"}]
        expected = [TileMaxSimScorer(str(quantised), USE_GPU).rank(settings(scorer_options=o), Q, k=10) for o in every]
        wrong: list[object] = []

        def work(i):
            try:
                for j in range(i, i + 8):
                    found = ranker.rank(settings(scorer_options=every[j % 4]), Q, k=10)
                    if found != expected[j % 4]:
                        wrong.append((j % 4, found))
            except Exception as error:  # noqa: BLE001 (a thread's error must fail the test)
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_where_memory_is_too_small_for_two(self, quantised, monkeypatch):
        """The other engine goes, and the one asked for comes."""
        ranker, Q = TileMaxSimScorer(str(quantised), USE_GPU), make_queries(quantised, n=1)
        before = ranker.rank(settings(), Q)
        build, other = engines._build_engine, weakref.ref(ranker._engine)

        def tight(index, device, options, shared=()):  # noqa: F811
            if shared:
                raise RuntimeError("GPU memory: expected more")
            assert other() is None, "its memory is free by now"
            return build(index, device, options)

        monkeypatch.setattr(engines, "_build_engine", tight)
        ranker.rank(settings(scorer_options={"codec": "dense"}), Q)
        assert [engine.index.codec for engine in ranker._engines] == ["dense"]
        assert ranker.rank(settings(), Q) == before

    def test_files_that_changed_are_read_again(self, tmp_path):
        """Engines of old files and of new ones never serve side by side."""
        path = make_index(tmp_path / "index")
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1)
        ranker.rank(settings(), Q)
        make_index(path, seed=5)
        pids, scores = ranker.rank(settings(scorer_options={"codec": "dense"}), Q)
        assert_scores(scores, oracle(path, Q[0], pids))
        pids, scores = ranker.rank(settings(), Q)
        assert_scores(scores, oracle(path, Q[0], pids))

    def test_pq_of_an_updated_index_is_refused(self, quantised, stock_extensions):  # noqa: F811
        ranker, Q = TileMaxSimScorer(str(quantised), USE_GPU), make_queries(quantised, n=1)
        dense, coded = {"codec": "dense"}, {"codec": "pq", "pq_m": 16}
        ranker.rank(settings(scorer_options=coded), Q)
        (best, *_), _ = ranker.rank(settings(scorer_options=dense), Q, k=1)
        ranker.ivf = TestUpdates().removed(ranker, [best])
        assert best not in ranker.rank(settings(scorer_options=dense), Q)[0]
        with pytest.raises(ValueError, match="expected one as in its files for PQ codes, got one updated in memory"):
            ranker.rank(settings(scorer_options=coded), Q)


class TestGivenPids:
    @pytest.mark.parametrize(
        "pids",
        [
            [5, 3, 3, 250, 0],
            range(40),
            torch.tensor([7, 1], dtype=torch.int64),
            torch.tensor([7, 1], dtype=torch.int32),
            torch.arange(6).numpy(),
            [299],
        ],
    )
    def test_exactly_these(self, plain, ranker, pids):
        Q = make_queries(plain, n=1)
        found, scores = ranker.rank(settings(ncells=None, ndocs=None), Q, pids=pids)
        assert sorted(found) == sorted(int(pid) for pid in pids)
        assert scores == sorted(scores, reverse=True)
        assert_scores(scores, oracle(plain, Q[0], found))

    def test_empty_passages_come_last(self, plain, ranker):
        lengths = read_index(plain).doclens
        empty = (lengths == 0).nonzero()[:, 0].tolist()
        assert len(empty) > 1
        pids, scores = ranker.rank(settings(), make_queries(plain, n=1), pids=[*reversed(empty), 1, 2])
        assert pids[2:] == sorted(empty)
        assert scores[2:] == [-torch.inf] * len(empty)

    def test_none(self, plain, ranker):
        none: Any
        for none in ([], torch.zeros(0), torch.zeros(0, dtype=torch.int32)):
            assert ranker.rank(settings(), make_queries(plain, n=1), pids=none) == ([], [])

    @pytest.mark.parametrize("pid", [-1, PASSAGES, 2**31, 2**40])
    def test_out_of_range(self, plain, ranker, pid):
        Q = make_queries(plain, n=1)
        with pytest.raises(IndexError, match=rf"0 \.\. 299, got {pid}$"):
            ranker.rank(settings(), Q, pids=[3, pid])
        with pytest.raises(IndexError, match=rf"0 \.\. 299, got {pid}$"):
            ranker.score_pids(settings(), Q, [3, pid])
        with pytest.raises(IndexError, match=rf"0 \.\. 299, got {pid}$"):
            ranker.score_pids(settings(), Q, [3, pid], torch.zeros(64, 32))

    @pytest.mark.parametrize("pids", [[1.0, 2.0], [True, False], [[1, 2]], torch.tensor([[1, 2]])])
    def test_not_pids(self, plain, ranker, pids):
        with pytest.raises(ValueError, match=r"pids: expected integers \[n\], got"):
            ranker.rank(settings(), make_queries(plain, n=1), pids=pids)


class TestFilter:
    def test_contract(self, plain, ranker):
        """int32 pids on the ranker's device, in and out, before pruning."""
        Q, seen = make_queries(plain, n=1), []

        def odd(pids):
            seen.append(pids)
            return pids[pids % 2 == 1]

        pids, scores = ranker.rank(settings(), Q, filter_fn=odd)
        assert (seen[0].dtype, seen[0].device.type) == (torch.int32, DEVICE)
        assert torch.equal(seen[0], ranker.retrieve(settings(), Q)[0])
        assert pids
        assert all(pid % 2 for pid in pids)
        assert_scores(scores, oracle(plain, Q[0], pids))

    def test_may_reorder_repeat_and_add(self, plain, ranker):
        Q = make_queries(plain, n=1)
        chosen = torch.tensor([9, 4, 9, 250], dtype=torch.int32, device=DEVICE)
        pids, _ = ranker.rank(settings(), Q, filter_fn=lambda _: chosen)
        assert sorted(pids) == [4, 9, 9, 250]

    def test_leaves_nothing(self, plain, ranker):
        assert ranker.rank(settings(), make_queries(plain, n=1), filter_fn=lambda pids: pids[:0]) == ([], [])

    def test_on_given_pids(self, plain, ranker):
        pids, _ = ranker.rank(
            settings(), make_queries(plain, n=1), pids=[1, 2, 3], filter_fn=lambda pids: pids[pids != 2]
        )
        assert sorted(pids) == [1, 3]

    @pytest.mark.parametrize("wrong", [lambda pids: pids.tolist(), lambda pids: pids.long(), lambda pids: pids[None]])
    def test_wrong_result(self, plain, ranker, wrong):
        with pytest.raises(ValueError, match="filter_fn"):
            ranker.rank(settings(), make_queries(plain, n=1), filter_fn=wrong)

    def test_result_out_of_range(self, plain, ranker):
        with pytest.raises(IndexError, match="got 300"):
            ranker.rank(settings(), make_queries(plain, n=1), filter_fn=lambda pids: pids * 0 + 300)


class TestQueries:
    @pytest.mark.parametrize(
        ("Q", "message"),
        [
            (torch.zeros(1, 0, DIM), "at least one token"),
            (torch.zeros(0, 32, DIM), "at least one query"),
            (torch.zeros(32, DIM), r"expected a floating-point tensor \[1, LQ, DIM\], got torch.float32 \[32, 64\]"),
            (torch.zeros(1, 32, DIM, dtype=torch.int32), "floating-point"),
            (torch.zeros(1, 32, DIM + 1), f"DIM {DIM}"),
            (None, "NoneType"),
        ],
    )
    def test_wrong(self, ranker, Q, message):
        for call in (ranker.rank, ranker.retrieve, lambda config, Q: ranker.score_pids(config, Q, [1, 2])):
            with pytest.raises(ValueError, match=message):
                call(settings(), Q)

    def test_several_are_aligned(self, plain, ranker):
        Q = make_queries(plain, n=4)
        given = [5, 5, 250, 7]
        expected = torch.cat([oracle(plain, Q[i], [given[i]]) for i in range(4)])
        scores, same = ranker.score_pids(settings(), Q, given)
        assert same.tolist() == given
        assert_scores(scores, expected)
        pids, scores = ranker.rank(settings(), Q, pids=given)
        assert_scores(scores, expected.sort(descending=True).values)
        assert pids == [given[i] for i in expected.argsort(descending=True).tolist()]
        assert ranker.rank(settings(), Q, pids=given, k=2) == (pids[:2], scores[:2])

    def test_several_need_as_many_pids(self, plain, ranker):
        Q = make_queries(plain, n=4)
        with pytest.raises(ValueError, match="expected 1 query, or several aligned with as many pids"):
            ranker.rank(settings(), Q)
        with pytest.raises(ValueError, match="expected 1 query or one for each of 3 pids, got 4"):
            ranker.rank(settings(), Q, pids=[1, 2, 3])
        with pytest.raises(ValueError, match="expected 1 query"):
            ranker.retrieve(settings(), Q)


class TestScorePids:
    def test_all_in_order(self, plain, ranker):
        Q = make_queries(plain, n=1)
        scores, pids = ranker.score_pids(settings(), Q, [9, 4, 9, 250], None)
        assert pids.tolist() == [9, 4, 9, 250]
        assert_scores(scores, oracle(plain, Q[0], [9, 4, 9, 250]))

    def test_prunes_with_centroid_scores(self, plain, ranker):
        Q = make_queries(plain, n=1)
        pids, centroid_scores = ranker.retrieve(settings(), Q)
        assert centroid_scores.shape == (64, 32)
        scores, kept = ranker.score_pids(settings(), Q, pids, centroid_scores)
        assert (kept.tolist(), scores.tolist()) == ranker.rank(settings(), Q)

    @pytest.mark.usefixtures("stock_extensions")
    def test_surface_is_stocks(self, plain, ranker):
        """Types and shapes of what stock's methods return."""
        Q, config = make_queries(plain, n=1), settings()
        stock = IndexScorer(str(plain), USE_GPU)
        for method, arguments in (("retrieve", ()), ("score_pids", ([1, 2], None))):
            stock_arguments = (torch.tensor([1, 2], dtype=torch.int32), None) if arguments else ()
            for a, b in zip(
                getattr(ranker, method)(config, Q, *arguments), getattr(stock, method)(config, Q, *stock_arguments)
            ):
                assert a.shape == b.shape
                assert a.device == b.device
        assert [type(x) for x in ranker.rank(config, Q)] == [type(x) for x in stock.rank(config, Q)]


class TestConfig:
    def test_without_flag_it_is_stock(self, plain, stock_extensions):  # noqa: F811
        ranker, stock = TileMaxSimScorer(str(plain), USE_GPU), IndexScorer(str(plain), USE_GPU)
        config = ColBERTConfig(ncells=2, centroid_score_threshold=0.4, ndocs=128)
        Q = make_queries(plain, n=1)
        assert ranker.rank(config, Q) == stock.rank(config, Q)
        assert ranker.rank(config, Q, k=3)[0] == stock.rank(config, Q)[0][:3]
        assert ranker._engine is None
        scores, pids = ranker.score_pids(config, Q, torch.tensor([3, 4], dtype=torch.int32), None)
        assert (pids.tolist(), scores.numel()) == ([3, 4], 2)

    def test_flipr_is_stocks_and_said_once(self, plain, stock_extensions, caplog):  # noqa: F811
        ranker = TileMaxSimScorer(str(plain), USE_GPU)
        config = settings(interaction="flipr", query_maxlen=64)
        Q = make_queries(plain, n=1, LQ=64)
        with caplog.at_level(logging.INFO, "plaid_tilemaxsim"):
            first = ranker.rank(config, Q)
            assert ranker.rank(config, Q) == first
        assert first == IndexScorer(str(plain), USE_GPU).rank(config, Q)
        assert [r.message for r in caplog.records if "flipr" in r.message] == [
            f'{plain}: interaction="flipr" is scored by stock PLAID'
        ]

    def test_ncells_above_the_centroids(self, plain, ranker):
        with pytest.raises(ValueError, match="ncells: expected at most the index's 64 centroids, got 65"):
            ranker.rank(settings(ncells=65), make_queries(plain, n=1))

    @pytest.mark.parametrize("ndocs", [0, 3])
    def test_few_ndocs_are_clamped_once(self, plain, ndocs, caplog):
        ranker = TileMaxSimScorer(str(plain), USE_GPU)
        with caplog.at_level(logging.WARNING, "plaid_tilemaxsim"):
            for _ in range(2):
                assert len(ranker.rank(settings(ndocs=ndocs), make_queries(plain, n=1))[0]) == 1
        assert caplog.text.count(f"ndocs={ndocs} keeps no passage") == 1

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("ncells", 0, "ncells: expected an integer >= 1"),
            ("ncells", 1.5, "ncells: expected an integer"),
            ("ndocs", -4, "ndocs: expected an integer >= 0, got -4"),
            ("ncells", None, "config.ncells: expected a value, since rank"),
            ("ndocs", None, "config.ndocs: expected a value, since rank"),
            ("scorer", "tilemax", "scorer: expected one of"),
            ("scorer_options", {"mod": 1}, "expected names from"),
        ],
    )
    def test_wrong_fields(self, plain, ranker, field, value, message):
        with pytest.raises(ValueError, match=message):
            ranker.rank(settings(**{field: value}), make_queries(plain, n=1))

    @pytest.mark.parametrize("k", [-1, 2.5, "10"])
    def test_wrong_k(self, plain, ranker, k):
        with pytest.raises(ValueError, match="k: expected an integer >= 0, got"):
            ranker.rank(settings(), make_queries(plain, n=1), k=k)

    def test_defaults_follow_k(self, plain, ranker):
        Q = make_queries(plain, n=1)
        unset = {"ncells": None, "centroid_score_threshold": None, "ndocs": None}
        for k, fields in ((10, (1, 0.5, 256)), (100, (2, 0.45, 1024)), (200, (4, 0.4, 4096))):
            explicit = dict(zip(scorer.TUNED, fields))
            assert ranker.rank(settings(**unset), Q, k=k) == ranker.rank(settings(**explicit), Q, k=k)

    @pytest.mark.gpu
    def test_impl_of_another_device(self, plain):
        with pytest.raises(ValueError, match="impl: expected"):
            TileMaxSimScorer(str(plain)).prepare(settings(scorer_options={"impl": "torch"}))

    @pytest.mark.skipif(USE_GPU, reason="needs a machine without CUDA")
    def test_use_gpu_without_gpu_says_so(self, plain, caplog):
        with caplog.at_level(logging.WARNING, "plaid_tilemaxsim"):
            pids, _ = TileMaxSimScorer(str(plain)).rank(settings(), make_queries(plain, n=1))
        assert len(pids) == 32
        assert caplog.text.count("torch sees no CUDA device") == 1

    @pytest.mark.parametrize("verify", ["full", "structure"])
    def test_broken_index(self, tmp_path, verify):
        path = make_index(tmp_path / "broken")
        codes = torch.load(path / "1.codes.pt")
        codes[7] = 64
        torch.save(codes, path / "1.codes.pt")
        Q = make_queries(path, n=1)
        ranker = TileMaxSimScorer(str(path), USE_GPU)
        for file in ("1.codes.pt", "0.codes.pt"):
            with pytest.raises(ValueError, match=file.replace(".", r"\.")):
                ranker.rank(settings(scorer_options={"verify": verify}), Q)
            (path / "0.codes.pt").unlink(missing_ok=True)


@pytest.mark.usefixtures("stock_extensions")
class TestUpdates:
    """What IndexUpdater does to a ranker, step by step as in colbert/index_updater.py."""

    def removed(self, ranker, pids):
        ivf, lengths = ranker.ivf.tensor, ranker.ivf.lengths
        ivf = ivf[: int(lengths.sum())]
        cells = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        keep = ~torch.isin(ivf, torch.tensor(pids, dtype=ivf.dtype))
        return StridedTensor(ivf[keep], torch.bincount(cells[keep], minlength=len(lengths)), use_gpu=False)

    def test_remove(self, plain):
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=1)
        before, before_scores = ranker.rank(settings(), Q, k=10)
        assert ranker.doclens.numel() == PASSAGES
        engine = ranker._engine
        assert ranker.rank(settings(), Q, k=10)[0] == before
        assert ranker._engine is engine, "reading stock's tensors is no reason to load again"
        ranker.ivf = self.removed(ranker, before[:2])
        for mode in ("plaid", "rerank", "exhaustive"):
            config = settings(scorer_options={"mode": mode})
            after, _ = ranker.rank(config, Q, k=8)
            assert after == before[2:], mode
            # as in stock, which removes passages from the lists only
            assert ranker.rank(config, Q, pids=before[:1]) == (before[:1], before_scores[:1])

    def test_add(self, plain):
        """Copies of existing passages, appended in front of stock's padding of 512 rows."""
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=1)
        (best, *_), (best_score, *_) = ranker.rank(settings(), Q, k=10)
        begin, end = ranker.offsets[best], ranker.offsets[best + 1]
        embeddings = ranker.embeddings
        codes, residuals = embeddings.codes[begin:end], embeddings.residuals[begin:end]
        embeddings.codes = torch.cat((embeddings.codes[:-512], codes, embeddings.codes[-512:]))
        embeddings.residuals = torch.cat((embeddings.residuals[:-512], residuals, embeddings.residuals[-512:]))
        ranker.doclens = torch.cat((ranker.doclens, torch.tensor([end - begin])))
        ivf, lengths = ranker.ivf.tensor, ranker.ivf.lengths.clone()
        lists = list(ivf[: int(lengths.sum())].split(lengths.tolist()))
        for cell in codes.unique().tolist():
            lists[cell] = torch.cat((lists[cell], torch.tensor([PASSAGES], dtype=ivf.dtype)))
            lengths[cell] += 1
        ranker.ivf = StridedTensor(torch.cat(lists), lengths, use_gpu=False)
        ranker.set_embeddings_strided()

        pids, scores = ranker.rank(settings(), Q, k=10)
        assert pids[:2] == [best, PASSAGES]
        assert scores[0] == scores[1] == pytest.approx(best_score, abs=1e-5)
        assert ranker.num_passages == PASSAGES + 1
        assert ranker.rank(settings(), Q, pids=[PASSAGES])[0] == [PASSAGES]
        with pytest.raises(IndexError, match=r"0 \.\. 300, got 301"):
            ranker.rank(settings(), Q, pids=[PASSAGES + 1])

    def test_engine_built_after_the_update(self, plain):
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=1)
        first = TileMaxSimScorer(str(plain), USE_GPU).rank(settings(), Q, k=1)[0]
        ranker.ivf = self.removed(ranker, first)
        assert first[0] not in ranker.rank(settings(), Q)[0]

    def test_stocks_hook_alone(self, plain):
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=1)
        ranker.rank(settings(), Q)
        engine = ranker._engine
        ranker.codec  # noqa: B018
        ranker.set_embeddings_strided()
        ranker.rank(settings(), Q)
        assert ranker._engine is not engine

    def test_pickle_keeps_the_update(self, plain):
        ranker, Q = TileMaxSimScorer(str(plain), USE_GPU), make_queries(plain, n=1)
        before, _ = ranker.rank(settings(), Q, k=10)
        assert pickle.loads(pickle.dumps(ranker)).rank(settings(), Q, k=10)[0] == before
        ranker.ivf = self.removed(ranker, before[:2])
        for clone in (pickle.loads(pickle.dumps(ranker)), copy.deepcopy(ranker)):
            assert clone.rank(settings(), Q, k=8)[0] == before[2:]


@pytest.mark.skipif(USE_GPU, reason="stock maps files on CPU only")
@pytest.mark.usefixtures("stock_extensions")
class TestMmap:
    """Stock's load_index_with_mmap, whose fixed header length does not fit what torch writes now."""

    def test_ours_is_right_and_stocks_fault_is_said(self, tmp_path, caplog):
        path = make_index(tmp_path / "index", chunk_size=1000)
        Q = make_queries(path, n=1)
        mapped = TileMaxSimScorer(str(path), False, True)
        assert mapped.rank(settings(), Q) == TileMaxSimScorer(str(path), False).rank(settings(), Q)
        mapped.prepare(settings(scorer="plaid"))
        right = torch.equal(mapped.embeddings.codes, read_index(path).codes())
        assert ("reads this index wrongly with load_index_with_mmap=True" in caplog.text) is not right

    def test_updates_are_refused(self, tmp_path):
        path = make_index(tmp_path / "index", chunk_size=1000)
        mapped = TileMaxSimScorer(str(path), False, True)
        mapped.ivf = StridedTensor(mapped.ivf.tensor, mapped.ivf.lengths, use_gpu=False)
        with pytest.raises(ValueError, match="expected load_index_with_mmap=False to search an updated index"):
            mapped.rank(settings(), make_queries(path, n=1))


class TestLazy:
    def test_nothing_is_loaded_before_use(self, plain):
        ranker = TileMaxSimScorer(str(plain), USE_GPU)
        assert "codec" not in vars(ranker)
        assert ranker._engine is None
        ranker.rank(settings(), make_queries(plain, n=1))
        assert "codec" not in vars(ranker)
        assert ranker.num_passages == PASSAGES

    def test_stock_attributes(self, plain, stock_extensions):  # noqa: F811
        for name in ("codec", "ivf", "doclens", "embeddings", "embeddings_strided", "offsets"):
            assert getattr(TileMaxSimScorer(str(plain), USE_GPU), name) is not None
        assert isinstance(TileMaxSimScorer(str(plain), USE_GPU).num_chunks, int)
        with pytest.raises(AttributeError, match="no attribute 'codecs'"):
            TileMaxSimScorer(str(plain), USE_GPU).codecs  # noqa: B018

    def test_path_with_spaces(self, tmp_path):
        path = make_index(tmp_path / "an index", n=20)
        assert len(TileMaxSimScorer(str(path), USE_GPU).rank(settings(), make_queries(path, n=1), k=3)[0]) == 3
