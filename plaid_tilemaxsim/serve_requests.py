"""What the server takes: its limits, and requests for /search read and checked. Knows neither HTTP nor tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_WAIT_MS = 60_000.0
FIELDS = ("query", "queries", "k", "pids", "text")


def _limit(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """What a server takes on; each is an option of the command line."""

    max_batch: int = _limit(32, "queries of one batch")
    max_wait_ms: float = _limit(0.0, "time that a query waits for others to share its batch")
    max_queue: int = _limit(1024, "queries that may wait; a request beyond that is answered 503")
    max_k: int = _limit(1000, "results of a query")
    max_queries: int = _limit(128, "queries of a request")
    max_results: int = _limit(20_000, "results of a request: k times its queries")
    max_query_chars: int = _limit(4096, "characters of a query (the encoder reads its first query_maxlen tokens)")
    max_pids: int = _limit(100_000, "pids of a request, times its queries")
    max_body_bytes: int = _limit(1 << 20, "bytes of a request's body")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "max_wait_ms" else 1
            if not value >= least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.max_wait_ms > MOST_WAIT_MS:
            raise ValueError(f"max_wait_ms: expected at most {MOST_WAIT_MS:g}, got {self.max_wait_ms}")
        if self.max_k > self.max_results:
            raise ValueError(f"max_k: expected at most max_results = {self.max_results}, got {self.max_k}")
        if self.max_queries > self.max_queue:
            raise ValueError(f"max_queries: expected at most max_queue = {self.max_queue}, got {self.max_queries}")


class Refused(Exception):
    """A request that gets no results: HTTP status and what to tell the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Query:
    text: str
    k: int
    pids: Sequence[int] | None = None


@dataclass(frozen=True)
class SearchRequest:
    queries: Sequence[Query]
    single: bool  # "query" was given, and its answer is wanted without a list around it
    with_text: bool


def parse(body: bytes, limits: Limits, num_passages: int, has_texts: bool) -> SearchRequest:
    """The request in a body; raises Refused with what was expected and got, 400 for no JSON, else 422."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and numbers of endless digits
        raise Refused(400, f"body: expected JSON, got {_shown(body)} ({error})") from None
    if not isinstance(given, dict):
        raise _unexpected("body", f"an object with {', '.join(FIELDS)}", given)
    unknown = [name for name in given if name not in FIELDS]
    if unknown:
        raise _unexpected("body", f"names from {list(FIELDS)}", unknown[0])
    if ("query" in given) == ("queries" in given):
        got = "both" if "query" in given else "neither"
        raise Refused(422, f'body: expected either "query" or "queries", got {got}')
    single = "query" in given
    texts = [given["query"]] if single else given["queries"]
    if not isinstance(texts, list) or not 1 <= len(texts) <= limits.max_queries:
        got = f"{len(texts)} of them" if isinstance(texts, list) else texts
        raise _unexpected("queries", f"a list of 1 to {limits.max_queries} strings", got)
    for i, text in enumerate(texts):
        _check_text("query" if single else f"queries[{i}]", text, limits.max_query_chars)
    k, pids, with_text = given.get("k", min(10, limits.max_k)), given.get("pids"), given.get("text", False)
    if not _is_integer(k) or not 1 <= k <= limits.max_k:
        raise _unexpected("k", f"an integer in 1 .. {limits.max_k}", k)
    if k * len(texts) > limits.max_results:
        most = limits.max_results // len(texts)
        expected = f"at most {most} for {len(texts)} queries, by max_results = {limits.max_results}"
        raise _unexpected("k", expected, k)
    if pids is not None:
        most = limits.max_pids // len(texts)
        if not isinstance(pids, list) or len(pids) > most:
            got = f"{len(pids)} of them" if isinstance(pids, list) else pids
            raise _unexpected("pids", f"a list of at most {most} integers for {len(texts)} queries", got)
        for pid in pids:
            if not _is_integer(pid) or not 0 <= pid < num_passages:
                raise _unexpected("pids", f"integers in 0 .. {num_passages - 1}", pid)
    if not isinstance(with_text, bool):
        raise _unexpected("text", "true or false", with_text)
    if with_text and not has_texts:
        raise Refused(422, "text: expected false, since this server was started without --collection, got true")
    return SearchRequest([Query(text, k, pids) for text in texts], single, with_text)


def _check_text(name: str, text: Any, most: int) -> None:
    if not isinstance(text, str) or not 1 <= len(text) <= most:
        got = f"one of {len(text)}" if isinstance(text, str) else text
        raise _unexpected(name, f"a string of 1 to {most} characters", got)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(422, f"{name}: expected Unicode text, got half a surrogate pair at {error.start}") from None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unexpected(name: str, expected: str, got: Any) -> Refused:
    return Refused(422, f"{name}: expected {expected}, got {_shown(got)}")


def _shown(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, a list too deep
        text = "something huge"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
