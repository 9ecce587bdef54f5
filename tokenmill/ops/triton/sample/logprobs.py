"""Log-probabilities of chosen tokens and the best ones beside them: a row is read once, and then where its best are.

    survey  (rows, chunks)  the largest logit of each group of neighbouring tokens, the chunk's mass, and how many of
                            its logits are larger than the chosen one
    join    (rows)          rank and log-probability; the best tokens, from the few groups that can hold them

The n groups with the largest maxima hold the n best tokens. How a row is cut depends on the vocabulary alone, so the
order of every sum, and with it every bit, is the same in any batch.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops import reference
from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.numeric import key_of, value_of
from tokenmill.ops.triton.sample.search import finite, list_groups, listed_tokens, rough_floor, survey_chunk
from tokenmill.ops.types import LOGPROB_BUCKETS, LOGPROB_WORDS

_CHUNK = 4096
_LEAST_GROUP = 32
_MOST_GROUPS = 8192  # the last kernel holds a row's groups in registers
_TILE = 64  # groups that it reads at a time
_SURVEY_WORDS = tl.constexpr(4)  # per chunk: largest logit, mass, number of larger logits
_HEAD = tl.constexpr(LOGPROB_WORDS)
_NOTHING = tl.constexpr(-(1 << 63))


def logprobs(
    logits: torch.Tensor,  # [n, vocab] float32, or the model's dtype: what is read is widened exactly
    tokens: torch.Tensor,  # [n] int64; -1 where none could be chosen
    widths: torch.Tensor,  # [n] int32: best tokens that a row asked for; -1: nothing, it gets only its token
    k: int,  # no width is larger
) -> torch.Tensor:  # [n, LOGPROB_WORDS + 2 * k] int32, as the reference has them
    """Of equal logits the lowest id comes first. Only as many of a row's best tokens are told as it asked for."""
    if k > LOGPROB_BUCKETS[-1]:
        return reference.logprobs(logits, tokens, widths, k)
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    group = max(_LEAST_GROUP, power_of_two(ceil_div(vocab, _MOST_GROUPS)))
    chunks = ceil_div(vocab, _CHUNK)
    words = 2 * chunks * (_CHUNK // group) + _SURVEY_WORDS.value * chunks
    space = torch.empty(rows * words, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, LOGPROB_WORDS + 2 * k, dtype=torch.int32, device=logits.device)
    sizes = (vocab, logits.stride(0), words)
    fixed = {"GROUP": group, "CHUNK": _CHUNK, "CHUNKS": chunks}
    _survey_kernel[(rows, chunks)](logits, tokens, widths, space, *sizes, **fixed, num_warps=8)
    _join_kernel[(rows,)](logits, tokens, widths, space, out, *sizes, k, **fixed, TILE=_TILE, num_warps=8)
    return out


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(do_not_specialize_on_alignment=["tokens", "widths"])
def _survey_kernel(
    logits,  # [rows, vocab]
    tokens,  # [rows]
    widths,  # [rows]
    space,  # [rows, words]
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
    if tl.load(widths + row) >= 0:
        logits += row * stride_row
        space += row * words
        chosen = tl.load(logits + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
        x, _, largest = survey_chunk(logits, space, chunk, vocab, False, GROUP, CHUNK)
        anchor = tl.where(finite(largest), largest, 0.0)
        space += 2 * CHUNKS * (CHUNK // GROUP) + _SURVEY_WORDS * chunk
        tl.store(space, largest)
        tl.store(space + 1, tl.sum(tl.sum(tl.exp(x - anchor), 1), 0))  # a NaN stays one
        above = tl.sum(tl.sum((x > chosen).to(tl.int32), 1), 0)
        tl.store(space + 2, above.to(tl.float32, bitcast=True))


@quick_launch
@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["tokens", "widths"])
def _join_kernel(
    logits,  # [rows, vocab]
    tokens,  # [rows]
    widths,  # [rows]
    space,  # [rows, words]
    out,  # [rows, _HEAD + 2 * k]
    vocab,
    stride_row,
    words,
    k,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    GROUPS: tl.constexpr = CHUNKS * (CHUNK // GROUP)
    row = tl.program_id(0).to(tl.int64)
    out += row * (_HEAD + 2 * k)
    chosen = tl.load(tokens + row)
    tl.store(out, chosen.to(tl.int32))
    width = tl.load(widths + row)
    if width >= 0:
        logits += row * stride_row
        space += row * words
        chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
        survey = space + 2 * GROUPS + _SURVEY_WORDS * chunk
        largest = tl.load(survey, mask=chunk < CHUNKS, other=float("-inf"))
        mass = tl.load(survey + 1, mask=chunk < CHUNKS, other=0.0)
        above = tl.load(survey + 2, mask=chunk < CHUNKS, other=0.0).to(tl.int32, bitcast=True)
        top = tl.max(largest, 0)
        log_mass = tl.log(tl.sum(mass * tl.exp(largest - top), 0))
        tl.store(out + 1, tl.sum(above, 0) + 1)
        value = tl.load(logits + tl.maximum(chosen, 0)).to(tl.float32)
        tl.store(out + 2, (value - top - log_mass).to(tl.int32, bitcast=True))
        if width > 0:
            out += _HEAD
            groups = tl.arange(0, triton.next_power_of_2(GROUPS))
            maxima = tl.load(space + groups, mask=groups < GROUPS, other=float("-inf"))
            reached = maxima >= value_of(rough_floor(maxima, top, width, TILE))
            few = tl.sum(reached.to(tl.int32), 0) < width  # then impossible tokens may be among the best
            count = list_groups(space + GROUPS, groups, (groups < GROUPS) & (reached | few))
            last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
            for place in range(width):
                last = _best_below(logits, space + GROUPS, count, vocab, last, GROUP, TILE)
                tl.store(out + place, (0x7FFFFFFF - (last & 0x7FFFFFFF)).to(tl.int32))
                tl.store(out + k + place, (value_of(last >> 32) - top - log_mass).to(tl.int32, bitcast=True))


@triton.jit
def _best_below(logits, listed, count, vocab, last, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The largest key below `last` in the listed groups. Keys order tokens by logit, equal ones from the lowest id."""
    best = tl.full([TILE], _NOTHING, tl.int64)
    for start in range(0, count, TILE):
        token, inside = listed_tokens(listed, start, count, vocab, GROUP, TILE)
        x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(x == 0.0, 0.0, x)  # both zeros are one value
        key = (key_of(x) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(inside & (key < last), key, _NOTHING), 1))
    return tl.max(best, 0)


IMPLEMENTATIONS = (declare(logprobs),)
