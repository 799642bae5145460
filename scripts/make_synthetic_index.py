"""Writes a PLAID index of any size in stock colbert-ai's own files, with queries that hit it.

    python -m scripts.make_synthetic_index --passages 8841823 --centroids 262144 --out indexes/synthetic

Both stock and the plugin search it like a real one. Its shape (lengths, use of centroids, geometry, residuals) was
fitted to a real index, see Shape and REAL; what came out is printed beside what that index has, and written to
synthetic.json in the folder. Vectors mean nothing, so rankings have no quality, only agreement and cost.

queries.pt holds fp32 [queries, 32, dim] unit vectors near 32 tokens of one passage each: nearly every query token
probes cells of its own, so candidates are as many as a query can have (about 3 times a real one's, and over 85% of
the centroids pass the threshold of 0.5). queries.masked.pt holds queries as short as real ones, 9 such tokens and
23 near each other as the vectors of [MASK] are: at the size of REAL they find what real queries find.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from plaid_tilemaxsim.index.lists import build_pid_lists

CHUNK_PASSAGES = 25_000
LQ = 32
WRITERS = 4
# Tokens whose embeddings are in memory at once.
BLOCK_TOKENS = {"cuda": 1 << 18, "cpu": 1 << 14}


@dataclass(frozen=True)
class Shape:
    """Fitted to stock's index of 18,570 MS MARCO passages (2 bits, 16,384 centroids, a 2-layer BERT encoder)."""

    # Lognormal lengths; the mean is that of all of MS MARCO (597.9 M vectors, 8,841,823 passages).
    mean_doclen: float = 67.6
    doclen_sigma: float = 0.36
    least_doclen: int = 8
    most_doclen: int = 180
    # A centroid's cosine with the one direction that all share, normal over words; the rest is its word's vector and
    # its own, whose cosine for two centroids of a word is the third number.
    common: float = 0.787
    common_sigma: float = 0.056
    word: float = 0.75
    word_centroids: int = 16
    # The k-th variance of what is not common falls as k ** -decay.
    decay: float = 0.64
    # A topic is the share of centroids nearest to a random vector, a passage draws this share of its tokens from its
    # topic's (skewed to the nearest by an exponent) and the rest from all centroids by lognormal weight.
    topics_per_centroid: float = 1 / 8
    topic_centroids: float = 1 / 160
    from_topic: float = 0.87
    topic_skew: float = 1.7
    use_sigma: float = 0.3
    # This share of the tokens repeats the code of an earlier token of the passage.
    repeated: float = 0.05
    # ||embedding - centroid|| before the embedding is normalised again.
    residual: float = 0.38
    # Noise of a query around its tokens; of a [MASK] around the first query token.
    query_noise: float = 0.7
    mask_noise: float = 0.15
    words_of_query: int = 9


# What 43 queries (TREC DL 2019) find in the real index that Shape was fitted to, at nprobe 1, 2 and 4.
REAL = {
    "passages": 18570,
    "tokens_a_passage": 68.8,
    "centroids_a_passage": 47.6,
    "log_sigma_of_tokens_a_centroid": 0.63,
    "cells": {"1": 9.3, "2": 18.1, "4": 34.3},
    "candidates_a_cell_over_mean_list": {"1": 1.05, "2": 0.94, "4": 0.85},
    "candidates_share": {"1": 0.0282, "2": 0.0493, "4": 0.0848},
    "centroids_kept": {"0.4": 0.964, "0.45": 0.852, "0.5": 0.624},
    "tokens_kept": {"0.4": 0.966, "0.45": 0.860, "0.5": 0.637},
    "best_centroid_score": 0.774,
}


class Generator:
    """All random choices of one index, on one device; the same seed and device type give the same index."""

    def __init__(self, passages: int, centroids: int, nbits: int, dim: int, seed: int, device: str, shape: Shape):
        self.shape, self.nbits, self.dim, self.device = shape, nbits, dim, torch.device(device)
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.doclens = self._doclens(passages)
        self.centroids, self.topics = self._centroids(centroids)
        weights = (shape.use_sigma * self._normal(centroids)).exp().double()
        self.cumulated_use = weights.cumsum(0) / weights.sum()
        self.cutoffs, self.weights, self.avg_residual = self._buckets()

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.random, device=self.device)

    def _uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.random, device=self.device)

    def _doclens(self, passages: int) -> Tensor:
        s = self.shape
        center = math.log(s.mean_doclen) - s.doclen_sigma**2 / 2
        return (
            (center + s.doclen_sigma * self._normal(passages)).exp().round().clamp(s.least_doclen, s.most_doclen).long()
        )

    def _centroids(self, C: int) -> tuple[Tensor, Tensor]:
        """Unit centroids fp16 [C, DIM], and the centroids of each topic, int32 [topics, n], nearest first."""
        s = self.shape
        scale = torch.arange(1, self.dim + 1, device=self.device) ** (-s.decay / 2)
        words = normalize(self._normal(math.ceil(C / s.word_centroids), self.dim) * scale, dim=1)
        own = normalize(self._normal(C, self.dim) * scale, dim=1)
        word = torch.randint(len(words), (C,), generator=self.random, device=self.device)
        varied = normalize(math.sqrt(s.word) * words[word] + math.sqrt(1 - s.word) * own, dim=1)
        direction = normalize(self._normal(self.dim), dim=0)
        varied = normalize(varied - (varied @ direction)[:, None] * direction, dim=1)
        common = (s.common + s.common_sigma * self._normal(len(words), 1)).clamp(0, 0.99)[word]
        centroids = normalize(common * direction + (1 - common**2).sqrt() * varied, dim=1)
        subjects = normalize(self._normal(max(1, int(C * s.topics_per_centroid)), self.dim) * scale, dim=1)
        size = max(1, int(C * s.topic_centroids))
        nearest = [(some @ varied.T).topk(size, dim=1).indices.int() for some in subjects.split(256)]
        return centroids.half(), torch.cat(nearest)

    def codes(self, doclens: Tensor) -> Tensor:
        """int32 [sum(doclens)] centroids of the tokens of passages, one topic each."""
        s, n = self.shape, int(doclens.sum())
        owner = torch.repeat_interleave(doclens, output_size=n)
        first = (doclens.cumsum(0) - doclens)[owner]
        topic = torch.randint(len(self.topics), doclens.shape, generator=self.random, device=self.device)[owner]
        rank = (self._uniform(n) ** s.topic_skew * self.topics.size(1)).long()
        everywhere = torch.searchsorted(self.cumulated_use, self._uniform(n).double()).clamp_(
            max=len(self.centroids) - 1
        )
        codes = torch.where(self._uniform(n) < s.from_topic, self.topics[topic, rank], everywhere.int())
        place = torch.arange(n, device=self.device) - first
        earlier = first + (self._uniform(n) * place).long()
        return torch.where((self._uniform(n) < s.repeated) & (place > 0), codes[earlier], codes)

    def embeddings(self, codes: Tensor) -> Tensor:
        """Unit embeddings fp32 [n, DIM] whose nearest centroids are those of codes [n]."""
        noise = self._normal(codes.numel(), self.dim) * (self.shape.residual / math.sqrt(self.dim))
        return normalize(noise + self.centroids[codes.long()], dim=1)

    def _buckets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Cutoffs [2**nbits - 1], weights [2**nbits], mean |residual| [], from a sample as stock's indexer does."""
        codes = torch.randint(len(self.centroids), (1 << 13,), generator=self.random, device=self.device)
        ranked = (self.embeddings(codes) - self.centroids[codes]).flatten().sort().values
        quantiles = torch.arange(2 ** (self.nbits + 1), device=self.device) / 2 ** (self.nbits + 1)
        values = ranked[(quantiles * (ranked.numel() - 1)).long()]
        return values[2::2].contiguous(), values[1::2].contiguous(), ranked.abs().mean()

    def residuals(self, codes: Tensor) -> Tensor:
        """uint8 [n, DIM * nbits // 8]: embeddings of codes [n], compressed as stock does it."""
        slots = 8 // self.nbits
        index = torch.arange(2**self.nbits, device=self.device)
        reversed_bits = torch.zeros_like(index)
        for bit in range(self.nbits):
            reversed_bits |= ((index >> bit) & 1) << (self.nbits - 1 - bit)
        shifts = torch.arange(slots - 1, -1, -1, device=self.device, dtype=torch.int32) * self.nbits
        packed = []
        for some in codes.split(BLOCK_TOKENS[self.device.type]):
            residual = self.embeddings(some) - self.centroids[some.long()]
            bucket = torch.bucketize(residual, self.cutoffs, out_int32=True)
            bits = reversed_bits.int()[bucket].view(len(some), -1, slots) << shifts
            packed.append(bits.sum(2, dtype=torch.int32).to(torch.uint8))
        return torch.cat(packed)

    def queries(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Two sets of unit queries, fp32 [n, LQ, DIM], near tokens with codes [n, LQ]; the second mostly masks."""
        s, scale = self.shape, 1 / math.sqrt(self.dim)
        n = codes.size(0)
        tokens = self.embeddings(codes.flatten()).view(n, LQ, self.dim)
        spread = normalize(tokens + s.query_noise * scale * self._normal(n, 1, self.dim), dim=2)
        masked = spread.clone()
        masks = spread[:, :1] + s.mask_noise * scale * self._normal(n, LQ - s.words_of_query, self.dim)
        masked[:, s.words_of_query :] = normalize(masks, dim=2)
        return spread, masked


def make_index(
    out: Path,
    *,
    passages: int,
    centroids: int | None = None,
    nbits: int = 2,
    dim: int = 128,
    seed: int = 0,
    queries: int = 200,
    device: str = "cpu",
    shape: Shape | None = None,
    progress: bool = True,
) -> dict[str, object]:
    """Writes the index folder out, which must not exist (it appears at once, when complete); what was measured.

    centroids: None for as many as stock's indexer makes, 2 ** floor(log2(16 * sqrt(tokens))).
    Raises ValueError for arguments that stock could not index, FileExistsError, OSError without disk space.
    """
    shape = shape or Shape()
    if nbits not in (1, 2, 4, 8) or dim <= 0 or dim % (8 * nbits):
        raise ValueError(
            f"nbits, dim: expected nbits of 1, 2, 4 or 8 and dim a multiple of 8 * nbits, got {nbits}, {dim}"
        )
    if centroids is None:
        centroids = 2 ** int(math.log2(16 * math.sqrt(max(passages, 1) * shape.mean_doclen)))
    for name, value in {"passages": passages, "centroids": centroids, "queries": queries}.items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if out.exists():
        raise FileExistsError(f"out: expected a path that does not exist, got {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    needed = int(passages * shape.mean_doclen * (dim * nbits / 8 + 8)) + 2 * centroids * dim
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise OSError(f"{out.parent}: expected {needed / 1e9:.1f} GB of disk space, got {free / 1e9:.1f} GB")

    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        measured = _write(folder, passages, centroids, nbits, dim, seed, queries, device, shape, progress)
        folder.chmod(0o755)
        folder.rename(out)
    finally:
        if folder.exists():
            shutil.rmtree(folder)
    return measured


def _write(
    folder: Path,
    passages: int,
    centroids: int,
    nbits: int,
    dim: int,
    seed: int,
    num_queries: int,
    device: str,
    shape: Shape,
    progress: bool,
) -> dict[str, object]:
    made = Generator(passages, centroids, nbits, dim, seed, device, shape)
    T = int(made.doclens.sum())
    offsets = torch.cat((made.doclens.new_zeros(1), made.doclens.cumsum(0)))

    # Each query's tokens, spread over one passage; their codes are noted while the chunks are made.
    chosen = torch.randint(passages, (num_queries, 1), generator=made.random, device=made.device)
    part = (torch.arange(LQ, device=made.device) + made._uniform(num_queries, LQ)) / LQ
    query_tokens = offsets[chosen] + (part * made.doclens[chosen]).long()
    query_codes = torch.empty(num_queries, LQ, dtype=torch.int32, device=made.device)
    use = torch.zeros(centroids, dtype=torch.int64, device=made.device)

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        writing: deque[Future[None]] = deque()
        starts = range(0, passages, CHUNK_PASSAGES)
        with ThreadPoolExecutor(WRITERS) as pool:
            for number, start in enumerate(tqdm(starts, desc="chunks", delay=2, disable=not progress)):
                doclens = made.doclens[start : start + CHUNK_PASSAGES]
                codes = made.codes(doclens)
                token_start, token_end = int(offsets[start]), int(offsets[start + len(doclens)])
                here = (query_tokens >= token_start) & (query_tokens < token_end)
                query_codes[here] = codes[query_tokens[here] - token_start]
                use.add_(torch.bincount(codes, minlength=centroids))
                if len(writing) > WRITERS:
                    writing.popleft().result()
                arguments = (codes.cpu(), made.residuals(codes).cpu(), doclens.tolist())
                writing.append(pool.submit(_write_chunk, folder, number, start, token_start, *arguments))
                yield codes, doclens
            for future in writing:
                future.result()

    lists, list_offsets = build_pid_lists(chunks(), centroids)
    lengths = list_offsets.diff()
    longest = int(lengths.max())
    tail = longest if int(list_offsets[-2]) + longest > lists.numel() else 0
    torch.save((torch.cat((lists, lists.new_zeros(tail))).cpu(), lengths.cpu()), folder / "ivf.pid.pt")
    torch.save(made.centroids.cpu(), folder / "centroids.pt")
    torch.save((made.cutoffs.cpu(), made.weights.cpu()), folder / "buckets.pt")
    torch.save(made.avg_residual.cpu(), folder / "avg_residual.pt")
    _write_metadata(folder, passages, centroids, T, nbits, dim, shape)

    spread, masked = made.queries(query_codes)
    torch.save(spread.cpu(), folder / "queries.pt")
    torch.save(masked.cpu(), folder / "queries.masked.pt")
    measured: dict[str, object] = {
        "arguments": {
            "passages": passages,
            "centroids": centroids,
            "nbits": nbits,
            "dim": dim,
            "seed": seed,
            "queries": num_queries,
            "device": made.device.type,
        },
        "shape": asdict(shape),
        "tokens": T,
        "index": {
            "tokens_a_passage": T / passages,
            "centroids_a_passage": lists.numel() / passages,
            "log_sigma_of_tokens_a_centroid": float(use[use > 0].double().log().std(correction=0)),
        },
        "queries.pt": measure(spread, made.centroids, use, lists, list_offsets, passages),
        "queries.masked.pt": measure(masked, made.centroids, use, lists, list_offsets, passages),
        "real": REAL,
        "passages_of_queries": chosen.flatten().tolist(),
    }
    (folder / "synthetic.json").write_text(json.dumps(measured, indent=1) + "\n")
    return measured


def _write_chunk(
    folder: Path, number: int, pid_start: int, token_start: int, codes: Tensor, residuals: Tensor, doclens: list[int]
) -> None:
    torch.save(codes, folder / f"{number}.codes.pt")
    torch.save(residuals, folder / f"{number}.residuals.pt")
    (folder / f"doclens.{number}.json").write_text(json.dumps(doclens, separators=(",", ":")))
    metadata = {
        "passage_offset": pid_start,
        "num_passages": len(doclens),
        "num_embeddings": codes.numel(),
        "embedding_offset": token_start,
    }
    (folder / f"{number}.metadata.json").write_text(json.dumps(metadata, indent=4) + "\n")


def _write_metadata(folder: Path, passages: int, centroids: int, T: int, nbits: int, dim: int, shape: Shape) -> None:
    config = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_token": "[Q]",
        "doc_token": "[D]",
        "ncells": None,
        "centroid_score_threshold": None,
        "ndocs": None,
        "load_index_with_mmap": False,
        "index_bsize": 64,
        "nbits": nbits,
        "kmeans_niters": 4,
        "similarity": "cosine",
        "query_maxlen": LQ,
        "attend_to_mask_tokens": False,
        "interaction": "colbert",
        "dim": dim,
        "doc_maxlen": shape.most_doclen,
        "mask_punctuation": True,
        "checkpoint": None,
        "collection": None,
    }
    common = {
        "config": config,
        "num_chunks": math.ceil(passages / CHUNK_PASSAGES),
        "num_partitions": centroids,
    }
    plan = {**common, "num_embeddings_est": float(T), "avg_doclen_est": T / passages}
    metadata = {**common, "num_embeddings": T, "avg_doclen": T / passages}
    (folder / "plan.json").write_text(json.dumps(plan, indent=4) + "\n")
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=4) + "\n")


def measure(
    Q: Tensor, centroids: Tensor, use: Tensor, lists: Tensor, list_offsets: Tensor, passages: int, most: int = 50
) -> dict[str, object]:
    """What the first queries of Q [n, LQ, DIM] find, in the words of REAL: means over queries.

    use [C]: tokens of each centroid; lists and list_offsets as build_pid_lists gives them.
    """
    nprobes, thresholds = (1, 2, 4), (0.4, 0.45, 0.5)
    mean_list = lists.numel() / len(centroids)
    share = use.double() / use.sum()
    cells: dict[str, list[int]] = {str(n): [] for n in nprobes}
    candidates: dict[str, list[int]] = {str(n): [] for n in nprobes}
    kept: dict[str, list[float]] = {str(t): [] for t in thresholds}
    tokens_kept: dict[str, list[float]] = {str(t): [] for t in thresholds}
    best: list[float] = []
    for q in Q[:most]:
        scores = centroids.float() @ q.T  # [C, LQ]
        for nprobe in nprobes:
            probed = scores.topk(min(nprobe, len(centroids)), dim=0).indices.unique()
            found = torch.zeros(passages, dtype=torch.bool, device=lists.device)
            for cell in probed.tolist():
                found[lists[list_offsets[cell] : list_offsets[cell + 1]].long()] = True
            cells[str(nprobe)].append(probed.numel())
            candidates[str(nprobe)].append(int(found.sum()))
        highest = scores.amax(1)
        for threshold in thresholds:
            passing = highest >= threshold
            kept[str(threshold)].append(float(passing.double().mean()))
            tokens_kept[str(threshold)].append(float(share[passing].sum()))
        best.append(float(scores.amax(0).mean()))

    def mean(values: list[float] | list[int]) -> float:
        return sum(values) / len(values)

    return {
        "cells": {n: mean(v) for n, v in cells.items()},
        "candidates": {n: mean(v) for n, v in candidates.items()},
        "candidates_share": {n: mean(v) / passages for n, v in candidates.items()},
        "candidates_a_cell_over_mean_list": {n: mean(candidates[n]) / mean(cells[n]) / mean_list for n in cells},
        "centroids_kept": {t: mean(v) for t, v in kept.items()},
        "tokens_kept": {t: mean(v) for t, v in tokens_kept.items()},
        "best_centroid_score": mean(best),
    }


def table(measured: dict[str, object]) -> str:
    """The measured figures of both query sets beside the real ones."""
    columns = {"synthetic": {}, "masked": {}, "real": {}}  # type: dict[str, dict[str, float]]
    for column, source in (("synthetic", "queries.pt"), ("masked", "queries.masked.pt"), ("real", "real")):
        blocks = [measured[source]] if source == "real" else [measured["index"], measured[source]]
        for block in blocks:
            assert isinstance(block, dict)
            for name, value in block.items():
                parts = {f"{name} @ {k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
                columns[column].update(parts)
    names = dict.fromkeys(name for column in columns.values() for name in column if name != "passages")
    lines = [f"{'':<42}{'queries.pt':>14}{'queries.masked':>16}{'real':>12}"]
    for name in names:
        cells = [columns[c].get(name) for c in ("synthetic", "masked", "real")]
        texts = ["" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.4g}" for x in cells]
        lines.append(f"{name:<42}{texts[0]:>14}{texts[1]:>16}{texts[2]:>12}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--centroids", type=int, help="default: as many as stock's indexer makes")
    parser.add_argument("--nbits", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    began = time.perf_counter()
    try:
        measured = make_index(
            options.out,
            passages=options.passages,
            centroids=options.centroids,
            nbits=options.nbits,
            dim=options.dim,
            seed=options.seed,
            queries=options.queries,
            device=options.device,
        )
    except (ValueError, OSError) as error:
        print(f"make_synthetic_index: {error}", file=sys.stderr)
        return 1
    print(table(measured))
    print(f"{options.out}: {measured['tokens']:,} tokens in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
