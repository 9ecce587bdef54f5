"""Compiles the native library: every kernel once per CPU level, everything else once, into one shared object."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libtokenmill_native.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread")
_MATH = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")  # but no -ffast-math: NaN must stay NaN
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
# The levels of src/ops.h, lowest first.
LEVELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "x86_64": ((), _AVX2, (*_AVX2, *_AVX512), (*_AVX2, *_AVX512, "-mavx512vnni")),
}

Tell = Callable[[int, int], None]  # files compiled, in all


class BuildError(Exception):
    """The library could not be built; the message says why."""


@dataclass(frozen=True)
class _Unit:
    source: Path
    flags: tuple[str, ...]
    output: str


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def fingerprint(extra: tuple[str, ...] = ()) -> str:
    """Changes whenever the library would."""
    digest = hashlib.sha256(repr((FLAGS, _MATH, LEVELS, extra, platform.machine())).encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(SOURCES)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(target: Path, tell: Tell | None = None, extra: tuple[str, ...] = ()) -> None:
    """Build into `target`, which appears complete or not at all: several processes may do this at once."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"there is no C++ compiler (looked for {', '.join(COMPILERS)})")
    units = _units()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        folder = Path(scratch)

        def compile_one(unit: _Unit) -> None:
            flags = [*FLAGS, *_MATH, *extra, *unit.flags]
            _call([compiler, *flags, "-c", str(unit.source), "-o", str(folder / unit.output)])

        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            for done, _ in enumerate(threads.map(compile_one, units), 1):
                if tell is not None:
                    tell(done, len(units))
        linked = folder / LIBRARY
        objects = [str(folder / unit.output) for unit in units]
        _call([compiler, "-shared", "-pthread", *extra, *objects, "-o", str(linked)])
        os.replace(linked, target)


def _units() -> list[_Unit]:
    kernels = sorted((SOURCES / "kernels").glob("*.cpp"))
    listed = " ".join(f"TM_KERNEL({kernel.stem})" for kernel in kernels)
    # The largest files first, so that no core waits for the last one.
    levels = LEVELS.get(platform.machine(), ((),))
    units = [
        _Unit(kernel, (f"-DTM_LEVEL={level}", f"-I{SOURCES}", *flags), f"{kernel.stem}_{level}.o")
        for kernel in sorted(kernels, key=lambda path: -path.stat().st_size)
        for level, flags in enumerate(levels)
    ]
    plain = sorted(SOURCES.glob("*.cpp"))
    return units + [_Unit(source, (f"-DTM_KERNELS={listed}",), f"{source.stem}.o") for source in plain]


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0][:300] if lines else f'status {done.returncode}'}")
