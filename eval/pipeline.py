"""The pipeline: an experiment to one results.json and one report.html, resumable stage by stage.

    OUT/2bit/k10/plaid/        run.trec, scored.npz
    OUT/2bit/k10/compare/      result.json
    OUT/2bit/k10/latency/      result.json
    OUT/experiment.json, results.json, report.html

Each stage folder has a manifest (inputs, environment) and appears whole. A stage whose inputs are what they were is
not run again. Indexes, passages and queries encoded are kept in the cache (eval.cache.cache_root).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval import report
from eval.cache import read_json, sha256_json, write_json
from eval.checkpoint import RECIPES, checkpoint_identity, make_checkpoint
from eval.compare import Side, compare
from eval.datasets import Dataset, load_dataset
from eval.experiment import Experiment
from eval.indexing import EncodedQueries, build_index, encode_queries
from eval.latency import measure_latency, summary
from eval.manifest import PACKAGES, environment, is_complete, machine, source_digest, stage, versions
from eval.measure import means, measure, paired
from eval.oracle import Oracle
from eval.retrieve import Scored, read_run, retrieve, write_run
from eval.systems import Knobs, Session, System, open_systems
from plaid_tilemaxsim.index.files import PlaidIndex, read_index

# Metrics that differ by less than this agree to four decimals.
METRIC_TOLERANCE = 5e-5


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
        self.identity = {
            "digest": self.index.digest(),
            "queries": context.dataset.queries_digest,
            "checkpoint": checkpoint_identity(context.checkpoint),
            "query_maxlen": e.query_maxlen,
            "versions": context.versions,
        }
        self._session: Session | None = None
        self.load_seconds: dict[str, float] = {}

    @cached_property
    def systems(self) -> list[System]:
        names = self.context.experiment.systems
        self.context.say(f"{self.label}: loading {' and '.join(names)} (stock compiles extensions its first time)")
        self._session, systems, self.load_seconds = open_systems(names, self.path)
        return systems

    @cached_property
    def oracle(self) -> Oracle:
        self.context.say(f"{self.label}: decompressing the index for the oracle")
        return Oracle(self.index, device="cuda" if torch.cuda.is_available() else "cpu")

    @property
    def label(self) -> str:
        return f"{self.context.dataset.name}, {self.nbits} bit"

    def bar(self, knobs: Knobs, what: str) -> str:
        return f"{self.label}, k={knobs.k}: {what}" if self.context.progress else ""

    def run(self) -> dict[str, Any]:
        """All stages over this index: its part of the results."""
        result = {
            "nbits": self.nbits,
            "path": str(self.path),
            "digest": self.identity["digest"],
            "passages": self.index.num_passages,
            "tokens": self.index.num_tokens,
            "centroids": self.index.num_centroids,
            "dim": self.index.dim,
            "bytes": self.index.nbytes,
            "search": [self.run_knobs(knobs) for knobs in self.context.experiment.search],
        }
        if self._session is not None:
            self._session.close()
        return result

    def run_knobs(self, knobs: Knobs) -> dict[str, Any]:
        e, dataset = self.context.experiment, self.context.dataset
        folder = self.context.out / f"{self.nbits}bit" / f"k{knobs.k}"
        folders = {name: folder / name.replace(":", "_") for name in e.systems}
        keys = {name: self.retrieve(folders[name], name, knobs) for name in e.systems}
        values = {
            name: measure(dataset.qrels, read_run(path / "run.trec"), e.measures) for name, path in folders.items()
        }
        base = e.systems[0]
        others = e.systems[1:]
        comparisons = self.compare(folder / "compare", folders, keys, knobs) if others else {}
        timed = e.latency.queries != 0
        latency = self.latency(folder / "latency", knobs) if timed else None
        return {
            "knobs": knobs.to_dict(),
            "metrics": {name: means(by_measure) for name, by_measure in values.items()},
            "paired": {name: {m: paired(values[base][m], values[name][m]) for m in e.measures} for name in others},
            "per_query": {
                "measure": e.measures[0],
                "values": {name: [round(v, 6) for v in by[e.measures[0]].values()] for name, by in values.items()},
            },
            "compare": comparisons.get("compare", {}),
            "exhaustive": comparisons.get("exhaustive"),
            "latency": latency,
        }

    def retrieve(self, folder: Path, name: str, knobs: Knobs) -> dict[str, Any]:
        """The run of one system; returns the inputs that identify it."""
        e, dataset = self.context.experiment, self.context.dataset
        code = ["eval/retrieve.py", "eval/systems.py"]
        inputs = {
            **self.identity,
            "system": name,
            "knobs": knobs.to_dict(),
            "judged": e.compare.queries,
            "threads": e.threads,
            "gpus": machine()["gpus"],
            "passages": dataset.passages_digest,
            "code": source_digest(*code, *(["plaid_tilemaxsim"] if name != "plaid" else [])),
        }
        if not is_complete(folder, inputs):
            system = next(s for s in self.systems if s.name == name)
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
            by_name = {system.name: system for system in self.systems}
            sides = [
                Side(name, scored[name], by_name[name].tolerance, by_name[name].clamps, by_name[name].follows_plaid)
                for name in e.systems
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
        """Share of the collection's k best, by exact scores of all passages, that each system returned."""
        from tqdm import tqdm

        found: dict[str, list[float]] = {side.name: [] for side in sides}
        label = self.bar(knobs, "oracle over all passages")
        for i in tqdm(range(len(Q)), desc=label, unit=" queries", disable=not label):
            best = set(self.oracle.topk(Q[i], knobs.k)[0].tolist())
            for side in sides:
                pids = side.scored.query(i)[0][: knobs.k].tolist()
                found[side.name].append(len(best.intersection(pids)) / len(best))
        return {"queries": len(Q), "recall": {name: sum(shares) / len(shares) for name, shares in found.items()}}

    def latency(self, folder: Path, knobs: Knobs) -> dict[str, Any]:
        e = self.context.experiment
        timing = e.latency
        inputs = {
            **self.identity,
            "systems": e.systems,
            "knobs": knobs.to_dict(),
            "queries": timing.queries,
            "warmup": timing.warmup,
            "repeats": timing.repeats,
            "machine": machine(),
            "code": source_digest("eval/latency.py", "eval/systems.py", "plaid_tilemaxsim"),
        }

        def make() -> dict[str, Any]:
            systems = self.systems
            assert self._session is not None
            result = measure_latency(
                systems, self.context.Q[: timing.queries], knobs, warmup=timing.warmup, repeats=timing.repeats,
                device=self._session.device, progress=self.bar(knobs, "latency"),
            )  # fmt: skip
            return {
                "threads": torch.get_num_threads(),
                "device": self._session.device.type,
                "load_seconds": self.load_seconds,
                "systems": result,
            }

        return self.stage_json(folder, inputs, make)

    def stage_json(self, folder: Path, inputs: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """result.json of a stage, made by `make` unless it is there already."""
        if not is_complete(folder, inputs):
            with stage(folder, inputs) as temporary:
                write_json(temporary / "result.json", make())
        result: dict[str, Any] = read_json(folder / "result.json")
        return result


def run(
    experiment: Experiment,
    out: Path,
    *,
    data: str | None = None,
    cache: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Run an experiment into the folder `out`; returns what results.json holds.

    data: folder of collections that may be named barely. cache: see eval.cache.cache_root.
    Raises ValueError for what the experiment asks and cannot get, naming it.
    """
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    context = Context(experiment, out, data, cache, progress)
    write_json(out / "experiment.json", experiment.to_dict())
    indexes = [IndexRun(context, nbits).run() for nbits in experiment.nbits]
    results = {
        "experiment": experiment.to_dict(),
        "environment": environment(),
        "dataset": context.dataset.identity(),
        "checkpoint": checkpoint_identity(context.checkpoint),
        "encode": {**summary(context.encoded.milliseconds), "shape": list(context.Q.shape)},
        "indexes": indexes,
    }
    results["verdict"] = verdict(results)
    results["figures"] = figures(results)
    write_json(out / "results.json", results)
    report.write(results, out / "report.html")
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
