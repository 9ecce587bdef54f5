"""Settings of the engine on the command line of `tokenmill serve`, and of the servers that `bench serve` starts."""

import contextlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tokenmill.cli.app import app

pytest.importorskip("uvicorn")

TYPED = {
    "quantization": "int4,layers.0-3=int8",
    "kv_cache_dtype": "int8",
    "policy": "sjf",
    "slo_itl_ms": 40.0,
    "slo_ttft_ms": 500.0,
}
WORDS = [word for name, value in TYPED.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def served(monkeypatch):
    """Run `tokenmill serve` up to the point where a process would be started; what it would serve, if anything."""

    def run(*words):
        seen = []

        async def stand_in(service, http, report, on_ready):
            seen.append(service)

        monkeypatch.setattr("tokenmill.serve.server.serve", stand_in)
        done = CliRunner().invoke(app, ["serve", *words])
        return done, seen[0] if seen else None

    return run


def test_what_is_typed_reaches_the_engine(served):
    done, service = served("some/model", *WORDS)
    assert done.exit_code == 0, done.output
    assert {name: getattr(service.config, name) for name in TYPED} == TYPED


def test_a_smaller_model_for_bad_times_keeps_its_own_weights(served):
    done, service = served("some/model", "--degrade", "some/smaller", *WORDS)
    assert done.exit_code == 0, done.output
    second = service.degrade.config
    assert (second.model, second.quantization, second.kv_cache_dtype) == ("some/smaller", None, "int8")
    assert (second.policy, second.slo_itl_ms, second.slo_ttft_ms) == ("sjf", 40.0, 500.0)


def test_forms_by_layer_come_from_a_file_unless_they_are_typed(served, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('[engine]\npolicy = "fcfs"\n[engine.quantization]\ndefault = "int4"\n"layers.0-3" = "int8"\n')
    _, service = served("some/model", "--config", str(path))
    assert service.config.quantization == {"default": "int4", "layers.0-3": "int8"}
    assert service.config.policy == "fcfs"
    _, service = served("some/model", "--config", str(path), "--quantization", "w8a8")
    assert (service.config.quantization, service.config.policy) == ("w8a8", "fcfs")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--quantization", "int3"], "int3"),
        (["--quantization", "int4,head=int8"], "head"),
        (["--kv-cache-dtype", "int2"], "int2"),
        (["--policy", "lottery"], "lottery"),
        (["--slo-itl-ms", "0"], "slo_itl_ms"),
        (["--slo-ttft-ms", "500"], "slo_itl_ms"),
    ],
)
def test_a_wrong_value_is_a_sentence_that_names_it(served, words, named):
    done, service = served("some/model", *words)
    assert (done.exit_code, service) == (2, None)
    assert done.stderr.startswith("error: ") and named in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("table", "line", "place"),
    [
        ("engine", 'seed = "x"', "engine.seed"),
        ("engine", "slo_ttft_ms = 500", "engine.slo_ttft_ms"),
        ("engine", 'policy = "lottery"', "engine.policy"),
        ("engine", 'quantization = {default = "int3"}', "engine.quantization"),
        ("serve", 'log_level = "loud"', "serve.log_level"),
        ("serve", 'port = "https"', "serve.port"),
    ],
)
def test_a_wrong_value_in_a_file_says_where_it_stands(served, tmp_path, table, line, place):
    path = tmp_path / "s.toml"
    path.write_text(f"[{table}]\ndtype = 'float32'\n{line}\n" if table == "engine" else f"[{table}]\n{line}\n")
    done, service = served("some/model", "--config", str(path))
    assert (done.exit_code, service) == (2, None)
    told = "".join(letter for letter in done.stderr if letter not in " \n│")  # as wide as the terminal
    assert f"({place}in{path})" in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine]\nmax_num_seqs = true\n", "max_num_seqs is True; it must be a positive whole number"),
        ("[engine]\nmax_num_seqs = 2.5\n", "max_num_seqs is 2.5; it must be a positive whole number"),
        ("[engine]\ndevice = true\n", "device is true; it must be a text"),
        ("[serve]\nport = true\n", "port is true; it must be a whole number"),
        ("[serve]\ndrain_seconds = false\n", "drain_seconds is false; it must be a number"),
        ("[serve]\nlog_level = true\n", "log_level is true; it must be a text"),
        ("[engine]\nmax_num_batched_tokens = true\n", "max_num_batched_tokens is True; it must be a positive whole"),
    ],
)
def test_a_value_of_another_kind_in_a_file_is_not_bent(served, tmp_path, text, said):
    path = tmp_path / "s.toml"
    path.write_text(text)
    done, service = served("some/model", "--config", str(path))
    assert (done.exit_code, service) == (2, None)
    assert said in done.stderr and str(path) in done.stderr


def test_switches_and_numbers_of_a_file_are_taken(served, tmp_path):
    path = tmp_path / "s.toml"
    path.write_text("[engine]\nmax_num_seqs = 3\n[serve]\nlog_prompts = true\ndrain_seconds = 2\ntrace_ratio = 0.5\n")
    done, service = served("some/model", "--config", str(path))
    assert done.exit_code == 0, done.output
    assert service.config.max_num_seqs == 3


def test_a_wrong_value_that_is_typed_is_not_laid_on_the_file(served, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('[engine]\npolicy = "fcfs"\nseed = 7\n[serve]\nport = 80\n')
    for words in (["--policy", "lottery"], ["--port", "https"]):
        done, _ = served("some/model", "--config", str(path), *words)
        assert done.exit_code == 2 and path.name not in done.stderr


def test_the_load_test_starts_a_server_that_understands_what_it_is_given(monkeypatch, served):
    """The words that `bench serve` gives to the server it starts are read by the real `tokenmill serve`."""
    commands = []

    class Stopped(Exception):
        pass

    def popen(command, **_):
        commands.append(command)
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", popen)
        with contextlib.suppress(Stopped):
            CliRunner().invoke(app, ["bench", "serve", "-m", "some/model", "--no-ceilings", *WORDS])
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "tokenmill", "serve"]
    done, service = served(*command[4:])
    assert done.exit_code == 0, done.output
    assert {name: getattr(service.config, name) for name in TYPED} == TYPED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "2"], "--replicas is for several replicas; say where they run, too, as in --cluster local"),
        (["--autoscale", "1:2:8"], "--autoscale is for several replicas"),
        (["--replica-gpus", "1"], "--replica-gpus is for several replicas"),
        (["--port", "many"], "invalid value for '--port': "),
        (["--cluster-secret", "no-such-file"], "cannot be read from no-such-file (No such file or directory)"),
    ],
)
def test_what_serve_would_have_to_ignore_or_guess_is_refused_in_one_line(served, words, said):
    done, service = served("some/model", *words)
    assert done.exit_code == 2 and service is None
    assert said in done.output and done.output.count("\n") == 1 and "Input should" not in done.output
