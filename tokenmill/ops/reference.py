"""Every op in plain torch: the definition that the other implementations are tested against."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tokenmill.ops.kv_forms import KV_FORMS, KVScales, channels, form_of, gather, quantize
from tokenmill.ops.noise import gumbel_noise
from tokenmill.ops.registry import Implementation
from tokenmill.ops.shaping import shape
from tokenmill.ops.types import LOGPROB_WORDS, AttentionBatch, Mask, SampleBatch


def rms_norm(
    x: torch.Tensor,  # [..., dim]
    weight: torch.Tensor,  # [dim], any float dtype
    eps: float,
) -> torch.Tensor:
    wide = x.to(_wide(x.dtype))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, dim]
    residual: torch.Tensor,  # [tokens, dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual x + residual (rounded to the dtype), and its norm. Inputs may be overwritten."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_kv_write(
    q: torch.Tensor,  # [tokens, heads, dim], rotated in place
    k: torch.Tensor,  # [tokens, kv_heads, dim]
    v: torch.Tensor | None,  # [tokens, kv_heads, v_dim]; None where values are a view of the keys (MLA)
    cos_sin: torch.Tensor,  # [max_positions, rot_dim] float32: cosines, then sines, of each rotation
    positions: torch.Tensor,  # [tokens]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor | None,  # [blocks, block_size, kv_heads, v_dim]
    slots: torch.Tensor,  # [tokens]: block * block_size + offset; negative: do not write
    q_norm: torch.Tensor | None = None,  # [dim]: heads of q and k are normed before they are rotated
    k_norm: torch.Tensor | None = None,  # [dim]: both or neither
    eps: float = 0.0,
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> None:
    """Rotate the first rot_dim dims of q and k (half-split pairs), and store k and v at their slots."""
    if q_norm is not None and k_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps))
        k = rms_norm(k, k_norm, eps)
    rope(q, cos_sin, positions)
    kept = slots >= 0
    where = slots[kept].long()
    _write(k_cache, scales.k if scales else None, where, rotated(k, cos_sin, positions)[kept])
    if v is not None:
        assert v_cache is not None
        _write(v_cache, scales.v if scales else None, where, v[kept])


def rope(
    q: torch.Tensor,  # [tokens, heads, dim], rotated in place
    cos_sin: torch.Tensor,  # [max_positions, rot_dim] float32
    positions: torch.Tensor,  # [tokens]
) -> None:
    """What `rope_kv_write` does to queries, for those without keys and values of their own."""
    q.copy_(rotated(q, cos_sin, positions))


def rotated(
    x: torch.Tensor,  # [tokens, heads, dim]
    cos_sin: torch.Tensor,  # [max_positions, rot_dim] float32
    positions: torch.Tensor,  # [tokens]
) -> torch.Tensor:
    half = cos_sin.shape[1] // 2
    angles = cos_sin[positions.long()].to(_wide(x.dtype))
    return _rotate(x, angles[:, None, :half], angles[:, None, half:], half)


def _write(
    cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim], or codes
    scales: torch.Tensor | None,  # [blocks, block_size, kv_heads, n]
    where: torch.Tensor,  # [tokens]
    x: torch.Tensor,  # [tokens, kv_heads, dim]
) -> None:
    block, offset = where // cache.shape[1], where % cache.shape[1]
    if scales is None:
        cache[block, offset] = x.to(cache.dtype)
    else:
        cache[block, offset], scales[block, offset] = quantize(x, form_of(cache))


def attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]; may be a strided view of k_cache
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> torch.Tensor:  # [tokens, heads, v_dim]
    if batch.tails is not None:
        raise NotImplementedError("the reference attention knows trees as `tree` only, not as `tails`")
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // kv_heads
    out = q.new_empty(q.shape[0], q.shape[1], channels(v_cache))
    wide = _wide(q.dtype)
    first = 0
    for row, count, context in zip(batch.host_rows, batch.host_counts, batch.host_context, strict=True):
        blocks = batch.block_tables[row, : -(-context // block_size)].long()
        keys, values = (
            gather(cache, beside, blocks, wide).flatten(0, 1)[:context].repeat_interleave(group, 1)
            for cache, beside in ((k_cache, scales.k if scales else None), (v_cache, scales.v if scales else None))
        )
        queries = q[first : first + count]
        scores = torch.einsum("qhd,khd->hqk", queries.to(wide), keys) * scale
        if mask.softcap is not None:
            scores = mask.softcap * torch.tanh(scores / mask.softcap)
        tree = batch.tree[first : first + count, :count] if batch.tree is not None else None
        scores.masked_fill_(~visible(count, context, mask, q.device, tree), float("-inf"))
        weights = scores.softmax(-1)
        out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        first += count
    return out


def visible(
    count: int, context: int, mask: Mask, device: torch.device, tree: torch.Tensor | None = None
) -> torch.Tensor:  # [count, context] bool
    """Which keys each of the last `count` positions of a row may see."""
    query = torch.arange(context - count, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    seen = key <= query
    if tree is not None:
        seen = torch.cat([seen[:, : context - count], tree], dim=1)
    if mask.window is not None:
        seen = seen & (key > query - mask.window)
    return seen


def act_mul(
    x: torch.Tensor,  # [tokens, 2 * inner]: gate, then up
    kind: str,  # "silu" or "gelu_tanh"
) -> torch.Tensor:  # [tokens, inner]
    gate, up = x.chunk(2, dim=-1)
    return activation(gate, kind) * up


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    raise ValueError(f"activation {kind!r} is not one of silu, gelu_tanh")


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # [tokens, dim] each
    return x + y


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:  # [tokens, dim]
    return x * factor


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:  # [n, vocab], may be overwritten
    """Nothing is larger than the cap, and what is small beside it stays as it is."""
    return torch.tanh(x / cap) * cap


def moe(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]: how much of each chosen expert
    experts: torch.Tensor,  # [tokens, k] int64: which experts
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    out = torch.zeros_like(x)
    for expert in sorted(set(experts.flatten().tolist())):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        inner = act_mul(F.linear(x[token], gate_up[expert]), kind)
        out.index_add_(0, token, F.linear(inner, down[expert]) * weights[token, choice, None].to(x.dtype))
    return out


def sample(
    logits: torch.Tensor,  # [n, vocab] float32
    batch: SampleBatch,
) -> torch.Tensor:  # [n] int64; -1 where the row's logits hold a NaN or no finite value
    """Choose one token per row: argmax of the filtered logits plus Gumbel noise keyed by (seed, position)."""
    _, best = best_of(logits, batch)
    return torch.where(torch.isfinite(logits.amax(-1)), best, -1)


def best_of(
    logits: torch.Tensor,  # [n, tokens]
    batch: SampleBatch,
    first: int = 0,  # the token of the first column
) -> tuple[torch.Tensor, torch.Tensor]:  # [n], [n] int64
    """What is largest of a row's logits, or of these with noise, and which token that is."""
    values, best = logits.max(-1)
    if not batch.all_greedy:
        heat = batch.temperature[:, None]
        scaled = logits / heat.clamp_min(1e-5)
        if batch.any_filter:
            scaled = scaled.masked_fill(~kept_tokens(scaled, batch.top_k, batch.top_p, batch.min_p), float("-inf"))
        noisy = scaled + gumbel_noise(batch.seed, batch.position, logits.shape[1], first).to(scaled.dtype)
        largest, warm = noisy.max(-1)
        greedy = batch.temperature < 1e-5
        values, best = torch.where(greedy, values, largest.to(values.dtype)), torch.where(greedy, best, warm)
    return values, best + first


def logprobs(
    logits: torch.Tensor,  # [n, vocab], before anything shaped them
    tokens: torch.Tensor,  # [n] int64: the chosen ones; -1 where none could be
    widths: torch.Tensor,  # [n] int32: how many best tokens a row asked for; -1: nothing, it gets only its token
    k: int,  # no width is larger
) -> torch.Tensor:  # [n, LOGPROB_WORDS + 2 * k]
    """A row's results in one piece, so that one copy brings them to the host: the token, its rank (1 + the number of
    larger logits), its log-probability, the ids of the k best tokens, best first, and their log-probabilities.

    Words are int32, floats among them float32 by their bits; for logits in float64 they are int64 and float64.
    """
    logits = logits.to(_wide(logits.dtype))
    word = torch.int64 if logits.dtype == torch.float64 else torch.int32
    out = torch.zeros(logits.shape[0], LOGPROB_WORDS + 2 * k, dtype=word, device=logits.device)
    out[:, 0] = tokens
    chosen = tokens.clamp_min(0)[:, None]
    mine = out
    if logits.device.type == "cpu" and (widths.numpy() < 0).any():  # nobody else pays for it where the host may look
        asked = torch.from_numpy(np.flatnonzero(widths.numpy() >= 0))
        logits, chosen, mine = logits[asked], chosen[asked], out[asked]
    top = min(k, logits.shape[1])
    scores = logits.log_softmax(-1)
    best = scores.topk(top, dim=-1)
    mine[:, 1] = (logits > logits.gather(1, chosen)).sum(-1) + 1
    mine[:, 2] = scores.gather(1, chosen)[:, 0].view(word)
    mine[:, LOGPROB_WORDS : LOGPROB_WORDS + top] = best.indices
    mine[:, LOGPROB_WORDS + k : LOGPROB_WORDS + k + top] = best.values.view(word)
    if mine is not out:
        out[asked] = mine
    return out


def kept_tokens(
    logits: torch.Tensor,  # [n, vocab], already divided by the temperature
    top_k: torch.Tensor,  # [n]
    top_p: torch.Tensor,  # [n]
    min_p: torch.Tensor,  # [n]
) -> torch.Tensor:  # [n, vocab] bool
    """top_k, then top_p over what is left, then min_p; ties with the last kept token are kept."""
    ranked = logits.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1]).long() - 1
    floor = ranked.gather(1, last[:, None])
    probs = ranked.masked_fill(ranked < floor, float("-inf")).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    inside = (mass_before < top_p[:, None]) & (ranked >= floor)
    nucleus = ranked.gather(1, (inside.sum(-1, keepdim=True) - 1).clamp_min(0))
    floor = torch.where(top_p[:, None] < 1, torch.maximum(floor, nucleus), floor)
    likely = ranked[:, :1] + torch.log(min_p)[:, None]
    return logits >= torch.maximum(floor, likely)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int) -> torch.Tensor:
    left, right = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of intermediate results."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_head(
    x: torch.Tensor,  # [tokens, heads, in]
    weight: torch.Tensor,  # [heads, out, in]; transposed: [heads, in, out]
    transposed: bool = False,
    beside: torch.Tensor | None = None,  # [tokens, heads, n]
) -> torch.Tensor:  # [tokens, heads, out], or behind what is beside it [tokens, heads, n + out]
    """Every head times a matrix of its own."""
    product = torch.bmm(x.transpose(0, 1), weight if transposed else weight.transpose(1, 2)).transpose(0, 1)
    return product if beside is None else torch.cat([beside, product], dim=-1)


def concat(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # [tokens, n], [tokens, m] -> [tokens, n + m]
    return torch.cat([x, y], dim=-1)


IMPLEMENTATIONS = tuple(
    Implementation(
        op=fn.__name__,
        name="reference",
        fn=fn,
        # A few of torch's own kernels are good enough for a CUDA graph; on a CPU the last two are no part of a graph.
        capture_safe=fn in (add, scaled, soft_cap, logprobs, shape, per_head, concat),
        batch_invariant=fn not in (attention, act_mul, moe, per_head),
        kv_forms=tuple(KV_FORMS),
        optional=fn is per_head,  # of latent attention, which nobody computes batch-invariantly
    )
    for fn in (
        rms_norm, add_rms_norm, rope_kv_write, rope, attention, act_mul, add, scaled, soft_cap, moe, sample, logprobs,
        shape, per_head, concat,
    )
)  # fmt: skip
