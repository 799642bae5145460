"""The quality run: packing, one set end to end, and what its summary makes of wrong results."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval.datasets import load_beir, write_beir
from scripts import pack_quality, run_quality
from tests.colbert_fixtures import checkpoint, stock_extensions  # noqa: F401
from tests.synthetic import make_collection

ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("faiss")
pytest.importorskip("ir_measures")


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beir") / "tiny"
    texts = make_collection(150)
    write_beir(
        folder,
        ((f"d{pid}", text) for pid, text in enumerate(texts)),
        ((f"q{i}", " ".join(texts[11 * i].split()[:5])) for i in range(6)),
        ((f"q{i}", f"d{11 * i}", 1) for i in range(6)),
    )
    return folder


@pytest.fixture(scope="module")
def result(beir: Path, checkpoint: Path, stock_extensions, tmp_path_factory) -> dict:  # noqa: F811
    """A set packed and run by the script's own command, without a GPU."""
    work = tmp_path_factory.mktemp("quality")
    dataset = load_beir(beir, progress=False)
    index = pack_quality.build_index(checkpoint, dataset, nbits=2, cache=work / "cache", progress=False)
    pack_quality.pack_set(dataset, index / "centroids.pt", work / "packed" / "sets" / "tiny")
    pack_quality.shutil.copytree(checkpoint, work / "packed" / "checkpoint")
    packed = load_beir(work / "packed" / "sets" / "tiny", progress=False)
    assert packed.identity()["sha256"] == dataset.identity()["sha256"]
    out = work / "quality.json"
    command = [sys.executable, str(ROOT / "scripts" / "run_quality.py"), str(work / "packed"), "--work",
               str(work / "run"), "--out", str(out), "--nbits", "2", "--k", "10", "--device", "cpu"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: dict = json.loads(out.read_text())
    return loaded


def test_one_command_gives_every_system_and_the_figures(result):
    assert result["correct"] is True
    figures = result["figures"]
    assert figures["sets"] == figures["metrics_equal_sets"] == 1
    assert figures["max_err_vs_oracle"] <= 1e-4
    assert figures["mean_err_ours"] <= 1e-5
    assert figures["mean_err_dense"] <= 1e-4 < figures["mean_err_pq"] < 3
    assert figures["ndcg10_tests"] == 2
    (row,) = result["table"]
    assert set(row["nDCG@10"]) == {*run_quality.SYSTEMS, "stock-cpu", "oracle"}
    assert row["nDCG@10"]["tilemaxsim:mode=exhaustive"] == row["nDCG@10"]["oracle"]
    assert {"versions", "commit", "command", "machine"} <= result.keys()


def test_what_is_wrong_is_a_problem(result):
    part = result["sets"]["tiny"]
    assert run_quality.merge({"tiny": part}, {}, False)["correct"] is True

    def spoiled(change) -> dict:
        wrong = copy.deepcopy(part)
        change(wrong["indexes"][0]["search"][0])
        return run_quality.merge({"tiny": wrong}, {}, False)

    def test_of(search, system):
        return search["paired"]["stock-cpu"][system]["nDCG@10"]

    assert not spoiled(lambda s: s["errors"]["tilemaxsim"].update(max=1.0))["correct"]
    assert not spoiled(lambda s: s.update(shuffled_refused=False))["correct"]
    assert not spoiled(lambda s: s["agreement"]["tilemaxsim against stock-cpu"].update(same=False))["correct"]
    unequal = spoiled(lambda s: test_of(s, "tilemaxsim").update(mean=-1e-4))
    assert unequal["figures"]["metrics_equal_sets"] == 0
    lost = spoiled(lambda s: test_of(s, "tilemaxsim:mode=rerank").update(mean=-0.1, p_value=1e-4))
    assert lost["figures"]["ndcg10_losses"] == lost["figures"]["ndcg10_losses_holm"] == 1
    better = spoiled(lambda s: test_of(s, "tilemaxsim:mode=rerank").update(mean=0.1, p_value=1e-4))
    assert better["figures"]["ndcg10_losses"] == 0
    assert not run_quality.merge({}, {"tiny": "it ended"}, False)["correct"]


def test_holm_stops_at_the_first_that_holds():
    tests = [(0.001, "a"), (0.02, "b"), (0.03, "c"), (1.0, "d")]
    assert [name for _, name in run_quality.holm_rejected(tests)] == ["a"]
    assert run_quality.holm_rejected([(0.04, "a")]) == [(0.04, "a")]


def test_stock_is_no_system_to_choose():
    with pytest.raises(SystemExit):
        run_quality.parse(["f", "--work", "w", "--out", "o", "--systems", "plaid"])
