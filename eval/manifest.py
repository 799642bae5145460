"""Identity of results: what a stage was made from, and on what. A stage counts only when all of it was written."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plaid_tilemaxsim

from .cache import atomic_folder, read_json, sha256_file, sha256_json, sha256_strings, versions, write_json

PACKAGE = Path(__file__).resolve().parent  # eval/ of a checkout, or where a wheel put it
ROOT = PACKAGE.parent
MANIFEST = "manifest.json"
PACKAGES = ("torch", "triton", "colbert-ai", "transformers", "numpy", "faiss-cpu", "faiss-gpu", "ir_measures")


def source_digest(*paths: str) -> str:
    """sha256 over names and contents of the Python files at or below paths like eval/compare.py or plaid_tilemaxsim."""
    roots = {"eval": PACKAGE, "plaid_tilemaxsim": Path(plaid_tilemaxsim.__file__).resolve().parent}
    parts: list[str] = []
    for path in paths:
        package, _, rest = path.partition("/")
        full = roots[package] / rest
        for file in sorted(full.rglob("*.py")) if full.is_dir() else [full]:
            parts += [f"{package}/{file.relative_to(roots[package])}", sha256_file(file)]
    return sha256_strings(parts)


def commit() -> str | None:
    """Commit of the checkout, with "-dirty" when tracked files differ from it; None where there is none to ask."""
    if not (ROOT / ".git").exists():  # a folder for packages may lie inside someone else's checkout
        return None
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if head.returncode != 0:
            return None
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
    except FileNotFoundError:  # no git executable: results stay usable without their commit
        return None
    return head.stdout.strip() + ("-dirty" if changed else "")


def cpu_model() -> str:
    """Name of the processor as /proc/cpuinfo gives it, else what Python's platform module knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a timing depends on: processor, threads, GPUs. Imports torch."""
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "cuda": torch.version.cuda,
    }


def environment() -> dict[str, Any]:
    """Machine, versions, commit and time, as recorded beside every result."""
    return {
        "machine": machine(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions(*PACKAGES),
        "commit": commit(),
        "argv": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_text(path: Path, text: str) -> None:
    """Write a file through a temporary sibling and a rename: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_complete(folder: Path, inputs: Mapping[str, Any]) -> bool:
    """True if `folder` holds a finished stage made from exactly these inputs."""
    path = folder / MANIFEST
    return path.exists() and read_json(path)["key"] == sha256_json(dict(inputs))


@contextmanager
def stage(folder: Path, inputs: Mapping[str, Any]) -> Iterator[Path]:
    """A temporary folder to write a stage's files into; it becomes `folder` when the block ends without error.

    `inputs` (plain JSON) is what `is_complete` compares; `manifest.json` records it with the environment.
    """
    started = time.perf_counter()
    with atomic_folder(folder) as temporary:
        yield temporary
        write_json(temporary / MANIFEST, {
            "key": sha256_json(dict(inputs)),
            "inputs": dict(inputs),
            "seconds": time.perf_counter() - started,
            "environment": environment(),
        })  # fmt: skip
