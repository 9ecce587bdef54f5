"""A model cut into stages gives the bits of the whole, whatever its architecture; a stage loads only its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from decoder_driver import Sequence, make_decoder
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY

from tokenmill.errors import ConfigError, ModelError
from tokenmill.model.decoder import Decoder, TokenBatch
from tokenmill.model.families import spec_from_config
from tokenmill.model.stage import divide, layer_costs, stages_of
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.model.weights.load import load_weights
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint

PROMPT = torch.randint(3, 160, (23,), generator=torch.Generator().manual_seed(7)).tolist()
CASES = ("llama-multi-head", "llama-biases", "qwen3", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3-moe-some-dense")
LATENT = ("deepseek-v2-lite", "deepseek-v2")


class Watched(SafetensorsCheckpoint):
    """Notes which tensors are read."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def tensor(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return super().tensor(name)


class Staged(Decoder):
    """Stages one behind the other, as if they were one decoder."""

    def __init__(self, stages: list[Decoder]) -> None:
        self.stages = stages
        last = stages[-1]
        shapes = [shape for stage in stages for shape in stage.spec.kv_shapes]
        self.spec = dataclasses.replace(last.spec)
        self.spec.__dict__["kv_shapes"] = shapes
        self.weights = last.weights

    def forward(self, tokens: TokenBatch, kv, watch=None, wanted=None):
        at = 0
        for stage in self.stages[:-1]:
            tokens.enters = stage.leave(tokens, kv[at : at + stage.spec.num_layers])
            at += stage.spec.num_layers
        return self.stages[-1].forward(tokens, kv[at:], wanted=wanted)

    def logits(self, hidden, wide=True):
        return self.stages[-1].logits(hidden, wide)


@pytest.fixture(scope="module", params=[*CASES, *LATENT])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny_models.make(request.param).save_pretrained(folder)
    return folder


def logits_of(decoder: Decoder) -> torch.Tensor:
    sequence = Sequence(decoder, 64)
    parts = [sequence.push(PROMPT[:9], wanted=[8]), sequence.push(PROMPT[9:]), *(sequence.push([n]) for n in (5, 90))]
    return torch.cat(parts)


@pytest.mark.parametrize("count", [2, 3])
def test_stages_give_the_bits_of_one_rank_and_read_every_tensor_once(saved, count):
    checkpoint = Watched(saved)
    spec = spec_from_config(checkpoint.config)
    whole = make_decoder(spec, load_weights(spec, checkpoint, torch.float32, "cpu"), 64)
    read, checkpoint.read = set(checkpoint.read), []
    stages, by_stage = [], []
    for part in stages_of(spec, count):
        stages.append(make_decoder(part, load_weights(part, checkpoint, torch.float32, "cpu"), 64))
        by_stage.append(set(checkpoint.read))
        checkpoint.read = []
    assert set.union(*by_stage) == read
    twice = {name for one in by_stage for other in by_stage if one is not other for name in one & other}
    assert twice <= ({"model.embed_tokens.weight"} if spec.tie_embeddings else set())
    assert torch.equal(logits_of(Staged(stages)), logits_of(whole))


def test_dummy_weights_of_a_stage_are_those_of_the_model():
    spec = spec_from_config(TINY | {"num_hidden_layers": 5})
    made = [dummy_weights(part, torch.float32, "cpu", 3) for part in (spec, *stages_of(spec, 3))]
    whole, stages = (make_decoder(spec, made[0], 64), list(map(make_decoder, stages_of(spec, 3), made[1:], [64] * 3)))
    assert torch.equal(logits_of_tiny(Staged(stages)), logits_of_tiny(whole))


def logits_of_tiny(decoder: Decoder) -> torch.Tensor:
    return Sequence(decoder, 32).push([token % TINY["vocab_size"] for token in PROMPT])


def test_a_tensor_that_no_stage_uses_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_models.make("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for part in stages_of(spec_from_config(checkpoint.config), 2):
        with pytest.raises(ModelError, match=r"extra\.weight"):
            load_weights(part, checkpoint, torch.float32, "cpu")


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_cheaper_most_expensive_stage(costs, data):
    count = data.draw(st.integers(1, len(costs)))
    found = divide(costs, count)
    assert [index for layers in found for index in layers] == list(range(len(costs))) and all(found)

    def cheapest(left: list[int], parts: int) -> float:
        if parts == 1:
            return sum(left)
        ends = range(1, len(left) - parts + 2)
        return min(max(sum(left[:end]), cheapest(left[end:], parts - 1)) for end in ends)

    assert max(sum(costs[index] for index in layers) for layers in found) == cheapest(costs, count)


def test_the_head_counts_as_layers():
    spec = spec_from_config(TINY | {"num_hidden_layers": 8, "vocab_size": 1000})
    costs = layer_costs(spec)
    head = costs[-1] / costs[0] - 1
    assert 3 < head < 5
    first, last = (part.num_layers for part in stages_of(spec, 2))
    assert first + last == 8 and first == 6


def test_fewer_layers_than_stages_are_refused_in_a_sentence():
    spec = spec_from_config(TINY)
    with pytest.raises(ConfigError, match="has 2 layers, which cannot be divided among 3 stages; pp may be up to 2"):
        stages_of(spec, 3)
