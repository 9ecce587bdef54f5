"""The planner: what it chooses follows from the load and the promise, and it says why."""

from __future__ import annotations

import math
from dataclasses import replace

import plan_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.plan.candidates import GpuFleet
from tokenmill.plan.explain import as_data, explain, lacks
from tokenmill.plan.gpus import GPUS
from tokenmill.plan.hardware import Hardware
from tokenmill.plan.memory import ModelBytes
from tokenmill.plan.planner import RESERVE, Ask, Choice, Plan, plan
from tokenmill.plan.queueing import Slo, demand_of, estimate, parse_slo
from tokenmill.plan.solve import solve
from tokenmill.plan.workload import fixed

WORK = fixed("chat", 500, 1000, 200, rate=4.0)


def ask(model: str = "llama3-8b", gpu: str = "h200", count: int = 8, rate: float = 4.0, **rest) -> Ask:
    rest.setdefault("slo", Slo(ttft=1.0, itl=0.05))
    return Ask(plan_models.shape(model), GpuFleet(GPUS[gpu], count), replace(WORK.at_rate(rate)), **rest)


def test_a_small_load_takes_one_gpu_and_rounds_nothing():
    found = plan(ask())
    assert found.enough and found.best.gpus == 1 and found.best.layout.loss == 0
    assert found.best.estimate.meets(found.ask.slo)


def test_a_larger_load_takes_more_gpus_and_never_fewer():
    used = [plan(ask(rate=rate, quality="exact")).best.gpus for rate in (2, 20, 60, 150)]
    assert used == sorted(used) and used[0] == 1 and used[-1] > 2


def test_a_model_that_is_too_large_for_one_gpu_is_divided():
    best = plan(ask("llama3-70b", quality="exact", rate=0.5)).best
    assert best.layout.split.gpus > 1
    with pytest.raises(ConfigError, match="fits in no way"):
        plan(ask("llama3-70b", gpu="l4", count=1))


def test_a_tighter_promise_between_tokens_makes_steps_shorter():
    wide = plan(ask(gpu="l4", rate=1.0, count=4, slo=Slo(ttft=5.0, itl=1.0, share=0.99), quality="exact")).best
    tight = plan(ask(gpu="l4", rate=1.0, count=4, slo=Slo(ttft=5.0, itl=0.12, share=0.99), quality="exact")).best
    assert tight.estimate.itl_high <= 0.12 < wide.estimate.itl_high or tight.gpus > wide.gpus


def test_quality_bounds_what_may_be_rounded():
    for quality, loss in (("exact", 0), ("near", 1), ("any", 2)):
        found = plan(ask(gpu="h100", count=2, rate=60.0, quality=quality))
        assert max(one.layout.loss for one in (found.best, *found.others)) == loss


def test_weights_are_rounded_only_where_the_engine_multiplies_them():
    found = plan(ask(gpu="l4", count=2, rate=1.0, quality="any"))
    assert all(one.layout.weights.quantization is None for one in (found.best, *found.others))


def test_a_load_beyond_all_gpus_says_how_many_would_do():
    found = plan(ask(gpu="l4", count=2, rate=200.0))
    assert not found.enough
    assert any("would do" in line for line in explain(found))


def test_without_arrivals_the_fastest_is_chosen():
    work = fixed("offline", 100, 1000, 200)
    found = plan(Ask(plan_models.shape("llama3-8b"), GpuFleet(GPUS["h200"], 2), work))
    assert found.best.gpus == 2
    assert found.best.rate >= max(one.rate for one in found.others) * 0.94  # 5 % are no difference


def test_every_runner_up_is_told_what_it_lacks():
    found = plan(ask(rate=30.0, price=3.5))
    text = "\n".join(explain(found))
    assert all(lacks(found, one) in text for one in found.others[:5])
    assert "per million tokens" in text
    data = as_data(found)
    assert data["plan"]["gpus"] == found.best.gpus and len(data["runners_up"]) == 5
    assert data["plan"]["price_per_million_tokens"] == pytest.approx(
        3.5 * found.best.gpus / 3600 / (found.needed * 1200) * 1e6
    )


def _choices(found: Plan) -> list[Choice]:
    return [found.best, *found.others]


@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(0.05, 300),
    ttft=st.sampled_from([0.2, 1.0, math.inf]),
    itl=st.sampled_from([0.02, 0.1, math.inf]),
    gpu=st.sampled_from(["h200", "l4"]),
    model=st.sampled_from(["qwen3-0.6b", "qwen3-30b-a3b"]),
)
def test_a_plan_that_is_enough_keeps_its_promise(rate, ttft, itl, gpu, model):
    found = plan(ask(model, gpu, 4, rate, slo=Slo(ttft, itl), quality="exact"))
    assert all(one.gpus <= 4 for one in _choices(found))
    if found.enough:
        assert found.best.rate >= found.needed * RESERVE
        assert found.best.estimate.meets(found.ask.slo)
        assert found.best.gpus == min(one.gpus for one in _choices(found) if one.rate >= found.ask.wanted)


@given(st.floats(0.1, 3), st.floats(1.1, 4))
def test_more_load_never_makes_answers_faster(rate, factor):
    best = plan_models.shape("llama3-8b")
    fit = next(
        GpuFleet(GPUS["h200"], 1).place(best, layout, longest=2000, rows=256, step_tokens=2048)
        for layout in GpuFleet(GPUS["h200"], 1).layouts(best, 0)
    )
    demand = demand_of(WORK, 0.9)
    calm, busy = (estimate(fit.cost, demand.at(one), fit.room, 0.9) for one in (rate, rate * factor))
    assert busy.rows >= calm.rows and busy.ttft >= calm.ttft * 0.99 and busy.itl >= calm.itl * 0.99


def test_promises_are_read_from_text():
    assert parse_slo("ttft=500ms,itl=0.05s,p=99") == Slo(0.5, 0.05, 0.99)
    assert parse_slo(None) == Slo()
    for wrong in ("ttft", "ttft=-1s", "p=120", "speed=3", "itl=fast"):
        with pytest.raises(ConfigError, match="written as"):
            parse_slo(wrong)


@pytest.mark.parametrize(
    ("model", "gpu", "tokens"),
    [
        ("qwen3-0.6b", "NVIDIA H200", 16384),
        ("llama3-8b", "NVIDIA H200", 8192),
        ("qwen3-30b-a3b", "NVIDIA H200", 16384),
        ("llama3-8b", "NVIDIA L4", 2048),  # 8192 tokens would hold up whoever decodes for more than a second
        ("llama3-8b", "a GPU of next year", 8192),
    ],
)
def test_an_engine_left_to_itself_takes_steps_that_suit_its_gpu(model, gpu, tokens):
    spec = plan_models.spec(model)
    sizes = ModelBytes(1, 1, 1, 1, 1, flops_per_token=2.0 * spec.active_parameters)
    solved = solve(EngineConfig(), sizes, 1000, Hardware("cuda", gpu, 1 << 40, 1 << 40))
    assert solved.max_step_tokens == tokens
