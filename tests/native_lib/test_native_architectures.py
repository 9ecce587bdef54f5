"""Every architecture is recorded whole on the native graph, and a recording gives the bits of plain steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.ops.native import library

PROMPTS = [[(53 * place + 17 * row) % 150 + 5 for place in range(6 + 11 * row)] for row in range(4)]
PARAMS = [SamplingParams(temperature=0, max_tokens=6 + 5 * row, ignore_eos=True, logprobs=0) for row in range(4)]


def answers(folder: str, recorded: bool) -> tuple[list[object], TorchRunner]:
    with LLM(
        folder, device="cpu", quantization="fp32", cuda_graphs=recorded, skip_tokenizer_init=True, max_num_seqs=3,
        max_model_len=96, max_num_batched_tokens=48,
    ) as llm:  # fmt: skip
        llm.generate([PROMPTS[0]], PARAMS[0])  # the first step of each kind is run plainly
        outputs = llm.generate(list(PROMPTS), PARAMS)
        assert all(one.error is None for one in outputs)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs], llm._processor.engine.runner


@pytest.mark.parametrize("case", tiny_models.CASES)
@pytest.mark.filterwarnings("error:.*run plainly")
def test_recorded_steps_give_the_bits_of_plain_ones(native: library.Library, tmp_path: Path, case: str) -> None:
    tiny_models.make(case).save_pretrained(tmp_path)
    plain, _ = answers(str(tmp_path), recorded=False)
    replayed, runner = answers(str(tmp_path), recorded=True)
    assert runner._recorded is not None and runner._recorded._graph is not None
    assert runner._chunks is not None and runner._chunks._graphs is not None
    assert replayed == plain


def test_an_embedding_that_is_scaled_and_a_cap_on_logits_are_part_of_the_recording(
    native: library.Library, tmp_path: Path
) -> None:
    """The tokens would differ without either: what a graph does not compute cannot go unnoticed."""
    model = tiny_models.make("gemma2")
    model.save_pretrained(tmp_path)
    found, _ = answers(str(tmp_path), recorded=True)
    with torch.inference_mode():
        for (tokens, _), prompt, params in zip(found, PROMPTS, PARAMS, strict=True):
            expected = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=params.max_tokens, pad_token_id=0
            )
            assert tokens == expected[0, len(prompt) :].tolist()
