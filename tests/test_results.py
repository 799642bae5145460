"""What README says was measured is what the results say, and every result passed its own checks."""

import json
from pathlib import Path

import pytest

from scripts import plot_roofline, update_readme
from scripts.kernels import page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "eval" / "results").glob("*.json"))


def test_readme_is_what_the_results_say():
    text = (ROOT / "README.md").read_text()
    assert update_readme.rendered(text) == text
    stale = text.replace("queries/s", "queries a second")
    assert update_readme.rendered(stale) != stale


def test_roofline_page_is_what_the_results_say():
    text = plot_roofline.PAGE.read_text()
    assert update_readme.rendered(text, page.tables(), "docs/roofline.md") == text


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_complete(path):
    result = json.loads(path.read_text())
    assert result["correct"] is True
    assert {"figures", "versions", "commit", "command"} <= result.keys()
    assert all(isinstance(value, (int, float)) for value in result["figures"].values())


def test_search_reaches_its_targets():
    f = update_readme.load("h200_search")["figures"]
    for k, limit in ((10, 0.6), (100, 0.8), (1000, 1.2)):
        assert f[f"search_p50_ms_k{k}"] <= limit
        assert f[f"search_p99_ms_k{k}"] <= 2 * f[f"search_p50_ms_k{k}"]
    assert f["mean_err_ours"] < f["mean_err_stock"]
    assert f["max_err_vs_oracle"] <= 2e-3


def test_a_run_that_failed_its_checks_is_not_shown(tmp_path, monkeypatch):
    (tmp_path / "eval" / "results").mkdir(parents=True)
    (tmp_path / "eval" / "results" / "h200_search.json").write_text('{"correct": false, "figures": {}}')
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="correct = False"):
        update_readme.search_table()


@pytest.mark.parametrize(
    "path", [path for path in RESULTS if path.stem.endswith("_hostile")], ids=lambda path: path.stem
)
def test_hostile_calls(path):
    f = json.loads(path.read_text())["figures"]
    assert f["hostile_cases"] >= (10_000 if path.stem == "cpu_hostile" else 2_000)
    assert f["failures"] == 0
    assert f["sharp"] >= 0.9 * f["compared"] > 0


QUALITY = ROOT / "eval" / "results" / "h200_quality.json"


@pytest.mark.skipif(not QUALITY.exists(), reason="eval/results has no h200_quality.json")
def test_quality_keeps_its_promises():
    f = update_readme.load("h200_quality")["figures"]
    assert f["sets"] >= f["metrics_equal_sets"] >= 5
    assert f["searches"] == 9 * f["sets"]
    assert f["metrics_equal_searches_cpu"] >= 0.9 * f["searches"]
    assert f["max_err_vs_oracle"] <= 2e-3
    assert f["mean_err_ours"] < f["mean_err_stock_gpu"]
    assert f["ndcg10_losses_holm"] == 0
