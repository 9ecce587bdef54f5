"""The roofline: what it counts agrees with counting one by one, and more work never takes less time."""

from __future__ import annotations

from dataclasses import replace

import plan_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engine.step import Step
from tokenmill.plan.planner.fit import fit
from tokenmill.plan.solve.gpus import GPUS, parse_gpus, rates_of, recognize
from tokenmill.plan.solve.roofline import ElementBytes, Link, Roofline, facts_for
from tokenmill.plan.solve.shape import Split
from tokenmill.step_time import TYPICAL, Facts, FittedStepTime, facts_of

EIGHT = plan_models.shape("llama3-8b")
COST = Roofline(EIGHT, ElementBytes(2, 2, 2), rates_of(GPUS["h200"], "dense"))


@given(st.integers(0, 300), st.integers(1, 200), st.lists(st.none() | st.integers(1, 250), min_size=1, max_size=3))
def test_pairs_are_those_counted_one_by_one(start, count, windows):
    shape = replace(EIGHT, layers=len(windows), windows=tuple((window, 1) for window in windows))
    counted = sum(
        min(position + 1, window or position + 1) for window in windows for position in range(start, start + count)
    )
    assert shape.pairs(start, count) * len(windows) == pytest.approx(counted)


@pytest.mark.parametrize("name", plan_models.CONFIGS)
def test_a_shape_has_the_parameters_of_its_spec(name):
    spec, shape = plan_models.spec(name), plan_models.shape(name)
    assert shape.parameters == sum(param.numel for param in spec.parameters().values())
    assert abs(shape.active - spec.active_parameters) <= shape.small  # norms are multiplied, but not matrices


LOADS = st.builds(
    Facts,
    decode_rows=st.integers(0, 512),
    decode_context=st.floats(0, 1e6),
    prefill_tokens=st.integers(0, 8192),
    prefill_pairs=st.floats(0, 1e8),
    prefill_context=st.floats(0, 1e6),
    chunks=st.integers(0, 64),
    sampled=st.integers(0, 512),
)


@given(LOADS, st.sampled_from(Facts._fields), st.sampled_from(["llama3-8b", "qwen3-30b-a3b"]))
def test_more_of_anything_never_takes_less_time(load, what, model):
    shape = plan_models.shape(model)
    cost = Roofline(shape, ElementBytes(2, 2, 2), rates_of(GPUS["h200"], "dense"))
    more = load._replace(**{what: getattr(load, what) * 2 + 1})
    assert cost.seconds(more) >= cost.seconds(load)


def test_a_step_of_the_engine_is_judged_as_the_planners():
    step = Step(1, rows=[0, 1, 2], starts=[99, 49, 10], counts=[1, 1, 30], samples=[1, 1, 0], num_singles=2)
    assert facts_of(step) == facts_for(EIGHT, [100, 50], [(10, 30, 0)])


def test_a_roofline_is_a_prior_of_what_is_fitted_to_steps():
    fitted = FittedStepTime(COST)
    for facts in TYPICAL:
        assert fitted.seconds(facts) == pytest.approx(COST.seconds(facts), rel=0.15)


def test_dividing_a_model_shortens_large_steps_and_costs_exchanges_in_small_ones():
    link = Link(450e9, 9e-6)
    whole, half = COST, replace(COST, split=Split(tensor=2), link=link)
    large = facts_for(EIGHT, [1000] * 128, [(0, 4096, 1)])
    assert 0.5 < half.seconds(large) / whole.seconds(large) < 0.7
    far = replace(half, link=Link(1e9, 1e-3))
    assert far.seconds(facts_for(EIGHT, [10])) > whole.seconds(facts_for(EIGHT, [10]))


def test_a_mixture_reads_few_experts_for_few_tokens_and_all_for_many():
    shape = plan_models.shape("qwen3-30b-a3b")
    assert shape.experts_read(1) == pytest.approx(shape.expert_weights * 8 / 128)
    assert shape.experts_read(500) == pytest.approx(shape.expert_weights, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.fixed_dictionaries({name: st.floats(0.4, 2.5) for name in ("weight_bytes", "kv_bytes", "linear_flops")}))
def test_a_fit_finds_the_rates_that_made_the_times(factors):
    true = replace(COST.rates, **{name: getattr(COST.rates, name) * factor for name, factor in factors.items()})
    loads = [facts_for(EIGHT, [context] * rows) for rows in (1, 8, 64, 256) for context in (64, 1024, 4096)]
    loads += [facts_for(EIGHT, [], [(0, tokens, 1)]) for tokens in (64, 512, 4096)]
    times = [replace(COST, rates=true).seconds(load) for load in loads]
    found = fit(COST.rates, lambda rates: [replace(COST, rates=rates).seconds(load) for load in loads], times)
    assert found.worst < 0.02
    for name, factor in factors.items():
        assert getattr(found.rates, name) / getattr(COST.rates, name) == pytest.approx(factor, rel=0.25)


def test_gpus_are_known_by_their_names():
    assert parse_gpus("H200x8") == (GPUS["h200"], 8)
    assert parse_gpus("l4") == (GPUS["l4"], 1)
    assert recognize("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert recognize("NVIDIA L40S") is GPUS["l40s"]
    assert recognize("NVIDIA GeForce RTX 4090") is GPUS["rtx4090"]
    assert recognize("NVIDIA GeForce GT 710") is None
