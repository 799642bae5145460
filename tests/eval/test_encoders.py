from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eval.datasets import Dataset
from eval.encoders import TOLERANCE, _run, exact_scores, figures, measure_checkpoint
from tests.synthetic import make_checkpoint, make_collection


@pytest.mark.parametrize("tokens", [1, 7, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_exact_scores(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    doclens = torch.tensor([3, 0, 1, 8, 7, 0, 20], dtype=torch.int32)
    vectors = torch.nn.functional.normalize(torch.randn(int(doclens.sum()), 24), dim=1).to(dtype)
    Q = torch.nn.functional.normalize(torch.randn(3, 5, 24), dim=-1)
    Q[1] = -vectors[0].float()  # all similarities with passage 0's first vector are negative
    scores = exact_scores(Q, vectors, doclens, tokens=tokens, progress=False)
    passages = vectors.double().split(doclens.tolist())
    expected = torch.tensor(
        [[float((q.double() @ p.T).max(1).values.sum()) if len(p) else -torch.inf for p in passages] for q in Q],
        dtype=torch.float64,
    )
    torch.testing.assert_close(scores.double(), expected, atol=TOLERANCE, rtol=0)
    other = scores.roll(1, 1).nan_to_num(neginf=-9)
    assert (other - expected.nan_to_num(neginf=-9)).abs().max() > 0.1


def test_a_random_encoder_still_finds_copies_of_passages(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    texts = make_collection(40)
    ids = [f"d{i}" for i in range(40)]
    asked = range(0, 40, 4)
    dataset = Dataset(
        "tiny", ids, texts, [f"q{i}" for i in asked], [texts[i] for i in asked],
        {f"q{i}": {f"d{i}": 1} for i in asked},
    )  # fmt: skip
    result = measure_checkpoint(checkpoint, dataset, cache=tmp_path, progress=False)
    assert result["correct"]
    assert result["largest_error"] <= TOLERANCE
    assert result["measures"]["nDCG@10"] > 2 * result["shuffled"]["nDCG@10"]
    assert result["passages_per_second"] > 0
    assert figures([result])["ndcg10_tiny_checkpoint"] == round(result["measures"]["nDCG@10"], 4)
    assert str(tmp_path) not in json.dumps(result)


def test_the_query_itself_is_no_result() -> None:
    ids = ["d0", "d1", "d2"]
    qrels = {"d0": {"d1": 1}, "q1": {"d1": 1}}
    dataset = Dataset("own", ids, ["a", "b", "c"], ["d0", "q1"], ["a", "b"], qrels, removes_own=True)
    run = _run(dataset, torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]))
    assert run == {"d0": {"d2": 2.0, "d1": 1.0}, "q1": {"d0": 3.0, "d2": 2.0, "d1": 1.0}}
