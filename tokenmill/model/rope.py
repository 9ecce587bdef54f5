"""Rotary embedding tables: every scaling of the frequencies, computed once and shared between layers."""

from __future__ import annotations

import math

import torch

from tokenmill.model.spec import RopeSpec


def rope_table(rope: RopeSpec, max_len: int, device: torch.device) -> torch.Tensor:  # [max_len, dim] float32
    """Cosines, then sines, of every position below max_len.

    Scalings that depend on the length of a sequence use max_len instead, because keys are cached rotated:
    a table that changed with the length would disagree with the keys already stored.
    """
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, max_len)
    return torch.cat([angles.cos(), angles.sin()], dim=1).mul_(rope.attention_factor).to(device)


def inverse_frequencies(rope: RopeSpec, max_len: int) -> torch.Tensor:  # [dim / 2] float32
    theta = rope.theta
    if rope.kind == "dynamic" and max_len > rope.original_positions:
        stretch = rope.factor * max_len / rope.original_positions - (rope.factor - 1)
        theta *= stretch ** (rope.dim / (rope.dim - 2))
    # In float32 throughout: models were trained with these roundings.
    plain = 1.0 / theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_positions else rope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32)
    return plain


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between are blended."""
    turns = rope.original_positions * plain / (2 * math.pi)  # rotations within the original length
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Like llama3, with the blend linear in the dimension instead of in the frequency."""
    low, high = _turning_dim(rope, rope.beta_fast), _turning_dim(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def _turning_dim(rope: RopeSpec, turns: float) -> float:
    """The dimension that makes this many rotations within the original length."""
    return rope.dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
