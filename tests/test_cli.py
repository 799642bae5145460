"""The command line: an unmodified program runs as under python, only with another scorer."""

import json
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

import plaid_tilemaxsim
from plaid_tilemaxsim import cli
from plaid_tilemaxsim.engine import SearchEngine
from tests.colbert_fixtures import checkpoint, collection, index  # noqa: F401
from tests.synthetic import make_index

CLI = [sys.executable, "-W", "ignore", "-m", "plaid_tilemaxsim"]


def run(*arguments: object, cwd: object = None) -> "subprocess.CompletedProcess[str]":
    command = [*CLI, *map(str, arguments)]
    return subprocess.run(
        command, cwd=str(cwd) if cwd else None, capture_output=True, text=True, timeout=300, check=False
    )


PROGRAM = """
    import json
    import os
    import sys

    from colbert import Searcher
    from colbert.infra import ColBERTConfig, Run, RunConfig

    assert __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__
    index, checkpoint, collection, where = sys.argv[1:]

    if __name__ == "__main__":
        passages = json.load(open(collection))
        with Run().context(RunConfig(root=where, experiment="e")):
            searcher = Searcher(index, checkpoint=checkpoint, collection=passages, verbose=1)
            ranking = searcher.search_all(dict(enumerate(passages[:2])), k=120)
            # colbert derives this path from __main__.__file__
            ranking.save("ranking.tsv")
        print(json.dumps({
            "ranker": type(searcher.ranker).__name__,
            "scorer": getattr(searcher.config, "scorer", None),
            "options": getattr(searcher.config, "scorer_options", None),
            "ncells": searcher.config.ncells,
            "results": len(ranking.data[0]),
            "name": __name__,
            "path": sys.path[0],
            "argv": sys.argv[0],
        }))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program") / "pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "search.py").write_text(textwrap.dedent(PROGRAM))
    return folder / "search.py"


@pytest.fixture
def arguments(tmp_path, index, checkpoint, collection):  # noqa: F811
    (tmp_path / "collection.json").write_text(json.dumps(collection))
    return [index, checkpoint, tmp_path / "collection.json", tmp_path / "out"]


def printed(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


class TestRun:
    def test_script(self, program, arguments, tmp_path):
        result = printed(run("run", "--scorer-options", '{"mode": "exhaustive"}', "--", program, *arguments))
        assert result == {
            "ranker": "TileMaxSimScorer",
            "scorer": "tilemaxsim",
            "options": {"mode": "exhaustive"},
            "ncells": None,
            "results": 120,
            "name": "__main__",
            "path": str(program.parent),
            "argv": str(program),
        }
        assert len(list((tmp_path / "out").rglob("ranking.tsv"))) == 1

    def test_module(self, program, arguments):
        result = printed(run("run", "-m", "pkg.search", *arguments, cwd=program.parent.parent))
        assert (result["scorer"], result["options"], result["results"]) == ("tilemaxsim", None, 120)
        assert result["argv"] == str(program)

    @pytest.fixture
    def here(self, monkeypatch):
        """Lets a program be run in this process."""
        for owner, name in ((sys, "argv"), (sys, "path")):
            monkeypatch.setattr(owner, name, list(getattr(owner, name)))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        yield
        plaid_tilemaxsim.disable()

    @pytest.mark.usefixtures("here")
    def test_arguments_are_the_programs(self, tmp_path, capsys):
        script = tmp_path / "show.py"
        script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
        with pytest.raises(SystemExit) as left:
            cli.main(["run", str(script), "--scorer", "x", "-m", "--help"])
        assert left.value.code == 3
        assert capsys.readouterr().out == "['--scorer', 'x', '-m', '--help']\n"
        assert plaid_tilemaxsim.is_enabled()

    @pytest.mark.usefixtures("here")
    def test_programs_error_is_its_own(self, tmp_path):
        script = tmp_path / "fail.py"
        script.write_text("x = 1\nraise ValueError('of the program')\n")
        with pytest.raises(ValueError, match="of the program") as error:
            cli.main(["run", "--", str(script)])
        assert (str(error.traceback[-1].path), error.traceback[-1].lineno) == (str(script), 1)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["run"], "expected a script, or -m and a module"),
            (["run", "-m"], "expected a script, or -m and a module"),
            (["run", "nowhere.py"], "expected a Python file, got 'nowhere.py'"),
            (["run", "-m", "no_such_module"], "expected a module that can be run, got 'no_such_module'"),
            (["run", "-m", "no.such"], "No module named 'no'"),
            (["run", "--scorer-options", "[1]", "x.py"], r"expected a JSON object, got '[1]'"),
            (["run", "--scorer-options", "{", "x.py"], "expected a JSON object, got '{'"),
            (["nothing"], "invalid choice"),
            ([], "required: COMMAND"),
        ],
    )
    def test_usage_errors(self, arguments, message, capsys, here):
        with pytest.raises(SystemExit) as error:
            cli.main(arguments)
        assert error.value.code == 2
        assert message in capsys.readouterr().err

    def test_unknown_scorer(self, program):
        done = run("run", "--scorer", "tilemax", program)
        assert done.returncode == 2
        assert "scorer: expected one of ['plaid', 'tilemaxsim'], got 'tilemax'" in done.stderr
        assert "Traceback" not in done.stderr


def test_inspect(index, tmp_path, capsys):  # noqa: F811
    assert cli.main(["inspect", str(index)]) == 0
    assert "300" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "plaid-tilemaxsim: " in capsys.readouterr().err


def test_env(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PLAID_TILEMAXSIM_TUNING", "h200.json")
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    for name in ("plugin", "torch", "triton", "colbert-ai", "transformers", "driver", "gpu", "scoring"):
        assert f"\n{name}" in "\n" + out
    assert f"{tmp_path} (0 entries)" in out
    assert "PLAID_TILEMAXSIM_TUNING=h200.json" in out


def test_env_of_a_cache_that_cannot_be_read(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for folder, said in (("file", "cannot be read: Not a directory"), ("none", "not there yet")):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        assert cli.main(["env"]) == 0
        assert f"{tmp_path / folder} ({said})" in capsys.readouterr().out


@pytest.mark.gpu
def test_env_names_kernels_and_driver(capsys):
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\ndriver +\d+\.\d+", out)
    assert "for 128 dimensions: residual 1 bits fast, " in out


@pytest.mark.parametrize("command", [[], ["run"], ["inspect"], ["pq"], ["env"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main([*command, "--help"])
    assert error.value.code == 0
    assert "usage: plaid-tilemaxsim" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"plaid-tilemaxsim {plaid_tilemaxsim.__version__}\n"


def test_a_name_is_found_where_colbert_puts_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments/default/indexes/my.index").mkdir(parents=True)
    assert cli.main(["inspect", "my.index"]) == 2
    assert "got none; did you mean experiments/default/indexes/my.index?" in capsys.readouterr().err
    assert cli.main(["inspect", "your.index"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_warmup_says_when_it_is_ready(tmp_path, capsys):
    make_index(tmp_path / "index", n=60, dim=64)
    assert cli.main(["warmup", str(tmp_path / "index"), "--k", "5", "--query-maxlen", "8"]) == 0
    assert "k=5: ready after" in capsys.readouterr().out
    for arguments, message in (
        (["index", "--scorer-options", '{"moed": 1}'], "scorer_options: expected names from"),
        (["none"], "folder: expected a folder that holds a PLAID index, got none"),
    ):
        assert cli.main(["warmup", str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def searched(monkeypatch):
    """The engines, shards among them, that were asked for a search."""
    found = set()

    def noted(method):
        def wrapped(engine, *args, **kwargs):
            found.add(engine)
            return method(engine, *args, **kwargs)

        return wrapped

    for name in ("search", "survivors"):
        monkeypatch.setattr(SearchEngine, name, noted(getattr(SearchEngine, name)))
    return found


@pytest.mark.parametrize("more", [{"devices": ["cpu"] * 3}, {"devices": ["cpu"] * 4, "replicas": 2}], ids=str)
@pytest.mark.parametrize("mode", ["plaid", "exhaustive"])
def test_warmup_reaches_every_shard_of_every_replica(tmp_path, searched, capsys, mode, more):
    path = str(make_index(tmp_path / "index", n=60, dim=64))
    options = {"mode": mode, **more}
    assert cli.main(["warmup", path, "--k", "5", "--query-maxlen", "8", "--scorer-options", json.dumps(options)]) == 0
    assert f"ms on {', '.join(more['devices'])}\n" in capsys.readouterr().out
    assert len([engine for engine in searched if type(engine) is SearchEngine]) == len(more["devices"])
    searched.clear()
    config = SimpleNamespace(scorer="tilemaxsim", scorer_options=options, query_maxlen=8)
    plaid_tilemaxsim.TileMaxSimScorer(path).warmup(config, 5)
    assert len([engine for engine in searched if type(engine) is SearchEngine]) == len(more["devices"])


def test_pq_writes_a_sidecar_that_inspect_lists(tmp_path, capsys):
    pytest.importorskip("faiss")
    path = str(make_index(tmp_path / "index", n=60, dim=64))
    assert cli.main(["pq", path, "--m", "8", "--sample", "500"]) == 0
    assert "8 bytes a token" in capsys.readouterr().out
    assert cli.main(["inspect", path]) == 0
    assert "M = 8: PQ, 8 bytes a token" in capsys.readouterr().out
    for arguments, message in (
        (["--m", "8"], "expected none, or force=True"),
        (["--m", "7"], "m: expected one of [8, 16, 32, 64]"),
        (["--m", "16", "--sample", "3"], "sample: expected an integer"),
    ):
        assert cli.main(["pq", path, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["pq", path, "--m", "8", "--opq", "--force", "--sample", "500", "--seed", "3"]) == 0
    assert cli.main(["inspect", path]) == 0
    assert "M = 8: OPQ" in capsys.readouterr().out
    assert cli.main(["warmup", path, "--k", "5", "--query-maxlen", "8", "--scorer-options", '{"codec": "pq"}']) == 0
    assert "k=5: ready" in capsys.readouterr().out
