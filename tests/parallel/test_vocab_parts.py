"""Ranks that have parts of the logits choose the tokens that one rank with all of them does, and exchange little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_ranks

from tokenmill.engine.step import Admission
from tokenmill.model.shard import vocabulary
from tokenmill.ops import cpu, reference, shaping
from tokenmill.parallel.communicator import Communicator
from tokenmill.params import SamplingParams
from tokenmill.sampling.logprobs import unpack
from tokenmill.sampling.sampler import Sampled, Sampler
from tokenmill.sampling.vocab_parts import VocabPart

VOCAB, ROWS, LENGTH = 331, 6, 24
OPS = SimpleNamespace(sample=cpu.sample, logprobs=reference.logprobs, shape=shaping.shape)
token = st.integers(0, VOCAB - 1)


def part_of(ranks: Communicator) -> VocabPart:
    parts = tuple(vocabulary(VOCAB, rank, ranks.size) for rank in range(ranks.size))
    return VocabPart(parts[ranks.rank], parts, ranks)


class Rows:
    """A few rows with settings, a token table and logits; sampled by one rank or by several."""

    def __init__(self, params: list[dict[str, Any]], seed: int, masked: int = -1) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=self.random, dtype=torch.int32)
        self.logits = torch.randn(len(params), VOCAB, generator=self.random) * 3
        self.params = [SamplingParams(**one) for one in params]
        self.masked = masked

    def sample(self, ranks: Communicator | None = None) -> Sampled:
        part = None if ranks is None else part_of(ranks)
        sampler = Sampler(OPS, ROWS, VOCAB, "cpu", self.tokens, part=part)
        rows = list(range(len(self.params)))
        sampler.admit([Admission(row, [], 5, self.params[row], 99 + row, [3, 200]) for row in rows])
        if self.masked in rows:
            bits = torch.randint(0, 256, (-(-VOCAB // 32) * 4,), generator=torch.Generator().manual_seed(1)) & 0x41
            sampler.take_masks({self.masked: [bits.byte().numpy().tobytes()]})
            sampler._flags[self.masked] |= 4
        logits = self.logits if part is None else self.logits[:, part.tokens.start : part.tokens.stop]
        positions = torch.arange(7, 7 + len(rows))
        return sampler.sample(logits.clone(), torch.tensor(rows), positions, sampler.traits(rows))

    def compare(self, size: int) -> None:
        alone = self.sample()
        for sampled in on_ranks(size, self.sample):
            assert torch.equal(sampled.tokens, alone.tokens)
            if alone.logprobs is not None:
                widths = torch.tensor([-1 if one.logprobs is None else one.logprobs for one in self.params]).numpy()
                told = zip(
                    unpack(sampled.logprobs.numpy(), widths), unpack(alone.logprobs.numpy(), widths), strict=True
                )
                for got, expected in told:
                    assert (got is None) == (expected is None)
                    if expected is not None:
                        assert (got.token, got.rank) == (expected.token, expected.rank)
                        assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
                        assert [one for one, _ in got.top] == [one for one, _ in expected.top]
                        assert [p for _, p in got.top] == pytest.approx([p for _, p in expected.top], abs=1e-5)


@st.composite
def row_params(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 5, 300])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.4])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.6])),
        "logit_bias": draw(st.sampled_from([None, {2: 8.0, 170: 7.5, 330: -4.0}])),
        "bad_words_ids": draw(st.sampled_from([[], [[9], [1, 250], [330]]])),
        "min_tokens": draw(st.sampled_from([0, 20])),
        "logprobs": draw(st.sampled_from([None, None, 0, 4])),
        "max_tokens": 50,
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(row_params(), min_size=1, max_size=ROWS),
    st.integers(0, 2**20),
    st.sampled_from([2, 3, 4]),
    st.integers(-1, ROWS - 1),
)
def test_ranks_choose_what_one_rank_chooses(params, seed, size, masked):
    Rows(params, seed, masked).compare(size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 330])
def test_a_row_that_is_no_number_on_one_rank_ends_on_all(temperature, bad, at):
    rows = Rows([{"temperature": temperature, "max_tokens": 9}] * 3, 5)
    rows.logits[1, at] = bad
    rows.compare(2)
    assert rows.sample().tokens.tolist()[1] == -1


def test_the_first_of_equal_logits_is_chosen():
    rows = Rows([{"temperature": 0.0, "max_tokens": 9}], 5)
    rows.logits[0, [40, 120, 300]] = 50.0
    rows.compare(4)
    assert rows.sample().tokens.tolist() == [40]


@pytest.mark.parametrize(
    ("params", "most"),  # bytes that a rank hands over for a row
    [
        ({"temperature": 0.0}, 16),
        ({"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {7: 1.0}}, 16),
        ({"temperature": 1.0, "min_p": 0.1}, 32),
        ({"temperature": 1.0, "top_k": 5}, 16 + 5 * 16),
        ({"temperature": 0.0, "logprobs": 2}, 16 + 8 * 3 + 2 * 16),
        ({"temperature": 1.0, "top_p": 0.9}, 4 * 166),
    ],
)
def test_ranks_exchange_no_more_than_a_choice_needs(params, most):
    rows = Rows([params | {"max_tokens": 9}] * 3, 1)

    def sampled(ranks: Communicator) -> int:
        rows.sample(ranks)
        return ranks.bytes["all_gather"]

    assert max(on_ranks(2, sampled)) <= 3 * most


def test_log_probabilities_of_prompts_are_those_of_one_rank():
    rows = Rows([{"temperature": 0.0, "max_tokens": 9}] * 4, 11)
    targets = torch.tensor([0, 330, 7, 166])

    def told(ranks: Communicator | None = None) -> list[Any]:
        part = None if ranks is None else part_of(ranks)
        sampler = Sampler(OPS, ROWS, VOCAB, "cpu", rows.tokens, part=part)
        logits = rows.logits if part is None else rows.logits[:, part.tokens.start : part.tokens.stop]
        return unpack(sampler.prompt_logprobs(logits, targets, 3).numpy(), torch.full((4,), 3).numpy())

    for found in on_ranks(2, told):
        for got, expected in zip(found, told(), strict=True):
            assert (got.token, got.rank) == (expected.token, expected.rank)
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert [one for one, _ in got.top] == [one for one, _ in expected.top]
