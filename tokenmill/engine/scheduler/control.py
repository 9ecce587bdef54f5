"""Pace: how many tokens and rows the next step may have; fixed, or led by feedback to latency targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.engine.step import Step
from tokenmill.step_time import Facts, FittedStepTime, facts_of

if TYPE_CHECKING:
    from tokenmill.engine.scheduler.lifecycle import Delta, Limits

ALLOWED = 0.01  # share of steps that may be late: the target is for the 95th percentile of every single answer
MIN_CHUNK = 32  # prompt tokens that a step may always have: prompts go on whatever happens
SMOOTHING = 0.02  # of the share of late tokens
GAIN = 0.05  # how fast the margin follows the share of late tokens
MARGINS = (0.25, 0.98)  # never above the target: a step that is meant to be late is late for every row in it


class Pace:
    """A fixed pace."""

    adapts = False  # whether it is told of committed steps

    def __init__(self, limits: Limits) -> None:
        self.step_tokens = limits.max_step_tokens  # read before every step; decodes always fit
        self.rows = limits.max_rows  # newcomers wait while as many run

    def committed(self, step: Step, deltas: Sequence[Delta], now: float) -> None:
        """Called after every committed step with what it gave to its requests, if it adapts."""


class SloPace(Pace):
    """Keeps the 95th percentile of the gaps between tokens at its target, with as much prompt per step as that allows.

    A model of step times is fitted to the steps as they come, and says how many prompt tokens fit into the next step. A
    margin on the target closes the loop: it falls while more than 1 % of steps are late and rises while fewer are, so
    the model need not be right. Where decoding alone takes all the time there is, newcomers wait, unless first tokens
    miss a target of their own more often, or the target is one that even a row alone misses.
    """

    adapts = True

    def __init__(self, limits: Limits, itl: float, ttft: float | None = None) -> None:
        super().__init__(limits)
        self.itl, self.ttft = itl, ttft
        self.margin = 0.9
        self._most_tokens, self._most_rows = limits.max_step_tokens, limits.max_rows
        self._stages = limits.stages
        self._late = self._late_first = 0.0  # smoothed shares
        self._step_time = FittedStepTime()
        self._depth = 0.0  # tokens that each prompt token of the last chunks looked at
        self._reachable = True  # False: a row alone was late, and nothing has been in time since

    def committed(self, step: Step, deltas: Sequence[Delta], now: float) -> None:
        facts = facts_of(step)
        if facts.prefill_tokens:
            self._depth = facts.prefill_pairs / facts.prefill_tokens
        went_on = next((one for one in deltas if len(one.tokens) and _went_on(one)), None)
        if went_on is not None:
            times = went_on.request.metrics.token_times
            gap = times[-1] - times[-1 - len(went_on.tokens)]  # tokens of one step come together
            self._step_time.learn(facts, gap)
            self._judge(gap > self.itl, step.num_singles)
            self._reachable |= gap <= self.itl
        for delta in deltas:
            if self.ttft is not None and len(delta.request.metrics.token_times) == len(delta.tokens) > 0:
                late = (delta.request.metrics.ttft or 0.0) > self.ttft
                self._late_first += 0.02 * (late - self._late_first)
        if self._step_time.known:
            self._set_pace(step.num_singles, facts.decode_context)

    def _judge(self, late: bool, rows: int) -> None:
        """Move the margin; a step with many rows is as many tokens."""
        weight = min(1.0, SMOOTHING * (1 + math.log2(1 + rows)) / 4)
        self._late += weight * (late - self._late)
        self.margin *= math.exp(GAIN * (ALLOWED - self._late))
        self.margin = min(max(self.margin, MARGINS[0]), MARGINS[1])

    def _set_pace(self, rows: int, context: float) -> None:
        decoding = self._step_time.seconds(Facts(rows, context))
        least = self._step_time.seconds(Facts(rows, context, MIN_CHUNK, MIN_CHUNK * self._depth))
        per_prompt = (least - decoding) / MIN_CHUNK
        left = self.itl * self.margin - decoding
        chunk = int(left / max(per_prompt, 1e-9)) if left > 0 else 0
        self.step_tokens = min(rows + max(chunk, MIN_CHUNK), self._most_tokens)
        if rows == 1 and decoding > self.itl:
            self._reachable = False
        full = least > self.itl * MARGINS[1]
        hold = full and self._reachable and self._late_first <= max(self._late, ALLOWED)
        self.rows = max(rows, 1) * self._stages if hold else self._most_rows  # a step has one set of several


def pace_for(limits: Limits, itl_ms: float | None, ttft_ms: float | None = None) -> Pace:
    """The pace that a config asks for."""
    if itl_ms is None:
        return Pace(limits)
    return SloPace(limits, itl_ms / 1000, None if ttft_ms is None else ttft_ms / 1000)


def _went_on(delta: Delta) -> bool:
    return len(delta.request.metrics.token_times) > len(delta.tokens)
