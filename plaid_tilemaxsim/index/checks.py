"""Checks on data from outside. Each failure is a ValueError that names file, field, expected and got."""

from __future__ import annotations

import os
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


def check_file(file: Path) -> None:
    """file is a plain file, or a symbolic link to one in its own folder.

    A link may also lead to the blobs of the Hugging Face cache that the folder lies in, since that is made of such
    links: <repository>/snapshots/<revision>/... -> <repository>/blobs/...
    """
    if not os.path.lexists(file):
        raise invalid(file, "file", "a file", "none")
    if file.is_symlink():
        folder = Path(os.path.realpath(file.parent))
        roots = [folder, *(above.parent / "blobs" for above in folder.parents if above.name == "snapshots")]
        target = Path(os.path.realpath(file))
        if not any(target.is_relative_to(root) for root in roots):
            raise invalid(file, "file", "a file of this folder", f"a symbolic link to {target}")
    if not file.is_file():
        raise invalid(file, "file", "a file", "a folder" if file.is_dir() else "neither file nor folder")


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
    memory or by a file and may size an allocation. Elements lie at multiples of their size.
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
    if value.data_ptr() % value.element_size():
        raise invalid(file, field, expected, "one at an address that is no multiple of the size of its elements")
    return value.detach()


def check_finite(tensor: Tensor, file: Path | str, field: str) -> None:
    bad = sum(int((~torch.isfinite(piece)).sum()) for piece in tensor.reshape(-1).split(PIECE))
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


def check_same_lists(
    pids: Tensor, offsets: Tensor, expected_pids: Tensor, expected_offsets: Tensor, file: Path | str
) -> None:
    """Lists as in check_pid_lists are those that the codes make; names the first centroid whose list differs."""
    if not torch.equal(offsets, expected_offsets):
        centroid = int((offsets != expected_offsets).to(torch.uint8).argmax()) - 1
    elif not torch.equal(pids, expected_pids):
        at = (pids != expected_pids).to(torch.uint8).argmax()
        centroid = int(torch.searchsorted(offsets, at, right=True)) - 1
    else:
        return
    expected, got = expected_offsets[centroid : centroid + 2].tolist(), offsets[centroid : centroid + 2].tolist()
    raise invalid(
        file,
        f"pids of centroid {centroid}",
        f"the {expected[1] - expected[0]} passages with its code, {expected_pids[slice(*expected)][:8].tolist()}...",
        f"{got[1] - got[0]}, {pids[slice(*got)][:8].tolist()}...",
    )
