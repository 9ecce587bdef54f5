"""Native norms, rotation, activations, lookup and greedy choice compute what the reference computes, at every level."""

from __future__ import annotations

import pytest
import torch
from cases import rope_case, sample_case, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.ops import reference
from tokenmill.ops.native import elementwise, library, ops
from tokenmill.ops.native.call import run
from tokenmill.ops.native.structs import DecodeInputArgs

EXACT = {"rtol": 2e-6, "atol": 2e-6}
CAPPED = {"rtol": 1e-6, "atol": 6e-6}  # about 1e-7 of the cap
NAN, INF = float("nan"), float("inf")
widths = pytest.mark.parametrize("dim", [1, 3, 8, 17, 64, 100, 576])
each_level = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@widths
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_equals_reference(level: int, dim: int, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    x, weight = torch.randn(7, dim) * 3, torch.randn(dim).to(weight_dtype)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **EXACT)


def test_norm_of_a_slice_and_of_heads(level: int) -> None:
    torch.manual_seed(0)
    fused, weight = torch.randn(5, 100), torch.randn(24)
    for x in (fused[:, 30:54], fused[:, :96].view(5, 4, 24), fused[:, 4:].view(5, 4, 24), fused.t()[:24].t()):
        torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **EXACT)


@widths
def test_norm_after_addition_equals_reference(level: int, dim: int) -> None:
    torch.manual_seed(dim)
    x, residual, weight = torch.randn(5, dim), torch.randn(5, dim), torch.randn(dim)
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    found = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dim": 64, "heads": 9, "kv_heads": 3},
        {"dim": 20, "rotated": 12},
        {"dim": 80, "rotated": 32, "v_dim": 48},
        {"dim": 18, "v_dim": 0, "kv_heads": 1},
    ],
    ids=str,
)
def test_rope_equals_reference(level: int, shape: dict[str, int], cache_dtype: torch.dtype) -> None:
    case = rope_case(11, skipped=3, seed=level, **shape)
    case.k_cache = case.k_cache.to(cache_dtype)
    case.v_cache = case.v_cache.to(cache_dtype) if case.v_cache is not None else None
    expected = case.copy().call(reference.rope_kv_write)
    found = case.copy().call(ops.rope_kv_write)
    for ours, theirs in zip(found, expected):
        # An even split between two neighbours may fall either way after a different last bit before the rounding.
        torch.testing.assert_close(
            ours, theirs, **(EXACT if ours is None or ours.dtype == torch.float32 else tolerance(ours.dtype))
        )


def test_rope_alone_turns_queries_as_the_write_does(level: int) -> None:
    case = rope_case(11, heads=3, dim=20, rotated=12, seed=level)
    expected, own = case.copy().call(reference.rope_kv_write)[0], case.copy()
    q = own.fused[:, : case.heads * case.dim].view(-1, case.heads, case.dim)
    ops.rope(q, case.cos_sin, case.positions)
    torch.testing.assert_close(q, expected, **EXACT)
    assert torch.equal(own.fused[:, case.heads * case.dim :], case.fused[:, case.heads * case.dim :])


def test_rope_norms_heads_first(level: int) -> None:
    torch.manual_seed(1)
    case = rope_case(6, dim=24)
    norms = (torch.randn(24), torch.randn(24), 1e-5)
    expected = case.copy().call(lambda *args: reference.rope_kv_write(*args, *norms))
    found = case.copy().call(lambda *args: ops.rope_kv_write(*args, *norms))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_narrow_caches_round_to_nearest_even_and_keep_every_value(level: int) -> None:
    """All finite halves, what lies halfway between two of them, and what overflows."""
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
        values = values[values.isfinite()]
        between = (values[:-1].double() + values[1:].double()) / 2
        v = torch.cat([values, between.float(), between.float() * (1 + 2**-20), torch.tensor([1e38, -1e38, INF, NAN])])
        v = torch.cat([v, v.new_zeros(-len(v) % 64)]).view(-1, 1, 64)
        tokens = v.shape[0]
        k_cache, v_cache = (torch.zeros(tokens, 1, 1, size, dtype=dtype) for size in (2, 64))
        zeros = torch.zeros(tokens, dtype=torch.int64)
        ops.rope_kv_write(
            torch.zeros(tokens, 1, 2), torch.zeros(tokens, 1, 2), v,
            torch.ones(1, 2), zeros, k_cache, v_cache, torch.arange(tokens),
        )  # fmt: skip
        torch.testing.assert_close(v_cache.view(-1), v.view(-1).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [1, 5, 16, 100, 1536])
def test_activation_equals_reference(level: int, kind: str, inner: int) -> None:
    torch.manual_seed(inner)
    x = torch.randn(5, 2 * inner) * 6
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, 0.0
    exact = reference.act_mul(x.double(), kind).float()
    torch.testing.assert_close(elementwise.act_mul(x, kind), exact, rtol=2e-6, atol=1e-6)
    assert elementwise.act_mul(torch.full((1, 2), NAN), kind).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding_is_the_scaled_row(level: int, dtype: torch.dtype) -> None:
    table = torch.randn(50, 37).to(dtype)
    ids = torch.tensor([0, 49, 7, 7])
    torch.testing.assert_close(ops.embed(ids, table, 2.5), table[ids].float() * 2.5, rtol=0, atol=0)


def test_embedding_of_a_token_outside_the_table_is_not_a_number(level: int) -> None:
    found = ops.embed(torch.tensor([3, -1, 50]), torch.ones(50, 8))
    assert found[0].eq(1).all() and found[1:].isnan().all()


def test_addition(level: int) -> None:
    x, y = torch.randn(5, 37), torch.randn(5, 90)[:, 10:47]
    torch.testing.assert_close(elementwise.add(x, y), x + y, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [1, 17, 100, 4096, 9001])  # parts of a row are computed apart
def test_factor_and_soft_cap_equal_the_reference(level: int, dim: int) -> None:
    torch.manual_seed(dim)
    x = torch.randn(3, dim + 2)[:, 1:-1] * 40
    torch.testing.assert_close(elementwise.scaled(x, 6.5), x * 6.5, rtol=0, atol=0)
    expected = reference.soft_cap(x.double(), 30.0).float()
    torch.testing.assert_close(elementwise.soft_cap(x.clone(), 30.0), expected, **CAPPED)


LAYOUTS = {
    "three dims": lambda x: x.view(3, 4, 10),
    "three dims, heads apart": lambda x: x.view(3, 4, 10)[:, 1:3],
    "three dims, turned": lambda x: x.view(3, 4, 10).transpose(0, 1),
    "every other column": lambda x: x.view(6, 20)[:, ::2],
    "columns as rows": lambda x: x.view(12, 10).t(),
    "one dim": lambda x: x,
    "one row for all": lambda x: x[:40].expand(3, 40),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_factors_and_soft_caps_take_any_layout(native: library.Library, layout: str) -> None:
    torch.manual_seed(2)
    x, y = (LAYOUTS[layout](torch.randn(120) * 40) for _ in range(2))
    torch.testing.assert_close(elementwise.add(x, y), x + y, rtol=0, atol=0)
    torch.testing.assert_close(elementwise.add(x.contiguous(), y), x + y, rtol=0, atol=0)
    torch.testing.assert_close(elementwise.scaled(x, 6.5), x * 6.5, rtol=0, atol=0)
    expected = reference.soft_cap(x.double(), 30.0).float()
    torch.testing.assert_close(elementwise.soft_cap(x, 30.0), expected, **CAPPED)


def test_a_soft_cap_leaves_the_numbers_between_its_rows(native: library.Library) -> None:
    whole = torch.full((3, 4, 10), 100.0)
    assert elementwise.soft_cap(whole[:, 1:3], 5.0).eq(5).all()
    assert elementwise.soft_cap(whole[..., ::2], 5.0).eq(5).all()
    assert whole[:, [0, 3]].eq(100).all() and whole[..., 1::2][:, [0, 3]].eq(100).all()


def test_a_sum_of_two_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(5, 8\) and \(8,\)"):
        elementwise.add(torch.ones(5, 8), torch.ones(8))


def test_a_soft_cap_holds_what_is_large_and_passes_on_what_is_no_number(level: int) -> None:
    found = elementwise.soft_cap(torch.tensor([[INF, -INF, NAN, 1e30, 0.0]]), 6.0)
    torch.testing.assert_close(found, torch.tensor([[6.0, -6.0, NAN, 6.0, 0.0]]), rtol=0, atol=0, equal_nan=True)


@each_level
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 9),
    vocab=st.sampled_from([1, 7, 300, 8192, 20_000]),
    ties=st.booleans(),
)
def test_greedy_choice_is_the_references(level: int, seed: int, rows: int, vocab: int, ties: bool) -> None:
    logits, batch = sample_case(rows, vocab, temperature=0.0, steps=2.0 if ties else 0.0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for bad in (NAN, INF, -INF):
        where = torch.rand(rows, vocab, generator=generator) < 0.3 / vocab
        logits = torch.where(where, bad, logits)
    logits[0] = torch.where(torch.rand((), generator=generator) < 0.2, -INF, logits[0])
    assert ops.sample(logits, batch).tolist() == reference.sample(logits, batch).tolist()


def test_warm_rows_are_sampled_as_the_reference_does(native: library.Library) -> None:
    logits, batch = sample_case(6, 500, temperature=[0.0, 1.0, 0.5, 2.0, 0.0, 1.0], top_k=[0, 5, 0, 9, 0, 1])
    assert ops.sample(logits, batch).tolist() == reference.sample(logits, batch).tolist()


def test_inputs_of_a_decode_step_are_gathered_from_the_tables(level: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (5, 40), generator=generator, dtype=torch.int32)
    blocks = torch.randint(0, 99, (5, 10), generator=generator, dtype=torch.int32)
    rows, starts = torch.tensor([4, 0, 2]), torch.tensor([39, 0, 17])
    ids, slots = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    table_rows, context = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    run(
        DecodeInputArgs(
            rows=rows.data_ptr(), starts=starts.data_ptr(), tokens=tokens.data_ptr(), blocks=blocks.data_ptr(),
            ids=ids.data_ptr(), slots=slots.data_ptr(), table_rows=table_rows.data_ptr(), context=context.data_ptr(),
            n=3, token_stride=40, block_stride=10, block_size=4,
        )
    )  # fmt: skip
    assert ids.tolist() == tokens[rows, starts].tolist()
    assert slots.tolist() == (blocks[rows, starts // 4] * 4 + starts % 4).tolist()
    assert table_rows.tolist() == rows.tolist() and context.tolist() == (starts + 1).tolist()


def test_numbers_of_another_size_are_refused_before_memory_is_touched() -> None:
    half, weight = torch.randn(3, 32).half(), torch.ones(32)
    for call in (
        lambda: ops.rms_norm(half, weight, 1e-5),
        lambda: ops.add_rms_norm(torch.randn(3, 32), half, weight, 1e-5),
        lambda: elementwise.act_mul(half, "silu"),
        lambda: elementwise.add(half, half),
    ):
        with pytest.raises(TypeError, match="float16, but was chosen for float32"):
            call()


def test_queries_and_keys_of_another_size_are_refused_too() -> None:
    q, k, cache = torch.randn(4, 2, 8), torch.randn(4, 1, 8), torch.zeros(1, 4, 1, 8)
    rest = (None, torch.zeros(4, 8), torch.arange(4), cache, None, torch.arange(4))
    for narrow in ((q.half(), k), (q, k.half())):
        with pytest.raises(TypeError, match="float16"):
            ops.rope_kv_write(*narrow, *rest)
