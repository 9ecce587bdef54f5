"""Commands that the docs show exist: their names, and every option."""

import shlex
from pathlib import Path

import pytest
import typer

from tokenmill.cli.app import app

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown(page):
    """Every `tokenmill ...` line of a page's blocks, as words; a backslash goes on in the next line."""
    blocks = (DOCS / page).read_text().split("```")[1::2]
    lines = (line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [shlex.split(line, comments=True) for line in lines if line.startswith("tokenmill ")]


def wrong(words):
    """What a command line has that the program has not."""
    command, rest = typer.main.get_command(app), words[1:]
    while (inner := getattr(command, "commands", None)) is not None:
        if rest[0] not in inner:
            return rest[0]
        command, rest = inner[rest[0]], rest[1:]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return next((word for word in rest if word.startswith("-") and word.partition("=")[0] not in known), None)


@pytest.mark.parametrize("page, least", [("benchmarks.md", 6), ("planning.md", 8), ("ladder.md", 1)])
def test_commands_in_the_docs_exist(page, least):
    found = shown(page)
    assert len(found) >= least
    assert [(" ".join(words), wrong(words)) for words in found if wrong(words) is not None] == []


def test_a_wrong_command_is_noticed():
    assert wrong(["tokenmill", "bench", "serve", "--streams", "4", "--no-ignore-eos"]) is None
    assert wrong(["tokenmill", "bench", "serve", "--users", "4"]) == "--users"
    assert wrong(["tokenmill", "bench", "server"]) == "server"
