"""The `/` commands of `tokenmill chat`, one small function each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.cli.terminal import note
from tokenmill.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenmill.cli.chat import Chat


@dataclass(frozen=True)
class Command:
    """What to type, what it does, and the function that does it."""

    usage: str
    meaning: str
    act: Callable[[Chat, str], None]


def obey(chat: Chat, line: str) -> None:
    name, _, argument = line.partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        raise InvalidRequest(f"there is no command {name}; /help lists them")
    COMMANDS[name].act(chat, argument.strip())


def _help(chat: Chat, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        note(f"  {command.usage:<{width}}  {command.meaning}")
    note("  Ctrl-C stops an answer, Ctrl-D leaves, and a line that ends in \\ goes on in the next one.")


def _reset(chat: Chat, argument: str) -> None:
    chat.conversation.turns.clear()
    note("(the conversation starts anew)")


def _system(chat: Chat, argument: str) -> None:
    chat.conversation.system = argument or None
    note("(system message set)" if argument else "(no system message)")


def _set(chat: Chat, argument: str) -> None:
    words = argument.split()
    if len(words) == 2:
        chat.conversation.set(*words)
    elif words:
        raise InvalidRequest("/set takes a name and a value, such as: /set temperature 0.7")
    for name, value in chat.conversation.settings().items():
        if not words or name == words[0]:
            note(f"  {name} = {value}")


def _regenerate(chat: Chat, argument: str) -> None:
    chat.regenerate()


def _save(chat: Chat, argument: str) -> None:
    chat.conversation.save(_path("/save", argument))
    note(f"(saved to {argument})")


def _load(chat: Chat, argument: str) -> None:
    chat.conversation.load(_path("/load", argument))
    note(f"(loaded {len(chat.conversation.turns)} messages)")


def _stats(chat: Chat, argument: str) -> None:
    if chat.last is None:
        note("(nothing was answered yet)")
        return
    note(f"  last answer: {chat.last.speed()}")
    note(f"  conversation: {len(chat.conversation.turns)} messages; all answers: {chat.total_tokens} tokens")


def _quit(chat: Chat, argument: str) -> None:
    raise EOFError


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidRequest(f"{command} needs a file name, such as: {command} talk.json")
    return Path(argument).expanduser()


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        Command("/help", "list the commands", _help),
        Command("/reset", "forget the conversation (also /clear); the system message stays", _reset),
        Command("/system TEXT", "set the system message; without TEXT, remove it", _system),
        Command("/set NAME VALUE", "change how tokens are chosen; /set alone shows the settings", _set),
        Command("/regenerate", "answer the last message again", _regenerate),
        Command("/save FILE", "write the conversation to a file", _save),
        Command("/load FILE", "go on with a saved conversation", _load),
        Command("/stats", "speed of the last answer and totals", _stats),
        Command("/quit", "leave (also /exit)", _quit),
    )
}

ALIASES = {"/exit": "/quit", "/clear": "/reset"}  # as other programs call them
