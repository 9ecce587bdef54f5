"""Batched torch versions of the ops for CPUs, where the reference would loop over rows or sort whole vocabularies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tokenmill.ops.kv_forms import KV_FORMS, KVScales, channels, gather
from tokenmill.ops.noise import TOKEN_OFFSET, gumbel, key, mix
from tokenmill.ops.reference import act_mul, visible
from tokenmill.ops.registry import Implementation
from tokenmill.ops.types import AttentionBatch, Mask, SampleBatch

# Gathered keys and values of a group of rows should stay in the processor's cache between the gather and the use.
_GATHER_BYTES = 4 << 20
_SCORE_BYTES = 16 << 20
_QUERY_SLICE = 256  # queries of a chunk that are attended together; keys after the last of them are not touched
# Of tokens that are so far behind the likeliest one only those with more noise than 5.5 can win; both round generously.
FAR, MUCH_NOISE = 6.0, int(math.exp(-math.exp(-5.5)) * 2**32) - 2**12
_LARGEST = torch.finfo(torch.float64).max
_mix: Any = mix  # it works on arrays of 32-bit words as well, at a third of the time


def attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]; may be a strided view of k_cache
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> torch.Tensor:  # [tokens, heads, v_dim]
    """Rows with one query are padded to a common length and computed together; each chunk is computed alone."""
    out = q.new_empty(q.shape[0], q.shape[1], channels(v_cache))
    num_singles = batch.num_singles if batch.tree is None else 0
    block_size = k_cache.shape[1]
    plan_name = f"cpu attention, window {mask.window}, block size {block_size}"  # equal in many layers
    if plan_name not in batch.cache:
        key_bytes = (channels(k_cache) + channels(v_cache)) * k_cache.shape[2] * q.element_size()
        reaches = [_reach(context, 1, mask) for context in batch.host_context[:num_singles]]
        groups = _groups_of_like_length(reaches, _GATHER_BYTES // key_bytes)
        batch.cache[plan_name] = [_padded(batch, group, mask, block_size) for group in groups]
    for padded in batch.cache[plan_name]:
        _attend_padded(out, q, k_cache, v_cache, scales, padded, mask, scale)
    first = num_singles
    for i in range(num_singles, len(batch.host_rows)):
        _attend_row(out, q, k_cache, v_cache, scales, batch, i, first, mask, scale)
        first += batch.host_counts[i]
    return out


def _reach(context: int, count: int, mask: Mask) -> int:
    """How many of the last keys of a row its last `count` queries can see."""
    if mask.window is None:
        return context
    return min(context, mask.window + count - 1)


def _groups_of_like_length(lengths: list[int], max_keys: int) -> Iterator[list[int]]:
    """Indices of rows that are worth padding to the longest of them, within a budget of gathered keys."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    group: list[int] = []
    for i in order:
        if group:
            longest = lengths[group[0]]
            if lengths[i] + 64 < 0.75 * longest or (len(group) + 1) * longest > max_keys:
                yield group
                group = []
        group.append(i)
    if group:
        yield group


@dataclass(frozen=True)
class _Padded:
    """Some rows with one query each, whose keys are padded to one length."""

    which: torch.Tensor  # [r]: index of the rows' queries
    blocks: torch.Tensor  # [r * columns]: the blocks to gather; any block where a row has no more
    seen: torch.Tensor  # [r, 1, length] bool: which of the gathered keys each query sees
    unseen: torch.Tensor  # the others, as indices into the gathered keys


def _padded(batch: AttentionBatch, group: list[int], mask: Mask, block_size: int) -> _Padded:
    context = torch.tensor([batch.host_context[i] for i in group])
    first_key = (context - mask.window).clamp_min(0) if mask.window is not None else torch.zeros_like(context)
    first_block = first_key // block_size
    last_block = (context - 1) // block_size
    columns = int((last_block - first_block).max()) + 1
    column = first_block[:, None] + torch.arange(columns)  # [r, columns]
    table = batch.block_tables.index_select(0, torch.tensor([batch.host_rows[i] for i in group]))
    blocks = table.gather(1, column.minimum(last_block[:, None])).flatten()
    position = (first_block * block_size)[:, None] + torch.arange(columns * block_size)  # [r, length]
    seen = (position < context[:, None]) & (position >= first_key[:, None])
    return _Padded(torch.tensor(group), blocks, seen[:, None], (~seen).flatten().nonzero()[:, 0])


def _attend_padded(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales | None,
    padded: _Padded,
    mask: Mask,
    scale: float,
) -> None:
    rows, kv_heads = padded.which.shape[0], k_cache.shape[2]
    # Unseen keys become zero: they may hold anything, and a NaN survives any mask.
    keys, values = (
        found.index_fill_(0, padded.unseen, 0).view(rows, -1, kv_heads, found.shape[2]).transpose(1, 2)
        for found in _gather(k_cache, v_cache, scales, padded.blocks, q.dtype)
    )
    queries = q.index_select(0, padded.which).view(rows, kv_heads, 1, -1, q.shape[2])
    attended = _attend(queries, keys, values, padded.seen, mask, scale)
    out.index_copy_(0, padded.which, attended.reshape(rows, *out.shape[1:]))


def _gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales | None,
    blocks: torch.Tensor,  # [n]
    dtype: torch.dtype,
) -> Iterator[torch.Tensor]:  # keys [n * block_size, kv_heads, dim], then values
    for cache, beside in ((k_cache, scales.k if scales else None), (v_cache, scales.v if scales else None)):
        yield gather(cache, beside, blocks, dtype).flatten(0, 1)


def _attend_row(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales | None,
    batch: AttentionBatch,
    i: int,
    first: int,  # where the row's queries begin
    mask: Mask,
    scale: float,
) -> None:
    block_size, kv_heads = k_cache.shape[1:3]
    row, count, context = batch.host_rows[i], batch.host_counts[i], batch.host_context[i]
    first_block = (context - _reach(context, count, mask)) // block_size
    blocks = batch.block_tables[row, first_block : -(-context // block_size)]
    base = first_block * block_size  # the position of the first gathered key
    keys, values = (
        found[: context - base].transpose(0, 1)[None] for found in _gather(k_cache, v_cache, scales, blocks, q.dtype)
    )
    tree = batch.tree[first : first + count, :count] if batch.tree is not None else None
    size = _QUERY_SLICE
    if not _fits_flash(keys, values, mask):
        size = max(1, min(size, _SCORE_BYTES // (8 * q.shape[1] * context)))
    for a in range(0, count, size):
        b = min(count, a + size)
        end = context - count + b if tree is None else context  # keys up to the last query of the slice
        low = max(base, end - _reach(end, b - a, mask)) if tree is None else base
        seen = None
        if tree is not None:
            seen = visible(count, context, mask, q.device, tree)[None, a:b, base:]
        elif b - a > 1 or mask.window is not None:
            seen = visible(b - a, end, mask, q.device)[None, :, low:]
        queries = q[first + a : first + b].reshape(b - a, kv_heads, -1, q.shape[2]).transpose(0, 1)[None]
        span = slice(low - base, end - base)
        attended = _attend(queries, keys[:, :, span], values[:, :, span], seen, mask, scale)
        out[first + a : first + b] = attended[0].transpose(0, 1).flatten(1, 2)


def _fits_flash(keys: torch.Tensor, values: torch.Tensor, mask: Mask) -> bool:
    """Whether torch has a tiled kernel for this; otherwise scores are materialised, in slices."""
    return mask.softcap is None and keys.shape[-1] == values.shape[-1]


def _attend(
    q: torch.Tensor,  # [b, kv_heads, m, group, dim]; b or m is 1
    keys: torch.Tensor,  # [b, kv_heads, length, dim]
    values: torch.Tensor,  # [b, kv_heads, length, v_dim]
    seen: torch.Tensor | None,  # [b, m, length] bool; None: everything
    mask: Mask,
    scale: float,
) -> torch.Tensor:  # [b, kv_heads, m, group, v_dim]
    """Attention in which the query heads of a group share their keys without a copy."""
    if not _fits_flash(keys, values, mask):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        b, kv_heads, m, group, dim = q.shape
        scores = (q.to(wide).reshape(b, kv_heads, m * group, dim) @ keys.to(wide).transpose(2, 3)) * scale
        if mask.softcap is not None:
            scores = mask.softcap * torch.tanh(scores / mask.softcap)
        if seen is not None:
            by_query = scores.view(b, kv_heads, m, group, -1)
            by_query.masked_fill_(~seen[:, None, :, None], float("-inf"))
        return (scores.softmax(-1) @ values.to(wide)).to(q.dtype).view(b, kv_heads, m, group, -1)
    if q.shape[2] == 1:  # the group takes the place of the queries
        some = seen[:, None] if seen is not None else None
        return F.scaled_dot_product_attention(q[:, :, 0], keys, values, attn_mask=some, scale=scale)[:, :, None]
    # The kv heads take the place of the batch, and keys are expanded over the group with stride 0.
    heads = q[0].transpose(1, 2)  # [kv_heads, group, m, dim]
    some = seen[0] if seen is not None else None
    keys, values = (x[0, :, None].expand(-1, q.shape[3], -1, -1) for x in (keys, values))
    return F.scaled_dot_product_attention(heads, keys, values, attn_mask=some, scale=scale).transpose(1, 2)[None]


def moe(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]
    experts: torch.Tensor,  # [tokens, k] int64
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    """Tokens sorted by expert once, so that each expert works on one slice."""
    tokens, k = experts.shape
    order = experts.flatten().argsort(stable=True)
    gathered = x.index_select(0, order // k)
    done = torch.empty_like(gathered)
    at = 0
    for expert, count in enumerate(experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()):
        if count:
            inner = act_mul(F.linear(gathered[at : at + count], gate_up[expert]), kind)
            done[at : at + count] = F.linear(inner, down[expert])
            at += count
    by_token = torch.empty_like(done).index_copy_(0, order, done).view(tokens, k, -1)
    return torch.bmm(weights.to(x.dtype)[:, None], by_token)[:, 0]


def sample(
    logits: torch.Tensor,  # [n, vocab]
    batch: SampleBatch,
) -> torch.Tensor:  # [n] int64; -1 where the row's logits hold a NaN or no finite value
    """The reference's choice, with noise and sorting only for the tokens that can still win."""
    values, best = best_of(logits, batch)
    return torch.where(torch.isfinite(values), best, -1)


def best_of(
    logits: torch.Tensor,  # [n, tokens]
    batch: SampleBatch,
    first: int = 0,  # the token of the first column
    floors: Sequence[torch.Tensor | None] | None = None,  # of each row: what filters keep is no less
) -> tuple[torch.Tensor, torch.Tensor]:  # [n], [n] int64
    """What is largest of a row's logits, or of these with noise, and which token that is."""
    top, best = logits.max(-1)
    if batch.all_greedy:
        return top, best + first
    finite, top = torch.isfinite(top), top.double()
    tokens = _hashed(first, logits.shape[1])
    keys = key(batch.seed, batch.position).numpy().astype(np.uint32)
    warm = finite & (batch.temperature >= 1e-5)
    for i in warm.nonzero()[:, 0].tolist():
        scaled = logits[i] / batch.temperature[i]
        if floors is not None:
            floor = floors[i]
        else:
            floor = _floor(scaled, batch.top_k[i], batch.top_p[i], batch.min_p[i]) if batch.any_filter else None
        if floor is None:
            bits = _mix(keys[i] ^ tokens)
            kept = _may_win(scaled, bits, int(best[i]))
            noisy = scaled[kept] + gumbel(torch.from_numpy(bits[kept.numpy()]))
        else:
            kept = (scaled >= floor).nonzero()[:, 0]
            if not len(kept):  # other ranks have what is
                top[i] = -torch.inf
                continue
            noisy = scaled[kept] + gumbel(torch.from_numpy(_mix(keys[i] ^ tokens[kept.numpy()])))
        place = noisy.argmax()
        top[i], best[i] = noisy[place].double().clamp_max(_LARGEST), kept[place]  # a low temperature makes it infinite
    return top, best + first


def _may_win(
    scaled: torch.Tensor,  # [vocab]
    bits: npt.NDArray[np.uint32],  # [vocab]: of the tokens' noise
    likeliest: int,
) -> torch.Tensor:  # [kept]
    """Tokens that are not far behind the likeliest one with its noise, or have much noise: few logarithms are taken."""
    if scaled.dtype not in (torch.float32, torch.float64):
        return torch.arange(len(scaled))
    values = scaled.numpy()
    known = values[likeliest] + gumbel(torch.from_numpy(bits[likeliest : likeliest + 1])).item()
    return torch.from_numpy(np.flatnonzero((values >= known - FAR) | (bits >= MUCH_NOISE)))


@lru_cache(maxsize=8)
def _hashed(first: int, count: int) -> npt.NDArray[np.uint32]:  # [count]
    hashed: npt.NDArray[np.uint32] = _mix(np.arange(first, first + count, dtype=np.uint32) + np.uint32(TOKEN_OFFSET))
    return hashed


def _floor(
    scaled: torch.Tensor,  # [vocab]
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor | None:
    """The smallest value that top_k, then top_p over what is left, then min_p keep; None where they are off."""
    floor = None
    if 0 < top_k < scaled.shape[0]:
        floor = scaled.topk(int(top_k)).values[-1]
    if top_p < 1:
        floor = _nucleus_floor(scaled if floor is None else scaled[scaled >= floor], top_p)
    if min_p > 0:
        likely = scaled.max() + torch.log(min_p)
        floor = likely if floor is None else torch.maximum(floor, likely)
    return floor


def _nucleus_floor(
    values: torch.Tensor,  # [kept]
    top_p: torch.Tensor,
) -> torch.Tensor:
    total = values.logsumexp(0)
    # The nucleus nearly always ends among the likely tokens; the long tail is sorted only where it does not.
    for likely in (values[values >= values.max() - 10], values):
        ranked = torch.from_numpy(np.sort(likely.numpy())).flip(0)  # numpy sorts with vector instructions
        probs = torch.exp(ranked - total)
        mass = probs.cumsum(0)
        if mass[-1] >= top_p:
            break
    inside = (mass - probs < top_p).sum()
    return ranked[inside - 1]


IMPLEMENTATIONS = tuple(
    Implementation(
        op=fn.__name__,
        name="cpu",
        fn=fn,
        devices=("cpu",),
        batch_invariant=fn is sample,
        kv_forms=tuple(KV_FORMS),
        rank=5,
    )
    for fn in (attention, moe, sample)
)
