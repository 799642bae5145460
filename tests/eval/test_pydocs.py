from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eval import pydocs
from eval.datasets import load_dataset
from eval.pydocs import build_pydocs, collect, docstrings, is_query, package_root, split_docstring

BODY = "The body has more than the ten words that a passage must have at least, so it stays."

SOURCE = f'''
"""Module summary in a sentence.

{BODY}
"""
def function(x):
    """Return the thing that x names.

    {BODY} Function.
    """
if True:
    class Outer:
        """Outer does things. {BODY} Outer."""
        def method(self):
            """Short."""
        class Inner:
            def method(self):
                """Inner method of an inner class.

                Args: {BODY} Inner.
                """
add_docstr(torch.abs, r"""
abs(input, *, out=None) -> Tensor

Computes the absolute value of each element.

{BODY} Absolute. {{input}}
""".format(**common))
add_newdoc("numpy", "arange", """
arange([start,] stop[, step])

Return evenly spaced values in an interval.

{BODY} Range.
""")
add_newdoc("agm", """
agm(a, b, out=None)

Compute the arithmetic-geometric mean of two values.

{BODY} Mean.
""")
add_newdoc("numpy", "ndarray", ("T", """
View of the transposed array, in a line.

{BODY} Transposed.
"""))
add_docstr_all("add", "add(other) -> Tensor\\n\\nAdd a scalar or tensor to self.\\n\\n{BODY} Sum.")
'''


def test_docstrings_of_classes_functions_and_c_code() -> None:
    found = {
        name: split_docstring(name, text) for name, text in docstrings(SOURCE.encode(), "scipy.special._add_newdocs")
    }
    summaries = {name.removeprefix("scipy.special."): doc.summary for name, doc in found.items() if doc}
    assert summaries == {
        "_add_newdocs": "Module summary in a sentence.",
        "_add_newdocs.function": "Return the thing that x names.",
        "_add_newdocs.Outer": "Outer does things.",
        "_add_newdocs.Outer.Inner.method": "Inner method of an inner class.",
        "torch.abs": "Computes the absolute value of each element.",
        "numpy.arange": "Return evenly spaced values in an interval.",
        "agm": "Compute the arithmetic-geometric mean of two values.",
        "numpy.ndarray.T": "View of the transposed array, in a line.",
        "torch.Tensor.add": "Add a scalar or tensor to self.",
    }
    assert found["scipy.special._add_newdocs.Outer.method"] is None  # trivial
    for doc in found.values():
        assert doc is None or (doc.summary not in doc.body and BODY in doc.body and "\n" not in doc.body)


def test_source_of_another_syntax_gives_nothing() -> None:
    assert list(docstrings(b'"""Doc."""\nprint "x"', "m")) == []
    assert list(docstrings(b"\xff", "m")) == []
    assert list(docstrings(b"x = '\\d'\n", "m")) == []


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (f"One sentence, then another. {BODY}", "One sentence, then another."),
        (f"Uses e.g. this or i.e. that to work.\n\n{BODY}", "Uses e.g. this or i.e. that to work."),
        (f"A summary over\ntwo lines.\n\n{BODY}", "A summary over two lines."),
        (f"Sections come next.\nArgs:\n    x: {BODY}", "Sections come next."),
        (f"f(x, y=(1,\n2)) -> int\n\nAfter a signature.\n\n{BODY}", "After a signature."),
    ],
)
def test_summary(text: str, summary: str) -> None:
    doc = split_docstring("name", text)
    assert doc is not None
    assert doc.summary == summary
    assert summary not in doc.body
    assert BODY in doc.body


@pytest.mark.parametrize("text", ["", "Summary only.", "Summary.\n\nToo few words here.", "f(x)\n\n"])
def test_trivial_bodies_are_dropped(text: str) -> None:
    assert split_docstring("name", text) is None


def test_what_can_be_asked() -> None:
    assert is_query("Return the mean of an array.")
    assert is_query("A tool for things of this kind.")
    assert not is_query("Short.")
    assert not is_query("labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*): Labels for it.")
    assert not is_query("Return " + "very " * 40 + "much.")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package whose import would fail, with 30 documented functions and some noise."""
    root = tmp_path / "site" / "documented"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('imported')\n")
    for i in range(6):
        functions = [
            f'def f{i}{j}():\n    """Do the {word} thing number {j}.\n\n    {BODY} It is {word}.\n    """\n'
            for j, word in enumerate(f"w{chr(97 + i)}{chr(97 + j)}" for j in range(5))
        ]
        (root / f"m{i}.py").write_text("\n".join(functions))
    copy = f'def copied():\n    """Another summary of the same body.\n\n    {BODY} It is waa.\n    """\n'
    (root / "z_copy.py").write_text(copy)
    same = "".join(
        f'def s{k}():\n    """Same words as summary.\n\n    {BODY} So {k * "x"} it.\n    """\n' for k in (2, 3)
    )
    (root / "same.py").write_text(same)
    (root / "tests" / "t.py").write_text(f'def t():\n    """A test that is skipped.\n\n    {BODY} Test.\n    """\n')
    (root / "bad-name.py").write_text(f'def t():\n    """No module at all here.\n\n    {BODY} Bad.\n    """\n')
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return "documented"


def test_build(package: str, tmp_path: Path) -> None:
    folder = build_pydocs(32, packages=(package, "not_installed_anywhere"), cache=tmp_path, progress=False)
    dataset = load_dataset(folder, progress=False)
    assert package not in sys.modules
    assert dataset.counts["passages"] == 32  # 30 + 2, the copied body once
    assert dataset.counts["queries"] == 30  # "Same words as summary." is two bodies' summary
    assert dataset.counts["own_passages"] == 0
    assert {p for judged in dataset.qrels.values() for p in judged} <= set(dataset.passage_ids)
    for query_id, query in zip(dataset.query_ids, dataset.queries):
        assert dataset.qrels[query_id] == {query_id.removeprefix("q/"): 1}
        assert query not in dataset.passages[dataset.pids[query_id.removeprefix("q/")]]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["packages"] == [package]
    assert manifest["passages_from"] == {package: 32}
    assert len(manifest["sha256"]) == 64


def test_smaller_is_a_prefix_and_builds_repeat(package: str, tmp_path: Path) -> None:
    large = load_dataset(build_pydocs(30, packages=(package,), cache=tmp_path / "a", progress=False), progress=False)
    small = load_dataset(build_pydocs(9, packages=(package,), cache=tmp_path / "a", progress=False), progress=False)
    again = load_dataset(build_pydocs(30, packages=(package,), cache=tmp_path / "b", progress=False), progress=False)
    assert small.passage_ids == large.passage_ids[:9]
    assert again.identity()["sha256"] == large.identity()["sha256"]
    few = load_dataset(build_pydocs(30, queries=4, packages=(package,), cache=tmp_path, progress=False), progress=False)
    assert few.counts["queries"] == 4
    assert few.passages_digest == large.passages_digest


def test_a_cached_collection_is_not_read_again(package: str, tmp_path: Path, monkeypatch) -> None:
    folder = build_pydocs(9, packages=(package,), cache=tmp_path, progress=False)
    monkeypatch.setattr(pydocs, "collect", lambda *_, **__: pytest.fail("read again"))
    assert build_pydocs(9, packages=(package,), cache=tmp_path, progress=False) == folder


def test_too_many_passages(package: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 33 passages in documented, got 32; ask for fewer"):
        build_pydocs(33, packages=(package,), cache=tmp_path, progress=False)
    with pytest.raises(ValueError, match="expected at least 1 passage and 1 query, got 0 and 300"):
        build_pydocs(0, cache=tmp_path)


def test_installed_packages() -> None:
    """The real sources, a few hundred passages of them: no import, several packages, sensible texts."""
    roots = {package: root for package in pydocs.PACKAGES if (root := package_root(package)) is not None}
    assert {"torch", "numpy", "stdlib"} <= set(roots)
    docs = collect(roots, 400, progress=False)
    assert len(docs) == len({doc.name for doc in docs}) == len({doc.body for doc in docs}) == 400
    assert len({doc.name.partition(".")[0] for doc in docs} & set(roots)) >= 3
    assert sum(is_query(doc.summary) for doc in docs) > 200


def test_spec(tmp_path: Path) -> None:
    dataset = load_dataset("pydocs:300", cache=tmp_path, progress=False)
    assert dataset.name == "pydocs-300"
    assert dataset.counts["passages"] == 300
    assert dataset.source == "pydocs"
    assert dataset.details["versions"]["torch"]
    assert load_dataset("pydocs[:300]", cache=tmp_path, progress=False).identity() == dataset.identity()
