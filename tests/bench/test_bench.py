"""The bench commands measure what they say, on a model small enough to run everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tokenmill import LLM
from tokenmill.bench.timing import seconds
from tokenmill.bench.trace import record
from tokenmill.cli.app import app


def test_a_slower_operation_takes_more_seconds() -> None:
    small, large = torch.ones(10_000), torch.ones(10_000_000)
    device = torch.device("cpu")
    assert seconds([lambda: small.sum()], device, 0.05) * 10 < seconds([lambda: large.exp()], device, 0.05)


def test_every_op_gets_a_line_with_its_share_of_a_ceiling(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.bench.ops.seconds", lambda variants, device: [one() for one in variants] and 1e-3)
    result = CliRunner().invoke(app, ["bench", "ops", "-m", tiny_model, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for name in ("linear qkv", "linear down", "add_rms_norm", "act_mul", "rope_kv_write", "attention decode"):
        assert any(line.startswith(name) and "% of the" in line for line in result.output.splitlines()), name
    assert "attention prefill" in result.output and "sample top_k" in result.output


def test_traces_hold_the_steps(tiny_model: str, tmp_path: Path) -> None:
    with LLM(tiny_model, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=3) as llm:
        paths = record(llm, tmp_path, rows=2, context=40)
        llm._front.engine.scheduler.check_integrity()
    for path in paths:
        events = json.loads(path.read_text())["traceEvents"]
        assert sum(event.get("name") == "engine step" for event in events) >= 4
