"""Where the ranks of one generation exchange tensors: memory that each machine makes for its own, and connections."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.parallel.channel import Channel
from tokenmill.parallel.communicator import Communicator
from tokenmill.parallel.layout import Layout
from tokenmill.parallel.segment import Segment
from tokenmill.parallel.shared_memory import SharedMemoryCommunicator
from tokenmill.parallel.sockets import Channels, SocketCommunicator


class Meeting:
    """One rank's part in it. `machine`: the ranks whose memory it shares."""

    communicator: Communicator  # to the ranks that have other parts of its layers
    every: Communicator | None  # for what stages hand on, and for what ranks ask of each other's experts

    def __init__(self, segment: Segment, layout: Layout, machine: range, rank: int, file: int = -1) -> None:
        self.file = file  # by which other ranks join; open until `close`
        self._segment, self._layout, self._machine, self._rank = segment, layout, machine, rank
        self._channels: Channels | None = None
        if len(machine) == layout.ranks:
            self.connect({})

    @classmethod
    def call(cls, layout: Layout, machine: range) -> Meeting:
        """For rank 0, before the others are told."""
        segment, file = call_machine(layout, machine)
        segment.enter(0)
        return cls(segment, layout, machine, 0, file)

    @classmethod
    def join(cls, file: int, layout: Layout, machine: range, rank: int) -> Meeting:
        """For every other rank. Takes the file over."""
        return cls(Segment.open(file, rank - machine.start), layout, machine, rank)

    def connect(self, channels: Mapping[int, Channel]) -> None:
        """To ranks of other machines, by rank: there is nothing to talk with before."""
        if len(self._machine) < self._layout.ranks:
            segment = self._segment
            self._channels = Channels(channels, lambda: segment.ended, segment.abort)
        layout = self._layout
        self.communicator = self._communicator(list(layout.tensor_group(self._rank)))
        self.every = self._communicator(list(range(layout.ranks))) if layout.pp * layout.dp > 1 else None

    def abort(self) -> None:
        """Whoever waits for another rank is told that it will not come. Any thread may say so."""
        self._segment.abort()
        if self._channels is not None:
            self._channels.abort()

    def close(self) -> None:
        self._segment.forget()
        if self._channels is not None:
            self._channels.close()

    def _communicator(self, members: list[int]) -> Communicator:
        near = _within(members, self._machine)
        if near is not None:
            groups = _groups(self._layout, self._machine)
            return SharedMemoryCommunicator(self._segment, self._rank - self._machine.start, groups.index(near))
        assert self._channels is not None
        return SocketCommunicator(self._channels, self._rank, members, int(len(members) == self._layout.ranks))


def call_machine(layout: Layout, machine: range) -> tuple[Segment, int]:
    """The memory of a machine's ranks, and the file by which they join."""
    segment = Segment.create(_groups(layout, machine))
    return segment, segment.unname()


def _groups(layout: Layout, machine: range) -> list[list[int]]:
    """All ranks of a machine, then those that share their layers' heads and columns, where these are others. As the
    machine numbers them."""
    groups = [list(range(len(machine)))]
    for rank in machine:
        for group in (layout.stage_group(rank), layout.tensor_group(rank)):
            near = _within(list(group), machine)
            if near is not None and near not in groups:
                groups.append(near)
    return groups


def _within(members: list[int], machine: range) -> list[int] | None:
    """Their numbers on the machine; None: some of them are elsewhere."""
    return [one - machine.start for one in members] if all(one in machine for one in members) else None
