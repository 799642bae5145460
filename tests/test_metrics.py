"""Searches as Prometheus metrics."""

import subprocess
import sys

import pytest

from plaid_tilemaxsim.metrics import SearchMetrics
from plaid_tilemaxsim.stats import SearchStats

prometheus_client = pytest.importorskip("prometheus_client")

LABELS = {"mode": "plaid", "codec": "residual", "placement": "cpu"}


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def test_searches_are_added_up(registry):
    metrics = SearchMetrics(registry)
    one = SearchStats("plaid", "residual", "cpu", k=10, queries=1, results=10, seconds=0.003)
    measured = SearchStats("plaid", "residual", "cpu", 10, 4, 37, 0.2, 1200, {"candidates": 0.05, "exact": 0.1})
    for stats in (one, measured, measured):
        metrics.observe(stats)
    value = registry.get_sample_value
    assert value("plaid_tilemaxsim_queries_total", LABELS) == 9
    assert value("plaid_tilemaxsim_results_total", LABELS) == 84
    assert value("plaid_tilemaxsim_candidates_total", LABELS) == 2400
    assert value("plaid_tilemaxsim_search_seconds_count", LABELS) == 3
    assert value("plaid_tilemaxsim_search_seconds_sum", LABELS) == pytest.approx(0.403)
    assert value("plaid_tilemaxsim_search_seconds_bucket", {**LABELS, "le": "0.005"}) == 1
    assert value("plaid_tilemaxsim_stage_seconds_total", {**LABELS, "stage": "exact"}) == pytest.approx(0.2)
    assert value("plaid_tilemaxsim_queries_total", {**LABELS, "mode": "pids"}) is None


def test_a_registry_takes_them_once(registry):
    SearchMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        SearchMetrics(registry)
    SearchMetrics(prometheus_client.CollectorRegistry())


def test_what_is_missing_is_named():
    code = "import sys; sys.modules['prometheus_client'] = None; from plaid_tilemaxsim import metrics;"
    done = subprocess.run([sys.executable, "-c", code + "metrics.SearchMetrics()"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'plaid-tilemaxsim[metrics]'" in done.stderr
