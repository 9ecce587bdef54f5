"""What a device offers to the schemes: the one place that decides whether our own products can run there."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

# What the launch shapes need: float8 tensor cores, and about the shared memory of a Hopper GPU.
CAPABILITY, SHARED_BYTES = (9, 0), 160 << 10


@lru_cache
def has_small_gemm(device: torch.device) -> bool:
    """Whether products may use our own kernels; with plain weights, the sizes of the product decide if they do."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    # Newer desktop GPUs are of a higher capability, but have 99 KiB.
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES)
    return torch.cuda.get_device_capability(device) >= CAPABILITY and shared >= SHARED_BYTES


def arrivals_for(rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Counters for a matrix with this many rows, where its products are computed in parts that have to meet."""
    if not has_small_gemm(device):
        return {}
    from tokenmill.ops.triton.gemm_small import counters_for

    return {"arrivals": torch.zeros(counters_for(rows), dtype=torch.int32, device=device)}
