"""Text to the ten best passages: stock colbert-ai and the plugin with its fast encoder, in turns, in one process.

    python scripts/bench_text.py --index idx/msmarco-size --passages 8841823 --out eval/results/h200_text.json

Everything is made here where it is missing and nothing is downloaded: a synthetic index (``make_synthetic_index``) and
a random checkpoint of BERT-base's size, moved so that its encodings lie where the index's centroids lie. Both sides
answer ``Searcher.search(text)``. The run counts as correct only if the fast encoder's embeddings are within fp16's
rounding of stock's (a bound that other queries' embeddings fail) and no farther from the fp32 model than stock's are,
if searching both gives the same passages up to ties, and if stock's ranker and ours agree on stock's embeddings.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn.functional import normalize

from eval.latency import summary
from eval.oracle import Oracle
from plaid_tilemaxsim.engine import with_defaults
from plaid_tilemaxsim.index.files import read_index
from scripts.ab_latency import agreement, conclude, described, recorded, timed
from scripts.make_synthetic_index import make_index
from tests.synthetic import make_checkpoint, make_collection

K = 10
# Share of the passages of two rankings that must be common or tied.
LEAST_COMMON = 0.98


def embedding_budget(layers: int) -> float:
    """Most distance of two fp16 encodings of one token.

    About 8 roundings a layer and 2 after them, each 2^-11 / sqrt(3) of the vector as it stands, independent: they add
    up to that times sqrt(8 layers + 2). Two encodings differ by sqrt(2) of it; 5 times as much is out of reach.
    """
    return 5 * math.sqrt(2 / 3 * (8 * layers + 2)) * 2**-11


def distances(a: Tensor, b: Tensor) -> Tensor:
    """[n, LQ] between tokens of a and b [n, LQ, DIM]."""
    return (a - b).norm(dim=2)


def place(checkpoint: Any, centroids: Tensor, texts: list[str]) -> None:
    """Changes the last bias and the projection so that encoded tokens have mean and covariance of the centroids."""
    ids, mask = checkpoint.query_tokenizer.tensorize(texts)
    norm = checkpoint.bert.encoder.layer[-1].output.LayerNorm
    with torch.no_grad():
        hidden = checkpoint.bert(ids, attention_mask=mask)[0].flatten(0, 1)
        size, device = hidden.size(1), hidden.device
        generator = torch.Generator().manual_seed(0)
        axis = normalize(torch.randn(size, generator=generator), dim=0).to(device)
        spread = (hidden - hidden.mean(0)).norm(dim=1).mean() / math.sqrt(size)
        norm.bias += math.sqrt(size) * axis - hidden.mean(0)
        centroids = centroids.to(device, torch.float32)
        values, vectors = torch.linalg.eigh(torch.cov(centroids.T))
        random = torch.randn(centroids.size(1), size, generator=generator).to(device) / (math.sqrt(size) * spread)
        random -= torch.outer(random @ axis, axis)
        root = vectors * values.clamp(min=0).sqrt()
        checkpoint.linear.weight.copy_(root @ random + torch.outer(centroids.mean(0), axis) / math.sqrt(size))


def exact(checkpoint: Any, texts: list[str]) -> Tensor:
    """fp32 [n, LQ, DIM]: the model without autocast."""
    from colbert.modeling.colbert import ColBERT

    with torch.no_grad():
        Q: Tensor = ColBERT.query(checkpoint, *checkpoint.query_tokenizer.tensorize(texts))
    return Q


def common(a: tuple[Any, ...], b: tuple[Any, ...], tie: float) -> float:
    """Share of the passages of a that b found too, or that score within ``tie`` of b's last."""
    (pids, _, scores), (others, _, other_scores) = a, b
    return sum(p in others or s <= other_scores[-1] + tie for p, s in zip(pids, scores)) / len(pids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, required=True, help="made where it is missing")
    parser.add_argument("--passages", type=int, default=8_841_823, help="of the index to make")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--texts-judged", type=int, default=3, help="on which both rankers meet the oracle")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--commit", help="of this code, for the record, where there is no checkout to ask")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    figures: dict[str, float] = {}
    detail: dict[str, Any] = {}
    problems: list[str] = []
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:.0f} s] {text}", flush=True)

    import plaid_tilemaxsim

    plaid_tilemaxsim.enable()
    script = Path(__file__).with_name("_extensions.py")
    compiling = subprocess.Popen([sys.executable, str(script), *(["gpu"] if on_gpu else [])])
    if not args.index.exists():
        make_index(args.index, passages=args.passages, device=device.type, progress=False)
        torch.cuda.empty_cache()
        say(f"made {args.index.name}")
    plaid_index = read_index(args.index, verify="structure")
    texts = [" ".join(text.split()[: 3 + i % 10]) for i, text in enumerate(make_collection(args.texts, seed=1))]
    bert = {"num_attention_heads": args.hidden // 64, "intermediate_size": 4 * args.hidden, "vocab_size": 30522}

    from colbert import Searcher
    from colbert.infra import ColBERTConfig

    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, dim=plaid_index.dim, hidden=args.hidden, layers=args.layers, **bert)
        say("made a checkpoint")
        known = {"checkpoint": folder, "collection": ["-"] * plaid_index.num_passages, "verbose": 1}
        place_of_index = str(args.index.resolve())
        options = {"scorer": "tilemaxsim", "scorer_options": {"encoder": "fast"}}
        ours = Searcher(place_of_index, config=ColBERTConfig(**options), **known)
        say("the plugin has the index")
        oracle = Oracle(plaid_index, dtype=torch.float64, device=device)
        say("the oracle has the index")
        if compiling.wait():
            sys.exit("stock's extensions do not compile here")
        say("stock's extensions are compiled")
        stock = Searcher(place_of_index, config=ColBERTConfig(scorer="plaid"), **known)
        say("stock has the index")
    checkpoint = stock.checkpoint = ours.checkpoint
    place(checkpoint, plaid_index.centroids, texts)
    parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    figures["encoder_parameters"] = parameters

    # ---- embeddings
    budget = embedding_budget(args.layers)
    fast = torch.cat([ours.encode(text) for text in texts])
    plain = torch.cat([stock.encode(text) for text in texts])
    apart, true = distances(fast, plain), exact(checkpoint, texts)
    others = distances(fast.roll(1, 0), plain).amax(1)
    figures["embedding_budget"] = budget
    figures["embedding_max_distance"] = float(apart.max())
    figures["embedding_least_distance_of_others"] = float(others.min())
    figures["embedding_mean_error"] = float(distances(fast, true).mean())
    figures["stock_embedding_mean_error"] = float(distances(plain, true).mean())
    together = ours.encode(texts)
    if not float(apart.max()) <= budget or not float(distances(together, plain).max()) <= budget:
        problems.append(f"embeddings: {float(apart.max()):.2e} and {float(distances(together, plain).max()):.2e} apart")
    if not float(others.min()) > budget:
        problems.append("embeddings: the bound tells no queries apart")
    if figures["embedding_mean_error"] > 1.1 * figures["stock_embedding_mean_error"] + 1e-6:
        problems.append("embeddings: farther from the fp32 model than stock's")
    say(f"embeddings at most {float(apart.max()):.2e} apart, budget {budget:.2e}")

    # ---- rankings
    engine = ours.ranker._engine
    params = with_defaults(K)
    found = [ours.search(text, k=K) for text in texts]
    of_stock_embeddings = [ours.dense_search(q[None], k=K) for q in plain]
    of_stock = [stock.search(text, k=K) for text in texts]
    ties = (2 * apart.sum(1)).tolist()  # how far two passages' scores can move against each other
    shares = [common(a, b, tie) for a, b, tie in zip(found, of_stock_embeddings, ties)]
    shuffled = [common(a, b, tie) for a, b, tie in zip(found[1:], of_stock_embeddings, ties)]
    figures["common_of_embeddings"] = sum(shares) / len(shares)
    figures["common_with_stock"] = sum(len({*a[0]} & {*b[0]}) / K for a, b in zip(found, of_stock)) / len(texts)
    if not figures["common_of_embeddings"] >= LEAST_COMMON > sum(shuffled) / len(shuffled):
        problems.append(f"rankings: {figures['common_of_embeddings']:.3f} in common, shuffled {max(shuffled):.3f}")
    counts = [engine.candidates(q, params.ncells).numel() for q in fast]
    figures["candidates_median"] = sorted(counts)[len(counts) // 2]
    judged = plain[: args.texts_judged]
    detail["agreement"] = agreement(stock.ranker, stock.config, engine, params, oracle, judged)
    problems += detail["agreement"]["failures"]
    del oracle
    say(f"rankings: {figures['common_of_embeddings']:.3f} in common, {figures['common_with_stock']:.3f} with stock's")

    # ---- times
    def encode(searcher: Any, text: str) -> None:
        searcher.encode(text)
        if on_gpu:
            torch.cuda.synchronize()

    def search(searcher: Any, text: str) -> None:
        searcher.search(text, k=K)

    sides = {"": ours, "stock_": stock}
    for name, work in {"text": search, "encode": encode}.items():
        times: dict[str, list[float]] = {prefix: [] for prefix in sides}
        gc.collect()
        gc.disable()
        for turn in range(args.repeats * len(texts)):
            for prefix in sorted(sides, reverse=turn % 2 == 1):
                spent = timed(work, sides[prefix], texts[turn % len(texts)])
                if turn >= 5:
                    times[prefix].append(spent)
        gc.enable()
        for prefix, spent_each in times.items():
            found_times = detail[f"{prefix}{name}_ms"] = summary(spent_each)
            figures[f"{prefix}{name}_p50_ms"] = found_times["p50"]
            figures[f"{prefix}{name}_p99_ms"] = found_times["p99"]
        say(f"{name}: {figures[f'{name}_p50_ms']:.3f} ms, stock {figures[f'stock_{name}_p50_ms']:.3f} ms")
    conclude(
        {
            "problems": problems[:40],
            "figures": figures,
            "detail": detail,
            "index": described(args.index, plaid_index),
            "encoder": {"layers": args.layers, "hidden": args.hidden, **bert, "parameters": parameters},
            "texts": len(texts),
            **recorded(args.commit),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
