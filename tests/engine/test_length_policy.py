"""Length prediction, shortest-first and the latency controller: what they promise, and that they change only order."""

import random

import pytest

from tokenmill.config import EngineConfig
from tokenmill.engine.request import Finish, Request
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.control import SloPace
from tokenmill.engine.scheduler.policy import Fcfs, ShortestFirst, WaitingQueue
from tokenmill.engine.scheduler.predict import HIGH, MEDIAN, TABLES, LengthPredictor, Recent
from tokenmill.engine.step import StepResult
from tokenmill.errors import ConfigError
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams
from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.demand.workload import Workload, fixed
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.simulate import shifting, simulate
from tokenmill.step_time import LinearStepTime

PARAMS = SamplingParams(max_tokens=None)


def ask(id, prompt, arrival=0.0, salt="", params=PARAMS):
    return Request(id, [1] * prompt, params, max_tokens=5000, seed=0, arrival=arrival, salt=salt)


def end(request, length, finish=Finish.STOP):
    request.tokens += [2] * length
    request.finish = finish
    return request


def feed(predictor, lengths, count, seed=0, **about):
    source = random.Random(seed)
    for number in range(count):
        prompt = source.choice(sorted(lengths))
        one = ask(f"{seed}-{number}", prompt, **about)
        predictor.promise(one)
        predictor.learn(end(one, lengths[prompt](source)))


def test_a_window_forgets_and_ranks():
    recent = Recent(size=100)
    for value in [*[1000] * 50, *range(100)]:
        recent.add(value)
    assert recent.values == sorted(range(100))
    assert recent.quantile(0.5) == 49 and recent.quantile(1.0) == 99 and recent.quantile(0.5, above=79) == 89
    assert recent.quantile(0.5, above=95) is None
    assert recent.rank(25) == pytest.approx(0.255) and recent.rank(-1) == 0 and recent.rank(1e9) == 1


def test_prompt_length_and_tenant_tell_answers_apart():
    predictor = LengthPredictor()
    feed(predictor, {100: lambda r: r.randint(10, 20), 1000: lambda r: r.randint(300, 500)}, 400)
    assert 10 <= predictor.total(ask("a", 100)) <= 20
    assert 300 <= predictor.total(ask("b", 1005)) <= 500
    feed(predictor, {100: lambda r: r.randint(800, 900)}, 200, seed=1, salt="other")
    assert 800 <= predictor.total(ask("c", 100, salt="other")) <= 900


def test_what_is_said_already_counts():
    predictor = LengthPredictor()
    feed(predictor, {100: lambda r: 10 if r.random() < 0.7 else 500}, 400)
    assert predictor.total(ask("a", 100)) == 10
    assert predictor.total(end(ask("b", 100), 50)) == 500
    assert predictor.total(end(ask("c", 100), 600)) >= 900  # longer than anything known
    assert predictor.total(ask("d", 100, params=SamplingParams(max_tokens=None)), HIGH) == 500


def test_a_prediction_is_at_most_the_limit_and_cancelled_answers_teach_nothing():
    predictor = LengthPredictor()
    for number in range(100):
        predictor.learn(end(ask(str(number), 10), 3, Finish.CANCELLED))
    assert predictor.learned == 0 and predictor.total(ask("a", 10)) == 128
    assert (
        Request("b", [1], PARAMS, max_tokens=7, seed=0)
        and predictor.total(Request("b", [1], PARAMS, max_tokens=7, seed=0)) == 7
    )


@pytest.mark.parametrize("shift", [False, True])
def test_quantiles_cover_what_they_promise(shift):
    """Also when answers become three times as long half way."""
    predictor = LengthPredictor()
    feed(predictor, {p: lambda r, p=p: int(r.lognormvariate(3 + p / 1000, 0.8)) + 1 for p in (50, 400, 2000)}, 2000)
    if shift:
        feed(
            predictor,
            {p: lambda r, p=p: int(r.lognormvariate(4 + p / 1000, 0.8)) + 1 for p in (50, 400, 2000)},
            2000,
            1,
        )
    assert predictor.coverage(HIGH) == pytest.approx(HIGH, abs=0.03)
    assert predictor.coverage(MEDIAN) == pytest.approx(MEDIAN, abs=0.05)


def test_short_ones_first_but_nobody_is_passed_by_those_who_come_much_later():
    policy = ShortestFirst(patience=10.0)
    feed(policy.predictor, {10: lambda r: 5, 1000: lambda r: 900}, 200)
    for number in range(100):
        policy.key(ask(f"w{number}", random.Random(number).choice([10, 1000])))
    queue = WaitingQueue(policy)
    for id, prompt, arrival in (("long", 1000, 0.0), ("short", 10, 4.0), ("late", 10, 11.0)):
        queue.push(ask(id, prompt, arrival))
    order = []
    while (head := queue.head(20.0, may_promote=False)) is not None:
        order.append(head[1].id)
        queue.remove(head[1])
    assert order == ["short", "long", "late"]


def test_memory_is_lent_against_predicted_lengths():
    policy = ShortestFirst()
    feed(policy.predictor, {100: lambda r: 500}, 100)
    kv = KVManager(100, 16)  # 1600 tokens: two requests of 100 + 500 fit, three do not
    scheduler = Scheduler(Limits(8, 512), kv, policy)
    for number in range(3):
        scheduler.add(ask(str(number), 100 + number))
    scheduler.schedule(0.0)
    assert len(scheduler.running) == 2
    eager = Scheduler(Limits(8, 512), KVManager(100, 16), ShortestFirst(reserve=False, predictor=policy.predictor))
    for number in range(3):
        eager.add(ask(f"e{number}", 100 + number))
    eager.schedule(0.0)
    assert len(eager.running) == 3


def test_whoever_is_alone_is_let_in_however_long():
    policy = ShortestFirst()
    feed(policy.predictor, {100: lambda r: 4000}, 100)
    scheduler = Scheduler(Limits(8, 512), KVManager(100, 16), policy)
    scheduler.add(ask("a", 100))
    assert scheduler.schedule(0.0) is not None and len(scheduler.running) == 1


MACHINE = Machine("toy", LinearStepTime(4e-3, 5e-4, 2e-7, 1e-4, 1e-8), 1, 30_000, 1000, 16, 1024, False)


def mixed(count=500, rate=12.0, seed=3):
    """Long prompts get long answers."""
    source, at, arrivals, prompts, outputs = random.Random(seed), 0.0, [], [], []
    for _ in range(count):
        arrivals.append(at)
        at += source.expovariate(rate)
        long = source.random() < 0.3
        prompts.append(source.randint(600, 700) if long else source.randint(50, 60))
        outputs.append(source.randint(200, 300) if long else source.randint(5, 20))
    return Workload("mixed", tuple(arrivals), tuple(prompts), tuple(outputs))


def run(policy, work=None, **changes):
    replica = ReplicaSpec(MACHINE, policy=policy, prefix_caching=False, **changes)
    return simulate(ClusterSpec(replica), work or mixed())


def test_shortest_first_lowers_the_mean_and_what_it_costs_the_last_is_bounded():
    fcfs = run(Fcfs).figures(Slo())
    sjf = run(lambda: ShortestFirst(promote_after=None, patience=10.0)).figures(Slo())
    assert sjf["latency_mean"] < 0.8 * fcfs["latency_mean"]
    assert sjf["latency_p99"] < fcfs["latency_p99"] + 12.0


def test_reserving_spares_preemptions():
    tight = Machine("tight", MACHINE.step_time, 1, 2500, 1000, 16, 1024, False)
    work = mixed(300, 6.0)
    counts = {}
    for reserve in (True, False):
        spec = ReplicaSpec(tight, policy=lambda r=reserve: ShortestFirst(promote_after=None, reserve=r))
        counts[reserve] = simulate(ClusterSpec(spec), work).preemptions
    assert counts[True] < counts[False] / 2


def late_share(outcome, target):
    """Of all gaps between tokens."""
    gaps = [float(gap) for one in outcome.served for gap in one.gaps]
    return sum(gap > target for gap in gaps) / len(gaps)


def test_the_controller_holds_a_target_that_fixed_settings_trade():
    """Few rows with long prompts, then many rows: what fits beside them differs."""
    chat, code = fixed("chat", 900, 50, 150, 12.0), fixed("code", 900, 900, 4, 4.0, seed=1)
    work = shifting(chat, code, 45.0, (9.0, 7.0))
    slo = Slo(ttft=1.0, itl=0.025, share=0.95)
    base = ReplicaSpec(MACHINE, policy=Fcfs, prefix_caching=False)
    settings = {budget: base.with_limits(step_tokens=budget) for budget in (64, 128, 256, 1024)}
    outcomes = {name: simulate(ClusterSpec(spec), work) for name, spec in {**settings, 0: base.led_by(slo)}.items()}
    led = outcomes.pop(0)
    assert late_share(led, slo.itl) < 0.01 < 0.05 < late_share(outcomes[256], slo.itl)
    assert led.goodput(slo) > 1.5 * max(outcomes[one].goodput(slo) for one in (64, 256, 1024))
    assert led.goodput(slo) > 0.97 * outcomes[128].goodput(slo)  # the best, which somebody would have to know


def test_the_controller_never_stops_prompts():
    work = fixed("w", 40, 300, 20, 50.0)  # under a target that cannot be met
    replica = ReplicaSpec(MACHINE, policy=Fcfs, prefix_caching=False, slo_itl_ms=1e-3, slo_ttft_ms=100)
    assert len(simulate(ClusterSpec(replica), work).served) == 40


def paced(itl, base, per_row, seconds=60.0):
    """Tokens per second and the share of late gaps in the second half, with always more requests than rows."""
    limits = Limits(64, 512)
    scheduler = Scheduler(limits, KVManager(4000, 16, False), pace=SloPace(limits, itl))
    now, number, made, late = 0.0, 0, 0, 0
    while now < seconds:
        while len(scheduler.requests) < 100:
            scheduler.add(Request(str(number), [number % 1000] * 100, PARAMS, max_tokens=50, seed=0, arrival=now))
            number += 1
        step = scheduler.schedule(now)
        took = base + per_row * step.num_singles + 1e-5 * (step.num_tokens - step.num_singles)
        now += took
        scheduler.commit(step, StepResult([[5] * bool(samples) for samples in step.samples]), now)
        if now > seconds / 2:
            made += sum(step.samples)
            late += step.num_singles * (took > itl)
    return made / (seconds / 2), late / made


@pytest.mark.parametrize(("itl", "rows"), [(0.012, 8), (0.015, 20), (0.030, 60)])
def test_the_controller_keeps_as_many_rows_as_the_target_allows(itl, rows):
    """A start with full steps is late, which must not hold it down to a row for ever."""
    speed, late = paced(itl, base=0.010, per_row=0.0002)
    assert late < 0.01
    assert speed > 0.8 * rows / (0.010 + 0.0002 * rows)


def test_a_target_that_a_lone_row_misses_holds_nobody_back():
    assert paced(0.005, base=0.010, per_row=0.0)[0] > 1000


def test_salts_that_never_come_back_are_forgotten():
    predictor = LengthPredictor()
    for number in range(2 * TABLES):
        predictor.learn(end(ask(str(number), 10, salt=str(number)), 7))
    assert len(predictor._tables) == TABLES
    assert predictor.total(ask("x", 10, salt="new")) == 7


def test_settings_are_checked():
    assert EngineConfig(policy="sjf", slo_itl_ms=20).slo_ttft_ms is None
    with pytest.raises(ConfigError, match="slo_itl_ms"):
        EngineConfig(slo_itl_ms=0)
    with pytest.raises(ConfigError, match="slo_itl_ms"):
        EngineConfig(slo_ttft_ms=100)
    with pytest.raises(ConfigError, match="policy"):
        EngineConfig(policy="longest")
