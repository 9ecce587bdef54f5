"""select finds what transformers finds, scoring every text by itself, in this process and on a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from http_models import write_model
from http_server import Server

from tokenmill import LLM
from tokenmill.program import ProgramState, RemoteLLM, program, select

CHOICES = ["yes", "no", "perhaps so", "a very long answer indeed"]


@program
def judge(s: ProgramState, text: str, normalized: bool) -> dict[str, float]:
    s += text + select("verdict", CHOICES, normalized=normalized)
    return s.meta("verdict")["scores"]


def test_select_equals_brute_force_by_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny-chat")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    batch: list[dict[str, Any]] = [
        {"text": f"The mill number {number} is", "normalized": normalized}
        for number in range(3)
        for normalized in (True, False)
    ]
    with LLM(folder, dtype="float32", device="cpu") as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        local = judge.run_batch(llm, batch)
    server = Server.start(folder, "--load-format", "auto", "--dtype", "float32")
    try:
        served = judge.run_batch(RemoteLLM(server.url), batch)
    finally:
        assert server.stop() == 0
    for asked, here, there in zip(batch, local, served, strict=True):
        before = tokenizer.encode(asked["text"])
        wanted = {}
        for choice in CHOICES:
            tokens = tokenizer.encode(choice, add_special_tokens=False)
            with torch.inference_mode():
                logits = model(torch.tensor([[*before, *tokens]])).logits[0].log_softmax(-1)
            scores = [logits[len(before) + at - 1, token].item() for at, token in enumerate(tokens)]
            wanted[choice] = sum(scores) / (len(tokens) if asked["normalized"] else 1)
        assert max(wanted.values()) - min(wanted.values()) > 0.01
        for state in (here, there):
            assert state.result == pytest.approx(wanted, rel=1e-4)
            assert state["verdict"] == max(wanted, key=lambda one: wanted[one])
