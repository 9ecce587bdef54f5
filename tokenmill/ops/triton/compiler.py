"""KernelCompiler: has the kernels that a collection asks for compiled in parallel, kept across starts, and loaded."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from tokenmill import cache
from tokenmill.ops.triton.compile_worker import Orders, hash_triton, is_remembered
from tokenmill.ops.triton.kept_list import list_path, read_list, write_list
from tokenmill.ops.triton.specializations import Collected, Specialization

log = logging.getLogger("tokenmill.kernels")

PROCESS_BYTES = 600 << 20  # of memory that a compiling process may take
MOST_PROCESSES = 32
SLOW_LOAD = 0.05  # seconds

Progress = Callable[[int, int, str], None]  # done, in all, what


def use_cache(chosen: cache.Chosen = None) -> str | None:
    """Have Triton keep compiled kernels where tokenmill keeps things; a sentence if they cannot be kept there.

    Whoever has told Triton itself where to keep them (TRITON_CACHE_DIR) is not overruled.
    """
    if triton.knobs.cache.dir != triton.knobs.cache.get_triton_dir("cache"):
        return None
    folder = cache.kernel_cache_dir(chosen)
    if folder.path != folder.wanted and folder.wanted.is_dir():  # filled ahead, for those who may only read it
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(folder.wanted, folder.path, dirs_exist_ok=True)
    triton.knobs.cache.dir = str(folder.path)
    return folder.note


def marks_dir() -> Path:
    """Where it is noted which specializations Triton's cache holds."""
    folder = Path(triton.knobs.cache.dir) / "tokenmill"
    with contextlib.suppress(OSError):  # whoever named a cache to Triton may have named one that can only be read
        folder.mkdir(parents=True, exist_ok=True)
    return folder


class KernelCompiler:
    """Compiles ahead. The process that does it can be started while the weights are loading."""

    def __init__(self, free_bytes: int) -> None:
        """free_bytes: of the host's memory."""
        self._processes = max(1, min(_cores(), MOST_PROCESSES, free_bytes // PROCESS_BYTES))
        self._process: subprocess.Popen[bytes] | None = None
        self._hashing = threading.Thread(target=hash_triton, daemon=True)  # a third of a second, most of it without GIL
        self._hashing.start()

    @property
    def folder(self) -> Path:
        return Path(triton.knobs.cache.dir)

    @property
    def cache_is_new(self) -> bool:
        folder = marks_dir()
        return not (folder.is_dir() and any(folder.iterdir()))

    def start(self) -> None:
        """Start the process that will compile: it imports what it needs and waits for orders."""
        path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TRITON_CACHE_DIR": str(triton.knobs.cache.dir),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill.ops.triton.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def listed(self, settings: str, find: Callable[[], Collected]) -> Collected:
        """The kernels of an engine with these settings: as an earlier start found them, or as `find` does now."""
        properties = torch.cuda.get_device_properties()
        path = list_path(marks_dir(), f"{_context()}|{properties.name}|{properties.multi_processor_count}|{settings}")
        kept = read_list(path, triton.runtime.driver.active.get_current_device())
        if kept is not None:
            return kept
        found = find()
        write_list(path, found)
        return found

    def compile(self, collected: Collected, tell: Progress) -> int:
        """Compile what the cache does not have, in parallel, and load everything. How many were compiled."""
        self._hashing.join()
        context = _context()
        named = [(one.digest(context), one) for one in collected.found]
        marks = marks_dir()
        missing = [job for job in named if not is_remembered(marks, self.folder, job[0])]
        began = time.monotonic()
        if missing:
            self._compile(missing, tell)
        self.close()
        compiled = time.monotonic()
        self._load(collected, tell)
        log.debug("compiled in %.1f s, loaded in %.1f s", compiled - began, time.monotonic() - compiled)
        return len(missing)

    def close(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # orders that nobody took
                    pipe.close()

    def _compile(self, jobs: list[tuple[str, Specialization]], tell: Progress) -> None:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        jobs = sorted(jobs, key=lambda job: -len(job[1].jitted().src))  # long ones first, so that none is left alone
        total, done = len(jobs), 0
        tell(0, total, "compiling kernels")
        try:
            pickle.dump(Orders(_target(), jobs, min(self._processes, total)), process.stdin)
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "ready" in answer:
                    log.debug("whoever compiles took %(ready)s s to start", answer)
                    continue
                done += 1
                tell(done, total, "compiling kernels")
                log.debug("%(kernel)s took %(seconds)s s", answer)
                if answer["error"]:
                    log.warning("%(kernel)s could not be compiled ahead: %(error)s", answer)
        except OSError as error:  # it died: what is missing is compiled one after the other, below
            log.warning("kernels are compiled one after the other, because the process that compiles died: %s", error)
        if done < total:
            log.warning("%d of %d kernels are compiled one after the other: they were not ahead", total - done, total)

    @staticmethod
    def _load(collected: Collected, tell: Progress) -> None:
        total = len(collected)
        for number, (one, holders) in enumerate(collected.found.items()):
            began = time.monotonic()
            try:
                made = one.compile()
                for kernel, key in holders:
                    kernel.take(key, made, dict(one.meta))
            except Exception as error:  # Triton's or the driver's; whoever needs this kernel meets it again
                log.warning("%s could not be loaded ahead: %s: %s", one.kernel, type(error).__name__, error)
            if (seconds := time.monotonic() - began) > SLOW_LOAD:
                log.debug("%s took %.2f s to be loaded", one.kernel, seconds)
            tell(number + 1, total, "loading kernels")


def _context() -> str:
    """What compiled kernels depend on besides themselves."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    return f"{triton.__version__}|{torch.__version__}|{_target()}|{suffix}"


def _target() -> tuple[str, int | str, int]:
    target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
