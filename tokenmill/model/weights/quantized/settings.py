"""Settings: typed look-ups in a checkpoint's quantization config, with errors that name method, key and value."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from tokenmill.errors import ModelError

_LONGEST_PATTERN = 1000  # a model's own are some tens of characters
_MOST_REPEATS = 6  # each multiplies the time that a name without a fit takes by its length
_LITERAL = re.compile(r"\\.|\[[^\]]*\]")


class Settings:
    """One JSON object of the config; a key that is null counts as left out."""

    def __init__(self, method: str, raw: Any, path: str = "") -> None:
        self.method = method
        self._path = path  # of this object in the config, for errors
        if not isinstance(raw, dict):
            raise ModelError(f"{self._who()} has {path or 'its config'}={_short(raw)}; it must be a JSON object")
        self.raw: dict[str, Any] = raw

    def has(self, *keys: str) -> bool:
        """Whether one of the keys has a value that is not empty."""
        return any(self.raw.get(key) not in (None, False, [], {}) for key in keys)

    def refuse(self, key: str, hint: str) -> NoReturn:
        """hint: what would do."""
        value = _short(self.raw.get(key))
        raise ModelError(f"{self._who()} has {self._path}{key}={value}, which cannot be loaded; {hint}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= 1 << 20:
            self.refuse(key, "it must be a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def word(self, key: str, choices: Collection[str], default: str | None = None, hint: str = "") -> str:
        """One of the choices, in small letters."""
        value = self._value(key, default)
        if not isinstance(value, str) or value.lower() not in choices:
            self.refuse(key, hint or f"it must be one of {', '.join(choices)}")
        return value.lower()

    def words(self, key: str) -> list[str]:
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self.refuse(key, "it must be a list of names")
        return value

    def pair(self, key: str) -> tuple[int, int]:
        value = self._value(key, None)
        if not (isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)):
            self.refuse(key, "it must be two whole numbers")
        rows, columns = value
        if min(rows, columns) < 1:
            self.refuse(key, "both must be at least 1")
        return rows, columns

    def inner(self, key: str) -> Settings | None:
        value = self.raw.get(key)
        return None if value is None else Settings(self.method, value, f"{self._path}{key}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._who()} has no {self._path}{key} in its config; download config.json again")
        return value

    def _who(self) -> str:
        return f"the checkpoint is quantized with {self.method} and"


def fits_any(patterns: Iterable[str], module: str, method: str) -> bool:
    """Whether the name is one of the patterns, or fits one of those that begin with "re:"."""
    return any(fits_regular(p[3:], module, method) if p.startswith("re:") else p == module for p in patterns)


def within_any(parts: Iterable[str], module: str) -> bool:
    """Whether one of the dotted names is a run of whole words of the module: mlp.gate is not in mlp.gate_proj."""
    return any(f".{part}." in f".{module}." for part in parts)


def fits_regular(pattern: str, module: str, method: str) -> bool:
    """Whether the name begins as the regular expression says."""
    try:
        if len(pattern) > _LONGEST_PATTERN:
            raise re.error("it is too long")
        plain = _LITERAL.sub("x", pattern)
        if len(re.findall(r"[*+{]", plain)) > _MOST_REPEATS or re.search(r"\)[*+{]", plain):
            raise re.error("it repeats so much that it could take for ever")
        return re.match(pattern, module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"the checkpoint is quantized with {method} and names layers by {_short(pattern)}, "
            f"which is no usable regular expression ({error}); download config.json again"
        ) from None


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
