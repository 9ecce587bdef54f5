"""Logits before sampling, in plain torch: penalties, bias, forbidden words, forbidden stop tokens, grammars' masks."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.ops.types import ANY_TOKEN, RowEdits, ShapeBatch

FORBIDDEN = float("-inf")
PENALTY_SCRATCH = 256 << 20  # bytes; more penalized rows than fit are done one after the other
_NO_TOKEN = -2


def shape(
    logits: torch.Tensor,  # [n, vocab], or those from the token `batch.first` on; overwritten
    batch: ShapeBatch,
) -> None:
    """The host looks at the settings, so that rows without any cost nothing."""
    _penalize_rows(logits, batch)
    if batch.edits:
        columns = (batch.rows.tolist(), batch.positions.tolist(), batch.stops_from.tolist())
        for entry, (row, position, stops_from) in enumerate(zip(*columns, strict=True)):
            if row in batch.edits:
                edit(logits[entry], batch.edits[row], batch.tokens[row, :position], position >= stops_from, batch.first)
    if batch.masks is not None and logits.device.type == "cpu":
        allow_only_on_host(logits, batch.masks, batch.mask_rows, batch.first)
    elif batch.masks is not None:
        allow_only(logits, batch.masks, batch.mask_rows)


def _penalize_rows(logits: torch.Tensor, batch: ShapeBatch) -> None:
    repetition, presence, frequency = (one.cpu().numpy() for one in (batch.repetition, batch.presence, batch.frequency))
    penalized = np.flatnonzero((repetition != 1) | (presence != 0) | (frequency != 0))
    if not penalized.size:
        return
    entries = torch.from_numpy(penalized).to(logits.device)
    longest = int(batch.positions.index_select(0, entries).cpu().numpy().max())
    known = batch.tokens[:, :longest]
    per_row = 4 * logits.element_size() * logits.shape[1] + 24 * longest  # counts; the row's tokens as indices
    for part in torch.split(entries, max(1, PENALTY_SCRATCH // per_row)):
        shaped = logits.index_select(0, part)
        settings = (batch.positions, batch.prompt_len, batch.repetition, batch.presence, batch.frequency)
        tokens = known.index_select(0, batch.rows.index_select(0, part)) - batch.first
        penalize(shaped, tokens, *(one.index_select(0, part) for one in settings))
        logits.index_copy_(0, part, shaped)


def penalize(
    logits: torch.Tensor,  # [k, vocab], overwritten
    tokens: torch.Tensor,  # [k, length]: the columns of the rows' tokens; only those before `positions` count
    positions: torch.Tensor,  # [k]
    prompt_len: torch.Tensor,  # [k]
    repetition: torch.Tensor,  # [k]
    presence: torch.Tensor,  # [k]
    frequency: torch.Tensor,  # [k]
) -> None:
    rows, vocab = logits.shape
    place = torch.arange(tokens.shape[1], device=tokens.device)
    # A row that failed may have left -1 in the table, and another rank may have the column; such places are counted in
    # a spare last one.
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


def edit(
    logits: torch.Tensor,  # [vocab], overwritten
    edits: RowEdits,
    before: torch.Tensor,  # [t]: the row's tokens before the one being chosen
    may_stop: bool,
    first: int = 0,  # the token of the first logit
) -> None:
    if edits.bias_ids is not None and edits.bias_values is not None:
        mine = _columns(logits, edits.bias_ids, first)
        logits.index_add_(0, edits.bias_ids[mine] - first, edits.bias_values[mine].to(logits.dtype))
    if edits.bad_words is not None:
        _forbid_words(logits, edits.bad_words, before, first)
    if edits.stop_ids is not None and not may_stop:
        logits.index_fill_(0, edits.stop_ids[_columns(logits, edits.stop_ids, first)] - first, FORBIDDEN)


def _columns(logits: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:  # [part], [k] -> [k] bool
    """Which of these tokens have a logit here."""
    return (tokens >= first) & (tokens < first + logits.shape[0])


def _forbid_words(
    logits: torch.Tensor,  # [vocab], overwritten
    words: torch.Tensor,  # [words, longest], right-aligned, padded with ANY_TOKEN
    before: torch.Tensor,  # [t]
    first: int,
) -> None:
    """Forbid the last token of every word whose other tokens are the last ones so far."""
    openings = words[:, :-1]  # [words, longest - 1]
    reach = openings.shape[1]
    tail = before[max(0, before.shape[0] - reach) :]
    if tail.shape[0] < reach:
        tail = torch.nn.functional.pad(tail, (reach - tail.shape[0], 0), value=_NO_TOKEN)
    matches = ((openings == tail) | (openings == ANY_TOKEN)).all(1)
    # Added, not assigned: two words may share a last token and only one of them match.
    last = words[:, -1]
    mine = _columns(logits, last, first)
    logits.index_add_(0, last[mine] - first, torch.where(matches, FORBIDDEN, 0.0).to(logits.dtype)[mine])


def allow_only(
    logits: torch.Tensor,  # [n, vocab], overwritten
    masks: torch.Tensor,  # [rows, 1 + words] int32: whether the row has a mask; then one bit per token, lowest first
    rows: torch.Tensor,  # [n]: whose mask is for which logits
    first: int = 0,  # the token of the first logit
) -> None:
    """Forbid the tokens whose bits are not set. A grammar's mask covers the whole vocabulary."""
    mine = masks.index_select(0, rows.long())  # [n, 1 + words]
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((mine[:, 1:, None] >> bits) & 1).flatten(1)[:, first : first + logits.shape[1]] != 0
    logits.masked_fill_(~(allowed | (mine[:, :1] == 0)), FORBIDDEN)


def allow_only_on_host(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor, first: int = 0) -> None:
    """The same where the host may look: only rows that have a mask cost anything.

    In numpy, on this thread: torch would share a row of 50 thousand logits among its threads, and where a core is busy
    the wait for them takes a hundred times as long as the work.
    """
    if logits.dtype == torch.bfloat16:  # numpy has none
        allow_only(logits, masks, rows, first)
        return
    last = first + logits.shape[1]
    table, entries, shaped = masks.numpy(), rows.numpy(), logits.numpy()
    for entry in np.flatnonzero(table[entries, 0]).tolist():
        bits = np.unpackbits(table[entries[entry], 1:].view(np.uint8), count=last, bitorder="little")
        np.copyto(shaped[entry], FORBIDDEN, where=bits[first:] == 0)
