"""What every native op does around its call: checks its tensors, joins their leading dims, and runs or records."""

from __future__ import annotations

from functools import lru_cache

import torch

from tokenmill.ops.native import library
from tokenmill.ops.native.structs import Args, check_structs


def run(args: Args) -> None:
    _library().run(args.KIND, args)


def check_float32(*tensors: torch.Tensor) -> None:
    """The library takes pointers as they come: with numbers of another size it would write beyond their end."""
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            raise TypeError(f"a native op got {tensor.dtype}, but was chosen for float32")


def as_rows(x: torch.Tensor) -> torch.Tensor:  # [rows, dim]
    """The same elements with the leading dims joined: a view where the strides allow it."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


@lru_cache
def _library() -> library.Library:
    native = library.library()
    check_structs(native)
    return native
