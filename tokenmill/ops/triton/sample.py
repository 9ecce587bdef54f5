"""Sampling: argmax of logits plus counter-based noise, filtered by thresholds that are found without sorting."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare, multiprocessors
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.numeric import gumbel, key_of, noise_key, value_of
from tokenmill.ops.types import SampleBatch

_BLOCK = 8192  # filtered: one program per row
_CHUNK_BLOCK = 4096
_MAX_CHUNKS = 64


def sample(
    logits: torch.Tensor,  # [n, vocab] float32, or the model's dtype: what is read is widened exactly
    batch: SampleBatch,
) -> torch.Tensor:  # [n] int64; -1 where the row's logits hold a NaN or no finite value
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if batch.any_filter and not batch.all_greedy:
        _filtered_kernel[(rows,)](
            logits, out, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position,
            vocab, logits.stride(0), BLOCK=_BLOCK, num_warps=16,
        )  # fmt: skip
        return out
    # Few rows cannot fill the device, so each is cut into chunks. A maximum does not depend on the cut.
    chunks = max(1, min(4 * multiprocessors(logits.device) // max(rows, 1), _MAX_CHUNKS))
    chunk = ceil_div(vocab, chunks * _CHUNK_BLOCK) * _CHUNK_BLOCK
    chunks = ceil_div(vocab, chunk)
    space = torch.empty(rows * chunks * 3, dtype=torch.float32, device=logits.device)
    _best_kernel[(rows, chunks)](
        logits, space, batch.temperature, batch.seed, batch.position, vocab, chunk, chunks, logits.stride(0),
        ALL_GREEDY=batch.all_greedy, BLOCK=_CHUNK_BLOCK, num_warps=16,
    )  # fmt: skip
    _join_kernel[(rows,)](space, out, chunks, CHUNKS=_MAX_CHUNKS, num_warps=1)
    return out


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(do_not_specialize=["chunk", "chunks"], do_not_specialize_on_alignment=["temperature", "seed", "position"])
def _best_kernel(
    logits,  # [rows, vocab]
    space,  # [rows, chunks, 3] float32: best value, largest logit (NaN if there is one), bits of the best token
    temperature,  # [rows]
    seed,  # [rows]
    position,  # [rows]
    vocab,
    chunk,
    chunks,
    stride_row,
    ALL_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, vocab)
    logits += row * stride_row
    heat = tl.load(temperature + row)
    greedy = heat < 1e-5
    heat = tl.maximum(heat, 1e-5)
    key = noise_key(tl.load(seed + row), tl.load(position + row))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    choice = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
        broken = broken | (x != x).to(tl.int32)
        top = tl.maximum(top, x)
        value = x
        if not ALL_GREEDY and not greedy:
            value = tl.div_rn(x, heat) + gumbel(key, token)
        choice = tl.where(value > best, token, choice)
        best = tl.maximum(best, value)
    best_value, best_token = _first_best(best, choice)
    largest = tl.where(tl.max(broken, 0) > 0, float("nan"), tl.max(top, 0))
    space += (row * chunks + tl.program_id(1)) * 3
    tl.store(space, best_value)
    tl.store(space + 1, largest)
    tl.store(space + 2, best_token.to(tl.float32, bitcast=True))


@quick_launch
@triton.jit(do_not_specialize=["chunks"])
def _join_kernel(
    space,  # [rows, chunks, 3]
    out,  # [rows]
    chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    space += (row * chunks + chunk) * 3
    inside = chunk < chunks
    best = tl.load(space, mask=inside, other=float("-inf"))
    largest = tl.load(space + 1, mask=inside, other=float("-inf"))
    choice = tl.load(space + 2, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    _, token = _first_best(best, choice)
    broken = tl.max((largest != largest).to(tl.int32), 0) > 0
    tl.store(out + row, tl.where(_finite(tl.max(largest, 0)) & (not broken), token, -1).to(tl.int64))


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "seed", "position"])
def _filtered_kernel(
    logits,  # [rows, vocab]
    out,  # [rows]
    temperature,  # [rows]
    top_k,  # [rows]
    top_p,  # [rows]
    min_p,  # [rows]
    seed,  # [rows]
    position,  # [rows]
    vocab,
    stride_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    heat = tl.load(temperature + row)
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)  # the largest logit of every BLOCK-th token
    choices = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    possible = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        broken = broken | (x != x).to(tl.int32)
        possible += (x > float("-inf")).to(tl.int32)
        choices = tl.where(x > lanes, token, choices)
        lanes = tl.maximum(lanes, x)
    top, choice = _first_best(lanes, choices)
    finite = _finite(top) & (tl.max(broken, 0) == 0)
    if finite & (heat >= 1e-5):
        keep = tl.load(top_k + row)
        floor = float("-inf")
        if (keep > 0) & (keep < tl.sum(possible, 0)):
            floor = _top_k_floor(logits, vocab, heat, tl.div_rn(lanes, heat), keep, BLOCK)
        key = noise_key(tl.load(seed + row), tl.load(position + row))
        choice = _draw(
            logits, vocab, heat, tl.div_rn(top, heat), floor, tl.load(top_p + row), tl.load(min_p + row), key, BLOCK
        )
    tl.store(out + row, tl.where(finite, choice, -1).to(tl.int64))


@triton.jit
def _top_k_floor(logits, vocab, heat, lanes, keep, BLOCK: tl.constexpr):
    """A value that exactly the top k (and what ties with the last of them) reach.

    Bisection over the ordered bits of floats: `low` is reached by at least k values, `high` by fewer. It ends as soon
    as `low` is reached by exactly k, because which value between two neighbours it is makes no difference.
    """
    low = key_of(float("-inf"))
    high = key_of(tl.max(lanes, 0)) + 1
    if keep <= BLOCK:
        # The k-th largest of the lanes' maxima is reached by k tokens at least, and usually by hardly any more.
        guess = high
        while guess - low > 256:
            middle = low + (guess - low) // 2
            enough = tl.sum((lanes >= value_of(middle)).to(tl.int32), 0) >= keep
            low = tl.where(enough, middle, low)
            guess = tl.where(enough, guess, middle)
    reached, _, _ = _count(logits, vocab, heat, low, low, low, BLOCK)
    while (reached != keep) & (high - low > 1):
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        at_first, at_second, at_third = _count(logits, vocab, heat, first, second, third, BLOCK)
        if at_third >= keep:
            low, reached = third, at_third
        elif at_second >= keep:
            low, high, reached = second, third, at_second
        elif at_first >= keep:
            low, high, reached = first, second, at_first
        else:
            high = first
    return value_of(low)


@triton.jit
def _count(logits, vocab, heat, first, second, third, BLOCK: tl.constexpr):
    """How many values reach each of three thresholds, given as ordered bits."""
    first, second, third = value_of(first), value_of(second), value_of(third)
    at_first = tl.zeros([BLOCK], tl.int32)
    at_second = tl.zeros([BLOCK], tl.int32)
    at_third = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        y = tl.div_rn(tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32), heat)
        at_first += (inside & (y >= first)).to(tl.int32)
        at_second += (inside & (y >= second)).to(tl.int32)
        at_third += (inside & (y >= third)).to(tl.int32)
    return tl.sum(at_first, 0), tl.sum(at_second, 0), tl.sum(at_third, 0)


@triton.jit
def _draw(logits, vocab, heat, top, floor, top_p, min_p, key, BLOCK: tl.constexpr):
    """The noisy best of the kept tokens, by rejection.

    A token is in the nucleus if the mass above it is smaller than top_p. The noisy best of all tokens is taken, and
    if it is outside, then so is everything below it: the next one is the noisy best of the tokens above it.
    The first is inside with probability top_p or more, so this takes a pass or two where a search takes many.
    """
    likely = top + tl.log(min_p)
    mass, value, choice = _noisy_best(logits, vocab, heat, top, floor, tl.maximum(floor, likely), key, False, BLOCK)
    if top_p < 1.0:
        goal = tl.maximum(mass * top_p, 1e-30)  # positive, so that the top token is always inside
        above, next_value, next_choice = _noisy_best(logits, vocab, heat, top, value, value, key, True, BLOCK)
        while above >= goal:
            value, choice = next_value, next_choice
            above, next_value, next_choice = _noisy_best(logits, vocab, heat, top, value, value, key, True, BLOCK)
    return choice


@triton.jit
def _noisy_best(logits, vocab, heat, top, mass_floor, floor, key, ABOVE: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the values that reach mass_floor; of those that reach floor, the noisy best: its value and token.

    ABOVE: they must pass it, not only reach it. Mass is relative to exp(top).
    """
    MAX_NOISE: tl.constexpr = 17.0  # the clamp of the uniform numbers keeps noise under 24 ln 2
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    values = tl.full([BLOCK], float("-inf"), tl.float32)
    choices = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        y = tl.div_rn(tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32), heat)
        if ABOVE:
            weighed = y > mass_floor
            allowed = y > floor
        else:
            weighed = y >= mass_floor
            allowed = y >= floor
        mass += tl.where(weighed, tl.exp(y - top), 0.0)
        promising = allowed & (y + MAX_NOISE > best)
        # Noise is the costly part, and most blocks have no token left that could win.
        if tl.max(promising.to(tl.int32), 0) > 0:
            noisy = tl.where(promising, y + gumbel(key, token), float("-inf"))
            better = noisy > best
            values = tl.where(better, y, values)
            choices = tl.where(better, token, choices)
            best = tl.maximum(best, noisy)
    best_noisy, choice = _first_best(best, choices)
    value = tl.max(tl.where((best == best_noisy) & (choices == choice), values, float("-inf")), 0)
    return tl.sum(mass, 0), value, choice


@triton.jit
def _first_best(values, tokens):
    """The largest value, and the smallest token that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, 2147483647), 0)


@triton.jit
def _finite(x):
    return (x > float("-inf")) & (x < float("inf"))


IMPLEMENTATIONS = (declare(sample),)
