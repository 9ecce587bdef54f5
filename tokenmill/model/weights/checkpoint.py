"""Checkpoint: a source of named tensors with a config, whatever file format they are stored in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from tokenmill.errors import ModelError
from tokenmill.model.config_reader import StoredConfig
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.packed import Blocks


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names, and a Hugging Face config.

    `tensor` returns a CPU tensor that the caller only reads, and keeps no longer than it needs: it may be a view
    of a mapped file, or may have been decoded for this call.
    """

    config: dict[str, Any]

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


@runtime_checkable
class BlockCheckpoint(Checkpoint, Protocol):
    """A checkpoint whose matrices can be had as they are stored, in blocks of small integers."""

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """In the dtype that it is wanted in: what is not needed is not written, nor moved to a device."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """A view of the mapped file; None: the tensor is no matrix, or is more than its rows in another order."""
        ...

    def prefetch(self, name: str) -> None:
        """The tensor is about to be read."""
        ...

    def release(self, name: str) -> None:
        """The tensor was read: its pages of the file need not stay in memory."""
        ...


@runtime_checkable
class GroupCheckpoint(Checkpoint, Protocol):
    """A checkpoint whose linear layers are small integers or float8 with scales; `tensor` gives them as floats."""

    def stored(self, name: str) -> WeightForm | None:
        """The form of a matrix that `groups` gives, without reading it; None: it is had as floats only."""
        ...

    def groups(self, name: str) -> Groups | None: ...

    def notes(self) -> list[str]:
        """What the engine's report should say of it."""
        ...


@runtime_checkable
class PartCheckpoint(Checkpoint, Protocol):
    """A checkpoint that reads no more of a tensor than is wanted."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def part(self, name: str, box: tuple[range, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A box of a tensor, by dimension; dtype: what it is wanted in, where the checkpoint decodes it anyway."""
        ...


@runtime_checkable
class TypedCheckpoint(Checkpoint, Protocol):
    """A checkpoint that knows what `tensor` gives without reading it."""

    def dtype(self, name: str) -> torch.dtype | None:
        """None: a type that torch does not have, or that is not known here."""
        ...


def read_config(directory: Path) -> StoredConfig:
    """The config.json of a model directory."""
    path = directory / "config.json"
    return StoredConfig(read_json(path), path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"there is no {path.name} in {path.parent}; it belongs beside the weights") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # broken JSON, or bytes that are not text
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    return content
