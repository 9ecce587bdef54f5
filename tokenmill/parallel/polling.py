"""PollingEnd: tensors exchanged through shared memory in plain torch, where there is no native library.

The same protocol as that of ops/native/src/exchange.h, where it is explained; words are looked at again and again.
"""

from __future__ import annotations

import time
from collections import Counter

import torch

from tokenmill.errors import PeerLostError
from tokenmill.parallel.segment import Area, Words
from tokenmill.parallel.sums import sum_by_pairs

_LINE = 64
_LONGEST_SLEEP = 0.001


class PollingEnd:
    """One rank's end of a group."""

    def __init__(self, area: Area, rank: int) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._area, self._rank = area, rank
        self._round = int(area.filled[rank, 0])
        self._slots = torch.from_numpy(area.slots)  # [size, 2, slot_bytes]
        self._bytes_of_rings = torch.from_numpy(area.bytes_of_rings)

    def sum(self, x: torch.Tensor) -> None:  # float32, dense; becomes the sum
        self._count("all_reduce", x.nbytes)
        flat, most = x.view(-1), self._area.slots.shape[2] // 4
        for begin in range(0, len(flat), most):
            own = flat[begin : begin + most]
            slots = self._slots[:, self._round & 1].view(torch.float32)[:, : len(own)]
            slots[self._rank] = own
            self._meet()
            own.copy_(sum_by_pairs(list(slots)))

    def gather(self, verb: str, x: torch.Tensor) -> torch.Tensor:  # dense; [...] -> [size, ...]
        self._count(verb, x.nbytes)
        out = torch.empty((self._area.size, *x.shape), dtype=x.dtype)
        into, own, most = _flat(out).view(self._area.size, -1), _flat(x), self._area.slots.shape[2]
        for begin in range(0, len(own), most):
            piece = own[begin : begin + most]
            slots = self._slots[:, self._round & 1, : len(piece)]
            slots[self._rank] = piece
            self._meet()
            into[:, begin : begin + most] = slots
        return out

    def turn(self, x: torch.Tensor) -> torch.Tensor:  # dense; [size, ...] -> the same
        self._count("all_to_all", x.nbytes)
        out = torch.empty_like(x)
        size = self._area.size
        into, own, most = _flat(out).view(size, -1), _flat(x).view(size, -1), self._area.slots.shape[2] // size
        most -= most % _LINE
        for begin in range(0, own.shape[1], most):
            piece = own[:, begin : begin + most]  # [to, bytes]
            slots = self._slots[:, self._round & 1, : size * most].view(size, size, most)[:, :, : piece.shape[1]]
            slots[self._rank] = piece
            self._meet()
            into[:, begin : begin + most] = slots[:, self._rank]
        return out

    def barrier(self) -> None:
        self._count("barrier", 0)
        self._meet()

    def send(self, x: torch.Tensor, to: int) -> None:
        self._count("send", x.nbytes)
        (written, read), data = self._area.rings[self._rank, to], self._bytes_of_rings[self._rank, to]
        left, lines = _flat(x), len(data) // _LINE
        while len(left):
            at = int(written[0])
            self._await(read, at - lines + 1)
            used = (at - int(read[0])) % 2**32
            now = min(len(left), min(lines - used, lines - at % lines) * _LINE)
            begin = at % lines * _LINE
            data[begin : begin + now] = left[:now]
            written[0] = (at - (-now // _LINE)) % 2**32
            left = left[now:]

    def receive(self, out: torch.Tensor, source: int) -> None:
        self._count("receive", out.nbytes)
        (written, read), data = self._area.rings[source, self._rank], self._bytes_of_rings[source, self._rank]
        left, lines = _flat(out), len(data) // _LINE
        while len(left):
            at = int(read[0])
            self._await(written, at + 1)
            there = (int(written[0]) - at) % 2**32
            now = min(len(left), min(there, lines - at % lines) * _LINE)
            begin = at % lines * _LINE
            left[:now] = data[begin : begin + now]
            read[0] = (at - (-now // _LINE)) % 2**32
            left = left[now:]

    def _count(self, verb: str, size: int) -> None:
        self.counts[verb] += 1
        self.bytes[verb] += size
        self._check()

    def _check(self) -> None:
        if self._area.ended[0]:
            raise PeerLostError("a rank of the group is gone")

    def _meet(self) -> None:
        self._check()
        self._round = (self._round + 1) % 2**32
        self._area.filled[self._rank, 0] = self._round
        for word in self._area.filled:
            self._await(word, self._round)

    def _await(self, word: Words, least: int) -> None:
        pause = 0.0
        while (int(word[0]) - least) % 2**32 >= 2**31:
            self._check()
            time.sleep(pause)
            pause = min(pause + 0.00001, _LONGEST_SLEEP)


def _flat(x: torch.Tensor) -> torch.Tensor:  # dense -> [bytes]
    return x.reshape(-1).view(torch.uint8)
