"""Conversation: what was said so far and how to sample, as data that can be saved to a file and loaded again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams

# What a person may /set, and the type of its value.
SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}
MAY_BE_NONE = ("max_tokens", "seed")
ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """A system message, the turns after it, and the sampling settings."""

    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)  # user and assistant in turn

    def messages(self) -> list[dict[str, Any]]:
        before = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*before, *self.turns]

    def say(self, role: str, text: str) -> None:
        self.turns.append({"role": role, "content": text})

    def set(self, name: str, text: str) -> None:
        if name not in SETTINGS:
            raise InvalidRequest(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
        changed: dict[str, Any] = {name: _value(name, text)}
        self.params = replace(self.params, **changed)

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self.params, name) for name in SETTINGS}

    def save(self, path: Path) -> None:
        content = {"system": self.system, "settings": self.settings(), "messages": self.turns}
        try:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written ({error.strerror}); choose another file") from None

    def load(self, path: Path) -> None:
        """Replace everything by what the file holds, or change nothing if the file is not such a file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read ({error.strerror}); check the name") from None
        except (ValueError, RecursionError):
            content = None
        turns, settings, system = _checked(content, path)
        self.params = replace(self.params, **settings)
        self.turns, self.system = turns, system


def _value(name: str, text: str) -> int | float | None:
    if name in MAY_BE_NONE and text.lower() == "none":
        return None
    try:
        number: int | float = SETTINGS[name](text)
    except ValueError:
        kind = "whole number" if SETTINGS[name] is int else "number"
        raise InvalidRequest(f"{name} is {text!r}; it must be a {kind}") from None
    return number


def _checked(content: Any, path: Path) -> tuple[list[dict[str, str]], dict[str, Any], str | None]:
    """The parts of a saved conversation, each of the type it must have."""
    fields = content if isinstance(content, dict) else {}
    turns, settings, system = fields.get("messages"), fields.get("settings", {}), fields.get("system")
    if (
        not isinstance(turns, list)
        or not all(_is_turn(turn) for turn in turns)
        or not isinstance(settings, dict)
        or not set(settings) <= set(SETTINGS)
        or not isinstance(system, str | None)
    ):
        raise InvalidRequest(f"{path} is not a saved conversation; load a file that /save wrote")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns], settings, system


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
