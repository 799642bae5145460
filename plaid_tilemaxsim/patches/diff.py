"""Unified diffs as git writes them: parsing, and application at the stated lines only (no search, no fuzz).

Every diff must carry full sha256 blob ids (``git diff --full-index`` in a repository with sha256 objects), so
that a patch itself says which content it turns into which.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_FILE = re.compile(rb"diff --git a/(?P<path>\S+) b/(?P=path)")
_INDEX = re.compile(rb"index (?P<before>[0-9a-f]{64})\.\.(?P<after>[0-9a-f]{64}) \d+")
_HUNK = re.compile(rb"@@ -(?P<start>\d+)(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@")


def blob_id(content: bytes) -> str:
    """The sha256 object id that git gives to a file of this content."""
    return hashlib.sha256(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Hunk:
    """Lines ``old``, the first of which is line ``start`` (from 0) of the file before, become ``new``."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file; ``before`` and ``after`` are blob ids."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]

    def apply(self, content: bytes) -> bytes:
        """The content after this diff. Raises ValueError unless ``content`` is what it was made from."""
        return self._replace(content, self.before, self.after, [(h.start, h.old, h.new) for h in self.hunks])

    def revert(self, content: bytes) -> bytes:
        """The content before this diff. Raises ValueError unless ``content`` is what the diff leads to."""
        replacements, shift = [], 0
        for hunk in self.hunks:
            replacements.append((hunk.start + shift, hunk.new, hunk.old))
            shift += len(hunk.new) - len(hunk.old)
        return self._replace(content, self.after, self.before, replacements)

    def _replace(
        self,
        content: bytes,
        source: str,
        target: str,
        replacements: list[tuple[int, tuple[bytes, ...], tuple[bytes, ...]]],
    ) -> bytes:
        if blob_id(content) != source:
            raise ValueError(f"{self.path}: expected content with blob id {source}, got {blob_id(content)}")
        lines = content.splitlines(keepends=True)
        for start, old, new in reversed(replacements):
            found = tuple(lines[start : start + len(old)])
            if found != old:
                raise ValueError(f"{self.path}: line {start + 1}: expected {old!r}, got {found!r}")
            lines[start : start + len(old)] = new
        result = b"".join(lines)
        if blob_id(result) != target:
            raise ValueError(f"{self.path}: expected a result with blob id {target}, got {blob_id(result)}")
        return result


def parse(patch: bytes, name: str) -> tuple[FileDiff, ...]:
    """The diffs of a patch file. Text before the first describes it. Raises ValueError naming ``name``."""
    diffs = []
    chunks = re.split(rb"^(?=diff --git )", patch, flags=re.MULTILINE)
    for chunk in chunks[1:]:
        lines = chunk.splitlines(keepends=True)
        file, index = _FILE.match(lines[0]), _INDEX.match(lines[1])
        if file is None or index is None:
            raise ValueError(f"{name}: expected a diff of one existing file with full sha256 ids, got {lines[:2]!r}")
        diffs.append(
            FileDiff(
                path=file["path"].decode(),
                before=index["before"].decode(),
                after=index["after"].decode(),
                hunks=tuple(_hunks(lines[4:], name)),
            )
        )
    if not diffs:
        raise ValueError(f"{name}: expected at least one 'diff --git' section, got none")
    return tuple(diffs)


def _hunks(lines: list[bytes], name: str) -> list[Hunk]:
    hunks = []
    position = 0
    while position < len(lines):
        head = _HUNK.match(lines[position])
        if head is None:
            raise ValueError(f"{name}: expected a hunk header, got {lines[position]!r}")
        position += 1
        old: list[bytes] = []
        new: list[bytes] = []
        while position < len(lines) and not lines[position].startswith(b"@@"):
            sign, text = lines[position][:1], lines[position][1:]
            if sign == b"\\":  # "\ No newline at end of file" speaks of the line above it
                raise ValueError(f"{name}: files without a final newline are not supported")
            if sign not in (b" ", b"-", b"+"):
                raise ValueError(f"{name}: expected a line of a hunk, got {lines[position]!r}")
            if sign in (b" ", b"-"):
                old.append(text)
            if sign in (b" ", b"+"):
                new.append(text)
            position += 1
        expected = tuple(int(head[side] or 1) for side in ("old", "new"))
        if (len(old), len(new)) != expected:
            raise ValueError(f"{name}: expected a hunk of {expected} lines, got {(len(old), len(new))}")
        hunks.append(Hunk(int(head["start"]) - 1, tuple(old), tuple(new)))
    return hunks
