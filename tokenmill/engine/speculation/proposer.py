"""Proposer: drafts for speculative decoding, and what a draft is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tokenmill.engine.request import Request
from tokenmill.engine.step import Step, StepResult

MAX_DRAFTS = 16  # tokens that a step verifies for one row


@dataclass(slots=True)
class Draft:
    """How one request may go on after the tokens that the host knows: a chain of tokens.

    `kinds` is what the proposer knows about the chances of each, a number below its own `kinds`: the shares of drafts
    that held are counted by kind and depth.
    """

    tokens: list[int]
    kinds: list[int]


class Proposer(Protocol):
    """Looks for drafts. A wrong one costs time and changes nothing: a step's noise is keyed by position."""

    name: str
    kinds: int
    on_device: int  # tokens that the device drafts at the end of steps, and only it knows; 0: the host asks for drafts

    def prior(self, kind: int, depth: int) -> float:
        """How probable it is that a draft holds if those before it do, as long as little was counted."""
        ...

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        """One entry per request, each of at most `length` tokens from position `len(request.tokens)` on."""
        ...

    def ended(self, request: Request) -> None:
        """The request has ended, or its tokens are to be forgotten."""
        ...

    def forget(self, salt: str | None = None) -> None:
        """Nothing that was learned of any text, or of those with this cache salt, may be used any more."""
        ...


@runtime_checkable
class DraftsOnDevice(Proposer, Protocol):
    """A proposer whose drafts are made at the end of steps: what goes wrong there is found here."""

    failure: Exception | None


@runtime_checkable
class WritesAhead(Proposer, Protocol):
    """A proposer on a device that leaves keys and values of its drafts in the rows' blocks."""

    room_ahead: int  # at how many positions behind the last one that a step computes


@runtime_checkable
class KeepsUp(WritesAhead, Protocol):
    """A proposer on a device with keys and values of its own, which are to be there of all that requests have."""

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Before a step at whose end the device drafts: launch what reads what is missing. How many tokens that is."""
        ...

    def follows(self, request: Request) -> bool:
        """Whether what the newest step drafted for it was drafted from all that it has."""
        ...

    def launched(self, step: Step) -> None: ...

    def committed(self, step: Step, result: StepResult) -> None:
        """Before its tokens are added to the requests'."""
        ...

    def reset(self) -> None:
        """Launched steps have failed."""
        ...


def in_background(make: Callable[[], Proposer], waited_for: bool = True) -> Future[Proposer]:
    """waited_for: the process does not end before it is made. Who computes with torch must be: a thread that the
    interpreter stops inside of it takes the process down."""
    future: Future[Proposer] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="proposer", daemon=not waited_for).start()
    return future
