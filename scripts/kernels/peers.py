"""Other implementations of MaxSim, called as their documentation says, and what a PyTorch user writes by hand.

Each peer is prepared once (what can be made ahead of a query is) and then timed. A peer that is not installed or
fails is a row with its reason. Sources read: flash-maxsim 0.3.0, late-interaction-kernels 0.4.5 (both Apache-2.0);
nothing of theirs is copied. Where both 8-bit and 16-bit entry points exist, rows of the former say bytes=1: they
read half as much and are no comparison for kernels that keep fp16.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plaid_tilemaxsim.ops import reference

from . import paper
from .bench import Bench, Shape
from .check import Check
from .data import LONGEST, Data

INSTALL = "pip install flash-maxsim==0.3.0 late-interaction-kernels==0.4.5"
Run = Callable[[], Tensor]
PAPER = "paper V2-MQ"

# Entry points that score another problem, and why they are not timed here.
NOT_RUN = {
    "flash_maxsim.flash_maxsim_pairs": "a query of its own for every passage",
    "flash_maxsim.flash_maxsim_pairs_dense": "a query of its own for every passage",
    "flash_maxsim.flash_maxsim_varlen": "a query of its own for every passage",
    "flash_maxsim.flash_maxsim_topk": "two stages, not every passage's score",
    "flash_maxsim.*_train": "training",
    "late_interaction_kernels.maxsim_pairs": "a query of its own for every passage",
    "late_interaction_kernels.score_pairs": "a list of pairs, which maxsim_padded makes",
}


def module(name: str) -> Any:
    """A peer's module; ImportError says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}; {INSTALL}") from error


def loop(Q: Tensor, D: Tensor, offsets: list[int]) -> Tensor:
    """MaxSim as it is first written: one passage at a time."""
    spans = itertools.pairwise(offsets)
    return torch.stack([(Q @ D[a:b].T).amax(1).sum(dtype=torch.float32) for a, b in spans])


def eager(Q: Tensor, D: Tensor) -> Tensor:
    return (D @ Q.T).amax(1).sum(1, dtype=torch.float32)


def eager_chunked(Q: Tensor, D: Tensor, chunk: int) -> Tensor:
    return torch.cat([eager(Q, part) for part in D.split(chunk)])


@dataclass(frozen=True)
class Padded:
    """Passages of one length: ``Q [LQ, DIM]``, ``D [B, ND, DIM]`` of one dtype."""

    Q: Tensor
    D: Tensor

    def first(self, n: int) -> Padded:
        return Padded(self.Q, self.D[:n])

    @property
    def lengths(self) -> Tensor:
        B, ND, _ = self.D.shape
        return torch.full((B,), ND, dtype=torch.int32, device=self.D.device)


@dataclass(frozen=True)
class Packed:
    """Ragged passages: ``D [T, DIM]``, ``offsets`` int64 ``[N + 1]``."""

    Q: Tensor
    D: Tensor
    offsets: Tensor

    @property
    def longest(self) -> int:
        return int(self.offsets.diff().max())


# ---- one function a peer: what is prepared, and the run


def _loop(x: Padded) -> Run:
    B, ND, DIM = x.D.shape
    offsets = [ND * i for i in range(B + 1)]
    return lambda: loop(x.Q, x.D.view(-1, DIM), offsets)


def _eager(x: Padded) -> Run:
    return lambda: eager_chunked(x.Q, x.D, 8192)


def _compile(x: Padded) -> Run:
    torch._dynamo.reset()
    compiled = torch.compile(eager, dynamic=False)
    return lambda: compiled(x.Q, x.D)


def _flash(name: str, *, lengths: bool = True, **options: Any) -> Callable[[Padded], Run]:
    def prepare(x: Padded) -> Run:
        function = getattr(module("flash_maxsim"), name)
        arguments = (x.Q, x.D, x.lengths) if lengths else (x.Q, x.D)
        return lambda: function(*arguments, **options)

    return prepare


def _flash_heuristic(x: Padded) -> Run:
    function, lengths = module("flash_maxsim.flash_maxsim_exp").flash_maxsim_heuristic, x.lengths
    return lambda: function(x.Q, x.D, lengths)


def _flash_batched(x: Padded) -> Run:
    function, lengths = module("flash_maxsim").flash_maxsim_batched, x.lengths
    return lambda: function(x.Q[None], x.D, lengths)[0]


def _flash_rerank_padded(x: Padded) -> Run:
    function = module("flash_maxsim").flash_maxsim_rerank_padded
    return lambda: function(x.Q[None], x.D[None])[0]


def _flash_int8(x: Padded) -> Run:
    package = module("flash_maxsim")
    quantised = [torch.cat(parts) for parts in zip(*map(package.quantize_int8, x.D.split(4096)))]
    lengths = x.lengths
    return lambda: package.flash_maxsim_int8(x.Q, *quantised, lengths)


def _flash_int8_symmetric(x: Padded) -> Run:
    package = module("flash_maxsim")
    quantised = [torch.cat(parts) for parts in zip(*map(package.quantize_int8_symmetric, x.D.split(4096)))]
    lengths = x.lengths
    return lambda: package.flash_maxsim_int8_symmetric(x.Q, *quantised, lengths)


def _flash_int8x8(x: Padded) -> Run:
    package = module("flash_maxsim")
    quantised = [torch.cat(parts) for parts in zip(*map(package.quantize_int8_symmetric, x.D.split(4096)))]
    query, lengths = package.quantize_query_int8(x.Q), x.lengths
    return lambda: package.flash_maxsim_int8x8(x.Q, *quantised, *query, doc_lengths=lengths)


def _lik(x: Padded) -> Run:
    function = module("late_interaction_kernels").maxsim
    return lambda: function(x.Q, x.D)


def _lik_padded(x: Padded) -> Run:
    function, lengths = module("late_interaction_kernels").maxsim_padded, x.lengths[None]
    query_lengths = torch.full((1,), len(x.Q), dtype=torch.int32, device=x.Q.device)
    return lambda: function(x.Q[None], x.D[None], query_lengths, lengths)[0]


def _lik_fp8(x: Padded) -> Run:
    fp8 = module("late_interaction_kernels.fp8")
    query, query_scale = fp8.quantize_fp8_per_token(x.Q)
    parts = [fp8.quantize_fp8_per_token(part) for part in x.D.split(4096)]
    D = torch.cat([part.view(torch.uint8) for part, _ in parts]).view(query.dtype)
    scale = torch.cat([part for _, part in parts])
    return lambda: fp8.maxsim_inference_fp8(query[None], D, scale_Q=query_scale[None], scale_D=scale)[0]


def _packed_loop(x: Packed) -> Run:
    offsets = x.offsets.tolist()
    return lambda: loop(x.Q, x.D, offsets)


def _flash_packed(x: Packed) -> Run:
    function, offsets, longest = module("flash_maxsim").flash_maxsim_packed, x.offsets.int(), x.longest
    return lambda: function(x.Q, x.D, offsets, longest)


def _flash_rerank(x: Packed) -> Run:
    function, offsets, longest = module("flash_maxsim").flash_maxsim_rerank, x.offsets.int(), x.longest
    return lambda: function(x.Q, x.D, offsets, longest)


def _lik_varlen(x: Packed) -> Run:
    function, offsets, longest = module("late_interaction_kernels").maxsim_varlen, x.offsets.int(), x.longest
    query_offsets = torch.tensor([0, len(x.Q)], dtype=torch.int32, device=x.Q.device)
    return lambda: function(x.Q, x.D, query_offsets, offsets, len(x.Q), longest)[0]


@dataclass(frozen=True)
class Peer:
    name: str
    prepare: Callable[[Any], Run]
    everywhere: bool = False  # in every shape; the others in the main shape only
    bytes: int = 2  # a stored value, where inputs have 2
    limit: int | None = None  # passages


PADDED_PEERS = (
    Peer("python loop", _loop, limit=1000),
    Peer("torch eager, chunked", _eager, everywhere=True),
    Peer("torch.compile", _compile),
    Peer("flash_maxsim.flash_maxsim", _flash("flash_maxsim"), everywhere=True),
    Peer("flash_maxsim.flash_maxsim_qreuse", _flash("flash_maxsim_qreuse"), everywhere=True),
    Peer("flash_maxsim.flash_maxsim_persistent", _flash("flash_maxsim_persistent")),
    Peer("flash_maxsim.flash_maxsim_splitk", _flash("flash_maxsim_splitk")),
    Peer("flash_maxsim.flash_maxsim_heuristic", _flash_heuristic),
    Peer("flash_maxsim.flash_maxsim_batched", _flash_batched),
    Peer("flash_maxsim.flash_maxsim_rerank_padded", _flash_rerank_padded),
    Peer("flash_maxsim.flash_maxsim_int8", _flash_int8, bytes=1),
    Peer("flash_maxsim.flash_maxsim_int8_symmetric", _flash_int8_symmetric, bytes=1),
    Peer("flash_maxsim.flash_maxsim_int8x8", _flash_int8x8, bytes=1),
    Peer("late_interaction_kernels.maxsim", _lik, everywhere=True),
    Peer("late_interaction_kernels.maxsim_padded", _lik_padded),
    Peer("late_interaction_kernels.maxsim_inference_fp8", _lik_fp8, bytes=1),
)
PACKED_PEERS = (
    Peer("python loop", _packed_loop, limit=1000),
    Peer("flash_maxsim.flash_maxsim_packed", _flash_packed),
    Peer("flash_maxsim.flash_maxsim_rerank", _flash_rerank),
    Peer("late_interaction_kernels.maxsim_varlen", _lik_varlen),
)


def run_padded(bench: Bench, shape: Shape, x: Padded, check: Check, everything: bool) -> None:
    for peer in PADDED_PEERS:
        if everything or peer.everywhere:
            part = x if peer.limit is None else x.first(peer.limit)
            bench.peer(shape, peer.name, _bound(peer.prepare, part), check, passages=peer.limit, bytes=peer.bytes)


def run_packed(bench: Bench, shape: Shape, x: Packed, check: Check) -> None:
    for peer in PACKED_PEERS:
        part = x
        if peer.limit is not None:
            part = Packed(x.Q, x.D, x.offsets[: peer.limit + 1])
        bench.peer(shape, peer.name, _bound(peer.prepare, part), check, passages=peer.limit, bytes=peer.bytes)


def run_paper(bench: Bench, shape: Shape, x: Padded, check: Check, choices: tuple[paper.PaperBlocks, ...]) -> None:
    """The paper's algorithm at each launch choice; figures take the fastest."""

    def prepare(blocks: paper.PaperBlocks) -> Run:
        return lambda: paper.paper_maxsim(x.Q, x.D, blocks)

    for blocks in choices:
        name = f"{PAPER}, {blocks.BLOCK_Q} x {blocks.BLOCK_N}, {blocks.num_warps} warps"
        bench.peer(shape, name, _bound(prepare, blocks), check, bytes=2)


def _bound(prepare: Callable[[Any], Run], x: Any) -> Callable[[], Run]:
    return lambda: prepare(x)


# ---- compressed passages


def little_endian_residuals(residuals: Tensor, nbits: int) -> Tensor:
    """ColBERT's residual bytes in late-interaction-kernels' order: slot s of a byte holds bits [s nbits, (s+1) nbits).

    ColBERT stores each bucket's bits least significant first from the byte's top.
    """
    every = torch.arange(256, dtype=torch.uint8, device=residuals.device)[:, None]
    numbers = torch.arange(2**nbits, dtype=torch.float32, device=residuals.device)
    buckets = reference.decode_residuals(every, nbits, numbers, torch.float32).long()  # [256, 8 / nbits]
    table = (buckets << (nbits * torch.arange(8 // nbits, device=residuals.device))).sum(1).to(torch.uint8)
    return torch.cat([table[part.int()] for part in residuals.split(1 << 22)])


def lik_residual_varlen(data: Data, passages: int) -> Run:
    """Passages up to 2**31 bytes of residuals: beyond that its 32-bit offsets leave its arrays."""
    function = module("late_interaction_kernels.plaid").maxsim_residual_varlen
    offsets = data.offsets[: passages + 1]
    T = int(offsets[-1])
    residuals = little_endian_residuals(data.residuals[:T], data.nbits)
    codes, cu = data.codes[:T], offsets.int()
    Q = data.Q.half()
    return lambda: function(Q, codes, residuals, cu, data.centroids, data.weights, data.nbits, max_seqlen_d=LONGEST)


def padded_codes(data: Data, passages: int) -> tuple[Tensor, Tensor]:
    """int32 ``[n, LONGEST]`` codes, zero beyond a passage's end, and int64 lengths."""
    offsets = data.offsets[: passages + 1]
    lengths = offsets.diff()
    place = torch.arange(LONGEST, device=offsets.device)
    at = (offsets[:-1, None] + place).clamp_(max=data.codes.numel() - 1)
    return torch.where(place < lengths[:, None], data.codes[at], 0), lengths


def lik_residual_padded(data: Data, passages: int) -> Run:
    function = module("late_interaction_kernels.plaid").maxsim_residual
    codes, lengths = padded_codes(data, passages)
    offsets = data.offsets[: passages + 1]
    place = torch.arange(codes.size(1), device=codes.device)
    at = (offsets[:-1, None] + place).clamp_(max=data.codes.numel() - 1)
    residuals = little_endian_residuals(data.residuals[at.flatten()], data.nbits).view(*codes.shape, -1)
    Q = data.Q.half()
    return lambda: function(Q, codes, residuals, lengths, data.centroids, data.weights, data.nbits)


def lik_centroid(data: Data, passages: int) -> Run:
    """Its table is fp32 [C, LQ], its codes are padded to the longest passage; the table is made outside."""
    function = module("late_interaction_kernels.plaid").plaid_approx_score
    codes, lengths = padded_codes(data, passages)
    scores = data.centroids.float() @ data.Q.T
    return lambda: function(scores, codes, lengths)


def torch_residual(data: Data, passages: int) -> Run:
    """Decompress, normalise, matmul, scatter-max: what PyTorch alone does with a compressed passage."""
    offsets = data.offsets[: passages + 1]
    T = int(offsets[-1])
    lengths = offsets.diff()
    owner = torch.arange(passages, device=offsets.device).repeat_interleave(lengths)
    every = torch.arange(256, dtype=torch.uint8, device=offsets.device)[:, None]
    table = reference.decode_residuals(every, data.nbits, data.weights, torch.float32).half()
    codes, residuals, Q = data.codes[:T], data.residuals[:T], data.Q.half()

    def run() -> Tensor:
        e = data.centroids[codes.long()] + table[residuals.long()].flatten(1)
        s = torch.nn.functional.normalize(e, dim=-1) @ Q.T
        best = s.new_full((passages, len(Q)), float("-inf"))
        best.scatter_reduce_(0, owner[:, None].expand_as(s), s, "amax")
        return best.sum(1, dtype=torch.float32)

    return run


def torch_centroid(data: Data, passages: int) -> Run:
    offsets = data.offsets[: passages + 1]
    T = int(offsets[-1])
    owner = torch.arange(passages, device=offsets.device).repeat_interleave(offsets.diff())
    scores = data.centroids @ data.Q.half().T
    codes = data.codes[:T].long()

    def run() -> Tensor:
        s = scores[codes]
        best = s.new_full((passages, s.size(1)), float("-inf"))
        best.scatter_reduce_(0, owner[:, None].expand_as(s), s, "amax")
        return best.sum(1, dtype=torch.float32)

    return run


def torch_pq(Q: Tensor, codes: Tensor, codebook: Tensor, ND: int) -> Iterator[tuple[str, Run]]:
    """Decode and multiply; and the table form: similarities of every code with the query, gathered and added."""
    M = codes.size(1)
    subspace = torch.arange(M, device=codes.device)
    half = Q.half()

    def decoded() -> Tensor:
        parts = codes.split((1 << 18) // ND * ND)
        return torch.cat([eager(half, codebook[subspace, c.int()].reshape(-1, ND, Q.size(1))) for c in parts])

    def gathered() -> Tensor:
        table = torch.einsum("qmd,mcd->mcq", half.view(len(Q), M, -1), codebook)
        parts = codes.split((1 << 16) // ND * ND)
        sums = [table[subspace, c.int()].sum(1).view(-1, ND, len(Q)) for c in parts]
        return torch.cat([s.amax(1).sum(1, dtype=torch.float32) for s in sums])

    yield "torch eager, decoded", decoded
    yield "torch eager, table", gathered
