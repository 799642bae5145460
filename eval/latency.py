"""Latency: systems interleaved on the same queries, end to end and by stage, warm-up left out."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eval.systems import Knobs, System

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
    device: torch.device,
    progress: str = "",
) -> dict[str, Any]:
    """Times of each system over Q (fp32 [n, LQ, DIM]): encoded query to pids and scores on the host.

    The first `warmup` queries run once untimed on every system. Then, `repeats` times, each query runs on all
    systems one after the other, the order turning by one every time, so that drift of the machine meets all alike.
    Stages are taken in a pass of their own, since reading clocks inside a search slows it; their means add up to
    `stages_total`. Q is on `device` before the clock starts.

    Returns system name -> {"search": summary, "stages": stage -> mean ms, "stages_total": ms}, and under "agreement"
    the share of the first system's pids that each system returned in the timed calls.
    """
    Q = Q.to(device)
    queries = [Q[i : i + 1] for i in range(len(Q))]
    times: dict[str, list[float]] = {system.name: [] for system in systems}
    stages: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
    shared: dict[str, list[float]] = {system.name: [] for system in systems}
    total = (repeats + 1) * len(queries)
    with tqdm(total=total, desc=progress, unit=" queries", disable=not progress) as bar:
        for system in systems:
            system.use(knobs)
            for q in queries[:warmup]:
                system.search(q)
        gc.collect()
        gc.disable()  # a collection in one system's call would be counted against it
        try:
            for repeat in range(repeats):
                for i, q in enumerate(queries):
                    turn = (i + repeat) % len(systems)
                    found: dict[str, set[int]] = {}
                    for system in (*systems[turn:], *systems[:turn]):
                        system.use(knobs)
                        milliseconds, pids = _timed(system, q, device)
                        times[system.name].append(milliseconds)
                        found[system.name] = set(pids)
                    base = found[systems[0].name]
                    for name, pids_found in found.items():
                        shared[name].append(len(base & pids_found) / max(len(base), 1))
                    bar.update()
        finally:
            gc.enable()
        for q in queries:
            for system in systems:
                system.use(knobs)
                stages[system.name].append(system.stages(q))
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


def _timed(system: System, q: Tensor, device: torch.device) -> tuple[float, list[int]]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    pids, _ = system.search(q)  # returns lists on the host, so the device is done
    return (time.perf_counter() - started) * 1e3, pids
