"""`tokenmill plan` and the file it writes for `tokenmill serve --config`."""

from __future__ import annotations

import json
from typing import Any

import plan_models
import pytest
from typer.testing import CliRunner

from tokenmill.cli.app import app
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.plan.calibrate import CPU_START, calibrate, kept_at
from tokenmill.plan.configfile import ConfigFile, read_config_file, write_config
from tokenmill.plan.hardware import cpu_hardware


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(plan_models._COMMON | plan_models.CONFIGS["llama3-8b"]))
    return str(folder)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def test_a_plan_is_printed_with_reasons_and_applied(model, tmp_path):
    target = tmp_path / "served.toml"
    done = run(model, "--gpu", "h200x2", "--rate", "3", "--slo", "ttft=1s,itl=50ms", "--apply", str(target))
    assert done.exit_code == 0, done.output
    assert "plan         1 x (bfloat16, undivided)" in done.output and "runners-up" in done.output
    settings = read_config_file(target, []).engine
    assert settings["model"] == model and settings["dtype"] == "bfloat16"
    EngineConfig.from_options(**settings)


def test_json_is_for_programs(model):
    done = run(model, "--gpu", "h200x2", "--rate", "3", "--price", "3.5/h", "--json")
    data = json.loads(done.stdout)
    assert data["plan"]["copies"] == 1 and data["plan"]["price_per_million_tokens"] > 0


def test_what_is_not_available_yet_is_not_applied(tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(plan_models._COMMON | plan_models.CONFIGS["llama3-70b"]))
    target = tmp_path / "served.json"
    words = [str(folder), "--gpu", "h200x4", "--rate", "0.2", "--quality", "exact", "--apply", str(target)]
    done = run(*words)
    assert done.exit_code == 2 and "not available yet" in done.output and not target.exists()
    assert "fits in no way" in run(*words, "--available").output


@pytest.mark.parametrize(
    "words",
    [
        ("--gpu", "tpu"),
        ("--slo", "ttft"),
        ("--price", "free"),
        ("--quality", "best"),
        ("--requests", "9"),
        ("--max-model-len", "-4"),
        ("--apply", "/no/such/folder/x.toml"),
    ],
)
def test_a_wrong_word_is_answered_with_a_sentence(model, words):
    done = run(model, *(() if words[0] == "--gpu" else ("--gpu", "l4")), *words)
    assert done.exit_code == 2 and words[1] in done.output


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_config_file_comes_back_as_it_went(tmp_path, ending):
    path = tmp_path / f"settings.{ending}"
    config = ConfigFile({"model": 'a "b" c', "max_num_seqs": 4, "enable_prefix_caching": False}, {"port": 9000})
    write_config(path, config)
    assert read_config_file(path, ["port"]) == config


def test_an_unknown_setting_names_the_closest(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[engine]\nmax_num_seq = 3\n")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        read_config_file(path, [])
    path.write_text("[engine]\nmax_queued_tokens = 3\n")
    with pytest.raises(ConfigError, match="move max_queued_tokens from engine to serve"):
        read_config_file(path, ["max_queued_tokens"])


def test_serve_takes_a_file_and_what_is_typed_wins(tmp_path, monkeypatch, tiny_model):
    pytest.importorskip("uvicorn")
    seen: dict[str, Any] = {}

    async def stand_in(service, http, report, on_ready):
        seen.update(config=service.config, http=http)

    monkeypatch.setattr("tokenmill.serve.server.serve", stand_in)
    path = tmp_path / "settings.toml"
    write_config(
        path,
        ConfigFile(
            {"model": tiny_model, "max_num_seqs": 4, "max_num_batched_tokens": 64, "load_format": "dummy"},
            {"port": 9001, "drain_seconds": 2.5},
        ),
    )
    done = CliRunner().invoke(app, ["serve", "--config", str(path), "--max-num-seqs", "7"])
    assert done.exit_code == 0, done.output
    config, http = seen["config"], seen["http"]
    assert (config.model, config.max_num_seqs, config.max_num_batched_tokens) == (tiny_model, 7, 64)
    assert (config.load_format, http.port, http.drain_seconds) == ("dummy", 9001, 2.5)


def test_a_calibration_is_made_once_and_kept(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setattr("tokenmill.model.weights.source.default_cache_dir", lambda: tmp_path / "models")
    monkeypatch.setattr("tokenmill.plan.calibrate.BUDGET", 0.01)
    config = EngineConfig(model=tiny_model, load_format="dummy", device="cpu", skip_tokenizer_init=True)
    first = calibrate(config)
    assert len(first.points) >= 5 and first.rates != CPU_START
    assert kept_at(config, cpu_hardware()).is_file()
    monkeypatch.setattr("tokenmill.engine.build.build", None)  # nothing is built the second time
    assert calibrate(config) == first
