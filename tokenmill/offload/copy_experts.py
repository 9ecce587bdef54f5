"""CopyExperts: a stream of its own copies the experts that a layer has chosen, and likely ones of the next, to the GPU.

The host has to hear what was chosen: it waits for the device once in every layer with experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
import torch

from tokenmill.model.layers import MoEWeights
from tokenmill.model.moe import experts_of
from tokenmill.model.spec import MoESpec
from tokenmill.offload.copy_feed import Streams
from tokenmill.offload.expert_rooms import ExpertLayer, ExpertRoom
from tokenmill.offload.expert_slots import AWAY, ExpertSlots, Told
from tokenmill.offload.feed import FeedStats
from tokenmill.offload.foresight import Foresight
from tokenmill.ops.registry import Ops
from tokenmill.plan.solve.offload import MOST


class CopyExperts:
    """A place is copied to behind all that has been launched; a layer's products are computed behind its copies."""

    bandwidth, place = 0.0, "pinned memory of the host"

    def __init__(
        self,
        homes: Sequence[ExpertRoom],  # all experts of every layer, in the host's memory
        layers: Sequence[ExpertLayer],
        slots: ExpertSlots,
        moe: MoESpec,
        foresight: Foresight,
        streams: Streams,
    ) -> None:
        self.slots, self.foresight = slots, foresight
        self._homes, self._layers, self._moe, self._streams = homes, layers, moe, streams
        self._numbers = {layer.index: number for number, layer in enumerate(layers)}
        self._behind: dict[int, Any] = {}  # layer -> event behind the last copy to it that nobody has waited for
        self._launched: Any = None  # event behind what was launched when the present call began
        self._bytes = 0

    def bring(
        self, layer: int, x: torch.Tensor, experts: torch.Tensor, mlp: MoEWeights, ops: Ops
    ) -> tuple[torch.Tensor, MoEWeights]:
        number, slots = self._numbers[layer], self.slots
        this, after = self._layers[number], number + 1
        asked = experts.flatten()
        if after < len(self._layers) and self.foresight.on:
            _, likely = experts_of(x, self._layers[after].router, self._moe, ops)
            asked = torch.cat([asked, likely.flatten().to(asked.dtype)])
        heard = asked.cpu().numpy()
        choices = heard[: experts.numel()]
        chosen = np.unique(choices).tolist()
        kept = frozenset(chosen)
        different = slots.call(number, chosen)
        self._launched = self._streams.computed()
        in_buffer = different > slots.slots
        for expert in chosen:
            if this.place(slots, number, expert, in_buffer) < 0:
                self._to_buffer(number, [expert]) if in_buffer else self._to_slot(number, expert, kept)
        if number in self._behind:
            self._streams.compute_after(self._behind.pop(number))
        table = np.full(slots.experts, AWAY)
        table[chosen] = [this.place(slots, number, expert, in_buffer) for expert in chosen]
        if after < len(self._layers) and different >= MOST * slots.experts:
            self._to_buffer(after, range(slots.experts))
        elif len(heard) > len(choices):
            ahead = frozenset(np.unique(heard[len(choices) :]).tolist())
            for expert in sorted(ahead):
                if slots.slot[after, expert] < 0 and self._to_slot(after, expert, ahead):
                    slots.early[after, expert] = 1
        told = slots.told
        self.foresight.note(int(told[Told.CALL]), float(told[Told.MISSES]) + slots.wasted)
        places = torch.from_numpy(table[choices]).view(experts.shape).to(experts)
        return places, this.matrices(mlp, in_buffer)

    def stats(self) -> FeedStats:
        return FeedStats(self._bytes, experts=self.slots.counts())

    def close(self) -> None:
        pass

    def _to_slot(self, number: int, expert: int, kept: Set[int]) -> bool:
        taken = self.slots.take(number, kept)
        if taken is None:
            return False
        slot, before = taken
        self.slots.forget(number, before)
        self._copy(number, self._layers[number].slots.parts(slot), self._homes[number].parts(expert))
        self.slots.arrived(number, slot, expert)
        return True

    def _to_buffer(self, number: int, experts: Iterable[int]) -> None:
        """Of those that have a slot, what lies there."""
        slots, layer = self.slots, self._layers[number]
        assert layer.buffer is not None
        slots.own(number)
        for expert in experts:
            if not slots.in_buffer(number, expert):
                slot = int(slots.slot[number, expert])
                source = layer.slots.parts(slot) if slot >= 0 else self._homes[number].parts(expert)
                self._copy(number, layer.buffer.parts(expert), source, counted=slot < 0)
                slots.buffer[slots.buffer_of(number), expert] = 1

    def _copy(
        self, number: int, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor], counted: bool = True
    ) -> None:
        for part, home in zip(into, source, strict=True):
            self._behind[number] = self._streams.copy(part, home, self._launched)
            self._bytes += home.numel() * home.element_size() if counted else 0
