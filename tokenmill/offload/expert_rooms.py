"""Rooms for some of a layer's experts: their matrices as the ops take them, and where the bytes of each one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tokenmill.errors import ModelError
from tokenmill.model.layers import MoEWeights, Weight
from tokenmill.model.spec import DecoderSpec
from tokenmill.offload.expert_slots import AWAY, ExpertSlots
from tokenmill.offload.image import ALIGNMENT, OWN, Image, lay, view_of
from tokenmill.quant.schemes.experts import Experts, allocate_experts
from tokenmill.quant.schemes.scheme import Linear, Schemes


@dataclass(frozen=True)
class ExpertRoom:
    """`weights`: by canonical name, of as many experts as there are places."""

    weights: Mapping[str, Weight]

    def parts(self, place: int) -> list[torch.Tensor]:
        """One expert's tensors, in the order in which its image has them; of those that are stacked."""
        return [stack[place] for stack in self.stacks()]

    def stacks(self) -> list[torch.Tensor]:
        """The same of all places."""
        return [stack for weight in self.weights.values() for stack in _stacks(weight)]


@dataclass(frozen=True)
class ExpertLayer:
    """A layer with experts, as its feed sees it."""

    index: int  # in the model
    router: torch.Tensor  # [experts, hidden]
    slots: ExpertRoom  # its own; where matrices are packed, behind them the places in its buffer
    buffer: ExpertRoom | None  # of all its experts, where a product takes either slots or that; None: packed
    memory: Sequence[torch.Tensor]  # [bytes] uint8 of every place, where matrices are packed

    @property
    def names(self) -> tuple[str, str]:
        return f"layers.{self.index}.experts_gate_up", f"layers.{self.index}.experts_down"

    def place(self, slots: ExpertSlots, number: int, expert: int, in_buffer: bool) -> int:
        """Where in `matrices` an expert is, or AWAY."""
        if self.buffer is None:
            return slots.place(number, expert)
        if in_buffer:
            return expert if slots.in_buffer(number, expert) else AWAY
        return int(slots.slot[number, expert])

    def matrices(self, mlp: MoEWeights, in_buffer: bool) -> MoEWeights:
        if self.buffer is None or not in_buffer:
            return mlp
        gate_up, down = (self.buffer.weights[name] for name in self.names)
        return replace(mlp, gate_up=gate_up, down=down)  # type: ignore[arg-type]


def stacked_bytes(image: Image, places: int) -> int:
    return sum(_aligned(part.nbytes * places) for part in image.parts)


def stacked_room(
    spec: DecoderSpec,
    image: Image,  # of one expert
    places: int,
    memory: torch.Tensor,  # [at least stacked_bytes] uint8
    dtype: torch.dtype,
    schemes: Schemes,
) -> ExpertRoom:
    """The same tensors of all experts lie one after the other, as products of stacked matrices want them."""
    stacks: dict[str, dict[str, torch.Tensor]] = {}
    at = 0
    for part in image.parts:
        run = memory[at : at + part.nbytes * places].view(getattr(torch, part.dtype))
        stacks.setdefault(part.weight, {})[part.key] = run.view(places, *part.shape)
        at += _aligned(part.nbytes * places)
    found: dict[str, Weight] = {}
    for name, stack in stacks.items():
        scheme = schemes.of(name)
        if scheme.floats:
            found[name] = stack[""]
            continue
        _, rows, columns = spec.parameters()[name].shape
        own = allocate_experts(scheme, 1, rows, columns, dtype, memory.device).stacked
        stacked = {
            key: stack[key] if key in stack else one.repeat(places, *[1] * (one.dim() - 1)) for key, one in own.items()
        }
        each = tuple({key: one[place] for key, one in stacked.items()} for place in range(places))
        found[name] = Experts(scheme, each, stacked)
    return ExpertRoom(found)


def packed_room(
    spec: DecoderSpec, image: Image, memory: Sequence[torch.Tensor], dtype: torch.dtype, schemes: Schemes
) -> ExpertRoom:
    """Matrices that are multiplied where their image was read to; memory: [at least nbytes] uint8 of every place."""
    found: dict[str, Weight] = {}
    for name in dict.fromkeys(part.weight for part in image.parts):
        _, rows, columns = spec.parameters()[name].shape
        experts = allocate_experts(schemes.of(name), len(memory), rows, columns, dtype, memory[0].device)
        for place, run in enumerate(memory):
            for part in image.parts:
                if part.weight == name:
                    lay(experts.linear(place), part, run)
        found[name] = experts
    return ExpertRoom(found)


def parts_in(image: Image, memory: torch.Tensor) -> list[torch.Tensor]:  # [at least nbytes] uint8
    """One expert's tensors, where its image was read to."""
    return [view_of(part, memory) for part in image.parts]


def one_expert(weights: Mapping[str, Weight], expert: int) -> dict[str, Weight]:
    """An expert's matrices, out of those of all, to be written to an image."""
    return {
        name: weight.linear(expert) if isinstance(weight, Experts) else _tensor(weight)[expert]
        for name, weight in weights.items()
    }


def check_alike(images: Sequence[Image], layer: int) -> None:
    """Who takes another one's place has the same form."""
    if any(one != images[0] for one in images):
        raise ModelError(
            f"the experts of layer {layer} are stored in different forms, and cannot take each other's places; set "
            "expert_cache='off', and whole layers are brought"
        )


def is_packed(image: Image, layer: int) -> bool:
    """Whether an expert's matrices are multiplied where its image is read to; or else lie in stacks."""
    packed = {part.weight for part in image.parts if part.form >= 0}
    others = {part.weight for part in image.parts if part.form < 0}
    if packed and others:
        raise ModelError(
            f"the experts of layer {layer} have one matrix that is packed and one that is not, and cannot be brought "
            "by themselves; quantize both in the same way, or set expert_cache='off', and whole layers are brought"
        )
    return bool(packed)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _stacks(weight: Weight) -> list[torch.Tensor]:
    if isinstance(weight, Experts):
        return [one for key, one in weight.stacked.items() if key not in OWN]
    return [_tensor(weight)]


def _tensor(weight: Weight) -> torch.Tensor:
    assert not isinstance(weight, Experts | Linear)
    return weight
