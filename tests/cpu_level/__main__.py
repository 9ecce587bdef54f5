"""Runs Python with the CPU held down to a level, native library included: `python tests/cpu_level avx2 -m pytest`."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

# What each library reads at its start. ATen's own kernels, oneDNN, MKL, and the OpenBLAS that numpy brings.
LEVELS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "HELD_DOWN_TO": "AVX2",
    },
    "baseline": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "HELD_DOWN_TO": "baseline",
    },
}
# numpy's names of what lies above each level; which of them a build can leave out, it says itself.
ABOVE = {"avx2": ("X86_V4", "AVX512"), "baseline": ("X86_V3", "X86_V4", "AVX512", "AVX2", "FMA3")}


def numpy_features(level: str) -> str:
    ask = "from numpy._core._multiarray_umath import __cpu_dispatch__ as names; print(*names)"
    names = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return " ".join(name for name in names if name.startswith(ABOVE[level]))


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in LEVELS:
        sys.exit(f"usage: python tests/cpu_level {{{','.join(LEVELS)}}} ARGUMENTS OF PYTHON...")
    if platform.machine() not in ("x86_64", "AMD64"):
        sys.exit(f"these levels are of x86 CPUs, and this is {platform.machine()}: run the tests without one")
    level, *arguments = sys.argv[1:]
    environment = os.environ | LEVELS[level] | {"NPY_DISABLE_CPU_FEATURES": numpy_features(level)}
    # Python imports the sitecustomize that lies beside this file, here and in every process that a test starts.
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execve(sys.executable, [sys.executable, *arguments], environment)


main()
