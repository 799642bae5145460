"""Hostile calls (see calls.py): a few hundred in CI, over 10,000 with --slow."""

from __future__ import annotations

import pytest
import torch

from tests.hostile import calls

SHORT, FULL = 40, 1000
INTERPRETED, FULL_INTERPRETED = 6, 60


def check(name: str, where: calls.Where, cases: int) -> None:
    tally = calls.run(calls.OPERATIONS[name], where, cases)
    assert tally.cases == cases
    assert tally.sharp >= 0.9 * tally.compared, "budgets that accept shuffled scores prove nothing"
    assert cases < SHORT or tally.compared or name in calls.UNSCORED


@pytest.mark.parametrize("name", calls.OPERATIONS)
def test_on_the_cpu(name, request):
    check(name, calls.CPU, FULL if request.config.getoption("--slow") else SHORT)


@pytest.mark.parametrize("name", calls.KERNELS)
def test_kernels(name, request, device):
    where = calls.CUDA if torch.cuda.is_available() else calls.INTERPRETER
    check(name, where, FULL_INTERPRETED if request.config.getoption("--slow") else INTERPRETED)
