"""Stock PLAID indexes from one encoding of a collection.

colbert-ai's own indexer builds every index; what is ours is what surrounds it:

- A collection is encoded once per checkpoint, in shards that survive an interruption, and indexes at any NBITS are
  built from these vectors: `CollectionEncoder` is replaced by one that serves them. Centroids and codes, which stock
  computes alike at every NBITS, are remembered. Vectors are kept in fp16, to which stock rounds them before use.
- Each index is cached under a name with a digest of everything it depends on, and appears by a rename, whole.
- The indexer runs in this process (a spawned child that dies would leave it waiting for ever) and, on CPU, needs no
  C++ compiler (`plaid_tilemaxsim.compat`). On GPU stock compiles two CUDA extensions to pack residuals.

Randomness: stock seeds `random`, numpy and torch with 12345 and faiss's k-means with 123; the manifest repeats this.
Two builds on one machine are equal bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from plaid_tilemaxsim import compat

from .cache import (
    atomic_folder,
    cache_root,
    read_json,
    sha256_file,
    sha256_json,
    sha256_strings,
    versions,
    write_json,
)
from .checkpoint import checkpoint_identity

if TYPE_CHECKING:
    import torch

    from .datasets import Dataset

# Passages per shard: what an interrupted encoding loses at most, about a minute of the small encoder.
SHARD = 2048
# Passages per call of the encoder.
BATCH, GPU_BATCH = 32, 256
SEEDS = {"python": 12345, "numpy": 12345, "torch": 12345, "faiss": 123}
ENCODING_VERSIONS = ("colbert-ai", "torch", "transformers")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Embeddings:
    """A collection's vectors: `shards[i]` holds passages [i * SHARD, (i + 1) * SHARD).

    load(i) gives (vectors fp16 [T_i, DIM] on CPU, doclens int32 [N_i]); vectors have unit length up to fp16.
    `seconds`: how long encoding took, over all the runs that it took.
    """

    folder: Path
    shards: tuple[Path, ...]
    passages: int
    dim: int
    doc_maxlen: int
    seconds: float

    def load(self, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        vectors, doclens = torch.load(self.shards[shard], weights_only=True, mmap=True)
        return vectors, doclens

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(vectors fp16 [T, DIM], doclens int32 [N]) of the whole collection, in memory."""
        import torch

        vectors, doclens = zip(*(self.load(shard) for shard in range(len(self.shards))))
        return torch.cat(vectors), torch.cat(doclens)


@dataclass(frozen=True)
class EncodedQueries:
    """`Q[i]` is query `ids[i]`: fp32 [nq, LQ, DIM] on CPU. `milliseconds[i]`: encoding it alone, model warm."""

    ids: tuple[str, ...]
    Q: torch.Tensor
    milliseconds: tuple[float, ...]
    path: Path


def encode_texts(
    checkpoint: str | os.PathLike[str],
    texts: Sequence[str],
    *,
    doc_maxlen: int | None = None,
    description: str = "encoding",
    progress: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Passages to (vectors fp16 [T, DIM], doclens int32 [N]), both on CPU, without any cache.

    doc_maxlen: longest passage in tokens, by default the checkpoint's. An empty text has its three markers' vectors.
    """
    import torch

    encoder = _Encoder(checkpoint, doc_maxlen=doc_maxlen)
    with tqdm(total=len(texts), desc=description, unit=" passages", disable=not progress) as bar:
        parts = [encoder.passages(texts[start : start + SHARD], bar) for start in range(0, len(texts), SHARD)]
    return torch.cat([vectors for vectors, _ in parts]), torch.cat([doclens for _, doclens in parts])


def encode_passages(
    checkpoint: str | os.PathLike[str],
    dataset: Dataset,
    *,
    doc_maxlen: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Embeddings:
    """The collection's vectors, cached; an interrupted call goes on where it stopped."""
    import torch

    settings = _settings(checkpoint)
    doc_maxlen = settings["doc_maxlen"] if doc_maxlen is None else doc_maxlen
    key: dict[str, Any] = {
        "passages": sha256_strings(dataset.passages),
        "checkpoint": checkpoint_identity(checkpoint),
        "doc_maxlen": doc_maxlen,
        "versions": versions(*ENCODING_VERSIONS),
    }
    name = f"{_slug(dataset.name)}.{_slug(key['checkpoint']['name'])}.{sha256_json(key)[:8]}"
    folder = cache_root(cache) / "embeddings" / name
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(dataset.passages), SHARD)
    shards = tuple(folder / f"{shard:05d}.pt" for shard in range(len(starts)))
    missing = [shard for shard, path in enumerate(shards) if not path.is_file()]
    seconds_of = read_json(folder / "seconds.json") if (folder / "seconds.json").is_file() else {}
    if missing:
        encoder = _Encoder(checkpoint, doc_maxlen=doc_maxlen)
        total = len(dataset.passages)
        done = total - sum(min(SHARD, total - starts[shard]) for shard in missing)
        label = f"{dataset.name}: encoding"
        with tqdm(total=total, initial=done, desc=label, unit=" passages", disable=not progress) as bar:
            for shard in missing:
                started = time.perf_counter()
                part = encoder.passages(dataset.passages[starts[shard] : starts[shard] + SHARD], bar)
                seconds_of[shards[shard].name] = round(time.perf_counter() - started, 3)
                temporary = shards[shard].with_suffix(f".{os.getpid()}.tmp")
                torch.save(part, temporary)
                os.replace(temporary, shards[shard])
                write_json(folder / "seconds.json", seconds_of)
        write_json(folder / MANIFEST, {**key, "dataset": dataset.name, "dim": settings["dim"], "shard": SHARD})
    seconds = round(sum(seconds_of.values()), 3)
    return Embeddings(folder, shards, len(dataset.passages), settings["dim"], doc_maxlen, seconds)


def encode_queries(
    checkpoint: str | os.PathLike[str],
    dataset: Dataset,
    *,
    query_maxlen: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> EncodedQueries:
    """The data set's judged queries as matrices, each encoded alone and timed; cached, the times too.

    The file at `.path` is a dict {"ids", "Q", "milliseconds"} for torch.load(weights_only=True).
    """
    import torch

    settings = _settings(checkpoint)
    query_maxlen = settings["query_maxlen"] if query_maxlen is None else query_maxlen
    key: dict[str, Any] = {
        "queries": dataset.queries_digest,
        "checkpoint": checkpoint_identity(checkpoint),
        "query_maxlen": query_maxlen,
        "versions": versions(*ENCODING_VERSIONS),
    }
    label = "-".join(filter(None, (dataset.name, dataset.split)))
    name = f"{_slug(label)}.{_slug(key['checkpoint']['name'])}.{sha256_json(key)[:8]}"
    path = cache_root(cache) / "queries" / f"{name}.pt"
    if not path.is_file():
        encoder = _Encoder(checkpoint, query_maxlen=query_maxlen)
        encoder.query(dataset.queries[0])  # the first call pays for what later ones find warm
        parts, milliseconds = [], []
        for query in tqdm(dataset.queries, desc=f"{dataset.name}: queries", unit=" queries", disable=not progress):
            started = time.perf_counter()
            parts.append(encoder.query(query))
            milliseconds.append(round((time.perf_counter() - started) * 1e3, 4))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save({"ids": list(dataset.query_ids), "Q": torch.cat(parts), "milliseconds": milliseconds}, temporary)
        os.replace(temporary, path)
        write_json(path.with_suffix(".json"), {**key, "dataset": dataset.name, "split": dataset.split})
    saved = torch.load(path, weights_only=True)
    return EncodedQueries(tuple(saved["ids"]), saved["Q"], tuple(saved["milliseconds"]), path)


def build_index(
    checkpoint: str | os.PathLike[str],
    dataset: Dataset,
    *,
    nbits: int = 2,
    doc_maxlen: int | None = None,
    kmeans_niters: int = 4,
    centroids: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """A stock PLAID index of the collection: built by colbert-ai, or found in the cache. Returns its folder.

    `Searcher(index=FOLDER)` needs nothing else: checkpoint and collection are in its metadata by path.
    manifest.json beside the index files records data, checkpoint, versions, seeds and seconds.
    centroids: centroids.pt of an earlier index of this collection ([C, DIM]), taken instead of training them: for a
    machine without faiss. C must be what stock would train.
    Raises ValueError when DIM does not fit NBITS (stock needs DIM % (8 * NBITS) == 0).
    """
    settings = _settings(checkpoint)
    if nbits not in (1, 2, 4, 8) or settings["dim"] % (8 * nbits):
        dim = settings["dim"]
        raise ValueError(f"expected nbits 1, 2, 4 or 8 with DIM % (8 * nbits) == 0, got {nbits} at DIM {dim}")
    doc_maxlen = settings["doc_maxlen"] if doc_maxlen is None else doc_maxlen
    key: dict[str, Any] = {
        "passages": dataset.passages_digest,
        "checkpoint": checkpoint_identity(checkpoint),
        "nbits": nbits,
        "doc_maxlen": doc_maxlen,
        "kmeans_niters": kmeans_niters,
        "versions": versions(*ENCODING_VERSIONS, "faiss-cpu", "faiss-gpu", "numpy"),
        **({} if centroids is None else {"centroids": sha256_file(centroids)}),
    }
    root = cache_root(cache)
    name = f"{_slug(dataset.name)}.{_slug(key['checkpoint']['name'])}.{nbits}bit.{sha256_json(key)[:8]}"
    folder = root / "indexes" / name
    if (folder / MANIFEST).is_file():
        return folder
    embeddings = encode_passages(checkpoint, dataset, doc_maxlen=doc_maxlen, cache=root, progress=progress)
    collection = _write_collection(dataset, root)
    started = time.perf_counter()
    with atomic_folder(folder) as temporary:
        _run_stock_indexer(
            checkpoint, collection, dataset, embeddings, temporary, folder, progress,
            {"nbits": nbits, "doc_maxlen": doc_maxlen, "kmeans_niters": kmeans_niters}, centroids,
        )  # fmt: skip
        metadata = read_json(temporary / "metadata.json")
        write_json(
            temporary / MANIFEST,
            {
                **key,
                "dataset": dataset.identity(),
                "seeds": SEEDS,
                "num_partitions": metadata["num_partitions"],
                "num_embeddings": metadata["num_embeddings"],
                "seconds": {"encode": embeddings.seconds, "build": round(time.perf_counter() - started, 3)},
            },
        )
    return folder


class _Encoder:
    """colbert-ai's Checkpoint, silent, batched by length."""

    def __init__(
        self, checkpoint: str | os.PathLike[str], *, doc_maxlen: int | None = None, query_maxlen: int | None = None
    ) -> None:
        compat.apply()
        from colbert.infra import ColBERTConfig
        from colbert.modeling.checkpoint import Checkpoint

        name = _path_or_name(checkpoint)
        changes = {"doc_maxlen": doc_maxlen, "query_maxlen": query_maxlen}
        changes = {option: value for option, value in changes.items() if value is not None}
        config = ColBERTConfig.from_existing(ColBERTConfig.load_from_checkpoint(name), ColBERTConfig(**changes))
        with _quiet():
            self.checkpoint = Checkpoint(name, colbert_config=config, verbose=0)
        self.batch = BATCH
        if config.total_visible_gpus > 0:
            self.checkpoint, self.batch = self.checkpoint.cuda(), GPU_BATCH

    def passages(self, texts: Sequence[str], bar: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(vectors fp16 [T, DIM], doclens int32 [N]).

        Stock pads a whole call to its longest passage; calls of one batch of similar lengths waste little.
        """
        import torch

        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found: dict[int, torch.Tensor] = {}
        with _quiet_warnings():
            for start in range(0, len(order), self.batch):
                rows = order[start : start + self.batch]
                batch = [texts[i] for i in rows]
                vectors, doclens = self.checkpoint.docFromText(batch, bsize=self.batch, keep_dims="flatten")
                found.update(zip(rows, vectors.half().split(doclens)))
                bar.update(len(rows))
        parts = [found[i] for i in range(len(texts))]
        return torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int32)

    def query(self, text: str) -> torch.Tensor:
        """fp32 [1, LQ, DIM] on CPU."""
        with _quiet_warnings():
            return self.checkpoint.queryFromText([text]).float().cpu()


class _ServedEncoder:
    """In place of colbert's CollectionEncoder: the same call, answered from cached vectors.

    Passages are told by their text: equal texts have equal vectors, and the sample and the chunks arrive as texts only.
    """

    def __init__(self, dataset: Dataset, embeddings: Embeddings, config: Any) -> None:
        self.pids = {_one_line(text): pid for pid, text in enumerate(dataset.passages)}
        self.embeddings = embeddings
        self.use_gpu = config.total_visible_gpus > 0

    def encode_passages(self, passages: Sequence[str]) -> tuple[torch.Tensor | None, list[int] | None]:
        import torch

        if not passages:
            return None, None
        parts: list[torch.Tensor] = []
        current, vectors, lengths = -1, torch.empty(0), torch.empty(0)
        starts: list[int] = []
        for text in passages:
            shard, row = divmod(self.pids[text], SHARD)
            if shard != current:
                vectors, lengths = self.embeddings.load(shard)
                starts = torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0)).tolist()
                current = shard
            parts.append(vectors[starts[row] : starts[row + 1]])
        joined = torch.cat(parts)
        # The stock indexer asserts fp32 on CPU and fp16 on GPU, and rounds to fp16 in both cases.
        return (joined if self.use_gpu else joined.float()), [len(part) for part in parts]


def _run_stock_indexer(
    checkpoint: str | os.PathLike[str],
    collection: Path,
    dataset: Dataset,
    embeddings: Embeddings,
    temporary: Path,
    folder: Path,
    progress: bool,
    options: dict[str, int],
    given: str | os.PathLike[str] | None,
) -> None:
    compat.apply()
    import colbert.indexing.collection_indexer as stock
    import colbert.indexing.utils as stock_utils
    import torch
    from colbert import Indexer
    from colbert.infra import ColBERTConfig, Run, RunConfig

    if given is None:
        try:
            import faiss  # noqa: F401 (stock only warns, and fails after the encoding)
        except ImportError as error:
            raise ValueError("expected faiss, which colbert-ai trains centroids with: pip install faiss-cpu") from error

    stages = tqdm(total=3, desc=f"{dataset.name}: k-means", bar_format="{desc} [{elapsed}]", disable=not progress)
    kmeans, compress = stock.compute_faiss_kmeans, stock.ResidualCodec.compress_into_codes

    def remembered_kmeans(dim: int, partitions: int, niters: int, sample: Any) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return kmeans(dim, partitions, niters, sample)

        if given is None:
            centroids = _remembered("centroids", [sample[0][0]], [partitions, niters], embeddings.folder, compute)
        else:
            centroids = torch.load(given, weights_only=True, map_location="cpu").float()
            if centroids.shape != (partitions, dim):
                raise ValueError(f"{given}: expected centroids [{partitions}, {dim}], got {list(centroids.shape)}")
        stages.set_description(f"{dataset.name}: {options['nbits']}-bit residuals")
        return centroids

    def remembered_codes(codec: Any, vectors: torch.Tensor, out_device: Any) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return compress(codec, vectors, out_device)

        return _remembered("codes", [codec.centroids, vectors], [], embeddings.folder, compute).to(out_device)

    run = RunConfig(
        nranks=1, avoid_fork_if_possible=True, root=str(folder.parent.parent), experiment="indexing",
        index_root=str(temporary.parent), name=folder.name,
    )  # fmt: skip
    log = folder.parent / f"{folder.name}.log"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with (
        stages,
        _ticking(stages),
        _quiet(),
        _stdout_to(log),
        _replaced(stock, "CollectionEncoder", lambda config, _: _ServedEncoder(dataset, embeddings, config)),
        _replaced(stock, "compute_faiss_kmeans", remembered_kmeans),
        _replaced(stock.ResidualCodec, "compress_into_codes", remembered_codes),
        _replaced(stock, "tqdm", SimpleNamespace(tqdm=lambda items, **_: items)),
        _replaced(stock_utils, "tqdm", SimpleNamespace(tqdm=lambda items, **_: items)),
        Run().context(run),
    ):
        try:
            config = ColBERTConfig(**options, avoid_fork_if_possible=True)
            indexer = Indexer(_path_or_name(checkpoint), config, verbose=1)
            indexer.index(temporary.name, str(collection), overwrite="force_silent_overwrite")
        finally:
            # Stock sets it for the process and leaves it.
            if visible is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.replace(log, temporary / "build.log")
    for name in ("plan.json", "metadata.json"):
        # Stock recorded where it wrote; the index is about to be renamed.
        content = read_json(temporary / name)
        content["config"]["index_name"] = folder.name
        write_json(temporary / name, content)


def _remembered(
    name: str,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[int],
    folder: Path,
    compute: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """compute(), or what it gave before for the same inputs and parameters, kept in `folder`.

    NBITS enters neither the centroids nor the codes, which are most of the work of an index.
    """
    import torch

    digest = hashlib.sha256(repr((list(parameters), versions("colbert-ai", "faiss-cpu", "faiss-gpu"))).encode())
    for tensor in inputs:
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    path = folder / f"{name}.{digest.hexdigest()[:16]}.pt"
    if not path.is_file():
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(compute().cpu(), temporary)
        os.replace(temporary, path)
    return torch.load(path, weights_only=True)


def _write_collection(dataset: Dataset, root: Path) -> Path:
    """The collection as the TSV that colbert reads by path, so that an index finds its texts again."""
    path = root / "collections" / f"{_slug(dataset.name)}.{dataset.passages_digest[:8]}.tsv"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(f"{pid}\t{_one_line(text)}\n" for pid, text in enumerate(dataset.passages))
        os.replace(temporary, path)
    return path


def _settings(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """dim, doc_maxlen and query_maxlen of a checkpoint."""
    compat.apply()
    from colbert.infra import ColBERTConfig

    config = ColBERTConfig.load_from_checkpoint(_path_or_name(checkpoint))
    if config is None:
        raise ValueError(f"{checkpoint}: expected a ColBERT checkpoint (artifact.metadata), got none")
    return {"dim": config.dim, "doc_maxlen": config.doc_maxlen, "query_maxlen": config.query_maxlen}


def _path_or_name(checkpoint: str | os.PathLike[str]) -> str:
    """An absolute path, or the name as it is when no such folder exists (a hub's)."""
    return str(Path(checkpoint).resolve()) if Path(checkpoint).is_dir() else str(checkpoint)


def _one_line(text: str) -> str:
    """One TSV field: BERT's tokenizer does not tell one kind of white space from another."""
    return " ".join(text.split())


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _quiet_warnings() -> Iterator[None]:
    """Without torch's warnings that autocast is spelt the old way and is off on CPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="colbert")
        warnings.filterwarnings("ignore", message=".*(CUDA is not available|Disabling autocast).*")
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what loading a model prints, and its progress bar of a few milliseconds."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), _quiet_warnings():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _ticking(bar: Any) -> Iterator[None]:
    """Redraws `bar` every second: k-means reports nothing while it runs."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(1):
            bar.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _stdout_to(path: Path) -> Iterator[None]:
    """Sends this process's standard output, faiss's C++ output with it, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        with open(path, "w") as file:
            os.dup2(file.fileno(), 1)
            with contextlib.redirect_stdout(file):
                yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
