"""Door: where other machines come in, those that know the secret; and how one goes to the door of another."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection

from tokenmill.engine.ranks.orders import Order
from tokenmill.errors import ConfigError
from tokenmill.peers import HELLO_SECONDS, Connection, PeerError, introduce

log = logging.getLogger("tokenmill.ranks")

PROTOCOL = b"tokenRK1"
SAY = 1  # the kind of frames before there is a line, or a link
LARGEST = 1 << 20  # bytes of them
MOST_CALLERS = 128  # that have not proven yet that they know the secret
MOST_LINKS = 4096
LOOK = 0.05  # seconds between looks whether a link is still waited for

_OTHERS = "the peer is no part of an engine of several ranks"

Address = tuple[str, int]
Link = tuple[socket.socket, bytes]  # between two ranks, and its key
Ends = tuple[int, int, int]  # of a link: generation, the rank that calls, the rank that is called


class Door:
    """A thread for each caller, until it is known what it wants: to join, which `join` is told, or to link two ranks,
    whose links wait here for `links`."""

    def __init__(self, address: Address, secret: bytes, join: Callable[[Connection, Order, str], None] | None) -> None:
        """Raises OSError. join: the connection, what was said, and the caller's host; it raises PeerError."""
        self._secret, self._join = secret, join
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=MOST_CALLERS)
        self.address: Address = self._socket.getsockname()[:2]
        self._links: dict[Ends, Link] = {}
        self._callers: dict[socket.socket, None] = {}  # that have proven nothing yet, the oldest first
        self._guests: set[socket.socket] = set()  # of whom it is not known yet what they want
        self._oldest = 0  # generation whose links are taken
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept, name="rank-door", daemon=True).start()

    def links(self, wanted: Collection[Ends], ended: Callable[[], bool]) -> dict[Ends, Link] | None:
        """Those links, once all are there; None: `ended` said that they are not waited for any more."""
        found: dict[Ends, Link] = {}
        with self._changed:
            while len(found) < len(wanted):
                found |= {ends: self._links.pop(ends) for ends in wanted if ends in self._links}
                if ended():
                    for link, _ in found.values():
                        link.close()
                    return None
                if len(found) < len(wanted):
                    self._changed.wait(LOOK)
        return found

    def forget(self, before: int) -> None:
        """Links of older generations."""
        with self._changed:
            self._oldest = before
            for ends in [ends for ends in self._links if ends[0] < before]:
                self._links.pop(ends)[0].close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            callers = [*self._callers, *self._guests, self._socket]
        for one in callers:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.forget(1 << 62)

    def _accept(self) -> None:
        while not self._closed:
            try:
                caller, (host, *_) = self._socket.accept()
            except OSError:
                time.sleep(0.1)  # out of descriptors, perhaps: others may close theirs
                continue
            with self._changed:
                if len(self._callers) >= MOST_CALLERS:  # strangers who say nothing keep nobody out
                    oldest = next(iter(self._callers))
                    del self._callers[oldest]
                    with contextlib.suppress(OSError):  # it is gone already
                        oldest.shutdown(socket.SHUT_RDWR)
                self._callers[caller] = None
            threading.Thread(target=self._hear, args=(caller, host), name="rank-caller", daemon=True).start()

    def _hear(self, caller: socket.socket, host: str) -> None:
        keep = False
        try:
            connection = introduce(caller, self._secret, b"", LARGEST, server=True, protocol=PROTOCOL, others=_OTHERS)
            with self._changed:
                self._callers.pop(caller, None)
                self._guests.add(caller)
            said = heard(connection)
            if "link" in said:
                generation, source, to = (int(number) for number in said["link"])
                keep = self._take((generation, source, to), connection)
            elif self._join is not None:
                keep = True  # whoever joins owns it
                self._join(connection, said, host)
        except (PeerError, ValueError, KeyError, TypeError, OSError) as error:
            keep = False
            if not self._closed:
                log.warning("somebody from %s was sent away: %s", host, error)
        finally:
            with self._changed:
                self._callers.pop(caller, None)
                self._guests.discard(caller)
            if not keep:
                caller.close()

    def _take(self, ends: Ends, connection: Connection) -> bool:
        with self._changed:
            if ends[0] < self._oldest or ends in self._links or len(self._links) >= MOST_LINKS or self._closed:
                return False
            tell(connection, {"linked": True})
            self._links[ends] = connection.release()
            self._changed.notify_all()
            return True


def call(address: Address, secret: bytes, say: Order) -> Connection:
    """Go to a door and say what one wants. Raises PeerError."""
    connection = reach(address, secret)
    try:
        tell(connection, say)
    except PeerError:
        connection.close()
        raise
    return connection


def reach(address: Address, secret: bytes) -> Connection:
    """Go to a door, which waits for a word. Raises PeerError."""
    try:
        caller = socket.create_connection(address, timeout=HELLO_SECONDS)
    except OSError as error:
        raise PeerError(f"nobody is there: {error}") from None
    try:
        return introduce(caller, secret, b"", LARGEST, server=False, protocol=PROTOCOL, others=_OTHERS)
    except PeerError:
        caller.close()
        raise


def call_for_link(address: Address, secret: bytes, ends: Ends) -> Link:
    """Returns when the other side has it, too. Raises PeerError."""
    connection = call(address, secret, {"link": list(ends)})
    try:
        heard(connection)
    except PeerError:
        connection.close()
        raise
    return connection.release()


def tell(connection: Connection, say: Order) -> None:
    connection.send(SAY, json.dumps(say).encode())


def heard(connection: Connection) -> Order:
    """Raises PeerError."""
    kind, _, body = connection.receive()
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    if kind != SAY or not isinstance(said, dict):
        raise PeerError("the peer says something that is not known here")
    return said


def listen(address: Address, secret: bytes, setting: str, join: Callable[[Connection, Order, str], None]) -> Door:
    """At the address of a setting."""
    try:
        return Door(address, secret, join)
    except (OSError, OverflowError) as error:
        where = f"{address[0]}:{address[1]}"
        raise ConfigError(f"{setting} is {where!r}, where nobody can listen: {error}; choose another") from None
