"""The cost model against the searches that were measured, and its pieces against the results files."""

import json
import math
from pathlib import Path

import pytest

from plaid_tilemaxsim import cli, plan
from scripts import update_plan, update_readme

RESULTS = Path(__file__).resolve().parent.parent / "eval" / "results"
FIGURES = json.loads((RESULTS / "h200_search.json").read_text())["figures"]
KERNELS = json.loads((RESULTS / "h200_kernels.json").read_text())["figures"]
# Sums of pieces timed one by one leave out what overlaps and how caches carry over from one to the next.
TOLERANCE = 0.15
# At k = 10 what rerank scores differs from query to query by more than what it takes besides.
RERANK_TOLERANCE = 0.2
# One kernel over everything is nearly all of it.
EXHAUSTIVE_TOLERANCE = 0.05
# Allocated while batches ran, whose buffers the plan leaves to the tenth of memory that it does not count on.
MEMORY_TOLERANCE = 0.15


@pytest.fixture(scope="module")
def measured_sizes():
    passages, tokens = round(FIGURES["passages"]), round(FIGURES["tokens"])
    sizes = plan.sizes_of(passages, tokens / passages, 2, "h200")
    assert (sizes.num_tokens, sizes.num_centroids) == (tokens, 262144)
    return sizes


def test_pieces_are_what_the_results_say():
    assert update_plan.FILE.read_text() == update_plan.rendered(), "run python scripts/update_plan.py"


def test_page_is_what_the_plan_says():
    text = update_plan.PAGE.read_text()
    assert update_readme.rendered(text, update_plan.TABLES, "docs/scale.md") == text


@pytest.mark.parametrize("k", plan.KS)
def test_searches_that_were_measured(measured_sizes, k):
    for mode, figure in (("plaid", f"search_p50_ms_k{k}"), ("rerank", f"rerank_p50_ms_k{k}")):
        found = plan.search(measured_sizes, 1, mode, k, "h200")
        within = TOLERANCE if mode == "plaid" else RERANK_TOLERANCE
        assert found.latency == pytest.approx(FIGURES[figure], rel=within)
        assert found.candidates == pytest.approx(FIGURES[f"candidates_k{k}"], rel=1e-3)
    hosted = plan.search(measured_sizes, 1, "plaid", k, "h200", "host")
    assert hosted.latency == pytest.approx(FIGURES[f"host_p50_ms_k{k}"], rel=TOLERANCE)


def test_the_whole_index(measured_sizes):
    found = plan.search(measured_sizes, 1, "exhaustive", 1000, "h200")
    for figure in (FIGURES["exhaustive_p50_ms"], KERNELS["exhaustive_ms"]):
        assert found.latency == pytest.approx(figure, rel=EXHAUSTIVE_TOLERANCE)
    assert found.stages["exact"] == pytest.approx(KERNELS["exhaustive_kernel_ms"], rel=EXHAUSTIVE_TOLERANCE)


def test_throughput(measured_sizes):
    found = plan.search(measured_sizes, 1, "plaid", 10, "h200")
    assert found.queries_per_s == pytest.approx(FIGURES["batch64_qps"], rel=1e-3)  # taken from there
    two = json.loads((RESULTS / "h200_x2.json").read_text())["figures"]
    found = plan.search(measured_sizes, 2, "plaid", 10, "h200")
    assert found.queries_per_s == pytest.approx(two["batch_qps_shards"], rel=TOLERANCE)


def test_memory(measured_sizes):
    for placement, figure in (("gpu", "gpu_gb"), ("host", "host_placement_gpu_gb")):
        device, _ = plan.memory(measured_sizes, placement)
        assert sum(device.values()) / 1e9 == pytest.approx(FIGURES[figure], rel=MEMORY_TOLERANCE)
    assert plan.shards_needed(measured_sizes, "gpu", "h200") == 1


def test_a_model_that_scales_nothing_would_fail(measured_sizes):
    """The measured searches differ by more than the tolerance allows, so no constant passes for all."""
    assert FIGURES["search_p50_ms_k1000"] / FIGURES["search_p50_ms_k10"] > ((1 + TOLERANCE) / (1 - TOLERANCE))
    assert FIGURES["rerank_p50_ms_k1000"] / FIGURES["rerank_p50_ms_k10"] > ((1 + TOLERANCE) / (1 - TOLERANCE))


def test_shards():
    sizes = plan.sizes_of(10**9, 67.6, 2, "h200")
    assert sizes.num_centroids == 2 ** math.floor(math.log2(16 * math.sqrt(sizes.num_tokens)))
    n = plan.shards_needed(sizes, "gpu", "h200")
    room = plan.USABLE * plan.measured("h200")["memory_bytes"]
    needs = [sum(plan.memory(sizes.shard(count), "gpu")[0].values()) for count in (n - 1, n)]
    assert needs[1] <= room < needs[0]
    for mode in ("plaid", "rerank", "exhaustive"):
        few, many = (plan.search(sizes, count, mode, 1000, "h200") for count in (n, 2 * n))
        assert many.gpu < few.gpu
        assert many.merging == pytest.approx(2 * few.merging)
        assert few.latency > few.gpu + few.sending
    assert plan.shards_needed(sizes, "host", "h200") < n
    assert plan.search(sizes, n, "rerank", 10, "h200", "host") is None


def test_bits_change_residuals_alone():
    one, four = (plan.sizes_of(10**7, 60, nbits, "h200") for nbits in (1, 4))
    a, b = (plan.memory(sizes, "gpu")[0] for sizes in (one, four))
    assert b["residuals"] == 4 * a["residuals"]
    assert {name for name in a if a[name] != b[name]} == {"residuals", "workspace"}
    assert plan.search(one, 1, "rerank", 10, "h200").gpu < plan.search(four, 1, "rerank", 10, "h200").gpu


def test_command(capsys):
    words = ["plan", "--passages", "1000000000", "--avg-len", "67.6", "--nbits", "2", "--gpu", "h200"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    for expected in ("residuals", "one of 22", "exhaustive, k = 1000", "Beyond what was measured", "no network"):
        assert expected in text
    for wrong, message in (
        (["--gpu", "a100"], "expected one that was measured"),
        (["--nbits", "3"], "nbits: expected one of"),
        (["--passages", "0"], "passages: expected at least 1"),
        (["--placement", "disk"], "placement: expected one of"),
        (["--shards", "0"], "shards: expected at least 1"),
        (["--passages", "10", "--shards", "11"], "shards: expected at most one for each of the 10 passages"),
        (["--passages", "2147483648"], "passages: expected at most 2147483647"),
        (["--avg-len", "inf"], "avg-len: expected at most"),
        (["--avg-len", "nan"], "avg-len: expected at least 1"),
    ):
        assert cli.main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err
