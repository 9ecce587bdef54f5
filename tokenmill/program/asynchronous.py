"""AsyncRuntime: programs on an AsyncLLM, whose engine has a thread of its own. Each program runs on another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.async_llm import AsyncLLM
from tokenmill.errors import TokenmillError
from tokenmill.outputs import RequestOutput
from tokenmill.program.backend import ProcessorBackend
from tokenmill.program.operations import Usage
from tokenmill.program.sequence import Call, TokenSequence
from tokenmill.program.waiting import Waiting
from tokenmill.request_state import RequestState


class AsyncRuntime(Waiting):
    def __init__(self, llm: AsyncLLM, options: dict[str, Any]) -> None:
        super().__init__()
        self.backend = _AsyncBackend(llm, options, self.wake)
        self._llm = llm

    @property
    def usage(self) -> Usage:
        return self.backend.usage

    def new_sequence(self) -> TokenSequence:
        return TokenSequence(self.backend)

    def finish(self, wait: bool) -> None:
        """What was held is given back on the engine's thread."""

    def post(self, work: Callable[[], None]) -> None:
        self._llm.run_on_engine(work, self._worked)

    def _worked(self, value: object, error: Exception | None) -> None:
        """On the engine's thread. An error is this program's alone; or the engine has stopped, and nobody works."""
        if error is not None:
            self.end(error)


class _AsyncBackend(ProcessorBackend):
    def __init__(self, llm: AsyncLLM, options: dict[str, Any], changed: Callable[[], None]) -> None:
        super().__init__(llm._processor, llm._built.engine, options, changed)
        self._llm = llm
        self._state_of: dict[Call, RequestState] = {}

    def submit(self, call: Call) -> None:
        state = self.prepare(call)
        self._processor.submit(state)
        self._state_of[call] = state
        self._llm.deliver(state, _Receiver(self, call))

    def cancel(self, call: Call) -> None:
        state = self._state_of.pop(call, None)
        if state is not None:
            self._llm.deliver(state, None)
            self.give_up(state)

    def hear(self, call: Call, output: RequestOutput) -> None:
        if output.finished:
            self._state_of.pop(call, None)
        call.told(output)


class _Receiver:
    """Takes a request's outputs where a mailbox would, on the engine's thread."""

    def __init__(self, backend: _AsyncBackend, call: Call) -> None:
        self._backend, self._call = backend, call

    def put(self, output: RequestOutput) -> None:
        self._backend.hear(self._call, output)

    def fail(self, error: Exception) -> None:
        self._call.failed(error if isinstance(error, TokenmillError) else TokenmillError(str(error)))
