"""CUDA graphs over static buffers: recorded one at a time in a process, replayed by one caller at a time.

Graphs on several devices can be one launch (``Joined``), for which it takes torch 2.8 and CUDA's Python bindings, which
later versions of torch install (cuda-bindings).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

K = TypeVar("K")
V = TypeVar("V")

# What one thread may not do while another records: synchronise the device, empty torch's cache, collect garbage.
_recording = threading.Lock()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where everything is recorded: cuBLAS keeps a workspace for every stream that it ever ran on."""
    return torch.cuda.Stream(device)


def empty_cache() -> None:
    """``torch.cuda.empty_cache`` between recordings, which torch does not outlive."""
    with _recording:
        torch.cuda.empty_cache()


def collect() -> None:
    """``gc.collect`` between recordings: what is garbage may hold graphs."""
    with _recording:
        gc.collect()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """None starts by itself in any thread: one that met the graph of a lost engine would end the process."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def recording(device: torch.device, pool: Any, joins: bool = False) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph of the work inside, which must have run once before. joins: one that ``Joined`` takes.

    Graphs of one pool share memory: one replay at a time, and none recorded into it after an error. RuntimeError for
    work that waits for the device.
    """
    with _recording, _no_collection(), torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph(keep_graph=True) if joins else torch.cuda.CUDAGraph()
        with torch.cuda.stream(_stream(device)):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                try:
                    graph.capture_end()
                except RuntimeError:
                    # torch has not got to this, and its allocator would take the recording for one that goes on
                    torch._C._cuda_endAllocateToPool(device.index, pool)
                    raise


@functools.cache
def _runtime() -> Any:
    """CUDA's runtime in Python; None where it, or torch's access to its graphs, is not there."""
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):  # torch 2.8 and later
        return None
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


def can_join() -> bool:
    """Whether graphs can be launched together."""
    return _runtime() is not None


class Joined:
    """One launch of graphs on several devices: the ``first`` ones at the same time, then the ``last``.

    All were recorded with ``joins``; what they read and write is their owner's to keep.
    """

    def __init__(self, first: Sequence[torch.cuda.CUDAGraph], last: torch.cuda.CUDAGraph) -> None:
        self._runtime = _runtime()
        self._whole = self._done(self._runtime.cudaGraphCreate(0))
        self._add(last, [self._add(graph, None) for graph in first])
        self._launched = self._done(self._runtime.cudaGraphInstantiate(self._whole, 0))

    def replay(self, stream: torch.cuda.Stream | None = None) -> None:
        """On a stream of the ``last`` one's device, which is the current device; None: on its current stream."""
        handle = self._runtime.cudaStream_t((stream or torch.cuda.current_stream()).cuda_stream)
        self._done(self._runtime.cudaGraphLaunch(self._launched, handle))

    def __del__(self) -> None:
        if hasattr(self, "_launched"):
            self._runtime.cudaGraphExecDestroy(self._launched)
        if hasattr(self, "_whole"):
            self._runtime.cudaGraphDestroy(self._whole)

    def _add(self, graph: torch.cuda.CUDAGraph, before: list[Any] | None) -> Any:
        child = self._runtime.cudaGraph_t(graph.raw_cuda_graph())
        return self._done(self._runtime.cudaGraphAddChildGraphNode(self._whole, before, len(before or ()), child))

    def _done(self, answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if int(status):
            text = self._runtime.cudaGetErrorString(status)[1].decode()
            raise RuntimeError(f"CUDA error: {text} ({status.name}) of a joined graph")
        return values[0] if values else None


class Recent(OrderedDict[K, V]):
    """What was recorded, by key: the ``most`` that were asked for last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def of(self, key: K, record: Callable[[], V]) -> V:
        if key in self:
            self.move_to_end(key)
        else:
            # A caller may be in inference mode; what later callers write to must not be made in it.
            with torch.inference_mode(False), torch.no_grad():
                self[key] = record()
            if len(self) > self._most:
                self.popitem(last=False)
        return self[key]


class Turns:
    """Gives the buffers on a device to one caller at a time, in whatever thread and on whatever stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """The current stream's work inside comes after the work of the caller before."""
        with self._lock:
            if self.device.type != "cuda":
                yield
                return
            here = torch.cuda.current_device() == self.device.index
            with contextlib.nullcontext() if here else torch.cuda.device(self.device):
                self.pass_to(torch.cuda.current_stream())
                yield

    def pass_to(self, stream: torch.cuda.Stream) -> None:
        """The work on ``stream`` from here on comes after that of the caller before. Not beside another caller."""
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
