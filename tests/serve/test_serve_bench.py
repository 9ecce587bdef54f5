"""`tokenmill bench serve` against real servers."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

from http_server import Server
from typer.testing import CliRunner

from tokenmill.cli.app import app

SMALL = ["--streams", "8", "--requests", "20", "--prompt-tokens", "12", "--max-tokens", "10"]


def bench(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "serve", *words])
    return result.exit_code, result.stdout


def test_every_answer_under_load_is_the_one_alone(server: Server) -> None:
    code, text = bench("--url", server.url, *SMALL, "--check", "--json", "-")
    found = json.loads(text)["points"][0]
    assert code == 0 and found["check"] == {"equal": 20, "lost": 0, "mixed_up": 0, "different": 0}
    assert found["completed"] == 20 and found["output_tokens"] == 200 and not found["errors"]
    assert 0 < found["ttft"]["p50"] <= found["ttft"]["p99"] <= found["e2e"]["p99"]


def test_an_open_loop_and_the_table(server: Server) -> None:
    code, text = bench("--url", server.url, *SMALL[2:], "--rate", "200")
    assert code == 0 and "200 requests/s at random times" in text and "errors      none" in text


def test_errors_are_counted_and_told(server: Server) -> None:
    code, text = bench("--url", server.url, *SMALL, "--name", "another")
    assert code == 1 and "20 x status 404" in text and "is not served here" in text


def test_the_offline_api_is_measured_in_turns(chat_model: str) -> None:
    tiny = ["-m", chat_model, "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
    code, text = bench(*tiny, *SMALL[:2], *SMALL[4:], "--against-offline", "--rounds", "2", "--json", "-")
    found = json.loads(text)["overhead"]
    assert code == 0 and len(found["served_tokens_per_second"]) == len(found["offline_tokens_per_second"]) == 2
    assert all(speed > 0 for speed in found["served_tokens_per_second"] + found["offline_tokens_per_second"])


def test_rates_are_swept_with_new_prompts_each_time(server: Server, tmp_path: Path) -> None:
    words = ["--rate", "40,80", "--repeats", "2", "--slo", "ttft=60s,itl=60s", "--price", "2.5/h"]
    target = tmp_path / "found.json"
    out = ["--json", str(target), "--plot", str(tmp_path / "plots")]
    code, text = bench("--url", server.url, *SMALL[2:], *words, *out)
    points = json.loads(target.read_text())["points"]
    assert code == 0 and [point["rate"] for point in points] == [40, 80]
    for point in points:
        assert point["completed"] == 40 and len(point["repeats"]) == 2
        # The first block of 16 holds two or three words, which two prompts may share; the same prompts would be 640.
        assert point["cached_tokens"] <= 4 * 16
        assert point["goodput"]["share"] == 1 and point["interval"]["ttft.mean"] is not None
        assert point["memory"]["resident"] > 1e7 and point["cost"]["per_million_tokens"] > 0
    assert "goodput/s" in text and "within TTFT 60000 ms and ITL 60000 ms at p90" in text
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {f"{name}.svg" for name in ("ttft", "itl", "throughput", "ttft_rate", "itl_rate", "goodput_rate")}
    for path in (tmp_path / "plots").iterdir():
        ET.parse(path)


def test_a_trace_is_replayed_at_its_times_and_shares_what_it_shares(server: Server, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 4000 * number, "input_length": 600, "output_length": 5, "hash_ids": [7, 8 + number]}
        for number in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--trace", str(trace), "--speed", "10", "--longest-input", "40", "--warmup", "0", "--json", "-"]
    code, text = bench("--url", server.url, *words)
    point = json.loads(text)["points"][0]
    assert code == 0 and point["completed"] == 4 and point["output_tokens"] == 20
    assert 1.2 < point["seconds"] < 10, "12 seconds, ten times as fast"
    assert 2 * 40 * 3 < point["cached_tokens"] < point["prompt_tokens"], "the last three begin as the first"


def test_a_server_of_our_own_tells_its_memory_and_what_it_made_of_the_machine(chat_model: str) -> None:
    tiny = ["-m", chat_model, "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
    code, text = bench(*tiny, *SMALL, "--json", "-")
    point = json.loads(text)["points"][0]
    assert code == 0 and point["memory"]["peak"] > 5e7
    achieved = point["achieved"]
    assert 20 <= achieved["steps"] <= 300, "ten tokens for eight at once, two and a half times, and their prompts"
    assert 0 < achieved["bytes_share"] < 1 and 0 < achieved["flops_share"] < 1
