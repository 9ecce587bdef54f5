"""Packs a step into one array of integers, so that it reaches the device in a single copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.engine.step import SharedPrefix, Step, is_speculative, num_decodes
from tokenmill.kv.moves import Move, Place

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedStep:
    """`words` holds the named sections one after the other; `sections` says where each lies."""

    words: Ints
    sections: dict[str, slice]
    sample_rows: list[int]  # of the sampled entries, on the host
    attention: AttentionRows


@dataclass(frozen=True)
class AttentionRows:
    """Rows as attention sees them. One that verifies drafts may be several, of one query each."""

    rows: list[int]
    starts: list[int]  # slots before the first query
    counts: list[int]
    context: list[int]  # at most so many keys: the device may know of fewer
    num_singles: int

    @classmethod
    def of(cls, step: Step, split_drafts: bool) -> AttentionRows:
        rows, starts, counts, num_singles = step.rows, step.starts, step.counts, step.num_singles
        if split_drafts and (decodes := num_decodes(step)) > num_singles:
            shares = zip(rows[:decodes], starts[:decodes], counts[:decodes], strict=True)
            singles = [(row, start + n) for row, start, count in shares for n in range(count)]
            num_singles = len(singles)
            rows = [row for row, _ in singles] + rows[decodes:]
            starts = [start for _, start in singles] + starts[decodes:]
            counts = [1] * num_singles + counts[decodes:]
        if step.pruned:
            starts = [start - step.pruned.get(row, 0) for row, start in zip(rows, starts, strict=True)]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        if step.slack:
            ends = [end + step.slack.get(row, 0) for row, end in zip(rows, ends, strict=True)]
        return cls(rows, starts, counts, ends, num_singles)


def pack(
    step: Step,
    token_width: int,  # of the token table
    max_blocks: int,
    padding: tuple[int, int] = (0, 0),
    num_entries: int = 0,
    split_drafts: bool = False,
    mask_rows: Callable[[Ints, Ints], Ints] | None = None,
) -> PackedStep:
    """All the integers a step brings; padding: to how many tokens (t) with which row; num_entries: to how many entries,
    where they are fewer, by repeating the first; split_drafts: attention sees drafts as rows of one query each;
    mask_rows: where the masks of entries are, by row and number within the row (`Sampler.mask_rows`).

    Attention: rows [n], q_start [n + 1], context [n].   Tokens: token_rows [t], positions [t], and where they stand in
    their row's blocks, which is the position unless it is pruned: places [t] (empty where no row is).
    Sampling: entries [m] (which tokens), entry_rows [m], entry_positions [m] (where the new token will stand).
    Writes: token_at/token_value into the token table, block_at/block_value into the block tables (flat indices),
    move_from/move_to (blocks).   A shared prefix: shared_members, shared_tokens [n]; both empty without one.
    Adapters, where a row has one: adapters [t] (slots, -1 without).
    Drafts, where there are any: told [6 d], proposed (see `draft_columns`); mask_rows [m], where they have masks.
    """
    rows, starts, counts, samples = (
        np.array(column, dtype=np.int64) for column in (step.rows, step.starts, step.counts, step.samples)
    )
    q_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=q_start[1:])
    ends = starts + counts
    if step.num_singles == len(rows):
        token_rows, positions = rows, starts
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(q_start[-1]) - np.repeat(q_start[:-1] - starts, counts)
    entry_owner = np.repeat(np.arange(len(rows)), samples)
    within = np.arange(len(entry_owner)) - np.repeat(np.cumsum(samples) - samples, samples)
    back = samples[entry_owner] - within  # 1 for a row's last token
    entries = q_start[entry_owner + 1] - back
    entry_rows, entry_positions = rows[entry_owner], ends[entry_owner] - back + 1
    token_at, token_value = _token_writes(step, token_width)
    block_at, block_value = block_writes(step, max_blocks)
    seen = AttentionRows.of(step, split_drafts)
    queries = np.array(seen.counts, dtype=np.int64)
    named = {
        "rows": np.array(seen.rows, dtype=np.int64),
        "q_start": np.concatenate([[0], np.cumsum(queries)]),
        "context": np.array(seen.starts, dtype=np.int64) + queries,
        "token_rows": _padded(token_rows, *padding),
        "positions": _padded(positions, padding[0], 0),
        "places": _padded(_places(step, positions, counts), padding[0] if step.pruned else 0, 0),
        "entries": _padded(entries, num_entries, entries[0] if len(entries) else 0),
        "entry_rows": entry_rows,
        "entry_positions": entry_positions,
        "token_at": token_at,
        "token_value": token_value,
        "block_at": block_at,
        "block_value": block_value,
        "move_from": np.array([_on_device(move).source for move in step.moves], dtype=np.int64),
        "move_to": np.array([move.target for move in step.moves], dtype=np.int64),
        "shared_members": np.array(step.shared.members if step.shared else (), dtype=np.int64),
        "shared_tokens": shared_lengths(step.shared, len(rows)) if step.shared else np.zeros(0, dtype=np.int64),
    }
    if step.adapters:
        named["adapters"] = _padded(np.repeat(np.array(step.adapters, dtype=np.int64), counts), padding[0], -1)
    if mask_rows is not None:
        named["mask_rows"] = mask_rows(entry_rows, within)
    if is_speculative(step):
        told, named["proposed"] = draft_columns(step)
        named["told"] = told.reshape(-1)
    sections, at = {}, 0
    for name, part in named.items():
        sections[name] = slice(at, at + len(part))
        at += len(part)
    return PackedStep(np.concatenate(list(named.values())), sections, entry_rows.tolist(), seen)


def _places(step: Step, positions: Ints, counts: Ints) -> Ints:
    """Empty where every token stands at its position."""
    if not step.pruned:
        return np.zeros(0, dtype=np.int64)
    behind = np.array([step.pruned.get(row, 0) for row in step.rows], dtype=np.int64)
    return positions - np.repeat(behind, counts)


def _on_device(move: Move) -> Move:
    if move.source_place is not Place.DEVICE or move.target_place is not Place.DEVICE:
        raise NotImplementedError(f"{move} leaves the device, and this runner moves blocks only within it")
    return move


def draft_columns(step: Step) -> tuple[Ints, Ints]:  # [6, tokens], [proposed tokens, at least one]
    """What rows that decode bring in a step that verifies drafts, one entry for every token that they compute: row,
    start, number within the row, first and end of its drafts among the proposed tokens, whether it has slack.
    """
    decodes = num_decodes(step)
    parts: list[tuple[int, int, int, int, bool]] = []
    proposed: list[int] = []
    for row, start in zip(step.rows[:decodes], step.starts[:decodes], strict=True):
        first = len(proposed)
        proposed += step.drafts.get(row, ())
        parts.append((row, start, first, len(proposed), row in step.slack))
    counts = np.array(step.counts[:decodes], dtype=np.int64)
    row, start, first, end, slack = np.repeat(np.array(parts, dtype=np.int64).reshape(-1, 5), counts, axis=0).T
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([row, start, number, first, end, slack]), np.array(proposed or [0], dtype=np.int64)


def _padded(column: Ints, size: int, value: int) -> Ints:  # [size], or as long as it is
    if len(column) >= size:
        return column
    whole = np.full(size, value, dtype=np.int64)
    whole[: len(column)] = column
    return whole


def shared_lengths(shared: SharedPrefix, rows: int) -> Ints:  # [rows]
    """How many tokens each row shares with the others; 0 for those that share none."""
    lengths = np.zeros(rows, dtype=np.int64)
    lengths[list(shared.members)] = shared.tokens
    return lengths


def _token_writes(step: Step, token_width: int) -> tuple[Ints, Ints]:
    """Tokens that the host knows and the device does not: of new rows, of beams, of the last stage's making.
    (Drafts: see `verify`.)
    """
    at: list[Ints] = []
    value: list[Ints] = []
    for admission in step.admissions:
        first = 0 if admission.params.reads_history else admission.num_computed  # what is computed is not read again
        at.append(admission.row * token_width + np.arange(first, len(admission.tokens)))
        value.append(np.array(array("i", admission.tokens[first:]), dtype=np.int64))
    if step.chosen or step.told:
        chosen = np.array(step.chosen + step.told, dtype=np.int64)
        at.append(chosen[:, 0] * token_width + chosen[:, 1])
        value.append(chosen[:, 2])
    return _joined(at), _joined(value)


def block_writes(step: Step, max_blocks: int) -> tuple[Ints, Ints]:
    """Where in the flattened block tables entries changed, and what they are now."""
    if not step.admissions:  # rows grow by a block now and then: lists are faster than many small arrays
        at = [row * max_blocks + first + n for row, first, blocks in step.blocks for n in range(len(blocks))]
        value = [block for _, _, blocks in step.blocks for block in blocks]
        return np.array(at, dtype=np.int64), np.array(value, dtype=np.int64)
    ranges = [row * max_blocks + np.arange(first, first + len(blocks)) for row, first, blocks in step.blocks]
    return _joined(ranges), _joined([np.array(blocks, dtype=np.int64) for _, _, blocks in step.blocks])


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
