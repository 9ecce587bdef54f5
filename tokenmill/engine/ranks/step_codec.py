"""Steps as bytes, so that every rank of a group gets the same one. `Step.requests` stays at home.

[ length of the integers | length of the text | integers | text | masks ]: what every step has is integers, one list
after the other with its length before it; what only admissions bring (parameters, seeds) is JSON; masks are as they
are. Nothing in it is ever executed. A step with parts has no integers of its own:
[ 0 | how many parts | its number | length of each part, 0 where it has none | the parts that there are ].
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from tokenmill.engine.step import POOLINGS, Admission, SharedPrefix, Step
from tokenmill.kv.moves import Move, Place, Placement
from tokenmill.params import SamplingParams

_LENGTHS = struct.Struct("<QQ")
_WORD = 8  # bytes
_PARAMS = tuple(field.name for field in fields(SamplingParams))
_PLACES = tuple(Place)


def encode_step(step: Step) -> bytes:
    if step.parts:
        parts = [b"" if part is None else encode_step(part) for part in step.parts]
        head = array("Q", (step.number, *map(len, parts)))
        return b"".join((_LENGTHS.pack(0, len(parts)), head.tobytes(), *parts))
    words = array("q", (step.number, step.num_singles, step.drafting, step.tree))
    for column in (step.rows, step.starts, step.counts, step.samples, step.adapters, step.in_float32):
        _put(words, column)
    words.append(len(step.blocks))
    for row, first, blocks in step.blocks:
        words.extend((row, first))
        _put(words, blocks)
    _put(words, [part for move in step.moves for part in _move_words(move)])
    words.append(len(step.placements))
    for placed in step.placements:
        words.extend((placed.row, placed.first, placed.count, placed.source))
        _put(words, placed.blocks)
    words.append(len(step.drafts))
    for row, drafts in step.drafts.items():
        words.append(row)
        _put(words, drafts)
    _put(words, [part for pair in step.slack.items() for part in pair])
    _put(words, [part for one in step.chosen for part in one])
    _put(words, [part for one in step.told for part in one])
    _put(words, [part for row, (width, length) in step.prompt_logprobs.items() for part in (row, width, length)])
    _put(words, [part for row, (how, end) in step.pooling.items() for part in (row, POOLINGS.index(how), end)])
    shared = step.shared
    _put(words, () if shared is None else (shared.tokens, *shared.members))
    words.append(len(step.masks))
    for row, masks in step.masks.items():
        words.append(row)
        _put(words, [len(mask) for mask in masks])
    words.append(len(step.admissions))
    for one in step.admissions:
        words.extend((one.row, one.prompt_len, one.num_computed))
        _put(words, one.tokens)
        _put(words, one.stop_ids)
    text = _admitted_text(step.admissions) if step.admissions else b""
    masks_of_rows = [mask for row_masks in step.masks.values() for mask in row_masks]
    return b"".join((_LENGTHS.pack(len(words), len(text)), words.tobytes(), text, *masks_of_rows))


def decode_step(message: bytes, group: int | None = None) -> Step:
    """group: of a step with parts only this one is read; None: all are."""
    count, text_length = _LENGTHS.unpack_from(message)
    at = _LENGTHS.size
    if not count:
        return _with_parts(message, text_length, group)
    words = _Words(memoryview(message)[at : at + 8 * count].cast("q").tolist())
    at += 8 * count
    text = message[at : at + text_length]
    at += text_length
    number, num_singles, drafting, tree = words.take(4)
    rows, starts, counts, samples, adapters, in_float32 = (words.list() for _ in range(6))
    step = Step(
        number=number,
        rows=rows,
        starts=starts,
        counts=counts,
        samples=samples,
        num_singles=num_singles,
        adapters=adapters,
        in_float32=in_float32,
        drafting=bool(drafting),
        tree=bool(tree),
    )
    for _ in range(words.one()):
        row, first = words.take(2)
        step.blocks.append((row, first, words.list()))
    step.moves = [
        Move(source, target, _PLACES[source_place], _PLACES[target_place])
        for source, target, source_place, target_place in zip(*_columns(words.list(), 4), strict=True)
    ]
    for _ in range(words.one()):
        row, first, count_placed, source = words.take(4)
        step.placements.append(Placement(row, first, count_placed, source, tuple(words.list())))
    for _ in range(words.one()):
        row = words.one()
        step.drafts[row] = words.list()
    step.slack = dict(zip(*_columns(words.list(), 2), strict=True))
    step.chosen = list(zip(*_columns(words.list(), 3), strict=True))
    step.told = list(zip(*_columns(words.list(), 3), strict=True))
    step.prompt_logprobs = {row: (width, length) for row, width, length in zip(*_columns(words.list(), 3), strict=True)}
    for row, how, length in zip(*_columns(words.list(), 3), strict=True):
        step.pooling[row] = POOLINGS[how], length
    if shared := words.list():
        step.shared = SharedPrefix(shared[0], tuple(shared[1:]))
    for _ in range(words.one()):
        row, masks = words.one(), []
        for length in words.list():
            masks.append(message[at : at + length])
            at += length
        step.masks[row] = masks
    if admissions := words.one():
        step.admissions = _admissions(admissions, words, json.loads(text))
    return step


def _with_parts(message: bytes, count: int, group: int | None) -> Step:
    at = _LENGTHS.size
    number, *lengths = memoryview(message)[at : at + _WORD * (1 + count)].cast("Q").tolist()
    at += _WORD * (1 + count)
    parts: list[Step | None] = []
    for index, length in enumerate(lengths):
        wanted = length and group in (None, index)
        parts.append(decode_step(message[at : at + length]) if wanted else None)
        at += length
    return Step(number, parts=tuple(parts))


class _Words:
    """The integers of a message, read from the first to the last."""

    def __init__(self, words: list[int]) -> None:
        self._words, self._at = words, 0

    def one(self) -> int:
        self._at += 1
        return self._words[self._at - 1]

    def take(self, count: int) -> list[int]:
        self._at += count
        return self._words[self._at - count : self._at]

    def list(self) -> list[int]:
        return self.take(self.one())


def _put(words: array[int], column: Iterable[int]) -> None:
    column = column if isinstance(column, list | tuple) else list(column)
    words.append(len(column))
    words.extend(column)


def _columns(flat: list[int], size: int) -> list[list[int]]:
    return [flat[first::size] for first in range(size)]


def _move_words(move: Move) -> tuple[int, int, int, int]:
    return move.source, move.target, _PLACES.index(move.source_place), _PLACES.index(move.target_place)


def _admitted_text(admissions: list[Admission]) -> bytes:
    """Seeds, which have any number of bits, and parameters, which siblings share."""
    known: dict[int, int] = {}
    params: list[dict[str, Any]] = []
    of: list[int] = []
    for one in admissions:
        if id(one.params) not in known:
            known[id(one.params)] = len(params)
            params.append(_params_text(one.params))
        of.append(known[id(one.params)])
    return json.dumps({"seeds": [one.seed for one in admissions], "params": params, "of": of}).encode()


def _params_text(params: SamplingParams) -> dict[str, Any]:
    said = {name: getattr(params, name) for name in _PARAMS}
    if params.logit_bias is not None:  # keys of JSON are texts
        said["logit_bias"] = list(params.logit_bias.items())
    return said


def _admissions(count: int, words: _Words, text: dict[str, Any]) -> list[Admission]:
    params = [_params(one) for one in text["params"]]
    found = []
    for number in range(count):
        row, prompt_len, num_computed = words.take(3)
        tokens, stop_ids = words.list(), words.list()
        mine, seed = params[text["of"][number]], text["seeds"][number]
        found.append(Admission(row, tokens, prompt_len, mine, seed, stop_ids, num_computed))
    return found


def _params(said: dict[str, Any]) -> SamplingParams:
    bias = said.pop("logit_bias")
    return SamplingParams(**said, logit_bias=None if bias is None else dict(bias))
