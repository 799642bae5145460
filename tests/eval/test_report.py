"""The report: self-contained, its numbers are the results', and it says plainly when something differs."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from eval import markdown, plots, report
from eval.compare import Errors
from eval.experiment import default_experiment
from eval.measure import paired
from eval.pipeline import figures, verdict

BASE, OURS = "plaid", "tilemaxsim"


def timing(p50: float) -> dict[str, float]:
    return {"n": 9, "mean": 1.1 * p50, "min": 0.5 * p50, "max": 3 * p50, "p20": 0.9 * p50, "p50": p50, "p80": 1.2 * p50,
            "p95": 1.7 * p50, "p99": 2.3 * p50}  # fmt: skip


def errors(scale: float) -> dict[str, Any]:
    import numpy as np

    collected = Errors()
    collected.add(np.random.default_rng(0).normal(size=500) * scale)
    return collected.summary()


def cost(seconds: float) -> dict[str, Any]:
    return {"load_seconds": seconds, "first_query_ms": 100 * seconds, "gpu_bytes": None, "gpu_peak_bytes": None,
            "host_bytes": 12_345_678, "index_bytes": 4_321_000}  # fmt: skip


def setting(k: int, stock_ms: float, ours_ms: float) -> dict[str, Any]:
    stages = ("centroids", "candidates", "prune")
    mine = dict(zip(stages, (0.31, 0.22, 0.13)), exact=ours_ms - 0.7, topk=0.04)
    stock = dict(zip(stages, (2.5, 1.25, 0.4 * stock_ms)), decompress=0.3 * stock_ms, maxsim=0.1 * stock_ms, topk=0.05)
    values = {"q1": 0.5, "q2": 1.0, "q3": 0.25}
    changed = {**values, "q3": 0.375} if k == 100 else values
    ranking = {"identical": 2, "same_outside_ties": 3, "top1_equal": 3, "pairs_reordered": 5, "pairs_beyond_ties": 0,
               "overlap": 0.9875, "worst_inversion": 3.25e-6, "tolerance": {BASE: 1e-4, OURS: 1e-4}}  # fmt: skip
    return {
        "knobs": {"k": k, "ncells": 1, "centroid_score_threshold": 0.5, "ndocs": 4 * k},
        "metrics": {
            BASE: dict.fromkeys(default_experiment().measures, 0.58333),
            OURS: dict.fromkeys(default_experiment().measures, sum(changed.values()) / 3),
        },
        "paired": {OURS: {m: paired(values, changed) for m in default_experiment().measures}},
        "per_query": {"measure": "nDCG@10", "values": {BASE: list(values.values()), OURS: list(changed.values())}},
        "compare": {
            OURS: {
                "base": BASE, "other": OURS, "comparable": True, "judged": True, "queries": 3, "same": True,
                "ranking": ranking,
                "candidates": {"equal": 3, "equal_but_ties": 0, "different": 0},
                "survivors": {"equal": 2, "equal_but_ties": 1, "different": 0},
                "errors": {BASE: {**errors(4e-6), "allowed": 2e-3}, OURS: {**errors(6e-6), "allowed": 2e-3}},
                "difference": errors(5e-6), "clamped": 0, "failures": [], "num_failures": 0,
            }
        },
        "exhaustive": {"queries": 3, "recall": {BASE: 0.875, OURS: 0.8125}, "candidates": {BASE: 0.9375, OURS: 0.9375}},
        "latency": {
            "threads": 2, "device": "cpu", "throughput": {
                BASE: {"1": 1e3 / stock_ms, "8": 1e3 / stock_ms}, OURS: {"1": 1e3 / ours_ms, "8": 8e3 / ours_ms},
            },
            "systems": {
                name: {"search": timing(p50), "stages": stages, "stages_total": sum(stages.values()), "agreement": 1.0}
                for name, p50, stages in ((BASE, stock_ms, stock), (OURS, ours_ms, mine))
            },
        },
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    made: dict[str, Any] = {
        "experiment": default_experiment().to_dict(),
        "environment": {
            "machine": {"cpu": "A <fast> CPU", "cpus": 4, "threads": 2, "gpus": [], "cuda": None},
            "platform": "Linux", "versions": {"torch": "2.13.0", "triton": "absent"}, "commit": "abc", "argv": [],
            "time": "2030-01-01T00:00:00Z",
        },
        "dataset": {
            "name": "tiny & odd", "split": "test", "source": "",
            "sha256": dict.fromkeys(("passages", "queries", "qrels"), "0" * 64),
            "counts": {"passages": 1234, "queries": 3, "judgments": 17},
        },
        "checkpoint": {"name": "splade-tiny", "sha256": "1" * 64},
        "encode": {**timing(4.56), "shape": [3, 32, 128]},
        "indexes": [
            {"nbits": 2, "path": "", "digest": "2" * 64, "passages": 1234, "tokens": 98765, "centroids": 256,
             "dim": 128, "bytes": 4_321_000, "systems": [BASE, OURS], "costs": {BASE: cost(1.5), OURS: cost(0.5)},
             "not_run": {}, "search": [setting(10, 23.456, 7.891), setting(1000, 345.67, 40.12)]}
        ],
    }  # fmt: skip
    made["not_run"] = {"fast-plaid": {"reason": "fast-plaid is not installed", "remedy": "pip install <it>"}}
    made["verdict"], made["figures"] = verdict(made), figures(made)
    return made


class Page(HTMLParser):
    """Text of the page, the links it makes, and the results that it carries."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = self.data = ""
        self.links: list[str | None] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if "script" in self.open:
            self.data += data
        elif "style" not in self.open:
            self.text += data + " "


def test_carries_the_results_whole(results):
    page = Page(report.render(results))
    assert json.loads(page.data) == json.loads(json.dumps(results))


def test_needs_nothing_from_outside(results):
    html = report.render(results)
    assert all(link and link.startswith("#") for link in Page(html).links)
    assert not re.search(r"@import|url\(|https?://", html)
    assert "<script>" not in html


def test_numbers_are_the_results(results):
    text = Page(report.render(results)).text
    for search in results["indexes"][0]["search"]:
        systems = search["latency"]["systems"]
        for figures_ in systems.values():
            for p in ("p50", "p95", "p99", "mean"):
                assert f" {plots.significant(figures_['search'][p])} " in text
        ratio = systems[OURS]["search"]["p50"] / systems[BASE]["search"]["p50"]
        assert f" {ratio:.3f} " in text
        for error in search["compare"][OURS]["errors"].values():
            assert f" {error['max']:.1e} " in text
        for by_measure in search["metrics"].values():
            assert all(f" {value:.4f} " in text for value in by_measure.values())
    for number in (
        "1,234 passages",
        "98,765 token vectors",
        "4.56 ms",
        "3.2e-06",
        "98.8%",
        "87.5%",
        "81.2%",
        "17 judgments",
    ):
        assert number in text, number


def test_answers(results):
    text = re.sub(r"\s+", " ", Page(report.render(results)).text)
    assert "Is it the same? Yes 6 searches in 2 settings" in text
    assert "How much faster? 3.0× to 8.6×" in text
    assert "Where does the time go? Pruning At k = 1000 stock PLAID spends" in text


def test_text_is_escaped(results):
    html = report.render(results)
    assert "tiny &amp; odd" in html
    assert "A &lt;fast&gt; CPU" in html
    results["checkpoint"]["name"] = "</script><b>"
    assert Page(report.render(results)).data.count("script") >= 1
    assert "</script><b>" not in report.render(results)


def test_a_difference_is_said(results):
    bad = copy.deepcopy(results)
    compared = bad["indexes"][0]["search"][1]["compare"][OURS]
    compared.update(same=False, num_failures=30)
    compared["failures"] = [{"query": "q<1>", "what": "ranking", "detail": "3 pairs ordered differently"}]
    compared["survivors"] = {"equal": 1, "equal_but_ties": 0, "different": 2}
    bad["verdict"] = verdict(bad)
    text = re.sub(r"\s+", " ", Page(report.render(bad)).text)
    assert "Is it the same? No 1 of 2 settings differ" in text
    assert "The first 1 of 30 findings" in text
    assert "TileMaxSim, median search. But the results differ." in text
    assert "q<1> ranking 3 pairs ordered differently" in text
    assert "2 differ" in text
    assert "1 of 2 settings" in report.summary(bad)


def test_slower_is_not_called_faster(results):
    slow = copy.deepcopy(results)
    slow["indexes"][0]["search"][0] = setting(10, 5.0, 10.0)
    html = report.render(slow)
    assert "0.50× to" in html
    assert "<article class=bad><h2>How much faster?" in html


def test_metrics_that_differ_are_no_pass(results):
    other = copy.deepcopy(results)
    other["indexes"][0]["search"][0] = setting(100, 5.0, 10.0)
    found = verdict(other)
    assert (found["same"], found["passed"], found["of"]) == (False, 1, 2)
    assert found["checks"][0]["metrics_differing"] == default_experiment().measures
    other["verdict"] = found
    assert "1 better, 2 equal, 0 worse" in Page(report.render(other)).text


def test_one_system_alone(results):
    alone = copy.deepcopy(results)
    alone["experiment"]["systems"] = [BASE]
    for search in alone["indexes"][0]["search"]:
        search.update(compare={}, paired={}, exhaustive=None, latency=None)
        del search["metrics"][OURS]
    alone["verdict"], alone["figures"] = verdict(alone), figures(alone)
    text = Page(report.render(alone)).text
    assert "Not compared" in text
    assert "Not timed" in text
    assert report.summary(alone)


def test_summary_for_the_terminal(results):
    text = report.summary(results)
    assert "3.0×" in text
    assert "8.6×" in text
    assert "2 of 2 settings" in text


def test_figures_are_flat(results):
    assert results["figures"]["plaid_p50_ms_k10_2bit"] == 23.456
    assert results["figures"]["tilemaxsim_over_plaid_p50_k1000_2bit"] == pytest.approx(40.12 / 345.67)
    assert all(isinstance(value, float) for value in results["figures"].values())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.000123, "1.23e-04"), (0.00123, "0.00123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"),
     (9.999, "10.0"), (1236.5, "1,240"), (-2.5, "-2.50")],
)  # fmt: skip
def test_significant(value, text):
    assert plots.significant(value) == text


def test_plots_are_well_formed():
    from xml.etree import ElementTree

    for html in (
        plots.stage_bars([("k = 10", [("a", {"centroids": 1.0, "topk": 0.0}), ("b", {"exact": 3.0})])], "t"),
        plots.stage_bars([("k = 10", [("a", {"centroids": 0.0})])], "nothing took time"),
        plots.histogram([-1.0, 0.0, 1.0], [3, 4], "t", "x − y"),
        plots.query_scatter([0.0, 1.0, 1.0], [0.0, 1.0, 0.5], "t", "a", "b"),
    ):
        assert ElementTree.fromstring(html).find(".//svg") is not None


def test_what_did_not_run_and_what_it_costs(results):
    page = Page(report.render(results))
    assert "fast-plaid is not installed" in page.text
    assert "pip install <it>" in page.text
    assert "12.3 MB" in page.text
    assert "150" in page.text  # the first query of stock
    text = markdown.render(results)
    assert "| fast-plaid | fast-plaid is not installed | pip install <it> |" in text
    assert "| 2 bit | stock PLAID | 1.50 | 150 | 4.32 MB |  | 12.3 MB |" in text
    assert "| k = 10 | TileMaxSim | 7.89 |" in text
    assert "93.8%" in text  # the candidates' share of the exact top k


def test_plots_of_tradeoffs_and_throughput(results):
    html = report.render(results)
    assert "stock PLAID, k = 10: 0.8750, 23.5" in html
    assert re.search(r"TileMaxSim, 8: 1,01\d", html)
    for search in results["indexes"][0]["search"]:
        search["exhaustive"] = None
        search["latency"]["throughput"] = {}
    bare = report.render(results)
    assert "Latency against recall" not in bare
    assert "<h3>Throughput" not in bare


def test_roofline_when_given(results):
    assert "Roofline" not in report.render(results)
    row = {"group": "dense", "name": "d128", "LQ": 32, "DIM": 128, "tokens": 1_000_000, "nbytes": 256_000_000}
    results["kernels"] = {
        "gpu": "A GPU", "read": {"gb_s": 4000.0},
        "rows": [{**row, "kernel": "plaid_tilemaxsim", "ours": True, "ms": 0.08},
                 {**row, "kernel": "flash_maxsim.flash_maxsim", "ours": False, "ms": 0.16},
                 {**row, "kernel": "other", "ours": False, "failed": "no"}],
    }  # fmt: skip
    html = report.render(results)
    # 2 * 1e6 * 128 * 32 operations in 0.08 ms, 32 a byte
    assert "TileMaxSim, dense d128, plaid_tilemaxsim: 32.00, 102" in html
    assert "flash_maxsim, dense d128" in html


def test_engines_with_vectors_of_their_own_are_not_judged(results):
    for search in results["indexes"][0]["search"]:
        search["compare"][OURS] |= {"judged": False, "same": None, "comparable": False}
    page = Page(report.render(results))
    assert "own vectors" in page.text


@pytest.mark.parametrize("log", [False, True])
def test_ticks_are_round_and_within(log):
    for low, high in ((0.31, 0.97), (2.0, 2.5), (3.0, 9000.0), (0.001, 0.004)):
        ticks = plots._ticks((low, high), log)
        assert len(ticks) >= 2
        assert all(low <= tick <= high for tick in ticks)


def test_labels():
    assert report.label("plaid:device=cpu") == "stock PLAID on the CPU"
    assert report.label("tilemaxsim:codec=pq,pq_m=32") == "TileMaxSim PQ M=32"
    assert report.label("tilemaxsim:mode=rerank,placement=host") == "TileMaxSim rerank host"
    assert report.label("maxsim:impl=flash-maxsim") == "MaxSim, flash-maxsim"
    assert report.label("fast-plaid:n_ivf_probe=4") == "fast-plaid n_ivf_probe=4"
