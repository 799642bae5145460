"""Uncompressed passages: every dtype and dimension that has a figure, ragged and short lists, peers beside them."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import api, reference

from . import paper, peers
from .bench import OURS, Bench, Shape
from .check import Check, dense_budget, sample
from .data import ragged_offsets, unit_rows

GROUP = "dense"
LQ = 32
DIMS = (64, 256, 384, 768)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# fp32 at an error of 1e-5 is what these reach; the faster one is the figure.
FULL_FP32 = ("ieee", "tf32x3", "fp16x3")


def unit_embeddings(n: int, DIM: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """``[n, DIM]`` random directions; rounding to dtype may move a norm by 2**-9."""
    out = torch.empty(n, DIM, dtype=dtype, device=gen.device)
    for part in out.split(1 << 20):
        part.copy_(normalize(torch.randn(part.shape, generator=gen, device=gen.device), dim=-1))
    return out


def of_bytes(passages: int, DIM: int, itemsize: int) -> int:
    """How many passages have the bytes of ``passages`` in fp16 at 128 dimensions; a multiple of 16."""
    return max(1, passages * 128 * 2 // (DIM * itemsize) // 16) * 16


def padded(
    bench: Bench,
    name: str,
    dtype: str,
    DIM: int,
    passages: int,
    *,
    group: str = GROUP,
    LQ: int = LQ,
    ND: int | None = None,
    precisions: tuple[str, ...] = ("ieee",),
    everything: bool = False,
    choices: tuple[paper.PaperBlocks, ...] = (),
    everywhere: bool = True,
) -> None:
    """Passages of one length: ours at each precision, the paper's at each choice, and peers.

    everywhere: those that run in every shape; everything: the others too.
    """
    ND = ND or bench.sizes.tokens
    D = unit_embeddings(passages * ND, DIM, DTYPES[dtype], bench.gen).view(passages, ND, DIM)
    Q = unit_rows(LQ, DIM, bench.gen).to(DTYPES[dtype])
    shape = Shape(group, name, LQ, DIM, dtype, passages, passages * ND, D.nbytes)
    chosen = sample(passages, bench.device)
    even = torch.arange(passages + 1, device=bench.device) * ND
    want = reference.maxsim(Q, D.view(-1, DIM), even, chosen)
    for precision in precisions:
        check = Check(want, chosen, dense_budget(LQ, DIM, precision, want))
        kernel = OURS if dtype != "fp32" else f"{OURS}, {precision}"
        out = torch.full((passages,), math.nan, device=bench.device)
        run = partial(api.dense_maxsim, Q, D, precision=precision, out=out, impl="triton")
        bench.ours(shape, run, check, kernel=kernel)
    check = Check(want, chosen, dense_budget(LQ, DIM))
    x = peers.Padded(Q, D)
    peers.run_paper(bench, shape, x, check, choices)
    if everywhere:
        peers.run_padded(bench, shape, x, check, everything)


def packed(bench: Bench, name: str, dtype: str = "fp16", DIM: int = 128) -> None:
    """Ragged passages, one after the other."""
    passages = bench.sizes.packed
    offsets = ragged_offsets(passages, bench.gen)
    D = unit_embeddings(int(offsets[-1]), DIM, DTYPES[dtype], bench.gen)
    Q = unit_rows(LQ, DIM, bench.gen).to(DTYPES[dtype])
    shape = Shape(GROUP, name, LQ, DIM, dtype, passages, len(D), D.nbytes + offsets.nbytes)
    chosen = sample(passages, bench.device)
    check = Check(reference.maxsim(Q, D, offsets, chosen), chosen, dense_budget(LQ, DIM))
    out = torch.full((passages,), math.nan, device=bench.device)
    bench.ours(shape, partial(api.dense_maxsim, Q, D, offsets=offsets, out=out, impl="triton"), check)
    peers.run_packed(bench, shape, peers.Packed(Q, D, offsets), check)


def run(bench: Bench) -> None:
    n = bench.sizes.dense
    choices = paper.CHOICES
    if bench.wants("d128 fp16"):
        padded(bench, "d128 fp16", "fp16", 128, n, everything=True, choices=choices)
    if bench.wants("packed"):
        packed(bench, "packed")
    if bench.wants("10k"):
        padded(bench, "10k", "fp16", 128, bench.sizes.few, choices=choices[:1])
    if bench.wants("d128 bf16"):
        padded(bench, "d128 bf16", "bf16", 128, n, choices=choices[:1])
    if bench.wants("fp32"):
        padded(bench, "fp32", "fp32", 128, of_bytes(n, 128, 4), precisions=(*FULL_FP32, "tf32"))
    for DIM in DIMS:
        for dtype in ("fp16", "bf16"):
            if bench.wants(f"d{DIM} {dtype}"):
                padded(bench, f"d{DIM} {dtype}", dtype, DIM, of_bytes(n, DIM, 2), choices=choices[:1])


CASES = (
    "d128 fp16", "packed", "10k", "d128 bf16", "fp32",
    *(f"d{DIM} {dtype}" for DIM in DIMS for dtype in ("fp16", "bf16")),
)  # fmt: skip
