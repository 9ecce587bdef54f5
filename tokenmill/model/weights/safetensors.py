"""SafetensorsCheckpoint: a directory with config.json and one or several .safetensors files, read by mapping them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import ModelError
from tokenmill.model.weights.checkpoint import read_config, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsCheckpoint:
    """Every file is opened, and its header checked against its size, before the first tensor is read."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.config: dict[str, Any] = read_config(self.directory)
        self._files = {path: _open(path) for path in self._paths()}
        self._where = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        if not self._where:
            raise ModelError(f"the safetensors files in {self.directory} hold no tensors")

    def names(self) -> list[str]:
        return list(self._where)

    def tensor(self, name: str) -> torch.Tensor:
        path = self._where[name]
        try:
            found: torch.Tensor = self._files[path].get_tensor(name)
        except Exception as error:  # the library raises its own and torch's errors for formats it does not know
            raise ModelError(f"tensor {name!r} in {path} cannot be read: {error}") from None
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def part(self, name: str, box: tuple[range, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        path = self._where[name]
        try:
            some = self._files[path].get_slice(name)
            found: torch.Tensor = some[tuple(slice(span.start, span.stop) for span in box)]
        except Exception as error:  # as in `tensor`
            raise ModelError(f"tensor {name!r} in {path} cannot be read: {error}") from None
        return found

    def dtype(self, name: str) -> torch.dtype | None:
        """From the file's header."""
        return _DTYPES.get(self._files[self._where[name]].get_slice(name).get_dtype())

    def _paths(self) -> list[Path]:
        index = self.directory / _INDEX
        if not index.exists():
            return self._without_index()
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelError(f"{index} has no usable weight_map; download it again")
        paths = [self.directory / shard for shard in sorted(set(shards.values()))]
        for path in paths:
            if path.parent != self.directory or path.suffix != ".safetensors":
                raise ModelError(f"{index} points to {path.name!r}; only .safetensors files beside it are read")
            if not path.exists():
                raise ModelError(f"{index} lists {path.name}, which is not there; the download is incomplete")
        return paths

    def _without_index(self) -> list[Path]:
        single = self.directory / _SINGLE
        paths = [single] if single.exists() else sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"there are no .safetensors files in {self.directory}; convert the model to safetensors")
        return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        size = ""
        with suppress(OSError):
            size = f" of {path.stat().st_size} bytes"
        raise ModelError(f"{path}{size} is truncated or corrupt ({error}); download it again") from None
