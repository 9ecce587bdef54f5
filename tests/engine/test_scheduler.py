"""Single decisions of the scheduler and the loop, each set up by hand on a simulated runner."""

import time
from dataclasses import replace
from random import Random

import pytest

from tokenmill.engine.beams import Beams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import BATCH, REALTIME, Finish, Request, State
from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.control import SloPace
from tokenmill.engine.step import StepResult
from tokenmill.errors import QueueFull
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10)


def engine(rows=4, step_tokens=64, blocks=64, overlap=True, **limits):
    clock = SimulatedClock()
    runner = SimulatedRunner(blocks, 8, clock)
    return Engine(
        Scheduler(Limits(rows, step_tokens, **limits), KVManager(blocks, 8)), runner, overlap=overlap, clock=clock
    )


def request(id, prompt=20, params=GREEDY, first=0, **rest):
    tokens = [(first + 7 * k) % 1000 for k in range(prompt)]
    return Request(id, tokens, params, max_tokens=params.max_tokens, seed=1, **rest)


def finish(house, limit=500):
    """Run until nothing is left; returns the last delta of every request."""
    last = {}
    while house.has_work:
        for delta in house.step():
            assert delta.request.id not in last
            if delta.finished:
                last[delta.request.id] = delta
        limit -= 1
        assert limit, "it hangs"
    assert not house.runner.violations
    house.scheduler.check_integrity()
    assert house.scheduler.kv.pool.num_free == house.scheduler.kv.pool.num_blocks
    return last


def answer(one):
    """What a copy of the request says in a house of its own."""
    house = engine(blocks=500)
    copy = Request(one.id, one.tokens[: one.prompt_len], one.params, max_tokens=one.max_tokens, seed=one.seed)
    house.add(copy)
    finish(house)
    return copy.output


def fail_steps(house, count):
    """The next `count` launched steps fail when they are waited for."""
    house.runner.faults.fail_at_wait = 1.0
    failed = house.scheduler.stats.failed_steps
    while house.scheduler.stats.failed_steps < failed + count:
        house.step()
    house.runner.faults.fail_at_wait = 0.0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_end_of_the_only_request_is_heard(overlap):
    house = engine(overlap=overlap)
    house.add(request("only"))
    house.cancel("only")
    assert house.has_work, "somebody still has to be told"
    assert finish(house)["only"].request.finish is Finish.CANCELLED


def test_cancelling_twice_or_after_the_end_or_a_stranger_is_ignored():
    house = engine()
    house.add(request("one"))
    house.step()
    house.cancel("one")
    house.cancel("one")
    house.cancel("nobody")
    assert len(finish(house)) == 1
    house.cancel("one")
    assert not house.has_work


def test_a_delta_that_was_given_does_not_change():
    house = engine(overlap=False)
    house.add(request("one"))
    (delta,) = house.step()
    house.cancel("one")
    assert not delta.finished
    assert house.step()[0].finished


def test_a_prefix_whose_step_failed_is_not_shared_even_if_its_request_left():
    house = engine()
    gone, heir = request("gone", 40), request("heir", 40)
    house.runner.faults.fail_at_wait = 1.0
    house.add(gone)
    house.step()
    house.cancel("gone")
    house.runner.faults.fail_at_wait = 0.0
    house.add(heir)
    finish(house)
    assert heir.finish is Finish.LENGTH and heir.output == answer(heir)


def test_a_prefix_whose_step_failed_is_not_shared_after_a_preemption():
    house = engine(rows=1, blocks=16)
    low, high = request("low", 40, priority=BATCH), request("high", 41, priority=REALTIME)
    house.runner.faults.fail_at_wait = 1.0
    house.add(low)
    house.step()
    house.add(high)
    house.step()
    house.runner.faults.fail_at_wait = 0.0
    finish(house)
    assert (low.output, high.output) == (answer(low), answer(high))


def test_a_request_that_breaks_its_steps_ends_alone_and_names_the_cause():
    house = engine()
    house.runner.faults.poisoned_tokens = frozenset({999})
    others = [request(f"other-{k}", 15 + k, first=k) for k in range(3)]
    bad = request("bad", 10)
    bad.tokens[4] = 999
    for one in [*others, bad]:
        house.add(one)
    ends = finish(house)
    assert bad.finish is Finish.ERROR and "holds a poisoned token" in bad.error and bad.output == []
    assert ends["bad"].finished
    for one in others:
        assert one.finish is Finish.LENGTH and one.output == answer(one)


def test_a_suspect_runs_with_nobody_in_flight_even_if_they_were_cancelled():
    house = engine()
    for id in ("first", "second"):
        house.add(request(id))
    fail_steps(house, 2)
    assert len(house.scheduler.isolation.suspects) == 2
    house.step()
    launched = house.runner.launched
    house.cancel("first")
    house.step()
    assert house.runner.launched == launched, "the step of the cancelled suspect is still out"
    finish(house)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_proved_innocent_goes_back_to_its_class(overlap):
    house = engine(rows=2, overlap=overlap)
    params = replace(GREEDY, max_tokens=100)
    low = [request(f"low-{k}", params=params, first=k, priority=BATCH) for k in range(2)]
    for one in low:
        house.add(one)
    fail_steps(house, 2)
    while any(one.state is not State.RUNNING for one in low):
        house.step()
    high = request("high", priority=REALTIME, arrival=house.clock())
    house.add(high)
    for _ in range(3):
        house.step()
    assert high.metrics.first_scheduled is not None, "batch requests kept the rank they had as suspects"
    finish(house)


def test_two_failures_at_once_do_not_convict_anybody():
    """A launch fails while the step before it turns out to have failed: both held the same innocent requests."""
    house = engine()
    pair = [request(id, first=len(id)) for id in ("one", "other")]
    for one in pair:
        house.add(one)
    fail_steps(house, 1)
    faults = house.runner.faults
    faults.fail_at_wait = 1.0
    house.step()
    faults.fail_at_launch = 1.0
    house.step()
    faults.fail_at_wait = faults.fail_at_launch = 0.0
    isolation = house.scheduler.isolation
    assert [isolation.failures(one) for one in pair] == [2, 2] and all(isolation.is_suspect(one) for one in pair)
    fail_steps(house, 1)
    finish(house)
    assert all(one.finish is Finish.LENGTH for one in pair)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspect_runs_without_proposals(overlap):
    house = engine(step_tokens=16, overlap=overlap)
    one = request("one", 40)
    house.add(one)
    fail_steps(house, 2)
    assert house.scheduler.isolation.is_suspect(one)
    while house.has_work:
        propose(house, 5)
        house.step()
    assert house.scheduler.stats.failed_steps == 2
    assert one.output == answer(one)


def test_blocks_that_a_realtime_request_needs_are_not_taken_by_growing_batch_requests():
    house = engine(rows=16, step_tokens=256, blocks=40, overlap=False, watermark=0.0)
    for number in range(8):
        house.add(request(f"low-{number}", 24, first=100 * number, priority=BATCH))
    house.step()
    assert house.scheduler.kv.pool.num_free == 16, "every one of the eight wants another block in the next step"
    high = request("high", 80, first=11, priority=REALTIME)
    house.add(high)
    house.step()
    assert high.metrics.first_scheduled is not None
    finish(house)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_search_goes_on_when_not_all_beams_fit_at_once(overlap):
    house = engine(rows=8, blocks=9, overlap=overlap, watermark=0.3)
    one = request("search", 30, SamplingParams(temperature=0, max_tokens=30, beam_width=4))
    one.beams = Beams(one)
    house.add(one)
    finish(house, limit=5000)
    roomy = engine(rows=8, blocks=200, overlap=overlap)
    two = request("search", 30, SamplingParams(temperature=0, max_tokens=30, beam_width=4))
    two.beams = Beams(two)
    roomy.add(two)
    finish(roomy)
    assert one.beams.group.results() == two.beams.group.results()
    assert house.scheduler.stats.preemptions > roomy.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_come_once_after_a_preemption(overlap):
    house = engine(rows=1, step_tokens=8, overlap=overlap)
    low = request("low", 30, replace(GREEDY, prompt_logprobs=0), priority=BATCH)
    house.add(low)
    for _ in range(3):
        house.step()
    house.add(request("high", priority=REALTIME))
    finish(house)
    assert low.metrics.preemptions == 1
    assert [one.token for one in low.prompt_logprobs] == low.tokens[1:30]


def test_a_victim_does_not_come_back_before_its_step_is_committed():
    """Realtime requests that turn out to share their prefix leave room over, in the very step that preempted it."""
    house = engine(rows=16, step_tokens=256, blocks=64, watermark=0.0)
    params = replace(GREEDY, max_tokens=40)
    low = [request(f"low-{k}", 60, params, first=100 * k, priority=BATCH) for k in range(4)]
    for one in low:
        house.add(one)
    for _ in range(4):
        house.step()
    high = [request(f"high-{k}", 75, first=501, priority=REALTIME, arrival=house.clock()) for k in range(8)]
    for number, one in enumerate(high):
        one.tokens[-1] = number
        house.add(one)
    expected = {one.id: answer(one) for one in [*low, *high]}
    finish(house)
    assert sum(one.metrics.preemptions for one in low) >= 4
    assert house.scheduler.stats.failed_steps == 0
    assert {one.id: one.output for one in [*low, *high]} == expected


def propose(house, count, token=3):
    for one in house.scheduler.running:
        one.drafts = [token] * count


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_never_reach_past_the_last_token(overlap):
    """Rows are as long as prompt and max_tokens together: a longer proposal would be written over the next row."""
    house = engine(overlap=overlap)
    one = request("one", 20)
    house.add(one)
    launch = house.runner.launch

    def watched(step):
        for row, start, count in zip(step.rows, step.starts, step.counts):
            assert start + step.slack.get(row, 0) + count <= 20 + one.max_tokens - 1
        return launch(step)

    house.runner.launch = watched
    while house.has_work:
        house.step()
        propose(house, 50)
    assert house.scheduler.stats.failed_steps == 0
    assert one.output == answer(one)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_drafts_and_overlap_go_together(wrong):
    """A row whose drafts are in flight is in the next step, too, before anybody on the host knows how long it is."""
    house = engine(rows=32, blocks=500, overlap=True)
    some = [request(f"one-{k}", 20, replace(GREEDY, max_tokens=60), first=k) for k in range(4)]
    answers = {one.id: answer(one) for one in some}
    for one in some:
        house.add(one)
    random, uncertain, most, steps = Random(5), 0, 0, 0
    while house.has_work:
        for one in house.scheduler.running:
            said = one.num_tokens - one.prompt_len
            known = answers[one.id][said : said + one.unsure + 3]
            one.drafts = [0 if random.random() < wrong else token for token in known]
        house.step()
        steps += 1
        step = house._in_flight[-1][0] if house._in_flight else None
        uncertain += len(step.slack) if step else 0
        most = max([most, *(step.slack.values() if step else [])])
    assert {one.id: one.output for one in some} == answers
    assert house.scheduler.stats.failed_steps == 0
    assert uncertain > 20 and most == 3  # every launched draft of one step, none of them twice
    assert wrong or steps < 30  # four tokens a step instead of one


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_starve_neither_decodes_nor_newcomers(overlap):
    house = engine(rows=8, step_tokens=16, blocks=500, overlap=overlap)
    launch = house.runner.launch

    def watched(step):
        assert step.num_tokens <= 16
        return launch(step)

    house.runner.launch = watched
    params = replace(GREEDY, max_tokens=60)
    old = [request(f"old-{k}", 3, params, first=k) for k in range(6)]
    for one in old:
        house.add(one)
    for _ in range(6):
        house.step()
    new = request("new", 40, priority=REALTIME, arrival=house.clock())
    house.add(new)
    for _ in range(14):
        before = {one.id: one.num_output for one in old}
        propose(house, 9)
        house.step()
        house.step()
        assert all(one.num_output > before[one.id] for one in old), "a proposal took another request's token"
    assert new.num_output > 0, "proposals took the newcomer's share"
    finish(house)
    assert house.scheduler.stats.failed_steps == 0


@pytest.mark.parametrize(("rows", "step_tokens"), [(16, 16), (8, 17), (16, 512)])
def test_drafts_leave_a_newcomer_the_whole_step(rows, step_tokens):
    clock = SimulatedClock()
    limits = Limits(max_rows=rows, max_step_tokens=step_tokens, max_verified=17)
    house = Engine(Scheduler(limits, KVManager(500, 8)), SimulatedRunner(500, 8, clock), overlap=False, clock=clock)
    old = request("old", 3, replace(GREEDY, max_tokens=400))
    right = answer(old)
    house.add(old)
    for _ in range(3):
        house.step()
    new = request("new", 40, first=5)
    house.add(new)
    steps = 0
    while not new.num_output:
        old.drafts = right[old.num_output : old.num_output + 16]
        house.step()
        steps += 1
    assert steps <= 2 + 40 // (step_tokens - 1)


def test_drafts_are_neither_tokens_of_prompts_nor_gaps_of_no_time():
    clock = SimulatedClock()
    limits = Limits(max_rows=8, max_step_tokens=64)
    pace = SloPace(limits, itl=0.5)
    learned = []
    pace._step_time.learn = lambda facts, seconds: learned.append((facts, seconds))
    scheduler = Scheduler(limits, KVManager(500, 8), pace=pace)
    house = Engine(scheduler, SimulatedRunner(500, 8, clock), overlap=False, clock=clock)
    one = request("one", 3, replace(GREEDY, max_tokens=40))
    right = answer(one)
    house.add(one)
    while house.has_work:
        one.drafts = right[one.num_output : one.num_output + 4] if one.num_output else []
        house.step()
    assert len(learned) > 5 and all(seconds > 0 for _, seconds in learned)
    assert {facts.prefill_tokens for facts, _ in learned} == {0}
    assert max(facts.decode_rows for facts, _ in learned) == 5


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_nobody_gives_up_a_block_for_a_draft(block_size):
    stopped = []
    for drafted in (False, True):
        clock, blocks = SimulatedClock(), 132 // block_size
        house = Engine(
            Scheduler(Limits(max_rows=8, max_step_tokens=64, max_verified=17), KVManager(blocks, block_size)),
            SimulatedRunner(blocks, block_size, clock), overlap=False, clock=clock,
        )  # fmt: skip
        some = [request(f"r{k}", 3, replace(GREEDY, max_tokens=40), first=k) for k in range(6)]
        for one in some:
            house.add(one)
        while house.has_work:
            if drafted:
                propose(house, 16)  # which are wrong
            house.step()
        stopped.append(house.scheduler.stats.preemptions)
    assert stopped[1] <= stopped[0]


def test_logits_that_are_not_finite_end_one_request_only():
    house = engine(overlap=False)
    for id in ("good", "bad"):
        house.add(request(id, first=len(id)))
    commit = house.scheduler.commit

    def broken(step, result, now):
        result.tokens = [
            [-1] if one.id == "bad" else tokens for one, tokens in zip(step.requests, result.tokens, strict=True)
        ]
        return commit(step, result, now)

    house.scheduler.commit = broken
    ends = {id: delta.request for id, delta in finish(house).items()}
    assert ends["bad"].finish is Finish.ERROR and "not finite" in ends["bad"].error and ends["bad"].output == []
    assert ends["good"].finish is Finish.LENGTH


def test_a_queue_that_is_full_of_tokens_refuses_but_never_the_only_one():
    house = engine(max_queued_tokens=50)
    house.add(request("large", 60))
    with pytest.raises(QueueFull, match=r"60 tokens are waiting, the limit is 50.*max_queued_tokens"):
        house.add(request("next", 1))
    finish(house)
    house.add(request("next", 1))
    assert len(finish(house)) == 1


def test_followers_of_a_cancelled_leader_get_their_tokens():
    house = engine()
    several = SamplingParams(temperature=1, max_tokens=10, n=3)
    leader, *followers = [request(f"{k}", params=several) for k in range(3)]
    for number, follower in enumerate(followers):
        follower.seed = 10 + number
    leader.followers = followers
    house.add(leader)
    house.cancel("0")
    finish(house)
    assert leader.finish is Finish.CANCELLED
    for follower in followers:
        assert follower.finish is Finish.LENGTH and follower.output == answer(follower)


def microseconds_per_step(waiting, steps=60):
    """schedule() and commit() with 64 requests that decode while others wait."""
    scheduler = Scheduler(Limits(64, 1024), KVManager(4000, 16))
    for number in range(64 + waiting):
        scheduler.add(request(str(number), 16, replace(GREEDY, max_tokens=1000), arrival=number * 1e-6))
    best = float("inf")
    for _ in range(steps):
        begin = time.perf_counter()
        step = scheduler.schedule(1.0)
        scheduler.commit(step, StepResult(tokens=[[5] if samples else [] for samples in step.samples]), 1.0)
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def test_a_long_queue_does_not_slow_a_step():
    assert microseconds_per_step(waiting=20_000) < 3 * microseconds_per_step(waiting=20)
