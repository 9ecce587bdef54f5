"""A KV cache in eight bits on the native library: written and read as the reference does it, on graphs and off them."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import AttentionCase, attention_case, rope_case, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import LLM, SamplingParams
from tokenmill.ops import reference
from tokenmill.ops.kv_forms import INT8, KVScales, dequantize, quantize
from tokenmill.ops.native import library, ops
from tokenmill.ops.registry import Need, select
from tokenmill.ops.types import Mask

CLOSE = tolerance(torch.float32)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def quantized(case: AttentionCase) -> tuple[AttentionCase, KVScales]:
    """Codes instead of floats; where nothing was written, codes of -128 and scales that are not a number."""
    unused = case.k_cache.isnan().any(-1, keepdim=True)
    codes, scales = [], []
    for cache in (case.k_cache, case.v_cache):
        code, scale = quantize(cache.nan_to_num(), INT8)
        codes.append(code.masked_fill(unused, -128))
        scales.append(scale.masked_fill(unused, math.nan))
    return replace(case, k_cache=codes[0], v_cache=codes[1]), KVScales(*scales)


def attend(case: AttentionCase, scales: KVScales, module: Any = ops) -> torch.Tensor:
    return case.call(lambda *args: module.attention(*args, scales=scales))


@st.composite
def cases(draw: Any) -> AttentionCase:
    singles = draw(st.lists(st.integers(1, 200), max_size=5))
    chunks = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(2, 90)), min_size=1, max_size=3))
    window = draw(st.sampled_from([None, None, 1, 5, 64, 300]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    key_dim = draw(st.sampled_from([4, 16, 20, 64, 67]))
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
        seed=draw(st.integers(0, 1 << 30)),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_attention_over_codes_equals_reference(level: int, case: AttentionCase) -> None:
    codes, scales = quantized(case)
    expected = attend(codes, scales, reference)
    assert expected.isfinite().all()
    torch.testing.assert_close(attend(codes, scales), expected, **CLOSE)


def test_long_contexts_and_other_layouts(level: int) -> None:
    """A single of several pieces; and caches as the engine lays them out, with other layers between the blocks."""
    case, scales = quantized(
        attention_case([1, 1, 70], [3000, 1025, 90], heads=6, kv_heads=2, key_dim=64, block_size=16)
    )
    expected = attend(case, scales)
    torch.testing.assert_close(expected, attend(case, scales, reference), **CLOSE)

    def between_layers(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x, x], 1)[:, 1]

    other = replace(case, k_cache=between_layers(case.k_cache), v_cache=between_layers(case.v_cache))
    apart = KVScales(between_layers(scales.k), between_layers(scales.v))
    assert not other.k_cache.is_contiguous() and torch.equal(attend(other, apart), expected)


def test_neither_threads_nor_the_size_of_chunks_change_a_bit(level: int, native: library.Library) -> None:
    case, scales = quantized(attention_case([200], [330], heads=6, kv_heads=2, key_dim=32, block_size=16))
    found = []
    for threads in (1, 3):
        native.threads = threads
        found.append(attend(case, scales))
    native.threads = 1
    assert torch.equal(found[0], found[1])
    for first, count in ((0, 2), (2, 70), (72, 128)):
        batch = replace(
            case.batch,
            q_start=torch.tensor([0, count], dtype=torch.int32),
            context=torch.tensor([130 + first + count], dtype=torch.int32),
        )
        part = replace(case, q=case.q[first : first + count], batch=batch)
        assert torch.equal(attend(part, scales), found[0][first : first + count])


@pytest.mark.parametrize(("dim", "v_dim", "rotated"), [(64, 64, 64), (40, 24, 36), (67, 5, 6), (1000, 1000, 64)])
def test_keys_and_values_are_written_as_the_reference_writes_them(
    level: int, dim: int, v_dim: int, rotated: int
) -> None:
    case = rope_case(40, heads=3, kv_heads=2, dim=dim, v_dim=v_dim, rotated=rotated, skipped=3)
    case.fused[4], case.fused[5] = 0, 1e-36
    found, wanted = [], []
    for module, results in ((ops, found), (reference, wanted)):
        own = case.copy()
        assert own.v_cache is not None
        own.k_cache, own.v_cache = (
            torch.full((x.shape[0], 2, *x.shape[1:]), 99, dtype=torch.int8)[:, 1] for x in (own.k_cache, own.v_cache)
        )
        scales = KVScales(*(torch.full((*x.shape[:3], 1), -1.0).bfloat16() for x in (own.k_cache, own.v_cache)))
        own.call(lambda *args, fn=module.rope_kv_write, beside=scales: fn(*args, scales=beside))
        results += [(own.k_cache, scales.k), (own.v_cache, scales.v)]
    for (codes, scale), (expected, expected_scale) in zip(found, wanted, strict=True):
        written = (expected_scale != -1)[..., 0]
        assert 0 < written.sum() < written.numel()
        assert (codes[~written] == 99).all() and (scale[~written] == -1).all()
        # The rotation rounds otherwise in its last bit, which may move a code to its neighbour, but hardly ever does.
        assert (scale[written] != expected_scale[written]).float().mean() < 0.01
        apart = (codes[written].int() - expected[written].int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 0.002
    assert torch.equal(found[1][0], wanted[1][0]) and torch.equal(found[1][1], wanted[1][1])  # values are not rotated


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(level: int, bad: float) -> None:
    case = rope_case(3, dim=20, kv_heads=1)
    case.fused[1, -20:] = torch.linspace(-1, 1, 20)
    case.fused[1, -1], case.fused[2, -20] = bad, bad  # values: one past the whole vectors, one inside
    own = case.copy()
    assert own.v_cache is not None
    own.k_cache, own.v_cache = own.k_cache.to(torch.int8), own.v_cache.to(torch.int8)
    scales = KVScales(*(torch.zeros(*own.k_cache.shape[:3], 1).bfloat16() for _ in range(2)))
    own.call(lambda *args: ops.rope_kv_write(*args, scales=scales))
    values = dequantize(own.v_cache, scales.v, torch.float32).flatten(0, 1)[own.slots, 0]
    assert values[0].isfinite().all() and values[1].isnan().any() and values[2].isnan().any()


def test_a_packed_model_answers_from_codes_on_a_graph(native: library.Library, default_model: str) -> None:
    prompts = ["The capital of France is", "One, two, three, four,"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(default_model, device="cpu", max_num_seqs=4, max_model_len=256, kv_cache_dtype="int8") as llm:
            runner = llm._processor.engine.runner
            chosen = runner.decoder.ops.chosen
            assert {chosen[op].name for op in ("attention", "rope_kv_write")} == {"native"}
            texts = [one.outputs[0].text for one in llm.generate(prompts, GREEDY, use_tqdm=False)]
            assert runner._recorded is not None and runner._recorded._graph is not None
            state = runner.state
            assert state.arena.dtype == torch.int8 and state.arena.stride(2) > state.arena.stride(0)
            assert llm._built.settings.memory.kv == state.arena.nbytes + state.scales.nbytes
            before = state.arena.clone(), state.scales.clone()
            assert before[0].any() and (before[1] > 0).any()
            state.copy_blocks(torch.tensor([0, 1]), torch.tensor([5, 6]))
            for arena, old in zip((state.arena, state.scales), before, strict=True):
                assert torch.equal(arena[:, :, [5, 6]], old[:, :, [0, 1]])
                assert torch.equal(arena[:, :, :5], old[:, :, :5])
    assert "Paris" in texts[0] and "five" in texts[1]


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_other_forms_are_left_to_torch(native: library.Library, form: str) -> None:
    chosen = select(Need("cpu", torch.float32, kv_form=form)).chosen
    assert chosen["attention"].name == "cpu" and chosen["rope_kv_write"].name == "reference"
    assert chosen["rms_norm"].name == "native"
