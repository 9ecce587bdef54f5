"""What stands around the forward pass of a step in which every row decodes, in plain torch: its inputs, and its end.

How many drafts held is known to the device first. The next step is launched before the host hears of it, so it starts
where the device says (`DecodeTables.lengths`), and finds among the tokens that the host proposed those that stand at
its own positions. Noise is keyed by position, so what holds is what the plain path would have sampled, greedy or not.
"""

from __future__ import annotations

import torch

from tokenmill.ops.registry import Implementation
from tokenmill.ops.types import DecodeInputs, DecodeTables


def decode_inputs(
    tables: DecodeTables,
    rows: torch.Tensor,  # [n] int64
    starts: torch.Tensor,  # [n] int64
    # Where drafts are verified there is an entry for the row's last known token and for every draft, and of each is
    # told its number within the row, first and end of the row's drafts among the proposed, and whether it has slack:
    # [4, n]; and the proposed tokens, at least one.
    drafts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> DecodeInputs:
    """Find out where rows stand, and write their drafts into the token table behind what is known."""
    positions, is_draft = starts, torch.zeros_like(rows, dtype=torch.int8)
    if drafts is None:
        ids = tables.tokens[rows, starts]
    else:
        (numbers, first, end, slack), proposed = drafts
        ahead = torch.where(slack > 0, tables.lengths[rows] - 1 - starts, 0)
        positions = starts + ahead + numbers
        at = first + ahead + numbers - 1
        drafted = (numbers > 0) & (at < end)
        tokens = proposed[at.clamp(0, len(proposed) - 1)]
        kept = tables.drafts[rows, (numbers - 1).clamp(0, tables.drafts.shape[1] - 1)]
        tokens = torch.where(tokens <= tables.on_device, kept, tokens)
        known = tables.tokens[rows, positions]
        ids = torch.where(numbers > 0, torch.where(drafted, tokens, 0).int(), known)
        tables.tokens[rows, positions] = ids
        is_draft = drafted.to(torch.int8)
    live = rows != tables.scratch_row
    blocks = tables.block_tables[rows, positions // tables.block_size].long()
    slots = torch.where(live, blocks * tables.block_size + positions % tables.block_size, -1)
    return DecodeInputs(ids, positions, slots, torch.where(live, positions + 1, 0).int(), rows.int(), is_draft)


def keep_sampled(
    tables: DecodeTables,
    rows: torch.Tensor,  # [n] int64
    inputs: DecodeInputs,
    sampled: torch.Tensor,  # [n] int64; where there are drafts, those that do not count become `rejected`
    numbers: torch.Tensor | None = None,  # [n] int64: of each entry within its row; None: there are no drafts
    rejected: int = 0,
) -> torch.Tensor | None:  # [n] int64: the row where its last entry that counts stands, elsewhere the scratch row
    """Write what was sampled behind what is known. A draft holds if it and all before it are what was sampled."""
    tables.tokens[rows, inputs.positions + 1] = sampled.clamp_min(0).int()  # -1 ends its request at commit
    if numbers is None:
        return None
    before = torch.roll(sampled, 1)
    wrong = (numbers > 0) & ~(inputs.is_draft.bool() & (inputs.ids == before))
    misses = torch.cumsum(wrong, 0)
    own = torch.arange(len(sampled), device=sampled.device) - numbers  # the row's first entry
    holds = misses == misses[own]
    follows = torch.nn.functional.pad((holds & (numbers > 0))[1:], (0, 1))  # (a recording copies no scalars)
    last = torch.where(holds & ~follows, rows, tables.scratch_row)
    tables.lengths[last] = inputs.positions + 2
    sampled.copy_(torch.where(holds, sampled, rejected))
    return last


IMPLEMENTATIONS = tuple(
    Implementation(op=fn.__name__, name="reference", fn=fn, capture_safe=True, batch_invariant=True)
    for fn in (decode_inputs, keep_sampled)
)
