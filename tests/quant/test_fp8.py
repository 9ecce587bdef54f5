"""fp8 weights: what is stored, what is computed with it, and how far answers move."""

from __future__ import annotations

import pytest
import torch
from fp8_models import QuantizedInputs, logits_of

from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.engine.choices import model_bytes
from tokenmill.errors import ConfigError
from tokenmill.model.families import spec_from_config
from tokenmill.model.layers import ResidentWeights
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.ops.matmul_torch import FLOAT8, LIMITS, quantize_rows
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.row_scaled import Fp8
from tokenmill.quant.schemes.scheme import Linear, Schemes

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "mlp_bias": True,
}  # fmt: skip


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> Linear:
    scheme = Fp8()
    storage = scheme.allocate(*weight.shape, dtype, CPU)
    scheme.write(storage, 0, weight)
    return Linear(scheme, storage)


def test_every_weight_is_within_half_a_unit_of_what_was_written():
    weight = randn(40, 96) * torch.logspace(-6, 3, 40)[:, None]
    storage = stored(weight).storage
    back = storage["weight"].float() * storage["scale"][:, None]
    # Three bits of mantissa; below the smallest normal number the step is fixed.
    limit = torch.maximum(weight.abs() * 2**-4, storage["scale"][:, None] * 2**-10)
    assert ((back - weight).abs() <= limit * 1.001).all()
    assert (storage["weight"].float().abs().amax(1) == LIMITS[FLOAT8][1]).all()


def test_rows_of_zeros_and_extreme_rows_stay_finite():
    weight = torch.stack([torch.zeros(32), torch.full((32,), 1e30), torch.full((32,), 1e-30)])
    out = stored(weight)(torch.ones(1, 32))
    assert out[0, 0] == 0
    torch.testing.assert_close(out[0, 1:], torch.tensor([32e30, 32e-30]), rtol=1e-5, atol=0)


def test_pieces_written_in_any_order_give_the_same_storage(monkeypatch):
    weight = randn(50, 64)
    whole = stored(weight).storage
    monkeypatch.setattr("tokenmill.quant.schemes.row_scaled._CHUNK", 7 * 64)
    scheme = Fp8()
    pieces = scheme.allocate(50, 64, torch.float32, CPU)
    for first, last in ((30, 50), (0, 11), (11, 30)):
        scheme.write(pieces, first, weight[first:last])
    for name, tensor in whole.items():
        assert torch.equal(pieces[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_those_of_the_stored_numbers(dtype):
    layer = stored(randn(24, 64), dtype)
    x, bias = randn(2, 5, 64, seed=1).to(dtype), randn(24, seed=2).to(dtype)
    weight = layer.storage["weight"].double() * layer.storage["scale"].double()[:, None]
    expected = torch.nn.functional.linear(x.double(), weight, bias.double())
    got = Linear(layer.scheme, layer.storage, bias)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=expected.abs().max().item() * 2**-7)


def test_input_that_is_quantized_already_is_taken_as_it_is():
    layer, x = stored(randn(24, 64)), randn(7, 64, seed=1)
    rows = quantize_rows(x)
    assert rows.values.dtype == FLOAT8 and rows.scale.shape == (7,)
    got = layer(rows)
    torch.testing.assert_close(got, layer(rows.values.float() * rows.scale[:, None]))


def test_head_and_embedding_stay_as_they_are():
    spec = spec_from_config(LLAMA)
    weights = dummy_weights(spec, torch.bfloat16, "cpu", 0, Schemes.inside(Fp8()))
    assert isinstance(weights.lm_head.scheme, Dense) and weights.embed.dtype == torch.bfloat16
    layer = weights.layer(0)
    for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(linear.scheme, Fp8) and linear.storage["weight"].dtype == FLOAT8


def test_the_bytes_allocated_are_the_bytes_planned():
    spec = spec_from_config(LLAMA)
    dense, fp8 = (model_bytes(spec, torch.bfloat16, Schemes.inside(scheme)).weights for scheme in (Dense(), Fp8()))
    assert dense == spec.weight_bytes(2)
    weights = dummy_weights(spec, torch.bfloat16, "cpu", 0, Schemes.inside(Fp8()))
    assert sum(tensor.nbytes for tensor in tensors(weights)) == fp8 < dense * 0.7


def tensors(weights: ResidentWeights):
    yield from (weights.embed, weights.final_norm, *weights.lm_head.storage.values())
    for layer in map(weights.layer, range(3)):
        yield from (layer.before_attention, layer.before_mlp)
        for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
            yield from linear.storage.values()
            if linear.bias is not None:
                yield linear.bias


@pytest.mark.parametrize(("scheme", "limit"), [(Fp8(), 0.12), (QuantizedInputs(), 0.18)], ids=["weights", "inputs too"])
def test_logits_of_a_random_model_stay_close(scheme, limit):
    """Rounding to three bits moves a number by 2.6 % on average, and a random model damps nothing."""
    spec, ids = spec_from_config(LLAMA), list(range(5, 105))
    exact = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3), ids)
    moved = logits_of(spec, dummy_weights(spec, torch.float32, "cpu", 3, Schemes.inside(scheme)), ids)
    error = (moved - exact).norm() / exact.norm()
    assert 0.001 < error < limit, f"logits moved by {error:.1%}"


def test_the_engine_answers_with_fp8_on_a_cpu(tiny_model):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4}
    answers = []
    for _ in range(2):
        with LLM(tiny_model, quantization="fp8", **settings) as llm:
            answers.append(llm.generate([{"prompt_token_ids": [5, 9, 14]}], params, use_tqdm=False)[0].outputs[0])
    assert len(answers[0].token_ids) == 12 and answers[0].token_ids == answers[1].token_ids


@pytest.mark.parametrize("wanted", ["hqq", "FP8", "", "int3"])
def test_other_schemes_are_refused_with_what_there_is(wanted):
    with pytest.raises(ConfigError, match="there are int8, int4, w8a8, fp8"):
        EngineConfig(quantization=wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [1, 5, 64, 100, 300])
@pytest.mark.parametrize("scheme", [Dense(), Fp8()], ids=["dense", "fp8"])
def test_products_on_the_gpu_are_those_of_the_stored_numbers(scheme, rows):
    cuda, dtype = torch.device("cuda", 0), torch.bfloat16
    storage = scheme.allocate(512, 1024, dtype, cuda)
    scheme.write(storage, 0, randn(512, 1024).to(dtype))
    x, bias = randn(rows, 1024, seed=1).to(cuda, dtype), randn(512, seed=2).to(cuda, dtype)
    weight = storage["weight"].double()
    weight = weight * storage["scale"].double()[:, None] if "scale" in storage else weight
    expected = torch.nn.functional.linear(x.double(), weight, bias.double())
    for _ in range(2):
        error = (Linear(scheme, storage, bias)(x).double() - expected).norm() / expected.norm()
        assert error < (0.04 if scheme.name == "fp8" and rows > 64 else 0.004)
