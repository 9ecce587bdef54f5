"""Attention between the nodes of trees: every node sees what is before the root, its ancestors and itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import AttentionCase, attention_case, tolerance
from test_triton_kv import coded

from tokenmill.ops.types import Mask

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
FANOUT, DEPTHS = 3, 3
NODES = FANOUT * DEPTHS
MASKS = [Mask(), Mask(window=2), Mask(window=5), Mask(window=40), Mask(softcap=2.0), Mask(window=33, softcap=20.0)]


def random_tree(generator: torch.Generator) -> list[int]:
    """Parents of the nodes: 0 is the root, others are nodes of the depth before."""
    first = [0] * FANOUT
    later = [
        1 + (depth - 1) * FANOUT + int(torch.randint(0, FANOUT, (), generator=generator))
        for depth in range(1, DEPTHS)
        for _ in range(FANOUT)
    ]
    return first + later


def paths_of(parents: list[int]) -> list[list[int]]:
    paths = [[0]]
    for node, parent in enumerate(parents, 1):
        paths.append([*paths[parent], node])
    return paths


def as_trees(case: AttentionCase, dead: int = 0) -> tuple[AttentionCase, list[list[list[int]]]]:
    """The rows' last tokens as trees, each row's own; `dead` nodes at the end of the last row are nobody's."""
    batch, rows, width = case.batch, len(case.batch.host_counts), NODES + 1
    generator = torch.Generator().manual_seed(5)
    paths = [paths_of(random_tree(generator)) for _ in range(rows)]
    tails = torch.tensor([[sum(1 << node for node in path) for path in one] for one in paths], dtype=torch.int32)
    context = batch.context[:, None] - width + 1 + torch.arange(width, device=batch.rows.device, dtype=torch.int32)
    tails, context = tails.flatten().to(batch.rows.device), context.flatten()
    if dead:
        tails[-dead:], context[-dead:] = 0, 0
    table_rows = batch.rows.repeat_interleave(width)
    trees = replace(
        batch, rows=table_rows, context=context, num_singles=rows * width, max_query=1, queries=width, tails=tails,
        fanout=FANOUT, q_start=torch.arange(rows * width + 1, dtype=torch.int32, device=batch.rows.device),
        host_rows=table_rows.tolist(), host_counts=[1] * rows * width, host_context=context.tolist(), cache={},
    )  # fmt: skip
    return replace(case, batch=trees), paths


def expected(case: AttentionCase, paths: list[list[list[int]]]) -> torch.Tensor:
    """Each node for itself, from the original rows of several queries."""
    batch, out, group = case.batch, [], case.q.shape[1] // case.k_cache.shape[2]
    for index, (row, context) in enumerate(zip(batch.host_rows, batch.host_context)):
        root = context - NODES - 1
        blocks = batch.block_tables[row, : -(-context // case.k_cache.shape[1])].long()
        for node, path in enumerate(paths[index]):
            places = torch.tensor([*range(root), *(root + one for one in path)])
            positions = torch.tensor([*range(root), *(root + depth for depth in range(len(path)))])
            if case.mask.window is not None:
                places = places[positions > root + len(path) - 1 - case.mask.window]
            keys, values = (
                one[blocks].flatten(0, 1)[places.to(one.device)].repeat_interleave(group, 1).float()
                for one in (case.k_cache, case.v_cache)
            )
            scores = torch.einsum("hd,thd->ht", case.q[index * (NODES + 1) + node].float(), keys) * case.scale
            if case.mask.softcap is not None:
                scores = case.mask.softcap * torch.tanh(scores / case.mask.softcap)
            out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
    return torch.stack(out).to(case.q.dtype)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_nodes_see_their_ancestors_only(mask, triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    width = NODES + 1
    case = attention_case([width] * 4, [width, 37, 64, 150], heads=6, mask=mask, device=triton_device)
    trees, paths = as_trees(case)
    torch.testing.assert_close(trees.call(attention), expected(case, paths), **tolerance(torch.float32))


@pytest.mark.parametrize(
    "heads",
    [
        {"heads": 3, "kv_heads": 3, "key_dim": 64},
        {"heads": 7, "kv_heads": 1, "key_dim": 80},
        {"heads": 5, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "values_in_keys": True},
    ],
    ids=str,
)
def test_every_head_shape(heads, triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([NODES + 1] * 2, [35, 20], device=triton_device, **heads)
    trees, paths = as_trees(case)
    torch.testing.assert_close(trees.call(attention), expected(case, paths), **tolerance(torch.float32))


def test_many_parts_equal_one(triton_device, monkeypatch):
    from tokenmill.ops.triton.attention import decode as attention_decode
    from tokenmill.ops.triton.attention.paged import attention

    width = NODES + 1
    for in_place in (0, 1 << 20):
        monkeypatch.setattr(attention_decode, "_JOIN_IN_PLACE", in_place)
        for extra in (1, 5, 64):
            case = attention_case([width] * 3, [width, 90, 333], device=triton_device)
            monkeypatch.setattr(attention_decode, "decode_splits", lambda *_, e=extra: (e, 1))
            trees, paths = as_trees(case)
            torch.testing.assert_close(trees.call(attention), expected(case, paths), **tolerance(torch.float32))


def test_keys_that_no_node_sees_are_not_read(triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([NODES + 1] * 2, [90, 45], device=triton_device)
    poisoned = case.forget(lambda row, position: row == 1 and position >= 45 - FANOUT)
    trees, paths = as_trees(poisoned, dead=FANOUT)
    wanted = expected(case, paths)
    torch.testing.assert_close(trees.call(attention)[:-FANOUT], wanted[:-FANOUT], **tolerance(torch.float32))


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("mask", [Mask(), Mask(window=5), Mask(window=33, softcap=20.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_codes_are_read_as_floats_are(dtype, mask, form, triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    shape = {"heads": 4, "kv_heads": 2, "key_dim": 64, "mask": mask, "dtype": dtype, "device": triton_device}
    case = attention_case([NODES + 1] * 2, [70, 33], **shape)
    codes, floats, scales = coded(case, form)
    _, paths = as_trees(case)
    trees, _ = as_trees(codes)
    got = trees.call(lambda *args: attention(*args, scales=scales))
    torch.testing.assert_close(got.float(), expected(floats, paths), **tolerance(dtype))
