"""Texts whose vectors are asked for are requests like any other: engines that die are asked again, others go on."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest
from http_server import simulated
from sim_engine import POISON, STEP_TOKENS
from sim_service import answer, assert_nothing_left, embed, eventually, greedy, opened, run, solo, strike

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.serve.engine_client.admission import Overloaded
from tokenmill.serve.engine_client.events import StepEvent


def test_vectors_are_asked_for_again_when_the_engine_dies() -> None:
    async def main() -> None:
        async with opened({"step": 0.01}) as service:
            prompts = [[5] * (i + 1) for i in range(40)]
            talk = asyncio.create_task(answer(service, [5, 6], greedy(60)))
            vectors = asyncio.create_task(embed(service, prompts))
            await eventually(lambda: len(service._active) > 40)
            await strike(service, signal.SIGKILL)
            assert await vectors == [[float(len(prompt)), float(sum(prompt))] for prompt in prompts]
            assert (await talk).outputs[0].token_ids == solo([5, 6], greedy(60))
            assert service.stats().restarts == 1 and not service._supervisor._busy.is_set()
            with pytest.raises(InvalidRequest, match="pooling"):
                await embed(service, [[5]], "max")
            with pytest.raises(InvalidRequest, match="empty"):
                await embed(service, [[]])
            await assert_nothing_left(service)

    run(main())


def test_a_text_that_ends_engines_is_given_up_with_the_cause() -> None:
    async def main() -> None:
        async with opened({"crash": POISON}, breaker_failures=100) as service:
            with pytest.raises(TokenmillError, match=r"ended the engine again when it ran alone: .*SIGSEGV"):
                await embed(service, [[POISON]])
            assert not service._supervisor._busy.is_set()  # an engine with nothing to do may be silent
            await eventually(service.ready)
            assert service.stats().restarts == 3
            assert await embed(service, [[5]]) == [[1.0, 5.0]]

    run(main())


def test_a_text_that_ends_engines_ends_no_other() -> None:
    async def main() -> None:
        async with opened({"crash": POISON}, breaker_failures=100) as service:
            poisoned = asyncio.create_task(embed(service, [[POISON]]))
            await eventually(lambda: service._active)
            others = [asyncio.create_task(embed(service, [[5] * size])) for size in (1, 2, 3)]
            with pytest.raises(TokenmillError, match="SIGSEGV"):
                await poisoned
            assert await asyncio.gather(*others) == [[[float(size), 5.0 * size]] for size in (1, 2, 3)]

    run(main())


def test_answers_go_on_while_long_texts_are_read() -> None:
    async def main() -> None:
        async with opened({"step": 0.002}) as service:
            steps: list[StepEvent] = []
            service.subscribe(lambda event: steps.append(event) if isinstance(event, StepEvent) else None)
            talk = await service.submit([5, 6], greedy(400))
            await eventually(lambda: talk.request_state.sequences[0].num_tokens)
            texts = [[7] * 2000] * 4
            assert await embed(service, texts) == [[2000.0, 14000.0]] * 4
            assert (await talk.last()).outputs[0].token_ids == solo([5, 6], greedy(400))
            shared = [step for step in steps if step.prefill_tokens and step.decodes]
            assert len(shared) >= 4 * 2000 // STEP_TOKENS  # and none of them is larger than any other step
            assert all(step.prefill_tokens + step.decodes <= STEP_TOKENS for step in steps)
            await assert_nothing_left(service)

    run(main())


def test_texts_wait_in_the_same_queue_and_come_in_all_or_none() -> None:
    async def main() -> None:
        async with opened({"step": 0.05}, max_queued_requests=8) as service:
            many = asyncio.create_task(embed(service, [[5] * 100] * 90))  # alone, it may be more than the queue holds
            await eventually(lambda: service._active)
            assert service.stats().queued_tokens >= 2000
            with pytest.raises(Overloaded, match="requests are waiting, the limit is 8"):
                await service.embed([[5]] * 2)
            with pytest.raises(Overloaded, match="requests are waiting, the limit is 8"):
                await service.submit([5], greedy(1))
            assert await many == [[100.0, 500.0]] * 90
            assert service.stats().accepted == 90 and service.stats().refused == 2
            await assert_nothing_left(service)

    run(main())


def test_a_vector_has_a_priority_and_a_deadline() -> None:
    async def main() -> None:
        async with simulated({"step": 0.05}) as (service, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
            late = await client.post("/v1/embeddings", json={"input": [5] * 2000, "deadline_ms": 100})
            assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
            found = await client.post("/v1/embeddings", json={"input": [5, 6], "priority": "batch", "cache_salt": "a"})
            assert found.json()["data"][0]["embedding"] == [2.0, 11.0]
            assert found.json()["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
            await assert_nothing_left(service)

    run(main())
