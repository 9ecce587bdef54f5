"""HostTier: blocks in the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.kv.tiers.queued import QueuedTier, ThreadBell
from tokenmill.kv.tiers.slots import Slots
from tokenmill.kv.transport import BlockMemory, Checksum

if TYPE_CHECKING:
    from tokenmill.kv.tiers.listener import TierListener


class HostTier(QueuedTier):
    """One piece of memory, which the device copies to and from at full speed, cut into slots of a block each."""

    def __init__(
        self, memory: BlockMemory, size: int, checksum: Checksum, bell: ThreadBell, name: str = "host memory"
    ) -> None:
        """size: bytes, of which whole blocks are used."""
        count, self._size = size // memory.block_bytes, memory.block_bytes
        self._bytes = memory.allocate(count * self._size)
        self._sums = [0] * count
        self.listener: TierListener | None = None  # which others bring blocks to
        super().__init__(name, memory, Slots(count), checksum, bell)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        super().close()

    @property
    def memory_of_slots(self) -> memoryview:
        return self._bytes

    def sum_of(self, slot: int) -> int:
        """As what lies there should have it."""
        return self._sums[slot]

    def slot(self, slot: int) -> memoryview:
        return self._bytes[slot * self._size : (slot + 1) * self._size]

    def set_sum(self, slot: int) -> None:
        """What lies in the slot is as it should be."""
        self._sums[slot] = self.checksum(self.slot(slot))

    def is_whole(self, slot: int) -> bool:
        return self._sums[slot] == self.checksum(self.slot(slot))

    def _write_one(self, identity: bytes, salt: str, block: int, slot: int) -> None:
        self.memory.gather([block], [self.slot(slot)])
        self.set_sum(slot)

    def _read_some(self, identities: list[bytes], slots: list[int], blocks: list[int]) -> int:
        whole = 0
        while whole < len(slots) and self.is_whole(slots[whole]):
            whole += 1
        self.memory.scatter(blocks[:whole], [self.slot(slot) for slot in slots[:whole]])
        return whole
