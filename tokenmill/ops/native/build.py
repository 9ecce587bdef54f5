"""Compiles the native library: every kernel once per CPU level, everything else once, into one shared object."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libtokenmill_native.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread")
MATH = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")  # but no -ffast-math: NaN must stay NaN
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_VNNI = (*_AVX2, *_AVX512, "-mavx512vnni")


@dataclass(frozen=True)
class Level:
    """What a CPU level is compiled with. Kernels that it does not name are served by the level below."""

    name: str
    flags: tuple[str, ...] = ()
    kernels: tuple[str, ...] | None = None  # None: all of them
    instruction: str | None = None  # which old assemblers do not know: they leave the level out


_BASELINE = Level("baseline")
_IN_ORDER = "-fno-schedule-insns"  # GCC would move loads up until the sums no longer fit in the registers
_ARM = (
    _BASELINE,
    Level("NEON", (_IN_ORDER,)),  # which every ARM CPU of 64 bits has
    Level(
        "NEON dot product",
        ("-march=armv8.2-a+dotprod", _IN_ORDER),
        ("matrix", "ceilings"),
        "sdot v0.4s, v1.16b, v2.4b[0]",
    ),
)
# The levels of src/ops.h, lowest first. Those that only add integer products are of use to few kernels.
LEVELS = {
    "x86_64": (
        _BASELINE,
        Level("AVX2", _AVX2),
        Level("AVX-VNNI", _AVX2, ("matrix",), "{vex} vpdpbusd %ymm0, %ymm1, %ymm2"),
        Level("AVX-512", (*_AVX2, *_AVX512)),
        Level("AVX-512 VNNI", _VNNI, ("matrix", "ceilings")),
        Level("AMX", _VNNI, ("matrix",), "tdpbssd %tmm0, %tmm1, %tmm2"),
    ),
    "aarch64": _ARM,
    "arm64": _ARM,  # the same CPUs, as macOS calls them
}

UNUSED_DAYS = 30  # after which a build is forgotten

Tell = Callable[[int, int], None]  # files compiled, in all


class BuildError(Exception):
    """The library could not be built; the message says why."""


@dataclass(frozen=True)
class _Unit:
    source: Path
    flags: tuple[str, ...]
    output: str


def levels(machine: str | None = None) -> tuple[Level, ...]:
    """Those of a kind of CPU, or of this one."""
    return LEVELS.get(machine or platform.machine(), (_BASELINE,))


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def fingerprint(extra: tuple[str, ...] = ()) -> str:
    """Changes with the sources, the flags and the kind of CPU.

    Not with the compiler, which would have to be asked at every start: a library from an assembler that left a level
    out stays until the next change, or until its folder is removed.
    """
    digest = hashlib.sha256(repr((FLAGS, MATH, LEVELS, extra, platform.machine())).encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(SOURCES)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(
    target: Path,
    tell: Tell | None = None,
    extra: tuple[str, ...] = (),
    cross: tuple[str, ...] = (),
    machine: str | None = None,
) -> None:
    """Build into `target`, which appears complete or not at all: several processes may do this at once.

    For another kind of CPU: `machine` names it, and `cross` is the compiler's command.
    """
    here = find_compiler()
    compiler = cross or ((here,) if here else ())
    if not compiler:
        raise BuildError(f"there is no C++ compiler (looked for {', '.join(COMPILERS)})")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        folder = Path(scratch)
        units = _units(levels(machine), lambda level: _assembles(compiler, level, folder))

        def compile_one(unit: _Unit) -> None:
            flags = [*FLAGS, *MATH, *extra, *unit.flags]
            _call([*compiler, *flags, "-c", str(unit.source), "-o", str(folder / unit.output)])

        if tell is not None:
            tell(0, len(units))
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            for done, unit in enumerate(as_completed([threads.submit(compile_one, unit) for unit in units]), 1):
                unit.result()
                if tell is not None:
                    tell(done, len(units))
        linked = folder / LIBRARY
        objects = [str(folder / unit.output) for unit in units]
        _call([*compiler, "-shared", "-pthread", *extra, *objects, "-o", str(linked)])
        os.replace(linked, target)


def forget_unused(folder: Path, keep: Path) -> None:
    """Delete the builds in `folder` that nobody loaded for a month, but `keep`; who still uses one has it mapped."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for build in folder.iterdir():
        if build == keep or not re.fullmatch("[0-9a-f]{16}", build.name):
            continue
        with contextlib.suppress(OSError):  # another process may forget it, too
            library = build / LIBRARY
            if (library if library.exists() else build).stat().st_mtime < oldest:
                shutil.rmtree(build, ignore_errors=True)


def _units(all_levels: tuple[Level, ...], assembles: Callable[[Level], bool]) -> list[_Unit]:
    kernels = sorted((SOURCES / "kernels").glob("*.cpp"), key=lambda path: -path.stat().st_size)
    known = {number: level for number, level in enumerate(all_levels) if level.instruction is None or assembles(level)}
    # The largest files first, so that no core waits for the last one.
    units, listed = [], ""
    for kernel in kernels:
        for number, level in known.items():
            if level.kernels is None or kernel.stem in level.kernels:
                flags = (f"-DTM_LEVEL={number}", f"-I{SOURCES}", *level.flags)
                units.append(_Unit(kernel, flags, f"{kernel.stem}_{number}.o"))
                listed += f"TM_SOURCE({kernel.stem}, {number}) "
    plain = sorted(SOURCES.glob("*.cpp"))
    return units + [_Unit(source, (f"-DTM_COMPILED={listed}",), f"{source.stem}.o") for source in plain]


def _assembles(compiler: tuple[str, ...], level: Level, folder: Path) -> bool:
    source = folder / "instruction.cpp"
    source.write_text(f'__asm__("{level.instruction}");\n')
    command = [*compiler, *level.flags, "-c", str(source), "-o", str(folder / "instruction.o")]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0][:300] if lines else f'status {done.returncode}'}")
