"""How long a step takes: what a step is judged by, the one question that everybody asks, and a model fitted to steps.

The planner, the simulator, admission and pace ask a `StepTimeModel`. There are two kinds: `Roofline`
(plan/solve/roofline.py) from the hardware and the model's shape, before anything ran, and the linear one here, fitted
to steps that did.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenmill.engine.step import Step

FORGETTING = 0.998  # per step: some hundreds of steps are remembered
LEAST_SEEN = 8  # steps before a fit without a prior is worth asking

Vector = npt.NDArray[np.float64]


class Facts(NamedTuple):
    """What a step does, as sums over its rows; a mean over many steps need not be whole."""

    decode_rows: float = 0  # tokens that are decoded, drafts included
    decode_context: float = 0  # tokens that they attend to; where layers have windows, the mean over the layers
    prefill_tokens: float = 0  # of prompts' chunks
    prefill_pairs: float = 0  # of a token of a chunk and one that it attends to
    prefill_context: float = 0  # tokens that the chunks attend to, each counted once
    chunks: float = 0
    sampled: float = 0  # rows of logits

    @property
    def tokens(self) -> float:
        return self.decode_rows + self.prefill_tokens


def facts_of(step: Step) -> Facts:
    decodes = step.num_singles + sum(1 for samples in step.samples if samples > 1)  # those that verify drafts follow
    tokens = pairs = context = 0
    for start, count in zip(step.starts[decodes:], step.counts[decodes:]):
        tokens += count
        pairs += count * start + count * (count + 1) // 2
        context += start + count
    decoded = sum(step.counts[:decodes])  # a draft is a row of its own to everything but the scheduler
    read = zip(step.starts[:decodes], step.counts[:decodes])
    decode_context = sum(count * start + count * (count + 1) // 2 for start, count in read)
    chunks = len(step.counts) - decodes
    return Facts(decoded, decode_context, tokens, pairs, context, chunks, sum(step.samples))


class StepTimeModel(Protocol):
    def seconds(self, facts: Facts) -> float:
        """How long a step takes that does this."""
        ...


@dataclass(frozen=True)
class LinearStepTime:
    """Weights once per step, then a price for every row, token and pair. All in seconds."""

    base: float
    per_row: float
    per_context: float
    per_prefill: float
    per_pair: float

    def seconds(self, facts: Facts) -> float:
        return (
            self.base
            + self.per_row * facts.decode_rows
            + self.per_context * facts.decode_context
            + self.per_prefill * facts.prefill_tokens
            + self.per_pair * facts.prefill_pairs
        )

    def __str__(self) -> str:
        return ", ".join(f"{price:.3g}" for price in astuple(self))


UNITS = np.array([1.0, 1e-1, 1e-4, 1e-2, 1e-6])  # of the five: they make the prices alike in size
RIDGE, PRIOR_RIDGE = 1e-2, 1.0  # in these units, how firmly prices are held to zero, or to those of a prior
# Steps that a prior is asked about: rows, context of each, tokens of a chunk.
TYPICAL = [
    Facts(rows, rows * context, chunk, chunk * (chunk + 1) / 2, chunk, int(chunk > 0), rows + int(chunk > 0))
    for rows in (1, 16, 128)
    for context in (128, 2048)
    for chunk in (0, 64, 512)
]


class FittedStepTime:
    """The linear model that fits the steps seen best, the recent ones most. No price is negative.

    Recursive least squares, kept as sums so that what does not vary for long cannot run away: it stays where a prior
    (or zero) holds it. Where some of the five vary only together, only their sum is known, and that is right.
    """

    def __init__(self, prior: StepTimeModel | None = None, forgetting: float = FORGETTING) -> None:
        self._forgetting = forgetting
        self._held, self._held_times = np.eye(5) * RIDGE, np.zeros(5)  # never forgotten: what does not vary stays there
        self._squares, self._times = np.zeros((5, 5)), np.zeros(5)  # of what was seen: facts by facts, and by seconds
        self._seen = 0
        self._linear: LinearStepTime | None = None  # since the last step was learned
        self.known = prior is not None
        if prior is not None:
            like_it = FittedStepTime(forgetting=1.0)
            for facts in TYPICAL:
                like_it.learn(facts, prior.seconds(facts))
            self._held = np.eye(5) * PRIOR_RIDGE
            self._held_times = PRIOR_RIDGE * np.array(astuple(like_it.linear)) / UNITS

    def learn(self, facts: Facts, seconds: float) -> None:
        scaled = _scaled(facts)
        self._squares = self._forgetting * self._squares + np.outer(scaled, scaled)
        self._times = self._forgetting * self._times + seconds * scaled
        self._seen += 1
        self.known |= self._seen >= LEAST_SEEN
        self._linear = None

    def seconds(self, facts: Facts) -> float:
        return self.linear.seconds(facts)

    @property
    def linear(self) -> LinearStepTime:
        """What is known so far."""
        if self._linear is None:
            squares, times = self._squares + self._held, self._times + self._held_times
            prices, live = np.zeros(5), list(range(5))
            while live:  # whoever would be paid for doing work is left out, and the others are fitted anew
                found = np.linalg.solve(squares[np.ix_(live, live)], times[live])
                if (found >= 0).all():
                    prices[live] = found
                    break
                live.pop(int(np.argmin(found)))
            self._linear = LinearStepTime(*(prices * UNITS).tolist())
        return self._linear


def _scaled(facts: Facts) -> Vector:
    scaled: Vector = np.array([1, *facts[:4]], dtype=np.float64) * UNITS
    return scaled
