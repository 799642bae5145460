"""``plaid-tilemaxsim serve INDEX``: searches over HTTP, the queries of many clients in one batch.

    POST /search        {"query": "text", "k": 10} or {"queries": ["text", ...]}; "pids": [...] scores exactly these
                        passages instead of searching; "text": true adds the passages themselves
    GET  /health        200 while searches succeed, else 503; also, with "status": "loading", before the index is loaded
    GET  /metrics       Prometheus
    GET  /openapi.json  the same in OpenAPI's words

JSON in and out. The port is taken first; until the index is loaded, every request is answered 503. Two threads own the
index and the encoder, so that a batch is encoded while the one before is searched; requests wait for them in a queue of
limited length. What is wrong with a request is said in {"error": "..."}: 4xx where it can be mended, 503 with
Retry-After where the queue is full. There is no authentication: whoever reaches the port can search.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import math
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from prometheus_client import (
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        PlatformCollector,
        ProcessCollector,
        generate_latest,
    )
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.routing import Router
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ImportError as error:
    raise ImportError(f"{error.name} is not installed here; pip install 'plaid-tilemaxsim[serve]'") from None

from plaid_tilemaxsim import __version__, enable
from plaid_tilemaxsim.graphs import collect
from plaid_tilemaxsim.metrics import NAMESPACE, SECONDS, SearchMetrics
from plaid_tilemaxsim.serve_requests import Limits, Query, Refused, parse

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("plaid_tilemaxsim")

RETRY_AFTER_SECONDS = 1
CLIENT_GONE = 499  # the status of a request that nobody hears the answer of; for the metrics
# A client that sends its body no faster than this is cut off, and one of which nothing is heard for as long.
BODY_SECONDS = IDLE_SECONDS = 10.0
# Searches in a row whose failure makes /health say so.
FAILING = 3
# Up to each of these k the search's defaults are the same (``funnel.default_params``).
SAME_SEARCH = (10, 100, 1024)
# Longer lists of pids are recorded at the first of their length.
MOST_LISTED = 1 << 17


@dataclass(frozen=True)
class Answer:
    pids: Sequence[int]
    scores: Sequence[float]


@dataclass
class _Waiting:
    query: Query
    arrived: float
    answer: Any  # a future, of concurrent.futures or of asyncio


class Batcher:
    """Two threads that answer queries in batches, in the order they come: one encodes while the other searches.

    Each takes a batch, encodes it, waits for the search before and searches: a batch stays in its thread, hence on its
    thread's CUDA stream, and one that is alone waits for no other thread.
    encode, search: what a batch's queries are to the search, sliced for a part of them, and the answers from both, in
    order. Each is called by one thread at a time. Where it fails for a batch, it is tried for its queries one by one:
    nobody fails for another's query.
    A batch starts when ``max_batch`` queries wait or the first has waited ``max_wait_ms``, at once where that is 0; but
    while another is searched, not before as many wait as are in that: or batches would become small, and more.
    observe: gets each batch's size and the seconds that its first query waited. deliver: calls what it gets, which sets
    the futures of a whole batch, in the thread that these belong to; by default in the batcher's own.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[Query]], Any],
        search: Callable[[Sequence[Query], Any], Sequence[Answer]],
        limits: Limits,
        observe: Callable[[int, float], None] = lambda queries, seconds: None,
        deliver: Callable[[Callable[[], None]], Any] = lambda settle: settle(),
    ) -> None:
        self._encode = encode
        self._search = search
        self._limits = limits
        self._observe = observe
        self._deliver = deliver
        self._waiting: deque[_Waiting] = deque()
        # Of all below. One of the threads works or both wait for the same: ``notify`` wakes the right one.
        self._changed = threading.Condition()
        self._encoding = False
        self._searching = 0  # queries of the batch that is searched
        self._closing = False
        self._failures = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"plaid-tilemaxsim serve {i}", daemon=True) for i in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Queries that wait."""
        return len(self._waiting)

    @property
    def healthy(self) -> bool:
        alive = all(thread.is_alive() for thread in self._threads)
        return alive and not self._closing and self._failures < FAILING

    def submit(self, queries: Sequence[Query], future: Callable[[], Any] = Future) -> list[Any]:
        """Futures of their answers, made by ``future``, for all or, where they do not all fit into the queue, Refused
        with status 503."""
        now = time.monotonic()
        items = [_Waiting(query, now, future()) for query in queries]
        with self._changed:
            if self._closing:
                raise Refused(503, "the server is shutting down")
            if len(self._waiting) + len(items) > self._limits.max_queue:
                raise Refused(503, f"expected room for {len(items)} queries, got {len(self._waiting)} waiting already")
            self._waiting.extend(items)
            self._wake()
        return [item.answer for item in items]

    def close(self) -> None:
        """Answers what waits, then ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while batch := self._next():
            self._work(batch)

    def _next(self) -> list[_Waiting]:
        """The next batch, once it is due; empty when there will be none."""
        waiting = self._waiting
        with self._changed:
            while (left := self._left()) is None or left > 0:
                self._changed.wait(left)
            batch = [waiting.popleft() for _ in range(_batch_size(min(self._limits.max_batch, len(waiting))))]
            self._encoding = bool(batch)
            return batch

    def _left(self) -> float | None:
        """Seconds until a batch is due; None: not before something changes."""
        waiting = self._waiting
        if self._encoding:
            return None
        if self._closing or len(waiting) >= self._limits.max_batch:
            return 0
        if len(waiting) < max(1, self._searching):
            return None
        return waiting[0].arrived + self._limits.max_wait_ms / 1e3 - time.monotonic()

    def _wake(self) -> None:
        """A thread that waits, unless it would wait on: then it would only be in the way of those that work."""
        if self._left() is not None:
            self._changed.notify()

    def _work(self, batch: Sequence[_Waiting]) -> None:
        encoded: list[tuple[Sequence[_Waiting], Any]] = []
        try:
            self._observe(len(batch), time.monotonic() - batch[0].arrived)
            # A client that has gone cancelled its query.
            encoded = self._encoded([item for item in batch if not item.answer.cancelled()])
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._searching)
                self._encoding, self._searching = False, len(batch) if encoded else 0
                self._wake()
        if not encoded:  # hence nothing to search: the other thread may be at that
            return
        try:
            for part, encoding in encoded:
                self._answer(part, encoding)
        finally:
            with self._changed:
                self._searching = 0
                if self._encoding:  # else this thread takes what waits itself
                    self._changed.notify()

    def _encoded(self, batch: Sequence[_Waiting]) -> list[tuple[Sequence[_Waiting], Any]]:
        """The batch and its encoding; where that fails, every query that can be encoded, and its own."""
        if not batch:
            return []
        try:
            return [(batch, self._encode([item.query for item in batch]))]
        except Exception as error:  # noqa: BLE001 (its client gets it)
            if len(batch) > 1:
                return [part for item in batch for part in self._encoded([item])]
            self._finish(batch, [error])
            return []

    def _answer(self, batch: Sequence[_Waiting], encoding: Any) -> None:
        try:
            answers = self._search([item.query for item in batch], encoding)
        except Exception as error:  # noqa: BLE001 (its client gets it)
            if len(batch) > 1:
                for i, item in enumerate(batch):
                    self._answer([item], encoding[i : i + 1])
            else:
                self._finish(batch, [error])
        else:
            self._finish(batch, answers)

    def _finish(self, batch: Sequence[_Waiting], answers: Sequence[Answer | Exception]) -> None:
        with self._changed:
            self._failures = self._failures + 1 if isinstance(answers[0], Exception) else 0
        # One call for all of them: each would wake the clients' thread, which then keeps this one from the next batch.
        self._deliver(functools.partial(_settle, [item.answer for item in batch], answers))


def _batch_size(queries: int) -> int:
    """How many of those that wait to take: a GPU searches as many as the next power of two, however few there are.

    Where more than a quarter of that would be for nobody, the power of two below; others may join the rest.
    """
    below = 1 << (queries.bit_length() - 1) if queries else 0
    return queries if 2 * queries >= 3 * below else below


def _settle(futures: Sequence[Any], answers: Sequence[Answer | Exception]) -> None:
    """futures: asyncio's, in the thread of their loop, or others that nobody cancels."""
    for future, answer in zip(futures, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class BatchSearch:
    """Answers batches with a Searcher: all texts are encoded at once, then searched at once.

    ``encode`` may run beside ``search``, of another batch and in another thread; neither beside itself.

    encoded: gets the seconds of every encoding; on a GPU only what the host has to do with it.
    """

    def __init__(self, searcher: Any, max_k: int, encoded: Callable[[float], Any] = lambda seconds: None) -> None:
        self._searcher = searcher
        self._max_k = max_k
        self._encoded = encoded

    def __call__(self, queries: Sequence[Query]) -> list[Answer]:
        return self.search(queries, self.encode(queries))

    def encode(self, queries: Sequence[Query]) -> Tensor:
        """[B, LQ, DIM]; on a GPU the current stream may still be at it."""
        began = time.perf_counter()
        Q: Tensor = self._searcher.encode([query.text for query in queries])
        self._encoded(time.perf_counter() - began)
        return Q

    def search(self, queries: Sequence[Query], Q: Tensor) -> list[Answer]:
        """Q: as ``encode`` returned it, to the same stream."""
        ranker, config = self._searcher.ranker, self._searcher.config
        found: dict[int, tuple[list[int], list[float]]] = {}
        together: dict[int, list[int]] = {}
        for i, query in enumerate(queries):
            k = self._shared_k(query.k)
            if query.pids is None:
                together.setdefault(k, []).append(i)
            else:
                found[i] = ranker.search(config, Q[i : i + 1], k, pids=query.pids)
        for k, members in together.items():
            if len(members) == 1:  # has a faster way than a batch
                found[members[0]] = ranker.search(config, Q[members[0]][None], k)
            else:
                asked = Q if len(members) == len(Q) else Q[members]
                found.update(zip(members, ranker.search_batch(config, asked, k), strict=True))
        return [Answer(found[i][0][: query.k], found[i][1][: query.k]) for i, query in enumerate(queries)]

    def _shared_k(self, k: int) -> int:
        """The largest k that is searched in the same way: its first results are those of k.

        So queries of different k share a batch, and clients cannot make a GPU record a graph for every k of up to 1024.
        """
        return next((min(n, self._max_k) for n in SAME_SEARCH if k <= n), k)

    def warmup(self, limits: Limits) -> None:
        """Compile, and on a GPU record, what requests can ask for: batches and lists of pids of every size, for every
        range of k."""
        most, on_gpu = limits.max_batch, self._searcher.config.total_visible_gpus > 0
        # The largest first, whose memory the others then share.
        sizes = [most, *(2**i for i in reversed(range((most - 1).bit_length())) if on_gpu or i == 0)]
        listed = (min(limits.max_pids, MOST_LISTED) - 1).bit_length() if on_gpu else 0
        ks = sorted({min(n, self._max_k) for n in SAME_SEARCH})
        for k in ks:
            began = time.perf_counter()
            if self._searcher.ranker.num_passages:
                for n in (1, *(2**i for i in range(7, listed + 1))):  # up to 64 are one size
                    self([Query("warm up", k, [0] * n)])
            self._search_sizes(sizes, k)
            logger.info("k = %d: batches of %s ready after %.1f s", k, sizes, time.perf_counter() - began)
        if on_gpu:  # each recording took from torch what memory it had at hand
            for k in ks:
                self._search_sizes(sizes, k)

    def _search_sizes(self, sizes: Sequence[int], k: int) -> None:
        for n in sizes:
            self([Query("warm up", k)] * n)


class _App(FastAPI):
    """Takes POST /search past FastAPI's routes and middleware, which take longer than what ``search`` does itself."""

    search: Callable[[Request], Awaitable[Response]]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == "/search":
            response = await self.search(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(searcher: Any, limits: Limits | None = None, texts: Sequence[str] | None = None) -> FastAPI:
    """The server's app; compiles what it needs first. From then on threads of its own alone use the searcher.

    searcher: a colbert Searcher whose config says scorer="tilemaxsim"; closed with the app. texts: passages by pid.
    """
    limits = limits or Limits()
    num_passages: int = searcher.ranker.num_passages
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    named: dict[str, Any] = {"namespace": NAMESPACE, "registry": registry}
    requests = Counter("http_requests", "Requests for /search by status", ("status",), **named)
    seconds = Histogram("http_request_seconds", "Time of an answered request", buckets=SECONDS, **named)
    sizes = Histogram("batch_queries", "Queries of a batch", buckets=[2**i for i in range(11)], **named)
    waits = Histogram("wait_seconds", "Time that a batch's first query waited", buckets=SECONDS, **named)
    encodes = Histogram("encode_seconds", "Host's time to encode a batch", buckets=SECONDS, **named)
    queue = Gauge("waiting_queries", "Queries that wait now", **named)

    def observe(queries: int, waited: float) -> None:
        sizes.observe(queries)
        waits.observe(waited)

    BatchSearch(searcher, limits.max_k).warmup(limits)
    SearchMetrics(registry).attach(searcher.ranker)
    batcher: Batcher

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal batcher
        batches = BatchSearch(searcher, limits.max_k, encodes.observe)
        deliver = asyncio.get_running_loop().call_soon_threadsafe
        batcher = Batcher(batches.encode, batches.search, limits, observe, deliver)
        queue.set_function(lambda: len(batcher))
        yield
        await asyncio.to_thread(batcher.close)
        searcher.ranker.close()

    # FastAPI's documentation pages load scripts from elsewhere.
    app = _App(title="plaid-tilemaxsim", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _json(error.status_code, {"error": message}, error.headers)

    @app.get("/health")
    async def health() -> Response:
        status = {"passages": num_passages, "waiting": len(batcher), "version": __version__}
        if batcher.healthy:
            return _json(200, {"status": "ok", **status})
        return _json(503, {"status": "failing", **status})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/search", openapi_extra=_openapi(limits))
    async def search(request: Request) -> Response:
        began = time.perf_counter()
        headers = None
        try:
            wanted = parse(await _read(request, limits.max_body_bytes), limits, num_passages, texts is not None)
            future = asyncio.get_running_loop().create_future
            answers = await asyncio.gather(*batcher.submit(wanted.queries, future))
            results = [_result(answer, texts if wanted.with_text else None) for answer in answers]
            response = _json(200, results[0] if wanted.single else {"results": results})
            seconds.observe(time.perf_counter() - began)
        except Refused as refused:
            if refused.status == 503:
                headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            response = _json(refused.status, {"error": str(refused)}, headers)
        except ClientDisconnect:
            response = _json(CLIENT_GONE, {"error": "the client closed the connection"})
        except Exception:
            logger.exception("POST /search: a search failed")
            response = _json(500, {"error": "the search failed; the server's log says why"})
        requests.labels(str(response.status_code)).inc()
        return response

    app.search = search
    return app


async def _read(request: Request, most: int) -> bytes:
    """The body, of JSON by its header; never more of it than ``most`` bytes."""
    kind = request.headers.get("content-type", "")
    # Also keeps a foreign web page in the user's browser from posting here: it may not set this header.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, f"Content-Type: expected application/json, got {kind or 'none'}")
    length = request.headers.get("content-length", "0")
    if int(length) > most:
        raise Refused(413, f"body: expected at most {most} bytes, got {length}")

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > most:
                raise Refused(413, f"body: expected at most {most} bytes, got more")
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise Refused(408, f"body: expected all of it within {BODY_SECONDS:g} s, got a part") from None


def _result(answer: Answer, texts: Sequence[str] | None) -> dict[str, Any]:
    """JSON knows no -inf, the score of an empty passage: null."""
    scores = [score if math.isfinite(score) else None for score in answer.scores]
    result = {"pids": answer.pids, "ranks": list(range(1, len(scores) + 1)), "scores": scores}
    return result if texts is None else {**result, "passages": [texts[pid] for pid in answer.pids]}


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


def _json(status: int, content: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(content).encode(), status, headers, "application/json")


def _openapi(limits: Limits) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1, "maxLength": limits.max_query_chars}
    integers = {"type": "array", "items": {"type": "integer"}}
    asked = {
        "query": text,
        "queries": {"type": "array", "items": text, "minItems": 1, "maxItems": limits.max_queries},
        "k": {"type": "integer", "minimum": 1, "maximum": limits.max_k, "default": min(10, limits.max_k)},
        "pids": {**integers, "maxItems": limits.max_pids},
        "text": {"type": "boolean", "default": False},
    }
    result = {
        "pids": integers,
        "ranks": integers,
        "scores": {"type": "array", "items": {"type": ["number", "null"]}},
        "passages": {"type": "array", "items": {"type": "string"}},
    }
    results = {"type": "object", "properties": {"results": {"type": "array", "items": _object(result)}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _object(asked)}}},
        "responses": {
            "200": {"content": {"application/json": {"schema": {"anyOf": [_object(result), results]}}}},
            **{
                status: {"description": text}
                for status, text in {
                    "400": "no JSON",
                    "408": "the body came too slowly",
                    "413": "the body is too large",
                    "415": "the Content-Type is another",
                    "422": "a field is not as expected",
                    "503": "too many queries wait",
                }.items()
            },
        },
    }


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def open_searcher(
    index: str | Path,
    *,
    checkpoint: str | None = None,
    collection: str | None = None,
    scorer_options: Mapping[str, Any] | None = None,
) -> tuple[Any, list[str] | None]:
    """(a colbert Searcher that scores with tilemaxsim, the passages' texts or None without ``collection``).

    collection: a .tsv of pid and passage. Raises ValueError where the files do not fit each other, are not there, or
    no checkpoint is found.
    """
    from plaid_tilemaxsim.config import options_of
    from plaid_tilemaxsim.index.files import read_index

    # What is wrong is said before anything heavy is loaded.
    passages = read_index(index).num_passages
    if collection is not None and not Path(collection).is_file():
        raise ValueError(f"collection: expected a .tsv file of pid and passage, got no file {collection}")
    index = Path(index).resolve()
    enable()
    from colbert import Searcher
    from colbert.data import Collection
    from colbert.infra import ColBERTConfig

    # Stock insists on a collection, and loads the index's own where none is given. range takes no memory.
    held = Collection(data=range(passages)) if collection is None else _read_collection(collection, passages)
    config = ColBERTConfig(scorer="tilemaxsim", scorer_options=dict(scorer_options or {}))
    options_of(config)
    try:
        searcher = Searcher(index=str(index), checkpoint=checkpoint, collection=held, config=config, verbose=1)
    except OSError as error:  # of transformers, which may name the hub alone
        named = checkpoint or ColBERTConfig.load_from_index(str(index)).checkpoint
        if Path(named).is_dir():
            raise
        raise ValueError(
            f"checkpoint: expected a folder, from here, or a name of the Hugging Face hub that can be reached, got "
            f"{named!r}{'' if checkpoint else ', which the index names'}; --checkpoint names another. "
            f"{str(error).splitlines()[0]}"
        ) from error
    return searcher, None if collection is None else held.data


def _read_collection(path: str, passages: int) -> Any:
    from colbert.data import Collection

    if not path.endswith(".tsv"):
        raise ValueError(f"collection: expected a .tsv file of pid and passage, got {path}")
    try:
        read = Collection(path)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"{path}: expected lines of pid, tab, passage, with pids from 0 upward ({error})") from None
    if len(read) != passages:
        raise ValueError(f"{path}: expected the index's {passages} passages, got {len(read)}")
    return read


class EndsIdle(asyncio.Protocol):
    """Before one of uvicorn's: ends where a client begins no request, or takes nothing of an answer, for IDLE_SECONDS.

    uvicorn waits for both without end, so that a few hundred such clients take all file descriptors.
    """

    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._before: Any = None
        self._check()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(error)

    def _check(self) -> None:
        # A new request is a new cycle. One that is worked on is the server's business.
        before, self._before = self._before, (self.cycle, self.transport.get_write_buffer_size())
        if before == self._before and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(IDLE_SECONDS, self._check)


class Connection(EndsIdle, AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """By httptools where that is installed, else by h11."""


class Deferred:
    """ASGI: the app that ``load`` makes, in a thread, and until it is there 503 for every request.

    done: called in the event loop's thread, with None once the app answers, or with what ``load`` raised.
    """

    def __init__(self, load: Callable[[], FastAPI], done: Callable[[Exception | None], None]) -> None:
        self._load = load
        self._done = done
        self._app: FastAPI | None = None
        self._router = Router(lifespan=self._lifespan)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._router(scope, receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            content = {"status": "loading", "error": "the index is being loaded", "version": __version__}
            await _json(503, content, {"Retry-After": str(RETRY_AFTER_SECONDS)})(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as running:

            async def start() -> None:
                try:
                    app = await asyncio.to_thread(self._load)
                    await running.enter_async_context(app.router.lifespan_context(app))
                except Exception as error:  # noqa: BLE001 (whoever waits gets it)
                    self._done(error)
                else:
                    self._app = app
                    self._done(None)

            starting = asyncio.create_task(start())
            yield
            await starting


class _Server(uvicorn.Server):
    """A signal that comes before it is ready ends the process at once: loading cannot be broken off."""

    ready = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.ready:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)


def serve(load: Callable[[], FastAPI], host: str, port: int, *, shutdown_seconds: float = 30.0) -> None:
    """Serves the app that ``load`` makes until SIGTERM or SIGINT; then answers what it has accepted, for at most
    ``shutdown_seconds``. Of the main thread.

    port 0 takes a free one. Prints the address once the app answers; before, whoever asks is answered 503. Raises
    OSError where the address cannot be had, before it loads, and what ``load`` raises.
    """
    failed: list[Exception] = []

    def done(error: Exception | None) -> None:
        if error is not None:
            failed.append(error)
            server.should_exit = True
            return
        server.ready = True
        print(at, flush=True)

    def loaded() -> FastAPI:
        app = load()
        # Nearly all of it stays; looking through it for garbage once more would stop all requests for that long.
        collect()
        gc.freeze()
        return app

    config = uvicorn.Config(
        Deferred(loaded, done), http=Connection, ws="none", log_level="warning", access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=math.ceil(shutdown_seconds),
    )  # fmt: skip
    server = _Server(config)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"host: expected a name or an address of this machine, got {host} ({error.strerror})") from None
    # With the protocol named, asyncio sends small parts at once (TCP_NODELAY); without, answers wait for an ACK: 40 ms.
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise OSError(f"port: expected one that can be had on {host}, got {port} ({error.strerror})") from None
        host, port = listener.getsockname()[:2]
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        # Also before uvicorn takes them, and when it is done: it raises the signal that ended it once more.
        before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            server.run(sockets=[listener])
        finally:
            gc.unfreeze()
            for number, handler in before.items():
                signal.signal(number, handler)
    if failed:
        raise failed[0]
    if not server.started:
        raise RuntimeError("the server did not start; its log says why")
