"""Images: a layer's weights as one run of bytes, and weights that are views of such a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tokenmill.errors import ModelError
from tokenmill.model.layers import Weight, allocate
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.native.matmul import PackedStorage
from tokenmill.quant.schemes.scheme import Linear, Schemes

ALIGNMENT = 64  # of every tensor: a cache line, and what vector loads and copy engines want
PAGE = 4096  # of the whole
_OWN = ("counters",)  # of a storage: what products write on, which is no weight


@dataclass(frozen=True)
class Part:
    """One tensor in an image."""

    weight: str  # canonical name
    key: str  # of its storage; of a packed matrix empty
    at: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    form: int = -1  # of a segment of a packed matrix, which follow each other
    rows: int = 0


@dataclass(frozen=True)
class Image:
    parts: tuple[Part, ...]
    nbytes: int  # whole pages


def image_of(weights: Mapping[str, Weight]) -> Image:
    """How these lie behind each other."""
    parts, at = [], 0
    for name, weight in weights.items():
        for key, tensor, form, rows in _tensors(weight):
            size, kind = tensor.numel() * tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
            parts.append(Part(name, key, at, size, kind, tuple(tensor.shape), form, rows))
            at += -(-size // ALIGNMENT) * ALIGNMENT
    return Image(tuple(parts), max(PAGE, -(-at // PAGE) * PAGE))


def write_image(weights: Mapping[str, Weight], image: Image, into: torch.Tensor) -> None:  # [nbytes] uint8
    parts = iter(image.parts)
    for weight in weights.values():
        for _, tensor, _, _ in _tensors(weight):
            _view(next(parts), into).copy_(tensor)


def weights_in(
    spec: DecoderSpec,
    image: Image,
    memory: torch.Tensor,  # [at least nbytes] uint8, where it lies or will lie
    dtype: torch.dtype,
    schemes: Schemes,
) -> dict[str, Weight]:
    """The weights as views of `memory`: what is written there is what is computed with."""
    params = spec.parameters()
    found: dict[str, Weight] = {}
    by_name: dict[str, list[Part]] = {}
    for part in image.parts:
        if part.weight not in params or not 0 <= part.at <= part.at + part.nbytes <= min(image.nbytes, len(memory)):
            raise ModelError(f"the prepared layers name {part.weight!r} at {part.at}, which the model does not have")
        by_name.setdefault(part.weight, []).append(part)
    for name, parts in by_name.items():
        weight = allocate(spec, params[name], dtype, memory.device, schemes.of(name))  # untouched, and soon gone
        if isinstance(weight, torch.Tensor):
            found[name] = _placed(parts[0], memory, weight)
            continue
        if isinstance(weight.storage, PackedStorage):
            matrix = weight.storage.matrix
            for part in parts:
                matrix.adopt(part.form, part.rows, _view(part, memory))
            weight.scheme.show(weight.storage)  # type: ignore[attr-defined]  # a Packed has it
        else:
            for part in parts:
                weight.storage[part.key] = _placed(part, memory, weight.storage[part.key])
        found[name] = weight
    return found


def _placed(part: Part, memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    view = _view(part, memory)
    if view.shape != like.shape or view.dtype != like.dtype:
        raise ModelError(f"{part.weight} was prepared as {part.dtype} {list(part.shape)}, which is not what is needed")
    return view


def _view(part: Part, memory: torch.Tensor) -> torch.Tensor:
    run = memory[part.at : part.at + part.nbytes]
    return run.view(getattr(torch, part.dtype)).view(part.shape)


def _tensors(weight: Weight) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    if not isinstance(weight, Linear):
        yield "", weight, -1, 0
    elif isinstance(weight.storage, PackedStorage):
        for form, rows, panels in weight.storage.matrix.segments:
            yield "", panels, form.number, rows
    else:
        for key, tensor in weight.storage.items():
            if key not in _OWN:
                yield key, tensor, -1, 0
