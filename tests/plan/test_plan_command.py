"""`tokenmill plan` and the file it writes for `tokenmill serve --config`."""

from __future__ import annotations

import json
import re
from typing import Any

import plan_models
import pytest
import torch
from tiny import write_tiny
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from tokenmill.cli.app import app
from tokenmill.config import EngineConfig
from tokenmill.engine.checkpoints import open_checkpoint
from tokenmill.engine.choices import model_bytes, schemes_for
from tokenmill.errors import ConfigError
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.load import stored_forms
from tokenmill.model.weights.source import resolve
from tokenmill.parallel.layout import parse_layout, why_not
from tokenmill.plan.planner.calibrate import CPU_START, calibrate, kept_at
from tokenmill.plan.planner.candidates import GpuFleet
from tokenmill.plan.planner.configfile import ConfigFile, read_config_file, write_config
from tokenmill.plan.planner.precision import WeightPrecision, stored_precision
from tokenmill.plan.solve.gpus import GPUS, rates_of
from tokenmill.plan.solve.hardware import cpu_hardware
from tokenmill.plan.solve.shape import shape_of
from tokenmill.quant.schemes.choose import ComputeTarget

SCHEME = "int4-g32"
TINY = ("--requests", "20x8")


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
    assert done.exit_code == 2 and "ranks on GPUs are not there yet" in done.output and not target.exists()
    assert "weights_offload" in run(*words[:-2], "--available").output  # one GPU can, if slowly


def test_a_divided_model_is_one_line_that_an_engine_takes(tmp_path, monkeypatch):
    """As soon as what the plan is for can run it."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(plan_models._COMMON | plan_models.CONFIGS["llama3-70b"]))
    target = tmp_path / "served.toml"
    monkeypatch.setattr(GpuFleet, "device", "cpu")
    words = [str(folder), "--gpu", "h200x4", "--quality", "exact"]
    done = run(*words, "--apply", str(target))
    assert done.exit_code == 0, done.output
    settings = read_config_file(target, []).engine
    found = json.loads(run(*words, "--json").stdout)["plan"]
    assert found["parallel"] == settings["parallel"] == str(parse_layout(settings["parallel"]))
    assert f"parallel               {settings['parallel']}  (" in done.output and "not there yet" not in done.output
    assert parse_layout(EngineConfig.from_options(**settings).parallel).ranks == found["gpus"] // found["copies"]


def test_what_no_version_runs_is_said_by_the_layout():
    assert why_not(parse_layout("tp2,pp2"), "cpu") is None
    assert "ranks on GPUs are not there yet" in str(why_not(parse_layout("tp2"), "cuda"))
    assert "ranks on GPUs are not there yet" in str(why_not(parse_layout("dp2,ep2"), "cuda"))
    assert why_not(parse_layout("dp2,ep2"), "cpu") is None


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "plain"
    write_tiny(folder, hidden_size=64, intermediate_size=128, head_dim=16, dtype="bfloat16")
    plan_models.write_weights(folder)
    Tokenizer(models.WordLevel({"w0": 0}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def small(tmp_path, plain):
    folder = tmp_path / "small"
    done = CliRunner().invoke(app, ["quantize", str(plain), "--scheme", SCHEME, "-o", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def test_a_quantized_checkpoint_is_planned_with_what_it_stores(small, plain):
    floats, stored = (json.loads(run(str(one), *TINY, "--gpu", "h200", "--json").stdout) for one in (plain, small))
    assert stored["plan"]["stored"] == SCHEME and stored["plan"]["quantization"] is None
    assert {one["stored"] for one in stored["runners_up"]} == {SCHEME}
    assert floats["plan"]["stored"] is None and "as the checkpoint was saved" in floats["reasons"]["dtype"]["why"]
    why = stored["reasons"]["quantization"]
    assert why == {"value": SCHEME, "why": "as the checkpoint stores it"}
    assert "saved" not in stored["reasons"]["dtype"]["why"]


@pytest.mark.parametrize("head", [None, "int8", "int4-g32"])
def test_the_bytes_of_stored_weights_are_those_that_the_engine_counts(small, plain, tmp_path, head):
    if head is not None:
        small = tmp_path / "with-head"
        words = ["quantize", str(plain), "--scheme", SCHEME, "--lm-head", head, "-o", str(small)]
        assert CliRunner().invoke(app, words).exit_code == 0
    config = EngineConfig(model=str(small))
    checkpoint, settings = open_checkpoint(config, resolve(str(small)))
    spec = spec_from_config(settings)
    schemes, _ = schemes_for(config, spec, checkpoint, ComputeTarget(torch.device("cuda"), torch.bfloat16))
    sizes = model_bytes(spec, torch.bfloat16, schemes, checkpoint, guarded=True)
    form, shape = stored_precision(spec, stored_forms(spec, checkpoint), torch.bfloat16), shape_of(spec)
    fleet = GpuFleet(GPUS["h200"], 1, stored=form)
    fit = fleet.place(shape, next(fleet.layouts(shape, 0)), longest=64, rows=64, step_tokens=512)
    assert fit.memory.weights == pytest.approx(sizes.weights, rel=0.02)
    assert fit.memory.weights < 0.7 * spec.weight_bytes(2)
    assert 4 * form.widest == sizes.scratch
    assert fit.step_time.element_bytes.head == pytest.approx(
        {None: 2, "int8": 1 + 4 / 64, "int4-g32": 0.5 + 4 / 32}[head]
    )


@pytest.mark.parametrize(("gpu", "float8"), [("a100", False), ("rtx3090", False), ("l4", True), ("rtx5090", True)])
def test_float8_is_planned_for_gpus_that_have_it(gpu, float8):
    ask = "llama3-8b", GpuFleet(GPUS[gpu], 1)
    forms = [(one.weights.quantization, one.kv.dtype) for one in ask[1].layouts(plan_models.shape(ask[0]), 2)]
    assert ("int8", "auto") in forms and ("w8a8", "auto") in forms
    assert any("fp8" in one for one in forms) == float8


def test_stored_float8_is_read_as_such_where_a_gpu_does_not_multiply_it():
    shape = plan_models.shape("llama3-8b")
    stored = WeightPrecision(None, "fp8", 1.0, 0, stored="fp8", widest=1 << 20)
    for gpu, rate in (("a100", "int8"), ("h100", "fp8")):
        fleet = GpuFleet(GPUS[gpu], 1, stored=stored)
        fit = fleet.place(shape, next(fleet.layouts(shape, 0)), longest=64, rows=64, step_tokens=512)
        assert fit.step_time.element_bytes.weight == 1.0
        assert fit.step_time.rates == rates_of(GPUS[gpu], rate)


def test_more_rows_than_the_kernels_take_cost_the_widening(small):
    checkpoint, settings = open_checkpoint(EngineConfig(model=str(small)), resolve(str(small)))
    spec = spec_from_config(settings)
    form, shape = stored_precision(spec, stored_forms(spec, checkpoint), torch.bfloat16), shape_of(spec)
    fleet = GpuFleet(GPUS["h200"], 1, stored=form)
    layout = next(fleet.layouts(shape, 0))
    few, many = (fleet.place(shape, layout, longest=64, rows=rows, step_tokens=512) for rows in (64, 256))
    assert few.step_time.element_bytes.weight == form.weight_bytes
    assert many.step_time.element_bytes.weight == few.step_time.element_bytes.weight + 4


def test_a_config_that_is_quantized_without_weights_is_told(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    known = plan_models._COMMON | plan_models.CONFIGS["llama3-8b"] | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(known))
    assert "says that it is quantized, but its weights are not there" in run(str(folder), "--gpu", "h200").output


def test_the_blocks_of_a_gguf_file_are_not_called_floats(default_model):
    done = run(default_model, "--gpu", "h200")
    assert done.exit_code == 0 and "the blocks of a GGUF file become floats" in done.output


def test_the_machine_is_measured_with_the_weights_as_stored_and_a_log_is_told(small, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    monkeypatch.setattr("tokenmill.plan.planner.calibrate.BUDGET", 0.01)
    monkeypatch.setattr("tokenmill.cli.plan.EVERY", 0.0)
    done = run(str(small), *TINY)
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"timing steps: \d+ of \d+", done.stderr)) > 3
    kept = json.loads(next((tmp_path / "plan").iterdir()).read_text())
    assert kept["settings"]["load_format"] == "auto" and kept["element_bytes"]["weight"] < 1


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


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("s.toml", 'max_num_seqs = "many"\n', "max_num_seqs stands outside .* move it under \\[engine\\]$"),
        ("s.toml", "port = 80\n[engine]\nseed = 1\n", "port stands outside .* move it under \\[serve\\]$"),
        ("s.toml", "max_queued_tokens = 9\n", "move it under \\[serve\\]$"),
        ("s.toml", "colour = 9\n", "colour stands outside .* move it under \\[engine\\] or \\[serve\\]$"),
        ("s.json", '{"seed": 1}', 'seed stands outside .* move it under "engine"$'),
        ("s.toml", "engine = 5\n", "engine is 5; it must be a table"),
        ("s.json", "[1]", "must hold the tables engine and serve"),
        ("s.toml", "[engines]\n", "has a table 'engines'"),
        ("s.toml", "[engine]\ntrust_remote_code = true\n", "s.toml: trust_remote_code=True .* never run"),
    ],
)
def test_what_stands_in_the_wrong_place_is_told_where_it_belongs(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config_file(path, ["port", "max_queued_tokens"])


def test_names_of_other_engines_are_taken_from_a_file_too(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('[engine]\ntensor_parallel_size = 1\ndtype = "half"\nenforce_eager = true\n')
    assert read_config_file(path, []).engine == {"dtype": "float16", "cuda_graphs": False}


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
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    monkeypatch.setattr("tokenmill.plan.planner.calibrate.BUDGET", 0.01)
    config = EngineConfig(model=tiny_model, load_format="dummy", device="cpu", skip_tokenizer_init=True)
    first = calibrate(config)
    assert len(first.points) >= 5 and first.rates != CPU_START
    assert kept_at(config, cpu_hardware()).is_file()
    monkeypatch.setattr("tokenmill.engine.build.build", None)  # nothing is built the second time
    assert calibrate(config) == first
