"""What stands around the forward pass of a step that verifies trees: its inputs, what held, where that is cached."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import quick_launch, start_next, wait_for_previous
from tokenmill.ops.types import DecodeInputs, DecodeTables, KeptPaths, TreeInputs, TreeTables

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by their bytes


def tree_inputs(
    tables: DecodeTables,
    trees: TreeTables,
    told: torch.Tensor,  # [6, rows] int64, as in reference_tree.py
    proposed: torch.Tensor,  # [at least one] int64
) -> TreeInputs:
    rows, nodes = told.shape[1], trees.tokens.shape[1]
    n, device = rows * (nodes + 1), told.device
    ids, context, rows32, parents, tails = torch.empty(5, n, dtype=torch.int32, device=device).unbind()
    slots, positions = torch.empty(2, n, dtype=torch.int64, device=device).unbind()
    is_draft = torch.empty(n, dtype=torch.int8, device=device)
    _inputs_kernel[(rows,)](
        tables.tokens, tables.block_tables, tables.lengths, tables.drafts, trees.tokens, trees.parents, told, proposed,
        ids, context, rows32, slots, positions, is_draft, parents, tails,
        rows, len(proposed), tables.tokens.stride(0), tables.block_tables.stride(0), tables.scratch_row,
        tables.block_size,
        NODES=nodes, FANOUT=trees.fanout, DRAFTED=tables.drafts.shape[1], ON_DEVICE=tables.on_device,
        BLOCK=power_of_two(nodes + 1), num_warps=1,
    )  # fmt: skip
    return TreeInputs(DecodeInputs(ids, positions, slots, context, rows32, is_draft), parents, tails)


@quick_launch
@triton.jit(
    do_not_specialize=["rows", "num_proposed"],
    do_not_specialize_on_alignment=[
        "told", "proposed", "ids", "context", "rows32", "slots", "positions", "is_draft", "parents", "tails",
    ],
)  # fmt: skip
def _inputs_kernel(
    tokens,  # [table rows, width] int32
    block_tables,  # [table rows, blocks] int32
    lengths,  # [table rows] int64
    device_drafts,  # [table rows, DRAFTED] int64
    tree_tokens,  # [table rows, NODES] int64
    tree_parents,  # [table rows, NODES] int64
    told,  # [6, rows]
    proposed,  # [num_proposed]
    ids,  # [rows, 1 + NODES], and the other results
    context,
    rows32,
    slots,
    positions,
    is_draft,
    parents,
    tails,
    rows,
    num_proposed,
    token_stride,
    table_stride,
    scratch_row,
    block_size,
    NODES: tl.constexpr,
    FANOUT: tl.constexpr,
    DRAFTED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(0)
    row = tl.load(told + entry)
    base = tl.load(told + rows + entry)
    first = tl.load(told + 2 * rows + entry)
    end = tl.load(told + 3 * rows + entry)
    count = tl.load(told + 5 * rows + entry)
    grown = count < 0
    ahead = tl.where(tl.load(told + 4 * rows + entry) > 0, tl.load(lengths + row) - 1 - base, 0)
    base += ahead
    number = tl.arange(0, BLOCK)
    inside = number <= NODES
    depth = (number + FANOUT - 1) // FANOUT
    follows = inside & (number > 0)
    at = first + ahead + depth - 1
    chained = follows & ((number - 1) % FANOUT == 0) & (depth <= count) & (at < end)
    at = tl.minimum(tl.maximum(at, 0), num_proposed - 1)
    chain = tl.load(proposed + at, mask=chained, other=0)
    kept = tl.load(device_drafts + row * DRAFTED + tl.maximum(depth - 1, 0), mask=chained, other=0)
    chain = tl.where(chain <= ON_DEVICE, kept, chain)
    before = row * NODES + tl.maximum(number - 1, 0)
    tree = tl.load(tree_tokens + before, mask=follows & grown, other=0)
    parent = tl.load(tree_parents + before, mask=follows & grown, other=0).to(tl.int32)
    parent = tl.where(grown, parent, tl.maximum(number - FANOUT, 0))
    is_node = tl.where(grown, follows, chained) & (row != scratch_row)
    live = is_node | ((number == 0) & (row != scratch_row))
    known = tl.load(tokens + row * token_stride + base)
    draft = tl.where(is_node, tl.where(grown, tree, chain), 0).to(tl.int32)
    place = base + tl.where(live, number, 0)
    block = tl.load(block_tables + row * table_stride + place // block_size, mask=inside, other=0).to(tl.int64)
    seen = 1 << number
    on_path = tl.where(is_node, parent, 0)
    for _ in tl.static_range(NODES // FANOUT):
        seen = seen | (1 << on_path)
        goes_on = is_node & (on_path > 0)
        above = tl.load(tree_parents + row * NODES + tl.maximum(on_path - 1, 0), mask=goes_on & grown, other=0)
        above = tl.where(grown, above.to(tl.int32), tl.maximum(on_path - FANOUT, 0))
        on_path = tl.where(goes_on, above, 0)
    out = entry * (NODES + 1) + number
    tl.store(ids + out, tl.where(number > 0, draft, known), mask=inside)
    tl.store(context + out, tl.where(live, place + 1, 0).to(tl.int32), mask=inside)
    tl.store(rows32 + out, (row + tl.zeros_like(number)).to(tl.int32), mask=inside)
    tl.store(slots + out, tl.where(live, block * block_size + place % block_size, -1), mask=inside)
    tl.store(positions + out, base + tl.where(live, depth, 0), mask=inside)
    tl.store(is_draft + out, is_node.to(tl.int8), mask=inside)
    tl.store(parents + out, tl.where(is_node, parent, -1), mask=inside)
    tl.store(tails + out, tl.where(live, seen, 0), mask=inside)


def keep_tree(
    tables: DecodeTables,
    rows: torch.Tensor,  # [rows] int64
    inputs: TreeInputs,
    sampled: torch.Tensor,  # [n] int64
    fanout: int,
    rejected: int,
) -> KeptPaths:
    count, width = len(rows), len(sampled) // len(rows)
    depths = (width - 1) // fanout
    tokens, order = torch.empty(2, count * (depths + 1), dtype=torch.int64, device=rows.device).unbind()
    nodes = torch.empty(count, depths, dtype=torch.int64, device=rows.device)
    last, newest, positions = torch.empty(3, count, dtype=torch.int64, device=rows.device).unbind()
    _keep_kernel[(count,)](
        tables.tokens, tables.lengths, rows, inputs.entries.positions, inputs.entries.ids, inputs.parents, sampled,
        tokens, order, nodes, last, newest, positions, tables.tokens.stride(0), rejected,
        WIDTH=width, FANOUT=fanout, BLOCK=power_of_two(width), num_warps=1,
    )  # fmt: skip
    return KeptPaths(tokens, order, nodes, last, newest, positions)


@quick_launch
@triton.jit(
    do_not_specialize_on_alignment=[
        "rows", "positions", "ids", "parents", "sampled", "kept", "order", "nodes", "last", "newest", "at_positions",
    ],
)  # fmt: skip
def _keep_kernel(
    tokens,  # [table rows, width] int32
    lengths,  # [table rows] int64
    rows,  # [rows]
    positions,  # [rows, WIDTH]
    ids,  # [rows, WIDTH]
    parents,  # [rows, WIDTH]
    sampled,  # [rows, WIDTH]
    kept,  # [rows, 1 + depths], and the other results
    order,
    nodes,
    last,
    newest,
    at_positions,
    token_stride,
    rejected,
    WIDTH: tl.constexpr,
    FANOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    DEPTHS: tl.constexpr = (WIDTH - 1) // FANOUT
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    first = entry * WIDTH
    base = tl.load(positions + first)
    number = tl.arange(0, BLOCK)
    inside = number < WIDTH
    token = tl.load(ids + first + number, mask=inside, other=-1)
    parent = tl.load(parents + first + number, mask=inside, other=-1)
    said = tl.load(sampled + first)
    known = tokens + row * token_stride + base + 1
    tl.store(known, tl.maximum(said, 0).to(tl.int32))
    tl.store(kept + entry * (DEPTHS + 1), said)
    tl.store(order + entry * (DEPTHS + 1), first)
    at = tl.zeros_like(tl.max(token, 0))
    held = tl.zeros_like(at)
    for depth in tl.static_range(DEPTHS):
        of_depth = (number > depth * FANOUT) & (number <= (depth + 1) * FANOUT)
        fits = of_depth & (parent == at) & (token == said) & (held == depth)
        child = tl.min(tl.where(fits, number, BLOCK), 0)
        found = child < BLOCK
        at = tl.where(found, child, at)
        held += found.to(tl.int32)
        said = tl.where(found, tl.load(sampled + first + at), said)
        place = entry * (DEPTHS + 1) + depth + 1
        tl.store(known + depth + 1, tl.maximum(said, 0).to(tl.int32), mask=found)
        tl.store(kept + place, tl.where(found, said, rejected))
        tl.store(order + place, first + at)
        tl.store(nodes + entry * DEPTHS + depth, tl.where(found, child, 0).to(tl.int64))
    tl.store(lengths + row, base + held + 2)
    tl.store(last + entry, first + at)
    tl.store(newest + entry, tl.maximum(said, 0))
    tl.store(at_positions + entry, base + held + 1)


def move_kv(
    arena: torch.Tensor,  # [layers, parts, blocks, block_size, kv_heads, width]
    scales: torch.Tensor | None,  # [layers, parts, blocks, block_size, kv_heads, n], beside codes
    tables: DecodeTables,
    rows: torch.Tensor,  # [rows] int64
    kept: KeptPaths,
) -> None:
    for cache in (arena, scales):
        if cache is None:
            continue
        layers, parts, blocks, block_size, heads, width = cache.shape
        size = heads * width * cache.element_size()
        word = next(bytes for bytes in (4, 2, 1) if size % bytes == 0)
        words = cache.view(layers * parts, blocks, block_size, heads * width).view(_WORDS[word])
        depths = kept.nodes.shape[1]
        _move_kernel[(len(rows), layers * parts)](
            words, tables.block_tables, rows, kept.nodes, kept.positions, words.stride(0),
            tables.block_tables.stride(0), tables.block_size,
            DEPTHS=depths, DEPTH_BLOCK=power_of_two(depths), WIDTH=size // word, BLOCK=power_of_two(size // word),
            num_warps=4 if size <= 4096 else 8,
        )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["stride_part"], do_not_specialize_on_alignment=["rows", "nodes", "positions"])
def _move_kernel(
    cache,  # [parts, blocks, block_size, WIDTH]
    block_tables,  # [table rows, blocks] int32
    rows,  # [rows]
    nodes,  # [rows, DEPTHS]
    positions,  # [rows]: of the newest tokens, which have no key yet
    stride_part,
    table_stride,
    block_size,
    DEPTHS: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(0).to(tl.int64)
    table = block_tables + tl.load(rows + entry) * table_stride
    depth = tl.arange(0, DEPTH_BLOCK)
    node = tl.load(nodes + entry * DEPTHS + depth, mask=depth < DEPTHS, other=0)
    held = node > 0
    base = tl.load(positions + entry) - 1 - tl.sum(held.to(tl.int64), 0)
    moves = held & (node != depth + 1)
    source = base + node
    target = base + depth + 1
    block = tl.load(table + source // block_size, mask=moves, other=0).to(tl.int64)
    source = block * block_size + source % block_size
    block = tl.load(table + target // block_size, mask=moves, other=0).to(tl.int64)
    target = block * block_size + target % block_size
    cache += tl.program_id(1).to(tl.int64) * stride_part
    column = tl.arange(0, BLOCK)
    mask = moves[:, None] & (column < WIDTH)[None, :]
    value = tl.load(cache + source[:, None] * WIDTH + column[None, :], mask=mask, other=0)
    tl.debug_barrier()  # a place may be one's target and another one's source: all are read before any is written
    tl.store(cache + target[:, None] * WIDTH + column[None, :], value, mask=mask)


IMPLEMENTATIONS = tuple(declare(fn) for fn in (tree_inputs, keep_tree, move_kv))
