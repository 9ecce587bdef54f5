"""What a benchmark asks: lengths from a recipe or a trace, arrivals, and prompts that share what the trace shares."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tokenmill.errors import ConfigError
from tokenmill.plan.demand.workload import Workload

WARM_TOKENS = 8  # an answer to warm up with is as long as this at most

# Words that nearly every vocabulary has as one token, so that a prompt's length is known without a tokenizer.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    prompt: str | list[int]
    max_tokens: int
    at: float | None = None  # seconds after the start at which it is meant to be sent; None: when a stream is free


@dataclass(frozen=True)
class Mix:
    """A workload and when its requests are sent. Every seed gives other prompts and other random times.

    Without a rate and a speed the loop is closed: a request is sent when another has ended.
    """

    work: Workload
    rate: float | None = None  # requests per second, at random times
    burstiness: float = 1.0  # squared coefficient of variation of the gaps: 1 is Poisson, 0 a clock
    speed: float | None = None  # the workload's own times, so many times as fast
    vocab: int | None = None  # prompts are token ids below this; None: words

    def __post_init__(self) -> None:
        if self.rate is not None and self.speed is not None:
            raise ConfigError("--rate and --speed exclude one another: random times, or the trace's own")
        for name, value in (("rate", self.rate), ("speed", self.speed)):
            if value is not None and not value > 0:
                raise ConfigError(f"--{name} is {value}; it must be above 0")
        if not self.burstiness >= 0:
            raise ConfigError(f"--burstiness is {self.burstiness}; it must be 0 or more")

    @property
    def open(self) -> bool:
        return self.rate is not None or self.speed is not None

    def asks(self, seed: int) -> list[Ask]:
        starts = self._starts(seed)
        prompts = self._texts() if self.work.texts is not None else self._made(seed)
        return [Ask(*one) for one in zip(prompts, self.work.outputs, starts)]

    def warm_up(self, count: int, seed: int) -> list[Ask]:
        """Short answers to the first prompts of a seed that is never measured."""
        whole = replace(self, rate=None, speed=None).asks(~seed)
        return [replace(ask, max_tokens=min(ask.max_tokens, WARM_TOKENS)) for ask in whole[:count]]

    def told(self) -> str:
        """When requests are sent, for people; nothing for a closed loop."""
        if self.speed is not None:
            return f"sent as in {self.work.name}" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")
        if self.rate is None:
            return ""
        bursts = "" if self.burstiness == 1 else f" (burstiness {self.burstiness:g})"
        return f"{self.rate:g} requests/s at random times{bursts}"

    def _starts(self, seed: int) -> Sequence[float | None]:
        if self.speed is not None:
            return [at / self.speed for at in self.work.arrivals]
        if self.rate is not None:
            return arrivals(len(self.work), self.rate, self.burstiness, seed)
        return [None] * len(self.work)

    def _texts(self) -> Iterator[str]:
        assert self.work.texts is not None
        yield from self.work.texts

    def _made(self, seed: int) -> Iterator[str | list[int]]:
        """Random prompts, no two alike except where the trace says that they begin alike."""
        work = self.work
        words = WORDS.split()
        ids = work.hash_ids if work.hash_ids is not None else [()] * len(work)
        for number, length in enumerate(work.prompts):
            if self.vocab is None:
                yield " ".join(_drawn(words, length, seed, number, ids[number], work.hash_block))
            else:
                yield _drawn(range(self.vocab), length, seed, number, ids[number], work.hash_block)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Random times, the first 0: gaps are gamma distributed, with the mean and the burstiness asked for."""
    dice, at, found = random.Random(f"{seed}/times"), 0.0, [0.0]
    for _ in range(count - 1):
        at += dice.gammavariate(1 / burstiness, burstiness / rate) if burstiness else 1 / rate
        found.append(at)
    return found[:count]


def clipped(work: Workload, longest_prompt: int | None, longest_answer: int | None) -> Workload:
    """The same requests, none longer than this. What texts say is not cut: there the lengths are only guesses."""
    return replace(
        work,
        prompts=tuple(min(one, longest_prompt or one) for one in work.prompts),
        outputs=tuple(min(one, longest_answer or one) for one in work.outputs),
    )


def _drawn(known: Sequence[T], length: int, seed: int, number: int, ids: tuple[int, ...], block: int) -> list[T]:
    """Blocks that every prompt with the same hash id has, and then what is only this one's."""
    shared = [
        word
        for one in ids[: -(-length // block)]
        for word in random.Random(f"{seed}/block/{one}").choices(known, k=block)
    ]
    missing = max(0, length - len(shared))
    return [*shared, *random.Random(f"{seed}/{number}").choices(known, k=missing)][:length]
