"""Launchers: start replicas somewhere, and tell when they have ended. This one starts processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenmill.errors import TokenmillError

KILL_AFTER = 15.0  # seconds beyond its drain time, after which a replica is ended the hard way


class ReplicaFailed(TokenmillError):
    """A replica did not start."""


@dataclass(frozen=True)
class ReplicaPlan:
    """What every replica of a cluster serves, as plain data that goes to other machines."""

    config: dict[str, Any]  # an EngineConfig
    http: dict[str, Any]  # HttpSettings, but for the address
    serve: dict[str, Any]  # ServeSettings
    log_level: str = "info"

    def line(self, host: str) -> bytes:
        http = self.http | {"host": host, "port": 0}
        given = {"config": self.config, "http": http, "serve": self.serve, "log_level": self.log_level}
        return json.dumps(given).encode() + b"\n"


class Handle(Protocol):
    """One replica that was asked for."""

    async def ready(self) -> str:
        """Its address, once it works. Raises ReplicaFailed."""
        ...

    async def ended(self) -> str:
        """Returns when it is gone, with the reason."""
        ...

    async def stop(self) -> None:
        """End it: what it still has is handed back. Safe at any time, and twice."""
        ...


class Launcher(Protocol):
    async def launch(self) -> Handle: ...

    async def has_room(self) -> bool:
        """Whether another replica could start now, beside those that run."""
        ...

    async def close(self) -> None: ...


class LocalLauncher:
    """Replicas as processes of this machine. With `gpus`, each has so many of them to itself."""

    def __init__(self, plan: ReplicaPlan, gpus: int = 0, there: int = 0, threads: int | None = None) -> None:
        self._plan = plan
        self._gpus = gpus
        self._free = list(range(there))
        self._threads = threads

    async def launch(self) -> Handle:
        taken, self._free = self._free[: self._gpus], self._free[self._gpus :]
        if len(taken) < self._gpus:
            self._free = taken + self._free
            raise ReplicaFailed(f"a replica wants {self._gpus} GPUs and {len(taken)} are free; start fewer replicas")
        environment = dict(os.environ)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, taken))
        if self._threads:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        process = await asyncio.create_subprocess_exec(
            *command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the router, which drains
        )
        assert process.stdin is not None
        process.stdin.write(self._plan.line("127.0.0.1"))
        return _LocalReplica(process, self._free, taken, self._plan.http.get("drain_seconds", 0.0))

    async def has_room(self) -> bool:
        return len(self._free) >= self._gpus

    async def close(self) -> None:
        return


class _LocalReplica:
    def __init__(
        self, process: asyncio.subprocess.Process, free: list[int], taken: Sequence[int], drain_seconds: float
    ) -> None:
        self._process = process
        self._free = free
        self._taken = list(taken)
        self._drain_seconds = drain_seconds

    async def ready(self) -> str:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            return said(line)
        raise ReplicaFailed(f"a replica ended before it was ready (status {await self._process.wait()}); see its log")

    async def ended(self) -> str:
        status = await self._process.wait()
        self._free += self._taken
        self._taken.clear()
        return f"it ended with status {status}"

    async def stop(self) -> None:
        for end, patience in ((self._process.terminate, self._drain_seconds + KILL_AFTER), (self._process.kill, None)):
            if self._process.returncode is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                end()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience)
        await self.ended()


def command() -> list[str]:
    return [sys.executable, "-m", "tokenmill.serve.cluster_replica"]


def said(line: bytes | str) -> str:
    """The address of a replica that is ready, from the line that it prints. Raises ReplicaFailed with its sentence."""
    try:
        told = json.loads(line)
        if "ready" in told:
            return str(told["ready"])
        raise ReplicaFailed(f"a replica did not start: {told['failed']}")
    except (ValueError, KeyError, TypeError):
        raise ReplicaFailed(f"a replica said {str(line)[:200]!r} instead of its address") from None
