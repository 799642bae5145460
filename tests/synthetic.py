"""Small stock-format PLAID indexes and ColBERT checkpoints for tests: made at once, nothing downloaded.

The files are those that colbert-ai 0.2.22 writes and reads (`plan.json`, `metadata.json`, `centroids.pt`,
`buckets.pt`, chunks, `ivf.pid.pt` with its padding tail), written without importing colbert.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

WORDS = tuple(a + b + c for a in "bdklmnrst" for b in "aeiou" for c in ("na", "ri", "to", "ve"))
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]")


def pack_residuals(indices: Tensor, nbits: int) -> Tensor:
    """Bucket indices uint8 `[T, DIM]` to residual rows uint8 `[T, DIM * nbits // 8]`, as stock packs them."""
    # the bits of an index LSB first, the bits of a byte MSB first
    bits = (indices.numpy()[..., None] >> np.arange(nbits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(bits.reshape(len(indices), -1), axis=-1))


def make_index(
    path: str | Path,
    n: int = 300,
    dim: int = 64,
    nbits: int = 2,
    C: int = 64,
    seed: int = 0,
    *,
    mean_doclen: float = 20.0,
    max_doclen: int = 60,
    empty: float = 0.02,
    chunk_size: int = 128,
    common: float = 0.0,
    checkpoint: str | Path | None = None,
    collection: str | Path | None = None,
) -> Path:
    """Write a stock PLAID index of `n` random passages under `path` and return it.

    Lengths are lognormal in `[1, max_doclen]`; a share `empty` of the passages has no token (removed).
    The last centroid owns no token, so one inverted list is empty. A chunk holds `chunk_size` passages.
    `common` > 0 adds that much of one direction to all vectors: from 2 on all similarities are positive, and stock's
    CPU scores, which clamp maxima at 0, mean the same as ours.
    `checkpoint` and `collection` are only recorded in the metadata.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    gen = torch.Generator().manual_seed(seed)

    lengths = (torch.randn(n, generator=gen) * 0.5 + math.log(mean_doclen)).exp().long().clamp(1, max_doclen)
    lengths[torch.rand(n, generator=gen) < empty] = 0
    T = int(lengths.sum())

    direction = normalize(torch.randn(dim, generator=gen), dim=-1) * dim**0.5
    centroids = normalize(torch.randn(C, dim, generator=gen) + common * direction, dim=-1).half()
    # a passage is about four centroids, so that candidate generation and pruning have something to find
    topics = torch.randint(0, max(C - 1, 1), (n, 4), generator=gen)
    owner = torch.repeat_interleave(torch.arange(n), lengths)
    topic = topics[owner, torch.randint(0, 4, (T,), generator=gen)]
    embeddings = normalize(centroids[topic].float() + torch.randn(T, dim, generator=gen) * 0.6 / dim**0.5, dim=-1)

    codes = (embeddings @ centroids[: max(C - 1, 1)].float().T).argmax(-1).int()
    residuals = embeddings - centroids[codes.long()].float()
    steps = torch.arange(2**nbits) / 2**nbits
    sample = residuals.flatten()[: 1 << 20]
    cutoffs = sample.quantile(steps[1:])
    weights = sample.quantile(steps + 0.5 / 2**nbits)
    packed = pack_residuals(torch.bucketize(residuals, cutoffs).to(torch.uint8), nbits)

    torch.save(centroids, path / "centroids.pt")
    torch.save((cutoffs, weights), path / "buckets.pt")
    torch.save(residuals.abs().mean(), path / "avg_residual.pt")

    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    starts = list(range(0, n, chunk_size))
    for chunk, start in enumerate(starts):
        end = min(start + chunk_size, n)
        tokens = slice(int(offsets[start]), int(offsets[end]))
        torch.save(codes[tokens].clone(), path / f"{chunk}.codes.pt")
        torch.save(packed[tokens].clone(), path / f"{chunk}.residuals.pt")
        (path / f"doclens.{chunk}.json").write_text(json.dumps(lengths[start:end].tolist()))
        meta = {
            "passage_offset": start,
            "num_passages": end - start,
            "num_embeddings": tokens.stop - tokens.start,
            "embedding_offset": tokens.start,
        }
        (path / f"{chunk}.metadata.json").write_text(json.dumps(meta, indent=4) + "\n")

    pairs = torch.unique(codes.long() * n + owner)
    ivf, ivf_lengths = (pairs % n).int(), torch.bincount(pairs // n, minlength=C)
    if ivf.numel() - int(ivf_lengths[-1]) + int(ivf_lengths.max()) > ivf.numel():
        ivf = torch.cat((ivf, torch.zeros(int(ivf_lengths.max()), dtype=ivf.dtype)))
    torch.save((ivf, ivf_lengths), path / "ivf.pid.pt")

    config = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_token": "[Q]",
        "doc_token": "[D]",
        "ncells": None,
        "centroid_score_threshold": None,
        "ndocs": None,
        "load_index_with_mmap": False,
        "nbits": nbits,
        "similarity": "cosine",
        "query_maxlen": 32,
        "attend_to_mask_tokens": False,
        "interaction": "colbert",
        "dim": dim,
        "doc_maxlen": max_doclen,
        "mask_punctuation": True,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "collection": None if collection is None else str(collection),
    }
    shared = {"config": config, "num_chunks": len(starts), "num_partitions": C}
    plan = {**shared, "num_embeddings_est": float(T), "avg_doclen_est": T / n}
    metadata = {**shared, "num_embeddings": T, "avg_doclen": T / n}
    (path / "plan.json").write_text(json.dumps(plan, indent=4) + "\n")
    (path / "metadata.json").write_text(json.dumps(metadata, indent=4) + "\n")
    return path


def make_queries(path: str | Path, n: int = 4, LQ: int = 32, seed: int = 1, noise: float = 0.5) -> Tensor:
    """Unit query vectors fp32 `[n, LQ, DIM]`, each query near four centroids of the index at `path`."""
    gen = torch.Generator().manual_seed(seed)
    centroids = torch.load(Path(path) / "centroids.pt", weights_only=True).float()
    C, dim = centroids.shape
    topics = torch.randint(0, max(C - 1, 1), (n, 4), generator=gen)
    topic = topics.gather(1, torch.randint(0, 4, (n, LQ), generator=gen))
    return normalize(centroids[topic] + torch.randn(n, LQ, dim, generator=gen) * noise / dim**0.5, dim=-1)


def make_collection(n: int = 300, seed: int = 0) -> list[str]:
    """`n` passages of 5 to 40 words of `WORDS`."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.randint(5, 41, (n,), generator=gen).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (size,), generator=gen).tolist()) for size in sizes]


def make_checkpoint(
    path: str | Path, dim: int = 64, seed: int = 0, *, hidden: int = 64, layers: int = 2, **bert: Any
) -> Path:
    """Write a ColBERT checkpoint under `path`: a random BERT, its projection, a tokenizer of `WORDS`.

    `bert`: more of BertConfig.
    """
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    vocab = (*SPECIAL_TOKENS, *".,;:!?-()[]'\"", *WORDS)
    (path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer) + "\n")

    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 2}
    shape |= {"vocab_size": len(vocab), "intermediate_size": 2 * hidden, **bert}
    config = BertConfig(**shape, architectures=["HF_ColBERT"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = {f"bert.{name}": tensor.contiguous() for name, tensor in BertModel(config).state_dict().items()}
        weights["linear.weight"] = torch.randn(dim, hidden) / hidden**0.5
    config.save_pretrained(path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    metadata = {
        "dim": dim,
        "query_maxlen": 32,
        "doc_maxlen": 60,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "similarity": "cosine",
        "interaction": "colbert",
    }
    (path / "artifact.metadata").write_text(json.dumps(metadata, indent=4) + "\n")
    return path
