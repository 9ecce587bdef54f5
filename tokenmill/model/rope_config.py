"""Reads the rotary part of a config.json, in its old form (rope_theta, rope_scaling) and its new (rope_parameters)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tokenmill.errors import ModelError
from tokenmill.model.config_reader import ConfigReader, as_number
from tokenmill.model.spec import RopeSpec

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def layer_ropes(config: ConfigReader, dim: int, windows: tuple[int | None, ...]) -> tuple[RopeSpec, ...]:
    """One rope per layer. Where the config has a local one, the layers with a window use it."""
    if dim < 2 or dim % 2:
        raise ModelError(f"config.json makes {dim} rotated dimensions per head; it must be an even number")
    whole = _rope(config, _parameters(config, "full_attention"), dim)
    local = _local_parameters(config)
    if local is None:
        return (whole,) * len(windows)
    near = _rope(config, local, dim)
    types = config.layer_types(len(windows))
    is_local = [kind == "sliding_attention" for kind in types] if types else [window is not None for window in windows]
    return tuple(near if here else whole for here in is_local)


def longest_rope(ropes: tuple[RopeSpec, ...]) -> int:
    """How far yarn stretches a model whose config still gives the original length; 0 without it."""
    return max((int(rope.original_positions * rope.factor) for rope in ropes if rope.kind == "yarn"), default=0)


def score_scale(config: ConfigReader) -> float:
    """What yarn multiplies attention scores by in architectures that apply it there."""
    parameters = _parameters(config, "full_attention")
    strength = parameters.get("mscale_all_dim")
    if not strength or _kind(parameters) == "default":
        return 1.0
    return _mscale(as_number("factor", parameters.get("factor")), as_number("mscale_all_dim", strength)) ** 2


def _parameters(config: ConfigReader, layer_type: str) -> dict[str, Any]:
    """The parameters for a type of layer as one flat dict, whichever form they were written in."""
    new = _table(config, "rope_parameters")
    nested = new.get(layer_type)
    flat = _table(config, "rope_scaling") or (nested if isinstance(nested, dict) else new)
    theta = config.get("rope_theta")
    return {"rope_theta": 10000.0 if theta is None else theta} | flat


def _local_parameters(config: ConfigReader) -> dict[str, Any] | None:
    local_theta = config.get("rope_local_base_freq")
    nested = _table(config, "rope_parameters").get("sliding_attention")
    if isinstance(nested, dict):
        return {"rope_theta": 10000.0 if local_theta is None else local_theta} | nested
    return None if local_theta is None else {"rope_theta": local_theta}


def _table(config: ConfigReader, key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"config.json has {key}={value!r}; it must be a table")
    return value or {}


def _kind(parameters: dict[str, Any]) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its name before it was published
    if kind not in KINDS:
        raise ModelError(f"rope scaling {kind!r} in config.json is not supported; supported are {', '.join(KINDS)}")
    return str(kind)


def _rope(config: ConfigReader, parameters: dict[str, Any], dim: int) -> RopeSpec:
    kind = _kind(parameters)
    plain = RopeSpec(dim, as_number("rope_theta", parameters["rope_theta"]), kind)
    positions = config.whole("max_position_embeddings")
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, factor=_number(parameters, "factor"))
    if kind == "dynamic":
        if dim < 4:
            raise ModelError(f"rope scaling 'dynamic' in config.json needs at least 4 rotated dimensions, not {dim}")
        return replace(plain, factor=_number(parameters, "factor"), original_positions=positions)
    # Phi-3 writes the original length outside; there it wins over the one inside.
    outside = config.maybe_whole("original_max_position_embeddings")
    original = outside or int(_number(parameters, "original_max_position_embeddings", positions))
    if original < 2 or plain.theta == 1.0:
        raise ModelError(f"rope scaling {kind!r} in config.json has theta {plain.theta} and original length {original}")
    scale = {"llama3": _llama3, "longrope": _longrope, "yarn": _yarn}[kind]
    return scale(replace(plain, original_positions=original), parameters, positions)


def _llama3(rope: RopeSpec, parameters: dict[str, Any], positions: int) -> RopeSpec:
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if high <= low:
        raise ModelError(f"rope scaling in config.json has high_freq_factor={high}; it must exceed {low}, the low one")
    return replace(rope, factor=_number(parameters, "factor"), low_freq_factor=low, high_freq_factor=high)


def _longrope(rope: RopeSpec, parameters: dict[str, Any], positions: int) -> RopeSpec:
    factor = _number(parameters, "factor", positions / rope.original_positions)
    natural = math.sqrt(1 + math.log(factor) / math.log(rope.original_positions)) if factor > 1 else 1.0
    return replace(
        rope,
        factor=factor,
        attention_factor=_number(parameters, "attention_factor", natural),
        short_factors=_factors(parameters, "short_factor", rope.dim),
        long_factors=_factors(parameters, "long_factor", rope.dim),
    )


def _yarn(rope: RopeSpec, parameters: dict[str, Any], positions: int) -> RopeSpec:
    factor = _number(parameters, "factor", positions / rope.original_positions)
    return replace(
        rope,
        factor=factor,
        attention_factor=_number(parameters, "attention_factor", _yarn_attention(parameters, factor)),
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
    )


def _yarn_attention(parameters: dict[str, Any], factor: float) -> float:
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above and below:
        return _mscale(factor, as_number("mscale", above)) / _mscale(factor, as_number("mscale_all_dim", below))
    return _mscale(factor, 1.0)


def _mscale(factor: float, strength: float) -> float:
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(parameters: dict[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None and default is None:
        raise ModelError(f"rope scaling {_kind(parameters)!r} in config.json has no {key}")
    return as_number(key, default if value is None else value)


def _factors(parameters: dict[str, Any], key: str, dim: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        found = f"{len(values)} numbers" if isinstance(values, list) else repr(values)
        raise ModelError(f"config.json has {found} as {key} of its rope; it must be a list of {dim // 2} numbers")
    return tuple(as_number(key, value) for value in values)
