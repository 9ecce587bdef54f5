"""ConfigReader: typed look-ups in a Hugging Face config.json, with errors that name the key and its value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelError

_HUGE = 1 << 40  # no real size comes near it
_MAX_LAYERS = 10_000


class StoredConfig(dict[str, Any]):
    """A config that knows its file, so that what is wrong in it can be said with the path."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path


@contextmanager
def errors_with_path(config: dict[str, Any]) -> Iterator[None]:
    """Errors about a config that has a file name it by its path."""
    try:
        yield
    except ModelError as error:
        if not isinstance(config, StoredConfig):
            raise
        said, path = str(error), str(config.path)
        named = said.replace("config.json", path, 1) if "config.json" in said else f"{path}: {said}"
        raise ModelError(named) from None


class ConfigReader:
    """A config over the defaults of its architecture. A key that is null in the file counts as left out."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.raw = config
        self._defaults = defaults

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def get(self, key: str) -> Any:
        """The file's value; null is respected where it means "off" rather than "default"."""
        return self.raw[key] if key in self.raw else self._defaults.get(key)

    def whole(self, key: str, low: int = 1) -> int:
        return _whole(key, self._needed(key), low)

    def _needed(self, key: str) -> Any:
        value = self.raw[key] if self.has(key) else self._defaults.get(key)
        if value is None:
            raise ModelError(f"config.json has no {key}, which this architecture needs")
        return value

    def num_layers(self) -> int:
        layers = self.whole("num_hidden_layers")
        if layers > _MAX_LAYERS:
            raise ModelError(f"config.json has num_hidden_layers={layers}; at most {_MAX_LAYERS} are supported")
        return layers

    def maybe_whole(self, key: str) -> int | None:
        value = self.get(key)
        return None if value is None else _whole(key, value, 1)

    def wholes(self, key: str) -> list[int]:
        value = self.get(key) or []
        if not isinstance(value, list):
            raise ModelError(f"config.json has {key}={value!r}; it must be a list of whole numbers")
        return [_whole(key, entry, 0) for entry in value]

    def number(self, key: str) -> float:
        return as_number(key, self._needed(key))

    def maybe_number(self, key: str) -> float | None:
        value = self.get(key)
        return None if value is None else as_number(key, value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw[key] if self.has(key) else self._defaults.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json has {key}={value!r}; it must be true or false")
        return value

    def text(self, key: str) -> str:
        value = self.raw[key] if self.has(key) else self._defaults.get(key)
        if not isinstance(value, str):
            raise ModelError(f"config.json has {key}={value!r}; it must be a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or nothing."""
        value = self.get(key)
        if value is None:
            return ()
        return tuple(_whole(key, entry, 0) for entry in (value if isinstance(value, list) else [value]))

    def layer_types(self, layers: int) -> list[str] | None:
        value = self.raw.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            raise ModelError(f"config.json has layer_types={value!r}; it must name the type of each of {layers} layers")
        for kind in value:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"layer type {kind!r} is not supported; full_attention and sliding_attention are")
        return value

    def partial_rotary_factor(self) -> float:
        parameters = self.raw.get("rope_parameters")
        inner = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
        value = inner if inner is not None else self.raw.get("partial_rotary_factor")
        return 1.0 if value is None else as_number("partial_rotary_factor", value)

    def dtype_name(self) -> str | None:
        value = self.raw.get("dtype") or self.raw.get("torch_dtype")
        return value.removeprefix("torch.") if isinstance(value, str) else None


def as_number(key: str, value: Any) -> float:
    """Every number in a config is a size, a rate or a scale, and so above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _HUGE:
        raise ModelError(f"config.json has {key}={_short(value)}; it must be a number above 0")
    return float(value)


def _whole(key: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < _HUGE:
        raise ModelError(f"config.json has {key}={_short(value)}; it must be a whole number of at least {low}")
    return value


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
