"""Latency and throughput: systems interleaved on the same queries, end to end and by stage, warm-up left out."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .systems import Knobs, System

PERCENTILES = (20, 50, 80, 95, 99)


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """n, mean, min, max and percentiles (linear interpolation) of a list of times. ValueError if it is empty."""
    if not len(milliseconds):
        raise ValueError("milliseconds: expected at least one time, got none")
    times = np.asarray(milliseconds, dtype=np.float64)
    values = {f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(times, PERCENTILES))}
    extremes = {"min": float(times.min()), "max": float(times.max())}
    return {"n": len(times), "mean": float(times.mean()), **extremes, **values}


def measure_latency(
    systems: Sequence[System],
    Q: Tensor,
    knobs: Knobs,
    *,
    warmup: int,
    repeats: int,
    progress: str = "",
) -> dict[str, Any]:
    """Times of each system over Q (fp32 [n, LQ, DIM]): encoded query to pids and scores on the host.

    The first `warmup` queries run once untimed on every system. Then, `repeats` times, each query runs on all
    systems one after the other, the order turning by one every time, so that drift of the machine meets all alike.
    Stages are taken in a pass of their own, since reading clocks inside a search slows it; their means add up to
    `stages_total`. Q is on each system's device before the clock starts; a system with a clock of its own is believed.

    Returns system name -> {"search": summary, "stages": stage -> mean ms, "stages_total": ms}, and under "agreement"
    the share of the first system's pids that each system returned in the timed calls.
    """
    on = {device: [q.to(device) for q in Q.split(1)] for device in {system.device for system in systems}}
    times: dict[str, list[float]] = {system.name: [] for system in systems}
    stages: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
    shared: dict[str, list[float]] = {system.name: [] for system in systems}
    with tqdm(total=(repeats + 1) * len(Q), desc=progress, unit=" queries", disable=not progress) as bar:
        for system in systems:
            system.use(knobs)
            for q in on[system.device][:warmup]:
                system.search(q)
        with _no_collection():
            for repeat in range(repeats):
                for i in range(len(Q)):
                    turn = (i + repeat) % len(systems)
                    found: dict[str, set[int]] = {}
                    for system in (*systems[turn:], *systems[:turn]):
                        system.use(knobs)
                        milliseconds, pids = timed(system, on[system.device][i])
                        times[system.name].append(milliseconds)
                        found[system.name] = set(pids)
                    base = found[systems[0].name]
                    for name, pids_found in found.items():
                        shared[name].append(len(base & pids_found) / max(len(base), 1))
                    bar.update()
        for i in range(len(Q)):
            for system in systems:
                system.use(knobs)
                stages[system.name].append(system.stages(on[system.device][i]))
            bar.update()
    result: dict[str, Any] = {}
    for name in times:
        mean = {stage: float(np.mean([s[stage] for s in stages[name]])) for stage in stages[name][0]}
        result[name] = {
            "search": summary(times[name]),
            "stages": mean,
            "stages_total": sum(mean.values()),
            "agreement": float(np.mean(shared[name])),
        }
    return result


def measure_throughput(
    systems: Sequence[System], Q: Tensor, knobs: Knobs, batches: Sequence[int], *, rounds: int = 3, progress: str = ""
) -> dict[str, dict[str, float]]:
    """Queries a second by system and batch size (a string, for JSON): the best of `rounds` after one that warms up.

    A batch is the first queries of Q (fp32 [n, LQ, DIM]), repeated where there are too few. A system without a call
    for batches answers one by one.
    """
    result: dict[str, dict[str, float]] = {system.name: {} for system in systems}
    bar = tqdm(total=len(systems) * len(batches), desc=progress, unit=" batches", disable=not progress)
    with bar, _no_collection():
        for system in systems:
            system.use(knobs)
            for size in batches:
                batch = Q[torch.arange(size) % len(Q)].to(system.device)
                milliseconds = [timed_batch(system, batch) for _ in range(rounds + 1)][1:]
                result[system.name][str(size)] = size / min(milliseconds) * 1e3
                bar.update()
    return result


def timed(system: System, q: Tensor) -> tuple[float, list[int]]:
    """One search: (milliseconds until its lists are on the host, pids)."""
    if system.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    pids, _ = system.search(q)  # lists on the host, so the device is done
    milliseconds = (time.perf_counter() - started) * 1e3
    return milliseconds if system.own_ms is None else system.own_ms, pids


def timed_batch(system: System, batch: Tensor) -> float:
    """Milliseconds of one call for several queries."""
    if system.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    system.search_batch(batch)
    milliseconds = (time.perf_counter() - started) * 1e3
    return milliseconds if system.own_ms is None else system.own_ms


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection within the block: it would be counted against the system that runs just then."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
