"""A wheel has everything that runs and serves, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "tokenmill/ops/native/lib/libtokenmill_native.so"


def built(folder: Path, **environment: str) -> Path:
    """The wheel of a copy of the sources: setuptools leaves its traces where it builds."""
    sources = folder / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "tokenmill", sources / "tokenmill", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    done = subprocess.run(
        [*command, f"--wheel-dir={folder}", str(sources)],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
    )
    if "No module named pip" in done.stderr or "setuptools" in done.stderr:
        pytest.skip("this environment has no pip or no setuptools")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_has_the_page_the_sources_and_every_module(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    wheel = built(tmp_path, PATH=str(empty))  # without a compiler, which is quick: the library is left out
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tokenmill").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.parent.name != "lib"
    }
    assert {"tokenmill/py.typed", "tokenmill/serve/page/index.html"} <= wanted
    assert names == wanted


@pytest.mark.slow
def test_a_wheel_runs_and_serves_away_from_the_checkout(tmp_path: Path, default_model: str) -> None:
    wheel = built(tmp_path)
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as package:
        package.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed), "TOKENMILL_CACHE": str(tmp_path / "cache")}
    code = (
        "from tokenmill.ops.native.library import load; import tokenmill; print(tokenmill.__file__); print(load().path)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(installed / "tokenmill" / "__init__.py"), str(installed / LIBRARY)]
    command = [sys.executable, "-m", "tokenmill", "serve", default_model, "--port", "0", "--log-format", "plain"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            told = []
            url = next((line.split()[-1] for line in lines if told.append(line) or " serves " in line), None)
            assert url is not None, "".join(told)
            deadline = time.monotonic() + 60
            for path, expected in (("/", b"<html"), ("/health", b"ready"), ("/v1/models", b"SmolLM2")):
                assert time.monotonic() < deadline
                asked = urllib.request.Request(url + path, headers={"Accept": "text/html" if path == "/" else "*/*"})
                assert expected in urllib.request.urlopen(asked, timeout=30).read()
        finally:
            server.terminate()
            server.communicate(timeout=60)
