"""The `tokenmill` program as a shell sees it: speed of --help, exit codes, pipes."""

import subprocess
import sys

import pytest
from cli_children import cpu_seconds

HELP = [sys.executable, "-m", "tokenmill", "--help"]
EMPTY_S = 0.03  # CPU time of an empty interpreter where --help has to take less than half a second
HEAVY = ("torch", "transformers", "rich.progress", "numpy", "fastapi")


def tokenmill(*args, **kwargs):
    return subprocess.run([sys.executable, "-m", "tokenmill", *args], capture_output=True, text=True, **kwargs)


def test_help_names_the_commands_and_is_quick():
    result = tokenmill("--help")
    for command in ("run", "chat", "pull", "models"):
        assert command in result.stdout
    # CPU time against that of an empty interpreter, the least of three: machines differ, others share cores.
    program, empty = (min(map(cpu_seconds, [command] * 3)) for command in (HELP, [sys.executable, "-c", "pass"]))
    assert program < 0.5 * max(1.0, empty / EMPTY_S)


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["models"], ["run", "hi", "--temperature", "-1"]])
def test_nothing_heavy_is_imported_before_a_model_is_needed(args):
    program = f"""
import sys
from tokenmill.cli import main
sys.argv = ["tokenmill", *{args!r}]
try:
    main()
finally:
    print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "HEAVY []" in result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["run", "--no-such-option"], "--no-such-option"),
        (["--no-such-option"], "--no-such-option"),
        (["dance"], "'dance'"),
        (["bench", "dance"], "'dance'"),
        (["run", "hi", "--seed", "x"], "'--seed'"),
        (["run", "hi", "--seed"], "'--seed'"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(args, named):
    result = tokenmill(*args)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert named in result.stderr and "--help" in result.stderr


def test_a_group_without_a_command_shows_its_help():
    result = tokenmill("bench")
    assert result.returncode == 2 and "Usage" in result.stdout + result.stderr


def test_version_is_that_of_the_package():
    import tokenmill as package

    assert tokenmill("--version").stdout == f"tokenmill {package.__version__}\n"


def test_missing_model_is_one_line_and_exit_1():
    result = tokenmill("run", "hi", "-m", "/no/such/model.gguf", stdin=subprocess.DEVNULL)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def stubbed(request, answer: str, after: str = "pass") -> list[str]:
    """A `tokenmill run hi` in a process of its own, whose model gives this answer."""
    program = f"""
import sys
sys.path.insert(0, {str(request.path.parent)!r})
from cli_stub import StubLLM
from tokenmill.cli import main
from tokenmill.cli import options
stub = StubLLM({answer})
options.open_llm = stub.open
sys.argv = ["tokenmill", "run", "hi"]
try:
    main()
finally:
    {after}
"""
    return [sys.executable, "-c", program]


def test_reader_that_goes_away_ends_the_program_quietly(request):
    command = stubbed(request, "'word ' * 200_000")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        process.stdout.read(10)
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=30) == 141
    assert stderr == b""


def test_piped_text_is_added_to_the_prompt(request):
    command = stubbed(request, "'ok'", after="print(stub.asked[0][0])")
    result = subprocess.run(command, input="a letter", capture_output=True, text=True)
    assert "'hi\\n\\na letter'" in result.stdout


def test_bytes_that_are_no_text_do_not_break_the_prompt(request):
    command = stubbed(request, "'ok'", after="print(ascii(stub.asked[0][0]))")
    result = subprocess.run(command, input=b"caf\xe9", capture_output=True)
    assert b"caf\\ufffd" in result.stdout
