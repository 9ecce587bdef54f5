"""SocketCommunicator: ranks on several machines exchange tensors over connections, one between each two that talk."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tokenmill.errors import PeerLostError
from tokenmill.parallel.channel import Channel
from tokenmill.parallel.sums import sum_by_pairs
from tokenmill.peers import PeerError

SHARED_SUM = 1 << 16  # bytes from which on each of more than two ranks adds up a share of the elements, and tells all
LOOK = 0.05  # seconds between looks whether the group has ended

_CALLS = {verb: number for number, verb in enumerate(("all_reduce", "all_gather", "all_to_all", "barrier", "send"))}
_Item = tuple[int, memoryview]  # a rank, and bytes for it or from it


class Channels:
    """All connections of one rank in one generation. They belong to one thread, but for `abort`.

    Who waits for one rank reads what comes from all of them, so nobody waits for it to take what was sent.
    """

    def __init__(self, channels: Mapping[int, Channel], ended: Callable[[], bool], abort: Callable[[], None]) -> None:
        """channels: by rank; ended: whether the generation has, looked at while nothing comes; abort: end it for the
        ranks of this machine."""
        self.channels = dict(channels)
        self._has_ended, self._end = ended, abort
        self._ranks = {one.socket.fileno(): rank for rank, one in self.channels.items()}
        self._poll = select.poll()
        self._asked: dict[int, int] = {}  # by file: the events that are waited for

    def exchange(self, verb: str, group: int, outgoing: Sequence[_Item], incoming: Sequence[_Item]) -> None:
        """Send to some, receive from some, all at once. Returns when what is sent is on its way, and the rest here."""
        self._check()
        call = _CALLS[verb]
        left = [_Coming(rank, self.channels[rank], call, group, into) for rank, into in incoming]
        going = [(rank, self.channels[rank]) for rank, _ in outgoing]
        for rank, data in outgoing:
            self.channels[rank].put(call, group, data)
        while True:
            for rank, channel in going:
                with self._losing(rank):
                    channel.flush()
            left = [one for one in left if not self._is_here(one)]
            going = [one for one in going if one[1].has_unsent]
            if not (left or going):
                return
            self._wait()

    def abort(self) -> None:
        """Any thread may end it, for the ranks that this one is connected with, too."""
        self._end()
        for channel in self.channels.values():
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()

    def _is_here(self, one: _Coming) -> bool:
        with self._losing(one.rank):
            return one.take()

    def _wait(self) -> None:
        """Until something may have come, or gone. What has come is read."""
        for file, rank in self._ranks.items():
            channel = self.channels[rank]
            events = (select.POLLIN if channel.has_room else 0) | (select.POLLOUT if channel.has_unsent else 0)
            if self._asked.get(file) != events:
                self._poll.register(file, events)
                self._asked[file] = events
        for file, events in self._poll.poll(LOOK * 1000):
            if events & ~select.POLLOUT:
                with self._losing(self._ranks[file]):
                    self.channels[self._ranks[file]].fill()
        self._check()

    def _check(self) -> None:
        if self._has_ended():
            raise PeerLostError("the group of ranks has ended")

    @contextmanager
    def _losing(self, rank: int) -> Iterator[None]:
        """Whoever finds another rank gone ends the generation."""
        try:
            yield
        except (OSError, PeerError, ValueError) as error:  # ValueError: closed meanwhile
            ended = self._has_ended()
            self.abort()
            why = "the group of ranks has ended" if ended else f"rank {rank} cannot be reached any more: {error}"
            raise PeerLostError(why) from None


class _Coming:
    """A tensor that one rank sends."""

    def __init__(self, rank: int, channel: Channel, call: int, group: int, into: memoryview) -> None:
        self.rank = rank
        self._channel, self._call, self._group, self._into, self._done = channel, call, group, into, 0

    def take(self) -> bool:
        """Whether all of it is here."""
        while (done := self._channel.take(self._call, self._group, self._into, self._done)) is not None:
            self._done = done
            if done == len(self._into):
                return True
        return False


class SocketCommunicator:
    """A rank's end of one group, with that group's numbering of ranks. Its calls cannot be recorded."""

    recordable = False

    def __init__(self, channels: Channels, rank: int, members: Sequence[int], group: int) -> None:
        """rank: among all, as members are; group: a number below 256 that the group's frames carry."""
        self.rank, self.size = members.index(rank), len(members)
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._channels, self._members, self._group = channels, list(members), group
        self._others = [one for one in range(self.size) if one != self.rank]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_reduce", x)
        x = x.contiguous()
        if self.size == 1:
            return x
        if self.size == 2 or x.nbytes < SHARED_SUM:
            return sum_by_pairs(list(self._gathered("all_reduce", x)))
        shares = x.view(-1).tensor_split(self.size)
        parts = [share.new_empty(len(shares[self.rank])) if n != self.rank else share for n, share in enumerate(shares)]
        self._exchange("all_reduce", [(n, shares[n]) for n in self._others], [(n, parts[n]) for n in self._others])
        total = torch.empty_like(x)
        totals = total.view(-1).tensor_split(self.size)
        totals[self.rank].copy_(sum_by_pairs(parts))
        mine = totals[self.rank]
        self._exchange("all_reduce", [(n, mine) for n in self._others], [(n, totals[n]) for n in self._others])
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_gather", x)
        return self._gathered("all_gather", x.contiguous())

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != self.size:
            raise ValueError(f"all_to_all got {x.shape[0]} parts for {self.size} ranks")
        self._count("all_to_all", x)
        x = x.contiguous()
        out = torch.empty_like(x)
        out[self.rank] = x[self.rank]
        self._exchange("all_to_all", [(n, x[n]) for n in self._others], [(n, out[n]) for n in self._others])
        return out

    def send(self, x: torch.Tensor, to: int) -> None:
        self._count("send", x)
        self._exchange("send", [(to, x.contiguous())], [])

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        self._count("receive", like)
        out = torch.empty(like.shape, dtype=like.dtype)
        self._exchange("send", [], [(source, out)])
        return out

    def barrier(self) -> None:
        self._count("barrier", nothing := torch.empty(0))
        self._exchange("barrier", [(n, nothing) for n in self._others], [(n, nothing) for n in self._others])

    def abort(self) -> None:
        self._channels.abort()

    def close(self) -> None:
        self._channels.close()

    def _gathered(self, verb: str, x: torch.Tensor) -> torch.Tensor:  # dense; [...] -> [size, ...]
        out = x.new_empty((self.size, *x.shape))
        out[self.rank] = x
        self._exchange(verb, [(n, x) for n in self._others], [(n, out[n]) for n in self._others])
        return out

    def _exchange(
        self, verb: str, outgoing: list[tuple[int, torch.Tensor]], incoming: list[tuple[int, torch.Tensor]]
    ) -> None:
        self._channels.exchange(verb, self._group, self._items(outgoing), self._items(incoming))

    def _items(self, tensors: list[tuple[int, torch.Tensor]]) -> list[_Item]:
        return [(self._members[n], _bytes(tensor)) for n, tensor in tensors]

    def _count(self, verb: str, x: torch.Tensor) -> None:
        self.counts[verb] += 1
        self.bytes[verb] += x.nbytes


def _bytes(x: torch.Tensor) -> memoryview:  # dense
    return x.reshape(-1).view(torch.uint8).numpy().data
