"""Workload: what will be asked, as plain columns (when, how long, how long the answer, which beginnings are shared)."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tokenmill.errors import ConfigError

MINUTE = 60.0
HASH_BLOCK = 512  # tokens per prefix hash in the public traces


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. The columns are equally long."""

    name: str
    arrivals: tuple[float, ...]  # seconds; the first is 0
    prompts: tuple[int, ...]  # tokens
    outputs: tuple[int, ...]  # tokens
    hash_ids: tuple[tuple[int, ...], ...] | None = None  # per request: equal ids at the front are an equal beginning
    hash_block: int = HASH_BLOCK  # tokens that one hash id stands for
    texts: tuple[str, ...] | None = None  # the prompts themselves, where the source has them

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError(f"the workload {self.name} has no requests")
        columns = [self.arrivals, self.outputs, *(one for one in (self.hash_ids, self.texts) if one is not None)]
        if any(len(column) != len(self.prompts) for column in columns):
            raise ValueError(f"the columns of {self.name} differ in length")

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1]

    @property
    def rate(self) -> float:
        """Requests per second; infinite where all arrive at once."""
        return (len(self) - 1) / self.seconds if self.seconds > 0 else math.inf

    @cached_property
    def busy(self) -> tuple[float, float]:
        """The rate of a busy minute (19 of 20 are calmer), and the burstiness within the minutes.

        Burstiness is the squared coefficient of variation of the gaps: 1 for Poisson arrivals, 0 for a clock's. Over
        a whole trace it would say how the days differ; what a queue feels is how the next minute goes.
        """
        if self.seconds < 2 * MINUTE:
            return self.rate, _burstiness(self.arrivals)
        minutes: list[list[float]] = [[] for _ in range(int(self.seconds / MINUTE) + 1)]
        for at in self.arrivals:
            minutes[int(at / MINUTE)].append(at)
        rates = [len(minute) / MINUTE for minute in minutes[:-1]]
        return percentile(rates, 0.95), percentile([_burstiness(minute) for minute in minutes[:-1]], 0.5)

    def cached_share(self, capacity: float = math.inf) -> float:
        """Share of prompt tokens that a cache of so many tokens has from earlier requests (least recently used go)."""
        if self.hash_ids is None:
            return 0.0
        most = capacity / self.hash_block
        seen: OrderedDict[int, None] = OrderedDict()
        cached = 0
        for ids, prompt in zip(self.hash_ids, self.prompts):
            hits = next((at for at, one in enumerate(ids) if one not in seen), len(ids))
            cached += min(hits * self.hash_block, max(prompt - 1, 0))  # one token at least is computed
            for one in reversed(ids):  # the end of a prompt goes first: without its beginning it is worth nothing
                seen[one] = None
                seen.move_to_end(one)
            while len(seen) > most:
                seen.popitem(last=False)
        return cached / sum(self.prompts)

    def up_to(self, tokens: int) -> Workload | None:
        """The requests that have no more tokens than this, prompt and answer; None: there are none."""
        columns = enumerate(zip(self.prompts, self.outputs))
        kept = [number for number, (prompt, output) in columns if prompt + output <= tokens]
        if len(kept) == len(self):
            return self
        return self.select(kept, [self.arrivals[number] for number in kept]) if kept else None

    def select(self, numbers: Sequence[int], arrivals: Sequence[float]) -> Workload:
        """These of the requests, at these times, counted from the first."""
        return replace(
            self,
            arrivals=tuple(at - arrivals[0] for at in arrivals),
            prompts=tuple(self.prompts[number] for number in numbers),
            outputs=tuple(self.outputs[number] for number in numbers),
            hash_ids=None if self.hash_ids is None else tuple(self.hash_ids[number] for number in numbers),
            texts=None if self.texts is None else tuple(self.texts[number] for number in numbers),
        )

    def at_rate(self, rate: float) -> Workload:
        """The same requests with all gaps stretched so that the mean rate is this."""
        if not rate > 0:
            raise ConfigError(f"the rate is {rate} requests per second; it must be above 0")
        if self.seconds <= 0:  # nothing to stretch: spread them evenly at random
            return replace(self, arrivals=poisson(len(self), rate))
        factor = self.rate / rate
        return replace(self, arrivals=tuple(at * factor for at in self.arrivals))

    def summary(self) -> str:
        rate = "all at once" if math.isinf(self.rate) else f"{self.rate:.2f}/s over {self.seconds:,.0f} s"
        text = (
            f"{len(self):,} requests, {rate}; prompts {_spread(self.prompts)}, answers {_spread(self.outputs)} tokens"
            f" (median, p90, most)"
        )
        return text + (f"; {self.cached_share():.0%} of prompt tokens repeat" if self.hash_ids is not None else "")


def fixed(name: str, count: int, prompt: int, output: int, rate: float = math.inf, seed: int = 0) -> Workload:
    """Equal requests, all at once or with Poisson arrivals."""
    arrivals = (0.0,) * count if math.isinf(rate) else poisson(count, rate, seed)
    return Workload(name, arrivals, (prompt,) * count, (output,) * count)


def poisson(count: int, rate: float, seed: int = 0) -> tuple[float, ...]:
    source = random.Random(seed)
    at, found = 0.0, [0.0]
    for _ in range(count - 1):
        at += source.expovariate(rate)
        found.append(at)
    return tuple(found[:count])


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _burstiness(arrivals: Sequence[float]) -> float:
    gaps = [after - before for before, after in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2 if mean > 0 else 1.0


def _spread(values: Sequence[int]) -> str:
    return f"{percentile(values, 0.5):,.0f}, {percentile(values, 0.9):,.0f}, {max(values):,}"
