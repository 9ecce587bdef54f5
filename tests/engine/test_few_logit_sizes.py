"""Steps that read prompts compute logits for one of a few numbers of tokens; the answers are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.model.decoder import Decoder
from tokenmill.processor import NO_ANSWER

SIZES = [4, 8]


def test_logits_of_mixed_steps_have_few_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path / "model")
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 120 for j in range(3 + 5 * i)]} for i in range(6)]
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=5 + 2 * i, ignore_eos=True) for i in range(6)]

    def run() -> list[list[int]]:
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "cuda_graphs": False, "device": "cpu"}
        with LLM(model=model, max_num_batched_tokens=16, max_num_seqs=8, **options) as llm:
            embedded = llm._processor.prepare([5] * 40, NO_ANSWER, pooling="mean")  # which reads all hidden states
            llm._processor.submit(embedded)
            return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]

    plain = run()
    seen: list[int] = []
    forward = Decoder.logits

    def noted(self: Decoder, hidden: torch.Tensor, wide: bool = True) -> torch.Tensor:
        seen.append(len(hidden))
        return forward(self, hidden, wide)

    monkeypatch.setattr(Decoder, "logits", noted)
    monkeypatch.setattr(TorchRunner, "decode_sizes", property(lambda self: SIZES))
    assert run() == plain
    assert 8 in seen  # more than there are rows
