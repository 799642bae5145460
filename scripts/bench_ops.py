"""Centroid scores, centroid-only MaxSim and short lists in fp32 over block choices: checked, then timed. One table.

Passages as in bench_residual.py (lognormal lengths, mean 67.7; 2**18 centroids; 2 bits). "% of read" is of the
bandwidth of a streaming read in the same run; codes count 4 bytes a token, table rows stay in L2 and count none.

    python scripts/bench_ops.py [--only centroid] [--passages 1500000] [--json out.json]
    python scripts/bench_ops.py --only residual_fp32 --passages 300000       # milliseconds of one list
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plaid_tilemaxsim.ops import api, centroid_kernel, tuning
from scripts.kernels import bench as kernels
from scripts.kernels.check import Check, Verdict, sample
from scripts.kernels.clock import Clock, times
from scripts.kernels.compressed import LISTED, LISTS, Fp32Lists
from scripts.kernels.data import Data, make


class Bench:
    """Rows of the table; ``only`` selects them by name."""

    def __init__(self, only: str, repeats: int) -> None:
        self.only, self.repeats = only, repeats
        self.rows: list[dict[str, Any]] = []
        self.read = kernels.Bench(torch.device("cuda"), kernels.Sizes()).measure_read()["gb_s"]

    def add(
        self,
        name: str,
        run: Callable[[], object],
        check: Callable[[Any], Verdict],
        nbytes: int,
        n: int,
        *,
        parts: int = 1,
        flush: Callable[[], object] | None = None,
    ) -> None:
        """``n`` things (tokens, passages or centroids) and ``nbytes`` of device memory a run, of which times are given
        for one of ``parts``; flush: run before each."""
        if self.only not in name:
            return
        verdict = check(run())
        if not verdict.correct:
            print(f"{name}: {verdict.reason}, not timed", flush=True)
            return
        ms = [one / parts for one in times(run, self.repeats, flush)]
        median = statistics.median(ms)
        row = {
            "name": name,
            "ms": round(median, 4),
            "p20": round(ms[len(ms) // 5], 4),
            "p80": round(ms[-1 - len(ms) // 5], 4),
            "g_per_s": round(n / parts / median / 1e6, 3),
            "pct_of_read": round(100 * nbytes / parts / median / 1e6 / self.read, 1),
        }
        self.rows.append(row)
        print(" ".join(f"{v}" for v in row.values()), flush=True)


def bench_centroid_scores(bench: Bench, data: Data) -> None:
    want = data.centroids.double() @ data.Q.double().T
    C, LQ = want.shape
    check = Check(want.flatten(), None, 3e-5)

    def run(ncells: int | None) -> Tensor:
        cs = api.centroid_scores(data.Q, data.centroids, 0.25, cmax=1.01, ncells=ncells)
        return cs.table

    def correct(table: Tensor) -> Verdict:
        return check((table[:C, :LQ] * (1.01 / 32767)).flatten())  # unit query tokens

    nbytes = data.centroids.nbytes + C * data.cs.table.size(1) * 2
    default = tuning.centroid_scores_blocks
    for warps, stages, programs in ((4, 2, 2), (8, 2, 2), (4, 3, 2), (4, 2, 4)):
        blocks = tuning.CentroidScoresBlocks(128, 32, 128, warps, stages, programs)
        tuning.centroid_scores_blocks = lambda *_, blocks=blocks: blocks
        for ncells in (None, 1, 2, 4):
            name = f"centroid_scores/ncells {ncells} warps {warps} stages {stages} programs {programs}"
            bench.add(name, partial(run, ncells), correct, nbytes, C)
    tuning.centroid_scores_blocks = default


def table_maxsim(cs: api.CentroidScores, data: Data, pids: Tensor) -> Tensor:
    """Sums of maxima of the table's own entries, fp64."""
    table = cs.table[:, : cs.LQ].double() * cs.scale.double()
    want = torch.full((len(pids),), -math.inf, dtype=torch.float64, device="cuda")
    for i, pid in enumerate(pids.tolist()):
        code = data.codes[data.offsets[pid] : data.offsets[pid + 1]].long()
        code = code if cs.keep is None else code[cs.keep[code].bool()]
        if len(code):
            want[i] = table[code].amax(0).sum()
    return want


def bench_centroid_maxsim(bench: Bench, data: Data) -> None:
    T, N = data.codes.size(0), data.offsets.size(0) - 1
    chosen = sample(N, data.codes.device)
    best = (data.centroids.float() @ data.Q.T).amax(1).sort(descending=True).values
    out = torch.full((N,), math.nan, device="cuda")
    nbytes = data.codes.nbytes + data.offsets.nbytes + out.nbytes
    packed = tuning.arch(out.device) >= 90
    cs = api.centroid_scores(data.Q, data.centroids, cmax=1.01)
    check = Check(table_maxsim(cs, data, chosen), chosen, 1e-5)
    run = partial(api.centroid_maxsim, cs, data.codes, data.offsets, out=out)
    default = tuning.centroid_blocks
    for BLOCK_N, programs in itertools.product((32, 64, 128), (8, 16, 24, 32)):
        blocks = tuning.CentroidBlocks(32, BLOCK_N, packed, programs)
        tuning.centroid_blocks = lambda *_, blocks=blocks: blocks
        bench.add(f"centroid_maxsim/all BN {BLOCK_N} programs {programs}", run, check, nbytes, T)
    tuning.centroid_blocks = default
    # as mode plaid prunes: a list
    pids = torch.arange(0, N, 8, dtype=torch.int32, device="cuda")
    listed = torch.full((len(pids),), math.nan, device="cuda")
    chosen = sample(len(pids), data.codes.device)
    tokens = int((data.offsets[1:] - data.offsets[:-1])[::8].sum())
    nbytes = tokens * 4 + len(pids) * (4 + 8 + 4)
    keep_default = tuning.centroid_kept_blocks
    for kept in (0.005, 0.02, 0.05, 0.1):
        cs = api.centroid_scores(data.Q, data.centroids, float(best[int(kept * len(best))]), cmax=1.01)
        check = Check(table_maxsim(cs, data, pids[chosen]), chosen, 1e-5)

        def portable(cs: api.CentroidScores = cs) -> Tensor:
            centroid_kernel.centroid_maxsim(cs, data.codes, data.offsets, pids, True, listed, None)
            return listed

        bench.add(f"centroid_maxsim/kept {kept} BN portable", portable, check, nbytes, tokens)
        run = partial(api.centroid_maxsim, cs, data.codes, data.offsets, pids, True, listed)
        for PER_LANE, programs in itertools.product((4, 8, 12), (16, 20, 24, 32)):
            kept_blocks = tuning.CentroidKeptBlocks(32, PER_LANE, packed, programs)
            tuning.centroid_kept_blocks = lambda *_, blocks=kept_blocks: blocks
            name = f"centroid_maxsim/kept {kept} BN lane {PER_LANE} programs {programs}"
            bench.add(name, run, check, nbytes, tokens)
    tuning.centroid_kept_blocks = keep_default


def bench_residual_fp32(bench: Bench, data: Data) -> None:
    """Lists as searches of mode plaid have them; the L2 is emptied before each run."""
    if bench.only and "residual_fp32" not in bench.only and bench.only not in "residual_fp32":
        return
    width = 4 + data.residuals.size(1) + 2 * data.Q.size(1)
    flush = Clock(data.codes.device).flush
    every = [Fp32Lists(data, n) for n in LISTED]
    default = tuning.residual_fp32_blocks
    # BLOCK_N, BLOCK_D, warps, stages
    choices = [(64, 128, 4, 1), (64, 128, 4, 2), (64, 128, 8, 1), (64, 64, 4, 1), (16, 128, 2, 1), (16, 128, 4, 1)]
    for BLOCK_N, BLOCK_D, warps, stages in choices:
        for n, lists in zip(LISTED, every, strict=True):
            for programs in (1, 2, 3) if n > 132 else (2,):
                blocks = tuning.ResidualFp32Blocks(BLOCK_N, 32, BLOCK_D, warps, stages, programs)
                tuning.residual_fp32_blocks = lambda *_, blocks=blocks: blocks

                def check(_: object, lists: Fp32Lists = lists) -> Verdict:
                    return lists.check(lists.out.flatten())

                name = f"residual_fp32/{n} BN {BLOCK_N} BD {BLOCK_D} warps {warps} stages {stages} programs {programs}"
                run, tokens = lists.recorded(), lists.tokens
                bench.add(name, run, check, tokens * width, tokens, parts=LISTS, flush=flush)
    tuning.residual_fp32_blocks = default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--passages", type=int, default=1_500_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    bench = Bench(args.only, args.repeats)
    data = make(2, 128, 32, args.passages, 1 << 18)
    bench_residual_fp32(bench, data)
    bench_centroid_scores(bench, data)
    bench_centroid_maxsim(bench, data)
    name = torch.cuda.get_device_name()
    device = f"{name}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device}; read {bench.read:.0f} GB/s; best of each kind:")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in bench.rows:
        kinds.setdefault(row["name"].split(" BN")[0].split(" warps")[0], []).append(row)
    for rows in kinds.values():
        best = min(rows, key=lambda row: row["ms"])
        print(f"{best['name']:<66} {best['ms']:>8} ms {best['g_per_s']:>8} G/s {best['pct_of_read']:>6} % of read")
    if args.json:
        args.json.write_text(
            json.dumps({"device": device, "read_gb_s": bench.read, "rows": bench.rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
