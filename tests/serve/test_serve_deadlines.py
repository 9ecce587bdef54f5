"""Deadlines at the front, in simulated time: nobody is ended who can still make it, and nobody is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from sim_service import answer, eventually, greedy, opened, run

from tokenmill.config import EngineConfig
from tokenmill.engine.request import State
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client import streams
from tokenmill.serve.engine_client.admission import Overloaded
from tokenmill.serve.engine_client.events import StepEvent
from tokenmill.serve.engine_client.remote_engine import EngineLoss
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.engine_client.streams import EXPIRY_GRACE, Stream
from tokenmill.serve.settings import ServeSettings

LONG = [7] * 1000  # a prompt that takes a second


@pytest.fixture(autouse=True)
def estimates_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SURE", 1.0)


class Front:
    """A service without a process behind it: this is its clock and its engine, which reads 1000 tokens a second."""

    def __init__(self, policy: str = "priority") -> None:
        self.now = 0.0
        self.service = Service(EngineConfig(model="none", skip_tokenizer_init=True, policy=policy), ServeSettings())
        self.service._remote.clock = lambda: self.now
        self.attach()
        for prefill in [100, 1000, 500, 200] * 5:  # how fast it is has to be learned
            self.step(prefill / 1000, prefill)

    def attach(self) -> None:
        ready = wire.EngineReady(wire.VERSION, 1, 1000, 100_000, (2,), 64, 1000, "none", [])
        self.service.engine_ready(ready, lambda message: None)

    async def submit(self, prompt: list[int] = LONG, **options: Any) -> Stream:
        return await self.service.submit(prompt, greedy(5), **options)

    def key(self, stream: Stream) -> int:
        return self.service._remote._keys[stream.request_id]

    def step(self, seconds: float, prefill: int = 0, begins: Stream | None = None, cached: int = 0) -> None:
        """A step of so many seconds and so many tokens of prompts, the first one of the request that it begins."""
        self.now += seconds
        admitted = [] if begins is None else [wire.Admitted(self.key(begins), self.now - seconds, cached)]
        self.service.engine_stepped(wire.StepDone(1, self.now, seconds, 0, prefill, [], admitted))

    def say(self, stream: Stream, token: int = 5) -> None:
        update = wire.SequenceUpdate(self.key(stream), [token])
        self.service.engine_stepped(wire.StepDone(1, self.now, 0.0, 0, 0, [update]))

    def is_late(self, stream: Stream) -> bool:
        """After a look at deadlines at this moment."""
        self.service._dispatcher._end_late()
        return stream.request_state.finished and stream.request_state.sequences[0].finish == "deadline"


def test_a_prompt_that_is_being_read_is_late_only_by_what_is_left_of_it() -> None:
    async def main() -> None:
        front = Front()
        stream = await front.submit(timeout=1.5)
        front.now += 0.3
        front.step(0.1, 100, begins=stream)
        for _ in range(9):
            assert not front.is_late(stream)  # at 1.2 s the whole of it would not fit any more
            front.step(0.1, 100)
        assert not front.is_late(stream)
        front.say(stream)
        assert not front.is_late(stream) and stream.request_state.output().outputs[0].token_ids == [5]
        front.now += 0.21 + EXPIRY_GRACE
        assert front.is_late(stream) and "its deadline passed" in stream.request_state.leader.error

    run(main())


def test_a_prompt_that_cannot_be_read_in_time_is_ended_before_and_while_it_is_read() -> None:
    async def main() -> None:
        front = Front()
        reading = await front.submit(timeout=1.5)
        front.step(0.1, 100, begins=reading)
        waiting = await front.submit(timeout=1.4)
        front.now += 0.45
        assert front.is_late(waiting) and not front.is_late(reading)  # 1000 tokens, and 900
        front.now += 0.1
        assert front.is_late(reading)
        assert "its first token would take" in reading.request_state.leader.error
        assert not front.service._active

    run(main())


def test_what_the_prefix_cache_supplied_need_not_be_read() -> None:
    async def main() -> None:
        front = Front()
        stream = await front.submit(timeout=1.5)
        front.step(0.1, 100, begins=stream, cached=800)
        front.now = stream.request_state.leader.deadline - 0.11  # 100 are left
        assert not front.is_late(stream)
        front.now += 0.05
        assert front.is_late(stream)

    run(main())


def test_a_prompt_that_died_with_its_engine_is_read_from_its_start() -> None:
    async def main() -> None:
        front = Front()
        talking = await front.submit([5], timeout=3)
        front.step(0.001, 1, begins=talking)
        front.say(talking)
        reading = await front.submit(timeout=2)
        front.step(0.9, 900, begins=reading)
        front.service.engine_lost(EngineLoss("it broke"))
        assert front.service.stats().queued == 1 and front.service.stats().queued_tokens == 1000
        front.attach()
        assert not front.is_late(reading)
        front.now += 0.2
        assert front.is_late(reading) and not front.is_late(talking)
        await talking.aclose()
        assert front.service.stats().queued == front.service.stats().queued_tokens == 0

    run(main())


@pytest.mark.parametrize(
    ("policy", "before"),
    [
        ("priority", {"realtime": False, "api": True}),
        ("fcfs", {"realtime": True, "api": True}),
        ("sjf", {"api": False, "realtime": False}),  # it may be the shorter one
    ],
)
def test_only_who_is_served_earlier_counts_at_the_door(policy: str, before: dict[str, bool]) -> None:
    async def main() -> None:
        front = Front(policy)
        for _ in range(5):
            await keep(front.submit(priority="batch"))
        await keep(front.submit(priority="api"))
        for priority, refused in before.items():
            if refused:
                with pytest.raises(Overloaded, match=r"the deadline is 1[.]5 s away"):
                    await front.submit(priority=priority, timeout=1.5)
            else:
                await keep(front.submit(priority=priority, timeout=1.5))

    streams: list[Stream] = []

    async def keep(coming: Any) -> None:
        streams.append(await coming)

    run(main())


def test_a_newcomer_is_taken_to_be_as_lucky_with_the_cache_as_others_were() -> None:
    async def main() -> None:
        front = Front()
        first = await front.submit()
        with pytest.raises(Overloaded, match=r"the deadline is 0[.]5 s away"):
            await front.submit(timeout=0.5)
        front.step(0.1, 100, begins=first, cached=900)
        second = await front.submit(timeout=0.5)
        assert not front.is_late(second)
        front.step(0.1, 100, begins=second, cached=0)  # it was not, and now that is known
        assert front.is_late(second)
        await first.aclose()

    run(main())


def test_an_idle_engine_takes_who_seems_to_be_late() -> None:
    """An estimate that is too high would stay so for ever if it kept everybody away."""

    async def main() -> None:
        front = Front()
        for _ in range(50):
            front.step(100.0, 100)  # a machine that was asleep
        stream = await front.submit([5], timeout=0.2)
        with pytest.raises(Overloaded, match=r"the deadline is 0[.]2 s away"):
            await front.submit([5], timeout=0.2)
        front.step(0.001, 1, begins=stream)
        assert not front.is_late(stream)
        front.say(stream)
        assert stream.request_state.output().outputs[0].token_ids == [5]
        await stream.aclose()

    run(main())


def test_the_time_that_a_prompt_is_prepared_counts() -> None:
    async def main() -> None:
        front = Front()
        prepare = front.service._processor.prepare

        def slow(*args: Any, **options: Any) -> Any:
            front.now += 0.4
            return prepare(*args, **options)

        front.service._processor.prepare = slow  # type: ignore[method-assign]
        began = front.now
        stream = await front.submit(timeout=1.5)
        assert stream.request_state.leader.deadline == pytest.approx(began + 1.5)
        with pytest.raises(Overloaded, match="the deadline is 0 s away"):
            await front.submit([5], timeout=0.1)
        await stream.aclose()

    run(main())


def test_a_reader_that_fails_does_not_end_the_watch_over_deadlines() -> None:
    async def main() -> None:
        front = Front()
        first, second = await front.submit([5], timeout=1), await front.submit([5], timeout=1)

        def fail() -> None:
            raise RuntimeError("a reader's bug")

        first.set_listener(fail)
        front.now += 1 + EXPIRY_GRACE + 0.01
        with pytest.raises(RuntimeError, match="a reader's bug"):
            front.service._dispatcher._end_late()
        await eventually(lambda: second.request_state.finished)
        assert second.request_state.sequences[0].finish == "deadline"

    run(main())


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_tells_that_it_has_begun_before_the_first_token(overlap: bool) -> None:
    async def main() -> None:
        async with opened({}, overlap) as service:
            seen: list[tuple[Any, ...]] = []  # at each step, before the first token

            def look(event: Any) -> None:
                for one in service.leaders() if isinstance(event, StepEvent) else []:
                    if not one.num_output:
                        queued = service.stats().queued, service.stats().queued_tokens
                        seen.append((one.state, one.metrics.first_scheduled is not None, queued))

            service.subscribe(look)
            assert len((await answer(service, [8] * 2000, greedy(3))).outputs[0].token_ids) == 3  # eight steps
            assert len(seen) >= 7 and set(seen) == {(State.RUNNING, True, (0, 0))}
            again = await answer(service, [8] * 2000, greedy(3))
            assert again.num_cached_tokens >= 1900 and service._admission.uncached_tokens(2000) <= 100

    run(main())


def test_nobody_is_ended_because_an_estimate_is_a_little_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    async def main() -> None:
        front = Front()
        stream = await front.submit(timeout=1.2)
        front.now += 0.3  # the rest is 0.9 s, and the prompt is expected to take 1 s: it may take less
        assert not front.is_late(stream)
        front.now += 0.2
        assert front.is_late(stream)

    run(main())
