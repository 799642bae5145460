"""Encoder "fast": stock's tokens exactly, stock's embeddings within fp16, from any thread, and nothing left behind."""

from __future__ import annotations

import gc
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plaid_tilemaxsim import compat
from plaid_tilemaxsim.encoder import MAX_BATCH, QueryEncoder, _half_precision_copy
from scripts.bench_text import embedding_budget
from tests.colbert_fixtures import checkpoint, collection, enabled, index  # noqa: F401
from tests.conftest import HAS_CUDA
from tests.synthetic import WORDS

compat.allow_missing_git()

pytestmark = pytest.mark.usefixtures("enabled")

TEXTS = [
    " ".join(WORDS[:5]),
    "",
    " ".join(WORDS[7:60]),  # longer than any query
    f"{WORDS[3]} [MASK] {WORDS[4].upper()}, [PAD] (né)",
    "nothing known here \n 你好",
    " ".join(WORDS[100:109]),
]


def load(folder: Path, **config: Any) -> Any:
    """colbert-ai's Checkpoint, where its config says CUDA if there is one."""
    from colbert.infra import ColBERTConfig
    from colbert.modeling.checkpoint import Checkpoint

    return Checkpoint(str(folder), ColBERTConfig(checkpoint=str(folder), **config), verbose=1)


@pytest.fixture
def model(checkpoint: Path, device: str) -> Any:  # noqa: F811
    return load(checkpoint)


def stock(model: Any, texts: list[str], maxlen: int = 32, **options: Any) -> torch.Tensor:
    """Searcher.encode."""
    model.query_tokenizer.query_maxlen = maxlen
    Q: torch.Tensor = model.queryFromText(texts, bsize=128 if len(texts) > 128 else None, to_cpu=True, **options)
    return Q


def budget(model: Any) -> float:
    """Most distance of two encodings of one token; on a CPU they are the same computation in fp32."""
    return embedding_budget(model.bert.config.num_hidden_layers) if HAS_CUDA else 1e-5


def assert_same(got: torch.Tensor, want: torch.Tensor, model: Any) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype == torch.float32
    assert got.device == want.device
    distance = (got - want).norm(dim=2).amax(1)
    assert distance.max() <= budget(model)
    if len(got) > 1:
        others = (got.roll(1, 0) - want).norm(dim=2).amax(1)
        assert others.min() > budget(model), "the budget tells no queries apart"


class TestTokens:
    @pytest.mark.parametrize("attend", [False, True])
    @pytest.mark.parametrize("maxlen", [8, 32, 48])
    def test_equal_stock(self, checkpoint, device, attend, maxlen):  # noqa: F811
        model = load(checkpoint, attend_to_mask_tokens=attend)
        encoder = QueryEncoder(model)
        model.query_tokenizer.query_maxlen = maxlen
        for texts in (TEXTS, TEXTS[2:3], TEXTS[1:2]):
            ids, mask = model.query_tokenizer.tensorize(texts)
            got = encoder._tokens(texts, maxlen)
            assert torch.equal(got[0], ids.cpu())
            assert torch.equal(got[1], mask.cpu())

    def test_stock_tokenizer_is_left_alone(self, model):
        encoder = QueryEncoder(model)
        backend = model.query_tokenizer.tok.backend_tokenizer
        before = backend.truncation, backend.padding
        encoder.encode(TEXTS, 12)
        assert (backend.truncation, backend.padding) == before


class TestEmbeddings:
    @pytest.mark.parametrize("attend", [False, True])
    def test_equal_stock(self, checkpoint, device, attend):  # noqa: F811
        model = load(checkpoint, attend_to_mask_tokens=attend)
        encoder = QueryEncoder(model)
        for texts in (TEXTS, TEXTS[:1], TEXTS[3:5], TEXTS[:1]):
            assert_same(encoder.encode(texts, 32), stock(model, texts), model)
        assert_same(encoder.encode(TEXTS, 9), stock(model, TEXTS, 9), model)

    def test_more_than_a_batch_lies_on_the_cpu(self, model):
        texts = [f"{a} {b}" for a in WORDS[:13] for b in WORDS[20:30]]
        assert len(texts) > MAX_BATCH
        got = QueryEncoder(model).encode(texts, 16)
        assert got.device.type == "cpu"
        assert_same(got, stock(model, texts, 16), model)

    @pytest.mark.parametrize("text", [TEXTS[0], TEXTS[2], " ".join(WORDS * 4)])
    def test_full_length(self, model, text):
        encoder = QueryEncoder(model)
        want = stock(model, [text], full_length_search=True)
        for _ in range(2):
            assert_same(encoder.encode([text], 32, full_length=True), want, model)
            assert_same(encoder.encode(TEXTS[:2], 32), stock(model, TEXTS[:2]), model)

    def test_threads(self, model):
        encoder = QueryEncoder(model)
        jobs = [(TEXTS[i % len(TEXTS)], (8, 32)[i % 2]) for i in range(64)]
        want = [encoder.encode([text], length) for text, length in jobs]
        encoder.close()
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda job: encoder.encode([job[0]], job[1]).clone(), jobs))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_in_inference_mode(self, model):
        encoder = QueryEncoder(model)
        with torch.inference_mode():
            first = encoder.encode(TEXTS[:1], 32)
        assert torch.equal(encoder.encode(TEXTS[:1], 32), first)

    @pytest.mark.parametrize("texts", [[], [1], [None, "a"], [["a"]]])
    def test_anything_but_strings(self, model, texts):
        with pytest.raises(ValueError, match="queries: expected one string or more, got"):
            QueryEncoder(model).encode(texts, 32)

    def test_full_length_of_several(self, model):
        with pytest.raises(ValueError, match="expected one with full_length_search, got 2"):
            QueryEncoder(model).encode(TEXTS[:2], 32, full_length=True)

    def test_slow_tokenizer(self, model):
        model.query_tokenizer.tok = types.SimpleNamespace(is_fast=False)
        with pytest.raises(ValueError, match="expected a checkpoint with a fast tokenizer, got SimpleNamespace"):
            QueryEncoder(model)


def test_half_precision_copy(model):
    copied = _half_precision_copy(model.model)
    assert {module.weight.dtype for module in copied.modules() if isinstance(module, torch.nn.Linear)} == {
        torch.float16
    }
    originals = dict(model.model.named_parameters())
    for name, parameter in copied.named_parameters():
        assert (parameter is originals[name]) == (parameter.dtype == torch.float32)
        assert torch.equal(parameter, originals[name].to(parameter.dtype))
    assert {p.dtype for p in originals.values()} == {torch.float32}


def test_nothing_waits_for_the_device(model, monkeypatch):
    """What a recording would fail at: values read on the host, tensors made from host values, sizes from data."""
    import transformers.utils.import_utils as import_utils

    if not hasattr(import_utils, "is_cuda_stream_capturing"):
        pytest.skip("this transformers does not know of recordings")
    waits = {"_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "masked_select", "item"}

    class NoWaits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in waits, func
            return func(*args, **(kwargs or {}))

    encoder = QueryEncoder(model)
    encoder.encode(TEXTS, 32)
    tokens = encoder._tokens(TEXTS, 32).to(encoder.device)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    with torch.no_grad(), NoWaits():
        encoder._forward(tokens)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            tokens.sum().item()


class TestSearcher:
    @pytest.fixture
    def searcher(self, index, checkpoint, collection, device):  # noqa: F811
        from colbert import Searcher
        from colbert.infra import ColBERTConfig

        config = ColBERTConfig(scorer="tilemaxsim", scorer_options={"encoder": "fast"})
        return Searcher(str(index), checkpoint=str(checkpoint), collection=collection, config=config, verbose=1)

    def test_search(self, searcher, collection):  # noqa: F811
        texts = [" ".join(text.split()[:7]) for text in collection[:5]]
        fast = [searcher.search(text, k=10) for text in texts]
        together = searcher.search_all(dict(enumerate(texts)), k=10).todict()
        searcher.configure(scorer_options={"encoder": "stock"})
        for i, text in enumerate(texts):
            pids, _, scores = searcher.search(text, k=10)
            assert_same_ranking(fast[i][0], fast[i][2], pids, scores, budget(searcher.checkpoint))
            listed, _, listed_scores = zip(*together[i], strict=True)
            assert_same_ranking(listed, listed_scores, pids, scores, budget(searcher.checkpoint))

    def test_who_encodes(self, searcher, monkeypatch):
        asked = []
        monkeypatch.setattr(QueryEncoder, "encode", lambda self, *args, **kwargs: asked.append((args, kwargs)))
        searcher.encode(TEXTS[0])
        searcher.encode(TEXTS[:2])
        searcher.encode(TEXTS[0], full_length_search=True)
        assert asked == [
            ((TEXTS[:1], 32), {"full_length": False}),
            ((TEXTS[:2], 32), {"full_length": False}),
            ((TEXTS[:1], 32), {"full_length": True}),
        ]
        searcher.configure(scorer="plaid")
        assert len(searcher.encode(TEXTS[0])) == 1
        searcher.configure(scorer="tilemaxsim", scorer_options=None)
        assert len(searcher.encode(TEXTS[0])) == 1
        assert len(asked) == 3

    def test_warns_where_nothing_asks_it(self, index, caplog):  # noqa: F811
        import plaid_tilemaxsim
        from plaid_tilemaxsim.config import ScorerConfig

        plaid_tilemaxsim.disable()
        scorer = plaid_tilemaxsim.TileMaxSimScorer(str(index), HAS_CUDA)
        scorer._get_engine(ScorerConfig(encoder="fast"))
        assert 'encoder="fast" needs plaid_tilemaxsim.enable()' in caplog.text

    def test_close(self, searcher):
        searcher.search(TEXTS[0], k=5)
        encoder = searcher.ranker.encoder(searcher.checkpoint)
        assert encoder._model is not None
        searcher.ranker.close()
        assert encoder._model is None
        assert not encoder._recordings


def assert_same_ranking(pids, scores, other_pids, other_scores, distance):
    """The same passages but for those whose scores are within 32 tokens' distance of the last; scores likewise."""
    most = 32 * distance
    assert len(pids) == len(other_pids)
    assert max(abs(a - b) for a, b in zip(scores, other_scores, strict=True)) <= most
    sure = {pid for pid, score in zip(other_pids, other_scores, strict=True) if score > other_scores[-1] + 2 * most}
    assert sure <= set(pids)


@pytest.mark.gpu
class TestRecorded:
    def test_replays_equal_the_model(self, model):
        encoder = QueryEncoder(model)
        for texts in (TEXTS, TEXTS[:1], TEXTS[2:5]):
            got = encoder.encode(texts, 32)
            assert got.is_cuda
            with torch.no_grad():
                assert_same(got, encoder._forward(encoder._tokens(texts, 32).cuda()), model)
        assert set(encoder._recordings) == {(8, 32), (1, 32), (4, 32)}

    def test_batches_of_every_size(self, model):
        """Within the budget of stock's, in one replay, whatever ran before; one alone has its bits before and after."""
        texts = [f"{a} {b}" for a in WORDS[:13] for b in WORDS[20:30]][:MAX_BATCH]
        encoder = QueryEncoder(model)
        alone = encoder.encode(texts[:1], 32)
        want = stock(model, texts)
        for n in (128, 1, 2, 3, 5, 9, 17, 31, 32, 33, 64, 100):
            got = encoder.encode(texts[:n], 32)
            assert_same(got, want[:n], model)
            assert torch.equal(encoder.encode(texts[:n], 32), got)
            assert torch.equal(encoder.encode(texts[:1], 32), alone)
        assert set(encoder._recordings) == {(2**i, 32) for i in range(8)}

    def test_sizes_share_memory(self, model):
        stock(model, TEXTS)
        encoder = QueryEncoder(model)
        texts = (TEXTS * 22)[:MAX_BATCH]

        def reserved(n):
            encoder.encode(texts[:n], 32)
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved()

        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        first = reserved(MAX_BATCH)
        assert max(reserved(2**i) for i in range(7)) - before <= 2 * (first - before)

    def test_close_frees_memory(self, model):
        stock(model, TEXTS)
        encoder = QueryEncoder(model)
        encoder.encode(TEXTS, 32)
        encoder.close()  # what stays belongs to cuBLAS
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        encoder.encode(TEXTS, 32)
        assert torch.cuda.memory_allocated() > before[0]
        encoder.close()
        gc.collect()
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before

    def test_a_model_that_waits(self, model, monkeypatch):
        encoder = QueryEncoder(model)
        forward = type(model.bert).forward

        def waiting(self, input_ids, attention_mask):
            attention_mask.sum().item()
            return forward(self, input_ids, attention_mask=attention_mask)

        monkeypatch.setattr(type(model.bert), "forward", waiting)
        with pytest.raises(ValueError, match="expected a model that a CUDA graph can record, got BertModel"):
            encoder.encode(TEXTS, 32)
        monkeypatch.undo()
        assert_same(encoder.encode(TEXTS, 32), stock(model, TEXTS), model)
        assert torch.randn(8, device="cuda").isfinite().all()
