"""Desk: hands what the engine said to those who wait for it, and sees every request to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenmill.engine.request import Finish
from tokenmill.follow import Follow
from tokenmill.front import Front
from tokenmill.serve.engine_client.remote_engine import RemoteEngine
from tokenmill.serve.engine_client.stream import Stream, Ticket

log = logging.getLogger("tokenmill.serve")

EXPIRY_GRACE = 0.25  # seconds after a deadline before the front ends what the engine should have ended


class Desk:
    """One ticket per request that is not finished. Whatever ends a request, its ticket is closed exactly once."""

    front: Front  # there once an engine has told its facts

    def __init__(self, remote: RemoteEngine, on_end: Callable[[Ticket], None]) -> None:
        self.tickets: dict[str, Ticket] = {}
        self._remote = remote
        self._on_end = on_end

    def open(self, follow: Follow, generation: int) -> Stream:
        """Hand a prepared request to the engine. Raises what `Front.submit` raises."""
        self.front.submit(follow)
        ticket = self.tickets[follow.id] = Ticket(follow, generation)
        if follow.timeout is not None:
            loop = asyncio.get_running_loop()
            ticket.timer = loop.call_later(follow.timeout + EXPIRY_GRACE, self._expire, ticket)
        return Stream(ticket, self.drop)

    def deliver(self, made: float | None = None) -> None:
        """Give what arrived to those who wait for it; `made` is when the engine made it."""
        for delta in self._remote.step():
            id = delta.request.id
            ticket = self.tickets.get(id) or self.tickets.get(id.partition("/")[0])
            try:
                moved = self.front.take_in([delta])
            except Exception as error:  # one answer that cannot be decoded is no other's trouble
                log.exception("request %s cannot be followed", id)
                if ticket is not None:
                    ticket.follow.leader.error = f"{type(error).__name__}: {error}"
                    self.drop(ticket, Finish.ERROR)
                continue
            if id in self._remote.at_fault:
                self._remote.at_fault.discard(id)
                if ticket is not None:
                    ticket.at_fault = True
            if moved and ticket is not None:
                ticket.wake(made)
                if ticket.follow.finished:
                    self._close(ticket)

    def drop(self, ticket: Ticket, why: Finish = Finish.CANCELLED) -> None:
        """End a request from this side."""
        if self.tickets.get(ticket.follow.id) is not ticket:
            return
        for sequence in ticket.follow.sequences:
            sequence.finish = sequence.finish or why
        self.front.cancel(ticket.follow)
        ticket.wake()
        self._close(ticket)

    def _expire(self, ticket: Ticket) -> None:
        """Its deadline has passed and no engine was there to say so."""
        leader = ticket.follow.leader
        late = self._remote.clock() - leader.arrival
        leader.error = leader.error or f"its deadline passed {late:.3f} s after it arrived"
        self.drop(ticket, Finish.DEADLINE)

    def _close(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket.follow.id, None) is None:
            return
        if ticket.timer is not None:
            ticket.timer.cancel()
        self._on_end(ticket)
