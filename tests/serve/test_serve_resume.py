"""A real model behind a killed engine goes on as if nothing had happened; and who is blamed for a crash."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from sim_service import embed, eventually, run

from tokenmill import LLM
from tokenmill.config import EngineConfig
from tokenmill.engine.request import Finish, Request
from tokenmill.outputs import RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.remote_engine import CRASH_WEIGHT, KILL_WEIGHT, EngineLoss, RemoteEngine
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.settings import ServeSettings

# float64 makes rounding differences between batch shapes far smaller than any gap between logits: equal means equal.
TINY: dict[str, Any] = {"load_format": "dummy", "dtype": "float64", "device": "cpu", "skip_tokenizer_init": True}
LENGTH = {"max_tokens": 120, "ignore_eos": True}
CASES = [
    SamplingParams(temperature=0, **LENGTH),
    SamplingParams(temperature=1, seed=1, **LENGTH),
    SamplingParams(temperature=1.3, seed=2, top_p=0.9, top_k=40, min_p=0.01, **LENGTH),
    SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, **LENGTH),
    SamplingParams(temperature=1, seed=4, n=3, **LENGTH),
    SamplingParams(temperature=0.7, seed=5, logprobs=3, prompt_logprobs=2, **LENGTH),
    SamplingParams(temperature=1, seed=6, logit_bias={7: 5.0}, bad_words_ids=[[9, 10]], min_tokens=30, max_tokens=90),
    SamplingParams(temperature=1, seed=8, best_of=3, n=1, **LENGTH),
]
PROMPTS = [[(17 * i + 7 * j) % 120 + 3 for j in range(4 + 9 * i)] for i in range(len(CASES))]


def plain(output: RequestOutput) -> tuple[Any, ...]:
    """What a user can see of an answer, but for the times."""
    rounded = [
        [{token: round(one.logprob, 9) for token, one in table.items()} for table in answer.logprobs or []]
        for answer in output.outputs
    ]
    first = [
        table and {token: round(one.logprob, 9) for token, one in table.items()}
        for table in output.prompt_logprobs or []
    ]
    ends = [(answer.token_ids, answer.finish_reason, answer.stop_reason) for answer in output.outputs]
    sums = [round(answer.cumulative_logprob or 0.0, 6) for answer in output.outputs]
    return ends, sums, rounded, first, output.finished, output.error


async def follow(service: Service, index: int, progress: Callable[[int], None]) -> tuple[Any, ...]:
    seen: list[list[int]] = []
    async for output in await service.submit(PROMPTS[index], CASES[index]):
        tokens = [one.token_ids for one in output.outputs]
        if CASES[index].best_of is None:  # the best of several is chosen anew at the end
            assert all(new[: len(old)] == old for old, new in zip(seen, tokens))
        seen = tokens
        progress(max(map(len, tokens)))
    return plain(output)


def test_a_real_model_goes_on_with_exactly_the_tokens_of_an_undisturbed_run(tiny_model: str) -> None:
    with LLM(tiny_model, **TINY) as llm:
        undisturbed = [plain(output) for output in llm.generate(PROMPTS, CASES, use_tqdm=False)]

    async def main() -> None:
        service = Service(EngineConfig(model=tiny_model, **TINY), ServeSettings())
        await service.start()
        assert service.facts.vocab_size == 128 and service.facts.max_len == 512

        async def all_of_them(progress: Callable[[int], None]) -> list[tuple[Any, ...]]:
            return await asyncio.gather(*(follow(service, index, progress) for index in range(len(CASES))))

        vectors = await embed(service, PROMPTS)
        shot: list[int] = []

        def shoot(length: int) -> None:
            """Once, when answers are well under way."""
            if length >= 40 and not shot:
                shot.append(service._supervisor.pid)
                os.kill(shot[0], signal.SIGKILL)

        disturbed = await all_of_them(shoot)
        assert shot and service.stats().restarts == 1
        assert disturbed == undisturbed
        assert await all_of_them(lambda length: None) == undisturbed
        for before, after in zip(vectors, await embed(service, PROMPTS), strict=True):
            assert after == pytest.approx(before, rel=1e-9)  # sums depend on who shares a step
        await eventually(lambda: not service._counters.engine.running)
        await service.stop()

    run(main())


# Who is blamed. A remote engine without any process.


class Bench:
    """A RemoteEngine and the messages that it sent to the engine of the moment."""

    def __init__(self) -> None:
        self.remote = RemoteEngine(clock=lambda: 0.0)
        self.sent: list[wire.ToEngine] = []
        self.remote.attach(self.sent.append)

    def add(self, *names: str) -> None:
        for name in names:
            self.remote.add(Request(name, [1, 2], SamplingParams(), max_tokens=50, seed=0))

    def key(self, name: str) -> int:
        return self.remote._keys[name]

    def lose(self, *names: str, weight: float = CRASH_WEIGHT) -> None:
        self.remote.lose(EngineLoss("it broke", weight, tuple(self.key(name) for name in names)))
        self.sent.clear()
        self.remote.attach(self.sent.append)

    def say(self, name: str, token: int = 5) -> None:
        key = self.key(name)
        update, admitted = wire.SequenceUpdate(key, [token]), wire.Admitted(key, 0.0, 0)
        self.remote.take_in(wire.StepDone(1, 0.0, 0.0, 1, 0, [update], [admitted]))

    def begin(self, name: str, cached: int = 0, prefill: int = 0) -> None:
        """The engine is in the prompt of this one, with so many tokens of prompts in its step."""
        admitted = wire.Admitted(self.key(name), 0.0, cached)
        self.remote.take_in(wire.StepDone(1, 0.0, 0.0, 0, prefill, [], [admitted]))

    @property
    def submitted(self) -> list[int]:
        return [one.key for message in self.sent if isinstance(message, wire.Submit) for one in message.sequences]


def test_everything_unfinished_goes_to_the_next_engine_with_what_it_said() -> None:
    bench = Bench()
    bench.add("a", "b", "c")
    bench.say("a", 7)
    bench.say("a", 8)
    bench.remote.cancel("b")
    bench.lose()
    messages = [one for one in bench.sent if isinstance(one, wire.Submit)]
    assert [one.sequences[0].output for one in messages] == [[7, 8], []]
    assert all(one.prompt == [1, 2] for one in messages)


def test_log_probabilities_of_a_prompt_are_asked_for_until_they_are_there() -> None:
    bench = Bench()
    bench.remote.add(Request("a", [1, 2], SamplingParams(prompt_logprobs=1), max_tokens=50, seed=0))
    bench.begin("a")  # they come with the first token
    bench.lose()
    assert [one.params.prompt_logprobs for one in bench.sent] == [1]
    bench.say("a")
    bench.lose()
    assert [one.params.prompt_logprobs for one in bench.sent] == [None]


def test_a_crash_at_the_same_spot_twice_is_tried_alone_then_convicted() -> None:
    bench = Bench()
    bench.add("bad", "good")
    bench.lose("bad", "good")
    assert len(bench.submitted) == 2  # once proves nothing
    bench.say("good")
    bench.lose("bad", "good")
    assert bench.submitted == [bench.key("bad")]  # good had got on in between
    bench.add("late")
    assert bench.submitted == [bench.key("bad")]  # a trial is not disturbed
    bench.lose("bad")
    ended = [delta for delta in bench.remote.step() if delta.finished]
    assert [(one.request.id, one.request.finish, "it broke" in one.request.error) for one in ended] == [
        ("bad", Finish.ERROR, True)
    ]
    assert bench.submitted == [bench.key("good"), bench.key("late")]


def test_a_suspect_that_gets_on_alone_is_acquitted_and_the_next_one_has_the_engine_to_itself() -> None:
    bench = Bench()
    bench.add("a", "b", "c")
    bench.lose("a", "b")
    bench.lose("a", "b")
    first = bench.key("a")
    assert bench.submitted == [first]
    bench.say("a")
    assert isinstance(bench.sent[1], wire.Cancel) and bench.sent[1].key == first
    assert bench.key("a") != first and bench.submitted == [first, bench.key("b")]
    stale = wire.SequenceUpdate(first, [9], finish="cancelled")  # what the engine still says of it
    bench.remote.take_in(wire.StepDone(2, 0.0, 0.0, 1, 0, [stale]))
    bench.say("b")
    assert set(bench.submitted[2:]) == {bench.key("a"), bench.key("c")}
    again = next(one for one in bench.sent[3:] if isinstance(one, wire.Submit) and one.sequences[0].output)
    assert again.sequences[0].output == [5]


def test_progress_between_crashes_clears_a_request() -> None:
    bench = Bench()
    bench.add("a", "b")
    for _ in range(6):
        bench.lose("a", "b")
        assert len(bench.submitted) == 2
        bench.say("a")
        bench.say("b")


@pytest.mark.parametrize("company", [0, 1, 2, 3])
def test_a_kill_from_outside_weighs_half(company: int) -> None:
    bench = Bench()
    bench.add("a", "b")
    for _ in range(company):
        bench.lose("a", "b", weight=KILL_WEIGHT)
        assert len(bench.submitted) == 2
    if company == 3:
        bench.lose("a", "b", weight=KILL_WEIGHT)
        assert len(bench.submitted) == 1
        bench.lose("a", weight=KILL_WEIGHT)
        assert not bench.remote.step() and bench.submitted == [bench.key("a")]
        bench.lose("a", weight=KILL_WEIGHT)
        assert [one.request.id for one in bench.remote.step()] == ["a"]


def test_a_request_in_two_launched_steps_is_blamed_once() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.lose("a", "b", "a", "b")
    assert len(bench.submitted) == 2


def test_who_was_not_in_flight_is_not_suspected() -> None:
    bench = Bench()
    bench.add("a", "b")
    for _ in range(5):
        bench.lose()
    assert len(bench.submitted) == 2


def test_a_cancelled_suspect_ends_its_trial() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.lose("a")
    bench.lose("a")
    assert bench.submitted == [bench.key("a")]
    bench.remote.cancel("a")
    assert bench.submitted[-1] == bench.key("b")


def test_siblings_travel_together_until_one_of_them_has_said_something() -> None:
    bench = Bench()
    leader, sibling = (Request(f"a{i}", [1, 2], SamplingParams(n=2), max_tokens=9, seed=i) for i in range(2))
    leader.followers = [sibling]
    bench.remote.add(leader)
    bench.lose()
    assert [len(one.sequences) for one in bench.sent] == [2]
    bench.begin("a0")
    assert bench.remote.queued == 1 and bench.remote.queued_tokens == 0
    bench.lose()  # with the prompt that they share
    assert [len(one.sequences) for one in bench.sent] == [2]
    assert bench.remote.queued == 2 and bench.remote.queued_tokens == 2
    bench.say("a0")
    bench.lose()
    assert [len(one.sequences) for one in bench.sent] == [1, 1]
    assert bench.remote.queued == 1 and bench.remote.queued_tokens == 0
