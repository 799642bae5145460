"""Hostile calls to engine and scorer: what the float64 oracle finds, or an error that names the argument.

As in :mod:`.calls`, but for whole searches: queries, parameters, lists of passages, masks and filters of every kind. A
search that is accepted must score what it returns as the oracle does, order it by score and pid, and return exactly the
passages that survive candidates and pruning in float64, wherever no cut is within rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from plaid_tilemaxsim.engine import SearchEngine, SearchParams, default_params
from plaid_tilemaxsim.index.files import PlaidIndex, read_index
from plaid_tilemaxsim.index.pq import PQ
from plaid_tilemaxsim.index.resident import load_resident
from plaid_tilemaxsim.ops import reference
from tests.hostile import calls
from tests.hostile.calls import U16, U32, Call, Draw, Operation, Tally, Where, seldom, together
from tests.synthetic import make_index

MODES = ("plaid", "rerank", "exhaustive")
# Fields of a config that follow from k unless they are set.
TUNED = ("ncells", "centroid_score_threshold", "ndocs")


Filter = Callable[[Tensor], Tensor]


@dataclass
class Shelf:
    """One index, and the engine over it."""

    path: Path
    stored: PlaidIndex
    engine: SearchEngine
    tokens: Tensor  # fp64 [T, DIM]

    def __repr__(self) -> str:
        return f"{self.path.name} {self.engine.index.codec}"

    @property
    def N(self) -> int:
        return self.stored.num_passages

    @property
    def C(self) -> int:
        return self.stored.num_centroids

    def budget(self, Q: Tensor) -> float:
        """fp32 sums at their worst; kernels round the centroids' scores to half a step each, embeddings and query to
        fp16: a random walk of DIM * LQ steps, of which ten deviations."""
        LQ, DIM = Q.shape
        fp32 = LQ * (2 * DIM + LQ + 16) * 2 * U32
        fp16 = 10 * (LQ / DIM) ** 0.5 * U16 + LQ / 60000 if self.engine.impl == "triton" else 0.0
        return float(Q.double().norm(dim=1).max() * self.tokens.norm(dim=1).max()) * (fp32 + fp16)

    def exact(self, Q: Tensor) -> Tensor:
        return reference.maxsim(Q.cpu(), self.tokens, self.stored.offsets)

    def candidates(self, Q: Tensor, ncells: int) -> Tensor | None:
        """int64, ascending; None where rounding may decide."""
        S = self.stored.centroids.double() @ Q.double().T
        if ncells < self.C:
            best = S.topk(ncells + 1, dim=0).values
            if ((best[-2] - best[-1]) <= 1e-5 * Q.double().norm(dim=1)).any():
                return None
        cells = S.topk(ncells, dim=0).indices.unique().tolist()
        offsets = self.stored.ivf_offsets
        return torch.cat([self.stored.ivf_pids[offsets[c] : offsets[c + 1]] for c in cells]).unique().long()

    def pruned(self, Q: Tensor, pids: Tensor, threshold: float | None, keep: int) -> Tensor | None:
        """The best by centroids, ties to the smaller pid; None where rounding may decide."""
        if keep >= len(pids):
            return pids
        stored, slack = self.stored, self.budget(Q)
        if threshold is not None:
            best = (stored.centroids.double() @ Q.double().T).amax(1)
            if ((best - threshold).abs() <= slack).any():
                return None
        approximate = reference.centroid_maxsim(
            Q.double(), stored.codes(), stored.centroids, stored.offsets, pids, threshold
        )
        scores, order = approximate.sort(descending=True, stable=True)
        if 0 < float(scores[keep - 1] - scores[keep]) <= 2 * slack:
            return None
        if scores[keep - 1] == scores[keep] > -math.inf:  # equal in float64 and not below: equal codes, or rounding
            return None
        return pids[order[:keep].sort().values]

    def survivors(self, Q: Tensor, p: SearchParams, start: Tensor | None, keep: Filter) -> Any:
        """Passages that a search scores exactly, from ``start`` or from its candidates; None where rounding decides."""
        short = Q if p.query_maxlen is None else Q[: p.query_maxlen]
        pids = start
        if pids is None:
            pids = torch.arange(self.N) if p.mode == "exhaustive" else self.candidates(short, p.ncells)
        if pids is None:
            return None
        pids = keep(pids).sort().values
        if start is None and p.mode == "plaid":
            for threshold, most in ((p.threshold, p.ndocs), (None, p.ndocs // 4)):
                pids = None if pids is None else self.pruned(short, pids, threshold, most)
        elif start is None and p.mode == "exhaustive" and p.prefilter is not None:
            pids = self.pruned(Q, pids, None, p.prefilter)
        return pids


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hostile-")


def random_pq(stored: PlaidIndex) -> PQ:
    """Codes that have nothing to do with the index, of vectors about as long as its own, and a rotation."""
    g = torch.Generator().manual_seed(stored.num_tokens)
    dim, m = stored.dim, 8
    codes = torch.randint(0, 256, (stored.num_tokens, m), generator=g).to(torch.uint8)
    codebook = torch.randn(m, 256, dim // m, generator=g) / dim**0.5
    return PQ(m, codes, codebook.half(), torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q.contiguous())


@functools.cache
def shelves(where: Where) -> list[Shelf]:
    """Indexes of a few passages, some empty, of several widths, and engines of every codec."""
    small = {"n": 40, "dim": 64, "C": 16, "max_doclen": 20, "mean_doclen": 8.0}
    sizes: list[dict[str, Any]] = [small | {"nbits": 2, "empty": 0.3}]
    if where.name != "interpreter":
        sizes += [{"n": 130, "dim": 64, "nbits": 4, "C": 32}, {"n": 1, "dim": 128, "nbits": 2, "C": 2, "empty": 0.0}]
    if where.name == "cpu":
        sizes += [small | {"nbits": 1, "dim": 24}, small | {"nbits": 8, "C": 1}]
    found = []
    for number, size in enumerate(sizes):
        path = make_index(Path(folder().name, f"{where.name}-{number}"), chunk_size=100, seed=3, **size)
        stored = read_index(path)
        tokens = reference.decompress(
            stored.codes(), stored.residuals(), stored.centroids, stored.bucket_weights, stored.nbits
        )
        for codec in ("residual", "dense", "pq"):
            pq = random_pq(stored) if codec == "pq" else None
            resident = load_resident(stored, torch.device(where.device), codec=codec, pq=pq)
            if pq is not None and pq.rotation is not None:
                tokens = reference.pq_decode(pq.codes, pq.codebook) @ pq.rotation.double()
            if where.name == "interpreter":  # kernels read fp16 here too
                resident = dataclasses.replace(
                    resident, centroids=resident.centroids.half(),
                    embeddings=None if resident.embeddings is None else resident.embeddings.half(),
                )  # fmt: skip
            found.append(Shelf(path, stored, SearchEngine(resident, impl=where.impls[0]), tokens))
    return found


def unit_query(draw: Draw, where: Where, shelf: Shelf) -> Tensor:
    """fp32 [LQ, DIM], near tokens of the index."""
    LQ = draw(st.sampled_from({"cpu": (1, 5, 32, 33, 130, 1024), "interpreter": (1, 5), "cuda": (1, 32)}[where.name]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randint(0, len(shelf.tokens), (LQ,), generator=g)
    DIM = shelf.stored.dim
    return normalize(shelf.tokens[rows].float() + 0.7 * torch.randn(LQ, DIM, generator=g) / DIM**0.5, dim=-1)


def held(draw: Draw, where: Where, Q: Tensor) -> Tensor:
    """A query as callers may hold it: other types, layouts, scales, with a gradient, all zero, on the device."""
    kind = draw(st.sampled_from(("plain", "plain", "plain", "half", "bfloat16", "double", "strided", "transposed",
                                 "gradient", "zeros", "scaled", "device")))  # fmt: skip
    if kind in ("half", "bfloat16", "double"):
        return Q.to(getattr(torch, {"half": "float16", "double": "float64"}.get(kind, kind)))
    if kind == "strided":
        return torch.stack([Q, Q], -1)[..., 0]
    if kind == "transposed":
        return Q.mT.contiguous().mT
    if kind == "gradient":
        return Q.requires_grad_()
    if kind == "zeros":
        return torch.zeros_like(Q)
    if kind == "scaled":
        return Q * draw(st.sampled_from((0.5, 3.0) if "triton" in where.impls or where.on_gpu else (1e-6, 3.0, 1e6)))
    return Q.to(where.device) if kind == "device" else Q


def no_query(draw: Draw, Q: Tensor) -> Any:
    """What is no query, given one: [LQ, DIM], or [B, LQ, DIM]."""
    value = draw(st.sampled_from((math.nan, math.inf, -math.inf, 3e38)))
    poisoned = Q.detach().float().cpu().clone(memory_format=torch.contiguous_format)  # on a GPU nobody looks
    poisoned.view(-1)[draw(st.integers(0, 2**20)) % Q.numel()] = value
    rows = Q.shape[:-2]
    ones = torch.ones
    return draw(st.sampled_from((
        poisoned, poisoned, poisoned, ones(*rows, 2, Q.size(-1) + 1), ones(*rows, 2, 0), ones(*rows, 0, Q.size(-1)),
        ones(*rows, 1025, Q.size(-1)), Q[None], Q.flatten(), Q.detach().to(torch.int32), Q.detach().to(torch.complex64),
        Q.tolist(), None, "query", 3, Q.detach().numpy() if Q.dtype == torch.float32 and not Q.is_cuda else None,
        Q.detach().to("meta"), Q.detach().to_sparse(),
    )))  # fmt: skip


def some_params(draw: Draw, where: Where, shelf: Shelf) -> SearchParams:
    few = where.name != "cpu"  # each is a graph of its own
    mode, k, ncells, threshold, ndocs, query_maxlen, prefilter = together(
        draw,
        where,
        MODES,
        (1, 7, None, shelf.N + 5) if few else (1, 3, 10, shelf.N, None, shelf.N + 5, 10**9),
        (1, 2) if few else (1, 2, 3, shelf.C, 128),
        (0.3,) if few else (-2.0, 0.0, 0.3, 0.5, 0.99),
        (32,) if few else (4, 5, 16, 64, 10**9),
        (None, 4) if few else (None, 1, 4, 32, 10**6),
        (None, 5) if few else (None, 1, 20, 10**9),
        most=9,
    )
    return SearchParams(k, ncells, threshold, ndocs, query_maxlen, mode, prefilter if mode == "exhaustive" else None)


def some_pids(draw: Draw, where: Where, N: int) -> tuple[Any, list[int] | None]:
    """Passages as callers may list them, and which these are; None where that is refused."""
    ids = draw(st.lists(st.integers(0, N - 1), max_size=12))
    if seldom(draw) or seldom(draw):
        outside = draw(st.sampled_from((N, -1, -N - 1, 2**31, 2**31 - 1, -(2**31), 2**40, -(2**63), 2**63, 2**70)))
        nonsense: list[Any] = [
            [*ids, 1.5], [*ids, "1"], [*ids, None], [[*ids, 0]], "pids", 3, 0.5, {"a": 1}, torch.ones(3),
            torch.ones(3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.int64), torch.tensor(0), object(),
            np.array(["0"]), np.array([0.5]), torch.zeros(3, dtype=torch.int32, device="meta"),
            torch.ones(3, dtype=torch.int32).to_sparse(),
        ]  # fmt: skip
        if draw(st.booleans()):
            return draw(st.sampled_from(nonsense)), None
        ids.insert(draw(st.integers(0, len(ids))), outside)
        fits = -(2**31) <= outside < 2**31
        return (
            torch.tensor(ids, dtype=torch.int32, device=where.device) if fits and draw(st.booleans()) else ids
        ), None
    kind = draw(st.sampled_from(("list", "tuple", "int32", "int64", "array", "device", "strided", "range")))
    if kind == "range":
        return range(N), list(range(N))
    value: Any = {
        "list": ids, "tuple": tuple(ids), "int32": torch.tensor(ids, dtype=torch.int32),
        "int64": torch.tensor(ids, dtype=torch.int64), "array": np.array(ids, dtype=np.int64),
        "device": torch.tensor(ids, dtype=torch.int32, device=where.device),
        "strided": torch.tensor([ids, ids], dtype=torch.int64).T[:, 0],
    }[kind]  # fmt: skip
    return value, ids


def some_allow(draw: Draw, where: Where, N: int) -> tuple[Any, Tensor | None]:
    """A mask or list of passages that may be found, and the mask; None where it is refused."""
    if draw(st.booleans()):
        value, ids = some_pids(draw, where, N)
        if isinstance(value, Tensor) and value.dtype == torch.bool and len(value) == N:
            ids = value.nonzero()[:, 0].tolist()
        mask = None
        if ids is not None:
            mask = torch.zeros(N, dtype=torch.bool)
            mask[ids] = True
        return value, mask
    if seldom(draw):
        return torch.ones(draw(st.sampled_from(((N + 1,), (N - 1,), (1, N), (0,)))), dtype=torch.bool), None
    step = draw(st.sampled_from((1, 2, 5, N + 1)))
    mask = (torch.arange(N) % step == 0) & (step <= N)
    return draw(st.sampled_from((mask, mask.to(where.device), mask.tolist()))), mask


def all_of_them(pids: Tensor) -> Tensor:
    return pids


def some_filter(draw: Draw, N: int) -> tuple[Callable[[Tensor], Any], Filter | None]:
    """A filter_fn, and what it keeps; None where what it returns is refused."""
    if seldom(draw):
        bad: list[Callable[[Tensor], Any]] = [
            Tensor.tolist, Tensor.long, Tensor.float, lambda pids: None, lambda pids: pids[None], lambda pids: 3,
            lambda pids: torch.cat([pids, pids.new_full((1,), N)]), lambda pids: pids.to("meta"),
            lambda pids: torch.cat([pids, pids.new_full((1,), -1)]), lambda pids: pids >= 0,
        ]  # fmt: skip
        return draw(st.sampled_from(bad)), None
    good: list[Filter] = [
        lambda pids: pids, lambda pids: pids.flip(0), lambda pids: pids[pids % 2 == 0], lambda pids: pids[:0],
        lambda pids: torch.cat([pids, pids[:3]]), lambda pids: pids[:1],
        lambda pids: torch.stack([pids, pids], 1)[:, 0],
    ]  # fmt: skip
    keep = draw(st.sampled_from(good))
    return keep, keep


def check_found(tally: Tally, shelf: Shelf, Q: Tensor, found: tuple[Any, Any], k: int | None, kept: Any) -> None:
    """Scores, order, and which passages: those of ``kept`` (None: not known), the best k of them."""
    pids, scores = (torch.as_tensor(x) for x in found)
    pids, scores = pids.long().cpu(), scores.double().cpu()
    assert pids.shape == scores.shape == (len(pids),)
    assert ((pids >= 0) & (pids < shelf.N)).all()
    exact, budget = shelf.exact(Q), shelf.budget(Q)
    tally.compare(scores, exact[pids], budget)
    for a, b in zip(range(len(pids) - 1), range(1, len(pids))):
        assert scores[a] > scores[b] or (scores[a] == scores[b] and pids[a] <= pids[b]), "order"
    if kept is None:
        assert k is None or len(pids) <= k
        return
    assert len(pids) == (len(kept) if k is None else min(k, len(kept))), "how many are found"
    rest = Counter(kept.tolist())
    rest.subtract(pids.tolist())
    assert min(rest.values(), default=0) >= 0, "found what was not to be found"
    left = [pid for pid, times in rest.items() if times]
    if left and len(pids):
        assert float(exact[left].max()) <= float(scores[-1]) + 2 * budget, "left a better one"


def search(draw: Draw, where: Where, tally: Tally) -> None:
    (shelf,) = together(draw, where, shelves(where), most=5)
    Q, p = held(draw, where, unit_query(draw, where, shelf)), some_params(draw, where, shelf)
    call = Call(shelf.engine.search, {"Q": Q, "params": p})
    start: Tensor | None = None
    allow: Tensor | None = None
    keep: Filter | None = all_of_them
    kinds = draw(st.sampled_from(((), (), ("pids",), ("allow",), ("filter_fn",), ("pids", "allow", "filter_fn"),
                                  ("allow", "filter_fn"))))  # fmt: skip
    if "pids" in kinds:
        call.arguments["pids"], ids = some_pids(draw, where, shelf.N)
        start = torch.tensor(ids or [], dtype=torch.int64)
        call.wrong = "pids" if ids is None else None
    if "allow" in kinds:
        call.arguments["allow"], allow = some_allow(draw, where, shelf.N)
        call.wrong = "allow" if allow is None else call.wrong
    if "filter_fn" in kinds:
        call.arguments["filter_fn"], keep = some_filter(draw, shelf.N)
        call.wrong = "filter_fn" if keep is None else call.wrong
    if p.ncells > shelf.C and "pids" not in kinds and p.mode != "exhaustive":
        call.wrong = "params"
    if where.on_gpu and call.wrong is None and seldom(draw):
        # nobody looks at a query on the GPU: whatever comes is of this index
        pids, scores = shelf.engine.search(torch.full_like(Q.detach(), math.nan, device=where.device), p)
        assert ((pids >= 0) & (pids < shelf.N)).all()
        assert len(pids) == len(scores)
    if seldom(draw):
        call.arguments["Q"], call.wrong = no_query(draw, Q), "Q"
    if call.refuses(tally):
        return

    def kept(pids: Tensor) -> Tensor:
        assert keep is not None
        chosen = pids if allow is None else pids[allow[pids]]
        return keep(chosen).long()

    found = call.result()
    assert found[0].dtype == torch.int32
    assert found[1].dtype == torch.float32
    check_found(tally, shelf, Q.detach(), found, p.k, shelf.survivors(Q.detach().float().cpu(), p, start, kept))


def score_pids(draw: Draw, where: Where, tally: Tally) -> None:
    (shelf,) = together(draw, where, shelves(where), most=5)
    pids, ids = some_pids(draw, where, shelf.N)
    own = ids is not None and len(ids) > 0 and draw(st.booleans())
    base = unit_query(draw, where, shelf)
    Q = torch.stack([base.roll(i, 0).roll(i, 1) for i in range(len(ids or ()))]) if own else base[None]
    Q = held(draw, where, Q)
    call = Call(shelf.engine.score_pids, {"Q": Q, "pids": pids}, None if ids is not None else "pids")
    if seldom(draw):
        call.arguments["Q"], call.wrong = no_query(draw, Q), "Q"
    elif own and len(ids) > 2 and seldom(draw):
        call.arguments["Q"], call.wrong = Q[:-1], "Q"
    if call.refuses(tally):
        return
    got = call.result()
    assert got.device.type == where.device
    Q = Q.detach().cpu()
    if own:
        rows = [reference.maxsim(q, shelf.tokens, shelf.stored.offsets, torch.tensor([pid])) for q, pid in zip(Q, ids)]
        want = torch.cat(rows)
    else:
        want = shelf.exact(Q[0])[torch.tensor(ids, dtype=torch.int64)]
    tally.compare(got, want, shelf.budget(Q[0]) * (1.01 if own else 1.0))


def search_batch(draw: Draw, where: Where, tally: Tally) -> None:
    """Equal to searching one by one, which ``search`` judges."""
    (shelf,) = together(draw, where, shelves(where), most=5)
    base, p = unit_query(draw, where, shelf), some_params(draw, where, shelf)
    B = draw(st.sampled_from((0, 1, 2) if where.name == "interpreter" else (0, 1, 2, 3)))
    Q = held(draw, where, torch.stack([base.roll(i, 0) for i in range(B)]) if B else base.new_zeros(0, *base.shape))
    generates = p.mode != "exhaustive"
    call = Call(shelf.engine.search_batch, {"Q": Q, "params": p})
    if B and p.ncells > shelf.C and generates:
        call.wrong = "params"
    if B and seldom(draw):
        call.arguments["Q"], call.wrong = no_query(draw, Q), "Q"
    if call.refuses(tally) or (p.ncells > shelf.C and generates):
        return
    got = call.result()
    assert len(got) == B
    for q, found in zip(Q, got):
        alone = shelf.engine.search(q, p)
        assert torch.equal(found[0], alone[0])
        assert torch.equal(found[1], alone[1])


def engine_candidates(draw: Draw, where: Where, tally: Tally) -> None:
    (shelf,) = together(draw, where, shelves(where), most=5)
    Q = held(draw, where, unit_query(draw, where, shelf))
    ncells = draw(st.sampled_from((1, min(2, shelf.C), shelf.C)))
    call = Call(shelf.engine.candidates, {"Q": Q, "ncells": ncells})
    if seldom(draw):
        call.arguments["ncells"] = draw(st.sampled_from((0, -1, shelf.C + 1, 129, 2**40, 1.5, "1", None, True)))
        call.wrong = "ncells"
    if seldom(draw):
        call.arguments["Q"], call.wrong = no_query(draw, Q), "Q"
    if call.refuses(tally):
        return
    got, want = call.result().cpu(), shelf.candidates(Q.detach().cpu(), ncells)
    assert torch.equal(got, got.unique())
    assert want is None or torch.equal(got.long(), want)


def params(draw: Draw, where: Where, tally: Tally) -> None:
    """Every field of the parameters is checked when they are made."""
    good = {"k": 3, "ncells": 1, "threshold": 0.4, "ndocs": 64, "query_maxlen": 32, "mode": "plaid", "prefilter": 7}
    call = Call(SearchParams, good)
    nonsense = (0, -1, 2.5, math.nan, math.inf, "3", True, [3], torch.tensor(3))
    wrong: dict[str, tuple[Any, ...]] = dict.fromkeys(("k", "ncells", "ndocs", "query_maxlen", "prefilter"), nonsense)
    wrong |= {
        "threshold": (math.nan, math.inf, -math.inf, "0.4", None, [0.4], 1j),
        "mode": ("", "fast", None, 3, ["plaid"]),
    }
    for name in draw(st.lists(st.sampled_from(sorted(wrong)), max_size=2, unique=True)):
        call.arguments[name], call.wrong = draw(st.sampled_from(wrong[name])), name
    if not call.refuses(tally):
        call.result()


@functools.cache
def rankers(where: Where) -> list[tuple[Shelf, Any]]:
    from plaid_tilemaxsim import TileMaxSimScorer

    stored = [shelf for shelf in shelves(where) if shelf.engine.index.codec == "residual"]
    return [(shelf, TileMaxSimScorer(str(shelf.path), where.on_gpu)) for shelf in stored]


FIELDS: dict[str, tuple[Any, ...]] = {
    "ncells": (0, -1, 2.5, "2", [1]),
    "centroid_score_threshold": (math.nan, math.inf, "high", [0.4]),
    "ndocs": (-1, 2.5, "many"),
    "query_maxlen": (0, -1, "long", 1.5),
    "scorer_options": ({"mode": "fast"}, {"speed": 1}, "plaid", {"prefilter": 3, "mode": "plaid"}, {"impl": "cuda"}),
    "scorer": ("stock", 3, ""),
}


def config_of(draw: Draw, where: Where) -> SimpleNamespace:
    few = where.name != "cpu"
    mode, codec, ncells, threshold, ndocs, query_maxlen = together(
        draw,
        where,
        MODES,
        ("residual", "dense"),
        (1,) if few else (None, 1, 2),
        (0.3,) if few else (None, 0.2, 0.5),
        (32,) if few else (None, 0, 3, 4, 32, 10**9),
        (32,) if few else (32, 4, 1, 10**6),
    )
    return SimpleNamespace(
        scorer="tilemaxsim",
        scorer_options={"mode": mode, "codec": codec},
        ncells=ncells,
        centroid_score_threshold=threshold,
        ndocs=ndocs,
        query_maxlen=query_maxlen,
        interaction="colbert",
        total_visible_gpus=int(where.on_gpu),
    )


def params_of(config: SimpleNamespace, k: int | None) -> SearchParams:
    """What a config means for k results."""
    named = (config.ncells, config.centroid_score_threshold, config.ndocs)
    ncells, threshold, ndocs = (d if v is None else v for v, d in zip(named, default_params(k or 1)))
    return SearchParams(k, ncells, threshold, max(ndocs, 4), config.query_maxlen, config.scorer_options["mode"])


def spoil_config(draw: Draw, call: Call, names: Iterable[str]) -> None:
    """Spoils one field of the config."""
    config = call.arguments["config"] = SimpleNamespace(**vars(call.arguments["config"]))
    name = draw(st.sampled_from(sorted(names)))
    setattr(config, name, draw(st.sampled_from(FIELDS[name])))
    call.wrong = "config"


def scorer_rank(draw: Draw, where: Where, tally: Tally) -> None:
    shelf, ranker = draw(st.sampled_from(rankers(where)))
    config = config_of(draw, where)
    Q = held(draw, where, unit_query(draw, where, shelf)[None])
    k = draw(st.sampled_from((0, 1, 3, None, shelf.N + 5, np.int64(3), True)))
    call = Call(ranker.rank, {"config": config, "Q": Q, "k": k})
    start: Tensor | None = None
    keep: Filter | None = all_of_them
    k = k if k is None else int(k)
    if k != 0 and draw(st.booleans()):
        call.arguments["pids"], ids = some_pids(draw, where, shelf.N)
        start = torch.tensor(ids or [], dtype=torch.int64)
        call.wrong = "pids" if ids is None else None
    elif k != 0 and draw(st.booleans()):
        call.arguments["filter_fn"], keep = some_filter(draw, shelf.N)
        call.wrong = "filter_fn" if keep is None else None
    if k != 0 and start is None:
        mode, few = config.scorer_options["mode"], params_of(config, k).ncells > shelf.C
        needed = {"plaid": TUNED, "rerank": TUNED[:1], "exhaustive": ()}[mode]
        unset = any(getattr(config, name) is None for name in needed)
        if (k is None and unset) or (mode != "exhaustive" and few):
            call.wrong = "config"
    if k != 0 and draw(st.integers(0, 5)) == 5:
        spoil_config(draw, call, FIELDS)
    if seldom(draw):
        call.arguments["k"], call.wrong = draw(st.sampled_from((-1, 2.5, "3", [3]))), "k"
    if k != 0 and seldom(draw):
        call.arguments["Q"], call.wrong = no_query(draw, Q), "Q"
    if call.refuses(tally):
        return
    assert keep is not None
    kept = keep
    found = call.result()
    assert all(type(pid) is int for pid in found[0])
    assert all(type(score) is float for score in found[1])
    if k == 0:
        assert found == ([], [])
        return
    p = params_of(config, k)
    Q = Q.detach()[0].cpu()
    check_found(tally, shelf, Q, found, p.k, shelf.survivors(Q.float(), p, start, lambda pids: kept(pids).long()))


def scorer_score_pids(draw: Draw, where: Where, tally: Tally) -> None:
    """Scores of given passages; with centroid scores they are pruned first, as candidates are."""
    shelf, ranker = draw(st.sampled_from(rankers(where)))
    config = config_of(draw, where)
    config.ncells = 1
    Q = held(draw, where, unit_query(draw, where, shelf)[None])
    pids, ids = some_pids(draw, where, shelf.N)
    prunes = draw(st.booleans()) and None not in vars(config).values()
    call = Call(ranker.score_pids, {"config": config, "Q": Q, "pids": pids}, None if ids is not None else "pids")
    if prunes:
        call.arguments["centroid_scores"] = torch.zeros(shelf.C, Q.size(1), device=where.device)
    if seldom(draw):
        call.arguments["Q"], call.wrong = no_query(draw, Q), "Q"
    if call.refuses(tally):
        return
    scores, found = call.result()
    assert scores.device.type == found.device.type == where.device
    Q = Q.detach()[0].cpu()
    if not prunes or config.scorer_options["mode"] != "plaid":
        assert found.tolist() == ids
        tally.compare(scores, shelf.exact(Q)[ids], shelf.budget(Q))
        return
    p = dataclasses.replace(params_of(config, None), k=None)
    listed = torch.tensor(ids, dtype=torch.int64)
    check_found(tally, shelf, Q, (found, scores), None, shelf.survivors(Q.float(), p, None, lambda pids: listed))


def scorer_search_batch(draw: Draw, where: Where, tally: Tally) -> None:
    shelf, ranker = draw(st.sampled_from(rankers(where)))
    config, base = config_of(draw, where), unit_query(draw, where, shelf)
    B = draw(st.sampled_from((1, 2, 3)))
    Q = held(draw, where, torch.stack([base.roll(i, 0) for i in range(B)]))
    k = draw(st.sampled_from((1, 3, shelf.N + 5)))
    call = Call(ranker.search_batch, {"config": config, "Q": Q, "k": k})
    if config.scorer_options["mode"] != "exhaustive" and params_of(config, k).ncells > shelf.C:
        call.wrong = "config"
    if draw(st.integers(0, 5)) == 5:
        spoil_config(draw, call, FIELDS.keys() - {"scorer"})
    if seldom(draw):
        call.arguments["k"], call.wrong = draw(st.sampled_from((-1, 2.5, "3", [3], None))), "k"
    if seldom(draw):
        call.arguments["Q"], call.wrong = no_query(draw, Q), "Q"
    if call.refuses(tally):
        return
    got = call.result()
    assert got == [ranker.rank(config, q[None], k=k) for q in Q]


def scorer_retrieve(draw: Draw, where: Where, tally: Tally) -> None:
    shelf, ranker = draw(st.sampled_from(rankers(where)))
    config, Q = config_of(draw, where), held(draw, where, unit_query(draw, where, shelf)[None])
    call = Call(ranker.retrieve, {"config": config, "Q": Q})
    if config.ncells is None or config.ncells > shelf.C:
        call.wrong = "config"
    if seldom(draw):
        config.ncells, call.wrong = draw(st.sampled_from(FIELDS["ncells"])), "config"
    if seldom(draw):
        bad = call.arguments["Q"] = no_query(draw, Q[:, : config.query_maxlen])
        if isinstance(bad, Tensor) and bad.dim() == 3 and bad.size(1) > config.query_maxlen:
            return  # what is too much is cut off
        call.wrong = "Q"
    if call.refuses(tally):
        return
    pids, scores = call.result()
    Q = Q.detach()[0, : config.query_maxlen].float().cpu()
    want = shelf.candidates(Q, config.ncells)
    assert torch.equal(pids, pids.unique())
    assert want is None or torch.equal(pids.cpu().long(), want)
    tally.compare(scores, shelf.stored.centroids.double() @ Q.double().T, shelf.budget(Q))


OPERATIONS: dict[str, Operation] = calls.OPERATIONS | {
    "engine.search": search,
    "engine.search_batch": search_batch,
    "engine.score_pids": score_pids,
    "engine.candidates": engine_candidates,
    "SearchParams": params,
    "scorer.rank": scorer_rank,
    "scorer.score_pids": scorer_score_pids,
    "scorer.search_batch": scorer_search_batch,
    "scorer.retrieve": scorer_retrieve,
}
# What runs kernels; without a GPU the scorer searches by the torch path.
KERNELS = [name for name in OPERATIONS if not name.startswith(("Search", "scorer"))]
