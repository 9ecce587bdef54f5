"""The default model answers as an independent dequantization of it does, and stops by itself in a chat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from tokenmill import LLM, SamplingParams

PROMPTS = [
    "The mill turns slowly while the river",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Frankreich ist",
]
# Both sides compute in float32 but add in different orders. Where the best two logits are closer than this,
# either may come out on top; everywhere else the same token must be chosen.
TIE = 1e-3


@pytest.fixture(scope="module")
def smol(default_model: str) -> Iterator[LLM]:
    with LLM(default_model, device="cpu", dtype="float32", max_num_seqs=8, max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def exact(default_model: str) -> Iterator[LLM]:
    """With plain torch ops: nothing is rounded to fewer bits than float32 has."""
    options = {"max_num_seqs": 8, "max_model_len": 1024, "ops": "cpu"}
    with LLM(default_model, device="cpu", dtype="float32", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(default_model: str) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from gguf_reference import load_llama

    return load_llama(default_model)


def test_greedy_tokens_equal_those_of_an_independent_dequantization(exact: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for output in exact.generate(PROMPTS, params, use_tqdm=False):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(tokens) == 64
        # Fed our answer, the other model must want each of its tokens next. By induction its own greedy answer is
        # the same; and where a tie is broken differently, the tokens after it are still checked.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert gaps.max() < TIE, f"{output.prompt!r}: token {int(gaps.argmax())} is {gaps.max():.4f} below the best"
        assert (gaps > 0).sum() <= 1


def test_logprobs_equal_those_of_an_independent_dequantization(exact: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    output = exact.generate([PROMPTS[0]], params, use_tqdm=False)[0]
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and answer.logprobs is not None
    tables = [*output.prompt_logprobs[1:], *answer.logprobs]
    for row, table in zip(expected[: len(tables)], tables, strict=True):
        assert table is not None
        for token, entry in table.items():
            assert entry.logprob == pytest.approx(row[token].item(), abs=TIE)


def test_a_chat_ends_by_an_end_token_and_makes_sense(smol: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    output = smol.chat(question, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)[0]
    answer = output.outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop" and answer.stop_reason is None
    assert smol._processor.tokenizer is not None and answer.token_ids[-1] in smol._processor.tokenizer.eos_ids
    assert "<|im_end|>" not in answer.text
    assert len(output.metrics.token_times) == len(answer.token_ids) and (output.metrics.ttft or 0) > 0


def test_several_chats_at_once_answer_as_one_by_one(smol: LLM) -> None:
    chats = [[{"role": "user", "content": f"Say the word {word}."}] for word in ("mill", "river", "stone")]
    params = SamplingParams(temperature=0, max_tokens=12)
    together = smol.chat(chats, params, use_tqdm=False)
    for chat, output in zip(chats, together, strict=True):
        assert smol.chat(chat, params, use_tqdm=False)[0].outputs[0].text == output.outputs[0].text


def test_streamed_text_is_the_text_of_the_whole_answer(smol: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    prompt = "Repeat: 你好 🦜 naïve café"
    whole = smol.generate([prompt], params, use_tqdm=False)[0].outputs[0].text
    texts = [output.outputs[0].text for output in smol.stream(prompt, params)]
    assert texts[-1] == whole and len(texts) > 2
    for before, after in pairwise(texts):
        assert after.startswith(before) and "\ufffd" not in before
