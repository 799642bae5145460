from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from eval.datasets import Dataset, load_beir, load_dataset, load_ir_dataset, load_msmarco, write_beir

CORPUS = [("d1", "Title", "first text"), ("d2", "", ""), ("d3", "", "third\ttext\nwith breaks"), ("q2", "", "own text")]
QUERIES = [("q3", "not judged"), ("q1", "first query"), ("q2", "own text")]
QRELS = [("q2", "d1", 0), ("q2", "d3", 2), ("q1", "d1", 1), ("q1", "d9", 1)]


def write(path: Path, text: str, *, gz: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if gz:
        with gzip.open(f"{path}.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def make_beir(folder: Path, *, gz: bool = False, splits: tuple[str, ...] = ("test",), header: bool = True) -> Path:
    rows = [json.dumps({"_id": i, "title": title, "text": text}) for i, title, text in CORPUS]
    write(folder / "corpus.jsonl", "\n".join(rows) + "\n", gz=gz)
    write(folder / "queries.jsonl", "".join(json.dumps({"_id": i, "text": t}) + "\n" for i, t in QUERIES), gz=gz)
    lines = ["query-id\tcorpus-id\tscore"] * header + [f"{q}\t{d}\t{g}" for q, d, g in QRELS]
    for split in splits:
        write(folder / "qrels" / f"{split}.tsv", "\n".join(lines) + "\n", gz=gz)
    return folder


def make_msmarco(folder: Path, *, gz: bool = False, suffix: str = "tsv") -> Path:
    write(folder / "collection.tsv", "0\tpassage zero\n1\t\n2\tpassage\ttwo\n", gz=gz)
    write(folder / "queries.dev.small.tsv", "7\tseven?\n8\teight\n9\tnot judged\n", gz=gz)
    write(folder / f"qrels.dev.small.{suffix}", "8 0 2 1\n7\t0\t0\t1\n7 Q0 1 0\n", gz=gz)
    return folder


def check_beir(dataset: Dataset) -> None:
    assert list(dataset.passage_ids) == ["d1", "d2", "d3", "q2"]
    assert list(dataset.passages) == ["Title first text", "", "third\ttext\nwith breaks", "own text"]
    assert list(dataset.query_ids) == ["q1", "q2"]
    assert list(dataset.queries) == ["first query", "own text"]
    assert dataset.qrels == {"q1": {"d1": 1, "d9": 1}, "q2": {"d1": 0, "d3": 2}}
    assert dataset.counts == {
        "passages": 4, "empty_passages": 1, "queries": 2, "judgments": 4, "relevant": 3, "judged_missing": 1,
        "own_passages": 1,
    }  # fmt: skip


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("header", [False, True])
def test_beir_folder(tmp_path: Path, gz: bool, header: bool) -> None:
    check_beir(load_dataset(make_beir(tmp_path / "tiny", gz=gz, header=header), progress=False))


@pytest.mark.parametrize("root", ["tiny", "some/where/tiny", "."])
def test_beir_archive(tmp_path: Path, root: str) -> None:
    folder = make_beir(tmp_path / "tiny")
    archive = tmp_path / "packed" / "tiny.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=root)
    dataset = load_dataset(archive, progress=False)
    check_beir(dataset)
    assert dataset.name == "tiny"
    unpacked = load_dataset("tiny", data=tmp_path, progress=False)
    packed = load_dataset("tiny", data=archive.parent, progress=False)
    for other in (unpacked, packed):
        assert other.identity()["sha256"] == dataset.identity()["sha256"]
    # A result names the data, not the machine's folders.
    assert str(tmp_path) not in json.dumps(dataset.identity())


def test_own_passage_is_left_out_in_beir_alone(tmp_path: Path) -> None:
    dataset = load_beir(make_beir(tmp_path / "tiny"), progress=False)
    assert dataset.own_passage("q1") is None
    assert dataset.own_passage("q2") == 3
    dataset.qrels["q2"]["q2"] = 1  # BEIR does not ask
    assert dataset.own_passage("q2") == 3
    folder = make_msmarco(tmp_path / "marco")
    write(folder / "queries.dev.small.tsv", "2\ttwo\n", gz=False)
    write(folder / "qrels.dev.small.tsv", "2 0 1 1\n", gz=False)
    assert load_dataset(folder, progress=False).own_passage("2") is None


def test_digests_tell_what_changed(tmp_path: Path) -> None:
    folder = make_beir(tmp_path / "tiny")
    first = load_beir(folder, progress=False)
    swapped = Dataset(
        "tiny", first.passage_ids, [first.passages[0] + first.passages[1], "", *first.passages[2:]],
        first.query_ids, first.queries, first.qrels,
    )  # fmt: skip
    assert swapped.passages_digest == first.passages_digest  # the same texts
    moved = Dataset(
        "tiny", first.passage_ids, ["", first.passages[0], *first.passages[2:]],
        first.query_ids, first.queries, {**first.qrels, "q1": {"d1": 2}},
    )  # fmt: skip
    assert moved.passages_digest != first.passages_digest
    assert moved.queries_digest == first.queries_digest
    assert moved.qrels_digest != first.qrels_digest


@pytest.mark.parametrize(
    ("splits", "asked", "expected"),
    [
        (("train",), "auto", "train"),
        (("train", "test", "dev"), "auto", "test"),
        (("train", "dl19", "dev"), "auto", "dl19"),
        (("train", "test"), "train", "train"),
    ],
)
def test_split(tmp_path: Path, splits: tuple[str, ...], asked: str, expected: str) -> None:
    folder = make_beir(tmp_path / "tiny", splits=splits)
    assert load_dataset(folder, split=asked, progress=False).split == expected


def test_unknown_or_ambiguous_split(tmp_path: Path) -> None:
    folder = make_beir(tmp_path / "tiny", splits=("a", "b"))
    with pytest.raises(ValueError, match="expected a split among a, b, got 'test'"):
        load_dataset(folder, split="test", progress=False)
    with pytest.raises(ValueError, match="expected a split to be named, one of a, b, got 'auto'"):
        load_dataset(folder, progress=False)


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("suffix", ["tsv", "txt"])
def test_msmarco_folder(tmp_path: Path, gz: bool, suffix: str) -> None:
    folder = make_msmarco(tmp_path / "ms", gz=gz, suffix=suffix)
    dataset = load_dataset(folder, progress=False)
    assert (dataset.name, dataset.split) == ("ms", "dev.small")
    assert list(dataset.passages) == ["passage zero", "", "passage two"]
    assert list(dataset.query_ids) == ["7", "8"]
    assert dataset.qrels == {"8": {"2": 1}, "7": {"0": 1, "1": 0}}
    end = ".gz" * gz
    names = ("collection.tsv", "queries.dev.small.tsv", f"qrels.dev.small.{suffix}")
    by_path = load_dataset(",".join(str(folder / name) + end for name in names), progress=False)
    assert by_path.identity()["sha256"] == dataset.identity()["sha256"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.jsonl", '{"_id": "d1", "text": "x"}\n{"_id": \n', r"corpus.jsonl:2: expected a JSON object, got"),
        ("corpus.jsonl", "[1]\n", r"corpus.jsonl:1: expected a JSON object, got '\[1\]'"),
        ("corpus.jsonl", '{"_id": 3, "text": "x"}\n', "corpus.jsonl:1: expected a string _id, got 3"),
        ("corpus.jsonl", '{"_id": "d1"}\n', "corpus.jsonl:1: expected a string text, got None"),
        ("corpus.jsonl", '{"_id": "d1", "title": 1, "text": "x"}\n', "corpus.jsonl:1: expected a string title, got 1"),
        (
            "corpus.jsonl",
            '{"_id": "d1", "text": "x"}\n\n{"_id": "d1", "text": "y"}\n',
            "corpus.jsonl:3: expected each _id once, got 'd1' again",
        ),
        ("corpus.jsonl", "", "expected passages, got none"),
        ("queries.jsonl", '{"_id": "q1", "text": "x"}\n', r"queries.jsonl: expected the text of each of the 2.*'q2'"),
        ("qrels/test.tsv", "", r"test.tsv: expected judgments, got an empty file"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", r"test.tsv: expected judgments, got none"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\n", r"test.tsv:2: expected query-id<TAB>.*'q1\\td1'"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t0.5\n", r"test.tsv:2: expected .*whole grade"),
        ("qrels/test.tsv", "q1\td1\t1\nq1\td1\t2\n", r"test.tsv:2: expected one grade .*'q1'.*'d1', got 1 and 2"),
        (
            "qrels/test.tsv",
            "q1\tx\t1\nq2\ty\t1\n",
            r"test.tsv: expected ids of passages in tiny, got none of them.*'x'",
        ),
    ],
)
def test_broken_beir(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = make_beir(tmp_path / "tiny")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_dataset(folder, progress=False)


def test_broken_bytes_and_gzip(tmp_path: Path) -> None:
    folder = make_beir(tmp_path / "a")
    (folder / "queries.jsonl").write_bytes(b'{"_id": "q1", "text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"queries.jsonl:1: expected UTF-8 text"):
        load_dataset(folder, progress=False)
    folder = make_beir(tmp_path / "b", gz=True)
    whole = (folder / "corpus.jsonl.gz").read_bytes()
    (folder / "corpus.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"corpus.jsonl.gz:\d+: expected"):
        load_dataset(folder, progress=False)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("collection.tsv", "0 no tab\n", r"collection.tsv:1: expected id<TAB>text, got '0 no tab'"),
        ("collection.tsv", "0\ta\n0\tb\n", r"collection.tsv:2: expected each id once, got '0' again"),
        ("qrels.dev.small.tsv", "7 0 0\n", r"qrels.dev.small.tsv:1: expected query-id 0 passage-id grade"),
    ],
)
def test_broken_msmarco(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = make_msmarco(tmp_path / "ms")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_dataset(folder, progress=False)


def test_what_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"expected corpus.jsonl \(BEIR\) or collection.tsv.*got no file"):
        load_dataset(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"expected a folder or the .tar.gz of a BEIR folder, got another file"):
        load_dataset(tmp_path / "file")
    with pytest.raises(ValueError, match="expected a file, got none"):
        load_msmarco(tmp_path / "c", tmp_path / "q", tmp_path / "r")
    shutil.rmtree(make_beir(tmp_path / "half") / "qrels")
    with pytest.raises(ValueError, match="expected judgments"):
        load_dataset(tmp_path / "half", progress=False)


@pytest.mark.parametrize("spec", ["pydocs:", "pydocs:0", "pydocs:many", "pydocs[:0]", "pydocs[:]", "scifact:-1"])
def test_what_is_no_slice(spec: str) -> None:
    with pytest.raises(ValueError, match=r"expected (pydocs|scifact):N with a whole N > 0, got"):
        load_dataset(spec)


def make_graded(folder: Path, passages: int, queries: int) -> Path:
    write_beir(
        folder,
        ((f"d{i}", f"text {i}") for i in range(passages)),
        ((f"q{i}", f"query {i}") for i in range(queries)),
        ((f"q{i}", f"d{(7 * i + j) % passages}", int(j < 2)) for i in range(queries) for j in range(4)),
    )
    return folder


def test_slice_keeps_relevant_passages_and_is_repeatable(tmp_path: Path) -> None:
    folder = make_graded(tmp_path / "many", 200, 40)
    whole = load_dataset(folder, progress=False)
    part = load_dataset(f"{folder}[:50]", progress=False)
    assert part.name == "many-50"
    assert part.counts["passages"] == 50
    assert 10 <= part.counts["queries"] < 40
    assert part.counts["judged_missing"] == 0
    positions = [whole.pids[p] for p in part.passage_ids]
    assert positions == sorted(positions)
    for query_id in part.query_ids:
        assert {p for p, g in part.qrels[query_id].items() if g} == {p for p, g in whole.qrels[query_id].items() if g}
    assert load_dataset(f"{folder}:50", progress=False).identity() == part.identity()
    assert whole.slice(200) is whole
    with pytest.raises(ValueError, match="expected a slice that holds some query's relevant passages, got 3"):
        whole.slice(3)


def test_first_queries(tmp_path: Path) -> None:
    dataset = load_dataset(make_graded(tmp_path / "many", 50, 10), progress=False).first_queries(3)
    assert list(dataset.query_ids) == ["q0", "q1", "q2"]
    assert set(dataset.qrels) == {"q0", "q1", "q2"}
    assert len(dataset.queries) == 3


def test_ir_datasets_id(tmp_path: Path) -> None:
    """The library's own code on a data set registered here."""
    ir_datasets = pytest.importorskip("ir_datasets")
    from ir_datasets.formats import TrecQrels, TsvDocs, TsvQueries
    from ir_datasets.util import StringFile

    docs = TsvDocs(StringFile("d1\tfirst passage\nd2\tsecond passage\n"))
    queries = TsvQueries(StringFile("q1\tfirst\nq2\tnot judged\n"))
    qrels = TrecQrels(StringFile("q1 0 d2 1\nq1 0 d1 0\n"), {0: "no", 1: "yes"})
    if "local-tiny/test" not in ir_datasets.registry:
        ir_datasets.registry.register("local-tiny/test", ir_datasets.Dataset(docs, queries, qrels))
        ir_datasets.registry.register("local-tiny", ir_datasets.Dataset(docs))
    dataset = load_dataset("local-tiny/test", progress=False)
    assert dataset.source == "ir_datasets:local-tiny/test"
    assert list(dataset.passages) == ["first passage", "second passage"]
    assert list(dataset.query_ids) == ["q1"]
    assert dataset.qrels == {"q1": {"d1": 0, "d2": 1}}
    with pytest.raises(ValueError, match="expected docs, queries and qrels, got none of its queries"):
        load_ir_dataset("local-tiny", progress=False)
    with pytest.raises(ValueError, match=r"expected a folder, an archive, a name or an ir_datasets id, got 'no-such'"):
        load_dataset("no-such", data=tmp_path, progress=False)


class LocalFile:
    """What ir_datasets calls a download: a file that is there already."""

    def __init__(self, path: Path) -> None:
        self.file = path

    def path(self) -> str:
        return str(self.file)

    def stream(self):
        return open(self.file, "rb")


def register_beir(folder: Path, name: str, split: str) -> str:
    """A BEIR folder under `beir/NAME` in the library's own classes for BEIR; returns the id."""
    import ir_datasets
    from ir_datasets.datasets import beir
    from ir_datasets.formats import GenericQuery

    identifier = f"beir/{name}"
    if identifier not in ir_datasets.registry:
        docs = beir.BeirDocs(name, LocalFile(folder / "corpus.jsonl"), beir.BeirTitleDoc)
        queries = beir.BeirQueries(name, LocalFile(folder / "queries.jsonl"), GenericQuery)
        qrels = beir.BeirQrels(LocalFile(folder / "qrels" / f"{split}.tsv"), {})
        ir_datasets.registry.register(identifier, ir_datasets.Dataset(docs, queries, qrels))
    return identifier


def test_beir_by_id_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ir_datasets")
    monkeypatch.setenv("IR_DATASETS_HOME", str(tmp_path / "home"))
    folder = make_beir(tmp_path / "tiny")
    check_beir(load_dataset(register_beir(folder, "local-tiny", "test"), progress=False))


@pytest.mark.parametrize(("name", "split"), [("scifact", "test"), ("msmarco-mini", "dl19")])
def test_real_collections_by_id(dataset_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name, split) -> None:
    pytest.importorskip("ir_datasets")
    monkeypatch.setenv("IR_DATASETS_HOME", str(tmp_path / "home"))
    folder = dataset_folder(name)
    by_id = load_dataset(register_beir(folder, f"local-{name}", split), progress=False)
    by_folder = load_dataset(folder, split=split, progress=False)
    assert by_id.identity()["sha256"] == by_folder.identity()["sha256"]
    assert by_id.counts == by_folder.counts


@pytest.mark.parametrize(
    ("name", "split", "passages", "queries", "judgments", "empty"),
    [
        ("scifact", "test", 5_183, 300, 339, 0),
        ("msmarco-mini", "dl19", 18_570, 43, 4_109, 0),
        ("msmarco-mini", "train", 18_570, 11_992, 12_677, 0),
        ("nfcorpus-processed", "test", 3_395, 323, 12_334, 0),
        ("vaswani", "test", 11_429, 93, 2_083, 0),
        ("cranfield", "test", 1_400, 225, 1_612, 2),
    ],
)
def test_real_collections(
    dataset_folder, name: str, split: str, passages: int, queries: int, judgments: int, empty: int
):
    dataset = load_dataset(dataset_folder(name), split=split, progress=False)
    counts = dataset.counts
    assert counts["passages"] == passages
    assert counts["queries"] == queries
    assert counts["judgments"] == judgments
    assert counts["empty_passages"] == empty
    assert counts["judged_missing"] == 0
    if name == "cranfield":
        assert counts["own_passages"] == 225
