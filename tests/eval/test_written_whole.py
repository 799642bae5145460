"""A result file is there whole or not at all, also when writing it is interrupted."""

import os

import pytest

from eval.cache import read_json, write_json
from eval.manifest import write_text


class Interrupting(dict):
    def items(self):
        raise KeyboardInterrupt


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("before", [None, {"old": 1}])
def test_json(tmp_path, before, monkeypatch):
    file = tmp_path / "result.json"
    if before is not None:
        write_json(file, before)
    there = list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_json(file, {"first": 1, "second": Interrupting(third=1)})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_json(file, {"new": 1})
    assert list(tmp_path.iterdir()) == there
    assert before is None or read_json(file) == before


def test_text(tmp_path, monkeypatch):
    file = tmp_path / "report.md"
    write_text(file, "old")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert file.read_text() == "old"
