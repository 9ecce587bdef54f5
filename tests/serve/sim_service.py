"""Services around simulated engine processes, and the answers they must give."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sim_engine import VOCAB

from tokenmill.config import EngineConfig
from tokenmill.engine.runner.simulated import ROOT, mix, ranked_tokens
from tokenmill.errors import TokenmillError
from tokenmill.outputs import RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.settings import ServeSettings

COMMAND = (sys.executable, str(Path(__file__).with_name("sim_engine.py")))
PATIENCE = 60.0  # seconds; anything that takes this long hangs


def run(main: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, PATIENCE)

    return asyncio.run(limited())


def make(plan: dict[str, Any] | None = None, overlap: bool = False, **settings: Any) -> Service:
    """A service whose engine follows this plan of faults; not started."""
    config = EngineConfig(model=json.dumps(plan or {}), skip_tokenizer_init=True, overlap=overlap)
    return Service(config, ServeSettings(**{"command": COMMAND, "backoff_seconds": 0.01} | settings))


@asynccontextmanager
async def opened(plan: dict[str, Any] | None = None, overlap: bool = False, **settings: Any) -> AsyncIterator[Service]:
    service = make(plan, overlap, **settings)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def greedy(max_tokens: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


async def answer(service: Service, prompt: list[int], params: SamplingParams, **options: Any) -> RequestOutput:
    """The last output; checks on the way that each output continues the one before it."""
    seen: list[list[int]] = []
    stream = await service.submit(prompt, params, **options)
    async for output in stream:
        tokens = [one.token_ids for one in output.outputs]
        assert all(new[: len(old)] == old for old, new in zip(seen, tokens))
        seen = tokens
    return output


async def embed(service: Service, prompts: list[list[int]], pooling: str = "mean") -> list[list[float]]:
    """The vectors; of the simulated model, the number of tokens and their sum."""
    streams = await service.embed(prompts, pooling)
    for stream in streams:
        if (error := (await stream.last()).error) is not None:
            raise TokenmillError(error)
    return [stream.request_state.leader.pooled for stream in streams]


def solo(prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    """What the simulated model says to this prompt when nothing disturbs it."""
    seed = 0 if params.greedy else (params.seed + index * 0x9E3779B97F4A7C15) & (2**63 - 1)
    value, said = ROOT, []
    for token in prompt:
        value = mix(value, token)
    while len(said) < params.max_tokens:
        said.append(ranked_tokens(value, seed, 1, VOCAB, [])[0])
        value = mix(value, said[-1])
    return said


async def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


async def strike(service: Service, number: signal.Signals) -> None:
    """Send a signal to the engine, once there is one."""
    await eventually(lambda: service._supervisor.pid)
    os.kill(service._supervisor.pid, number)


async def assert_nothing_left(service: Service) -> None:
    """No request is known to the front or to the engine, and every block is free."""
    assert not service._active and not service._remote.sequences and not service._processor._states
    view = await service.view() or await service.view()  # the first may have gone to an engine that was just replaced
    assert view is not None and not view.rows and not any(state >= 2 for state in view.blocks)
    stats = service.stats()
    assert (stats.active, stats.queued, stats.queued_tokens) == (0, 0, 0)
