"""What a program's state is asked to do, one operation after the other, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from tokenmill.program.expressions import Gen, Select


@dataclass
class Usage:
    """What a program cost, and what it was spared."""

    calls: int = 0
    prompt_tokens: int = 0  # of all calls, as somebody who makes them one by one sends them
    computed_tokens: int = 0  # of these: what was not there already
    output_tokens: int = 0

    @property
    def saved_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens

    def add(self, more: Usage) -> None:
        for name in (one.name for one in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(more, name))


@dataclass(eq=False)
class Variable:
    """A result. Written on the engine's thread, read on the program's."""

    text: str = ""  # so far
    done: bool = False
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generate:
    part: Gen
    into: Variable


@dataclass(frozen=True)
class Choose:
    part: Select
    into: Variable


@dataclass(frozen=True)
class OpenTurn:
    role: str


@dataclass(frozen=True)
class CloseTurn:
    pass


Operation = str | Generate | Choose | OpenTurn | CloseTurn


class ProgramSequence(Protocol):
    """A program's state as whoever answers keeps it: what the program appends to and reads from.

    `append`, `fork` and `close` are called on the thread that answers.
    """

    @property
    def text(self) -> str:
        """So far."""
        ...

    tokens: list[int]
    error: Exception | None
    idle: bool  # nothing is left to be done
    taken: int  # times that something was asked for

    def append(self, operations: Sequence[Operation]) -> None: ...

    def child(self) -> Any:
        """One that waits until it is forked from this one."""
        ...

    def fork(self, children: list[Any]) -> None: ...

    def settle(self) -> None:
        """Have what was appended made text, if it is not: somebody wants to read it."""
        ...

    def close(self) -> None: ...
