"""Where the ranks of one generation exchange tensors: memory that rank 0 makes, and each rank's communicator."""

from __future__ import annotations

from tokenmill.parallel.layout import Layout
from tokenmill.parallel.segment import Segment
from tokenmill.parallel.shared_memory import SharedMemoryCommunicator


class Meeting:
    """One rank's part in it."""

    def __init__(self, segment: Segment, layout: Layout, rank: int, file: int = -1) -> None:
        self.file = file  # by which other ranks join; open until `close`
        self._segment = segment
        groups = _groups(layout)
        self.communicator = SharedMemoryCommunicator(segment, rank, groups.index(list(layout.tensor_group(rank))))
        # For what stages hand on, and for what ranks with requests of their own ask of each other's experts.
        self.every = SharedMemoryCommunicator(segment, rank) if layout.pp * layout.dp > 1 else None

    @classmethod
    def call(cls, layout: Layout) -> Meeting:
        """For rank 0, before the others are told."""
        segment = Segment.create(_groups(layout))
        segment.enter(0)
        return cls(segment, layout, 0, segment.unname())

    @classmethod
    def join(cls, file: int, layout: Layout, rank: int) -> Meeting:
        """For every other rank. Takes the file over."""
        return cls(Segment.open(file, rank), layout, rank)

    def abort(self) -> None:
        """Whoever waits for another rank is told that it will not come. Any thread may say so."""
        self._segment.abort()

    def close(self) -> None:
        self.communicator.close()


def _groups(layout: Layout) -> list[list[int]]:
    """All ranks, then those that share their layers' heads and columns, where these are others."""
    groups = [list(range(layout.ranks))]
    for rank in range(layout.ranks):
        for group in (list(layout.stage_group(rank)), list(layout.tensor_group(rank))):
            if group not in groups:
                groups.append(group)
    return groups
