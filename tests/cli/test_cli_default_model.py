"""`tokenmill run` end to end: the real program, the real default model."""

import subprocess
import sys

import pytest
from cli_children import cpu_seconds

from tokenmill.errors import ModelError

FIRST_TOKEN_S = 6.0  # the promise, for a machine where `import torch` takes this long:
IMPORT_TORCH_S = 1.8


@pytest.fixture(scope="module")
def default_model() -> None:
    from tokenmill.model.weights import source

    try:
        source.resolve("default")
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")


def run_command(*args: str) -> list[str]:
    return [sys.executable, "-m", "tokenmill", "run", *args]


@pytest.mark.usefixtures("default_model")
def test_run_answers_the_same_question_the_same_way_every_time():
    command = run_command("What is 2 + 2?", "--temperature", "0", "--max-tokens", "24", "--verbose")
    first, second = (subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True) for _ in "ab")
    assert first.returncode == 0, first.stderr
    assert "4" in first.stdout
    assert first.stdout == second.stdout
    assert "tokens/s" in first.stderr


@pytest.mark.usefixtures("default_model")
def test_first_token_of_a_cached_model_comes_within_seconds():
    # CPU time and not the clock, because other tests share the cores; and where even `import torch` is slow just now,
    # the limit grows with it.
    slowness = max(1.0, cpu_seconds([sys.executable, "-c", "import torch"]) / IMPORT_TORCH_S)
    command = run_command("Hello", "--max-tokens", "1")
    assert any(cpu_seconds(command) < FIRST_TOKEN_S * slowness for _ in range(2))


@pytest.mark.usefixtures("default_model")
def test_chat_remembers_until_reset():
    command = [sys.executable, "-m", "tokenmill", "chat", "--temperature", "0", "--max-tokens", "24"]
    question = "What is my favourite animal?"
    text = f"My favourite animal is the owl.\n{question}\n/reset\n{question}\n"
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    _, remembered, forgotten = result.stdout.splitlines()
    assert "owl" in remembered
    assert "owl" not in forgotten


@pytest.mark.usefixtures("default_model")
def test_too_long_a_prompt_is_one_line_that_says_what_to_do():
    command = run_command("word " * 200, "--max-model-len", "64")
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: the prompt has")
    assert "prompt and answer share max_model_len = 64" in result.stderr
