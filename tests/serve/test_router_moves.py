"""When a stream leaves a replica, and for what it does not wait: by what has happened, never by the clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster import PATIENCE, SimReplica, Told, client, continued, expected, replicas, routed
from sim_service import eventually, run

from tokenmill.serve.api import cluster as told_by_replicas
from tokenmill.serve.router import forward
from tokenmill.serve.router import replica as followed
from tokenmill.serve.router.app import RouterApp
from tokenmill.serve.router.settings import RouterSettings


def where(app: RouterApp) -> list[int]:
    """The replicas that have begun to answer a request."""
    return [at for at, one in enumerate(app.fleet.replicas) if any(not each.missing for each in one.bookings)]


@pytest.mark.slow
def test_a_stream_whose_engine_dies_again_does_not_wait_for_the_next_one(tmp_path: Path) -> None:
    """Each engine that died starts again only when it is let: at the end one of the two never does."""

    async def main() -> None:
        gates = [tmp_path / f"{number}" for number in range(2)]
        found = []
        for gate in gates:
            gate.touch()
            found.append(SimReplica({"step": 0.004, "gate": str(gate), "stages": []}))
            found[-1].start()
        try:
            async with routed([one.url for one in found]) as (app, url), client() as http:
                told = Told()
                ask = asyncio.create_task(continued(http, [url], [7] * 40, told, seed=4, max_tokens=1500))
                await eventually(lambda: told.tokens and where(app), PATIENCE)
                [first] = where(app)
                gates[first].unlink()
                found[first].kill_engine()
                await eventually(lambda: where(app) == [1 - first], PATIENCE)
                gates[first].touch()
                await eventually(lambda: app.fleet.replicas[first].open, PATIENCE)
                gates[1 - first].unlink()
                assert not told.done
                found[1 - first].kill_engine()
                assert (await ask).tokens == expected([7] * 40, 1500, 4) and told.connections == 1
                assert not app.fleet.replicas[1 - first].open
        finally:
            for one in found:
                one.end()

    asyncio.run(asyncio.wait_for(main(), 3 * PATIENCE))


class Machine:
    """Stands before a server, until it is gone: then nothing is answered any more, and nothing is closed either."""

    def __init__(self, url: str) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self._there = True
        self._copies: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._door = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._door.sockets[0].getsockname()[1]}"

    def vanish(self) -> None:
        self._there = False
        self._door.close()
        for one in self._copies:
            one.cancel()

    def end(self) -> None:
        self.vanish()
        for one in self._writers:
            one.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, int(self._port))
        except OSError:  # the server has not begun to listen
            writer.close()
            return
        self._writers += [writer, back]

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()

        self._copies += [asyncio.create_task(copy(there, writer)), asyncio.create_task(copy(reader, back))]


def test_a_machine_that_is_gone_is_not_waited_for_as_one_that_is_busy() -> None:
    async def main() -> None:
        async with replicas(2, {"step": 0.004}) as found, client() as http:
            machines = [Machine(one.url) for one in found]
            urls = [await one.start() for one in machines]
            async with routed(urls, hang_seconds=3600.0) as (app, url):
                told = Told()
                ask = asyncio.create_task(continued(http, [url], [7] * 40, told, seed=5, max_tokens=1000))
                await eventually(lambda: told.tokens and where(app), PATIENCE)
                [first] = where(app)
                machines[first].vanish()
                assert (await ask).tokens == expected([7] * 40, 1000, 5) and told.connections == 1
                assert not app.fleet.replicas[first].open
            for one in machines:
                one.end()

    run(main())


def test_what_the_policy_waits_for_is_less_than_three_seconds() -> None:
    """The seconds that docs/scaling.md names, as sums of what is waited for one after the other."""
    settings = RouterSettings(())
    between = told_by_replicas.BEAT + told_by_replicas.TOGETHER  # two words of a replica
    seen_back = followed.AGAIN_MOST + settings.connect_seconds + between
    engine_dies = between + forward.LOOK_AGAIN
    machine_dies = between + followed.QUIET + followed.REACH + forward.LOOK_AGAIN
    asked_meanwhile = settings.connect_seconds + forward.LOOK_AGAIN
    assert max(engine_dies, machine_dies, asked_meanwhile, seen_back) <= 2.5
