"""Native attention computes what the reference computes: ragged paged batches, every mask, every level of the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_case, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.ops import reference
from tokenmill.ops.kv_forms import INT8, KVScales, quantize
from tokenmill.ops.native import library, ops
from tokenmill.ops.types import Mask

CLOSE = tolerance(torch.float32)
each_level = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(case: AttentionCase) -> None:
    expected = case.call(reference.attention)
    assert not expected.isnan().any()
    torch.testing.assert_close(case.call(ops.attention), expected, **CLOSE)


@st.composite
def cases(draw: Any) -> AttentionCase:
    singles = draw(st.lists(st.integers(1, 200), max_size=6))
    chunks = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(2, 90)), max_size=3))
    if not singles and not chunks:
        singles = [1]
    window = draw(st.sampled_from([None, None, 1, 5, 64, 300]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    key_dim = draw(st.sampled_from([4, 16, 20, 64]))
    return attention_case(
        [1] * len(singles) + [count for _, count in chunks],
        singles + [start + count for start, count in chunks],
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7])),
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=draw(st.sampled_from([key_dim, key_dim, 8, 18])),
        block_size=draw(st.sampled_from([1, 4, 16, 64])),
        mask=Mask(
            window=window,
            softcap=draw(st.sampled_from([None, None, 2.0])),
        ),
        shared=draw(st.sampled_from([0, 2])),
        seed=draw(st.integers(0, 1 << 30)),
    )


@each_level
@given(case=cases())
def test_attention_equals_reference_on_ragged_batches(level: int, case: AttentionCase) -> None:
    check(case)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=100), Mask(softcap=5.0)], ids=str)
def test_long_contexts(level: int, mask: Mask) -> None:
    """More keys than the pieces of a single hold at their smallest, and a chunk over several tiles of both kinds."""
    check(
        attention_case([1, 1, 1, 300], [3000, 1025, 1, 700], heads=3, kv_heads=1, key_dim=64, block_size=16, mask=mask)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_caches_are_read_exactly(level: int, dtype: torch.dtype) -> None:
    """Products of values that a narrow cache holds are computed in float32, so the tolerance is float32's."""
    case = attention_case([1, 1, 40], [150, 20, 90], heads=6, kv_heads=2, key_dim=36, value_dim=20, seed=3)
    narrow = replace(case, k_cache=case.k_cache.to(dtype), v_cache=case.v_cache.to(dtype))
    wide = replace(case, k_cache=narrow.k_cache.float(), v_cache=narrow.v_cache.float())
    torch.testing.assert_close(narrow.call(ops.attention), wide.call(reference.attention), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_layout_of_the_caches_does_not_change_a_bit(level: int, dtype: torch.dtype) -> None:
    """Keys may lie apart by anything: block by block with other layers between them, or head by head."""
    case = attention_case([1, 1, 1, 70], [150, 20, 65, 90], heads=6, kv_heads=2, key_dim=32, value_dim=24, seed=5)
    case = replace(case, k_cache=case.k_cache.to(dtype), v_cache=case.v_cache.to(dtype))
    expected = case.call(ops.attention)

    def between_layers(cache: torch.Tensor) -> torch.Tensor:
        arena = torch.full((cache.shape[0], 3, *cache.shape[1:]), float("nan"), dtype=dtype)
        arena[:, 1] = cache
        return arena[:, 1]

    def by_head(cache: torch.Tensor) -> torch.Tensor:
        return cache.transpose(1, 2).contiguous().transpose(1, 2)

    for layout in (between_layers, by_head):
        other = replace(case, k_cache=layout(case.k_cache), v_cache=layout(case.v_cache))
        assert not other.k_cache.is_contiguous()
        assert torch.equal(other.call(ops.attention), expected)


def test_values_that_are_a_view_of_the_keys(level: int) -> None:
    check(
        attention_case(
            [1, 1, 9], [130, 7, 40], heads=20, kv_heads=1, key_dim=48, value_dim=32, values_in_keys=True, seed=1
        )
    )


def test_more_heads_than_a_tile_holds(level: int) -> None:
    check(attention_case([1, 3], [70, 80], heads=128, kv_heads=1, key_dim=24))


@pytest.mark.parametrize("window", [None, 3, 12])
def test_tree_masks(level: int, window: int | None) -> None:
    counts, contexts = [1, 4, 6, 70], [9, 200, 6, 75]
    case = attention_case(counts, contexts, mask=Mask(window=window), seed=7)
    tree = torch.rand(sum(counts), max(counts), generator=torch.Generator().manual_seed(1)) < 0.4
    first = 0
    for count in counts:
        own = tree[first : first + count, :count]
        own &= torch.ones(count, count, dtype=torch.bool).tril()
        own |= torch.eye(count, dtype=torch.bool)
        first += count
    case.batch.tree = tree
    check(case)


def test_keys_that_no_query_sees_are_never_used(level: int) -> None:
    mask = Mask(window=20)
    case = attention_case([1, 1, 30], [90, 15, 120], mask=mask, block_size=4)
    starts = [89, 14, 90]
    poisoned = case.forget(lambda i, position: position <= starts[i] - 20)
    torch.testing.assert_close(poisoned.call(ops.attention), case.call(reference.attention), **CLOSE)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=70)], ids=str)
def test_a_chunk_of_one_token_has_the_bits_of_a_larger_one(level: int, mask: Mask) -> None:
    """So a prompt may be cut anywhere: at its end, at the end of a block, at the end of a tile of keys."""
    whole = attention_case([200], [200], heads=6, kv_heads=2, key_dim=20, value_dim=18, block_size=16, mask=mask)
    expected = whole.call(ops.attention)
    for position in (0, 1, 15, 16, 63, 64, 127, 199):
        batch = replace(
            whole.batch,
            q_start=torch.tensor([0, 1], dtype=torch.int32),
            context=torch.tensor([position + 1], dtype=torch.int32),
            num_singles=0,
        )
        one = replace(whole, q=whole.q[position : position + 1], batch=batch)
        assert torch.equal(one.call(ops.attention), expected[position : position + 1]), position


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_neither_threads_nor_neighbours_change_a_bit(level: int, native: library.Library, dtype: torch.dtype) -> None:
    contexts = [700, 5, 64, 65, 1300, 400]
    counts = [1, 1, 1, 1, 1, 130]
    case = attention_case(counts, contexts, heads=6, kv_heads=2, key_dim=32, block_size=16)
    case = replace(case, k_cache=case.k_cache.to(dtype), v_cache=case.v_cache.to(dtype))
    found = []
    for threads in (1, 2, 3, 5):
        native.threads = threads
        found.append(case.call(ops.attention))
    native.threads = 1
    assert all(torch.equal(one, found[0]) for one in found)
    first = 0
    for i, count in enumerate(counts):
        b = case.batch
        alone = replace(
            b,
            rows=b.rows[i : i + 1],
            q_start=torch.tensor([0, count], dtype=torch.int32),
            context=b.context[i : i + 1],
            num_singles=int(count == 1),
        )
        one = replace(case, q=case.q[first : first + count], batch=alone)
        assert torch.equal(one.call(ops.attention), found[0][first : first + count])
        first += count


def test_the_size_of_chunks_does_not_change_a_bit(level: int) -> None:
    """So a prompt that is computed in other portions, or found in the prefix cache, gives the same keys and tokens."""
    case = attention_case([200], [330], heads=6, kv_heads=2, key_dim=32, block_size=16)
    whole = case.call(ops.attention)
    for first, count in ((0, 2), (2, 70), (72, 128)):
        batch = replace(
            case.batch,
            q_start=torch.tensor([0, count], dtype=torch.int32),
            context=torch.tensor([130 + first + count], dtype=torch.int32),
        )
        part = replace(case, q=case.q[first : first + count], batch=batch)
        assert torch.equal(part.call(ops.attention), whole[first : first + count])


@st.composite
def whole_prompts(draw: Any) -> tuple[AttentionCase, KVScales | None]:
    """One row that is a chunk, over a cache of any form; some with keys of several pieces, of one length or another."""
    length = draw(st.one_of(st.integers(2, 200), st.just(700)))
    before = draw(st.sampled_from([0, 0, 30, 250, 4000]))
    kv_heads = draw(st.sampled_from([1, 2]))
    case = attention_case(
        [length], [before + length], heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 16])), kv_heads=kv_heads,
        key_dim=draw(st.sampled_from([16, 20, 32, 67])), value_dim=draw(st.sampled_from([16, 18, 40])), block_size=16,
        mask=Mask(draw(st.sampled_from([None, None, 5, 70, 1500])), draw(st.sampled_from([None, None, 2.0]))),
        seed=draw(st.integers(0, 1 << 30)),
    )  # fmt: skip
    form = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]))
    if form != torch.int8:
        return replace(case, k_cache=case.k_cache.to(form), v_cache=case.v_cache.to(form)), None
    (k, k_scales), (v, v_scales) = (quantize(cache.nan_to_num(), INT8) for cache in (case.k_cache, case.v_cache))
    return replace(case, k_cache=k, v_cache=v), KVScales(k_scales, v_scales)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=whole_prompts(), data=st.data())
def test_a_query_has_the_same_bits_as_a_single_and_in_any_chunk(
    level: int, prompt: tuple[AttentionCase, KVScales | None], data: Any
) -> None:
    """So a token is the same whether it was decoded, read with a prompt, or computed again after it was preempted."""
    case, scales = prompt
    whole = case.call(lambda *args: ops.attention(*args, scales=scales))
    assert whole.isfinite().all()
    length, before = len(whole), case.batch.max_context - len(whole)
    some = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=6))
    for position in {0, length - 1, length // 2, *some}:
        first = data.draw(st.integers(max(0, position - 70), position))
        for begin, singles in ((position, 1), (position, 0), (first, 0)):
            batch = replace(
                case.batch,
                q_start=torch.tensor([0, position + 1 - begin], dtype=torch.int32),
                context=torch.tensor([before + position + 1], dtype=torch.int32),
                num_singles=singles,
            )
            part = replace(case, q=case.q[begin : position + 1], batch=batch)
            found = part.call(lambda *args: ops.attention(*args, scales=scales))
            assert torch.equal(found, whole[begin : position + 1]), (position, begin, singles)
