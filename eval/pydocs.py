"""`pydocs`: a collection made from the documentation of packages that are installed anyway.

A passage is the body of a docstring, its id the qualified name; the query is the docstring's summary, which the body
no longer holds; the judgment is the known item. Nothing is downloaded and nothing is imported: sources are parsed with
`ast`, and what C code documents is read where a package keeps it in Python (`add_docstr`, `add_newdoc`).

Left out: tests; bodies under `MIN_BODY` words; bodies that repeat an earlier one but for names and numbers (a model's
copy in another model's file). A summary that is no sentence to ask, or that several bodies share, is no query; its body
stays as a passage. Source files are read in the order of a hash of their name until there are enough passages, so
`pydocs:2000` is the beginning of `pydocs:20000`, and the same packages give the same collection on every machine.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from .cache import atomic_folder, cache_root, sha256_json, sha256_strings, versions, write_json
from .datasets import write_beir

PACKAGES = ("torch", "numpy", "scipy", "transformers", "stdlib")
DEFAULT_PASSAGES, DEFAULT_QUERIES = 2_000, 300
MIN_BODY, MIN_QUERY, MAX_QUERY = 10, 4, 30
# Raise when the rules above change, so that no cached collection of older rules is taken for a new one.
RULES = 1
# Folders of a package that hold no documentation of it.
SKIPPED = frozenset(
    ("test", "tests", "testing", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "__pycache__")
)


@dataclass(frozen=True)
class Doc:
    name: str
    summary: str
    body: str


def build_pydocs(
    passages: int = DEFAULT_PASSAGES,
    *,
    queries: int = DEFAULT_QUERIES,
    packages: tuple[str, ...] = PACKAGES,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """A BEIR folder (split "test") of `passages` passages and at most `queries` queries; built once, then cached.

    packages: import names, or "stdlib"; one that is not installed is left out, and manifest.json says which were read.
    Raises ValueError when these packages hold fewer passages than asked for.
    """
    if passages < 1 or queries < 1:
        raise ValueError(f"expected at least 1 passage and 1 query, got {passages} and {queries}")
    roots = {package: root for package in packages if (root := package_root(package)) is not None}
    found = {package: release for package, release in versions(*roots).items() if package != "stdlib"}
    key = {"rules": RULES, "versions": found, "packages": list(roots), "passages": passages, "queries": queries}
    folder = cache_root(cache) / "pydocs" / f"{passages}.{sha256_json(key)[:8]}"
    if (folder / "manifest.json").is_file():
        return folder
    docs = collect(roots, passages, progress=progress)
    if len(docs) < passages:
        raise ValueError(
            f"pydocs: expected {passages:,} passages in {', '.join(roots)}, got {len(docs):,}; ask for fewer, "
            f"or install more of {', '.join(packages)}"
        )
    shared = Counter(doc.summary.casefold() for doc in docs)
    asked = [doc for doc in docs if is_query(doc.summary) and shared[doc.summary.casefold()] == 1]
    if not asked:
        raise ValueError(f"pydocs: expected a query among {passages} passages, got none; ask for more passages")
    # By hash, so that queries come from all over the collection.
    asked = sorted(asked, key=lambda doc: _hash(doc.name))[:queries]
    with atomic_folder(folder) as temporary:
        write_beir(
            temporary,
            ((doc.name, doc.body) for doc in docs),
            # Not the passage's id: equal ids mean that the query is that passage.
            ((f"q/{doc.name}", doc.summary) for doc in asked),
            ((f"q/{doc.name}", doc.name, 1) for doc in asked),
        )
        digest = sha256_strings(part for doc in docs for part in (doc.name, doc.summary, doc.body))
        read = Counter(package if (package := doc.name.partition(".")[0]) in roots else "stdlib" for doc in docs)
        write_json(temporary / "manifest.json", {**key, "passages_from": dict(read.most_common()), "sha256": digest})
    return folder


def package_root(package: str) -> Path | None:
    """The folder of an installed package's sources, found without importing it, or None."""
    if package == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def collect(roots: dict[str, Path], passages: int, *, progress: bool = True) -> list[Doc]:
    """The first `passages` passages of these packages, or all if they hold fewer. See the module's rules."""
    sources = sorted(_sources(roots), key=lambda source: _hash(source[0]))
    docs: dict[str, Doc] = {}
    fingerprints: set[str] = set()
    with tqdm(total=passages, desc="pydocs: reading sources", unit=" passages", disable=not progress) as bar:
        for module, path in sources:
            for name, docstring in docstrings(path.read_bytes(), module):
                doc = split_docstring(name, docstring)
                if doc is None or name in docs or (fingerprint := _fingerprint(doc.body)) in fingerprints:
                    continue
                docs[name] = doc
                fingerprints.add(fingerprint)
                bar.update()
                if len(docs) == passages:
                    return list(docs.values())
    return list(docs.values())


def docstrings(source: bytes, module: str) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of a module, its classes and functions, and of what it documents for C code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # stray backslashes in others' strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # templates and sources of another Python's syntax
    if text := ast.get_docstring(tree):
        yield module, text
    yield from _walk(tree.body, module, module)


def split_docstring(name: str, docstring: str) -> Doc | None:
    """A docstring as (summary, body), each on one line, or None when the body is trivial.

    The summary is the first paragraph's first sentence; a signature before it is dropped, the rest of the paragraph
    opens the body.
    """
    paragraphs = [p for p in re.split(r"\n[ \t]*\n", inspect.cleandoc(docstring)) if p.strip()]
    while paragraphs and _SIGNATURE.fullmatch(paragraphs[0].strip()):
        paragraphs.pop(0)
    if not paragraphs:
        return None
    first = " ".join(paragraphs[0].split())
    if match := _SECTION.search(paragraphs[0]):
        # "Summary." followed by "Args:" without a blank line between.
        first = " ".join(paragraphs[0][: match.start()].split())
        paragraphs.insert(1, paragraphs[0][match.start() :])
    sentence = _SENTENCE_END.split(first, maxsplit=1)
    body = " ".join(" ".join([*sentence[1:], *paragraphs[1:]]).split())
    if len(_WORD.findall(body)) < MIN_BODY:
        return None
    return Doc(name, sentence[0], body)


def is_query(summary: str) -> bool:
    """Whether a summary can be asked: it begins like a sentence and has some words, no more than a query holds."""
    return bool(
        re.match(r"[A-Z][a-z]+[ ,]|An? ", summary)
        and len(_WORD.findall(summary)) >= MIN_QUERY
        and len(summary.split()) <= MAX_QUERY
    )


_WORD = re.compile(r"[A-Za-z]{2,}")
_SIGNATURE = re.compile(r"[\w.]+\(.*\)(\s*->.*)?", re.DOTALL)
_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Example|Examples|Note)\s*:", re.MULTILINE
)
# A sentence ends before a capital, a quote, a bracket or markup; "e.g. a" and "i.e. this" do not end one.
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)`'\"\]*][.!?])\s+(?=[A-Z`'\"(\[*:.])")


def _walk(body: list[ast.stmt], prefix: str, module: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}.{node.name}"
            if text := ast.get_docstring(node):
                yield name, text
            if isinstance(node, ast.ClassDef):
                yield from _walk(node.body, name, module)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _walk(node.body, prefix, module)
            yield from _walk(getattr(node, "orelse", []), prefix, module)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _added(node.value, module)


def _added(call: ast.Call, module: str) -> Iterator[tuple[str, str]]:
    """The name and text of `add_docstr(torch.abs, "...")`, `add_newdoc("numpy", "abs", "...")` and their like."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if not re.fullmatch(r"_?add_(docstr|newdoc|docstring)\w*", function):
        return
    arguments = [element for a in call.args for element in (a.elts if isinstance(a, ast.Tuple) else [a])]
    texts = [text for argument in arguments if (text := _text(argument)) is not None]
    if not texts or "\n" not in texts[-1]:
        return
    # The object is named by strings before the text, or by the expression that it is.
    name = ".".join(text for text in texts[:-1] if "\n" not in text)
    name = name or next((ast.unparse(a) for a in arguments if isinstance(a, (ast.Attribute, ast.Name))), "")
    if function == "add_docstr_all":
        name = f"torch.Tensor.{name}"
    elif "." not in name:
        name = f"{module.rpartition('.')[0]}.{name}"
    yield name, texts[-1]


def _text(node: ast.expr) -> str | None:
    """The literal text of a string expression; a `.format(**common)` keeps its text, without the parts filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = _text(node.func.value)
        return None if text is None else re.sub(r"\{\w+\}", "", text).replace("{{", "{").replace("}}", "}")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [part for part in (_text(node.left), _text(node.right)) if part is not None]
        return "".join(parts) if parts else None
    return None


def _sources(roots: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """(dotted module name, file) of every source file that may document something."""
    for package, root in roots.items():
        for path in root.rglob("*.py"):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if SKIPPED.isdisjoint(parts[:-1]) and all(part.isidentifier() for part in parts):
                if parts[-1] == "__init__":
                    parts.pop()
                yield ".".join(parts if package == "stdlib" else [package, *parts]), path


def _fingerprint(body: str) -> str:
    """What a body says without its numbers and names: copies under other names are equal."""
    words = re.findall(r"[a-z]{2,}", re.sub(r"\w*[A-Z_`\d]\w*", " ", body))
    return " ".join(words) if len(words) >= MIN_BODY // 2 else body


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
