"""Images: a layer's weights as one run of bytes, and weights that are views of such a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from tokenmill.errors import ModelError
from tokenmill.model.layers import Weight, allocate
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.native.matmul import PackedStorage
from tokenmill.plan.solve.offload import PAGE
from tokenmill.quant.schemes.experts import Experts
from tokenmill.quant.schemes.scheme import Linear, Schemes

ALIGNMENT = 64  # of every tensor: a cache line, and what vector loads and copy engines want
OWN = ("counters",)  # of a storage: what products write on, which is no weight


@dataclass(frozen=True)
class Part:
    """One tensor in an image."""

    weight: str  # canonical name
    key: str  # of its storage; of a packed matrix empty, of its slices their numbers
    at: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    form: int = -1  # of a segment of a packed matrix, which follow each other
    rows: int = 0
    expert: int = -1  # whose it is, where each has tensors of its own


@dataclass(frozen=True)
class Image:
    parts: tuple[Part, ...]
    nbytes: int  # whole pages


def image_of(weights: Mapping[str, Weight]) -> Image:
    """How these lie behind each other."""
    parts, at = [], 0
    for name, weight in weights.items():
        for part, _ in _parts(name, weight):
            parts.append(replace(part, at=at))
            at += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return Image(tuple(parts), max(PAGE, -(-at // PAGE) * PAGE))


def write_image(weights: Mapping[str, Weight], image: Image, into: torch.Tensor) -> None:  # [nbytes] uint8
    places = iter(image.parts)
    for name, weight in weights.items():
        for _, tensor in _parts(name, weight):
            view_of(next(places), into).copy_(tensor)


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
        elif isinstance(weight, Experts) and weight.stacked:
            stacked = weight.stacked | {part.key: _placed(part, memory, weight.stacked[part.key]) for part in parts}
            each = tuple({key: one[expert] for key, one in stacked.items()} for expert in range(len(weight)))
            found[name] = Experts(weight.scheme, each, stacked)
        else:
            for part in parts:
                lay(weight.linear(part.expert) if isinstance(weight, Experts) else weight, part, memory)
            found[name] = weight
    return found


def lay(linear: Linear, part: Part, memory: torch.Tensor) -> None:
    storage = linear.storage
    if isinstance(storage, PackedStorage):
        storage.matrices[int(part.key or 0)].adopt(part.form, part.rows, view_of(part, memory))
        linear.scheme.show(storage)  # type: ignore[attr-defined]  # those of packed matrices have it
    else:
        storage[part.key] = _placed(part, memory, storage[part.key])


def _placed(part: Part, memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    view = view_of(part, memory)
    if view.shape != like.shape or view.dtype != like.dtype:
        raise ModelError(f"{part.weight} was prepared as {part.dtype} {list(part.shape)}, which is not what is needed")
    return view


def view_of(part: Part, memory: torch.Tensor) -> torch.Tensor:
    run = memory[part.at : part.at + part.nbytes]
    return run.view(getattr(torch, part.dtype)).view(part.shape)


def _parts(name: str, weight: Weight) -> Iterator[tuple[Part, torch.Tensor]]:
    """Where they are is not known yet."""
    if isinstance(weight, Experts) and not weight.stacked:
        for expert in range(len(weight)):
            for part, tensor in _parts(name, weight.linear(expert)):
                yield replace(part, expert=expert), tensor
    elif isinstance(weight, torch.Tensor):
        yield _part(name, "", weight), weight
    elif isinstance(weight, Linear) and isinstance(weight.storage, PackedStorage):
        for number, matrix in enumerate(weight.storage.matrices):
            key = str(number) if len(weight.storage.matrices) > 1 else ""
            for form, rows, panels in matrix.segments:
                yield replace(_part(name, key, panels), form=form.number, rows=rows), panels
    else:
        for key, tensor in (weight.stacked if isinstance(weight, Experts) else weight.storage).items():
            if key not in OWN:
                yield _part(name, key, tensor), tensor


def _part(name: str, key: str, tensor: torch.Tensor) -> Part:
    kind = str(tensor.dtype).removeprefix("torch.")
    return Part(name, key, 0, tensor.numel() * tensor.element_size(), kind, tuple(tensor.shape))
