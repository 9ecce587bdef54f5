"""Verification of drafts on the device: where each row stands, which of its drafts hold, how long it is from then on.

How many drafts held is known to the device first. The next step is launched before the host hears of it, so it starts
where the device says (`DeviceState.lengths`), and finds among the tokens that the host proposed those that stand at its
own positions. Noise is keyed by position, so what holds is what the plain path would have sampled, greedy or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.step import DRAFTED, ON_DEVICE, Step

REJECTED = -2  # stands for a sampled token behind a draft that did not hold
COLUMNS = 6  # of `draft_columns`


@dataclass
class Entries:
    """Tokens of rows that decode: of each the last known one and as many drafts as it verifies. All are [n] int64."""

    rows: torch.Tensor
    positions: torch.Tensor  # where they stand on the device
    offsets: torch.Tensor  # 0: the last known token; otherwise the number of the draft
    ids: torch.Tensor
    is_draft: torch.Tensor  # bool: False where a draft was to be verified, but none was proposed for the position

    @classmethod
    def place(
        cls,
        state: DeviceState,
        told: torch.Tensor,  # [COLUMNS, n], as the host has it
        proposed: torch.Tensor,  # [tokens]; at least one
    ) -> Entries:
        """Find out where rows stand, and write their drafts into the token table behind what is known."""
        rows, starts, offsets, first, end, slack = told
        ahead = torch.where(slack > 0, state.lengths[rows] - 1 - starts, 0)
        positions = starts + ahead + offsets
        at = first + ahead + offsets - 1
        is_draft = (offsets > 0) & (at < end)
        drafts = proposed[at.clamp(0, len(proposed) - 1)]
        drafts = torch.where(drafts == ON_DEVICE, state.drafts[rows, (offsets - 1).clamp(0, DRAFTED - 1)], drafts)
        known = state.tokens[rows, positions].long()
        ids = torch.where(offsets > 0, torch.where(is_draft, drafts, 0), known)
        state.tokens[rows, positions] = ids.int()
        return cls(rows, positions, offsets, ids, is_draft)

    def accept(self, state: DeviceState, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the sampled tokens [n] count, or are REJECTED; and of each row the last entry that counts [n], bool.

        A draft holds if it and all before it are what was sampled.
        """
        before = torch.roll(sampled, 1)
        wrong = (self.offsets > 0) & ~(self.is_draft & (self.ids == before))
        misses = torch.cumsum(wrong, 0)
        own = torch.arange(len(sampled), device=sampled.device) - self.offsets  # the row's first entry
        holds = misses == misses[own]
        follows = torch.nn.functional.pad((holds & (self.offsets > 0))[1:], (0, 1))  # (a recording copies no scalars)
        last = holds & ~follows
        state.lengths[torch.where(last, self.rows, state.scratch_row)] = self.positions + 2
        return torch.where(holds, sampled, REJECTED), last


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
