"""Drafts: speculative decoding as plans and simulations see it: how often drafts hold, and what verifying costs."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError
from tokenmill.step_time import Facts, StepTimeModel


@dataclass(frozen=True)
class Drafts:
    acceptance: float  # that a draft holds if those before it do
    most: int  # per row and step

    def accepted(self, count: int) -> float:
        """How many of a chain of so many hold, on average: nothing holds behind the first that does not."""
        chance, held = 1.0, 0.0
        for _ in range(count):
            chance *= self.acceptance
            held += chance
        return held

    def best(self, model: StepTimeModel, rows: float, context: float, room: float) -> int:
        """How many drafts per row make the most tokens per second in a step that only decodes; `context`: tokens that
        its rows attend to, together; `room`: tokens that it may have.
        """

        def rate(count: int) -> float:
            return (1 + self.accepted(count)) / model.seconds(verifying(rows, context, count))

        counts = [count for count in range(self.most + 1) if count == 0 or rows * (1 + count) <= room]
        return max(counts, key=rate)

    @property
    def name(self) -> str:
        return f"up to {self.most} drafts that hold with probability {self.acceptance:g} each"


def verifying(rows: float, context: float, count: int) -> Facts:
    """A step that decodes, with so many drafts per row. A draft is a row of its own: it attends to as many tokens."""
    return Facts(decode_rows=rows * (1 + count), decode_context=context * (1 + count), sampled=rows * (1 + count))


def parse_drafts(text: str | None, most: int) -> Drafts | None:
    """From ACCEPTANCE:DRAFTS; `most` drafts are what an engine verifies for a row."""
    if text is None:
        return None
    acceptance, _, count = text.partition(":")
    try:
        found = Drafts(float(acceptance), int(count))
    except ValueError:
        raise ConfigError(f"--speculation is {text!r}; it is written as ACCEPTANCE:DRAFTS, such as 0.8:4") from None
    if not (0 <= found.acceptance <= 1 and 1 <= found.most <= most):
        raise ConfigError(f"--speculation is {text!r}; ACCEPTANCE is from 0 to 1, and DRAFTS from 1 to {most}")
    return found
