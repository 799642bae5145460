"""Whether files are still what they were when they were loaded: by names, sizes, times and inodes, without reading."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

# Files up to this size enter a digest by content, larger ones by size and time alone.
SMALL_FILE = 1 << 20
# Of an index and its PQ sidecars; others may come and go.
_FILES = re.compile(r"(\d+\.)?metadata\.json|doclens\.\d+\.json|.+\.pt|pq\d+\.json")


@dataclass(frozen=True)
class Stamp:
    """A file as it was at some time."""

    file: Path
    size: int
    modified: int  # ns
    inode: int

    def check(self) -> None:
        """ValueError unless the file is still the same: of a shorter one, touching the lost part of a map would end
        the process (SIGBUS)."""
        try:
            now = stamp(self.file)
        except OSError as error:
            got = error.strerror or "none"
        else:
            if now == self:
                return
            got = f"{now.size} bytes" if now.size != self.size else "one written later"
        raise ValueError(
            f"{self.file}: file: expected the {self.size} bytes that were there when the index was loaded, got {got}; "
            "refresh() loads it again"
        )


def stamp(file: Path) -> Stamp:
    """Raises OSError as os.stat does."""
    now = file.stat()
    return Stamp(file, now.st_size, now.st_mtime_ns, now.st_ino)


def fingerprint(folder: Path | str) -> str:
    """sha256 hex over the stamps of an index's files and what metadata.json holds; "" where they cannot be told.

    Nothing has been checked yet, so that is read only where it is a small plain file, not a pipe or a hole.
    """
    digest = hashlib.sha256()
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.stat()) for entry in entries if _FILES.fullmatch(entry.name))
        for name, now in found:
            digest.update(f"{name}\0{now.st_size}\0{now.st_mtime_ns}\0{now.st_ino}\0".encode())
        metadata = Path(folder, "metadata.json")
        if metadata.is_file() and metadata.stat().st_size <= SMALL_FILE:
            digest.update(metadata.read_bytes())
    except OSError:  # whoever reads the index next says what is wrong
        return ""
    return digest.hexdigest()
