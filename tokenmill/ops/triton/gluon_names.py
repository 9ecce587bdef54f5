"""What the Hopper kernels call, under one name each: Gluon renamed some of it between releases.

Imported only where such a kernel is used (ops/device_facts.py): not every Triton has this language.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


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
