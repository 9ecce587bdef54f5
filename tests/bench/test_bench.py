"""The bench commands measure what they say, on a model small enough to run everywhere."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tokenmill import LLM
from tokenmill.bench.ops import COLD_BYTES, Case, bench_ops, cases, line_of
from tokenmill.bench.timeline import Span, Timeline, draw
from tokenmill.bench.timing import Ceilings, seconds
from tokenmill.bench.trace import record
from tokenmill.cli.app import app
from tokenmill.model.families import spec_from_config
from tokenmill.ops.registry import Need, select


def test_a_slower_operation_takes_more_seconds() -> None:
    small, large = torch.ones(10_000), torch.ones(10_000_000)
    device = torch.device("cpu")
    assert seconds([lambda: small.sum()], device, 0.05) * 10 < seconds([lambda: large.exp()], device, 0.05)


def test_every_op_gets_a_line_with_its_share_of_a_ceiling(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.bench.ops.seconds", lambda variants, device: [one() for one in variants] and 1.0)
    result = CliRunner().invoke(app, ["bench", "ops", "-m", tiny_model, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for name in ("dense qkv", "dense down", "add_rms_norm", "act_mul", "rope_kv_write", "attention decode"):
        assert any(line.startswith(name) and "% of the" in line for line in result.output.splitlines()), name
    assert "attention prefill" in result.output and "sample top_k" in result.output and "sample greedy" in result.output


def test_more_than_a_ceiling_is_explained() -> None:
    best, nothing = Ceilings(bytes_per_s=1e9, flops_per_s=1e12), [lambda: None] * 64
    large = Case("large", COLD_BYTES / 64, 0, nothing)  # type: ignore[arg-type]
    assert line_of(large, 2 * large.bytes / 1e9, best).text().endswith("50.0% of the memory ceiling")
    assert "125.0% of the memory ceiling (other work was" in line_of(large, 0.8 * large.bytes / 1e9, best).text()
    small = Case("small", 1e6, 1e6, nothing)  # type: ignore[arg-type]
    assert line_of(small, 1e-3, best).text().endswith("ceiling (a cache may hold its 64 MB)")
    assert line_of(small, 1e-3, Ceilings(1e12, 1e9)).text().endswith("100.0% of the compute ceiling")


def test_an_op_is_held_against_the_best_ceiling_seen_up_to_it(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine became twice as fast after the first op; whoever is near the ceiling has it measured again."""
    spec = spec_from_config(json.loads((Path(tiny_model) / "config.json").read_text()))
    speeds = iter([1e9, 2e9, 1.5e9, 5e9])
    monkeypatch.setattr("tokenmill.bench.ops.ceilings_of", lambda *_: lambda _: Ceilings(next(speeds), 1e30))
    monkeypatch.setattr("tokenmill.bench.ops.seconds", lambda *_: 1e-3)
    sizes = (0.5e6, 1e6, 1.9e6, 4e6)  # bytes of a millisecond
    monkeypatch.setattr("tokenmill.bench.ops.cases", lambda *_: [Case("", size, 0, []) for size in sizes])
    lines = bench_ops(spec, torch.device("cpu"), torch.float32, lambda _: None)
    assert [line.share for line in lines] == pytest.approx([0.5, 0.5, 0.95, 0.8])


def test_mixtures_are_among_the_ops() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 16,
        "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6, "tie_word_embeddings": False,
    }  # fmt: skip
    spec, device = spec_from_config(config), torch.device("cpu")
    ops = select(Need(device.type, torch.float32, spec.attention_head_dim, 16))
    named = {case.name: case for case in cases(spec, ops, device, torch.float32)}
    assert not any("gate_up" in name for name in named), "no layer has a dense MLP"
    for tokens, most in ((1, 2), (16, 8)):
        case = named[f"moe, {tokens} tokens to 2 experts"]
        weights = 3 * 32 * 64 * 4
        assert case.bytes <= most * weights + 2 * tokens * 64 * 4, "experts that no token chose are not read"
        assert case.flops == 2 * tokens * 2 * weights / 4
        out = case.variants[0]()
        assert isinstance(out, torch.Tensor) and out.shape == (tokens, 64)


def test_traces_hold_the_steps(tiny_model: str, tmp_path: Path) -> None:
    with LLM(tiny_model, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=3) as llm:
        paths = record(llm, tmp_path, rows=2, context=40)
        llm._processor.engine.scheduler.check_integrity()
    assert [path.name for path in paths] == ["decode.json", "decode.svg", "mixed.json", "mixed.svg"]
    for path in paths[::2]:
        ET.parse(path.with_suffix(".svg"))
        events = json.loads(path.read_text())["traceEvents"]
        assert sum(event.get("name") == "engine step" for event in events) >= 4


def test_a_place_for_traces_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(app, ["bench", "trace", "-m", "/no/such/model", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2 and "the folder" in result.output and "cannot be made" in result.output


def test_gaps_of_the_device_are_found_and_blamed_on_what_the_host_did() -> None:
    device = [Span("first", 0, 10), Span("beside", 2, 30), Span("second", 31, 40), Span("third", 90, 100)]
    timeline = Timeline([Span("engine step", 0, 100)], [Span("cudaLaunchKernel", 41, 80)], device)
    assert timeline.gaps() == [(40, 90)]  # a microsecond between launches is no gap
    assert timeline.cause((40, 90)) == "cudaLaunchKernel"
    assert timeline.cause((0, 30)) == "host: Python between launches"
    picture = draw(timeline, "a <title>")
    assert "gap 1: 50 us, cudaLaunchKernel" in picture and "a &lt;title&gt;" in picture
    ET.fromstring(picture)
