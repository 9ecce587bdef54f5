"""docs/scaling.md: its manifests are YAML that names options and health endpoints that there are."""

from __future__ import annotations

import re
from pathlib import Path

import typer
import yaml

from tokenmill.cli.app import app
from tokenmill.serve.router import app as router_app

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {name for one in found.params for name in one.opts}


def test_manifests_name_options_and_endpoints_that_there_are() -> None:
    parts = [part for block in BLOCKS for part in yaml.safe_load_all(block)]
    pods = [part["spec"]["template"]["spec"] for part in parts if part.get("kind") in ("StatefulSet", "Deployment")]
    assert len(pods) == 2 and any("ray" in str(part) for part in parts)
    for pod in pods:
        [container] = pod["containers"]
        program, command, *words = container["command"]
        assert program == "tokenmill"
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options_of(command)
        for probe in ("livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in ("/health/live", "/health/ready")
        assert pod["terminationGracePeriodSeconds"] >= 40


def test_commands_of_the_page_have_the_options_that_they_are_given() -> None:
    for command in ("serve", "route"):
        said = re.findall(rf"tokenmill {command} ([^`\n#]*)", PAGE)
        given = {word for line in said for word in re.findall(r"(?<!\S)--[a-z-]+", line)}
        assert given and given <= options_of(command)


def test_routed_paths_are_those_of_the_page() -> None:
    for path in (*router_app.GENERATING, *(one.rstrip("/") for one in router_app.KEPT)):
        assert f"`{path}" in PAGE
