"""Engines of other projects in their own environments: a stand-in package shows what is asked of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.indexing import Embeddings
from eval.systems import Knobs, NotRun, open_systems, parse_system, unavailable
from eval.systems.external import ENGINES, External, find_python
from tests.colbert_fixtures import checkpoint, index  # noqa: F401

DIM, LENGTHS = 8, [3, 1, 4, 2, 6]
# Brute force under the names and arguments of the real packages; it keeps its index in a file, as they do.
FAST_PLAID = """
import json, os, pathlib, torch
print("an engine that talks on stdout")
class FastPlaid:
    def __init__(self, index, device):
        self.index = pathlib.Path(index)
        if (self.index / "metadata.json").exists():
            self.passages = torch.load(self.index / "vectors.pt")
    def create(self, documents_embeddings, nbits):
        assert documents_embeddings[0].dtype == torch.float16
        torch.save(documents_embeddings, self.index / "vectors.pt")
        (self.index / "metadata.json").write_text(json.dumps({"nbits": nbits, "pid": os.getpid()}))
    def search(self, queries_embeddings, top_k, show_progress, n_ivf_probe=8):
        if n_ivf_probe == 99:
            raise RuntimeError("too many cells")
        assert show_progress is False
        found = []
        for q in queries_embeddings:
            scores = torch.stack([(p.float() @ q.T).amax(0).sum() for p in self.passages])
            best = scores.sort(descending=True, stable=True)
            found.append([(int(pid), float(s)) for s, pid in zip(best.values[:top_k], best.indices[:top_k])])
        return found
"""
WARP = """
import json, pathlib, torch
class XTRWarp:
    def __init__(self, index):
        self.index = pathlib.Path(index)
    def create(self, embeddings_source, device, nbits, show_progress):
        assert embeddings_source[0].dtype == torch.float32
        torch.save(embeddings_source, self.index / "vectors.pt")
        (self.index / "metadata.json").write_text(json.dumps({"nbits": nbits}))
    def load(self, device):
        self.passages = torch.load(self.index / "vectors.pt")
        return self
    def search(self, queries_embeddings, top_k, num_threads, show_progress):
        assert num_threads >= 1
        q = queries_embeddings[0]
        scores = torch.stack([(p @ q.T).amax(0).sum() for p in self.passages])
        order = scores.argsort(descending=True)[:top_k].tolist()
        return [[(pid, float(scores[pid])) for pid in order]] * len(queries_embeddings)
"""


def install(cache: Path, engine: str, module: str, source: str, package: str) -> None:
    """An environment under `cache` whose interpreter is this one with the stand-in on its path."""
    site = cache / "peers" / engine / "site"
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text("")
    (site / module / "search.py").write_text(source)
    info = site / f"{package.replace('-', '_')}-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2.3\n")
    python = cache / "peers" / engine / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)


@pytest.fixture
def vectors(tmp_path: Path) -> Embeddings:
    """Unit vectors of five passages, in the form in which the evaluation keeps a collection's encoding."""
    T = sum(LENGTHS)
    values = torch.nn.functional.normalize(torch.randn(T, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
    folder = tmp_path / "embeddings"
    folder.mkdir()
    torch.save((values.half(), torch.tensor(LENGTHS, dtype=torch.int32)), folder / "00000.pt")
    return Embeddings(folder, (folder / "00000.pt",), len(LENGTHS), DIM, 20, 1.0)


def brute_force(vectors: Embeddings, q: torch.Tensor) -> list[float]:
    passages, doclens = vectors.all()
    return [float((p.float() @ q.T).amax(0).sum()) for p in passages.split(doclens.tolist())]


PACKAGES = {"fast-plaid": ("fast_plaid", FAST_PLAID, "fast-plaid"), "xtr-warp": ("xtr_warp", WARP, "xtr-warp-rs")}


@pytest.mark.parametrize("engine", PACKAGES)
def test_an_engine_answers_from_its_own_environment(engine, vectors, tmp_path):
    install(tmp_path, engine, *PACKAGES[engine])
    Q = torch.nn.functional.normalize(torch.randn(3, 4, DIM, generator=torch.Generator().manual_seed(1)), dim=-1)
    for opening in range(2):
        system = External(ENGINES[engine], {}, lambda: vectors, nbits=4, cache=tmp_path)
        assert system.opened["version"] == "1.2.3"
        assert (system.opened["build_seconds"] > 0) == (opening == 0)  # the second finds the first's index
        assert system.index_bytes > sum(LENGTHS) * DIM * 2
        system.use(Knobs(3, 1, 0.5, 4))
        pids, scores = system.search(Q[:1])
        truth = brute_force(vectors, Q[0])
        assert pids == sorted(range(len(truth)), key=lambda pid: -truth[pid])[:3]
        assert scores == pytest.approx(sorted(truth, reverse=True)[:3], abs=1e-5)
        assert system.own_ms is not None
        assert 0 < system.own_ms < 10_000
        assert len(system.search_batch(Q)) == 3
        system.close()
        assert system.process.returncode == 0
    (built,) = vectors.folder.glob(f"{engine}.4bit.*")
    assert (built / "metadata.json").exists()
    array = np.load(next(vectors.folder.glob("arrays.*")) / "vectors.npy")
    assert array.dtype == np.float16


def test_options_reach_the_engine_and_its_errors_come_back(vectors, tmp_path):
    install(tmp_path, "fast-plaid", *PACKAGES["fast-plaid"])
    system = External(ENGINES["fast-plaid"], {"n_ivf_probe": 99}, lambda: vectors, nbits=2, cache=tmp_path)
    with pytest.raises(RuntimeError, match="fast-plaid: RuntimeError: too many cells"):
        system.search(torch.zeros(1, 4, DIM))
    system.process.kill()
    system.process.wait()
    with pytest.raises(RuntimeError, match="fast-plaid: its process ended with -9"):
        system.search(torch.zeros(1, 4, DIM))
    unknown = {"speed": 1}
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'speed'"):
        External(ENGINES["fast-plaid"], unknown, lambda: vectors, nbits=2, cache=tmp_path).search(
            torch.zeros(1, 4, DIM)
        )


def test_a_missing_or_broken_environment_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fast_plaid", None)
    monkeypatch.setattr("eval.systems.external.sys.executable", _python_without("fast_plaid", tmp_path))
    with pytest.raises(NotRun, match=r"fast-plaid is not installed; python -m venv .*peers.fast-plaid"):
        find_python(ENGINES["fast-plaid"], tmp_path)
    why = unavailable("fast-plaid", tmp_path)
    assert why is not None
    assert "pip install fast-plaid" in why.remedy
    install(tmp_path, "fast-plaid", "other", FAST_PLAID, "fast-plaid")
    with pytest.raises(NotRun, match=r"python cannot import fast_plaid: ImportError"):
        find_python(ENGINES["fast-plaid"], tmp_path)


def _python_without(module: str, tmp_path: Path) -> str:
    """An interpreter that lacks `module` even where this one has it."""
    site = tmp_path / "without" / module
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("raise ImportError('not here')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site.parent}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_without_vectors_it_is_not_run(index, tmp_path):  # noqa: F811
    install(tmp_path, "fast-plaid", *PACKAGES["fast-plaid"])
    opened = open_systems(["fast-plaid"], index, cache=tmp_path)
    assert opened.systems == []
    assert "vectors" in opened.not_run["fast-plaid"].reason


def test_names():
    assert parse_system("fast-plaid:n_ivf_probe=4,n_full_scores=8192") == (
        "fast-plaid",
        {"n_ivf_probe": 4, "n_full_scores": 8192},
    )
