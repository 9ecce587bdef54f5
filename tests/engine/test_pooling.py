"""Requests that want a vector of their prompt: computed in steps like any other, equal to a plain forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import BATCH, REALTIME, Finish, Request
from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.policy import ShortestFirst
from tokenmill.engine.step import POOLINGS, Step
from tokenmill.errors import InvalidRequest, QueueFull
from tokenmill.kv.manager import KVManager
from tokenmill.model.decoder import TokenBatch
from tokenmill.ops.types import AttentionBatch
from tokenmill.processor import NO_ANSWER
from tokenmill.request_state import RequestState

PROMPTS = [[(7 * i + first) % 120 + 3 for i in range(size)] for first, size in ((0, 50), (9, 1), (0, 33), (5, 48))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
STEP_TOKENS = 16


@torch.inference_mode()
def reference(llm: LLM, prompt: list[int], pooling: str) -> list[float]:
    """From one forward pass over the whole prompt, with keys and values of its own."""
    decoder, size = llm._built.engine.runner.decoder, len(prompt)
    state = DeviceState(
        decoder.spec, max_rows=1, max_len=512, num_blocks=32, block_size=16, dtype=torch.float64,
        device=torch.device("cpu"),
    )  # fmt: skip
    state.block_tables[0] = torch.arange(32, dtype=torch.int32)
    positions, row = torch.arange(size), torch.zeros(1, dtype=torch.int32)
    whole = {"num_singles": 0, "max_query": size, "max_context": size}
    host = {"host_rows": [0], "host_counts": [size], "host_context": [size]}
    q_start, context = torch.tensor([0, size], dtype=torch.int32), torch.tensor([size], dtype=torch.int32)
    attention = AttentionBatch(row, q_start, context, state.block_tables, **whole, **host)
    slots = state.slots(torch.zeros_like(positions), positions)
    hidden = decoder.forward(TokenBatch(torch.tensor(prompt), positions, slots, attention), state.kv)
    return torch.nn.functional.normalize(hidden.sum(0) if pooling == "mean" else hidden[-1], dim=0).tolist()


def open_llm(model: str, **options: Any) -> LLM:
    settings = {"dtype": "float64", "device": "cpu", "skip_tokenizer_init": True, "block_size": 16, "max_num_seqs": 4}
    return LLM(model, load_format="dummy", **settings | {"max_num_batched_tokens": STEP_TOKENS} | options)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def llm(tiny_model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(tiny_model, overlap=request.param) as found:
        yield found


def watched(llm: LLM) -> list[Step]:
    """The steps that are launched from now on."""
    steps: list[Step] = []
    runner = llm._built.engine.runner
    launch = runner.launch
    runner.launch = lambda step: (steps.append(step), launch(step))[1]  # type: ignore[method-assign]
    return steps


def start(llm: LLM, prompt: list[int], pooling: str | None = None, **options: Any) -> RequestState:
    request_state = llm._processor.prepare(prompt, NO_ANSWER if pooling else GREEDY, pooling=pooling, **options)
    llm._processor.submit(request_state)
    return request_state


def run(llm: LLM) -> None:
    while llm._processor.engine.has_work:
        llm._processor.step()
    llm._built.engine.scheduler.check_integrity()


def close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("step_tokens", [4, 16, 17, 512])
def test_a_vector_is_that_of_one_forward_pass_in_any_chunks(tiny_model: str, pooling: str, step_tokens: int) -> None:
    with open_llm(tiny_model, max_num_batched_tokens=step_tokens) as llm:
        steps = watched(llm)
        found = llm.embed(PROMPTS, pooling=pooling, use_tqdm=False)
        assert [one.prompt_token_ids for one in found] == PROMPTS
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert one.finished and one.error is None
            close(one.outputs.embedding, reference(llm, prompt, pooling))
        assert max(step.num_tokens for step in steps) <= step_tokens
        assert step_tokens < 512 or len(steps) == 1  # all together


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_and_decodes_share_steps_and_do_not_change_each_other(llm: LLM, pooling: str) -> None:
    asked = [[11, 12, 13], [40, 41]]
    alone = [one.outputs[0].token_ids for one in llm.generate(asked, GREEDY, use_tqdm=False)]
    steps = watched(llm)
    talks = [start(llm, prompt) for prompt in asked]
    while not all(request_state.sequences[0].num_tokens for request_state in talks):
        llm._processor.step()
    before = len(steps)
    vectors = [start(llm, prompt, pooling) for prompt in PROMPTS[:2]]
    run(llm)
    assert [request_state.output().outputs[0].token_ids for request_state in talks] == alone
    for prompt, request_state in zip(PROMPTS, vectors, strict=False):
        close(request_state.leader.pooled, reference(llm, prompt, pooling))
        assert request_state.leader.finish is Finish.STOP and request_state.leader.output == []
    together = [step for step in steps[before:] if step.num_singles == 2 and len(step.rows) > 2]
    assert len(together) > 2  # a text of 50 tokens is read in pieces, and meanwhile both others go on
    assert all(step.num_tokens <= STEP_TOKENS for step in steps)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"batching": "static", "enable_prefix_caching": False, "enable_chunked_prefill": False},
        {"kv_cache": False, "enable_prefix_caching": False},
        {"policy": "sjf"},
    ],
    ids=["static batches", "no cache", "shortest first"],
)
def test_other_ways_of_scheduling_do_not_change_a_vector(
    tiny_model: str, options: dict[str, Any], pooling: str
) -> None:
    with open_llm(tiny_model, **{"max_num_batched_tokens": 512, "max_model_len": 64} | options) as llm:
        talk = start(llm, [11, 12, 13])
        vectors = [start(llm, prompt, pooling) for prompt in PROMPTS]
        run(llm)
        assert talk.sequences[0].num_tokens == 12
        for prompt, request_state in zip(PROMPTS, vectors, strict=True):
            close(request_state.leader.pooled, reference(llm, prompt, pooling))
        policy = llm._built.engine.scheduler.policy
        if isinstance(policy, ShortestFirst):  # they say nothing about how long answers are
            assert policy.predictor._tables["all"].values == [12]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_steps_that_would_be_recorded_give_the_same_vector(tiny_model: str, pooling: str) -> None:
    """Packed weights on a CPU: steps that read prompts are recorded, but for those that hidden states are read of."""
    options = {"dtype": "float32", "quantization": "int8", "max_num_batched_tokens": 64}
    with open_llm(tiny_model, **options) as llm:
        alone = llm.embed(PROMPTS, pooling=pooling, use_tqdm=False)
        llm.reset_prefix_cache()
        talks = [start(llm, [7, number + 3, 9]) for number in range(3)]
        vectors = []
        for prompt in PROMPTS:
            llm._processor.step()
            vectors.append(start(llm, prompt, pooling))
        run(llm)
        assert all(talk.sequences[0].num_tokens == 12 for talk in talks)
        for request_state, one in zip(vectors, alone, strict=True):
            found, expected = torch.tensor(request_state.leader.pooled), torch.tensor(one.outputs.embedding)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_preempted_one_starts_over(tiny_model: str, pooling: str) -> None:
    with open_llm(tiny_model, overlap=True, max_num_seqs=1, enable_prefix_caching=False) as llm:
        request_state = start(llm, PROMPTS[0], pooling, priority="batch")
        for _ in range(2):
            llm._processor.step()
        urgent = start(llm, PROMPTS[3], pooling, priority="realtime")
        run(llm)
        assert request_state.leader.metrics.preemptions == 1
        close(request_state.leader.pooled, reference(llm, PROMPTS[0], pooling))
        close(urgent.leader.pooled, reference(llm, PROMPTS[3], pooling))


def test_only_the_last_state_may_start_on_cached_blocks(llm: LLM) -> None:
    steps = watched(llm)
    first, again = (start(llm, PROMPTS[0], "mean") for _ in range(2))
    run(llm)
    close(again.leader.pooled, first.leader.pooled)
    assert again.leader.metrics.cached_tokens == 0
    last = start(llm, PROMPTS[0], "last")
    run(llm)
    assert last.leader.metrics.cached_tokens == 48  # which those filled
    close(last.leader.pooled, reference(llm, PROMPTS[0], "last"))
    assert sum(step.num_tokens for step in steps) == 50 + 50 + 2


def test_the_last_state_is_the_one_the_next_token_is_chosen_from(llm: LLM) -> None:
    [said] = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    [found] = llm.embed(PROMPTS[0], pooling="last", use_tqdm=False)
    logits = llm._built.engine.runner.decoder.logits(torch.tensor([found.outputs.embedding], dtype=torch.float64))
    assert int(logits.argmax()) == said.outputs[0].token_ids[0]


def test_what_cannot_be_embedded_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="pooling is 'max'; it must be one of mean, last"):
        llm.embed([5], pooling="max")
    with pytest.raises(InvalidRequest, match="the prompt has 512 tokens or more"):
        llm.embed([5] * 512)


def test_states_that_are_no_numbers_end_their_own_request_only(llm: LLM) -> None:
    embedding = llm._built.engine.runner.decoder.weights.embed
    with torch.inference_mode():
        embedding[2] = torch.nan
    bad, good = llm.embed([[5, 2, 7], PROMPTS[0]], use_tqdm=False)
    assert bad.error is not None and "not finite" in bad.error and bad.outputs.embedding == []
    close(good.outputs.embedding, reference(llm, PROMPTS[0], "mean"))


# -- on a simulated device, which counts and adds up the tokens that a vector is made of --------------------------


def engine(rows: int = 4, step_tokens: int = 8, overlap: bool = True, **limits: Any) -> Engine:
    clock = SimulatedClock()
    scheduler = Scheduler(Limits(rows, step_tokens, **limits), KVManager(64, 8))
    return Engine(scheduler, SimulatedRunner(64, 8, clock), overlap=overlap, clock=clock)


def wanting(id: str, size: int = 30, pooling: str = "mean", **rest: Any) -> Request:
    return Request(id, list(range(size)), NO_ANSWER, max_tokens=0, seed=1, pooling=pooling, **rest)


def finish(engine: Engine) -> list[str]:
    """Run until nothing is left; the ids of those that ended, in that order."""
    ended = []
    while engine.has_work:
        ended += [delta.request.id for delta in engine.step() if delta.finished]
    assert not engine.runner.violations  # type: ignore[attr-defined]
    engine.scheduler.check_integrity()
    return ended


@pytest.mark.parametrize("overlap", [False, True])
def test_every_token_is_pooled_once_after_a_preemption_and_a_failed_step(overlap: bool) -> None:
    house = engine(rows=1, overlap=overlap)
    low = wanting("low", priority=BATCH)
    house.add(low)
    for _ in range(3):
        house.step()
    house.add(wanting("high", 9, priority=REALTIME))
    house.runner.faults.fail_at_wait = 1.0  # type: ignore[attr-defined]
    house.runner.faults.min_gap = 100  # type: ignore[attr-defined]
    assert finish(house) == ["high", "low"]
    assert low.metrics.preemptions >= 1 and house.scheduler.stats.failed_steps == 1
    assert low.pooled == [30.0, sum(range(30))]


def test_one_that_is_cancelled_or_late_leaves_nothing() -> None:
    house = engine()
    house.add(wanting("cancelled"))
    late = wanting("late", deadline=1e-4)
    house.add(late)
    house.step()
    house.cancel("cancelled")
    assert sorted(finish(house)) == ["cancelled", "late"]
    assert late.finish is Finish.DEADLINE and late.pooled == []
    assert house.scheduler.kv.pool.num_free == 64


def test_the_queue_is_bounded_for_them_too() -> None:
    house = engine(max_queued_requests=2)
    house.add(wanting("0"))
    house.add(wanting("1"))
    with pytest.raises(QueueFull):
        house.add(wanting("2"))
