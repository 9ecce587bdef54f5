"""A client whose connection broke goes on behind the last event that it has, at the same router or at another one."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from cluster import PATIENCE, Told, client, continued, expected, free_port, replicas, routed
from http_server import Server, simulated
from sim_service import eventually, run
from stream_cases import CASES, events, events_with_ids

from tokenmill.serve.engine_client.events import RequestEvent, StepEvent
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.router import fleet, forward

Event = tuple[str, str, Any]


def plain(found: list[Event]) -> list[tuple[str, Any]]:
    return [(name, told) for _, name, told in found]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all attempts that began with the id of an event."""
    made: list[int] = []

    def randbits(bits: int) -> int:
        if bits == 40:
            made.append(len(made))
            return made[-1]
        return random.getrandbits(bits)

    monkeypatch.setattr(forward.secrets, "randbits", randbits)
    return made


async def forget(http: httpx.AsyncClient, url: str, id: str, attempts: list[int]) -> None:
    """The replica that answered keeps nothing of it."""
    request = id.split(".")[0]
    names = [request, *(f"{request}.{1 + one}" for one in attempts)]
    answer = await http.post(f"{url}/cluster/cancel", json={"names": names})
    assert answer.status_code == 200
    assert (await http.get(f"{url}/cluster/streams/{request}")).status_code == 404


def places(found: list[Event], seed: int) -> list[int]:
    """The first events and the last, where several belong to one step, and some between them."""
    ends = {0, 1, 2, 3, len(found) - 1, len(found) - 2, len(found) - 3}
    between = {at for at, (id, _, _) in enumerate(found) if ">" in id or id.split(".")[5][1:] != "0"}
    some = set(random.Random(seed).sample(range(len(found)), min(3, len(found))))
    return sorted(at for at in ends | set(sorted(between)[:4]) | some if 0 <= at < len(found))


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed anew"])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_goes_on_behind_any_of_its_events(case: str, kept: bool, server: Server, attempts: list[int]) -> None:
    path, body, read = CASES[case]

    async def main() -> None:
        async with client() as http, routed([server.url]) as (_, url), routed([server.url]) as (_, other):
            found = await events_with_ids(http, url, path, body)
            whole = read(plain(found))
            assert whole == read(await events(http, server.url, path, body))
            assert all(id for id, _, _ in found) and len({id for id, _, _ in found}) == len(found)
            for turn, at in enumerate(places(found, len(case))):
                if not kept:
                    await forget(http, server.url, found[0][0], attempts)
                rest = await events_with_ids(http, (url, other)[turn % 2], path, body, last=found[at][0])
                assert read(plain([*found[: at + 1], *rest])) == whole, at
                if at == len(found) - 1:
                    assert rest == []

    run(main())


def prompt_of(number: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(3, 1000) for _ in range(40)]


def count_tokens(service: Service) -> list[int]:
    """How many are computed in each step from now on."""
    counts: list[int] = []
    service.subscribe(lambda event: counts.append(event.tokens) if isinstance(event, StepEvent) else None)
    return counts


def names_of_requests(service: Service) -> list[str]:
    """Of all that are accepted from now on; one whose beginning is computed again is told by its name."""
    names: list[str] = []
    service.subscribe(lambda event: names.append(event.id) if isinstance(event, RequestEvent) else None)
    return names


def test_streams_survive_their_router() -> None:
    """It vanishes in their middle. The replica goes on with them, and another router has the rest from it."""

    async def main() -> None:
        count, most = 6, 200
        async with simulated({"step": 0.004}) as (service, replica), client() as http:
            names, found = names_of_requests(service), [Told() for _ in range(count)]
            async with routed([replica]) as (_, other):
                async with routed([replica]) as (_, url):
                    asks = [
                        asyncio.create_task(
                            continued(http, [url, other], prompt_of(number), told, seed=number, max_tokens=most)
                        )
                        for number, told in enumerate(found)
                    ]
                    await eventually(lambda: all(len(one.tokens) > 20 for one in found))
                    assert not any(one.done for one in found)
                for number, told in enumerate(await asyncio.gather(*asks)):
                    assert told.error is None and told.finish == "length" and len(told.ids) == 1
                    assert told.tokens == expected(prompt_of(number), most, number)
                    assert told.connections == 2
            await eventually(lambda: not service._active)
            assert len(names) >= 2 * count and not any(one.endswith("-anew") for one in names)

    run(main())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a port is taken again at once")
def test_streams_survive_a_router_that_is_killed_and_started_again() -> None:
    async def main() -> None:
        async with simulated({"step": 0.004}) as (_, replica), client() as http:
            port = free_port()
            command = [sys.executable, "-m", "tokenmill", "route", "--port", str(port), "--replica", replica]
            told, url = Told(), f"http://127.0.0.1:{port}"

            async def start() -> asyncio.subprocess.Process:
                return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)

            process = await start()
            ask = asyncio.create_task(continued(http, [url], prompt_of(1), told, seed=1, max_tokens=1500))
            try:
                await eventually(lambda: len(told.tokens) > 20)
                process.kill()
                await process.wait()
                process = await start()
                assert (await ask).tokens == expected(prompt_of(1), 1500, 1) and told.connections > 1
            finally:
                process.kill()
                await process.wait()

    run(main())


@pytest.mark.slow
def test_a_client_that_comes_back_finds_its_stream_wherever_it_is() -> None:
    """At the replica that told its last event, at another one, or nowhere: then it is computed anew. What it goes on
    with may break again."""

    async def main() -> None:
        async with replicas(2, {"step": 0.004}) as found, client() as http:
            urls = [one.url for one in found]
            for told_kill in range(2):
                told = Told()
                async with routed(urls, policy="round-robin") as (app, other):
                    async with routed(urls, policy="round-robin") as (first, url):
                        ask = asyncio.create_task(
                            continued(http, [url, other], prompt_of(2), told, seed=2, max_tokens=500)
                        )
                        await eventually(lambda told=told: len(told.tokens) > 20)
                        [number] = [at for at, one in enumerate(first.fleet.replicas) if one.bookings]
                        if told_kill:  # with all that it has, and its router with it
                            found[number].kill()
                    if not told_kill:
                        await eventually(lambda app=app: any(one.bookings for one in app.fleet.replicas), PATIENCE)
                        [there] = [at for at, one in enumerate(app.fleet.replicas) if one.bookings]
                        assert there == number
                        await eventually(lambda told=told: len(told.tokens) > 100 or told.done)
                        found[number].kill()
                    assert (await ask).tokens == expected(prompt_of(2), 500, 2) and told.error is None
                    found[number].start()
                    await eventually(lambda app=app: all(one.open for one in app.fleet.replicas), PATIENCE)

    asyncio.run(asyncio.wait_for(main(), 4 * PATIENCE))


@asynccontextmanager
async def held_back(url: str) -> AsyncIterator[str]:
    """A way to a server of which nothing is heard at once."""
    host, port = url.removeprefix("http://").split(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        there, back = await asyncio.open_connection(host, int(port))

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(there, writer), copy(reader, back), return_exceptions=True)

    door = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{door.sockets[0].getsockname()[1]}"
    finally:
        door.close()


def test_a_router_that_has_just_started_finds_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among replicas of which it has heard nothing yet: the one that has it is not the one that comes first."""
    monkeypatch.setattr(fleet, "SETTLE", 60.0 * bool(fleet.SETTLE))

    async def main() -> None:
        async with simulated({"step": 0.004}) as (_, one), simulated({"step": 0.004}) as (service, other):
            told, names = Told(), names_of_requests(service)
            async with client() as http:
                async with routed([other]) as (_, url):
                    ask = asyncio.create_task(
                        continued(http, [url], prompt_of(5), told, once=True, seed=5, max_tokens=300)
                    )
                    await eventually(lambda: len(told.tokens) > 20)
                await ask
                async with routed([one], probe_seconds=60.0) as (app, url), held_back(other) as late:
                    app.fleet.add(late)
                    await continued(http, [url], prompt_of(5), told, seed=5, max_tokens=300)
                assert told.tokens == expected(prompt_of(5), 300, 5)
                assert len({one.partition(".")[0] for one in names}) == 1 and len(set(names)) == 2

    run(main())


def test_a_client_may_say_which_tokens_it_has(attempts: list[int]) -> None:
    """They are not computed again, if they are right."""

    async def main() -> None:
        async with simulated({"step": 0.002}) as (service, replica), client() as http, routed([replica]) as (_, url):
            body = {"prompt": prompt_of(3), "seed": 3, "max_tokens": 300, "return_token_ids": True, "ignore_eos": True}
            found = await events_with_ids(http, url, "/v1/completions", body)
            counted, right = count_tokens(service), expected(prompt_of(3), 300, 3)
            at = next(at for at, (id, _, _) in enumerate(found) if int(id.split(".")[4]) >= 200)
            id, had = found[at][0], int(found[at][0].split(".")[4])
            for said, cost in ((right[:had], 300 - had), (right[: had - 1], 300)):  # fewer than it has: not enough
                await forget(http, replica, id, attempts)
                counted.clear()
                rest = await events_with_ids(http, url, "/v1/completions", body | {"resume_token_ids": [said]}, last=id)
                tokens = [one for _, _, told in rest[:-1] for choice in told["choices"] for one in choice["token_ids"]]
                assert right[:had] + tokens == right
                await eventually(lambda: not service._active)
                assert abs(sum(counted) - cost) < 20
            for more, header, status in (
                ({"resume_token_ids": [[right[0] + 1, *right[1:had]]]}, id, 409),
                ({"resume_token_ids": [["a"] * had]}, id, 400),
                ({"resume_token_ids": [right[:had]]}, "", 400),
                ({"n": 2}, id, 400),
                ({"prompt": prompt_of(4)}, id, 409),
                ({"seed": 4}, id, 409),
                ({"stream": False}, id, 400),
                ({}, id[:-9], 400),
                ({}, "17", 400),
                ({}, id.replace(f".{had}.", f".{2**40}."), 400),
                ({}, id.replace(f".{had}.", f".{had + 200}."), 409),
            ):
                await forget(http, replica, id, attempts)
                headers = {"last-event-id": header} if header else {}
                wrong = body | {"stream": True} | more
                answer = await http.post(f"{url}/v1/completions", json=wrong, headers=headers)
                assert answer.status_code == status, (more, header, answer.text)
            headers = {"last-event-id": id}
            there = await http.post(f"{replica}/v1/completions", json=body | {"stream": True}, headers=headers)
            assert there.status_code == 400 and "send it to a router" in there.text
            assert not service._active

    run(main())


def test_what_is_computed_anew_in_vain_is_counted(attempts: list[int]) -> None:
    async def main() -> None:
        async with simulated() as (_, replica), client() as http, routed([replica]) as (_, url):
            body = {"prompt": prompt_of(6), "seed": 6, "max_tokens": 30, "ignore_eos": True}
            found = await events_with_ids(http, url, "/v1/completions", body)
            id = found[-1][0]
            await forget(http, replica, id, attempts)

            async def used() -> list[float]:
                lines = (await http.get(f"{replica}/metrics")).text.splitlines()
                told = [one for one in lines if one.startswith("tokenmill_tenant_tokens_total{")]
                return [sum(float(one.split()[-1]) for one in told if kind in one) for kind in ("prompt", "output")]

            while await used() != [40, 30]:  # that one is closed
                await asyncio.sleep(0.01)
            wrong = body | {"seed": 7, "stream": True}
            answer = await http.post(f"{url}/v1/completions", json=wrong, headers={"last-event-id": id})
            assert answer.status_code == 409 and await used() == [80, 60]

    run(main())


def test_a_comment_does_not_look_like_an_event() -> None:
    """Some clients take any empty line for the end of an event once they know an id, and read JSON out of nothing."""

    async def main() -> None:
        async with (
            simulated({"step": 0.3}, http={"beat_seconds": 0.1}) as (_, slow),
            routed([slow]) as (_, url),
            client() as http,
        ):
            body = {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True, "stream": True}
            text = (await http.post(f"{url}/v1/completions", json=body)).text
            assert ": still here\n" in text
            assert all("data: " in one for one in text.split("\n\n")[:-1])

    run(main())


def test_official_clients_read_streams_with_ids(server: Server) -> None:
    async def main() -> None:
        async with routed([server.url]) as (_, url):
            said: Any = {"max_tokens": 20, "messages": [{"role": "user", "content": "What is a mill?"}]}
            said["model"] = "tiny-chat"
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
                chunks = [each async for each in await one.chat.completions.create(**said, stream=True)]
                assert chunks[-1].choices[0].finish_reason
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other:
                found = [each.type async for each in await other.messages.create(**said, stream=True)]
                assert found[0] == "message_start" and found[-1] == "message_stop"

    run(main())
