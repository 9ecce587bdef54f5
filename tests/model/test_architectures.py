"""Every supported architecture gives the logits and the greedy tokens that transformers gives."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from decoder_driver import Sequence, greedy, load_decoder

PROMPT = torch.randint(3, 160, (40,), generator=torch.Generator().manual_seed(7)).tolist()
NEW = 64
MAX_LEN = len(PROMPT) + NEW


@pytest.fixture(scope="module", params=list(tiny_models.CASES))
def pair(request, tmp_path_factory):
    """The model in transformers, and ours read from the checkpoint that transformers saved."""
    model = tiny_models.make(request.param)
    directory = tmp_path_factory.mktemp("model")
    sharded = {"max_shard_size": "60KB"} if request.param in ("llama", "mixtral", "deepseek-v2") else {}
    model.save_pretrained(directory, **sharded)
    assert (directory / "model.safetensors.index.json").exists() == bool(sharded)
    return model, load_decoder(directory, MAX_LEN)


def test_prefill_logits_equal_transformers(pair):
    model, decoder = pair
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.2  # so that the bound below means something
    torch.testing.assert_close(Sequence(decoder, MAX_LEN).push(PROMPT), expected, rtol=0, atol=1e-4)


def test_64_greedy_tokens_equal_transformers(pair):
    model, decoder = pair
    with torch.inference_mode():
        out = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    expected = out[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 4  # not one token over and over
    assert greedy(decoder, PROMPT, NEW) == expected


def test_chunked_prefill_gives_the_same_logits(pair):
    _, decoder = pair
    whole = Sequence(decoder, MAX_LEN).push(PROMPT)
    chunked = Sequence(decoder, MAX_LEN)
    parts = [chunked.push(PROMPT[first : first + 7]) for first in range(0, len(PROMPT), 7)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)


def test_tokens_that_nobody_reads_leave_keys_and_values_behind(pair):
    _, decoder = pair
    whole = Sequence(decoder, MAX_LEN).push(PROMPT)
    some = Sequence(decoder, MAX_LEN)
    assert some.push(PROMPT[:7], wanted=[]).shape[0] == 0
    read = some.push(PROMPT[7:], wanted=[len(PROMPT) - 8, 2])
    torch.testing.assert_close(read, whole[[-1, 9]], rtol=0, atol=2e-5)
