"""From its first moment a server says what it is doing and how far that is, at its first start and after a crash."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import http_around
from sim_service import eventually, greedy, make, run, strike

from tokenmill.serve.engine.startup import StartupStage

STAGES = [
    ["loading weights", 0, 134_515_008],
    ["loading weights", 33_628_752, 134_515_008],
    ["compiling kernels", 3, 12],
]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (StartupStage("starting the engine"), "starting the engine"),
        (StartupStage("compiling kernels", 3, 12), "compiling kernels, 3 of 12"),
        (StartupStage("downloading", 49_000_000, 98_000_000), "downloading, 50 %"),
        (StartupStage("downloading", 99_000_000, 98_000_000), "downloading, 100 %"),
    ],
)
def test_a_stage_in_words(stage: StartupStage, said: str) -> None:
    assert str(stage) == said


def test_a_start_is_told_in_stages_to_everybody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenmill.serve")
    gate = tmp_path / "gate"
    at_terminal: list[tuple[int, int, str]] = []

    async def main() -> None:
        service = make({"gate": str(gate), "stages": STAGES})
        async with http_around(service) as url, httpx.AsyncClient(base_url=url) as client:

            async def seen(stage: str) -> dict[str, Any]:
                while (answer := await client.get("/health")).json().get("stage") != stage:
                    assert answer.status_code == (200 if answer.json()["ready"] else 503)
                    await asyncio.sleep(0.005)
                return answer.json()

            first = await client.get("/health")  # before anything was started
            assert first.status_code == 503 and first.json()["stage"] == "starting the engine"
            starting = asyncio.create_task(service.start(lambda *report: at_terminal.append(report)))
            told = await seen("compiling kernels")
            assert (told["status"], told["ready"], told["state"]) == ("starting", False, "starting")
            assert (told["done"], told["total"], told["message"]) == (3, 12, "compiling kernels, 3 of 12")
            assert told["seconds"] > 0 and (await client.get("/health/live")).status_code == 200
            refused = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "starting (compiling kernels, 3 of 12)" in refused.json()["error"]["message"]
            assert 'tokenmill_start_progress{stage="compiling kernels"} 0.25' in (await client.get("/metrics")).text
            assert "soon (compiling kernels, 3 of 12)" in (await client.get("/")).text
            gate.touch()
            await starting
            ready = await client.get("/health")
            assert ready.status_code == 200 and ready.json()["status"] == "ok" and "stage" not in ready.json()
            assert "tokenmill_start_progress{" not in (await client.get("/metrics")).text
            assert at_terminal[-1] == (3, 12, "compiling kernels")
            assert "loading weights" in {what for _, _, what in at_terminal}

            gate.unlink()  # the second engine has to wait there, too
            count = len(at_terminal)
            stream = await service.submit([5, 6], greedy(4))
            await strike(service, signal.SIGKILL)
            told = await seen("compiling kernels")
            assert (told["status"], told["restarts"]) == ("restarting", 1)
            assert "the engine is being started: compiling kernels, 3 of 12" in caplog.text
            gate.touch()
            await stream.last()
            await eventually(service.ready)
            assert (await client.get("/health")).json()["status"] == "ok" and len(at_terminal) == count
        await service.stop()

    run(main())
