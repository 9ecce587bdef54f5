"""One request cannot hurt another: not by bad numbers, by its id, by an old deadline, or by asking in a storm."""

from __future__ import annotations

import asyncio

import pytest
from api_engines import GREEDY, assert_idle, open_tiny, open_tiny_async

from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest, QueueFull

SHARED = list(range(3, 35))  # two blocks
POISON = 100


@pytest.fixture
def poisoned(tiny_model: str) -> LLM:
    llm = open_tiny(tiny_model)
    llm._built.engine.runner.decoder.weights.embed[POISON] = float("nan")  # type: ignore[attr-defined]
    return llm


@pytest.mark.parametrize("overlap", [False, True])
def test_not_finite_logits_do_not_spread_through_the_prefix_cache(tiny_model: str, overlap: bool) -> None:
    llm = open_tiny(tiny_model, overlap=overlap)
    expected = llm.generate([[*SHARED, 50]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    llm._built.engine.runner.decoder.weights.embed[POISON] = float("nan")  # type: ignore[attr-defined]
    bad = llm.generate([[*SHARED, POISON]], GREEDY, use_tqdm=False)[0]
    assert bad.outputs[0].finish_reason == "error" and "not finite" in (bad.error or "")
    after = llm.generate([[*SHARED, 50]], GREEDY, use_tqdm=False)[0]
    assert (after.outputs[0].finish_reason, after.outputs[0].token_ids) == ("length", expected)
    llm.reset_prefix_cache()
    together = llm.generate([[*SHARED, POISON], [*SHARED, 50]], GREEDY, use_tqdm=False)
    assert together[0].outputs[0].finish_reason == "error"
    assert together[1].outputs[0].token_ids == expected
    assert_idle(llm._built.engine)


def test_a_request_that_started_on_bad_blocks_is_tried_once_on_its_own(poisoned: LLM) -> None:
    """Both share the blocks; the sibling of n=2 must not be retried forever either."""
    params = SamplingParams(temperature=1, seed=1, n=2, max_tokens=5, ignore_eos=True, detokenize=False)
    output = poisoned.generate([[*SHARED, POISON]], params, use_tqdm=False)[0]
    assert [one.finish_reason for one in output.outputs] == ["error", "error"]
    assert_idle(poisoned._built.engine)


def test_an_id_is_taken_until_every_sequence_of_its_request_ended(tiny_model: str) -> None:
    with open_tiny(tiny_model) as llm:
        processor = llm._processor
        probe = SamplingParams(temperature=1, seed=3, n=2, max_tokens=60, ignore_eos=True, detokenize=False)
        first, second = (one.token_ids for one in llm.generate([[5, 6, 7]], probe, use_tqdm=False)[0].outputs)
        stop = next(token for token in first[:30] if token not in second)
        params = SamplingParams(
            temperature=1, seed=3, n=2, max_tokens=60, ignore_eos=True, detokenize=False, stop_token_ids=[stop]
        )
        state = processor.prepare([5, 6, 7], params, request_id="x")
        processor.submit(state)
        while state.output().outputs[0].finish_reason is None:
            processor.step()
        assert not state.finished
        with pytest.raises(InvalidRequest, match="already running"):
            processor.submit(processor.prepare([8, 9], GREEDY, request_id="x"))
        while not state.finished:
            processor.step()
        assert state.output().outputs[1].token_ids == second
        again = processor.prepare([8, 9], GREEDY, request_id="x")
        processor.submit(again)
        while not again.finished:
            processor.step()


def test_a_deadline_of_the_past_does_not_end_a_new_request_of_the_same_id(tiny_model: str) -> None:
    with open_tiny(tiny_model) as llm:
        processor, clock = llm._processor, [0.0]
        processor.engine.clock = lambda: clock[0]
        first = processor.prepare([5, 6], GREEDY, request_id="x", timeout=10)
        processor.submit(first)
        while not first.finished:
            processor.step()
        second = processor.prepare([5, 6], GREEDY, request_id="x")
        processor.submit(second)
        clock[0] = 100.0
        while not second.finished:
            processor.step()
        assert second.output().outputs[0].finish_reason == "length"


def test_cancelled_requests_leave_nothing_behind_a_blocked_head(tiny_model: str) -> None:
    with open_tiny(tiny_model, max_num_seqs=1) as llm:
        processor = llm._processor
        for state in (processor.prepare([5] * 20, GREEDY) for _ in range(2)):
            processor.submit(state)
        processor.step()
        for _ in range(2000):
            state = processor.prepare([5] * 20, GREEDY, timeout=1000)
            processor.submit(state)
            processor.cancel(state)
        scheduler = processor.engine.scheduler
        assert sum(len(lane) for lane in scheduler.waiting._lanes.values()) < 200
        assert len(scheduler.life.deadlines) < 200


def test_beams_keep_the_log_probabilities_of_the_prompt(tiny_model: str) -> None:
    with open_tiny(tiny_model) as llm:
        params = SamplingParams(beam_width=3, max_tokens=6, prompt_logprobs=1, ignore_eos=True, detokenize=False)
        output = llm.generate([[5, 6, 7, 8, 9]], params, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 5
        assert all(output.prompt_logprobs[1:])


def test_best_of_prefers_a_whole_answer_to_one_that_was_cut_off(tiny_model: str) -> None:
    with open_tiny(tiny_model) as llm:
        processor, clock = llm._processor, [0.0]
        processor.engine.clock = lambda: clock[0]
        params = SamplingParams(temperature=1, seed=1, best_of=3, max_tokens=4, ignore_eos=True, detokenize=False)
        state = processor.prepare([5, 6, 7], params)
        processor.submit(state)
        while not state.sequences[0].finish:
            processor.step()
        for sequence in state.sequences[1:]:
            processor.engine.cancel(sequence.request.id)
        while not state.finished:
            processor.step()
        assert state.output().outputs[0].finish_reason == "length"


def test_parameters_changed_after_the_call_do_not_reach_the_request(tiny_model: str) -> None:
    with open_tiny(tiny_model) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
        state = llm._processor.prepare([5, 6, 7], params)
        params.max_tokens, params.prompt_logprobs = 100, 5
        assert state.leader.params.max_tokens == 3 and state.leader.params.prompt_logprobs is None


def test_a_storm_of_refused_requests_does_not_stop_those_who_run(tiny_model: str) -> None:
    async def storm() -> int:
        llm = open_tiny_async(tiny_model, max_num_seqs=1, max_queued_requests=1)
        stop, refused = asyncio.Event(), 0

        async def client() -> None:
            nonlocal refused
            while not stop.is_set():
                try:
                    async for _ in llm.generate([5] * 10, GREEDY):
                        pass
                except QueueFull:
                    refused += 1
                    await asyncio.sleep(0)

        clients = [asyncio.create_task(client()) for _ in range(20)]
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
        for _ in range(200):
            try:
                async for output in llm.generate([7, 8, 9], params):
                    length = len(output.outputs[0].token_ids)
                break
            except QueueFull:
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*clients)
        llm.shutdown()
        assert refused
        return length

    assert asyncio.run(asyncio.wait_for(storm(), 120)) == 50
