"""The levels of ARM CPUs: cross-compiled, run by an emulator, compared with what this CPU gives for the same inputs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tokenmill.ops.native import build, library

pytestmark = pytest.mark.slow  # a minute of compiling

HERE = Path(__file__).parent
EMULATOR, GCC = "qemu-aarch64", "aarch64-linux-gnu-g++"
CLANG = ("clang++", *(f"clang++-{version}" for version in range(22, 12, -1)))
BASELINE, NEON, DOT_PRODUCT = range(3)  # of src/ops.h
OLD, NEW = "cortex-a53", "neoverse-n1"  # a CPU without dot products and one with them
TYPES = {name: np.dtype(name) for name in ("f4", "f2", "u2", "u1", "u4", "i1", "i4", "i8")} | {"b2": np.dtype("u2")}
CLOSE = {"f4": 2e-6, "f2": 1e-3, "b2": 1e-2, "i1": 1e-2}  # of a result's largest number: a few last places

Results = dict[str, tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Arm:
    folder: Path
    compiler: tuple[str, ...]
    root: Path  # where the emulator finds the system's libraries

    def program(self, name: str) -> Path:
        return link(self.compiler, HERE / f"{name}.cpp", self.folder / build.LIBRARY, self.folder / name)

    def run(self, cpu: str, program: Path, *args: object) -> subprocess.CompletedProcess[bytes]:
        command = [EMULATOR, "-L", str(self.root), "-cpu", cpu, str(program), *map(str, args)]
        return subprocess.run(command, capture_output=True, timeout=1200)


def link(compiler: tuple[str, ...], source: Path, shared: Path, program: Path) -> Path:
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{build.SOURCES}", f"-Wl,-rpath,{shared.parent}"]
    subprocess.run([*compiler, *flags, str(source), str(shared), "-o", str(program)], check=True)
    return program


def find(kind: str) -> tuple[str, ...] | None:
    if kind == "gcc":
        return (GCC,) if shutil.which(GCC) else None
    found = next((name for name in CLANG if shutil.which(name)), None)
    return (found, "--target=aarch64-linux-gnu") if found else None


@pytest.fixture(scope="module", params=["gcc", "clang"])
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """The library as build.py makes it on an ARM machine."""
    compiler = find(request.param)
    if build.platform.machine() in ("aarch64", "arm64"):
        pytest.skip("this is an ARM CPU: the other tests run its levels")
    if compiler is None or shutil.which(GCC) is None:  # the other one takes this one's headers and libraries
        pytest.skip(f"there is no {request.param} that compiles for ARM (Debian: g++-aarch64-linux-gnu, clang)")
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"there is no {EMULATOR} (Debian: qemu-user)")
    folder = tmp_path_factory.mktemp(request.param)
    build.compile_library(folder / build.LIBRARY, cross=compiler, machine="aarch64")
    asked = subprocess.run([GCC, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True)
    return Arm(folder, compiler, Path(asked.stdout.strip()).resolve().parents[1])


@pytest.fixture(scope="module")
def results(arm: Arm) -> Callable[[str, int], Results]:
    program = arm.program("level_results")

    def run(cpu: str, level: int) -> Results:
        done = arm.run(cpu, program, level, 2)
        assert done.returncode == 0, done.stderr.decode()
        return read(done.stdout)

    return run


@pytest.fixture(scope="module")
def here(native: library.Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """What this CPU gives."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = link(
        (compiler,), HERE / "level_results.cpp", native.path, tmp_path_factory.mktemp("here") / "level_results"
    )
    return lambda level: read(subprocess.run([program, str(level), "1"], capture_output=True, check=True).stdout)


def read(data: bytes) -> Results:
    found: Results = {}
    at = 0
    while at < len(data):
        end = data.index(b"\n", at)
        name, kind, count = data[at:end].decode().rsplit(" ", 2)
        found[name] = kind, np.frombuffer(data, TYPES[kind], int(count), end + 1)
        at = end + 1 + int(count) * TYPES[kind].itemsize
    return found


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def different_bits(one: Results, other: Results, *kinds: str) -> list[str]:
    assert one.keys() == other.keys()
    chosen = [name for name in one if not kinds or name.startswith(kinds)]
    assert len(chosen) > 20 or not kinds
    return [name for name in chosen if not same(one[name][1], other[name][1])]


def floats(kind: str, numbers: np.ndarray) -> np.ndarray:
    return (numbers.astype("u4") << 16).view("f4").astype("f8") if kind == "b2" else numbers.astype("f8")


def far(one: Results, other: Results) -> list[str]:
    """What is further apart than the order of additions explains; what says that it is exact must be."""
    wrong = different_bits(one, other, "exact")
    for name in one.keys() - {name for name in one if name.startswith("exact")}:
        kind = one[name][0]
        x, y = floats(*one[name]), floats(*other[name])
        fine = np.isfinite(y).all() and np.isfinite(x).all() and np.abs(y).max() > 0
        if not fine or np.abs(x - y).max() > CLOSE[kind] * np.abs(y).max():
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("cpu", "level"), [(OLD, BASELINE), (OLD, NEON), (NEW, DOT_PRODUCT)])
def test_ops_give_what_they_give_here(
    cpu: str, level: int, results: Callable[[str, int], Results], here: Callable[[int], Results]
) -> None:
    assert not far(results(cpu, level), here(BASELINE))


def test_packed_and_dense_products_have_the_bits_of_avx2(
    arm: Arm, results: Callable[[str, int], Results], here: Callable[[int], Results], native: library.Library
) -> None:
    """The same steps in floats. Around them, compilers choose what they contract: so only where it is the same one."""
    compiler = build.find_compiler()
    said = subprocess.run([str(compiler), "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in said or arm.compiler != (GCC,):
        pytest.skip("the two compilers are of different kinds")
    avx2 = library.LEVEL_NAMES.index("AVX2")
    if not native.has_level(avx2):
        pytest.skip("this CPU has no AVX2")
    assert not different_bits(results(OLD, NEON), here(avx2), "product")


def test_dot_products_change_no_bits(results: Callable[[str, int], Results]) -> None:
    assert not different_bits(results(NEW, DOT_PRODUCT), results(NEW, NEON))


def test_a_cpu_has_the_levels_that_it_can_execute(arm: Arm) -> None:
    program = arm.program("level_results")
    for cpu, best in ((OLD, NEON), (NEW, DOT_PRODUCT), ("max", DOT_PRODUCT)):
        for level in range(DOT_PRODUCT + 1):
            done = arm.run(cpu, program, level, 1)
            assert done.returncode == (0 if level <= best else 3), (cpu, level, done.stderr)


def test_rows_do_not_depend_on_others_nor_on_threads(arm: Arm) -> None:
    done = arm.run(NEW, arm.program("matrix_stress"))
    assert done.returncode == 0 and done.stdout == b"ok\n", done.stdout[-1000:] + done.stderr[-1000:]
