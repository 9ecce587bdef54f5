"""The Triton attention kernels compute what the reference computes, and never look where there is no key."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cases import attention_case, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.ops import reference
from tokenmill.ops.types import Mask

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
# The interpreter's dot takes bfloat16 for integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])

MASKS = [
    Mask(),
    Mask(window=5),
    Mask(window=40),
    Mask(window=70),
    Mask(window=1000),
    Mask(softcap=2.0),
    Mask(window=33, softcap=20.0),
]


def check(case, dtype=torch.float32) -> None:
    from tokenmill.ops.triton.attention.paged import attention

    got = case.call(attention)
    assert not got.isnan().any()
    torch.testing.assert_close(got, case.call(reference.attention), **tolerance(dtype))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_singles_equal_reference(mask, triton_device):
    check(attention_case([1] * 4, [1, 37, 64, 150], mask=mask, device=triton_device))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_chunks_equal_reference(mask, triton_device):
    check(attention_case([2, 33, 20], [2, 130, 97], mask=mask, device=triton_device))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 24])
def test_mixed_rows_with_shared_blocks_equal_reference(block_size, triton_device):
    counts, contexts = [1, 1, 9, 17], [70, 65, 73, 68]
    check(attention_case(counts, contexts, block_size=block_size, shared=2, device=triton_device))


HEADS = [
    {"heads": 3, "kv_heads": 3, "key_dim": 64},
    {"heads": 7, "kv_heads": 1, "key_dim": 80},
    {"heads": 4, "kv_heads": 2, "key_dim": 96},
    {"heads": 2, "kv_heads": 1, "key_dim": 128},
    {"heads": 2, "kv_heads": 1, "key_dim": 256},
    {"heads": 2, "kv_heads": 2, "key_dim": 8},
    {"heads": 3, "kv_heads": 1, "key_dim": 24, "value_dim": 12},
    {"heads": 2, "kv_heads": 1, "key_dim": 192, "value_dim": 128},
    {"heads": 5, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "values_in_keys": True},
    {"heads": 70, "kv_heads": 1, "key_dim": 16, "value_dim": 8, "values_in_keys": True},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_shape_equals_reference(heads, dtype, triton_device):
    check(attention_case([1, 1, 3], [35, 20, 38], dtype=dtype, device=triton_device, **heads), dtype)


def as_singles(case, width, missing=0):
    """Rows of a few queries as singles one behind the other; `missing` at the end of the last row are nobody's."""
    batch, rows = case.batch, len(case.batch.host_counts)
    each = torch.arange(width, device=batch.rows.device, dtype=torch.int32)
    context = (batch.context[:, None] - width + 1 + each).flatten()
    table_rows = batch.rows.repeat_interleave(width)
    if missing:
        context[-missing:], table_rows[-missing:] = 0, 0
    singles = replace(
        batch, rows=table_rows, context=context, num_singles=rows * width, max_query=1, queries=width,
        q_start=torch.arange(rows * width + 1, dtype=torch.int32, device=batch.rows.device),
        host_rows=table_rows.tolist(), host_counts=[1] * rows * width, host_context=context.tolist(), cache={},
    )  # fmt: skip
    return replace(case, batch=singles)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("width", [2, 5, 9])
def test_several_queries_of_a_row_equal_reference(mask, width, triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([width] * 4, [width, 37, 64, 150], heads=6, mask=mask, device=triton_device)
    got = as_singles(case, width).call(attention)
    torch.testing.assert_close(got, case.call(reference.attention), **tolerance(torch.float32))


@pytest.mark.parametrize("heads", [*HEADS[:4], HEADS[6], HEADS[9]], ids=str)
def test_several_queries_with_every_head_shape_equal_reference(heads, triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([3] * 2, [35, 20], device=triton_device, **heads)
    got = as_singles(case, 3).call(attention)
    torch.testing.assert_close(got, case.call(reference.attention), **tolerance(torch.float32))


@pytest.mark.parametrize("missing", [1, 3])
def test_keys_that_only_a_missing_query_would_see_are_not_read(missing, triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([4] * 2, [90, 45], device=triton_device)
    expected = case.call(reference.attention)
    poisoned = case.forget(lambda row, position: row == 1 and position >= 45 - missing)
    got = as_singles(poisoned, 4, missing).call(attention)
    torch.testing.assert_close(got[:-missing], expected[:-missing], **tolerance(torch.float32))


def test_several_queries_in_many_parts_equal_one(triton_device, monkeypatch):
    from tokenmill.ops.triton.attention import decode as attention_decode
    from tokenmill.ops.triton.attention.paged import attention

    for in_place in (0, 1 << 20):
        monkeypatch.setattr(attention_decode, "_JOIN_IN_PLACE", in_place)
        for extra in (1, 5, 64):
            case = attention_case([3] * 3, [3, 90, 333], device=triton_device)
            monkeypatch.setattr(attention_decode, "decode_splits", lambda *_, e=extra: (e, 1))
            got = as_singles(case, 3).call(attention)
            torch.testing.assert_close(got, case.call(reference.attention), **tolerance(torch.float32))


@pytest.mark.parametrize("count", [1, 6])
def test_keys_outside_the_window_are_not_read(count, triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    window, contexts = 20, [90, 45]
    case = attention_case([count] * 2, contexts, mask=Mask(window=window), device=triton_device)
    first_query = [context - count for context in contexts]
    poisoned = case.forget(lambda row, position: position <= first_query[row] - window)
    torch.testing.assert_close(poisoned.call(attention), case.call(reference.attention), **tolerance(torch.float32))


def test_many_parts_equal_one(triton_device, monkeypatch):
    from tokenmill.ops.triton.attention import decode as attention_decode
    from tokenmill.ops.triton.attention.paged import attention

    for in_place in (0, 1 << 20):
        monkeypatch.setattr(attention_decode, "_JOIN_IN_PLACE", in_place)
        for extra, least in [(1, 1), (2, 1), (5, 1), (11, 1), (64, 1), (7, 3)]:
            case = attention_case([1] * 3, [1, 90, 333], device=triton_device)
            monkeypatch.setattr(attention_decode, "decode_splits", lambda *_, e=extra, t=least: (e, t))
            for _layer in range(2):
                got, expected = case.call(attention), case.call(reference.attention)
                torch.testing.assert_close(got, expected, **tolerance(torch.float32))


def test_parts_follow_what_rows_have_to_read(triton_device):
    """One long row among short ones is cut, the short ones are not; every tile is read once."""
    from tokenmill.ops.triton.attention import decode as attention_decode

    case = attention_case([1] * 6, [40, 3000, 64, 17, 1, 90], device=triton_device)
    plan = attention_decode._make_plan(case.q, 2, 16, case.batch, case.mask, "")
    items = [item for item in plan.items.tolist() if item[0] >= 0]
    parts = [sum(item[0] == row for item in items) for row in range(6)]
    assert parts[1] >= 6 and parts[:1] + parts[2:] == [1] * 5
    assert plan.joins[:, 0].tolist() == [0, parts[1], 0, 0, 0, 0]
    for row, context in enumerate(case.batch.host_context):
        mine = sorted(item[1:3] for item in items if item[0] == row)
        assert mine[0][0] == 0 and mine[-1][1] == -(-context // plan.tile.block_n)
        assert all(before[1] == after[0] for before, after in pairwise(mine))


def test_padding_rows_without_keys_get_zeros(triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    for contexts in ([20, 1], [300, 1]):
        case = attention_case([1, 1], contexts, device=triton_device)
        expected = case.call(reference.attention)
        case.batch.context[1] = 0
        got = case.call(attention)
        torch.testing.assert_close(got[0], expected[0], **tolerance(torch.float32))
        assert not got[1].any()


def test_tile_list_is_built_once_for_all_layers(triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([3, 40], [3, 50], device=triton_device)
    case.call(attention)
    first = dict(case.batch.cache)
    case.call(attention)
    assert len(first) == 1
    assert all(case.batch.cache[name] is tiles for name, tiles in first.items())


def test_tile_list_covers_every_query_once_and_starts_with_the_longest():
    from tokenmill.ops.triton.attention.prefill import _host_tile_list

    batch = attention_case([1, 1, 5, 64, 130], [9, 1, 200, 64, 131]).batch
    tiles = _host_tile_list(batch, group=3, block_m=16).tolist()
    expected = [[row, tile] for row, count in ((2, 5), (3, 64), (4, 130)) for tile in range(-(-count * 3 // 16))]
    assert sorted(tiles) == expected
    assert tiles[0] == [2, 0]


def test_tree_masks_are_refused(triton_device):
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([3], [9], device=triton_device)
    case.batch.tree = torch.ones(3, 3, dtype=torch.bool, device=triton_device)
    with pytest.raises(NotImplementedError, match="tree"):
        case.call(attention)


def test_decode_workspace_stays_within_its_promise():
    from tokenmill.ops.triton.config import (
        DECODE_WORKSPACE_BYTES,
        decode_splits,
        decode_tile,
        partial_bytes,
        prefix_splits,
    )

    device = torch.device("cpu")
    for rows in (1, 7, 64, 512, 4096):
        for heads, kv_heads, dim in ((32, 8, 128), (128, 1, 512), (9, 3, 64)):
            tile = decode_tile(heads // kv_heads, dim, dim, torch.bfloat16, rows * kv_heads)
            extra, _ = decode_splits(rows, kv_heads, heads, dim, tile, device)
            assert (extra + min(rows, extra)) * partial_bytes(heads, dim) <= DECODE_WORKSPACE_BYTES
            splits = prefix_splits(rows, extra + rows, kv_heads, heads, dim, device)
            assert not splits or (extra + rows * (1 + splits)) * partial_bytes(heads, dim) <= DECODE_WORKSPACE_BYTES


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=4),
    block_size=st.sampled_from([8, 16, 32]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 70)),
    seed=st.integers(0, 1000),
)
def test_random_mixes_equal_reference(rows, block_size, kv_heads, group, window, seed, triton_device):
    rows = sorted(rows, key=lambda row: row[0] > 1)
    counts, contexts = [count for count, _ in rows], [count + before for count, before in rows]
    case = attention_case(
        counts, contexts, heads=kv_heads * group, kv_heads=kv_heads, block_size=block_size, shared=1,
        mask=Mask(window=window), seed=seed, device=triton_device,
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32])
def test_any_number_of_decodes_takes_a_kernel_that_the_warm_up_meets(kv_heads, monkeypatch):
    from tokenmill.engine.runner.recordings import bucket_sizes
    from tokenmill.engine.runner.warmup import DECODES
    from tokenmill.ops.triton import config
    from tokenmill.ops.triton.launch import MOST_PROGRAMS

    monkeypatch.setattr(config, "multiprocessors", lambda device: 132)

    def kernel(rows: int) -> tuple[config.Tile, bool]:
        """What is compiled in: the tile, and whether programs start before the kernel in front has ended."""
        tile = config.decode_tile(4, 128, 128, torch.bfloat16, rows * kv_heads)
        extra, _ = config.decode_splits(rows, kv_heads, 4 * kv_heads, 128, tile, torch.device("cpu"))
        return tile, kv_heads * (rows + extra) <= MOST_PROGRAMS

    known = {kernel(rows) for rows in (*DECODES, *bucket_sizes(512))}
    assert {rows: kernel(rows) for rows in range(1, 513) if kernel(rows) not in known} == {}


def test_decodes_of_a_few_hundred_programs_share_multiprocessors():
    from tokenmill.ops.triton.config import Tile, decode_tile

    of = {programs: decode_tile(7, 128, 128, torch.bfloat16, programs) for programs in (127, 128, 511, 512, 1024, 1025)}
    assert of[127] == of[1025] == Tile(16, 64, 2, 5)
    assert of[128] == of[511] == Tile(16, 64, 2, 4) and of[512] == of[1024] == Tile(16, 64, 4, 4)
    assert decode_tile(7, 64, 64, torch.bfloat16, 128) == Tile(16, 64, 2, 5)  # measured for heads of 128
