"""adapter_config.json as PEFT writes it: which ranks and scales modules have, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import InvalidRequest

_MOST_BYTES = 1 << 20  # of the file
_MOST_PATTERNS, _MOST_LENGTH, _MOST_QUANTIFIERS = 4096, 200, 3  # an expression that takes for ever is somebody's attack

# Settings that change the computation in a way that is not there, by name: what they are when they change nothing.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (None, False), "DoRA rescales whole weights, which cannot be done for one row of a batch"),
    ("bias", (None, "none"), "biases of an adapter are not served; train it with bias='none'"),
    ("lora_bias", (None, False), "biases of an adapter are not served; train it with lora_bias=False"),
    ("modules_to_save", (None, []), "whole modules of an adapter are not served; merge it into the weights"),
    ("fan_in_fan_out", (None, False), "no layer here has its weight transposed; leave it out"),
    ("layer_replication", (None, []), "layers are not repeated; merge the adapter into the weights"),
    ("target_parameters", (None, []), "parameters outside of linear layers are not adapted; leave them out"),
    ("trainable_token_indices", (None, [], {}), "embeddings of an adapter are not served; leave them out"),
    ("alora_invocation_tokens", (None, []), "adapters that begin in the middle of a text are not served"),
    ("use_qalora", (None, False), "QALoRA pools inputs, which is not done here"),
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    rank: int
    alpha: float
    rank_stabilized: bool
    targets: tuple[str, ...]  # names of modules, each with its suffix; empty: an expression, or all of them
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    every_layer: bool  # targets are meant for all layers
    base: str  # the model that it was made for, as it says

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        alpha, rank = float(_matching(self.alpha_pattern, module, self.alpha)), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def read_config(path: Path) -> AdapterConfig:
    """Raises InvalidRequest with one sentence."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        found = json.loads(text) if len(text) <= _MOST_BYTES else None
    except OSError as error:
        raise InvalidRequest(
            f"there is no adapter to read at {str(path)!r} ({error.strerror}); give a folder with "
            "adapter_config.json and adapter_model.safetensors"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{str(path)!r} is not JSON ({error!s:.100}); save the adapter again") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{str(path)!r} is not the config of an adapter; save the adapter again")
    return _checked(found, path)


def _checked(found: dict[str, Any], path: Path) -> AdapterConfig:
    kind = found.get("peft_type")
    if kind != "LORA":
        raise InvalidRequest(f"{str(path)!r} says peft_type={kind!r:.60}; only LORA is served")
    for name, neutral, why in _REFUSED:
        if found.get(name) not in neutral:
            raise InvalidRequest(f"{str(path)!r} says {name}={found[name]!r:.100}: {why}")
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InvalidRequest(
            f"{str(path)!r} says init_lora_weights={start!r:.60}, which changes the base's weights, too; convert the "
            "adapter to a plain one (path_initial_model_for_weight_conversion of PEFT)"
        )
    rank, alpha = found.get("r"), found.get("lora_alpha")
    rank_pattern, alpha_pattern = (_pattern(found, name, path) for name in ("rank_pattern", "alpha_pattern"))
    for one in (rank, *rank_pattern.values()):
        if isinstance(one, bool) or not isinstance(one, int) or one < 1:
            raise InvalidRequest(f"{str(path)!r} has a rank of {one!r:.60}; it must be a positive whole number")
    for one in (alpha, *alpha_pattern.values()):
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise InvalidRequest(f"{str(path)!r} has a lora_alpha of {one!r:.60}; it must be a number")
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    targets = found.get("target_modules")
    named = isinstance(targets, list) and all(isinstance(one, str) for one in targets)
    if not (targets is None or isinstance(targets, str) or named):
        raise InvalidRequest(f"{str(path)!r} says target_modules={targets!r:.60}; it must be names of modules")
    return AdapterConfig(
        rank,
        float(alpha),
        found.get("use_rslora") is True,
        tuple(targets) if isinstance(targets, list) else (),
        rank_pattern,
        alpha_pattern,
        found.get("layers_to_transform") is None and not found.get("exclude_modules"),
        str(found.get("base_model_name_or_path") or "unknown")[:200],
    )


def _pattern(found: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    """Numbers by module names, or by expressions that match how names end."""
    pattern = found.get(name) or {}
    if not isinstance(pattern, dict) or len(pattern) > _MOST_PATTERNS:
        raise InvalidRequest(f"{str(path)!r} has a {name} that is not {_MOST_PATTERNS} entries or fewer; save it again")
    for key in pattern:
        quantifiers = len(re.findall(r"[*+{?]", key))
        if len(key) > _MOST_LENGTH or quantifiers > _MOST_QUANTIFIERS or re.search(r"\)[*+{]", key):
            raise InvalidRequest(f"{str(path)!r} has an expression in {name} that is too complicated: {key!r:.100}")
        try:
            re.compile(key)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidRequest(f"{str(path)!r} has {key!r:.100} in {name}, which is no expression: {error}") from None
    return pattern


def _matching(pattern: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first key that the module's name is, or ends with behind a dot."""
    if module in pattern:
        return pattern[module]
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)
