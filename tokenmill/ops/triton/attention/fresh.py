"""Attention for long chunks: their keys and values are gathered out of the cache once, then streamed in whole tiles."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.ops.device_facts import HOPPER_ATTENTION, multiprocessors, reads_shared, room, usable
from tokenmill.ops.kv_forms import KVScales, channels
from tokenmill.ops.triton.attention.kv_codes import cache_arguments, load_decoded
from tokenmill.ops.triton.attention.paging import load_rows, score_scales
from tokenmill.ops.triton.attention.tile import key_range, query_pairs, store_pairs
from tokenmill.ops.triton.config import Tile, power_of_two
from tokenmill.ops.triton.launch import quick_launch
from tokenmill.ops.triton.numeric import tanh
from tokenmill.ops.types import AttentionBatch, Mask

# Gathering a key costs as much as some 250 (query, head) pairs cost to attend to it, so short chunks do not gain.
LEAST_PAIRS = 1024
SCRATCH_BYTES = 128 << 20  # what gathered keys and values may take; the memory plan counts on it
_GATHER = 64  # keys that one program gathers
_ENTRY = 8  # words of an entry of the tile list


@dataclass(frozen=True)
class Launch:
    """Shape of one attention program, and which kernel runs it."""

    tile: Tile
    hopper: bool = False


def launch_shape(dim: int, device: torch.device) -> Launch | None:
    """`dim`: the head size as a power of two. None: tiles are too large for this device."""
    if dim > 128:
        tile = Tile(128, 64, 8, 2)
        copies = tile.num_stages if reads_shared(device) else tile.num_stages - 1
        fits = 2 * dim * (tile.block_m + 2 * copies * tile.block_n) <= room(device)
        return Launch(tile) if fits else None
    # The kernel of hopper.py reaches 594 TFLOP/s on an H200, the one here 405 (scripts/gpu_prefill.py).
    if dim in (64, 128) and usable(HOPPER_ATTENTION, device):
        return Launch(Tile(128, 128, 8, 2), hopper=True)
    return Launch(Tile(128, 64, 8, 3))


@dataclass(frozen=True)
class FreshPlan:
    """What all layers of a step share: which rows take part, where their keys go, and the lists that kernels read."""

    members: frozenset[int]  # indices of rows
    gather: torch.Tensor  # [n, 4] int32: row, first position, where it goes, its keys
    tiles: torch.Tensor  # [tiles, _ENTRY] int32: first token, count, first position, first pair, where its keys are
    keys: int  # gathered keys, each row's rounded up to whole tiles
    scratch: torch.Tensor  # [2 * kv_heads * keys, dim]: keys, then values, head by head
    rows: Any  # the scratch as a descriptor that tiles are loaded through
    hopper_rows: Any  # the same for the Hopper kernel; None where it is not used
    launch: Launch


def fresh_plan(
    q: torch.Tensor,  # [tokens, heads, dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]
    batch: AttentionBatch,
) -> FreshPlan | None:
    """The plan for the rows that gain from it; None if there are none. Made once per step."""
    kv_heads, key_dim, value_dim = k_cache.shape[2], channels(k_cache), channels(v_cache)
    if q.dtype.itemsize != 2 or key_dim != value_dim or key_dim > 256:
        return None
    name = f"fresh plan of {kv_heads} heads of {key_dim}"  # equal in all layers
    if name not in batch.cache:
        batch.cache[name] = _make_plan(q, kv_heads, max(16, power_of_two(key_dim)), batch)
    plan: FreshPlan | None = batch.cache[name]
    return plan


def fresh_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,  # [tokens, heads, v_dim]
    batch: AttentionBatch,
    plan: FreshPlan,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,
) -> None:
    kv_heads, dim = k_cache.shape[2], channels(k_cache)
    block = plan.scratch.shape[1]
    cache = cache_arguments(k_cache, v_cache, scales)
    _gather_kernel[(plan.gather.shape[0], kv_heads, 2)](
        *cache.tensors, plan.scratch, plan.gather, batch.rows, batch.block_tables,
        *cache.strides, batch.block_tables.stride(0), plan.keys,
        BLOCK_SIZE=k_cache.shape[1], DIM=dim, DIM_BLOCK=block, KEYS=_GATHER, FORM=cache.constants["FORM"], num_warps=4,
    )  # fmt: skip
    cap_scale, score_scale = score_scales(scale, mask.softcap)
    tile, items = plan.launch.tile, kv_heads * plan.tiles.shape[0]
    if plan.launch.hopper and mask.window is None and mask.softcap is None:
        from tokenmill.ops.triton.attention.hopper import hopper_kernel  # in Gluon, which not every Triton has

        hopper_kernel[(min(items, multiprocessors(q.device)),)](
            q, plan.hopper_rows, out, plan.tiles, *q.stride()[:2], *out.stride()[:2],
            kv_heads, plan.keys, items, score_scale, GROUP=q.shape[1] // kv_heads, DIM=dim, DIM_BLOCK=block,
            BLOCK_N=tile.block_n, STAGES=tile.num_stages, num_warps=4,
        )  # fmt: skip
        return
    _fresh_kernel[(items,)](
        q, plan.rows, out, plan.tiles, *q.stride()[:2], *out.stride()[:2],
        kv_heads, plan.keys, mask.window or 0, cap_scale, score_scale,
        GROUP=q.shape[1] // kv_heads, DIM=dim, DIM_BLOCK=block, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        WINDOWED=mask.window is not None, SOFTCAP=mask.softcap is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _make_plan(q: torch.Tensor, kv_heads: int, dim: int, batch: AttentionBatch) -> FreshPlan | None:
    launch = launch_shape(dim, q.device)
    if launch is None:
        return None
    group = q.shape[1] // kv_heads
    room = SCRATCH_BYTES // (2 * kv_heads * dim * q.dtype.itemsize)
    members, places, keys = _members(batch, group, launch.tile.block_n, room)
    if not members:
        return None
    gather, tiles = _host_lists(batch, members, places, group, launch.tile)
    both = torch.from_numpy(np.concatenate([gather.ravel(), tiles.ravel()]))
    both = both.pin_memory().to(q.device, non_blocking=True) if q.device.type == "cuda" else both
    scratch = torch.empty(2 * kv_heads * keys, dim, dtype=q.dtype, device=q.device)
    block, hopper_rows = [launch.tile.block_n, dim], None
    if launch.hopper:
        from tokenmill.ops.triton.gluon_names import tiled

        hopper_rows = tiled(scratch, block)
    return FreshPlan(
        members=frozenset(members),
        gather=both[: gather.size].view(-1, 4),
        tiles=both[gather.size :].view(-1, _ENTRY),
        keys=keys,
        scratch=scratch,
        rows=TensorDescriptor.from_tensor(scratch, block),
        hopper_rows=hopper_rows,
        launch=launch,
    )


def _members(batch: AttentionBatch, group: int, block_n: int, room: int) -> tuple[list[int], list[int], int]:
    """Rows with enough queries for the gathering to pay off, as long as there is room; where their keys go."""
    members: list[int] = []
    places: list[int] = []
    keys = 0
    for i in range(batch.num_singles, len(batch.host_counts)):
        size = -(-batch.host_context[i] // block_n) * block_n
        if batch.host_counts[i] * group >= LEAST_PAIRS and keys + size <= room:
            members.append(i)
            places.append(keys)
            keys += size
    return members, places, keys


def _host_lists(
    batch: AttentionBatch, members: list[int], places: list[int], group: int, tile: Tile
) -> tuple[np.ndarray, np.ndarray]:
    """FreshPlan.gather and FreshPlan.tiles; the tiles with most keys first, so that the last ones to end are short."""
    count = np.asarray([batch.host_counts[i] for i in members], dtype=np.int64)
    context = np.asarray([batch.host_context[i] for i in members], dtype=np.int64)
    first_token = np.concatenate([[0], np.cumsum(batch.host_counts)])[members]
    place = np.asarray(places, dtype=np.int64)

    owner, number = numbered(-(-context // tile.block_n) * tile.block_n // _GATHER)
    gather = np.stack(
        [np.asarray(members)[owner], number * _GATHER, place[owner] + number * _GATHER, context[owner]], axis=1
    )

    owner, number = numbered(-(-count * group // tile.block_m))
    start = context - count
    first_pair = number * tile.block_m
    order = np.argsort(-(start[owner] + first_pair // group), kind="stable")
    columns = [first_token[owner], count[owner], start[owner], first_pair, place[owner]]
    columns += [np.zeros_like(owner)] * (_ENTRY - len(columns))
    return gather.astype(np.int32), np.stack(columns, axis=1)[order].astype(np.int32)


def numbered(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For groups of these sizes: the group of each element, and its number in the group."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return owner, np.arange(len(owner)) - np.repeat(sizes.cumsum() - sizes, sizes)


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(do_not_specialize=["keys"], do_not_specialize_on_alignment=["gather", "rows", "tables"])
def _gather_kernel(
    k_cache,  # [blocks, BLOCK_SIZE, kv_heads, DIM]
    v_cache,  # [blocks, BLOCK_SIZE, kv_heads, DIM]
    k_scales,  # [blocks, BLOCK_SIZE, kv_heads, n], where the cache holds codes, in words of int32
    v_scales,
    scratch,  # [2, kv_heads, keys, DIM_BLOCK]
    gather,  # [n, 4]: row, first position, where it goes, the row's keys
    rows,  # [rows]
    tables,  # [max_rows, max_blocks]
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_table,
    keys,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    FORM: tl.constexpr,
):
    entry = gather + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + tl.load(entry)).to(tl.int64)
    position = tl.load(entry + 1) + tl.arange(0, KEYS)
    place = tl.load(entry + 2) + tl.arange(0, KEYS)
    # What lies between a row's last key and the end of its last tile becomes zero: it is weighed with zero later,
    # and zero times whatever lay there before need not be zero.
    seen = position < tl.load(entry + 3)
    block = tl.load(tables + row * stride_table + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    slot = (position % BLOCK_SIZE).to(tl.int64)
    target = ((tl.program_id(2) * tl.num_programs(1) + head) * keys + place) * DIM_BLOCK
    if FORM > 0:
        offsets = block * stride_k_block + slot * stride_k_token + head  # of keys and values alike
        if tl.program_id(2) == 0:
            value, column = load_decoded(k_cache, k_scales, offsets, seen, DIM, FORM)
        else:
            value, column = load_decoded(v_cache, v_scales, offsets, seen, DIM, FORM)
        inside = tl.broadcast_to((column < DIM_BLOCK)[None, :], value.shape)
        tl.store(scratch + target[:, None] + column[None, :], value.to(scratch.dtype.element_ty), mask=inside)
    else:
        if tl.program_id(2) == 0:
            offsets = block * stride_k_block + slot * stride_k_token
            value = load_rows(k_cache + head * stride_k_head, offsets, seen, DIM, DIM_BLOCK)
        else:
            offsets = block * stride_v_block + slot * stride_v_token
            value = load_rows(v_cache + head * stride_v_head, offsets, seen, DIM, DIM_BLOCK)
        tl.store(scratch + target[:, None] + tl.arange(0, DIM_BLOCK)[None, :], value.to(scratch.dtype.element_ty))


@quick_launch
@triton.jit(do_not_specialize=["keys", "window"], do_not_specialize_on_alignment=["tiles"])
def _fresh_kernel(
    q,  # [tokens, heads, DIM]
    gathered,  # descriptor of [2 * kv_heads * keys, DIM_BLOCK], in tiles of [BLOCK_N, DIM_BLOCK]
    out,  # [tokens, heads, DIM]
    tiles,  # [tiles, 8]: first token, count, first position, first pair, where the row's keys are
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    kv_heads,
    keys,
    window,
    cap_scale,
    score_scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    kv_head = tl.program_id(0) % kv_heads
    entry = tiles + tl.program_id(0) // kv_heads * 8
    first_token = tl.load(entry)
    count = tl.load(entry + 1)
    before = tl.load(entry + 2)
    first_pair = tl.load(entry + 3)
    k_row = kv_head * keys + tl.load(entry + 4)
    v_row = k_row + kv_heads * keys

    token, live, position, head, offsets = query_pairs(
        first_pair, count, before, first_token, kv_head, stride_q_token, stride_q_head, GROUP, BLOCK_M
    )
    queries = load_rows(q, offsets, live, DIM, DIM_BLOCK)
    _, bounds = key_range(first_pair, count, before, window, GROUP, BLOCK_M, BLOCK_N, WINDOWED)
    acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite, so that a query may see no key of a tile
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        acc, top, total = _scan(
            acc, top, total, bounds[part], bounds[part + 1], queries, gathered, k_row, v_row, position, window,
            cap_scale, score_scale, part != 1, WINDOWED, SOFTCAP, BLOCK_N,
        )  # fmt: skip

    dim = tl.arange(0, DIM_BLOCK)
    store_pairs(out, acc, total, dim, first_token, token, head, live, stride_out_token, stride_out_head, DIM)


@triton.jit
def _scan(
    acc, top, total, low, high, queries, gathered,
    k_row,  # where the row's keys begin
    v_row,
    position,  # [BLOCK_M] of the queries
    window, cap_scale, score_scale,
    MASKED: tl.constexpr,  # whether some query may not see some key of [low, high)
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold the keys [low, high) into the online softmax of every query of the tile."""
    for start in range(low, high, BLOCK_N):
        k = gathered.load([k_row + start, 0])
        scores = tl.dot(queries, tl.trans(k))
        if SOFTCAP:
            scores = tanh(scores * cap_scale)
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible = visible & (key[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        v = gathered.load([v_row + start, 0])
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return acc, top, total
