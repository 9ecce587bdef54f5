"""Imports go one way, as docs/architecture.md says: no package imports what is built on it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tokenmill"
LOW = (
    "tokenmill.__version__",
    "tokenmill.errors",
    "tokenmill.compat",
    "tokenmill.cache",
    "tokenmill.collector",
    "tokenmill.step_time",
    "tokenmill.peers",
)
FORMS = ("quant.forms", "sampling.structured", "sampling.records")
# What an engine needs of the two packages that have a layer above it.
PLAN = ("tokenmill.plan.solve",)
QUANT = tuple(f"tokenmill.quant.{name}" for name in ("forms", "groups", "rounding", "schemes"))
SETTINGS = ("tokenmill.config", "tokenmill.params", *(f"tokenmill.{name}" for name in FORMS))
PACKAGES = {  # package -> what it may import beside itself
    "ops": (),
    "kv": (),
    "routing": (),
    "parallel": ("tokenmill.ops",),
    "quant": ("tokenmill.ops",),  # all but quant/tool, which is built on models and engines
    "sampling": ("tokenmill.ops", "tokenmill.parallel", "tokenmill.params"),
    "model": ("tokenmill.ops", "tokenmill.parallel", *QUANT),
    "offload": ("tokenmill.model", "tokenmill.ops", *PLAN, *QUANT),
    "engine": (
        "tokenmill.kv",
        "tokenmill.model",
        "tokenmill.offload",
        "tokenmill.ops",
        "tokenmill.parallel",
        "tokenmill.sampling",
        *SETTINGS,
        *PLAN,
        *QUANT,
    ),
    "plan/solve": ("tokenmill.config", "tokenmill.model.spec", "tokenmill.parallel.layout"),
    "plan/demand": (),
    "plan/planner": (
        "tokenmill.plan.solve",
        "tokenmill.plan.demand",
        "tokenmill.engine",
        "tokenmill.model.spec",
        "tokenmill.parallel.layout",
        *SETTINGS,
        *QUANT,
    ),
    "plan/simulator": (
        "tokenmill.plan.solve",
        "tokenmill.plan.demand",
        "tokenmill.engine",
        "tokenmill.kv",
        "tokenmill.routing",
        "tokenmill.params",
        "tokenmill.bench.plot",
    ),
    "plan/replay": ("tokenmill.plan.demand", "tokenmill.kv"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    allowed = (f"tokenmill.{package.replace('/', '.')}", *LOW, *PACKAGES[package])
    files = sorted((PACKAGE / package).rglob("*.py"))
    if package == "quant":
        files = [path for path in files if path.parent.name != "tool"]
        allowed = (*QUANT, *LOW, *PACKAGES[package])
    assert files
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files
        for name in imports(ast.parse(path.read_text()))
        if not any(name == one or name.startswith(f"{one}.") for one in allowed)
    ]
    assert not wrong


# Sub-packages of serve -> those below them. All of them may use the modules of SERVE_LOW; app.py, server.py and
# cluster_replica.py, beside them, are built of everything.
SERVE_LOW = ("tokenmill.serve.errors", "tokenmill.serve.settings")
SERVE = {
    "engine": (),
    "storage": (),
    "tool_calls": (),
    "engine_client": ("engine",),
    "observe": ("engine", "engine_client"),
    "http": ("engine", "engine_client", "storage", "observe"),
    "api": ("engine", "engine_client", "storage", "observe", "tool_calls", "http"),
    "cluster": ("engine", "engine_client", "storage", "observe", "http", "router"),
    "router": ("engine", "engine_client", "storage", "observe", "http"),
}


def test_every_sub_package_of_serve_has_its_place() -> None:
    found = {path.parent.name for path in (PACKAGE / "serve").glob("*/__init__.py")}
    assert found == set(SERVE)
    assert {path.stem for path in (PACKAGE / "serve").glob("*.py")} == {
        "__init__", "app", "cluster_replica", "server", *(name.rpartition(".")[2] for name in SERVE_LOW)
    }  # fmt: skip


@pytest.mark.parametrize("package", [*SERVE, *SERVE_LOW])
def test_a_sub_package_of_serve_imports_only_what_is_below_it(package: str) -> None:
    if package in SERVE:
        files, below = sorted((PACKAGE / "serve" / package).rglob("*.py")), (package, *SERVE[package])
        allowed = (*(f"tokenmill.serve.{name}" for name in below), *SERVE_LOW)
    else:
        files, allowed = [PACKAGE / "serve" / f"{package.rpartition('.')[2]}.py"], ()
    assert files
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files
        for name in imports(ast.parse(path.read_text()))
        if name.startswith(("tokenmill.serve.", "tokenmill.cli", "tokenmill.bench"))
        and not any(name == one or name.startswith(f"{one}.") for one in allowed)
    ]
    assert not wrong


def test_planning_scheduling_and_simulating_need_no_torch() -> None:
    packages = (PACKAGE / "plan", PACKAGE / "kv", PACKAGE / "routing", PACKAGE / "engine" / "scheduler")
    paths = [path for package in packages for path in package.rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import {name}" for name in sorted(names))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules of ours that are imported, whenever that happens; not those for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tokenmill":
            whole = node.module or ""
            yield from (f"{whole}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "tokenmill")
        yield from imports(node)
