"""`tokenmill serve --cluster`: as many replicas as the load needs, wherever they run; what dies is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster import PATIENCE, FakeReplica, client, completion, expected, fakes, routed
from sim_service import COMMAND, eventually, run

from tokenmill.cli.serve_cluster import ClusterOptions, serve_cluster
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.plan.simulator.autoscale import Autoscale
from tokenmill.serve.cluster.launch import LocalLauncher, ReplicaFailed, ReplicaPlan, said
from tokenmill.serve.cluster.placement import Placement
from tokenmill.serve.router.app import RouterApp
from tokenmill.serve.router.replica import Booking
from tokenmill.serve.settings import HttpSettings, ServeSettings

SECRET = "a secret of this cluster"


def plan_of(step: float = 0.004, **more: Any) -> ReplicaPlan:
    config = EngineConfig(model=json.dumps({"step": step, **more}), skip_tokenizer_init=True, overlap=False)
    settings = ServeSettings(command=COMMAND, backoff_seconds=0.01)
    return ReplicaPlan(asdict(config), {"drain_seconds": 5.0, "cluster_secret": SECRET}, asdict(settings), "warning")


@asynccontextmanager
async def placed(app: RouterApp, launcher: Any, scale: Autoscale, drain: float = 30.0) -> AsyncIterator[Placement]:
    app.cluster = placement = Placement(app.fleet, launcher, scale, drain)
    running = asyncio.create_task(placement.run())
    try:
        yield placement
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def fixed(count: int) -> Autoscale:
    return Autoscale(count, count, 1.0, interval=0.2)


def open_count(app: RouterApp) -> int:
    return sum(one.open for one in app.fleet.replicas)


def test_a_replica_that_is_killed_is_replaced_and_its_streams_go_on() -> None:
    async def main() -> None:
        async with (
            routed([], http={"cluster_secret": SECRET}) as (app, url),
            placed(app, LocalLauncher(plan_of()), fixed(1)) as placement,
            client() as http,
        ):
            await eventually(lambda: open_count(app) == 1, PATIENCE)
            ask = asyncio.create_task(completion(http, url, [5] * 20, seed=3, max_tokens=300))
            await eventually(lambda: any(not one.missing for one in app.fleet.replicas[0].bookings))
            os.kill(placement.members[0].handle._process.pid, signal.SIGKILL)
            told = await ask
            assert told.error is None and told.tokens == expected([5] * 20, 300, 3)

    run(main())


@pytest.mark.slow
def test_replicas_of_one_machine_are_replaced_and_updated_under_load() -> None:
    async def main() -> None:
        async with (
            routed([], http={"cluster_secret": SECRET}) as (app, url),
            placed(app, LocalLauncher(plan_of()), fixed(2)) as placement,
            client(headers={"x-tokenmill-cluster": SECRET}) as http,
        ):
            await eventually(lambda: open_count(app) == 2, PATIENCE)
            prompts = [[number + 3] * 20 for number in range(8)]
            asks = [
                asyncio.create_task(completion(http, url, prompt, seed=number, max_tokens=700))
                for number, prompt in enumerate(prompts)
            ]
            await eventually(lambda: all(one.bookings for one in app.fleet.replicas))
            first = {one.url for one in app.fleet.replicas}
            os.kill(placement.members[0].handle._process.pid, signal.SIGKILL)
            await eventually(lambda: len(first & {one.url for one in app.fleet.replicas}) == 1)
            await eventually(lambda: open_count(app) == 2, PATIENCE)
            told = (await http.post(f"{url}/router/replicas", json={"update": True})).json()
            assert told["cluster"] == {"wanted": 2, "present": 2, "updating": False}
            assert not first & {one.url for one in app.fleet.replicas}
            for number, one in enumerate(await asyncio.gather(*asks)):
                assert one.error is None and one.tokens == expected(prompts[number], 700, number)

    run(main())


@dataclass
class FakeHandle:
    """A replica that somebody else runs."""

    url: str
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def ready(self) -> str:
        return self.url

    async def ended(self) -> str:
        await self.over.wait()
        return "it was over"

    async def stop(self) -> None:
        self.over.set()


class FakeLauncher:
    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.handles: list[FakeHandle] = []
        self.closed = False

    async def launch(self) -> FakeHandle:
        running = {one.url for one in self.handles if not one.over.is_set()}
        self.handles.append(FakeHandle(next(url for url in self.urls if url not in running)))
        return self.handles[-1]

    async def has_room(self) -> bool:
        return True

    async def close(self) -> None:
        self.closed = True


def test_their_number_follows_the_load() -> None:
    async def main() -> None:
        async with fakes(*(FakeReplica() for _ in range(4))) as urls, routed([]) as (app, _):
            launcher = FakeLauncher(urls)
            scale = Autoscale(1, 3, 2.0, interval=0.05, patience=3)
            async with placed(app, launcher, scale) as placement:
                await eventually(lambda: open_count(app) == 1)
                app.fleet.replicas[0].bookings.update(Booking(10) for _ in range(5))
                await eventually(lambda: open_count(app) == 3)
                app.fleet.replicas[0].bookings.clear()
                await eventually(lambda: open_count(app) == 1 and len(placement.members) == 1)
                before = len(launcher.handles)
                launcher.handles[-1].over.set()  # whoever dies is replaced
                assert await placement.update() <= 1  # and an update replaces whoever is there
                await eventually(lambda: open_count(app) == 1 and len(launcher.handles) > before)
            assert launcher.closed and all(one.over.is_set() for one in launcher.handles)

    run(main())


def test_a_cluster_that_cannot_start_says_why() -> None:
    async def main() -> None:
        async with routed([]) as (app, _):
            placement = Placement(app.fleet, LocalLauncher(plan_of(refuse="there is no such model")), fixed(1), 1.0)
            with pytest.raises(ReplicaFailed, match="there is no such model"):
                await placement.run()

    run(main())


@pytest.mark.parametrize("line", [b"", b"nonsense", b"[]", b'{"else": 1}'])
def test_a_replica_that_says_something_else_is_none(line: bytes) -> None:
    with pytest.raises(ReplicaFailed, match="instead of its address"):
        said(line)


def test_gpus_that_are_not_there_are_missed_with_a_sentence() -> None:
    async def main() -> None:
        launcher = LocalLauncher(plan_of(), gpus=2, there=1)
        assert not await launcher.has_room()
        with pytest.raises(ReplicaFailed, match="wants 2 GPUs and 1 are free"):
            await launcher.launch()

    run(main())


@pytest.mark.parametrize(
    "options, why",
    [
        (ClusterOptions("local", 0, None, 0, 0), "--replicas is 0"),
        (ClusterOptions("local", 1, "2:1", 0, 0), "LEAST:MOST:PER"),
        (ClusterOptions("local", 1, "4:2:8", 0, 0), "MOST no fewer"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: ClusterOptions, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        options.scale()


@pytest.mark.parametrize("option, why", [("journal", "--journal is one server's"), ("lora_dir", "--lora-modules")])
def test_folders_of_one_server_are_refused(option: str, why: str) -> None:
    http = HttpSettings(**{option: Path("x")})
    with pytest.raises(ConfigError, match=why):
        run(serve_cluster(ClusterOptions("local", 1, None, 0, 0), EngineConfig(), http, ServeSettings(), "info"))
