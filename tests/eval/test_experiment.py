"""Experiments: every key required, none unknown, values of the right kind, the shipped files valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.experiment import Experiment, default_experiment, find_config
from eval.systems import Knobs, parse_system
from plaid_tilemaxsim.funnel import default_params

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
BEIR = (
    "arguana", "climate-fever", "cqadupstack/android", "cqadupstack/english", "cqadupstack/gaming", "cqadupstack/gis",
    "cqadupstack/mathematica", "cqadupstack/physics", "cqadupstack/programmers", "cqadupstack/stats", "cqadupstack/tex",
    "cqadupstack/unix", "cqadupstack/webmasters", "cqadupstack/wordpress", "dbpedia-entity/test", "fever/test",
    "fiqa/test", "hotpotqa/test", "msmarco/test", "nfcorpus/test", "nq", "quora/test", "scidocs", "scifact/test",
    "trec-covid", "webis-touche2020",
)  # fmt: skip
GOOD = default_experiment().to_dict()


def test_round_trip():
    assert Experiment.from_dict(json.loads(json.dumps(GOOD))) == default_experiment()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_file(path):
    experiment = Experiment.read(path)
    assert experiment.name == path.stem
    assert json.loads(path.read_text()) == experiment.to_dict()


def test_files_are_shipped():
    """One for each public BEIR set that ir_datasets has, the MS MARCO ones, and those about modes and codecs."""
    by_name = {path.stem: Experiment.read(path) for path in CONFIGS}
    assert {"msmarco_k10", "msmarco_k100", "msmarco_k1000", "trec_dl19", "trec_dl20"} <= by_name.keys()
    datasets = {experiment.dataset for experiment in by_name.values()}
    for name in BEIR:
        assert any(dataset.startswith(f"beir/{name}") for dataset in datasets), name
    systems = {system for experiment in by_name.values() for system in experiment.systems}
    for wanted in ("mode=rerank", "mode=exhaustive", "codec=dense", "codec=pq", "placement=host", "fast-plaid"):
        assert any(wanted in system for system in systems), wanted


def test_ids_exist_in_ir_datasets():
    ir_datasets = pytest.importorskip("ir_datasets")
    for path in CONFIGS:
        dataset = Experiment.read(path).dataset
        if dataset.startswith(("beir/", "msmarco-passage/")):
            source = ir_datasets.load(dataset)
            assert source.has_docs(), dataset
            assert source.has_queries(), dataset
            assert source.has_qrels(), dataset


def test_configurations_by_name(tmp_path):
    assert find_config("msmarco_k10").name == "msmarco_k10.json"
    assert find_config(str(tmp_path / "x.json")) == tmp_path / "x.json"
    with pytest.raises(ValueError, match=r"config: expected a \.json file or one of .*msmarco_k10"):
        find_config("msmarco_k11")


@pytest.mark.parametrize("key", sorted(GOOD))
def test_every_key_is_required(key):
    with pytest.raises(ValueError, match=f"got none for {key}"):
        Experiment.from_dict({name: value for name, value in GOOD.items() if name != key}, "x.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ncell": 3}, "x.json: expected only the keys .*, got ncell"),
        ({"nbits": [3]}, "x.json, nbits: expected 1, 2, 4 or 8, got 3"),
        ({"nbits": []}, "nbits: expected at least one"),
        ({"nbits": [2, 2]}, "nbits: expected each once"),
        ({"threads": "two"}, "threads: expected int or null, got 'two'"),
        ({"queries": True}, "queries: expected int or null, got True"),
        ({"queries": 0}, "queries: expected a number >= 1, got 0"),
        ({"systems": ["plaid:mode=rerank"]}, "system: expected plaid or plaid:device=cpu"),
        ({"systems": ["pliad"]}, "system: expected plaid, tilemaxsim, .*fast-plaid"),
        ({"systems": ["tilemaxsim:mode=fast"]}, "scorer option mode: expected one of"),
        ({"systems": ["tilemaxsim:speed=fast"]}, "scorer_options: expected names from"),
        ({"systems": ["maxsim:impl=abacus"]}, "system: expected maxsim:impl=I with I among loop"),
        ({"latency": {**GOOD["latency"], "batches": [0]}}, "latency.batches: expected numbers >= 1, got 0"),
        ({"search": [{"k": 10}]}, "search: expected the keys .* got none for ncells"),
        ({"search": [{**GOOD["search"][0], "nprobe": 1}]}, "search: expected only the keys .*, got nprobe"),
        ({"search": [{**GOOD["search"][0], "k": 0}]}, "k: expected an integer >= 1, got 0"),
        ({"search": [GOOD["search"][0]] * 2}, "search: expected each k once"),
        ({"latency": {**GOOD["latency"], "repeats": 0}}, "latency.repeats: expected a number >= 1"),
        ({"compare": {"queries": 5}}, "compare: expected the keys .* got none for exhaustive"),
        ({"compare": {"queries": 5, "exhaustive": "yes"}}, "exhaustive: expected bool, got 'yes'"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Experiment.from_dict({**GOOD, **changes}, "x.json")


def test_file_that_is_no_json(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json: expected JSON"):
        Experiment.read(tmp_path / "x.json")


@pytest.mark.parametrize("k", [1, 10, 11, 100, 101, 1000, 5000])
def test_default_knobs_are_stocks(k):
    knobs = Knobs.defaults(k)
    assert (knobs.ncells, knobs.centroid_score_threshold, knobs.ndocs) == default_params(k)


def test_parse_system():
    assert parse_system("tilemaxsim:mode=rerank,placement=host") == (
        "tilemaxsim",
        {"mode": "rerank", "placement": "host"},
    )
    assert parse_system("tilemaxsim:mode=exhaustive,prefilter=1000")[1]["prefilter"] == 1000
    assert parse_system("plaid") == ("plaid", {})
