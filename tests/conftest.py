"""Options, markers and fixtures shared by all tests."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

# colbert imports GitPython, which raises at import where there is no git; hubs are never asked during tests.
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # triton reads this when a kernel is decorated, so it must be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

DATA_VARIABLE = "PLAID_TILEMAXSIM_DATA"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (the full matrices)")
    parser.addoption("--gpu", action="store_true", help="run only the tests marked gpu; an error without CUDA")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu") and not HAS_CUDA:
        raise pytest.UsageError(
            "--gpu was given, but torch sees no CUDA device; check nvidia-smi and that "
            f"torch is a CUDA build (it is {torch.__version__})"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # tests that take `device` run in the interpreter without a GPU, and are GPU tests where there is one
        if HAS_CUDA and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
    if config.getoption("--gpu"):
        config.hook.pytest_deselected(items=[item for item in items if "gpu" not in item.keywords])
        items[:] = [item for item in items if "gpu" in item.keywords]
    for item in items:
        if "gpu" in item.keywords and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: CUDA, or the CPU under Triton's interpreter."""
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a collection -> its BEIR folder (corpus.jsonl, queries.jsonl, qrels/), or skips the test.

    The environment variable PLAID_TILEMAXSIM_DATA names a folder of <name>.tar.gz archives or unpacked
    <name>/ folders. Archives are unpacked once per session.
    """
    unpacked: dict[str, Path] = {}

    def folder(name: str) -> Path:
        root = os.environ.get(DATA_VARIABLE)
        if not root:
            pytest.skip(f"set {DATA_VARIABLE} to a folder that holds {name}.tar.gz or {name}/ (BEIR form)")
        plain, archive = Path(root, name), Path(root, f"{name}.tar.gz")
        if plain.is_dir():
            return plain
        if not archive.is_file():
            pytest.skip(f"{DATA_VARIABLE}={root} holds neither {name}/ nor {name}.tar.gz")
        if name not in unpacked:
            target = tmp_path_factory.mktemp("data")
            with tarfile.open(archive) as tar:
                # Python before 3.10.12 and 3.11.4 has no filters, and extractall no argument for one.
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[assignment]
                tar.extractall(target)
            unpacked[name] = target / name
        return unpacked[name]

    return folder
