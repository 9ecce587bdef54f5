"""Engines are killed, hang and crash under load: every stream ends with the tokens of an undisturbed run, or alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import pytest
from sim_engine import POISON
from sim_service import answer, assert_nothing_left, eventually, greedy, opened, run, solo, strike

from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.serve.engine_client.admission import Overloaded, Unavailable
from tokenmill.serve.engine_client.events import EngineEvent, RequestEvent
from tokenmill.serve.engine_client.service import Service

PROMPTS = [[(17 * i + 7 * j) % 900 + 3 for j in range(3 + 3 * i)] for i in range(64)]


def params_of(i: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=i % 2, seed=i, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_five_kills_under_64_streams_change_no_token(overlap: bool) -> None:
    async def main() -> None:
        async with opened({"step": 0.004}, overlap) as service:
            jobs = [asyncio.create_task(answer(service, p, params_of(i, 150))) for i, p in enumerate(PROMPTS)]
            for kill in range(5):
                before = service._counters.engine
                await eventually(lambda before=before: service._counters.engine is not before)  # it works
                await strike(service, signal.SIGKILL)
                await eventually(lambda kill=kill: service._supervisor.generation == kill + 2)
            outputs = await asyncio.gather(*jobs)
            assert service.stats().restarts == 5
            for i, output in enumerate(outputs):
                assert output.outputs[0].token_ids == solo(PROMPTS[i], params_of(i, 150)), output.error
                assert output.outputs[0].finish_reason == "length" and output.error is None
            await assert_nothing_left(service)

    run(main())


def test_kills_in_quick_succession_are_blamed_on_nobody() -> None:
    """Shot again right after it took the work up, so that no request got anywhere in between."""

    async def main() -> None:
        async with opened({"step": 0.02}, breaker_failures=100) as service:
            jobs = [asyncio.create_task(answer(service, p, greedy(20))) for p in PROMPTS[:16]]
            await eventually(lambda: service._counters.engine.running)
            for kill in range(5):
                await strike(service, signal.SIGKILL)
                await eventually(lambda kill=kill: service._supervisor.generation == kill + 2)
            outputs = await asyncio.gather(*jobs)
            assert [one.outputs[0].token_ids for one in outputs] == [solo(p, greedy(20)) for p in PROMPTS[:16]]

    run(main())


def test_a_hung_engine_is_replaced_and_its_requests_go_on() -> None:
    async def main() -> None:
        async with opened({"step": 0.004}, hang_seconds=2.0) as service:
            jobs = [asyncio.create_task(answer(service, p, greedy(100))) for p in PROMPTS[:16]]
            await eventually(lambda: service._counters.engine.running)
            old = service._supervisor.pid
            await strike(service, signal.SIGSTOP)
            began = time.monotonic()
            outputs = await asyncio.gather(*jobs)
            assert time.monotonic() - began < 60
            assert [one.outputs[0].token_ids for one in outputs] == [solo(p, greedy(100)) for p in PROMPTS[:16]]
            assert service.stats().restarts == 1
            with pytest.raises(ProcessLookupError):
                os.kill(old, 0)

    run(main())


def test_an_engine_that_was_stopped_while_idle_is_found_out_by_the_next_request() -> None:
    async def main() -> None:
        async with opened(hang_seconds=1.0) as service:
            await strike(service, signal.SIGSTOP)
            await asyncio.sleep(1.2)
            assert service.stats().restarts == 0 and service.ready()  # nobody asked it for anything
            assert (await answer(service, [5], greedy(5))).outputs[0].token_ids == solo([5], greedy(5))
            assert service.stats().restarts == 1

    run(main())


CAUSES = [
    ("crash", "SIGSEGV"),
    ("exit", "status 7 (the device fell off the bus)"),
    ("killed", "killed from outside, or by the kernel for memory"),
    ("hang", "completed no step for 1 s"),
]


@pytest.mark.parametrize(("how", "cause"), CAUSES)
def test_a_request_that_ends_engines_fails_alone_with_its_cause(how: str, cause: str) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"breaker_failures": 100, "hang_seconds": 1.0}
        async with opened({"step": 0.002, how: POISON}, **settings) as service:
            good = [asyncio.create_task(answer(service, p, greedy(60))) for p in PROMPTS[:12]]
            await eventually(lambda: service._counters.engine.running)
            bad = await answer(service, [5, POISON, 6], greedy(60))
            assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == []
            assert cause in bad.error and "alone" in bad.error
            outputs = await asyncio.gather(*good)
            assert [one.outputs[0].token_ids for one in outputs] == [solo(p, greedy(60)) for p in PROMPTS[:12]]
            assert all(one.error is None for one in outputs)
            await assert_nothing_left(service)

    run(main())


def test_an_answer_that_breaks_on_its_way_keeps_what_was_said() -> None:
    async def main() -> None:
        wrong = solo(PROMPTS[3], greedy(20))[-1]
        others = [p for p in PROMPTS[4:20] if wrong not in solo(p, greedy(60))]
        async with opened({"step": 0.002, "crash": wrong}, breaker_failures=100) as service:
            good = [asyncio.create_task(answer(service, p, greedy(60))) for p in others]
            bad = await answer(service, PROMPTS[3], greedy(60))
            assert bad.outputs[0].finish_reason == "error" and "SIGSEGV" in bad.error
            said = bad.outputs[0].token_ids  # the last of them may have died with the engine
            assert said and said == solo(PROMPTS[3], greedy(20))[: len(said)]
            outputs = await asyncio.gather(*good)
            assert [one.outputs[0].token_ids for one in outputs] == [solo(p, greedy(60)) for p in others]

    run(main())


def test_two_poisoned_requests_are_both_found_and_siblings_are_spared() -> None:
    async def main() -> None:
        async with opened({"step": 0.002, "crash": POISON}, breaker_failures=100) as service:
            wide = SamplingParams(temperature=1, seed=7, n=3, max_tokens=60, ignore_eos=True)
            good = asyncio.create_task(answer(service, PROMPTS[3], wide))
            bad = await asyncio.gather(
                *(answer(service, [5 + i, POISON], greedy(60)) for i in range(2)),
            )
            assert all("SIGSEGV" in one.error for one in bad)
            outputs = (await good).outputs
            assert [one.token_ids for one in outputs] == [solo(PROMPTS[3], wide, index) for index in range(3)]

    run(main())


def test_a_disconnect_storm_leaves_no_request_and_no_block() -> None:
    async def main() -> None:
        dice = random.Random(5)

        async def leave(service: Service, i: int) -> None:
            stream = await service.submit(PROMPTS[i % 64], params_of(i, 500))
            for _ in range(dice.randrange(4)):
                await anext(stream)
            if i % 3 == 0:
                await stream.aclose()
            elif i % 3 == 1:
                assert service.cancel(stream.request_id)
                assert [one async for one in stream][-1].outputs[0].finish_reason == "cancelled"
            del stream  # a stream that nobody holds any more is cancelled, too

        async with opened({"step": 0.002}) as service:
            stay = asyncio.create_task(answer(service, PROMPTS[9], greedy(120)))
            await asyncio.gather(*(leave(service, i) for i in range(300)))
            assert (await stay).outputs[0].token_ids == solo(PROMPTS[9], greedy(120))
            await asyncio.sleep(0.02)
            await assert_nothing_left(service)
            assert service.stats().finished == {"length": 1, "cancelled": 300}

    run(main())


def test_a_client_that_leaves_while_the_engine_is_down_is_not_resumed() -> None:
    async def main() -> None:
        async with opened({"step": 0.004}) as service:
            stream = await service.submit(PROMPTS[3], greedy(500))
            await anext(stream)
            await strike(service, signal.SIGKILL)
            await eventually(lambda: service._supervisor.pid is None)
            await stream.aclose()
            await eventually(lambda: service._supervisor.pid is not None and service.ready())
            await assert_nothing_left(service)

    run(main())


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        async with opened({"step": 0.003}) as service:
            jobs = [asyncio.create_task(answer(service, p, greedy(60))) for p in PROMPTS[:20]]
            await eventually(lambda: service._counters.engine.running)
            draining = asyncio.create_task(service.drain(20))
            await asyncio.sleep(0)
            assert not service.ready() and service.live()
            with pytest.raises(Unavailable, match="shutting down"):
                await service.submit([5], greedy())
            assert await draining == 0
            outputs = await asyncio.gather(*jobs)
            assert [one.outputs[0].token_ids for one in outputs] == [solo(p, greedy(60)) for p in PROMPTS[:20]]

    run(main())


def test_drain_hands_back_what_it_cannot_finish_even_through_a_restart() -> None:
    async def main() -> None:
        async with opened({"step": 0.05}) as service:
            jobs = [asyncio.create_task(answer(service, p, greedy(1000))) for p in PROMPTS[:5]]
            await eventually(lambda: service._counters.engine.running)
            await strike(service, signal.SIGKILL)
            began = time.monotonic()
            assert await service.drain(0.6) == 5
            assert time.monotonic() - began < 20  # the answers would have taken fifty
            for output in await asyncio.gather(*jobs):
                assert output.outputs[0].finish_reason == "error" and "shutting down" in output.error

    run(main())


def test_an_engine_that_never_comes_back_opens_the_breaker_and_tells_the_cause(tmp_path: Any) -> None:
    fuse = tmp_path / "fuse"
    fuse.write_text("1   ")

    async def main() -> None:
        plan = {"step": 0.004, "fuse": str(fuse)}
        settings = {"give_up_after": 4, "breaker_failures": 3, "breaker_seconds": 0.5}
        async with opened(plan, **settings) as service:
            kinds: list[str] = []
            service.subscribe(lambda event: kinds.append(event.kind) if isinstance(event, EngineEvent) else None)
            job = asyncio.create_task(answer(service, PROMPTS[3], greedy(2000)))
            await eventually(lambda: service._counters.engine.running)
            await strike(service, signal.SIGKILL)
            output = await job
            assert output.outputs[0].finish_reason == "error" and "4 times in a row" in output.error
            assert "no device was found" in output.error
            said = output.outputs[0].token_ids
            assert said and said == solo(PROMPTS[3], greedy(len(said)))
            assert service.live() and not service.ready()
            with pytest.raises(Unavailable) as refused:
                await service.submit([5], greedy())
            assert 0 < refused.value.retry_after <= 1
            assert "breaker_open" in kinds
            fuse.write_text("99  ")  # the device is plugged in again
            await eventually(lambda: service.stats().breaker == "half_open" and service.ready())
            assert (await answer(service, [5], greedy(3))).outputs[0].token_ids == solo([5], greedy(3))
            assert service.stats().breaker == "closed" and kinds[-1] == "breaker_closed"

    run(main())


def test_a_half_open_breaker_lets_one_in_at_a_time(tmp_path: Any) -> None:
    async def main() -> None:
        async with opened({"step": 0.01}, breaker_failures=1, breaker_seconds=0.3) as service:
            await strike(service, signal.SIGKILL)
            await eventually(lambda: service.stats().breaker == "open")
            with pytest.raises(Unavailable):
                await service.submit([5], greedy())
            await eventually(lambda: service.stats().breaker == "half_open" and service.ready())
            with pytest.raises(InvalidRequest):  # a wrong request is no probe
                await service.submit([5000], greedy())
            first = await service.submit([5], greedy(1000))
            with pytest.raises(Unavailable):
                await service.submit([6], greedy())
            await first.aclose()  # it proved nothing: another may try
            assert (await answer(service, [6], greedy(3))).outputs[0].token_ids == solo([6], greedy(3))
            assert service.stats().breaker == "closed"

    run(main())


def test_deadlines_are_kept_even_while_the_engine_is_away(tmp_path: Any) -> None:
    fuse = tmp_path / "fuse"
    fuse.write_text("1   ")

    async def main() -> None:
        async with opened({"step": 0.01, "fuse": str(fuse)}, give_up_after=1000) as service:
            assert (await answer(service, [5], greedy(2000), timeout=0.3)).outputs[0].finish_reason == "deadline"
            stream = await service.submit([5], greedy(2000), timeout=2)
            await anext(stream)
            await strike(service, signal.SIGKILL)
            began = time.monotonic()
            output = [one async for one in stream][-1]
            assert output.outputs[0].finish_reason == "deadline" and "deadline passed" in output.error
            assert output.outputs[0].token_ids and time.monotonic() - began < 20
            assert not service._remote.sequences

    run(main())


def test_a_waiting_request_is_dropped_once_its_deadline_cannot_be_met() -> None:
    async def main() -> None:
        async with opened({"step": 0.05}) as service:
            await answer(service, [8] * 2000, greedy(10))  # it learns what long prompts cost: eight steps
            assert service._admission.step_time.known
            jobs = [asyncio.create_task(answer(service, [7], greedy(200))) for _ in range(64)]  # ten seconds
            await eventually(lambda: service._counters.engine.running == 64)
            began = time.monotonic()
            late = await answer(service, [9] * 2000, greedy(10), timeout=4)  # a busy machine may take 0.5 s a step
            assert late.outputs[0].finish_reason == "deadline" and "past its deadline" in late.error
            assert 0.5 < time.monotonic() - began < 4
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    run(main())


def test_a_full_queue_refuses_with_the_time_it_takes_to_drain() -> None:
    async def main() -> None:
        async with opened({"step": 0.01}, max_queued_tokens=1000) as service:
            await asyncio.gather(*(answer(service, [5], greedy(20)) for _ in range(4)))  # it learns how fast it is
            jobs = [asyncio.create_task(answer(service, [7] * 10, greedy(60))) for _ in range(64)]
            await eventually(lambda: service._counters.engine.running == 64)  # all rows are taken
            streams = [await service.submit([9] * 100, greedy(10)) for _ in range(10)]
            with pytest.raises(Overloaded, match="1000 prompt tokens are waiting") as refused:
                await service.submit([9] * 100, greedy(10))
            assert 1 <= refused.value.retry_after < 10
            assert service.stats().queued_tokens == 1000 and service.stats().drain_seconds > 0.1
            for stream in streams:
                await stream.aclose()
            assert service.stats().queued_tokens == 0
            late = await service.submit([9] * 100, greedy(10))
            assert len([one async for one in late][-1].outputs[0].token_ids) == 10
            await asyncio.gather(*jobs)

    run(main())


def test_events_tell_steps_requests_and_restarts() -> None:
    async def main() -> None:
        async with opened({"step": 0.004}) as service:
            seen: list[Any] = []
            service.subscribe(seen.append)
            job = asyncio.create_task(answer(service, PROMPTS[30], greedy(80), request_id="mine"))
            await eventually(lambda: service._counters.engine.running)
            await strike(service, signal.SIGKILL)
            await job
            ended = [one for one in seen if isinstance(one, RequestEvent) and one.kind == "finished"]
            told = [(one.id, one.reason, one.output_tokens, one.restarts) for one in ended]
            assert told == [("mine", "length", 80, 1)]
            assert ended[0].ttft > 0 and len(ended[0].token_gaps) == 79 and ended[0].queue_seconds >= 0
            assert [one.kind for one in seen if isinstance(one, EngineEvent)] == ["died", "ready"]
            steps = [one for one in seen if type(one).__name__ == "StepEvent"]
            assert sum(one.tokens for one in steps) == 80
            assert any(one.prefill_tokens >= len(PROMPTS[30]) for one in steps) and any(one.decodes for one in steps)

    run(main())
