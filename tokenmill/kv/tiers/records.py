"""Records: a block as it lies on disk or goes over a wire; a page of header, then the payload."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

MAGIC = b"tokenKV1"
# magic, namespace, identity, hash of the salt, sequence, bytes of payload, its checksum; then a checksum of all that
_HEADER = struct.Struct("<8s16s16s16sQQI")
_SUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _SUM.size


@dataclass(frozen=True)
class Header:
    namespace: bytes
    identity: bytes
    salt: bytes  # 16 bytes that say nothing of it
    sequence: int  # larger ones were written later
    length: int
    checksum: int

    def pack_into(self, target: memoryview) -> None:
        packed = _HEADER.pack(
            MAGIC, self.namespace, self.identity, self.salt, self.sequence, self.length, self.checksum
        )
        target[: _HEADER.size] = packed
        target[_HEADER.size : HEADER_BYTES] = _SUM.pack(zlib.crc32(packed))


def read_header(source: memoryview) -> Header | None:
    """None: there is no whole header here."""
    packed = bytes(source[: _HEADER.size])
    (checksum,) = _SUM.unpack(source[_HEADER.size : HEADER_BYTES])
    if zlib.crc32(packed) != checksum or not packed.startswith(MAGIC):
        return None
    return Header(*_HEADER.unpack(packed)[1:])
