"""Memory that processes share, without a name that could be left behind, and words in it that wake who waits."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
import tempfile
import time

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_NAP = 0.0005  # seconds between looks where nobody can be woken
_LOW = 0xFFFFFFFF
_C = ctypes.CDLL(None, use_errno=True)


class SharedMemory:
    """Bytes that whoever has the descriptor maps. They end with the last process that does: nothing is left behind."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        self.fd = fd
        self.bytes = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def of_size(cls, size: int) -> SharedMemory:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("tokenmill-ranks", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.truncate(fd, size)
        return cls(fd)

    def word(self, offset: int) -> Word:
        return Word(self.bytes, offset)

    def close(self) -> None:
        """The descriptor; the mapping goes when nobody holds a word of it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Word:
    """A number that one process sets and others wait for. It may not jump by a multiple of 2**32 at once."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._number = ctypes.c_uint64.from_buffer(memory, offset)
        low = offset if sys.byteorder == "little" else offset + 4
        self._low = ctypes.c_uint32.from_buffer(memory, low)
        self._address = ctypes.addressof(self._low)

    @property
    def value(self) -> int:
        return self._number.value

    def set(self, value: int) -> None:
        self._number.value = value
        self.wake()

    def wake(self) -> None:
        if _FUTEX is not None:
            _C.syscall(ctypes.c_long(_FUTEX), ctypes.c_void_p(self._address), _WAKE, _ALL, None, None, 0)

    def wait_while(self, seen: int, seconds: float) -> None:
        """Returns when the number is another than `seen`, when somebody wakes it, after `seconds`, or for no reason."""
        if _FUTEX is None:
            time.sleep(min(seconds, _NAP))
            return
        limit = struct.pack("qq", int(seconds), int(seconds % 1 * 1e9))
        expected = ctypes.c_uint32(seen & _LOW)
        _C.syscall(ctypes.c_long(_FUTEX), ctypes.c_void_p(self._address), _WAIT, expected, limit, None, 0)
