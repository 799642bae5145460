"""Copies from mapped files to a GPU through pinned memory, and pinning of host memory that a GPU reads itself."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

# Pinned buffers between page cache and GPU: while the bus empties one, threads fill the others.
STAGE_BYTES = 32 << 20
STAGES = 8


def copy_staged(copies: Sequence[tuple[Tensor, Tensor]], bar: tqdm) -> None:
    """Copies each (source, target): contiguous, alike in shape and dtype, source on the CPU, target on any device.

    Targets on the current CUDA device are filled through STAGES pinned buffers, the others by the same threads
    directly. Advances bar by bytes. Returns when all is copied.
    """
    pieces = list(_pieces(copies))
    staged = any(target.is_cuda for _, target in pieces)
    largest = min(STAGE_BYTES, max((source.numel() for source, _ in pieces), default=0))
    buffers = [torch.empty(largest if staged else 0, dtype=torch.uint8, pin_memory=staged) for _ in range(STAGES)]
    emptied = [torch.cuda.Event() for _ in range(STAGES)] if staged else []
    filling: deque[tuple[int, Future[None]]] = deque()

    def fill(stage: int, source: Tensor, target: Tensor) -> None:
        if target.is_cuda:
            emptied[stage].synchronize()
            target = buffers[stage][: source.numel()]
        # Not torch's copy: it would start all cores' worth of threads in each of ours.
        np.copyto(target.numpy(), source.numpy())

    def send() -> None:
        number, filled = filling.popleft()
        filled.result()
        _, target = pieces[number]
        if target.is_cuda:
            target.copy_(buffers[number % STAGES][: target.numel()], non_blocking=True)
            emptied[number % STAGES].record()
        bar.update(target.numel())

    with ThreadPoolExecutor(STAGES) as pool:
        for number, (source, target) in enumerate(pieces):
            if len(filling) == STAGES:
                send()
            filling.append((number, pool.submit(fill, number % STAGES, source, target)))
        while filling:
            send()
    if staged:
        torch.cuda.current_stream().synchronize()


def pin(tensor: Tensor) -> None:
    """Locks a CPU tensor's pages and opens them to the GPU (cudaHostRegister) until the tensor object is freed.

    Unlike torch's pinned allocator this takes no power of two of memory. RuntimeError if the driver refuses.
    """
    if tensor.numel() == 0:
        return
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if status != 0:
        raise RuntimeError(
            f"host memory: expected {tensor.nbytes} bytes that can be pinned, got CUDA error {status} from "
            "cudaHostRegister (ulimit -l limits locked memory)"
        )
    # At exit the driver is gone before the tensor is.
    weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr()).atexit = False


def _pieces(copies: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The copies as bytes, uint8 [n] with n <= STAGE_BYTES."""
    for source, target in copies:
        yield from zip(_bytes(source).split(STAGE_BYTES), _bytes(target).split(STAGE_BYTES), strict=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
