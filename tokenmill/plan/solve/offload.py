"""Which layers, or which experts of a mixture, live outside the device when not all fit, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUFFERS = 2  # one is computed with while the other is filled
PAGE = 4096  # bytes that what is brought is a multiple of
MOST = 3 / 4  # of a layer's experts: who chooses so many is taken to choose all, also of the next layer (routing.h)
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


@dataclass(frozen=True)
class CachedExperts:
    """Experts of which every layer keeps some on the device. The others are brought when a step chooses them; where it
    chooses more than there are slots, to one of the buffers, which have room for all of a layer's and take turns.
    """

    slots: int = 0  # of every layer; 0: all experts are on the device
    experts: int = 0  # that a layer has
    each: tuple[int, ...] = ()  # bytes of one, of every layer that has some

    @property
    def nbytes(self) -> int:
        """Of those that have no slot."""
        return (self.experts - self.slots) * sum(self.each) if self.slots else 0

    @property
    def buffers(self) -> int:
        return BUFFERS * self.experts * max(self.each) if self.slots else 0

    @property
    def freed(self) -> int:
        return self.nbytes - self.buffers

    def bytes_of_token(self, top_k: int) -> float:
        """That a lone token is waited for, at random choices: as many of its experts have no slot as of all."""
        return top_k * (1 - self.slots / self.experts) * sum(self.each) if self.slots else 0.0


NO_EXPERTS_AWAY = CachedExperts()


def most_slots(each: Sequence[int], experts: int, *, freed: int = 0, away: int = 0) -> CachedExperts:
    """As many slots as leave so many bytes free, and so many elsewhere; `NO_EXPERTS_AWAY` where none do."""
    sizes = tuple(-(-one // PAGE) * PAGE for one in each)
    choices = (CachedExperts(slots, experts, sizes) for slots in range(experts - 1, 0, -1) if sizes)
    found = (one for one in choices if one.freed >= max(1, freed) and one.nbytes >= away)
    return next(found, NO_EXPERTS_AWAY)
