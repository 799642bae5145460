"""The kernel benchmark at sizes that the interpreter can do: every group end to end, and what it makes of results."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plaid_tilemaxsim.ops import reference
from scripts import bench_kernels, plot_roofline
from scripts.kernels import check, clock, compressed, data, dense, page, peers, record, stream, sweeps
from scripts.kernels.bench import OURS, TINY, Bench, Shape
from scripts.kernels.clock import Time
from scripts.update_readme import rendered
from tests import peer_stubs
from tests.conftest import HAS_CUDA

ISSUE = {
    "dense_fp16_pct", "dense_over_best_peer", "dense_over_paper", "dense_packed_pct", "dense_d64_pct",
    "dense_d256_pct", "dense_d384_pct", "dense_d768_pct", "dense_bf16_pct", "dense_fp32_pct", "dense_fp32_max_err",
    "dense_tf32_pct", "dense_10k_pct", "residual2_gtok", "residual1_gtok", "residual4_gtok", "centroid_gtok",
    "pq16_mdocs", "exhaustive_ms",
}  # fmt: skip


def timed(clock, run, nbytes, host=False):
    run()
    return Time(2.0, 1.0, 3.0, 5)


@pytest.fixture
def stubs(monkeypatch):
    """Peers installed, timing stubbed, nothing compiled."""
    peer_stubs.install(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(clock.Clock, "__call__", timed)
    monkeypatch.setattr(data, "MEAN_LENGTH", 12)
    monkeypatch.setattr(compressed, "FEW_KEPT", 0.1)  # of as few tokens some
    # one point of each sweep
    for name in ("LENGTHS", "TOKENS", "DIMS", "RESIDUAL_DIMS"):
        monkeypatch.setattr(sweeps, name, getattr(sweeps, name)[1:2])


@pytest.mark.skipif(HAS_CUDA, reason="the stand-ins are for the CPU")
def test_every_group_end_to_end(stubs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "kernels.json"
    options = ["--sizes", "tiny", "--out", str(out), "--commit", "abc"]
    assert bench_kernels.main(["--groups", "dense", *options]) == 0
    dense_rows = json.loads(out.read_text())["rows"]
    assert bench_kernels.main(["--groups", "residual,centroid,pq,exhaustive", "--sweeps", "--merge", *options]) == 0
    result = json.loads(out.read_text())
    assert result["correct"] is True
    assert result["rows"][: len(dense_rows)] == dense_rows
    assert result["runs"].keys() == set(bench_kernels.RUNS)
    assert {"gpu", "versions", "commit", "command", "read", "not_run"} <= result.keys()
    assert str(tmp_path) not in result["command"]
    assert {row["group"] for row in result["sweeps"]} == {f"sweep {name}" for name in sweeps.CASES}
    unfinished = [row for row in result["rows"] + result["sweeps"] if "failed" in row]
    assert all("residual_maxsim_batch" in row["failed"] for row in unfinished), unfinished
    assert result["figures"].keys() >= ISSUE
    assert all(math.isfinite(value) for value in result["figures"].values())
    assert "correct: True" in capsys.readouterr().out
    check_page(out, result, tmp_path, monkeypatch)


def check_page(out, result, tmp_path, monkeypatch):
    """The page and the plots that these results make."""
    text = plot_roofline.PAGE.read_text()
    shown = rendered(text, page.tables(out), "roofline.md")
    assert page.NOTHING not in shown
    assert page.NO_SWEEPS not in shown
    for row in result["rows"]:
        assert (page.name_of(row) if row["ours"] else row["kernel"]) in shown
    assert f"{result['figures']['dense_fp16_pct']:,.0f}" in shown
    out.write_text(json.dumps({**result, "sweeps": []}))
    assert page.NO_SWEEPS in rendered(text, page.tables(out), "roofline.md")
    out.write_text(json.dumps({**result, "correct": False}))
    with pytest.raises(ValueError, match="correct = False"):
        page.tables(out)
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot_roofline, "PLOTS", tmp_path / "plots")
    for plot in (plot_roofline.plot_dense, plot_roofline.plot_compressed, plot_roofline.plot_sweeps):
        first = plot(result).read_text()
        assert plot(result).read_text() == first
        assert plot({**result, "rows": [], "sweeps": []}) is None


def test_the_page_without_results(tmp_path):
    shown = rendered(plot_roofline.PAGE.read_text(), page.tables(tmp_path / "none.json"), "roofline.md")
    assert shown.count(page.NOTHING) == len(page.TABLES)


def test_the_page_names_the_issues_targets():
    assert ISSUE - {"dense_over_paper"} <= page.TARGETS.keys()


def test_a_run_that_breaks_keeps_its_groups(stubs, tmp_path, monkeypatch):
    out = tmp_path / "kernels.json"

    def broken(bench):
        raise RuntimeError("the device went away")

    monkeypatch.setitem(bench_kernels.RUNS, "pq", broken)
    arguments = ["--groups", "centroid,pq", "--sizes", "tiny", "--no-peers", "--no-compile", "--out", str(out)]
    with pytest.raises(RuntimeError, match="went away"):
        bench_kernels.main(arguments)
    assert {row["group"] for row in json.loads(out.read_text())["rows"]} == {"centroid"}


def test_compiling_runs_write_nothing(stubs, tmp_path):
    out = tmp_path / "kernels.json"
    small = ["--groups", "dense", "--only", "10k", "--sizes", "tiny", "--out", str(out)]
    assert bench_kernels.main([*small, "--compile", "--peers", "qreuse"]) == 0
    assert not out.exists()
    assert bench_kernels.main([*small, "--peers", "qreuse", "--no-compile"]) == 0
    assert {row["kernel"] for row in json.loads(out.read_text())["rows"]} == {OURS, "flash_maxsim.flash_maxsim_qreuse"}


def test_compile_jobs_name_every_case_once():
    jobs = bench_kernels.compile_jobs(list(bench_kernels.RUNS), "", True)
    assert len(jobs) == len(set(jobs))
    every = {(group, case) for group, cases in bench_kernels.CASES.items() for case in cases}
    assert {(group, case) for group, case, _ in jobs} == every
    assert bench_kernels.compile_jobs(["dense"], "10k", False) == [("dense", "10k", None)]


def bench(**options):
    return Bench(torch.device("cuda" if HAS_CUDA else "cpu"), TINY, **options)


def shape(**changes):
    return Shape(**{"group": "g", "name": "n", "LQ": 4, "DIM": 8, "dtype": "fp16", "passages": 40, "tokens": 400,
                    "nbytes": 6400, **changes})  # fmt: skip


def test_peers_that_fail_are_rows_with_their_reason(monkeypatch):
    b = bench()
    want = torch.arange(40.0).double()
    exact = check.Check(want, None, 1e-3)
    monkeypatch.setitem(sys.modules, "flash_maxsim", None)
    b.peer(shape(), "absent", lambda: peers.module("flash_maxsim"), exact)
    b.peer(shape(), "wrong", lambda: lambda: want.roll(20), exact)
    b.peer(shape(), "rough", lambda: lambda: want + 0.1, exact)
    b.peer(shape(), "some", lambda: lambda: want[:10], exact, passages=10, bytes=1)
    absent, wrong, rough, some = b.rows
    assert peers.INSTALL in absent["failed"]
    assert "ms" not in wrong
    assert "failed" in wrong
    assert "failed" not in rough
    assert rough["max_error"] == pytest.approx(0.1)
    assert (some["passages"], some["tokens"], some["nbytes"]) == (10, 100, 800)
    assert not record.problems(b.rows)


def test_ours_when_wrong_is_not_timed_and_a_problem():
    b = bench()
    want = torch.arange(40.0).double()
    b.ours(shape(), lambda: want.roll(1), check.Check(want, None, 1e-3))
    b.missing(shape(name="later"), OURS, AttributeError("no such kernel"))
    assert "ms" not in b.rows[0]
    assert len(record.problems(b.rows)) == 1


def test_checks_reject_what_is_not_the_oracles():
    want = torch.tensor([3.0, 1, -math.inf, 7, 4, 9]).double()
    assert check.Check(want, None, 0.1)(want + 0.05).correct
    assert not check.Check(want, None, 0.1)(want + 0.2).correct
    assert not check.Check(want, None, 100.0)(want).correct, "a tolerance that lets a shuffled result through"
    for i, value in ((0, math.nan), (0, math.inf), (2, 0.0)):
        got = want.clone()
        got[i] = value
        assert not check.Check(want, None, 0.1)(got).correct
    nothing = torch.full((4,), -math.inf).double()
    assert not check.Check(nothing, None, 0.1)(nothing).correct
    chosen = torch.tensor([1, 4, 5])
    assert check.Check(want[chosen], chosen, 0.1)(want.nan_to_num(neginf=0.0)).correct
    of_first = check.Check(want, None, 0.1).of_peer(2)
    assert len(of_first.want) == 2
    assert of_first.tolerance is None


def test_samples_reach_both_ends():
    chosen = check.sample(8_841_823, torch.device("cpu"))
    assert chosen[[0, -1]].tolist() == [0, 8_841_822]
    assert len(chosen.unique()) == check.SAMPLE
    assert check.sample(3, torch.device("cpu")).tolist() == [0, 1, 2]


@pytest.mark.parametrize("blocks", stream.CHOICES)
def test_streaming_read_reads_every_word_once(blocks, device):
    x = stream.words(torch.device(device), 5 * 65536)
    out = torch.zeros(stream.programs_of(x.device, blocks), dtype=torch.int32, device=device)
    assert int(stream.stream(x, out, blocks).sum(dtype=torch.int64) - x.sum(dtype=torch.int64)) % 2**32 == 0


def test_a_read_that_misses_words_is_refused(monkeypatch):
    monkeypatch.setattr(stream, "stream", lambda x, out, blocks: out)
    with pytest.raises(ValueError, match="streaming read"):
        bench().measure_read()


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_little_endian_residuals(nbits):
    residuals = torch.randint(0, 256, (50, 24), dtype=torch.uint8)
    buckets = reference.decode_residuals(residuals, nbits, torch.arange(2.0**nbits), torch.float32).int()
    shifts = torch.arange(0, 8, nbits)
    got = (peers.little_endian_residuals(residuals, nbits).int()[..., None] >> shifts) & (2**nbits - 1)
    assert torch.equal(got.flatten(1), buckets)


def test_shapes_have_the_bytes_they_say():
    for DIM in (64, 128, 384, 768):
        for itemsize in (2, 4):
            n = dense.of_bytes(100_000, DIM, itemsize)
            assert n % 16 == 0
            assert abs(n * DIM * itemsize / (100_000 * 128 * 2) - 1) < 2e-3
    d = data.make(2, 64, 8, 20, 50, device="cpu")
    assert d.nbytes == int(d.offsets[-1]) * (4 + 16 + 2) + 21 * 8
    assert d.cs.table.shape == (51, 16), "the row of the absent token is there"
    assert (d.cs.table[50] == -32768).all()


def test_thresholds_keep_about_their_share():
    d = data.make(2, 64, 8, 20, 1000, device="cpu")
    best = (d.centroids.double() @ d.Q.double().T).amax(1)
    assert (best >= compressed.threshold_between(d, 0.2)).double().mean().item() == pytest.approx(0.2, abs=0.01)


def row(group, name, kernel=OURS, **fields):
    timed = {"ms": 1.0, "mdocs_s": 10.0, "gtok_s": 20.0, "pct_of_read": 50.0, "max_error": 1e-6, "read_gb_s": 4400.0}
    return {"group": group, "name": name, "kernel": kernel, "ours": kernel.startswith(OURS), **timed, **fields}


def test_floors_are_of_the_best_read():
    rows = [
        row("dense", "a", ms=2.0, nbytes=8_000_000, read_gb_s=4000.0),
        row("pq", "b", ms=2.0, nbytes=8_000_000, read_gb_s=5000.0),
        {"group": "dense", "name": "c", "kernel": "not run"},
    ]
    for _ in range(2):  # again changes nothing
        rows = record.of_best_read(rows)
        assert [round(r["floor_ms"], 9) for r in rows[:2]] == [0.0016, 0.0016]
        assert [round(r["pct_of_read"], 9) for r in rows[:2]] == [0.08, 0.08]
        assert "floor_ms" not in rows[2]
    assert [r.get("read_gb_s") for r in rows] == [4000.0, 5000.0, None]


def test_figures():
    rows = [
        row("dense", "d128 fp16", mdocs_s=40.0),
        row("dense", "d128 fp16", "slow", mdocs_s=10.0),
        row("dense", "d128 fp16", "int8", mdocs_s=90.0, bytes=1),
        row("dense", "d128 fp16", f"{peers.PAPER}, 1", mdocs_s=8.0),
        row("dense", "d128 fp16", f"{peers.PAPER}, 2", mdocs_s=16.0),
        row("dense", "d64 fp16", pct_of_read=97.0),
        row("dense", "fp32", f"{OURS}, ieee", ms=3.0, pct_of_read=30.0),
        row("dense", "fp32", f"{OURS}, tf32x3", ms=2.0, pct_of_read=60.0, max_error=5e-5),
        row("residual", "2 bits, from the query", ms=3.0),
        row("residual", "2 bits, 8 queries", ms=6.0),
    ]
    found = record.figures(rows)
    assert found["dense_over_best_peer"] == 2.5
    assert found["dense_over_paper"] == 2.5
    assert (found["dense_fp32_pct"], found["dense_fp32_max_err"]) == (30.0, 1e-6)
    assert found["residual2_q8_speedup"] == 4.0
    assert "dense_d64_pct" not in found, "half of its shapes"
    assert not {"pq16_mdocs", "exhaustive_ms", "dense_tf32_pct"} & found.keys()
    rows.append(row("dense", "d64 bf16", pct_of_read=91.0))
    assert record.figures(rows)["dense_d64_pct"] == 91.0


def test_merging_replaces_rows():
    old = [row("a", "x"), row("a", "y")]
    assert record.merged(old, [row("a", "y", ms=7.0)]) == [row("a", "x"), row("a", "y", ms=7.0)]


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_the_benchmarks_kernels_compile(arch):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench_aot", str(arch)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["kernel"] for k in kernels} == {"_stream_kernel", "_paper_kernel"}
    assert all(k["shared_bytes"] <= {80: 163, 90: 227}[arch] << 10 and k["spills"] == 0 for k in kernels)
    # 16 bytes a load
    assert all(k["wide"] for k in kernels if k["kernel"] == "_stream_kernel")


@pytest.mark.gpu
def test_the_clock_sees_the_work():
    device = torch.device("cuda")
    x = torch.zeros(1 << 28, device=device)
    c = clock.Clock(device)
    whole, half = c(x.sum, x.nbytes), c(x[: 1 << 27].sum, x.nbytes // 2)
    assert whole.p20 <= whole.ms <= whole.p80
    assert 1.5 < whole.ms / half.ms < 2.5
