"""LoRA adapters as users name them: LoRARequest, and which names stand for which folders in an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.engine.core import Engine
from tokenmill.errors import InvalidRequest


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name and the folder that PEFT saved it in. The number is not looked at: names tell adapters
    apart here."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class Adapters:
    """Owned by the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._paths: dict[str, Path] = {}

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        folder = Path(checked_path(path)).expanduser().resolve()
        self._engine.load_adapter(checked_name(name), folder)
        self._paths[name] = folder

    def unload(self, name: str) -> None:
        self._engine.unload_adapter(checked_name(name))
        self._paths.pop(name, None)

    def names(self, wanted: Any, adapter: Any, count: int) -> list[str]:
        """Of the adapters of so many prompts; those that a LoRARequest brings are loaded if they are not there."""
        several = list(wanted) if isinstance(wanted, Sequence) else [wanted] * count
        if len(several) != count:
            raise InvalidRequest(f"{count} prompts came with {len(several)} lora_requests; give one, or as many")
        if adapter and any(one is not None for one in several):
            raise InvalidRequest("adapter and lora_request both name an adapter; give one of them")
        return [self._name(one) if one is not None else adapter for one in several]

    def _name(self, one: Any) -> str:
        name, path = getattr(one, "lora_name", None), getattr(one, "lora_path", None)  # another engine's will do
        if not isinstance(name, str):
            raise InvalidRequest(f"lora_request is a {type(one).__name__}; give a LoRARequest, or a list of them")
        if path and self._paths.get(name) != Path(checked_path(path)).expanduser().resolve():
            self.load(name, path)
        return name


def checked_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise InvalidRequest(f"an adapter's name is {name!r:.60}; it must be printable text of at most 200 characters")
    return name


def checked_path(path: Any) -> str:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in os.fspath(path):
        raise InvalidRequest(f"an adapter's path is {path!r:.60}; it must be that of a folder")
    return os.fspath(path)
