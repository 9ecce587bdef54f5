"""The ops of a decoder layer on the native library: argument structs filled from tensors."""

from __future__ import annotations

import torch

from tokenmill.ops import cpu
from tokenmill.ops.kv_forms import KVScales
from tokenmill.ops.native.call import as_rows, check_float32, run
from tokenmill.ops.native.recording import NotRecordableError, new, row_count
from tokenmill.ops.native.structs import (
    AttentionArgs,
    ChooseArgs,
    DecodeInputArgs,
    EmbedArgs,
    NormArgs,
    PickArgs,
    RopeArgs,
    storage_of,
)
from tokenmill.ops.types import AttentionBatch, Mask, SampleBatch


def rms_norm(
    x: torch.Tensor,  # [..., dim]
    weight: torch.Tensor,  # [dim]
    eps: float,
) -> torch.Tensor:
    check_float32(x)
    rows = as_rows(x)
    out = new(tuple(x.shape))
    dim = x.shape[-1]
    run(NormArgs(
        x=rows, weight=weight, out=out, rows=row_count(rows.shape[0]), dim=dim, x_stride=rows.stride(0),
        out_stride=dim, weight_storage=storage_of(weight), eps=eps,
    ))  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor,  # [tokens, dim], overwritten by the norm
    residual: torch.Tensor,  # [tokens, dim], overwritten by the sum
    weight: torch.Tensor,  # [dim]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_float32(x, residual)
    run(NormArgs(
        x=x, residual=residual, weight=weight, total=residual, out=x, rows=row_count(x.shape[0]), dim=x.shape[1],
        x_stride=x.stride(0), residual_stride=residual.stride(0), total_stride=residual.stride(0),
        out_stride=x.stride(0), weight_storage=storage_of(weight), eps=eps,
    ))  # fmt: skip
    return x, residual


def rope_kv_write(
    q: torch.Tensor,  # [tokens, heads, dim], rotated in place
    k: torch.Tensor,  # [tokens, kv_heads, dim]
    v: torch.Tensor | None,  # [tokens, kv_heads, v_dim]
    cos_sin: torch.Tensor,  # [max_positions, rot_dim] float32
    positions: torch.Tensor,  # [tokens]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor | None,  # [blocks, block_size, kv_heads, v_dim]
    slots: torch.Tensor,  # [tokens]
    q_norm: torch.Tensor | None = None,  # [dim]
    k_norm: torch.Tensor | None = None,  # [dim]
    eps: float = 0.0,
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> None:
    check_float32(q, k, *([] if v is None else [v]))
    positions, slots = positions.long(), slots.long()
    args = RopeArgs(
        q=q, k=k, table=cos_sin, positions=positions, slots=slots, k_cache=k_cache,
        tokens=row_count(q.shape[0]), heads=q.shape[1], kv_heads=k.shape[1], dim=q.shape[2],
        rotated=cos_sin.shape[1], block_size=k_cache.shape[1],
        q_token=q.stride(0), q_head=q.stride(1), k_token=k.stride(0), k_head=k.stride(1),
        k_block=k_cache.stride(0), k_slot=k_cache.stride(1), k_cache_head=k_cache.stride(2),
        cache_storage=storage_of(k_cache), eps=eps,
    )  # fmt: skip
    if v is not None and v_cache is not None:
        args.v, args.v_cache, args.v_dim = v.data_ptr(), v_cache.data_ptr(), v.shape[2]
        args.v_token, args.v_head = v.stride(0), v.stride(1)
        args.v_block, args.v_slot, args.v_cache_head = v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)
    if q_norm is not None and k_norm is not None:
        args.q_norm, args.k_norm, args.norm_storage = q_norm.data_ptr(), k_norm.data_ptr(), storage_of(q_norm)
    _set_scales(args, scales)
    run(args)


def rope(
    q: torch.Tensor,  # [tokens, heads, dim], rotated in place
    cos_sin: torch.Tensor,  # [max_positions, rot_dim] float32
    positions: torch.Tensor,  # [tokens]
) -> None:
    check_float32(q)
    positions = positions.long()
    run(RopeArgs(
        q=q, table=cos_sin, positions=positions, tokens=row_count(q.shape[0]), heads=q.shape[1], dim=q.shape[2],
        rotated=cos_sin.shape[1], q_token=q.stride(0), q_head=q.stride(1),
    ))  # fmt: skip


def attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]; may be a strided view of k_cache
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> torch.Tensor:  # [tokens, heads, v_dim]
    check_float32(q)
    tokens, heads, k_dim = q.shape
    v_dim = v_cache.shape[3]
    out = new((tokens, heads, v_dim))
    rows = batch.rows.shape[0]
    args = AttentionArgs(
        q=q, k=k_cache, v=v_cache, out=out,
        rows=batch.rows, q_start=batch.q_start, context=batch.context, tables=batch.block_tables,
        heads=heads, kv_heads=k_cache.shape[2], k_dim=k_dim, v_dim=v_dim, block_size=k_cache.shape[1],
        q_token=q.stride(0), q_head=q.stride(1), out_token=heads * v_dim, out_head=v_dim,
        k_block=k_cache.stride(0), k_slot=k_cache.stride(1), k_head=k_cache.stride(2),
        v_block=v_cache.stride(0), v_slot=v_cache.stride(1), v_head=v_cache.stride(2),
        table_row=batch.block_tables.stride(0), window=mask.window or 0, cache_storage=storage_of(k_cache),
        softcap=mask.softcap or 0.0, scale=scale,
    )  # fmt: skip
    if batch.counts is not None:
        args.counts, args.n, args.singles = batch.counts.data_ptr(), rows, batch.num_singles
    else:
        args.n, args.singles = row_count(rows), row_count(batch.num_singles if batch.tree is None else 0)
    if batch.tree is not None:
        tree = batch.tree.contiguous()
        args.tree, args.tree_stride = tree.data_ptr(), tree.shape[1]
    _set_scales(args, scales)
    run(args)
    return out


def _set_scales(args: RopeArgs | AttentionArgs, scales: KVScales | None) -> None:
    if scales is not None:
        args.k_scales, args.v_scales = scales.k.data_ptr(), scales.v.data_ptr()
        args.k_scale_block, args.k_scale_slot, args.k_scale_head, _ = scales.k.stride()
        args.v_scale_block, args.v_scale_slot, args.v_scale_head, _ = scales.v.stride()


def sample(
    logits: torch.Tensor,  # [n, vocab]
    batch: SampleBatch,
) -> torch.Tensor:  # [n] int64; -1 where the row's logits hold a NaN or no finite value
    """Greedy rows are chosen natively; a batch with any other is the torch implementation's."""
    if not batch.all_greedy or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return cpu.sample(logits, batch)
    out = new((logits.shape[0],), torch.int64)
    rows, vocab = logits.shape
    run(ChooseArgs(logits=logits, out=out, rows=row_count(rows), vocab=vocab, stride=logits.stride(0)))
    return out


def embed(
    ids: torch.Tensor,  # [tokens]
    table: torch.Tensor,  # [vocab, dim] float32, float16 or bfloat16
    scale: float = 1.0,
) -> torch.Tensor:  # [tokens, dim] float32
    ids = ids.long()
    vocab, dim = table.shape
    out = new((ids.shape[0], dim))
    run(EmbedArgs(
        ids=ids, table=table, out=out, rows=row_count(ids.shape[0]), vocab=vocab, dim=dim, out_stride=dim,
        table_storage=storage_of(table), scale=scale,
    ))  # fmt: skip
    return out


def decode_inputs(
    rows: torch.Tensor,  # [n] int64
    starts: torch.Tensor,  # [n] int64: position of each row's token
    tokens: torch.Tensor,  # [table rows, max_len] int32
    block_tables: torch.Tensor,  # [table rows, max_blocks] int32
    block_size: int,
    ids: torch.Tensor,  # [n] int64, written
    slots: torch.Tensor,  # [n] int64, written
    table_rows: torch.Tensor,  # [n] int32, written
    context: torch.Tensor,  # [n] int32, written
) -> None:
    """What a decode step reads, gathered from the tables."""
    run(DecodeInputArgs(
        rows=rows, starts=starts, tokens=tokens, blocks=block_tables, ids=ids, slots=slots, table_rows=table_rows,
        context=context, n=row_count(rows.shape[0]), token_stride=tokens.stride(0),
        block_stride=block_tables.stride(0), block_size=block_size,
    ))  # fmt: skip


def choose_into(
    out: torch.Tensor,  # [n] int64, written
    logits: torch.Tensor,  # [n, vocab] float32
    on: torch.Tensor,  # [1] int64: where it is 0 nothing happens
    rows: torch.Tensor,  # [n] int64
    starts: torch.Tensor,  # [n] int64
    tokens: torch.Tensor,  # [table rows, max_len] int32: written at the position after start
) -> None:
    """The likeliest tokens, also written to where the next step finds them."""
    if logits.dtype != torch.float32:
        raise NotRecordableError(f"logits are {logits.dtype}")
    run(ChooseArgs(
        logits=logits, out=out, on=on, table_row=rows, starts=starts, tokens=tokens, rows=row_count(logits.shape[0]),
        vocab=logits.shape[1], stride=logits.stride(0), token_stride=tokens.stride(0),
    ))  # fmt: skip


def best_into(
    bests: torch.Tensor,  # [n, 2] int64, written: a value by its bits, and a token
    logits: torch.Tensor,  # [n, part of the vocabulary] float32
    on: torch.Tensor,  # [1] int64: where it is 0 nothing happens
    first: int,  # the token of the first logit
) -> None:
    """The likeliest of the tokens that a rank has, for `pick_into`."""
    if logits.dtype != torch.float32:
        raise NotRecordableError(f"logits are {logits.dtype}")
    run(ChooseArgs(
        logits=logits, on=on, bests=bests, rows=row_count(logits.shape[0]), vocab=logits.shape[1],
        stride=logits.stride(0), first=first,
    ))  # fmt: skip


def pick_into(
    out: torch.Tensor,  # [n] int64, written
    bests: torch.Tensor,  # [ranks, n, 2] int64, as `best_into` leaves them
    on: torch.Tensor,  # these as of `choose_into`
    rows: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """The likeliest of all ranks' tokens."""
    run(PickArgs(
        bests=bests, out=out, on=on, table_row=rows, starts=starts, tokens=tokens, rows=row_count(bests.shape[1]),
        ranks=bests.shape[0], rank_stride=bests.stride(0) // 2, token_stride=tokens.stride(0),
    ))  # fmt: skip
