"""The inner step of attention over a paged cache: find keys through a block table, score them, fold in their values."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.numeric import tanh

# Kernels keep scores in units of log2(e), because the hardware has exp2.
LOG2_E = 1.4426950408889634


def score_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What raw scores are multiplied with before the soft cap, and after it (or instead of it)."""
    if softcap is None:
        return 1.0, scale * LOG2_E
    return scale / softcap, softcap * LOG2_E


@triton.constexpr_function
def padded_block(dim):
    """A head size as a block: a power of two."""
    return max(16, 1 << (dim - 1).bit_length())


@triton.constexpr_function
def first_block(dim):
    """The power of two in a head size, because blocks are powers of two (96 = 64 + 32)."""
    return max(16, 1 << (dim.bit_length() - 1))


@triton.constexpr_function
def rest_block(dim):
    """What is left of it, padded; 0 if nothing is."""
    rest = dim - max(16, 1 << (dim.bit_length() - 1))
    return max(16, 1 << (rest - 1).bit_length()) if rest > 0 else 0


@triton.jit
def cache_offsets(
    table,  # the row's block table
    position,  # [BLOCK_N]
    seen,  # [BLOCK_N] bool: elsewhere the table is not read
    stride_k_block,
    stride_k_token,
    stride_v_block,
    stride_v_token,
    SAME_LAYOUT: tl.constexpr,  # the strides of keys and values are equal
    BLOCK_SIZE: tl.constexpr,
):
    """Where the keys and values of these positions begin; 64 bits, because pools pass 2**31 elements."""
    block = tl.load(table + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    slot = (position % BLOCK_SIZE).to(tl.int64)
    k_offsets = block * stride_k_block + slot * stride_k_token
    if SAME_LAYOUT:
        return k_offsets, k_offsets
    return k_offsets, block * stride_v_block + slot * stride_v_token


@triton.jit
def node_seen(tails, key, root):
    """Whether nodes see these keys: those of their ancestors, and all that are before the tree."""
    behind = tl.minimum(tl.maximum(key - root, 0), 31)
    return (key < root) | ((key - root < 32) & (((tails >> behind) & 1) != 0))


@triton.jit
def node_position(key, root, FANOUT: tl.constexpr):
    """The position of what is cached there: a node's is its depth behind the root's."""
    return tl.where(key > root, root + (key - root + FANOUT - 1) // FANOUT, key)


@triton.jit
def load_rows(base, offsets, seen, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # [rows, BLOCK]
    """WIDTH elements from each offset, zero-padded to BLOCK; zeros where not seen, so that stale memory cannot leak."""
    dim = tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + dim[None, :]
    if WIDTH == BLOCK:
        return tl.load(pointers, mask=seen[:, None], other=0.0)
    return tl.load(pointers, mask=seen[:, None] & (dim < WIDTH)[None, :], other=0.0)


@triton.jit
def score(
    q_first,  # [BLOCK_M, FIRST]
    q_rest,  # [BLOCK_M, REST]; anything where REST is 0
    k_cache,
    offsets,  # [BLOCK_N]
    seen,  # [BLOCK_N] bool
    cap_scale,
    KEY_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # [BLOCK_M, BLOCK_N] float32
    FIRST: tl.constexpr = first_block(KEY_DIM)
    REST: tl.constexpr = rest_block(KEY_DIM)
    k = load_rows(k_cache, offsets, seen, KEY_DIM if KEY_DIM < FIRST else FIRST, FIRST).to(q_first.dtype)
    scores = tl.dot(q_first, tl.trans(k), input_precision="ieee")
    if REST > 0:
        k = load_rows(k_cache + FIRST, offsets, seen, KEY_DIM - FIRST, REST).to(q_first.dtype)
        scores = tl.dot(q_rest, tl.trans(k), scores, input_precision="ieee")
    if SOFTCAP:
        scores = tanh(scores * cap_scale)
    return scores


@triton.jit
def fold(acc, top, total, scores, values, scale):
    """One step of the online softmax: acc and total are relative to top, the largest score so far."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = finite_or_zero(new_top)
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def merged(acc, top, total, other, other_top, other_total):
    """Two partial results as one; the first may be empty, and either may be of keys that the query does not see."""
    new_top = tl.maximum(top, other_top)
    base = finite_or_zero(new_top)
    mine = tl.exp2(top - base)
    theirs = tl.exp2(other_top - base)
    acc = acc * mine[:, None] + other * theirs[:, None]
    return acc, new_top, total * mine + other_total * theirs


@triton.jit
def finite_or_zero(top):
    """A query may have seen no key yet; subtracting -inf from -inf would poison it."""
    return tl.where(top == float("-inf"), 0.0, top)
