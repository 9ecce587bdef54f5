"""Takes the memory that steps need before the first request: asking a GPU's driver for more waits for all running work.

torch keeps what it was given and cuts every later tensor out of it. A server that met its largest steps one by one
stood still for 50 to 300 ms at each of them.
"""

from __future__ import annotations

import contextlib

import torch

SMALL, SMALL_COUNT = 1 << 20, 32  # torch keeps tensors of up to so many bytes apart; how many there may be
LEAST_STAGED = 9  # the smallest pinned piece has two to the power of so many bytes
STAGED_AT_ONCE = 12  # copies of one size that are on their way


def staged_bytes(max_rows: int, max_tokens: int) -> int:
    """What the host sends for the largest step (see `inputs.pack`), except for prefixes that were cached."""
    return 8 * (6 * max_tokens + 16 * max_rows)


def reserve(device: torch.device, activations: int, staged: int) -> None:
    """activations: device memory of the largest step; staged: pinned host memory of the largest copy, both in bytes."""
    with contextlib.suppress(torch.OutOfMemoryError):  # then it is asked for as steps need it
        torch.empty(activations, dtype=torch.uint8, device=device)
        _ = [torch.empty(SMALL, dtype=torch.uint8, device=device) for _ in range(SMALL_COUNT)]
    powers = range(LEAST_STAGED, max(LEAST_STAGED, (staged - 1).bit_length()) + 1)
    _ = [torch.empty(1 << power, dtype=torch.uint8, pin_memory=True) for power in powers for _ in range(STAGED_AT_ONCE)]
