"""Arena: memory in large pages for weights and the KV cache."""

from __future__ import annotations

import ctypes
import weakref

import torch

from tokenmill.ops.native.library import Library


class Arena:
    """Memory in large pages, handed out in order: weights that are read one after the other lie so."""

    def __init__(self, native: Library, chunk: int = 32 << 20) -> None:
        """chunk: bytes to ask the system for at once."""
        self._native, self._least = native, chunk
        self._chunk: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:  # [size] uint8, aligned to a cache line; freed with its last view
        if self._used + size > len(self._chunk):
            whole = max(size, self._least)
            address = self._native.c.tm_alloc(whole)
            if not address:
                raise MemoryError(f"no memory for {whole:,} bytes of weights or KV cache")
            buffer = (ctypes.c_uint8 * whole).from_address(address)
            weakref.finalize(buffer, self._native.c.tm_free, address, whole).atexit = False
            self._chunk, self._used = torch.frombuffer(buffer, dtype=torch.uint8), 0
        part = self._chunk[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return part
