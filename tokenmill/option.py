"""Option: what is declared of one setting (default, range, choices, text), and the check of values against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import ConfigError

_DECLARED = "option"  # in a field's metadata


@dataclass(frozen=True)
class CommandDefault:
    """What one command takes instead of the default, and why."""

    value: Any  # or a function that makes it; DERIVED: the command works it out
    why: str


class _Derived:
    """Stands for a value that a command works out from its own options."""


DERIVED = _Derived()


@dataclass(frozen=True)
class Option:
    """One setting. `None` and "auto" mean that it is left unset."""

    help: str  # one sentence, without its full stop
    group: str  # heading in --help
    default: Any = None
    solved: str = ""  # what is chosen from hardware and model where it is unset
    unset: str = ""  # what being unset means, where nothing is chosen
    more: str = ""  # for the docs alone: further sentences
    choices: tuple[str, ...] = ()
    low: int | None = None  # of whole numbers
    above: float | None = None  # of other numbers
    high: float | None = None
    unit: str = ""
    form: str = ""  # what a text has to be, or what a number has to be besides
    by_command: Mapping[str, CommandDefault] = field(default_factory=dict)
    name: str = ""
    kind: str = ""  # int, float, bool or str

    @property
    def optional(self) -> bool:
        return self.default is None

    def check(self, value: object) -> None:
        """Refuse what is of another kind or out of range, in a sentence that has the name, the value and the range."""
        if not ((value is None and self.optional) or self._fits(value)):
            raise ConfigError(f"{self.name} is {value!r}; it must be {self.wanted()}")

    def wanted(self) -> str:
        """What a value has to be: "a positive whole number, or unset to be solved"."""
        if self.kind == "bool":
            return "True, False, or unset to be solved" if self.optional else "True or False"
        ends = (", or unset to be solved" if self.solved else ", or unset") if self.optional else ""
        return self.range() + ends

    def range(self) -> str:
        """The values there are; nothing for texts of any form."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind == "int":
            number = {None: "a whole number", 1: "a positive whole number"}.get(self.low)
            return (number or f"a whole number of at least {self.low}") + self.form
        if self.kind == "float":
            most = "" if self.high is None else f" and at most {self.high:g}"
            return f"a number{self.unit and f' of {self.unit}'} above {self.above:g}{most}"
        return self.form

    def _fits(self, value: object) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "str":  # models, devices and forms by layer are looked at by those who use them
            return isinstance(value, str) or not self.form
        if isinstance(value, bool) or not isinstance(value, int if self.kind == "int" else int | float):
            return False
        above = self.above is None or value > self.above
        return above and (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def line(self, command: str = "") -> str:
        """For --help: what it is, its choices, and what holds where nothing is said."""
        text = self.help[:1].upper() + self.help[1:]
        if not all(choice in self.help for choice in self.choices):
            text += f": {', '.join(self.choices)}"
        other = self.by_command.get(command)
        if other is not None:
            known = not callable(other.value) and other.value is not DERIVED
            return f"{text}; unset: {f'{other.value} ({other.why})' if known else other.why}."
        if self.solved or self.unset:
            return f"{text}; unset: {self.solved or self.unset}."
        return f"{text}." if self.optional else f"{text}; default: {_shown(self.default)}."


def _shown(default: object) -> str:
    return {True: "on", False: "off"}.get(default, "") if isinstance(default, bool) else str(default)


def option(default: Any, help: str, group: str, **more: Any) -> Any:
    """A field of a dataclass that declares an Option; `more` are the Option's other fields."""
    return field(default=default, metadata={_DECLARED: Option(help, group, default, **more)})


def options_of(cls: type) -> dict[str, Option]:
    """What a dataclass declares, by name."""
    return {
        one.name: dataclasses.replace(one.metadata[_DECLARED], name=one.name, kind=str(one.type).partition(" ")[0])
        for one in dataclasses.fields(cls)
    }


def command_defaults(options: Mapping[str, Option], command: str, derived: Mapping[str, Any]) -> dict[str, Any]:
    """What a command takes where nothing is said and the default is another; `derived` has what it worked out."""
    found: dict[str, Any] = {}
    for name, one in options.items():
        if (other := one.by_command.get(command)) is not None:
            make: Callable[[], Any] | None = other.value if callable(other.value) else None
            found[name] = derived[name] if other.value is DERIVED else make() if make is not None else other.value
    assert derived.keys() <= found.keys(), f"not declared for {command}: {derived.keys() - found.keys()}"
    return found


def as_words(options: Mapping[str, Any]) -> list[str]:
    """The same settings as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", ",".join(f"{key}={one}" for key, one in value.items())]
        else:
            words += [f"--{flag}", str(value)]
    return words
