"""How long a step takes: what a step is judged by, the one question that everybody asks, and a model fitted to steps.

The planner, the simulator, admission, pace and the draft budget ask a `StepTimeModel`. There are two kinds: `Roofline`
(plan/solve/roofline.py) from the hardware and the model's shape, before anything ran, and `FittedStepTime` here, fitted
to steps that did.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenmill.engine.step import Step

FORGETTING = 0.998  # per step: some hundreds of steps are remembered
LEAST_SEEN = 8  # steps before a fit without a prior is worth asking

Vector = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


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
UNITS_BY_UNITS = np.outer(UNITS, UNITS)
RIDGE, PRIOR_RIDGE = 1e-2, 1.0  # in these units, how firmly prices are held to zero, or to those of a prior
# Steps that a prior is asked about: rows, context of each, tokens of a chunk.
TYPICAL = [
    Facts(rows, rows * context, chunk, chunk * (chunk + 1) / 2, chunk, int(chunk > 0), rows + int(chunk > 0))
    for rows in (1, 16, 128)
    for context in (128, 2048)
    for chunk in (0, 64, 512)
]

SIZES = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024]  # in tokens
SIZE_ARRAY, SIZE_NUMBERS = np.array(SIZES, dtype=np.float64), np.arange(len(SIZES), dtype=np.float64)
LARGEST_SURPRISE = 0.4  # of a step, in its logarithm: others' work on the machine must not count for more
SLOWEST = 0.03  # how fast the shape follows a new step, at last
DRIFT = 0.15  # and how fast the level does: what slows one size slows all, mostly


class DecodeCurve:
    """How long steps that only decode take by their number of tokens, which is no line: kernels work in tiles.

    A level that follows all of them (contexts grow, machines are shared), and a shape over the number of tokens, which
    starts as `per_token` says. It is interpolated between sizes that were seen, and beyond them goes on as it started.
    """

    def __init__(self, per_token: float) -> None:
        self.level: float | None = None  # logarithm of seconds
        self._prior: Vector = np.log1p(per_token * (SIZE_ARRAY - 1))
        self._off = np.zeros(len(SIZES))  # by how much each size differs from that
        self._times = [0] * len(SIZES)  # that each was seen
        self._seen = np.zeros(0, dtype=np.int64)  # sizes that were, in order
        self._shape = self._prior

    def learn(self, tokens: float, seconds: float) -> None:
        at = min(bisect_left(SIZES, tokens), len(SIZES) - 1)
        measured = math.log(max(seconds, 1e-7))
        if self.level is None:
            self.level = measured - float(self._prior[at])
        here = float(self._shape[at])
        surprise = min(max(measured - self.level - here, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self._times[at] += 1
        if self._times[at] == 1:
            self._seen = np.flatnonzero(self._times)
        rate = max(SLOWEST, 1 / (1 + self._times[at]))
        self._off[at] = here - self._prior[at] + rate * (1 - DRIFT) * surprise
        self.level += DRIFT * surprise
        shape = self._prior + np.interp(SIZE_NUMBERS, self._seen, self._off[self._seen])
        self._shape = np.maximum.accumulate(shape)  # more tokens never take less

    def seconds(self, tokens: Counts) -> Vector:
        seconds: Vector = np.exp((self.level or 0.0) + np.interp(tokens, SIZE_ARRAY, self._shape))
        return seconds


class FittedStepTime:
    """Fitted to the steps seen, the recent ones most: prices for all that steps do, and a curve for those that decode.

    The prices (`seconds`) are the linear model that fits best, and none is negative. Recursive least squares, kept as
    sums so that what does not vary for long cannot run away: it stays where a prior (or zero) holds it. Where some of
    the five vary only together, only their sum is known, and that is right.

    The curve (`decoding`) knows how steps of a few tokens more or less compare, which a line does not, and what they
    take now. `seconds` leaves it out all the same: it knows no contexts and treats alike what is nearly as large, and a
    pace that believed it was late more often.
    """

    def __init__(
        self,
        prior: StepTimeModel | None = None,
        forgetting: float = FORGETTING,
        per_token: float = 0.0,  # what a decoded token more costs, in shares of a step with one, until it was seen
    ) -> None:
        self._forgetting = forgetting
        self._held, self._held_times = np.eye(5) * RIDGE, np.zeros(5)  # never forgotten: what does not vary stays there
        self._sums = np.zeros((6, 6))  # of what was seen: the five and the seconds, each by each
        self._seen = 0
        self._linear: LinearStepTime | None = None  # since the last step was learned
        self._curve = DecodeCurve(per_token)
        self.known = prior is not None
        if prior is not None:
            like_it = FittedStepTime(forgetting=1.0)
            for facts in TYPICAL:
                like_it.learn(facts, prior.seconds(facts))
            self._held = np.eye(5) * PRIOR_RIDGE
            self._held_times = PRIOR_RIDGE * np.array(astuple(like_it.linear)) / UNITS

    def learn(self, facts: Facts, seconds: float) -> None:
        rows, context, prompt, pairs = facts[:4]
        seen = np.array((1.0, rows, context, prompt, pairs, seconds))
        self._sums *= self._forgetting
        self._sums += seen[:, None] * seen
        self._seen += 1
        self.known |= self._seen >= LEAST_SEEN
        self._linear = None
        if rows and not prompt:
            self._curve.learn(rows, seconds)

    def seconds(self, facts: Facts) -> float:
        return self.linear.seconds(facts)

    @property
    def knows_decoding(self) -> bool:
        """Whether any step that only decodes was seen: until then `decoding` tells only how such steps compare."""
        return self._curve.level is not None

    def decoding(self, tokens: Counts) -> Vector:
        """How long steps take that only decode, by their number of tokens, with contexts as they are of late."""
        return self._curve.seconds(tokens)

    @property
    def linear(self) -> LinearStepTime:
        """The prices, as far as they are known."""
        if self._linear is None:
            squares = self._sums[:5, :5] * UNITS_BY_UNITS + self._held
            times = self._sums[:5, 5] * UNITS + self._held_times
            prices, live = np.zeros(5), np.arange(5)
            while len(live):  # whoever would be paid for doing work is left out, and the others are fitted anew
                found = np.linalg.solve(squares[live[:, None], live], times[live])
                if found.min() >= 0:
                    prices[live] = found
                    break
                live = np.delete(live, found.argmin())
            self._linear = LinearStepTime(*(prices * UNITS).tolist())
        return self._linear
