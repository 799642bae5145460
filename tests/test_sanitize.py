"""The sanitizer's driver, without the sanitizer, and what is made of the tool's output."""

import json
import os
import stat
import subprocess
import sys
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
    assert row["reported"] == errors
    assert (row["problem"] is None) == (errors == 0 or (errors is not None and tool == "memcheck"))
    assert row["launches"] == {"rank_kernel._rank_kernel": 2}
    assert printed in row["output"]


def test_a_part_that_takes_too_long_has_failed(tmp_path):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    row = sanitize.run_part("memcheck", "selections", str(fake), 0.5)
    assert row["problem"]
    assert "started" in row["output"]


def some_rows(monkeypatch, wrong=()):
    """Rows of runs that all pass but those named, in the order in which they end."""

    def run_part(tool, part, sanitizer, limit):
        reported = int((tool, part) in wrong)
        launches = dict.fromkeys(sanitize.kernels(), 1) if tool is None else {}
        problem = "exit status 1" if reported and tool is None else None
        return {"tool": tool, "part": part, "seconds": 1.0, "reported": reported, "reports": [], "problem": problem,
                "launches": launches, "output": "what it printed"}  # fmt: skip

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
        return {"tool": tool, "part": part, "problem": None}

    monkeypatch.setattr(sanitize, "run_part", run_part)
    assert len(list(sanitize.runs(["memcheck"], ["slow", "quick"], "", 1.0, 2))) == 4


def test_a_result_is_correct_when_everything_has_run_and_passed(monkeypatch):
    parts = list(sanitize_driver.PARTS)
    rows = some_rows(monkeypatch)
    result = sanitize.result_of(rows, sanitize.TOOLS, parts)
    assert result["correct"]
    assert (result["problems"], result["not_run"]) == ([], [])
    assert result["figures"] == {
        "memcheck_errors": 0,
        "racecheck_errors": 0,
        "racecheck_dispatch_reports": 0,
        "racecheck_control_reports": 0,
        "racecheck_control_races": 0,
        "kernels": len(sanitize.kernels()),
    }
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


def line_of(kernel, place):
    return next(line for (name, _, line), found in sanitize.places().items() if (name, found) == (kernel, place))


def report(kernel, *accesses):
    """As racecheck prints it: of accesses (what, offset, place or line)."""
    file = "residual_wgmma_kernel.py" if "wgmma" in kernel else "sanitize_dispatch.py"
    lines = [
        f"{what} access at {kernel}+{offset:#x} in {file}:{line if isinstance(line, int) else line_of(kernel, line)}"
        for what, offset, line in accesses
    ]
    hazards = "".join(f"=========     and {line} [{4 + i} hazards]\n" for i, line in enumerate(lines[1:]))
    return f"========= Error: Race reported between {lines[0]}\n{hazards}========= \n"


WGMMA = "_residual_wgmma_kernel"
STATE = (("Read", 0x1C0, "def"), ("Write", 0x6E10, "def"), ("Write", 0xA370, "if"))
CAPTURES = (("Write", 0x6E20, "def"), ("Read", 0x340, "def"), ("Read", 0x3860, "def"))
CONTROL = [report("_dispatch_kernel", ("Read", 0x110, "def"), ("Write", 0x970, "def"), ("Write", 0xCA0, "if"))]
RACE = report("_racing_kernel", ("Write", 0x440, "race"), ("Read", 0x1F0, "race"))


def checked(tmp_path, printed, count=None):
    """Result of racecheck over parts that print these reports (``count`` in the summary), and its row of each."""
    rows = []
    for part, reports in printed.items():
        launched = {sanitize.RACE: 1} if part == "dispatch" else {}
        output = tmp_path / part
        n = len(reports) if count is None else count
        summary = f"========= RACECHECK SUMMARY: {n} hazards displayed ({n} errors, 0 warnings)\n"
        output.write_text("========= COMPUTE-SANITIZER\n" + "".join(reports) + json.dumps(launched) + "\n" + summary)
        fake = tmp_path / "compute-sanitizer"
        fake.write_text(f"#!/bin/sh\ncat {output}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        rows.append(sanitize.run_part("racecheck", part, str(fake), 60))
    result = sanitize.result_of(rows, ["racecheck"], list(printed))
    return result["figures"], result["problems"], {row["part"]: row for row in result["rows"]}


def test_reports_of_the_dispatch_are_counted_apart(tmp_path):
    ours = [report(WGMMA, *STATE), report(WGMMA, *CAPTURES), report(WGMMA, STATE[0], STATE[2])]
    figures, problems, rows = checked(tmp_path, {"batch2": ours, "dispatch": [*CONTROL, RACE, RACE]})
    assert problems == []
    assert figures["racecheck_errors"] == 0
    assert figures["racecheck_dispatch_reports"] == 3
    assert figures["racecheck_control_reports"] == 1
    assert figures["racecheck_control_races"] == 2
    assert (rows["batch2"]["errors"], rows["batch2"]["dispatch_reports"]) == (0, 3)
    assert all(row["passed"] for row in rows.values())


@pytest.mark.parametrize(
    "other",
    [
        report(WGMMA, STATE[0], STATE[1], ("Write", 0x45E0, 163)),  # a tile of the ring as well
        report(WGMMA, ("Read", 0x45E0, 163), STATE[1]),
        report(WGMMA, ("Write", 0x6E10, "def"), ("Write", 0xA370, "if")),  # nothing like it of the control
        report(WGMMA, STATE[0]),
        report(WGMMA, *STATE).replace(WGMMA, "_residual_batch_kernel"),
        report(WGMMA, *STATE).replace("Error", "Warning"),
        report(WGMMA, *STATE).replace(" in residual_wgmma_kernel.py", ""),
        report(WGMMA, *STATE).replace("========= \n", "=========     more that is said\n========= \n"),
        RACE.replace("Read", "Write").replace(f":{line_of('_racing_kernel', 'race')}", ":1"),
    ],
)
def test_any_other_report_is_an_error(other, tmp_path):
    figures, problems, rows = checked(
        tmp_path, {"batch2": [report(WGMMA, *STATE), other], "dispatch": [*CONTROL, RACE]}
    )
    assert problems == ["batch2 racecheck: 1 reported; see the log"]
    assert figures["racecheck_errors"] == 1
    assert (rows["batch2"]["errors"], rows["batch2"]["dispatch_reports"]) == (1, 1)


@pytest.mark.parametrize("control", [None, [], CONTROL, [RACE], [*CONTROL, RACE.replace("_racing", "_other")]])
def test_without_its_control_the_dispatch_is_an_error(control, tmp_path):
    printed = {"batch2": [report(WGMMA, *STATE)]} | ({} if control is None else {"dispatch": control})
    figures, problems, _ = checked(tmp_path, printed)
    assert "batch2 racecheck: 1 reported; see the log" in problems
    assert figures["racecheck_errors"] >= 1
    assert figures["racecheck_dispatch_reports"] == 0
    if control == []:
        assert "dispatch racecheck: its race was not reported" in problems


def test_a_summary_of_other_reports_than_those_printed_is_a_problem(tmp_path):
    figures, problems, _ = checked(tmp_path, {"batch2": [report(WGMMA, *STATE)], "dispatch": [*CONTROL, RACE]}, 2)
    assert problems == [f"batch2 racecheck: 1 reports of at most {sanitize.PRINTED} printed, 2 in the summary"]
    assert figures["racecheck_errors"] == 2
    assert figures["racecheck_dispatch_reports"] == 0


def test_lines_of_the_dispatch():
    where = {name for name, _, _ in sanitize.places()}
    assert where == {WGMMA, "_dispatch_kernel", "_racing_kernel"}

    def kernel(x):  # never run, only read
        if len(x):
            x.warp_specialize([], [])
        elif x == 0:
            if x:
                pass
            x.warp_specialize([], [])

    start = kernel.__code__.co_firstlineno
    assert sanitize.dispatch_lines(kernel) == {start: "def", start + 3: "if"}


MACHINE_CODE = r"""
import json, re, torch
from scripts import sanitize, sanitize_dispatch
from tests.ops import aot

with aot.compiling_for(90) as kernels:
    shares = torch.zeros(7, 2).int()
    for barriers in (False, True):
        sanitize_dispatch.dispatch(shares, torch.zeros(7, 3, 128).int(), barriers)
    sanitize_dispatch.race(shares, torch.zeros(7, 128).long())
    aot.launch_wgmma(8, 32, 2, False, torch.uint16)
found = []
for k in kernels:
    code = aot._tool("nvdisasm", "-g", "-c", cubin=k.asm["cubin"])
    for path, line, access in re.findall(r'//## File "(.*)", line (\d+)| (LDS|STS)M?\b', code):
        if path:
            at = k.kernel, path.split("/")[-1], int(line)
        else:
            found.append([k.kernel, {"LDS": "Read", "STS": "Write"}[access], sanitize.places().get(at, "elsewhere")])
print(json.dumps(found))
"""


def test_the_machine_code_has_shared_memory_where_the_controls_say():
    """Compiled for sm_90: the control has what the package's kernel has of a dispatch, and of nothing else."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", MACHINE_CODE]
    done = subprocess.run(command, cwd=sanitize.ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, set[tuple[str, ...]]] = {}
    for kernel, *access in json.loads(done.stdout.splitlines()[-1]):
        found.setdefault(kernel, set()).add(tuple(access))
    assert {("Read", "def"), ("Write", "def")} <= found["_dispatch_kernel"]
    assert "elsewhere" not in {place for _, place in found["_dispatch_kernel"] | found["_racing_kernel"]}
    assert {access for access in found[WGMMA] if access[1] != "elsewhere"} == found["_dispatch_kernel"]
    assert found["_racing_kernel"] - found["_dispatch_kernel"] == {("Read", "race"), ("Write", "race")}


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
                "reported": 0,
                "reports": [],
                "problem": None,
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
