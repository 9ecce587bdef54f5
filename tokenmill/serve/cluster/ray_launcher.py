"""RayLauncher: replicas on the machines of a Ray cluster. Ray places, supervises and ends them, and nothing else.

An actor per replica asks for CPUs and GPUs; it starts the same process that a single machine would, tells its address
and waits for its end. Requests and tokens go from the router to the replica over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from typing import Any

from tokenmill.errors import ConfigError, pip_install
from tokenmill.serve.cluster.launch import KILL_AFTER, Handle, ReplicaFailed, ReplicaPlan, command, said

CONNECT_SECONDS = 5.0


class ReplicaActor:
    """Runs where Ray placed it: one process, which sees its end by the closed pipe."""

    def __init__(self, line_of: ReplicaPlan, host: str | None) -> None:
        import ray

        self._process = subprocess.Popen(command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(line_of.line(host or ray.util.get_node_ip_address()))
        self._process.stdin.flush()

    def ready(self) -> str:
        """The line that the replica prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode()

    def ended(self) -> int:
        return self._process.wait()

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def stop(self, seconds: float) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()


class RayLauncher:
    """Raises ConfigError where there is no Ray, or no cluster at the address."""

    def __init__(
        self, plan: ReplicaPlan, address: str, cpus: float = 1, gpus: float = 0, host: str | None = None
    ) -> None:
        """`host`: where replicas listen; None: at their machine's address in the cluster."""
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError(f"--cluster {address} needs the package {error.name}; {pip_install('cluster')}") from None
        self._ray: Any = ray
        self._plan = plan
        self._host = host
        self._needs = {"CPU": cpus, "GPU": gpus}
        try:
            host_there, _, port = address.rpartition(":")
            if host_there and port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host_there, int(port)), CONNECT_SECONDS).close()
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level="warning")
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            raise ConfigError(
                f"there is no Ray cluster at {address!r} ({why}); start one with `ray start --head`"
            ) from None
        self._actor = ray.remote(ReplicaActor).options(
            num_cpus=cpus, num_gpus=gpus, max_concurrency=4, scheduling_strategy="SPREAD"
        )

    async def launch(self) -> Handle:
        actor = await asyncio.to_thread(self._actor.remote, self._plan, self._host)
        return _RayReplica(self._ray, actor, self._plan.http.get("drain_seconds", 0.0))

    async def has_room(self) -> bool:
        free = await asyncio.to_thread(self._ray.available_resources)
        return all(free.get(name, 0) >= need for name, need in self._needs.items() if need)

    async def close(self) -> None:
        await asyncio.to_thread(self._ray.shutdown)


class _RayReplica:
    def __init__(self, ray: Any, actor: Any, drain_seconds: float) -> None:
        self._ray = ray
        self._actor = actor
        self._drain_seconds = drain_seconds
        self._stopped = False

    async def ready(self) -> str:
        try:
            line = await self._actor.ready.remote()  # also waits until there is a place for it
        except self._ray.exceptions.RayError as error:
            raise ReplicaFailed(f"a replica was lost before it was ready: {_sentence(error)}") from None
        if not line:
            raise ReplicaFailed("a replica ended before it was ready; see its log under Ray's session directory")
        return said(line)

    async def ended(self) -> str:
        try:
            return f"it ended with status {await self._actor.ended.remote()}"
        except self._ray.exceptions.RayError as error:  # the actor or its machine is gone
            return _sentence(error)

    async def node(self) -> str:
        return str(await self._actor.node.remote())

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        patience = self._drain_seconds + KILL_AFTER
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(patience + KILL_AFTER):
                await self._actor.stop.remote(patience)
        with contextlib.suppress(self._ray.exceptions.RayError):
            await asyncio.to_thread(self._ray.kill, self._actor)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
