"""AsyncLLM: concurrent streams answer as alone; whoever leaves, lags, errs or dies harms nobody and hangs nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from api_engines import GREEDY, PROMPT, assert_idle, ids, open_tiny_async

from tokenmill import LLM, AsyncLLM, RequestOutput, SamplingParams
from tokenmill.errors import InvalidRequest, QueueFull, TokenmillError

LONG = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
PROMPTS = [[(17 * i + 7 * j) % 120 + 3 for j in range(3 + 2 * i)] for i in range(20)]
PATIENCE = 30.0  # seconds; anything that takes this long hangs


def run(main: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, PATIENCE)

    return asyncio.run(limited())


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def tokens_of(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    return (await last(llm.generate(prompt, params, **options))).outputs[0].token_ids


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


async def idle(llm: AsyncLLM) -> None:
    """Waits until the engine has nothing to do, and checks on its own thread that it holds nothing."""
    await eventually(lambda: not llm._processor.engine.has_work)
    await llm.reset_prefix_cache()
    await llm._call(lambda: assert_idle(llm._processor.engine))
    assert not llm._mail and not llm._processor._states


@pytest.fixture(scope="module")
def service(tiny_model: str) -> Iterator[AsyncLLM]:
    llm = open_tiny_async(tiny_model)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def expected(tiny: LLM) -> list[list[int]]:
    return [ids(tiny, prompt) for prompt in PROMPTS]


def test_concurrent_streams_equal_their_solo_answers(service: AsyncLLM, expected: list[list[int]]) -> None:
    async def follow(prompt: list[int]) -> list[int]:
        seen: list[int] = []
        async for output in service.generate(prompt, GREEDY):
            tokens = output.outputs[0].token_ids
            assert tokens[: len(seen)] == seen and len(tokens) > len(seen)
            seen = tokens
        assert output.finished and output.outputs[0].finish_reason == "length"
        return seen

    async def main() -> None:
        for _ in range(2):
            assert await asyncio.gather(*map(follow, PROMPTS)) == expected
        await idle(service)

    run(main())


def test_chat_and_text_come_through_the_async_twin(text_model: str, texter: LLM) -> None:
    async def main(llm: AsyncLLM) -> None:
        output = await last(llm.generate("mill", GREEDY))
        assert output.outputs[0].text == texter.generate("mill", GREEDY, use_tqdm=False)[0].outputs[0].text
        with pytest.raises(InvalidRequest, match="no chat template"):
            await last(llm.chat([{"role": "user", "content": "hello"}], GREEDY))

    llm = open_tiny_async(text_model, skip_tokenizer_init=False)
    run(main(llm))
    llm.shutdown()


# Leaving


def test_a_cancelled_task_frees_its_memory_within_a_step(service: AsyncLLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(tokens_of(service, PROMPT, LONG))
        scheduler = service._processor.engine.scheduler
        await eventually(lambda: bool(scheduler.running) and scheduler.running[0].num_output > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Commands are taken before every step, so by the time this one is answered the request is gone.
        assert await service._call(lambda: (list(scheduler.running), list(scheduler.requests))) == ([], [])
        await idle(service)

    run(main())


def test_a_task_cancelled_before_its_request_began_leaves_nothing(service: AsyncLLM) -> None:
    async def main() -> None:
        for pause in range(4):
            tasks = [asyncio.create_task(tokens_of(service, PROMPT, LONG)) for _ in range(10)]
            for _ in range(pause):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            assert all(isinstance(end, BaseException) for end in await asyncio.gather(*tasks, return_exceptions=True))
            steps = service._processor.engine.scheduler.stats.steps
            await idle(service)
            assert service._processor.engine.scheduler.stats.steps - steps < 100  # nobody went on to the full length

    run(main())


def test_closing_or_abandoning_an_iterator_cancels_its_request(service: AsyncLLM) -> None:
    async def main() -> None:
        async with aclosing(service.generate(PROMPT, LONG)) as stream:
            assert not (await anext(stream)).finished
        await idle(service)
        abandoned = service.generate(PROMPT, LONG)
        await anext(abandoned)
        del abandoned
        gc.collect()
        await idle(service)

    run(main())


def test_those_who_stay_are_not_touched_by_those_who_leave(service: AsyncLLM, expected: list[list[int]]) -> None:
    async def leaver(prompt: list[int], after: int) -> None:
        async with aclosing(service.generate(prompt, LONG)) as stream:
            for _ in range(after):
                await anext(stream)

    async def main() -> None:
        leavers = [leaver(prompt, i % 7 + 1) for i, prompt in enumerate(PROMPTS)]
        answers = await asyncio.gather(*(tokens_of(service, prompt) for prompt in PROMPTS), *leavers)
        assert answers[: len(PROMPTS)] == expected
        await idle(service)

    run(main())


# Erring


def test_an_invalid_request_raises_in_its_task_only(service: AsyncLLM, expected: list[list[int]]) -> None:
    async def main() -> None:
        bad = [service.generate([5, 4000], GREEDY), service.generate([], GREEDY), service.generate(PROMPT, "greedy")]
        good = [tokens_of(service, prompt) for prompt in PROMPTS]
        ends = await asyncio.gather(*map(last, bad), *good, return_exceptions=True)
        assert all(isinstance(end, InvalidRequest) for end in ends[:3])
        assert "token id 4000" in str(ends[0]) and "empty" in str(ends[1]) and "SamplingParams" in str(ends[2])
        assert ends[3:] == expected
        await idle(service)

    run(main())


def test_a_full_queue_refuses_and_takes_again_when_it_has_drained(tiny_model: str) -> None:
    async def main(llm: AsyncLLM) -> None:
        streams = [llm.generate(PROMPT, LONG) for _ in range(4)]
        outputs = await asyncio.gather(*map(anext, streams[:1]))
        assert not outputs[0].finished
        ends = await asyncio.gather(*(tokens_of(llm, PROMPT) for _ in range(6)), return_exceptions=True)
        refused = [end for end in ends if isinstance(end, QueueFull)]
        assert len(refused) == 4 and "max_queued_requests" in str(refused[0])
        assert [end for end in ends if not isinstance(end, QueueFull)] == [await tokens_of(llm, PROMPT)] * 2
        for stream in streams:
            await stream.aclose()
        await idle(llm)

    llm = open_tiny_async(tiny_model, max_num_seqs=1, max_queued_requests=2)
    run(main(llm))
    llm.shutdown()


def test_a_taken_request_id_is_refused_and_hurts_not_its_owner(service: AsyncLLM, expected: list[list[int]]) -> None:
    async def main() -> None:
        owner = service.generate(PROMPTS[3], LONG, request_id="mine")  # a short answer may be over too soon
        await anext(owner)
        with pytest.raises(InvalidRequest, match="'mine' is already running"):
            await tokens_of(service, PROMPT, request_id="mine")
        assert (await last(owner)).outputs[0].token_ids[: len(expected[3])] == expected[3]
        assert await tokens_of(service, PROMPTS[3], request_id="mine") == expected[3]
        await idle(service)

    run(main())


# Lagging


def test_a_slow_reader_gets_the_newest_and_the_last_output_and_delays_nobody(service: AsyncLLM) -> None:
    async def main() -> None:
        stream = service.generate(PROMPT, LONG)
        first = await anext(stream)
        quick = await tokens_of(service, PROMPT)  # served while the slow one does not read
        await eventually(lambda: not service._processor.engine.has_work)
        final = await anext(stream)
        assert not first.finished and final.finished and final.outputs[0].token_ids[:12] == quick
        assert len(final.outputs[0].token_ids) == 512 - len(PROMPT)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await idle(service)

    run(main())


def test_the_last_output_is_never_lost_between_threads(service: AsyncLLM) -> None:
    """Readers that empty their mailbox all the time, while the engine fills it."""

    async def main() -> None:
        short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for _ in range(10):
            answers = await asyncio.gather(*(tokens_of(service, [5 + i], short) for i in range(30)))
            assert all(len(answer) == 3 for answer in answers)

    run(main())


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="this system does not tell a thread's CPU time")
def test_an_idle_engine_burns_no_cpu(service: AsyncLLM) -> None:
    async def main() -> None:
        await tokens_of(service, PROMPT)
        await idle(service)
        clock = await service._call(lambda: time.pthread_getcpuclockid(threading.get_ident()))
        before = time.clock_gettime(clock)
        await asyncio.sleep(0.5)
        assert time.clock_gettime(clock) - before < 0.02

    run(main())


# Ending


def test_shutdown_raises_in_every_running_task(tiny_model: str) -> None:
    async def main() -> None:
        llm = open_tiny_async(tiny_model)
        tasks = [asyncio.create_task(tokens_of(llm, prompt, LONG)) for prompt in PROMPTS]
        await eventually(lambda: bool(llm._processor.engine.scheduler.running))
        late = [asyncio.create_task(tokens_of(llm, PROMPT, LONG)) for _ in range(5)]
        await asyncio.sleep(0)  # these have asked and were not heard yet
        llm.shutdown()
        for end in await asyncio.gather(*tasks, *late, return_exceptions=True):
            assert isinstance(end, TokenmillError) and "shut down" in str(end)
        with pytest.raises(TokenmillError, match=r"has stopped \(it was shut down\); make a new one"):
            await tokens_of(llm, PROMPT)
        with pytest.raises(TokenmillError, match="has stopped"):
            await llm.reset_prefix_cache()
        llm.shutdown()

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_engine_thread_reaches_everybody_who_waits(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        llm = open_tiny_async(tiny_model)
        waiting = [asyncio.create_task(tokens_of(llm, prompt, LONG)) for prompt in PROMPTS]
        await eventually(lambda: bool(llm._processor.engine.scheduler.running))

        def die(*_: Any) -> None:
            raise AssertionError("the books are wrong")

        monkeypatch.setattr(llm._processor.engine.scheduler, "schedule", die)
        waiting += [asyncio.create_task(tokens_of(llm, PROMPT)) for _ in range(5)]
        for end in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(end, TokenmillError) and "the books are wrong" in str(end)
        with pytest.raises(TokenmillError, match="the books are wrong"):
            await tokens_of(llm, PROMPT)
        llm.shutdown()

    run(main())


def test_tasks_of_an_event_loop_that_ended_do_not_keep_the_engine_busy(service: AsyncLLM) -> None:
    async def abandon() -> None:
        for prompt in PROMPTS:
            asyncio.create_task(tokens_of(service, prompt, LONG))  # noqa: RUF006
        await asyncio.sleep(0.02)

    async def main() -> None:
        await idle(service)

    steps = service._processor.engine.scheduler.stats.steps
    run(abandon())
    run(main())
    assert service._processor.engine.scheduler.stats.steps - steps < 200
