"""Generated inputs for every op, with poison wherever an implementation must not look."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenmill.ops.types import CAUSAL, AttentionBatch, Mask, SampleBatch

NAN = float("nan")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """How far a result may be from one that was computed in float32 and rounded once."""
    return {
        torch.float64: {"rtol": 1e-9, "atol": 1e-9},
        torch.float32: {"rtol": 2e-5, "atol": 2e-5},
        torch.float16: {"rtol": 4e-3, "atol": 4e-3},
        torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    }[dtype]


@dataclass
class AttentionCase:
    """Arguments of the attention op; `call(fn)` calls an implementation with them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch
    mask: Mask
    scale: float

    def call(self, fn: Any) -> torch.Tensor:
        result: torch.Tensor = fn(self.q, self.k_cache, self.v_cache, self.batch, self.mask, self.scale)
        return result

    def forget(self, position_is_dead: Any) -> AttentionCase:
        """The same case with poison at the positions of each row for which position_is_dead(row index, position)."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        size = k_cache.shape[1]
        for i, (row, context) in enumerate(zip(self.batch.host_rows, self.batch.host_context)):
            for position in range(context):
                if position_is_dead(i, position):
                    block = int(self.batch.block_tables[row, position // size])
                    k_cache[block, position % size] = NAN
                    v_cache[block, position % size] = NAN
        return replace(self, k_cache=k_cache, v_cache=v_cache)


def attention_case(
    counts: list[int],  # queries per row, those with one first
    contexts: list[int],  # keys per row
    *,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int | None = None,  # None: as key_dim
    values_in_keys: bool = False,  # values are the last value_dim elements of each key
    block_size: int = 8,
    mask: Mask = CAUSAL,
    shared: int = 0,  # leading full blocks that every row long enough shares with the first
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionCase:
    random = torch.Generator().manual_seed(seed)
    value_dim = value_dim or key_dim
    n, tokens = len(counts), sum(counts)
    blocks = [-(-context // block_size) for context in contexts]
    pool = torch.randperm(sum(blocks) + 3, generator=random).tolist()
    rows = torch.randperm(n + 2, generator=random)[:n]
    tables = torch.full((n + 2, max(blocks) + 2), 2**30, dtype=torch.int32)  # out of any pool
    k_cache = torch.full((len(pool), block_size, kv_heads, key_dim), NAN)
    v_cache = torch.full((len(pool), block_size, kv_heads, value_dim), NAN)
    first_row: list[int] = []
    for i, context in enumerate(contexts):
        common = first_row[: min(shared, context // block_size, contexts[0] // block_size)]
        own = [pool.pop() for _ in range(blocks[i] - len(common))]
        first_row = first_row or own
        table = common + own
        tables[rows[i], : len(table)] = torch.tensor(table, dtype=torch.int32)
        for position in range(len(common) * block_size, context):
            block, offset = table[position // block_size], position % block_size
            k_cache[block, offset] = torch.randn(kv_heads, key_dim, generator=random)
            v_cache[block, offset] = torch.randn(kv_heads, value_dim, generator=random)
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * key_dim, generator=random).to(device, dtype)
    k_cache, v_cache = k_cache.to(device, dtype), v_cache.to(device, dtype)
    if values_in_keys:
        v_cache = k_cache[..., key_dim - value_dim :]
    starts = torch.tensor([0, *counts]).cumsum(0)
    batch = AttentionBatch(
        rows=rows.to(device, torch.int32),
        q_start=starts.to(device, torch.int32),
        context=torch.tensor(contexts).to(device, torch.int32),
        block_tables=tables.to(device),
        num_singles=sum(count == 1 for count in counts),
        max_query=max(counts),
        max_context=max(contexts),
        host_rows=rows.tolist(),
        host_counts=list(counts),
        host_context=list(contexts),
    )
    q = fused[:, : heads * key_dim].view(tokens, heads, key_dim)
    return AttentionCase(q, k_cache, v_cache, batch, mask, key_dim**-0.5)


@dataclass
class RopeCase:
    """Arguments of rope_kv_write, which works in place: `copy()` before each call."""

    fused: torch.Tensor  # [tokens, (heads + kv_heads) * dim + kv_heads * v_dim]
    heads: int
    kv_heads: int
    dim: int
    v_dim: int  # 0: no values
    cos_sin: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    slots: torch.Tensor

    def copy(self) -> RopeCase:
        v_cache = None if self.v_cache is None else self.v_cache.clone()
        return replace(self, fused=self.fused.clone(), k_cache=self.k_cache.clone(), v_cache=v_cache)

    def call(self, fn: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q and the caches afterwards."""
        tokens, widths = self.fused.shape[0], [self.heads * self.dim, self.kv_heads * self.dim]
        q, k, v = self.fused.split([*widths, self.fused.shape[1] - sum(widths)], dim=1)
        q, k = q.view(tokens, self.heads, self.dim), k.view(tokens, self.kv_heads, self.dim)
        values = v.view(tokens, self.kv_heads, self.v_dim) if self.v_dim else None
        fn(q, k, values, self.cos_sin, self.positions, self.k_cache, self.v_cache, self.slots)
        return q, self.k_cache, self.v_cache


def rope_case(
    tokens: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int | None = None,  # None: as dim; 0: no values
    rotated: int | None = None,  # None: all of dim
    block_size: int = 8,
    skipped: int = 0,  # tokens that are not written
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> RopeCase:
    random = torch.Generator().manual_seed(seed)
    v_dim = dim if v_dim is None else v_dim
    rotated = dim if rotated is None else rotated
    blocks, positions = -(-tokens // block_size) + 2, 100
    angles = torch.rand(positions, rotated // 2, generator=random) * 6.3
    slots = torch.randperm(blocks * block_size, generator=random)[:tokens]
    slots[torch.randperm(tokens, generator=random)[:skipped]] = -1
    fused = torch.randn(tokens, (heads + kv_heads) * dim + kv_heads * v_dim, generator=random)
    return RopeCase(
        fused.to(device, dtype), heads, kv_heads, dim, v_dim,
        cos_sin=torch.cat([angles.cos(), angles.sin()], 1).to(device),
        positions=torch.randint(0, positions, (tokens,), generator=random).to(device),
        k_cache=torch.full((blocks, block_size, kv_heads, dim), 7.0, dtype=dtype, device=device),
        v_cache=torch.full((blocks, block_size, kv_heads, v_dim), 7.0, dtype=dtype, device=device) if v_dim else None,
        slots=slots.to(device),
    )  # fmt: skip


def sample_case(
    rows: int,
    vocab: int,
    *,
    spread: float = 3.0,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    steps: float = 0.0,  # round logits to multiples of this, so that there are ties
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, SampleBatch]:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=random) * spread
    if steps:
        logits = (logits / steps).round() * steps

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=device)

    batch = SampleBatch(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random).to(device),
        position=torch.randint(0, 10_000, (rows,), generator=random).to(device),
        all_greedy=False,
        any_filter=False,
    )
    batch.all_greedy = bool((batch.temperature < 1e-5).all())
    batch.any_filter = bool(((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)).any())
    return logits.to(device), batch
