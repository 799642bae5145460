"""The pipeline: an experiment to one results.json and one report.html, resumable stage by stage.

    OUT/2bit/load/             result.json: load time, memory, size, first query of each system
    OUT/2bit/k10/plaid/        run.trec, scored.npz
    OUT/2bit/k10/measure/      result.json, and so compare/ and latency/
    OUT/experiment.json, results.json, report.html, report.md

Each stage folder has a manifest (inputs, environment) and appears whole. A stage whose inputs are what they were is
not run again. Indexes, passages and queries encoded are kept in the cache (eval.cache.cache_root).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.pq import find_pq, write_pq

from . import markdown, report
from .cache import read_json, sha256_json, write_json
from .checkpoint import RECIPES, checkpoint_identity, make_checkpoint
from .compare import Side, compare
from .datasets import Dataset, load_dataset
from .experiment import Experiment
from .indexing import Embeddings, EncodedQueries, build_index, encode_passages, encode_queries
from .latency import measure_latency, measure_throughput, summary
from .manifest import PACKAGES, environment, is_complete, machine, source_digest, stage, versions
from .measure import means, measure, paired
from .oracle import Oracle
from .retrieve import Scored, read_run, retrieve, write_run
from .systems import Knobs, NotRun, Opened, open_systems, parse_system, unavailable

# Metrics that differ by less than this agree to four decimals.
METRIC_TOLERANCE = 5e-5
STAGES = ("build", "retrieve", "measure", "compare", "latency")


@dataclass
class Context:
    """What all stages of one experiment share; the costly parts are made when a stage first needs them."""

    experiment: Experiment
    out: Path
    data: str | None
    cache: str | None
    progress: bool

    def say(self, text: str) -> None:
        if self.progress:
            print(text, file=sys.stderr, flush=True)

    @cached_property
    def dataset(self) -> Dataset:
        e = self.experiment
        dataset = load_dataset(e.dataset, split=e.split, data=self.data, cache=self.cache, progress=self.progress)
        return dataset if e.queries is None else dataset.first_queries(e.queries)

    @cached_property
    def checkpoint(self) -> str:
        name = self.experiment.checkpoint
        if name not in RECIPES:
            return name
        return str(make_checkpoint(name, cache=self.cache, progress=self.progress))

    @cached_property
    def encoded(self) -> EncodedQueries:
        return encode_queries(
            self.checkpoint,
            self.dataset,
            query_maxlen=self.experiment.query_maxlen,
            cache=self.cache,
            progress=self.progress,
        )

    @cached_property
    def not_run(self) -> dict[str, NotRun]:
        """Systems that cannot run here, as far as that is known without loading them."""
        reasons = {name: unavailable(name, self.cache) for name in self.experiment.systems}
        return {name: why for name, why in reasons.items() if why is not None}

    @cached_property
    def available(self) -> list[str]:
        return [name for name in self.experiment.systems if name not in self.not_run]

    @property
    def Q(self) -> Tensor:
        return self.encoded.Q

    @cached_property
    def versions(self) -> dict[str, str]:
        return versions(*PACKAGES)


class IndexRun:
    """The stages over one index. Systems and the oracle are loaded when a stage first needs them."""

    def __init__(self, context: Context, nbits: int) -> None:
        self.context, self.nbits = context, nbits
        self.folder = context.out / f"{nbits}bit"
        e = context.experiment
        self.path = build_index(
            context.checkpoint,
            context.dataset,
            nbits=nbits,
            doc_maxlen=e.doc_maxlen,
            kmeans_niters=e.kmeans_niters,
            cache=context.cache,
            progress=context.progress,
        )
        self.index: PlaidIndex = read_index(self.path, verify="structure")
        asked = [options for kind, options in map(parse_system, e.systems) if kind == "tilemaxsim"]
        for m in sorted({options["pq_m"] for options in asked if options.get("codec") == "pq"}):
            if m not in find_pq(self.path):
                write_pq(self.index, m, progress=context.progress)
        self.identity = {
            "digest": self.index.digest(),
            "queries": context.dataset.queries_digest,
            "checkpoint": checkpoint_identity(context.checkpoint),
            "query_maxlen": e.query_maxlen,
            "versions": context.versions,
        }

    @cached_property
    def opened(self) -> Opened:
        names = self.context.available
        self.context.say(f"{self.label}: loading {', '.join(names)} (stock compiles extensions its first time)")
        return open_systems(names, self.path, embeddings=self.embeddings, nbits=self.nbits, cache=self.context.cache)

    def embeddings(self) -> Embeddings:
        e = self.context.experiment
        return encode_passages(
            self.context.checkpoint, self.context.dataset, doc_maxlen=e.doc_maxlen, cache=self.context.cache,
            progress=self.context.progress,
        )  # fmt: skip

    @cached_property
    def costs(self) -> dict[str, Any]:
        """What loading each system took, and which could not be loaded: {"costs": ..., "not_run": ...}."""
        inputs = {
            **self.identity,
            "systems": self.context.available,
            "machine": machine(),
            "code": source_digest("eval/systems", "plaid_tilemaxsim"),
        }

        def make() -> dict[str, Any]:
            return {"costs": self.opened.costs, "not_run": told(self.opened.not_run)}

        result = self.stage_json(self.folder / "load", inputs, make)
        base = self.context.experiment.systems[0]
        if base not in result["costs"]:
            why = {**told(self.context.not_run), **result["not_run"]}[base]
            raise ValueError(f"{base}: expected the first system, with which others are compared, to run; {why}")
        return result

    @cached_property
    def names(self) -> list[str]:
        """The systems that run, in the experiment's order."""
        return [name for name in self.context.experiment.systems if name in self.costs["costs"]]

    @cached_property
    def oracle(self) -> Oracle:
        self.context.say(f"{self.label}: decompressing the index for the oracle")
        return Oracle(self.index, device="cuda" if torch.cuda.is_available() else "cpu")

    @property
    def label(self) -> str:
        return f"{self.context.dataset.name}, {self.nbits} bit"

    def bar(self, knobs: Knobs, what: str) -> str:
        return f"{self.label}, k={knobs.k}: {what}" if self.context.progress else ""

    def run(self, stages: Collection[str]) -> dict[str, Any]:
        """The named stages over this index: its part of the results, whole when all are named."""
        result = {
            "nbits": self.nbits,
            "path": str(self.path),
            "digest": self.identity["digest"],
            "passages": self.index.num_passages,
            "tokens": self.index.num_tokens,
            "centroids": self.index.num_centroids,
            "dim": self.index.dim,
            "bytes": self.index.nbytes,
        }
        if set(stages) != {"build"}:
            result |= {
                "systems": self.names,
                **self.costs,
                "search": [self.run_knobs(knobs, stages) for knobs in self.context.experiment.search],
            }
        if "opened" in self.__dict__:
            self.opened.close()
        return result

    def run_knobs(self, knobs: Knobs, stages: Collection[str]) -> dict[str, Any]:
        folder = self.folder / f"k{knobs.k}"
        result: dict[str, Any] = {"knobs": knobs.to_dict()}
        if {"retrieve", "measure", "compare"} & set(stages):
            folders = {name: folder / name.replace(":", "_") for name in self.names}
            keys = {name: self.retrieve(folders[name], name, knobs) for name in self.names}
            if "measure" in stages:
                result |= self.measure(folder / "measure", folders, keys)
            if "compare" in stages:
                others = self.names[1:]
                compared = self.compare(folder / "compare", folders, keys, knobs) if others else {}
                result |= {"compare": compared.get("compare", {}), "exhaustive": compared.get("exhaustive")}
        if "latency" in stages:
            timed = self.context.experiment.latency.queries != 0
            result["latency"] = self.latency(folder / "latency", knobs) if timed else None
        return result

    def retrieve(self, folder: Path, name: str, knobs: Knobs) -> dict[str, Any]:
        """The run of one system; returns the inputs that identify it."""
        e, dataset = self.context.experiment, self.context.dataset
        code = ["eval/retrieve.py", "eval/systems"]
        inputs = {
            **self.identity,
            "system": name,
            "cost": self.costs["costs"][name].get("version"),
            "knobs": knobs.to_dict(),
            "judged": e.compare.queries,
            "threads": e.threads,
            "gpus": machine()["gpus"],
            "passages": dataset.passages_digest,
            "own": dataset.removes_own,
            "code": source_digest(*code, *(["plaid_tilemaxsim"] if name != "plaid" else [])),
        }
        if not is_complete(folder, inputs):
            system = next(s for s in self.opened.systems if s.name == name)
            # One more than k, in case the query's own passage is among them.
            system.use(knobs if system.follows_plaid else replace(knobs, k=knobs.k + 1))
            with stage(folder, inputs) as temporary:
                scored, timings = retrieve(
                    system, self.context.Q, judged=e.compare.queries, progress=self.bar(knobs, name)
                )
                scored.save(temporary / "scored.npz")
                own = [dataset.own_passage(query_id) for query_id in dataset.query_ids]
                write_run(temporary / "run.trec", scored, dataset.query_ids, dataset.passage_ids,
                          k=knobs.k, tag=name, left_out=own)  # fmt: skip
                write_json(temporary / "timings.json", timings)
        return inputs

    def measure(self, folder: Path, folders: dict[str, Path], keys: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Means, paired tests against the first system, and the first measure query by query."""
        e, dataset = self.context.experiment, self.context.dataset
        inputs = {
            "runs": {name: sha256_json(key) for name, key in keys.items()},
            "measures": e.measures,
            "qrels": dataset.qrels_digest,
            "versions": self.context.versions,
            "code": source_digest("eval/measure.py"),
        }

        def make() -> dict[str, Any]:
            values = {
                name: measure(dataset.qrels, read_run(path / "run.trec"), e.measures) for name, path in folders.items()
            }
            base, first = self.names[0], e.measures[0]
            return {
                "metrics": {name: means(by_measure) for name, by_measure in values.items()},
                "paired": {
                    name: {m: paired(values[base][m], values[name][m]) for m in e.measures} for name in self.names[1:]
                },
                "per_query": {
                    "measure": first,
                    "values": {name: [round(v, 6) for v in by[first].values()] for name, by in values.items()},
                },
            }

        return self.stage_json(folder, inputs, make)

    def compare(
        self, folder: Path, folders: dict[str, Path], keys: dict[str, dict[str, Any]], knobs: Knobs
    ) -> dict[str, Any]:
        """The others against the first system, judged by the oracle."""
        e = self.context.experiment
        inputs = {
            "runs": {name: sha256_json(key) for name, key in keys.items()},
            "queries": e.compare.queries,
            "exhaustive": e.compare.exhaustive,
            "code": source_digest("eval/compare.py", "eval/oracle.py", "plaid_tilemaxsim/ops/reference.py"),
        }

        def make() -> dict[str, Any]:
            scored = {name: Scored.load(path / "scored.npz") for name, path in folders.items()}
            by_name = {system.name: system for system in self.opened.systems}
            sides = [
                Side(name, scored[name], by_name[name].tolerance, by_name[name].clamps, by_name[name].follows_plaid)
                for name in self.names
            ]
            Q = self.context.Q[: e.compare.queries]
            result: dict[str, Any] = {"compare": {}, "exhaustive": None}
            for other in sides[1:]:
                result["compare"][other.name] = compare(
                    sides[0], other, self.oracle, Q, knobs, self.context.dataset.query_ids,
                    query_maxlen=e.query_maxlen, progress=self.bar(knobs, f"{other.name} against {sides[0].name}"),
                )  # fmt: skip
            if e.compare.exhaustive:
                result["exhaustive"] = self.exhaustive(sides, Q, knobs)
            return result

        return self.stage_json(folder, inputs, make)

    def exhaustive(self, sides: list[Side], Q: Tensor, knobs: Knobs) -> dict[str, Any]:
        """Of the collection's k best, by exact scores of all passages: the share that each system returned (`recall`),
        and that was among its candidates before pruning (`candidates`, where a system tells them)."""
        from tqdm import tqdm

        found: dict[str, list[float]] = {side.name: [] for side in sides}
        probed: dict[str, list[float]] = {}
        label = self.bar(knobs, "oracle over all passages")
        for i in tqdm(range(len(Q)), desc=label, unit=" queries", disable=not label):
            best = self.oracle.topk(Q[i], knobs.k)[0].numpy()
            for side in sides:
                pids = side.scored.query(i)[0][: knobs.k]
                found[side.name].append(float(np.isin(best, pids).mean()))
                if side.follows_plaid:
                    probed.setdefault(side.name, []).append(float(np.isin(best, side.scored.candidates_of(i)).mean()))
        return {
            "queries": len(Q),
            "recall": {name: float(np.mean(shares)) for name, shares in found.items()},
            "candidates": {name: float(np.mean(shares)) for name, shares in probed.items()},
        }

    def latency(self, folder: Path, knobs: Knobs) -> dict[str, Any]:
        e = self.context.experiment
        timing = e.latency
        inputs = {
            **self.identity,
            "systems": self.names,
            "knobs": knobs.to_dict(),
            "timing": asdict(timing),
            "machine": machine(),
            "code": source_digest("eval/latency.py", "eval/systems", "plaid_tilemaxsim"),
        }

        def make() -> dict[str, Any]:
            systems = self.opened.systems
            Q = self.context.Q[: timing.queries]
            return {
                "threads": torch.get_num_threads(),
                "device": systems[0].device.type,
                "systems": measure_latency(
                    systems, Q, knobs, warmup=timing.warmup, repeats=timing.repeats,
                    progress=self.bar(knobs, "latency"),
                ),
                "throughput": measure_throughput(
                    systems, Q, knobs, timing.batches, progress=self.bar(knobs, "throughput")
                ),
            }  # fmt: skip

        return self.stage_json(folder, inputs, make)

    def stage_json(self, folder: Path, inputs: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """result.json of a stage, made by `make` unless it is there already."""
        if not is_complete(folder, inputs):
            with stage(folder, inputs) as temporary:
                write_json(temporary / "result.json", make())
        result: dict[str, Any] = read_json(folder / "result.json")
        return result


def told(not_run: Mapping[str, NotRun]) -> dict[str, dict[str, str]]:
    """Why systems did not run, as JSON."""
    return {name: {"reason": why.reason, "remedy": why.remedy} for name, why in not_run.items()}


def run(
    experiment: Experiment,
    out: Path,
    *,
    stages: Collection[str] = STAGES,
    data: str | None = None,
    cache: str | None = None,
    kernels: Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Run an experiment, or some of its STAGES and what they need, into the folder `out`; returns the results.

    With all stages these are what results.json holds, and report.html and report.md are written beside it.
    data: folder of collections that may be named barely. cache: see eval.cache.cache_root. kernels: a result of
    scripts/bench_kernels.py whose roofline goes into the report.
    Raises ValueError for what the experiment asks and cannot get, naming it.
    """
    if unknown := [name for name in stages if name not in STAGES]:
        raise ValueError(f"stages: expected some of {', '.join(STAGES)}, got {unknown[0]!r}")
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    context = Context(experiment, out, data, cache, progress)
    write_json(out / "experiment.json", experiment.to_dict())
    for name, why in context.not_run.items():
        context.say(f"{name}: not run: {why}")
    indexes = [IndexRun(context, nbits).run(stages) for nbits in experiment.nbits]
    results: dict[str, Any] = {
        "experiment": experiment.to_dict(),
        "environment": environment(),
        "dataset": context.dataset.identity(),
        "checkpoint": checkpoint_identity(context.checkpoint),
        "indexes": indexes,
    }
    if set(stages) != set(STAGES):
        return results
    results["encode"] = {**summary(context.encoded.milliseconds), "shape": list(context.Q.shape)}
    not_run = told(context.not_run)
    for index in indexes:
        not_run |= index["not_run"]
    results["not_run"] = not_run
    results["verdict"] = verdict(results)
    results["figures"] = figures(results)
    if kernels is not None:
        results["kernels"] = read_json(kernels)
    write_json(out / "results.json", results)
    report.write(results, out / "report.html")
    markdown.write(results, out / "report.md")
    return results


def verdict(results: dict[str, Any]) -> dict[str, Any]:
    """Whether each system that follows PLAID gave stock's results: the checks, and `same` if all passed.

    `same` is None when nothing was compared.
    """
    checks = []
    for index in results["indexes"]:
        for search in index["search"]:
            for name, compared in search["compare"].items():
                if not compared["comparable"]:
                    continue
                differing = [m for m, d in search["paired"][name].items() if abs(d["mean"]) >= METRIC_TOLERANCE]
                checks.append(
                    {
                        "system": name,
                        "nbits": index["nbits"],
                        "k": search["knobs"]["k"],
                        "same_results": compared["same"],
                        "metrics_equal": not differing,
                        "metrics_differing": differing,
                    }
                )
    passed = [check["same_results"] and check["metrics_equal"] for check in checks]
    return {"same": all(passed) if checks else None, "passed": sum(passed), "of": len(checks), "checks": checks}


def figures(results: dict[str, Any]) -> dict[str, float]:
    """The numbers that others quote, flat: latency medians, ratios to the first system, errors, metrics."""
    flat: dict[str, float] = {"encode_p50_ms": results["encode"]["p50"]}
    base = results["experiment"]["systems"][0]
    for index in results["indexes"]:
        for search in index["search"]:
            suffix = f"k{search['knobs']['k']}_{index['nbits']}bit"
            for name, by_measure in search["metrics"].items():
                for measure_name, value in by_measure.items():
                    flat[f"{name}_{measure_name}_{suffix}"] = value
            if search["latency"] is not None:
                p50 = {name: timed["search"]["p50"] for name, timed in search["latency"]["systems"].items()}
                for name, value in p50.items():
                    flat[f"{name}_p50_ms_{suffix}"] = value
                    if name != base:
                        flat[f"{name}_over_{base}_p50_{suffix}"] = value / p50[base]
            for name, compared in search["compare"].items():
                flat[f"{name}_max_error_{suffix}"] = compared["errors"][name]["max"]
                flat[f"{name}_mean_error_{suffix}"] = compared["errors"][name]["mean"]
    return flat
