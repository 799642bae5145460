"""What product quantisation costs and saves on a real collection: quality beside bytes a token, PQ and residuals.

    python scripts/bench_pq_quality.py --dataset scifact --queries Q.pt --index ONE_BIT TWO_BITS FOUR_BITS \\
        --base 2 --m 8 16 32 64 --opq 8 16 --out eval/results/pq_quality.json

Every index holds the same passages by the same encoder at another width; ``Q.pt`` their encoded queries (what eval
caches: a dict of "ids" and "Q" fp32 [n, LQ, DIM]). Residuals are searched at each width, PQ trained and encoded from
the embeddings of the index of ``--base`` bits, whose centroids also find and prune for it. Measures by ir_measures over
all judged queries, at k = 100 with stock's parameters. The run is correct only if on a sample of queries every score is
within 2e-3 of the float64 score of what its codec stores, a check that a shuffled scorer fails, and if codec "dense"
measures like the residuals it was decompressed from. Sets are added to what ``--out`` holds already.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from eval.cache import read_json, write_json
from eval.datasets import Dataset, load_dataset
from eval.manifest import environment
from eval.measure import means, measure
from plaid_tilemaxsim.engine import SearchEngine, with_defaults
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.pq import PQ, quantise
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.ops import reference

K = 100
MEASURES = ("nDCG@10", "R@100")
LIMIT = 2e-3
CHECKED = 8
# Bytes a token that the codec's scores are read from; candidates and pruning read 4 bytes more, its code.
INVERSE_NORM = 2


def embeddings(index: PlaidIndex) -> Tensor:
    """fp32 [T, DIM]."""
    return reference.decompress(
        index.codes(), index.residuals(), index.centroids, index.bucket_weights, index.nbits, torch.float32
    )


def stored(index: PlaidIndex, pq: PQ | None) -> Tensor:
    """fp32 [T, DIM]: what a codec's bytes stand for, in the space of the query."""
    if pq is None:
        return embeddings(index)
    e = reference.pq_decode(pq.codes, pq.codebook, torch.float32)
    return e if pq.rotation is None else e @ pq.rotation


def search(dataset: Dataset, engine: SearchEngine, Q: Tensor, D: Tensor, mode: str) -> tuple[dict[str, Any], bool]:
    """Measures and errors of all queries, and whether the sample's scores are right."""
    params, run, errors, shuffled = with_defaults(K, mode=mode), {}, [], []
    offsets = engine.index.offsets
    for i, query_id in enumerate(dataset.query_ids):
        own = dataset.own_passage(query_id)
        pids, scores = engine.search(Q[i], params)
        if i % max(1, len(Q) // CHECKED) == 0:
            true = reference.maxsim(Q[i], D, offsets, pids)
            errors.append(float((true - scores).abs().max()))
            shuffled.append(float((true - scores.roll(1)).abs().max()))
        found = zip(pids.tolist(), scores.tolist())
        run[query_id] = {dataset.passage_ids[pid]: score for pid, score in found if pid != own}
    values = means(measure(dataset.qrels, run, MEASURES))
    right = max(errors) <= LIMIT < min(shuffled)
    return {**values, "max_error": max(errors)}, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="as for scripts/eval.py")
    parser.add_argument("--name", help="of the set in the results (default: the dataset's)")
    parser.add_argument("--split", default="auto")
    parser.add_argument("--data", type=Path, help="folder of collections that are given by bare name")
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--index", type=Path, nargs="+", required=True)
    parser.add_argument("--base", type=int, help="bits of the index that PQ is made of (default: the widest)")
    parser.add_argument("--m", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--opq", type=int, nargs="*", default=[])
    parser.add_argument("--sample", type=int, default=1 << 16)
    parser.add_argument("--mode", default="plaid", choices=["plaid", "rerank", "exhaustive"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    dataset = load_dataset(args.dataset, split=args.split, data=args.data, progress=False)
    saved = torch.load(args.queries, weights_only=True)
    Q = saved["Q"].float()
    problems: list[str] = []
    if list(saved["ids"]) != list(dataset.query_ids):
        raise ValueError(f"{args.queries.name}: ids: expected those of the dataset's queries, got others")
    indexes = {index.nbits: index for index in map(read_index, args.index)}
    base = indexes[args.base or max(indexes)]
    true, set_name = embeddings(base), args.name or dataset.name
    rows: dict[str, dict[str, Any]] = {}

    def add(name: str, index: PlaidIndex, codec: str, width: int, pq: PQ | None = None) -> None:
        began = time.perf_counter()
        engine = SearchEngine(load_resident(index, "cpu", codec=codec, pq=pq, progress=False))
        D = stored(index, pq)
        found, right = search(dataset, engine, Q, D, args.mode)
        if not right:
            problems.append(f"{set_name}, {name}: scores off by {found['max_error']:.3g}")
        lost = float(((D - true) ** 2).sum(1).mean()) if index is base else None
        rows[name] = {"bytes_per_token": width, **found, "squared_distance_from_base": lost}
        seconds = time.perf_counter() - began
        print(f"{set_name:<22} {name:<10} {width:>4} bytes  nDCG@10 {found['nDCG@10']:.4f}  R@100 {found['R@100']:.4f}"
              f"  error {found['max_error']:.1e}  {seconds:.0f} s", flush=True)  # fmt: skip

    for nbits, index in sorted(indexes.items()):
        add(f"residual{nbits}", index, "residual", index.dim * nbits // 8 + INVERSE_NORM)
    add("dense", base, "dense", 2 * base.dim)
    for name in MEASURES:
        if abs(rows["dense"][name] - rows[f"residual{base.nbits}"][name]) > 1e-4:
            problems.append(f"{set_name}, dense: {name} {rows['dense'][name]}, residuals have another")
    for opq, widths in ((False, args.m), (True, args.opq)):
        for m in widths:
            pq = quantise(base, m, opq=opq, sample=args.sample)
            add(f"{'opq' if opq else 'pq'}{m}", base, "pq", m, pq)

    found = environment()
    result = read_json(args.out) if args.out.exists() else {"problems": [], "figures": {}, "detail": {}}
    result["problems"] = [p for p in result["problems"] if not p.startswith(f"{set_name}, ")] + problems
    result["correct"] = not result["problems"]
    key = set_name.replace("-", "_").replace(".", "_")
    for name, row in rows.items():
        for field in ("bytes_per_token", *MEASURES):
            result["figures"][f"{key}_{name}_{field}"] = row[field]
    result["detail"][set_name] = {
        "queries": len(dataset.query_ids),
        "passages": base.num_passages,
        "tokens": base.num_tokens,
        "dim": base.dim,
        "base_bits": base.nbits,
        "mode": args.mode,
        "trained_on": min(args.sample, base.num_tokens),
        "commit": found["commit"],
        "rows": rows,
    }
    result["note"] = (
        "bytes_per_token: what the exact step reads (2 bytes of a residual row are its inverse norm); candidates and "
        "pruning read 4 more whatever the codec. dense: as fp16. PQ is made of the embeddings of the base index, so "
        "it cannot be better than these but by chance. Encoder splade-tiny, which is small."
    )
    for name in ("machine", "versions", "commit"):
        result[name] = found[name]
    result["command"] = (
        "python scripts/bench_pq_quality.py --dataset D --queries Q.pt --index INDEX... "
        f"--base {base.nbits} --m 8 16 32 64 --opq 8 16 --out eval/results/pq_quality.json, for every set"
    )
    write_json(args.out, result)
    return 0 if result["correct"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
