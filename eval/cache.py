"""Where built things live, and how they get there whole: digests, atomic folders, JSON."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_root(cache: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: `cache`, else `$XDG_CACHE_HOME/plaid-tilemaxsim`, else `~/.cache/plaid-tilemaxsim`."""
    if cache is not None:
        return Path(cache).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser().resolve() / "plaid-tilemaxsim"


def sha256_file(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_strings(strings: Iterable[str]) -> str:
    """Digest of a sequence of strings; their lengths are hashed too, so that no two sequences run together."""
    digest = hashlib.sha256()
    for string in strings:
        data = string.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by distribution name, with Python's own; "absent" for what is not installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def read_json(path: str | os.PathLike[str]) -> Any:
    """Raises ValueError naming the file, line and column when it does not hold JSON."""
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: expected JSON, got {error}") from error


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 2) -> None:
    """Writes `value` under a temporary name and renames it: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False)  # noqa: SIM115
    try:
        with file:
            json.dump(value, file, indent=indent, ensure_ascii=False)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except BaseException:
        os.unlink(file.name)
        raise


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary folder beside `path`, renamed to `path` when the block ends well, removed when it does not.

    An existing `path` is replaced.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        if path.exists():
            # A folder cannot be renamed over a full one: move the old one aside first.
            aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.rename(path, aside / path.name)
            os.rename(temporary, path)
            shutil.rmtree(aside)
        else:
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
