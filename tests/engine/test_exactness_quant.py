"""Under one quantization, of weights or cache or both, the answer does not depend on how it was computed."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
import torch
from exactness_ways import QUANTIZED, WAYS, Engines, Outcome, Subject, write_model

from tokenmill import LLM, SamplingParams
from tokenmill.ops.native.library import Library, load

PAIRS = [name for name in QUANTIZED if " + " in name]  # these take every other way, in turns


pytest.importorskip("llguidance")  # for structured output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "groups")


@pytest.fixture(scope="module", params=QUANTIZED)
def engines(request: pytest.FixtureRequest, model: str) -> Iterator[tuple[str, Engines]]:
    if request.param.startswith("packed") and not isinstance(load(), Library):
        pytest.skip("needs the native library")
    opened = Engines(QUANTIZED[request.param], model)
    yield request.param, opened
    opened.close()


def check(engines: Engines, way: str, seed: int) -> None:
    outcome, case = engines.compare(way, seed), f"{way}, seed {seed}"
    subject = engines.subject
    assert outcome.happened, f"{case}: no {WAYS[way].proof}, so this proves nothing"
    assert not outcome.differ, f"{case}: {outcome}"
    assert not (subject.bits and outcome.other_bits), f"{case}: {outcome}"


def test_the_answer_does_not_depend_on_how_it_was_computed(engines: tuple[str, Engines]) -> None:
    name, opened = engines
    for way in list(WAYS)[PAIRS.index(name) % 2 :: 2] if name in PAIRS else WAYS:
        check(opened, way, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_the_answer_does_not_depend_on_how_it_was_computed_with_more_mixes(
    engines: tuple[str, Engines], seed: int
) -> None:
    for way in WAYS:
        check(engines[1], way, seed)


def prompt_logprobs(llm: LLM) -> list[float]:
    prompt = [(11 * i) % 60 + 3 for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    tables = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    assert tables is not None
    return [table[token].logprob for token, table in zip(prompt[1:], tables[1:], strict=True) if table is not None]


def test_quantization_does_change_the_answer_and_only_a_little(engines: tuple[str, Engines], model: str) -> None:
    """Were it equal, the test above would compare floats with floats."""
    _, opened = engines
    kept = opened.subject.fixture is not None  # the floats that its codes stand for may be equal
    floats = {"quantization": "fp32", "ops": "reference"} if kept else {}
    plain = Subject(floats, opened.subject.fixture, "float32" if kept else opened.subject.dtype).open(model)
    pairs = zip(prompt_logprobs(opened.plain), prompt_logprobs(plain), strict=True)
    plain.shutdown()
    assert (0 if kept else 1e-4) < fmean(abs(mine - theirs) for mine, theirs in pairs) < 0.5


@pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
def test_packed_answers_do_not_depend_on_the_number_of_threads(model: str) -> None:
    found: list[Any] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            engines = Engines(QUANTIZED["packed int8"], model)
            outcome = engines.compare("batch", 0)
            assert outcome == Outcome(answers=5, happened=outcome.happened)
            found.append(prompt_logprobs(engines.plain))
            engines.close()
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
