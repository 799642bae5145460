"""What a user can ask of the scorer, checked in one place. The only reader of environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

SCORERS = ("plaid", "tilemaxsim")
ENVIRONMENT_PREFIX = "PLAID_TILEMAXSIM_"

_CHOICES = {
    "mode": ("plaid", "rerank", "exhaustive"),
    "codec": ("residual", "dense", "pq"),
    "placement": ("auto", "gpu", "host", "disk"),
    "impl": ("auto", "triton", "torch"),
    "verify": ("full", "structure"),
    "encoder": ("stock", "fast"),
}
_INTEGERS = ("pq_m", "prefilter")
_FLAGS = {"0": False, "1": True}
# Placements that a codec knows, where not all.
_PLACEMENTS = {"dense": ("auto", "gpu", "host"), "pq": ("auto", "gpu")}


@dataclass(frozen=True)
class ScorerConfig:
    """``scorer_options`` of ``ColBERTConfig``, checked.

    mode        "plaid": stock's funnel. "rerank": every candidate is scored exactly, nothing is pruned.
                "exhaustive": the whole index is scored, no candidates are generated
    codec       what passages are scored exactly from: "residual" (stock's codes and residuals), "dense" (the same
                embeddings decompressed: all at load where they fit, else the survivors of each search), "pq" (the
                product quantiser that `plaid-tilemaxsim pq` trained). Candidates and pruning are the same for all
    pq_m        bytes a token of the product quantiser to use; None takes the only one there is
    placement   of residuals when searching on a GPU: "gpu", "host" (pinned memory), "disk" (left in the index's
                files, for indexes larger than memory), "auto" (the first of these that fits). Not "disk" with codec
                "dense"; "auto" or "gpu" with codec "pq"
    impl        "triton" (GPU kernels), "torch" (CPU), "auto" (by device). Never falls back
    verify      of the index files before they are laid out: "structure" checks shapes and counts, "full" codes and
                lists too (which are checked at load in any case)
    prefilter   in mode "exhaustive", the number of passages that centroid scores alone keep for exact
                scoring; None scores all exactly
    tuning      file that ``plaid-tilemaxsim tune`` wrote on a GPU of this kind: its block choices, for the whole
                process, instead of the built-in ones; None leaves them as they are
    encoder     of the texts given to a Searcher: "fast" records the model as CUDA graphs, with embeddings that equal
                stock's up to the rounding of fp16 (on a CPU it is stock's model as it is); "stock" is colbert-ai's
    stats       measure the stages of each search, into the scorer's ``last_search_stats``
    devices     where to search: GPU numbers or "cuda:N", or "cpu"s. Several share the index, a shard each, and find
                what one would; replicas divide them evenly, in this order. None: the current GPU, or the CPU
    replicas    independent copies of the index, over which batches are split and concurrent searches spread; without
                ``devices`` each on a GPU of its own

    The environment variable PLAID_TILEMAXSIM_<NAME> sets the default of option <name>.
    Raises ValueError with the valid names or values.
    """

    mode: str = "plaid"
    codec: str = "residual"
    pq_m: int | None = None
    placement: str = "auto"
    impl: str = "auto"
    verify: str = "structure"
    prefilter: int | None = None
    tuning: str | None = None
    encoder: str = "stock"
    stats: bool = False
    devices: tuple[str, ...] | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"scorer option {name}: expected one of {list(valid)}, got {value!r}")
        for name in _INTEGERS:
            n = getattr(self, name)
            if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
                raise ValueError(f"scorer option {name}: expected None or an integer >= 1, got {n!r}")
        if self.prefilter is not None and self.mode != "exhaustive":
            raise ValueError(f"scorer option prefilter: expected None in mode {self.mode!r}, got {self.prefilter!r}")
        if self.pq_m is not None and self.codec != "pq":
            raise ValueError(f"scorer option pq_m: expected None with codec {self.codec!r}, got {self.pq_m!r}")
        known = _PLACEMENTS.get(self.codec)
        if known is not None and self.placement not in known:
            raise ValueError(
                f"scorer option placement: expected one of {list(known)} with codec {self.codec!r}, "
                f"got {self.placement!r}"
            )
        if self.tuning is not None and not (isinstance(self.tuning, str) and self.tuning):
            raise ValueError(f"scorer option tuning: expected None or the path of a file, got {self.tuning!r}")
        if not isinstance(self.stats, bool):
            raise ValueError(f"scorer option stats: expected True or False, got {self.stats!r}")
        object.__setattr__(self, "devices", _device_names(self.devices))
        if type(self.replicas) is not int or self.replicas < 1:
            raise ValueError(f"scorer option replicas: expected an integer >= 1, got {self.replicas!r}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | ScorerConfig | None) -> ScorerConfig:
        """The options of one config, over those of the environment, over the defaults."""
        if isinstance(options, ScorerConfig):
            options = asdict(options)
        elif options is not None and not isinstance(options, Mapping):
            raise ValueError(f"scorer_options: expected a dict or None, got {type(options).__name__}")
        given = _from_environment()
        for name, value in (options or {}).items():
            if name not in _VARIABLES:
                raise ValueError(f"scorer_options: expected names from {list(_VARIABLES)}, got {name!r}")
            given[name] = value
        return cls(**given)


_VARIABLES = {field.name: ENVIRONMENT_PREFIX + field.name.upper() for field in fields(ScorerConfig)}


def _from_environment() -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, variable in _VARIABLES.items():
        text = os.environ.get(variable)
        if not text:
            continue
        if name in _CHOICES and text not in _CHOICES[name]:
            raise ValueError(f"{variable}: expected one of {list(_CHOICES[name])}, got {text!r}")
        if name in (*_INTEGERS, "replicas") and not text.isdecimal():
            raise ValueError(f"{variable}: expected an integer >= 1, got {text!r}")
        if name == "stats" and text not in _FLAGS:
            raise ValueError(f"{variable}: expected 0 or 1, got {text!r}")
        if name == "stats":
            given[name] = _FLAGS[text]
        elif name == "devices":
            given[name] = [int(word) if word.isdecimal() else word for word in text.split(",")]
        else:
            given[name] = int(text) if name in (*_INTEGERS, "replicas") else text
    return given


def _device_names(devices: Any) -> tuple[str, ...] | None:
    """Names as torch writes them; whether there is such a device is found out when an index is loaded."""
    if devices is None:
        return None
    wrong = not isinstance(devices, (list, tuple)) or not devices
    names = []
    for device in () if wrong else devices:
        if type(device) is int and device >= 0:
            device = f"cuda:{device}"
        if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda:(0|[1-9]\d{0,2})", device):
            wrong = True
            break
        names.append(device)
    if wrong:
        raise ValueError(
            f'scorer option devices: expected None or a list of GPU numbers, "cuda:N" or "cpu", got {devices!r}'
        )
    return tuple(names)


def choices(option: str) -> tuple[str, ...]:
    """Valid values of an option that takes names, none for the others."""
    return _CHOICES.get(option, ())


def check_scorer(name: Any) -> str:
    """``scorer`` of a config, None meaning "plaid". ValueError with the valid names otherwise."""
    if name is None:
        return "plaid"
    if name not in SCORERS:
        raise ValueError(f"scorer: expected one of {list(SCORERS)}, got {name!r}")
    return str(name)


def scorer_of(config: Any) -> str:
    """The scorer that a config asks for; "plaid" if it says nothing. ValueError with the valid names if unknown."""
    return check_scorer(_plain(getattr(config, "scorer", None)))


def options_of(config: Any) -> ScorerConfig:
    """The checked ``scorer_options`` of a config."""
    return ScorerConfig.from_options(_plain(getattr(config, "scorer_options", None)))


def _plain(value: Any) -> Any:
    """A config made before its class had the field shows colbert's wrapper of the default instead of a value."""
    return value.val if type(value).__name__ == "DefaultVal" else value
