"""Checks on data from outside. Each failure is a ValueError that names file, field, expected and got."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Bounds the temporaries of a check: entries looked at together.
PIECE = 1 << 24


def invalid(file: Path | str, field: str, expected: object, got: object) -> ValueError:
    """The one form in which this package says that index data are wrong."""
    return ValueError(f"{file}: {field}: expected {expected}, got {got}")


def check_int(value: Any, file: Path | str, field: str, low: int, high: int | None = None) -> int:
    """value if it is an int (no bool, no float) with low <= value, and value <= high where high is given."""
    if type(value) is not int or value < low or (high is not None and value > high):
        expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise invalid(file, field, expected, repr(value)[:80])
    return value


def check_tensor(
    value: Any, file: Path | str, field: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]
) -> Tensor:
    """value if it is a plain contiguous tensor of one of the dtypes and of the shape (None: any size).

    Contiguous means that every element has bytes of its own, so the sizes of a checked tensor are backed by
    memory or by a file and may size an allocation.
    """
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    expected = f"a contiguous {names} tensor of shape [{sizes}]"
    if type(value) is not Tensor:
        raise invalid(file, field, expected, type(value).__name__)
    if value.layout is not torch.strided or value.is_meta or value.is_neg() or value.is_conj():
        raise invalid(file, field, expected, f"{value.layout} on {value.device}, or a lazily negated view")
    fits = value.dim() == len(shape) and all(
        size is None or size == got for size, got in zip(shape, value.shape, strict=True)
    )
    if value.dtype not in dtypes or not fits or not value.is_contiguous():
        kind = "contiguous" if value.is_contiguous() else "non-contiguous"
        got = f"a {kind} {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
        raise invalid(file, field, expected, got)
    return value.detach()


def check_finite(tensor: Tensor, file: Path | str, field: str) -> None:
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise invalid(file, field, "finite numbers", f"{bad} that are NaN or infinite")


def check_range(tensor: Tensor, file: Path | str, field: str, low: int, high: int) -> None:
    """Every element of the integer tensor (on any device) lies in [low, high)."""
    if tensor.numel() == 0:
        return
    least, most = (int(x) for x in torch.aminmax(tensor))
    if least < low or most >= high:
        at = int(((tensor < low) | (tensor >= high)).to(torch.uint8).argmax())
        value = int(tensor.flatten()[at])
        raise invalid(file, field, f"values in [{low}, {high})", f"{value} at position {at}")


def check_pid_lists(pids: Tensor, offsets: Tensor, num_passages: int, file: Path | str) -> None:
    """Every list pids[offsets[c]:offsets[c + 1]] is strictly ascending and lies in [0, num_passages).

    pids int32 [n] and offsets int64 [C + 1] (ascending from 0 to n) on one device, any.
    """
    check_range(pids, file, "pids", 0, num_passages)
    starts = offsets[1:-1]
    for begin in range(1, pids.numel(), PIECE):
        end = min(begin + PIECE, pids.numel())
        rising = pids[begin:end] > pids[begin - 1 : end - 1]
        # The first pid of a list owes nothing to the pid before it.
        first, last = torch.searchsorted(starts, torch.tensor([begin, end], device=starts.device)).tolist()
        rising[starts[first:last] - begin] = True
        if not bool(rising.all()):
            at = begin + int((~rising).to(torch.uint8).argmax())
            centroid = int((offsets <= at).sum()) - 1
            got = f"{int(pids[at])} after {int(pids[at - 1])}"
            raise invalid(file, f"pids of centroid {centroid}", "a strictly ascending list", got)
