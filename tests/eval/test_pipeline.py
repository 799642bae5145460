"""The pipeline: one call from an experiment to results, resumable; and what it finds on real collections."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plaid_tilemaxsim
from eval import pipeline
from eval.compare import Side, compare
from eval.datasets import write_beir
from eval.experiment import Comparing, Experiment, Timing, default_experiment
from eval.oracle import Oracle
from eval.retrieve import Scored, read_run
from eval.systems import OURS_CPU, STOCK_CPU, Knobs
from plaid_tilemaxsim.index.files import read_index
from tests.colbert_fixtures import checkpoint, stock_extensions  # noqa: F401
from tests.synthetic import make_collection

pytest.importorskip("faiss")
pytest.importorskip("ir_measures")

PASSAGES, QUERIES = 150, 6


@pytest.fixture(autouse=True)
def left_as_it_was():
    yield
    plaid_tilemaxsim.disable()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BEIR folder whose queries are the first words of a passage; query 3 has a passage's id."""
    folder = tmp_path_factory.mktemp("beir") / "tiny"
    texts = make_collection(PASSAGES)
    targets = [11 * i for i in range(QUERIES)]
    names = ["d5" if i == 3 else f"q{i}" for i in range(QUERIES)]
    write_beir(
        folder,
        ((f"d{pid}", text) for pid, text in enumerate(texts)),
        ((name, " ".join(texts[pid].split()[:5])) for name, pid in zip(names, targets)),
        ((name, f"d{pid}", 1) for name, pid in zip(names, targets)),
    )
    return folder


@pytest.fixture(scope="module")
def experiment(dataset: Path, checkpoint: Path) -> Experiment:  # noqa: F811
    return default_experiment().with_changes(
        name="tiny",
        dataset=str(dataset),
        checkpoint=str(checkpoint),
        doc_maxlen=60,
        systems=["plaid", "tilemaxsim", "tilemaxsim:mode=exhaustive"],
        search=[Knobs(5, 2, 0.3, 60), Knobs(100, 4, 0.2, 400)],
        compare=Comparing(queries=None, exhaustive=True),
        latency=Timing(queries=3, warmup=1, repeats=1, batches=[1, 4]),
    )


@pytest.fixture(scope="module")
def done(experiment, tmp_path_factory, stock_extensions):  # noqa: F811
    """(results, out, cache) of one run."""
    out, cache = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("cache")
    results = pipeline.run(experiment, out, cache=str(cache), progress=False)
    plaid_tilemaxsim.disable()
    return results, out, cache


def test_results_files(done):
    results, out, _ = done
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert json.loads((out / "experiment.json").read_text()) == results["experiment"]
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert (out / "report.md").read_text().startswith("# TileMaxSim against stock PLAID on tiny")
    assert results["not_run"] == {}
    costs = results["indexes"][0]["costs"]
    assert list(costs) == ["plaid", "tilemaxsim", "tilemaxsim:mode=exhaustive"]
    assert all(cost["first_query_ms"] > 0 for cost in costs.values())
    for k in (5, 100):
        for system in ("plaid", "tilemaxsim", "tilemaxsim_mode=exhaustive"):
            folder = out / "2bit" / f"k{k}" / system
            run = read_run(folder / "run.trec")
            assert len(run) == QUERIES
            assert all(0 < len(docs) <= k for docs in run.values())
            assert "d5" not in run["d5"]  # the query's own passage
            manifest = json.loads((folder / "manifest.json").read_text())
            assert manifest["inputs"]["knobs"]["k"] == k
            assert {"machine", "versions", "commit"} <= set(manifest["environment"])
            assert len(manifest["inputs"]["digest"]) == 64


def test_the_plugin_is_stock(done):
    results, _, _ = done
    assert results["verdict"]["same"] is True, results["verdict"]
    assert results["verdict"]["of"] == 2  # exhaustive mode is not held to PLAID's funnel
    for search in results["indexes"][0]["search"]:
        compared = search["compare"]["tilemaxsim"]
        assert compared["queries"] == QUERIES
        assert compared["candidates"]["different"] == compared["survivors"]["different"] == 0
        assert compared["errors"]["tilemaxsim"]["max"] <= 2e-3
        # scoring everything is what the oracle's exhaustive search does, in float32
        assert search["exhaustive"]["recall"]["tilemaxsim:mode=exhaustive"] > 0.99
        exact = search["exhaustive"]
        assert exact["recall"]["plaid"] <= exact["candidates"]["plaid"] <= 1
        assert exact["candidates"]["plaid"] == exact["candidates"]["tilemaxsim"]
        assert set(search["latency"]["throughput"]["plaid"]) == {"1", "4"}
        assert search["compare"]["tilemaxsim:mode=exhaustive"]["same"] is None
        for timed in search["latency"]["systems"].values():
            assert timed["search"]["n"] == 3


def test_a_second_run_does_nothing_again(done, experiment, monkeypatch):
    results, out, cache = done

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("run again")

    for name in ("retrieve", "compare", "measure_latency", "open_systems", "Oracle"):
        monkeypatch.setattr(pipeline, name, fail)
    again = pipeline.run(experiment, out, cache=str(cache), progress=False)
    for part in ("indexes", "verdict", "figures", "dataset"):
        assert again[part] == results[part]


def test_changed_knobs_are_run_again(done, experiment, monkeypatch):
    _, out, cache = done
    asked = []
    real = pipeline.retrieve

    def counted(system, Q, **kwargs):
        asked.append(system.name)
        return real(system, Q, **kwargs)

    monkeypatch.setattr(pipeline, "retrieve", counted)
    search = [experiment.search[0], dataclasses.replace(experiment.search[1], ndocs=200)]
    less = experiment.with_changes(search=search, systems=["plaid", "tilemaxsim"], latency=Timing(0, 0, 1, []))
    results = pipeline.run(less, out, cache=str(cache), progress=False)
    assert asked == ["plaid", "tilemaxsim"]  # of the second setting alone
    assert results["indexes"][0]["search"][0]["latency"] is None


def test_a_stopped_run_leaves_no_half_stage(done, experiment, tmp_path, monkeypatch):
    _, _, cache = done
    real = Scored.save

    def stop(self, path):
        real(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scored, "save", stop)
    small = experiment.with_changes(systems=["plaid"], search=experiment.search[:1], latency=Timing(0, 0, 1, []))
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(small, tmp_path, cache=str(cache), progress=False)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["2bit", "2bit/k5", "2bit/load", "2bit/load/manifest.json", "2bit/load/result.json",
                    "experiment.json"]  # fmt: skip
    monkeypatch.undo()
    results = pipeline.run(small, tmp_path, cache=str(cache), progress=False)
    assert results["verdict"]["same"] is None
    assert (tmp_path / "2bit/k5/plaid/run.trec").exists()


def test_command_line(done, experiment, tmp_path, capsys):
    spec = spec_from_file_location("eval_script", Path(__file__).parents[2] / "scripts" / "eval.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    cache = done[2]
    (tmp_path / "tiny.json").write_text(json.dumps(experiment.to_dict()))
    flags = ["--config", str(tmp_path / "tiny.json"), "--out", str(tmp_path / "out"), "--cache", str(cache), "--quiet"]
    assert script.main([*flags, "--k", "5", "--no-latency", "--systems", "plaid", "tilemaxsim"]) == 0
    assert "1 of 1 settings" in capsys.readouterr().out
    assert script.main([*flags, "--systems", "pliad"]) == 2
    assert "system: expected plaid" in capsys.readouterr().err
    for command, wanted in (("build", "2bit"), ("measure", "nDCG@10"), ("compare", "same outside ties")):
        assert script.main([command, *flags, "--k", "5", "--systems", "plaid", "tilemaxsim"]) == 0
        assert wanted in capsys.readouterr().out
    (tmp_path / "out" / "report.md").unlink()
    assert script.main(["report", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.md").exists()
    assert script.main(["report", "--out", str(tmp_path / "none")]) == 2
    assert "expected the results of `run`" in capsys.readouterr().err
    (tmp_path / "tiny.json").write_text(json.dumps({**experiment.to_dict(), "bits": 2}))
    assert script.main(flags) == 2
    assert "expected only the keys" in capsys.readouterr().err


def test_codecs(done, experiment, tmp_path):
    _, _, cache = done
    names = ["plaid", "tilemaxsim:codec=dense", "tilemaxsim:codec=pq,pq_m=16"]
    wanted = experiment.with_changes(systems=names, search=experiment.search[:1], latency=Timing(1, 0, 1, []))
    results = pipeline.run(wanted, tmp_path, cache=str(cache), progress=False)
    compared = results["indexes"][0]["search"][0]["compare"]
    assert results["verdict"] == {**results["verdict"], "same": True, "of": 1}
    dense, quantised = (compared[name] for name in names[1:])
    assert (dense["same"], quantised["same"], quantised["judged"]) == (True, None, False)
    assert dense["errors"][names[1]]["max"] <= 2e-3 < quantised["errors"][names[2]]["max"]
    with pytest.raises(ValueError, match="expected pq_m=M with codec=pq"):
        experiment.with_changes(systems=["tilemaxsim:codec=pq"])


@pytest.mark.skipif(find_spec("xtr_warp") is not None, reason="xtr-warp-rs is installed here")
def test_what_cannot_run_is_reported_and_the_rest_goes_on(done, experiment, tmp_path):
    _, _, cache = done
    wanted = experiment.with_changes(
        systems=["plaid", "tilemaxsim", "xtr-warp"], search=experiment.search[:1], latency=Timing(1, 0, 1, [1])
    )
    results = pipeline.run(wanted, tmp_path, cache=str(cache), progress=False)
    why = results["not_run"]["xtr-warp"]
    assert why["reason"] == "xtr-warp-rs is not installed"
    assert "pip install xtr-warp-rs" in why["remedy"]
    assert list(results["indexes"][0]["search"][0]["metrics"]) == ["plaid", "tilemaxsim"]
    for name in ("report.html", "report.md"):
        assert "xtr-warp-rs is not installed" in (tmp_path / name).read_text()
    alone = wanted.with_changes(systems=["xtr-warp", "plaid"])
    with pytest.raises(ValueError, match=r"xtr-warp: expected the first system.*not installed"):
        pipeline.run(alone, tmp_path / "alone", cache=str(cache), progress=False)


def check_real(out: Path, nbits: int, **changes: Any) -> None:
    """What the project promises of stock and plugin on real text, and that a shuffled scorer breaks the promise.

    Indexes and encoded texts stay in the user's cache.
    """
    experiment = default_experiment().with_changes(
        nbits=[nbits],
        compare=Comparing(queries=None, exhaustive=False),
        latency=Timing(queries=0, warmup=0, repeats=1, batches=[]),
        **changes,
    )
    results = pipeline.run(experiment, out, progress=False)
    plaid_tilemaxsim.disable()
    index = results["indexes"][0]
    for search in index["search"]:
        compared = search["compare"]["tilemaxsim"]
        assert compared["failures"] == []
        assert compared["errors"]["tilemaxsim"]["max"] <= 2e-3
        assert (
            compared["ranking"]["same_outside_ties"] == compared["queries"] == results["dataset"]["counts"]["queries"]
        )
        assert compared["candidates"]["different"] == compared["survivors"]["different"] == 0
        for name, change in search["paired"]["tilemaxsim"].items():
            assert abs(change["mean"]) < pipeline.METRIC_TOLERANCE, name
    assert results["verdict"]["same"] is True
    if torch.cuda.is_available():
        return  # the sides' tolerances below are the CPU's
    # The same comparison of a plugin whose scores, or whose order, went to the wrong passages.
    knobs = experiment.search[0]
    folder = out / f"{nbits}bit" / f"k{knobs.k}"
    stock, ours = (Scored.load(folder / name / "scored.npz") for name in ("plaid", "tilemaxsim"))
    rng = np.random.default_rng(0)
    bounds = list(zip(ours.offsets[:-1], ours.offsets[1:]))
    wrong = {
        "order": dataclasses.replace(ours, pids=np.concatenate([rng.permutation(ours.pids[a:b]) for a, b in bounds])),
        "constant": dataclasses.replace(ours, scores=np.full_like(ours.scores, ours.scores.mean())),
    }
    oracle = Oracle(read_index(index["path"]))
    encoded = pipeline.Context(experiment, out, None, None, False).encoded
    n = min(20, len(encoded.ids))
    base = Side("plaid", stock, STOCK_CPU, clamps=True)
    good = compare(base, Side("tilemaxsim", ours, OURS_CPU), oracle, encoded.Q[:n], knobs, encoded.ids)
    assert good["same"] is True
    for what, scored in wrong.items():
        bad = compare(base, Side("tilemaxsim", scored, OURS_CPU), oracle, encoded.Q[:n], knobs, encoded.ids)
        assert bad["same"] is False, what
        assert bad["num_failures"] >= n


@pytest.fixture(scope="session")
def splade_tiny():
    """Skips where the default checkpoint can be neither found nor downloaded."""
    from eval.checkpoint import make_checkpoint

    try:
        return str(make_checkpoint("splade-tiny", progress=False))
    except RuntimeError as error:
        pytest.skip(f"no checkpoint: {error}")


@pytest.mark.parametrize("nbits", [2])
def test_slice_of_real_text(dataset_folder, splade_tiny, stock_extensions, tmp_path, nbits):  # noqa: F811
    folder = dataset_folder("scifact")
    check_real(tmp_path, nbits, dataset=f"{folder}[:400]", split="test", queries=30)


@pytest.mark.slow
@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("name", ["pydocs", "scifact", "msmarco-mini"])
def test_real_collections_whole(dataset_folder, splade_tiny, stock_extensions, tmp_path, name, nbits):  # noqa: F811
    split = {"pydocs": "auto", "scifact": "test", "msmarco-mini": "dl19"}[name]
    dataset = "pydocs[:2000]" if name == "pydocs" else str(dataset_folder(name))
    check_real(tmp_path, nbits, dataset=dataset, split=split)
