"""Fixtures of tests that run colbert-ai itself: import what a test module needs."""

from __future__ import annotations

from pathlib import Path

import pytest

import plaid_tilemaxsim
from tests.synthetic import make_checkpoint, make_collection, make_index

PASSAGES = 300
DIM = 64


@pytest.fixture
def enabled():
    """The plugin, enabled during the test."""
    plaid_tilemaxsim.enable()
    yield
    plaid_tilemaxsim.disable()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), dim=DIM)


@pytest.fixture(scope="session")
def collection() -> list[str]:
    return make_collection(PASSAGES)


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A 2-bit index of PASSAGES passages, all similarities positive."""
    path = tmp_path_factory.mktemp("indexes") / "positive"
    return make_index(path, n=PASSAGES, dim=DIM, nbits=2, common=2.0, checkpoint=checkpoint)


@pytest.fixture(scope="session")
def stock_extensions() -> None:
    """Stock's C++ extensions, without which it cannot search on a CPU (compiled once per machine, minutes)."""
    import torch

    if torch.cuda.is_available():
        return
    from colbert.modeling.colbert import ColBERT
    from colbert.search.index_storage import IndexScorer
    from colbert.search.strided_tensor import StridedTensor

    for owner in (ColBERT, IndexScorer, StridedTensor):
        owner.try_load_torch_extensions(False)
