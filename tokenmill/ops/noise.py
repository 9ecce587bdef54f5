"""Counter-based noise: a pure function of (seed, position, token), the same on every device and in every batch."""

from __future__ import annotations

import torch

# The finalizer of a well-mixed 32-bit integer hash ("lowbias32"); 32-bit so that Triton computes the very same bits.
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
_WORD = 0xFFFFFFFF
TOKEN_OFFSET = 0x9E3779B9  # so that token 0 is not hashed from 0, which the hash maps to itself


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit words held in int64 tensors (torch has no unsigned 32-bit arithmetic)."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * _MULTIPLIER_1) & _WORD
    x = ((x ^ (x >> 15)) * _MULTIPLIER_2) & _WORD
    return x ^ (x >> 16)


def key(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One 32-bit key per row, [n] int64, from a 64-bit seed and a position."""
    return mix(mix(mix(seed) ^ ((seed >> 32) & _WORD)) ^ (position & _WORD))


def gumbel_noise(
    seed: torch.Tensor,  # [n] int64
    position: torch.Tensor,  # [n] int64
    vocab: int,
    first: int = 0,  # the first of so many tokens
) -> torch.Tensor:  # [n, vocab] float32
    token = torch.arange(first, first + vocab, device=seed.device, dtype=torch.int64)
    return gumbel(mix(key(seed, position)[:, None] ^ mix(token + TOKEN_OFFSET)[None, :]))


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float32, from 32 random bits each."""
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    # Rounding may give exactly 1: -log(1) = 0 and the noise would be infinite.
    return -torch.log(-torch.log(uniform.clamp(2.0**-33, 1.0 - 2.0**-24)))
