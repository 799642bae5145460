"""Hostile calls (calls.py) and searches (searches.py): a few hundred in CI, over 10,000 with --slow.

``scripts/hostile.py`` runs more of them, each kind in a process of its own, and writes down how many.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    with pytest.raises((AssertionError, IndexError)):  # a pid past count may be none of the index
        calls.run(OPERATIONS[name], calls.CPU, 150)


def test_a_run_in_a_process_of_its_own():
    args = argparse.Namespace(seed=0, seconds=60.0, limit=60.0, jobs=2)
    good = hostile.run_apart(args, "SearchParams", "cpu", 30)
    assert (good["cases"], good["failures"]) == (30, 0)
    bad = hostile.run_apart(args, "unheard of", "cpu", 30)
    assert "KeyError: 'unheard of'" in bad["output"]
    late = hostile.run_apart(argparse.Namespace(seed=0, seconds=60.0, limit=0.01, jobs=1), "SearchParams", "cpu", 10**9)
    assert late["output"] == "no end after 0.01 s"
    assert hostile.result_of([good], complete=True)["correct"]
    failed = hostile.result_of([good, bad, late], complete=True)
    assert not failed["correct"]
    assert (failed["figures"]["hostile_cases"], failed["figures"]["failures"]) == (30, 2)
    vague = good | {"compared": 10, "sharp": 8}
    assert not hostile.result_of([vague], complete=True)["correct"]
    assert not hostile.result_of([good], complete=False)["correct"]
    assert not hostile.result_of([good, good | {"cases": 0}], complete=True)["correct"]


def slow(draw, where, tally):
    draw(st.lists(st.integers(0, draw(st.integers(0, 9))), min_size=1))
    time.sleep(0.01)


def test_time_ends_a_run_and_its_cases_count():
    began = time.perf_counter()
    tally = calls.run(slow, calls.CPU, 10**6, seconds=0.5)
    assert 5 < tally.cases < 60
    assert time.perf_counter() - began < 5
    assert calls.run(slow, calls.CPU, 10, seconds=0.0).cases == 0


def test_time_does_not_end_what_has_gone_wrong():
    """A failure is shrunk after the time is up, and stays one."""

    def fails(draw, where, tally):
        slow(draw, where, tally)
        assert draw(st.integers(0, 1000)) < 400

    with pytest.raises(AssertionError):
        calls.run(fails, calls.CPU, 10**6, seconds=0.2)


def combinations(seed, cases):
    """Of LQ, nbits and DIM, as ``residual_maxsim`` would have them compiled on a GPU."""
    seen = set()

    def look(draw, where, tally):
        seen.add(tuple(calls.together(draw, where, where.query_tokens, where.nbits, where.dims)))

    calls.run(look, calls.CUDA, cases, seed)
    return seen


def test_a_run_on_a_gpu_compiles_for_few_shapes():
    assert combinations(0, 60) == combinations(0, 300)
    assert len(combinations(0, 60)) == 6
    assert combinations(0, 60) != combinations(1, 60)


@pytest.mark.parametrize("name", ["residual_maxsim", "residual_maxsim_batch"])
def test_nothing_needs_what_cuda_lacks_for_uint16(name):
    """CUDA copies and views uint16, and little else."""
    ops = torch.ops.aten
    has = {ops.view.dtype, ops.view.default, ops.detach.default, ops.clone.default, ops._to_copy.default}
    has |= {ops.slice.Tensor, ops.select.int, ops.unsqueeze.default, ops.new_zeros.default, ops.new_empty.default}
    has |= {ops.copy_.default, ops.alias.default}

    class Few(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if function not in has and any(x.dtype == torch.uint16 for x in tensors):
                raise NotImplementedError(f"{function} for uint16")
            return function(*args, **(kwargs or {}))

    with Few():
        calls.run(OPERATIONS[name], replace(calls.CPU, impls=("reference",)), 150)
