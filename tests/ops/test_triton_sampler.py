"""With Triton's ops the whole sampler samples what it does with the reference's: settings reach kernels by address."""

import numpy as np
import pytest
import torch

from tokenmill.engine.step import Admission
from tokenmill.ops import reference
from tokenmill.ops.registry import Implementation, Ops
from tokenmill.params import SamplingParams
from tokenmill.sampling.logprobs import unpack
from tokenmill.sampling.sampler import Sampler

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device")

VOCAB, ROWS, LENGTH = 500, 10, 60
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 0.9, "logit_bias": {4: 6.0, 9: -3.0}, "bad_words_ids": [[7], [8, 9]]},
    {"temperature": 0.0, "min_tokens": 100, "max_tokens": 200, "presence_penalty": 1.0},
    {"temperature": 0.7, "structured": {"regex": "a"}, "logprobs": 2},
    {"best_of": 3, "n": 2, "temperature": 1.2},
    {"temperature": 0.0, "logprobs": 8},
    {"temperature": 0.0, "bad_words_ids": [[1], [2, 3, 4], [5, 6]], "logprobs": 5, "repetition_penalty": 0.8},
]


def ops(triton: bool) -> Ops:
    from tokenmill.ops.triton import IMPLEMENTATIONS

    offered: tuple[Implementation, ...] = IMPLEMENTATIONS if triton else reference.IMPLEMENTATIONS
    chosen = {one.op: one for one in offered if one.op in ("sample", "logprobs", "shape")}
    return Ops(chosen, dict.fromkeys(chosen, ""))


def test_every_kind_of_row_at_once(triton_device):
    random = torch.Generator().manual_seed(3)
    table = torch.randint(0, VOCAB, (ROWS + 1, LENGTH), generator=random, dtype=torch.int32)
    logits = torch.randn(ROWS + 3, VOCAB, generator=random) * 3
    rows = [*range(ROWS), 9, 3, ROWS]  # some have drafts; the last is padding
    positions = [20 + row for row in range(ROWS)] + [30, 24, 0]
    bits = np.zeros(512, dtype=np.uint8)
    bits[[3, 77, 400]] = 1
    found = []
    for triton in (False, True):
        tokens = table.to(triton_device)
        sampler = Sampler(ops(triton), ROWS, VOCAB, triton_device, tokens)
        if triton:
            sampler._counters = torch.zeros(4, VOCAB, dtype=torch.int32, device=triton_device)  # fewer than rows
        params = [SamplingParams(**settings) for settings in SETTINGS]
        admissions = [Admission(row, [1] * 15, 15, one, 7 + row, [3, 6]) for row, one in enumerate(params)]
        sampler.admit(admissions[:4])
        sampler.admit(admissions[4:])
        sampler.take_masks({6: [np.packbits(bits, bitorder="little").tobytes()]})
        traits = sampler.traits(rows[:-1])
        assert traits.warm and traits.filtered and traits.shaped and traits.best == 8
        sampled = sampler.sample(
            logits.clone().to(triton_device),
            torch.tensor(rows, device=triton_device),
            torch.tensor(positions, device=triton_device),
            traits,
        )
        assert sampled.logprobs is not None
        told = unpack(sampled.logprobs.cpu().numpy()[:-1], sampler.widths(rows[:-1]))
        found.append((sampled.tokens.tolist(), told))
    (plain_tokens, plain), (tokens, mine) = found
    assert tokens == plain_tokens
    assert [one is None for one in mine] == [row not in (2, 3, 6, 7, 8, 9) for row in rows[:-1]]
    for one, other in zip(mine, plain, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.token, one.rank) == (other.token, other.rank)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [[entry.logprob, *(value for _, value in entry.top)] for entry in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)
