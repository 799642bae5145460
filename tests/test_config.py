"""ScorerConfig: what a user may ask for, and what he is told otherwise."""

import dataclasses

import pytest

from plaid_tilemaxsim.config import ScorerConfig, check_scorer


def test_defaults():
    assert ScorerConfig.from_options(None) == ScorerConfig.from_options({}) == ScorerConfig()
    assert ScorerConfig().mode == "plaid"


def test_options_are_taken():
    config = ScorerConfig.from_options({"mode": "exhaustive", "prefilter": 4096, "placement": "host"})
    assert (config.mode, config.prefilter, config.placement) == ("exhaustive", 4096, "host")
    assert ScorerConfig.from_options(config) == config


def test_devices_have_one_name_each():
    config = ScorerConfig.from_options({"devices": [0, "cuda:1", "cpu"], "replicas": 3})
    assert config.devices == ("cuda:0", "cuda:1", "cpu")
    assert ScorerConfig.from_options(config) == config
    assert hash(config) is not None


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScorerConfig().mode = "rerank"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moed": "plaid"}, r"expected names from \['mode', .*\], got 'moed'"),
        ({"mode": "fast"}, r"mode: expected one of \['plaid', 'rerank', 'exhaustive'\], got 'fast'"),
        ({"placement": "cpu"}, "placement: expected one of"),
        ({"impl": None}, "impl: expected one of"),
        ({"mode": ["plaid"]}, "mode: expected one of"),
        ({"verify": True}, "verify: expected one of"),
        ({"mode": "exhaustive", "prefilter": 0}, "prefilter: expected None or an integer >= 1, got 0"),
        ({"mode": "exhaustive", "prefilter": True}, "prefilter: .* got True"),
        ({"codec": "opq"}, r"codec: expected one of \['residual', 'dense', 'pq'\], got 'opq'"),
        ({"codec": "pq", "pq_m": 0}, "pq_m: expected None or an integer >= 1, got 0"),
        ({"codec": "pq", "pq_m": "16"}, "pq_m: expected None or an integer >= 1, got '16'"),
        ({"pq_m": 16}, "pq_m: expected None with codec 'residual', got 16"),
        (
            {"codec": "pq", "placement": "host"},
            r"placement: .* \['auto', 'gpu'\] with codec 'pq', got 'host'",
        ),
        ({"codec": "dense", "placement": "disk"}, r"placement: expected one of .* with codec 'dense', got 'disk'"),
        ({"prefilter": 100}, "prefilter: expected None in mode 'plaid', got 100"),
        ({"tuning": 7}, "tuning: expected None or the path of a file, got 7"),
        ({"tuning": ""}, "tuning: expected None or the path of a file, got ''"),
        ({"stats": 1}, "stats: expected True or False, got 1"),
        ({"devices": []}, r"devices: expected None or a list of GPU numbers, .*, got \[\]"),
        ({"devices": 0}, "devices: .*, got 0"),
        ({"devices": "cuda:0"}, "devices: .*, got 'cuda:0'"),
        ({"devices": [0, -1]}, r"devices: .*, got \[0, -1\]"),
        ({"devices": [True]}, r"devices: .*, got \[True\]"),
        ({"devices": ["tpu"]}, r"devices: .*, got \['tpu'\]"),
        ({"replicas": 0}, "replicas: expected an integer >= 1, got 0"),
        ({"replicas": None}, "replicas: expected an integer >= 1, got None"),
        ("exhaustive", "scorer_options: expected a dict or None, got str"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ScorerConfig.from_options(options)


def test_environment_sets_defaults(monkeypatch):
    monkeypatch.setenv("PLAID_TILEMAXSIM_MODE", "exhaustive")
    monkeypatch.setenv("PLAID_TILEMAXSIM_PREFILTER", "64")
    monkeypatch.setenv("PLAID_TILEMAXSIM_PLACEMENT", "")
    assert ScorerConfig.from_options(None) == ScorerConfig(mode="exhaustive", prefilter=64)
    monkeypatch.setenv("PLAID_TILEMAXSIM_CODEC", "pq")
    monkeypatch.setenv("PLAID_TILEMAXSIM_PQ_M", "32")
    assert ScorerConfig.from_options(None).pq_m == 32
    monkeypatch.delenv("PLAID_TILEMAXSIM_CODEC")
    monkeypatch.delenv("PLAID_TILEMAXSIM_PQ_M")
    assert ScorerConfig.from_options(None) == ScorerConfig(mode="exhaustive", prefilter=64)
    assert ScorerConfig.from_options({"prefilter": 8}).prefilter == 8
    monkeypatch.setenv("PLAID_TILEMAXSIM_DEVICES", "0,cuda:2")
    monkeypatch.setenv("PLAID_TILEMAXSIM_REPLICAS", "2")
    assert ScorerConfig.from_options(None).devices == ("cuda:0", "cuda:2")
    assert ScorerConfig.from_options(None).replicas == 2
    for text, value in (("1", True), ("0", False)):
        monkeypatch.setenv("PLAID_TILEMAXSIM_STATS", text)
        assert ScorerConfig.from_options(None).stats is value


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MODE", "fast"), ("PREFILTER", "many"), ("CODEC", "opq"), ("PQ_M", "x"), ("STATS", "yes"), ("REPLICAS", "x")],
)
def test_environment_is_checked(monkeypatch, variable, value):
    monkeypatch.setenv(f"PLAID_TILEMAXSIM_{variable}", value)
    with pytest.raises(ValueError, match=f"PLAID_TILEMAXSIM_{variable}: expected .*, got '{value}'"):
        ScorerConfig.from_options(None)


def test_scorer_names():
    assert check_scorer(None) == check_scorer("plaid") == "plaid"
    assert check_scorer("tilemaxsim") == "tilemaxsim"
    for wrong in ("tilemaxism", "PLAID", "", 1, ["plaid"]):
        with pytest.raises(ValueError, match=r"scorer: expected one of \['plaid', 'tilemaxsim'\], got"):
            check_scorer(wrong)
