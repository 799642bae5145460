"""Retrieval: encoded queries through a system into a TREC run and the full list of what it scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from .systems import System


@dataclass(frozen=True)
class Scored:
    """What one system did for every query, ragged: query i owns pids[offsets[i]:offsets[i + 1]], best first.

    Candidates (before pruning, ascending) are ragged alike; empty for systems that do not tell.
    """

    offsets: np.ndarray  # int64 [n + 1]
    pids: np.ndarray  # int32
    scores: np.ndarray  # float32
    candidate_offsets: np.ndarray  # int64 [n + 1]
    candidates: np.ndarray  # int32

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def query(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(pids, scores) of query i."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        return self.pids[part], self.scores[part]

    def candidates_of(self, i: int) -> np.ndarray:
        return self.candidates[self.candidate_offsets[i] : self.candidate_offsets[i + 1]]

    @classmethod
    def from_lists(cls, results: Sequence[tuple[Sequence[int], Sequence[float]]], candidates: Sequence[Any]) -> Scored:
        """From one (pids, scores) and one pid sequence per query."""
        return cls(
            _offsets([len(pids) for pids, _ in results]),
            _join([pids for pids, _ in results], np.int32),
            _join([scores for _, scores in results], np.float32),
            _offsets([len(c) for c in candidates]),
            _join(candidates, np.int32),
        )

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> Scored:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in cls.__dataclass_fields__})


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _join(parts: Sequence[Any], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def retrieve(
    system: System, Q: Tensor, *, judged: int | None = None, progress: str = ""
) -> tuple[Scored, dict[str, Any]]:
    """Run every query of Q (fp32 [n, LQ, DIM]) through `system`, whose knobs are set: (what it scored, timings).

    A system that follows PLAID gives all that it scored and, for the first `judged` queries (None: all), its
    candidates; another gives its k best and none: scoring a whole collection leaves more than there is room for.
    Timings: `first_query_ms` (it includes whatever the system loads late) and `seconds` in all. `progress`: the
    label of a progress bar, none if empty.
    """
    results: list[tuple[list[int], list[float]]] = []
    candidates: list[Any] = []
    first_query_ms = 0.0
    started = time.perf_counter()
    for i in tqdm(range(len(Q)), desc=progress, unit=" queries", disable=not progress):
        before = time.perf_counter()
        results.append(system.rank(Q[i : i + 1]) if system.follows_plaid else system.search(Q[i : i + 1]))
        if i == 0:
            first_query_ms = (time.perf_counter() - before) * 1e3
        wanted = system.follows_plaid and (judged is None or i < judged)
        candidates.append(system.candidates(Q[i : i + 1]).numpy() if wanted else [])
    seconds = time.perf_counter() - started
    return Scored.from_lists(results, candidates), {"first_query_ms": first_query_ms, "seconds": seconds}


def write_run(
    path: Path,
    scored: Scored,
    query_ids: Sequence[str],
    passage_ids: Sequence[str],
    *,
    k: int,
    tag: str,
    left_out: Sequence[int | None] | None = None,
) -> None:
    """A TREC run: the k best of each query, `query_id Q0 passage_id rank score tag`, scores to float32 precision.

    `left_out[i]` is a pid that query i does not get (the query's own passage), or None. Raises ValueError for an id
    that holds white space, which the format cannot carry, and for lists that do not match the queries.
    """
    if len(query_ids) != len(scored):
        raise ValueError(f"query_ids: expected {len(scored)} of them, got {len(query_ids)}")
    tag = tag.replace(" ", "_")
    with open(path, "w", encoding="utf-8") as f:
        for i, query_id in enumerate(query_ids):
            pids, scores = scored.query(i)
            if left_out is not None and left_out[i] is not None:
                kept = pids != left_out[i]
                pids, scores = pids[kept], scores[kept]
            for rank, (pid, score) in enumerate(zip(pids[:k].tolist(), scores[:k].tolist()), 1):
                line = (query_id, "Q0", passage_ids[pid], str(rank), f"{score:.9g}", tag)
                if any(len(word.split()) != 1 for word in line):
                    raise ValueError(f"{path.name}: expected ids without white space, got {line[0]!r}, {line[2]!r}")
                f.write(" ".join(line) + "\n")


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Query id -> passage id -> score. ValueError names the line that is no TREC run line."""
    run: dict[str, dict[str, float]] = {}
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            words = line.split()
            if len(words) != 6:
                raise ValueError(f"{path}:{number}: expected 6 words, got {len(words)}: {line[:60]!r}")
            run.setdefault(words[0], {})[words[2]] = float(words[4])
    return run
