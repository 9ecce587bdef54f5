"""Every setting of an engine is declared once: each way to make an engine takes it, checks it and has its default."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenmill import LLM, AsyncLLM
from tokenmill.cli.app import app
from tokenmill.config import OPTIONS, EngineConfig, command_defaults
from tokenmill.errors import ConfigError
from tokenmill.option import Option, as_words

pytest.importorskip("uvicorn")

COMMANDS = {  # how each is begun; what it needs besides the model and settings
    "run": ["run", "Hi", "-m", "some/model"],
    "chat": ["chat", "-m", "some/model"],
    "serve": ["serve", "some/model"],
    "warm": ["warm", "some/model"],
    "bench offline": ["bench", "offline", "some/model", "--no-ceilings"],
    "bench latency": ["bench", "latency", "some/model", "--no-ceilings"],
    "bench trace": ["bench", "trace", "-m", "some/model"],
    "bench serve": ["bench", "serve", "-m", "some/model", "--no-ceilings"],
}
OWN_SEED = ("run", "chat", "bench offline", "bench latency", "bench serve")  # have a --seed of their own
FILES = ("serve", "run", "warm", "bench offline")
FRONTS = ("LLM", "AsyncLLM", *COMMANDS, *(f"{command} --config" for command in FILES))
SERVERS = ("max_queued_requests", "max_queued_tokens")  # in a file they stand under [serve]

# A value of each setting that is not its default.
OTHER: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "parallel": "tp2",
    "rank_listen": "127.0.0.1:7200",
    "rank_secret_file": "/some/other/secret",
    "ranks_here": 1,
    "rank_patience": 60.0,
    "quantization": {"default": "int4", "layers.0-3": "int8"},
    "kv_cache_dtype": "int8",
    "max_model_len": 128,
    "cache_dir": "/some/folder",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "policy": "sjf",
    "slo_itl_ms": 40.0,
    "slo_ttft_ms": 500.0,
    "max_queued_requests": 7,
    "max_queued_tokens": 70,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory": 1 << 20,
    "block_size": 32,
    "enable_prefix_caching": False,
    "prompt_modules": False,
    "module_reread_tokens": 4,
    "module_start": "start.txt",
    "module_start_tokens": 100,
    "eviction": "learned",
    "max_memory": 1 << 34,
    "weights_offload": 1 << 30,
    "expert_cache": "lru",
    "kv_pruning": "keynorm",
    "kv_pruning_keep": 0.25,
    "kv_pruning_window": 128,
    "kv_host_memory": 1 << 30,
    "kv_disk_path": "/some/where",
    "kv_disk_bytes": 1 << 33,
    "kv_listen": "127.0.0.1:7100",
    "kv_push_to": "127.0.0.1:7101",
    "kv_transport": "nixl",
    "kv_secret_file": "/some/secret",
    "cuda_graphs": False,
    "prompt_graphs": False,
    "warm_up": False,
    "shared_prefix_attention": False,
    "adaptive_precision": False,
    "speculation": "off",
    "batch_invariant": True,
    "overlap": True,
    "ops": {"attention": "cpu", "sample": "reference"},
    "expert_capacity": 1.5,
    "allreduce_8bit_above": 65536,
    "hot_experts": "0,3",
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 64,
    "lora_host_memory": 1 << 20,
    "skip_tokenizer_init": True,
    "seed": 9,
    "kv_cache": False,
    "kv_reservation": "max_model_len",
    "batching": "static",
    "enable_chunked_prefill": False,
}
# One that is refused, and what has to be said of it.
WRONG: dict[str, tuple[Any, str]] = {
    **{name: ("lottery", f"one of {', '.join(one.choices)}") for name, one in OPTIONS.items() if one.choices},
    **{name: (0, "a positive whole number") for name, one in OPTIONS.items() if one.low == 1},
    "gpu_memory_utilization": (1.5, "a number above 0 and at most 1"),
    "weights_offload": (-1, "a whole number of at least 0"),
    "slo_itl_ms": (0.0, "a number of milliseconds above 0, or unset"),
    "slo_ttft_ms": (-1.0, "a number of milliseconds above 0, or unset"),
}


class Made(Exception):
    """Thrown where an engine would be built."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Go one way to an engine up to where it would be built: its settings, or what was said instead."""
    command = typer.main.get_command(app)
    monkeypatch.setattr("typer.testing._get_command", lambda _: command)  # made once
    monkeypatch.chdir(tmp_path)
    served: list[EngineConfig] = []

    def build(config: EngineConfig, *_: Any) -> None:
        raise Made(config)

    async def stand_in(service: Any, *_: Any) -> None:
        served.append(service.config)

    def popen(words: list[str], **_: Any) -> None:
        assert words[:4] == [sys.executable, "-m", "tokenmill", "serve"]
        typed("serve", words[3:])  # what the server that is started makes of them
        raise Made(served.pop())

    monkeypatch.setattr("tokenmill.llm.build", build)
    monkeypatch.setattr("tokenmill.async_llm.build", build)
    monkeypatch.setattr("tokenmill.serve.server.serve", stand_in)
    monkeypatch.setattr(subprocess, "Popen", popen)

    def typed(front: str, words: list[str]) -> EngineConfig | str:
        done = CliRunner().invoke(app, words)
        if isinstance(done.exception, Made):
            return done.exception.config
        if front == "serve" and done.exit_code == 0:
            return served[-1]
        assert done.exit_code == 2, (done.output, done.exception)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.stderr

    def go(front: str, **settings: Any) -> EngineConfig | str:
        if front in ("LLM", "AsyncLLM"):
            try:
                {"LLM": LLM, "AsyncLLM": AsyncLLM}[front]("some/model", **settings)
            except Made as made:
                return made.config
            except ConfigError as error:
                return str(error)
        name = front.removesuffix(" --config")
        if name != front:
            engine = {key: value for key, value in settings.items() if key not in SERVERS}
            serve = {key: value for key, value in settings.items() if key in SERVERS}
            path = tmp_path / "settings.json"
            path.write_text(json.dumps({"engine": engine, "serve": serve}))
            return typed(name, [*COMMANDS[name], "--config", str(path)])
        if name in OWN_SEED and "seed" in settings:
            settings["engine_seed"] = settings.pop("seed")
        return typed(name, [*COMMANDS[name], *as_words(settings)])

    return go


def test_the_examples_are_of_every_setting() -> None:
    assert OTHER.keys() == OPTIONS.keys() - {"model"}
    assert {name for name in OTHER if OTHER[name] == OPTIONS[name].default} == set()


@pytest.mark.parametrize("front", FRONTS)
def test_every_setting_reaches_the_engine_from_everywhere(make: Any, front: str) -> None:
    settings = dict(OTHER)
    if front.endswith("--config") and not front.startswith("serve"):
        settings = {name: value for name, value in settings.items() if name not in SERVERS}
    alone = {"batch_invariant": settings.pop("batch_invariant")}  # not with quantized weights
    pruned = {name: settings.pop(name) for name in OTHER if name.startswith("kv_pruning")}  # nor with much else
    for given in (settings, alone, pruned):
        found = make(front, **given)
        assert isinstance(found, EngineConfig), found
        reached = {name: getattr(found, name) for name in given}
        if isinstance(reached.get("quantization"), str):
            reached["quantization"] = {"default": "int4", "layers.0-3": "int8"}
            assert found.quantization == "default=int4,layers.0-3=int8"
        assert (found.model, reached) == ("some/model", given)


@pytest.mark.parametrize("front", FRONTS)
def test_a_value_out_of_range_is_refused_with_one_sentence_everywhere(make: Any, front: str) -> None:
    for name, (value, wanted) in WRONG.items():
        if front.endswith("--config") and not front.startswith("serve") and name in SERVERS:
            continue
        said = make(front, **{name: value})
        assert isinstance(said, str), (name, said)
        assert f"{name} is {value!r}; it must be {wanted}" in said


@pytest.mark.parametrize("front", FRONTS)
def test_defaults_are_the_same_everywhere_but_where_the_declaration_says_so(
    make: Any, front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "getrandbits", lambda bits: bits)
    command = {"bench serve": "serve"}.get(front, front.removesuffix(" --config"))
    derived: dict[str, dict[str, Any]] = {
        "bench offline": {"skip_tokenizer_init": False},
        "bench latency": {"max_num_seqs": 1, "skip_tokenizer_init": False},
        "bench trace": {"max_num_seqs": 9, "max_model_len": 128 + 65},
    }
    expected = {**asdict(EngineConfig("some/model")), **command_defaults(command, **derived.get(command, {}))}
    assert asdict(make(front)) == expected


def test_only_commands_that_are_there_have_defaults_of_their_own() -> None:
    named = {command for one in OPTIONS.values() for command in one.by_command}
    assert named <= COMMANDS.keys()
    assert all(other.why for one in OPTIONS.values() for other in one.by_command.values())


def test_what_is_typed_wins_over_the_file(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[engine]\nmodel = "from/file"\nmax_num_seqs = 5\nops = "reference"\n[serve]\nport = 9\n')
    done = CliRunner().invoke(app, ["warm", "--config", str(path), "--max-num-seqs", "7"])
    assert isinstance(done.exception, Made), done.output
    config = done.exception.config
    assert (config.model, config.max_num_seqs, config.ops) == ("from/file", 7, "reference")


def test_null_in_a_file_is_unset(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"engine": {"max_num_seqs": null, "overlap": null}}')
    done = CliRunner().invoke(app, ["run", "Hi", "--config", str(path)])
    assert isinstance(done.exception, Made) and done.exception.config.max_num_seqs == 1
    path.write_text('{"engine": {"seed": null}}')
    assert "seed is None; it must be a whole number" in CliRunner().invoke(app, ["warm", "--config", str(path)]).stderr


def test_a_file_is_checked_by_every_command_and_the_place_is_told(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[engine]\nseed = 1.5\n")
    done = CliRunner().invoke(app, ["run", "Hi", "--seed", "4", "--config", str(path)])
    assert done.exit_code == 2 and "seed is 1.5; it must be a whole number (engine.seed in" in done.stderr
    path.write_text("[serve]\nprot = 1\n")
    done = CliRunner().invoke(app, ["warm", "--config", str(path)])
    assert done.exit_code == 2 and "serve has no setting 'prot'; did you mean 'port'?" in done.stderr


@pytest.mark.parametrize(
    ("kind", "declared", "good", "bad", "wanted"),
    [
        ("int", {"low": 0}, [0, 7], [-1, 1.0, True, "1"], "a whole number of at least 0"),
        ("int", {"low": 1, "solved": "8"}, [1, None], [0, 1.5], "a positive whole number, or unset to be solved"),
        ("float", {"above": 0, "high": 1}, [0.1, 1], [0, 1.1, float("nan"), True], "a number above 0 and at most 1"),
        ("bool", {}, [True, False, None], [1, "yes"], "True, False, or unset to be solved"),
        ("str", {"choices": ("a", "b")}, ["a", None], ["c", 1, []], "one of a, b, or unset"),
        ("str", {"form": "a path"}, ["x", None], [3, []], "a path, or unset"),
    ],
)
def test_a_declaration_says_what_fits(kind: str, declared: Any, good: list[Any], bad: list[Any], wanted: str) -> None:
    optional = None in good
    one = Option("help", "group", None if optional else good[0], name="it", kind=kind, **declared)
    for value in good:
        one.check(value)
    for value in bad:
        with pytest.raises(ConfigError) as refused:
            one.check(value)
        assert str(refused.value) == f"it is {value!r}; it must be {wanted}"


@pytest.mark.parametrize("text", ["attention=", "=cpu", "attention=cpu,sample"])
def test_half_a_pair_of_op_and_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="it is one name, or names by op, written as attention=cpu"):
        EngineConfig.from_options(ops=text)


def test_a_batch_that_does_not_fit_is_refused(make: Any) -> None:
    words = ["bench", "latency", "some/model", "--no-ceilings", "--batch", "1,8", "--max-num-seqs", "4"]
    assert "max_num_seqs is 4; it must be 8, the largest --batch, or more" in CliRunner().invoke(app, words).stderr


@pytest.mark.parametrize("words", [["warm"], ["bench", "offline"], ["bench", "serve"], ["run"]])
def test_help_says_where_all_options_are(words: list[str]) -> None:
    told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output
    assert "`tokenmill serve --help` lists them" in told and "--kv-reservation" not in told


def test_help_of_serve_lists_every_option() -> None:
    told = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert [name for name in OPTIONS if name != "model" and f"--{name.replace('_', '-')}" not in told] == []


def test_a_server_says_how_much_may_wait_and_why() -> None:
    from tokenmill.cli.serve import queue_line

    usual = EngineConfig(**command_defaults("serve"))
    assert "500,000 prompt tokens and 10,000 requests may wait; more get 429 (clients of a server" in queue_line(usual)
    assert queue_line(EngineConfig(max_queued_tokens=7, max_queued_requests=8)).endswith("more get 429")
