"""The tuner with a timer that knows the answer, and the file between it and the choice functions."""

import json
import math

import pytest
import torch

from plaid_tilemaxsim import cli, tuner
from plaid_tilemaxsim.config import ScorerConfig
from plaid_tilemaxsim.ops import tuned, tuning

TINY = tuner.Size(tokens=700, centroids=200, sample=20)


@pytest.fixture(autouse=True)
def nothing_loaded():
    tuned.unload()
    yield
    tuned.unload()


@pytest.fixture
def few(monkeypatch):
    """One field to try, with two values: the interpreter runs a program after the other."""
    for kernel, marked in tuned.TUNABLE.items():
        kept = {name: (32, 64) if name == "BLOCK_N" else () for name in marked.fields}
        monkeypatch.setitem(tuned.TUNABLE, kernel, tuned.Tunable(marked.choose, marked.arguments, kept))


def chosen(case, arch=90):
    """What the launcher of a case would be told now."""
    if case.kernel == "dense":
        return tuning.dense_blocks(arch, **case.shape)
    return tuning.centroid_blocks(arch, **case.shape)


def case_of(kernel, device):
    data = tuner.Data(torch.device(device), TINY)
    return tuner.dense(data, 5, 32) if kernel == "dense" else tuner.centroid(data, 5)


@pytest.mark.parametrize("kernel", ["dense", "centroid"])
def test_the_fastest_correct_choice_wins(kernel, few, device):
    case = case_of(kernel, device)
    default = chosen(case)
    other = 64 if default.BLOCK_N == 32 else 32

    def measure(run):
        return {other: 1.0}.get(chosen(case).BLOCK_N, 2.0)

    entry, counts = tuner.tune_case(case, tuning.arch(torch.device(device)), measure)
    assert entry["choice"]["BLOCK_N"] == other
    assert (entry["default_ms"], entry["ms"]) == (2.0, 1.0)
    assert counts["timed"] >= 2
    assert chosen(case) == default, "the tuner leaves nothing behind"


def test_a_gain_within_noise_keeps_the_default(few, device):
    case = case_of("dense", device)
    default = chosen(case)
    entry, _ = tuner.tune_case(case, 90, lambda run: 2.0 if chosen(case) == default else 1.99)
    assert entry["choice"]["BLOCK_N"] == default.BLOCK_N
    assert entry["ms"] == entry["default_ms"] == 2.0


def test_wrong_candidates_are_not_timed(few, device):
    case = case_of("dense", device)
    default, right, timed = chosen(case), case.run, []
    case.run = lambda: right() if chosen(case) == default else right().roll(1)

    def measure(run):
        timed.append(chosen(case))
        return 1.0

    entry, counts = tuner.tune_case(case, 90, measure)
    assert counts["wrong"] == 1
    assert set(timed) == {default}
    assert entry["choice"]["BLOCK_N"] == default.BLOCK_N
    case.run = lambda: right().roll(1)
    with pytest.raises(RuntimeError, match=r"the default choice .* does not give the oracle's scores"):
        tuner.tune_case(case, 90, lambda run: 1.0)


def test_candidates_that_do_not_fit_the_chip_are_passed_over(few, device):
    case = case_of("dense", device)
    default, right = chosen(case), case.run

    def run():
        if chosen(case) != default:
            raise tuner.OutOfResources(300_000, 232_448, "shared memory")
        return right()

    case.run = run
    entry, counts = tuner.tune_case(case, 90, lambda run: 1.0)
    assert counts == {"timed": 1, "refused": 1, "wrong": 0}
    assert entry["choice"]["BLOCK_N"] == default.BLOCK_N


@pytest.mark.parametrize(
    "make",
    [
        lambda data: tuner.centroid_scores(data, 5, 40),
        lambda data: tuner.centroid_kept(data, 5),
        lambda data: tuner.dense(data, 5, 32, fixed=24),
        lambda data: tuner.residual(data, 5, 32, 2),
        lambda data: tuner.residual_batch(data, 2, 5, 32, 2),
        lambda data: tuner.residual_fp32(data, 5, 32, 2),
    ],
)
def test_cases_know_right_from_wrong(make, device):
    case = make(tuner.Data(torch.device(device), TINY))
    assert tuned.TUNABLE[case.kernel].arguments.keys() == case.shape.keys()
    assert case.correct()
    right = case.run
    case.run = lambda: right().roll(1, 0)
    assert not case.correct()
    case.run = lambda: torch.full_like(right().float(), math.nan)
    assert not case.correct()


@pytest.fixture
def table(few, device):
    lines: list[str] = []
    made = tuner.tune(torch.device(device), {"centroid"}, True, TINY, lambda run: 1.0, lines.append)
    assert len(lines) == len(made["entries"]) == 1
    return made


def test_file_round_trip(table, tmp_path, device):
    path = tmp_path / "h200.json"
    default = tuning.centroid_blocks(90, 32)
    entry = table["entries"][0]
    assert entry["shape"] == {"LQP": 32}
    entry["choice"]["BLOCK_N"] = 32 if default.BLOCK_N == 64 else 64
    tuner.write(path, table)
    assert list(tmp_path.iterdir()) == [path]
    tuning.load(path, device)
    assert tuning.centroid_blocks(90, 32) != default
    assert entry["choice"]["BLOCK_N"] == tuning.centroid_blocks(90, 32).BLOCK_N
    assert tuning.centroid_blocks(80, 32) == tuned.TUNABLE["centroid"].choose(80, 32), "another chip"
    assert tuning.centroid_blocks(90, 64) == tuned.TUNABLE["centroid"].choose(90, 64), "another shape"
    tuned.unload()
    assert tuning.centroid_blocks(90, 32) == default


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(version=2), "version: expected 1, got 2"),
        (lambda t: t.update(arch=80), "arch: expected 90, which this device is, got 80"),
        (lambda t: t.pop("entries"), "entries: expected a list, got None"),
        (lambda t: t["entries"].append(7), r"entries\[1\]: expected an object, got 7"),
        (lambda t: t["entries"].append(t["entries"][0]), r"entries\[1\].shape: expected each kernel and shape once"),
        (lambda t: t["entries"][0].update(kernel="softmax"), r"entries\[0\].kernel: expected one of \['centroid', .*"),
        (lambda t: t["entries"][0]["shape"].update(LQP=0), r"entries\[0\].shape.LQP: expected int \(>= 1\), got 0"),
        (lambda t: t["entries"][0]["shape"].update(LQ=1), r"entries\[0\].shape: expected an object with \['LQP'\]"),
        (lambda t: t["entries"][0]["choice"].pop("BLOCK_N"), r"entries\[0\].choice: expected an object with"),
        (
            lambda t: t["entries"][0]["choice"].update(BLOCK_N=48),
            r"entries\[0\].choice.BLOCK_N: expected one of \[64, 32\], got 48",
        ),
        (lambda t: t["entries"][0]["choice"].update(BLOCK_N=True), r"entries\[0\].choice.BLOCK_N: .* got True"),
    ],
)
def test_files_are_checked(table, change, message, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_device_properties", lambda device: (90, 3))
    path = tmp_path / "tuned.json"
    change(table)
    tuner.write(path, table)
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        tuning.load(path, "cpu" if tuning.interpreted() else "cuda")
    assert not tuned._loaded


def test_files_that_are_no_tables(tmp_path):
    path = tmp_path / "tuned.json"
    with pytest.raises(ValueError, match="expected a file written by plaid-tilemaxsim tune, got No such file"):
        tuned.load(path, 90)
    path.write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        tuned.load(path, 90)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"top level: expected an object, got \[\]"):
        tuned.load(path, 90)


def test_a_cpu_has_no_choices(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="expected a CUDA device to take its choices for, got cpu"):
        tuning.load(tmp_path / "tuned.json", "cpu")


@pytest.mark.parametrize("kernel", sorted(tuned.TUNABLE))
def test_classes_share_the_default(kernel):
    """A class of shapes is one choice: rounding the counts up must not change what the function says."""
    marked = tuned.TUNABLE[kernel]
    values = {
        "itemsize": (2, 4), "DIM": (96, 128), "LQ": (1, 16, 17, 20, 32, 100), "LQP": (16, 32), "NQ": (1, 3),
        "fixed_length": (None, 5, 100, 128, 300), "precision": ("ieee", "tf32x3"), "nbits": (2,), "blocks": (1, 3, 8),
        "kind": ("fp16",), "words": (64,), "fixed": (False, True),
    }  # fmt: skip
    for arch in (80, 90):
        shapes: list[dict[str, object]] = [{}]
        for name in marked.arguments:
            shapes = [shape | {name: value} for shape in shapes for value in values[name]]
        for shape in shapes:
            assert marked.choose(arch, **shape) == marked.choose(arch, **tuned.shape_class(shape))


def test_the_command(few, tmp_path, capsys, monkeypatch, device):
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(tuner, "Size", lambda: TINY)
    monkeypatch.setattr(tuner, "milliseconds", lambda run: 1.0)
    assert cli.main(["tune", "--quick", "--only", "centroid,centroid_scores", "--out", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [entry["kernel"] for entry in written["entries"]] == ["centroid_scores", "centroid"]
    assert {"version", "gpu", "arch", "torch", "triton"} <= written.keys()
    assert "centroid LQP=32: 1.0000 -> 1.0000 ms the default" in capsys.readouterr().out
    assert cli.main(["tune", "--only", "softmax", "--out", str(path)]) == 2
    assert "only: expected names from" in capsys.readouterr().err
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune", "--out", str(path)]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err


def test_the_option(monkeypatch):
    monkeypatch.setenv("PLAID_TILEMAXSIM_TUNING", "/etc/tuned.json")
    assert ScorerConfig.from_options(None).tuning == "/etc/tuned.json"
    assert ScorerConfig.from_options({"tuning": None}).tuning is None
