"""Hostile calls to the operations: the oracle's result within an error budget, or an error that names the argument.

A function of ``OPERATIONS`` draws one call, makes it and judges it. Half of the calls are spoiled: a tensor of another
type, shape, layout or device, something that is no tensor, a number out of range. A refusal must be an error of ours
(``name: expected ..., got ...``) and must leave outputs and inputs as they were. A call that is accepted must give the
scores that :mod:`plaid_tilemaxsim.ops.reference` has in float64, write no place past ``count``, and leave inputs alone.
Any other exception is a failure; crashes and hangs are for the process around it to see.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim.ops import api, cpu, reference
from tests.ops.ragged import U16, quantised

Draw = Callable[[st.SearchStrategy[Any]], Any]
Want = Callable[[], Tensor]

U32 = 2.0**-24
SENTINEL = 7.0
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*FLOATS, torch.float64, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)
REFUSED = re.compile(r"^\S.*?: expected .*, got ", re.DOTALL)
# Examples of one run of hypothesis; a suite is as many runs, each with a seed of its own, as it takes.
ROUND = 250


@dataclass(frozen=True)
class Where:
    """Where calls run, and sizes that it can afford: the interpreter is slow, a GPU compiles anew for each shape."""

    name: str
    device: str
    impls: tuple[str, ...]
    query_tokens: tuple[int, ...]
    dims: tuple[int, ...]
    nbits: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens of a passage
    passages: int  # at most
    centroids: tuple[int, ...]
    seed: int = field(default=0, compare=False)  # of the combinations that a run on a GPU has

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


CPU = Where(
    "cpu", "cpu", ("auto", "torch", "reference"), (1, 2, 5, 17, 32, 33, 130, 1024), (8, 24, 64, 96, 128, 1024),
    (1, 2, 4, 8), (0, 1, 2, 15, 16, 17, 33, 64, 129), 10, (1, 2, 33, 64, 150, 256),
)  # fmt: skip
INTERPRETER = Where(
    "interpreter", "cpu", ("triton",), (1, 5, 17, 33), (16, 64, 96), (1, 2, 4, 8), (0, 1, 2, 17, 33), 4, (1, 33, 150)
)
CUDA = Where(
    "cuda", "cuda", ("auto", "triton", "reference"), (1, 5, 32, 33, 1024), (64, 128), (2, 4),
    (0, 1, 2, 15, 16, 17, 33, 64, 129, 300), 40, (1, 33, 150, 1000),
)  # fmt: skip


@dataclass
class Tally:
    """What a run of calls came to."""

    cases: int = 0
    refused: int = 0
    compared: int = 0  # results with at least two different scores
    sharp: int = 0  # of these: those where the budget would not accept the scores in another order

    def compare(self, got: Tensor, want: Tensor, tolerance: float) -> None:
        """Same -inf, all else within ``tolerance``."""
        got, want = got.detach().double().cpu(), want.double().cpu()
        assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
        assert not got.isnan().any(), "NaN scores"
        assert torch.equal(got == -math.inf, want == -math.inf), "empty passages"
        got, want = got[want > -math.inf], want[want > -math.inf]
        if want.numel() == 0:
            return
        worst = float((got - want).abs().max())
        assert worst <= tolerance, f"off by {worst}, budget {tolerance}"
        if len(want.unique()) > 1:
            self.compared += 1
            self.sharp += float(want.max() - want.min()) > 2 * tolerance


@dataclass
class Call:
    """One call: its arguments, what is wrong with them (None: nothing), and what must come of it."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    wrong: str | None = None

    def spoil(
        self, draw: Draw, tensors: Mapping[str, Sequence[torch.dtype]], others: Mapping[str, Sequence[Any]]
    ) -> None:
        """Spoils none, one or two arguments. tensors: and the types that they may have; others: and what they may not
        be."""
        values = {**others, "impl": ("cuda", "", None, 3, ["torch"])}
        names = [name for name in (*tensors, *values) if self.arguments.get(name) is not None]
        kinds = list(SPOILS)  # each once: two tensors of another type or device may fit together again
        for _ in range(draw(st.sampled_from((0, 0, 0, 0, 0, 1, 1, 2)))):
            name = names.pop(draw(st.integers(0, len(names) - 1)))
            if name in values:
                self.arguments[name] = draw(st.sampled_from(values[name]))
            else:
                kind = kinds.pop(draw(st.integers(0, len(kinds) - 1)))
                self.arguments[name] = spoiled(draw, self.arguments[name], tensors[name], kind)
            self.wrong = name

    def refuses(self, tally: Tally) -> bool:
        """Makes the call if it must be refused, and checks that it was."""
        if self.wrong is None:
            return False
        before = copies(self.arguments)
        try:
            self.function(**self.arguments)
        except (ValueError, IndexError) as error:
            refusal = error
        else:
            raise AssertionError(f"accepted a wrong {self.wrong}: {describe(self.arguments[self.wrong])}")
        assert REFUSED.match(str(refusal)), f"{type(refusal).__name__} that names no argument: {refusal}"
        unchanged(self.arguments, before)
        tally.refused += 1
        return True

    def result(self) -> Any:
        """Of a call that must be accepted; inputs stay as they were."""
        before = copies(self.arguments)
        got = self.function(**self.arguments)
        before.pop("out", None)
        unchanged(self.arguments, before)
        return got


def together(draw: Draw, where: Where, *choices: Sequence[Any], most: int = 6) -> Sequence[Any]:
    """One of each of ``choices``. On a GPU, which compiles a kernel for each combination, one of the ``most``
    combinations that the seed of the run picks."""
    if not where.on_gpu:
        return [draw(st.sampled_from(values)) for values in choices]
    every = list(itertools.product(*choices))
    return draw(st.sampled_from(random.Random(where.seed).sample(every, min(most, len(every)))))


def copies(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: value.detach().clone()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.device.type != "meta" and value.layout == torch.strided
    }


def unchanged(arguments: dict[str, Any], before: dict[str, Tensor]) -> None:
    for name, copy in before.items():
        now = arguments[name].detach().contiguous()
        assert torch.equal(now.view(-1).view(torch.uint8), copy.contiguous().view(-1).view(torch.uint8)), (
            f"{name} has been written to"
        )


def describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} {value.device}" if isinstance(value, Tensor) else repr(value)[:80]


SPOILS = ("dtype", "deeper", "flatter", "strided", "device", "sparse", "list", "text", "array")


def spoiled(draw: Draw, x: Tensor, dtypes: Sequence[torch.dtype], kind: str) -> Any:
    """Something like x that no operation takes."""
    if kind == "dtype":
        return x.to(draw(st.sampled_from([dtype for dtype in DTYPES if dtype not in dtypes])))
    if kind == "strided":
        y = x.new_empty(*x.shape, 2)[..., 0].copy_(x)  # CUDA stacks no uint16
        return x[None, None] if y.is_contiguous() else y
    if kind == "flatter":
        return x.flatten() if x.dim() > 1 and x.dim() != 3 else x.new_zeros(())
    if kind == "device":
        return x.cpu() if x.is_cuda else x.to("meta")
    if kind == "sparse":
        return x.float().to_sparse()
    if kind == "list":
        return x.tolist()
    if kind == "array":
        return x.float().cpu().detach().numpy()
    return "x" if kind == "text" else x[None, None]


def seldom(draw: Draw) -> bool:
    return bool(draw(st.integers(0, 11)) == 7)


def poisoned(Q: Tensor, at: int, value: float) -> Tensor:
    Q = Q.clone()
    Q.view(-1)[at % Q.numel()] = value
    return Q


def ways(draw: Draw, Q: Tensor) -> Tensor:
    """The same query as callers may hold it."""
    kind = draw(st.sampled_from(("as it is", "as it is", "gradient", "view")))
    if kind == "gradient":
        return Q.clone().requires_grad_() * 1
    if kind == "view":
        return torch.cat([Q[:1], Q])[1:] if Q.numel() else Q
    return Q


@dataclass
class Selection:
    """Which passages are asked for: arguments of the call, and what it may write."""

    arguments: dict[str, Any]
    pids: Tensor  # int64 [m] on the CPU: those to be scored
    wrong: str | None

    def check(self, tally: Tally, got: Tensor, want: Tensor, tolerance: float, ignore: Tensor | None = None) -> None:
        """want: fp64 [..., N], of all passages. ignore: bool [N], passages whose scores mean nothing."""
        out, m = self.arguments.get("out"), len(self.pids)
        assert got.dtype == torch.float32
        assert not got.requires_grad
        assert out is None or got.data_ptr() == out.data_ptr()
        assert out is None or (out[..., m:] == SENTINEL).all(), "places past count have been written to"
        judged = slice(None) if ignore is None else ~ignore[self.pids]
        tally.compare(got[..., :m][..., judged], want.cpu()[..., self.pids][..., judged], tolerance)


def selection(draw: Draw, where: Where, N: int, rows: tuple[int, ...] = (), listed: bool = True) -> Selection:
    """Any of N passages, in any order, some twice, some outside; outputs of shape [*rows, n]."""
    arguments: dict[str, Any] = {}
    ids = list(range(N))
    if listed and draw(st.booleans()):
        ids = draw(st.lists(st.integers(0, N - 1), max_size=12)) if N else []
        dtype = draw(st.sampled_from((torch.int32, torch.int64)))
        outside = [-1, N, -N - 1, 2**31 - 1, -(2**31)] + ([2**40, -(2**63)] if dtype == torch.int64 else [])
        # on a GPU nobody looks: documented
        if not where.on_gpu and seldom(draw):
            ids.insert(draw(st.integers(0, len(ids))), draw(st.sampled_from(outside)))
        arguments["pids"] = torch.tensor(ids, dtype=dtype, device=where.device)
    n = m = len(ids)
    if draw(st.booleans()):
        count = draw(st.sampled_from((0, 1, n - 1, n, n + 3, -1, 2**31 - 1, -(2**31))))
        m = max(0, min(n, count))
        arguments["count"] = torch.tensor([count], dtype=torch.int32, device=where.device)
    if draw(st.booleans()):
        arguments["out"] = torch.full((*rows, n), SENTINEL, device=where.device)
    scored = torch.tensor(ids[:m], dtype=torch.int64)
    wrong = "pids" if ((scored < 0) | (scored >= N)).any() else None
    return Selection(arguments, scored, wrong)


SELECTION_TENSORS: dict[str, Sequence[torch.dtype]] = {
    "offsets": (torch.int64,), "pids": (torch.int32, torch.int64), "out": (torch.float32,), "count": (torch.int32,)
}  # fmt: skip


def compressed(draw: Draw, where: Where, queries: tuple[int, ...] = (1,)) -> SimpleNamespace:
    """Queries and passages as an index has them; attributes are named as the operations' arguments."""
    NQ, LQ, nbits, DIM, steps = together(
        draw, where, queries, where.query_tokens, where.nbits, where.dims, (True, False)
    )
    DIM = DIM if LQ <= 130 else min(DIM, where.dims[1])
    C = draw(st.sampled_from(where.centroids))
    lengths = draw(st.lists(st.sampled_from(where.lengths), max_size=where.passages))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    c = SimpleNamespace(nbits=nbits, lengths=lengths, N=len(lengths), C=C, generator=g)
    Q = normalize(torch.randn(NQ, LQ, DIM, generator=g), dim=-1)
    centroids = normalize(torch.randn(C, DIM, generator=g), dim=1)
    if draw(st.booleans()):  # all similarities below zero
        Q, centroids = Q.abs(), -centroids.abs()
    if "triton" not in where.impls:
        Q = Q * draw(st.sampled_from((1.0, 1.0, 1e-3, 1e6)))
    T = sum(lengths)
    width = 0.5 / DIM**0.5
    c.bucket_weights = torch.linspace(-width, 0.9 * width, 2**nbits) + 0.05 * width * torch.rand(2**nbits, generator=g)
    c.residuals = torch.randint(0, 256, (T, DIM * nbits // 8), generator=g).to(torch.uint8)
    c.codes = torch.randint(0, C, (T,), generator=g).to(torch.int32)
    centroids = centroids.half()
    weights = reference.decode_residuals(c.residuals, nbits, c.bucket_weights, torch.float32)
    inverse = 1 / (centroids[c.codes.long()].float() + weights).norm(dim=1)
    c.inv_norms, c.inv_norm_lo, c.inv_norm_step = inverse, 0.0, 1.0
    if T and steps:
        c.inv_norms, c.inv_norm_lo, c.inv_norm_step = quantised(inverse)
    if "triton" not in where.impls and draw(st.booleans()):
        centroids = centroids.float()
    c.Q, c.centroids = Q, centroids
    c.offsets = torch.tensor([0, *lengths]).cumsum(0)
    for name, value in vars(c).items():
        if isinstance(value, Tensor):
            setattr(c, name, value.to(where.device))
    q, widest = float(Q.norm(dim=-1).max()), float(inverse.max()) if T else 0.0
    norms = 1.0 + width * DIM**0.5
    # fp32: each product and sum once, of the similarity, of the norm and over the query's tokens; a step of the norms
    half = 0.5 * c.inv_norm_step if c.inv_norms.dtype == torch.uint16 else 0.0
    c.tolerance = LQ * q * norms * ((2 * DIM + LQ + 16) * U32 * widest + half)
    # kernels: half a step of the centroids' scores, and q and w rounded to fp16, all at their worst and of one sign
    one = q * 1.01 / 65534 + 2.1 * U16 * float(Q.abs().sum(-1).max()) * float(c.bucket_weights.abs().max())
    # 1 bit: the tensor core adds up products with 1024, of which it truncates
    if nbits == 1:
        one += 1024 * DIM * U32 * q * width
    c.kernel_tolerance = c.tolerance + LQ * one * widest
    return c


def oracle(c: SimpleNamespace, Q: Tensor) -> Tensor:
    """fp64 [N], whatever the call was given besides."""
    return reference.residual_maxsim(Q, c.codes, c.residuals, c.centroids, c.bucket_weights, c.nbits, c.offsets)


def runs_kernels(where: Where, impl: Any) -> bool:
    return impl == "triton" or (impl == "auto" and where.on_gpu)


def unfinished(draw: Draw, call: Call, where: Where) -> None:
    """NaN, infinities and squares past fp32 in Q: refused where looking at them waits for nothing."""
    value = draw(st.sampled_from((math.nan, math.inf, -math.inf, 3e38))) if seldom(draw) else None
    Q = call.arguments["Q"]
    if value is None or call.wrong is not None or where.on_gpu or Q.dtype != torch.float32:
        return
    call.arguments["Q"] = poisoned(Q.detach(), draw(st.integers(0, 2**20)), value)
    call.wrong = "Q"


def strangely_sized(Q: Tensor) -> list[Tensor]:
    """Queries with none or too many tokens or dimensions, or one dimension more than the data."""
    LQ, DIM = Q.shape[-2:]
    rows = Q.shape[:-2]
    shapes = ((0, DIM), (1025, DIM), (LQ, 0), (LQ, DIM + 8), (LQ, 1032), (LQ, DIM - 1))
    return [Q.new_zeros(*rows, *shape) for shape in shapes]


def change_size(draw: Draw, call: Call) -> None:
    if call.wrong is None and seldom(draw):
        call.arguments["Q"] = draw(st.sampled_from(strangely_sized(call.arguments["Q"])))
        call.wrong = "Q"


def centroid_scores(draw: Draw, where: Where, tally: Tally) -> None:
    c = compressed(draw, where)
    Q = c.Q[0]
    S = c.centroids.double() @ Q.double().T
    threshold, ncells = together(draw, where, (None, -1e30, -0.2, 0.0, 0.1, 1e30), (None, 1, 2, 5))
    arguments = {
        "Q": ways(draw, Q), "centroids": c.centroids, "impl": draw(st.sampled_from(where.impls)),
        "threshold": threshold, "ncells": ncells and min(ncells, c.C), "cmax": draw(st.sampled_from((None, 1.001))),
    }  # fmt: skip
    call = Call(api.centroid_scores, arguments)
    numbers = (math.nan, math.inf, -math.inf, "0.5", [0.5])
    call.spoil(
        draw,
        {"Q": (torch.float32,), "centroids": (torch.float16, torch.float32)},
        {"threshold": numbers, "ncells": (0, -1, 129, 2.5, "3"), "cmax": (-1.0, *numbers)},
    )
    change_size(draw, call)
    if call.wrong is None and seldom(draw):
        arguments["centroids"], call.wrong = c.centroids[:0], "centroids"
    unfinished(draw, call, where)
    if call.refuses(tally):
        return
    cs = call.result()
    kernels = runs_kernels(where, arguments["impl"])
    size = float(Q.norm(dim=1).max()) * 1.001
    tolerance = size * (2e-6 if kernels else (Q.size(1) + 4) * U32)
    table = cs.table[: c.C, : cs.LQ].double() * cs.scale.double()
    step = 0.51 * float(cs.scale) if kernels else 0.0
    assert (cs.LQ, table.shape) == (len(Q), S.shape)
    tally.compare(table.flatten(), S.flatten(), tolerance + step)
    if arguments["threshold"] is not None:
        best = S.amax(1)
        clear = (best - arguments["threshold"]).abs() > tolerance
        assert torch.equal((cs.keep != 0)[clear], (best >= arguments["threshold"])[clear])
    if arguments["ncells"] is not None and kernels:
        n = min(arguments["ncells"], c.C)
        keys = cs.cells.flatten(0, 1)[:, : cs.LQ].sort(dim=0, descending=True).values
        cells = 0x7FFFFFFF - (keys[:n] & 0x7FFFFFFF)
        assert (keys[n:] == -(2**63)).all() or n < c.C, "fillers"
        assert (cells < c.C).all()
        least = S.topk(n, dim=0).values[-1]
        assert (S.gather(0, cells) >= least - 2 * tolerance).all()


def bad_scores(cs: api.CentroidScores) -> list[Any]:
    """Forms of centroid scores that no implementation takes."""
    table = cs.table
    wide = torch.cat([table] * 2, 1)
    return [None, table, replace(cs, table=table.double()), replace(cs, table=table[:, :-1]),
            replace(cs, table=wide), replace(cs, table=torch.stack([table] * 2, -1)[..., 0][:, :, None]),
            replace(cs, LQ=cs.LQ + 1100),
            replace(cs, LQ=0), replace(cs, scale=cs.scale.double()), replace(cs, scale=cs.scale[:0]),
            replace(cs, scale=1.0), replace(cs, table=table.tolist())]  # fmt: skip


def centroid_maxsim(draw: Draw, where: Where, tally: Tally) -> None:
    c = compressed(draw, where)
    Q, impl = c.Q[0], draw(st.sampled_from(where.impls))
    S = c.centroids.double() @ Q.double().T
    best = S.amax(1).sort().values
    at = draw(st.integers(0, c.C - 1))
    threshold = float(best[at]) - 1e-4 * float(best.abs().max())
    cs = api.centroid_scores(Q, c.centroids, threshold, impl=impl)
    # which centroids are kept is what centroid_scores says: that is judged elsewhere
    assert cs.keep is not None
    kept = draw(st.booleans())
    chosen = selection(draw, where, c.N)
    arguments = {"cs": cs, "codes": c.codes, "offsets": c.offsets, "use_keep": kept, "impl": impl} | chosen.arguments
    call = Call(api.centroid_maxsim, arguments, chosen.wrong)
    spoiled_scores = bad_scores(cs)
    if kept:
        spoiled_scores += [replace(cs, keep=None), replace(cs, keep=cs.keep.float()), replace(cs, keep=cs.keep[:-1])]
    call.spoil(draw, {"codes": (torch.int32,)} | SELECTION_TENSORS, {"cs": spoiled_scores})
    if c.codes.numel() and not where.on_gpu and seldom(draw):
        arguments["codes"], call.wrong = c.codes[:-1], "codes"
    if call.refuses(tally):
        return
    got = call.result()
    if kept:
        S[cs.keep == 0] = -math.inf
    scores = [S[c.codes[a:b].long()].amax(0).sum() if b > a else S.new_tensor(-math.inf)
              for a, b in itertools.pairwise(c.offsets.tolist())]  # fmt: skip
    want = torch.stack(scores) if scores else S.new_zeros(0)
    size = float(Q.norm(dim=1).max()) * 1.001 * len(Q)
    tolerance = size * (2e-6 + 1.02 / 65534 if runs_kernels(where, impl) else (Q.size(1) + len(Q) + 4) * U32)
    chosen.check(tally, got, want, tolerance)


def numbers_of_norms() -> dict[str, Sequence[Any]]:
    bad = (math.nan, math.inf, None, "1", [1.0])
    return {"inv_norm_lo": bad, "inv_norm_step": bad, "nbits": (0, 3, -2, 2.0, 16, "2", None)}


INDEX_TENSORS: dict[str, Sequence[torch.dtype]] = {
    "codes": (torch.int32,), "residuals": (torch.uint8,), "inv_norms": (torch.uint16, torch.float32),
    "bucket_weights": (torch.float32,),
}  # fmt: skip
INDEX_NAMES = ("codes", "residuals", "inv_norms", "inv_norm_lo", "inv_norm_step", "bucket_weights", "nbits", "offsets")


def cut_short(draw: Draw, call: Call, where: Where) -> None:
    """One row fewer in a tensor that has one a token; all of them fewer than the offsets say."""
    names = draw(st.sampled_from((("codes",), ("residuals",), ("inv_norms",), INDEX_NAMES[:3]))) if seldom(draw) else ()
    if call.wrong is not None:
        return
    if where.on_gpu and len(names) > 1:
        return
    for name in names if len(call.arguments["codes"]) else ():
        call.arguments[name] = call.arguments[name][:-1]
        call.wrong = name


def residual_maxsim(draw: Draw, where: Where, tally: Tally) -> None:
    c = compressed(draw, where)
    Q, impl = c.Q[0], draw(st.sampled_from(where.impls))
    cs = api.centroid_scores(Q, c.centroids, impl=impl)
    chosen = selection(draw, where, c.N)
    arguments = {"Q": ways(draw, Q), "cs": cs, "impl": impl} | {name: getattr(c, name) for name in INDEX_NAMES}
    call = Call(api.residual_maxsim, arguments | chosen.arguments, chosen.wrong)
    call.spoil(
        draw,
        {"Q": (torch.float32,)} | INDEX_TENSORS | SELECTION_TENSORS,
        {"cs": bad_scores(cs)} | numbers_of_norms(),
    )
    change_size(draw, call)
    cut_short(draw, call, where)
    unfinished(draw, call, where)
    if call.refuses(tally):
        return
    kernels = runs_kernels(where, impl)
    chosen.check(tally, call.result(), oracle(c, Q), c.kernel_tolerance if kernels else c.tolerance)


def residual_maxsim_fp32(draw: Draw, where: Where, tally: Tally) -> None:
    c = compressed(draw, where)
    Q, impl = c.Q[0], draw(st.sampled_from(where.impls))
    chosen = selection(draw, where, c.N)
    arguments = {"Q": ways(draw, Q), "centroids": c.centroids, "impl": impl}
    arguments |= {name: getattr(c, name) for name in INDEX_NAMES if not name.startswith("inv_norm")}
    call = Call(api.residual_maxsim_fp32, arguments | chosen.arguments, chosen.wrong)
    tensors = {name: dtypes for name, dtypes in INDEX_TENSORS.items() if name != "inv_norms"}
    call.spoil(
        draw,
        {"Q": (torch.float32,), "centroids": (torch.float16, torch.float32)} | tensors | SELECTION_TENSORS,
        {"nbits": numbers_of_norms()["nbits"]},
    )
    change_size(draw, call)
    unfinished(draw, call, where)
    if call.refuses(tally):
        return
    LQ, DIM = Q.shape
    # fp32: each product and sum once, of the similarity, of the norm and over the query's tokens
    tolerance = LQ * float(Q.norm(dim=1).max()) * (2 * DIM + LQ + 16) * U32
    chosen.check(tally, call.result(), oracle(c, Q), tolerance)


def residual_maxsim_batch(draw: Draw, where: Where, tally: Tally) -> None:
    c = compressed(draw, where, (1, 2, 3, 5))
    NQ = len(c.Q)
    impl = draw(st.sampled_from(where.impls))
    chosen = selection(draw, where, c.N, (NQ,))
    arguments = {"Q": ways(draw, c.Q), "centroids": c.centroids, "impl": impl}
    call = Call(
        api.residual_maxsim_batch,
        arguments | {name: getattr(c, name) for name in INDEX_NAMES} | chosen.arguments,
        chosen.wrong,
    )
    call.spoil(
        draw,
        {"Q": (torch.float32,), "centroids": (torch.float16, torch.float32)} | INDEX_TENSORS | SELECTION_TENSORS,
        numbers_of_norms(),
    )
    if call.wrong is None and seldom(draw):
        call.arguments["Q"], call.wrong = c.Q[:0], "Q"
    change_size(draw, call)
    cut_short(draw, call, where)
    unfinished(draw, call, where)
    if call.refuses(tally):
        return
    tolerance = c.kernel_tolerance if runs_kernels(where, impl) else c.tolerance
    if where.on_gpu:  # the kernel puts embeddings together in fp16, and rounds the query to it
        tolerance += 2.1 * c.Q.size(1) * U16
    chosen.check(tally, call.result(), torch.stack([oracle(c, q) for q in c.Q]), tolerance)


@dataclass
class Dense:
    """Queries and embeddings; ``Q`` [LQ, DIM] or [NQ, LQ, DIM]."""

    Q: Tensor
    rows: tuple[int, ...]
    D: Tensor  # [T, DIM]
    offsets: Tensor
    precision: str

    @property
    def want(self) -> Tensor:
        queries = self.Q if self.rows else self.Q[None]
        scores = torch.stack([reference.maxsim(q, self.D, self.offsets) for q in queries])
        return scores if self.rows else scores[0]


def dense(draw: Draw, where: Where) -> Dense:
    # fp16x3 has its own conditions for fp32 on a GPU, which tests of the kernel know
    precisions = [name for name in api.PRECISIONS if not (where.on_gpu and name == "fp16x3")]
    NQ, LQ, DIM, dtype, precision = together(
        draw, where, (0, 0, 1, 3), where.query_tokens, where.dims, FLOATS, precisions, most=8
    )
    DIM = DIM if LQ <= 130 else min(DIM, where.dims[1])
    lengths = draw(st.lists(st.sampled_from(where.lengths), max_size=where.passages))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    Q = normalize(torch.randn(max(NQ, 1), LQ, DIM, generator=g), dim=-1)
    D = normalize(torch.randn(sum(lengths), DIM, generator=g), dim=-1)
    if draw(st.booleans()):
        Q, D = Q.abs(), -D.abs()
    Q, D = Q.to(where.device, dtype), D.to(where.device, dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(where.device)
    return Dense(Q if NQ else Q[0], (NQ,) if NQ else (), D, offsets, precision)


def dense_tolerance(d: Dense, where: Where, impl: str) -> float:
    """fp32 sums of products that are exact or, of fp32, rounded once; TF32 has 11 bits, three products of it 22."""
    LQ, DIM = d.Q.shape[-2:]
    one = (DIM + LQ + 8) * U32
    if runs_kernels(where, impl) and where.on_gpu and d.Q.dtype == torch.float32:
        one += {"tf32": 2.1 * U16, "ieee": 0.0}.get(d.precision, DIM**0.5 * 2.0**-20)
    return LQ * 1.02 * one


def dense_packed(draw: Draw, where: Where, tally: Tally) -> None:
    d, impl = dense(draw, where), draw(st.sampled_from(where.impls))
    chosen = selection(draw, where, len(d.offsets) - 1, d.rows)
    ignore = None
    if len(d.D) and draw(st.sampled_from((False, False, False, True))):
        # NaN in a passage is that passage's own affair
        row = draw(st.integers(0, len(d.D) - 1))
        d.D[row] = math.nan
        ignore = torch.zeros(len(d.offsets) - 1, dtype=torch.bool)
        ignore[int(torch.searchsorted(d.offsets, row, right=True)) - 1] = True
    arguments: dict[str, Any] = {"Q": ways(draw, d.Q), "D": d.D, "offsets": d.offsets, "impl": impl}
    arguments["precision"] = d.precision
    call = Call(api.dense_maxsim, arguments | chosen.arguments, chosen.wrong)
    call.spoil(draw, {"Q": (d.Q.dtype,), "D": (d.D.dtype,)} | SELECTION_TENSORS, {"precision": ("fp8", None, 1)})
    if call.wrong is None and seldom(draw):
        call.arguments["lengths"], call.wrong = d.offsets.diff(), "lengths"
    if call.wrong is None and len(d.D) and not where.on_gpu and seldom(draw):
        call.arguments["D"], call.wrong = d.D[:-1], "D"
    change_size(draw, call)
    unfinished(draw, call, where)
    if call.refuses(tally):
        return
    chosen.check(tally, call.result(), d.want, dense_tolerance(d, where, impl), ignore)


def dense_padded(draw: Draw, where: Where, tally: Tally) -> None:
    d, impl = dense(draw, where), draw(st.sampled_from(where.impls))
    lengths = d.offsets.diff()
    B, ND = len(lengths), int(lengths.max()) if len(lengths) else 0
    ND = draw(st.sampled_from((ND, ND + 1, ND + 19)))
    D = torch.full((B, ND, d.D.size(1)), math.nan, dtype=d.D.dtype, device=where.device)  # padding must not be read
    for b, (start, end) in enumerate(itertools.pairwise(d.offsets.tolist())):
        D[b, : end - start] = d.D[start:end]
    arguments: dict[str, Any] = {"Q": ways(draw, d.Q), "D": D, "impl": impl}
    arguments["precision"] = d.precision
    wrong = None
    if draw(st.booleans()):
        arguments["lengths"] = lengths.to(draw(st.sampled_from((torch.int32, torch.int64))))
        bad = draw(st.sampled_from((None, None, None, -1, ND + 1, 2**31 - 1, -(2**31))))
        if B and bad is not None and not where.on_gpu:
            arguments["lengths"][draw(st.integers(0, B - 1))], wrong = bad, "lengths"
    else:
        full = torch.randn(D.shape, generator=torch.Generator().manual_seed(B)).to(where.device)
        D.copy_(normalize(full, dim=-1))
        offsets = torch.arange(B + 1, device=where.device) * ND
        d = replace(d, D=D.flatten(0, 1), offsets=offsets)
    chosen = selection(draw, where, B, d.rows, listed=False)
    call = Call(api.dense_maxsim, arguments | chosen.arguments, wrong)
    tensors = {"Q": (d.Q.dtype,), "D": (D.dtype,), "lengths": (torch.int32, torch.int64)} | SELECTION_TENSORS
    call.spoil(draw, tensors, {"precision": ("fp8", None, 1)})
    if call.wrong is None and seldom(draw):
        call.arguments["pids"], call.wrong = torch.zeros(1, dtype=torch.int32, device=where.device), "pids"
    change_size(draw, call)
    unfinished(draw, call, where)
    if call.refuses(tally):
        return
    chosen.check(tally, call.result(), d.want, dense_tolerance(d, where, impl))


def pq_maxsim(draw: Draw, where: Where, tally: Tally) -> None:
    d, impl = dense(draw, where), draw(st.sampled_from(where.impls))
    Q = d.Q.float()
    DIM = Q.size(-1)
    sizes = [m for m in (1, 2, 8, 16, 32) if DIM % m == 0 and (m >= 8 or where.name == "cpu")]
    (M,) = together(draw, where, sizes, most=1)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    codebook = (torch.randn(M, 256, DIM // M, generator=g) / DIM**0.5).half().to(where.device)
    codes = torch.randint(0, 256, (len(d.D), M), generator=g).to(torch.uint8).to(where.device)
    chosen = selection(draw, where, len(d.offsets) - 1, d.rows)
    arguments = {"Q": ways(draw, Q), "codes": codes, "codebook": codebook, "offsets": d.offsets, "impl": impl}
    call = Call(api.pq_maxsim, arguments | chosen.arguments, chosen.wrong)
    call.spoil(
        draw, {"Q": (torch.float32,), "codes": (torch.uint8,), "codebook": (torch.float16,)} | SELECTION_TENSORS, {}
    )
    if call.wrong is None and seldom(draw):
        name, value = draw(st.sampled_from([
            ("codebook", codebook[:-1]), ("codebook", codebook[:, :255]), ("codes", codes[:, :0]),
            ("codes", codes[:, : M - 1]),
        ]))  # fmt: skip
        call.arguments[name], call.wrong = value, name
    if call.wrong is None and len(codes) and not where.on_gpu and seldom(draw):
        call.arguments["codes"], call.wrong = codes[:-1], "codes"
    change_size(draw, call)
    unfinished(draw, call, where)
    if call.refuses(tally):
        return
    e = float(codebook.float().norm(dim=2).amax(1).norm())
    one = (DIM + len(Q) + 8) * U32 + (2 * U16 if runs_kernels(where, impl) else 0)
    want = replace(d, Q=Q, D=reference.pq_decode(codes, codebook)).want
    chosen.check(tally, call.result(), want, Q.size(-2) * e * one)


def decompress(draw: Draw, where: Where, tally: Tally) -> None:
    c = compressed(draw, where)
    want = reference.decompress(c.codes, c.residuals, c.centroids, c.bucket_weights, c.nbits)
    DIM = c.Q.size(-1)
    if "triton" in where.impls:
        from plaid_tilemaxsim.ops import decompress_kernel

        dtype = draw(st.sampled_from((torch.float16, torch.float32)))
        got = torch.full((len(want) + 1, DIM), SENTINEL, dtype=dtype, device=where.device)
        decompress_kernel.decompress(c.codes, c.residuals, c.centroids, c.bucket_weights, c.nbits, got[:-1])
        assert (got[-1] == SENTINEL).all(), "rows past the last have been written to"
        got = got[:-1]
    else:
        table = cpu.byte_table(c.nbits, c.bucket_weights)
        got = normalize(cpu.decompress(c.codes, c.residuals, c.centroids, table), dim=-1)
    rounding = U16 if got.dtype == torch.float16 else 0.0
    tolerance = (DIM + 8) * U32 + rounding
    if want.numel():
        assert (got.double() - want).abs().max() <= tolerance
    if len(want) > 1:
        tally.compared += 1
        tally.sharp += bool((want.roll(1, 0) - want).abs().max() > 2 * tolerance)


def candidates(draw: Draw, where: Where, tally: Tally) -> None:
    """The lists of the best cells, each passage once, ascending; with the kernels a filter too, and a clean bitmap."""
    C, LQ = together(draw, where, (1, 2, 33, 64, 256, 640), (1, 5, 32))
    N = draw(st.sampled_from((1, 31, 32, 33, 700, 4097)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    S = torch.randn(C, LQ, generator=g)
    if draw(st.booleans()):
        S = -S.abs() * 1e30
    lists = [torch.randperm(N, generator=g)[: int(torch.randint(0, min(N, 90) + 1, (1,), generator=g)) * (c % 3 > 0)]
             .sort().values.int() for c in range(C)]  # fmt: skip
    ivf_pids, ivf_offsets = torch.cat(lists), torch.tensor([0, *map(len, lists)]).cumsum(0)
    ncells = draw(st.sampled_from((1, 2, C, C, C // 2 + 1, 0, -1, C + 1, 2**40)))
    good = 1 <= ncells <= C
    cells = S.topk(ncells if good else 1, dim=0).indices
    want = torch.cat([lists[c] for c in cells.flatten().tolist()]).unique()
    if "triton" in where.impls:
        from plaid_tilemaxsim.ops import candidates_kernel as kernel

        if not good or ncells > 128:
            tally.refused += 1  # api.centroid_scores refuses before there are keys
            return
        image = S.view(torch.int32).long()
        image = torch.where(image < 0, image ^ 0x7FFFFFFF, image)
        keys = ((image << 32) | (0x7FFFFFFF - torch.arange(C))[:, None]).contiguous().to(where.device)
        found = torch.full((LQ, ncells), -1, dtype=torch.int32, device=where.device)
        kernel.select_cells(keys, found)
        bits = torch.zeros(kernel.bitmap_words(N), dtype=torch.int32, device=where.device)
        kernel.mark_lists(found, ivf_pids.to(where.device), ivf_offsets.to(where.device), bits)
        allow, mask = None, draw(st.sampled_from((None, 0, 0x55555555, -1)))
        if mask is not None:
            allow = torch.full_like(bits, mask)
            want = want[(mask >> (want % 32)) & 1 == 1] if mask else want[:0]
        counts = torch.zeros(kernel.count_blocks(N), dtype=torch.int32, device=where.device)
        pids = torch.full((N + 1,), -1, dtype=torch.int32, device=where.device)
        total = torch.full((1,), -1, dtype=torch.int32, device=where.device)
        kernel.gather_marked(bits, counts, pids[:N], total, allow)
        n = int(total)
        assert (pids[n:] == -1).all()
        assert not bits.any()
        got = pids[:n].cpu()
    else:
        cs = api.CentroidScores(S, torch.ones(1), LQ)
        call = Call(cpu.candidates, {"cs": cs, "ncells": ncells, "ivf_pids": ivf_pids, "ivf_offsets": ivf_offsets,
                                     "num_passages": N}, None if good else "ncells")  # fmt: skip
        if call.refuses(tally):
            return
        got = call.result()
    assert torch.equal(got, want.int())


def _ranked(scores: Tensor, pids: Tensor) -> Tensor:
    """Places of ``scores``, best first, ties to the smaller pid, then to the earlier; NaN is last."""
    scores = torch.where(scores.isnan(), -math.inf, scores) + 0.0
    by_pid = pids.argsort(stable=True)
    return by_pid[scores[by_pid].argsort(descending=True, stable=True)]


def some_scores(draw: Draw, most: int) -> tuple[Tensor, Tensor]:
    """Scores with ties, both zeros, infinities and NaN; pids in any order, some twice."""
    n = draw(st.integers(0, most))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = (torch.randn(n, generator=g) * draw(st.sampled_from((0.0, 1.0, 5.0, 1e30)))).round() / 4
    for value in draw(st.lists(st.sampled_from((-math.inf, math.nan, -0.0, 0.0, 3e38)), max_size=6)):
        scores[torch.rand(n, generator=g) < 0.2] = value
    return scores, torch.randint(0, max(2 * n, 1), (n,), generator=g, dtype=torch.int32)


def select(draw: Draw, where: Where, tally: Tally) -> None:
    scores, pids = some_scores(draw, 200)
    n = len(scores)
    m = draw(st.sampled_from((0, 1, 2, n // 2, n - 1, n, n + 7, 2**31 - 1)))
    m = max(m, 0)
    if "triton" in where.impls:
        from plaid_tilemaxsim.ops import select_kernel as kernel

        device = torch.device(where.device)
        pids = pids.sort().values  # as candidates are: then the earliest is the smallest
        room = min(m, n) + 1
        out_pids = torch.full((room,), -7, dtype=torch.int32, device=device)
        out_scores, out_count = torch.full((room,), SENTINEL, device=device), out_pids[:1].clone()
        padded = torch.cat([scores, torch.full((3,), math.nan)]).to(device)
        count = torch.tensor([n], dtype=torch.int32, device=device)
        work = kernel.select_workspace(device)
        ids = torch.cat([pids, pids.new_zeros(3)]).to(device)
        kernel.select_top(padded, ids, count, m, out_pids, out_scores, out_count, work)
        taken = int(out_count)
        assert taken == min(m, n)
        assert (out_pids[taken:] == -7).all()
        assert not work[: kernel._STATE].any(), "the workspace is as it was"
        got = out_pids[:taken].cpu(), out_scores[:taken].cpu()
    else:
        got = cpu.select_top(scores, pids, m)
    best = _ranked(scores, pids)[:m].sort().values
    assert got[0].tolist() == pids[best].tolist()
    known = ~scores[best].isnan()
    assert torch.equal(got[1][known] + 0.0, scores[best][known] + 0.0)


def rank(draw: Draw, where: Where, tally: Tally) -> None:
    scores, pids = some_scores(draw, 200)
    n = len(scores)
    k = draw(st.sampled_from((0, 1, 2, n // 2, n - 1, n, n + 7, 2**31 - 1)))
    k = max(k, 0)
    if "triton" in where.impls:
        from plaid_tilemaxsim.ops import rank_kernel as kernel

        cap = n + draw(st.sampled_from((0, 1, 40)))
        k = min(k, cap)
        if cap == 0:
            return
        padded = torch.cat([scores, torch.full((cap - n,), math.nan)]).to(where.device)
        ids = torch.cat([pids, pids.new_zeros(cap - n)]).to(where.device)
        count = torch.tensor([draw(st.sampled_from((n, n, cap + 9)))], dtype=torch.int32, device=where.device)
        if int(count) > cap:
            scores, pids, n = padded.cpu(), ids.cpu(), cap
        packed = torch.full((1 + 2 * k,), -9, dtype=torch.int32, device=where.device)
        kernel.rank(padded, ids, count, k, packed)
        packed = packed.cpu()
        taken = int(packed[0])
        assert taken == min(n, k)
        assert (packed[1 + taken : 1 + k] == -9).all()
        got = packed[1 : 1 + taken], packed[1 + k : 1 + k + taken].view(torch.float32)
    else:
        got = cpu.topk(scores, pids, k)
    best = _ranked(scores, pids)[:k]
    assert got[0].tolist() == pids[best].tolist()
    want = torch.where(scores[best].isnan(), -math.inf, scores[best])
    assert torch.equal(got[1] + 0.0, want + 0.0)


Operation = Callable[[Draw, Where, Tally], None]
OPERATIONS: dict[str, Operation] = {
    function.__name__: function
    for function in (
        centroid_scores, centroid_maxsim, residual_maxsim, residual_maxsim_fp32, residual_maxsim_batch, dense_packed,
        dense_padded, pq_maxsim, decompress, candidates, select, rank,
    )
}  # fmt: skip


def run(operation: Operation, where: Where, cases: int, first_seed: int = 0, seconds: float = math.inf) -> Tally:
    """Makes ``cases`` calls, or as many as begin within ``seconds``; raises at the first one that goes wrong."""
    tally, began, wrong = Tally(), time.perf_counter(), False
    where = replace(where, seed=first_seed)

    def late() -> bool:
        return time.perf_counter() - began > seconds

    for number in itertools.count(first_seed):
        left = cases - tally.cases
        if left <= 0 or late():
            return tally

        @seed(number)
        @settings(
            max_examples=min(left, ROUND), deadline=None, database=None, report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.data())
        def one(data: Any) -> None:
            nonlocal wrong
            try:
                operation(data.draw, where, tally)
            except Exception:
                wrong = True  # is shrunk, however long that takes
                raise
            tally.cases += 1
            if not wrong and late():
                raise SkipTest("time is up")  # hypothesis passes it on; earlier in a case it would call it flaky

        try:
            one()
        except SkipTest:
            return tally
    raise AssertionError("unreachable")
