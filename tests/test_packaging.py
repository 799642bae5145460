"""What gets installed: the wheel, the source archive, and the files that must agree about them."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import plaid_tilemaxsim
from plaid_tilemaxsim.config import ScorerConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def listed(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line and not line.startswith("#")]


def name_of(requirement: str) -> str:
    return re.split(r"[\s;<>=\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_package_is_listed(metadata: configparser.ConfigParser) -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "plaid_tilemaxsim").rglob("*.py")}
    found = {".".join(folder.parts) for folder in folders}
    found |= {"plaid_tilemaxsim.patches.data", "plaid_tilemaxsim_eval.configs"}
    for path in (ROOT / "eval").rglob("*.py"):
        found.add(".".join(["plaid_tilemaxsim_eval", *path.parent.relative_to(ROOT / "eval").parts]))
    assert set(listed(metadata["options"]["packages"])) == found


def test_version_is_stated_once(metadata: configparser.ConfigParser) -> None:
    assert metadata["metadata"]["version"] == plaid_tilemaxsim.__version__
    assert f"## [{plaid_tilemaxsim.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_direct_requirements_are_pinned(metadata: configparser.ConfigParser) -> None:
    pins = {
        name_of(line)
        for file in (ROOT / "constraints").glob("*.txt")
        for line in listed(file.read_text())
        if not line.startswith("-c ")
    }
    wanted = listed(metadata["options"]["install_requires"])
    for extra, lines in metadata["options.extras_require"].items():
        if extra != "gpu":  # the GPU environment keeps what is there
            wanted += listed(lines)
    assert {name_of(line) for line in wanted} <= pins


def test_import_is_light() -> None:
    heavy = "{'torch', 'triton', 'colbert', 'numpy', 'transformers'}"
    code = f"import plaid_tilemaxsim, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_readme_lists_the_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(ScorerConfig)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), built from a copy of the sources so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("plaid_tilemaxsim", "patches", "configs", "tests", "eval", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    build("sdist", source, folder)
    build("wheel", source, folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def build(kind: str, source: Path, folder: Path) -> None:
    """A wheel or sdist of the sources, in a folder, by what setup.cfg says."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def content(wheel: Path) -> dict[str, bytes]:
    """File -> bytes, but for the list of files with their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        message = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"plaid_tilemaxsim", "plaid_tilemaxsim_eval", info}
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "patches").rglob("*") if path.is_file()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "plaid_tilemaxsim").rglob("*.py")}
    wanted = sources | {f"plaid_tilemaxsim/patches/data/{name.removeprefix('patches/')}" for name in data}
    evaluation = [*(ROOT / "eval").rglob("*.py"), ROOT / "eval" / "report.css", *(ROOT / "configs").glob("*.json")]
    wanted |= {f"plaid_tilemaxsim_{path.relative_to(ROOT)}" for path in evaluation if path.parent.name != "configs"}
    wanted |= {f"plaid_tilemaxsim_eval/configs/{path.name}" for path in evaluation if path.parent.name == "configs"}
    assert {name for name in names if not name.startswith(info)} == wanted | {
        "plaid_tilemaxsim/py.typed",
        "plaid_tilemaxsim/measured.json",
    }
    assert message["Name"] == "plaid-tilemaxsim"
    assert message["License"] == "Apache-2.0"
    assert {"gpu", "cpu", "eval", "dev"} <= set(message.get_all("Provides-Extra", []))
    assert "plaid-tilemaxsim = plaid_tilemaxsim.cli:main" in entry_points
    assert "tilemaxsim = plaid_tilemaxsim.scorer:TileMaxSimScorer" in entry_points


def test_sdist_holds_what_the_wheel_is_built_from(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("plaid_tilemaxsim/")]
    with tarfile.open(built[1]) as sdist:
        held = {member.name.split("/", 1)[-1] for member in sdist.getmembers()}
    for name in names:
        assert name.replace("plaid_tilemaxsim/patches/data/", "patches/") in held
    assert {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"} <= held


def test_sdist_makes_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as sdist:
        # Python before 3.10.12 and 3.11.4 has no filters, and extractall no argument for one.
        sdist.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[assignment]
        sdist.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    build("wheel", source, tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert content(again) == content(built[0])


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The interpreter of an environment in which nothing is installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    return tmp_path / "empty" / "bin" / "python"


def call(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PLAID_TILEMAXSIM_"))}
    return subprocess.run([str(python), *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def install(python: Path, *what: str, cwd: Path) -> None:
    done = call(Path(sys.executable), "-m", "pip", "--python", str(python), "install", "-q", *what, cwd=cwd)
    assert done.returncode == 0, done.stderr


def test_the_wheel_alone_in_an_empty_environment(built: tuple[Path, Path], empty: Path, tmp_path: Path) -> None:
    """It is typed, helps, and says which package is missing; with those of this environment nothing conflicts."""
    install(empty, "--no-deps", "--no-index", str(built[0]), cwd=tmp_path)
    code = "import plaid_tilemaxsim as p, pathlib; print(pathlib.Path(p.__file__).with_name('py.typed').is_file())"
    assert call(empty, "-c", code, cwd=tmp_path).stdout == "True\n"
    shown = call(empty.with_name("plaid-tilemaxsim"), "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "plaid-tilemaxsim run -- search.py" in shown.stdout
    refused = call(empty, "-c", "import plaid_tilemaxsim; plaid_tilemaxsim.enable()", cwd=tmp_path)
    assert "ImportError: colbert-ai is not installed here; install colbert-ai==0.2.22" in refused.stderr

    (site,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    checked = call(empty, "-m", "pip", "check", cwd=tmp_path)
    assert "No broken requirements" in checked.stdout or checked.returncode == 1, checked.stderr
    assert [line for line in checked.stdout.splitlines() if line.startswith("plaid-tilemaxsim ")] == []


@pytest.mark.slow
def test_install_from_the_index_into_an_empty_environment(
    built: tuple[Path, Path], empty: Path, tmp_path: Path
) -> None:
    """The wheel and all that it and its extras ask for, in the tested versions (some GB, minutes)."""
    reachable = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", str(tmp_path)]
    if subprocess.run([*reachable, "mergedeep"], capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index")
    (version,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints" / "cpu.txt").read_text(), flags=re.MULTILINE)
    without_cuda = call(Path(sys.executable), "-m", "pip", "--python", str(empty), "install", "-q", "--no-deps",
                        f"torch=={version}+cpu", cwd=tmp_path)  # fmt: skip
    if without_cuda.returncode:  # then torch comes as the index has it
        print(without_cuda.stderr)
    wheel = f"plaid-tilemaxsim[cpu,eval,serve,metrics] @ {built[0].as_uri()}"
    install(empty, "-c", str(ROOT / "constraints" / "cpu.txt"), "pip", wheel, cwd=tmp_path)
    checked = call(empty, "-m", "pip", "check", cwd=tmp_path)
    assert checked.stdout == "No broken requirements found.\n"
    shown = call(empty.with_name("plaid-tilemaxsim"), "env", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    code = "import plaid_tilemaxsim as p, plaid_tilemaxsim.serve; p.enable(); print(p.is_enabled())"
    assert call(empty, "-c", code, cwd=tmp_path).stdout.endswith("True\n")


def test_patches_work_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    command = [sys.executable, "-m", "plaid_tilemaxsim.patches", "status"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    count = len(list((ROOT / "patches").rglob("*.patch")))
    assert f"of {count} patches applied" in done.stdout


def test_the_evaluation_works_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Its configurations are found by name, what is missing is said, and nothing is imported from this checkout."""
    site = tmp_path / "site"
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site)}

    def call(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True
        )

    main = "import sys; from plaid_tilemaxsim.cli import main; sys.exit(main(sys.argv[1:]))"
    shown = call(main, "eval", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "plaid-tilemaxsim eval" in shown.stdout
    unknown = call(main, "eval", "run", "--config", "msmarco", "--out", "out")
    assert unknown.returncode == 2
    assert "msmarco_k1000" in unknown.stderr
    code = (
        "import plaid_tilemaxsim_eval.pipeline as p, plaid_tilemaxsim_eval.experiment as e;"
        "print(p.__file__, e.Experiment.read(e.find_config('msmarco_k10')).name, p.source_digest('eval/systems')[:4])"
    )
    done = call(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    without = call("import sys; sys.modules['ir_measures'] = None;" + main, "eval", "--out", "out")
    assert without.returncode == 2
    assert "pip install 'plaid-tilemaxsim[eval]'" in without.stderr


def test_no_file_names_a_private_path() -> None:
    """Sources and documents must not speak of folders that exist on one machine only."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not names:
        pytest.skip("not a git checkout")
    for name in names:
        file = ROOT / name
        if file.suffix in (".py", ".md", ".sh", ".cfg", ".toml", ".txt") and file.is_file():
            found = re.search(r"(?<![\w.])/(?:home|work|Users)/\w+", file.read_text(encoding="utf-8"))
            assert found is None, f"{name}: {found and found[0]}"
