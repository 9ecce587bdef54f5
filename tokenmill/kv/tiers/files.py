"""Files: what the disk tier asks of the system, in one place so that tests can stand in for a bad disk."""

from __future__ import annotations

import os
from pathlib import Path

PAGE = 4096  # what O_DIRECT wants addresses, offsets and sizes to be multiples of


class Files:
    """Segments of a fixed size, read and written past the page cache where the filesystem can do that."""

    def __init__(self) -> None:
        self.direct = hasattr(os, "O_DIRECT")  # as far as is known

    def open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError:
                self.direct = False  # or it cannot be opened at all, which the next line says
        return os.open(path, flags, 0o600)

    def reserve(self, file: int, size: int) -> None:
        """Room on the disk for the whole of it: what is written later cannot fail for want of that."""
        os.posix_fallocate(file, 0, size)

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def read(self, file: int, into: memoryview, at: int) -> int:
        """Bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(into):
            count = os.preadv(file, [into[done:]], at + done)
            if not count:
                break
            done += count
        return done

    def write(self, file: int, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwritev(file, [data[done:]], at + done)

    def close(self, file: int) -> None:
        os.close(file)
