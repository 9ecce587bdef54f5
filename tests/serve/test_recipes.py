"""Every block of Python in docs/recipes.md runs against a server, where its package is installed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from http_server import Server

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
RECIPES = [
    (title, code)
    for title, section in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    for code in re.findall(r"```python\n(.*?)```", section, re.S)
]


@pytest.mark.parametrize(("title", "code"), RECIPES, ids=[title for title, _ in RECIPES])
def test_a_recipe_runs(server: Server, title: str, code: str) -> None:
    for package in re.findall(r"^(?:from|import) (\w+)", code, re.M):
        pytest.importorskip(package)
    code = code.replace("http://127.0.0.1:8000", server.url).replace('default"', 'tiny-chat"')
    if "json_schema" in code:  # likeliest for a random model is to indent for ever
        code = code.replace("max_tokens=40, temperature=0", "max_tokens=400, temperature=1, seed=1")
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(compile(code, title, "exec"), {"__name__": "recipe"})
    assert len(told.getvalue().strip()) > 1
    if "regex" in code:
        assert told.getvalue().rstrip().endswith(("yes", "no"))
    if "json_schema" in code:
        assert re.search(r"\{'kind': '(wind|water)'\}", told.getvalue())


def test_the_page_has_all_recipes() -> None:
    assert [title for title, _ in RECIPES] == [
        "OpenAI's SDK", "Anthropic's SDK", "LangChain", "LlamaIndex", "LiteLLM"
    ]  # fmt: skip
