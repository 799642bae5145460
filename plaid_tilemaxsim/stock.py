"""Stock's side of the scorer: its IndexScorer, loaded when first needed, and what IndexUpdater does to it in memory."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import torch

from plaid_tilemaxsim import compat
from plaid_tilemaxsim.index.stamps import fingerprint

compat.allow_missing_git()

from colbert.search.index_storage import IndexScorer  # noqa: E402

if TYPE_CHECKING:
    from plaid_tilemaxsim.index.files import PlaidIndex

logger = logging.getLogger("plaid_tilemaxsim")

# What stock's constructor loads, and its callers (IndexUpdater, for one) read.
_ATTRIBUTES = frozenset({"codec", "ivf", "doclens", "embeddings", "embeddings_strided", "offsets"})
# Rows behind the embeddings that stock makes room for.
PADDING = 512


class State:
    """Stock's tensors at some time; equal by identity: stock replaces what it changes, and comparing would read it."""

    def __init__(self, revision: int, *tensors: Any) -> None:
        self._revision = revision
        self._tensors = tensors

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State) or self._revision != other._revision:
            return False
        return all(a is b for a, b in zip(self._tensors, other._tensors, strict=True))


class StockScorer(IndexScorer):
    """Stock's IndexScorer of the index in a folder; its files are read when an attribute or a call first needs them.

    use_gpu and load_index_with_mmap are stock's. A pickle holds what stock's would.
    """

    _transient: tuple[str, ...] = ("_lock", "_closed")  # what _start makes, and no pickle holds

    def __init__(self, index_path: str, use_gpu: bool = True, load_index_with_mmap: bool = False) -> None:
        self.index_path = str(index_path)
        self.use_gpu = use_gpu
        self.load_index_with_mmap = load_index_with_mmap
        self.stock_fingerprint: str | None = None  # of the files that are loaded
        self._stored: State | None = None  # as it came from these files
        self._revision = 0
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._closed = False

    def check_open(self) -> None:
        """ValueError once it is closed."""
        if self._closed:
            raise ValueError(f"{self.index_path}: scorer: expected an open one, got one that was closed")

    def load_stock(self) -> None:
        """Everything that stock's constructor loads, including its extensions; once."""
        with self._lock:
            if self._stored is not None:
                return
            self.check_open()
            mark = fingerprint(self.index_path)
            # Stock's tensors must outlive a search's inference mode.
            with torch.inference_mode(False):
                super().__init__(self.index_path, self.use_gpu, self.load_index_with_mmap)
            self._stored, self.stock_fingerprint = self._state(), mark
            if self.load_index_with_mmap:
                self._check_maps()

    def forget_stock(self) -> None:
        """Lets go of what was loaded, changes in memory included."""
        self._stored = self.stock_fingerprint = None
        for name in (*_ATTRIBUTES, "_metadata"):
            self.__dict__.pop(name, None)

    def updated_state(self) -> State | None:
        """Stock's tensors where some have been replaced (by IndexUpdater) since they came from the files."""
        before = self._stored
        if before is None:
            return None
        try:
            now = self._state()
        except KeyError:  # another thread is letting go of them
            return None
        return None if now == before else now

    def index_in_memory(self, stored: PlaidIndex) -> PlaidIndex:
        """The index as IndexUpdater left it in stock's tensors; centroids and buckets, ``stored``'s, never change."""
        if self.load_index_with_mmap:
            raise ValueError(
                f"{self.index_path}: expected load_index_with_mmap=False to search an updated index, got True"
            )
        return type(stored).from_tensors(
            nbits=stored.nbits,
            centroids=stored.centroids,
            bucket_cutoffs=stored.bucket_cutoffs,
            bucket_weights=stored.bucket_weights,
            codes=self.embeddings.codes,
            residuals=self.embeddings.residuals,
            doclens=self.doclens,
            ivf=self.ivf.tensor,
            ivf_lengths=self.ivf.lengths,
            metadata=stored.metadata,
            path=stored.path,
            verify="structure",
        )

    def set_embeddings_strided(self) -> None:
        """Stock's hook: IndexUpdater calls it after changing codes, residuals or doclens, and the constructor."""
        if self._stored is None and not self.load_index_with_mmap:
            self._trim()
        super().set_embeddings_strided()
        self._revision += 1

    def _trim(self) -> None:
        """Takes away uninitialised rows: IndexUpdater counts embeddings twice where it saves them, stock makes room for
        those that it counted, and the next IndexUpdater.add would put its own behind them and save what lies before."""
        rows = int(self.doclens.sum()) + PADDING
        embeddings = self.embeddings
        if len(embeddings.codes) > rows:
            embeddings.codes, embeddings.residuals = embeddings.codes[:rows], embeddings.residuals[:rows]

    def _check_maps(self) -> None:
        """Says so when stock maps its files at a wrong place: it skips a header of fixed length, torch's differ."""
        path = os.path.join(self.index_path, "0.codes.pt")
        codes = torch.load(path, map_location="cpu", mmap=True, weights_only=True)[:1024]
        if not torch.equal(self.embeddings.codes[: len(codes)], codes):
            logger.error(
                "%s: colbert-ai reads this index wrongly with load_index_with_mmap=True, so scorer='plaid' ranks "
                "at random; scorer='tilemaxsim' is not affected",
                self.index_path,
            )

    def _state(self) -> State:
        held = self.__dict__
        embeddings = held["embeddings"]
        return State(self._revision, held["ivf"], held["doclens"], embeddings.codes, embeddings.residuals)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES and self.__dict__.get("_stored") is None and "_lock" in self.__dict__:
            self.load_stock()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
