"""What a checkpoint is worth before any index: quality by exact MaxSim over its vectors, and encoding speed."""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .checkpoint import checkpoint_identity
from .indexing import encode_passages, encode_queries
from .measure import means, measure

if TYPE_CHECKING:
    import torch

    from .datasets import Dataset

MEASURES = ("nDCG@10", "RR@10", "R@100")
K = 100
# fp32 sums of at most 384 products of entries below 1, then of at most 64 maxima, against fp64.
TOLERANCE = 1e-3


def measure_checkpoint(
    checkpoint: str | os.PathLike[str],
    dataset: Dataset,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Means of MEASURES when every passage is scored exactly, vectors per passage, and encoding speed, JSON-ready.

    `correct` is true if sampled scores equal a plain fp64 loop's within TOLERANCE and passages in another order score
    less than half the nDCG@10. Encoding times are those of the run that filled the cache; `load_average` is now's.
    """
    import torch

    embeddings = encode_passages(checkpoint, dataset, cache=cache, progress=progress)
    encoded = encode_queries(checkpoint, dataset, cache=cache, progress=progress)
    vectors, doclens = embeddings.all()
    scores = exact_scores(encoded.Q, vectors, doclens, progress=progress)
    values = means(measure(dataset.qrels, _run(dataset, scores), MEASURES))
    order = torch.randperm(scores.size(1), generator=torch.Generator().manual_seed(0))
    shuffled = means(measure(dataset.qrels, _run(dataset, scores[:, order]), MEASURES))
    error = _largest_error(encoded.Q, vectors, doclens, scores)
    return {
        "checkpoint": checkpoint_identity(checkpoint),
        "dataset": dataset.identity(),
        "doc_maxlen": embeddings.doc_maxlen,
        "measures": values,
        "shuffled": shuffled,
        "largest_error": error,
        "correct": error <= TOLERANCE and shuffled["nDCG@10"] < 0.5 * values["nDCG@10"],
        "vectors_per_passage": round(len(vectors) / len(doclens), 2),
        "passages_per_second": round(len(doclens) / embeddings.seconds, 1),
        "query_ms_p50": round(statistics.median(encoded.milliseconds), 3),
        "load_average": round(os.getloadavg()[0], 1),
    }


def exact_scores(
    Q: torch.Tensor, vectors: torch.Tensor, doclens: torch.Tensor, *, tokens: int = 4096, progress: bool = True
) -> torch.Tensor:
    """MaxSim of every query with every passage: fp32 [nq, N] on CPU; a passage without vectors scores -inf.

    Q: fp32 [nq, LQ, DIM]; vectors: fp16 or fp32 [T, DIM]; doclens: int [N]; tokens: vectors per block, at least.
    """
    import torch

    nq, LQ, dim = Q.shape
    columns = Q.reshape(nq * LQ, dim).T.contiguous()
    scores = torch.full((nq, len(doclens)), -torch.inf)
    lengths = doclens.long().tolist()
    first, start = 0, 0
    with tqdm(total=len(lengths), desc="exact MaxSim", unit=" passages", disable=not progress) as bar:
        while first < len(lengths):
            last, end = first, start
            while last < len(lengths) and (last == first or end - start < tokens):
                end += lengths[last]
                last += 1
            # [t, nq * LQ] -> [n, nq * LQ]
            similarities = vectors[start:end].float() @ columns
            best = torch.segment_reduce(similarities, "max", lengths=doclens[first:last].long(), axis=0)
            scores[:, first:last] = best.view(last - first, nq, LQ).sum(-1).T
            bar.update(last - first)
            first, start = last, end
    return scores


def _run(dataset: Dataset, scores: torch.Tensor) -> dict[str, dict[str, float]]:
    run = {}
    for row, query_id in enumerate(dataset.query_ids):
        own = dataset.own_passage(query_id)
        values, pids = scores[row].topk(min(K + 1, scores.size(1)))
        found = [(pid, value) for pid, value in zip(pids.tolist(), values.tolist()) if pid != own][:K]
        run[query_id] = {dataset.passage_ids[pid]: value for pid, value in found}
    return run


def _largest_error(Q: torch.Tensor, vectors: torch.Tensor, doclens: torch.Tensor, scores: torch.Tensor) -> float:
    import torch

    generator = torch.Generator().manual_seed(1)
    ends = doclens.long().cumsum(0)
    largest = 0.0
    for _ in range(50):
        query = int(torch.randint(len(Q), (1,), generator=generator))
        pid = int(torch.randint(len(doclens), (1,), generator=generator))
        if doclens[pid] == 0:
            continue
        rows = vectors[ends[pid] - doclens[pid] : ends[pid]].double()
        plain = (Q[query].double() @ rows.T).max(1).values.sum()
        largest = max(largest, abs(float(plain) - float(scores[query, pid])))
    return largest


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    """The flat map of a results file: measure_dataset_checkpoint -> value; speeds stay beside their load."""
    flat = {}
    for result in results:
        suffix = f"{result['dataset']['name']}_{result['checkpoint']['name']}".replace("-", "_")
        flat[f"ndcg10_{suffix}"] = round(result["measures"]["nDCG@10"], 4)
        flat[f"r100_{suffix}"] = round(result["measures"]["R@100"], 4)
    return flat
