"""Blocks that go to another process over TCP: peers that die, lie, come back or do not know the secret."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_memory import SIZE, SPACE, FakeMemory, ended, get, name, payload, put, summed

from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.listener import TierListener
from tokenmill.kv.tiers.queued import ThreadBell
from tokenmill.kv.tiers.remote import RemoteTier
from tokenmill.kv.tiers.wire import PUT, Connection, PeerError, fill, introduce

SECRET = b"k" * 32


class Side:
    """A decode engine's host memory with a listener, and what a prefill worker has."""

    def __init__(self, slots=64, port=0, space=SPACE):
        self.memory = FakeMemory()
        self.host = HostTier(self.memory, slots * SIZE, summed, ThreadBell())
        self.listener = TierListener(self.host, ("127.0.0.1", port), SECRET, space.digest)

    def close(self):
        self.listener.close()
        self.host.close()


@pytest.fixture
def side():
    side = Side()
    yield side
    side.close()


def remote(side, secret=SECRET, space=SPACE, memory=None):
    return RemoteTier(side.listener.address, secret, space.digest, memory or FakeMemory(), summed, ThreadBell())


def test_what_is_pushed_is_found_by_the_other_engine(side):
    tier = remote(side)
    assert put(tier, tier.memory, range(20), "salt").arrived == 20
    assert side.host.lookup([name(number) for number in range(20)]) == 20
    assert get(side.host, side.memory, range(20)).arrived == 20
    assert tier.lookup([name(number) for number in range(20)]) == 20
    assert get(tier, tier.memory, range(20)).arrived == 20  # and can be fetched again
    tier.forget("salt")
    until = time.monotonic() + 20
    while side.host.lookup([name(0)]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not side.host.lookup([name(0)]) and not tier.lookup([name(0)])
    side.host.slots.check()
    tier.close()


def test_what_the_peer_has_is_learned_without_waiting(side):
    put(side.host, side.memory, range(4))
    tier = remote(side)
    names = [name(number) for number in range(6)]
    until = time.monotonic() + 20
    while tier.lookup(names) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert tier.lookup(names) == 4 and get(tier, tier.memory, range(4)).arrived == 4
    side.host.discard([name(2)])
    done = get(tier, tier.memory, range(4))
    assert done.arrived == 2 and done.failure is None, "what the peer lost meanwhile does not arrive"
    assert tier.lookup(names) == 2
    tier.close()


def test_a_wrong_secret_and_another_model_are_sent_away(side):
    for wrong in ({"secret": b"guess"}, {"space": replace(SPACE, weights="others")}):
        tier = remote(side, **wrong)
        done = put(tier, tier.memory, range(3))
        assert done.arrived == 0 and done.failure
        tier.close()
    assert not side.host.lookup([name(0)]) and side.listener.received == 0
    good = remote(side)
    assert put(good, good.memory, range(3)).arrived == 3
    good.close()


def connect(side):
    raw = socket.create_connection(side.listener.address)
    return raw, introduce(raw, SECRET, SPACE.digest, 1 << 20, server=False)


class Tampering:
    """A socket that changes or cuts what goes out."""

    def __init__(self, raw, after, flip):
        self.raw, self.after, self.flip, self.sent = raw, after, flip, 0

    def sendall(self, data):
        data = bytearray(data)
        at = self.after - self.sent
        self.sent += len(data)
        if 0 <= at < len(data):
            if not self.flip:
                self.raw.sendall(data[:at])
                self.raw.close()
                raise OSError("cut")
            data[at] ^= 8
        self.raw.sendall(data)

    def __getattr__(self, what):
        return getattr(self.raw, what)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5, 9, 14, 20, 31, 40, 100, SIZE // 14, SIZE - 1, SIZE + 30, SIZE + 45])
def test_a_torn_or_altered_block_is_never_found(side, after, flip):
    raw, peer = connect(side)
    peer._socket = Tampering(raw, after, flip)
    try:
        peer.send(PUT, name(1), memoryview(payload(1)))
        peer.send(PUT, name(2), memoryview(payload(2)))
        raw.settimeout(0.5)
        raw.recv(100)
    except Exception:
        pass  # the other side may hang up at any time
    raw.close()
    settle(side)
    assert not side.host.lookup([name(1)])
    side.host.slots.check()
    tier = remote(side)
    assert put(tier, tier.memory, [1]).arrived == 1 and get(side.host, side.memory, [1]).arrived == 1
    tier.close()


def settle(side):
    """Until nobody is connected any more."""
    until = time.monotonic() + 20
    while side.listener._peers and time.monotonic() < until:
        time.sleep(0.005)


def test_a_frame_cannot_be_sent_twice(side):
    raw, peer = connect(side)
    sent = []
    real = raw.sendall

    class Recorder(Tampering):
        def sendall(self, data):
            sent.append(bytes(data))
            real(data)

    peer._socket = Recorder(raw, -1, False)
    peer.send(PUT, name(1), memoryview(payload(1)))
    peer.receive()
    side.host.discard([name(1)])
    with contextlib.suppress(OSError):
        for part in sent:
            real(part)
    settle(side)
    assert not side.host.lookup([name(1)])


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)])
def test_strangers_are_sent_away_and_harm_nobody(side, garbage):
    raw = socket.create_connection(side.listener.address)
    raw.sendall(garbage)
    raw.close()
    tier = remote(side)
    assert put(tier, tier.memory, range(3)).arrived == 3
    tier.close()


def test_a_peer_that_is_not_there_costs_nothing_and_is_found_when_it_comes_back(side):
    tier = remote(side)
    assert put(tier, tier.memory, range(3)).arrived == 3
    port = side.listener.address[1]
    side.listener.close()
    settle(side)
    done = put(tier, tier.memory, range(5, 8))
    assert done.arrived == 0 and done.failure
    assert tier.lookup([name(0)]) == 0, "whoever comes back under the same name may have lost everything"
    again = Side(port=port)
    until = time.monotonic() + 20
    while not put(tier, tier.memory, range(10, 13)).arrived and time.monotonic() < until:
        time.sleep(0.05)
    assert again.host.lookup([name(10)]) == 1
    tier.close()
    again.close()


def test_a_peer_that_says_nothing_is_given_up(side, monkeypatch):
    monkeypatch.setattr("tokenmill.peers.FRAME_SECONDS", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))

    given_up = threading.Event()

    def mute():
        raw, _ = listener.accept()
        introduce(raw, SECRET, SPACE.digest, 1 << 20, server=True)
        given_up.wait(20)

    threading.Thread(target=mute, daemon=True).start()
    tier = RemoteTier(listener.getsockname()[:2], SECRET, SPACE.digest, FakeMemory(), summed, ThreadBell())
    done = ended(tier, tier.write([name(1)], [0], ""))
    assert done.arrived == 0 and "says nothing" in done.failure
    given_up.set()
    tier.close()
    listener.close()


def test_leases_keep_what_is_on_its_way_and_end(side, monkeypatch):
    monkeypatch.setattr("tokenmill.kv.tiers.listener.PUT_SECONDS", 0.2)
    tier = remote(side)
    pushed = put(tier, tier.memory, range(30)).arrived + put(tier, tier.memory, range(30, 50)).arrived
    assert pushed == 32 == side.listener.received, "half of the room is this engine's own, as long as leases run"
    for start in range(100, 300, 30):
        put(side.host, side.memory, range(start, start + 30))
    assert side.host.lookup([name(0)]) in (0, 1)  # leased so long, or not any more: a busy machine decides
    time.sleep(0.3)
    for start in range(300, 500, 30):
        put(side.host, side.memory, range(start, start + 30))
    assert not any(side.host.lookup([name(number)]) for number in range(32)), "stranded blocks are freed"
    assert put(tier, tier.memory, range(60, 70)).arrived == 10
    side.host.slots.check()
    tier.close()


PUSHER = """
import sys, itertools
sys.path[:0] = {paths!r}
from fake_memory import FakeMemory, put, summed, SPACE
from tokenmill.kv.tiers.remote import RemoteTier
from tokenmill.kv.tiers.queued import ThreadBell
tier = RemoteTier(("127.0.0.1", {port}), b"k" * 32, SPACE.digest, FakeMemory(), summed, ThreadBell())
for start in itertools.count(int(sys.argv[1]), 8):
    assert put(tier, tier.memory, range(start, start + 8)).failure is None
    print(start, flush=True)
"""


def test_a_pusher_killed_at_any_moment_leaves_only_whole_blocks(monkeypatch):
    monkeypatch.setattr("tokenmill.kv.tiers.listener.PUT_SECONDS", 0.0)
    side = Side()
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    script = PUSHER.format(paths=paths, port=side.listener.address[1])
    for turn, wait in enumerate((0.0, 0.004, 0.013)):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(turn * 10_000)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3):
            process.stdout.readline()
        time.sleep(wait)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        settle(side)
        side.host.slots.check()
        held = [number for number in range(turn * 10_000, turn * 10_000 + 4000) if side.host.lookup([name(number)])]
        assert len(held) >= 16
        for number in held:
            assert get(side.host, side.memory, [number]).arrived == 1  # compares
    side.close()


def test_an_introduction_that_trickles_in_is_given_up():
    """Each byte comes in time, the whole does not."""
    mine, theirs = socket.socketpair()
    mine.settimeout(5.0)
    given_up = threading.Event()

    def trickle():
        with theirs, contextlib.suppress(OSError):
            for _ in range(1000):
                theirs.send(b"x")
                if given_up.wait(0.01):
                    return

    feeder = threading.Thread(target=trickle)
    feeder.start()
    with mine, pytest.raises(PeerError, match="says nothing any more"):
        fill(mine, memoryview(bytearray(100_000)), time.monotonic() + 0.2)
    given_up.set()
    feeder.join()


def test_a_connection_has_codes_of_its_own():
    one, other = socket.socketpair()
    frames = []
    for role, end in ((True, one), (False, other)):
        connection = Connection(end, b"k" * 32, 1000, role)
        connection.send(PUT, b"x")
    frames = [other.recv(100), one.recv(100)]
    assert frames[0] != frames[1]
