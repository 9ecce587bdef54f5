"""ProgramState: what a program appends to and reads from, on the program's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tokenmill.errors import InvalidRequest
from tokenmill.program.expressions import Expression, Gen, Select, expression
from tokenmill.program.operations import (
    Choose,
    CloseTurn,
    Generate,
    OpenTurn,
    Operation,
    ProgramSequence,
    Usage,
    Variable,
)

MAX_BRANCHES = 1024


class Runtime(Protocol):
    """Whoever runs a program: work of any thread for the engine's, and waiting for what came of it."""

    @property
    def usage(self) -> Usage: ...

    def new_sequence(self) -> ProgramSequence: ...

    def post(self, work: Callable[[], None]) -> None: ...

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until then; raises what ended the runtime instead."""
        ...


class ProgramState:
    """Text so far, and named results. `s += ...` returns at once; reading waits for what is read.

    s += "Once upon a time" + gen("story", max_tokens=40)
    s["story"]
    """

    def __init__(self, runtime: Runtime, sequence: ProgramSequence | None = None) -> None:
        self._runtime = runtime
        self._sequence = runtime.new_sequence() if sequence is None else sequence
        self._variables: dict[str, Variable] = {}
        self._asked = 0  # operations that were handed on
        self._in_turn = False
        self._branches: list[ProgramState] = []
        self.result: Any = None  # what the program returned
        self.exception: BaseException | None = None  # what it raised

    def __iadd__(self, value: Any) -> ProgramState:
        operations = self._operations(expression(value))
        self._asked += 1
        self._runtime.post(lambda: self._sequence.append(operations))
        return self

    def __getitem__(self, name: str) -> str:
        """What `gen`, `select` or `set` of this name came to, the newest."""
        return self._ready(name).text

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def get(self, name: str, default: str | None = None) -> str | None:
        return self[name] if name in self._variables else default

    def set(self, name: str, value: str) -> None:
        """A result that nobody asked the model for."""
        self._variables[name] = Variable(value, done=True)

    def meta(self, name: str) -> dict[str, Any]:
        """What is known beside the text: of `gen` its "finish_reason" and "output" (a RequestOutput, with
        log-probabilities where they were asked for), of `select` the "scores".
        """
        return self._ready(name).meta

    def stream(self, name: str) -> Iterator[str]:
        """The text of a result as it comes, piece by piece."""
        variable, shown = self._variable(name), 0
        while True:
            self._wait(lambda: variable.done or len(variable.text) > shown)  # noqa: B023 (called before it returns)
            done, text = variable.done, variable.text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
            if done:
                return

    def text(self) -> str:
        """All text so far: what was appended and what was said."""
        self.sync()
        return self._sequence.text

    @property
    def token_ids(self) -> list[int]:
        """Those that the model has read or written; text behind them becomes tokens with the next `gen`."""
        self.sync()
        return list(self._sequence.tokens)

    @property
    def error(self) -> Exception | None:
        """Why it ended early."""
        return self._sequence.error

    @property
    def usage(self) -> Usage:
        """Of everything that ran together with this state."""
        return self._runtime.usage

    def sync(self) -> None:
        """Wait for everything that was appended."""
        self._sequence.settle()
        self._wait(lambda: self._sequence.idle and self._sequence.taken == self._asked)
        if self._sequence.error is not None:
            raise self._sequence.error

    def sync_all(self) -> None:
        """The same, and for all that was forked from it."""
        self.sync()
        for one in self._branches:
            one.sync_all()

    def fork(self, count: int = 2) -> Branches:
        """So many states that go on from here, each on its own; what was said so far is computed once."""
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MAX_BRANCHES:
            raise InvalidRequest(f"fork makes between 1 and {MAX_BRANCHES} branches, not {count!r:.60}")
        children = [self._sequence.child() for _ in range(count)]
        branches = [ProgramState(self._runtime, child) for child in children]
        for one in branches:
            one._variables = dict(self._variables)
            self._branches.append(one)
        self._asked += 1
        self._runtime.post(lambda: self._sequence.fork(children))
        return Branches(branches)

    def _operations(self, parts: Expression) -> list[Operation]:
        found: list[Operation] = []
        for part in parts:
            if isinstance(part, str):
                found.append(part)
            elif isinstance(part, Gen):
                found.append(Generate(part, self._new(part.name)))
            elif isinstance(part, Select):
                found.append(Choose(part, self._new(part.name)))
            else:
                if self._in_turn:
                    raise InvalidRequest(f"a turn of role {part.role!r} stands inside another turn; append them apart")
                self._in_turn = True
                try:
                    found += [OpenTurn(part.role), *self._operations(part.content), CloseTurn()]
                finally:
                    self._in_turn = False
        return found

    def _new(self, name: str | None) -> Variable:
        variable = Variable()
        if name is not None:
            self._variables[name] = variable
        return variable

    def _variable(self, name: str) -> Variable:
        found = self._variables.get(name)
        if found is None:
            known = ", ".join(map(repr, self._variables)) or "nothing"
            raise KeyError(f"nothing is named {name!r} in this state; it has {known}")
        return found

    def _ready(self, name: str) -> Variable:
        variable = self._variable(name)
        self._wait(lambda: variable.done)
        return variable

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._runtime.wait(lambda: ready() or self._sequence.error is not None)
        if self._sequence.error is not None and not ready():
            raise self._sequence.error

    def _close(self) -> None:
        """On the engine's thread, when the program has ended."""
        self._sequence.close()
        for one in self._branches:
            one._close()


class Branches(list[ProgramState]):
    """States that were forked from one: `branches[2]` is one of them, `branches["idea"]` what each has of that name."""

    def join(self) -> list[ProgramState]:
        """Wait for all of them."""
        for one in self:
            one.sync()
        return list(self)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [one[key] for one in self]
        return super().__getitem__(key)
