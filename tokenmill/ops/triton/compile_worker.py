"""Compiles specializations of kernels in several processes, for a GPU that none of them touches.

Started by `compiler.KernelCompiler` with pickled orders on its standard input, which only that one writes; a line of
JSON on standard output tells of each kernel that is done. Its processes are forked from one that has imported
everything, before that has any threads.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.cache import write_whole
from tokenmill.ops.triton.specializations import Specialization


@dataclass(frozen=True)
class Orders:
    """What is to be compiled, and for what."""

    target: tuple[str, int | str, int]  # backend, architecture, threads of a warp
    jobs: list[tuple[str, Specialization]]  # under which name it is remembered
    processes: int


def remember(cache: Path, name: str, made: Any) -> None:
    """A file that says under which hash Triton keeps the kernel."""
    folder = next(Path(path).parent for path in made.metadata_group.values())
    write_whole(cache / name, folder.name)


def is_remembered(cache: Path, triton_cache: Path, name: str) -> bool:
    try:
        return (triton_cache / (cache / name).read_text()).is_dir()
    except OSError:
        return False


class _NoDevice:
    """Stands in for the driver of a GPU: says what to compile for, and has no device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(job: tuple[str, Specialization]) -> dict[str, Any]:
    from tokenmill.ops.triton.compiler import marks_dir

    name, one = job
    began = time.monotonic()
    error = None
    try:
        made = one.compile()
        _build_launcher(made)
        remember(marks_dir(), name, made)
    except Exception as problem:  # the engine meets it again, where it can be told
        error = f"{type(problem).__name__}: {problem}"[:500]
    return {"kernel": one.kernel, "seconds": round(time.monotonic() - began, 3), "error": error}


def _build_launcher(made: Any) -> None:
    """Older Tritons compile a little C for each signature when a kernel is first launched; they keep that, too."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):  # newer ones have one launcher for all
        return
    try:
        driver.CudaLauncher(made.src, made.metadata)
    except Exception as error:  # it is then built when the kernel is loaded, where errors are told
        print(f"the launcher of {made.name} was not built ahead: {error}", file=sys.stderr)


def _build_utilities() -> None:
    """The same for what Triton asks the driver with; the engine needs that, too, and is still loading weights."""
    from triton.backends.nvidia import driver

    with contextlib.suppress(Exception):
        driver.CudaUtils()


def hash_triton() -> None:
    """Compute the hash of all of Triton, which is part of every kernel's; processes that are forked then know it."""
    from triton.runtime import cache

    with contextlib.suppress(AttributeError):
        cache.triton_key()


def main() -> int:
    began = time.monotonic()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not mix with the answers
    import triton
    from triton.backends.compiler import GPUTarget

    import tokenmill.ops.triton  # noqa: F401  # so that every process has it, ready to compile

    _build_utilities()
    hash_triton()
    print(json.dumps({"ready": round(time.monotonic() - began, 3)}), file=answers)
    try:
        orders: Orders = pickle.load(sys.stdin.buffer)  # from the process that started this one
    except EOFError:  # it had nothing to compile, or is gone
        return 0
    triton.runtime.driver.set_active(_NoDevice(GPUTarget(*orders.target)))
    for module in {one.module for _, one in orders.jobs}:
        __import__(module)
    # Not multiprocessing's Pool, which waits for ever for a process that was killed (no memory, a compiler's bug).
    with ProcessPoolExecutor(orders.processes, multiprocessing.get_context("fork")) as pool:
        try:
            for done in as_completed([pool.submit(_compile, job) for job in orders.jobs]):
                print(json.dumps(done.result()), file=answers)
        except BrokenProcessPool as error:  # the engine compiles what is missing
            print(f"a process that compiles kernels died: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
