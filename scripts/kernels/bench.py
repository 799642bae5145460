"""One run of the kernel benchmarks: checks a kernel, times it, keeps a row; peers beside it, failures with reasons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from . import data, stream
from .check import Check
from .clock import Clock, Time

OURS = "plaid_tilemaxsim"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Every working set is far above the L2, or the L2 is emptied before each run."""

    tokens: int = 128  # of a passage, where all have as many
    dense: int = 100_000  # passages of 128 dimensions in fp16: 3.28 GB; other shapes as many bytes
    few: int = 10_000
    packed: int = 200_000
    residual: int = 1_500_000
    centroids: int = 1 << 18
    pq: int = 200_000
    exhaustive: int = 8_841_823
    read_bytes: int = 4 << 30
    sweep_bytes: int = 1 << 31
    sweep_passages: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)


# What compiles the kernels of a full run (its divisibilities and types), and what the interpreter can do.
SMALL = Sizes(128, 1024, 1024, 1024, 1024, 1 << 12, 1024, 2048, 1 << 24, 1 << 24, (1024,))
TINY = Sizes(20, 16, 16, 16, 16, 1 << 10, 16, 16, 1 << 17, 1 << 15, (16,))


@dataclass(frozen=True)
class Shape:
    """What is scored. nbytes: what a kernel has to read at least, counted once; the floor of its time."""

    group: str
    name: str
    LQ: int
    DIM: int
    dtype: str
    passages: int
    tokens: int
    nbytes: int


@dataclass
class Bench:
    device: torch.device
    sizes: Sizes
    once: bool = False  # run everything a single time, untimed: compiles
    only: str = ""  # cases whose name contains this
    peers: str | None = ""  # peers whose name contains this; None: no peers
    read_gb_s: float = float("nan")
    rows: list[dict[str, Any]] = field(default_factory=list)
    on_row: Callable[[], object] = lambda: None  # called after every new row

    def __post_init__(self) -> None:
        self.clock = Clock(self.device, self.once)
        self.gen = torch.Generator(self.device).manual_seed(0)
        self._residual_data = functools.lru_cache(maxsize=1)(self._make_residual_data)

    def wants(self, case: str) -> bool:
        return self.only in case

    def residual_data(self, nbits: int, passages: int, DIM: int = 128, LQ: int = 32) -> data.Data:
        """The last one made is kept."""
        return self._residual_data(nbits, passages, DIM, LQ)

    def _make_residual_data(self, nbits: int, passages: int, DIM: int, LQ: int) -> data.Data:
        return data.make(nbits, DIM, LQ, passages, self.sizes.centroids, device=str(self.device))

    def forget(self) -> None:
        """Gives the memory of the last data back."""
        self._residual_data.cache_clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure_read(self) -> dict[str, Any]:
        """Read bandwidth by every launch choice of the streaming kernel, checked; the best is the ceiling."""
        x = stream.words(self.device, self.sizes.read_bytes)
        want = x.sum(dtype=torch.int64)
        found = []
        for blocks, out in stream.candidates(x):
            run = functools.partial(stream.stream, x, out, blocks)
            got = run().sum(dtype=torch.int64)
            if int(got - want) % (1 << 32):
                raise ValueError(f"streaming read {blocks}: expected the sum {int(want)} modulo 2**32, got {int(got)}")
            found.append({**asdict(blocks), "gb_s": x.nbytes / self.clock(run, x.nbytes).ms / 1e6})
        best = max(found, key=lambda row: row["gb_s"])
        self.read_gb_s = best["gb_s"]
        small = x[: max(1 << 14, 80_000_000 // (1 << 14) * (1 << 14))]
        blocks = stream.StreamBlocks(**{name: best[name] for name in best if name != "gb_s"})
        out = torch.zeros(stream.programs_of(self.device, blocks), dtype=torch.int32, device=self.device)
        time = self.clock(functools.partial(stream.stream, small, out, blocks), small.nbytes)
        return {
            "gb_s": self.read_gb_s,
            "best": best,
            "choices": found,
            "bytes": x.nbytes,
            # the ceiling of small problems: starting and draining costs the same there
            "small": {"bytes": small.nbytes, "gb_s": small.nbytes / time.ms / 1e6},
        }

    def ours(
        self,
        shape: Shape,
        run: Callable[[], object],
        check: Check,
        *,
        kernel: str = OURS,
        checked: Callable[[], Tensor] | None = None,
        host: bool = False,
        **extra: Any,
    ) -> None:
        """Checks and times one of our kernels; a wrong one is not timed. ``extra`` goes into the row.

        checked: makes from a run what ``check`` compares, where that is not what ``run`` returns. host: the time is
        that of the host, for a call that ends with its result there.
        """
        made = run() if checked is None else checked()
        assert isinstance(made, Tensor)
        verdict = check(made)
        row = self._row(shape, kernel, extra)
        row |= {"ours": True, "max_error": verdict.max_error, "tolerance": check.tolerance, "correct": verdict.correct}
        if not verdict.correct:
            row["failed"] = verdict.reason
        elif not self.once:
            self._timed(row, shape, self.clock(run, shape.nbytes, host=host))
        self._keep(row)

    def missing(self, shape: Shape, kernel: str, error: Exception) -> None:
        """A kernel that this version does not have: a row with the reason, neither right nor wrong."""
        self._keep(self._row(shape, kernel, {}) | {"ours": True, "failed": f"{type(error).__name__}: {error}"})

    def peer(
        self,
        shape: Shape,
        kernel: str,
        prepare: Callable[[], Callable[[], Tensor]],
        check: Check,
        *,
        passages: int | None = None,
        **extra: Any,
    ) -> None:
        """The same for another implementation; whatever stops it is its row's reason.

        passages: it scores the first so many, and its row counts as many. bytes: of a value it keeps, where the shape's
        have 2.
        """
        if passages is not None and passages < shape.passages:
            share = passages / shape.passages
            tokens, nbytes = round(shape.tokens * share), round(shape.nbytes * share)
            shape = replace(shape, passages=passages, tokens=tokens, nbytes=nbytes)
        else:
            passages = None
        shape = replace(shape, nbytes=shape.nbytes * extra.get("bytes", 2) // 2)
        if self.peers is None or self.peers not in kernel:
            return
        row = self._row(shape, kernel, extra) | {"ours": False}
        try:
            run = prepare()
            verdict = check.of_peer(passages)(run())
            row |= {"max_error": verdict.max_error, "correct": verdict.correct}
            if not verdict.correct:
                row["failed"] = verdict.reason
            elif not self.once:
                self._timed(row, shape, self.clock(run, shape.nbytes))
        except Exception as error:  # noqa: BLE001 (a peer may fail in any way; the row says how)
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # raises where the failure took the device with it
                torch.cuda.empty_cache()
        self._keep(row)

    def _row(self, shape: Shape, kernel: str, extra: dict[str, Any]) -> dict[str, Any]:
        return {**asdict(shape), "kernel": kernel, **extra}

    def _timed(self, row: dict[str, Any], shape: Shape, time: Time) -> None:
        row |= {
            **asdict(time),
            "floor_ms": shape.nbytes / self.read_gb_s / 1e6,
            "pct_of_read": 100 * shape.nbytes / time.ms / 1e6 / self.read_gb_s,
            "mdocs_s": shape.passages / time.ms / 1e3,
            "gtok_s": shape.tokens / time.ms / 1e6,
            "read_gb_s": self.read_gb_s,
        }

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(describe(row), flush=True)
        self.on_row()


def describe(row: dict[str, Any]) -> str:
    """One line: what was scored, by what, and what came out."""
    head = f"{row['group']}/{row['name']:<22} {row['kernel']:<46}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    if "ms" not in row:
        return f"{head} error {row['max_error']:.1e}"
    return (
        f"{head} {row['ms']:9.4f} ms {row['pct_of_read']:6.1f}% of read {row['mdocs_s']:9.2f} Mdocs/s "
        f"{row['gtok_s']:8.2f} Gtok/s error {row['max_error']:.1e}"
    )
