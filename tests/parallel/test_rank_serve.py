"""Ranks of a server are killed a hundred times under 64 streams: nothing is lost, wrong or said twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / room) for room in ("sampling", "serve")]

from grammar_models import write_model
from rank_groups import THREE, children, gone

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from http_server import Server  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

STREAMS, TOKENS, KILLS = 64, 80, 100
PATH = "/v1/completions"


def body(number: int, **more: Any) -> dict[str, Any]:
    asked = {"prompt": f"mill {number} " * (1 + number % 4), "max_tokens": TOKENS, "temperature": 0.7 * (number % 2)}
    return asked | {"seed": number, "ignore_eos": True, "return_token_ids": True, **more}


class Crowd:
    """Streams that are asked again and again, and when each of them last said something."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=url, timeout=300, limits=limits)
        self.wanted: list[list[int]] = []
        self.heard = [0.0] * STREAMS
        self.over = False
        self.answered = 0

    async def ask_all(self) -> None:
        asks = [self.client.post(PATH, json=body(number)) for number in range(STREAMS)]
        self.wanted = [answer.json()["choices"][0]["token_ids"] for answer in await asyncio.gather(*asks)]

    async def stream(self, number: int) -> None:
        while not self.over:
            said: list[int] = []
            finish = None
            async with self.client.stream("POST", PATH, json=body(number, stream=True)) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        said += choice["token_ids"]
                        finish = choice["finish_reason"]
                        self.heard[number] = time.monotonic()
            assert finish == "length" and said == self.wanted[number], (
                f"stream {number} was cut, or says something else"
            )
            self.answered += 1

    async def resumed(self, since: float) -> float:
        """Seconds until every stream has spoken since then."""
        while min(self.heard) < since:
            await asyncio.sleep(0.005)
        return time.monotonic() - since


def ranks_of(server: Server) -> list[int]:
    """Processes that a fork server has forked."""
    found = []
    for pid in children(server.process.pid):
        with contextlib.suppress(OSError):
            if b"ranks.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return [pid for pid in found if any(pid in children(other) for other in found)]


@pytest.mark.slow
def test_a_hundred_kills_of_ranks_under_64_streams_cost_no_answer(tmp_path: Path) -> None:
    server = Server.start(
        write_model(tmp_path / "talker", **THREE), "--parallel", "tp3", "--max-num-seqs", str(STREAMS)
    )
    everybody = children(server.process.pid)
    rng, times, killed = random.Random(5), [], 0

    async def main() -> None:
        nonlocal killed
        crowd = Crowd(server.url)
        await crowd.ask_all()
        jobs = [asyncio.create_task(crowd.stream(number)) for number in range(STREAMS)]
        await crowd.resumed(time.monotonic())
        while killed < KILLS and not any(job.done() for job in jobs):
            await asyncio.sleep(rng.uniform(0, 0.5))
            ranks = ranks_of(server)
            if not ranks:  # the ones before have just been killed
                continue
            now = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), signal.SIGKILL)
                killed += 1
            if rng.random() < 0.8:  # else another one is killed while the streams still wait
                times.append(await asyncio.wait_for(crowd.resumed(now), 120))
        crowd.over = True
        await asyncio.gather(*jobs)
        assert crowd.answered > STREAMS
        metrics = (await crowd.client.get("/metrics")).text
        assert "tokenmill_engine_restarts_total 0" in metrics, "the engine itself never went down"
        await crowd.client.aclose()

    asyncio.run(main())
    everybody += children(server.process.pid)
    assert server.stop() == 0 and gone(everybody)
    times.sort()
    median = times[len(times) // 2]
    print(f"{killed} kills; all streams spoke again after {median:.2f} s (median), {times[-1]:.2f} s (most)")
