"""Requests that the GPU tests run in several ways, and how their answers are compared."""

from __future__ import annotations

from typing import Any

from tokenmill import LLM, SamplingParams


def mix() -> tuple[list[list[int]], list[SamplingParams]]:
    """Long and short prompts, shared prefixes, greedy and sampled, more than fits in one step."""
    prompts, params = [], []
    shared = [(13 * i) % 4000 for i in range(300)]
    for number in range(40):
        prompts.append(shared[: (number * 37) % 300] + [(number * 7 + i) % 4000 for i in range(1 + number * 5)])
        params.append(
            SamplingParams(
                temperature=[0.0, 0.9][number % 2], top_p=[1.0, 0.9][number // 2 % 2], top_k=[0, 50][number // 4 % 2],
                seed=number, max_tokens=48, ignore_eos=True, detokenize=False, n=[1, 1, 1, 3][number % 4],
                repetition_penalty=[1.0, 1.1][number // 8 % 2],
            )
        )  # fmt: skip
    return prompts, params


def answers(model: str, **options: Any) -> list[list[int]]:
    with LLM(model, dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=512, **options) as llm:
        prompts, params = mix()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm._processor.engine.scheduler.check_integrity()
        return [one.token_ids for output in outputs for one in output.outputs]


def agreement(mine: list[list[int]], theirs: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(mine, theirs, strict=True)) / len(theirs)
