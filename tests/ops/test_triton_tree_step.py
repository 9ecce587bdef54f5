"""The kernels around a step that verifies trees against the reference, and that against a walk through each tree."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.ops import reference_tree
from tokenmill.ops.kv_forms import KV_FORMS
from tokenmill.ops.types import DecodeTables, KeptPaths, TreeNoise, TreeTables

ROWS, WIDTH, BLOCKS, BLOCK_SIZE, DEPTHS = 6, 64, 16, 4, 3
SCRATCH, REJECTED = ROWS, -2
cheap = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tables_of(generator: torch.Generator, device: str, fanout: int) -> tuple[DecodeTables, TreeTables]:
    """Every block is one row's, and trees are random: few tokens, so that siblings are equal, too."""

    def some(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=dtype).to(device)

    own = torch.randperm((ROWS + 1) * BLOCKS, generator=generator).view(ROWS + 1, BLOCKS)
    tables = DecodeTables(
        tokens=some(5, ROWS + 1, WIDTH, dtype=torch.int32),
        block_tables=own.int().to(device),
        lengths=some(20, ROWS + 1),
        drafts=some(5, ROWS + 1, DEPTHS),
        on_device=-1,
        scratch_row=SCRATCH,
        block_size=BLOCK_SIZE,
    )
    parents = some(fanout, ROWS + 1, DEPTHS * fanout)
    parents += 1 + (torch.arange(DEPTHS * fanout, device=device) // fanout - 1) * fanout
    parents[:, :fanout] = 0
    return tables, TreeTables(some(5, ROWS + 1, DEPTHS * fanout), parents, fanout)


def copied(tables: DecodeTables) -> DecodeTables:
    return replace(tables, tokens=tables.tokens.clone(), lengths=tables.lengths.clone())


@pytest.mark.parametrize("fanout", [1, 3, 4])
@cheap
@given(
    seed=st.integers(0, 10_000),
    rows=st.lists(
        # whether it verifies a tree, or how many drafts of a chain, slack, whether the device drafted these
        st.tuples(st.booleans(), st.integers(0, DEPTHS), st.booleans(), st.booleans()),
        min_size=1,
        max_size=ROWS,
    ),
    padding=st.integers(0, 2),
    right=st.floats(0, 1),
)
def test_steps_with_trees_equal_a_walk_through_them(fanout, seed, rows, padding, right, triton_device):
    from tokenmill.ops.triton import tree_step

    generator = torch.Generator().manual_seed(seed)
    tables, trees = tables_of(generator, triton_device, fanout)
    entries, proposed = [], []
    for row, (grown, count, slack, on_device) in enumerate(rows):
        start, ahead = int(torch.randint(1, 30, (), generator=generator)), 0
        if slack:
            ahead = int(torch.randint(0, 3, (), generator=generator))
            tables.lengths[row] = start + 1 + ahead
        first = len(proposed)
        if not grown:
            bridging = ahead + int(slack)  # may be more than there was to be bridged
            drafts = torch.randint(0, 5, (bridging + count,), generator=generator).tolist()
            proposed += [-1 - (seed % 2)] * len(drafts) if on_device else drafts
        entries.append((row, start, first, len(proposed), int(slack), -1 if grown else count))
    entries += [(SCRATCH, 0, 0, 0, 0, 0)] * padding
    told = torch.tensor(entries).T.contiguous().to(triton_device)
    offered = torch.tensor(proposed or [0]).to(triton_device)
    before = copied(tables)
    expected = reference_tree.tree_inputs(tables, trees, told, offered)
    made = tree_step.tree_inputs(tables, trees, told, offered)
    for one in fields(expected.entries):
        assert torch.equal(getattr(made.entries, one.name), getattr(expected.entries, one.name)), one.name
    assert torch.equal(made.parents, expected.parents) and torch.equal(made.tails, expected.tails)
    assert torch.equal(tables.tokens, before.tokens)

    width = 1 + DEPTHS * fanout
    ids = expected.entries.ids.view(-1, width)
    sampled = torch.randint(-1, 5, ids.shape, generator=generator).to(triton_device)
    for row in range(len(rows)):  # some nodes are what their parents say
        for node in range(1, width):
            parent = int(expected.parents.view(-1, width)[row, node])
            if parent >= 0 and float(torch.rand((), generator=generator)) < right:
                sampled[row, parent] = ids[row, node]
    others = copied(tables)
    kept = reference_tree.keep_tree(others, told[0], expected, sampled.flatten(), fanout, REJECTED)
    mine = tree_step.keep_tree(tables, told[0], made, sampled.flatten(), fanout, REJECTED)
    for one in fields(kept):
        assert torch.equal(getattr(mine, one.name), getattr(kept, one.name)), one.name
    assert torch.equal(tables.tokens[:SCRATCH], others.tokens[:SCRATCH])
    assert torch.equal(tables.lengths[:SCRATCH], others.lengths[:SCRATCH])

    for row, (grown, count, slack, on_device) in enumerate(rows):
        base = int(told[1, row]) + (int(before.lengths[row]) - 1 - int(told[1, row]) if slack else 0)
        if grown:
            nodes = list(zip(trees.tokens[row].tolist(), trees.parents[row].tolist()))
        else:
            ahead = base - int(told[1, row])
            first, end = int(told[2, row]), int(told[3, row])
            chain = before.drafts[row].tolist() if on_device else proposed[first + ahead : end]
            chain = chain[:count]
            nodes = [(-9, -9)] * (width - 1)
            for depth, token in enumerate(chain):
                nodes[depth * fanout] = token, 1 + (depth - 1) * fanout if depth else 0
        at, path = 0, [0]
        while True:
            fits = [n for n, (token, parent) in enumerate(nodes, 1) if parent == at and token == sampled[row, at]]
            if not fits:
                break
            at = fits[0]
            path.append(at)
        said = [int(sampled[row, node]) for node in path]
        assert kept.tokens.view(-1, DEPTHS + 1)[row].tolist() == said + [REJECTED] * (DEPTHS + 1 - len(said))
        assert kept.order.view(-1, DEPTHS + 1)[row, : len(path)].tolist() == [row * width + node for node in path]
        assert kept.nodes[row].tolist() == path[1:] + [0] * (DEPTHS + 1 - len(path))
        assert int(kept.last[row]) == row * width + at and int(kept.newest[row]) == max(0, said[-1])
        assert int(kept.positions[row]) == base + len(path) and int(others.lengths[row]) == base + len(path) + 1
        written = before.tokens[row].clone()
        written[base + 1 : base + 1 + len(said)] = torch.tensor(said).clamp_min(0)
        assert torch.equal(others.tokens[row], written)
        for node in range(width):  # where nodes stand, and what they see
            entry = row * width + node
            there = node == 0 or nodes[node - 1] != (-9, -9)
            block = int(before.block_tables[row, (base + node) // BLOCK_SIZE])
            assert expected.entries.slots[entry] == (block * 4 + (base + node) % 4 if there else -1)
            depth, above, seen = (node + fanout - 1) // fanout, node, 0
            while there and above:
                seen |= 1 << above
                above = nodes[above - 1][1]
            assert int(expected.tails[entry]) == (seen | 1 if there else 0)
            assert not there or int(expected.entries.positions[entry]) == base + depth


@pytest.mark.parametrize("form", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize(("heads", "dim", "parts"), [(3, 64, 2), (1, 96, 1), (8, 128, 2)])
def test_the_path_that_held_is_cached_where_its_tokens_stand(form, heads, dim, parts, triton_device):
    from tokenmill.ops.triton import tree_step

    generator = torch.Generator().manual_seed(dim)
    fanout, layers, blocks = 4, 2, (ROWS + 1) * BLOCKS
    tables, _ = tables_of(generator, triton_device, fanout)

    def cache(width: int, dtype: torch.dtype) -> torch.Tensor:
        bytes = width * dtype.itemsize
        raw = torch.randint(0, 256, (layers, parts, blocks, BLOCK_SIZE, heads, bytes), generator=generator)
        return raw.to(torch.uint8).view(dtype).to(triton_device)

    known = KV_FORMS[form] if form else None
    arena = cache(dim, torch.bfloat16) if known is None else cache(known.width(dim), known.dtype)
    scales = None if known is None else cache(known.scales(dim), torch.bfloat16)
    paths = [[1, 5, 9], [2, 7, 12], [4, 8], [3], [], [2, 5]]  # some where they shall be, some over each other's places
    bases = [3, 10, 0, 7, 20, 29]
    nodes = torch.tensor([path + [0] * (DEPTHS - len(path)) for path in paths] + [[0] * DEPTHS])
    positions = torch.tensor([base + 1 + len(path) for base, path in zip(bases, paths)] + [1])
    empty = torch.zeros(0, dtype=torch.int64)
    rows = torch.arange(ROWS + 1).to(triton_device)
    kept = KeptPaths(empty, empty, nodes.to(triton_device), empty, empty, positions.to(triton_device))
    caches = [one for one in (arena, scales) if one is not None]
    wanted = [one.view(torch.uint8).clone() for one in caches]
    for before, one in zip(wanted, caches):
        raw = one.view(torch.uint8)
        for row, (base, path) in enumerate(zip(bases, paths)):
            for depth, node in enumerate(path, 1):
                source, target = (
                    (int(tables.block_tables[row, place // BLOCK_SIZE]), place % BLOCK_SIZE)
                    for place in (base + node, base + depth)
                )
                before[:, :, target[0], target[1]] = raw[:, :, source[0], source[1]]
    others = [one.clone() for one in caches]
    reference_tree.move_kv(others[0], others[1] if known else None, tables, rows, kept)
    tree_step.move_kv(arena, scales, tables, rows, kept)
    for one, other, whole in zip(caches, others, wanted):
        assert torch.equal(other.view(torch.uint8), whole) and torch.equal(one.view(torch.uint8), whole)


def beam(chances: torch.Tensor, scores: list[float], fanout: int) -> list[tuple[float, int, int]]:
    """The best (score, parent, place) of all children. chances: [parents, vocabulary]"""
    every = [
        (score + float(chances[parent, place]), parent, place)
        for parent, score in enumerate(scores)
        for place in range(chances.shape[1])
    ]
    return sorted(every, reverse=True)[:fanout]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("vocab", "fanout", "width"), [(70, 4, 20), (5000, 3, 576)])
def test_a_tree_grows_by_the_likeliest_nodes_of_each_depth(vocab, fanout, width, warm, triton_device):
    from tokenmill.ops.noise import gumbel_noise
    from tokenmill.ops.triton.draft_tree import grow_tree

    generator = torch.Generator().manual_seed(vocab)
    names = torch.randperm(3 * vocab, generator=generator)[:vocab].to(triton_device)
    rows = torch.tensor([4, 0, 2]).to(triton_device)
    noise = None
    if warm:
        heat = torch.tensor([1.0, 0.0, 0.6]).to(triton_device)
        noise = TreeNoise(heat, torch.tensor([7, -3, 1 << 40]).to(triton_device), torch.tensor([5, 9, 3]).to(rows))

    def empty() -> tuple[TreeTables, torch.Tensor]:
        made = torch.zeros(2, 6, DEPTHS * fanout, dtype=torch.int64, device=triton_device)
        return TreeTables(*made.unbind(), fanout), torch.zeros(6, DEPTHS, dtype=torch.int64, device=triton_device)

    results = []
    for fn in (reference_tree.grow_tree, grow_tree):
        generator.manual_seed(1)
        trees, drafts = empty()
        scores, said = None, []
        for depth in range(DEPTHS):
            parents = 1 if depth == 0 else fanout
            logits = 2 * torch.randn(3 * parents, vocab, generator=generator).to(triton_device)
            states = torch.randn(3 * parents, width, generator=generator).to(triton_device)
            before = [[0.0]] * 3 if scores is None else scores.view(3, -1).tolist()
            tokens, below, scores = fn(logits, names, states, scores, trees, drafts, rows, depth, noise)
            said += [tokens, below, scores]
            for index in range(3):
                mine = logits[index * parents : (index + 1) * parents]
                if noise is not None and float(noise.temperature[index]) > 0:
                    seed, position = noise.seed[index : index + 1], noise.positions[index : index + 1] + 1 + depth
                    mine = mine / noise.temperature[index] + gumbel_noise(seed, position, 3 * vocab)[:, names]
                wanted = beam(mine.log_softmax(-1), before[index], fanout)
                here = slice(index * fanout, (index + 1) * fanout)
                assert tokens[here].tolist() == [int(names[place]) for _, _, place in wanted]
                assert scores[here].tolist() == pytest.approx([score for score, _, _ in wanted], abs=1e-4)
                assert torch.equal(below[here], states[[index * parents + parent for _, parent, _ in wanted]])
                places = slice(depth * fanout, (depth + 1) * fanout)
                assert torch.equal(trees.tokens[rows[index], places], tokens[here])
                above = [1 + (depth - 1) * fanout + parent if depth else 0 for _, parent, _ in wanted]
                assert trees.parents[rows[index], places].tolist() == above
        for row in rows.tolist():
            node, chain = 1 + (DEPTHS - 1) * fanout, []
            while node:
                chain.insert(0, int(trees.tokens[row, node - 1]))
                node = int(trees.parents[row, node - 1])
            assert drafts[row].tolist() == chain
        results.append([*said, trees.tokens, trees.parents, drafts])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


def test_logits_that_are_no_numbers_give_tokens_all_the_same(triton_device):
    from tokenmill.ops.triton.draft_tree import grow_tree

    trees = TreeTables(*torch.full((2, 3, 8), -1, dtype=torch.int64, device=triton_device).unbind(), 4)
    rows = torch.tensor([1], device=triton_device)
    names, drafts = torch.arange(50, device=triton_device), torch.zeros(3, 2, dtype=torch.int64, device=triton_device)
    state, scores = torch.zeros(1, 16, device=triton_device), None
    for depth in range(2):
        logits = torch.full((len(state), 50), torch.nan, device=triton_device)
        tokens, state, scores = grow_tree(logits, names, state, scores, trees, drafts, rows, depth)
        assert all(0 <= token < 50 for token in tokens.tolist())
    assert all(0 <= parent <= 4 for parent in trees.parents[1].tolist())
