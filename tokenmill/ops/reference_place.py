"""Keys and values of tokens copied to where these stand in another sequence, in plain torch."""

from __future__ import annotations

import torch

from tokenmill.ops.kv_forms import KV_FORMS, KVScales, dequantize, form_of, quantize
from tokenmill.ops.registry import Implementation


def place_kv(
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim], or codes
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim], or codes
    turns: torch.Tensor,  # [n, rot_dim] float32: cosines, then sines, of the angles between two places
    turn: torch.Tensor,  # [tokens] int64: which of these lies between a token's two
    source: torch.Tensor,  # [tokens] int64: slots; none is among the targets
    target: torch.Tensor,  # [tokens] int64
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> None:
    """Keys are turned by the way that they go (a rotation behind a rotation is one by the sum of both), in float32.
    Values, and the codes of quantized ones, stay as they are."""
    size = k_cache.shape[1]
    here, there = (target // size, target % size), (source // size, source % size)
    v_cache[here] = v_cache[there]
    wide = torch.float64 if k_cache.dtype == torch.float64 else torch.float32
    keys = k_cache[there]
    angles = turns.to(wide)[turn][:, None]
    if scales is None:
        k_cache[here] = _turned(keys.to(wide), angles).to(k_cache.dtype)
        return
    scales.v[here] = scales.v[there]
    turned = _turned(dequantize(keys, scales.k[there], wide), angles)
    k_cache[here], scales.k[here] = quantize(turned, form_of(k_cache))


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:  # [tokens, heads, dim], [tokens, 1, rot_dim]
    half = angles.shape[-1] // 2
    cos, sin = angles[..., :half], angles[..., half:]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


IMPLEMENTATIONS = (
    Implementation(
        op="place_kv", name="reference", fn=place_kv, capture_safe=True, batch_invariant=True, kv_forms=tuple(KV_FORMS)
    ),
)
