"""Ranks that are connected by sockets: what they exchange, in any order, and what ends them."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verb_calls import Call, any_calls, counted, make, random_call, same_bits

from tokenmill.errors import PeerLostError
from tokenmill.parallel import channel as channels
from tokenmill.parallel import sockets
from tokenmill.parallel.channel import Channel
from tokenmill.parallel.sockets import Channels, SocketCommunicator

PATIENCE = 240


class Wired:
    """Ranks that are threads, each with a connection to every other one."""

    def __init__(self, size: int) -> None:
        ends: list[dict[int, Channel]] = [{} for _ in range(size)]
        for low in range(size):
            for high in range(low + 1, size):
                pair, key = socket.socketpair(), secrets.token_bytes(32)
                ends[low][high], ends[high][low] = Channel(pair[0], key, True), Channel(pair[1], key, False)
        self.over = threading.Event()
        self.ranks = [Channels(one, self.over.is_set, self.over.set) for one in ends]

    def group(self, *members: int, number: int = 0) -> list[SocketCommunicator]:
        return [SocketCommunicator(self.ranks[rank], rank, members, number) for rank in members]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def together(*works: Callable[[], Any]) -> list[Any]:
    """What each brings; what one of them raises."""
    found: list[Any] = [None] * len(works)

    def do(index: int) -> None:
        try:
            found[index] = works[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=do, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return found


def make_all(c: SocketCommunicator, calls: Sequence[Call]) -> tuple[Any, Any]:
    for number, call in enumerate(calls):
        got, expected = make(c, call)
        if got is not None and expected is not None:
            assert same_bits(got, expected), f"call {number} of {calls}"
    return dict(c.counts), dict(c.bytes)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 4),
    calls=any_calls,
    frame=st.sampled_from([97, 4096, 1 << 20]),
    share=st.sampled_from([0, 4096]),
)
def test_verbs_bring_what_torch_computes_bit_for_bit(size: int, calls: list[Call], frame: int, share: int) -> None:
    """Of all shapes and types, in one frame and in many, and sums of which each rank adds up a share."""
    if size == 1:
        calls = [call for call in calls if call[0] != "ring"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "LARGEST", frame)
        patch.setattr(sockets, "SHARED_SUM", share)
        wired = Wired(size)
        found = together(*(lambda c=c: make_all(c, calls) for c in wired.group(*range(size))))
        wired.close()
    assert found == [counted(size, calls)] * size


def test_large_tensors_cross_in_both_directions_and_nobody_waits_for_the_other_to_read() -> None:
    """Far more than sockets hold: all send before anybody receives what it was sent."""
    wired = Wired(3)
    big = torch.arange(3 << 20, dtype=torch.float32)

    def rank(c: SocketCommunicator) -> bool:
        parts = c.all_gather(big + c.rank)
        whole = c.all_reduce(big.clone())
        c.send(big + c.rank, (c.rank + 1) % 3)  # all of them, and nobody receives yet
        before = (c.rank - 1) % 3
        came = c.receive(big, before)
        return all(torch.equal(part, big + n) for n, part in enumerate(parts)) and (
            torch.equal(whole, big + big + big) and torch.equal(came, big + before)
        )

    assert together(*(lambda c=c: rank(c) for c in wired.group(0, 1, 2))) == [True] * 3
    wired.close()


def test_groups_share_connections_and_calls_of_another_group_are_told_apart() -> None:
    wired = Wired(4)
    every, pairs = wired.group(0, 1, 2, 3), {1: wired.group(0, 1, number=1), 2: wired.group(2, 3, number=2)}

    def rank(number: int) -> list[Any]:
        near = pairs[1 + number // 2][number % 2]
        x = torch.tensor([float(number)])
        return [
            float(near.all_reduce(x.clone())),
            float(every[number].all_reduce(x)),
            float(near.all_reduce(x.clone())),
        ]

    assert together(*(lambda n=n: rank(n) for n in range(4))) == [[1, 6, 1], [1, 6, 1], [5, 6, 5], [5, 6, 5]]
    x = torch.zeros(3)
    found = together(lambda: every[0].send(x, 1), lambda: pairs[1][1].receive(x, 0))
    assert isinstance(found[1], PeerLostError) and "where 12 of 4:1 come next" in str(found[1])
    wired.close()


def test_ranks_that_ask_for_different_things_are_told_so() -> None:
    wired = Wired(2)
    one, other = wired.group(0, 1)
    found = together(lambda: one.all_gather(torch.zeros(4)), lambda: other.all_reduce(torch.zeros(4)))
    assert all(isinstance(error, PeerLostError) for error in found)
    assert any("where 16 of" in str(error) for error in found)
    wired.close()


def cut_after(bytes_left: int, source: socket.socket, to: socket.socket, flip: bool) -> None:
    """Pass on so many bytes; then hang up, or change one and go on."""
    while True:
        try:
            data = bytearray(source.recv(4096))
        except OSError:
            break
        if not data:
            break
        if bytes_left < len(data):
            if flip and bytes_left >= 0:
                data[bytes_left] ^= 1 << (bytes_left % 8)
            elif not flip:
                data = data[:bytes_left]
        with_less = bytes_left < len(data) or (not flip and bytes_left <= len(data))
        bytes_left -= len(data)
        try:
            to.sendall(data)
        except OSError:
            break
        if with_less and not flip:
            break
    for one in (source, to):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 6000), flip=st.booleans(), seed=st.integers(0, 9))
def test_frames_that_are_cut_or_changed_anywhere_end_the_group_and_bring_nothing_wrong(
    at: int, flip: bool, seed: int
) -> None:
    key = secrets.token_bytes(32)
    (near, near_proxy), (far_proxy, far) = socket.socketpair(), socket.socketpair()
    over = [threading.Event(), threading.Event()]
    ranks = [
        Channels({1: Channel(near, key, True)}, over[0].is_set, over[0].set),
        Channels({0: Channel(far, key, False)}, over[1].is_set, over[1].set),
    ]
    proxies = [
        threading.Thread(target=cut_after, args=(at, near_proxy, far_proxy, flip)),
        threading.Thread(target=cut_after, args=(1 << 40, far_proxy, near_proxy, False)),
    ]
    for proxy in proxies:
        proxy.start()

    def rank(number: int) -> None:
        c, chance = SocketCommunicator(ranks[number], number, (0, 1), 0), random.Random(seed)
        while True:
            got, expected = make(c, random_call(chance))
            assert got is None or expected is None or same_bits(got, expected)

    found = together(lambda: rank(0), lambda: rank(1))
    assert all(isinstance(error, PeerLostError) for error in found), found
    assert all(one.is_set() for one in over)
    for proxy in proxies:
        proxy.join(PATIENCE)
    for one in (*ranks, near_proxy, far_proxy):
        one.close()


@pytest.mark.parametrize("how", ["abort", "end", "close"])
def test_whoever_waits_is_told_when_the_group_ends(how: str) -> None:
    wired = Wired(3)
    c = wired.group(0, 1, 2)

    def end() -> None:
        time.sleep(random.random() / 10)
        {"abort": c[2].abort, "end": wired.over.set, "close": lambda: wired.ranks[2].close()}[how]()

    found = together(lambda: c[0].all_reduce(torch.zeros(3)), lambda: c[1].receive(torch.zeros(3), 2), end)
    assert all(isinstance(error, PeerLostError) for error in found[:2]), found
    for rank in (0, 1):
        with pytest.raises(PeerLostError):
            c[rank].barrier()
    wired.close()


def test_what_nobody_asked_for_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is beyond it waits with the sender."""
    monkeypatch.setattr(channels, "READ_AHEAD", 1 << 16)
    monkeypatch.setattr(channels, "LARGEST", 1 << 12)
    wired = Wired(3)
    c = wired.group(0, 1, 2)
    many = [torch.full((1 << 16,), float(n)) for n in range(8)]

    def sender() -> None:
        for one in many:
            c[0].send(one, 1)

    def waiter() -> list[float]:
        c[1].receive(torch.zeros(1), 2)  # reads what rank 0 sends meanwhile
        held = wired.ranks[1].channels[0]
        assert len(held._inbox) <= 2 * (1 << 16) + channels._READ
        return [float(c[1].receive(many[0], 0)[-1]) for _ in many]

    def late() -> None:
        time.sleep(0.2)
        c[2].send(torch.zeros(1), 1)

    assert together(sender, waiter, late)[1] == [float(n) for n in range(8)]
    wired.close()
