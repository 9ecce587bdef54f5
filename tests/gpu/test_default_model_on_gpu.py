"""The default model on a GPU answers what the CPU's reference path answers."""

from __future__ import annotations

import pytest
import torch

from tokenmill import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

TOPICS = (
    "the water wheel", "prime numbers", "a recipe for bread", "the moon", "why the sky is blue", "sorting a list",
    "the French revolution", "photosynthesis", "a short poem about rain", "how a bicycle stays up", "the number pi",
    "three facts about owls", "what a compiler does", "the history of paper", "a letter to a friend", "the tides",
    "counting to twenty", "the seasons", "how bees make honey", "a story about a mill",
)  # fmt: skip


def answers(model: str, **options: object) -> list[RequestOutput]:
    with LLM(model, max_model_len=512, **options) as llm:
        chats = [[{"role": "user", "content": f"Tell me about {topic}."}] for topic in TOPICS]
        params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, logprobs=5, detokenize=False)
        return llm.chat(chats, params, use_tqdm=False)


@pytest.fixture(scope="module")
def reference(default_model: str) -> list[RequestOutput]:
    return answers(default_model, device="cpu", ops="reference")


# A token may differ where the best logits are closer than the rounding of the whole network in that dtype.
@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-3), ("bfloat16", 0.3)])
def test_256_tokens_equal_the_cpus_up_to_a_tie(
    default_model: str, reference: list[RequestOutput], dtype: str, gap: float
) -> None:
    found = answers(default_model, device="cuda", dtype=dtype)
    whole = 0
    for mine, theirs in zip(found, reference, strict=True):
        ids, expected = mine.outputs[0].token_ids, theirs.outputs[0].token_ids
        first = next((at for at, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            whole += 1
            continue
        assert theirs.outputs[0].logprobs is not None
        table = theirs.outputs[0].logprobs[first]
        best = max(entry.logprob for entry in table.values())
        assert ids[first] in table and best - table[ids[first]].logprob < gap, f"token {first} of {mine.request_id}"
    print(f"{dtype}: {whole} of {len(TOPICS)} answers equal to the last token")
    if dtype == "float32":
        assert whole >= 18  # in bfloat16 every answer meets a tie before its 256th token
