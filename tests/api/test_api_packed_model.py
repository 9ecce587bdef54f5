"""The default model from its packed weights answers what the reference path answers from the same weights, expanded."""

from __future__ import annotations

import pytest

from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.quant.schemes.packed import Packed

SUBJECTS = ("the moon", "bread", "prime numbers", "an old mill", "ice")
QUESTIONS = ("Tell me about {}.", "Write a line about {}.", "Why is {} good?", "Name a fact about {}.", "What is {}?")
PROMPTS = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
# Inputs are rounded to 8 bits (more where they are large): the two best tokens may swap if they are this close.
GAP = 0.25


def answers(model: str, **options: str) -> list[RequestOutput]:
    with LLM(model, device="cpu", max_num_seqs=64, max_model_len=256, **options) as llm:
        packed = isinstance(llm._processor.engine.runner.decoder.weights.lm_head.scheme, Packed)  # type: ignore[attr-defined]
        if packed != (not options):
            pytest.skip("there is no native library here: no compiler was found")
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=8, detokenize=False)
        return llm.chat(chats, params, use_tqdm=False)


def test_greedy_answers_are_those_of_the_reference_up_to_near_ties(default_model: str) -> None:
    whole = 0
    for mine, theirs in zip(answers(default_model), answers(default_model, ops="reference"), strict=True):
        ids, expected = mine.outputs[0].token_ids, theirs.outputs[0].token_ids
        first = next((at for at, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            whole += 1
            continue
        assert theirs.outputs[0].logprobs is not None
        table = theirs.outputs[0].logprobs[first]
        best = max(entry.logprob for entry in table.values())
        assert ids[first] in table and best - table[ids[first]].logprob < GAP, f"token {first} of {mine.request_id}"
    assert 2 * whole >= len(PROMPTS), f"only {whole} of {len(PROMPTS)} answers are equal to the last token"


@pytest.mark.filterwarnings("error:steps that read prompts")  # no recording is refused
def test_bits_do_not_depend_on_company_or_chunks(default_model: str) -> None:
    """Whatever runs beside a request, and however its prompt is cut, one token at the end included."""

    def logprobs(prompts: list[list[int]], budget: int) -> list[list[float]]:
        with LLM(default_model, device="cpu", max_num_seqs=8, max_model_len=128, max_num_batched_tokens=budget) as llm:
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
            outputs = llm.generate(list(prompts), params, use_tqdm=False)
        return [[next(iter(entry.values())).logprob for entry in one.outputs[0].logprobs or []] for one in outputs]

    prompts = [[(7919 * row + 31 * place) % 49152 for place in range(21 + row)] for row in range(6)]
    alone = [logprobs([prompt], 512)[0] for prompt in prompts[:2]]
    for budget in (512, 20, 13):  # 20: the first prompt's last token is read by itself
        assert logprobs(prompts, budget)[:2] == alone, budget
