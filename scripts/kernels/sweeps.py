"""One size at a time away from LQ = 32, 128 tokens, 128 dimensions, fp16: our dense and residual kernels."""

from __future__ import annotations

from . import dense
from .bench import Bench
from .compressed import residual_case
from .dense import of_bytes

LENGTHS = (8, 16, 32, 48, 64, 96, 128)
TOKENS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
DIMS = (64, 96, 128, 192, 256, 384, 512, 768)
RESIDUAL_DIMS = (64, 96, 128, 384, 768)
NBITS = (1, 2, 4, 8)


def run(bench: Bench) -> None:
    """Every point reads about ``sizes.sweep_bytes``, but the batches, whose size is what is swept."""
    budget = bench.sizes.sweep_bytes

    def passages(ND: int, DIM: int, itemsize: int = 2) -> int:
        return max(1, budget // (ND * DIM * itemsize) // 16) * 16

    if bench.wants("lq"):
        for LQ in LENGTHS:
            dense.padded(
                bench, f"lq {LQ}", "fp16", 128, passages(128, 128), group="sweep lq", LQ=LQ,
                choices=dense.paper.CHOICES[:1], everywhere=False,
            )  # fmt: skip
    if bench.wants("tokens"):
        for ND in TOKENS:
            dense.padded(
                bench, f"tokens {ND}", "fp16", 128, passages(ND, 128), group="sweep tokens", ND=ND,
                choices=dense.paper.CHOICES[:1], everywhere=False,
            )  # fmt: skip
    if bench.wants("dim"):
        for dtype in ("fp16", "bf16", "fp32"):
            size = dense.DTYPES[dtype].itemsize
            for DIM in DIMS:
                precisions = ("tf32x3", "tf32", "ieee") if dtype == "fp32" else ("ieee",)
                dense.padded(
                    bench, f"dim {DIM} {dtype}", dtype, DIM, passages(128, DIM, size), group="sweep dim",
                    precisions=precisions, everywhere=False,
                )  # fmt: skip
    if bench.wants("batch"):
        for n in bench.sizes.sweep_passages:
            dense.padded(
                bench, f"batch {n}", "fp16", 128, n, group="sweep batch", choices=dense.paper.CHOICES[:1],
                everywhere=False,
            )  # fmt: skip
    if bench.wants("residual"):
        for DIM in RESIDUAL_DIMS:
            for nbits in NBITS if DIM == 128 else (2,):
                n = of_bytes(bench.sizes.residual // 3, DIM, 2)
                data = bench.residual_data(nbits, n, DIM)
                residual_case(bench, "sweep residual", f"residual {DIM} {nbits}", data)
        bench.forget()


CASES = ("lq", "tokens", "dim", "batch", "residual")
