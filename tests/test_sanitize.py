"""The sanitizer's driver, without the sanitizer, and what is made of the tool's output."""

import json
import stat
import threading

import pytest

from scripts import sanitize, sanitize_driver


def test_the_driver_passes_and_says_what_it_ran(capsys):
    sanitize_driver.main(["candidates"])
    launches = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert launches.keys() == {f"candidates_kernel._{name}_kernel" for name in ("mark", "count", "gather")}
    assert launches.keys() < sanitize.kernels()


def test_every_module_of_kernels_is_known():
    modules = {name.split(".")[0] for name in sanitize.kernels()}
    assert {"dense_kernel", "residual_fast_kernel", "centroid_kernel", "select_kernel", "rank_kernel"} <= modules


@pytest.mark.parametrize(
    ("tool", "printed", "errors"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0),
        ("memcheck", "========= ERROR SUMMARY: 1 error", 1),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("racecheck", "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", 3),
        ("racecheck", "Device not supported", None),
    ],
)
def test_what_a_tool_reports(tool, printed, errors, tmp_path):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"""#!/bin/sh\necho '{{"rank_kernel._rank_kernel": 2}}'\necho '{printed}'\n""")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    row = sanitize.run_part(tool, "selections", str(fake), 60)
    assert row["errors"] == errors
    assert row["passed"] == (errors == 0)
    assert row["launches"] == {"rank_kernel._rank_kernel": 2}
    assert printed in row["output"]


def test_a_part_that_takes_too_long_has_failed(tmp_path):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    row = sanitize.run_part("memcheck", "selections", str(fake), 0.5)
    assert not row["passed"]
    assert "started" in row["output"]


def some_rows(monkeypatch, wrong=()):
    """Rows of runs that all pass but those named, in the order in which they end."""

    def run_part(tool, part, sanitizer, limit):
        passed = (tool, part) not in wrong
        launches = dict.fromkeys(sanitize.kernels(), 1) if tool is None else {}
        output = "what it printed"
        return {"tool": tool, "part": part, "seconds": 1.0, "errors": int(not passed), "passed": passed,
                "launches": launches, "output": output}  # fmt: skip

    monkeypatch.setattr(sanitize, "run_part", run_part)
    return list(sanitize.runs(sanitize.TOOLS, list(sanitize_driver.PARTS), "", 1.0, 3))


def test_each_part_runs_alone_then_under_every_tool(monkeypatch):
    rows = some_rows(monkeypatch)
    order = [(row["tool"], row["part"]) for row in rows]
    assert len(order) == len(set(order)) == 3 * len(sanitize_driver.PARTS)
    for part in sanitize_driver.PARTS:
        assert all(order.index((None, part)) < order.index((tool, part)) for tool in sanitize.TOOLS)


def test_tools_do_not_wait_for_every_part(monkeypatch):
    begun = threading.Event()

    def run_part(tool, part, sanitizer, limit):
        if tool is None and part == "slow":
            assert begun.wait(10), "no tool has begun"
        if tool is not None:
            begun.set()
        return {"tool": tool, "part": part, "passed": True}

    monkeypatch.setattr(sanitize, "run_part", run_part)
    assert len(list(sanitize.runs(["memcheck"], ["slow", "quick"], "", 1.0, 2))) == 4


def test_a_result_is_correct_when_everything_has_run_and_passed(monkeypatch):
    parts = list(sanitize_driver.PARTS)
    rows = some_rows(monkeypatch)
    result = sanitize.result_of(rows, sanitize.TOOLS, parts)
    assert result["correct"]
    assert (result["problems"], result["not_run"]) == ([], [])
    assert result["figures"] == {"memcheck_errors": 0, "racecheck_errors": 0, "kernels": len(sanitize.kernels())}
    assert "output" not in result["rows"][0]
    for n in range(len(rows)):
        cut_off = sanitize.result_of(rows[:n], sanitize.TOOLS, parts)
        assert not cut_off["correct"]
        assert cut_off["problems"] == []
        assert len(cut_off["not_run"]) == len(rows) - n
    assert not sanitize.result_of(rows, ["memcheck"], parts)["correct"]
    assert not sanitize.result_of(rows, sanitize.TOOLS, parts[1:])["correct"]


def test_what_fails_is_a_problem_and_alone_it_gets_no_tool(monkeypatch):
    rows = some_rows(monkeypatch, {(None, "pq"), ("racecheck", "merges")})
    assert {row["tool"] for row in rows if row["part"] == "pq"} == {None}
    result = sanitize.result_of(rows, sanitize.TOOLS, list(sanitize_driver.PARTS))
    assert not result["correct"]
    assert sorted(problem.split(":")[0] for problem in result["problems"]) == ["merges racecheck", "pq alone"]
    assert result["figures"]["racecheck_errors"] == 1
    assert result["not_run"] == ["pq memcheck", "pq racecheck"]
    idle = [row | {"launches": {}} for row in some_rows(monkeypatch)]
    result = sanitize.result_of(idle, sanitize.TOOLS, list(sanitize_driver.PARTS))
    assert len(result["problems"]) == len(sanitize.kernels())


def test_the_result_is_written_after_every_run(monkeypatch, tmp_path):
    """As the command writes it: of one run, then of all."""
    fake, out = tmp_path / "compute-sanitizer", tmp_path / "result.json"
    fake.write_text("#!/bin/sh\necho Version 2026.1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    written = []

    def write_text(path, text):
        assert path == out
        written.append(json.loads(text))

    def runs(tools, parts, sanitizer, limit, jobs):
        assert (parts, sanitizer, limit, jobs) == (["pq"], str(fake), 60.0, 2)
        for tool in (None, *tools):
            yield {
                "tool": tool,
                "part": "pq",
                "seconds": 1.0,
                "errors": 0,
                "passed": True,
                "launches": {},
                "output": "",
            }

    monkeypatch.setattr(sanitize, "runs", runs)
    monkeypatch.setattr(sanitize, "write_text", write_text)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(fake))
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.torch.cuda, "get_device_name", lambda: "a GPU")
    arguments = ["--out", str(out), "--parts", "pq", "--limit", "60", "--jobs", "2", "--commit", "abc"]
    monkeypatch.setattr(sanitize.sys, "argv", ["sanitize.py", *arguments])
    assert sanitize.main() == 0
    assert [len(result["rows"]) for result in written] == [1, 2, 3]
    assert [len(result["not_run"]) for result in written] == [2, 1, 0]
    assert not written[-1]["correct"], "one part is not all of them"
