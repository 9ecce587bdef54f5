"""Which layers live outside the device when not all fit, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUFFERS = 2  # one is computed with while the other is filled
NEAR_RESIDENT = 0.95  # of the speed of resident weights: what a step of prompts should reach


@dataclass(frozen=True)
class StreamedLayers:
    """Layers that are brought to the device in every step, spread evenly between those that stay there."""

    layers: tuple[int, ...] = ()
    nbytes: int = 0  # of all of them: what a step moves
    buffers: int = 0  # bytes of the room on the device that they take turns in

    @property
    def freed(self) -> int:
        return self.nbytes - self.buffers

    def seconds(self, bandwidth: float) -> float:
        """At least, of a step."""
        return self.nbytes / bandwidth


NOTHING_STREAMED = StreamedLayers()


def spread(count: int, of: int) -> tuple[int, ...]:
    """So many layers, evenly: between two of them the next one has time to arrive."""
    return tuple((2 * number + 1) * of // (2 * count) for number in range(count))


def streamed(layer_bytes: Sequence[int], count: int) -> StreamedLayers:
    layers = spread(count, len(layer_bytes))
    each = [layer_bytes[index] for index in layers]
    rooms = [max(each[number::BUFFERS]) for number in range(BUFFERS)] if each else []
    return StreamedLayers(layers, sum(each), sum(rooms))


def to_free(layer_bytes: Sequence[int], wanted: int) -> StreamedLayers | None:
    """The fewest layers whose absence frees so many bytes; None: not even as many as there are do."""
    choices = (streamed(layer_bytes, count) for count in _counts(len(layer_bytes)))
    return next((one for one in choices if one.freed >= wanted), None)


def to_hold(layer_bytes: Sequence[int], wanted: int) -> StreamedLayers:
    """The fewest layers that have so many bytes, or as many as there are."""
    found = NOTHING_STREAMED
    for count in _counts(len(layer_bytes)):
        found = streamed(layer_bytes, count)
        if found.nbytes >= wanted:
            break
    return found


def _counts(layers: int) -> range:
    """Even numbers: behind an odd last one the first would want the same buffer. Two would only fill the buffers."""
    return range(2 * BUFFERS, layers + 1, BUFFERS)


def hiding_tokens(
    step_seconds: float,  # that bringing the layers takes
    token_seconds: float,  # to compute one token of a prompt, all weights there
) -> int:
    """Tokens of a step from which on it is at 95 % of the speed of resident weights: it computes while it waits."""
    return -(-int(1e9 * NEAR_RESIDENT * step_seconds) // max(1, int(1e9 * token_seconds)))
