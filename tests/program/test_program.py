"""Programs say what separate calls say, compute what is shared once, and leave nothing behind however they end."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "sampling"))
from grammar_models import open_model, write_model

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.outputs import Logprob
from tokenmill.program import ProgramState, assistant, gen, program, select, system, user
from tokenmill.program.asynchronous import AsyncRuntime
from tokenmill.program.expressions import Select
from tokenmill.program.local import LocalRuntime
from tokenmill.program.operations import Choose, Usage, Variable
from tokenmill.program.sequence import Call, TokenSequence
from tokenmill.program.waiting import Waiting

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STORY = "Once upon a time there was a mill by a river, and the mill turned day and night. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = Path(write_model(tmp_path_factory.mktemp("program") / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return str(folder)


@pytest.fixture(scope="module")
def opened(model: str) -> Iterator[LLM]:
    with open_model(model) as llm:
        yield llm


@pytest.fixture
def llm(opened: LLM) -> Iterator[LLM]:
    """Afterwards nothing is left of any program."""
    opened.reset_prefix_cache()
    yield opened
    engine = opened._built.engine
    assert not engine.has_work and not len(engine.scheduler.life.held)
    engine.scheduler.check_integrity()


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    with open_model(model, enable_prefix_caching=False, speculation="off") as llm:
        yield llm


def said(plain: LLM, prompt: str | list[int], **params: Any) -> str:
    """What one separate call says."""
    asked: Any = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    return plain.generate(asked, SamplingParams(**params), use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_answers_are_those_of_separate_calls(llm: LLM, plain: LLM, heat: float) -> None:
    sampling: dict[str, Any] = {"temperature": heat, "seed": 4, "ignore_eos": True}
    before: list[list[int]] = []

    @program
    def two_answers(s: ProgramState, topic: str) -> None:
        s += STORY + f"About {topic}: "
        s += gen("first", max_tokens=17, **sampling)
        s += " Then: "
        before.append([*s.token_ids, *llm.get_tokenizer().encode(" Then: ", add_special_tokens=False)])  # type: ignore[union-attr]
        s += gen("second", max_tokens=9, **sampling)

    state = two_answers.run(llm, topic="the river")
    assert state["first"] == said(plain, STORY + "About the river: ", max_tokens=17, **sampling)
    assert state["second"] == said(plain, before[0], max_tokens=9, **sampling)
    assert state.text() == STORY + "About the river: " + state["first"] + " Then: " + state["second"]
    assert state.usage.computed_tokens <= len(before[0]) + 1 and state.usage.saved_tokens > len(STORY)


def test_branches_compute_what_they_share_once_and_say_what_separate_calls_say(llm: LLM, plain: LLM) -> None:
    prefix = STORY[:200]
    tokens = len(llm.get_tokenizer().encode(prefix))  # type: ignore[union-attr]

    @program
    def branches(s: ProgramState) -> list[str]:
        s += prefix
        ways = s.fork(8)
        for number, one in enumerate(ways):
            one += f"{number}" + gen("end", max_tokens=6, temperature=1.0, seed=number, ignore_eos=True)
        return ways["end"]

    state = branches.run(llm)
    wanted = [
        said(plain, prefix + str(number), max_tokens=6, temperature=1.0, seed=number, ignore_eos=True)
        for number in range(8)
    ]
    assert state.result == wanted
    assert state.usage.computed_tokens == tokens + 8  # the prefix once, and each branch's own digit
    assert state.usage.calls == 9


@pytest.mark.parametrize("normalized", [True, False])
def test_select_takes_what_scoring_whole_prompts_finds_likeliest(llm: LLM, plain: LLM, normalized: bool) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    choices = ["yes", "no", "perhaps so", "true", "nullable"]

    @program
    def judge(s: ProgramState, text: str) -> None:
        s += text + select("verdict", choices, normalized=normalized) + "." + gen("more", max_tokens=5, temperature=0)

    texts = [f"{STORY[k : k + 60]} " for k in range(4)]
    states = judge.run_batch(llm, [{"text": text} for text in texts])
    for text, state in zip(texts, states, strict=True):
        begin = tokenizer.encode(text)
        scores = {}
        for choice in choices:
            own = tokenizer.encode(choice, add_special_tokens=False)
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            found = plain.generate({"prompt_token_ids": [*begin, *own]}, params, use_tqdm=False)[0].prompt_logprobs
            assert found is not None
            total = sum(next(iter(one.values())).logprob for one in found[len(begin) :] if one)
            scores[choice] = total / len(own) if normalized else total
        assert state.meta("verdict")["scores"] == pytest.approx(scores, abs=1e-6)
        assert state["verdict"] == max(scores, key=lambda one: scores[one])
        whole = [*begin, *tokenizer.encode(state["verdict"], add_special_tokens=False)]
        assert state["more"] == said(
            plain, [*whole, *tokenizer.encode(".", add_special_tokens=False)], max_tokens=5, temperature=0
        )


def test_turns_of_a_chat_are_those_of_the_template(llm: LLM, plain: LLM) -> None:
    @program
    def conversation(s: ProgramState) -> None:
        s += system("Be brief.") + user("Hello")
        s += assistant(gen("greeting", max_tokens=8, temperature=0))
        s += user("And now?")
        s += assistant("Well: " + gen("now", max_tokens=8, temperature=0))

    state = conversation.run(llm)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    asked = SamplingParams(max_tokens=8, temperature=0)
    assert state["greeting"] == plain.chat(messages, asked, use_tqdm=False)[0].outputs[0].text
    assert state.text() == (
        f"<|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>{state['greeting']}<|end|>"
        f"<|user|>And now?<|end|><|assistant|>Well: {state['now']}<|end|>"
    )
    with pytest.raises(InvalidRequest, match="begin a chat with a turn"):

        @program
        def mixed(s: ProgramState) -> None:
            s += "text" + user("Hello")

        mixed.run(llm)


def test_what_a_stop_string_cut_is_no_part_of_what_follows(llm: LLM, plain: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    letters = {tokenizer.encode(letter, add_special_tokens=False)[0]: 50.0 for letter in "abcdefghijklmnop"}
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logit_bias": letters, "repetition_penalty": 1.5}
    free = said(plain, STORY, max_tokens=30, **options)
    stop = free[12:14]

    @program
    def cut(s: ProgramState) -> None:
        s += STORY + gen("start", max_tokens=30, stop=stop, **options) + "!"
        s += gen("rest", max_tokens=4, **options)

    state = cut.run(llm)
    assert state["start"] == free[: free.index(stop)]
    assert state.text() == STORY + state["start"] + "!" + state["rest"]
    assert tokenizer.decode(state.token_ids).endswith(state["start"] + "!" + state["rest"])


def test_forms_of_answers_and_loops_and_conditions(llm: LLM) -> None:
    pytest.importorskip("llguidance")

    @program
    def agent(s: ProgramState) -> int:
        rounds = 0
        while rounds < 4:
            s += f"Step {rounds}: " + gen("tool", choices=["search", "answer"], temperature=1.0, seed=rounds)
            rounds += 1
            if s["tool"] == "answer":
                break
            s += gen("query", regex="[a-z]{3}", temperature=1.0, seed=rounds)
            assert len(s["query"]) == 3
        s.set("rounds", str(rounds))
        return rounds

    state = agent.run(llm)
    assert state["rounds"] == str(state.result) and "Step 0: " in state.text()


def test_a_result_is_streamed_as_it_comes(llm: LLM, plain: LLM) -> None:
    pieces: list[str] = []

    @program
    def told(s: ProgramState) -> None:
        s += STORY + gen("end", max_tokens=25, temperature=0, ignore_eos=True)
        pieces.extend(s.stream("end"))

    state = told.run(llm)
    assert len(pieces) > 3 and "".join(pieces) == state["end"]


def test_an_error_of_a_program_is_raised_and_the_others_go_on(llm: LLM) -> None:
    @program
    def fragile(s: ProgramState, number: int) -> None:
        s += STORY + gen("text", max_tokens=40 + number, temperature=0, ignore_eos=True)
        if number == 1:
            raise ZeroDivisionError("of the user's own")
        s.fork(2)[0] += gen("more", max_tokens=3)
        if number == 2:
            s["nothing"]

    batch = [{"number": number} for number in range(4)]
    states = fragile.run_batch(llm, batch, return_exceptions=True)
    assert [type(one.exception) for one in states] == [type(None), ZeroDivisionError, KeyError, type(None)]
    assert states[0]["text"] and states[3]["text"]
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        fragile.run_batch(llm, batch)
    with pytest.raises(KeyError, match="it has 'text'"):
        fragile.run(llm, number=2)


def test_a_program_that_has_ended_is_asked_no_more(llm: LLM) -> None:
    @program
    def short(s: ProgramState) -> None:
        s += STORY + gen("text", max_tokens=3, temperature=0)

    state = short.run(llm)
    said_so_far = state.text()
    state += " more" + gen("more", max_tokens=3)
    assert state["text"] in said_so_far
    with pytest.raises(TokenmillError, match="has ended"):
        state["more"]
    with pytest.raises(TokenmillError, match="has ended"):
        state.text()


def test_an_engine_is_driven_by_one_thread(llm: LLM) -> None:
    @program
    def inner(s: ProgramState) -> None:
        s += STORY + gen("text", max_tokens=2)

    @program
    def outer(s: ProgramState, how: int) -> None:
        s += STORY + gen("text", max_tokens=30, ignore_eos=True)
        if how == 1:
            inner.run(llm)
        elif how == 2:
            llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
        else:
            inner(s)  # goes on with the same state

    states = outer.run_batch(llm, [{"how": how} for how in range(3)], return_exceptions=True)
    assert states[0].exception is None
    for state in states[1:]:
        assert isinstance(state.exception, TokenmillError) and "ask its state" in str(state.exception)
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)


def test_select_needs_a_text_to_stand_behind(llm: LLM) -> None:
    @program
    def nothing(s: ProgramState) -> None:
        s += select("verdict", ["a", "b"])

    with pytest.raises(InvalidRequest, match="append it first"):
        nothing.run(llm)


class Answers:
    """A backend whose calls are answered by hand."""

    def __init__(self) -> None:
        self.tokenizer: Any = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(one) for one in text])
        self.usage, self.calls, self.dropped, self.cancelled = Usage(), list[Call](), list[str](), list[Call]()
        self.submit, self.cancel, self.drop = self.calls.append, self.cancelled.append, self.dropped.append
        self.changed = lambda: None

    def answer(self, number: int, error: str | None = None) -> None:
        call = self.calls[number]
        scores = [{token: Logprob(-1.0, 1)} for token in call.prompt]
        output: Any = SimpleNamespace(
            request_id=f"call {number}", finished=True, error=error, prompt_token_ids=call.prompt, metrics=None,
            prompt_logprobs=scores, outputs=[SimpleNamespace(token_ids=[1])],
        )  # fmt: skip
        call.told(output)


@pytest.mark.parametrize("how", ["close", "error", "end"])
def test_choices_of_which_some_were_scored_leave_nothing_behind(how: str) -> None:
    backend = Answers()
    sequence = TokenSequence(backend)
    sequence.append(["so ", Choose(Select("x", ("a", "bc", "d"), True), Variable())])
    backend.answer(0)  # the text before them is read
    backend.answer(1)
    backend.answer(2)
    assert not backend.dropped
    if how == "close":
        sequence.close()
    elif how == "error":
        backend.answer(3, error="its time was over")
        assert sequence.error is not None
    else:
        backend.answer(3)
        sequence.close()
    assert sorted(backend.dropped) == [f"call {number}" for number in range(4 if how == "end" else 3)]
    assert backend.cancelled == ([] if how == "end" else [backend.calls[3]])


def test_an_answer_that_is_given_up_as_it_ends_keeps_nothing(llm: LLM) -> None:
    backend = LocalRuntime(llm, {}).backend
    kept: list[str] = []
    call = Call([5] * 40, SamplingParams(max_tokens=1), told=lambda output: None, failed=lambda error: None)
    backend.submit(call)
    held = llm._built.engine.scheduler.life.held
    while not len(held):
        llm._step(backend._waiting)
    kept += [one.id for one in held]
    backend.cancel(call)
    assert kept and not len(held)


def test_what_the_engine_refuses_reaches_who_reads_it_and_all_branches(llm: LLM) -> None:
    @program
    def too_long(s: ProgramState) -> None:
        s += STORY * 20
        branches = s.fork(2)
        branches[0] += gen("never", max_tokens=3)
        branches[0]["never"]

    with pytest.raises(TokenmillError, match="shorten it"):
        too_long.run(llm)


def test_an_interrupt_ends_all_programs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    ended: list[BaseException] = []

    @program
    def endless(s: ProgramState) -> None:
        try:
            while True:
                s += "a" + gen("b", max_tokens=2, temperature=0, ignore_eos=True)
                s["b"]
                started.set()
        except BaseException as error:
            ended.append(error)
            raise

    step = llm._step

    def interrupted(waiting: Any) -> Any:
        if started.is_set():
            raise KeyboardInterrupt
        return step(waiting)

    monkeypatch.setattr(llm, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        endless.run(llm)
    monkeypatch.undo()
    for _ in range(1000):
        if ended:
            break
        threading.Event().wait(0.01)
    assert isinstance(ended[0], TokenmillError)


@pytest.mark.parametrize(
    "wrong", [lambda: gen("x", n=2), lambda: gen(""), lambda: select("x", []), lambda: select("x", "abc"),
              lambda: select("x", ["a", ""]), lambda: gen("x", temprature=1)]
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(wrong: Any) -> None:
    with pytest.raises(InvalidRequest):
        wrong()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.recursive(
        st.tuples(st.integers(1, 6), st.integers(0, 40)),
        lambda inner: st.lists(inner, min_size=1, max_size=3),
        max_leaves=8,
    )
)
def test_any_tree_of_forks_says_what_separate_calls_say(llm: LLM, plain: LLM, shape: Any) -> None:
    """A leaf generates, a list forks; prompts of all leaves are asked again one by one."""
    asked: list[tuple[list[int], int, str]] = []

    def walk(s: ProgramState, node: Any, depth: int) -> None:
        s += f" {depth}."
        if isinstance(node, tuple):
            output, more = node
            s += STORY[:more]
            before = s.token_ids
            s += gen("leaf", max_tokens=output, temperature=0, ignore_eos=True)
            if s.token_ids[: len(before)] == before:
                length = len(s.token_ids) - output
                asked.append((s.token_ids[:length], output, s["leaf"]))
            return
        for branch, inner in zip(s.fork(len(node)), node, strict=True):
            walk(branch, inner, depth + 1)

    @program
    def tree(s: ProgramState) -> None:
        s += "Root"
        walk(s, shape, 0)

    tree.run(llm)
    assert asked
    for prompt, output, text in asked:
        assert said(plain, prompt, max_tokens=output, temperature=0, ignore_eos=True) == text


def test_programs_of_an_async_engine_run_beside_each_other_and_can_be_cancelled(model: str, plain: LLM) -> None:
    options = {"load_format": "dummy", "dtype": "float64", "device": "cpu", "max_num_seqs": 16, "max_model_len": 512}
    started, ended = threading.Event(), threading.Event()

    @program
    def branches(s: ProgramState, text: str) -> list[str]:
        s += STORY + text
        ways = s.fork(2)
        for number, one in enumerate(ways):
            one += gen("end", max_tokens=6, temperature=1.0, seed=number, ignore_eos=True)
        return ways["end"]

    @program
    def endless(s: ProgramState) -> None:
        try:
            while True:
                s += "a" + gen("b", max_tokens=2, temperature=0, ignore_eos=True)
                s["b"]
                started.set()
        finally:
            ended.set()

    @program
    def wrong(s: ProgramState) -> None:
        s += STORY * 20 + gen("never", max_tokens=3)

    async def run(llm: AsyncLLM) -> list[ProgramState]:
        forever = asyncio.create_task(endless.arun(llm))
        states = await asyncio.gather(*(branches.arun(llm, text=str(number)) for number in range(4)))
        with pytest.raises(TokenmillError, match="shorten it"):
            await wrong.arun(llm)
        await asyncio.to_thread(started.wait)
        forever.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forever
        await asyncio.to_thread(ended.wait)
        return states

    llm = AsyncLLM(model, **options)
    try:
        for number, state in enumerate(asyncio.run(run(llm))):
            assert state.result == [
                said(plain, f"{STORY}{number}", max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True)
                for seed in range(2)
            ]
    finally:
        llm.shutdown()
    scheduler = llm._built.engine.scheduler
    scheduler.check_integrity()
    assert not len(scheduler.life.held) and not scheduler.requests


def test_an_engine_that_stops_ends_every_program_that_waits(model: str) -> None:
    """Those whose answers are under way, several at once, and those whose wishes nobody has heard yet."""
    options = {"load_format": "dummy", "dtype": "float64", "device": "cpu", "max_num_seqs": 16, "max_model_len": 512}
    llm = AsyncLLM(model, **options)
    started = threading.Semaphore(0)

    @program
    def endless(s: ProgramState) -> None:
        ways = s.fork(4)
        while True:
            for one in ways:
                one += "a" + gen("b", max_tokens=5, temperature=0, ignore_eos=True)
            ways["b"]
            started.release()

    async def run() -> list[Any]:
        tasks = [asyncio.create_task(endless.arun(llm)) for _ in range(3)]
        for _ in tasks:
            await asyncio.to_thread(started.acquire)
        await asyncio.to_thread(llm.shutdown)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    found = asyncio.run(run())
    assert [type(one) for one in found] == [TokenmillError] * 3, found


@pytest.mark.parametrize("stopped", [True, False])
def test_work_that_no_engine_does_ends_the_program_that_waits_for_it(stopped: bool) -> None:
    asked: list[Any] = []
    runtime = AsyncRuntime.__new__(AsyncRuntime)
    runtime._llm = SimpleNamespace(run_on_engine=lambda work, answer: asked.append((work, answer)))  # type: ignore[assignment]
    Waiting.__init__(runtime)
    runtime.post(lambda: None)
    asked[0][1](None, TokenmillError("the engine has stopped") if stopped else None)
    if stopped:
        with pytest.raises(TokenmillError, match="has stopped"):
            runtime.wait(lambda: False)
    assert (runtime._ended is not None) is stopped


def test_a_program_without_an_engine_of_its_own_is_refused_in_one_sentence(model: str, llm: LLM) -> None:
    @program
    def tell(s: ProgramState) -> None:
        s += "A mill" + gen("on", max_tokens=2)

    with pytest.raises(InvalidRequest, match=r"to run it by itself: tell\.run\(llm, \.\.\.\)"):
        tell(llm)
    with pytest.raises(InvalidRequest, match="run and run_batch take an LLM, not str; for an AsyncLLM"):
        tell.run("default")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="arun takes an AsyncLLM, not LLM; for an LLM: run"):
        asyncio.run(tell.arun(llm))
    with open_model(model) as other:
        pass
    with pytest.raises(TokenmillError, match="this LLM was shut down; make a new one"):
        tell.run(other)


def test_options_of_a_program_are_those_of_its_requests(llm: LLM) -> None:
    """Another salt finds nothing of what the first one left in the cache."""

    @program(cache_salt="one")
    def read(s: ProgramState) -> None:
        s += STORY + gen("end", max_tokens=2, temperature=0, ignore_eos=True)

    cold = read.run(llm).usage.computed_tokens
    assert read.run(llm).usage.computed_tokens < 20 < cold
    assert read.with_options(cache_salt="two").run(llm).usage.computed_tokens == cold
    with pytest.raises(InvalidRequest, match="priority is 'soon'"):
        read.with_options(priority="soon").run(llm)
