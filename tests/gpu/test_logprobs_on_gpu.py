"""Log-probabilities, penalties and edits in recorded steps: the answers of plain ones, with no wait on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_mixes import agreement

from tokenmill import LLM, SamplingParams
from tokenmill.outputs import RequestOutput

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

ASKS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 5},
    "many logprobs": {"logprobs": 20},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "edits": {"logit_bias": {7: 3.0, 9: -4.0}, "min_tokens": 9, "stop_token_ids": [11], "bad_words_ids": [[3], [4, 5]]},
    "all": {"logprobs": 3, "repetition_penalty": 1.2, "logit_bias": {8: 2.0}, "temperature": 0.8, "top_k": 20},
}


def answers(checkpoint: str, kinds: list[str], **options: Any) -> tuple[list[RequestOutput], tuple[int, int] | None]:
    prompts = [[(number * 7 + i) % 4000 for i in range(1 + number * 3)] for number in range(24)]
    params = [
        SamplingParams(
            **{"temperature": 0.0} | ASKS[kinds[number % len(kinds)]],
            max_tokens=40, ignore_eos=True, detokenize=False, seed=number,
        )
        for number in range(24)
    ]  # fmt: skip
    settings = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 24}
    with LLM(checkpoint, **settings, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm._processor.engine.scheduler.check_integrity()  # type: ignore[attr-defined]
        graphs = llm._built.engine.runner._graphs  # type: ignore[attr-defined]
        return outputs, None if graphs is None else (graphs.replays, graphs.plain_runs)


@pytest.mark.parametrize("kinds", [[name] for name in ASKS] + [list(ASKS)], ids=lambda kinds: "+".join(kinds))
def test_recorded_steps_say_what_plain_ones_say(checkpoint: str, kinds: list[str]) -> None:
    plain, _ = answers(checkpoint, kinds, cuda_graphs=False)
    recorded, counts = answers(checkpoint, kinds, cuda_graphs=True)
    told = [[output.outputs[0].token_ids for output in one] for one in (recorded, plain)]
    assert agreement(*told) >= 0.9
    for mine, theirs in zip(recorded, plain, strict=True):
        one, other = mine.outputs[0], theirs.outputs[0]
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is None or other.logprobs is None or one.token_ids != other.token_ids:
            continue
        for token, table, expected in zip(one.token_ids, one.logprobs, other.logprobs, strict=True):
            assert table[token].rank == expected[token].rank
            assert table[token].logprob == pytest.approx(expected[token].logprob, abs=1e-3)
            assert [entry.logprob for entry in table.values()] == pytest.approx(
                [entry.logprob for entry in expected.values()], abs=1e-3
            )
    assert counts is not None and counts[0] >= 30, counts  # steps that were replayed


def test_the_reference_ops_give_the_same_tokens(checkpoint: str) -> None:
    """Not only the same way twice: penalties, edits and ranks as plain torch has them."""
    plain, _ = answers(checkpoint, list(ASKS), ops="reference")
    recorded, _ = answers(checkpoint, list(ASKS), cuda_graphs=True)
    assert agreement(*([output.outputs[0].token_ids for output in one] for one in (recorded, plain))) >= 0.8


def test_steady_decode_with_log_probabilities_never_waits(checkpoint: str) -> None:
    with LLM(checkpoint, device="cuda", skip_tokenizer_init=True, max_num_seqs=16) as llm:
        processor = llm._processor
        for number in range(16):
            params = SamplingParams(
                **{"temperature": 0.0} | list(ASKS.values())[number % len(ASKS)],
                max_tokens=400, ignore_eos=True, detokenize=False,
            )  # fmt: skip
            processor.submit(processor.prepare([number + 5] * 20, params))
        for _ in range(40):
            processor.step()
        launch, graphs = processor.engine.runner.launch, processor.engine.runner._graphs  # type: ignore[attr-defined]
        before = graphs.replays

        def watched(step):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        processor.engine.runner.launch = watched  # type: ignore[method-assign]
        for _ in range(200):
            processor.step()
        assert graphs.replays - before >= 199


def test_prompt_logprobs_and_wide_asks_do_not_change_the_answer(checkpoint: str) -> None:
    """More best tokens than kernels are made for are torch's work, in steps that are not recorded."""
    found = []
    for width in (4, 60):
        params = SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=width, prompt_logprobs=width
        )
        with LLM(checkpoint, device="cuda", dtype="float32", skip_tokenizer_init=True) as llm:
            (output,) = llm.generate([[5, 9, 700, 31, 8, 2]], params, use_tqdm=False)
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        tables = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        assert all(len(table or {}) in (width, width + 1) for table in tables)
        best = [[(token, entry.rank) for token, entry in list((table or {}).items())[:4]] for table in tables]
        found.append((output.outputs[0].token_ids, best))
    assert found[0] == found[1]
