"""The sanitizer's driver, without the sanitizer, and what is made of the tool's output."""

import json
import stat

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
