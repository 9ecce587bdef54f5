"""CRC32C of memory by the native library, or zlib's checksum where there is none."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable

from tokenmill.ops.native.library import Library, load


def checksum() -> tuple[str, Callable[[memoryview], int]]:
    """Its name, and what makes it of writable bytes; the interpreter's lock is not held meanwhile."""
    native = load()
    if not isinstance(native, Library):
        return "crc32", zlib.crc32
    function = native.c.tm_crc32c

    def crc32c(data: memoryview) -> int:
        size = data.nbytes
        return int(function(ctypes.addressof(ctypes.c_char.from_buffer(data)), size, 0)) if size else 0

    return "crc32c", crc32c
