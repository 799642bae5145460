"""Hostile calls (calls.py) and searches (searches.py): a few hundred in CI, over 10,000 with --slow.

``scripts/hostile.py`` runs more of them, each kind in a process of its own, and writes down how many.
"""

from __future__ import annotations

import argparse

import pytest
import torch

from scripts import hostile
from tests.hostile import calls
from tests.hostile.searches import KERNELS, OPERATIONS

SHORT, FULL = 25, 600
INTERPRETED, FULL_INTERPRETED = 4, 40


def check(name: str, where: calls.Where, cases: int) -> None:
    tally = calls.run(OPERATIONS[name], where, cases)
    assert tally.cases == cases
    assert tally.sharp >= 0.9 * tally.compared, "budgets that accept shuffled scores prove nothing"


@pytest.mark.parametrize("name", OPERATIONS)
def test_on_the_cpu(name, request):
    check(name, calls.CPU, FULL if request.config.getoption("--slow") else SHORT)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name, request, device):
    where = calls.CUDA if torch.cuda.is_available() else calls.INTERPRETER
    check(name, where, FULL_INTERPRETED if request.config.getoption("--slow") else INTERPRETED)


class Wrong:
    """Calls that a suite must not let pass."""

    @staticmethod
    def shuffled(monkeypatch):
        right = calls.cpu.residual_maxsim
        monkeypatch.setattr(calls.cpu, "residual_maxsim", lambda *args: right(*args).roll(1))
        return "residual_maxsim"

    @staticmethod
    def unchecked(monkeypatch):
        monkeypatch.setattr(calls.api, "_check_range", lambda *args: None)
        return "dense_packed"

    @staticmethod
    def past_count(monkeypatch):
        monkeypatch.setattr(calls.api, "_host_count", lambda n, count: n)
        return "pq_maxsim"


@pytest.mark.parametrize("fault", ["shuffled", "unchecked", "past_count"])
def test_the_suite_notices(fault, monkeypatch):
    name = getattr(Wrong, fault)(monkeypatch)
    with pytest.raises(AssertionError):
        calls.run(OPERATIONS[name], calls.CPU, 150)


def test_a_run_in_a_process_of_its_own():
    args = argparse.Namespace(seed=0, seconds=60.0, limit=60.0)
    good = hostile.run_apart(args, "SearchParams", "cpu", 30)
    assert (good["cases"], good["failures"]) == (30, 0)
    bad = hostile.run_apart(args, "unheard of", "cpu", 30)
    assert "KeyError: 'unheard of'" in bad["output"]
    late = hostile.run_apart(argparse.Namespace(seed=0, seconds=60.0, limit=0.01), "SearchParams", "cpu", 10**9)
    assert late["output"] == "no end after 0.01 s"
    assert hostile.result_of([good], complete=True)["correct"]
    failed = hostile.result_of([good, bad, late], complete=True)
    assert not failed["correct"]
    assert (failed["figures"]["hostile_cases"], failed["figures"]["failures"]) == (30, 2)
    vague = good | {"compared": 10, "sharp": 8}
    assert not hostile.result_of([vague], complete=True)["correct"]
    assert not hostile.result_of([good], complete=False)["correct"]
