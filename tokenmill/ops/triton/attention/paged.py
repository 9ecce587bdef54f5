"""Paged attention: rows with one query go to the split decode kernel, the others to the chunked prefill kernel."""

from __future__ import annotations

import torch

from tokenmill.ops.device_facts import FLOAT8, HOPPER_ATTENTION
from tokenmill.ops.kv_forms import KVScales, channels
from tokenmill.ops.triton.attention.decode import decode_attention
from tokenmill.ops.triton.attention.kv_codes import FORMS
from tokenmill.ops.triton.attention.prefill import prefill_attention
from tokenmill.ops.triton.config import MAX_HEAD_DIM, declare
from tokenmill.ops.types import AttentionBatch, Mask


def attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]; may be a strided view of k_cache
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,  # of caches that hold codes
) -> torch.Tensor:  # [tokens, heads, v_dim]
    if batch.tree is not None:
        raise NotImplementedError("the Triton attention has no tree mask; choose the reference attention for trees")
    assert q.stride(2) == k_cache.stride(3) == v_cache.stride(3) == 1
    out = batch.out
    if out is None:
        out = torch.empty(q.shape[0], q.shape[1], channels(v_cache), dtype=q.dtype, device=q.device)
    if batch.num_singles:
        decode_attention(q, k_cache, v_cache, out, batch, mask, scale, scales)
    if batch.num_singles < len(batch.host_counts):
        prefill_attention(q, k_cache, v_cache, out, batch, mask, scale, scales)
    return out


# Batches of singles may be captured in a graph; chunks copy a list of tiles from the host, so they may not.
# The number of splits depends on the whole batch, so a row's last bits do too.
IMPLEMENTATIONS = (
    declare(
        attention,
        head_dims=(1, MAX_HEAD_DIM),
        batch_invariant=False,
        tails=True,
        kv_forms=tuple(FORMS),
        kv_requires={"fp8": FLOAT8},
        features=(HOPPER_ATTENTION,),
    ),
)
