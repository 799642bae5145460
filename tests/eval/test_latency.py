"""Latency: who runs when, what is left out, and the summary's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eval.latency import measure_latency, measure_throughput, summary, timed
from eval.systems import Knobs

KNOBS = Knobs.defaults(10)
LOG: list[tuple[str, str, int]] = []


class Fake:
    def __init__(self, name: str, found: list[int]) -> None:
        self.name, self.found = name, found
        self.device = torch.device("cpu")
        self.own_ms: float | None = None
        self.knobs: list[Knobs] = []

    def use(self, knobs):
        self.knobs.append(knobs)

    def search(self, Q):
        LOG.append((self.name, "search", int(Q[0, 0, 0])))
        return self.found, [1.0] * len(self.found)

    def search_batch(self, Q):
        LOG.append((self.name, f"batch of {len(Q)}", int(Q[0, 0, 0])))
        return [(self.found, [])] * len(Q)

    def stages(self, Q):
        LOG.append((self.name, "stages", int(Q[0, 0, 0])))
        return {"centroids": 1.0 + int(Q[0, 0, 0]), "topk": 0.5}


@pytest.fixture
def log():
    LOG.clear()
    return LOG


def run(warmup: int = 1, repeats: int = 2, n: int = 3):
    systems = [Fake("a", [1, 2, 3, 4]), Fake("b", [4, 3, 2, 9])]
    Q = torch.arange(float(n))[:, None, None].expand(n, 4, 2)
    result = measure_latency(systems, Q, KNOBS, warmup=warmup, repeats=repeats)  # type: ignore[arg-type]
    return systems, result


def test_systems_take_turns(log):
    _, result = run()
    searches = [(name, query) for name, what, query in log if what == "search"]
    assert searches[:2] == [("a", 0), ("b", 0)]  # the warm-up
    timed = searches[2:]
    assert len(timed) == 2 * 2 * 3
    assert timed[0::2] == [("a", 0), ("b", 1), ("a", 2), ("b", 0), ("a", 1), ("b", 2)]
    assert [q for _, q in timed[0::2]] == [q for _, q in timed[1::2]]
    assert all(first[0] != second[0] for first, second in zip(timed[0::2], timed[1::2]))
    for name in "ab":
        assert result[name]["search"]["n"] == 6


def test_stages_are_means_of_a_pass_of_their_own(log):
    _, result = run()
    stages = [entry for entry in log if entry[1] == "stages"]
    assert len(stages) == 2 * 3
    assert log.index(stages[0]) > max(i for i, entry in enumerate(log) if entry[1] == "search")
    assert result["a"]["stages"] == {"centroids": 2.0, "topk": 0.5}
    assert result["a"]["stages_total"] == 2.5


def test_agreement_is_the_shared_part(log):
    _, result = run()
    assert (result["a"]["agreement"], result["b"]["agreement"]) == (1.0, 0.75)


def test_knobs_reach_every_system(log):
    systems, _ = run()
    assert all(knobs == KNOBS for system in systems for knobs in system.knobs)


def test_a_systems_own_clock_is_believed(log):
    system = Fake("a", [1])
    system.own_ms = 12.5
    assert timed(system, torch.zeros(1, 4, 2)) == (12.5, [1])


def test_throughput_counts_queries(log):
    systems = [Fake("a", [1]), Fake("b", [2])]
    systems[1].own_ms = 250.0
    found = measure_throughput(systems, torch.zeros(3, 4, 2), KNOBS, [1, 8], rounds=2)
    assert [what for name, what, _ in log if name == "a"] == ["batch of 1"] * 3 + ["batch of 8"] * 3
    assert found["b"] == {"1": pytest.approx(4), "8": pytest.approx(32)}
    assert all(rate > 0 for rate in found["a"].values())


def test_summary_is_numpys():
    times = np.random.default_rng(0).exponential(size=101)
    found = summary(times.tolist())
    assert found["n"] == 101
    assert found["p50"] == np.median(times)
    assert found["p95"] == np.percentile(times, 95)
    assert (found["min"], found["max"], found["mean"]) == (times.min(), times.max(), times.mean())
    assert summary([2.0])["p99"] == 2.0


def test_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="expected at least one time"):
        summary([])
