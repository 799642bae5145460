"""Queries to embeddings as colbert-ai encodes them, with one launch where it has hundreds.

``Searcher.encode`` with ``scorer_options={"encoder": "fast"}``. On a GPU the checkpoint's model is recorded as a CUDA
graph for each query length and power of two of queries, in memory that all of these graphs share; others take the next
power and leave its last rows to queries of before. Embeddings stay there, where the search takes them from. The
arithmetic is stock's, fp16 autocast, from a copy of the model whose linear layers hold fp16 weights (stock casts them
for every query) and share all other weights with the checkpoint. On a CPU, where there is nothing to record, the
model runs as in stock. Knows colbert-ai's Checkpoint and QueryTokenizer, no index.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plaid_tilemaxsim import faults
from plaid_tilemaxsim.graphs import Turns, recording

# Queries that stock gives the model at once.
MAX_BATCH = 128
MAX_GRAPHS = 16
# Tokens that ``full_length_search`` goes to.
MAX_LENGTH = 500


@dataclass
class _Recording:
    inputs: Tensor  # int64 [2, B, LQ] in pinned memory: ids, attention mask
    output: Tensor  # fp32 [B, LQ, DIM]
    graph: torch.cuda.CUDAGraph
    done: torch.cuda.Event  # of the last replay: the inputs have been read


class QueryEncoder:
    """The queries of one colbert-ai ``Checkpoint``, on the device of its model.

    Safe to call from several threads. Weights are copied at the first query; after changing those of the checkpoint,
    ``close``. Raises ValueError for a tokenizer without a fast (Rust) backend.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.device: torch.device = checkpoint.device
        tokenizer = checkpoint.query_tokenizer.tok
        if not tokenizer.is_fast:
            raise ValueError(
                f'encoder="fast": expected a checkpoint with a fast tokenizer, got {type(tokenizer).__name__}; '
                'use encoder="stock"'
            )
        # A copy, since every call of a tokenizer sets how its backend cuts and pads.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._length: int | None = None  # that the backend cuts and pads to
        self._turns = Turns(self.device)
        self._model: Any = None
        self._recordings: OrderedDict[tuple[int, int], _Recording] = OrderedDict()
        self._pool: Any = None

    def encode(self, texts: Sequence[str], query_maxlen: int, *, full_length: bool = False) -> Tensor:
        """fp32 [B, LQ, DIM], unit vectors; on the model's device, on the CPU, as in stock, if more than MAX_BATCH.

        LQ is query_maxlen: longer texts are cut, shorter ones filled up with mask tokens. full_length, for one text:
        LQ grows with it to at most MAX_LENGTH; such lengths are run without a recording.
        Raises ValueError for anything but strings, and for a model that cannot be recorded.
        """
        texts = list(texts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"queries: expected one string or more, got {[type(text).__name__ for text in texts][:5]}")
        if full_length and len(texts) != 1:
            raise ValueError(f"queries: expected one with full_length_search, got {len(texts)}")
        with self._turns.take(), torch.inference_mode(False), torch.no_grad():
            length = self._full_length(texts[0], query_maxlen) if full_length else query_maxlen
            batches = [texts[i : i + MAX_BATCH] for i in range(0, len(texts), MAX_BATCH)]
            encoded = [self._encode(self._tokens(batch, length), recorded=length == query_maxlen) for batch in batches]
            return encoded[0] if len(encoded) == 1 else torch.cat(encoded).cpu()

    def close(self) -> None:
        """Frees the copy and the graphs; the next query makes them again."""
        with self._turns.take():
            if self._recordings:
                torch.cuda.synchronize(self.device)
            self._recordings.clear()
            self._model = self._pool = None

    def _full_length(self, text: str, query_maxlen: int) -> int:
        self._length = None
        tokens = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return min(MAX_LENGTH, max(query_maxlen, tokens))

    def _tokens(self, texts: list[str], length: int) -> Tensor:
        """int64 [2, B, length] on the CPU: the ids and the attention mask of QueryTokenizer.tensorize."""
        stock = self.checkpoint.query_tokenizer
        if length != self._length:
            # The call leaves its settings in the backend, which alone is asked from then on.
            self._tokenizer(texts[:1], padding="max_length", truncation=True, max_length=length - 1)
            self._length = length
        encoded = self._tokenizer.backend_tokenizer.encode_batch(texts)
        # torch.tensor is slow over nested lists.
        lists = [[e.ids for e in encoded], [e.attention_mask for e in encoded]]
        tokens = torch.from_numpy(np.array(lists, dtype=np.int64))
        marker = torch.tensor([stock.Q_marker_token_id, 1])[:, None, None].expand(2, len(texts), 1)
        tokens = torch.cat((tokens[:, :, :1], marker, tokens[:, :, 1:]), dim=2)
        ids, mask = tokens
        ids.masked_fill_(ids == stock.pad_token_id, stock.mask_token_id)
        if stock.config.attend_to_mask_tokens:
            mask.masked_fill_(ids == stock.mask_token_id, 1)
        return tokens

    def _encode(self, tokens: Tensor, *, recorded: bool) -> Tensor:
        """fp32 [B, LQ, DIM] of tokens [2, B, LQ]."""
        if self._model is None:
            self._model = _half_precision_copy(self.checkpoint.model) if self._on_gpu else self.checkpoint.model
        if not self._on_gpu or not recorded:
            return self._forward(tokens.to(self.device))
        queries = tokens.size(1)
        rec = self._recording(1 << (queries - 1).bit_length(), tokens.size(2))
        rec.done.synchronize()
        rec.inputs[:, :queries] = tokens
        rec.graph.replay()
        rec.done.record()
        return rec.output[:queries].clone()

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _forward(self, tokens: Tensor) -> Tensor:
        """What ColBERT.query computes, without its waits."""
        ids, mask = tokens
        with torch.autocast("cuda", torch.float16, enabled=self._on_gpu, cache_enabled=False):
            hidden = self._model.LM(ids, attention_mask=mask)[0]
            kept = (ids != self.checkpoint.pad_token).unsqueeze(2).float()
            return torch.nn.functional.normalize(self._model.linear(hidden) * kept, p=2, dim=2)

    def _recording(self, queries: int, length: int) -> _Recording:
        key = queries, length
        rec = self._recordings.get(key)
        if rec is None:
            rec = self._recordings[key] = self._record(queries, length)
        self._recordings.move_to_end(key)
        while len(self._recordings) > MAX_GRAPHS:
            torch.cuda.synchronize(self.device)
            self._recordings.popitem(last=False)
        return rec

    def _record(self, queries: int, length: int) -> _Recording:
        inputs = torch.ones(2, queries, length, dtype=torch.int64, pin_memory=True)
        inputs[1, :, -1] = 0  # where all tokens take part a model may go another way than with a mask
        self._forward(inputs.to(self.device))
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with recording(self.device, self._pool) as graph:
                output = self._forward(inputs.to(self.device, non_blocking=True))
        except BaseException as error:
            self._pool = None  # nothing is recorded into the other one any more
            if not isinstance(error, RuntimeError) or faults.memory_shortage(error) is not None:
                raise
            raise ValueError(
                f'encoder="fast": expected a model that a CUDA graph can record, got {type(self._model.LM).__name__} '
                f'({error}); use encoder="stock"'
            ) from error
        return _Recording(inputs, output, graph, torch.cuda.Event())


def _half_precision_copy(model: torch.nn.Module) -> Any:
    """A copy with the linear layers in fp16, as autocast casts them; all other weights are the model's own."""
    own: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for parameter in module.parameters(recurse=False):
                own[id(parameter)] = torch.nn.Parameter(parameter.detach().half(), requires_grad=False)
    return copy.deepcopy(model, own)
