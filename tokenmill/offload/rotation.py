"""Which layer has which buffer, and which layers are to be there while a layer is computed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.plan.solve.offload import BUFFERS


@dataclass(frozen=True)
class Rotation:
    """Layers take turns in buffers, each always in the same one: addresses never change, so recorded steps hold.

    What is wanted follows from the layer that is computed and from nothing else: whoever jumps (a pass that failed, one
    over some layers) finds its way back.
    """

    layers: tuple[int, ...]  # that are streamed, in their order: an even number, so that the first follows the last
    buffer_of: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.layers) % BUFFERS == 0
        object.__setattr__(self, "buffer_of", {one: number % BUFFERS for number, one in enumerate(self.layers)})

    def wanted(self, computed: int) -> tuple[int, ...]:
        """Those to come next, this one included, as many as there are buffers."""
        first = bisect_left(self.layers, computed)
        return tuple(self.layers[(first + ahead) % len(self.layers)] for ahead in range(BUFFERS))

    def sizes(self, layer_bytes: Sequence[int]) -> list[int]:
        """Bytes of every buffer: of the largest layer that comes there."""
        return [max(layer_bytes[layer] for layer in self.layers[number::BUFFERS]) for number in range(BUFFERS)]
