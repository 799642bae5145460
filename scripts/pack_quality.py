"""The folder that scripts/run_quality.py reads: texts, judgments, encoder and trained centroids, small enough to copy.

    python scripts/pack_quality.py --data ~/beir --out .carry/quality scifact msmarco-mini:dl19 pydocs:10000

A set is NAME[:SPLIT] of a folder of collections, NAME=FOLDER of a BEIR folder, or pydocs:N. For each the stock index
is built here first (or found in the cache) and its centroids go along, so that the machine that runs need not train
them (it needs no faiss then, but for PQ codes).
Vectors and residuals stay behind: they are ten times the texts and are made again in seconds by a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.cache import atomic_folder, write_json
from eval.checkpoint import RECIPES, make_checkpoint
from eval.datasets import Dataset, load_beir, load_dataset, write_beir
from eval.indexing import build_index


def read_set(spec: str, data: str | None, cache: str | None) -> Dataset:
    """NAME=FOLDER, pydocs:N or NAME[:SPLIT]. ValueError as of eval.datasets."""
    name, is_folder, folder = spec.partition("=")
    if is_folder:
        return load_beir(folder, name=name)
    base, _, rest = spec.partition(":")
    if base == "pydocs":
        return load_dataset(spec, cache=cache)
    return load_dataset(base, split=rest or "auto", data=data)


def pack_set(dataset: Dataset, centroids: Path | None, folder: Path) -> None:
    """A BEIR folder with .gz files of one split's queries, and centroids.pt beside them if given."""
    split = dataset.split or "test"
    write_beir(
        folder,
        zip(dataset.passage_ids, dataset.passages),
        zip(dataset.query_ids, dataset.queries),
        ((q, p, grade) for q, judged in dataset.qrels.items() for p, grade in judged.items()),
        split,
    )
    for path in (folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels" / f"{split}.tsv"):
        with open(path, "rb") as plain, gzip.open(f"{path}.gz", "wb", compresslevel=9) as packed:
            shutil.copyfileobj(plain, packed)
        path.unlink()
    if centroids is not None:
        shutil.copyfile(centroids, folder / "centroids.pt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="SET", help="NAME[:SPLIT], NAME=FOLDER or pydocs:N")
    parser.add_argument("--data", help="folder of collections that SET may name barely")
    parser.add_argument("--checkpoint", default="splade-tiny", choices=sorted(RECIPES))
    parser.add_argument("--cache", help="where indexes are kept (default: ~/.cache/plaid-tilemaxsim)")
    parser.add_argument("--centroids-from", type=float, default=0.0, metavar="MIB", help="leave smaller ones out: they "
                        "are trained again soon where faiss is")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    checkpoint = make_checkpoint(args.checkpoint, cache=args.cache)
    with atomic_folder(args.out) as temporary:
        shutil.copytree(checkpoint, temporary / "checkpoint")
        identities = {}
        for spec in args.sets:
            dataset = read_set(spec, args.data, args.cache)
            centroids = build_index(checkpoint, dataset, nbits=2, cache=args.cache) / "centroids.pt"
            large = centroids.stat().st_size >= args.centroids_from * 2**20
            pack_set(dataset, centroids if large else None, temporary / "sets" / dataset.name)
            identities[dataset.name] = dataset.identity()
        write_json(temporary / "manifest.json", identities)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {len(args.sets)} sets, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
