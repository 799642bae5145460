"""Graphs joined to one launch: what CUDA is asked for. That it answers right is for tests on GPUs."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plaid_tilemaxsim import faults, graphs


class Runtime:
    """Stands in for CUDA's; a handle is the name of what it stands for."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.calls: list[Any] = []

    def cudaGraph_t(self, handle: Any) -> Any:
        return handle

    cudaStream_t = cudaGraph_t

    def cudaGetErrorString(self, status: Any) -> Any:
        return 0, b"out of memory"

    def _answer(self, name: str, *args: Any) -> Any:
        self.calls.append((name, *args))
        return (Status(int(name == self.refused)), f"{name} {len(self.calls)}")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._answer(name, *args)


class Status(int):
    name = "cudaErrorMemoryAllocation"


def a_graph(name: str) -> Any:
    return SimpleNamespace(raw_cuda_graph=lambda: name)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(graphs, "_runtime", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream="stream"))
    return fake


def test_the_last_waits_for_all_others_and_they_for_none(runtime: Runtime) -> None:
    joined = graphs.Joined([a_graph("a"), a_graph("b")], a_graph("last"))
    added = [call[1:] for call in runtime.calls if call[0] == "cudaGraphAddChildGraphNode"]
    whole, first, second = "cudaGraphCreate 1", "cudaGraphAddChildGraphNode 2", "cudaGraphAddChildGraphNode 3"
    assert [child for *_, child in added] == ["a", "b", "last"]
    assert [(parent, before, n) for parent, before, n, _ in added[:2]] == [(whole, None, 0)] * 2
    assert added[2][:3] == (whole, [first, second], 2)
    joined.replay()
    assert runtime.calls[-1] == ("cudaGraphLaunch", "cudaGraphInstantiate 5", "stream")
    del joined
    assert [name for name, _ in runtime.calls[-2:]] == ["cudaGraphExecDestroy", "cudaGraphDestroy"]


@pytest.mark.parametrize("refused", ["cudaGraphCreate", "cudaGraphAddChildGraphNode", "cudaGraphInstantiate"])
def test_what_cuda_refuses_is_an_error_and_leaves_nothing(runtime: Runtime, refused: str) -> None:
    runtime.refused = refused
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        graphs.Joined([a_graph("a")], a_graph("last"))
    assert faults.memory_shortage(raised.value) is not None
    del raised  # which holds what was being made
    gc.collect()
    made = refused != "cudaGraphCreate"
    assert [call[0] for call in runtime.calls].count("cudaGraphDestroy") == made
    assert not any(call[0] == "cudaGraphExecDestroy" for call in runtime.calls)


def test_without_the_bindings_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs._runtime.cache_clear()
    monkeypatch.delattr(torch.cuda.CUDAGraph, "raw_cuda_graph", raising=False)
    assert not graphs.can_join()
    graphs._runtime.cache_clear()


def test_the_recordings_asked_for_last_stay() -> None:
    recordings: graphs.Recent[str, torch.Tensor | None] = graphs.Recent(2)
    with torch.inference_mode():
        first = recordings.of("first", lambda: torch.zeros(1))
    assert first is not None
    assert not first.is_inference()
    assert recordings.of("none", lambda: None) is None
    for key in ("none", "first"):
        recordings.of(key, lambda: pytest.fail("made twice"))
    recordings.of("third", lambda: torch.ones(1))
    assert list(recordings) == ["first", "third"]
    with pytest.raises(ValueError, match="no"):
        recordings.of("bad", fail)
    assert list(recordings) == ["first", "third"]


def fail() -> torch.Tensor:
    raise ValueError("no")
