"""Sessions: programs of clients, each a few states that go on from one another, for as long as somebody renews it."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.program.operations import Usage
from tokenmill.program.sequence import TokenSequence
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.engine_client.state_backend import StateBackend
from tokenmill.serve.errors import HttpError

MOST_STATES = 1024  # of a session
MOST_TENANT_STATES = 16_384  # of all sessions of a tenant: one without any text takes memory, too
MAIN = "main"  # the state that a session begins with
_REMEMBERED = 10_000  # sessions that have ended, for the sake of a better sentence


class State:
    """One text that grows. What it said stays when a call fails; it cannot go on then."""

    def __init__(self, name: str, backend: StateBackend) -> None:
        self.name, self.backend = name, backend
        self.sequence = TokenSequence(backend)
        self.busy = False  # a call of the client's is at work on it
        self.counted = 0  # of its size, in what its tenant holds

    @property
    def size(self) -> int:
        """Tokens, and characters that are none yet."""
        return len(self.sequence.tokens) + len(self.sequence.unread)


@dataclass(eq=False)
class Session:
    id: str
    tenant: str
    service: Service
    options: dict[str, Any]  # of all its requests
    lease: float  # seconds
    expires: float = 0.0  # of the loop's clock
    states: dict[str, State] = field(default_factory=dict)
    running: int = 0  # calls
    ended: str | None = None  # why
    timer: asyncio.TimerHandle | None = None  # looks whether its lease has ended
    spent: Usage = field(default_factory=Usage)  # of states that were dropped

    def state(self, name: str) -> State:
        """Raises HttpError."""
        if (found := self.states.get(name)) is None:
            known = ", ".join(map(repr, list(self.states)[:20]))
            raise HttpError(404, f"this session has no state {name[:60]!r}; it has {known}", "state_not_found", "state")
        return found

    @property
    def usage(self) -> Usage:
        whole = replace(self.spent)
        for state in self.states.values():
            whole.add(state.backend.usage)
        return whole


class Sessions:
    """Of all tenants. A tenant may have `most` of them, whose states hold `most_tokens` together."""

    def __init__(self, most: int, most_tokens: int, on_end: Callable[[str], None] = lambda how: None) -> None:
        self._most, self._most_tokens = most, most_tokens
        self._on_end = on_end
        self._open: dict[str, Session] = {}
        self._count: Counter[str] = Counter()  # by tenant
        self._tokens: Counter[str] = Counter()  # by tenant, as last counted
        self._states: Counter[str] = Counter()  # by tenant
        self._gone: OrderedDict[str, tuple[str, str]] = OrderedDict()  # tenant, why

    def __len__(self) -> int:
        return len(self._open)

    def open(self, tenant: str, service: Service, options: dict[str, Any], lease: float) -> Session:
        """Raises HttpError 429 and InvalidRequest."""
        if self._count[tenant] >= self._most:
            raise HttpError(
                429,
                f"{self._count[tenant]} of your sessions are open and {self._most} are allowed; close one, or wait "
                "until a lease ends",
                "too_many_sessions",
                retry_after=1.0,
            )
        self.check_states(tenant, 1)
        session = Session(f"sess_{secrets.token_hex(16)}", tenant, service, options, lease)
        self.add(session, MAIN)
        self._open[session.id] = session
        self._count[tenant] += 1
        self.renew(session)
        self._look_at(session)
        return session

    def found(self, tenant: str, id: str) -> Session:
        """Raises HttpError 404 for one that this tenant never had, 410 for one that has ended."""
        session = self._open.get(id)
        if session is not None and session.tenant == tenant:
            return session
        owner, why = self._gone.get(id, ("", ""))
        if why and owner == tenant:
            raise HttpError(410, f"the session {id[:60]!r} has ended: {why}; open another one", "session_ended")
        raise HttpError(404, f"there is no session {id[:60]!r}; open one with POST /v1/sessions", "session_not_found")

    def renew(self, session: Session, lease: float | None = None) -> None:
        session.lease = session.lease if lease is None else lease
        loop = asyncio.get_running_loop()
        session.expires = loop.time() + session.lease
        if session.timer is not None and session.expires < session.timer.when():
            session.timer.cancel()
            session.timer = loop.call_at(session.expires, self._look_at, session)

    def count(self, session: Session, state: State) -> None:
        """What this state holds by now. Calls do this as they go on: to walk all states takes too long."""
        if session.ended is None:
            size = state.size
            self._tokens[session.tenant] += size - state.counted
            state.counted = size

    def add(self, session: Session, name: str) -> State:
        """One more state of a session, for which `check_states` found room."""
        made = session.states[name] = State(name, StateBackend(session.service, session.options))
        self._states[session.tenant] += 1
        return made

    def check_states(self, tenant: str, more: int) -> None:
        """Raises HttpError 429 where so many states more are too many."""
        if self._states[tenant] + more > MOST_TENANT_STATES:
            raise HttpError(
                429,
                f"your sessions have {self._states[tenant]} states, this would add {more}, and {MOST_TENANT_STATES} "
                "are allowed; close sessions or drop states that nobody goes on from",
                "too_many_session_states",
            )

    def drop(self, session: Session, state: State) -> None:
        """Of a session that is open; nobody goes on from this state."""
        del session.states[state.name]
        self._states[session.tenant] -= 1
        self._tokens[session.tenant] -= state.counted
        session.spent.add(state.backend.usage)
        state.sequence.close()

    def check_room(self, session: Session, more: int) -> None:
        """Raises HttpError 429 where so many tokens more are too many."""
        used = self._tokens[session.tenant]
        if used + more > self._most_tokens:
            raise HttpError(
                429,
                f"your sessions hold {used} tokens, this would add {more}, and {self._most_tokens} are allowed; close "
                "sessions or drop states that nobody goes on from",
                "too_many_session_tokens",
            )

    def close(self, session: Session, how: str, why: str) -> None:
        """Give back all that it holds; whoever waits for it is told why. Safe to call twice."""
        if self._open.pop(session.id, None) is None:
            return
        session.ended = why
        self._count[session.tenant] -= 1
        self._states[session.tenant] -= len(session.states)
        self._gone[session.id] = session.tenant, why
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        if session.timer is not None:
            session.timer.cancel()
        for state in session.states.values():
            self._tokens[session.tenant] -= state.counted
            state.sequence.close()
        self._on_end(how)

    def _look_at(self, session: Session) -> None:
        """Again and again until its lease has ended. A call that runs keeps it."""
        loop = asyncio.get_running_loop()
        if session.running:
            self.renew(session)
        if loop.time() >= session.expires:
            self.close(session, "lease", f"nobody asked anything of it for {session.lease:g} s, which was its lease")
            return
        session.timer = loop.call_at(session.expires, self._look_at, session)
