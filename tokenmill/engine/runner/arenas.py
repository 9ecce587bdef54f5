"""Arenas: the tensors that keys and values of a rank's layers lie in, in memory of its own or in what it is given."""

from __future__ import annotations

import math
from threading import Thread

import numpy as np
import torch

from tokenmill.errors import ModelError
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.kv_forms import form_for
from tokenmill.ops.native.arena import Arena
from tokenmill.ops.native.library import Library, library

FIRST_BYTES = 32 << 20  # of the KV cache that are ready before the first requests need them

Arenas = tuple[torch.Tensor, torch.Tensor | None]  # keys and values; scales, beside a quantized cache


def arenas(
    spec: DecoderSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,  # of floats, or of a quantized form's codes
    device: torch.device,
    native: bool,  # the native library reads and writes them
    memory: torch.Tensor | None = None,  # [bytes]: where they are to lie
) -> Arenas:  # [layers, key and value (or only key), blocks, block_size, kv_heads, dim]
    """One copy moves a block of all layers. With MLA there are keys only."""
    shapes = set(spec.kv_shapes)
    if len(shapes) != 1:
        raise ModelError(f"layers that cache keys of different shapes are not supported: {shapes}")
    shape = shapes.pop()
    parts, form, used = 2 if shape.v_dim else 1, form_for(dtype), 0

    def paged(width: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal used
        block = (block_size, shape.kv_heads, width)
        # Of the native library a block of all layers lies together: a request fills a few large pages.
        whole = (num_blocks, spec.num_layers, parts, *block) if native else (spec.num_layers, parts, num_blocks, *block)
        if memory is not None:
            first, used = used, used + math.prod(whole) * dtype.itemsize
            found = memory[first:used].view(dtype).view(whole)
        else:
            found = _large_pages(whole, dtype) if native else _zeros(whole, dtype, device)
        return found.movedim(0, 2) if native else found

    codes = paged(form.width(shape.k_dim) if form else shape.k_dim, dtype)
    return codes, paged(form.scales(shape.k_dim), torch.bfloat16) if form else None


def arena_bytes(spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> int:
    """How much memory they take."""
    found = arenas(spec, num_blocks, block_size, dtype, torch.device("meta"), False, None)
    return sum(one.numel() * one.element_size() for one in found if one is not None)


def _large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory as they are first written, two megabytes at a time where the system can do that."""
    native = library()
    memory = Arena(native).take(math.prod(shape) * dtype.itemsize)
    Thread(target=_populate, args=(native, memory[:FIRST_BYTES]), name="kv-memory", daemon=True).start()
    return memory.view(dtype).view(shape)


def _populate(native: Library, memory: torch.Tensor) -> None:
    """Blocks are handed out from the first on. A virtual machine may take milliseconds for a large page, and it is the
    first prompts that would wait for it."""
    native.c.tm_populate(memory.data_ptr(), len(memory))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU numpy's, whose pages cost neither time nor memory before they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
