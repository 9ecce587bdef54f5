"""Filtered sampling (top_k, top_p, min_p): a row is read once in chunks, and after that only where it matters.

    survey   (rows, chunks)  the largest logit of each group of neighbouring tokens; for rows without top_k also the
                             chunk's mass and its noisy best
    round    (rows, spans)   for rows without top_k: is the noisy best inside the nucleus? and the one to take if not
    decide   (rows)          top_k, and the rows that are still open, over the few groups that can matter

top_k: k groups whose largest logit reaches a value hold k tokens that do, so everything that is among the top k is in
the groups that reach it: some 60 of 4,000. Which tokens those are is found exactly, among these groups alone.

top_p, by rejection: a token is in the nucleus if the mass above it is smaller than top_p. The noisy best of all tokens
is taken, and if it is outside, then so is everything below it: the next one is the noisy best of the tokens above it.
The first is inside with probability top_p or more, so two rounds are enough for nearly every row, and the last kernel
goes on with the others.

How a row is cut depends on the vocabulary alone, so the order of every sum, and with it the token, is the same in any
batch. Values are logits divided by the temperature; mass is relative to that of the largest value.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.numeric import gumbel, noise_key, value_of
from tokenmill.ops.triton.sample.search import (
    finite,
    first_best,
    list_groups,
    noisy_best,
    rough_floor,
    survey_chunk,
    top_k_floor,
)
from tokenmill.ops.types import SampleBatch

# What is known of a row. Kernels see these as constants.
_OPEN = tl.constexpr(0)  # there is a candidate, and it is not known whether it is inside
_SETTLED = tl.constexpr(1)
_LIMITED = tl.constexpr(2)  # by top_k: the last kernel's work

_SURVEY_WORDS = tl.constexpr(4)  # per chunk: largest logit, mass, noisy best, its token
_STATE_WORDS = tl.constexpr(8)  # per round: status, token, its value, the mass that is too much, the largest value
_PART_WORDS = tl.constexpr(4)  # per round and span: mass, noisy best, its token


class FilterShape(NamedTuple):
    """How the work is cut."""

    group: int = 32  # tokens whose largest logit is kept
    chunk: int = 4096  # tokens of a program of the survey
    survey_warps: int = 8
    span: int = 2  # chunks of a program of a round
    round_warps: int = 8
    rounds: int = 2
    tile: int = 64  # groups that a round and the last kernel read at a time
    decide_warps: int = 8


_SHAPE = FilterShape()
_MOST_GROUPS = 8192  # the last kernel holds a row's groups in registers


class Cut(NamedTuple):
    """One row's parts, and the float32 words of its scratch memory."""

    group: int
    chunks: int
    spans: int
    words: int


@lru_cache
def cut(vocab: int, shape: FilterShape) -> Cut:
    group = max(shape.group, power_of_two(ceil_div(vocab, _MOST_GROUPS)))
    chunks = ceil_div(vocab, shape.chunk)
    spans = ceil_div(chunks, shape.span)
    groups = chunks * (shape.chunk // group)
    words = 2 * groups + _SURVEY_WORDS.value * chunks
    words += shape.rounds * (_STATE_WORDS.value + _PART_WORDS.value * spans)
    return Cut(group, chunks, spans, ceil_div(words, 32) * 32)


def sample_filtered(
    logits: torch.Tensor,  # [n, vocab]
    batch: SampleBatch,
    out: torch.Tensor,  # [n] int64
    shape: FilterShape = _SHAPE,
) -> None:
    rows, vocab = logits.shape
    group, chunks, spans, words = cut(vocab, shape)
    space = torch.empty(rows * words, dtype=torch.float32, device=logits.device)
    settings = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position)
    surveyed = (*settings[:3], *settings[4:])  # min_p has no part in the first look
    sizes = (vocab, logits.stride(0), words)
    fixed = {"GROUP": group, "CHUNK": shape.chunk, "CHUNKS": chunks}
    _survey_kernel[(rows, chunks)](logits, space, *surveyed, *sizes, **fixed, num_warps=shape.survey_warps)
    for turn in range(shape.rounds):
        _round_kernel[(rows, spans)](
            logits, space, *settings, *sizes,
            **fixed, SPAN=shape.span, SPANS=spans, TURN=turn, TILE=shape.tile, num_warps=shape.round_warps,
        )  # fmt: skip
    _decide_kernel[(rows,)](
        logits, space, out, *settings, *sizes,
        **fixed, SPANS=spans, ROUNDS=shape.rounds, TILE=shape.tile, num_warps=shape.decide_warps,
    )  # fmt: skip


# Small tensors whose alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "seed", "position"])
def _survey_kernel(
    logits,  # [rows, vocab]
    space,  # [rows, words]
    temperature,  # [rows]
    top_k,  # [rows]
    top_p,  # [rows]
    seed,  # [rows]
    position,  # [rows]
    vocab,
    stride_row,
    words,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += row * stride_row
    space += row * words
    # A NaN becomes an infinity: either makes the row impossible.
    x, token, largest = survey_chunk(logits, space, chunk, vocab, True, GROUP, CHUNK)
    space += 2 * CHUNKS * (CHUNK // GROUP) + _SURVEY_WORDS * chunk
    tl.store(space, largest)
    heat = tl.load(temperature + row)
    greedy = heat < 1e-5
    if greedy | (not _limits(tl.load(top_k + row), vocab)):
        value = x
        if not greedy:
            key = noise_key(tl.load(seed + row), tl.load(position + row))
            value = tl.div_rn(x, heat)
            if tl.load(top_p + row) < 1.0:
                anchor = tl.where(finite(largest), tl.div_rn(largest, heat), 0.0)
                tl.store(space + 1, tl.sum(tl.sum(tl.exp(value - anchor), 1), 0))
            value += gumbel(key, token)
        best = tl.max(tl.max(value, 1), 0)
        tl.store(space + 2, best)
        first = tl.min(tl.min(tl.where(value == best, token, 2147483647), 1), 0)
        tl.store(space + 3, first.to(tl.float32, bitcast=True))


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "seed", "position"])
def _round_kernel(
    logits,  # [rows, vocab]
    space,  # [rows, words]
    temperature, top_k, top_p, min_p, seed, position,  # [rows]
    vocab, stride_row, words,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    HERE: tl.constexpr = CHUNK // GROUP
    GROUPS: tl.constexpr = CHUNKS * HERE
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    logits += row * stride_row
    space += row * words
    heat = tl.load(temperature + row)
    least = tl.load(min_p + row)
    if TURN == 0:
        limited = _limits(tl.load(top_k + row), vocab)
        status, choice, value, goal, top = _first_state(
            logits, space + 2 * GROUPS, heat, limited, tl.load(top_p + row), least, CHUNKS
        )
    else:
        status, choice, value, goal, top = _next_state(
            logits, _round_at(space, TURN - 1, GROUPS, CHUNKS, SPANS), heat, least, SPANS
        )
    state = _round_at(space, TURN, GROUPS, CHUNKS, SPANS)
    if span == 0:
        tl.store(state, status.to(tl.float32, bitcast=True))
        tl.store(state + 1, choice.to(tl.float32, bitcast=True))
        tl.store(state + 2, value)
        tl.store(state + 3, goal)
        tl.store(state + 4, top)
    if status == _OPEN:
        key = noise_key(tl.load(seed + row), tl.load(position + row))
        begin = span * SPAN * HERE
        mass, best, token = noisy_best(
            logits, space, begin, tl.minimum(begin + SPAN * HERE, GROUPS), vocab, heat, top,
            value, float("-inf"), _likely(top, least), key, LISTED=False, GROUP=GROUP, TILE=TILE,
        )  # fmt: skip
        part = state + _STATE_WORDS + _PART_WORDS * span
        tl.store(part, mass)
        tl.store(part + 1, best)
        tl.store(part + 2, token.to(tl.float32, bitcast=True))


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "seed", "position"])
def _decide_kernel(
    logits,  # [rows, vocab]
    space,  # [rows, words]
    out,  # [rows]
    temperature, top_k, top_p, min_p, seed, position,  # [rows]
    vocab, stride_row, words,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SPANS: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    GROUPS: tl.constexpr = CHUNKS * (CHUNK // GROUP)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    space += row * words
    heat = tl.load(temperature + row)
    least = tl.load(min_p + row)
    status, choice, value, goal, top = _next_state(
        logits, _round_at(space, ROUNDS - 1, GROUPS, CHUNKS, SPANS), heat, least, SPANS
    )
    if status != _SETTLED:
        key = noise_key(tl.load(seed + row), tl.load(position + row))
        likely = _likely(top, least)
        groups = tl.arange(0, triton.next_power_of_2(GROUPS))
        maxima = tl.div_rn(tl.load(space + groups, mask=groups < GROUPS, other=float("-inf")), heat)
        listed = space + GROUPS
        if status == _LIMITED:
            keep = tl.load(top_k + row)
            low = rough_floor(maxima, top, keep, TILE)
            count = list_groups(listed, groups, maxima >= value_of(low))
            floor = top_k_floor(logits, listed, count, vocab, heat, top, low, keep, GROUP, TILE)
            mass, _, choice = noisy_best(
                logits, listed, 0, count, vocab, heat, top, float("-inf"), floor, likely, key, True, GROUP, TILE
            )
            value = tl.div_rn(tl.load(logits + choice).to(tl.float32), heat)
            share = tl.load(top_p + row)
            goal = _goal(mass, share)
            status = tl.where(share < 1.0, _OPEN, _SETTLED)
        else:
            count = list_groups(listed, groups, (maxima > value) & (maxima >= likely))
        while status == _OPEN:
            mass, _, token = noisy_best(
                logits, listed, 0, count, vocab, heat, top, value, float("-inf"), likely, key, True, GROUP, TILE
            )
            status, choice, value = _judge(logits, heat, mass, token, choice, value, goal, likely)
    tl.store(out + row, choice.to(tl.int64))


@triton.jit
def _limits(keep, vocab):
    return (keep > 0) & (keep < vocab)


@triton.jit
def _round_at(space, turn, GROUPS: tl.constexpr, CHUNKS: tl.constexpr, SPANS: tl.constexpr):
    """Where a round keeps its state, and behind it what its spans found."""
    return space + 2 * GROUPS + _SURVEY_WORDS * CHUNKS + turn * (_STATE_WORDS + _PART_WORDS * SPANS)


@triton.jit
def _likely(top, min_p):
    return tl.minimum(top + tl.log(min_p), top)


@triton.jit
def _goal(mass, top_p):
    """A token with this much above it is outside. It is positive, so that the top token is always inside."""
    return tl.where(top_p < 1.0, tl.maximum(mass * top_p, 1e-30), float("inf"))


@triton.jit
def _first_state(logits, survey, heat, limited, top_p, min_p, CHUNKS: tl.constexpr):
    """Status, candidate, its value, goal and largest value of a row, from the chunks of its survey."""
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    inside = chunk < CHUNKS
    survey += chunk * _SURVEY_WORDS
    largest = tl.load(survey, mask=inside, other=float("-inf"))
    mass = tl.load(survey + 1, mask=inside, other=0.0)
    best = tl.load(survey + 2, mask=inside, other=float("-inf"))
    token = tl.load(survey + 3, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    _, choice = first_best(best, token)
    greedy = heat < 1e-5
    heat = tl.maximum(heat, 1e-5)
    values = tl.div_rn(largest, heat)
    top = tl.max(values, 0)
    possible = finite(tl.max(largest, 0))
    # Nobody measured the mass of a row without top_p, nor the noisy best of one with top_k: no arithmetic with those.
    goal = _goal(tl.sum(mass * tl.exp(values - top), 0), top_p)
    value = float("-inf")
    status = tl.where(possible & (not greedy), tl.where(limited, _LIMITED, _OPEN), _SETTLED)
    choice = tl.where(possible, choice, -1)
    if status == _OPEN:
        value = tl.div_rn(tl.load(logits + choice).to(tl.float32), heat)
        status = tl.where((goal == float("inf")) & (value >= _likely(top, min_p)), _SETTLED, _OPEN)
    return status, choice, value, goal, top


@triton.jit
def _next_state(logits, state, heat, min_p, SPANS: tl.constexpr):
    """The state of a row after a round, from the state before it and what its spans found."""
    status = tl.load(state).to(tl.int32, bitcast=True)
    choice = tl.load(state + 1).to(tl.int32, bitcast=True)
    value = tl.load(state + 2)
    goal = tl.load(state + 3)
    top = tl.load(state + 4)
    if status == _OPEN:
        span = tl.arange(0, triton.next_power_of_2(SPANS))
        part = state + _STATE_WORDS + _PART_WORDS * span
        mass = tl.load(part, mask=span < SPANS, other=0.0)
        best = tl.load(part + 1, mask=span < SPANS, other=float("-inf"))
        token = tl.load(part + 2, mask=span < SPANS, other=0.0).to(tl.int32, bitcast=True)
        _, token = first_best(best, token)
        status, choice, value = _judge(logits, heat, tl.sum(mass, 0), token, choice, value, goal, _likely(top, min_p))
    return status, choice, value, goal, top


@triton.jit
def _judge(logits, heat, above, token, choice, value, goal, likely):
    """Keep the candidate if neither filter is against it, given the mass above it; else the next one is `token`.

    Comparisons are such that a NaN (of values that overflow) ends the search.
    """
    status = _SETTLED
    if (value < likely) | (above >= goal):
        choice = token
        value = tl.div_rn(tl.load(logits + token).to(tl.float32), heat)
        status = tl.where(goal == float("inf"), _SETTLED, _OPEN)
    return status, choice, value
