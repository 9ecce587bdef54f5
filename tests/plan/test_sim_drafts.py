"""Simulated drafts against the engine's own loop with replayed ones, and what plans and simulations make of them."""

import json
import random

import plan_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sim_replica import COST, ROWS, machine, make_jobs, serve_alone
from typer.testing import CliRunner

from tokenmill.cli.app import app
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.policy import Fcfs
from tokenmill.engine.speculation.proposer import MAX_DRAFTS
from tokenmill.engine.speculation.replay import ReplayProposer
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.errors import ConfigError
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams
from tokenmill.plan.demand.slo import NO_PROMISE, Slo
from tokenmill.plan.demand.workload import fixed
from tokenmill.plan.planner.candidates import GpuFleet
from tokenmill.plan.planner.explain import as_data, explain
from tokenmill.plan.planner.search import PlanRequest, plan
from tokenmill.plan.simulator.replica import STOP, ReplicaSpec
from tokenmill.plan.solve.drafts import Drafts, parse_drafts, verifying
from tokenmill.plan.solve.gpus import GPUS

VOCAB = 1000


class Ending(SimulatedRunner):
    """Says stop when the answer has its length, drafts or not."""

    ends: dict

    def _sample(self, step, index, row, hashes, result):
        held = super()._sample(step, index, row, hashes, result)
        request = step.requests[index]
        last = request.prompt_len + self.ends[request.id] - 1
        first = len(row.tokens) - len(held)
        if held and first <= last < first + len(held):
            row.tokens[last] = STOP
            del row.tokens[last + 1 :]
            held = [*held[: last - first], STOP]
        return held


class Replayed(Speculation):
    """Known answers as drafts, as many per row as the simulator takes; behind an answer's end it drafts on."""

    def __init__(self, drafts, scheduler, answers):
        super().__init__(max_tokens=17, per_token=0.0)
        self.drafts, self.scheduler = drafts, scheduler
        self.known = ReplayProposer(drafts.acceptance, drafts.most, VOCAB)
        for prompt, answer in answers:
            self.known.learn(prompt, answer)
        self.verified = 0

    def propose(self, requests):
        running = self.scheduler.running
        count = self.drafts.best(COST, len(running), sum(one.num_tokens for one in running), 17)
        if not count:
            return
        for one, draft in zip(requests, self.known.propose(requests, 100)):
            known = [] if draft is None else draft.tokens[one.pending : one.pending + one.unsure + count]
            one.drafts = known + [1] * (one.unsure + count - len(known))
            self.verified += count


def engine_times(rows, overlap, tokens, drafts=None, answers=()):
    """Token times by job, and prompts with answers, of the engine's own loop over a runner that verifies drafts."""
    clock, jobs = SimulatedClock(), make_jobs(rows)
    runner = Ending(tokens // 8, 8, clock, vocab=VOCAB, step_time=COST)
    runner.ends = {str(job.number): job.output for job in jobs}
    scheduler = Scheduler(Limits(8, 64, max_verified=1 + MAX_DRAFTS), KVManager(tokens // 8, 8), Fcfs())
    speculation = None if drafts is None else Replayed(drafts, scheduler, answers)
    engine = Engine(scheduler, runner, overlap=overlap, clock=clock, speculation=speculation)
    coming, requests = jobs, []
    while coming or engine.has_work:
        if not engine.has_work:
            clock.wait_until(coming[0].arrival)
        while coming and coming[0].arrival <= clock.now:
            job = coming.pop(0)
            # Prompts of their own, so that answers can be looked up by them
            params = SamplingParams(temperature=0, max_tokens=None, min_tokens=max(0, job.output - 1))
            request = Request(
                str(job.number), job.tokens, params, max_tokens=1000, seed=0, stop_ids=frozenset((STOP,)),
                arrival=job.arrival,
            )  # fmt: skip
            requests.append(request)
            engine.add(request)
        engine.step()
    assert not runner.violations
    assert [one.num_output for one in requests] == [runner.ends[one.id] for one in requests]
    times = {int(one.id): one.metrics.token_times for one in requests}
    texts = [(one.tokens[: one.prompt_len], one.output) for one in requests]
    return times, texts, scheduler.stats.steps, 0 if speculation is None else speculation.verified


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, overlap=st.booleans(), right=st.booleans(), most=st.integers(1, 6))
def test_where_all_drafts_hold_or_none_the_replica_keeps_the_times_of_the_engine(rows, overlap, right, most):
    rows = [(gap, prompt, output, 0) for gap, prompt, output, _ in rows]
    drafts = Drafts(1.0, most) if right else Hopeful(0.0, most)
    _, texts, plain, _ = engine_times(rows, overlap, 2000)
    expected, said, steps, verified = engine_times(rows, overlap, 2000, drafts, texts)
    assert said == texts
    spec = ReplicaSpec(machine(overlap), block_size=8, policy=Fcfs, drafts=drafts)
    found, replica = serve_alone(spec, make_jobs(rows))
    for number, times in expected.items():
        assert found[number] == pytest.approx(times, abs=1e-9)
    assert replica.scheduler.stats.steps == steps
    if right and max(output for _, _, output, _ in rows) > 2 * most + 8 and len(rows) < 4:
        assert verified and steps < plain


class Hopeful(Drafts):
    """Takes drafts to hold that never do."""

    def best(self, model, rows, context, room):
        return Drafts(0.8, self.most).best(model, rows, context, room)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("acceptance", [0.4, 0.8])
def test_drafts_that_hold_now_and_then_take_about_as_long_as_replayed_ones(acceptance, overlap):
    dice = random.Random(5)
    rows = [(dice.random() * 0.4, 20 + dice.randrange(60), 60 + dice.randrange(60), 0) for _ in range(60)]
    drafts = Drafts(acceptance, 4)
    plain, texts, _, _ = engine_times(rows, overlap, 4000)
    expected, said, steps, verified = engine_times(rows, overlap, 4000, drafts, texts)
    assert said == texts and verified > 1000
    spec = ReplicaSpec(machine(overlap, tokens=4000), block_size=8, policy=Fcfs, drafts=drafts)
    found, replica = serve_alone(spec, make_jobs(rows))

    def decoding(times):
        return sum(one[-1] - one[0] for one in times.values())

    assert decoding(found) == pytest.approx(decoding(expected), rel=0.05)
    assert replica.scheduler.stats.steps == pytest.approx(steps, rel=0.05)
    assert decoding(found) < 0.9 * decoding(plain)


def test_as_many_drafts_as_bring_the_most_tokens_per_second():
    drafts = Drafts(0.8, 4)
    assert drafts.accepted(4) == pytest.approx(0.8 + 0.64 + 0.512 + 0.4096) and Drafts(1.0, 4).accepted(4) == 4
    for rows in (1, 2, 3, 8):
        room, context = 17, 100 * rows
        rates = [
            (1 + drafts.accepted(count)) / COST.seconds(verifying(rows, context, count))
            for count in range(5)
            if rows * (1 + count) <= room
        ]
        assert rates[drafts.best(COST, rows, context, room)] == max(rates)
    assert [drafts.best(COST, rows, 100 * rows, 17) for rows in (1, 8, 9)] == [4, 1, 0]
    assert Drafts(0.0, 4).best(COST, 1, 100, 17) == 0


def test_drafts_are_read_from_text():
    assert parse_drafts("0.8:4", 16) == Drafts(0.8, 4) and parse_drafts(None, 16) is None
    for wrong in ("0.8", "0.8:x", "yes:4", "1.2:4", "0.5:0", "0.5:17", ""):
        with pytest.raises(ConfigError, match="--speculation is"):
            parse_drafts(wrong, 16)


def planned(rate, drafts=None, slo=NO_PROMISE):
    work, fleet = fixed("chat", 500, 1000, 200, rate=rate), GpuFleet(GPUS["h200"], 1)
    return plan(PlanRequest(plan_models.shape("llama3-8b"), fleet, work, slo, quality="exact", drafts=drafts))


def test_a_plan_expects_tokens_as_much_sooner_as_a_drafted_step_brings():
    plain, drafted = planned(0.1), planned(0.1, Drafts(0.8, 4))
    seen, without = drafted.best.estimate, plain.best.estimate
    assert (without.drafts, without.tokens_per_step) == (0, 1) and seen.drafts == 4
    alone = plain.best.placement.step_time.seconds(verifying(1, plain.demand.context, 0))
    assert without.itl == pytest.approx(alone, rel=0.02)  # whatever the mean, a step that decodes has a row
    assert seen.tokens_per_step == pytest.approx(1 + Drafts(0.8, 4).accepted(4))
    assert 0.9 * seen.tokens_per_step < without.itl / seen.itl <= seen.tokens_per_step
    told = "\n".join(explain(drafted))
    assert "4 per row  (with up to 4 drafts that hold with probability 0.8 each" in told
    assert "3.36 tokens per row" in told
    assert "speculation" not in "\n".join(explain(plain))
    assert as_data(drafted)["plan"]["drafts"] == 4 and as_data(plain)["plan"]["tokens_per_step"] == 1


def test_drafts_are_left_where_they_bring_nothing_and_never_make_a_plan_carry_less():
    for rate, acceptance in ((0.1, 0.0), (15.0, 0.05)):
        found = planned(rate, Drafts(acceptance, 4))
        assert found.best.estimate.drafts == 0 and "off  (with up to 4 drafts" in "\n".join(explain(found))
    slo = Slo(ttft=1.0)
    assert planned(4.0, Drafts(0.7, 4), slo).best.rate >= planned(4.0, slo=slo).best.rate


def test_both_commands_take_drafts(tmp_path):
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:00:{at:02d}.0,{100 + 13 * at},{60 + at % 40}" for at in range(40)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    figures = {}
    for name, words in {"plain": [], "drafted": ["--speculation", "0.8:4"]}.items():
        out = tmp_path / f"{name}.json"
        found = CliRunner().invoke(app, ["simulate", str(trace), *words, "-o", str(out)])
        assert found.exit_code == 0, found.output
        (figures[name],) = json.loads(out.read_text()).values()
    assert figures["drafted"]["latency_mean"] < 0.5 * figures["plain"]["latency_mean"]
    assert figures["drafted"]["steps"] < 0.5 * figures["plain"]["steps"]
    for words in (["simulate", str(trace)], ["plan", "--gpu", "h200"]):
        found = CliRunner().invoke(app, [*words, "--speculation", "4"])
        assert found.exit_code == 2 and "written as ACCEPTANCE:DRAFTS, such as 0.8:4" in found.output
