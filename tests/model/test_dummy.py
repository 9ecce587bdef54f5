"""Dummy weights: a usable model from a config alone, the same for the same seed."""

from __future__ import annotations

import published_configs as published
import pytest
import tiny_models
import torch
from decoder_driver import Sequence, make_decoder
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill.model.families import spec_from_config
from tokenmill.model.weights import dummy
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.ops.native.library import Library
from tokenmill.ops.native.library import load as load_native
from tokenmill.quant.schemes.packed import Packed
from tokenmill.quant.schemes.scheme import Schemes

PROMPT = list(range(3, 33))


def tiny_spec(case: str):
    return spec_from_config(tiny_models.make(case).config.to_dict() | {"architectures": None})


def run(spec, dtype, seed):
    return Sequence(make_decoder(spec, dummy_weights(spec, dtype, "cpu", seed), 64), 64).push(PROMPT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", ["llama", "gemma3", "olmo2", "deepseek-v2", "qwen3-moe"])
def test_logits_are_finite_and_tell_tokens_apart(case, dtype):
    logits = run(tiny_spec(case), dtype, seed=0)
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std() < 30
    assert len(set(logits.argmax(-1).tolist())) > 3


def test_the_seed_decides_the_weights():
    spec = tiny_spec("deepseek-v2")
    first = run(spec, torch.float32, seed=5)
    assert torch.equal(run(spec, torch.float32, seed=5), first)
    assert not torch.equal(run(spec, torch.float32, seed=6), first)


def test_a_deep_model_in_half_precision_does_not_overflow():
    config = published.SMOLLM2_135M | {"num_hidden_layers": 60, "hidden_size": 144, "vocab_size": 500}
    assert torch.isfinite(run(spec_from_config(config), torch.float16, seed=1)).all()


def test_the_bytes_allocated_are_the_bytes_planned():
    for case in ("llama-multi-head", "gemma2", "deepseek-v2", "llama-biases"):
        spec = tiny_spec(case)
        weights = dummy_weights(spec, torch.bfloat16, "cpu", seed=0)
        tensors = {id(tensor): tensor for tensor in _tensors(weights)}
        assert sum(tensor.nbytes for tensor in tensors.values()) == spec.weight_bytes(2)


class _Largest(TorchDispatchMode):
    """How many elements the largest float32 tensor had that was made inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.skipif(not isinstance(load_native(), Library), reason="needs the native library")
def test_packed_weights_are_drawn_in_chunks_and_are_the_same(monkeypatch):
    config = published.SMOLLM2_135M | {"num_hidden_layers": 1, "hidden_size": 144, "vocab_size": 500}
    spec = spec_from_config(config | {"dtype": "bfloat16"})

    def packed():
        with _Largest() as seen:
            store = dummy_weights(spec, torch.float32, "cpu", 3, Schemes(Packed()))
        return store.embedding(torch.arange(500)), seen.elements

    whole, most = packed()
    assert most >= 500 * 144 and 0.9 < whole.std() * 12 < 1.1
    monkeypatch.setattr(dummy, "_CHUNK", 144 * 100)
    chunked, most = packed()
    assert torch.equal(chunked, whole) and most <= 144 * 100


def _tensors(node):
    """Every tensor reachable from the store."""
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict):
        yield from (found for value in node.values() for found in _tensors(value))
    elif isinstance(node, list):
        yield from (found for value in node for found in _tensors(value))
    elif hasattr(node, "__dict__"):
        yield from _tensors(vars(node))
