"""Drafts of structured answers: verified under their masks, they change no token, and forced ones save steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "sampling"))
from grammar_models import END, closers, open_model, write_model
from tiny_drafts import made_head, make_drafts_free

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.speculation import choose
from tokenmill.engine.speculation.calibration import Calibration
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.engine.step import Pending, Step
from tokenmill.sampling import grammar
from tokenmill.sampling.grammar import Constraint, Grammars

pytest.importorskip("llguidance")

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "preferred_payment_method": {"enum": ["credit_card", "bank_transfer"]},
        "shipping_address_verified": {"type": "boolean"},
        "remarks": {"type": "string", "maxLength": 6},
    },
    "required": ["customer_identification_number", "preferred_payment_method", "shipping_address_verified", "remarks"],
    "additionalProperties": False,
}
FORMS: dict[str, Any] = {
    "schema": {"json": ORDER},
    "regex": {"regex": "(item [0-9]{2}: a[bc]-[xyz]{3}; ){2,4}done"},
    "choice": {"choice": ["the answer is yes", "the answer is no", "it depends"]},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "several": {"temperature": 1.3, "n": 3},
}


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    with open_model(model, speculation="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def drafted(model: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(choose.PER_TOKEN, "cpu", 0.0)
        opened = open_model(model, speculation="suffix")
    with opened:
        yield opened


def engine_of(llm: LLM) -> Engine:
    engine = llm._processor.engine
    assert isinstance(engine, Engine)
    return engine


def speculation_of(llm: LLM) -> Speculation:
    speculation = engine_of(llm).speculation
    assert speculation is not None
    return speculation


def with_proposer(llm: LLM, *proposers: Any) -> Speculation:
    """An engine with these proposers alone."""
    engine = engine_of(llm)
    engine.speculation = Speculation(max_tokens=64, per_token=0.0, proposers=proposers)
    assert engine.grammars is not None
    engine.grammars.looks_ahead = True
    return engine.speculation


def mix(llm: LLM, settings: dict[str, Any]) -> list[SamplingParams]:
    """Every form twice, and requests without any."""
    found = []
    for seed, form in enumerate([*FORMS.values(), None, *FORMS.values(), None]):
        fixed: dict[str, Any] = {"max_tokens": 150 if form else 40, "seed": seed, "ignore_eos": form is None}
        found.append(SamplingParams(structured=form, logit_bias=closers(llm), **fixed | settings))
    return found


def answers(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    prompts = [[9 + k, *range(30, 50 + k)] for k in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    engine_of(llm).scheduler.check_integrity()
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


def logprobs(llm: LLM, params: list[SamplingParams]) -> list[list[dict[int, float]]]:
    outputs = llm.generate([[9, 30, 77, 50 + k] for k in range(len(params))], params, use_tqdm=False)
    return [
        [{id: entry.logprob for id, entry in table.items()} for table in one.logprobs or []]
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize("settings", SETTINGS)
def test_drafts_change_no_token_of_a_structured_answer(plain: LLM, drafted: LLM, settings: str) -> None:
    params = mix(plain, SETTINGS[settings])
    expected = answers(plain, params)
    stats = speculation_of(drafted).stats
    before = stats["grammar"].accepted
    for _ in range(2):  # the second time the suffix index knows the answers
        assert answers(drafted, params) == expected
    assert stats["grammar"].accepted > before + 100
    assert stats["grammar"].accepted == stats["grammar"].drafted  # there was no choice
    if settings == "logprobs":
        for mine, theirs in zip(logprobs(drafted, params), logprobs(plain, params), strict=True):
            assert [list(one) for one in mine] == [list(one) for one in theirs]
            assert [one[token] for one in mine for token in one] == pytest.approx(
                [one[token] for one in theirs for token in one]
            )


def test_drafts_of_other_proposers_are_verified_under_their_masks(plain: LLM, drafted: LLM) -> None:
    settings: dict[str, Any] = {"max_tokens": 150, "logit_bias": closers(plain), "temperature": 0.0}
    params = [SamplingParams(structured=FORMS["schema"], **settings)] * 2
    expected = answers(plain, params)
    before = speculation_of(drafted).stats["suffix"].accepted
    for _ in range(3):
        assert answers(drafted, params) == expected
    assert speculation_of(drafted).stats["suffix"].accepted > before + 10


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"overlap": True, "max_num_batched_tokens": 16},
        {"overlap": True, "block_size": 8, "kv_cache_memory": 40 * 8 * 2 * 2 * 2 * 8 * 8, "max_model_len": 256},
        {"enable_prefix_caching": True, "max_num_seqs": 3},
    ],
    ids=["overlap", "chunks", "few blocks", "few rows"],
)
def test_nor_do_they_with_overlap_chunks_and_preemption(model: str, plain: LLM, options: dict[str, Any]) -> None:
    params = mix(plain, {"temperature": 1.0, "n": 2})
    expected = answers(plain, params)
    with open_model(model, speculation="suffix", **options) as llm:
        assert answers(llm, params) == expected
        assert answers(llm, params) == expected
        assert speculation_of(llm).stats["grammar"].accepted > 100
        assert bool(engine_of(llm).scheduler.stats.preemptions) == ("kv_cache_memory" in options)


def test_nor_do_they_on_recorded_steps(model: str) -> None:
    """In float32, on the native library: steps that only decode are recorded."""
    settings = {"structured": FORMS["schema"], "max_tokens": 100, "seed": 3}
    params = [SamplingParams(**settings, temperature=0.0), SamplingParams(**settings, temperature=0.7, top_k=5)]
    with open_model(model, speculation="off", dtype="float32") as llm:
        expected = answers(llm, params)
    with open_model(model, dtype="float32") as llm:  # on where steps are recorded
        if engine_of(llm).speculation is None:
            pytest.skip("nothing is recorded on this machine")
        assert answers(llm, params) == expected
        assert speculation_of(llm).stats["grammar"].accepted > 30


@pytest.mark.parametrize("settings", SETTINGS)
def test_nor_do_those_of_a_head(model: str, tmp_path: Path, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It guesses at random, and is believed all the same: its drafts are verified wherever a grammar allows them."""
    monkeypatch.setattr(Calibration, "chances", lambda self, draft, own: 0.9 ** np.arange(1, 1 + len(draft.tokens)))
    with open_model(model, speculation="off", dtype="float32") as llm:
        params = mix(llm, SETTINGS[settings])
        expected = answers(llm, params)
    with open_model(model, dtype="float32") as llm:
        if engine_of(llm).speculation is None:
            pytest.skip("nothing is recorded on this machine")
    options = {"load_format": "dummy", "dtype": "float32", "device": "cpu"}
    head = made_head(model, tmp_path / "head.safetensors", options, vocab=300)
    for speculation in (f"head:{head}", f"suffix,head:{head}"):
        with open_model(model, speculation=speculation, dtype="float32", max_num_seqs=64) as llm:
            assert answers(llm, params) == expected
            stats = speculation_of(llm).stats
            assert stats["grammar"].accepted > 50 and stats["head"].drafted > (0 if "suffix" in stats else 30)


def steps_for(llm: LLM, form: Any) -> int:
    before = engine_of(llm).scheduler.stats.steps
    params = SamplingParams(structured=form, max_tokens=200, logit_bias=closers(llm))
    llm.generate([[9, 30, 77]], params, use_tqdm=False)
    return engine_of(llm).scheduler.stats.steps - before


@pytest.mark.parametrize("form", ["schema", "choice"])
def test_what_a_grammar_leaves_no_choice_about_saves_steps(model: str, plain: LLM, form: str) -> None:
    with open_model(model, speculation="suffix") as llm:
        assert 1.5 * steps_for(llm, FORMS[form]) <= steps_for(plain, FORMS[form])


Spoil = Callable[[Random, list[int]], list[int]]


class Oracle:
    """Proposes by what it was told of answers, and is wrong in a way of its own now and then."""

    name, kinds, on_device = "oracle", 1, False

    def __init__(self, known: dict[tuple[int, ...], list[int]], spoil: Spoil) -> None:
        self.known, self.spoil, self.random = known, spoil, Random(5)

    def prior(self, kind: int, depth: int) -> float:
        return 0.9

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        found: list[Draft | None] = []
        for one in requests:
            rest = self.known[tuple(one.tokens[: one.prompt_len])][one.num_output :]
            tokens = self.spoil(self.random, rest)[:length]
            found.append(Draft(tokens, [0] * len(tokens)) if tokens else None)
        return found

    def ended(self, request: Request) -> None: ...

    def forget(self, salt: str | None = None) -> None: ...


def right(random: Random, rest: list[int]) -> list[int]:
    return [*rest, END, 7, 9]  # beyond the end, too


def forbidden(random: Random, rest: list[int]) -> list[int]:
    place = random.randrange(len(rest) + 1)
    return [*rest[:place], random.choice([0, 1, 3, 5, 280, 332, 10_000, -1]), *rest[place:]]


def of_another_place(random: Random, rest: list[int]) -> list[int]:
    skipped = random.randrange(5)
    return rest[skipped:] if random.random() < 0.5 else [*rest[:skipped], *rest[2 * skipped :]]


def another_letter(random: Random, rest: list[int]) -> list[int]:
    """Allowed, mostly: another digit, another one of "xyz"."""
    others = {19 + n: 19 + (n + 1) % 10 for n in range(10)} | {91: 92, 92: 93, 93: 91}
    return [others.get(token, token) if random.random() < 0.5 else token for token in rest]


@pytest.mark.parametrize("spoil", [right, forbidden, of_another_place, another_letter])
@pytest.mark.parametrize("overlap", [False, True])
def test_wrong_drafts_change_nothing(model: str, plain: LLM, spoil: Any, overlap: bool) -> None:
    params = [one for one in mix(plain, {"temperature": 1.0}) if one.structured is not None]
    expected = answers(plain, params)
    known = {(9 + k, *range(30, 50 + k)): expected[k][0][0] for k in range(len(params))}
    with open_model(model, speculation="suffix", overlap=overlap) as llm:
        stats = with_proposer(llm, Oracle(known, spoil)).stats["oracle"]
        assert answers(llm, params) == expected
    assert stats.drafted > 50
    assert stats.accepted > 20 and (stats.accepted < stats.drafted or spoil is not another_letter)


class Longer:
    """A launched step whose rows say more than they should behind the last token of their answers."""

    def __init__(self, pending: Pending, step: Step, lengths: dict[int, int]) -> None:
        self._pending, self._step, self._lengths = pending, step, lengths

    def wait(self) -> Any:
        result = self._pending.wait()
        for request, tokens in zip(self._step.requests, result.tokens, strict=True):
            if tokens and request.num_output + len(tokens) == self._lengths[request.tokens[0]]:
                tokens += [40, 41]
        return result


def test_an_end_in_the_middle_of_accepted_drafts_is_the_end(
    model: str, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [one for one in mix(plain, {"temperature": 1.0}) if one.structured is not None]
    expected = answers(plain, params)
    lengths = {9 + k: len(answer[0][0]) for k, answer in enumerate(expected)}
    with open_model(model, speculation="suffix", enable_prefix_caching=True) as llm:
        launch = engine_of(llm).runner.launch
        monkeypatch.setattr(engine_of(llm).runner, "launch", lambda step: Longer(launch(step), step, lengths))
        assert answers(llm, params) == expected


def ready_constraint(llm: LLM, form: Any, output: Sequence[int] = ()) -> tuple[Grammars, Constraint]:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    grammars = Grammars(lambda: tokenizer)
    grammars.looks_ahead = True
    constraint = Constraint("x", grammars)
    constraint.open(form, [])
    assert grammars.collect(30.0, for_grammars=True) == [constraint]
    for token in output:
        assert constraint.consume(token)
        constraint.start_mask()
        assert grammars.collect(30.0) == [constraint]
    return grammars, constraint


def spelled(llm: LLM, text: str) -> list[int]:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    return tokenizer.encode(text, add_special_tokens=False)


def test_forced_tokens_come_with_their_masks(plain: LLM) -> None:
    whole = spelled(plain, "x then something long; y")
    _, constraint = ready_constraint(plain, {"regex": "[xy] then something long; [xy]"}, whole[:1])
    assert list(constraint.forced) == whole[1 : 1 + grammar.MOST_FORCED]
    masks = constraint.masks_behind(constraint.forced)
    assert len(masks) == len(constraint.forced) == grammar.MOST_FORCED
    _, behind = ready_constraint(plain, {"regex": "[xy] then something long; [xy]"}, whole[:5])
    assert masks[3] == behind.mask
    assert constraint.masks_behind(whole[2:]) == []


@pytest.mark.parametrize(
    ("text", "allowed"),
    [("aaaa", 4), ("aazaa", 2), ("zaa", 0), ("aaaaaaaaaaaa", 8)],
)
def test_a_check_says_how_many_drafts_fit_and_leaves_no_trace(plain: LLM, text: str, allowed: int) -> None:
    form = {"regex": "a{3,}b?"}
    _, constraint = ready_constraint(plain, form, spelled(plain, "a"))
    mask, before = constraint.mask, ready_constraint(plain, form, spelled(plain, "aaa"))[1].mask
    drafts = spelled(plain, text)
    for _ in range(2):
        assert constraint.check(drafts) == allowed == len(constraint.masks_behind(drafts))
    assert constraint.check([*spelled(plain, "aa"), END, END]) == 2  # nothing may follow an end: it is no draft
    assert constraint.check([-1, 5]) == constraint.check([10_000]) == constraint.check([]) == 0
    assert constraint.mask == mask and constraint.error is None and not constraint.complete
    for token in spelled(plain, "aa"):
        assert constraint.consume(token)
    assert constraint.masks_behind(drafts) == [] and constraint.check(drafts) == 0  # not before its mask is there
    constraint.start_mask()
    constraint._grammars.collect(30.0)
    assert constraint.mask == before


def test_a_slow_grammar_is_not_asked_about_drafts(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _, constraint = ready_constraint(plain, {"regex": "[ab]+"}, spelled(plain, "a"))
    monkeypatch.setattr(grammar, "SLOW", 0.0)
    assert constraint.check(spelled(plain, "bb")) == 0
    monkeypatch.setattr(grammar, "SLOW", 1e9)
    assert constraint.check(spelled(plain, "bb")) == 2


def test_a_parser_that_fails_behind_a_draft_costs_the_draft_only(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _, constraint = ready_constraint(plain, {"regex": "[ab]+"}, spelled(plain, "a"))
    compute, calls = grammar._mask, []

    def fails(matcher: Any) -> Any:
        calls.append(matcher)
        if len(calls) == 2:
            raise BaseException("panicked")
        return compute(matcher)

    monkeypatch.setattr(grammar, "_mask", fails)
    assert constraint.check(spelled(plain, "bbb")) == 1
    assert constraint.ready and constraint.error is None
    assert constraint.consume(spelled(plain, "b")[0])


def test_without_speculation_nothing_is_looked_ahead(plain: LLM, drafted: LLM) -> None:
    grammars = [engine_of(llm).grammars for llm in (plain, drafted)]
    assert [one is not None and one.looks_ahead for one in grammars] == [False, True]
