"""Ranks with requests of their own and experts of each other: tokens go to their experts, and nothing else changes."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from decoder_driver import BLOCK, Sequence
from thread_ranks import on_ranks

from tokenmill.model.decoder import Decoder
from tokenmill.model.families import spec_from_config
from tokenmill.model.shard import shard_of, spec_of
from tokenmill.model.weights.load import load_weights
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.ops.registry import Need, select
from tokenmill.parallel.communicator import Communicator
from tokenmill.parallel.layout import parse_layout
from tokenmill.parallel.threads import thread_communicators

TEXTS = [[list(range(3, 23)), [7], [9]], [[50, 51], [52, 53, 54], [55]], [[80] * 9, [81], [82, 83]], [[5], [6], [7]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def checkpoint(case: str) -> SafetensorsCheckpoint:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            tiny_models.make(case).save_pretrained(made[case])
        return SafetensorsCheckpoint(made[case])

    return checkpoint


def decoder_of(checkpoint, spec, **ranks) -> Decoder:
    ops = select(Need("cpu", torch.float64, spec.attention_head_dim, BLOCK), prefer="cpu")
    return Decoder(spec, load_weights(spec, checkpoint, torch.float64, "cpu"), ops, 64, **ranks)


def logits_of(decoder: Decoder, chunks: list[list[int]]) -> torch.Tensor:  # [tokens, vocab]
    sequence = Sequence(decoder, 64)
    return torch.cat([sequence.push(chunk) for chunk in chunks])


@pytest.mark.parametrize(
    ("case", "layout", "hot"),
    [
        ("mixtral", "dp2,ep2", ()),
        ("qwen3-moe", "dp4,ep4", (1, 6)),
        ("qwen3-moe-some-dense", "dp2,tp2,ep4", ()),
        ("deepseek-v2", "dp2,tp2,ep4", (0,)),
    ],
)
def test_requests_of_each_rank_get_the_logits_of_one_rank(case, layout, hot, saved):
    whole, layout = spec_from_config(saved(case).config), parse_layout(layout)
    tensor_ranks = [thread_communicators(layout.tp) for _ in range(layout.dp)]

    def run(ranks: Communicator) -> tuple[torch.Tensor, int]:
        _, group, shard = layout.coordinates(ranks.rank)
        spec = spec_of(whole, shard_of(layout, ranks.rank), hot)
        beside = tensor_ranks[group][shard] if layout.tp > 1 else None
        decoder = decoder_of(saved(case), spec, ranks=beside, expert_ranks=ranks)
        return logits_of(decoder, TEXTS[group]), ranks.counts["all_to_all"]

    found = on_ranks(layout.ranks, run)
    alone = decoder_of(saved(case), whole)
    for group in range(layout.dp):
        parts = [logits for logits, _ in found[group * layout.tp : (group + 1) * layout.tp]]
        torch.testing.assert_close(torch.cat(parts, dim=1), logits_of(alone, TEXTS[group]), rtol=1e-9, atol=1e-9)
    mixtures = sum(whole.moe.layers)  # hidden states, shares and choices there, and sums back
    assert all(exchanges == 4 * mixtures * len(TEXTS[0]) for _, exchanges in found)


def test_a_token_is_sent_once_to_a_rank_however_many_of_its_experts_are_there(saved):
    whole = spec_from_config(saved("qwen3-moe").config)

    def run(ranks: Communicator) -> list[int]:
        decoder = decoder_of(
            saved("qwen3-moe"), spec_of(whole, shard_of(parse_layout("dp2,ep2"), ranks.rank)), expert_ranks=ranks
        )
        sizes: list[int] = []
        exchange = ranks.all_to_all

        def counted(x: torch.Tensor) -> torch.Tensor:
            sizes.append(x.shape[1])
            return exchange(x)

        ranks.all_to_all = counted  # type: ignore[method-assign]
        logits_of(decoder, [TEXTS[0][0]])
        return sizes

    for sizes in on_ranks(2, run):
        assert max(sizes) <= len(TEXTS[0][0])
