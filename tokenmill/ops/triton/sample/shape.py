"""Penalties, bias, forbidden words and stop tokens, each at the few logits that it is about; then grammars' masks.

One program per row. It counts the row's tokens in a table of zeros that has a place for every token of the vocabulary,
and then goes through them again: who takes a token's count away, and leaves a zero, changes that token's logit.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare
from tokenmill.ops.triton.launch import quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.sample.mask import allow_only
from tokenmill.ops.types import ANY_TOKEN, ShapeBatch

_BLOCK = 1024
_IN_PROMPT = tl.constexpr(1 << 30)  # beside the number of times that a token is in the output
_ANY = tl.constexpr(ANY_TOKEN)
_NO_TOKEN = tl.constexpr(-2)


def shape(
    logits: torch.Tensor,  # [n, vocab] float32, overwritten
    batch: ShapeBatch,
) -> None:
    """Rows without settings cost the reading of a few words, so it may be recorded for batches that have both."""
    counters = batch.counters
    assert logits.stride(1) == 1 and logits.dtype == torch.float32 and counters is not None
    rows, vocab = logits.shape
    _shape_kernel[(min(rows, counters.shape[0]),)](
        logits, counters, batch.tokens, batch.rows, batch.positions, batch.prompt_len, batch.repetition,
        batch.presence, batch.frequency, batch.stops_from, batch.edits_at, rows, vocab, logits.stride(0),
        batch.tokens.stride(0), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    if batch.masks is not None:
        allow_only(logits, batch.masks, batch.mask_rows)


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(
    do_not_specialize=["entries"],
    do_not_specialize_on_alignment=[
        "rows", "positions", "prompt_len", "repetition", "presence", "frequency", "stops_from", "edits_at",
    ],
)  # fmt: skip
def _shape_kernel(
    logits,  # [entries, vocab]
    counters,  # [programs, vocab]
    tokens,  # [all rows, max_len]
    rows,  # [entries], and so on
    positions,
    prompt_len,
    repetition,
    presence,
    frequency,
    stops_from,
    edits_at,
    entries,
    vocab,
    stride_entry,
    stride_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    counters += tl.program_id(0).to(tl.int64) * vocab
    for entry in range(tl.program_id(0), entries, tl.num_programs(0)):
        strength = tl.load(repetition + entry)
        once = tl.load(presence + entry)
        each = tl.load(frequency + entry)
        edits = tl.load(edits_at + entry)
        mine = logits + tl.cast(entry, tl.int64) * stride_entry
        history = tokens + tl.load(rows + entry).to(tl.int64) * stride_row
        position = tl.load(positions + entry).to(tl.int32)
        if (strength != 1.0) | (once != 0.0) | (each != 0.0):
            _count(counters, history, position, tl.load(prompt_len + entry), vocab, BLOCK)
            tl.debug_barrier()  # other threads read what these wrote
            _penalize(mine, counters, history, position, strength, once, each, vocab, BLOCK)
            tl.debug_barrier()
        if edits != 0:
            _edit(mine, history, position, tl.load(stops_from + entry), edits.to(tl.pointer_type(tl.int64)), BLOCK)
            tl.debug_barrier()


@triton.jit
def _count(counters, history, position, prompt_len, vocab, BLOCK: tl.constexpr):
    for start in range(0, position, BLOCK):
        place = start + tl.arange(0, BLOCK)
        token = tl.load(history + place, mask=place < position, other=-1)
        usable = (token >= 0) & (token < vocab)  # a row that failed may have left -1
        tl.atomic_add(counters + token, 1, mask=usable & (place >= prompt_len), sem="relaxed")
        tl.atomic_or(counters + token, _IN_PROMPT, mask=usable & (place < prompt_len), sem="relaxed")


@triton.jit
def _penalize(logits, counters, history, position, strength, once, each, vocab, BLOCK: tl.constexpr):
    for start in range(0, position, BLOCK):
        place = start + tl.arange(0, BLOCK)
        token = tl.load(history + place, mask=place < position, other=-1)
        usable = (token >= 0) & (token < vocab)
        count = tl.atomic_xchg(counters + token, 0, mask=usable, sem="relaxed")
        first = usable & (count != 0)
        spoken = (count & (_IN_PROMPT - 1)).to(tl.float32)
        x = tl.load(logits + token, mask=first, other=0.0)
        x = tl.where(x < 0, x * strength, tl.div_rn(x, strength))
        x = x - spoken * each - tl.where(spoken > 0, once, 0.0)
        tl.store(logits + token, x, mask=first)


@triton.jit
def _edit(logits, history, position, stops_from, edits, BLOCK: tl.constexpr):
    biases = tl.load(edits).to(tl.int32)
    words = tl.load(edits + 1).to(tl.int32)
    longest = tl.load(edits + 2).to(tl.int32)
    stops = tl.load(edits + 3).to(tl.int32)
    edits += 4
    for start in range(0, biases, BLOCK):
        place = start + tl.arange(0, BLOCK)
        token = tl.load(edits + place, mask=place < biases, other=0)
        bias = tl.load(edits + biases + place, mask=place < biases, other=0).to(tl.float64, bitcast=True)
        x = tl.load(logits + token, mask=place < biases, other=0.0)
        tl.store(logits + token, x + bias.to(tl.float32), mask=place < biases)
    tl.debug_barrier()
    edits += 2 * biases
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        matches = word < words
        letters = edits + word * longest
        for letter in range(longest - 1):
            before = position - longest + 1 + letter
            said = tl.load(history + before, mask=before >= 0, other=_NO_TOKEN)
            wanted = tl.load(letters + letter, mask=matches, other=0)
            matches = matches & ((wanted == said) | (wanted == _ANY))
        token = tl.load(letters + longest - 1, mask=matches, other=0)
        x = tl.load(logits + token, mask=matches, other=0.0)
        tl.store(logits + token, x + float("-inf"), mask=matches)
    tl.debug_barrier()
    edits += words * longest
    if position < stops_from:
        for start in range(0, stops, BLOCK):
            place = start + tl.arange(0, BLOCK)
            token = tl.load(edits + place, mask=place < stops, other=0)
            tl.store(logits + token, float("-inf"), mask=place < stops)


IMPLEMENTATIONS = (declare(shape),)
