"""Choices that ``plaid-tilemaxsim tune`` measured on one chip, in place of those of :mod:`.tuning`.

A choice function that is marked :func:`tunable` names the fields of its result that may be replaced, and the values
that the tuner tries. Without a loaded file the function is what it would be unmarked. A file holds, for a kernel and a
class of shapes (its arguments; token and query counts rounded up to powers of two), other values of those fields: they
change the speed of a kernel and the order of its fp32 sums, never what it computes.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

VERSION = 1

# Arguments that vary from query to query, and the smallest class of each.
_ROUNDED = {"LQ": 16, "NQ": 1, "blocks": 1, "fixed_length": 16}

P = ParamSpec("P")
T = TypeVar("T")
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Tunable:
    """A choice function as written, the annotations of its arguments after ``arch``, and the values to try by field."""

    choose: Callable[..., Any]
    arguments: dict[str, str]
    fields: dict[str, tuple[Any, ...]]

    def allowed(self, default: Any) -> dict[str, tuple[Any, ...]]:
        """Values of every field, the default's own first."""
        own = {name: getattr(default, name) for name in self.fields}
        return {name: (own[name], *(v for v in values if v != own[name])) for name, values in self.fields.items()}


TUNABLE: dict[str, Tunable] = {}
_loaded: dict[Key, dict[str, Any]] = {}


def tunable(kernel: str, **fields: tuple[Any, ...]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Marks ``choose(arch, ...)``, which returns a frozen dataclass with at least these fields."""

    def mark(choose: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(choose)
        arguments = {name: str(p.annotation) for name, p in signature.parameters.items()}
        assert arguments.pop("arch", None) == "int", choose
        TUNABLE[kernel] = Tunable(choose, arguments, fields)

        @functools.wraps(choose)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> T:
            default = choose(*args, **kwargs)
            if not _loaded:
                return default
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            shape = dict(bound.arguments)
            arch = shape.pop("arch")
            values = _loaded.get(_key(kernel, arch, shape_class(shape)))
            return replace(default, **values) if values else default  # type: ignore[type-var]

        return chosen

    return mark


def shape_class(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The shape that stands for all shapes that share a choice."""
    stands = {
        name: max(_ROUNDED[name], 1 << (value - 1).bit_length()) if name in _ROUNDED and value is not None else value
        for name, value in shape.items()
    }
    if shape.get("itemsize") == 2:  # fp16 and bf16 have one precision
        stands["precision"] = "ieee"
    return stands


def _key(kernel: str, arch: int, shape: Mapping[str, Any]) -> Key:
    return (kernel, arch, *sorted(shape.items()))


@contextmanager
def trying(kernel: str, arch: int, shape: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the choice for this class of shapes has these values; for the tuner."""
    key = _key(kernel, arch, shape_class(shape))
    before = _loaded.get(key)
    _loaded[key] = dict(values)
    try:
        yield
    finally:
        if before is None:
            del _loaded[key]
        else:
            _loaded[key] = before


def load(path: str | os.PathLike[str], arch: int) -> None:
    """Takes the choices of a file for this process, instead of those of a file loaded before.

    Searches already recorded as CUDA graphs keep theirs. Raises ValueError with the file, the field, what was expected
    and found; the choices are then as before.
    """
    choices = read(path, arch)
    _loaded.clear()
    _loaded.update(choices)


def unload() -> None:
    """Back to the choice functions as written."""
    _loaded.clear()


def read(path: str | os.PathLike[str], arch: int) -> dict[Key, dict[str, Any]]:
    """Checks all of a file that ``tune`` wrote on a chip of this ``arch``; see :func:`load`."""

    def expect(field: str, condition: bool, expected: object, got: object) -> None:
        if not condition:
            raise ValueError(f"{os.fspath(path)}: {field}: expected {expected}, got {got!r}")

    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{os.fspath(path)}: expected a file written by plaid-tilemaxsim tune, got {error.strerror}"
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{os.fspath(path)}: expected JSON, got {error}") from None
    expect("top level", isinstance(table, dict), "an object", table)
    expect("version", table.get("version") == VERSION, VERSION, table.get("version"))
    expect("arch", table.get("arch") == arch, f"{arch}, which this device is", table.get("arch"))
    entries = table.get("entries")
    expect("entries", isinstance(entries, list), "a list", entries)
    choices: dict[Key, dict[str, Any]] = {}
    for i, entry in enumerate(entries):
        at = f"entries[{i}]"
        expect(at, isinstance(entry, dict), "an object", entry)
        kernel, shape, choice = (entry.get(name) for name in ("kernel", "shape", "choice"))
        expect(f"{at}.kernel", isinstance(kernel, str) and kernel in TUNABLE, f"one of {sorted(TUNABLE)}", kernel)
        tuned = TUNABLE[kernel]
        _same_names(f"{at}.shape", shape, tuned.arguments, expect)
        for name, annotation in tuned.arguments.items():
            expect(f"{at}.shape.{name}", _is(annotation, shape[name]), f"{annotation} (>= 1)", shape[name])
        expect(f"{at}.shape", shape == shape_class(shape), shape_class(shape), shape)
        _same_names(f"{at}.choice", choice, tuned.fields, expect)
        for name, values in tuned.allowed(tuned.choose(arch, **shape)).items():
            same = [value for value in values if type(value) is type(choice[name]) and value == choice[name]]
            expect(f"{at}.choice.{name}", bool(same), f"one of {list(values)}", choice[name])
        key = _key(kernel, arch, shape)
        expect(f"{at}.shape", key not in choices, "each kernel and shape once", shape)
        choices[key] = choice
    return choices


def _same_names(field: str, got: Any, wanted: Mapping[str, Any], expect: Callable[..., None]) -> None:
    expect(field, isinstance(got, dict) and got.keys() == wanted.keys(), f"an object with {sorted(wanted)}", got)


def _is(annotation: str, value: Any) -> bool:
    if annotation == "str":
        return isinstance(value, str)
    if value is None:
        return "None" in annotation
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
