"""The library is built where it is missing, once, and its absence is said in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.ops.native import build, library
from tokenmill.ops.native.formats import FORMS, OF_GGUF


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(library, "_loaded", [])
    found = library.load.__wrapped__(cache_dir=tmp_path)
    assert isinstance(found, str) and "no C++ compiler" in found and "no-such-compiler" in found


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    sources = tmp_path / "src"
    (sources / "kernels").mkdir(parents=True)
    (sources / "broken.cpp").write_text("int broken( {\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(build.BuildError, match=r"failed: .*error"):
        build.compile_library(tmp_path / "out" / build.LIBRARY)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_fingerprint_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "a.cpp").write_text("1")
    before = build.fingerprint()
    (tmp_path / "a.cpp").write_text("2")
    assert build.fingerprint() != before
    assert build.fingerprint(("-g",)) != build.fingerprint()


def test_builds_that_nobody_loads_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When a new one is made; what was loaded within a month stays, and so does what is no build."""
    tmp_path /= "native"
    tmp_path.mkdir()
    long_ago, lately = time.time() - 40 * 86400, time.time() - 20 * 86400
    folders = {name: tmp_path / name for name in ("0" * 16, "1" * 16, "2" * 16, "notes")}
    for folder in folders.values():
        folder.mkdir()
    for name in ("0" * 16, "1" * 16, "notes"):
        (folders[name] / build.LIBRARY).write_bytes(b"")
    os.utime(folders["0" * 16] / build.LIBRARY, (long_ago, long_ago))
    os.utime(folders["1" * 16] / build.LIBRARY, (lately, lately))
    os.utime(folders["notes"] / build.LIBRARY, (long_ago, long_ago))
    os.utime(folders["1" * 16], (long_ago, long_ago))  # the library's time counts
    os.utime(folders["2" * 16], (long_ago, long_ago))  # a build that never ended
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(build, "fingerprint", lambda: "f" * 16)

    def compile_library(target: Path, tell: object) -> None:
        target.parent.mkdir()
        target.write_bytes(b"not a library")
        os.utime(target, (long_ago, long_ago))

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))  # so that no packaged one is found
    library.load.__wrapped__(cache_dir=tmp_path.parent)
    assert {path.name for path in tmp_path.iterdir()} == {"1" * 16, "f" * 16, "notes"}
    library.load.__wrapped__(cache_dir=tmp_path.parent)
    assert (tmp_path / ("f" * 16) / build.LIBRARY).stat().st_mtime > lately  # touched when found


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """Builds take no time, and temporary folders are of this test; yields where was built."""
    made: list[Path] = []

    def compile_library(target: Path, tell: object) -> None:
        made.append(target)
        target.parent.mkdir(parents=True)
        target.write_bytes(b"a library")

    def opened(path: Path) -> library.Library:
        found = object.__new__(library.Library)
        found.path, found.note = path, None
        return found

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(library, "_open", opened)
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield made


def test_a_cache_that_cannot_be_written_leads_to_a_temporary_folder_and_says_so(
    quick_build: list[Path], tmp_path: Path
) -> None:
    wanted = tmp_path / "file"
    wanted.write_text("in the way")
    found = library.load.__wrapped__(cache_dir=wanted)
    (path,) = quick_build
    assert isinstance(found, library.Library) and found.path == path
    assert path.parts[: len(tmp_path.parts) + 1] == (tmp_path / f"tokenmill-{os.getuid()}").parts
    assert library.where_else() == found.note and found.note is not None
    assert str(wanted) in found.note and "TOKENMILL_CACHE" in found.note and str(path.parents[1]) in found.note
    library._loaded.clear()
    library.load.__wrapped__(cache_dir=wanted)
    assert quick_build == [path]  # the next process finds it there


def test_a_full_cache_leads_to_a_temporary_folder(
    quick_build: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_library = build.compile_library

    def full(target: Path, tell: object) -> None:
        if target.is_relative_to(tmp_path / "cache"):
            raise build.BuildError("c++ failed: fatal error: No space left on device")
        compile_library(target, tell)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "compile_library", full)
    found = library.load.__wrapped__(cache_dir=tmp_path / "cache")
    assert isinstance(found, library.Library) and found.path == quick_build[0]
    assert found.note is not None and f"no room for the native CPU library in {tmp_path / 'cache'}" in found.note


def test_what_lies_in_a_cache_that_can_only_be_read_is_used(
    quick_build: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library.load.__wrapped__(cache_dir=tmp_path / "cache")
    library._loaded.clear()
    monkeypatch.setattr(library, "writable_or_temporary", lambda *_: pytest.fail("nothing need be written"))
    found = library.load.__wrapped__(cache_dir=tmp_path / "cache")
    assert isinstance(found, library.Library) and found.note is None and len(quick_build) == 1


def test_a_process_has_one_library(quick_build: list[Path], tmp_path: Path) -> None:
    """Its ops ask for it without a folder: they must get the one that an engine loaded from its own."""
    found = library.load.__wrapped__(cache_dir=tmp_path / "cache")
    assert library.load.__wrapped__() is found and len(quick_build) == 1


@pytest.mark.parametrize(
    ("machine", "new", "kept"),
    [
        ("x86_64", ("AVX-VNNI", "AMX"), "AVX-512 VNNI"),
        ("aarch64", ("NEON dot product",), "NEON"),
        ("arm64", ("NEON dot product",), "NEON"),
    ],
)
def test_levels_that_the_assembler_does_not_know_are_left_out(machine: str, new: tuple[str, ...], kept: str) -> None:
    levels = build.levels(machine)
    numbers = {level.name: number for number, level in enumerate(levels)}
    all_units, known = build._units(levels, lambda level: True), build._units(levels, lambda level: False)
    gone = {unit.output for unit in all_units} - {unit.output for unit in known}
    assert {f"matrix_{numbers[name]}.o" for name in new} == {name for name in gone if name.startswith("matrix_")}
    (listed,) = (unit.flags[0] for unit in known if unit.source.stem == "levels")
    assert f"(matrix, {numbers[kept]})" in listed
    assert all(f"(matrix, {numbers[name]})" not in listed for name in new)


def test_a_kind_of_cpu_that_has_no_levels_gets_the_plain_kernels() -> None:
    levels = build.levels("riscv64")
    assert [level.name for level in levels] == ["baseline"]
    flags = {flag for unit in build._units(levels, lambda level: False) for flag in unit.flags}
    assert {flag for flag in flags if flag.startswith("-DTM_LEVEL")} == {"-DTM_LEVEL=0"}


def test_whether_an_instruction_is_known_is_asked_of_the_assembler(tmp_path: Path) -> None:
    found = build.find_compiler()
    if found is None or build.platform.machine() != "x86_64":
        pytest.skip("there is no C++ compiler for x86")
    compiler = (found,)
    assert build._assembles(compiler, build.Level("old", instruction="paddd %xmm0, %xmm1"), tmp_path)
    assert not build._assembles(compiler, build.Level("new", instruction="no_such_instruction %xmm0, %xmm1"), tmp_path)
    strange = build.Level("strange", ("-mno-such-extension",), instruction="paddd %xmm0, %xmm1")
    assert not build._assembles(compiler, strange, tmp_path)  # nor does a compiler that does not know the level's flags


def test_a_damaged_library_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / build.LIBRARY
    broken.write_bytes(b"not a library")
    found = library._open(broken)
    assert isinstance(found, str) and "cannot be loaded" in found


def test_both_sides_agree_on_sizes(native: library.Library) -> None:
    for format in OF_GGUF.values():
        for columns in (256, 512, 768):
            assert format.form.panel_bytes(columns) % 64 == 0
    assert [form.number for form in FORMS] == list(range(len(FORMS)))


def test_a_fork_gets_a_pool_of_its_own(native: library.Library) -> None:
    program = """
import os, torch
from tokenmill.ops.native.library import library
from tokenmill.ops.native.matrix import PackedMatrix
library().threads = 2
matrix = PackedMatrix(64, 64)
matrix.append_floats(torch.eye(64))
x = torch.randn(3, 64)
assert torch.equal(matrix.matmul(x), x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(matrix.matmul(x), x) else 3)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(matrix.matmul(x), x)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_no_symbols_but_our_own_leave_the_library(native: library.Library) -> None:
    """Another library's function of the same name must not be called instead of ours."""
    done = subprocess.run(["nm", "-D", "--defined-only", str(native.path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("nm is not there")
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert names and all(name.startswith("tm_") for name in names if not name.startswith("_")), names
