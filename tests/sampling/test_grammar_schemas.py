"""Whatever a random model says under a schema of the official JSON Schema test suite is valid under that schema."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_models import closers, open_model, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest
from tokenmill.sampling.grammar import check_grammar
from tokenmill.sampling.structured import checked_structured

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SUITE = "JSON-Schema-Test-Suite_d7_d2020.tgz"  # folders tests/draft7 and tests/draft2020-12 of the suite
VALIDATORS = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}
URIS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_model(tmp_path_factory.mktemp("models") / "bytes")
    with open_model(folder, max_num_seqs=64, dtype="float32") as opened:
        yield opened


def suite() -> list[tuple[str, Any]]:
    """(draft, schema) of every group of tests."""
    here = Path(__file__).resolve()
    found = [path for up in (2, 3) if (path := here.parents[up] / "shared" / "data" / SUITE).is_file()]
    if not found:
        pytest.skip(f"{SUITE} is not here")
    schemas = []
    with tarfile.open(found[0]) as archive:
        for member in archive:
            parts = Path(member.name).parts
            if member.name.endswith(".json") and len(parts) == 3 and (content := archive.extractfile(member)):
                schemas += [(parts[1], group["schema"]) for group in json.load(content)]
    return schemas


def compilable(schema: Any) -> bool:
    try:
        form = checked_structured({"json": schema})
        assert form is not None
        check_grammar(form)
    except InvalidRequest as error:
        assert str(error)
        return False
    return True


def spoken(llm: LLM, schemas: list[Any], **more: Any) -> list[tuple[Any, str, str | None]]:
    """(schema, answer, why it ended), two answers per schema."""
    bias = closers(llm, 3.0)
    mix = [
        SamplingParams(structured={"json": schema}, max_tokens=150, n=2, seed=number, logit_bias=bias, **more)
        for number, schema in enumerate(schemas)
    ]
    outputs = llm.generate([[5, 10 + number % 80] for number in range(len(mix))], mix, use_tqdm=False)
    assert not [output.error for output in outputs if output.error]
    return [
        (schema, one.text, one.finish_reason)
        for schema, output in zip(schemas, outputs, strict=True)
        for one in output.outputs
    ]


def test_answers_are_valid_under_the_schemas_of_the_suite(llm: LLM) -> None:
    schemas = [(draft, schema) for draft, schema in suite() if isinstance(schema, dict)]
    usable = [(draft, schema | {"$schema": URIS[draft]}) for draft, schema in schemas]
    # Python's regular expressions, with which answers are checked, know no \p.
    usable = [(draft, schema) for draft, schema in usable if compilable(schema) and "\\\\p" not in json.dumps(schema)]
    assert len(usable) > len(schemas) / 2
    ended = 0
    for draft, validator in VALIDATORS.items():
        mine = [schema for name, schema in usable if name == draft]
        for schema, text, reason in spoken(llm, mine, temperature=1.0):
            if reason == "stop":
                ended += 1
                errors = [error.message for error in validator(schema).iter_errors(json.loads(text))]
                assert not errors, (schema, text, errors)
    assert ended > len(usable)


names = st.sampled_from(["a", "b", "name", "é", 'quo"te', "x y"])
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-50, 50),
              st.integers(0, 2000)),
    st.builds(lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span}, st.integers(0, 5),
              st.integers(0, 10)),
    st.just({"type": "string", "pattern": "^[a-c]+[0-9]{2}$"}),
    st.just({"type": "string", "format": "date"}),
    st.builds(lambda values: {"enum": values},
              st.lists(st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.none(), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.one_of(st.booleans(), st.text(max_size=5), st.just({"a": [1, None]}))),
)  # fmt: skip


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def an_object(properties: dict[str, Any], required: int, more: bool) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:required],
            "additionalProperties": more,
        }

    return st.one_of(
        st.builds(an_object, st.dictionaries(names, inner, max_size=4), st.integers(0, 4), st.booleans()),
        st.builds(lambda items, low, span: {"type": "array", "items": items, "minItems": low, "maxItems": low + span},
                  inner, st.integers(0, 2), st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda target: {"$ref": "#/$defs/it", "$defs": {"it": target}}, leaves),
    )  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas=st.lists(st.recursive(leaves, branches, max_leaves=6), min_size=8, max_size=16))
def test_answers_are_valid_under_made_up_schemas(llm: LLM, schemas: list[Any]) -> None:
    usable = [schema for schema in schemas if compilable(schema)]
    for schema, text, reason in spoken(llm, usable, temperature=1.2):
        if reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
