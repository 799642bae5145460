"""Residual MaxSim kernels on this GPU: correctness on a sample against fp64, then throughput. One table, printed last.

Synthetic passages with MS MARCO-like lengths (lognormal, mean 67.7), random codes, residual bytes and centroids; the
work (3.8 GB at 2 bits and 1.5 M passages) is far above the L2. Every variant is checked in this run before it is timed.

    python scripts/bench_residual.py                     # variants at 2 bits, then 1 and 4 bits, centroid-only
    python scripts/bench_residual.py --only u2           # variants whose name contains the text
    ncu --set full -k regex:residual_maxsim python scripts/bench_residual.py --nbits 2 --only default --single
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plaid_tilemaxsim.ops import api, residual_fast_kernel, residual_kernel
from plaid_tilemaxsim.ops.residual_fast_kernel import Launch
from scripts.kernels.clock import times
from scripts.kernels.compressed import residual_check
from scripts.kernels.data import make


def variants(nbits: int, DIM: int, LQ: int) -> dict[str, Launch]:
    """Name (programs per SM, tiles in a loop body, passages in a group) -> launch; the first is the default."""
    chosen = {"default": residual_fast_kernel.launch_for(90, nbits, DIM, LQ)}
    if DIM > 128:
        return chosen | {"16 u1": Launch(16, 1, 16, 128), "12 u2": Launch(12, 2, 16, 168)}
    chosen |= {"12 u2": Launch(12, 2, 16, 168), "16 u1": Launch(16, 1, 16, 128)}
    if nbits == 2:
        chosen |= {"14 u2": Launch(14, 2, 16, 144), "16 u1 g128": Launch(16, 1, 128, 128)}
    if nbits == 4:
        chosen |= {"14 u1": Launch(14, 1, 16, 144)}
    return chosen


def registers(before: int) -> str:
    """Registers (and spilled bytes) of the fast kernel compiled since ``before`` were; empty if none was."""
    compiled = list(residual_fast_kernel._residual_maxsim_kernel.device_caches[torch.cuda.current_device()][0].values())
    if len(compiled) == before:
        return ""
    return f"{compiled[-1].n_regs}" + (f"+{compiled[-1].n_spills}" if compiled[-1].n_spills else "")


def num_compiled() -> int:
    return len(residual_fast_kernel._residual_maxsim_kernel.device_caches[torch.cuda.current_device()][0])


def measure(nbits: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time every chosen variant; rows of the table."""
    began = time.time()
    data = make(nbits, args.dim, args.lq, args.passages, args.centroids)
    T, n = data.codes.size(0), args.passages
    check = residual_check(data)
    print(f"{nbits} bits, DIM {args.dim}, LQ {args.lq}: {T} tokens, made in {time.time() - began:.1f} s", flush=True)
    out = torch.empty(n, device="cuda")
    arguments = (data.Q, data.cs, *data.compressed)
    launchers: dict[str, Callable[[], object]] = {
        name: partial(residual_fast_kernel.residual_maxsim, *arguments, None, out, None, launch=launch)
        for name, launch in variants(nbits, args.dim, args.lq).items()
    }
    launchers["portable"] = partial(residual_kernel.residual_maxsim, *arguments, None, out, None)
    if nbits == 2:
        launchers["centroid-only"] = partial(api.centroid_maxsim, data.cs, data.codes, data.offsets, out=out)

    rows = []
    for name, run in launchers.items():
        if args.only not in name:
            continue
        out.fill_(math.nan)
        before = num_compiled()
        run()
        torch.cuda.synchronize()
        regs = registers(before)
        if args.single:
            continue
        error: float | None = None
        if name != "centroid-only":
            verdict = check(out)
            error = verdict.max_error
            if not verdict.correct:
                print(f"{name}: {verdict.reason}, max error {error:.1e}, not timed: WRONG", flush=True)
                continue
        ms = times(run, args.repeats)
        gtok = T / statistics.median(ms) / 1e6
        rows.append(
            {
                "nbits": nbits,
                "variant": name,
                "gtok": round(gtok, 2),
                "p20": round(T / ms[len(ms) // 5] / 1e6, 2),
                "p80": round(T / ms[-1 - len(ms) // 5] / 1e6, 2),
                "ms": round(statistics.median(ms), 3),
                "ms_599M": round(599 / gtok, 2),
                "registers": regs,
                "error": error,
            }
        )
        print(f"{name}: {gtok:.2f} Gtokens/s after {time.time() - began:.1f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbits", type=int, nargs="*", default=[2, 1, 4])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--lq", type=int, default=32)
    parser.add_argument("--passages", type=int, default=1_500_000)
    parser.add_argument("--centroids", type=int, default=1 << 18)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--single", action="store_true", help="launch each variant once and stop: for ncu")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()

    began = time.time()
    rows = [row for nbits in args.nbits for row in measure(nbits, args)]
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}; {time.time() - began:.0f} s in all")
    print(f"{'bits':>4} {'variant':<18} {'Gtok/s':>7} {'p20':>7} {'p80':>7} {'ms':>8} {'599M ms':>8} {'regs':>7} error")
    for row in rows:
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        print(
            f"{row['nbits']:>4} {row['variant']:<18} {row['gtok']:>7} {row['p20']:>7} {row['p80']:>7} "
            f"{row['ms']:>8} {row['ms_599M']:>8} {row['registers']:>7} {error}"
        )
    if args.json:
        args.json.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
