"""Verification of drafts: what stands for a rejected one, and steps for a device that knows where its rows stand.

Elsewhere the ops `decode_inputs` and `keep_sampled` find that out (ops/reference_decode.py).
"""

from __future__ import annotations

from tokenmill.engine.step import Step

REJECTED = -2  # stands for a sampled token behind a draft that did not hold
COLUMNS = 6  # of `draft_columns`


def settled(step: Step, lengths: list[int]) -> Step:
    """The step with its starts as they are, for a device that computes a step while it is launched."""
    made = Step(**{name: getattr(step, name) for name in Step.__slots__})
    made.starts, made.drafts, made.slack = list(step.starts), dict(step.drafts), {}
    for index, row in enumerate(step.rows):
        if row in step.slack:
            ahead = lengths[row] - 1 - step.starts[index]
            made.starts[index] += ahead
            if row in made.drafts:
                made.drafts[row] = made.drafts[row][ahead:]
    return made
