"""The worker's side of the wire: runs one engine in its own environment and answers JSON lines about it.

Run as `python serve.py DRIVER THREADS` by the Python that has the engine. Imports nothing of tokenmill, and the drivers
beside it (on_*.py) import nothing but their engine, so the environment needs nothing else. A driver module has

    prepare(source, variant, folder) -> model      make the form of the weights that is wanted, once; returns its path
    PeerEngine(model, variant, threads, rows, length)  load it for `rows` requests of `length` tokens
    PeerEngine.version                                 what is measured, such as "engine 1.2.3"
    PeerEngine.rows (optional)                         it takes this many requests: no need to load it again for fewer
    PeerEngine.single(prompt, new, clock) -> tokens, times  greedy, EOS ignored; what clock() said after each token
    PeerEngine.batch(prompts, new) -> tokens           all at once; one list per prompt
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
Clock = Callable[[], tuple[float, float]]


class DrivenEngine:
    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._engine: Any = None

    def prepare(self, source: str, variant: str, folder: str) -> dict[str, Any]:
        return {"model": str(self._driver.prepare(Path(source), variant, Path(folder)))}

    def load(self, model: str, variant: str, threads: int, rows: int, length: int) -> dict[str, Any]:
        if getattr(self._engine, "rows", 0) < rows:
            self._engine = None  # the memory of the one before goes first
            gc.collect()
            self._engine = self._driver.PeerEngine(model, variant, threads, rows, length)
        return {"version": self._engine.version}

    def single(self, prompt: list[int], new: int) -> dict[str, Any]:
        clock = clock_of(list(processes(os.getpid())))
        begin = clock()
        tokens, moments = self._engine.single(prompt, new, clock)
        times, cpu = ([moment[kind] - begin[kind] for moment in moments] for kind in (0, 1))
        return {"tokens": tokens, "times": times, "cpu": cpu, "spent": clock()[1]}  # spent: since the process began

    def batch(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        clock = clock_of(list(processes(os.getpid())))
        begin = clock()
        tokens = self._engine.batch(prompts, new)
        end = clock()
        return {"tokens": tokens, "seconds": end[0] - begin[0], "cpu": end[1] - begin[1]}

    def peak(self) -> dict[str, Any]:
        return {"bytes": sum(map(peak_bytes, processes(os.getpid())))}


def clock_of(counted: list[int]) -> Clock:
    """Seconds that passed, and seconds that cores spent on these processes: other programs hardly change those."""
    if sys.platform != "linux":
        return lambda: (time.perf_counter(), time.process_time())
    clocks = [~process << 3 | 2 for process in counted]  # how Linux numbers the CPU clock of a process
    return lambda: (time.perf_counter(), sum(map(time.clock_gettime, clocks)))


def processes(root: int) -> Iterator[int]:
    """This process and what it started, where the system lists them."""
    yield root
    for path in Path(f"/proc/{root}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from processes(int(child))


def peak_bytes(process: int) -> int:
    """Most memory that was resident. Not from getrusage where it can be helped: that remembers the parent's, too."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except FileNotFoundError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if process == os.getpid() else 0
        return most if sys.platform == "darwin" else 1024 * most
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def begin_answers() -> Callable[[dict[str, Any]], None]:
    """For a worker process: returns what writes a line of JSON to whoever asks, and ends with that one."""
    if sys.platform == "linux":  # even if that one was killed while this one was stopped
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Engines print what they like to stdout; the answers keep a descriptor of their own.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    return say


def answer_lines(worker: object) -> None:
    """Answer each line of stdin with what the worker's method of that name returns."""
    say = begin_answers()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            say(getattr(worker, question.pop("command"))(**question))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    if hasattr(os, "sched_setaffinity"):  # an engine that counts cores itself shall count as many as it may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
    answer_lines(DrivenEngine(importlib.import_module(sys.argv[1])))


if __name__ == "__main__":
    main()
