"""The KV cache of packed models on a CPU: how it is stored, laid out and copied, and what of that a user may set."""

from __future__ import annotations

import pytest
import torch
from cases import rope_case

from tokenmill import LLM, SamplingParams
from tokenmill.engine.choices import choose_kv_dtype
from tokenmill.engine.runner.state import DeviceState
from tokenmill.errors import ConfigError
from tokenmill.ops import reference
from tokenmill.ops.native import library, ops
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.packed import Packed
from tokenmill.quant.schemes.scheme import Schemes

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_packed_models_keep_halves_and_others_what_they_compute_in() -> None:
    packed, dense = Schemes(Packed()), Schemes(Dense())
    assert choose_kv_dtype("auto", torch.float32, packed, CPU)[0] == torch.float16
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert choose_kv_dtype("auto", dtype, dense, CPU)[0] == dtype
    assert choose_kv_dtype("float32", torch.float32, packed, CPU)[0] == torch.float32
    assert choose_kv_dtype("bfloat16", torch.bfloat16, dense, GPU)[0] == torch.bfloat16
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'float16', but the model computes in bfloat16"):
        choose_kv_dtype("float16", torch.bfloat16, dense, GPU)


@pytest.mark.parametrize(
    ("quantization", "cache", "stored"),
    [
        ("fp32", "auto", torch.float32),
        ("fp32,layers.0=int8", "auto", torch.float32),
        ({"layers.0-1": "fp32"}, "auto", torch.float32),
        ("fp32", "float16", torch.float16),
        ("bf16", "auto", torch.float16),
        ("int8,layers.0=fp32", "auto", torch.float16),
    ],
)
def test_float32_weights_have_a_float32_cache_unless_another_is_set(
    native: library.Library, tiny_model: str, quantization: str | dict[str, str], cache: str, stored: torch.dtype
) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 2, "max_model_len": 64}
    with LLM(tiny_model, device="cpu", quantization=quantization, kv_cache_dtype=cache, **options) as llm:
        assert llm._processor.engine.runner.state.arena.dtype == stored


@pytest.mark.parametrize(("wanted", "stored"), [("auto", "float16"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_packed_model_answers_with_every_cache_and_says_which(
    native: library.Library, default_model: str, wanted: str, stored: str
) -> None:
    prompts = ["The capital of France is", "One, two, three, four,"]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with LLM(default_model, device="cpu", max_num_seqs=4, max_model_len=256, kv_cache_dtype=wanted) as llm:
        state = llm._processor.engine.runner.state
        assert str(state.arena.dtype) == f"torch.{stored}"
        assert any(line.startswith(f"kv cache     {stored} (") for line in llm.plan_lines())
        assert llm._built.settings.memory.kv == state.arena.nbytes
        texts = [one.outputs[0].text for one in llm.generate(prompts, greedy, use_tqdm=False)]
    assert "Paris" in texts[0] and "five" in texts[1]


def test_keys_beyond_the_range_of_halves_are_reported_with_the_way_out(
    native: library.Library, default_model: str
) -> None:
    """Nothing that a float16 cache cannot hold becomes a wrong answer."""
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    ends = {}
    for dtype in ("auto", "float32"):
        with LLM(default_model, device="cpu", max_num_seqs=4, max_model_len=256, kv_cache_dtype=dtype) as llm:
            runner = llm._processor.engine.runner
            runner.decoder.weights.layer(0).before_attention.mul_(1e6)
            ends[dtype] = llm.generate("The capital of France is", greedy, use_tqdm=False)[0]
            if dtype == "float32":
                assert runner.state.arena[0].abs().max() > torch.finfo(torch.float16).max
    assert ends["auto"].outputs[0].finish_reason == "error" and "kv_cache_dtype" in (ends["auto"].error or "")
    assert ends["float32"].outputs[0].finish_reason == "length" and ends["float32"].error is None


def test_blocks_are_copied_in_every_layer(native: library.Library, default_model: str) -> None:
    """As for forks; the arena is a view of memory in which the blocks of all layers lie together."""
    with LLM(default_model, device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        state: DeviceState = llm._processor.engine.runner.state
        assert state.arena.stride(2) > state.arena.stride(0) > state.arena.stride(1)
        state.arena.copy_(torch.randn(state.arena.shape))
        before = state.arena.clone()
        state.copy_blocks(torch.tensor([1, 5]), torch.tensor([2, 0]))
        assert torch.equal(state.arena[:, :, [2, 0]], before[:, :, [1, 5]])
        assert torch.equal(state.arena[:, :, [1, 3, 4, 5, 6]], before[:, :, [1, 3, 4, 5, 6]])
        layer = state.kv[3]
        assert torch.equal(layer.k, state.arena[3, 0]) and torch.equal(layer.v, state.arena[3, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_are_written_to_caches_of_any_layout(level: int, dtype: torch.dtype) -> None:
    case = rope_case(40, heads=3, kv_heads=2, dim=40, v_dim=24, rotated=36, skipped=3)
    expected = case.copy().call(reference.rope_kv_write)
    own = case.copy()
    shape = own.k_cache.shape
    memory = torch.full((shape[0], 2, *shape[1:]), 7.0, dtype=dtype)  # as the case's own, where nothing is written
    own.k_cache, own.v_cache = memory[:, 0], memory[:, 1, :, :, :24]
    found = own.call(ops.rope_kv_write)
    close = {"rtol": 2**-7, "atol": 1e-3} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        assert (wanted != 7.0).any()
        torch.testing.assert_close(got.float(), wanted, **close)
    assert (memory[:, 1, :, :, 24:] == 7.0).all()
