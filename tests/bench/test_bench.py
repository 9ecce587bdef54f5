"""The bench commands measure what they say, on a model small enough to run everywhere."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tokenmill import LLM
from tokenmill.bench.timeline import Span, Timeline, draw
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
    for name in ("dense qkv", "dense down", "add_rms_norm", "act_mul", "rope_kv_write", "attention decode"):
        assert any(line.startswith(name) and "% of the" in line for line in result.output.splitlines()), name
    assert "attention prefill" in result.output and "sample top_k" in result.output and "sample greedy" in result.output


def test_traces_hold_the_steps(tiny_model: str, tmp_path: Path) -> None:
    with LLM(tiny_model, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=3) as llm:
        paths = record(llm, tmp_path, rows=2, context=40)
        llm._front.engine.scheduler.check_integrity()
    assert [path.name for path in paths] == ["decode.json", "decode.svg", "mixed.json", "mixed.svg"]
    for path in paths[::2]:
        ET.parse(path.with_suffix(".svg"))
        events = json.loads(path.read_text())["traceEvents"]
        assert sum(event.get("name") == "engine step" for event in events) >= 4


def test_gaps_of_the_device_are_found_and_blamed_on_what_the_host_did() -> None:
    device = [Span("first", 0, 10), Span("beside", 2, 30), Span("second", 31, 40), Span("third", 90, 100)]
    timeline = Timeline([Span("engine step", 0, 100)], [Span("cudaLaunchKernel", 41, 80)], device)
    assert timeline.gaps() == [(40, 90)]  # a microsecond between launches is no gap
    assert timeline.cause((40, 90)) == "cudaLaunchKernel"
    assert timeline.cause((0, 30)) == "host: Python between launches"
    picture = draw(timeline, "a <title>")
    assert "gap 1: 50 us, cudaLaunchKernel" in picture and "a &lt;title&gt;" in picture
    ET.fromstring(picture)
