"""Rows -> figures -> the result file: what the issue's targets are called, and how runs add up in one JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from eval.cache import read_json, write_json

from .bench import OURS
from .compressed import LISTED, LISTS, MS, QUERIES
from .dense import DIMS, FULL_FP32
from .peers import NOT_RUN, PAPER

Row = dict[str, Any]
# Largest error of an fp32 score that counts as full precision.
FP32_ERROR = 1e-5


def key(row: Row) -> tuple[str, str, str]:
    return row["group"], row["name"], row["kernel"]


def figures(rows: Iterable[Row]) -> dict[str, float]:
    """The flat map of the results; a figure whose rows are missing, wrong or failed is absent."""
    timed = {key(row): row for row in rows if "ms" in row}
    found: dict[str, float] = {}

    def put(name: str, make: Callable[..., float], *args: Any) -> None:
        try:
            found[name] = make(*args)
        except (KeyError, ValueError):  # a row that was not timed; min and max of none
            return

    def ours(group: str, name: str, kernel: str = OURS) -> Row:
        return timed[group, name, kernel]

    def of(field: str, group: str, *names: str) -> float:
        """The least among our rows."""
        return min(ours(group, name)[field] for name in names)

    def over_best_peer(group: str, *names: str) -> float:
        """Least of our rates over the fastest peer's that keeps values as given: int8 and fp8 peers read half."""
        ratios = []
        for name in names:
            beside = [row for row in timed.values() if (row["group"], row["name"]) == (group, name)]
            rates = [row["mdocs_s"] for row in beside if not row["ours"] and row.get("bytes", 2) == 2]
            ratios.append(ours(group, name)["mdocs_s"] / max(rates))
        return min(ratios)

    def over_paper() -> float:
        rates = [row["mdocs_s"] for at, row in timed.items() if at[:2] == ("dense", "d128 fp16") and PAPER in at[2]]
        return ours("dense", "d128 fp16")["mdocs_s"] / max(rates)

    def full_fp32(field: str) -> float:
        each = [timed.get(("dense", "fp32", f"{OURS}, {precision}")) for precision in FULL_FP32]
        right = [row for row in each if row is not None and row["max_error"] <= FP32_ERROR]
        return min(right, key=lambda row: row["ms"])[field]

    def speedup(group: str, one: str, several: str) -> float:
        return QUERIES * ours(group, one)["ms"] / ours(group, several)["ms"]

    put("read_gb_s", lambda: max(row["read_gb_s"] for row in timed.values()))
    put("dense_fp16_pct", of, "pct_of_read", "dense", "d128 fp16")
    put("dense_fp16_mdocs", of, "mdocs_s", "dense", "d128 fp16")
    put("dense_over_best_peer", over_best_peer, "dense", "d128 fp16")
    put("dense_over_paper", over_paper)
    cases = {"packed": ["packed"], "10k": ["10k"], "bf16": [f"d{DIM} bf16" for DIM in (128, *DIMS)]}
    cases |= {f"d{DIM}": [f"d{DIM} fp16", f"d{DIM} bf16"] for DIM in DIMS}
    for case, names in cases.items():
        put(f"dense_{case}_pct", of, "pct_of_read", "dense", *names)
        put(f"dense_{case}_over_best_peer", over_best_peer, "dense", *names)
    put("dense_fp32_pct", full_fp32, "pct_of_read")
    put("dense_fp32_max_err", full_fp32, "max_error")
    put("dense_tf32_pct", lambda: ours("dense", "fp32", f"{OURS}, tf32")["pct_of_read"])
    put("dense_tf32_max_err", lambda: ours("dense", "fp32", f"{OURS}, tf32")["max_error"])
    for nbits in (1, 2, 4):
        put(f"residual{nbits}_gtok", of, "gtok_s", "residual", f"{nbits} bits")
    put("residual2_over_best_peer", over_best_peer, "residual", "2 bits")
    put("residual2_q8_speedup", speedup, "residual", "2 bits, from the query", f"2 bits, {QUERIES} queries")
    for n in LISTED:
        put(f"residual_fp32_us_{n}", lambda n=n: 1e3 / LISTS * ours("residual", f"fp32, {n} passages")["ms"])
    put("centroid_gtok", of, "gtok_s", "centroid", "every token")
    put("centroid_thresholded_gtok", of, "gtok_s", "centroid", "thresholded")
    put("centroid_kept_gtok", of, "gtok_s", "centroid", "few kept")
    put("centroid_kept_every_row_gtok", lambda: ours("centroid", "few kept", f"{OURS}, every row")["gtok_s"])
    put("centroid_over_best_peer", over_best_peer, "centroid", "every token")
    put("centroid_scores_ms", of, "ms", "centroid", "scores")
    for M in MS:
        put(f"pq{M}_mdocs", of, "mdocs_s", "pq", f"m{M}")
    put("pq16_q8_speedup", speedup, "pq", "m16", f"m16, {QUERIES} queries")
    put("exhaustive_ms", of, "ms", "exhaustive", "search")
    put("exhaustive_kernel_ms", of, "ms", "exhaustive", "kernel")
    return found


def problems(rows: Iterable[Row]) -> list[str]:
    """Our kernels that did not match the oracle."""
    wrong = (row for row in rows if row["ours"] and row.get("correct") is False)
    return [f"{'/'.join(key(row)[:2])}: {row['failed']} (error {row['max_error']:.1e})" for row in wrong]


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """New rows in the place of old ones of the same group, name and kernel."""
    replaced = {key(row) for row in new}
    return [row for row in old if key(row) not in replaced] + new


def of_best_read(rows: list[Row]) -> list[Row]:
    """Rows with floor and share of the highest read bandwidth that any of their runs measured: it varies by 2%."""
    best = max((row["read_gb_s"] for row in rows if "ms" in row), default=0.0)

    def renewed(row: Row) -> Row:
        floor = row["nbytes"] / best / 1e6
        return row | {"floor_ms": floor, "pct_of_read": 100 * floor / row["ms"]}

    return [renewed(row) if "ms" in row else row for row in rows]


class Record:
    """The result file of a run. ``merge``: on top of what the file holds."""

    def __init__(self, path: Path | None, merge: bool, environment: dict[str, Any]) -> None:
        self.path = path
        self.environment = environment
        self.old: dict[str, Any] = read_json(path) if merge and path is not None and path.exists() else {}
        self.result: dict[str, Any] = {}

    def write(self, rows: list[Row], read: dict[str, Any], groups: Iterable[str], gpu: str) -> dict[str, Any]:
        """``rows`` of this run so far, ``groups`` those it has begun."""
        every = of_best_read(merged(self.old.get("rows", []) + self.old.get("sweeps", []), rows))
        sweeps = [row for row in every if row["group"].startswith("sweep")]
        main = [row for row in every if not row["group"].startswith("sweep")]
        here = {name: self.environment[name] for name in ("commit", "command", "time")}
        here["read_gb_s"] = read["gb_s"]
        wrong = problems(every)
        self.result = {
            "correct": not wrong,
            "problems": wrong,
            "figures": figures(main),
            "gpu": gpu,
            "read": read,
            # a run that merged keeps what each group was measured with
            "runs": {**self.old.get("runs", {}), **dict.fromkeys(groups, here)},
            "not_run": NOT_RUN,
            **self.environment,
            "rows": main,
            "sweeps": sweeps,
        }
        if self.path is not None:
            write_json(self.path, self.result)
        return self.result
