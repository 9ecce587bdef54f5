"""Trees of drafts in plain torch: how the device grows them, what a step that verifies them computes, what it keeps.

The shape of a tree is fixed: so many nodes of every depth, sorted by it. Which node continues which is known on the
device alone. A node's key and value go where its number says, behind the root's; those of the path that held are moved
together at the end of the step. As with chains noise is keyed by position, so what holds is what the plain path would
have sampled.
"""

from __future__ import annotations

import torch

from tokenmill.ops.noise import TOKEN_OFFSET, gumbel, key, mix
from tokenmill.ops.registry import Implementation
from tokenmill.ops.types import DecodeInputs, DecodeTables, KeptPaths, TreeInputs, TreeNoise, TreeTables

GREEDY = 1e-5  # temperatures below are none


def tree_inputs(
    tables: DecodeTables,
    trees: TreeTables,
    # Of every row: itself, its start, first and end of its drafts among the proposed, whether it has slack, and how
    # many of these drafts it verifies as a chain, at the first places of every depth; -1: it verifies its tree.
    told: torch.Tensor,  # [6, rows] int64
    proposed: torch.Tensor,  # [at least one] int64
) -> TreeInputs:
    """Find out where rows stand, and what their trees look like. Nothing is written: siblings share positions."""
    rows, starts, first, end, slack, count = told[:, :, None]  # [rows, 1] each
    grown = count < 0
    nodes, fanout = trees.tokens.shape[1], trees.fanout
    number = torch.arange(nodes + 1, device=told.device)[None, :]
    depth = (number + fanout - 1) // fanout
    ahead = torch.where(slack > 0, tables.lengths[rows] - 1 - starts, 0)
    base = starts + ahead
    at = first + ahead + depth - 1
    chained = (number > 0) & ((number - 1) % fanout == 0) & (depth <= count) & (at < end)
    chain = proposed[at.clamp(0, len(proposed) - 1)]
    chain = torch.where(chain <= tables.on_device, tables.drafts[rows, (depth - 1).clamp_min(0)], chain)
    before = (number - 1).clamp_min(0)
    is_node = chained | (grown & (number > 0))
    tokens = torch.where(grown, trees.tokens[rows, before], chain)
    parents = torch.where(grown, trees.parents[rows, before], (number - fanout).clamp_min(0))
    live = (rows != tables.scratch_row) & ((number == 0) | is_node)
    ids = torch.where(number > 0, torch.where(is_node, tokens, 0).int(), tables.tokens[rows, base])
    positions = base + torch.where(live, depth, 0)  # what is nobody's has an angle, too
    place = base + torch.where(live, number, 0)
    blocks = tables.block_tables[rows, place // tables.block_size].long()
    slots = torch.where(live, blocks * tables.block_size + place % tables.block_size, -1)
    context = torch.where(live, place + 1, 0)
    above = torch.where(is_node, parents, 0)
    seen, on_path = 1 << number, above
    for _ in range(nodes // fanout):
        seen = seen | (1 << on_path)
        on_path = above.gather(1, on_path)
    whole = rows.expand_as(ids).int(), (is_node & live).to(torch.int8)
    entries = DecodeInputs(*(one.reshape(-1) for one in (ids, positions, slots, context.int(), *whole)))
    parents = torch.where(is_node & live, parents, -1).int()
    return TreeInputs(entries, parents.view(-1), torch.where(live, seen, 0).int().view(-1))


def keep_tree(
    tables: DecodeTables,
    rows: torch.Tensor,  # [rows] int64
    inputs: TreeInputs,
    sampled: torch.Tensor,  # [n] int64
    fanout: int,
    rejected: int,
) -> KeptPaths:
    """Follow from the root what was sampled, and write it behind what is known."""
    count = len(rows)
    said, ids, parents = (one.view(count, -1) for one in (sampled, inputs.entries.ids, inputs.parents))
    width = said.shape[1]
    base = inputs.entries.positions.view(count, -1)[:, :1]
    at = torch.zeros_like(base)
    goes_on, held = torch.ones_like(at, dtype=torch.bool), torch.zeros_like(at)
    order, nodes, tokens = [at], [], [said[:, :1]]
    preferred = torch.arange(fanout, 0, -1, device=rows.device)
    for first in range(1, width, fanout):
        fits = parents[:, first : first + fanout] == at
        fits = fits & (ids[:, first : first + fanout] == said.gather(1, at)) & goes_on
        goes_on = fits.any(1, keepdim=True)
        at = torch.where(goes_on, first + (fits * preferred).argmax(1, keepdim=True), at)
        held = held + goes_on
        order.append(at)
        nodes.append(torch.where(goes_on, at, 0))
        tokens.append(torch.where(goes_on, said.gather(1, at), rejected))
    path, new = torch.cat(order, 1), torch.cat(tokens, 1)
    number = torch.arange(path.shape[1], device=rows.device)[None, :]
    inside = number <= held
    where = torch.where(inside, rows[:, None], tables.scratch_row)
    tables.tokens[where, torch.where(inside, base + 1 + number, 0)] = new.clamp_min(0).int()
    positions = (base + 1 + held).view(-1)
    tables.lengths[rows] = positions + 1
    entries = width * torch.arange(count, device=rows.device)[:, None]
    return KeptPaths(
        tokens=new.reshape(-1),
        order=(entries + path).reshape(-1),
        nodes=torch.cat(nodes, 1),
        last=(entries + at).view(-1),
        newest=said.gather(1, at).clamp_min(0).view(-1),
        positions=positions,
    )


def move_kv(
    arena: torch.Tensor,  # [layers, parts, blocks, block_size, kv_heads, width]
    scales: torch.Tensor | None,  # [layers, parts, blocks, block_size, kv_heads, n], beside codes
    tables: DecodeTables,
    rows: torch.Tensor,  # [rows] int64
    kept: KeptPaths,
) -> None:
    """Keys and values of the path that held, from the places of its nodes to those of their positions."""
    depths = kept.nodes.shape[1]
    held = (kept.nodes > 0).sum(1, keepdim=True)
    base = kept.positions[:, None] - 1 - held
    depth = torch.arange(1, depths + 1, device=rows.device)[None, :]
    places = base + kept.nodes, base + torch.where(kept.nodes > 0, depth, 0)  # what did not hold is the root on itself
    (block, offset), target = (
        (tables.block_tables[rows[:, None], place // tables.block_size].long(), place % tables.block_size)
        for place in places
    )
    for cache in (arena, scales):
        if cache is not None:
            raw = cache.view(torch.uint8)
            raw[:, :, target[0], target[1]] = raw[:, :, block, offset]


def grow_tree(
    logits: torch.Tensor,  # [rows * parents, draft vocabulary]
    names: torch.Tensor,  # [draft vocabulary] int64: tokens of the target
    states: torch.Tensor,  # [rows * parents, width]: what the parents left
    scores: torch.Tensor | None,  # [rows * parents] float32: logarithms of their chances; None: they are roots
    trees: TreeTables,
    drafts: torch.Tensor,  # [table rows, depths] int64
    rows: torch.Tensor,  # [rows] int64: table rows
    depth: int,  # of the nodes that are made, from 0 on
    noise: TreeNoise | None = None,  # None: all rows are greedy
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # tokens [rows * fanout] int64, their parents' states, scores
    """The likeliest nodes of a depth over all parents. Behind the last depth the likeliest path becomes the chain."""
    count, fanout = len(rows), trees.fanout
    parents = len(logits) // count
    value = torch.nan_to_num(logits.float(), nan=-torch.inf, neginf=-torch.inf)
    if noise is not None:
        heat = noise.temperature.repeat_interleave(parents)[:, None]
        keys = key(noise.seed, noise.positions + 1 + depth).repeat_interleave(parents)[:, None]
        warm = value / heat.clamp_min(GREEDY) + gumbel(mix(keys ^ mix(names + TOKEN_OFFSET)[None, :]))
        value = torch.where(heat < GREEDY, value, warm)
    chance = value.log_softmax(-1)
    if scores is not None:
        chance = chance + scores[:, None]
    best, place = chance.view(count, -1).topk(fanout)
    parent, tokens = place // logits.shape[1], names[place % logits.shape[1]]
    here = slice(depth * fanout, (depth + 1) * fanout)
    trees.tokens[rows, here] = tokens
    trees.parents[rows, here] = parent + (1 + (depth - 1) * fanout if depth else 0)
    whole = (torch.arange(count, device=rows.device)[:, None] * parents + parent).view(-1)
    if here.stop == trees.tokens.shape[1]:
        node = torch.full_like(rows, here.start + 1)
        for above in range(depth, -1, -1):
            drafts[rows, above] = trees.tokens[rows, node - 1]
            node = trees.parents[rows, node - 1]
    return tokens.reshape(-1), states[whole], best.reshape(-1)


IMPLEMENTATIONS = tuple(
    Implementation(op=fn.__name__, name="reference", fn=fn, capture_safe=True, batch_invariant=True)
    for fn in (tree_inputs, keep_tree, move_kv, grow_tree)
)
