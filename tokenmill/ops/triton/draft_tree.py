"""Grows a tree of drafts by a depth, in two kernels: the best children of every parent, and the best of them all."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.numeric import gumbel, noise_key
from tokenmill.ops.types import TreeNoise, TreeTables

_FEW_BLOCK, _MANY_BLOCK = 2048, 8192  # logits of a program
_MANY = 1 << 16  # of a parent


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
    (n, vocab), count, fanout, device = logits.shape, len(rows), trees.fanout, logits.device
    nodes, width = trees.tokens.shape[1], states.shape[1]
    block = _FEW_BLOCK if vocab <= _MANY else _MANY_BLOCK
    splits, parents = ceil_div(vocab, block), n // count
    values = torch.empty(n, splits, fanout, dtype=torch.float32, device=device)
    places = torch.empty(n, splits, fanout, dtype=torch.int32, device=device)
    stats = torch.empty(n, splits, 2, dtype=torch.float32, device=device)
    heat, seed, positions = (rows,) * 3 if noise is None else (noise.temperature, noise.seed, noise.positions)
    _best_kernel[(n, splits)](
        logits, names, values, places, stats, heat, seed, positions, vocab, logits.stride(0), depth,
        PARENTS=parents, FANOUT=fanout, WARM=noise is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    tokens = torch.empty(count * fanout, dtype=torch.int64, device=device)
    below, reached = states.new_empty(count * fanout, width), values.new_empty(count * fanout)
    _grow_kernel[(count,)](
        values, places, stats, names, states, scores if scores is not None else reached, trees.tokens, trees.parents,
        drafts, rows, tokens, below, reached, splits, depth, width, states.stride(0), drafts.stride(0),
        ROOTS=scores is None, LAST=(depth + 1) * fanout == nodes, PARENTS=parents, FANOUT=fanout, NODES=nodes,
        SPLITS=power_of_two(splits), KIDS=power_of_two(splits * fanout), BEAMS=power_of_two(parents),
        WIDTH=power_of_two(width), num_warps=4,
    )  # fmt: skip
    return tokens, below, reached


@quick_launch
@triton.jit(
    do_not_specialize=["depth"],
    do_not_specialize_on_alignment=["values", "places", "stats", "temperature", "seed", "positions"],
)
def _best_kernel(
    logits,  # [rows * PARENTS, vocab]
    names,  # [vocab]
    values,  # [rows * PARENTS, splits, FANOUT]
    places,  # the same
    stats,  # [rows * PARENTS, splits, 2]: the largest value, and the sum of all relative to it
    temperature,  # [rows]
    seed,  # [rows]
    positions,  # [rows]
    vocab,
    stride_row,
    depth,
    PARENTS: tl.constexpr,
    FANOUT: tl.constexpr,
    WARM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    parent = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocab
    value = tl.load(logits + parent * stride_row + place, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    if WARM:
        row = parent // PARENTS
        heat = tl.load(temperature + row)
        key = noise_key(tl.load(seed + row), tl.load(positions + row) + 1 + depth)
        if heat >= 1e-5:
            value = tl.div_rn(value, heat) + gumbel(key, tl.load(names + place, mask=inside, other=0))
    top = tl.max(value, 0)
    total = tl.sum(tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), 0)
    out = parent * tl.num_programs(1) + tl.program_id(1)
    tl.store(stats + out * 2, top)
    tl.store(stats + out * 2 + 1, total)
    for child in tl.static_range(FANOUT):
        if child > 0:
            top = tl.max(value, 0)
        at = tl.min(tl.where(value == top, place, vocab - 1), 0)
        tl.store(values + out * FANOUT + child, top)
        tl.store(places + out * FANOUT + child, at)
        value = tl.where(place == at, float("-inf"), value)


@quick_launch
@triton.jit(
    do_not_specialize=["splits", "depth"],
    do_not_specialize_on_alignment=["values", "places", "stats", "scores", "rows", "tokens", "reached"],
)
def _grow_kernel(
    values,  # [rows * PARENTS, splits, FANOUT]
    places,
    stats,  # [rows * PARENTS, splits, 2]
    names,  # [vocab]
    states,  # [rows * PARENTS, width]
    scores,  # [rows * PARENTS]; not read of roots
    tree_tokens,  # [table rows, NODES]
    tree_parents,  # [table rows, NODES]
    drafts,  # [table rows, depths]
    rows,  # [rows]
    tokens,  # [rows, FANOUT]
    below,  # [rows, FANOUT, width]
    reached,  # [rows, FANOUT]
    splits,
    depth,
    width,
    stride_state,
    stride_drafts,
    ROOTS: tl.constexpr,
    LAST: tl.constexpr,
    PARENTS: tl.constexpr,
    FANOUT: tl.constexpr,
    NODES: tl.constexpr,
    SPLITS: tl.constexpr,  # and what follows: as powers of two
    KIDS: tl.constexpr,
    BEAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    parent = tl.arange(0, BEAMS)
    split = tl.arange(0, SPLITS)
    known = (parent < PARENTS)[:, None] & (split < splits)[None, :]
    part = (entry * PARENTS + parent)[:, None] * splits + split[None, :]
    tops = tl.load(stats + part * 2, mask=known, other=float("-inf"))
    totals = tl.load(stats + part * 2 + 1, mask=known, other=0.0)
    top = tl.max(tops, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    whole = top + tl.log(tl.sum(totals * tl.exp(tops - top[:, None]), 1))
    kid = tl.arange(0, KIDS)
    shown = (parent < PARENTS)[:, None] & (kid < splits * FANOUT)[None, :]
    candidate = (entry * PARENTS + parent)[:, None] * splits * FANOUT + kid[None, :]
    chance = tl.load(values + candidate, mask=shown, other=float("-inf")) - whole[:, None]
    if not ROOTS:
        chance += tl.load(scores + entry * PARENTS + parent, mask=parent < PARENTS, other=0.0)[:, None]
    chance = tl.where(shown & (chance == chance), chance, float("-inf"))
    number = parent[:, None] * KIDS + kid[None, :]
    column = tl.arange(0, WIDTH)
    for child in tl.static_range(FANOUT):
        best = tl.max(tl.max(chance, 1), 0)
        chosen = tl.min(tl.min(tl.where(chance == best, number, BEAMS * KIDS), 1), 0)
        # Where no chance is a number any parent and any of its children will do.
        beam = tl.minimum(chosen // KIDS, PARENTS - 1)
        offered = (entry * PARENTS + beam) * splits * FANOUT + tl.minimum(chosen % KIDS, splits * FANOUT - 1)
        place = tl.load(places + offered)
        token = tl.load(names + place)
        node = row * NODES + depth * FANOUT + child
        tl.store(tree_tokens + node, token)
        tl.store(tree_parents + node, tl.where(depth > 0, 1 + (depth - 1) * FANOUT + beam, 0).to(tl.int64))
        tl.store(tokens + entry * FANOUT + child, token)
        tl.store(reached + entry * FANOUT + child, best)
        state = tl.load(states + (entry * PARENTS + beam) * stride_state + column, mask=column < width)
        tl.store(below + (entry * FANOUT + child) * width + column, state, mask=column < width)
        chance = tl.where(number == chosen, float("-inf"), chance)
        if LAST and child == 0:  # the likeliest path is the chain
            tl.store(drafts + row * stride_drafts + depth, token)
            above = 1 + (depth - 1) * FANOUT + beam
            for back in tl.static_range(1, NODES // FANOUT):
                held = row * NODES + above.to(tl.int64) - 1
                tl.store(drafts + row * stride_drafts + depth - back, tl.load(tree_tokens + held))
                above = tl.load(tree_parents + held)


IMPLEMENTATIONS = (declare(grow_tree),)
