"""LocalRuntime: programs on an LLM of this process. They run on threads of their own, the engine on the caller's."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.errors import TokenmillError
from tokenmill.llm import LLM
from tokenmill.program.backend import ProcessorBackend
from tokenmill.program.operations import Usage
from tokenmill.program.sequence import Call, TokenSequence
from tokenmill.program.waiting import Waiting
from tokenmill.request_state import RequestState


class LocalRuntime(Waiting):
    """`drive` turns the engine's loop; everything else is for the threads of programs."""

    def __init__(self, llm: LLM, options: dict[str, Any]) -> None:
        super().__init__()
        self.backend: _LocalBackend = _LocalBackend(llm, options, self.wake)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    @property
    def usage(self) -> Usage:
        return self.backend.usage

    def new_sequence(self) -> TokenSequence:
        return TokenSequence(self.backend)

    def post(self, work: Callable[[], None]) -> None:
        self._posted.put(work)

    def finish(self, wait: bool) -> None:
        """What was held is given back already."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else may drive the engine meanwhile, programs' threads included."""
        llm = self.backend.llm
        llm._check_open()
        before, llm._driver = llm._driver, threading.get_ident()
        try:
            yield
        finally:
            llm._driver = before

    def drive(self, until: Callable[[], bool]) -> None:
        """Answer until then. Whoever makes `until` true posts something, so that it is noticed."""
        try:
            while not until():
                busy = self.backend.has_work
                while not self._posted.empty() or not busy:
                    self._posted.get()()
                    if until():
                        return
                    busy = self.backend.has_work
                self.backend.step()
        except BaseException as error:
            self.end(error if isinstance(error, Exception) else TokenmillError("the program was interrupted"))
            raise


class _LocalBackend(ProcessorBackend):
    def __init__(self, llm: LLM, options: dict[str, Any], changed: Callable[[], None]) -> None:
        super().__init__(llm._processor, llm._built.engine, options, changed)
        self.llm = llm
        self._waiting: deque[RequestState] = deque()  # for room in the queue
        self._call_of: dict[RequestState, Call] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._call_of)

    def submit(self, call: Call) -> None:
        state = self.prepare(call)
        self._call_of[state] = call
        self._waiting.append(state)

    def cancel(self, call: Call) -> None:
        for state in [one for one, mine in self._call_of.items() if mine is call]:
            del self._call_of[state]
            if state in self._waiting:
                self._waiting.remove(state)
            else:
                self.give_up(state)

    def step(self) -> None:
        """The engine's next step, and what it brought to whoever waits for it."""
        self.llm._check_open()
        for state in self.llm._step(self._waiting):
            call = self._call_of.get(state)
            if call is None:  # somebody else's, such as an open stream's
                continue
            if state.finished:
                del self._call_of[state]
            call.told(state.output())
