"""Structured output: what is sampled fits its grammar, whatever else happens to the request and beside it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grammar_models import END, closers, open_model, write_model

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Finish, Request
from tokenmill.errors import InvalidRequest
from tokenmill.sampling import grammar, structured
from tokenmill.sampling.grammar import Constraint, Grammars

pytest.importorskip("llguidance")

PROMPT = [9, 30, 77, 50]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_model(model, overlap=request.param) as opened:
        yield opened


def params(llm: LLM, form: Any, **more: Any) -> SamplingParams:
    return SamplingParams(**{"structured": form, "max_tokens": 200, "logit_bias": closers(llm), "seed": 1} | more)


def one(llm: LLM, form: Any, prompt: list[int] = PROMPT, **more: Any) -> Any:
    output = llm.generate([prompt], params(llm, form, **more), use_tqdm=False)[0]
    assert output.error is None
    return output.outputs[0]


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 130
        and set(value["tags"]) <= {"a", "é", "c"}
        and len(value["tags"]) <= 3
    )


def test_every_sequence_of_a_request_fits_the_schema(llm: LLM) -> None:
    outputs = llm.generate([PROMPT], params(llm, {"json": PERSON}, n=8, temperature=1.5), use_tqdm=False)[0].outputs
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert all(is_person(output.text) for output in outputs)
    assert len({output.text for output in outputs}) > 4  # each follows its own path through the grammar


@pytest.mark.parametrize("regex", [r"\d{3}-[a-f]{2,4}", "(ab|abc)+x?", "[^a]é?", r"a/b\\c\"", "\\w\\.\\n"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_whole_answer_matches_the_regex(llm: LLM, regex: str, temperature: float) -> None:
    for seed in range(4):
        output = one(llm, {"regex": regex}, temperature=temperature, seed=seed, max_tokens=400)
        if output.finish_reason == "stop":  # (ab|abc)+ need not end
            assert re.fullmatch(regex, output.text, re.ASCII if "d" in regex else 0), output.text
    assert output.finish_reason == "stop" or "+" in regex


def test_one_of_the_choices_is_said(llm: LLM) -> None:
    choices = ["yes", "yes sir", "no", 'a "quoted"\n\\thing', "é\u2028|/", "</s>"]
    said = {one(llm, {"choice": choices}, seed=seed, temperature=2.0).text for seed in range(40)}
    assert said <= set(choices) and len(said) > 2


def test_a_choice_that_spells_a_special_token_is_said_in_ordinary_ones(llm: LLM) -> None:
    output = one(llm, {"choice": ["</s>"]})
    assert output.text == "</s>" and END not in output.token_ids[:-1] and len(output.token_ids) >= 4


def test_a_lark_grammar_leads(llm: LLM) -> None:
    form = {"grammar": 'start: sum\nsum: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,2}/'}
    for seed in range(5):
        output = one(llm, form, seed=seed, max_tokens=60)
        unfinished = "" if output.finish_reason == "stop" else r"\+?"
        assert re.fullmatch(r"\d{1,2}(\+\d{1,2})+" + unfinished, output.text)


def test_any_object_will_do_for_json_object(llm: LLM) -> None:
    output = one(llm, {"json_object": True}, logit_bias=closers(llm, 8.0))
    assert output.finish_reason == "stop" and isinstance(json.loads(output.text), dict)


def test_an_end_token_ends_an_answer_that_could_go_on_but_need_not(llm: LLM) -> None:
    bias = {END: 20.0}
    output = one(llm, {"regex": "a{3,}"}, logit_bias=bias)
    assert (output.text, output.finish_reason, output.stop_reason) == ("aaa", "stop", None)
    assert output.token_ids[-1] == END
    ignored = one(llm, {"regex": "a{3,}"}, logit_bias=bias, ignore_eos=True)
    assert (ignored.text, ignored.finish_reason) == ("aaa", "stop")  # nothing can follow an end, wanted or not


def test_an_answer_that_may_not_end_yet_runs_into_max_tokens(llm: LLM) -> None:
    output = one(llm, {"regex": "a{50}"}, max_tokens=7, logit_bias={END: 50.0})
    assert (output.text, output.finish_reason) == ("aaaaaaa", "length")


def test_the_same_with_penalties_filters_and_stops(llm: LLM) -> None:
    output = one(
        llm, {"json": PERSON}, repetition_penalty=3.0, presence_penalty=2.0, frequency_penalty=2.0, top_k=3, top_p=0.5,
        min_p=0.2, temperature=0.8,
    )  # fmt: skip
    assert is_person(output.text)
    stopped = one(llm, {"json": PERSON}, stop=['"age"'])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"age"')
    assert stopped.text.startswith("{") and stopped.text.replace(" ", "").replace("\n", "").endswith('",')


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """Before the mask: what the model thought of the tokens that it had to take."""
    output = one(llm, {"choice": ["q"]}, logprobs=0, temperature=0.0, logit_bias=None)
    free = llm.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=333, temperature=0), use_tqdm=False)
    [token] = output.token_ids
    assert output.logprobs[0][token].logprob == pytest.approx(free[0].outputs[0].logprobs[0][token].logprob)
    assert output.logprobs[0][token].rank > 1


def free_params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=20, seed=5, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=6, max_tokens=60, ignore_eos=True, frequency_penalty=0.5, logprobs=2),
    ]


def test_neighbours_with_a_grammar_change_nothing_for_the_others(llm: LLM) -> None:
    prompts = [[7 * k + i for i in range(20)] for k in range(3)]
    alone = [o.outputs[0].token_ids for o in llm.generate(prompts, free_params(), use_tqdm=False)]
    mixed = llm.generate(
        [PROMPT, *prompts, PROMPT],
        [params(llm, {"json": PERSON}), *free_params(), params(llm, {"regex": "x{80}"}, n=3)],
        use_tqdm=False,
    )
    assert [o.outputs[0].token_ids for o in mixed[1:4]] == alone
    assert is_person(mixed[0].outputs[0].text)
    assert [o.text for o in mixed[4].outputs] == ["x" * 80] * 3


def test_a_row_forgets_the_grammar_of_the_request_before(model: str) -> None:
    with open_model(model, max_num_seqs=1) as llm:
        free = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        before = llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].token_ids
        assert one(llm, {"choice": ["abc"]}).text == "abc"
        assert llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].token_ids == before


def answers(llm: LLM) -> list[list[tuple[list[int], str | None]]]:
    """Twelve long answers to prompts that share a prefix, some of them several."""
    forms: list[Any] = [{"json": PERSON}, {"regex": "[a-z ]{90}"}, {"regex": "(x|yz){60,}"}, None]
    mix = [params(llm, forms[k % 4], seed=k, n=1 + k % 2, max_tokens=100, ignore_eos=True) for k in range(12)]
    prompts = [list(range(10, 60 + k)) for k in range(12)]
    outputs = llm.generate(prompts, mix, use_tqdm=False)
    llm._processor.engine.scheduler.check_integrity()  # type: ignore[attr-defined]
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


def test_tokens_do_not_depend_on_batching_caching_preemption_or_overlap(model: str) -> None:
    with open_model(model, max_num_seqs=1, overlap=False, enable_prefix_caching=False) as llm:
        expected = answers(llm)
    cell = 2 * 2 * 2 * 8 * 8  # bytes per token: two layers, keys and values, two heads of 8 in float64
    for options in (
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "overlap": True, "enable_prefix_caching": True},
        {"max_num_seqs": 16, "overlap": True, "max_num_batched_tokens": 16},
        {"max_num_seqs": 16, "overlap": True, "block_size": 8, "kv_cache_memory": 48 * 8 * cell, "max_model_len": 256},
    ):
        with open_model(model, **options) as llm:
            assert answers(llm) == expected, options
            preemptions = llm._processor.engine.scheduler.stats.preemptions  # type: ignore[attr-defined]
            assert bool(preemptions) == ("kv_cache_memory" in options)


def drive(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()


def constrained(id: str, form: Any, output: list[int], **more: Any) -> Request:
    request = Request(id, PROMPT, SamplingParams(structured=form, max_tokens=40), max_tokens=40, seed=3, **more)
    request.tokens += output
    return request


def test_a_request_goes_on_from_the_tokens_it_has_said(llm: LLM) -> None:
    """What another engine process does with a request whose first engine died."""
    engine = llm._processor.engine
    assert isinstance(engine, Engine)
    whole = constrained("whole", {"regex": "[a-z]{12}=[0-9]{5}"}, [])
    drive(engine, [whole])
    for said in range(len(whole.output) + 1):
        resumed = constrained(f"after {said}", {"regex": "[a-z]{12}=[0-9]{5}"}, whole.output[:said])
        drive(engine, [resumed])
        assert resumed.output == whole.output
        assert resumed.finish is Finish.STOP


def test_an_output_that_never_fitted_its_grammar_fails_alone(llm: LLM) -> None:
    engine = llm._processor.engine
    assert isinstance(engine, Engine)
    wrong = constrained("wrong", {"regex": "[a-z]{12}"}, [END])
    right = constrained("right", {"regex": "[a-z]{12}"}, [])
    drive(engine, [wrong, right])
    assert wrong.finish is Finish.ERROR and "does not fit its grammar" in str(wrong.error)
    assert right.finish is Finish.STOP
    engine.scheduler.check_integrity()


def test_cancelled_while_its_grammar_is_compiled(llm: LLM) -> None:
    engine = llm._processor.engine
    assert isinstance(engine, Engine)
    request = constrained("gone", {"json": PERSON}, [])
    engine.add(request)
    engine.cancel("gone")
    while engine.has_work:
        engine.step()
    assert request.finish is Finish.CANCELLED
    engine.scheduler.check_integrity()


def test_an_id_may_be_used_again_while_the_old_grammar_is_compiled(llm: LLM) -> None:
    engine = llm._processor.engine
    assert isinstance(engine, Engine)
    for again in (
        Request("twice", PROMPT, SamplingParams(), max_tokens=4, seed=0),
        constrained("twice", {"choice": ["abc"]}, []),
    ):
        engine.add(constrained("twice", {"json": PERSON | {"title": again.params.temperature}}, []))
        engine.cancel("twice")
        drive(engine, [again])
        assert again.finish in (Finish.STOP, Finish.LENGTH) and again.num_output <= 4


def test_failed_steps_do_not_disturb_the_grammar(model: str) -> None:
    with open_model(model, overlap=True) as llm:
        engine = llm._processor.engine
        assert isinstance(engine, Engine)
        launch, count = engine.runner.launch, 0

        def sometimes(step: Any) -> Any:
            nonlocal count
            count += 1
            if count % 5 == 0:
                raise RuntimeError("the device tripped")
            return launch(step)

        expected = [constrained(str(k), {"regex": "[a-z]{20}"}, []) for k in range(3)]
        drive(engine, expected)
        engine.runner.launch = sometimes  # type: ignore[method-assign]
        tripped = [constrained(str(k), {"regex": "[a-z]{20}"}, []) for k in range(3)]
        drive(engine, tripped)
        assert count > 10
        assert [r.output for r in tripped] == [r.output for r in expected]


def test_a_slow_mask_holds_nobody_else_back(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = grammar._mask
    monkeypatch.setattr(grammar, "_mask", lambda matcher: (time.sleep(0.03), compute(matcher))[1])
    with open_model(model) as llm:
        engine = llm._processor.engine
        assert isinstance(engine, Engine)
        free = Request("free", PROMPT, SamplingParams(max_tokens=100), max_tokens=100, seed=0)
        slow = constrained("slow", {"regex": "[a-z]{30}"}, [])
        engine.add(slow)
        engine.add(free)
        while not free.finished:
            engine.step()
        assert slow.num_output < 30
        while engine.has_work:
            engine.step()
        assert slow.finish is Finish.STOP and slow.num_output >= 10


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 1}}, "Unsatisfiable"),
        ({"json": {"$ref": "http://example.org/x"}}, "example.org"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": False}, "a JSON schema is an object"),
        ({"json": {"enum": [2**53 + 1]}}, "not exact"),
        ({"json": {"x-guidance": {"lenient": 3}}}, "cannot be compiled"),
        ({"json": "{nonsense"}, "no JSON text"),
        ({"json": 3}, "a JSON schema is an object"),
        ({"json": {"enum": [{1, 2}]}}, "cannot be written as JSON"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"regex": "[a"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": ""}, "non-empty"),
        ({"regex": 5}, "non-empty string"),
        ({"regex": "a" * 20_000}, "at most 16384"),
        ({"grammar": "start: nobody"}, "nobody"),
        ({"grammar": 'begin: "a"'}, "start"),
        ({"choice": []}, "list of texts"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": ["a", 3]}, "non-empty string"),
        ({"choice": ["a"] * 2000}, "at most 1024"),
        ({"json_object": False}, "True"),
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"regexp": "a"}, "regexp"),
        ("json", "must be a dict"),
        ({"regex": "\ud800"}, "surrogates"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_a_sentence(llm: LLM, form: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        llm.generate([PROMPT], SamplingParams(structured=form), use_tqdm=False)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_schemas_are_bounded() -> None:
    SamplingParams(structured={"json": nested(structured.MAX_SCHEMA_DEPTH - 2)})
    for depth in (structured.MAX_SCHEMA_DEPTH + 1, 200_000):
        with pytest.raises(InvalidRequest, match="nested more than"):
            SamplingParams(structured={"json": nested(depth)})
    with pytest.raises(InvalidRequest, match=r"no JSON text|nested"):
        SamplingParams(structured={"json": '{"items":' * 10_000 + "{}" + "}" * 10_000})
    with pytest.raises(InvalidRequest, match="more than 20000 values"):
        SamplingParams(structured={"json": {"enum": list(range(30_000))}})
    with pytest.raises(InvalidRequest, match="bytes"):
        SamplingParams(structured={"json": {"const": "x" * 200_000}})
    cycle: dict[str, Any] = {}
    cycle["items"] = cycle
    with pytest.raises(InvalidRequest, match="nested more than"):
        SamplingParams(structured={"json": cycle})


@pytest.mark.parametrize("other", [{"beam_width": 2}, {"bad_words": ["a"]}, {"min_tokens": 3}])
def test_what_could_forbid_the_only_token_that_fits_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        SamplingParams(structured={"regex": "a"}, **other)


def test_the_users_schema_may_change_after_it_was_handed_in() -> None:
    schema: dict[str, Any] = {"type": "string"}
    made = SamplingParams(structured={"json": schema})
    schema["type"] = "integer"
    assert made.structured == {"json": '{"type": "string"}'}
    made.check()
    assert made.structured == {"json": '{"type": "string"}'}


def test_a_class_with_a_schema_is_a_schema() -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "boolean"}

    assert SamplingParams(structured={"json": Model}).structured == {"json": '{"type": "boolean"}'}


def test_parameters_survive_the_wire() -> None:
    for form in ({"json": PERSON}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}, {"grammar": "x"}):
        made = SamplingParams(structured=form)  # type: ignore[arg-type]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made


def test_without_the_library_the_refusal_says_what_to_install(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with open_model(model) as llm, pytest.raises(InvalidRequest, match="llguidance"):
        llm.generate([PROMPT], SamplingParams(structured={"regex": "a"}), use_tqdm=False)


def test_the_library_is_imported_with_the_first_structured_request_only(model: str) -> None:
    import subprocess

    program = (
        "import sys; from grammar_models import open_model; from tokenmill import SamplingParams\n"
        f"llm = open_model({model!r})\n"
        "llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "assert 'llguidance' not in sys.modules\n"
        "llm.generate([[5, 6]], SamplingParams(max_tokens=2, structured={'regex': 'ab'}), use_tqdm=False)\n"
        "assert 'llguidance' in sys.modules\n"
    )
    here = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n" + program],
        check=True, timeout=120,
    )  # fmt: skip


def test_an_engine_without_a_tokenizer_reads_it_for_the_first_grammar(model: str) -> None:
    with open_model(model, skip_tokenizer_init=True) as llm:
        free = SamplingParams(structured={"regex": "ab"}, max_tokens=5, detokenize=False)
        assert llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].finish_reason == "stop"


def test_a_model_without_a_tokenizer_says_so(tiny_model: str) -> None:
    with open_model(tiny_model, skip_tokenizer_init=True) as llm:
        output = llm.generate([PROMPT], SamplingParams(structured={"regex": "ab"}), use_tqdm=False)[0]
        assert output.outputs[0].finish_reason == "error" and "tokenizer.json" in str(output.error)


def test_compiled_grammars_are_shared_and_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILED", 3)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    grammars = Grammars(lambda: tokenizer)
    for number in (1, 2, 3, 4, 5, 5, 4):
        constraint = Constraint("x", grammars)
        constraint.open({"regex": f"a{{{number}}}"}, [])
        assert grammars.collect(30.0, for_grammars=True) == [constraint] and constraint.ready
    assert len(grammars._compiled) == 3
    grammars.close()
