"""The patches for colbert-ai: what applies them, and what they change, on the published files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

from plaid_tilemaxsim.patches import apply, find_target, load_series, patch_states, revert, status
from plaid_tilemaxsim.patches.__main__ import main
from plaid_tilemaxsim.patches.diff import blob_id, parse
from tests.colbert_fixtures import PASSAGES, checkpoint, collection, index  # noqa: F401
from tests.synthetic import make_queries

VERSION = "0.2.22"
WHEEL_SHA256 = "b829f0a26ba6cdb31c890fa136dd4aade20c5e03372e43cd3b5121466545e413"
PATCHES = Path(__file__).parents[1] / "patches"
SEARCHER = "colbert/searcher.py"


def tree(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed colbert-ai, as published whether or not it is patched."""
    root = tmp_path_factory.mktemp("installed")
    for file in metadata.files("colbert-ai") or ():
        if (file.parts[0] in ("colbert", "utility") and file.suffix != ".pyc") or file.name == "METADATA":
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), root / file)
    revert(root, load_series(VERSION))
    return root


@pytest.fixture
def target(installed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(installed, tmp_path / "site-packages"))


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest) -> Path:
    """The wheel that PyPI has, downloaded once."""
    folder = request.config.cache.mkdir(f"colbert-ai-{VERSION}")
    file = folder / f"colbert_ai-{VERSION}-py3-none-any.whl"
    if not file.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*command, "-d", str(folder), f"colbert-ai=={VERSION}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip could not download colbert-ai=={VERSION}: {done.stderr.strip().splitlines()[-1]}")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == WHEEL_SHA256
    return file


# what applies them


def test_apply_and_revert(target: Path) -> None:
    before, series = tree(target), load_series(VERSION)
    assert set(patch_states(target, series).values()) == {"not applied"}
    changed = apply(target, series)
    assert sorted(changed) == sorted(series.chains())
    assert all(change.done == change.total for change in status(target, series))
    assert set(patch_states(target, series).values()) == {"applied"}
    after = tree(target)
    assert {path for path in before if before[path] != after[path]} == set(changed)
    assert before.keys() == after.keys()
    assert apply(target, series) == []
    assert tree(target) == after
    assert sorted(revert(target, series)) == sorted(changed)
    assert tree(target) == before
    assert revert(target, series) == []


def test_result_is_python(target: Path) -> None:
    series = load_series(VERSION)
    apply(target, series)
    for path in series.chains():
        compile((target / path).read_bytes(), path, "exec")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_applies_the_same(target: Path, installed: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.copytree(installed, tmp_path / "git"))
    files = sorted((PATCHES / f"colbert-ai-{VERSION}").glob("*.patch"))
    # -C alone would look for a repository above; an empty one keeps git from finding ours.
    subprocess.run(["git", "init", "-q"], cwd=theirs, check=True)
    subprocess.run(["git", "apply", *map(str, files)], cwd=theirs, check=True)
    shutil.rmtree(theirs / ".git")
    apply(target, load_series(VERSION))
    assert tree(theirs) == tree(target)


def test_modified_file_is_refused(target: Path) -> None:
    series = load_series(VERSION)
    with open(target / SEARCHER, "a") as file:
        file.write("# mine\n")
    before = tree(target)
    for action in (apply, revert):
        with pytest.raises(ValueError, match=re.escape(SEARCHER)):
            action(target, series)
        assert tree(target) == before
    states = patch_states(target, series)
    assert states["02-scorer-registry"] == "file modified"
    assert states["07-transformers-5"] == "not applied"


def test_missing_file_is_refused(target: Path) -> None:
    (target / SEARCHER).unlink()
    with pytest.raises(ValueError, match=re.escape(SEARCHER)):
        apply(target, load_series(VERSION))


def test_interrupted_apply_goes_on(target: Path, installed: Path, tmp_path: Path) -> None:
    series = load_series(VERSION)
    complete = Path(shutil.copytree(installed, tmp_path / "complete"))
    apply(complete, series)
    chain = series.chains()[SEARCHER]
    assert len(chain) >= 3
    (target / SEARCHER).write_bytes(chain[0].apply((target / SEARCHER).read_bytes()))
    states = patch_states(target, series)
    assert (states["02-scorer-registry"], states["03-search-defaults-per-call"]) == ("applied", "not applied")
    apply(target, series)
    assert tree(target) == tree(complete)
    (target / SEARCHER).write_bytes(chain[0].apply((installed / SEARCHER).read_bytes()))
    revert(target, series)
    assert tree(target) == tree(installed)


def test_partly_applied_patch_is_reported(target: Path) -> None:
    series = load_series(VERSION)
    name = next(name for name, diffs in series.patches.items() if len(diffs) > 1)
    diff = series.chains()["colbert/search/index_storage.py"][0]
    (target / diff.path).write_bytes(diff.apply((target / diff.path).read_bytes()))
    assert patch_states(target, series)[name] == "partly applied"


def test_failed_write_leaves_files_whole(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, calls = tree(target), os.replace, []

    def replace(source: str, destination: Path) -> None:
        calls.append(destination)
        if len(calls) == 3:
            raise OSError("disk full")
        real(source, destination)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="disk full"):
        apply(target, load_series(VERSION))
    after = tree(target)
    assert after.keys() == before.keys()
    assert sum(before[path] != after[path] for path in before) == 2
    monkeypatch.undo()
    revert(target, load_series(VERSION))
    assert tree(target) == before


def test_mode_and_hard_links_are_kept(target: Path, tmp_path: Path) -> None:
    file, twin = target / SEARCHER, tmp_path / "cached.py"
    file.chmod(0o640)
    os.link(file, twin)
    pristine = twin.read_bytes()
    apply(target, load_series(VERSION))
    assert file.stat().st_mode & 0o777 == 0o640
    assert twin.read_bytes() == pristine != file.read_bytes()


def test_targets(target: Path, tmp_path: Path) -> None:
    assert find_target(target) == (target, VERSION)
    assert find_target()[1] == VERSION
    with pytest.raises(ValueError, match="colbert/__init__"):
        find_target(tmp_path)
    checkout = tmp_path / "checkout"
    shutil.copytree(target / "colbert", checkout / "colbert")
    with pytest.raises(ValueError, match="one version of colbert-ai"):
        find_target(checkout)
    (checkout / "setup.py").write_text("setuptools.setup(\n    name='colbert-ai',\n    version='0.2.22',\n)\n")
    assert find_target(checkout) == (checkout, VERSION)
    (checkout / "setup.py").write_text("setup(name='colbert-ai', version='0.3')\n")
    version = find_target(checkout)[1]
    with pytest.raises(ValueError, match=re.escape(f"['{VERSION}'], got '0.3'")):
        load_series(version)


def test_command(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--target", str(target)])
        return code, *capsys.readouterr()

    count = len(load_series(VERSION).patches)
    code, out, _ = run("status")
    assert code == 0
    assert f"0 of {count} patches applied" in out
    assert f"patches apply --target {target}" in out
    code, out, _ = run("apply")
    assert code == 0
    assert f"patches revert --target {target}" in out
    assert f"{count} of {count} patches applied" in run("status")[1]
    assert run("revert")[0] == 0
    (target / SEARCHER).write_text("")
    code, out, error = run("apply")
    assert code == 1
    assert SEARCHER in error
    assert "Traceback" not in error
    code, out, _ = run("status")
    assert code == 1
    assert "pip install --force-reinstall" in out


DIFF = (
    b"why\n\ndiff --git a/x.py b/x.py\nindex %s..%s 100644\n--- a/x.py\n+++ b/x.py\n"
    b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n@@ -5 +5,2 @@ context\n-e\n+E\n+F\n"
)
BEFORE, AFTER = b"a\nb\nc\nd\ne\n", b"a\nB\nc\nd\nE\nF\n"


def make_diff(before: bytes = BEFORE, after: bytes = AFTER) -> bytes:
    return DIFF % (blob_id(before).encode(), blob_id(after).encode())


def test_diff() -> None:
    (diff,) = parse(make_diff(), "x.patch")
    assert diff.apply(BEFORE) == AFTER
    assert diff.revert(AFTER) == BEFORE
    for wrong in (AFTER, BEFORE + b"\n", b""):
        with pytest.raises(ValueError, match=r"x\.py: expected content"):
            diff.apply(wrong)


def test_diff_that_lies() -> None:
    other = BEFORE.replace(b"b", b"z")
    (diff,) = parse(make_diff(before=other), "x.patch")
    with pytest.raises(ValueError, match=r"x\.py: line 1: expected"):
        diff.apply(other)
    (diff,) = parse(make_diff(after=other), "x.patch")
    with pytest.raises(ValueError, match=r"x\.py: expected a result"):
        diff.apply(BEFORE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"diff --git", b"dif", "expected at least one"),
        (b" 100644", b"", "full sha256 ids"),
        (b"@@ -1,3", b"@@ -1,4", "a hunk of"),
        (b"@@ -1,3", b"@ -1,3", "hunk header"),
        (b"\n c\n", b"\n\n c\n", "line of a hunk"),
        (b"+F\n", b"+F\n\\ No newline at end of file\n", "final newline"),
    ],
)
def test_broken_patch_files(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=rf"x\.patch: .*{message}"):
        parse(make_diff().replace(old, new), "x.patch")


def test_diffs_must_chain(tmp_path: Path) -> None:
    folder = tmp_path / f"colbert-ai-{VERSION}"
    folder.mkdir()
    for name in ("1.patch", "2.patch"):
        (folder / name).write_bytes(make_diff())
    with pytest.raises(ValueError, match=r"2: x\.py"):
        load_series(VERSION, tmp_path).chains()


def test_every_patch_is_described() -> None:
    rows = re.findall(r"^\| (\d\d-\S+) \|", (PATCHES / "README.md").read_text(), flags=re.MULTILINE)
    assert rows == list(load_series(VERSION).patches)


# what they change

# A user's program: the flag, and no import of ours.
PROGRAM = """
import json, os, sys
from multiprocessing import active_children

import torch
from colbert import Searcher
from colbert.infra import ColBERTConfig, RunConfig, Run
from colbert.infra.launcher import Launcher
from colbert.indexing.codecs.residual_embeddings import ResidualEmbeddings


def die(config):
    os._exit(3)


def found(searcher, **arguments):
    pids, ranks, scores = searcher.dense_search(Q, **arguments)
    return dict(pids=pids, ranks=ranks, scores=scores)


if __name__ == "__main__":
    index, checkpoint, collection, queries = sys.argv[1:]
    root, name = os.path.split(index)
    out = {"file": sys.modules["colbert"].__file__, "ours_before": "plaid_tilemaxsim" in sys.modules}
    Q = torch.load(queries)
    config = ColBERTConfig.from_existing(ColBERTConfig(scorer="tilemaxsim", scorer_options={"impl": "torch"}))
    out["fields"] = [config.scorer, config.scorer_options, ColBERTConfig().scorer]

    def searcher(config):
        return Searcher(name, checkpoint=checkpoint, collection=collection, index_root=root, config=config)

    ours = searcher(config)
    out["ranker"] = type(ours.ranker).__name__
    out["k5"], out["k200"] = found(ours, k=5), found(ours, k=200)
    out["none"] = found(ours, k=5, pids=[])
    out["given"] = found(ours, k=5, pids=[3, 1])
    out["text"] = len(ours.search("bana", k=7)[0])
    out["pinned"] = [ours.config.ncells, ours.config.centroid_score_threshold, ours.config.ndocs]
    ours.config.configure(scorer="tilemaxim")
    for make in (lambda: found(ours, k=5), lambda: searcher(ColBERTConfig(scorer="tilemaxim"))):
        try:
            make()
        except ValueError as error:
            out["unknown"] = str(error)

    n = len(torch.load(index + "/0.codes.pt"))
    plain = ResidualEmbeddings.load_chunks(index, range(1), n)
    mapped = ResidualEmbeddings.load_chunks(index, range(1), n, load_index_with_mmap=True)
    same = torch.equal(plain.codes[:n], mapped.codes) and torch.equal(plain.residuals[:n], mapped.residuals)
    out["mmap"] = n > 0 and same

    with Run().context(RunConfig(nranks=2)):
        try:
            Launcher(die).launch(ColBERTConfig())
        except RuntimeError as error:
            out["dead"] = str(error)
    out["children"] = len(active_children())
    ColBERTConfig().save("saved.json")
    print("RESULT " + json.dumps(out))
"""


# The plugin in a program whose colbert-ai has the flag by itself.
BOTH_PROGRAM = """
import json, os, sys

import plaid_tilemaxsim
import torch

plaid_tilemaxsim.enable()
from colbert import Searcher
from colbert.infra import ColBERTConfig

index, checkpoint, collection, queries = sys.argv[1:]
root, name = os.path.split(index)
Q = torch.load(queries)
config = ColBERTConfig(scorer="tilemaxsim")
searcher = Searcher(name, checkpoint=checkpoint, collection=collection, index_root=root, config=config)
out = {"pids": searcher.dense_search(Q, k=5)[0], "ranker": type(searcher.ranker).__name__}
try:
    searcher.config.configure(scorer_options={"mod": "plaid"})
    searcher.dense_search(Q, k=5)
except ValueError as error:
    out["unknown"] = str(error)
plaid_tilemaxsim.disable()
config = ColBERTConfig.from_existing(config, ColBERTConfig(scorer_options={"mode": "rerank"}))
out["disabled"] = [config.scorer, config.scorer_options]
plaid_tilemaxsim.enable()
out["again"] = ColBERTConfig.from_existing(config).scorer
print("RESULT " + json.dumps(out))
"""


def run_patched(program: str, root: Path, folder: Path, arguments: list[str]) -> dict:
    (folder / "program.py").write_text(program)
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "CUDA_VISIBLE_DEVICES": "",
        "GIT_PYTHON_REFRESH": "raise",
        "PATH": str(folder),  # no git here
        "GIT_PYTHON_GIT_EXECUTABLE": "",
    }
    done = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def arguments(
    index: Path,  # noqa: F811
    checkpoint: Path,  # noqa: F811
    collection: list[str],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """Of the programs: an index, its checkpoint and collection, and the file of a query."""
    folder = tmp_path_factory.mktemp("arguments")
    texts, queries = folder / "collection.tsv", folder / "queries.pt"
    texts.write_text("".join(f"{pid}\t{text}\n" for pid, text in enumerate(collection)))
    torch.save(make_queries(index, n=1), queries)
    return [str(index), str(checkpoint), str(texts), str(queries)]


def test_published_wheel_searches_with_the_flag(
    wheel: Path,
    installed: Path,
    arguments: list[str],
    tmp_path: Path,
) -> None:
    root = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    published = tree(root)
    assert {path: published[path] for path in tree(installed)} == tree(installed)
    assert main(["apply", "--target", str(root)]) == 0

    out = run_patched(PROGRAM, root, tmp_path, arguments)

    assert out["file"] == str(root / "colbert" / "__init__.py")
    assert out["ours_before"] is False
    assert out["fields"] == ["tilemaxsim", {"impl": "torch"}, "plaid"]
    assert out["ranker"] == "TileMaxSimScorer"
    for name, k in (("k5", 5), ("k200", 200)):
        found, wanted = out[name], oracle(Path(arguments[0]), torch.load(arguments[3])[0], out[name]["pids"])
        assert len(found["pids"]) == len(found["ranks"]) == len(found["scores"])
        assert found["ranks"] == list(range(1, len(found["pids"]) + 1))
        assert torch.tensor(found["scores"]).sub(wanted).abs().max() < 2e-3
        assert torch.tensor(found["scores"]).sub(wanted.roll(1)).abs().max() > 2e-3  # rejects shuffled scores
        assert found["scores"] == sorted(found["scores"], reverse=True)
        assert len(found["pids"]) <= k
    assert len(out["k5"]["pids"]) == 5
    # the search with k=5 does not decide how far the one with k=200 looks: stock would keep 256 // 4
    assert len(out["k200"]["pids"]) > 64
    assert out["pinned"] == [None, None, None]
    assert out["none"] == {"pids": [], "ranks": [], "scores": []}
    assert sorted(out["given"]["pids"]) == [1, 3]
    assert out["text"] == 7
    assert "['plaid', 'tilemaxsim']" in out["unknown"]
    assert out["mmap"] is True
    assert "a child process died" in out["dead"]
    assert out["children"] == 0
    assert json.loads((tmp_path / "saved.json").read_text())["scorer"] == "plaid"

    assert main(["revert", "--target", str(root)]) == 0
    assert tree(root) == published


def test_plugin_beside_the_patches(target: Path, arguments: list[str], tmp_path: Path) -> None:
    apply(target, load_series(VERSION))
    out = run_patched(BOTH_PROGRAM, target, tmp_path, arguments)
    wanted = oracle(Path(arguments[0]), torch.load(arguments[3])[0], list(range(PASSAGES)))
    assert out["ranker"] == "TileMaxSimScorer"
    assert out["pids"][0] == int(wanted.argmax())
    assert "mode" in out["unknown"]
    assert out["disabled"] == ["tilemaxsim", {"mode": "rerank"}]
    assert out["again"] == "tilemaxsim"


def oracle(index: Path, Q: torch.Tensor, pids: list[int]) -> torch.Tensor:  # noqa: F811
    from plaid_tilemaxsim.index.files import read_index
    from plaid_tilemaxsim.ops.reference import residual_maxsim

    stored = read_index(index)
    return residual_maxsim(
        Q,
        stored.codes(),
        stored.residuals(),
        stored.centroids,
        stored.bucket_weights,
        stored.nbits,
        stored.offsets,
        torch.tensor(pids),
    ).float()
