"""Runs: what is written is what was ranked, in TREC's form, and reads back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eval.retrieve import Scored, read_run, retrieve, write_run

RESULTS = [([7, 3, 5], [2.5, 2.0, 1 / 3]), ([], []), ([2, 7], [9.0, float("-inf")])]
CANDIDATES = [[3, 5, 7], [], [2, 7, 8]]
IDS = [f"d{i}" for i in range(10)]
QUERIES = ["q1", "q2", "q3"]


@pytest.fixture
def scored() -> Scored:
    return Scored.from_lists(RESULTS, CANDIDATES)


def test_ragged_lists_come_back(scored, tmp_path):
    scored.save(tmp_path / "scored.npz")
    again = Scored.load(tmp_path / "scored.npz")
    assert len(again) == 3
    for i, (pids, scores) in enumerate(RESULTS):
        assert again.query(i)[0].tolist() == pids
        assert again.query(i)[1].tolist() == np.array(scores, np.float32).tolist()
        assert again.candidates_of(i).tolist() == CANDIDATES[i]


def test_no_query():
    assert len(Scored.from_lists([], [])) == 0


def test_run_reads_back_to_float32(scored, tmp_path):
    write_run(tmp_path / "run.trec", scored, QUERIES, IDS, k=10, tag="a system")
    run = read_run(tmp_path / "run.trec")
    assert list(run) == ["q1", "q3"]
    assert {d: np.float32(s) for d, s in run["q1"].items()} == {"d7": 2.5, "d3": 2.0, "d5": np.float32(1 / 3)}
    first = (tmp_path / "run.trec").read_text().splitlines()[0].split()
    assert first == ["q1", "Q0", "d7", "1", "2.5", "a_system"]


def test_the_querys_own_passage_is_left_out_before_the_cut(scored, tmp_path):
    write_run(tmp_path / "run.trec", scored, QUERIES, IDS, k=2, tag="x", left_out=[7, None, 4])
    run = read_run(tmp_path / "run.trec")
    assert list(run["q1"]) == ["d3", "d5"]
    assert list(run["q3"]) == ["d2", "d7"]


def test_what_the_form_cannot_hold_is_refused(scored, tmp_path):
    with pytest.raises(ValueError, match="expected ids without white space"):
        write_run(tmp_path / "run.trec", scored, QUERIES, [f"d {i}" for i in range(10)], k=2, tag="x")
    with pytest.raises(ValueError, match="query_ids: expected 3 of them, got 2"):
        write_run(tmp_path / "run.trec", scored, QUERIES[:2], IDS, k=2, tag="x")
    (tmp_path / "bad").write_text("q1 Q0 d1 1 2.0 x\nq1 d2\n")
    with pytest.raises(ValueError, match="bad:2: expected 6 words, got 2"):
        read_run(tmp_path / "bad")


class Fake:
    name = "fake"

    def __init__(self, follows_plaid: bool = True) -> None:
        self.follows_plaid = follows_plaid

    def search(self, Q):
        return tuple(values[:2] for values in self.rank(Q))

    def rank(self, Q):
        i = int(Q[0, 0, 0])
        return RESULTS[i]

    def candidates(self, Q):
        return torch.tensor(CANDIDATES[int(Q[0, 0, 0])], dtype=torch.int32)


def test_retrieve_asks_every_query_in_order(scored):
    Q = torch.arange(3.0)[:, None, None].expand(3, 4, 2)
    got, timings = retrieve(Fake(), Q)  # type: ignore[arg-type]
    for name, array in vars(scored).items():
        assert np.array_equal(getattr(got, name), array), name
    assert 0 < timings["first_query_ms"] / 1e3 <= timings["seconds"]


def test_candidates_are_kept_of_judged_queries_only():
    Q = torch.arange(3.0)[:, None, None].expand(3, 4, 2)
    got, _ = retrieve(Fake(), Q, judged=1)  # type: ignore[arg-type]
    assert [len(got.candidates_of(i)) for i in range(3)] == [3, 0, 0]


def test_a_system_that_scores_everything_gives_its_best():
    Q = torch.arange(3.0)[:, None, None].expand(3, 4, 2)
    got, _ = retrieve(Fake(follows_plaid=False), Q)  # type: ignore[arg-type]
    assert got.query(0)[0].tolist() == [7, 3]
    assert len(got.candidates) == 0
