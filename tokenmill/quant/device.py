"""What a device offers to the schemes: the one place that decides whether our own products can run there."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

CAPABILITY = (9, 0)  # what the launch shapes need: float8 tensor cores, and the shared memory of a Hopper GPU or later


@lru_cache
def has_small_gemm(device: torch.device) -> bool:
    """Whether products may use our own kernels; with plain weights, the sizes of the product decide if they do."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def arrivals_for(rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Counters for a matrix with this many rows, where its products are computed in parts that have to meet."""
    if not has_small_gemm(device):
        return {}
    from tokenmill.ops.triton.gemm_small import counters_for

    return {"arrivals": torch.zeros(counters_for(rows), dtype=torch.int32, device=device)}
