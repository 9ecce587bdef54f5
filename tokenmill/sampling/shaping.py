"""What changes logits before sampling: penalties, bias, forbidden words and forbidden stop tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

FORBIDDEN = float("-inf")


@dataclass(frozen=True)
class RowEdits:
    """The sparse edits of one row, on the device; None where the row has none of that kind."""

    bias_ids: torch.Tensor | None = None  # [b] int64
    bias_values: torch.Tensor | None = None  # [b] float64
    bad_words: torch.Tensor | None = None  # [words, longest] int64, right-aligned, padded with ANY_TOKEN
    stop_ids: torch.Tensor | None = None  # [s] int64: forbidden while the output is shorter than min_tokens


ANY_TOKEN = -1
_NO_TOKEN = -2


def penalize(
    logits: torch.Tensor,  # [k, vocab], overwritten
    tokens: torch.Tensor,  # [k, length]: the rows' tokens; only those before `positions` count
    positions: torch.Tensor,  # [k]
    prompt_len: torch.Tensor,  # [k]
    repetition: torch.Tensor,  # [k], over prompt and output: divides positive logits, multiplies negative ones
    presence: torch.Tensor,  # [k], subtracted once from every token of the output
    frequency: torch.Tensor,  # [k], subtracted for each time a token stands in the output
) -> None:
    rows, vocab = logits.shape
    place = torch.arange(tokens.shape[1], device=tokens.device)
    # A row that failed may have left -1 in the table; such places are counted in a spare last column.
    usable = (place < positions[:, None]) & (tokens >= 0) & (tokens < vocab)
    ids = torch.where(usable, tokens, vocab).long()
    seen = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device).scatter_(1, ids, True)[:, :vocab]
    in_output = (place >= prompt_len[:, None]).to(logits.dtype)
    counts = torch.zeros(rows, vocab + 1, dtype=logits.dtype, device=logits.device)
    counts = counts.scatter_add_(1, ids, in_output)[:, :vocab]
    strength = repetition.to(logits.dtype)[:, None]
    punished = torch.where(logits < 0, logits * strength, logits / strength)
    logits.copy_(torch.where(seen, punished, logits))
    logits.sub_(counts * frequency.to(logits.dtype)[:, None])
    logits.sub_((counts > 0) * presence.to(logits.dtype)[:, None])


def add_bias(
    logits: torch.Tensor,  # [vocab], overwritten
    ids: torch.Tensor,  # [b]
    values: torch.Tensor,  # [b]
) -> None:
    logits.index_add_(0, ids, values.to(logits.dtype))


def forbid(
    logits: torch.Tensor,  # [vocab], overwritten
    ids: torch.Tensor,  # [s]
) -> None:
    logits.index_fill_(0, ids, FORBIDDEN)


def forbid_words(
    logits: torch.Tensor,  # [vocab], overwritten
    words: torch.Tensor,  # [words, longest], right-aligned, padded with ANY_TOKEN
    before: torch.Tensor,  # [t]: the row's tokens before the one being chosen
) -> None:
    """Forbid the last token of every word whose other tokens are the last ones so far."""
    openings = words[:, :-1]  # [words, longest - 1]
    reach = openings.shape[1]
    tail = before[max(0, before.shape[0] - reach) :]
    if tail.shape[0] < reach:
        tail = torch.nn.functional.pad(tail, (reach - tail.shape[0], 0), value=_NO_TOKEN)
    matches = ((openings == tail) | (openings == ANY_TOKEN)).all(1)
    # Added, not assigned: two words may share a last token and only one of them match.
    logits.index_add_(0, words[:, -1], torch.where(matches, FORBIDDEN, 0.0).to(logits.dtype))


def allow_only(
    logits: torch.Tensor,  # [n, vocab], overwritten
    masks: torch.Tensor,  # [rows, 1 + words] int32: whether the row has a mask; then one bit per token, lowest first
    rows: torch.Tensor,  # [n]: whose mask is for which logits
) -> None:
    """Forbid the tokens whose bits are not set. A grammar's mask covers the whole vocabulary."""
    mine = masks.index_select(0, rows.long())  # [n, 1 + words]
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((mine[:, 1:, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0
    logits.masked_fill_(~(allowed | (mine[:, :1] == 0)), FORBIDDEN)


def allow_only_on_host(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """The same where the host may look: only rows that have a mask cost anything."""
    table, entries = masks.numpy(), rows.numpy()
    for entry in np.flatnonzero(table[entries, 0]).tolist():
        bits = np.unpackbits(table[entries[entry], 1:].view(np.uint8), count=logits.shape[1], bitorder="little")
        logits[entry].masked_fill_(torch.from_numpy(bits == 0), FORBIDDEN)
