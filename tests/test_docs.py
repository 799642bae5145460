"""The documentation says what the code does: its commands run, its tables and messages are those of the sources."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from plaid_tilemaxsim import cli, config
from scripts import update_docs, update_readme
from tests.colbert_fixtures import checkpoint, collection, stock_extensions  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Calls whose arguments become "...: FIELD: expected EXPECTED, got GOT".
INVALID = {"invalid", "_invalid"}


@pytest.mark.parametrize("name", update_docs.PAGES)
def test_tables_are_what_their_sources_say(name):
    text = (DOCS / name).read_text()
    assert update_readme.rendered(text, update_docs.PAGES[name], name) == text
    row = re.search(r"^\| .*\d.*$", text, flags=re.M)
    assert row is not None
    stale = text.replace(row[0], row[0] + " 1 |")
    assert update_readme.rendered(stale, update_docs.PAGES[name], name) != stale


def test_readme_and_options_agree():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "README.md").read_text(), flags=re.M))
    for field in dataclasses.fields(config.ScorerConfig):
        assert str(field.default).lower() in rows[field.name].lower(), field.name
        assert set(config.choices(field.name)) <= set(re.findall(r"\w+", rows[field.name])), field.name


class TestSite:
    def test_builds_without_a_warning(self, tmp_path):
        pytest.importorskip("mkdocs")
        pytest.importorskip("mkdocstrings_handlers.python")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        page = (tmp_path / "api.html").read_text()
        assert 'id="plaid_tilemaxsim.scorer.TileMaxSimScorer.search"' in page
        assert (tmp_path / "source" / "eval" / "results" / "h200_search.json").is_file()
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)', page)
        assert loaded == []  # the site needs no network

    def test_reference_lists_modules_that_exist(self):
        text = (DOCS / "api.md").read_text()
        modules = re.findall(r"^::: (\S+)$", text, flags=re.M)
        assert len(modules) == len(set(modules))
        assert set(modules) == set(re.findall(r"\(#(plaid_tilemaxsim[\w.]*)\)", text))
        for name in modules:
            assert importlib.util.find_spec(name) is not None, name
        public = {f"plaid_tilemaxsim.{name}" for name in ("plugin", "scorer", "engine", "ops.api", "cli", "serve")}
        assert public <= set(modules)

    def test_pictures_are_well_formed(self):
        pictures = list((DOCS / "plots").glob("*.svg"))
        assert DOCS / "plots" / "data-flow.svg" in pictures
        for picture in pictures:
            assert ET.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def messages() -> list[str]:
    """Every text in the package and its shell scripts that can be a message, with … for what is put in."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join("…" if isinstance(part, ast.FormattedValue) else text(part) for part in node.values)
        return "…"

    found = []
    for file in (ROOT / "plaid_tilemaxsim").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                found.append(text(node))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in INVALID:
                _, field, expected, got = map(text, node.args)
                found.append(f"…: {field}: expected {expected}, got {got}")
    for line in (ROOT / "scripts" / "_venv.sh").read_text(encoding="utf-8").splitlines():
        found.append(re.sub(r"\$\{[^}]*\}|\$\w+|\$\*", "…", line))
    return [" ".join(one.split()) for one in found]


def is_message(quoted: str, known: list[str]) -> bool:
    """Whether the parts of a quotation that … separates stand in one known text, in that order."""
    parts = [part.strip() for part in quoted.split("…") if part.strip(" :,")]
    pattern = re.compile(".*".join(map(re.escape, parts)))
    return any(pattern.search(one) for one in known)


class TestTroubleshooting:
    def test_every_message_is_one_of_the_sources(self):
        known = messages()
        entries = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), flags=re.M)
        assert len(entries) >= 40
        assert [entry for entry in entries if not is_message(entry, known)] == []
        assert not is_message("…: GPU memory: expected …, found … free", known)
        assert not is_message("got … free, expected …: GPU memory", known)

    def test_every_message_has_cause_and_fix(self):
        parts = re.split(r"^### .*$", (DOCS / "troubleshooting.md").read_text(), flags=re.M)[1:]
        for part in parts:
            assert part.index("**Cause.**") < part.index("**Fix.**")


BLOCK = re.compile(r'^```(bash|python)(?: title="(.*?)")?\n(.*?)^```$', flags=re.M | re.S)


@pytest.fixture
def blocks():
    return [(name, body) for _, name, body in BLOCK.findall((DOCS / "quickstart.md").read_text())]


class TestQuickstart:
    """Its blocks in their order, with a smaller checkpoint, other passages and a free port."""

    def test_every_kind_of_block_is_known(self, blocks):
        kinds = set(re.findall(r"^```(.+?)$", (DOCS / "quickstart.md").read_text(), flags=re.M))
        assert {re.sub(r' title="\w+\.py"', "", kind) for kind in kinds} == {"console", "bash", "python"}
        names = [name for name, _ in blocks if name]
        commands = "".join(body for name, body in blocks if not name)
        assert all(re.search(rf"^python {name}\b", commands, flags=re.M) for name in names)

    def test_from_passages_to_a_server(self, blocks, tmp_path, checkpoint, collection, stock_extensions):  # noqa: F811
        pytest.importorskip("faiss")
        pytest.importorskip("fastapi")
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        env = {name: value for name, value in env.items() if not name.startswith("PLAID_TILEMAXSIM_")}

        def run(command: str) -> str:
            done = subprocess.run(
                ["bash", "-euc", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, command + done.stdout + done.stderr
            return done.stdout

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        server = None
        printed = {}
        try:
            for name, body in blocks:
                if name:
                    body = body.replace("colbert-ir/colbertv2.0", str(checkpoint))
                    (tmp_path / name).write_text(body)
                elif "python passages.py" in body:
                    (tmp_path / "docs").symlink_to(DOCS)
                    assert int(run(body).split()[0]) > 100
                    lines = [f"{pid}\t{text}\n" for pid, text in enumerate(collection)]
                    (tmp_path / "collection.tsv").write_text("".join(lines))
                elif "serve" in body:
                    command = ["bash", "-euc", "exec " + body.replace("8000", port)]
                    server = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
                    assert any("http://" in line for line in server.stdout)
                elif "curl" in body:
                    if shutil.which("curl") is None:
                        pytest.skip("curl is not installed: the server was started but not asked")
                    printed["curl"] = run(body.replace("8000", port))
                else:
                    printed[body.split()[1]] = run(body)
        finally:
            if server is not None:
                server.terminate()
                server.wait(60)
        assert "300 in 1 chunks" in printed["index.py"]
        assert len(re.findall(r"^\d \d+\.\d\d \d+: ", printed["search.py"], flags=re.M)) == 5
        assert len(re.findall(r"^\d \d+\.\d\d \d+: ", printed["run"], flags=re.M)) == 5
        (common,) = re.findall(r"in common: ([\d.]+)%", printed["ab.py"])
        assert float(common) > 99
        assert len(re.findall(r"^\w+: [\d.]+ ms a search$", printed["ab.py"], flags=re.M)) == 2
        assert '"pids":[' in printed["curl"]
        assert '"status":"ok"' in printed["curl"]
        assert "plaid_tilemaxsim" in printed["curl"]


class TestHelp:
    def test_help_is_enough_to_start(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["--help"])
        shown = capsys.readouterr().out
        for group, members in cli.COMMANDS.items():
            assert f"\n{group}:\n" in shown
            for example, text in members.values():
                assert f"{text}\n            plaid-tilemaxsim {example}\n" in shown

    @pytest.mark.parametrize("name", [name for members in cli.COMMANDS.values() for name in members])
    def test_every_command_has_an_example_that_it_can_read(self, name, capsys):
        ((example, _),) = (members[name] for members in cli.COMMANDS.values() if name in members)
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert f"plaid-tilemaxsim {name}" in capsys.readouterr().out
        if name != "eval":
            assert cli._parser().parse_args(example.split()).command.__name__ == f"_{name}"
