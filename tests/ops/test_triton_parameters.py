"""A kernel takes nothing that it does not use: every argument costs its launch something. Read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tokenmill

SOURCES = sorted((Path(tokenmill.__file__).parent / "ops" / "triton").rglob("*.py"))


def unused(source: str) -> list[str]:
    """Parameters of compiled functions that their bodies do not read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(".jit" in ast.unparse(one) for one in node.decorator_list):
            names = (one for part in node.body for one in ast.walk(part) if isinstance(one, ast.Name))
            used = {one.id for one in names if isinstance(one.ctx, ast.Load)}
            taken = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            found += [f"{node.name}: {one.arg}" for one in taken if one.arg not in used]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_parameter_of_a_kernel_is_used(path: Path) -> None:
    assert unused(path.read_text(encoding="utf-8")) == []


def test_an_unused_parameter_is_found() -> None:
    assert len(SOURCES) > 20
    assert unused("@triton.jit(noinline=True)\ndef kernel(x, y):\n    z = x\n") == ["kernel: y"]
    assert unused("@triton.jit\ndef kernel(x, y, *, z, w):\n    y = x + w\n") == ["kernel: y", "kernel: z"]
