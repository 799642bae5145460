"""One experiment, fully said: data, encoder, index, systems, every search parameter, what is timed and how.

A JSON file under configs/ holds one; all its keys are required, none besides them is accepted.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from .cache import read_json
from .manifest import PACKAGE
from .measure import MEASURES
from .systems import Knobs, parse_system


def _check_types(value: Any) -> None:
    """ValueError names the first field of a dataclass instance whose value is not of its declared type."""
    hints = typing.get_type_hints(type(value))
    for field in fields(value):
        got, hint = getattr(value, field.name), hints[field.name]
        plain = tuple(
            typing.get_origin(t) or t for t in (typing.get_args(hint) if isinstance(hint, UnionType) else [hint])
        )
        if not isinstance(got, plain) or (isinstance(got, bool) and bool not in plain):
            names = " or ".join("null" if t is NoneType else t.__name__ for t in plain)
            raise ValueError(f"{field.name}: expected {names}, got {got!r}")


def _read(cls: type, values: Any, where: str) -> dict[str, Any]:
    """The keyword arguments of `cls` from a JSON object that has exactly its fields."""
    names = [field.name for field in fields(cls)]
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(names)}, got {values!r}")
    if unknown := [name for name in values if name not in names]:
        raise ValueError(f"{where}: expected only the keys {', '.join(names)}, got {', '.join(unknown)}")
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{where}: expected the keys {', '.join(names)}, got none for {', '.join(missing)}")
    return values


@dataclass(frozen=True)
class Comparing:
    """queries: how many of the first queries the oracle judges, null for all. exhaustive: also rank the whole
    collection by the oracle, and report how much of its k best each system found."""

    queries: int | None
    exhaustive: bool


@dataclass(frozen=True)
class Timing:
    """queries: how many of the first queries are timed, null for all, 0 for no timing; warmup: of these, run once
    before the clock starts; repeats: timed rounds over them; batches: batch sizes whose throughput is measured."""

    queries: int | None
    warmup: int
    repeats: int
    batches: list[int]


@dataclass(frozen=True)
class Experiment:
    """What to run. `dataset`, `split`: see eval.datasets. `checkpoint`: a recipe of eval.checkpoint, a folder or a
    hub's name. `nbits`: one index for each. `systems`: see eval.systems.parse_system; the others are compared with
    the first. `search`: one set of knobs for each k. `threads`: torch's, null for its own choice."""

    name: str
    dataset: str
    split: str
    queries: int | None
    checkpoint: str
    doc_maxlen: int
    query_maxlen: int
    kmeans_niters: int
    nbits: list[int]
    systems: list[str]
    search: list[Knobs]
    measures: list[str]
    compare: Comparing
    latency: Timing
    threads: int | None

    def __post_init__(self) -> None:
        for part in (self, self.compare, self.latency):
            _check_types(part)
        for name in ("nbits", "systems", "search", "measures"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one, got none")
        for name in ("nbits", "systems"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name}: expected each once, got {getattr(self, name)}")
        if len({knobs.k for knobs in self.search}) != len(self.search):
            raise ValueError(f"search: expected each k once, got {[knobs.k for knobs in self.search]}")
        if wrong := [n for n in self.nbits if n not in (1, 2, 4, 8)]:
            raise ValueError(f"nbits: expected 1, 2, 4 or 8, got {wrong[0]!r}")
        for system in self.systems:
            parse_system(system)
        positive = {"queries": self.queries, "threads": self.threads, "compare.queries": self.compare.queries,
                    "doc_maxlen": self.doc_maxlen, "query_maxlen": self.query_maxlen,
                    "kmeans_niters": self.kmeans_niters, "latency.repeats": self.latency.repeats}  # fmt: skip
        for name, value in positive.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {value}")
        if wrong := [n for n in self.latency.batches if not isinstance(n, int) or isinstance(n, bool) or n < 1]:
            raise ValueError(f"latency.batches: expected numbers >= 1, got {wrong[0]!r}")
        for name, value in (("latency.queries", self.latency.queries), ("latency.warmup", self.latency.warmup)):
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected a number >= 0, got {value}")

    @classmethod
    def from_dict(cls, values: Any, where: str = "experiment") -> Experiment:
        """From parsed JSON. ValueError for unknown or missing keys and values of the wrong kind, naming `where`."""
        values = dict(_read(cls, values, where))
        if not isinstance(values["search"], list):
            raise ValueError(f"{where}, search: expected a list, got {values['search']!r}")
        parts: dict[str, Callable[[], Any]] = {
            "search": lambda: [Knobs(**_read(Knobs, v, "search")) for v in values["search"]],
            "compare": lambda: Comparing(**_read(Comparing, values["compare"], "compare")),
            "latency": lambda: Timing(**_read(Timing, values["latency"], "latency")),
        }
        try:
            return cls(**{**values, **{name: part() for name, part in parts.items()}})
        except ValueError as error:
            raise ValueError(f"{where}, {error}") from error

    @classmethod
    def read(cls, path: Path) -> Experiment:
        return cls.from_dict(read_json(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_changes(self, **changes: Any) -> Experiment:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def find_config(name: str) -> Path:
    """A configuration by path, or by the name of a shipped one. ValueError lists those."""
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.exists():
        return path
    # A checkout has configs/ beside eval/, an installed package inside it.
    folder = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
    shipped = sorted(file.stem for file in folder.glob("*.json"))
    if name not in shipped:
        raise ValueError(f"config: expected a .json file or one of {', '.join(shipped)}, got {name!r}")
    return folder / f"{name}.json"


def default_experiment(dataset: str = "pydocs[:2000]") -> Experiment:
    """What the command line starts from: the sample collection, stock's knobs at k = 10, 100 and 1000."""
    return Experiment(
        name="pydocs",
        dataset=dataset,
        split="auto",
        queries=None,
        checkpoint="splade-tiny",
        doc_maxlen=300,
        query_maxlen=32,
        kmeans_niters=4,
        nbits=[2],
        systems=["plaid", "tilemaxsim"],
        search=[Knobs.defaults(k) for k in (10, 100, 1000)],
        measures=list(MEASURES),
        compare=Comparing(queries=100, exhaustive=True),
        latency=Timing(queries=60, warmup=5, repeats=2, batches=[1, 8, 32]),
        threads=None,
    )
