"""The flag: real fields of ColBERTConfig, registered and taken back without a trace."""

import copy
import dataclasses
import json
import logging
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from importlib import metadata
from typing import Any

import pytest
import torch

import plaid_tilemaxsim
from plaid_tilemaxsim import compat, plugin
from plaid_tilemaxsim.config import SCORERS, scorer_of
from tests.colbert_fixtures import PASSAGES, checkpoint, collection, enabled, index, stock_extensions  # noqa: F401
from tests.synthetic import WORDS, make_queries

compat.allow_missing_git()

import colbert  # noqa: E402
import colbert.searcher  # noqa: E402
from colbert import IndexUpdater, Searcher  # noqa: E402
from colbert.infra import ColBERTConfig, Run, RunConfig  # noqa: E402
from colbert.modeling.colbert import ColBERT  # noqa: E402

FLAGGED = {"scorer": "tilemaxsim", "scorer_options": {"mode": "exhaustive"}}


def surface() -> dict[str, object]:
    """Everything of colbert-ai (and transformers) that enabling may touch."""
    from transformers import PreTrainedModel

    return {
        **{f"config.{name}": value for name, value in vars(ColBERTConfig).items() if name != "__annotations__"},
        "annotations": dict(vars(ColBERTConfig).get("__annotations__", {})),
        **{f"searcher.{name}": value for name, value in vars(Searcher).items()},
        "IndexScorer": colbert.searcher.IndexScorer,
        "init_weights": PreTrainedModel.init_weights,
        "try_load": vars(ColBERT)["try_load_torch_extensions"],
        "segmented_maxsim": vars(ColBERT).get("segmented_maxsim"),
    }


def run_python(source: str, *args: object) -> str:
    """Standard output of a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class TestImport:
    def test_package_imports_nothing_heavy(self):
        out = run_python(
            """
            import sys
            import plaid_tilemaxsim, plaid_tilemaxsim.config, plaid_tilemaxsim.plugin, plaid_tilemaxsim.cli
            assert not plaid_tilemaxsim.is_enabled()
            print([name for name in ("torch", "triton", "colbert", "transformers") if name in sys.modules])
            """
        )
        assert out.strip() == "[]"

    def test_names(self):
        from plaid_tilemaxsim.config import ScorerConfig
        from plaid_tilemaxsim.scorer import TileMaxSimScorer

        assert plaid_tilemaxsim.ScorerConfig is ScorerConfig
        assert plaid_tilemaxsim.TileMaxSimScorer is TileMaxSimScorer
        with pytest.raises(AttributeError, match="no attribute 'Scorer'"):
            plaid_tilemaxsim.Scorer  # noqa: B018


class TestReversible:
    def test_disable_restores_everything(self):
        before = surface()
        plaid_tilemaxsim.enable()
        during = surface()
        assert plaid_tilemaxsim.is_enabled()
        plaid_tilemaxsim.disable()
        assert not plaid_tilemaxsim.is_enabled()
        after = surface()
        assert after.keys() == before.keys()
        assert [name for name in before if after[name] is not before[name] and after[name] != before[name]] == []
        assert during["IndexScorer"] is plaid_tilemaxsim.TileMaxSimScorer
        assert not hasattr(ColBERTConfig, "scorer")
        with pytest.raises(TypeError, match="scorer"):
            ColBERTConfig(scorer="tilemaxsim")

    def test_idempotent(self):
        before = surface()
        plaid_tilemaxsim.enable()
        during = surface()
        plaid_tilemaxsim.enable()
        assert surface() == during
        plaid_tilemaxsim.disable()
        plaid_tilemaxsim.disable()
        assert surface() == before

    def test_threads(self):
        """Configs made in one thread work at every moment of another's enable and disable."""
        stop, failures = threading.Event(), []

        def make_configs() -> None:
            while not stop.is_set():
                try:
                    config = ColBERTConfig.from_existing(ColBERTConfig(nbits=4), None)
                    assert config.nbits == 4
                    assert config.export()["nbits"] == 4
                except Exception as error:  # noqa: BLE001
                    failures.append(error)

        def toggle() -> None:
            for _ in range(20):
                plaid_tilemaxsim.enable()
                plaid_tilemaxsim.is_enabled()

        maker = threading.Thread(target=make_configs)
        maker.start()
        for _ in range(5):
            togglers = [threading.Thread(target=toggle) for _ in range(4)]
            for thread in togglers:
                thread.start()
            for thread in togglers:
                thread.join()
            plaid_tilemaxsim.disable()
        stop.set()
        maker.join()
        assert failures == []
        assert not plaid_tilemaxsim.is_enabled()

    def test_configs_lose_the_flag(self):
        plaid_tilemaxsim.enable()
        made, loaded, assigned = (
            ColBERTConfig(nbits=4, **FLAGGED),
            copy.copy(ColBERTConfig(nbits=4, **FLAGGED)),
            ColBERTConfig(nbits=4),
        )
        assigned.scorer = "tilemaxsim"
        plaid_tilemaxsim.disable()
        for config in (made, loaded, assigned):
            assert ColBERTConfig.from_existing(config).nbits == 4
            assert "scorer" not in config.export()
            assert not hasattr(config, "scorer")
            assert pickle.loads(pickle.dumps(config)).nbits == 4

    @pytest.mark.usefixtures("enabled")
    def test_a_config_that_was_refused(self):
        with pytest.raises(ValueError, match="got 'moed'") as refused:  # its frames hold the config
            ColBERTConfig(scorer="tilemaxsim", scorer_options={"moed": "plaid"})
        plaid_tilemaxsim.disable()
        assert not plaid_tilemaxsim.is_enabled()
        assert refused.tb is not None

    def test_foreign_wrapper_is_not_dropped(self, enabled, monkeypatch):  # noqa: F811
        with monkeypatch.context() as patch:
            patch.setattr(Searcher, "dense_search", lambda *args: None)
            with pytest.raises(RuntimeError, match=r"Searcher\.dense_search: expected what plaid_tilemaxsim.enable"):
                plaid_tilemaxsim.disable()
            assert plaid_tilemaxsim.is_enabled()

    def test_failure_leaves_stock(self, monkeypatch):
        before = surface()
        monkeypatch.setattr(plugin, "_register_scorer", lambda changes: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plaid_tilemaxsim.enable()
        assert surface() == before
        assert not plaid_tilemaxsim.is_enabled()


class TestVersionGuard:
    @pytest.mark.parametrize("version", ["0.2.21", "0.2.23", "0.3.0"])
    def test_unknown_version(self, monkeypatch, version):
        monkeypatch.setattr(metadata, "version", lambda name: version)
        with pytest.raises(ValueError, match=rf"colbert-ai: expected a version from \['0.2.22'\], got '{version}'"):
            plaid_tilemaxsim.enable()
        assert not plaid_tilemaxsim.is_enabled()

    def test_not_installed(self, monkeypatch):
        def missing(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
        with pytest.raises(ImportError, match=r"install colbert-ai==0\.2\.22"):
            plaid_tilemaxsim.enable()


@pytest.mark.usefixtures("enabled")
class TestFields:
    def test_are_real_fields(self):
        fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(ColBERTConfig)}
        assert fields["scorer"].default.val == "plaid"
        assert fields["scorer_options"].default.val is None
        assert (ColBERTConfig().scorer, ColBERTConfig().scorer_options) == ("plaid", None)
        config = ColBERTConfig(**FLAGGED)
        assert (config.scorer, config.scorer_options) == ("tilemaxsim", {"mode": "exhaustive"})
        assert "scorer='tilemaxsim'" in repr(config)
        assert config != ColBERTConfig()
        assert dataclasses.replace(config, nbits=4).scorer == "tilemaxsim"

    def test_none_is_the_default(self):
        assert ColBERTConfig(scorer=None).scorer == "plaid"

    def test_from_existing(self):
        index_config, user = ColBERTConfig(scorer="plaid", nbits=2), ColBERTConfig(**FLAGGED)
        merged = ColBERTConfig.from_existing(None, index_config, user, Run().config)
        assert (merged.scorer, merged.nbits) == ("tilemaxsim", 2)
        assert ColBERTConfig.from_existing(user, ColBERTConfig(nbits=4)).scorer_options == {"mode": "exhaustive"}
        assert ColBERTConfig.from_existing(merged).scorer == "tilemaxsim"

    def test_run_context(self):
        with Run().context(RunConfig(experiment="other")):
            config = ColBERTConfig.from_existing(ColBERTConfig(**FLAGGED), Run().config)
            assert (config.scorer, config.experiment) == ("tilemaxsim", "other")
        with Run().context(ColBERTConfig(**FLAGGED), inherit_config=False):
            assert ColBERTConfig.from_existing(Run().config).scorer == "tilemaxsim"

    def test_configure(self):
        config = ColBERTConfig()
        assert config.configure(scorer="tilemaxsim", scorer_options={"mode": "rerank"}) == set()
        assert ColBERTConfig.from_existing(config).scorer_options == {"mode": "rerank"}

    def test_load_from_index(self, tmp_path):
        metadata = {"config": ColBERTConfig(dim=64, **FLAGGED).export(), "num_chunks": 1}
        (tmp_path / "metadata.json").write_text(json.dumps(metadata))
        config = ColBERTConfig.load_from_index(str(tmp_path))
        assert (config.scorer, config.scorer_options, config.dim) == ("tilemaxsim", {"mode": "exhaustive"}, 64)
        assert "scorer" in config.assigned
        plaid_tilemaxsim.disable()
        assert ColBERTConfig.load_from_index(str(tmp_path)).dim == 64

    def test_export_is_stocks_without_the_flag(self):
        config = ColBERTConfig(nbits=4)
        exported = config.export()
        plaid_tilemaxsim.disable()
        assert exported == ColBERTConfig(nbits=4).export()

    def test_save_and_from_path(self, tmp_path):
        ColBERTConfig(**FLAGGED).save(str(tmp_path / "config.json"))
        config, ignored = ColBERTConfig.from_path(str(tmp_path / "config.json"))
        assert (config.scorer, config.scorer_options) == ("tilemaxsim", {"mode": "exhaustive"})
        assert ignored == {"meta"}

    def test_older_instance(self):
        plaid_tilemaxsim.disable()
        old = ColBERTConfig(nbits=4)
        plaid_tilemaxsim.enable()
        assert scorer_of(old) == old.scorer == "plaid"
        assert old.export()["nbits"] == 4
        assert ColBERTConfig.from_existing(old, ColBERTConfig(scorer="tilemaxsim")).scorer == "tilemaxsim"
        old.configure(scorer="tilemaxsim")
        assert ColBERTConfig.from_existing(old).scorer == "tilemaxsim"

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickle(self, protocol):
        for clone in (lambda c: pickle.loads(pickle.dumps(c, protocol)), copy.copy, copy.deepcopy):
            config = clone(ColBERTConfig(nbits=4, **FLAGGED))
            assert (config.scorer, config.nbits) == ("tilemaxsim", 4)
            assert ColBERTConfig.from_existing(config).scorer_options == {"mode": "exhaustive"}
            assert clone(ColBERTConfig()) == ColBERTConfig()

    def test_pickle_of_a_flag_set_by_hand(self):
        config = ColBERTConfig()
        config.scorer = "tilemaxsim"
        assert pickle.loads(pickle.dumps(config)).scorer == "tilemaxsim"

    def test_pickle_without_flag_needs_no_plugin(self):
        data = pickle.dumps(ColBERTConfig(nbits=4))
        assert b"plaid_tilemaxsim" not in data
        plaid_tilemaxsim.disable()
        assert pickle.loads(data) == ColBERTConfig(nbits=4)
        plaid_tilemaxsim.enable()
        assert pickle.loads(data) == ColBERTConfig(nbits=4)

    def test_pickle_with_flag_brings_the_plugin(self):
        data = pickle.dumps(ColBERTConfig(**FLAGGED))
        plaid_tilemaxsim.disable()
        assert pickle.loads(data).scorer == "tilemaxsim"
        assert plaid_tilemaxsim.is_enabled()

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"scorer": "tilemaxism"}, r"expected one of \['plaid', 'tilemaxsim'\], got 'tilemaxism'"),
            ({"scorer": "tilemaxsim", "scorer_options": {"moed": "plaid"}}, "expected names from .*'mode'.*got 'moed'"),
            ({"scorer_options": {"mode": "fast"}}, "mode: expected one of"),
        ],
    )
    def test_misspelt(self, fields, message):
        with pytest.raises(ValueError, match=message):
            ColBERTConfig(**fields)
        config = ColBERTConfig()
        with pytest.raises(ValueError, match=message):
            config.configure(**fields)
        name, value = list(fields.items())[-1]
        with pytest.raises(ValueError, match=message):
            setattr(config, name, value)

    def test_process_default(self):
        explicit = ColBERTConfig(scorer="plaid")
        plaid_tilemaxsim.enable(scorer="tilemaxsim", scorer_options={"mode": "rerank"})
        try:
            plaid_tilemaxsim.enable()
            assert (ColBERTConfig().scorer, ColBERTConfig().scorer_options) == ("tilemaxsim", {"mode": "rerank"})
            assert ColBERTConfig().scorer_options is not ColBERTConfig().scorer_options
            assert ColBERTConfig.from_existing(explicit).scorer == "plaid"
            assert "scorer" not in ColBERTConfig().export()
        finally:
            plaid_tilemaxsim.disable()
        plaid_tilemaxsim.enable()
        assert ColBERTConfig().scorer == "plaid"

    def test_process_default_is_checked(self):
        with pytest.raises(ValueError, match="scorer: expected one of"):
            plaid_tilemaxsim.enable(scorer="tilemax")
        with pytest.raises(ValueError, match="mode: expected one of"):
            plaid_tilemaxsim.enable(scorer_options={"mode": "fast"})
        assert ColBERTConfig().scorer == "plaid"


SPAWN = """
    import multiprocessing

    def child(config, sent, out):
        import plaid_tilemaxsim
        from plaid_tilemaxsim import compat
        from colbert.infra import ColBERTConfig

        assert plaid_tilemaxsim.is_enabled(), "by the config among the arguments"
        out.put((compat.transformers_adapted(), ColBERTConfig.from_existing(config, sent.get()).scorer))

    if __name__ == "__main__":
        import plaid_tilemaxsim

        plaid_tilemaxsim.enable()
        from colbert.infra import ColBERTConfig
        from plaid_tilemaxsim import compat

        context = multiprocessing.get_context("spawn")
        sent, out = context.SimpleQueue(), context.SimpleQueue()
        process = context.Process(target=child, args=(ColBERTConfig(nbits=4), sent, out))
        process.start()
        sent.put(ColBERTConfig(scorer="tilemaxsim"))
        process.join()
        assert process.exitcode == 0
        assert out.get() == (compat.transformers_adapted(), "tilemaxsim")
        print("children agree")
"""


def test_spawned_children_get_the_plugin(tmp_path):
    """Even from a main script that enables it behind its main guard, as a spawned indexer needs it."""
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(SPAWN))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("children agree")


INDEXER = """
    import json
    import sys

    import plaid_tilemaxsim

    if __name__ == "__main__":
        plaid_tilemaxsim.enable()
        from colbert import Indexer
        from colbert.infra import ColBERTConfig, Run, RunConfig

        checkpoint, collection, root, fields = sys.argv[1:]
        with Run().context(RunConfig(nranks=1, root=root, experiment="e")):
            config = ColBERTConfig(nbits=2, kmeans_niters=1, **json.loads(fields))
            Indexer(checkpoint, config, verbose=1).index("spawned", json.load(open(collection)))
"""


@pytest.mark.parametrize("fields", [FLAGGED, pytest.param({}, marks=pytest.mark.slow)], ids=["flagged", "plain"])
def test_spawned_indexer(tmp_path, checkpoint, collection, stock_extensions, fields):  # noqa: F811
    """Stock's Indexer starts a child, which needs the plugin for transformers 5; stock reads what it writes."""
    pytest.importorskip("faiss", reason="indexing needs faiss: pip install faiss-cpu")
    (tmp_path / "main.py").write_text(textwrap.dedent(INDEXER))
    (tmp_path / "collection.json").write_text(json.dumps(collection))
    arguments = [checkpoint, tmp_path / "collection.json", tmp_path, json.dumps(fields)]
    command = [sys.executable, "-W", "ignore", tmp_path / "main.py", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "e" / "indexes" / "spawned"
    stored = json.loads((path / "metadata.json").read_text())["config"]
    assert {name: stored[name] for name in plugin.FIELDS if name in stored} == fields

    compat.apply()
    results = [Searcher(str(path), collection=collection, verbose=1).search(collection[5], k=3)]
    plaid_tilemaxsim.enable()
    for scorer in SCORERS:
        config = ColBERTConfig(scorer=scorer, scorer_options={})
        results.append(Searcher(str(path), collection=collection, config=config, verbose=1).search(collection[5], k=3))
    plaid_tilemaxsim.disable()
    assert [pids[0] for pids, _, _ in results] == [5, 5, 5]


@pytest.mark.usefixtures("enabled", "stock_extensions")
class TestSearcher:
    @pytest.fixture
    def searcher(self, index, checkpoint, collection):  # noqa: F811
        return Searcher(str(index), checkpoint=str(checkpoint), collection=collection, verbose=1)

    @pytest.fixture
    def ours(self, searcher):
        searcher.configure(scorer="tilemaxsim")
        return searcher

    def test_same_searcher_both_scorers(self, searcher, index):  # noqa: F811
        assert isinstance(searcher.ranker, plaid_tilemaxsim.TileMaxSimScorer)
        searcher.configure(ncells=4, centroid_score_threshold=0.4, ndocs=1024)
        for Q in make_queries(index, n=3).split(1):
            results = {}
            for name in ("plaid", "tilemaxsim", "plaid"):
                searcher.configure(scorer=name)
                results[name] = searcher.dense_search(Q, k=20)
            (pids, ranks, scores), (stock_pids, _, stock_scores) = results["tilemaxsim"], results["plaid"]
            assert ranks == list(range(1, 21))
            # Both sum 32 maxima in fp32, each off by at most a few ulps of 1: far below 2e-3.
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(stock_scores), rtol=0, atol=2e-3)
            assert [p for p, q, s, t in zip(pids, stock_pids, scores, scores[1:]) if p != q and s - t > 4e-3] == []
            shuffled = scores[1:] + scores[:1]
            assert not torch.allclose(torch.tensor(shuffled), torch.tensor(stock_scores), rtol=0, atol=2e-3)

    def test_first_k_does_not_decide_later_ones(self, ours, collection):  # noqa: F811
        Q = ours.encode(collection[0])
        fresh = ours.dense_search(Q, k=200)
        ours.dense_search(Q, k=10)
        assert ours.config.ncells is ours.config.centroid_score_threshold is ours.config.ndocs is None
        assert ours.dense_search(Q, k=200) == fresh
        # 256 // 4 passages are scored for k = 10
        assert len(fresh[0]) > 64

    def test_stock_pins_do_not_reach_ours(self, ours, collection):  # noqa: F811
        Q = ours.encode(collection[0])
        fresh = ours.dense_search(Q, k=200)
        ours.configure(scorer="plaid")
        ours.dense_search(Q, k=10)
        assert ours.config.ndocs == 256
        ours.configure(scorer="tilemaxsim")
        assert ours.dense_search(Q, k=200) == fresh
        ours.configure(ndocs=64)
        assert len(ours.dense_search(Q, k=200)[0]) == 16

    def test_explicit_settings_are_kept(self, ours, collection):  # noqa: F811
        ours.configure(ndocs=64)
        assert len(ours.search(collection[0], k=200)[0]) == 16
        assert ours.config.ndocs == 64

    def test_lengths_agree(self, ours, collection):  # noqa: F811
        for pids, ranks, scores in (
            ours.search(collection[0], k=250),
            ours.search(collection[0], k=10, pids=[3, 3, 7]),
            ours.search(collection[0], k=10, pids=[]),
            ours.search(collection[0], k=10, filter_fn=lambda pids: pids[:0]),
            ours.search(collection[0], k=0),
        ):
            assert len(pids) == len(ranks) == len(scores)
            assert ranks == list(range(1, len(pids) + 1))

    def test_what_the_user_sets_is_not_taken_for_stocks(self, searcher, collection):  # noqa: F811
        searcher.configure(scorer="plaid")
        searcher.search(collection[0], k=10)  # stock writes ncells=1 into the config
        searcher.configure(scorer="tilemaxsim")
        by_default = searcher.search(collection[0], k=1000)
        searcher.configure(ncells=1)
        assert len(searcher.search(collection[0], k=1000)[0]) < len(by_default[0])

    def test_only_allowed_passages_are_found(self, ours, collection):  # noqa: F811
        Q = ours.encode(collection[0])
        even = torch.arange(ours.ranker.num_passages) % 2 == 0
        masked = ours.dense_search(Q, k=5, allow=even)
        assert len(masked[0]) == 5
        assert all(pid % 2 == 0 for pid in masked[0])
        assert ours.dense_search(Q, k=5, allow=even.nonzero()[:, 0]) == masked
        assert ours.dense_search(Q, k=5, filter_fn=lambda pids: pids[pids % 2 == 0]) == masked
        with pytest.raises(ValueError, match="allow: expected bool"):
            ours.dense_search(Q, k=5, allow=even[:-1])
        ours.configure(scorer="plaid")
        with pytest.raises(ValueError, match="allow: expected None"):
            ours.dense_search(Q, k=5, allow=even)

    def test_search_all(self, ours, collection):  # noqa: F811
        queries = dict(enumerate(collection[:3]))
        ranking = ours.search_all(queries, k=5, qid_to_pids={0: None, 1: [4, 5], 2: []})
        one = ours.search(collection[0], k=5)
        assert [pid for pid, _, _ in ranking.data[0]] == one[0]
        assert sorted(pid for pid, _, _ in ranking.data[1]) == [4, 5]
        assert ranking.data[2] == []
        assert ranking.provenance().config["scorer"] == "tilemaxsim"

    def test_many_queries_and_long_ones(self, ours, collection):  # noqa: F811
        ranking = ours.search_all(dict(enumerate(collection[:130])), k=3)
        assert len(ranking.data) == 130
        for qid in (0, 129):
            pids, ranks, scores = ours.search(collection[qid], k=3)
            assert [row[:2] for row in ranking.data[qid]] == list(zip(pids, ranks))
            # encoded in another batch, so equal but for the encoder's rounding
            assert [row[2] for row in ranking.data[qid]] == pytest.approx(scores, abs=1e-3)
        long = " ".join(collection[:6])
        assert ours.encode(long, full_length_search=True).size(1) > 100
        assert len(ours.search(long, k=5, full_length_search=True)[0]) == 5

    def test_misspelt_at_the_latest_in_the_search(self, searcher, collection):  # noqa: F811
        vars(searcher.config)["scorer"] = "tilemaxism"
        with pytest.raises(ValueError, match="scorer: expected one of"):
            searcher.search(collection[0])
        vars(searcher.config).update(scorer="tilemaxsim", scorer_options={"moed": "plaid"})
        with pytest.raises(ValueError, match="scorer_options: expected names from"):
            searcher.search(collection[0])

    def test_after_disable_it_is_stock(self, ours, collection):  # noqa: F811
        ours.search(collection[0])
        plaid_tilemaxsim.disable()
        pids, ranks, scores = ours.search(collection[0], k=10)
        assert ours.config.ncells == 1
        assert len(pids) == len(scores) == len(ranks) == 10

    def test_flag_from_the_index(self, tmp_path, index, checkpoint, collection):  # noqa: F811
        copied = tmp_path / "flagged"
        shutil.copytree(index, copied)
        stored = json.loads((index / "metadata.json").read_text())
        stored["config"] |= FLAGGED
        (copied / "metadata.json").write_text(json.dumps(stored))
        arguments = {"checkpoint": str(checkpoint), "collection": collection, "verbose": 1}
        assert Searcher(str(copied), **arguments).config.scorer == "tilemaxsim"
        user = Searcher(str(copied), **arguments, config=ColBERTConfig(scorer="plaid"))
        assert user.config.scorer == "plaid"
        plaid_tilemaxsim.disable()
        compat.apply()
        assert len(Searcher(str(copied), **arguments).search(collection[0], k=5)[0]) == 5
        compat.revert()

    def test_mismatched_collection_warns(self, index, checkpoint, collection, caplog):  # noqa: F811
        for scorer in ("plaid", "tilemaxsim"):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "plaid_tilemaxsim"):
                Searcher(
                    str(index),
                    checkpoint=str(checkpoint),
                    collection=collection[:2],
                    config=ColBERTConfig(scorer=scorer),
                    verbose=1,
                )
            assert "the index has 300 passages and the collection 2" in caplog.text

    def test_only_the_chosen_side_is_loaded(self, index, checkpoint, collection):  # noqa: F811
        config = ColBERTConfig(scorer="tilemaxsim")
        searcher = Searcher(str(index), checkpoint=str(checkpoint), collection=collection, config=config, verbose=1)
        searcher.search(collection[0])
        assert "codec" not in vars(searcher.ranker)
        searcher = Searcher(str(index), checkpoint=str(checkpoint), collection=collection, verbose=1)
        assert "codec" in vars(searcher.ranker)
        assert searcher.ranker._engine is None

    def test_codecs(self, tmp_path, index, checkpoint, collection):  # noqa: F811
        """One Searcher, its codec changed between calls as its scorer can be."""
        pytest.importorskip("faiss")
        from plaid_tilemaxsim.cli import main

        copied = shutil.copytree(index, tmp_path / "coded")
        assert main(["pq", str(copied), "--m", "16", "--sample", "2000"]) == 0
        config = ColBERTConfig(scorer="tilemaxsim")
        searcher = Searcher(str(copied), checkpoint=str(checkpoint), collection=collection, config=config, verbose=1)
        want = dict(zip(*searcher.search(collection[3], k=10)[::2]))
        for options, error in (({"codec": "dense"}, 2e-3), ({"codec": "pq"}, 2.0)):
            searcher.configure(scorer_options=options)
            found = dict(zip(*searcher.search(collection[3], k=10)[::2]))
            both = want.keys() & found.keys()
            assert len(both) >= 5
            worst = max(abs(want[pid] - found[pid]) for pid in both)
            assert worst <= error
            assert options["codec"] == "dense" or worst > 2e-3, "other scores than from residuals"
        with pytest.raises(ValueError, match="codec: expected one of"):
            searcher.configure(scorer_options={"codec": "opq"})

    def test_index_updater(self, tmp_path, index, checkpoint, collection):  # noqa: F811
        """Stock's own updater: what it adds and removes is found, or not, by the next search, as by stock's."""
        copied = tmp_path / "updated"
        shutil.copytree(index, copied)
        # add() fails on the padding that stock itself writes since 0.2.20
        ivf, lengths = torch.load(copied / "ivf.pid.pt")
        torch.save((ivf[: int(lengths.sum())], lengths), copied / "ivf.pid.pt")
        settings = {"ncells": 8, "centroid_score_threshold": 0.0, "ndocs": 2048}
        config = ColBERTConfig(scorer="tilemaxsim", **settings)

        def make():
            return Searcher(str(copied), checkpoint=str(checkpoint), collection=collection, config=config, verbose=1)

        def found(searcher, scorer):
            searcher.configure(scorer=scorer)
            pids, _, scores = searcher.search(text, k=400)
            return dict(zip(pids, scores))

        text = " ".join(WORDS[7:19])
        searcher = make()
        before = found(searcher, "tilemaxsim")
        updater = IndexUpdater(searcher.config, searcher, str(checkpoint))
        assert updater.add([text, collection[0]]) == [PASSAGES, PASSAGES + 1]
        after = found(searcher, "tilemaxsim")
        assert next(iter(after)) == PASSAGES
        assert after.keys() - before.keys() >= {PASSAGES}
        assert 17 in before
        # one after the other: stock cannot store the removal of what was added since it last stored
        for pid in (17, PASSAGES):
            updater.remove([pid])
            after = found(searcher, "tilemaxsim")
            assert pid not in after
            assert after.keys() == found(searcher, "plaid").keys()
            updater.persist_to_disk()
            assert found(searcher, "tilemaxsim") == after
            assert found(make(), "tilemaxsim") == after
            assert found(make(), "plaid").keys() == after.keys()
