"""Quantized keys and values: what is stored is as near as the form allows, reading is exact, every attention agrees."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import AttentionCase, attention_case, rope_case, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.ops import cpu, invariant, reference
from tokenmill.ops.kv_forms import FP8, INT4, INT8, KV_FORMS, KVForm, KVScales, dequantize, form_of, quantize
from tokenmill.ops.registry import Implementation, Need, select
from tokenmill.ops.types import Mask

FORMS = list(KV_FORMS.values())
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def by_name(form: KVForm) -> str:
    return form.name


def quantized(case: AttentionCase, form: KVForm) -> tuple[AttentionCase, KVScales, AttentionCase]:
    """The case with codes for keys and values, their scales, and the case with the floats that the codes stand for.

    Slots that no row uses have scales that are not a number.
    """
    (k, k_scale), (v, v_scale) = (quantize(cache.nan_to_num(), form) for cache in (case.k_cache, case.v_cache))
    unused = case.k_cache.isnan().any(-1, keepdim=True)
    scales = KVScales(k_scale.masked_fill(unused, math.nan), v_scale.masked_fill(unused, math.nan))
    wide = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    floats = replace(case, k_cache=dequantize(k, scales.k, wide), v_cache=dequantize(v, scales.v, wide))
    return replace(case, k_cache=k, v_cache=v), scales, floats


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [8, 32, 64, 96, 128])
def test_every_element_is_within_half_a_step_of_what_was_written(form: KVForm, dtype: torch.dtype, dim: int) -> None:
    x = (torch.randn(40, 3, dim) * torch.logspace(-3, 3, 40)[:, None, None]).to(dtype)
    codes, scales = quantize(x, form)
    assert codes.dtype == form.dtype and scales.dtype == torch.bfloat16
    assert codes.shape == (40, 3, form.width(dim)) and scales.shape == (40, 3, form.scales(dim))
    assert codes[0].nbytes + scales[0].nbytes == 3 * form.head_bytes(dim)
    error = (dequantize(codes, scales, torch.float64) - x.double()).abs()
    if form is INT4:
        step = scales[..., : form.groups(dim)].double().repeat_interleave(dim // form.groups(dim), -1)
    elif form is INT8:
        step = scales.double()
    else:  # three bits behind the leading one, and the smallest that float8 has
        step = torch.maximum(x.double().abs() / 8, scales.double() * 2**-9)
    assert (error <= step * 0.5 * (1 + 1e-5)).all()
    assert error.max() > 0


@pytest.mark.parametrize("form", FORMS, ids=by_name)
def test_scales_are_no_larger_than_they_must_be(form: KVForm) -> None:
    """A head's largest element takes the largest code, or nearly so: bfloat16 rounds up by less than one in 128."""
    x = torch.randn(200, 1, 32)
    codes, scales = quantize(x, form)
    top = codes.float() if form is not INT4 else torch.cat([codes & 15, codes >> 4], -1).float()
    assert (top.abs().amax(-1) >= form.largest * 0.92).all() and (top.abs() <= form.largest).all()
    extent = x.abs().amax(-1) if form is not INT4 else x.amax(-1) - scales[..., 1].float()
    ratio = scales[..., 0].float() * form.largest / extent
    assert (ratio >= 1 - 1e-6).all() and (ratio <= 1 + 2**-7 + 1e-6).all()


@pytest.mark.parametrize("form", FORMS, ids=by_name)
def test_reading_is_exact_and_zeros_stay_zeros(form: KVForm) -> None:
    x = torch.randn(50, 2, 64)
    x[0] = 0
    x[1] = 1e-35
    codes, scales = quantize(x, form)
    narrow, wide = dequantize(codes, scales, torch.float32), dequantize(codes, scales, torch.float64)
    if form is not INT4:  # a minimum may be far larger than the step
        assert torch.equal(narrow.double(), wide)
    assert (narrow[0] == 0).all() and (scales[0, :, : form.groups(64)] == 1).all()
    assert narrow[1].abs().max() <= 1.1e-35


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(form: KVForm, bad: float) -> None:
    x = torch.randn(3, 1, 32)
    x[1, 0, 5] = bad
    found = dequantize(*quantize(x, form), torch.float32)
    assert found[1, 0, 5].isnan() and found[[0, 2]].isfinite().all()


def test_int4_packs_the_two_halves_of_a_head_into_bytes() -> None:
    x = torch.arange(64.0).remainder(16).view(1, 64)  # every group holds 0 ... 15: scale one, minimum zero
    x[0, 32:] = 15 - x[0, 32:]
    codes, scales = quantize(x, INT4)
    assert codes.tolist() == [[d % 16 | (15 - d % 16) << 4 for d in range(32)]]
    assert scales.tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("dim", [33, 48, 80])
def test_heads_that_int4_cannot_hold_are_refused(dim: int) -> None:
    with pytest.raises(ConfigError, match=f"multiple of 32 channels; this model's have {dim}"):
        INT4.check(dim)
    INT8.check(dim), FP8.check(dim)
    INT4.check(8), INT4.check(96)


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rope_kv_write_stores_what_quantize_makes_of_floats(form: KVForm, dtype: torch.dtype) -> None:
    case = rope_case(30, heads=4, kv_heads=2, dim=32, v_dim=64, skipped=4, dtype=dtype)
    q, k, v = case.copy().call(reference.rope_kv_write)
    assert v is not None
    own = case.copy()
    own.k_cache, own.v_cache = (torch.zeros(*x.shape[:3], form.width(x.shape[3])).to(form.dtype) for x in (k, v))
    scales = KVScales(*(torch.full((*x.shape[:3], form.scales(x.shape[3])), -1.0).bfloat16() for x in (k, v)))
    found = own.call(lambda *args: reference.rope_kv_write(*args, scales=scales))
    written = (k != 7.0).any(-1)
    assert torch.equal(found[0], q) and 0 < written.sum() < written.numel()
    for codes, beside, floats in ((own.k_cache, scales.k, k), (own.v_cache, scales.v, v)):
        wanted = quantize(floats, form)
        assert torch.equal(codes[written].float(), wanted[0][written].float())
        assert torch.equal(beside[written], wanted[1][written])
        assert (codes[~written].float() == 0).all() and (beside[~written] == -1).all()


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask", [Mask(), Mask(window=9), Mask(window=12, softcap=5.0)], ids=str)
def test_every_attention_reads_the_floats_that_the_codes_stand_for(
    form: KVForm, dtype: torch.dtype, mask: Mask
) -> None:
    case = attention_case([1, 1, 5, 17], [1, 40, 5, 29], key_dim=32, value_dim=64, mask=mask, dtype=dtype)
    codes, scales, floats = quantized(case, form)
    expected = floats.call(reference.attention)
    assert expected.isfinite().all()
    for module in (reference, cpu, invariant):
        found = codes.call(lambda *args, fn=module.attention: fn(*args, scales=scales))
        torch.testing.assert_close(found, expected, **tolerance(dtype))


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    singles=st.lists(st.integers(1, 90), max_size=5),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 4, 16]),
    dim=st.sampled_from([8, 32]),
    seed=st.integers(0, 1 << 30),
)
def test_cpu_attention_equals_reference_on_ragged_quantized_batches(
    form: KVForm, singles: list[int], chunks: list[tuple[int, int]], block_size: int, dim: int, seed: int
) -> None:
    counts, contexts = [1] * len(singles), list(singles)
    for start, count in chunks:
        counts.append(count)
        contexts.append(start + count)
    case = attention_case(counts, contexts, key_dim=dim, block_size=block_size, dtype=torch.float64, seed=seed)
    codes, scales, _ = quantized(case, form)
    expected = codes.call(lambda *args: reference.attention(*args, scales=scales))
    for _ in range(2):  # the second layer of a step finds what the first one derived
        found = codes.call(lambda *args: cpu.attention(*args, scales=scales))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_ops_are_chosen_by_the_caches_they_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, rank: int, *forms: str) -> Implementation:
        return Implementation(op="attention", name=name, fn=lambda: name, kv_forms=forms, rank=rank)

    offered = (make("plain", 0, "int8", "int4"), make("fast", 9), make("faster", 10, "int8"))
    monkeypatch.setattr("tokenmill.ops.registry.implementations", lambda device, batch_invariant: offered)
    chosen = {form: select(Need("cpu", torch.float32, kv_form=form)) for form in (None, "int8", "int4")}
    assert [ops.chosen["attention"].name for ops in chosen.values()] == ["faster", "faster", "plain"]
    assert "not fast: no int4 KV cache" in chosen["int4"].reasons["attention"]
    with pytest.raises(ConfigError, match=r"there is no op 'attention'.*plain: no fp8 KV cache"):
        select(Need("cpu", torch.float32, kv_form="fp8"))


@pytest.mark.parametrize("form", FORMS, ids=by_name)
def test_the_form_of_a_cache_is_told_by_its_codes(form: KVForm) -> None:
    assert form_of(torch.empty(1, dtype=form.dtype)) is form
