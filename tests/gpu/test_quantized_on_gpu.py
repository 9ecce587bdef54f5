"""Quantized weights and caches on a GPU: answers are those of the CPU's plain path with the same stored numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import pytest
import torch
from gpu_quantized_cases import SHAPES, TOKENS, Answer, Case, Outcome, measure, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

FIXTURES = Path(__file__).parent.parent / "weights" / "data"
Setting = tuple[int, dict[str, str]]  # head dimension, settings
ALONE: list[Setting] = [
    *((64, {"quantization": form}) for form in ("int8", "int4-g128", "int4-g32-zeros", "w8a8", "fp8")),
    *((128, {"kv_cache_dtype": form}) for form in ("int8", "fp8", "int4")),
]
TOGETHER: list[Setting] = [
    (64, {"quantization": "int8", "kv_cache_dtype": "int4"}),
    (64, {"quantization": "int4-g128", "kv_cache_dtype": "int8"}),
    (128, {"quantization": "int4-g32-zeros", "kv_cache_dtype": "fp8"}),
    (128, {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
    (128, {"quantization": "fp8,layers.0=int8,lm_head=int8", "kv_cache_dtype": "fp8"}),
]
PUBLIC = {
    "w4a16_group": {"quantization": "int4"}, "w8a8_static": {"quantization": "w8a8"}, "mixed": {"quantization": "fp8"},
}  # fmt: skip

# How far log-probabilities may be from the CPU's, in the mean and at most: about twice what bfloat16 makes of them on a
# CPU. What is rounded as it is computed, inputs and keys, moves by whole codes; float8 inputs are floats on the CPU.
NEAR = {
    "w8a8": (0.09, 0.45), "fp8": (0.17, 0.7), "kv int8": (0.04, 0.2), "kv fp8": (0.07, 0.3), "kv int4": (0.17, 0.7),
}  # fmt: skip

Outcomes = Callable[[str], Outcome]


def near(options: dict[str, str]) -> tuple[float, float]:
    weights, cache = options.get("quantization", "").split(",")[0], options.get("kv_cache_dtype", "")
    return max(NEAR.get(weights, (0.03, 0.15)), NEAR.get(f"kv {cache}", (0.0, 0.0)))


def case_id(value: int | dict[str, str]) -> str:
    if isinstance(value, int):
        return str(value)
    return " + ".join(form if name == "quantization" else f"kv {form}" for name, form in value.items())


def name_of(head_dim: int, options: dict[str, str]) -> str:
    return f"{head_dim} {case_id(options)}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """All cases at once, since each is one core that compiles; a test waits for its own."""
    models = {head_dim: write_model(tmp_path_factory.mktemp("quantized") / "model", head_dim) for head_dim in SHAPES}
    cases = {
        name_of(head_dim, options): Case(models[head_dim], options, recorded=(head_dim, options) in TOGETHER)
        for head_dim, options in [*TOGETHER, *ALONE]
    }
    cases |= {name: Case(str(FIXTURES / name), vocab=64, longest=60) for name in PUBLIC}
    workers = min(len(cases), os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1)
    found = {name: pool.submit(measure, case) for name, case in cases.items()}
    yield lambda name: found[name].result()
    pool.shutdown(wait=False, cancel_futures=True)


def check_near(mine: list[list[float]], theirs: list[list[float]], allowed: tuple[float, float], what: str) -> None:
    gaps = [abs(a - b) for ours, others in zip(mine, theirs, strict=True) for a, b in zip(ours, others, strict=True)]
    assert all(gap == gap for gap in gaps), f"{what}: a log-probability is no number"
    print(f"{what}: log-probabilities differ by {fmean(gaps):.4f} in the mean, {max(gaps):.4f} at most")
    assert fmean(gaps) < allowed[0] and max(gaps) < allowed[1], f"{what}: more than {allowed}"


def check_against_cpu(outcome: Outcome, allowed: tuple[float, float], what: str) -> None:
    check_near([one.decoded for one in outcome.said], outcome.expected, allowed, f"{what}, decoded")
    check_near(outcome.read, outcome.expected, allowed, f"{what}, read")
    assert len({tuple(one.tokens) for one in outcome.said}) == len(outcome.said)


@pytest.mark.parametrize(("head_dim", "options"), [*ALONE, *TOGETHER], ids=case_id)
def test_answers_are_those_of_the_plain_path(outcomes: Outcomes, head_dim: int, options: dict[str, str]) -> None:
    name = name_of(head_dim, options)
    check_against_cpu(outcomes(name), near(options), name)


@pytest.mark.parametrize("name", PUBLIC)
def test_checkpoints_of_public_tools_answer(outcomes: Outcomes, name: str) -> None:
    outcome = outcomes(name)
    assert any("as stored" in line for line in outcome.plan)
    check_against_cpu(outcome, near(PUBLIC[name]), name)


def equal_up_to_ties(mine: list[list[int]], theirs: list[Answer], gap: float) -> int:
    """How many answers are equal; where one is not, the other token was about as likely."""
    whole = 0
    for ids, other in zip(mine, theirs, strict=True):
        pairs = enumerate(zip(ids, other.tokens, strict=True))
        first = next((at for at, pair in pairs if pair[0] != pair[1]), None)
        if first is None:
            whole += 1
            continue
        table = other.tables[first]
        assert ids[first] in table and table[other.tokens[first]] - table[ids[first]] < gap
    return whole


@pytest.mark.parametrize(("head_dim", "options"), TOGETHER, ids=case_id)
def test_recorded_steps_say_the_same_and_never_wait(outcomes: Outcomes, head_dim: int, options: dict[str, str]) -> None:
    outcome = outcomes(name_of(head_dim, options))
    assert outcome.replays >= TOKENS - 5
    equal = equal_up_to_ties(outcome.again, outcome.said, gap=near(options)[1])
    print(f"{equal} of {len(outcome.said)} answers of recorded steps equal those of plain ones")
    assert equal >= len(outcome.said) // 2  # a recorded step has other rows beside these, and sums in another order
    assert outcome.launched >= 25 and outcome.failed == 0, "a launch waited for the device"
