"""Ranks exchange tensors in C++ alone: no race, no access out of bounds, nobody waits for a group that has ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tokenmill.ops.native import build

SOURCES = ("exchange.cpp", "pool.cpp", "levels.cpp", "kernels/collectives.cpp")


def stress(tmp_path: Path, *flags: str) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    subprocess.run(
        [compiler, "-std=c++17", "-pthread", *flags, f"-I{build.SOURCES}", "-DTM_COMPILED=TM_SOURCE(collectives, 0)",
         Path(__file__).parent / "exchange_stress.cpp", *(build.SOURCES / name for name in SOURCES),
         "-o", tmp_path / "stress"],
        check=True,
    )  # fmt: skip
    done = subprocess.run([tmp_path / "stress"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_exchanges_pass_the_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    stress(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1")


@pytest.mark.slow
def test_a_system_without_futexes_looks_again_and_again(tmp_path: Path) -> None:
    stress(tmp_path, "-O1", "-U__linux__")
