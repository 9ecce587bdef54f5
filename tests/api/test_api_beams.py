"""Beam search through the API finds what transformers' beam search finds, and plain forwards what logprobs say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from api_engines import assert_idle

from tokenmill import LLM, SamplingParams

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 9, 14, 21, 33], [40, 3, 3, 17, 8, 29, 31, 2, 11, 6, 7, 22, 35, 44, 10, 9, 19, 27], [12]]
EOS = [1, 4]
NEAR = 1e-4  # transformers norms and rotates in float32, whatever the dtype of the model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A random model, in float64 so that scores of different beams cannot be confused; and its folder."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.35,  # sharp enough that beams differ, flat enough that end tokens come up
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval().double()
    folder: Path = tmp_path_factory.mktemp("models") / "beams"
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.fixture(scope="module", params=[16, 3], ids=["rows for all", "three rows"])
def llm(checkpoint: tuple[Any, str], request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_num_seqs": request.param, "max_num_batched_tokens": 32, "block_size": 8}
    with LLM(checkpoint[1], skip_tokenizer_init=True, dtype="float64", device="cpu", **options) as llm:
        yield llm
        llm.reset_prefix_cache()
        assert_idle(llm._processor.engine)


def theirs(model: Any, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=None if params.ignore_eos else EOS,
        pad_token_id=0,
        max_new_tokens=params.max_tokens,
        do_sample=False,
    )
    return [_until_end(tokens[len(prompt) :], () if params.ignore_eos else EOS) for tokens in found.tolist()]


def _until_end(tokens: list[int], ends: Any) -> list[int]:
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens


CASES: dict[str, dict[str, Any]] = {
    "two": {"beam_width": 2},
    "four": {"beam_width": 4, "n": 4},
    "seven": {"beam_width": 7, "n": 2},
    "short ones": {"beam_width": 4, "n": 3, "length_penalty": -1.0},
    "sum of logprobs": {"beam_width": 4, "n": 2, "length_penalty": 0.0},
    "long ones": {"beam_width": 3, "n": 3, "length_penalty": 2.5},
    "early": {"beam_width": 4, "n": 4, "early_stopping": True},
    "without end": {"beam_width": 4, "n": 2, "ignore_eos": True},
    "one token": {"beam_width": 3, "n": 3, "max_tokens": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_beams_equal_those_of_transformers(llm: LLM, checkpoint: tuple[Any, str], name: str) -> None:
    params = SamplingParams(**{"max_tokens": 20} | CASES[name])
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert [one.token_ids for one in output.outputs] == theirs(checkpoint[0], prompt, params)
        assert [one.index for one in output.outputs] == list(range(params.n))
        for one in output.outputs:
            ended = not params.ignore_eos and one.token_ids[-1] in EOS
            assert one.finish_reason == ("stop" if ended else "length")


def test_end_tokens_come_up_in_the_beams_of_this_model(checkpoint: tuple[Any, str]) -> None:
    """Guards the test above: it must see beams that end and beams that do not."""
    params = SamplingParams(beam_width=4, n=4, max_tokens=20)
    ends = [beam[-1] in EOS for prompt in PROMPTS for beam in theirs(checkpoint[0], prompt, params)]
    assert any(ends) and not all(ends)


def test_beams_beside_other_requests_change_nothing_for_either(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    beams = SamplingParams(beam_width=3, n=2, max_tokens=15)
    solo = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS for params in (plain, beams)]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    together = llm.generate(prompts, [plain, beams] * len(PROMPTS), use_tqdm=False)
    for one, other in zip(solo, together, strict=True):
        assert [beam.token_ids for beam in one.outputs] == [beam.token_ids for beam in other.outputs]


def test_a_beam_search_is_cumulative_in_the_models_own_logprobs(llm: LLM, checkpoint: tuple[Any, str]) -> None:
    output = llm.generate([PROMPTS[0]], SamplingParams(beam_width=4, n=2, max_tokens=10), use_tqdm=False)[0]
    for one in output.outputs:
        table = plain_logprobs(checkpoint[0], PROMPTS[0] + one.token_ids)[len(PROMPTS[0]) - 1 : -1]
        expected = table.gather(1, torch.tensor(one.token_ids)[:, None]).sum().item()
        assert one.cumulative_logprob == pytest.approx(expected, abs=NEAR)


def plain_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:  # [tokens, vocab]
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_a_plain_forward(llm: LLM, checkpoint: tuple[Any, str], temperature: float) -> None:
    widths = {"logprobs": 4, "prompt_logprobs": 3}
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=9, ignore_eos=True, **widths)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        one, prompt = output.outputs[0], output.prompt_token_ids
        assert one.logprobs is not None and output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        expected = plain_logprobs(checkpoint[0], prompt + one.token_ids)
        tables = [*output.prompt_logprobs[1:], *one.logprobs]
        following = [*prompt[1:], *one.token_ids]
        for row, token, table, width in zip(
            expected, following, tables, [3] * (len(prompt) - 1) + [4] * len(one.token_ids)
        ):
            assert table is not None
            best = row.topk(width).indices.tolist()
            assert set(table) == {token, *best}
            for id, entry in table.items():
                assert entry.logprob == pytest.approx(row[id].item(), abs=NEAR)
                assert entry.rank == int((row > row[id]).sum()) + 1
