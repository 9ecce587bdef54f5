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
from tokenmill.plan.demand.slo import Slo, parse_slo
from tokenmill.plan.demand.workload import Workload, fixed
from tokenmill.plan.planner.candidates import GpuFleet
from tokenmill.plan.planner.explain import as_data, explain, lacks, reasons
from tokenmill.plan.planner.queueing import demand_of, estimate
from tokenmill.plan.planner.search import RESERVE, Choice, Plan, PlanRequest, plan
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.host_memory import HostMemory
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.simulate import simulate
from tokenmill.plan.solve.gpus import GPUS
from tokenmill.plan.solve.hardware import Hardware
from tokenmill.plan.solve.memory import ModelBytes
from tokenmill.plan.solve.roofline import facts_for
from tokenmill.plan.solve.settings import solve

WORK = fixed("chat", 500, 1000, 200, rate=4.0)


def ask(model: str = "llama3-8b", gpu: str = "h200", count: int = 8, rate: float = 4.0, **rest) -> PlanRequest:
    rest.setdefault("slo", Slo(ttft=1.0, itl=0.05))
    return PlanRequest(plan_models.shape(model), GpuFleet(GPUS[gpu], count), replace(WORK.at_rate(rate)), **rest)


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


def test_what_fits_in_no_other_way_is_streamed():
    found = plan(ask("llama3-70b", gpu="l4", count=1))
    placement = found.best.placement
    stream, away = placement.step_time.stream, placement.memory.streamed
    assert stream is not None and stream.nbytes == away.nbytes > 2 * placement.memory.total
    assert placement.memory.total <= placement.memory.budget
    assert found.best.estimate.itl >= stream.seconds
    lines = [line for line in explain(found) if "weights_offload" in line]
    assert len(lines) == 1 and "s of it at 25 GB/s" in lines[0] and "95%" in lines[0]
    small = replace(GPUS["l4"], memory=2 << 30)
    with pytest.raises(ConfigError, match="fits in no way"):
        plan(replace(ask("llama3-70b", gpu="l4", count=1), fleet=GpuFleet(small, 1)))


def test_of_a_mixture_that_fits_in_no_other_way_experts_are_cached():
    found = plan(ask("qwen3-30b-a3b", gpu="l4", count=1, quality="exact", rate=0.01, slo=Slo()))
    placement, shape = found.best.placement, plan_models.shape("qwen3-30b-a3b")
    stream, cached = placement.step_time.stream, placement.memory.cached
    assert stream is not None and stream.by_expert and stream.nbytes == cached.nbytes > 0
    assert 0 < cached.slots < cached.experts == 128 and not placement.memory.streamed.layers
    assert placement.memory.total <= placement.memory.budget
    (line,) = (line for line in explain(found) if "weights_offload" in line)
    assert f"{cached.slots} of 128 experts of every layer stay" in line and "at 25 GB/s (not measured)" in line
    assert any("so experts of it are cached" in line for line in explain(found))
    # A lone token waits for those of its eight experts that have no slot, and for no others.
    free = replace(placement.step_time, stream=None)
    one, many = (facts_for(shape, [500] * rows) for rows in (1, 128))
    waits = placement.step_time.seconds(one) - free.seconds(one)
    assert waits == pytest.approx(cached.bytes_of_token(8) / stream.bytes_per_s, rel=0.01)
    assert waits < stream.seconds / 10
    assert placement.step_time.seconds(many) == pytest.approx(stream.seconds, rel=0.01)


def test_a_tighter_promise_between_tokens_makes_steps_shorter():
    wide = plan(ask(gpu="l4", rate=1.0, count=4, slo=Slo(ttft=5.0, itl=1.0, share=0.99), quality="exact")).best
    tight = plan(ask(gpu="l4", rate=1.0, count=4, slo=Slo(ttft=5.0, itl=0.12, share=0.99), quality="exact")).best
    assert tight.estimate.itl_high <= 0.12 < wide.estimate.itl_high or tight.gpus > wide.gpus


def test_quality_bounds_what_may_be_rounded():
    for quality, loss in (("exact", 0), ("near", 1), ("any", 2)):
        found = plan(ask(gpu="h100", count=2, rate=60.0, quality=quality))
        assert max(one.layout.loss for one in (found.best, *found.others)) == loss


def test_weights_are_rounded_only_where_the_engine_multiplies_them():
    for gpu, forms in (("a100", {"int8", "w8a8", "int4"}), ("l4", {"int8", "w8a8", "int4", "fp8"})):
        found = plan(ask(gpu=gpu, count=2, rate=1.0, quality="any"))
        chosen = {one.layout.weights.quantization for one in (found.best, *found.others)}
        assert chosen - {None} and chosen <= {None, *forms}


def test_a_load_beyond_all_gpus_says_how_many_would_do():
    found = plan(ask(gpu="l4", count=2, rate=200.0))
    assert not found.enough
    assert any("would do" in line for line in explain(found))


def test_requests_longer_than_the_model_are_left_out_and_told():
    """Two of ten are too long for 40,960 positions: the plan is that of the other eight."""
    short = fixed("chat", 8, 1000, 200, rate=1.0)
    both = replace(
        short,
        arrivals=(*short.arrivals, 20.0, 21.0),
        prompts=(*short.prompts, 40_000, 50_000),
        outputs=(*short.outputs, 1_000, 1),
        hash_ids=tuple((number,) for number in range(10)),
    )
    shape, fleet = plan_models.shape("qwen3-0.6b"), GpuFleet(GPUS["h200"], 1)
    found = plan(PlanRequest(shape, fleet, both))
    assert found.ask.left_out == 2 and found.ask.longest == 1200 and len(found.ask.load.hash_ids) == 8
    assert found.best.rate == plan(PlanRequest(shape, fleet, replace(short, hash_ids=both.hash_ids[:8]))).best.rate
    assert any("left out     2 of 10 requests" in line and "40,960" in line for line in explain(found))
    assert as_data(found)["left_out_requests"] == 2
    assert plan(PlanRequest(shape, fleet, both, max_len=41_000)).ask.left_out == 2
    assert not any("left out" in line for line in explain(plan(PlanRequest(shape, fleet, short))))


@pytest.mark.parametrize("limit, hint", [(None, "40,960"), (2000, "max_model_len is 2,000")])
def test_a_load_of_which_nothing_fits_is_refused(limit, hint):
    work = fixed("books", 10, 99_999, 256)
    with pytest.raises(ConfigError, match=f"no request fits: .* 100,255 tokens .*{hint}"):
        plan(PlanRequest(plan_models.shape("qwen3-0.6b"), GpuFleet(GPUS["h200"], 1), work, max_len=limit))


def test_the_first_request_that_is_kept_comes_at_once():
    work = replace(fixed("mixed", 3, 10, 10), arrivals=(0.0, 2.0, 5.0), prompts=(90, 10, 20))
    kept = work.up_to(30)
    assert kept.arrivals == (0.0, 3.0) and kept.prompts == (10, 20)
    assert work.up_to(100) is work and work.up_to(5) is None


@pytest.mark.parametrize("promise", [Slo(ttft=0.5, itl=0.05), Slo()])
@pytest.mark.parametrize("rate", [1.0, 60.0, math.inf])
@pytest.mark.parametrize("quality", ["exact", "near"])
def test_what_is_said_of_rounding_and_promises_is_true(promise, rate, quality):
    work = fixed("chat", 300, 1000, 200, rate)
    found = plan(PlanRequest(plan_models.shape("llama3-8b"), GpuFleet(GPUS["h200"], 4), work, promise, quality))
    text = "\n".join(explain(found))
    assert ("within the promise" in text) == promise.promises
    assert promise.promises or "the promise is kept" not in text
    assert "without rounding anything" not in text
    assert not found.needed or f"{found.needed:.2f}/s come in a busy minute" in text
    why = {name: reason for name, _, reason in reasons(found)}
    for name, loss in (("quantization", found.best.layout.weights.loss), ("kv_cache_dtype", found.best.layout.kv.loss)):
        assert not (loss and "without rounding" in why[name])
        assert (quality == "exact") == ("--quality exact" in why[name])
        if "rounding gains less than 5%" in why[name]:
            assert found.best.rate * 1.06 > max(one.rate for one in found.others)


def test_a_promise_that_nothing_keeps_is_not_called_kept():
    found = plan(ask(slo=Slo(ttft=1e-6), rate=1.0))
    assert not found.enough and "the promise is kept" not in "\n".join(explain(found))
    offline = plan(PlanRequest(found.ask.shape, found.ask.fleet, fixed("all", 9, 1000, 200), Slo(ttft=1e-6)))
    assert any("not even a lone request" in line for line in explain(offline))


@pytest.mark.parametrize(
    "saved, said", [("float16", "as the checkpoint was saved"), ("float32", "of float32, in which")]
)
def test_the_dtype_is_as_saved_only_where_it_is(saved, said):
    found = plan(replace(ask(), shape=replace(plan_models.shape("llama3-8b"), saved_dtype=saved)))
    assert said in next(why for name, _, why in reasons(found) if name == "dtype")


def test_without_arrivals_the_fastest_is_chosen():
    work = fixed("offline", 100, 1000, 200)
    found = plan(PlanRequest(plan_models.shape("llama3-8b"), GpuFleet(GPUS["h200"], 2), work))
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
    calm, busy = (estimate(fit.step_time, demand.at(one), fit.room, 0.9) for one in (rate, rate * factor))
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


def talks(users: int, turns: int, step: int = 1000, block: int = 100) -> Workload:
    """Everybody comes again, one after the other, with all that was said."""
    number = [(turn, user) for turn in range(turns) for user in range(users)]
    ids = tuple(tuple(1000 * user + at for at in range(step * (turn + 1) // block)) for turn, user in number)
    prompts = tuple(step * (turn + 1) + 20 for turn, _ in number)
    arrivals = tuple(2.0 * at for at in range(len(number)))
    return Workload("talks", arrivals, prompts, (30,) * len(number), ids, block)


def test_memory_of_the_host_is_proposed_where_a_load_comes_back_to_what_the_device_forgot():
    shape, fleet = plan_models.shape("llama3-8b"), GpuFleet(GPUS["l4"], 1)
    found = plan(PlanRequest(shape, fleet, talks(40, 4), Slo(), "exact"))
    host, room = found.host, found.best.placement.room
    assert host is not None and host.tokens > room.kv_tokens
    assert host.nbytes == pytest.approx(host.tokens * shape.kv_elements * 2, rel=0.01)
    most = talks(40, 4).cached_share()
    assert found.best.cached_share < 0.1 < 0.9 * most <= host.cached_share <= most
    assert host.rate > 1.2 * found.best.rate and host.faster > 1
    (line,) = (line for line in explain(found) if line.strip().startswith("kv_host_memory"))
    assert f"{host.nbytes:,}" in line and f"{host.cached_share:.0%} of prompt tokens are found then" in line
    assert as_data(found)["reasons"]["kv_host_memory"]["value"] == f"{host.nbytes:,}"
    # The engine's own slots and policy, simulated with that much, find what the plan says.
    step_time, each = found.best.placement.step_time, host.nbytes // host.tokens
    machine = Machine("l4", step_time, 1, room.kv_tokens, each, room.max_rows, room.step_tokens, True)
    shares = []
    for memory in (None, HostMemory(host.nbytes, GPUS["l4"].host)):
        served = simulate(ClusterSpec(ReplicaSpec(machine, host_memory=memory)), talks(40, 4))
        shares.append(served.figures(Slo())["cached_share"])
    assert shares[0] < 0.1 and shares[1] == pytest.approx(host.cached_share, abs=0.05)


@pytest.mark.parametrize("load", ["fits", "never again", "too far"])
def test_memory_of_the_host_is_not_proposed_where_it_brings_nothing(load):
    work = talks(2, 4) if load == "fits" else talks(40, 4)
    work = replace(work, hash_ids=None) if load == "never again" else work
    gpu = replace(GPUS["l4"], host=1e6) if load == "too far" else GPUS["l4"]
    found = plan(PlanRequest(plan_models.shape("llama3-8b"), GpuFleet(gpu, 1), work, Slo(), "exact"))
    assert found.host is None and not any("kv_host_memory" in line for line in explain(found))
