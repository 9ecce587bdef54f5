"""Ranks as real processes for tests: forked once, given jobs by name, replaced where a test kills them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch

PATIENCE = 240  # seconds after which something hangs, on a very busy machine, too

_fork = multiprocessing.get_context("fork")  # what the parent has imported and loaded need not be loaded again


class Ranks:
    """`run(job, ...)` calls job(rank, ...) in the first `size` of them at once, and returns their answers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._started = [self._start(rank) for rank in range(size)]

    def run(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """A rank that fails ends them all: others may wait for it."""
        self.begin(range(size), job, *args)
        pipes = {self._started[rank][1]: rank for rank in range(size)}
        answers: dict[int, Any] = {}
        while pipes:
            ready = wait(list(pipes), PATIENCE)
            failed = [] if ready else [f"ranks {[*pipes.values()]} hang"]
            for pipe in ready:
                ok, said = pipe.recv()
                rank = pipes.pop(pipe)
                answers[rank] = said
                failed += [] if ok else [f"rank {rank} failed:\n{said}"]
            if failed:
                for rank in pipes.values():
                    self.kill(rank)
                raise AssertionError("\n".join(failed))
        return [answers[rank] for rank in range(size)]

    def begin(self, ranks: Any, job: Callable[..., Any], *args: Any) -> None:
        for rank in ranks:
            self._started[rank][1].send((job, args))

    def answer(self, rank: int) -> Any:
        pipe = self._started[rank][1]
        ok, said = pipe.recv() if pipe.poll(PATIENCE) else (False, "it hangs")
        if not ok:
            for other in range(self.size):  # whose answers would be taken for those of later jobs
                self.kill(other)
        assert ok, f"rank {rank} failed:\n{said}"
        return said

    def kill(self, rank: int) -> None:
        """As if the machine had taken it; another one takes its place for later jobs."""
        process, pipe = self._started[rank]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        pipe.close()
        self._started[rank] = self._start(rank)

    def close(self) -> None:
        for process, pipe in self._started:
            pipe.close()
            process.kill()
            process.join()

    def _start(self, rank: int) -> tuple[Any, Any]:
        ours, theirs = _fork.Pipe()
        process = _fork.Process(target=_serve, args=(rank, theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return process, ours


@contextmanager
def ranks(size: int) -> Iterator[Ranks]:
    started = Ranks(size)
    try:
        yield started
    finally:
        started.close()


def _serve(rank: int, pipe: Any, parents: Any) -> None:
    parents.close()
    torch.set_num_threads(1)  # torch's own threads stayed in the parent
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
