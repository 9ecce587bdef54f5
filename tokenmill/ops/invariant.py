"""Ops for CPUs without the native library in which a query's bits depend on its own inputs alone, whatever else runs.

Matrix libraries choose another order of summation for another number of rows. Here every product has the same shape
whatever the batch: a weight times a fixed number of columns, which are tokens (or queries), padded with zeros. They
fill one vector register, so that all of them take the same way through the library, each in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F

from tokenmill.ops.kv_forms import KV_FORMS, KVScales, channels, gather
from tokenmill.ops.registry import Implementation
from tokenmill.ops.types import AttentionBatch, Mask

SLICES = 4  # of a sum over columns that ranks may divide
_REGISTER_BYTES = (64, 32, 16)  # of a vector register, the widest first
_KEYS = 64  # that are attended together, counted from the first one of a row


@lru_cache
def lanes(dtype: torch.dtype) -> int:
    """How many columns a product may have so that all of them get the same bits: as many as this machine proves."""
    for size in _REGISTER_BYTES:
        count = size // max(4, dtype.itemsize)  # what is shorter than float32 is widened for the product
        if all(_lanes_agree(dtype, *shape, count) for shape in ((96, 64), (513, 576), (7, 33))):
            return count
    return 1


def _lanes_agree(dtype: torch.dtype, rows: int, inner: int, count: int) -> bool:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, inner, generator=random).to(dtype)
    columns = torch.randn(1, inner, generator=random).to(dtype).repeat(count, 1).t()
    result = weight @ columns
    return torch.equal(result, result[:, :1].expand_as(result))


@lru_cache
def fewest_rows(dtype: torch.dtype) -> int:
    """How many rows a weight needs so that a row's product does not depend on their number: libraries have a way of
    their own for very few.
    """
    for count in (1, 4, 16):
        if all(_rows_agree(dtype, count, inner) for inner in (12, 64, 448, 1216)):
            return count
    return 64


def _rows_agree(dtype: torch.dtype, count: int, inner: int) -> bool:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(8 * count, inner, generator=random).to(dtype)
    columns = torch.randn(lanes(dtype), inner, generator=random).to(dtype).t()
    whole = weight @ columns
    return all(
        torch.equal(torch.cat([part @ columns for part in torch.split(weight, rows)]), whole)
        for rows in (count, 2 * count, 3 * count, 4 * count)
    )


def slices_of(columns: int, ranks: int = 1) -> int:
    """In how many parts a product sums over a rank's columns, so that the sum over ranks has the bits of one rank's:
    all of them add four parts by pairs, ((0 + 1) + (2 + 3)). 1: four do not fit.
    """
    return SLICES // ranks if columns * ranks % SLICES == 0 and SLICES % ranks == 0 else 1


def sum_by_pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [sum(parts[at + 1 : at + 2], parts[at]) for at in range(0, len(parts), 2)]
    return parts[0]


def sliced_linear(
    x: torch.Tensor,  # [rows, slices * in]
    weight: torch.Tensor,  # [slices, out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:  # [rows, out]
    """The bias belongs to the first slice, and so to the first rank."""
    parts = torch.split(x, weight.shape[2], dim=1)
    biases = [bias, *[None] * (len(weight) - 1)]
    return sum_by_pairs([linear(*one) for one in zip(parts, weight, biases, strict=True)])


def linear(
    x: torch.Tensor,  # [rows, in]
    weight: torch.Tensor,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:  # [rows, out]
    columns = weight.shape[0]
    if columns < fewest_rows(weight.dtype):
        weight = F.pad(weight, (0, 0, 0, fewest_rows(weight.dtype) - columns))
    x = x.contiguous()
    rows, width = x.shape[0], lanes(x.dtype)
    out = x.new_empty(rows, columns)
    for start in range(0, rows, width):
        part = x[start : start + width]
        count = part.shape[0]
        if count < width:
            part = F.pad(part, (0, 0, 0, width - count))
        out[start : start + count] = (weight @ part.t()).t()[:count, :columns]
    return out if bias is None else out + bias


def attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]; may be a strided view of k_cache
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> torch.Tensor:  # [tokens, heads, v_dim]
    """All rows together, a tile of keys after the other, from each row's first key on.

    A tile that a query does not see changes nothing about it: it adds zeros, and scales with one.
    """
    if batch.tree is not None or batch.tails is not None:
        raise NotImplementedError("the batch-invariant attention has no tree mask")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads, v_dim = k_cache.shape[2], channels(v_cache)
    group, width = q.shape[1] // kv_heads, lanes(wide)
    token, head, position, context, table_row = _tiles(batch, group, width)
    tiles = token.shape[0]
    by_head = q.to(wide).view(-1, kv_heads, group, q.shape[2])
    queries = by_head[token, :, head]  # [tiles, width, kv_heads, dim]
    # Contiguous like everything that is multiplied here: a product takes another way for other strides.
    queries = queries.permute(0, 2, 3, 1).contiguous().view(tiles * kv_heads, q.shape[2], width)
    acc = queries.new_zeros(tiles * kv_heads, v_dim + 1, width)  # the last row is the sum of the weights
    top = queries.new_full((tiles * kv_heads, 1, width), float("-inf"))
    for start in range(0, int(context.max()), _KEYS):
        live = int((context > start).sum())  # tiles are in the order of their contexts, the longest first
        keys, values = _gathered(k_cache, v_cache, scales, batch, table_row[:live], context[:live], start, wide)
        seen = _visible(start, position[:live], mask).repeat_interleave(kv_heads, 0)  # [., _KEYS, width]
        some = slice(live * kv_heads)
        scores = torch.bmm(keys, queries[some]) * scale
        if mask.softcap is not None:
            scores = mask.softcap * torch.tanh(scores / mask.softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        new_top = torch.maximum(top[some], scores.amax(1, keepdim=True))
        base = new_top.masked_fill(new_top == float("-inf"), 0.0)
        shrink = torch.exp(top[some] - base)
        acc[some] = acc[some] * shrink + torch.bmm(values, torch.exp(scores - base))
        top[some] = new_top
    mixed = (acc[:, :v_dim] / acc[:, v_dim:]).view(tiles, kv_heads, v_dim, width).permute(0, 3, 1, 2)
    out = q.new_empty(q.shape[0], kv_heads, group, v_dim)
    real = position >= 0
    out[token[real], :, head[real]] = mixed[real].to(q.dtype)
    return out.view(q.shape[0], q.shape[1], v_dim)


def _tiles(batch: AttentionBatch, group: int, width: int) -> tuple[torch.Tensor, ...]:
    """For tiles of `width` pairs of one row each, those with most keys first: the pairs' tokens, heads of the group and
    positions [tiles, width] (a lane without a query has the position -1); keys and table row [tiles].

    Pair m of a row is query m // group with head m % group of each group.
    """
    found = []
    first = 0
    for row, count, context in zip(batch.host_rows, batch.host_counts, batch.host_context, strict=True):
        for pair in range(0, count * group, width):
            last = min((pair + width - 1) // group, count - 1)
            found.append((context - count + last + 1, first, count, context, row, pair))
        first += count
    found.sort(key=lambda tile: -tile[0])
    keys, tokens, counts, contexts, rows, pairs = torch.tensor(found).t()[:, :, None]
    pair = pairs + torch.arange(width)
    query = pair // group
    inside = query < counts
    return (
        torch.where(inside, tokens + query, tokens),
        pair % group,
        torch.where(inside, contexts - counts + query, -1),
        keys[:, 0],
        rows[:, 0],
    )


def _gathered(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales | None,
    batch: AttentionBatch,
    rows: torch.Tensor,  # [n]
    context: torch.Tensor,  # [n]
    start: int,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # [n * kv_heads, _KEYS, dim], [n * kv_heads, v_dim + 1, _KEYS]
    """A tile of keys, and of values with a row of ones below them. Past the end of a row stands its first key."""
    block_size, kv_heads = k_cache.shape[1:3]
    position = start + torch.arange(_KEYS)
    position = torch.where(position < context[:, None], position, 0)  # [n, _KEYS]
    block = batch.block_tables[rows[:, None], position // block_size].long()
    slot = (block * block_size + position % block_size).flatten()
    keys, values = (
        gather(cache.flatten(0, 1), beside, slot, wide).view(*position.shape, kv_heads, -1)
        for cache, beside in (
            (k_cache, scales.k.flatten(0, 1) if scales else None),
            (v_cache, scales.v.flatten(0, 1) if scales else None),
        )
    )
    values = F.pad(values, (0, 1), value=1.0)
    return keys.transpose(1, 2).contiguous().flatten(0, 1), values.permute(0, 2, 3, 1).contiguous().flatten(0, 1)


def _visible(
    start: int,
    position: torch.Tensor,  # [n, width]
    mask: Mask,
) -> torch.Tensor:  # [n, _KEYS, width] bool
    key = (start + torch.arange(_KEYS))[:, None]
    query = position[:, None]
    seen = key <= query
    if mask.window is not None:
        seen = seen & (key > query - mask.window)
    return seen


def act_mul(
    x: torch.Tensor,  # [tokens, 2 * inner]: gate, then up
    kind: str,  # "silu" or "gelu_tanh"
) -> torch.Tensor:  # [tokens, inner]
    """Of steps that are rounded exactly or computed alike in every lane, unlike the library's fused activations."""
    gate, up = (part.contiguous() for part in x.chunk(2, dim=-1))
    wide = gate.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if kind == "silu":
        active = wide / (1.0 + torch.exp(-wide))
    elif kind == "gelu_tanh":
        active = 0.5 * wide * (1.0 + torch.tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))
    else:
        raise ValueError(f"activation {kind!r} is not one of silu, gelu_tanh")
    return active.to(x.dtype) * up


def moe(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]
    experts: torch.Tensor,  # [tokens, k] int64
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    kind: str,
    slices: int = 1,  # in which sums over inner columns are computed
) -> torch.Tensor:  # [tokens, hidden]
    """A token's experts are summed in the order in which it chose them, for each slice of the inner columns alone."""
    inner = down.shape[2] // slices
    parts = x.new_empty(slices, *experts.shape, x.shape[1])
    for expert in sorted(set(experts.flatten().tolist())):
        token, place = (experts == expert).nonzero(as_tuple=True)
        active = act_mul(linear(x[token], gate_up[expert]), kind)
        for number in range(slices):
            some = slice(number * inner, (number + 1) * inner)
            parts[number, token, place] = linear(active[:, some], down[expert, :, some].contiguous())
    share = weights.to(x.dtype)[:, :, None]
    out = parts[:, :, 0] * share[:, 0]
    for place in range(1, experts.shape[1]):
        out = out + parts[:, :, place] * share[:, place]
    return sum_by_pairs(out.unbind())


def route(
    x: torch.Tensor,  # [tokens, hidden]
    router: torch.Tensor,  # [experts, hidden] float32
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [tokens, top_k] float32, experts [tokens, top_k] int64
    return best_experts(linear(x.to(router.dtype), router), top_k, normalize, scale)


def best_experts(
    scores: torch.Tensor,  # [tokens, experts]
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of largest softmax, best first."""
    weights, experts = scores.softmax(-1).topk(top_k, dim=-1)
    if normalize:
        total = weights[:, 0]
        for place in range(1, top_k):  # a library's sum may follow the number of tokens
            total = total + weights[:, place]
        weights = weights / total[:, None]
    return weights * scale, experts


IMPLEMENTATIONS = tuple(
    Implementation(
        op=fn.__name__,
        name="invariant",
        fn=fn,
        devices=("cpu",),
        batch_invariant=True,
        kv_forms=tuple(KV_FORMS),
        sliced=fn is moe,
        rank=20,
    )
    for fn in (attention, act_mul, moe, route)
)
