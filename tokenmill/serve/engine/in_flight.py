"""InFlightFile: names the sequences an engine was working on, in a file that outlives it: a crash has suspects.

A message would do as well, but the last one before a crash is the one that is lost. A mapped page is the kernel's.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path

MOST = 65_535  # keys; more are not named
_COUNT = struct.Struct("<Q")
_SIZE = _COUNT.size + 8 * MOST


class InFlightFile:
    """Written by the engine before every step; read by the front after the engine's death."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _SIZE)

    @staticmethod
    def create(path: Path) -> None:
        """A record with nobody in it."""
        with path.open("wb") as file:
            file.truncate(_SIZE)

    def write(self, keys: Iterable[int]) -> None:
        numbers = array("Q", keys)[:MOST]
        _COUNT.pack_into(self._page, 0, 0)  # a torn record names nobody rather than somebody else
        self._page[_COUNT.size : _COUNT.size + 8 * len(numbers)] = numbers.tobytes()
        _COUNT.pack_into(self._page, 0, len(numbers))

    @staticmethod
    def read(path: Path) -> list[int]:
        """Who was in flight; nobody where the file cannot be read."""
        try:
            data = path.read_bytes()
        except OSError:
            return []
        if len(data) < _COUNT.size:
            return []
        (count,) = _COUNT.unpack_from(data)
        return array("Q", data[_COUNT.size : _COUNT.size + 8 * min(count, MOST)]).tolist()
