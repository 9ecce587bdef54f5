"""Searching a row's groups of neighbouring tokens: the noisy best, its mass, and the floor that top_k sets."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.numeric import gumbel, key_of, value_of

_LEAST_FLOAT = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def first_best(values, tokens):
    """The largest value, and the smallest token that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, 2147483647), 0)


@triton.jit
def finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def survey_chunk(logits, space, chunk, vocab, NAN_IS_INFINITE: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk's logits and tokens, and the largest logit; those of its groups are written to `space`."""
    HERE: tl.constexpr = CHUNK // GROUP
    group = chunk * HERE + tl.arange(0, HERE)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if NAN_IS_INFINITE:
        x = tl.where(x != x, float("inf"), x)
    maxima = tl.max(x, 1)
    tl.store(space + group, maxima)
    return x, token, tl.max(maxima, 0)


@triton.jit
def listed_tokens(listed, start, count, vocab, GROUP: tl.constexpr, TILE: tl.constexpr):  # [TILE, GROUP]
    """The tokens of the listed groups from `start` on, and whether there are such."""
    place = start + tl.arange(0, TILE)
    group = tl.load(listed + place, mask=place < count, other=0.0).to(tl.int32, bitcast=True)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return token, (place < count)[:, None] & (token < vocab)


@triton.jit
def noisy_best(
    logits, space, begin, end, vocab, heat, top, over, weighed_from, floor, key,
    LISTED: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of the values above `over`: the mass of those that reach weighed_from, and the noisy best that reaches floor too.

    LISTED: `space` lists the groups to look at, from begin to end. Otherwise it holds the largest logits of all groups.
    """
    MAX_NOISE: tl.constexpr = 17.0  # the clamp of the uniform numbers keeps noise under 24 ln 2
    best = tl.full([TILE, GROUP], float("-inf"), tl.float32)
    choices = tl.zeros([TILE, GROUP], tl.int32)
    mass = tl.zeros([TILE, GROUP], tl.float32)
    for start in range(begin, end, TILE):
        if LISTED:
            token, inside = listed_tokens(space, start, end, vocab, GROUP, TILE)
        else:
            group = start + tl.arange(0, TILE)
            maxima = tl.div_rn(tl.load(space + group, mask=group < end, other=float("-inf")), heat)
            active = (maxima > over) & (maxima >= floor)
            token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            inside = active[:, None] & (token < vocab)
        y = tl.div_rn(tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32), heat)
        weighed = (y > over) & (y >= weighed_from)
        mass += tl.where(weighed, tl.exp(y - top), 0.0)
        promising = weighed & (y >= floor) & (y + MAX_NOISE > best)
        # Noise is the costly part, and many tiles have no token that could win.
        if tl.max(tl.max(promising.to(tl.int32), 1), 0) > 0:
            noisy = tl.where(promising, y + gumbel(key, token), float("-inf"))
            choices = tl.where(noisy > best, token, choices)
            best = tl.maximum(best, noisy)
    winner = tl.max(tl.max(best, 1), 0)
    first = tl.min(tl.min(tl.where(best == winner, choices, 2147483647), 1), 0)
    return tl.sum(tl.sum(mass, 1), 0), winner, first


@triton.jit
def list_groups(listed, groups, active):
    """Write the numbers of the active groups to the list, in order; returns how many there are."""
    active = active.to(tl.int32)
    place = tl.cumsum(active, 0) - 1
    tl.store(listed + place, groups.to(tl.float32, bitcast=True), mask=active > 0)
    tl.debug_barrier()  # other threads read it
    return tl.sum(active, 0)


@triton.jit
def rough_floor(maxima, top, keep, TILE: tl.constexpr):
    """Ordered bits of a value that k groups reach at least, and not many more; the least float if there are fewer."""
    low = key_of(_LEAST_FLOAT)
    high = key_of(top) + 1
    reached = tl.sum((maxima >= value_of(low)).to(tl.int32), 0)
    enough = tl.maximum(TILE, keep + keep // 2)
    while (reached > enough) & (high - low > 1):
        first, second, third = _between(low, high)
        counts = tl.sum(_reaching(maxima, first, second, third), 0)
        low, high, reached = _narrow(low, high, reached, first, second, third, counts, keep)
    return low


@triton.jit
def top_k_floor(logits, listed, count, vocab, heat, top, low, keep, GROUP: tl.constexpr, TILE: tl.constexpr):
    """A value that exactly the top k (and what ties with the last of them) reach; `low` reaches below it.

    It ends as soon as k values reach it, because which value between two neighbours it is makes no difference.
    """
    high = key_of(top) + 1
    counts = _count(logits, listed, count, vocab, heat, low, low, low, GROUP, TILE)
    reached = (counts & 0x1FFFFF).to(tl.int32)
    while (reached > keep) & (high - low > 1):
        first, second, third = _between(low, high)
        counts = _count(logits, listed, count, vocab, heat, first, second, third, GROUP, TILE)
        low, high, reached = _narrow(low, high, reached, first, second, third, counts, keep)
    return value_of(low)


@triton.jit
def _between(low, high):
    """Three thresholds that cut the range into quarters."""
    step = tl.maximum((high - low) // 4, 1)
    return low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)


@triton.jit
def _narrow(low, high, reached, first, second, third, counts, keep):
    """The quarter in which k is passed: `low` is reached by at least k values, `high` by fewer."""
    at_first = (counts & 0x1FFFFF).to(tl.int32)
    at_second = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
    at_third = (counts >> 42).to(tl.int32)
    if at_third >= keep:
        low, reached = third, at_third
    elif at_second >= keep:
        low, high, reached = second, third, at_second
    elif at_first >= keep:
        low, high, reached = first, second, at_first
    else:
        high = first
    return low, high, reached


@triton.jit
def _reaching(y, first, second, third):
    """1 for each of three thresholds (ordered bits) that y reaches, in 21 bits each: counted in one reduction."""
    at_first = (y >= value_of(first)).to(tl.int64)
    at_second = (y >= value_of(second)).to(tl.int64)
    at_third = (y >= value_of(third)).to(tl.int64)
    return at_first + (at_second << 21) + (at_third << 42)


@triton.jit
def _count(logits, listed, count, vocab, heat, first, second, third, GROUP: tl.constexpr, TILE: tl.constexpr):
    """How many values of the listed groups reach each of three thresholds, in 21 bits each."""
    counts = tl.zeros([TILE, GROUP], tl.int64)
    for start in range(0, count, TILE):
        token, inside = listed_tokens(listed, start, count, vocab, GROUP, TILE)
        y = tl.div_rn(tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32), heat)
        counts += _reaching(y, first, second, third)
    return tl.sum(tl.sum(counts, 1), 0)
