"""Effectiveness by ir_measures: per-query values of a run, their means, and paired differences of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEASURES = ("nDCG@10", "RR@10", "R@100", "R@1000")

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]


def measure(qrels: Qrels, run: Run, measures: Sequence[str] = MEASURES) -> dict[str, dict[str, float]]:
    """Measure name -> judged query id -> value.

    `qrels`: query id -> document id -> relevance (an unjudged document counts as 0); `run`: query id -> document id
    -> score, where trec_eval's order applies (score descending, equal scores by document id descending).
    Every query of `qrels` is in the result: one that the run lacks has value 0. Queries without judgments are left
    out. Raises ValueError for a measure that ir_measures does not know and for empty qrels.
    """
    import ir_measures

    if not qrels:
        raise ValueError("qrels: expected at least one judged query, got none")
    parsed = {}
    for name in measures:
        try:
            parsed[ir_measures.parse_measure(name)] = name
        except (NameError, ValueError, SyntaxError) as error:
            raise ValueError(f"measures: expected names such as {', '.join(MEASURES)}, got {name!r}") from error
    values: dict[str, dict[str, float]] = {name: dict.fromkeys(qrels, 0.0) for name in measures}
    judged_run = {qid: dict(docs) for qid, docs in run.items() if qid in qrels and docs}
    plain_qrels = {qid: dict(docs) for qid, docs in qrels.items()}
    for metric in ir_measures.iter_calc(list(parsed), plain_qrels, judged_run):
        values[parsed[metric.measure]][metric.query_id] = float(metric.value)
    return values


def means(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over all judged queries, by measure."""
    return {name: sum(by_query.values()) / len(by_query) for name, by_query in values.items()}


def paired(base: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any]:
    """Per-query comparison of one measure: other - base over the same queries.

    Returns mean, how many queries are `better`, `worse`, `equal` for `other`, the two-sided p-value of a paired t
    test (None when no query differs or there is only one), and `differences` (query id -> difference, unequal ones
    only). Raises ValueError if the two cover different queries.
    """
    if base.keys() != other.keys():
        raise ValueError(f"paired: expected the same queries, got {len(base)} and {len(other)} that differ")
    differences = {qid: other[qid] - base[qid] for qid in base}
    unequal = {qid: d for qid, d in differences.items() if d != 0.0}
    p_value = None
    if unequal and len(base) > 1:
        from scipy.stats import ttest_rel

        p = float(ttest_rel([other[qid] for qid in base], [base[qid] for qid in base]).pvalue)
        p_value = p if p == p else None  # nan when all queries differ by the same amount
    return {
        "mean": sum(differences.values()) / len(differences),
        "better": sum(d > 0 for d in unequal.values()),
        "worse": sum(d < 0 for d in unequal.values()),
        "equal": len(base) - len(unequal),
        "p_value": p_value,
        "differences": unequal,
    }
