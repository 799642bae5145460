"""Measures: known values, missing queries, paired differences."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("ir_measures")

from eval.measure import means, measure, paired

QRELS = {"a": {"d1": 1}, "b": {"d2": 2, "d3": 1}, "c": {"d4": 1}}


def test_values_by_hand():
    run = {"a": {"d9": 3.0, "d1": 2.0}, "b": {"d2": 1.0, "d9": 0.5, "d3": 0.25}, "c": {"d4": 1.0}}
    values = measure(QRELS, run, ["RR@10", "nDCG@10", "R@100"])
    assert values["RR@10"] == {"a": 0.5, "b": 1.0, "c": 1.0}
    ideal = 2 + 1 / math.log2(3)
    assert values["nDCG@10"]["b"] == pytest.approx((2 + 1 / math.log2(4)) / ideal)
    assert values["R@100"] == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_a_judged_query_without_results_counts_as_zero():
    values = measure(QRELS, {"a": {"d1": 1.0}, "b": {}}, ["nDCG@10", "R@100"])
    assert values["nDCG@10"] == {"a": 1.0, "b": 0.0, "c": 0.0}
    assert means(values)["nDCG@10"] == pytest.approx(1 / 3)


def test_an_unjudged_query_is_left_out():
    assert set(measure(QRELS, {"z": {"d1": 1.0}}, ["R@100"])["R@100"]) == set(QRELS)


@pytest.mark.parametrize("name", ["NDGC@10", "R@", ""])
def test_unknown_measure_is_named(name):
    with pytest.raises(ValueError, match="measures: expected names such as nDCG@10"):
        measure(QRELS, {}, [name])


def test_empty_qrels_are_refused():
    with pytest.raises(ValueError, match="qrels: expected at least one judged query"):
        measure({}, {})


def test_paired_counts_and_test():
    change = paired({"a": 0.5, "b": 1.0, "c": 0.25, "d": 0.0}, {"a": 0.75, "b": 1.0, "c": 0.0, "d": 0.5})
    assert (change["better"], change["worse"], change["equal"]) == (2, 1, 1)
    assert change["mean"] == pytest.approx(0.125)
    assert change["differences"] == {"a": 0.25, "c": -0.25, "d": 0.5}
    assert 0 < change["p_value"] < 1


def test_paired_without_difference_has_no_p_value():
    assert paired({"a": 0.5, "b": 1.0}, {"a": 0.5, "b": 1.0})["p_value"] is None


def test_paired_wants_the_same_queries():
    with pytest.raises(ValueError, match="expected the same queries"):
        paired({"a": 1.0}, {"b": 1.0})
