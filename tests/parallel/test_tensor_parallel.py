"""Ranks that divide heads, columns, experts and the vocabulary compute what one rank does, of any architecture."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import tiny_models
import torch
from decoder_driver import BLOCK, Sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_ranks

from tokenmill.engine.choices import check_invariant, invariant_schemes
from tokenmill.errors import ConfigError
from tokenmill.model.decoder import Decoder
from tokenmill.model.experts import ExpertLimits, within_capacity
from tokenmill.model.families import spec_from_config
from tokenmill.model.shard import Shard, spec_of
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.load import load_weights
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.ops.native import library
from tokenmill.ops.registry import Need, Ops, select
from tokenmill.parallel.communicator import Communicator
from tokenmill.quant.schemes.choose import ComputeTarget

PROMPT = list(range(3, 23))
PLAIN = ComputeTarget(torch.device("cpu"), torch.float32)
MOE = ["mixtral", "qwen3-moe", "qwen3-moe-some-dense", "deepseek-v2-lite", "deepseek-v2"]
# (case, tensor-parallel ranks, whether whole experts are divided)
LAYOUTS = [(case, 2, False) for case in tiny_models.CASES] + [(case, 2, True) for case in MOE]
LAYOUTS += [
    (case, 4, False) for case in ("llama", "llama-multi-query", "llama-biases", "gemma2", "olmo2", "deepseek-v2")
]
LAYOUTS += [("qwen3-moe", 4, True), ("mixtral", 4, True)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """case -> its checkpoint; made once."""
    made = {}

    def checkpoint(case: str) -> SafetensorsCheckpoint:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            tiny_models.make(case).save_pretrained(made[case])
        return SafetensorsCheckpoint(made[case])

    return checkpoint


def ops_for(spec: DecoderSpec, dtype: torch.dtype) -> Ops:
    return select(Need("cpu", dtype, spec.attention_head_dim, BLOCK), prefer="cpu")


def decoder_of(checkpoint: SafetensorsCheckpoint, dtype: torch.dtype) -> Decoder:
    spec = spec_from_config(checkpoint.config)
    return Decoder(spec, load_weights(spec, checkpoint, dtype, "cpu"), ops_for(spec, dtype), 64)


def rank_decoder(
    checkpoint: SafetensorsCheckpoint, dtype: torch.dtype, ranks: Communicator, whole_experts: bool = False
) -> Decoder:
    ep = (ranks.rank, ranks.size) if whole_experts else (0, 1)
    spec = spec_of(spec_from_config(checkpoint.config), Shard(ranks.rank, ranks.size, *ep))
    return Decoder(spec, load_weights(spec, checkpoint, dtype, "cpu"), ops_for(spec, dtype), 64, ranks)


def invariant_decoder(
    checkpoint: SafetensorsCheckpoint, dtype: torch.dtype, native: bool, ranks: Communicator | None = None
) -> Decoder:
    spec = spec_from_config(checkpoint.config)
    if ranks is not None:
        spec = spec_of(spec, Shard(ranks.rank, ranks.size))
    place = ComputeTarget(torch.device("cpu"), dtype, native)
    check_invariant(spec, place, as_floats=True)
    schemes = invariant_schemes(spec, place)
    need = Need("cpu", dtype, spec.attention_head_dim, BLOCK, batch_invariant=True)
    weights = load_weights(spec, checkpoint, dtype, "cpu", schemes=schemes)
    return Decoder(spec, weights, select(need, "native" if native else None), 64, ranks)


def logits_of(decoder: Decoder) -> torch.Tensor:  # [tokens, vocab]
    """Of a prompt in two chunks and of a decoded token."""
    sequence = Sequence(decoder, 64)
    return torch.cat([sequence.push(PROMPT[:11]), sequence.push(PROMPT[11:]), sequence.push([7])])


@pytest.mark.parametrize(("case", "size", "whole_experts"), LAYOUTS)
def test_ranks_together_compute_the_logits_of_one(case, size, whole_experts, saved):
    alone = logits_of(decoder_of(saved(case), torch.float64))
    parts = on_ranks(size, lambda ranks: logits_of(rank_decoder(saved(case), torch.float64, ranks, whole_experts)))
    torch.testing.assert_close(torch.cat(parts, dim=1), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "native"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)])
@pytest.mark.parametrize(
    "case", ["llama", "llama-biases", "llama-multi-query", "gemma2", "olmo2", "mixtral", "qwen3-moe"]
)
def test_batch_invariant_logits_have_the_same_bits_on_one_two_and_four_ranks(case, dtype, native, saved):
    if native and isinstance(library.load(), str):
        pytest.skip("there is no native library")
    alone = logits_of(invariant_decoder(saved(case), dtype, native))
    for size in (2, 4):
        parts = on_ranks(size, lambda ranks: logits_of(invariant_decoder(saved(case), dtype, native, ranks)))
        assert torch.equal(torch.cat(parts, dim=1), alone)


@pytest.mark.parametrize("case", ["llama", "mixtral", "olmo2"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_exchange_what_the_formula_says(case, size, saved):
    """A sum for the embedding, and one behind each half of a layer, of every token's hidden state."""

    def run(ranks: Communicator) -> tuple[int, int, int, DecoderSpec]:
        decoder = rank_decoder(saved(case), torch.float64, ranks)
        Sequence(decoder, 64).push(PROMPT)
        return ranks.counts["all_reduce"], ranks.bytes["all_reduce"], ranks.bytes["all_gather"], decoder.spec

    for sums, summed, gathered, spec in on_ranks(size, run):
        assert sums == 1 + 2 * spec.num_layers
        assert summed == sums * len(PROMPT) * spec.hidden * 8
        normed = spec.q_size + spec.kv_size if case == "olmo2" else 0  # queries and keys of all heads are normed as one
        assert gathered == spec.num_layers * len(PROMPT) * normed * 8


@pytest.mark.parametrize(("case", "hot"), [("qwen3-moe", (1, 6)), ("mixtral", (0, 1, 2, 3)), ("deepseek-v2", (7,))])
def test_hot_experts_that_all_ranks_have_change_no_logits(case, hot, saved):
    alone = logits_of(decoder_of(saved(case), torch.float64))

    def run(ranks: Communicator) -> torch.Tensor:
        spec = spec_of(spec_from_config(saved(case).config), Shard(ranks.rank, 2, ranks.rank, 2), hot)
        weights = load_weights(spec, saved(case), torch.float64, "cpu")
        return logits_of(Decoder(spec, weights, ops_for(spec, torch.float64), 64, ranks))

    torch.testing.assert_close(torch.cat(on_ranks(2, run), dim=1), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["qwen3-moe-some-dense", "deepseek-v2"])
def test_how_often_experts_are_chosen_is_counted_by_layer(case, saved):
    decoder = decoder_of(saved(case), torch.float64)
    load = decoder.count_experts()
    logits_of(decoder)
    spec = decoder.spec
    tokens = len(PROMPT) + 1
    assert load.counts.sum(1).tolist() == [tokens * spec.moe.top_k * spec.is_moe(i) for i in range(spec.num_layers)]
    two = load.hottest(2)
    assert min(load.counts.sum(0)[list(two)]) == sorted(load.counts.sum(0).tolist())[-2]
    assert (
        on_ranks(2, lambda ranks: _counted(rank_decoder(saved(case), torch.float64, ranks, True)))
        == [load.counts.tolist()] * 2
    )


def _counted(decoder: Decoder) -> list[list[int]]:
    load = decoder.count_experts()
    logits_of(decoder)
    return load.counts.tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), st.integers(1, 12), st.integers(0, 2**20))
def test_an_expert_takes_the_first_tokens_up_to_its_capacity(tokens, top_k, experts, capacity, seed):
    random = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=random).argsort(-1)[:, :top_k]
    share = torch.rand(tokens, top_k, generator=random) + 0.1
    kept, dropped = within_capacity(share, chosen, capacity)
    taken: Counter[int] = Counter()
    for token, place in product(range(tokens), range(top_k)):
        expert = int(chosen[token, place])
        taken[expert] += 1
        expected = share[token, place] if taken[expert] <= capacity else 0
        assert kept[token, place] == expected
    assert int(dropped) == sum(max(0, count - capacity) for count in taken.values())


def test_a_capacity_drops_tokens_of_crowded_experts_alike_on_all_ranks(saved):
    exact = logits_of(decoder_of(saved("qwen3-moe"), torch.float64))

    def limited(decoder: Decoder) -> tuple[torch.Tensor, int]:
        decoder.expert_limits = ExpertLimits(capacity=0.5)
        load = decoder.count_experts()
        return logits_of(decoder), int(load.dropped.sum())

    alone, dropped = limited(decoder_of(saved("qwen3-moe"), torch.float64))
    assert 0 < dropped < 0.5 * 3 * len(PROMPT) * 3 and not torch.allclose(alone, exact)
    parts = on_ranks(2, lambda ranks: limited(rank_decoder(saved("qwen3-moe"), torch.float64, ranks, True)))
    torch.testing.assert_close(torch.cat([logits for logits, _ in parts], dim=1), alone, rtol=1e-9, atol=1e-9)
    assert [count for _, count in parts] == [dropped] * 2


@pytest.mark.parametrize(
    ("case", "shard", "told"),
    [
        ("llama", Shard(0, 1), None),
        ("qwen3-moe", Shard(0, 2, 0, 2), "ranks that divide whole experts"),
        ("deepseek-v2", Shard(0, 1), "projects its latent attention"),
    ],
)
def test_batch_invariance_that_ranks_cannot_keep_is_refused(case, shard, told, saved):
    spec = spec_of(spec_from_config(saved(case).config), shard)
    if told is None:
        check_invariant(spec, PLAIN, as_floats=True)
        return
    with pytest.raises(ConfigError, match=told):
        check_invariant(spec, PLAIN, as_floats=True)


def test_what_only_one_rank_computes_invariantly_is_refused_for_several(saved):
    native = replace(PLAIN, native=True)
    latent, dense = (spec_from_config(saved(case).config) for case in ("deepseek-v2", "llama"))
    check_invariant(latent, native, as_floats=False)
    with pytest.raises(ConfigError, match="latent attention has the same bits on one rank only"):
        check_invariant(spec_of(latent, Shard(0, 2)), native, as_floats=True)
    check_invariant(spec_of(dense, Shard(0, 2)), native, as_floats=True)
    with pytest.raises(ConfigError, match="divide the columns of quantized or rounded weights"):
        check_invariant(spec_of(dense, Shard(0, 2)), native, as_floats=False)


def test_batch_invariance_of_sizes_without_four_slices_is_refused_for_several_ranks(saved):
    whole = replace(spec_from_config(saved("llama").config), intermediate=82)
    check_invariant(whole, PLAIN, as_floats=True)
    with pytest.raises(ConfigError, match="82 inner columns, which are not divided into 4 slices"):
        check_invariant(spec_of(whole, Shard(0, 2)), PLAIN, as_floats=True)
    three = replace(whole, heads=6, kv_heads=3, intermediate=84)
    with pytest.raises(ConfigError, match="which 3 ranks cannot divide"):
        check_invariant(spec_of(three, Shard(0, 3)), PLAIN, as_floats=True)
