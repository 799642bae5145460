"""The server: what it answers is a direct search's, what it refuses says why, and nobody pays for another's query."""

import asyncio
import contextlib
import http.client
import importlib
import json
import logging
import math
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

import plaid_tilemaxsim
from plaid_tilemaxsim import cli, serve
from plaid_tilemaxsim.funnel import default_params
from plaid_tilemaxsim.serve_requests import FIELDS, Limits, Query, Refused, SearchRequest, parse
from scripts import bench_serve
from tests.colbert_fixtures import PASSAGES, checkpoint, collection, index  # noqa: F401

TOLERANCE = bench_serve.TOLERANCE["cpu"]
SMALL = Limits(
    max_k=200, max_queries=4, max_results=300, max_query_chars=100, max_pids=350, max_body_bytes=10_000, max_queue=6
)


def call(address, method="POST", path="/search", body=None, headers=None, timeout=60):
    """(status, headers, parsed answer) of one request on a connection of its own."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=timeout)
    try:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, answer.headers, json.loads(content) if is_json else content.decode()
    finally:
        connection.close()


@contextlib.contextmanager
def running(app, http=serve.Connection):
    """Address of the app, served by a thread of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            server.should_exit = True
            thread.join()


class TestParse:
    @pytest.mark.parametrize(
        ("body", "status", "message"),
        [
            (b"", 400, "body: expected JSON, got"),
            (b"{", 400, "body: expected JSON"),
            (b"\xff\xfe\xfd", 400, "body: expected JSON"),
            (b"[" * 9000, 400, "body: expected JSON"),
            (b'{"query": "a", "k": ' + b"9" * 5000 + b"}", 400, "body: expected JSON"),
            (pickle.dumps({"query": "a"}), 400, "body: expected JSON"),
            (b'"text"', 422, "body: expected an object"),
            (b"{}", 422, 'expected either "query" or "queries", got neither'),
            (b'{"query": "a", "queries": ["a"]}', 422, "got both"),
            (b'{"query": "a", "K": 3}', 422, f"names from {list(FIELDS)}, got K"),
            (b'{"query": ["a"]}', 422, "query: expected a string of 1 to 100 characters, got ['a']"),
            (b'{"query": ""}', 422, "query: expected a string of 1 to 100 characters, got one of 0"),
            (json.dumps({"query": "a" * 101}).encode(), 422, "got one of 101"),
            (b'{"query": "a\\ud800"}', 422, "query: expected Unicode text, got half a surrogate pair at 1"),
            (b'{"queries": []}', 422, "queries: expected a list of 1 to 4 strings, got 0 of them"),
            (b'{"queries": ["a", "a", "a", "a", "a"]}', 422, "got 5 of them"),
            (b'{"queries": "a"}', 422, "queries: expected a list of 1 to 4 strings, got a"),
            (b'{"queries": ["a", null]}', 422, "queries[1]: expected a string of 1 to 100 characters, got None"),
            (b'{"query": "a", "k": 0}', 422, "k: expected an integer in 1 .. 200, got 0"),
            (b'{"query": "a", "k": 201}', 422, "k: expected an integer in 1 .. 200, got 201"),
            (b'{"query": "a", "k": 2.0}', 422, "got 2.0"),
            (b'{"queries": ["a", "a"], "k": 151}', 422, "at most 150 for 2 queries, by max_results = 300, got 151"),
            (b'{"query": "a", "k": NaN}', 422, "got nan"),
            (b'{"query": "a", "k": true}', 422, "got True"),
            (b'{"query": "a", "k": null}', 422, "got None"),
            (b'{"query": "a", "pids": 3}', 422, "pids: expected a list of at most 350 integers for 1 queries, got 3"),
            (json.dumps({"query": "a", "pids": [0] * 351}).encode(), 422, "got 351 of them"),
            (json.dumps({"queries": ["a"] * 4, "pids": [0] * 88}).encode(), 422, "at most 87 integers for 4 queries"),
            (b'{"query": "a", "pids": [0, 300]}', 422, "pids: expected integers in 0 .. 299, got 300"),
            (b'{"query": "a", "pids": [-1]}', 422, "pids: expected integers in 0 .. 299, got -1"),
            (b'{"query": "a", "pids": ["1"]}', 422, "pids: expected integers in 0 .. 299, got 1"),
            (b'{"query": "a", "text": 1}', 422, "text: expected true or false, got 1"),
            (b'{"query": "a", "text": true}', 422, "--collection"),
        ],
    )  # fmt: skip
    def test_refused(self, body, status, message):
        with pytest.raises(Refused) as refused:
            parse(body, SMALL, PASSAGES, has_texts=False)
        assert refused.value.status == status
        assert message in str(refused.value)
        assert len(str(refused.value)) < 300

    def test_taken(self):
        wanted = parse(b'{"queries": ["a", "b"], "k": 3, "pids": [1, 1], "text": true}', SMALL, PASSAGES, True)
        assert wanted == SearchRequest([Query("a", 3, [1, 1]), Query("b", 3, [1, 1])], False, True)
        assert parse(b'{"query": "a"}', SMALL, PASSAGES, False) == SearchRequest([Query("a", 10)], True, False)
        assert parse(b'{"query": "a"}', Limits(max_k=3), PASSAGES, False).queries[0].k == 3

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner),
        max_leaves=12,
    )

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=50) | st.builds(lambda value: json.dumps(value).encode(), json_values))
    def test_any_body_is_taken_or_refused(self, body):
        try:
            wanted = parse(body, SMALL, PASSAGES, has_texts=True)
        except Refused as error:
            refused = error
        else:
            for query in wanted.queries:
                assert 1 <= len(query.text.encode()) <= 400
                assert 1 <= query.k <= 200
                assert all(0 <= pid < PASSAGES for pid in query.pids or ())
            return
        assert refused.status in (400, 422)
        assert len(str(refused).encode()) < 500

    def test_limits_are_checked(self):
        for wrong in (
            {"max_k": 0},
            {"max_wait_ms": -1.0},
            {"max_wait_ms": math.nan},
            {"max_wait_ms": math.inf},
            {"max_queue": 5},
            {"max_results": 999},
        ):
            said = "max_queries: expected at most max_queue = 5|max_k: expected at most max_results = 999"
            with pytest.raises(ValueError, match=f"{next(iter(wrong))}|{said}"):
                Limits(**wrong)


class Gate:
    """An encoder and a search that tell what they were asked, in which thread, and wait to be let on."""

    def __init__(self):
        self.begun: queue.Queue[list[str]] = queue.Queue()  # of the encoder
        self.asked: queue.Queue[list[str]] = queue.Queue()  # of the search
        self.encoder_open = threading.Event()
        self.encoder_open.set()
        self.open = threading.Event()
        self.threads: dict[str, list[str]] = {"encode": [], "search": []}
        self.inside = {"encode": threading.Lock(), "search": threading.Lock()}

    def encode(self, queries):
        return self._step("encode", [query.text for query in queries], self.begun, self.encoder_open, "unreadable")

    def search(self, queries, texts):
        assert texts == [query.text for query in queries]
        self._step("search", texts, self.asked, self.open, "bad")
        return [serve.Answer([len(text)], [0.5]) for text in texts]

    def _step(self, name, texts, told, gate, wrong):
        assert self.inside[name].acquire(blocking=False), f"two threads {name}"
        try:
            self.threads[name] += [threading.current_thread().name] * len(texts)
            told.put(texts)
            assert gate.wait(30)
            if wrong in texts:
                raise RuntimeError(f"a query that is {wrong}")
            return texts
        finally:
            self.inside[name].release()


@pytest.fixture
def gate():
    return Gate()


def queries(*texts):
    return [Query(text, 10) for text in texts]


def none_of(told):
    """Whether nothing comes, for as long as a thread that is let on takes, and more."""
    try:
        told.get(timeout=0.1)
    except queue.Empty:
        return True
    return False


class TestBatcher:
    @pytest.fixture
    def batcher(self, gate):
        batcher = serve.Batcher(
            gate.encode, gate.search, Limits(max_batch=3, max_wait_ms=0, max_queue=8, max_queries=8)
        )
        yield batcher
        gate.encoder_open.set()
        gate.open.set()
        batcher.close()

    def fill(self, gate, batcher):
        """Futures of one batch that is searched and one that is encoded: what comes now waits."""
        futures = batcher.submit(queries("a"))
        assert gate.asked.get(timeout=30) == gate.begun.get(timeout=30) == ["a"]
        futures += batcher.submit(queries("e"))
        assert gate.begun.get(timeout=30) == ["e"]
        return futures

    def test_what_waits_is_answered_together_and_in_order(self, gate, batcher):
        first = self.fill(gate, batcher)
        later = batcher.submit(queries("bb", "ccc")) + batcher.submit(queries("dddd", "eeeee"))
        gate.open.set()
        assert [future.result(30).pids for future in first + later] == [[1], [1], [2], [3], [4], [5]]
        assert [gate.asked.get(timeout=30) for _ in range(3)] == [["e"], ["bb", "ccc", "dddd"], ["eeeee"]]
        assert batcher.healthy

    def test_a_batch_is_encoded_while_the_one_before_is_searched(self, gate, batcher):
        """One and no more, by one thread from queue to answer."""
        futures = batcher.submit(queries("a"))
        gate.asked.get(timeout=30)
        gate.begun.get(timeout=30)
        futures += batcher.submit(queries("b"))
        assert gate.begun.get(timeout=30) == ["b"]  # the search of "a" has not ended
        futures += batcher.submit(queries(*"cdefg"))
        assert none_of(gate.begun)
        assert none_of(gate.asked)
        assert not any(future.done() for future in futures)
        gate.open.set()
        assert all(future.result(30) for future in futures)
        assert [gate.asked.get(timeout=30) for _ in range(3)] == [["b"], ["c", "d", "e"], ["f", "g"]]
        assert gate.threads["encode"] == gate.threads["search"]
        assert len(set(gate.threads["search"])) == 2

    def test_a_search_waits_for_no_encoder(self, gate, batcher):
        """What is searched is answered, while the next batch is not encoded yet."""
        (first,) = batcher.submit(queries("a"))
        gate.asked.get(timeout=30)
        gate.encoder_open.clear()
        (second,) = batcher.submit(queries("b"))
        gate.open.set()
        assert first.result(30).pids == [1]
        assert not second.done()
        gate.encoder_open.set()
        assert second.result(30).pids == [1]

    def test_the_next_batch_is_no_smaller_for_being_encoded_early(self, gate, batcher):
        futures = batcher.submit(queries("a", "b", "c"))
        assert gate.asked.get(timeout=30) == gate.begun.get(timeout=30) == ["a", "b", "c"]
        futures += batcher.submit(queries("d", "e"))
        assert none_of(gate.begun)
        futures += batcher.submit(queries("f"))
        assert gate.begun.get(timeout=30) == ["d", "e", "f"]
        futures += batcher.submit(queries("g", "h"))
        gate.open.set()
        assert all(future.result(30) for future in futures)
        assert [gate.asked.get(timeout=30) for _ in range(2)] == [["d", "e", "f"], ["g", "h"]]

    def test_does_not_wait_when_idle(self, gate):
        gate.open.set()
        assert Limits().max_wait_ms == 0
        batcher = serve.Batcher(gate.encode, gate.search, Limits())
        batcher.submit(queries("a"))[0].result(30)
        began = time.monotonic()
        for _ in range(100):
            batcher.submit(queries("a"))[0].result(30)
        assert time.monotonic() - began < 1
        assert gate.threads["encode"] == gate.threads["search"]
        batcher.close()

    def test_sizes_waste_no_more_than_a_quarter_of_a_launch(self):
        sizes = [serve._batch_size(n) for n in range(34)]
        assert sizes == [0, 1, 2, 3, 4, 4, 6, 7, 8, 8, 8, 8, *range(12, 17), *[16] * 7, *range(24, 33), 32]
        for asked, taken in enumerate(sizes):
            assert taken == asked or 2 * asked < 3 * taken, (asked, taken)
            assert taken * 4 >= 3 * (1 << (taken - 1).bit_length()) or taken in (0, 1, 2)

    def test_a_batch_is_delivered_at_once_where_its_futures_belong(self, gate):
        """And the next one begins before anybody has taken it."""
        delivered: list = []
        batcher = serve.Batcher(gate.encode, gate.search, Limits(max_batch=2), deliver=delivered.append)
        first = batcher.submit(queries("a"))
        assert gate.asked.get(timeout=30) == ["a"]
        later = batcher.submit(queries("bb", "ccc", "bad"))
        gate.open.set()
        assert [gate.asked.get(timeout=30) for _ in range(2)] == [["bb", "ccc"], ["bad"]]
        batcher.close()
        assert len(delivered) == 3
        assert not any(future.done() for future in first + later)
        later[0].cancel()
        for settle in delivered:
            settle()
        assert [future.result(0).pids for future in (first[0], later[1])] == [[1], [3]]
        assert later[0].cancelled()
        with pytest.raises(RuntimeError, match="a query that is bad"):
            later[2].result(0)

    def test_waits_for_company_no_longer_than_asked(self, gate):
        gate.open.set()
        batcher = serve.Batcher(gate.encode, gate.search, Limits(max_batch=2, max_wait_ms=1000))
        began = time.monotonic()
        batcher.submit(queries("a"))[0].result(30)
        assert 0.9 < time.monotonic() - began < 10
        began = time.monotonic()
        for future in batcher.submit(queries("a")) + batcher.submit(queries("b")):
            future.result(30)
        assert time.monotonic() - began < 0.9
        batcher.close()

    def test_a_full_queue_refuses_and_recovers(self, gate, batcher):
        taken = self.fill(gate, batcher) + batcher.submit(queries(*"bcdefg"))
        for _ in range(2):
            with pytest.raises(Refused, match="expected room for 3 queries, got 6 waiting") as refused:
                batcher.submit(queries(*"hij"))
            assert refused.value.status == 503
        assert len(batcher) == 6
        taken += batcher.submit(queries(*"hi"))
        gate.open.set()
        assert all(future.result(30).pids == [1] for future in taken)
        assert batcher.submit(queries("jj"))[0].result(30).pids == [2]

    @pytest.mark.parametrize("wrong", ["bad", "unreadable"])
    def test_nobody_fails_for_anothers_query(self, gate, batcher, wrong):
        before = self.fill(gate, batcher)
        good, bad, also_good = batcher.submit(queries("bb", wrong, "ccc"))
        after = batcher.submit(queries("dddd"))
        gate.open.set()
        assert [future.result(30).pids for future in (*before, good, also_good, *after)] == [[1], [1], [2], [3], [4]]
        with pytest.raises(RuntimeError, match=f"a query that is {wrong}"):
            bad.result(30)
        assert batcher.healthy
        for _ in range(serve.FAILING):
            with pytest.raises(RuntimeError):
                batcher.submit(queries(wrong))[0].result(30)
        assert not batcher.healthy
        batcher.submit(queries("a"))[0].result(30)
        assert batcher.healthy

    def test_an_encoder_s_error_is_its_batch_s_alone(self, gate, batcher):
        """It comes while the batch before is searched, and says so at once."""
        (before,) = batcher.submit(queries("a"))
        assert gate.asked.get(timeout=30) == ["a"]
        (wrong,) = batcher.submit(queries("unreadable"))
        with pytest.raises(RuntimeError, match="a query that is unreadable"):
            wrong.result(30)
        assert not before.done()
        gate.open.set()
        assert before.result(30).pids == [1]
        assert batcher.submit(queries("bb"))[0].result(30).pids == [2]

    def test_a_search_s_error_is_its_batch_s_alone(self, gate, batcher):
        (wrong,) = batcher.submit(queries("bad"))
        assert gate.asked.get(timeout=30) == ["bad"]
        gate.encoder_open.clear()
        (after,) = batcher.submit(queries("bb"))
        gate.open.set()
        with pytest.raises(RuntimeError, match="a query that is bad"):
            wrong.result(30)
        gate.encoder_open.set()
        assert after.result(30).pids == [2]

    def test_a_query_that_nobody_waits_for_is_left_out(self, gate, batcher):
        self.fill(gate, batcher)
        gone, wanted = batcher.submit(queries("b", "c"))
        gone.cancel()
        alone = batcher.submit(queries("d", "f"))  # a batch of nobody
        for future in alone:
            future.cancel()
        gate.open.set()
        wanted.result(30)
        assert [gate.asked.get(timeout=30) for _ in range(2)] == [["e"], ["c"]]
        assert batcher.submit(queries("gg"))[0].result(30).pids == [2]
        assert gate.asked.get(timeout=30) == ["gg"]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_thread_that_ends_does_not_stop_the_other(self, gate):
        """Nor keep ``close`` from returning; /health says that it is gone."""

        def observe(size, seconds):
            if size == 1:
                raise RuntimeError("not observed")

        gate.open.set()
        batcher = serve.Batcher(gate.encode, gate.search, Limits(), observe)
        batcher.submit(queries("a"))
        while batcher.healthy:
            time.sleep(0.001)
        assert [future.result(30).pids for future in batcher.submit(queries("bb", "ccc"))] == [[2], [3]]
        closing = threading.Thread(target=batcher.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()

    @pytest.mark.parametrize("stage", ["idle", "encoded", "searched", "both"])
    def test_close_answers_what_waits(self, gate, batcher, stage):
        """Wherever the batches are when it comes."""
        waiting = []
        if stage == "encoded":
            gate.encoder_open.clear()
        if stage != "idle":
            waiting += batcher.submit(queries("a"))
            gate.begun.get(timeout=30)
        if stage in ("searched", "both"):
            gate.asked.get(timeout=30)
        if stage == "both":
            gate.encoder_open.clear()
            waiting += batcher.submit(queries("b"))
            gate.begun.get(timeout=30)
        if stage != "idle":
            waiting += batcher.submit(queries(*"cdefg"))
        closing = threading.Thread(target=batcher.close)
        closing.start()
        while batcher.healthy:
            time.sleep(0.001)
        with pytest.raises(Refused, match="shutting down"):
            batcher.submit(queries("a"))
        gate.open.set()
        gate.encoder_open.set()
        closing.join(30)
        assert not closing.is_alive()
        assert all(future.result(0).pids == [1] for future in waiting)
        assert not batcher.healthy

    texts = st.sampled_from(["a", "bb", "ccc", "bad", "unreadable"])

    @settings(max_examples=20, deadline=None)
    @given(
        st.lists(st.lists(texts, min_size=1, max_size=4), max_size=40), st.integers(1, 5), st.sampled_from([0.0, 0.5])
    )
    def test_every_query_gets_its_own_answer_whatever_comes(self, asked, max_batch, max_wait_ms):
        gate = Gate()
        gate.open.set()
        limits = Limits(max_batch=max_batch, max_wait_ms=max_wait_ms)
        batcher = serve.Batcher(gate.encode, gate.search, limits)
        futures = [batcher.submit(queries(*texts)) for texts in asked]
        for texts, of_one in zip(asked, futures):
            for text, future in zip(texts, of_one):
                if text in ("bad", "unreadable"):
                    assert str(future.exception(30)) == f"a query that is {text}"
                else:
                    assert future.result(30).pids == [len(text)]
        batcher.close()


class TestBatchSearch:
    """Around a searcher that notes what it is asked."""

    @pytest.fixture
    def search(self):
        class Ranker:
            num_passages = 5

            def __init__(self):
                self.asked = []

            def search(self, config, Q, k, pids=None):
                self.asked.append((1, k) if pids is None else (1, k, len(pids)))
                return self._answer(Q[0], k)

            def search_batch(self, config, Q, k):
                self.asked.append((len(Q), k))
                return [self._answer(q, k) for q in Q]

            def _answer(self, q, k):
                return [int(q[0, 0])] * k, [0.5] * k

        class Searcher:
            ranker, config = Ranker(), types.SimpleNamespace(total_visible_gpus=1)

            def encode(self, texts):
                return torch.tensor([len(text) for text in texts]).view(-1, 1, 1)

        return serve.BatchSearch(Searcher(), 500)

    def test_queries_of_one_search_go_together(self, search):
        ks = (3, 500, 10, 11, 100, 101)
        answers = search([Query("a" * k, k) for k in ks] + [Query("a", 7, [1, 2])])
        assert [answer.pids for answer in answers] == [[k] * k for k in ks] + [[1] * 7]
        assert sorted(search._searcher.ranker.asked) == [(1, 10, 2), (2, 10), (2, 100), (2, 500)]

    @pytest.mark.parametrize("max_k", [1, 10, 60, 100, 1000, 5000])
    def test_k_is_raised_within_the_same_search(self, max_k):
        search = serve.BatchSearch(None, max_k)
        for k in range(1, max_k + 1):
            shared = search._shared_k(k)
            assert k <= shared <= max_k
            assert default_params(shared) == default_params(k)

    @pytest.mark.parametrize("most", [1, 5, 32, 100])
    def test_warm_up_meets_every_size(self, search, most, caplog):
        """Whatever the server forms takes as many lanes, for one of the same k, as some batch before."""
        limits = Limits(max_batch=most, max_k=500, max_pids=1000)
        with caplog.at_level(logging.INFO, "plaid_tilemaxsim"):
            search.warmup(limits)
        asked, search._searcher.ranker.asked = search._searcher.ranker.asked, []
        assert len(caplog.records) == 3

        def power(size):
            return 1 << (size - 1).bit_length()

        def recordings(calls):
            return {
                (min(32, power(size)), size == 1, k, *(max(64, power(n)) for n in listed)) for size, k, *listed in calls
            }

        for n in range(1, most + 1):
            for k in (1, 10, 11, 150, 500):
                search([Query("a", k)] * n)
                search([Query("a", k, [0] * min(1000, n**2))])
        assert recordings(search._searcher.ranker.asked) <= recordings(asked)
        assert len(recordings(asked)) == 3 * ((min(most, 32) - 1).bit_length() + 1 + 5)


@pytest.mark.gpu
def test_nothing_is_recorded_after_the_warm_up(index):  # noqa: F811
    searcher, _ = serve.open_searcher(index, scorer_options={"encoder": "fast"})
    search = serve.BatchSearch(searcher, 200)
    search.warmup(Limits(max_batch=11, max_k=200, max_pids=300))
    encoder, engine = searcher.ranker.encoder(searcher.checkpoint), searcher.ranker._engine
    searches = set(engine._device_search._recordings)
    assert {lanes for _, _, _, lanes, *_ in searches} == {1, 2, 4, 8, 16}
    assert set(encoder._recordings) == {(2**i, 32) for i in range(5)}
    ks = (1, 10, 11, 100, 101, 200)
    for n in range(1, 12):
        for k in ks:
            search([Query("bana dero", k)] * n)
        search([Query("bana", ks[i % len(ks)]) for i in range(n)])
    for n in (1, 64, 65, 200, 300):
        search([Query("bana", 3, [5] * n)])
    assert set(engine._device_search._recordings) == searches
    assert len(encoder._recordings) == 5
    searcher.close()


def test_batches_that_overlap_are_answered_as_one_after_the_other(index, collection):  # noqa: F811
    """On a GPU both are under way at the same time, and the encoder's output is the next batch's soon."""
    searcher, _ = serve.open_searcher(index, scorer_options={"encoder": "fast"})
    search = serve.BatchSearch(searcher, 200)
    batches = [[Query(text[:100], 10) for text in collection[i : i + 8]] for i in range(0, 160, 8)]
    wanted = [(answer.pids, answer.scores) for batch in batches for answer in search(batch)]
    batcher = serve.Batcher(search.encode, search.search, Limits(max_batch=8))
    futures = [future for batch in batches for future in batcher.submit(batch)]
    batcher.close()
    found = [(future.result(0).pids, future.result(0).scores) for future in futures]
    assert all(bench_serve.agrees(*both, TOLERANCE) for both in zip(found, wanted))
    assert not any(bench_serve.agrees(*both, TOLERANCE) for both in zip(found, wanted[8:]))
    searcher.close()


@pytest.fixture(scope="module", autouse=True)
def disabled_afterwards():
    yield
    plaid_tilemaxsim.disable()


@pytest.fixture(scope="module")
def direct(index):  # noqa: F811
    """A Searcher that no server uses."""
    return serve.open_searcher(index)[0]


@pytest.fixture(scope="module")
def tsv(tmp_path_factory, collection):  # noqa: F811
    path = tmp_path_factory.mktemp("collection") / "collection.tsv"
    path.write_text("".join(f"{pid}\t{text}\n" for pid, text in enumerate(collection)))
    return path


@pytest.fixture(scope="module")
def address(index, tsv):  # noqa: F811
    searcher, texts = serve.open_searcher(index, collection=str(tsv))
    with running(
        serve.create_app(searcher, Limits(max_k=200, max_query_chars=100, max_body_bytes=10_000), texts)
    ) as at:
        yield at


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"collection": "nowhere.tsv"}, "collection: expected a .tsv file of pid and passage, got no file nowhere.tsv"),
        ({"scorer_options": {"mod": "plaid"}}, "scorer_options: expected names from .* got 'mod'"),
        (
            {"checkpoint": "nowhere/at/all"},
            "checkpoint: expected a folder, .* got 'nowhere/at/all'; --checkpoint names",
        ),
    ],
    ids=["collection", "options", "checkpoint"],
)
def test_what_a_server_is_given_is_checked(index, given, message, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=message):
        serve.open_searcher(index, **given)


def same(answer, searched):
    """Whether an answer is what a Searcher returned."""
    pids, ranks, scores = searched
    assert answer["ranks"] == ranks
    (got,) = bench_serve.ranked([(200, answer, 0.0)])
    return bench_serve.agrees(got, (pids, scores), TOLERANCE)


class TestAnswers:
    def test_are_those_of_a_direct_search(self, address, direct, collection):  # noqa: F811
        for k in (1, 7, 10, 11, 100, 101, 200):
            for text in collection[k % 5 : k % 5 + 3]:
                status, _, answer = call(address, body={"query": text[:100], "k": k})
                assert status == 200
                assert set(answer) == {"pids", "ranks", "scores"}
                assert same(answer, direct.search(text[:100], k=k))
                assert not same({**answer, "pids": answer["pids"][::-1]}, direct.search(text[:100], k=k)) or k == 1

    def test_of_several_queries_come_in_order(self, address, direct, collection):  # noqa: F811
        texts = [text[:100] for text in collection[:40]]
        status, _, answer = call(address, body={"queries": texts, "k": 20})
        assert status == 200
        results, wanted = answer["results"], [direct.search(text, k=20) for text in texts]
        assert all(map(same, results, wanted))
        assert not any(map(same, results, wanted[1:]))

    def test_of_given_pids_are_their_exact_scores(self, address, direct, collection):  # noqa: F811
        text, pids = collection[0][:100], [5, 299, 7, 7, 0, 120]
        _, _, answer = call(address, body={"query": text, "k": 100, "pids": pids})
        assert same(answer, direct.search(text, k=100, pids=pids))
        assert sorted(answer["pids"]) == sorted(pids)
        assert call(address, body={"query": text, "pids": []})[2] == {"pids": [], "ranks": [], "scores": []}

    def test_hold_the_passages_where_asked(self, address, collection):  # noqa: F811
        _, _, answer = call(address, body={"query": "bana", "text": True})
        assert answer["passages"] == [collection[pid] for pid in answer["pids"]]

    def test_an_empty_passage_scores_null(self, address, direct):
        (empty, *_) = (direct.ranker.doclens == 0).nonzero()[:, 0].tolist()
        _, _, answer = call(address, body={"query": "bana", "pids": [empty, 1]})
        assert answer["pids"][1] == empty
        assert answer["scores"][1] is None

    def test_do_not_change_under_load(self, address, direct, collection):  # noqa: F811
        asked = [(collection[i % 60][:100], (5, 10, 60, 150)[i % 4]) for i in range(240)]
        wanted = {(text, k): direct.search(text, k=k) for text, k in set(asked)}
        answers = asyncio.run(bench_serve.load(address, [{"query": text, "k": k} for text, k in asked], 24))
        assert all(status == 200 and same(answer, wanted[key]) for (status, answer, _), key in zip(answers, asked))
        assert sum(same(answer, wanted[key]) for (_, answer, _), key in zip(answers, asked[4:])) < 24
        batches = call(address, "GET", "/metrics")[2]
        full = next(line for line in batches.splitlines() if 'batch_queries_bucket{le="8.0"}' in line)
        total = next(line for line in batches.splitlines() if "batch_queries_count" in line)
        assert float(full.split()[1]) < float(total.split()[1]), "no batch of more than 8 queries"


@pytest.fixture(params=["h11_impl.H11Protocol", "httptools_impl.HttpToolsProtocol"], ids=["h11", "httptools"])
def connection(request, monkeypatch):
    """What a server makes of either of uvicorn's protocols."""
    module, name = request.param.split(".")
    pytest.importorskip(module.removesuffix("_impl"))
    monkeypatch.setattr(serve, "IDLE_SECONDS", 0.3)
    protocol = getattr(importlib.import_module(f"uvicorn.protocols.http.{module}"), name)
    return type("Connection", (serve.EndsIdle, protocol), {})


class TestRefusals:
    def test_over_http(self, address):
        fine = json.dumps({"query": "bana"}).encode()
        for body, headers, status, message in (
            ({"query": "a", "k": 201}, {}, 422, "k: expected an integer in 1 .. 200, got 201"),
            (b"{", {}, 400, "body: expected JSON"),
            (fine, {"Content-Type": "text/plain"}, 415, "expected application/json, got text/plain"),
            (pickle.dumps(1), {"Content-Type": "application/octet-stream"}, 415, "Content-Type: expected"),
            (b" " * 10_001, {}, 413, "body: expected at most 10000 bytes, got 10001"),
            (iter([b" " * 6000] * 2), {}, 413, "body: expected at most 10000 bytes, got more"),  # in chunks
        ):  # fmt: skip
            got, answered, answer = call(address, body=body, headers=headers)
            assert (got, answered["Content-Type"]) == (status, "application/json")
            assert message in answer["error"]
        assert call(address, "GET", "/search")[::2] == (405, {"error": "GET /search: Method Not Allowed"})
        assert call(address, "GET", "/nowhere")[::2] == (404, {"error": "GET /nowhere: Not Found"})
        assert call(address, body=fine, headers={"Content-Type": "application/json; charset=utf-8"})[0] == 200

    def test_a_body_that_does_not_come(self, address, monkeypatch):
        monkeypatch.setattr(serve, "BODY_SECONDS", 0.2)
        host, port = address.removeprefix("http://").split(":")
        head = b"POST /search HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(head)
            assert client.recv(1000).startswith(b"HTTP/1.1 408")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(head)
        assert call(address, body={"query": "bana"})[0] == 200
        gone = 'http_requests_total{status="499"} 1.0'
        while gone not in call(address, "GET", "/metrics")[2]:
            time.sleep(0.05)

    @pytest.fixture
    def lively(self, connection):
        """Host and port of a server that has only to be asked."""
        app = serve.FastAPI()
        app.get("/health")(lambda: "ok")
        with running(app, connection) as address:
            yield address.removeprefix("http://").split(":")

    def test_clients_that_do_nothing(self, lively):
        """No request, half of one, half of the next one: cut off; one that works goes on."""
        host, port = lively
        half, whole = b"POST /search HTTP/1.1\r\nHost: a\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        for sent in (b"", half, whole + half):
            with socket.create_connection((host, int(port)), timeout=30) as client:
                client.sendall(sent)
                answer = b""
                with contextlib.suppress(ConnectionResetError):
                    while part := client.recv(1000):
                        answer += part
                assert answer.startswith(b"HTTP/1.1 200") == (whole in sent)
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=30)) as client:
            client.connect()
            connected = client.sock
            for _ in range(10):
                client.request("GET", "/health")
                assert client.getresponse().read()
                time.sleep(0.1)
            assert client.sock is connected

    def test_a_client_that_does_not_read(self, connection):
        app = serve.FastAPI()
        app.get("/")(lambda: serve.Response(bytes(1 << 26)))
        with running(app, connection) as address, socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = address.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            client.settimeout(30)
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            taken = 0
            for _ in range(10):  # slow is not idle
                taken += len(client.recv(1 << 16))
                time.sleep(0.1)
            time.sleep(1.5)
            with contextlib.suppress(ConnectionResetError):
                while part := client.recv(1 << 20):
                    taken += len(part)
            assert 0 < taken < 1 << 26


class TestApp:
    """Around a search that waits or fails."""

    @pytest.fixture
    def blocked(self, gate, monkeypatch):
        monkeypatch.setattr(serve.BatchSearch, "warmup", lambda self, limits: None)
        monkeypatch.setattr(serve.BatchSearch, "encode", lambda self, queries: gate.encode(queries))
        monkeypatch.setattr(serve.BatchSearch, "search", lambda self, queries, texts: gate.search(queries, texts))

        class Ranker:
            num_passages, closed = PASSAGES, False

            def close(self):
                self.closed = True

        searcher = type("Searcher", (), {"ranker": Ranker()})()
        with running(serve.create_app(searcher, SMALL)) as address:
            yield address
            gate.open.set()
        assert searcher.ranker.closed

    def test_a_full_queue_is_503_with_retry_after(self, blocked, gate):
        answers = []
        clients = [
            threading.Thread(target=lambda: answers.append(call(blocked, body={"query": "a"})[0])) for _ in range(8)
        ]
        for client in clients[:2]:  # one is searched, one encoded
            client.start()
            gate.begun.get(timeout=30)
        for client in clients[2:]:
            client.start()
        while call(blocked, "GET", "/health")[2]["waiting"] < 6:
            time.sleep(0.01)
        status, headers, answer = call(blocked, body={"query": "b"})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert answer == {"error": "expected room for 1 queries, got 6 waiting already"}
        gate.open.set()
        for client in clients:
            client.join(30)
        assert answers == [200] * 8
        assert call(blocked, body={"query": "b"})[0] == 200
        metrics = call(blocked, "GET", "/metrics")[2]
        assert 'plaid_tilemaxsim_http_requests_total{status="503"} 1.0' in metrics
        assert 'plaid_tilemaxsim_http_requests_total{status="200"} 9.0' in metrics
        assert "plaid_tilemaxsim_waiting_queries 0.0" in metrics

    def test_a_failing_search_is_500_and_shows_in_health(self, blocked, gate, caplog):
        gate.open.set()
        assert call(blocked, "GET", "/health")[0] == 200
        for _ in range(serve.FAILING):
            status, _, answer = call(blocked, body={"query": "bad"})
            assert (status, answer) == (500, {"error": "the search failed; the server's log says why"})
        assert "a query that is bad" in caplog.text
        assert call(blocked, "GET", "/health")[::2] == (
            503, {"status": "failing", "passages": PASSAGES, "waiting": 0, "version": serve.__version__},
        )  # fmt: skip
        assert call(blocked, body={"query": "a"})[0] == 200
        assert call(blocked, "GET", "/health")[2]["status"] == "ok"

    def test_describes_itself(self, blocked):
        described = call(blocked, "GET", "/openapi.json")[2]["paths"]["/search"]["post"]
        schema = described["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert set(schema) == set(FIELDS)
        assert schema["k"]["maximum"] == SMALL.max_k
        assert {"200", "400", "413", "415", "422", "503"} <= set(described["responses"])


class TestDeferred:
    """What a server answers before its index is loaded."""

    @pytest.mark.parametrize("fails", [False, True])
    def test_503_until_it_is_loaded(self, fails):
        go = threading.Event()
        told: queue.Queue[Exception | None] = queue.Queue()
        inside: list[str] = []

        @contextlib.asynccontextmanager
        async def lifespan(app):
            inside.append("began")
            yield
            inside.append("ended")

        def load():
            assert go.wait(30)
            if fails:
                raise ValueError("no index")
            app = serve.FastAPI(lifespan=lifespan)
            app.get("/health")(lambda: "ok")
            return app

        with running(serve.Deferred(load, told.put)) as address:
            for method, path in (("GET", "/health"), ("POST", "/search"), ("GET", "/nowhere")):
                status, headers, answer = call(address, method, path, body=b"")
                assert (status, answer["status"], headers["Retry-After"]) == (503, "loading", "1")
            go.set()
            error = told.get(timeout=30)
            assert str(error) == ("no index" if fails else "None")
            assert call(address, "GET", "/health")[0] == (503 if fails else 200)
        assert inside == ([] if fails else ["began", "ended"])

    def test_a_signal_ends_it_at_once(self):
        code = "import threading, time\nfrom plaid_tilemaxsim import serve\n"
        code += "def load():\n    print('loading', flush=True)\n    time.sleep(300)\n"
        code += "serve.serve(load, '127.0.0.1', 0)\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(30) == -number
            assert process.stdout.read() == ""
            process.stdout.close()


def test_nothing_of_what_is_loaded_is_looked_through_again():
    code = "import gc\nfrom plaid_tilemaxsim import serve\n"
    code += "app = serve.FastAPI()\napp.get('/')(lambda: gc.get_freeze_count())\n"
    code += "serve.serve(lambda: app, '127.0.0.1', 0)\nprint(gc.get_freeze_count())\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert call(process.stdout.readline().strip(), "GET", "/")[2] > 10_000
    process.terminate()
    assert process.wait(30) == 0
    assert process.stdout.read() == "0\n"
    process.stdout.close()


class TestCommand:
    def test_load_meets_the_script_s_checks(self, index, checkpoint, tmp_path):  # noqa: F811
        out = tmp_path / "serve.json"
        arguments = ["--index", index, "--checkpoint", checkpoint, "--requests", 150, "--distinct", 30, "--out", out]
        bench_serve.main([str(word) for word in [*arguments, "--clients", 8]])  # exits with 1 if something is wrong
        result = json.loads(out.read_text())
        assert result["correct"]
        figures = result["figures"]
        assert figures["errors"] == 0
        assert figures["agreement"] == figures["pids_agreement"] == 1
        assert 0 < figures["serve_p50_ms"] <= figures["serve_p99_ms"]
        assert 1 < figures["serve_batch_mean_clients8"] <= 8
        assert 0 < figures["serve_wait_ms"] < figures["serve_p99_ms"]
        assert 0 < figures["serve_encode_ms"] + figures["serve_search_ms"] < figures["serve_p99_ms"]
        assert str(tmp_path) not in out.read_text()

    def test_sigterm_answers_what_was_accepted(self, index):  # noqa: F811
        """With seconds of waiting for company, all requests are in the queue when the signal comes."""
        command = [sys.executable, "-W", "ignore", "-m", "plaid_tilemaxsim", "serve", str(index), "--port", "0"]
        process = subprocess.Popen([*command, "--max-wait-ms", "3000"], stdout=subprocess.PIPE, text=True)
        at = next(line.strip() for line in process.stdout if line.startswith("http://"))
        answers = []
        clients = [
            threading.Thread(target=lambda: answers.append(call(at, body={"queries": ["bana", "dero"]})[0]))
            for _ in range(3)
        ]
        for client in clients:
            client.start()
        while call(at, "GET", "/health")[2]["waiting"] < 6:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(60)
        assert answers == [200] * 3
        assert process.wait(60) == 0
        process.stdout.close()
        with pytest.raises(ConnectionRefusedError):
            call(at, body={"query": "bana"})

    def test_says_what_is_wrong(self, index, tsv, tmp_path, capsys):  # noqa: F811
        short = tmp_path / "short.tsv"
        short.write_text("0\tone\n1\ttwo\n")
        jumbled = tmp_path / "jumbled.tsv"
        jumbled.write_text("7\tone\n")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            for arguments, message in (
                ([str(tmp_path)], "metadata.json"),
                ([str(index), "--max-k", "0"], "max_k: expected at least 1, got 0"),
                ([str(index), "--collection", str(short)], "expected the index's 300 passages, got 2"),
                ([str(index), "--collection", str(jumbled)], "expected lines of pid, tab, passage"),
                ([str(index), "--collection", "a.jsonl"], "collection: expected a .tsv file"),
                ([str(index), "--collection", str(tmp_path / "no.tsv")], "no.tsv"),
                ([str(index), "--scorer-options", '{"moed": 1}'], "scorer_options: expected names"),
                (
                    ["nowhere", "--port", port],
                    f"expected one that can be had on 127.0.0.1, got {port} (Address already",
                ),
                (
                    ["nowhere", "--host", "nowhere.invalid"],
                    "host: expected a name or an address of this machine, got nowhere",
                ),
                ([str(index), "--max-wait-ms", "inf"], "max_wait_ms: expected at most 60000, got inf"),
            ):
                assert cli.main(["serve", *arguments]) == 2
                error = capsys.readouterr().err.splitlines()[-1]
                assert error.startswith("plaid-tilemaxsim: ")
                assert message in error

    @pytest.mark.parametrize("port", ["99999", "-1", "http"])
    def test_ports(self, port, capsys):
        with pytest.raises(SystemExit):
            cli.main(["serve", "index", "--port", port])
        assert f"expected 0 .. 65535, got '{port}'" in capsys.readouterr().err

    def test_names_the_extra(self):
        code = "import sys; sys.modules['fastapi'] = None; from plaid_tilemaxsim.cli import main; main(['serve', 'x'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "fastapi is not installed here; pip install 'plaid-tilemaxsim[serve]'" in done.stderr

    def test_help_names_the_limits(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["serve", "--help"])
        out = capsys.readouterr().out
        for name in vars(Limits()):
            assert f"--{name.replace('_', '-')} N" in out
