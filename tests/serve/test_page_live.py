"""/live: what it tells, to whom, and that it costs the engine nothing while nobody watches."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from http_server import simulated
from hypothesis import given
from hypothesis import strategies as st
from sim_service import eventually, greedy, run, strike

from tokenmill.kv.pool import BlockPool
from tokenmill.serve.api import live as live_module
from tokenmill.serve.api.live import _pool, percentiles
from tokenmill.serve.engine import wire
from tokenmill.serve.engine.introspection import blocks_of
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.http.api_keys import add_key

ROW = {"id", "state", "prompt", "output", "cached", "blocks", "age"}
SLOW = {"step": 0.02}  # seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "BUSY", 0.02)
    monkeypatch.setattr(live_module, "IDLE", 0.02)


@asynccontextmanager
async def watching(url: str, key: str | None = None) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient() as client, client.stream("GET", f"{url}/live", headers=headers) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")

        async def frames() -> AsyncIterator[dict[str, Any]]:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

        yield frames()


async def until(frames: AsyncIterator[dict[str, Any]], condition: Any) -> dict[str, Any]:
    """The first snapshot that is as wanted."""
    async for frame in frames:
        if condition(frame):
            return frame
    raise AssertionError("the stream ended before")


def count_views(service: Service) -> list[int]:
    """Notes each question to the engine."""
    asked: list[int] = []
    inner = service.view

    async def view(timeout: float = 2.0) -> wire.EngineSnapshot | None:
        asked.append(1)
        return await inner(timeout)

    service.view = view  # type: ignore[method-assign]
    return asked


def test_a_snapshot_shows_requests_blocks_steps_and_latencies() -> None:
    async def main() -> None:
        async with simulated(SLOW) as (service, url), watching(url) as frames:
            prompt = list(range(3, 43))
            streams = [await service.submit(prompt, greedy(400), request_id=uuid4().hex) for _ in range(3)]
            known = lambda one: [bool(row["output"] and row["blocks"]) for row in one["rows"]] == [True] * 3  # noqa: E731
            frame = await until(frames, known)
            ids = {stream.request_id[:8] for stream in streams}
            assert {row["id"] for row in frame["rows"]} == ids and all(len(id) == 8 for id in ids)
            for row in frame["rows"]:
                assert (row["state"], row["prompt"]) == ("decode", 40) and row["blocks"] >= 3 and row["age"] > 0
            pool = frame["pool"]
            assert (pool["blocks"], pool["block_size"], pool["each"]) == (2048, 16, 1)
            names = ("free", "cached", "used", "shared")
            assert [pool["cells"].count(digit) for digit in "0123"] == [pool[name] for name in names]
            assert sum(pool[name] for name in names) == 2048 and pool["used"] >= 3
            assert pool["shared"] == 2  # the two full blocks of the prompt
            frame = await until(frames, lambda one: one["itl"] is not None)
            assert frame["ttft"]["n"] == 3 and 15 < frame["itl"]["p50"] < 2000
            assert frame["steps"][-1][1:3] == [3, 0] and sum(step[2] for step in frame["steps"]) == 40 + 2 * 8
            assert (frame["cache_hit"], frame["cache_queried"]) == (64, 120)
            for stream in streams:
                await stream.aclose()
            frame = await until(frames, lambda one: not one["rows"] and one["pool"]["used"] == 0)
            assert frame["pool"]["cached"] >= 2 and frame["pool"]["shared"] == 0
            assert frame["finished"] == {"cancelled": 3} and frame["state"] == "ready"

    run(main())


def test_rates_tell_of_seconds_that_are_over() -> None:
    async def main() -> None:
        async with simulated() as (service, url):
            async for _ in await service.submit([3, 4, 5], greedy(50)):  # before anybody watched
                pass
            async with watching(url) as frames:
                frame = await until(frames, lambda one: sum(output for output, _ in one["rates"]) >= 50)
                assert sum(output for output, _ in frame["rates"]) == 50
                assert sum(prefilled for _, prefilled in frame["rates"]) == 3
                assert len(frame["rates"]) == live_module.SECONDS
                assert frame["ttft"]["n"] == 1 and frame["itl"]["n"] == 49

    run(main())


def test_latencies_of_a_watched_request_are_counted_once() -> None:
    async def main() -> None:
        async with simulated(SLOW) as (service, url), watching(url) as frames:
            stream = await service.submit([3, 4, 5], greedy(30))
            await until(frames, lambda one: one["itl"] is not None and one["itl"]["n"] > 3)
            async for _ in stream:
                pass
            frame = await until(frames, lambda one: one["finished"] == {"length": 1})
            assert (frame["ttft"]["n"], frame["itl"]["n"]) == (1, 29)

    run(main())


def test_nobody_watching_costs_the_engine_nothing_and_an_idle_engine_is_left_alone() -> None:
    async def main() -> None:
        async with simulated() as (service, url):
            asked = count_views(service)
            async for _ in await service.submit([3, 4, 5], greedy(20)):
                pass
            await asyncio.sleep(0.2)
            assert not asked
            async with watching(url) as frames:
                for _ in range(10):  # nothing moves: one question is enough for all these
                    await anext(frames)
                assert len(asked) == 1
            await asyncio.sleep(0.2)
            async for _ in await service.submit([3, 4, 5], greedy(20)):
                pass
            await asyncio.sleep(0.2)
            assert len(asked) == 1

    run(main())


def test_watchers_share_one_question_and_are_let_go() -> None:
    async def main() -> None:
        async with simulated(SLOW) as (service, url):
            async with watching(url) as first, watching(url) as second, watching(url) as third:
                for frames in (first, second, third):
                    await anext(frames)
                asked = count_views(service)
                stream = await service.submit([3, 4, 5], greedy(400))
                for _ in range(5):
                    await asyncio.gather(anext(first), anext(second), anext(third))
                assert 1 <= len(asked) <= 8
                await stream.aclose()
            count = len(asked)
            await asyncio.sleep(0.2)
            async for _ in await service.submit([3, 4, 5], greedy(20)):
                pass
            assert len(asked) == count

    run(main())


def test_the_number_of_watchers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MOST_WATCHERS", 1)

    async def main() -> None:
        async with simulated() as (_, url), httpx.AsyncClient() as client:
            async with watching(url) as frames:
                await anext(frames)
                refused = await client.get(f"{url}/live")
                assert refused.status_code == 503 and "watch already" in refused.json()["error"]["message"]
                assert refused.headers["retry-after"] == "10"
            for _ in range(100):  # the first one is gone
                async with client.stream("GET", f"{url}/live") as response:
                    if response.status_code == 200:
                        return
                await asyncio.sleep(0.02)
            raise AssertionError("the place was not given back")

    run(main())


def test_where_there_are_keys_each_sees_their_own_requests_and_an_operator_all(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob, operator = (add_key(file, name, {"operator": name == "op"}) for name in ("alice", "bob", "op"))
    body = {"prompt": [77] * 40, "max_tokens": 400, "temperature": 0, "ignore_eos": True}

    async def main() -> None:
        async with simulated(SLOW, {"keys": file}) as (_, url), httpx.AsyncClient() as client:
            for headers in ({}, {"authorization": "Bearer tm-guess"}):
                assert (await client.get(f"{url}/live", headers=headers)).status_code == 401
            asking = asyncio.create_task(
                client.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {alice}"})
            )
            for key, listed in ((alice, 1), (operator, 1), (bob, 0)):
                async with watching(url, key) as frames:
                    frame = await until(frames, lambda one: one["running"] == 1)
                    assert [set(row) for row in frame["rows"]] == [ROW] * listed
                    told = json.dumps(frame)
                    assert "alice" not in told and "bob" not in told and alice not in told and "77, 77" not in told
            asking.cancel()

    run(main())


def test_a_restart_is_seen_and_the_view_goes_on() -> None:
    async def main() -> None:
        async with simulated(SLOW) as (service, url), watching(url) as frames:
            stream = await service.submit([3, 4, 5], greedy(400))
            await until(frames, lambda one: one["running"] == 1)
            await strike(service, signal.SIGKILL)
            frame = await until(frames, lambda one: one["state"] == "restarting")
            assert frame["pool"] is None and [row["state"] for row in frame["rows"]] == ["waiting"]
            frame = await until(frames, lambda one: one["state"] == "ready" and one["running"] == 1)
            assert frame["restarts"] == 1 and frame["pool"]["used"] > 0
            await stream.aclose()

    run(main())


def test_a_server_that_leaves_ends_the_view() -> None:
    async def main() -> None:
        async with simulated() as (service, url), watching(url) as frames:
            await anext(frames)
            await service.drain(5)
            states = [frame["state"] async for frame in frames]  # ends by itself
            assert states[-1] == "draining"

    run(main())


def test_a_watcher_that_is_gone_is_forgotten() -> None:
    async def main() -> None:
        async with simulated() as (service, url):
            async with watching(url) as frames:
                await anext(frames)
                assert any(task.get_name() == "tokenmill-live" for task in asyncio.all_tasks())
            await eventually(lambda: not any(task.get_name() == "tokenmill-live" for task in asyncio.all_tasks()))
            assert service.ready()

    run(main())


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=200))
def test_the_map_of_blocks_is_what_a_walk_over_them_finds(blocks: list[tuple[int, bool]]) -> None:
    pool = BlockPool(len(blocks))
    pool.references = [held for held, _ in blocks]
    pool.has_content = [has for _, has in blocks]
    walked = [(wire.SHARED if held > 1 else wire.USED) if held else wire.CACHED * has for held, has in blocks]
    assert list(blocks_of(pool)) == walked


def test_a_large_pool_is_told_in_squares_of_several_blocks() -> None:
    states = bytes([wire.USED] * 30_000 + [wire.FREE] * 50_000)
    told = _pool(states, 16)
    assert told["each"] == 10 and len(told["cells"]) == 8000
    assert told["cells"] == "2" * 3000 + "0" * 5000 and (told["used"], told["free"]) == (30_000, 50_000)
    assert len(_pool(bytes(live_module.MOST_CELLS + 1), 16)["cells"]) <= live_module.MOST_CELLS


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles(deque()) is None
    assert percentiles(deque([0.005])) == {"p50": 5.0, "p90": 5.0, "p99": 5.0, "n": 1}
    assert percentiles(deque(x / 1000 for x in range(100, 0, -1))) == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "n": 100}
