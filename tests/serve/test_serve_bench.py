"""`tokenmill bench serve` against real servers."""

from __future__ import annotations

import json

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
    code, text = bench("--url", server.url, *SMALL, "--rate", "200")
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
