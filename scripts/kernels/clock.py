"""How long something takes on the GPU: warm-up outside, cold L2, medians of CUDA events, the host far ahead."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# The L2 of the largest GPU meant here is 126 MB: more bytes than this a run leave nothing of the run before.
COLD_BYTES = 1 << 30
FLUSH_BYTES = 256 << 20
# GPU clocks slept before a batch of runs is timed, so that launches never wait for Python: 5 ms.
HEAD_START = 10_000_000
WARMUPS = 2
# A batch of runs takes about this long, and has between so many runs.
BATCH_MS, LEAST, MOST = 250.0, 7, 25


@dataclass(frozen=True)
class Time:
    """Milliseconds of one run: median and 20th and 80th percentile over ``repeats`` runs."""

    ms: float
    p20: float
    p80: float
    repeats: int


def times(run: Callable[[], object], repeats: int, flush: Callable[[], object] | None = None) -> list[float]:
    """Milliseconds of each of ``repeats`` runs on the current CUDA device, sorted; warm-up runs before them.

    flush: run before each, outside the time.
    """
    for _ in range(WARMUPS):
        run()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(HEAD_START)
    for start, end in events:
        if flush is not None:
            flush()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)


def host_times(run: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds on the host's clock, sorted, of a call that waits for its own result."""
    spans = []
    for _ in range(WARMUPS + repeats):
        began = time.perf_counter()
        run()
        spans.append((time.perf_counter() - began) * 1e3)
    return sorted(spans[WARMUPS:])


class Clock:
    """Times runs on one device. ``once``: run them a single time, for what that compiles; the times are NaN.

    On a CPU, where kernels are interpreted, it is always once: there is nothing to measure.
    """

    def __init__(self, device: torch.device, once: bool = False) -> None:
        self.device = device
        self.once = once or device.type != "cuda"
        self._flush: torch.Tensor | None = None

    def __call__(self, run: Callable[[], object], nbytes: int, host: bool = False) -> Time:
        """``nbytes``: device memory that a run touches; below COLD_BYTES the L2 is emptied before each run.

        host: ``run`` returns with its result on the host, and the time is the host's.
        """
        run()
        if self.once:
            return Time(math.nan, math.nan, math.nan, 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        estimate = (time.perf_counter() - began) * 1e3
        repeats = round(min(max(BATCH_MS / max(estimate, 1e-3), LEAST), MOST))
        flush = None if nbytes >= COLD_BYTES else self.flush
        ms = host_times(run, repeats) if host else times(run, repeats, flush)
        return Time(statistics.median(ms), ms[len(ms) // 5], ms[-1 - len(ms) // 5], repeats)

    def flush(self) -> None:
        """Fills the L2 with clean lines: it reads, since written lines would be written back during the next run."""
        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        self._flush.max()
