"""One `Dataset` from any of the forms a retrieval collection comes in.

| spec | form |
|---|---|
| `pydocs`, `pydocs:N` | documentation of the installed packages (eval/pydocs.py), N passages |
| `FOLDER` | BEIR: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv, each also as .gz |
| `FOLDER.tar.gz` | such a folder, packed |
| `FOLDER` | MS MARCO: collection.tsv, queries.SPLIT.tsv, qrels.SPLIT.tsv or .txt, each also as .gz |
| `COLLECTION,QUERIES,QRELS` | the same three files by path |
| `NAME` | FOLDER or FOLDER.tar.gz of that name under the data folder |
| an `ir_datasets` id | whatever that library provides, e.g. `beir/scifact/test` |

Every spec may end in `:N` (or `[:N]`), a slice of N passages; but for pydocs see `Dataset.slice`. Rules, the same for
every form:

- Queries are those of the split's judgments, in the order of the query file; a file may hold more.
- A passage's text is "title text"; an empty passage stays, and is encoded as its markers alone.
- BEIR's own rule for BEIR data (folders, archives, `beir/...` ids) and nowhere else: a passage with the query's id is
  left out of that query's results before the cut at k, judged or not (`Dataset.own_passage`). ArguAna and Quora need
  it. In MS MARCO equal ids mean nothing, and nothing is left out.
- As in ir_measures and trec_eval: means are over the judged queries, one that finds nothing counts as 0; a query
  without judgments counts nowhere; an unjudged passage has grade 0, and so have negative grades.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from .cache import sha256_strings

# Which split "auto" means, the first that exists; a folder with a single split needs none of these names.
SPLIT_ORDER = ("test", "dl19", "dev", "dev.small")


@dataclass(frozen=True)
class Dataset:
    """A collection with judged queries.

    `passage_ids[pid]` is the id of the passage that an index calls `pid`; `passages[pid]` its text. `queries[i]` has
    id `query_ids[i]`, and every one of them has judgments. `qrels[query_id][passage_id]` is a grade, 0 = not relevant;
    it may name passages that the collection lacks (counted as `judged_missing`): these are never retrieved. `source`
    names a file or an id, never a machine's path. `removes_own`: BEIR's rule of equal ids applies.
    """

    name: str
    passage_ids: Sequence[str]
    passages: Sequence[str]
    query_ids: Sequence[str]
    queries: Sequence[str]
    qrels: dict[str, dict[str, int]]
    split: str = ""
    source: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    removes_own: bool = False

    @cached_property
    def pids(self) -> dict[str, int]:
        """Passage id -> pid."""
        return {passage_id: pid for pid, passage_id in enumerate(self.passage_ids)}

    @cached_property
    def passages_digest(self) -> str:
        """Of ids and texts, in order: what an index is built from."""
        return sha256_strings(_alternate(self.passage_ids, self.passages))

    @cached_property
    def queries_digest(self) -> str:
        return sha256_strings(_alternate(self.query_ids, self.queries))

    @cached_property
    def qrels_digest(self) -> str:
        rows = sorted((q, p, grade) for q, judged in self.qrels.items() for p, grade in judged.items())
        return sha256_strings(f"{q}\t{p}\t{grade}" for q, p, grade in rows)

    @cached_property
    def counts(self) -> dict[str, int]:
        judgments = [(p, grade) for judged in self.qrels.values() for p, grade in judged.items()]
        return {
            "passages": len(self.passages),
            "empty_passages": sum(not text.strip() for text in self.passages),
            "queries": len(self.queries),
            "judgments": len(judgments),
            "relevant": sum(grade > 0 for _, grade in judgments),
            "judged_missing": sum(p not in self.pids for p, _ in judgments),
            "own_passages": sum(self.own_passage(q) is not None for q in self.query_ids),
        }

    def own_passage(self, query_id: str) -> int | None:
        """The pid to leave out of this query's results because it has the query's id, or None."""
        return self.pids.get(query_id) if self.removes_own else None

    def identity(self) -> dict[str, Any]:
        """What a result must record to say which data it is about (JSON-ready)."""
        return {
            "name": self.name,
            "split": self.split,
            "source": self.source,
            "counts": self.counts,
            "sha256": {"passages": self.passages_digest, "queries": self.queries_digest, "qrels": self.qrels_digest},
            **({"details": self.details} if self.details else {}),
        }

    def first_queries(self, count: int) -> Dataset:
        """The same collection with only its first `count` queries."""
        kept = list(self.query_ids[:count])
        return replace(
            self,
            query_ids=kept,
            queries=list(self.queries[:count]),
            qrels={query_id: self.qrels[query_id] for query_id in kept},
        )

    def slice(self, passages: int) -> Dataset:
        """`passages` of the passages, in their order: those judged relevant for the first queries, then others by hash.

        A query is kept if its relevant passages still fit in half of the slice, so that the other half is noise.
        """
        if passages >= len(self.passages):
            return self
        if passages < 2:
            raise ValueError(f"{self.name}: expected a slice of at least 2 passages, got {passages}")
        kept: set[str] = set()
        query_ids = []
        for query_id in self.query_ids:
            relevant = {p for p, grade in self.qrels[query_id].items() if grade > 0 and p in self.pids}
            if relevant and len(kept | relevant) <= passages // 2:
                kept |= relevant
                query_ids.append(query_id)
        if not query_ids:
            raise ValueError(f"{self.name}: expected a slice that holds some query's relevant passages, got {passages}")
        by_hash = sorted(
            (p for p in self.passage_ids if p not in kept), key=lambda p: hashlib.sha256(p.encode()).digest()
        )
        kept.update(by_hash[: passages - len(kept)])
        rows = [pid for pid, passage_id in enumerate(self.passage_ids) if passage_id in kept]
        texts = dict(zip(self.query_ids, self.queries))
        return replace(
            self,
            name=f"{self.name}-{passages}",
            passage_ids=[self.passage_ids[pid] for pid in rows],
            passages=[self.passages[pid] for pid in rows],
            query_ids=query_ids,
            queries=[texts[query_id] for query_id in query_ids],
            qrels={
                query_id: {p: grade for p, grade in self.qrels[query_id].items() if p in kept} for query_id in query_ids
            },
            details={**self.details, "slice_of": {"passages": len(self.passages), "queries": len(self.queries)}},
        )


def load_dataset(
    spec: str | os.PathLike[str],
    *,
    split: str = "auto",
    data: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Dataset:
    """The data set that `spec` names (see the table above). Nothing but an `ir_datasets` id can reach the network.

    split: a name, or "auto": the only one, else the first of test, dl19, dev, dev.small.
    data: folder of collections that may be given by bare name.
    cache: where pydocs is kept (see `eval.cache.cache_root`).
    Raises ValueError: unknown spec or split; a file that does not hold what it should, with its line.
    """
    spec = os.fspath(spec)
    base, size = _parse_slice(spec)
    if base == "pydocs":
        from .pydocs import DEFAULT_PASSAGES, build_pydocs

        folder = build_pydocs(size or DEFAULT_PASSAGES, cache=cache, progress=progress)
        dataset = load_beir(folder, split="test", name=f"pydocs-{size or DEFAULT_PASSAGES}", progress=progress)
        return replace(dataset, source="pydocs", details=json.loads((folder / "manifest.json").read_text()))
    dataset = _load(base, split, data, progress)
    return dataset if size is None else dataset.slice(size)


def load_beir(
    path: str | os.PathLike[str], *, split: str = "auto", name: str | None = None, progress: bool = True
) -> Dataset:
    """A BEIR folder, or the .tar.gz of one. Files may be gzipped. See `load_dataset`."""
    path = Path(path)
    files = _Archive(path) if path.is_file() else _Folder(path)
    corpus, queries = files.find("corpus.jsonl"), files.find("queries.jsonl")
    for wanted, found in (("corpus.jsonl", corpus), ("queries.jsonl", queries)):
        if found is None:
            raise ValueError(f"{path}: expected {wanted} or {wanted}.gz, got {files.listing()}")
    assert corpus is not None
    assert queries is not None
    splits = files.glob(r"qrels/(.+)\.tsv")
    chosen = _choose_split(path, splits, split)

    passage_ids, passages = [], []
    seen: set[str] = set()
    for where, row in _read_jsonl(files, corpus, progress):
        passage_ids.append(_unique(row, "_id", seen, where))
        title = row.get("title") or ""
        if not isinstance(title, str):
            raise ValueError(f"{where}: expected a string title, got {title!r}")
        passages.append(f"{title} {_text(row, 'text', where)}".strip())
    seen = set()
    texts = {_unique(row, "_id", seen, where): _text(row, "text", where) for where, row in _read_jsonl(files, queries)}
    qrels = _read_beir_qrels(files, splits[chosen])
    return _assemble(
        name or path.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz"),
        passage_ids, passages, texts, qrels, chosen, path.name, (files.label(queries), files.label(splits[chosen])),
        removes_own=True,
    )  # fmt: skip


def load_msmarco(
    collection: str | os.PathLike[str],
    queries: str | os.PathLike[str],
    qrels: str | os.PathLike[str],
    *,
    name: str = "msmarco",
    split: str = "",
    progress: bool = True,
) -> Dataset:
    """MS MARCO TSV files: `pid<TAB>text`, `qid<TAB>text`, `qid 0 pid grade`. See `load_dataset`."""
    passage_ids, passages = [], []
    seen: set[str] = set()
    for where, (passage_id, text) in _read_tsv(Path(collection), progress):
        passage_ids.append(_unique({"id": passage_id}, "id", seen, where))
        passages.append(text)
    seen = set()
    texts = {_unique({"id": q}, "id", seen, where): text for where, (q, text) in _read_tsv(Path(queries))}
    judged = _read_trec_qrels(Path(qrels))
    return _assemble(
        name, passage_ids, passages, texts, judged, split, Path(collection).name, (str(queries), str(qrels))
    )


def load_ir_dataset(identifier: str, *, progress: bool = True) -> Dataset:
    """A data set of the `ir_datasets` library, which downloads what it lacks.

    A passage is `doc.default_text()` without outer white space, so that `beir/X` equals the BEIR folder of X; a query
    likewise. Ids that begin with `beir/` follow BEIR's rule of equal ids.
    Raises ValueError when the id is unknown or has no passages, queries or judgments.
    """
    if importlib.util.find_spec("ir_datasets") is None:
        raise ValueError(f"{identifier!r}: expected ir_datasets to look this id up, got none: pip install ir_datasets")
    import ir_datasets

    try:
        source = ir_datasets.load(identifier)
    except KeyError as error:
        raise ValueError(f"expected a folder, an archive, a name or an ir_datasets id, got {identifier!r}") from error
    for part in ("docs", "queries", "qrels"):
        if not getattr(source, f"has_{part}")():
            raise ValueError(f"ir_datasets {identifier!r}: expected docs, queries and qrels, got none of its {part}")
    passage_ids, passages = [], []
    for doc in tqdm(source.docs_iter(), desc=f"{identifier} passages", unit=" passages", disable=not progress):
        passage_ids.append(doc.doc_id)
        passages.append(doc.default_text().strip())
    texts = {query.query_id: query.default_text() for query in source.queries_iter()}
    qrels: dict[str, dict[str, int]] = {}
    for judgment in source.qrels_iter():
        qrels.setdefault(judgment.query_id, {})[judgment.doc_id] = int(judgment.relevance)
    where = f"ir_datasets {identifier}"
    name = identifier.replace("/", "-")
    return _assemble(
        name, passage_ids, passages, texts, qrels, "", f"ir_datasets:{identifier}", (where, where),
        removes_own=identifier.startswith("beir/"),
    )  # fmt: skip


def write_beir(
    folder: Path,
    corpus: Iterable[tuple[str, str]],
    queries: Iterable[tuple[str, str]],
    qrels: Iterable[tuple[str, str, int]],
    split: str = "test",
) -> None:
    """Writes BEIR form: corpus.jsonl and queries.jsonl of (id, text), qrels/`split`.tsv of (query, passage, grade)."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for passage_id, text in corpus:
            file.write(json.dumps({"_id": passage_id, "title": "", "text": text}, ensure_ascii=False) + "\n")
    with open(folder / "queries.jsonl", "w", encoding="utf-8") as file:
        for query_id, text in queries:
            file.write(json.dumps({"_id": query_id, "text": text}, ensure_ascii=False) + "\n")
    with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8") as file:
        file.write("query-id\tcorpus-id\tscore\n")
        file.writelines(f"{query_id}\t{passage_id}\t{grade}\n" for query_id, passage_id, grade in qrels)


def _load(base: str, split: str, data: str | os.PathLike[str] | None, progress: bool) -> Dataset:
    if base.count(",") == 2:
        collection, queries, qrels = (Path(part).expanduser() for part in base.split(","))
        return load_msmarco(collection, queries, qrels, split="" if split == "auto" else split, progress=progress)
    candidates = [Path(base).expanduser()]
    if data is not None and os.sep not in base:
        candidates += [Path(data, base), Path(data, f"{base}.tar.gz")]
    for path in candidates:
        if path.is_file() and tarfile.is_tarfile(path):
            return load_beir(path, split=split, progress=progress)
        if path.is_dir():
            files = _Folder(path)
            if files.find("corpus.jsonl"):
                return load_beir(path, split=split, progress=progress)
            if files.find("collection.tsv"):
                return _load_msmarco_folder(files, split, progress)
            raise ValueError(
                f"{path}: expected corpus.jsonl (BEIR) or collection.tsv (MS MARCO), got {files.listing()}"
            )
        if path.is_file():
            raise ValueError(f"{path}: expected a folder or the .tar.gz of a BEIR folder, got another file")
    return load_ir_dataset(base, progress=progress)


def _load_msmarco_folder(files: _Folder, split: str, progress: bool) -> Dataset:
    queries = files.glob(r"queries\.(.+)\.tsv")
    qrels = files.glob(r"qrels\.(.+)\.(?:tsv|txt)")
    if plain := files.glob(r"()queries\.tsv"):
        queries.update(plain)
    if plain := files.glob(r"()qrels\.(?:tsv|txt)"):
        qrels.update(plain)
    splits = {name: qrels[name] for name in qrels if name in queries}
    chosen = _choose_split(files.path, splits, split)
    collection = files.find("collection.tsv")
    assert collection is not None
    return load_msmarco(
        files.path / collection, files.path / queries[chosen], files.path / qrels[chosen],
        name=files.path.name, split=chosen, progress=progress,
    )  # fmt: skip


def _assemble(
    name: str,
    passage_ids: list[str],
    passages: list[str],
    texts: dict[str, str],
    qrels: dict[str, dict[str, int]],
    split: str,
    source: str,
    where: tuple[str, str],
    *,
    removes_own: bool = False,
) -> Dataset:
    queries_file, qrels_file = where
    if not passages:
        raise ValueError(f"{source}: expected passages, got none")
    if not qrels:
        raise ValueError(f"{qrels_file}: expected judgments, got none")
    if missing := [query_id for query_id in qrels if query_id not in texts]:
        raise ValueError(
            f"{queries_file}: expected the text of each of the {len(qrels)} queries judged in {qrels_file}, "
            f"got none for {len(missing)} of them, e.g. {missing[0]!r}"
        )
    query_ids = [query_id for query_id in texts if query_id in qrels]
    dataset = Dataset(
        name, passage_ids, passages, query_ids, [texts[query_id] for query_id in query_ids],
        {query_id: qrels[query_id] for query_id in query_ids}, split, source, removes_own=removes_own,
    )  # fmt: skip
    if dataset.counts["judged_missing"] == dataset.counts["judgments"]:
        example = next(iter(next(iter(qrels.values()))))
        raise ValueError(f"{qrels_file}: expected ids of passages in {source}, got none of them, e.g. {example!r}")
    return dataset


def _choose_split(path: Path, splits: dict[str, str], split: str) -> str:
    if not splits:
        raise ValueError(f"{path}: expected judgments (qrels/SPLIT.tsv or qrels.SPLIT.tsv), got none")
    if split != "auto":
        if split not in splits:
            raise ValueError(f"{path}: expected a split among {', '.join(sorted(splits))}, got {split!r}")
        return split
    if len(splits) == 1:
        return next(iter(splits))
    for name in SPLIT_ORDER:
        if name in splits:
            return name
    raise ValueError(f"{path}: expected a split to be named, one of {', '.join(sorted(splits))}, got 'auto'")


class _Folder:
    """Files of a folder by relative name."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"{path}: expected a folder or a .tar.gz of one, got neither")
        self.path = path
        self.names = sorted(
            str(file.relative_to(path)) for pattern in ("*", "qrels/*") for file in path.glob(pattern) if file.is_file()
        )

    def find(self, name: str) -> str | None:
        """`name` or `name`.gz, whichever exists."""
        return next((n for n in (name, f"{name}.gz") if n in self.names), None)

    def glob(self, pattern: str) -> dict[str, str]:
        """First group of `pattern` -> file name; the plain file wins over its .gz."""
        found: dict[str, str] = {}
        for name in self.names:
            if match := re.fullmatch(pattern + r"(?:\.gz)?", name):
                found.setdefault(match.group(1), name)
        return found

    def listing(self) -> str:
        return ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "") if self.names else "no file"

    def label(self, name: str) -> str:
        return str(self.path / name)

    def open(self, name: str) -> IO[bytes]:
        return open(self.path / name, "rb")


class _Archive(_Folder):
    """Files of a tar archive that holds one folder; nothing is unpacked to disk."""

    def __init__(self, path: Path) -> None:
        if not tarfile.is_tarfile(path):
            raise ValueError(f"{path}: expected a folder or a .tar.gz of one, got another file")
        self.path = path
        self.tar = tarfile.open(path)  # noqa: SIM115 (read from while the data set loads, closed with the object)
        members = [member for member in self.tar.getmembers() if member.isfile()]
        corpora = [m.name for m in members if re.fullmatch(r"(.*/)?corpus\.jsonl(\.gz)?", m.name)]
        if len(corpora) != 1:
            raise ValueError(f"{path}: expected one corpus.jsonl in the archive, got {len(corpora)}")
        root = corpora[0].rpartition("/")[0]
        self.members = {m.name[len(root) + 1 :] if root else m.name: m for m in members if m.name.startswith(root)}
        self.names = sorted(self.members)

    def label(self, name: str) -> str:
        return f"{self.path}/{name}"

    def open(self, name: str) -> IO[bytes]:
        file = self.tar.extractfile(self.members[name])
        assert file is not None
        return file


def _lines(file: IO[bytes], label: str) -> Iterator[tuple[str, str]]:
    """(place, line) of a UTF-8 file, gunzipped when its name ends in .gz; blank lines are skipped."""
    number = 0
    try:
        plain = gzip.GzipFile(fileobj=file) if label.endswith(".gz") else file
        with file, io.TextIOWrapper(plain, encoding="utf-8", newline="\n") as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield f"{label}:{number}", line.rstrip("\r\n")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{label}:{number + 1}: expected UTF-8 text, got {error}") from error


def _read_jsonl(files: _Folder, name: str, progress: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    label = files.label(name)
    for where, line in tqdm(_lines(files.open(name), label), desc=name, unit=" passages", disable=not progress):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: expected a JSON object, got {error} in {line[:60]!r}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r}")
        yield where, row


def _read_tsv(path: Path, progress: bool = False) -> Iterator[tuple[str, tuple[str, str]]]:
    lines = _lines(_open(path), str(path))
    for where, line in tqdm(lines, desc=path.name, unit=" passages", disable=not progress):
        key, tab, text = line.partition("\t")
        if not tab or not key:
            raise ValueError(f"{where}: expected id<TAB>text, got {line[:60]!r}")
        yield where, (key, text.replace("\t", " "))


def _read_beir_qrels(files: _Folder, name: str) -> dict[str, dict[str, int]]:
    def parse(line: str) -> list[str] | None:
        row = line.split("\t")
        return row if len(row) == 3 else None

    lines = _lines(files.open(name), files.label(name))
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{files.label(name)}: expected judgments, got an empty file")
    # The header is a convention, not a rule: some exports lack it.
    rows = lines if first[1].split("\t")[-1].strip() == "score" else iter([first, *lines])
    return _qrels(rows, parse, "query-id<TAB>corpus-id<TAB>score")


def _read_trec_qrels(path: Path) -> dict[str, dict[str, int]]:
    def parse(line: str) -> list[str] | None:
        row = line.split()
        return [row[0], row[2], row[3]] if len(row) == 4 else None

    return _qrels(_lines(_open(path), str(path)), parse, "query-id 0 passage-id grade")


def _qrels(
    rows: Iterable[tuple[str, str]], parse: Callable[[str], list[str] | None], shape: str
) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    for where, line in rows:
        row = parse(line)
        if row is None or not re.fullmatch(r"-?\d+", row[2].strip()):
            raise ValueError(f"{where}: expected {shape} with a whole grade, got {line[:60]!r}")
        query_id, passage_id, grade = row[0], row[1], int(row[2])
        judged = qrels.setdefault(query_id, {})
        if judged.setdefault(passage_id, grade) != grade:
            raise ValueError(
                f"{where}: expected one grade for query {query_id!r} and passage {passage_id!r}, "
                f"got {judged[passage_id]} and {grade}"
            )
    return qrels


def _open(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, got none")
    return open(path, "rb")


def _unique(row: dict[str, Any], key: str, seen: set[str], where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: expected a string {key}, got {value!r}")
    if value in seen:
        raise ValueError(f"{where}: expected each {key} once, got {value!r} again")
    seen.add(value)
    return value


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected a string {key}, got {value!r}")
    return value


def _parse_slice(spec: str) -> tuple[str, int | None]:
    if os.path.exists(spec):
        return spec, None
    match = re.fullmatch(r"(.+?)(?:\[:(.*)\]|:([^/]*))", spec)
    if match is None:
        return spec, None
    size = match.group(2) or match.group(3) or ""
    if not re.fullmatch(r"[1-9][\d_]*", size):
        raise ValueError(f"expected {match.group(1)}:N with a whole N > 0, got {spec!r}")
    return match.group(1), int(size)


def _alternate(keys: Sequence[str], values: Sequence[str]) -> Iterator[str]:
    for key, value in zip(keys, values):
        yield key
        yield value
