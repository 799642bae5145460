"""What users reported of colbert-ai (C) and RAGatouille (R), wherever this path can meet it, and what happens here.

Elsewhere: stale state after updates (C#181, C#261, R#174, R#266) in test_updates and test_lifetime, wrong maps
(C PR204) in test_scorer, transformers 5 (C PR412) in test_compat. Not met: torch.quantile's limit (C#299) and
IndexUpdater.add on padded lists (C#369, PR336, PR380) fail in colbert-ai itself, while indexing and updating.
"""

import json
import logging
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from plaid_tilemaxsim import TileMaxSimScorer, compat
from plaid_tilemaxsim.index.files import read_index
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.ops import reference
from plaid_tilemaxsim.stages_torch import TorchStages
from tests.synthetic import make_index, make_queries

compat.allow_missing_git()

pytestmark = pytest.mark.usefixtures("device")  # on a GPU where there is one
USE_GPU = torch.cuda.is_available()
DEVICE = "cuda" if USE_GPU else "cpu"
N = 300
# |ours - exact| at 32 unit query tokens; see DESIGN in tests/test_engine.py
ATOL = 2e-3 if USE_GPU else 2e-5


def settings(**fields):
    default = {
        "scorer": "tilemaxsim", "scorer_options": None, "ncells": 2, "centroid_score_threshold": 0.4, "ndocs": 128,
        "query_maxlen": 32, "interaction": "colbert", "total_visible_gpus": torch.cuda.device_count(),
    }  # fmt: skip
    return SimpleNamespace(**(default | fields))


EXHAUSTIVE = settings(scorer_options={"mode": "exhaustive"})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("index") / "plain", n=N)


@pytest.fixture(scope="module")
def ranker(path):
    return TileMaxSimScorer(str(path), USE_GPU)


@pytest.fixture(scope="module")
def Q(path):
    return make_queries(path, n=1)


def exact(path, Q, pids=None):
    """fp64 [n], from the files."""
    index = read_index(path)
    return reference.residual_maxsim(
        Q.double(), index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits,
        index.offsets, None if pids is None else torch.as_tensor(pids),
    )  # fmt: skip


def assert_exact(path, Q, pids, scores):
    true, scores = exact(path, Q, pids), torch.tensor(scores, dtype=torch.float64)
    torch.testing.assert_close(scores, true, rtol=0, atol=ATOL)
    assert len(pids) < 3 or not torch.allclose(scores.roll(1), true, rtol=0, atol=ATOL)


class TestFiles:
    def test_codes_and_residuals_of_other_lengths(self, path, tmp_path):
        """C#129: scored with the wrong passage's residuals, or an abort."""
        copy = shutil.copytree(path, tmp_path / "index")
        residuals = torch.load(copy / "0.residuals.pt", weights_only=True)
        torch.save(residuals[:-1].clone(), copy / "0.residuals.pt")
        with pytest.raises(ValueError, match=r"0\.residuals\.pt: residuals: expected .*got"):
            TileMaxSimScorer(str(copy), USE_GPU).rank(settings(), make_queries(path, n=1), k=3)

    @pytest.mark.parametrize("change", ["int64", "padded", "not padded"])
    def test_lists_as_updates_leave_them(self, path, ranker, Q, tmp_path, change):
        """C#369, C PR180, PR336, PR380: the tail of padding that belongs to no list; int64 after updates."""
        copy = shutil.copytree(path, tmp_path / "index")
        pids, lengths = torch.load(copy / "ivf.pid.pt", weights_only=True)
        pids = pids[: int(lengths.sum())]
        if change == "padded":
            pids = torch.cat([pids, torch.full((500,), N - 1, dtype=pids.dtype)])
        torch.save((pids.long() if change == "int64" else pids.clone(), lengths), copy / "ivf.pid.pt")
        assert TileMaxSimScorer(str(copy), USE_GPU).rank(settings(), Q, k=50) == ranker.rank(settings(), Q, k=50)

    def test_sixteen_bits(self, path, tmp_path):
        """C#360."""
        copy = shutil.copytree(path, tmp_path / "index")
        metadata = json.loads((copy / "metadata.json").read_text())
        metadata["config"]["nbits"] = 16
        (copy / "metadata.json").write_text(json.dumps(metadata))
        with pytest.raises(ValueError, match=r"metadata\.json: config\.nbits: expected one of .*, got 16"):
            TileMaxSimScorer(str(copy), USE_GPU).rank(settings(), make_queries(path, n=1), k=3)

    def test_a_code_beyond_the_centroids(self, path, tmp_path):
        """Stock: the process aborts."""
        copy = shutil.copytree(path, tmp_path / "index")
        codes = torch.load(copy / "0.codes.pt", weights_only=True)
        codes[3] = 64
        torch.save(codes, copy / "0.codes.pt")
        with pytest.raises(ValueError, match=r"0\.codes\.pt: codes: expected .*64"):
            TileMaxSimScorer(str(copy), USE_GPU).rank(settings(), make_queries(path, n=1), k=3)

    @pytest.mark.parametrize("nbits", [1, 2, 4])
    def test_96_dimensions(self, tmp_path, nbits):
        """R#239."""
        path = make_index(tmp_path / "index", dim=96, nbits=nbits, n=100)
        Q = make_queries(path, n=1)
        pids, scores = TileMaxSimScorer(str(path), USE_GPU).rank(EXHAUSTIVE, Q, k=20)
        assert_exact(path, Q[0], pids, scores)

    def test_empty_centroids(self, path, ranker, Q):
        """C#99, C#138: lists without passages, all probed."""
        assert (read_index(path).ivf_offsets.diff() == 0).any()
        pids, _ = ranker.retrieve(settings(ncells=64), Q)
        listed = read_index(path).ivf_pids.unique()
        assert torch.equal(pids.cpu(), listed)

    def test_no_extension_and_spaces_in_the_path(self, path, ranker, Q, tmp_path, monkeypatch):
        """C#195, C#287, C#324, R#166, R#238, R#255: nothing is compiled by a C++ compiler here."""
        import torch.utils.cpp_extension

        monkeypatch.setattr(torch.utils.cpp_extension, "load", lambda *a, **k: pytest.fail("compiled an extension"))
        copy = shutil.copytree(path, tmp_path / "an index")
        assert TileMaxSimScorer(str(copy), USE_GPU).rank(settings(), Q, k=9) == ranker.rank(settings(), Q, k=9)

    @pytest.mark.parametrize("codec", ["residual", "dense"])
    def test_no_token_is_a_zero_vector(self, path, codec):
        """C#141: after a decompression whose launch failed unnoticed."""
        engine_index = load_resident(read_index(path), DEVICE, codec=codec)
        if codec == "dense":
            assert engine_index.embeddings is not None
            norms = engine_index.embeddings.float().norm(dim=-1)
            torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=2e-3)
        else:
            assert engine_index.inv_norms is not None
            inverse = engine_index.inv_norm_lo + engine_index.inv_norm_step * engine_index.inv_norms.float()
            assert ((inverse > 0.5) & (inverse < 2)).all()


class TestResults:
    @pytest.mark.parametrize("mode", ["plaid", "rerank", "exhaustive"])
    def test_each_passage_once(self, ranker, Q, mode):
        """C#270, pylate#214: the same pid many times at a large k."""
        config = settings(ncells=16, centroid_score_threshold=-1.0, ndocs=4096, scorer_options={"mode": mode})
        pids, scores = ranker.rank(config, Q, k=1000)
        assert len(pids) == len(set(pids)) == len(scores) > 100

    def test_fewer_than_k(self, ranker, Q):
        """C#382, R#130, R#135: ranks longer than pids."""
        pids, scores = ranker.rank(settings(ndocs=16), Q, k=10)
        assert len(pids) == len(scores) == 4

    @pytest.mark.parametrize("mode", ["plaid", "rerank", "exhaustive"])
    def test_every_pid_is_in_the_collection(self, ranker, Q, mode):
        """C#218, R#3, R#9: collection[pid] fails; a collection of another length is named (test_plugin)."""
        pids, _ = ranker.rank(settings(scorer_options={"mode": mode}), Q)
        assert 0 <= min(pids) <= max(pids) < N

    def test_negative_similarities_count(self, tmp_path):
        """C#62: zeros of the padding beat them; stock's CPU branch clamps maxima at 0."""
        path = make_index(tmp_path / "index", common=2.0)
        Q = -make_queries(path, n=1)
        pids, scores = TileMaxSimScorer(str(path), USE_GPU).rank(EXHAUSTIVE, Q, k=20)
        assert max(scores) < 0
        assert_exact(path, Q[0], pids, scores)
        assert not any(read_index(path).doclens[pids] == 0)

    def test_sums_in_fp32(self, path, ranker, Q):
        """pylate PR237: sums in fp16 have steps of 1/64 to 1/32 and cost 0.4 to 2.2 nDCG."""
        pids, scores = ranker.rank(EXHAUSTIVE, Q)
        filled = [score for score in scores if score > -math.inf]
        assert len(set(filled)) >= 0.98 * len(filled)
        assert_exact(path, Q[0], pids[:100], scores[:100])
        halves = torch.tensor(filled[:100]).half().double()
        assert not torch.allclose(halves, exact(path, Q[0], pids[:100]), rtol=0, atol=ATOL)

    def test_run_to_run(self, path, ranker, Q):
        """R#196."""
        first = ranker.rank(settings(), Q, k=50)
        assert all(ranker.rank(settings(), Q, k=50) == first for _ in range(5))
        assert TileMaxSimScorer(str(path), USE_GPU).rank(settings(), Q, k=50) == first

    def test_a_quarter_of_ndocs_is_scored_exactly(self, ranker, Q):
        """C#263: documented; mode "rerank" scores all candidates."""
        assert len(ranker.rank(settings(centroid_score_threshold=-1.0, ndocs=64), Q)[0]) == 16
        rerank = settings(ndocs=64, scorer_options={"mode": "rerank"})
        assert len(ranker.rank(rerank, Q)[0]) == ranker.retrieve(rerank, Q)[0].numel() > 16

    @pytest.mark.parametrize("lq", [33, 128, 508])
    def test_long_queries(self, path, ranker, lq):
        """C PR226, R#99: RAGatouille grows query_maxlen with the query; all tokens are scored."""
        Q = make_queries(path, n=1, LQ=lq)
        for maxlen in (32, lq):
            pids, scores = ranker.rank(settings(query_maxlen=maxlen, ncells=4, ndocs=1024), Q, k=20)
            true = exact(path, Q[0], pids)
            assert (torch.tensor(scores).double() - true).abs().max() <= ATOL * lq / 32

    @pytest.mark.gpu
    def test_one_long_passage_costs_no_memory(self, tmp_path):
        """R#177: out of memory in step 3a, which pads every candidate to the longest."""
        path = make_index(tmp_path / "index", n=20_000, C=64, max_doclen=60)
        longest = make_index(tmp_path / "long", n=20_000, C=64, max_doclen=60)
        # one passage of a whole chunk's tokens
        doclens = json.loads((longest / "doclens.0.json").read_text())
        doclens = [sum(doclens), *(0 for _ in doclens[1:])]
        (longest / "doclens.0.json").write_text(json.dumps(doclens))
        used = []
        for folder in (path, longest):
            ranker = TileMaxSimScorer(str(folder), True)
            config = settings(ncells=32, ndocs=8192, scorer_options={"mode": "plaid"})
            ranker.prepare(config)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ranker.rank(config, make_queries(folder, n=1), k=1000)
            used.append(torch.cuda.max_memory_allocated() - before)
            ranker.close()
        assert used[1] <= used[0] * 1.2 + 1_000_000


class TestGivenPids:
    @pytest.mark.parametrize("form", [list, tuple, torch.tensor, lambda p: torch.tensor(p, dtype=torch.int32)])
    def test_on_any_device_and_in_any_form(self, path, ranker, Q, form):
        """C#148, C#160: pids on the CPU and codes on the GPU, or the other way round."""
        wanted = [5, 250, 17, 17]
        pids, scores = ranker.rank(settings(), Q, pids=form(wanted))
        assert sorted(pids) == sorted(wanted)
        assert_exact(path, Q[0], pids, scores)
        if USE_GPU:
            moved = torch.tensor(wanted).cuda()
            assert ranker.rank(settings(), Q, pids=moved) == ranker.rank(settings(), Q.cuda(), pids=form(wanted))

    def test_nothing_else_is_found_and_nothing_retrieved(self, ranker, Q, monkeypatch):
        """C#323, R#83, C PR352."""
        wanted = list(range(0, N, 7))
        if not USE_GPU:
            monkeypatch.setattr(TorchStages, "candidates", lambda *a, **k: pytest.fail("retrieved"))
        pids, _ = ranker.rank(settings(ncells=1, ndocs=4), Q, pids=wanted)
        assert sorted(pids) == wanted

    def test_more_than_a_million(self, tmp_path):
        """Stock's CPU branch: a segmentation fault from 1.05 million on (arrays on the stack)."""
        path = make_index(tmp_path / "index", n=50, dim=64, C=8, mean_doclen=2.0, max_doclen=3)
        ranker, Q = TileMaxSimScorer(str(path), USE_GPU), make_queries(path, n=1, LQ=4)
        wanted = torch.arange(1_100_000) % 50
        pids, scores = ranker.rank(settings(), Q, pids=wanted, k=44_000)
        assert len(pids) == 44_000
        assert set(pids) == {pids[0], pids[22_000]}
        assert len(set(scores)) == 2
        assert_exact(path, Q[0], [pids[0], pids[-1]], [scores[0], scores[-1]])

    @pytest.mark.parametrize("wrong", [-1, N, 2**31, 2**40])
    def test_outside_the_index(self, ranker, Q, wrong):
        """Stock: reads outside its arrays on a CPU."""
        with pytest.raises(IndexError, match=rf"pids: expected 0 \.\. {N - 1}, got {wrong}"):
            ranker.rank(settings(), Q, pids=[1, wrong])

    def test_none(self, ranker, Q):
        """Stock's GPU branch crashes."""
        assert ranker.rank(settings(), Q, pids=[]) == ([], [])


class TestFilters:
    """C#177, C#304, PR267."""

    def test_before_pruning(self, path, ranker, Q):
        """As many results as without a filter: it is applied to candidates, not to results."""
        config = settings(ncells=16, centroid_score_threshold=-1.0, ndocs=64)
        even, scores = ranker.rank(config, Q, filter_fn=lambda pids: pids[pids % 2 == 0])
        assert len(even) == 16
        assert all(pid % 2 == 0 for pid in even)
        assert_exact(path, Q[0], even, scores)

    def test_nothing_left(self, ranker, Q):
        """Stock's GPU branch crashes."""
        assert ranker.rank(settings(), Q, k=5, filter_fn=lambda pids: pids[:0]) == ([], [])
        nothing = torch.zeros(N, dtype=torch.bool)
        assert ranker.search(settings(), Q, 5, allow=nothing) == ([], [])

    def test_its_tensor(self, ranker, Q):
        seen = []

        def keep(pids):
            seen.append((pids.dtype, pids.device.type))
            return pids

        ranker.rank(settings(), Q, filter_fn=keep)
        assert seen == [(torch.int32, DEVICE)]


class TestArguments:
    def test_few_ndocs_and_many_cells(self, ranker, Q, caplog):
        """Stock's GPU branch crashes on the one and raises on the other."""
        for _ in range(2):
            assert len(ranker.rank(settings(ndocs=3), Q, k=5)[0]) == 1
        assert caplog.text.count("ndocs=3 keeps no passage") <= 1
        with pytest.raises(ValueError, match="ncells: expected at most"):
            ranker.rank(settings(ncells=65), Q, k=5)

    @pytest.mark.parametrize("shape", [(1, 0, 64), (0, 32, 64), (1, 32, 63), (32, 64)])
    def test_queries_of_other_shapes(self, ranker, shape):
        """Stock: an IndexError, or an assertion without words."""
        with pytest.raises(ValueError, match="Q: expected"):
            ranker.rank(settings(), torch.ones(shape), k=5)

    def test_several_queries(self, path, ranker):
        Q = make_queries(path, n=3)
        with pytest.raises(ValueError, match="Q: expected 1 query, or several aligned with as many pids"):
            ranker.rank(settings(), Q, k=5)
        pids, scores = ranker.rank(settings(), Q, pids=[7, 8, 9])
        for pid, score in zip(pids, scores, strict=True):
            assert score == pytest.approx(float(exact(path, Q[pid - 7], [pid])), abs=ATOL)

    def test_half_precision_queries(self, ranker, Q):
        """Stock's CPU branch raises."""
        assert ranker.rank(settings(), Q.half(), k=5) == ranker.rank(settings(), Q.half().float(), k=5)


class TestDevices:
    @pytest.mark.skipif(USE_GPU, reason="there is a GPU")
    def test_a_gpu_that_is_asked_for_and_not_there(self, path, Q, caplog):
        """C#209: on the CPU, and nobody knows."""
        with caplog.at_level(logging.WARNING):
            TileMaxSimScorer(str(path), True).rank(settings(), Q, k=3)
        assert "torch sees no CUDA device; searching on the CPU" in caplog.text

    @pytest.mark.gpu
    def test_a_gpu_that_is_there(self, ranker, Q):
        ranker.rank(settings(), Q, k=3)
        assert ranker._engine.device.type == "cuda"

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_another_gpu_than_the_first(self, path, ranker, Q):
        """C#348: stock forces its output to cuda:0."""
        want = ranker.rank(settings(), Q, k=20)
        with torch.cuda.device(1):
            second = TileMaxSimScorer(str(path), True)
            assert second.rank(settings(), Q, k=20) == want
        assert second._engine.device == torch.device("cuda", 1)
        assert second.rank(settings(), Q.cuda(0), k=20) == second.rank(settings(), Q, k=20) == want
