"""A series of patches against one version of colbert-ai, and its application to a folder.

Where a file stands is told by its content alone: the ids in the diffs chain its states, pristine to fully
patched. So an interrupted ``apply`` or ``revert`` is run again, and a file in none of the known states is
never touched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from plaid_tilemaxsim.patches.diff import FileDiff, blob_id, parse

_PREFIX = "colbert-ai-"


@dataclass(frozen=True)
class Series:
    """The patches for one version; ``patches``: name of a patch -> its diffs, in the order of application."""

    version: str
    patches: dict[str, tuple[FileDiff, ...]]

    def chains(self) -> dict[str, list[FileDiff]]:
        """Path -> the diffs of that file in order; each starts from what the one before leads to."""
        chains: dict[str, list[FileDiff]] = {}
        for name, diffs in self.patches.items():
            for diff in diffs:
                chain = chains.setdefault(diff.path, [])
                if chain and chain[-1].after != diff.before:
                    raise ValueError(f"{name}: {diff.path}: expected a diff of {chain[-1].after}, got {diff.before}")
                chain.append(diff)
        return chains


@dataclass(frozen=True)
class Change:
    """A file of the target: ``done`` of its ``total`` diffs are applied; None for unknown content."""

    path: str
    done: int | None
    total: int


def _data_folder() -> Path:
    installed = Path(__file__).parent / "data"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "patches"


def load_series(version: str, folder: Path | None = None) -> Series:
    """The patches for a version of colbert-ai. For another one raises ValueError, naming those there are."""
    folder = _data_folder() if folder is None else folder
    versions = sorted(path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*") if path.is_dir())
    if version not in versions:
        raise ValueError(f"colbert-ai {version}: expected a version with patches {versions}, got {version!r}")
    files = sorted((folder / f"{_PREFIX}{version}").glob("*.patch"))
    return Series(version, {file.stem: parse(file.read_bytes(), file.name) for file in files})


def find_target(target: str | os.PathLike[str] | None = None) -> tuple[Path, str]:
    """The folder that holds ``colbert/`` and the version of colbert-ai in it.

    ``target``: a checkout of colbert-ai or a site-packages folder; None for the installed package, which is
    found without importing it. Raises ValueError where there is no colbert-ai or its version cannot be told.
    """
    if target is None:
        spec = importlib.util.find_spec("colbert")
        if spec is None or spec.origin is None:
            raise ValueError("colbert-ai: expected an installed package, got none; pip install colbert-ai==0.2.22")
        root = Path(spec.origin).parents[1]
    else:
        root = Path(target).resolve()
        if not (root / "colbert" / "__init__.py").is_file():
            raise ValueError(f"{root}: expected a folder that holds colbert/__init__.py (a checkout or site-packages)")
    versions = set(_versions(root))
    if len(versions) != 1:
        raise ValueError(
            f"{root}: expected one version of colbert-ai in colbert_ai-*.dist-info/METADATA or setup.py, "
            f"got {sorted(versions)}"
        )
    return root, versions.pop()


def _versions(root: Path) -> Iterable[str]:
    # A checkout's own setup.py comes first: beside it may lie the metadata of an older editable install.
    sources = (
        [(root / "setup.py", r"version\s*=\s*['\"]([^'\"]+)['\"]")]
        if (root / "setup.py").is_file()
        else [(path, r"(?m)^Version: (\S+)") for path in root.glob("colbert_ai-*.dist-info/METADATA")]
    )
    for path, pattern in sources:
        found = re.search(pattern, path.read_text(encoding="utf-8"))
        if found:
            yield found[1]


def restore_hint(version: str) -> str:
    return (
        "Restore modified files first: git checkout in a checkout, else "
        f"pip install --force-reinstall --no-deps colbert-ai=={version}"
    )


def status(root: Path, series: Series) -> list[Change]:
    """The state of every file that the series touches."""
    changes = []
    for path, chain in series.chains().items():
        states = [chain[0].before, *(diff.after for diff in chain)]
        file = root / path
        found = blob_id(file.read_bytes()) if file.is_file() else None
        changes.append(Change(path, states.index(found) if found in states else None, len(chain)))
    return changes


def patch_states(root: Path, series: Series) -> dict[str, str]:
    """Name of a patch -> "applied", "not applied", "file modified", or "partly applied" (files differ)."""
    done = {change.path: change.done for change in status(root, series)}
    position = dict.fromkeys(done, 0)
    states = {}
    for name, diffs in series.patches.items():
        found = set()
        for diff in diffs:
            applied = done[diff.path]
            position[diff.path] += 1
            if applied is None:
                found.add("file modified")
            else:
                found.add("applied" if applied >= position[diff.path] else "not applied")
        states[name] = found.pop() if len(found) == 1 else "partly applied"
    return states


def apply(root: Path, series: Series) -> list[str]:
    """Bring every file to its fully patched state; returns the paths written, none when all were there.

    All results are computed and checked before the first is written, and each file is replaced atomically.
    Raises ValueError, with nothing written, if a file is neither pristine nor in a state the series leads to.
    """
    return _move(root, series, forward=True)


def revert(root: Path, series: Series) -> list[str]:
    """Bring every file back to its pristine state; same guarantees as ``apply``."""
    return _move(root, series, forward=False)


def _move(root: Path, series: Series, *, forward: bool) -> list[str]:
    chains = series.chains()
    changes = status(root, series)
    unknown = [change.path for change in changes if change.done is None]
    if unknown:
        raise ValueError(
            f"{root}: expected files of colbert-ai {series.version}, pristine or patched by this series, "
            f"got other content in {unknown}. Nothing was changed. {restore_hint(series.version)}"
        )
    results: dict[Path, bytes] = {}
    for change in changes:
        assert change.done is not None
        chain, file = chains[change.path], root / change.path
        content = file.read_bytes()
        if forward:
            for diff in chain[change.done :]:
                content = diff.apply(content)
        else:
            for diff in reversed(chain[: change.done]):
                content = diff.revert(content)
        if change.done != (change.total if forward else 0):
            results[file] = content
    for file, content in results.items():
        _replace(file, content)
    return [file.relative_to(root).as_posix() for file in results]


def _replace(file: Path, content: bytes) -> None:
    # A new file rather than new content: an installer may have hard-linked the old one into its cache.
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        os.chmod(temporary, file.stat().st_mode)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
