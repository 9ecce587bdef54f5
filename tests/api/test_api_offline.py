"""LLM: streams, interruption, deadlines, bounded queues, failing steps and broken models lose no other request."""

from __future__ import annotations

import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from api_engines import GREEDY, PROMPT, assert_idle, ids, open_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.errors import TokenmillError

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
BAD = 125  # a token that no prompt below holds
PROMPTS = [[(17 * i + 7 * j) % 120 + 3 for j in range(5 + 3 * i)] for i in range(12)]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tiny: LLM):
    yield
    tiny.reset_prefix_cache()
    assert_idle(tiny._processor.engine)


def solo(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [ids(llm, prompt, params) for prompt in PROMPTS]


def together(llm: LLM, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, **options)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    return [output.outputs[0].token_ids for output in outputs]


# Streams


def test_a_stream_is_the_answer_so_far_at_every_step(tiny: LLM) -> None:
    outputs = list(tiny.stream(PROMPT, GREEDY))
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [ids(tiny, PROMPT)[: i + 1] for i in range(12)]
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert [output.outputs[0].finish_reason for output in outputs] == [None] * 11 + ["length"]


def test_closing_a_stream_frees_its_memory_and_spoils_nothing(tiny: LLM) -> None:
    expected = solo(tiny)
    stream = tiny.stream([9] * 100, LONG)
    assert not next(stream).finished
    stream.close()
    scheduler = tiny._processor.engine.scheduler
    assert not scheduler.running and not scheduler.requests
    scheduler.check_integrity()
    assert together(tiny) == expected


def test_streams_and_generate_can_be_mixed(tiny: LLM) -> None:
    expected = ids(tiny, PROMPT)
    streams = [tiny.stream(PROMPT, GREEDY) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert together(tiny) == solo(tiny)  # runs the streams to their ends, too
    for stream in streams:
        (*_, last) = stream
        assert last.finished and last.outputs[0].token_ids == expected


def test_a_stream_that_is_never_read_costs_nothing(tiny: LLM) -> None:
    tiny.stream(PROMPT, LONG)
    assert not tiny._processor.engine.has_work


# Interruption


def meanwhile(method: Callable[..., Any], at: int, action: Callable[[], None]) -> Callable[..., Any]:
    """The method, with something happening during its `at`-th call, before it does its work."""
    calls = 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            action()
        return method(*args)

    return call


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Presses Ctrl-C `times` times during the `at`-th launch of an engine."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(llm: LLM, at: int, times: int = 1) -> None:
        def action() -> None:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

        runner = llm._processor.engine.runner
        monkeypatch.setattr(runner, "launch", meanwhile(runner.launch, at, action))

    yield press
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_interrupted_generate_cancels_everything_and_the_engine_stays_usable(
    tiny_model: str, ctrl_c: Callable[..., None], at: int, overlap: bool
) -> None:
    # 24 blocks: whatever an interrupted step left behind would be missed, or found unfilled in the prefix cache
    with open_tiny(tiny_model, block_size=8, max_model_len=128, kv_cache_memory=24 * 8 * 512, overlap=overlap) as llm:
        expected = solo(llm)
        llm.reset_prefix_cache()
        ctrl_c(llm, at)
        with pytest.raises(KeyboardInterrupt):
            together(llm, LONG)
        scheduler = llm._processor.engine.scheduler
        assert not scheduler.requests and not llm._processor._states
        scheduler.check_integrity()
        assert together(llm) == expected
        llm.reset_prefix_cache()
        assert_idle(llm._processor.engine)


def test_an_interrupted_stream_ends_and_the_engine_stays_usable(tiny: LLM, ctrl_c: Callable[..., None]) -> None:
    expected = ids(tiny, PROMPT)
    stream = tiny.stream(PROMPT, LONG)
    ctrl_c(tiny, 5)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert not tiny._processor.engine.scheduler.requests
    assert ids(tiny, PROMPT) == expected


def test_an_interrupt_that_tears_a_step_shuts_the_engine_down(tiny_model: str, ctrl_c: Callable[..., None]) -> None:
    llm = open_tiny(tiny_model)
    ctrl_c(llm, 3, times=3)
    with pytest.raises(KeyboardInterrupt):
        together(llm, LONG)
    with pytest.raises(TokenmillError, match="was shut down"):
        together(llm)


def test_an_error_between_steps_cancels_everything(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    expected = solo(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(tiny._processor, "take_in", meanwhile(tiny._processor.take_in, 5, interrupt))
        with pytest.raises(KeyboardInterrupt):
            together(tiny, LONG)
    assert not tiny._processor.engine.scheduler.requests and not tiny._processor._states
    assert together(tiny) == expected


# Failing steps


def out_of_luck() -> None:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_step_that_fails_once_changes_no_tokens(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, at: int, overlap: bool
) -> None:
    params = [GREEDY if i % 2 else SamplingParams(temperature=1.0, seed=i, max_tokens=12) for i in range(len(PROMPTS))]
    with open_tiny(tiny_model, overlap=overlap) as llm:
        expected = together(llm, params)
        llm.reset_prefix_cache()
        runner = llm._processor.engine.runner
        monkeypatch.setattr(runner, "launch", meanwhile(runner.launch, at, out_of_luck))
        assert together(llm, params) == expected
        assert llm._processor.engine.scheduler.stats.failed_steps == 1
        llm.reset_prefix_cache()
        assert_idle(llm._processor.engine)


def test_a_request_that_breaks_every_step_fails_alone_with_the_cause(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = solo(tiny)
    tiny.reset_prefix_cache()
    launch = tiny._processor.engine.runner.launch

    def allergic(step: Any) -> Any:
        if any(BAD in request.tokens[: request.prompt_len] for request in step.requests):
            raise RuntimeError("allergic to 125")
        return launch(step)

    monkeypatch.setattr(tiny._processor.engine.runner, "launch", allergic)
    *others, broken = tiny.generate([*PROMPTS, [5, BAD, 6]], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in others] == expected
    assert broken.outputs[0].finish_reason == "error" and broken.outputs[0].token_ids == []
    assert "allergic to 125" in (broken.error or "") and "alone" in (broken.error or "")


# Broken weights


def test_a_model_that_says_nan_fails_the_requests_that_touch_it_and_no_others(tiny_model: str) -> None:
    with open_tiny(tiny_model) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={BAD: -100})
        clean = together(llm, params)
        runner = llm._processor.engine.runner
        assert isinstance(runner, TorchRunner)
        runner.decoder.weights.embed[BAD] = float("nan")
        poisoned = [[BAD], [5, 6, BAD, 7], [9] * 40 + [BAD]]
        prompts = [prompt for pair in zip(PROMPTS, poisoned * 4, strict=True) for prompt in pair]
        for _ in range(2):  # the second time over blocks that held NaN
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs[::2]] == clean
            for output in outputs[1::2]:
                assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []
                assert "not finite" in (output.error or "") and "dtype float32" in (output.error or "")
            llm.reset_prefix_cache()
        assert_idle(llm._processor.engine)


def test_beams_and_several_answers_fail_as_one_when_the_model_says_nan(tiny_model: str) -> None:
    with open_tiny(tiny_model) as llm:
        runner = llm._processor.engine.runner
        assert isinstance(runner, TorchRunner)
        runner.decoder.weights.embed[BAD] = float("nan")
        params = [SamplingParams(beam_width=3), SamplingParams(n=3, seed=1), GREEDY]
        beams, several, fine = llm.generate([[BAD, 5], [BAD, 5], PROMPT], params, use_tqdm=False)
        assert [one.finish_reason for one in beams.outputs] == ["error"] and "not finite" in (beams.error or "")
        assert [one.finish_reason for one in several.outputs] == ["error"] * 3 and several.error
        assert fine.outputs[0].finish_reason == "length" and fine.error is None
        llm.reset_prefix_cache()
        assert_idle(llm._processor.engine)


# Queues, deadlines, priorities


@pytest.mark.parametrize("bound", [{"max_queued_requests": 1}, {"max_queued_tokens": 40}])
def test_generate_feeds_a_queue_smaller_than_its_prompts(tiny_model: str, tiny: LLM, bound: dict[str, int]) -> None:
    with open_tiny(tiny_model, max_num_seqs=2, **bound) as llm:
        assert together(llm) == solo(tiny)
        assert llm._processor.engine.scheduler.stats.rejected > 0  # the bound was felt


def test_a_deadline_ends_a_request_with_what_it_has(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(tiny, PROMPT, LONG)
    clock = iter(range(10_000_000))
    monkeypatch.setattr(tiny._processor.engine, "clock", lambda: float(next(clock)))
    output = tiny.generate([PROMPT], LONG, use_tqdm=False, timeout=100)[0]
    tokens = output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "deadline" and "deadline passed" in (output.error or "")
    assert 0 < len(tokens) < 200 and tokens == expected[: len(tokens)]


def test_a_deadline_passes_in_the_queue_as_well(tiny_model: str) -> None:
    with open_tiny(tiny_model, max_num_seqs=1) as llm:
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        started = time.monotonic()
        output = llm.generate([PROMPT], GREEDY, use_tqdm=False, timeout=0.02)[0]
        assert output.outputs[0].finish_reason == "deadline" and output.outputs[0].token_ids == []
        assert time.monotonic() - started < 60
        assert len(list(stream)[-1].outputs[0].token_ids) == 200


def test_a_deadline_that_is_kept_changes_nothing(tiny: LLM) -> None:
    assert ids(tiny, PROMPT, timeout=60.0) == ids(tiny, PROMPT)


def test_the_important_are_served_first(tiny_model: str) -> None:
    with open_tiny(tiny_model, max_num_seqs=1) as llm:
        blocker = llm.stream([8, 8], LONG, priority="realtime")
        next(blocker)  # holds the only row while the others queue, least important first
        names = ("batch", "api", "realtime")
        asked = [llm._processor.prepare(PROMPT, GREEDY, priority=name, request_id=name) for name in names]
        for one in asked:
            llm._processor.submit(one)
        finished: list[str] = []
        while len(finished) < 3:
            finished += [one.id for one in llm._processor.step() if one.finished and one in asked]
        assert finished == ["realtime", "api", "batch"]


def test_every_priority_gives_the_same_tokens(tiny: LLM) -> None:
    assert len({tuple(ids(tiny, PROMPT, priority=priority)) for priority in ("realtime", "api", "batch", 0, 2)}) == 1


# Life and end


def test_metrics_tell_when_things_happened(tiny: LLM) -> None:
    before = time.monotonic()
    metrics = tiny.generate([PROMPT], GREEDY, use_tqdm=False)[0].metrics
    assert metrics.first_scheduled is not None and metrics.finished is not None
    times = [before, metrics.arrival, metrics.first_scheduled, *metrics.token_times, metrics.finished, time.monotonic()]
    assert times == sorted(times) and len(metrics.token_times) == 12
    assert metrics.queue_seconds is not None and metrics.ttft is not None and metrics.tpot is not None
    assert metrics.preemptions == 0


def test_the_plan_is_told_line_by_line(tiny: LLM) -> None:
    text = "\n".join(tiny.plan_lines())
    for word in ("model", "device", "weights", "kv cache", "activations", "workspace", "in all", "block_size = 16"):
        assert word in text
    assert "max_num_seqs = 8  (as set)" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_counts_this_calls_requests_only_and_only_at_a_terminal(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    pytest.importorskip("tqdm")

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    stream = tiny.stream(PROMPT, GREEDY)
    next(stream)
    tiny.generate(PROMPTS, LONG, use_tqdm=True)
    assert ("12/12" in screen.getvalue().rsplit("\r", 1)[-1]) is terminal


def test_after_shutdown_every_call_says_so(tiny_model: str) -> None:
    llm = open_tiny(tiny_model)
    stream = llm.stream(PROMPT, LONG)
    unread = llm.stream(PROMPT, LONG)
    next(stream)
    llm.shutdown()
    llm.shutdown()  # once is enough, twice does no harm
    hello = [{"role": "user", "content": "hello"}]
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([PROMPT], GREEDY),
        lambda: llm.chat(hello),
        lambda: llm.stream(PROMPT),
        lambda: llm.apply_chat_template(hello),
        llm.reset_prefix_cache,
        llm.plan_lines,
        lambda: next(stream),
        lambda: next(unread),
    ]
    for call in calls:
        with pytest.raises(TokenmillError, match="was shut down; make a new one"):
            call()


def test_a_context_manager_shuts_down_also_after_an_error(tiny_model: str) -> None:
    with pytest.raises(ZeroDivisionError), open_tiny(tiny_model) as llm:
        assert len(ids(llm, PROMPT)) == 12
        raise ZeroDivisionError
    with pytest.raises(TokenmillError, match="was shut down"):
        llm.generate([PROMPT])


def test_a_shut_down_engine_gives_its_memory_back(tiny_model: str) -> None:
    import gc
    import weakref

    llm = open_tiny(tiny_model)
    ids(llm, PROMPT)
    runner = llm._processor.engine.runner
    assert isinstance(runner, TorchRunner)
    arena = weakref.ref(runner.state.arena)
    del runner
    llm.shutdown()
    gc.collect()
    assert arena() is None
