"""The processes of all ranks but the first, seen from the engine: started, told what to do, missed when they end."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenmill.engine.checkpoints import Progress
from tokenmill.engine.ranks.orders import Order, receive_order, send_order
from tokenmill.errors import ConfigError, ModelError, TokenmillError
from tokenmill.parallel.communicator import PeerLostError

if TYPE_CHECKING:
    from tokenmill.engine.ranks.machines import Machines

log = logging.getLogger("tokenmill.ranks")

SERVER = (sys.executable, "-m", "tokenmill.engine.ranks.fork_server")
LAST_WORDS = 0.1  # seconds in which it becomes known how a process ended
LOOK = 0.1  # seconds between looks how far ranks have loaded
TELL_EVERY = 0.2  # seconds between words of it
GRACE = 5.0  # seconds in which a fork server has to be gone


@dataclass(eq=False)
class _Peer:
    """One rank's process, and what is known of it."""

    rank: int
    generation: int = 0  # that it was told of last
    ready: int = 0  # the newest one that it takes part in
    failed: tuple[str, str] | None = None  # kind of error, and its text: why it takes part in none
    progress: tuple[int, int, str] | None = None
    follower: Follower | None = None  # told when it is gone
    gone: bool = False
    why: str = ""  # it is gone, where somebody else knows that
    code: int | None = None  # it ended with
    pid: int | None = None  # on this machine
    socket: socket.socket | None = None  # None: on another machine

    def hear(self, word: Order) -> None:
        """What it says of itself."""
        if "ready" in word:
            self.ready = word["ready"]
        elif "progress" in word:
            done, total, what = word["progress"]
            self.progress = done, total, what
        elif "failed" in word and word["generation"] == self.generation:  # the one before has ended anyway
            self.failed = word["failed"], word["why"]
        elif "broken" in word and word["broken"] == self.generation and self.follower is not None:
            self.follower.broken(self.rank, word["why"])


class Follower(Protocol):
    """A generation, as far as it is told of its ranks. Any thread may."""

    def lose(self, rank: int, why: str = "") -> None:
        """Its process is gone."""
        ...

    def broken(self, rank: int, why: str) -> None:
        """It cannot reach another rank. Whose fault that is may be told by others."""
        ...


class RankProcesses:
    """Ranks of this machine are forked by a server that has imported the engine, and a thread listens to each of them;
    those of other machines are what `machines` has."""

    def __init__(
        self,
        ranks: int,
        command: Sequence[str] = SERVER,
        *,
        here: range | None = None,  # those to be forked; None: all but rank 0
        machines: Machines | None = None,
        heard: Callable[[int, Order], None] = lambda rank, word: None,  # what a rank of this machine says
    ) -> None:
        """Another `command` may stand in for the real server."""
        self.ranks, self.machines, self._command = ranks, machines, command
        self.here = range(1, ranks) if here is None else here
        self._heard = heard
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._closed = self._server_ready = False
        self._server: subprocess.Popen[bytes] | None = None
        if self.here:
            self._start_server()
        if machines is not None:
            machines.tells = self._hear_far

    @property
    def near(self) -> int:
        """Ranks of this machine, the first included."""
        return self.ranks if self.machines is None else self.machines.here

    def ensure(self, rank: int) -> None:
        """There is a process for the rank, or a machine that has one."""
        peer = self._peers.get(rank)
        if peer is not None and not peer.gone:
            return
        if rank not in self.here:
            with self._changed:
                self._peers[rank] = _Peer(rank)
            return
        ours, theirs = socket.socketpair()
        peer = _Peer(rank, socket=ours)
        with self._changed:  # before the server can answer, which says which process it is
            self._peers[rank] = peer
        with theirs:
            try:
                send_order(self._to_server, {"fork": rank}, [theirs.fileno()])
            except OSError:  # then all ranks are gone, too
                assert self._server is not None
                self._server.kill()
                self._server.wait()
                self._start_server()
                send_order(self._to_server, {"fork": rank}, [theirs.fileno()])
        threading.Thread(target=self._listen, args=(peer, ours), name=f"rank-{rank}", daemon=True).start()

    def order(self, rank: int, order: Order, files: Sequence[int], follower: Follower) -> None:
        """`follower`: told, by any thread, when the process that was told this is gone."""
        peer = self._peers[rank]
        with self._changed:
            peer.generation, peer.failed, peer.progress = order["generation"], None, None
            peer.follower = follower
            gone = peer.gone
        if gone:
            follower.lose(rank)
        if peer.socket is None:
            assert self.machines is not None
            if not self.machines.order(rank, order):
                self._lose(peer)
            return
        with contextlib.suppress(OSError):  # whoever listens to it knows that it is gone
            send_order(peer.socket, order, files)

    def wait_ready(self, generation: int, patience: float, tell: Progress, ended: Callable[[], bool]) -> None:
        """Until all ranks take part, or the generation has ended; `patience`: seconds in which one that does not take
        part yet computes or says something."""
        heard = told = time.monotonic()
        seen: object = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled(generation), LOOK)
                peers = list(self._peers.values())
            for peer in peers:
                if peer.failed is not None:
                    raise _error(peer)
                if peer.gone:
                    raise PeerLostError(self.why_gone(peer.rank))
            waiting = [peer for peer in peers if not _takes_part(peer, generation)]
            if not waiting or ended():
                return
            now = time.monotonic()
            if now - told > TELL_EVERY:  # who waits for this hears that it goes on
                told = now
                known = [peer.progress for peer in waiting if peer.progress is not None]
                here = len(peers) - len(waiting), len(peers), "waiting for other ranks"
                tell(*min(known, key=_share, default=here))
            state = [(peer.progress, self.computed(peer.rank)) for peer in waiting]
            if state != seen:
                heard, seen = now, state
            elif now - heard > patience:
                for peer in waiting:
                    self.kill(peer.rank)
                raise PeerLostError(f"rank {waiting[0].rank} hung while it was made ready, for {patience:g} s")

    def _is_settled(self, generation: int) -> bool:
        peers = self._peers.values()
        return all(_takes_part(one, generation) for one in peers) or any(one.failed or one.gone for one in peers)

    def why_gone(self, rank: int) -> str:
        """In words; how it ended becomes known a moment after it did."""
        peer = self._peers[rank]
        with self._changed:
            self._changed.wait_for(lambda: peer.code is not None or peer.why, LAST_WORDS)
        if peer.why or peer.code is None:
            return peer.why or f"rank {rank} is gone"
        if peer.code < 0:
            return f"rank {rank} was killed by {_signal_name(-peer.code)}"
        return f"rank {rank} ended with status {peer.code}"

    def code(self, rank: int) -> int | None:
        """That it ended with, as far as that is known."""
        return self._peers[rank].code

    def was_killed(self, rank: int) -> bool:
        """By somebody outside, or the system for want of memory, or with its whole machine."""
        peer = self._peers[rank]
        return peer.code == -signal.SIGKILL or (peer.socket is None and peer.code is None)

    def pid(self, rank: int) -> int | None:
        """On this machine."""
        return self._peers[rank].pid

    def is_known(self, rank: int) -> bool:
        """Whether there was ever a process for it."""
        return rank in self._peers

    def computed(self, rank: int) -> float | None:
        """Processor seconds so far; None where that cannot be known."""
        if rank not in self.here:
            return None if self.machines is None else self.machines.computed(rank)
        pid = self._peers[rank].pid
        return None if pid is None else cpu_seconds(pid)

    def kill(self, rank: int) -> None:
        """End a rank that does not answer."""
        peer = self._peers[rank]
        if peer.pid is not None:
            with contextlib.suppress(OSError):
                send_order(self._to_server, {"kill": peer.pid})
        elif peer.socket is None and self.machines is not None:
            self.machines.kill(rank)

    def close(self) -> None:
        """End them all. Nothing of them is left when this returns."""
        if self._closed:
            return
        self._closed = True
        if self.machines is not None:
            self.machines.close()
        if self._server is None:
            return
        for peer in self._peers.values():
            if peer.socket is not None:
                _hang_up(peer.socket)
        _hang_up(self._to_server)
        if not self._server_ready:  # it still imports, and has forked nobody
            self._server.kill()
        try:
            self._server.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        self._server_ready = False
        with theirs:
            self._server = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._to_server = ours
        threading.Thread(target=self._listen_to_server, args=(ours,), name="rank-server", daemon=True).start()

    def _listen_to_server(self, server: socket.socket) -> None:
        while (received := receive_order(server)) is not None:
            order = received[0]
            with self._changed:
                self._server_ready = True
                if "forked" in order:
                    self._peers[order["forked"]].pid = order["pid"]
                elif "ended" in order:
                    for peer in self._peers.values():
                        if peer.pid == order["ended"]:
                            peer.code = order["code"]
                self._changed.notify_all()

    def _listen(self, peer: _Peer, its: socket.socket) -> None:
        while (received := receive_order(its)) is not None:
            with self._changed:
                peer.hear(received[0])
                self._changed.notify_all()
            self._heard(peer.rank, received[0])
        self._lose(peer)
        its.close()

    def _lose(self, peer: _Peer) -> None:
        with self._changed:
            peer.gone = True
            follower = peer.follower  # of an older generation, where this process was replaced in the meantime
            self._changed.notify_all()
        if follower is not None:
            follower.lose(peer.rank)

    def _hear_far(self, rank: int, word: Order) -> None:
        peer = self._peers.get(rank)
        if peer is None or peer.gone:
            return
        with self._changed:
            if "lost" in word:
                peer.why, peer.code = word["lost"], word.get("code")
            else:
                peer.hear(word)
            self._changed.notify_all()
        if "lost" in word:
            self._lose(peer)


def _takes_part(peer: _Peer, generation: int) -> bool:
    """It said so, and the server, which may be slower, said which process it is: one that hangs can be killed."""
    return peer.ready >= generation and (peer.pid is not None or peer.socket is None)


def cpu_seconds(pid: int) -> float | None:
    """That a process has computed so far; None where that cannot be known."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(parts[11]) + int(parts[12])) / 100


def _share(progress: tuple[int, int, str]) -> float:
    done, total, _ = progress
    return done / total if total else 0.0


def _hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _error(peer: _Peer) -> TokenmillError:
    assert peer.failed is not None
    kind, why = peer.failed
    if kind == PeerLostError.__name__:  # while it was made ready; who that was is found out, or has been
        return PeerLostError(why)
    kinds: dict[str, type[TokenmillError]] = {"ConfigError": ConfigError, "ModelError": ModelError}
    if kind in kinds:
        return kinds[kind](why)
    return RankFailedError(f"rank {peer.rank} could not be made ready: {kind}: {why}")


class RankFailedError(TokenmillError):
    """A rank could not load its part of the model."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
