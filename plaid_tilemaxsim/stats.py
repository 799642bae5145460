"""What a search says of itself, to those who ask: the scorer's ``on_search`` and ``last_search_stats``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SearchStats:
    """One call of a scorer that searched.

    seconds is wall time on the host from the checked arguments to the answer, without loading the index. stages and
    candidates are measured where the scorer option ``stats`` is set, else empty and None: seconds by names of
    ``funnel.STAGES`` (on a GPU the device's time in each, so they add up to less than ``seconds``), and how many
    passages came out of candidate generation. A batch on a GPU runs the stages of its queries at the same time, and
    has neither, nor has a search on several devices.
    """

    mode: str  # "plaid", "rerank" or "exhaustive"; "pids" where the caller named the passages to score
    codec: str  # "residual", "dense" or "pq"
    placement: str  # where the index is: "gpu", "host", "disk" or "cpu"
    k: int | None  # results asked for; None: all
    queries: int
    results: int  # over all queries
    seconds: float
    candidates: int | None = None
    stages: Mapping[str, float] = field(default_factory=dict)


class Watch:
    """Filled by the engine during one call."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self.candidates: int | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the host's time inside to a stage."""
        began = time.perf_counter()
        yield
        self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - began

    def found(self, candidates: int) -> None:
        self.candidates = (self.candidates or 0) + candidates
