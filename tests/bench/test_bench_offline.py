"""`bench offline` and `bench latency` on a tiny model, and what they say of the machine."""

from __future__ import annotations

import gc
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tokenmill.bench.achieved import Roof, work_of
from tokenmill.bench.figures import Answer
from tokenmill.bench.timing import Ceilings, ceilings, ceilings_of
from tokenmill.cli.app import app
from tokenmill.model.families import spec_from_config
from tokenmill.plan.solve.shape import shape_of

TINY = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float64"]


def bench(*words: str) -> str:
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_offline_counts_what_was_asked(tiny_model: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["--requests", "6", "--input", "20", "--output", "9", "--repeats", "2", "--price", "2.5/h"]
    text = bench("offline", tiny_model, *TINY, *words, "--json", str(found), "--plot", str(tmp_path / "plots"))
    point = json.loads(found.read_text())["points"][0]
    assert (point["requests"], point["prompt_tokens"], point["output_tokens"]) == (12, 240, 108)
    assert point["output_tokens_per_second"] == pytest.approx(108 / point["seconds"])
    assert 0 < point["ttft"]["p50"] <= point["e2e"]["p50"] and point["memory"]["peak"] > 1e7
    assert point["achieved"]["steps"] >= 2 * 9 and 0 < point["achieved"]["bytes_share"] < 1
    assert "12 requests in 2 repeats, all at once, prompts of 20 and answers of 9 tokens" in text
    assert "per million tokens" in text and "GB/s" in text and "errors      none" in text
    for name in ("ttft", "itl", "throughput"):
        ET.parse(tmp_path / "plots" / f"{name}.svg")


def test_one_run_has_no_interval(tiny_model: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["--requests", "4", "--input", "8", "--output", "4", "--no-ceilings", "--json", str(found)]
    told = bench("offline", tiny_model, *TINY, *words)
    assert " to " not in told and "95 %" not in told
    assert set(json.loads(found.read_text())["points"][0]["interval"].values()) == {None}
    assert "95 % of the mean" in bench("offline", tiny_model, *TINY, *words, "--repeats", "2")


def test_one_batch_has_no_interval(tiny_model: str) -> None:
    """Its requests share every step, so that drawing them again would show an interval of no width."""
    words = ["--batch", "3", "--input", "8", "--output", "4", "--no-ceilings", "--json", "-"]
    for repeats, known in (("1", False), ("2", True)):
        (point,) = json.loads(bench("latency", tiny_model, *TINY, *words, "--repeats", repeats))["points"]
        assert {value is not None for value in point["interval"].values()} == {known}


def test_offline_takes_its_lengths_from_a_trace(tiny_model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:17:0{number}.5,{10 + number},{3 + number}" for number in range(5)]
    trace.write_text("\n".join(rows) + "\n")
    words = ["--trace", str(trace), "--requests", "4", "--longest-output", "5", "--no-ceilings", "--json", "-"]
    point = json.loads(bench("offline", tiny_model, *TINY, *words))["points"][0]
    assert (point["requests"], point["prompt_tokens"], point["output_tokens"]) == (4, 46, 3 + 4 + 5 + 5)


def test_latency_has_a_row_per_batch(tiny_model: str) -> None:
    words = ["--batch", "1,3", "--input", "12", "--output", "6", "--repeats", "3", "--no-ceilings"]
    points = json.loads(bench("latency", tiny_model, *TINY, *words, "--json", "-"))["points"]
    assert [point["batch"] for point in points] == [1, 3] and [point["requests"] for point in points] == [3, 9]
    for point in points:
        assert 0 < point["step"]["p50"] <= point["step"]["p99"] < point["e2e"]["p99"]
        assert point["decode_tokens_per_second"] == pytest.approx(point["batch"] / point["step"]["p50"])
        assert point["ttft"]["mean"] < point["e2e"]["mean"]
    told = bench("latency", tiny_model, *TINY, *words).splitlines()
    assert [line.split()[0] for line in told[1:]] == ["batch", "1", "3"]


def test_bytes_and_operations_of_a_run_by_hand() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    shape = shape_of(spec_from_config(config))
    layer = 32 * (4 + 2 * 2) * 8 + 32 * 32 + 3 * 32 * 48
    assert shape.active == 2 * layer
    answers = [
        Answer(1.0, prompt_tokens=10, cached_tokens=4, output_tokens=3),
        Answer(1.0, prompt_tokens=5, output_tokens=1),
        Answer(1.0, prompt_tokens=7, error="timeout"),
    ]
    work = work_of(answers, 4, shape)
    assert (work.tokens, work.sampled) == (6 + 2 + 5, 4)
    assert work.keys == 11 + 12 and work.pairs == sum(range(5, 13)) + sum(range(1, 6))
    roof = Roof(
        shape, "cpu", "float32", 4, 128 * 32 * 2, weights=1_000_000, kv_per_token=256, ceilings=Ceilings(1e6, 1e7)
    )
    assert roof.bytes_of(work) == 4 * (1_000_000 - 128 * 32 * 2) + 23 * 256, "an embedding is looked up, not read"
    pair = 2 * 4 * (8 + 8) * 2
    assert roof.flops_of(work) == 2 * (13 * 2 * layer + 4 * 128 * 32) + work.pairs * pair
    assert roof.achieved(work, 2.0)["bytes_share"] == pytest.approx(roof.bytes_of(work) / 2e6)


def test_the_ceiling_of_products_is_the_fastest_way_to_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.ops.matmul import Matmul, MatmulKernel, dense_need, only
    from tokenmill.quant.schemes.dense import Dense

    class Slow(Dense):
        def matmul(self, storage: dict[str, torch.Tensor], dtype: torch.dtype) -> Matmul:
            slow = MatmulKernel("slow", ("dense",), lambda need, x, storage, bias: x @ x @ x @ x @ x)
            return only(slow, dense_need(storage["weight"], dtype))

    def fake(variants: list[object], device: torch.device, budget: float = 0.3, *, best: bool = False) -> float:
        with torch.profiler.profile() as profile:
            variants[0]()  # type: ignore[operator]
        return float(max(1, sum(event.count for event in profile.key_averages() if event.key == "aten::mm")))

    monkeypatch.setattr("tokenmill.bench.timing.seconds", fake)
    plain = ceilings(torch.device("cpu"), torch.float32)
    assert ceilings(torch.device("cpu"), torch.float32, [Slow()]).flops_per_s == plain.flops_per_s > 0


def test_what_measures_ceilings_holds_no_memory_between_two_measurements() -> None:
    def large() -> int:
        return sum(type(one) is torch.Tensor and one.nbytes >= 1 << 20 for one in gc.get_objects())

    before = large()
    measure = ceilings_of(torch.device("cpu"), torch.float32)
    assert measure(0.0).bytes_per_s > 0
    assert large() == before
