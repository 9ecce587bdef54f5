"""What the Hopper kernels share: what Gluon renamed between releases under one name each, descriptors, and releases.

Imported only where such a kernel is used (ops/device_facts.py): not every Triton has this language.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def _first(module: Any, *names: str) -> Any:
    """The newest name comes first: an old one may be left behind, and refuse when it is called."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


# Triton 3.7
thread_barrier = _first(gl, "barrier", "thread_barrier")
# Triton 3.8
tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
tma_store = _first(tma, "async_store", "async_copy_shared_to_global")
copy_async = _first(async_copy, "async_load", "async_copy_global_to_shared")
# Triton 3.9
reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")

KINDS = {
    torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
}  # fmt: skip


def tiled(matrix: torch.Tensor, block: list[int]) -> Any:
    """A matrix as a descriptor of tiles of this shape."""
    return TensorDescriptor.from_tensor(matrix, block, _layout(*block, matrix.dtype))


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], KINDS[dtype])


@gluon.jit
def release(bar):
    """A tile in shared memory may be overwritten."""
    thread_barrier()  # every warp of the group has to be through with the tile
    mbarrier.arrive(bar, count=1)
