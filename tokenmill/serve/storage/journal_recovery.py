"""What can be read of a journal's bytes, whatever has happened to them. Touches no file."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, field

MAGIC = b"tokenmill journal 1\n"
_VERSION = re.compile(rb"tokenmill journal (\d{1,9})\n")
_HEAD = struct.Struct("<II")  # length, checksum
_MOST_FLIPPED = 2  # bytes of a beginning that may differ before a file is somebody else's


@dataclass(frozen=True)
class RecoveredJournal:
    """What was found. A `foreign` file is none of ours, and must not be touched."""

    records: list[bytes] = field(default_factory=list)
    rest: bytes = b""  # what is no record
    end: int | None = None  # where appends go on; None: the file has to be written anew
    version: int | None = None  # of a journal that another tokenmill wrote; all of it is `rest`
    foreign: bool = False


def framed(record: bytes) -> bytes:
    """A record as it is in the file. It is not empty: zeros, which a crash may leave, are no records."""
    if not record:
        raise ValueError("a record of a journal may not be empty")
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def recover_journal(data: bytes) -> RecoveredJournal:
    if MAGIC.startswith(data):  # new, or torn at its very beginning
        return RecoveredJournal()
    if data.startswith(MAGIC):
        return _records(data)
    if (found := _VERSION.match(data)) is not None:
        return RecoveredJournal(rest=data, version=int(found[1]))
    first, _ = _chain(data, len(MAGIC))
    if first:  # its beginning is damaged
        rest = _records(data)
        return RecoveredJournal(rest.records, data[: len(MAGIC)] + rest.rest)
    differing = sum(one != other for one, other in zip(data, MAGIC))
    if differing <= _MOST_FLIPPED or not any(data):
        return RecoveredJournal(rest=data)
    return RecoveredJournal(foreign=True)


def _records(data: bytes) -> RecoveredJournal:
    records, at = _chain(data, len(MAGIC))
    if at == len(data):
        return RecoveredJournal(records, end=at)
    beyond = _skip(data, at)
    if beyond is None:  # as a crash leaves it: nothing after the damage can be told from what records contain
        return RecoveredJournal(records, data[at:], end=at)
    later, rest = beyond
    return RecoveredJournal(records + later, rest)


def _chain(data: bytes, at: int) -> tuple[list[bytes], int]:
    """Whole records from there on, and where they end."""
    records = []
    while (record := _record_at(data, at)) is not None:
        records.append(record)
        at += _HEAD.size + len(record)
    return records, at


def _skip(data: bytes, at: int) -> tuple[list[bytes], bytes] | None:
    """Whole records beyond damaged ones, and the damaged ones, where lengths lead to the very end of the file: then
    only contents were damaged. Else None: to search on for something like a record could find one that a client had
    written into its own."""
    records: list[bytes] = []
    damaged: list[bytes] = []
    while at < len(data):
        end = _end_at(data, at)
        if end is None:
            return None
        damaged.append(data[at:end])
        more, at = _chain(data, end)
        if not more:
            continue
        records += more
    return (records, b"".join(damaged)) if records else None


def _record_at(data: bytes, at: int) -> bytes | None:
    """The record that begins there, or None where none is whole."""
    end = _end_at(data, at)
    if end is None:
        return None
    record = data[at + _HEAD.size : end]
    return record if zlib.crc32(record) == _HEAD.unpack_from(data, at)[1] else None


def _end_at(data: bytes, at: int) -> int | None:
    """Where the record that begins there says that it ends, if that can be."""
    if at + _HEAD.size > len(data):
        return None
    length: int = _HEAD.unpack_from(data, at)[0]
    end = at + _HEAD.size + length
    return end if length and end <= len(data) else None
