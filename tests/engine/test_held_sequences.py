"""What a request leaves behind for others to continue: nothing is computed again, nothing changes, nothing leaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.outputs import RequestOutput
from tokenmill.processor import Prompt

PROMPT = [(7 * k) % 120 + 3 for k in range(45)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return opened(write_tiny(tmp_path_factory.mktemp("held") / "tiny"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return opened(write_tiny(tmp_path_factory.mktemp("plain") / "tiny"), enable_prefix_caching=False)


def opened(model: str, **options: Any) -> LLM:
    """In float64, so that equal means equal; the cache has room for 512 tokens."""
    options = {"kv_cache_memory": 32 * 16 * 2 * 2 * 2 * 8 * 8, "max_num_seqs": 4, "speculation": "off"} | options
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, dtype="float64", device="cpu", **options)


def ask(llm: LLM, prompt: Prompt, params: SamplingParams, **options: Any) -> RequestOutput:
    state = llm._processor.prepare(prompt, params, **options)
    return llm._run([state], use_tqdm=False)[0].output()


def engine_of(llm: LLM) -> Engine:
    return llm._built.engine


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "ignore_eos": True} | more)


def computed(output: RequestOutput) -> int:
    """Prompt tokens that were not there."""
    assert output.metrics is not None
    return len(output.prompt_token_ids) - output.metrics.cached_tokens


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_continued_sequence_computes_only_what_is_new(llm: LLM, plain: LLM, heat: float) -> None:
    llm.reset_prefix_cache()
    first = ask(llm, PROMPT, params(temperature=heat, seed=5), keep=True)
    longer = [*PROMPT, *first.outputs[0].token_ids, 11, 12, 13]
    wanted = ask(plain, longer, params(temperature=heat, seed=6)).outputs[0].token_ids
    second = ask(llm, longer, params(temperature=heat, seed=6), keep=True, continues=first.request_id)
    assert second.outputs[0].token_ids == wanted
    assert computed(second) <= 4  # three new ones, and the last that was sampled
    third = ask(llm, [*longer, *wanted, 9], params(), continues=second.request_id)
    assert computed(third) <= 2
    for id in (first.request_id, second.request_id):
        engine_of(llm).drop_held(id)
    assert not len(engine_of(llm).scheduler.life.held)
    engine_of(llm).scheduler.check_integrity()


def test_branches_share_a_beginning_and_do_not_see_each_other(llm: LLM, plain: LLM) -> None:
    llm.reset_prefix_cache()
    kept = ask(llm, PROMPT, params(max_tokens=1), keep=True)
    prompts = [[*PROMPT, 20 + k, 30 + k] for k in range(8)]
    wanted = [ask(plain, prompt, params()).outputs[0].token_ids for prompt in prompts]
    states = [llm._processor.prepare(prompt, params(), continues=kept.request_id) for prompt in prompts]
    found = [state.output() for state in llm._run(states, use_tqdm=False)]
    assert [one.outputs[0].token_ids for one in found] == wanted
    assert [computed(one) for one in found] == [2] * 8
    engine_of(llm).drop_held(kept.request_id)
    engine_of(llm).scheduler.check_integrity()


def test_scores_from_a_place_on_are_those_of_the_whole_and_compute_what_lies_behind_it(llm: LLM, plain: LLM) -> None:
    llm.reset_prefix_cache()
    kept = ask(llm, PROMPT, params(max_tokens=1), keep=True)
    prompt = [*PROMPT, 40, 41, 42]
    whole = ask(plain, prompt, params(max_tokens=1, prompt_logprobs=0)).prompt_logprobs
    assert whole is not None and len(whole) == len(prompt)
    for start in (0, 1, 17, 44, 45, 47):
        found = ask(
            llm, prompt, params(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start), continues=kept.request_id
        )
        assert found.prompt_logprobs is not None
        assert found.prompt_logprobs[: max(1, start)] == [None] * max(1, start)
        for mine, theirs in zip(found.prompt_logprobs[start:], whole[start:], strict=True):
            if theirs is not None:
                assert mine is not None and mine.keys() == theirs.keys()
                for token, entry in theirs.items():
                    assert mine[token].logprob == pytest.approx(entry.logprob, abs=1e-9)
        assert computed(found) == len(prompt) - min(len(PROMPT), max(0, start - 1))
    engine_of(llm).drop_held(kept.request_id)


def test_another_salt_continues_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    kept = ask(llm, PROMPT, params(max_tokens=1), keep=True, cache_salt="one")
    other = ask(llm, [*PROMPT, 9], params(), continues=kept.request_id, cache_salt="two")
    assert computed(other) == len(PROMPT) + 1
    llm.reset_prefix_cache("one")
    wiped = ask(llm, [*PROMPT, 9], params(), continues=kept.request_id, cache_salt="one")
    assert computed(wiped) == len(PROMPT) + 1
    engine_of(llm).drop_held(kept.request_id)


def test_who_needs_room_takes_it_from_who_is_held(llm: LLM, plain: LLM) -> None:
    llm.reset_prefix_cache()
    held = [ask(llm, [k + 3] * 80, params(max_tokens=2), keep=True).request_id for k in range(5)]
    life = engine_of(llm).scheduler.life
    assert life.held.num_blocks <= 16 and life.held.given_up >= 2  # half of 32
    long = [(3 * k) % 120 + 3 for k in range(300)]
    states = [llm._processor.prepare([k + 1, *long], params(max_tokens=40)) for k in range(2)]
    wanted = [ask(plain, [k + 1, *long], params(max_tokens=40)).outputs[0].token_ids for k in range(2)]
    assert [one.output().outputs[0].token_ids for one in llm._run(states, use_tqdm=False)] == wanted
    again = ask(llm, [*[3] * 80, 9], params(), continues=held[0])
    assert again.outputs[0].token_ids == ask(plain, [*[3] * 80, 9], params()).outputs[0].token_ids
    for id in held:
        engine_of(llm).drop_held(id)
    life.check_integrity()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 60), st.integers(1, 12), st.booleans(), st.booleans()), max_size=12
    )
)
def test_any_tree_of_continuations_says_what_separate_calls_say(
    llm: LLM, plain: LLM, plan: list[tuple[int, int, int, bool, bool]]
) -> None:
    """Some keep, some are dropped, some run side by side, and memory is short."""
    known: list[tuple[str | None, list[int]]] = [(None, [5, 6, 7])]
    for number, (parent, more, output, keep, drop) in enumerate(plan):
        before, tokens = known[parent % len(known)]
        prompt = [*tokens, *[(number * 13 + k) % 120 + 3 for k in range(more)]][:400]
        asked = params(max_tokens=output, temperature=0.5 * (number % 3), seed=number)
        states = [llm._processor.prepare(prompt, asked, keep=keep, continues=before) for _ in range(2)]
        found = [state.output() for state in llm._run(states, use_tqdm=False)]
        wanted = ask(plain, prompt, asked).outputs[0].token_ids
        assert [one.outputs[0].token_ids for one in found] == [wanted, wanted]
        if keep:
            known += [(one.request_id, [*prompt, *wanted]) for one in found]
        if drop and before is not None:
            engine_of(llm).drop_held(before)
        engine_of(llm).scheduler.check_integrity()
    for id, _ in known:
        engine_of(llm).drop_held(id or "")
    assert engine_of(llm).scheduler.life.held.num_blocks == 0
    engine_of(llm).scheduler.check_integrity()
