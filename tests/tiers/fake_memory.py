"""A device's blocks without a device, and disks that go wrong."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
import zlib

from tokenmill.kv.tiers.files import PAGE, Files
from tokenmill.kv.transport import Namespace

SIZE = 5000  # bytes of a block: no multiple of a page
SPACE = Namespace("weights", "form", 16, "crc32")


def name(number):
    return number.to_bytes(16, "little")


class FakeMemory:
    """Blocks as bytearrays; a copy may be held up half-way."""

    def __init__(self, blocks=64, size=SIZE):
        self.block_bytes = size
        self.blocks = [bytearray(size) for _ in range(blocks)]
        self.go = threading.Event()
        self.go.set()

    def fill(self, block, number):
        self.blocks[block][:] = payload(number, self.block_bytes)
        return block

    def allocate(self, size):
        return memoryview(mmap.mmap(-1, max(size, PAGE)))[:size]

    def gather(self, blocks, targets):
        for block, target in zip(blocks, targets, strict=True):
            assert self.go.wait(20)
            target[:] = self.blocks[block]

    def scatter(self, blocks, sources):
        for block, source in zip(blocks, sources, strict=True):
            assert self.go.wait(20)
            self.blocks[block][:] = source


def payload(number, size=SIZE):
    return random.Random(number).randbytes(size)


def ended(tier, ticket, seconds=20.0):
    """Wait for a ticket."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for done in tier.poll():
            if done.ticket == ticket:
                return done
        time.sleep(0.002)
    raise AssertionError(f"ticket {ticket} never ended")


def put(tier, memory, numbers, salt=""):
    blocks = [memory.fill(at, number) for at, number in enumerate(numbers)]
    return ended(tier, tier.write([name(number) for number in numbers], blocks, salt))


def get(tier, memory, numbers):
    """Those that arrived, each compared with what was written."""
    blocks = list(range(32, 32 + len(numbers)))
    done = ended(tier, tier.read([name(number) for number in numbers], blocks))
    for number, block in list(zip(numbers, blocks))[: done.arrived]:
        assert memory.blocks[block] == payload(number, memory.block_bytes), f"block {number} holds something else"
    return done


def summed(data):
    return zlib.crc32(data)


class BadFiles(Files):
    """A disk with little room, and one that fails from some moment on."""

    def __init__(self, room=1 << 40):
        super().__init__()
        self.room = room
        self.fail_reads = self.fail_writes = self.halve_writes = False
        self.writes = 0

    def reserve(self, file, size):
        if size > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= size
        super().reserve(file, size)

    def read(self, file, into, at):
        if self.fail_reads:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, into, at)

    def write(self, file, data, at):
        self.writes += 1
        if self.fail_writes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.halve_writes:  # what a power cut leaves
            data = data[: len(data) // 2 // PAGE * PAGE]
        super().write(file, data, at)
