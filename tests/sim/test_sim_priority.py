"""Who waits for whom, and how long at most; counted in steps."""

import dataclasses

import pytest
from harness import HEAD_BOUND, Day, House
from sim_clients import CALM, Client, clients

from tokenmill.engine.request import API, BATCH, REALTIME, Finish, Request
from tokenmill.engine.runner.simulated import STEP_TIME
from tokenmill.engine.scheduler.policy import PriorityClasses
from tokenmill.errors import QueueFull
from tokenmill.params import SamplingParams


def ask(id, prompt=30, output=20, arrival=0.0, **rest):
    """A client whose answer is exactly `output` tokens long."""
    first = sum(id.encode()) * 7919 + len(id)
    tokens = [(first + 31 * k) % 500 for k in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=output)
    return Client(arrival, [Request(id, tokens, params, max_tokens=output, seed=0, arrival=arrival, **rest)])


class Watched(Day):
    """Remembers in which step each request came and was first scheduled, and how many had risen at most."""

    def __post_init__(self):
        super().__post_init__()
        self.came, self.began, self.most_promoted = {}, {}, 0

    def step(self):
        for id in self.scheduler.requests:
            self.came.setdefault(id, self.steps)
        deltas = super().step()
        for request in [*self.scheduler.running, *(delta.request for delta in deltas)]:
            if request.metrics.first_scheduled is not None:
                self.began.setdefault(request.id, self.steps)
        self.most_promoted = max(self.most_promoted, self.scheduler.life.num_promoted)
        return deltas

    def waits(self, priority):
        """Steps from arrival to first scheduling, of every request of a class."""
        return [self.began[id] - self.came[id] for id, r in self.ends.items() if r.priority == priority]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("scarce", ["rows", "blocks", "both"])
def test_realtime_never_waits_for_batch(overlap, watermark, scarce):
    """Batch requests hold every row or block. A realtime one is scheduled within HEAD_BOUND steps all the same."""
    house = House(
        rows=4 if scarce != "blocks" else 64,
        blocks=64 if scarce != "rows" else 1000,
        overlap=overlap,
        watermark=watermark,
        policy=PriorityClasses(promote_after=None),
    )
    low = [ask(f"low-{k}", prompt=60, output=60, priority=BATCH) for k in range(40)]
    high = [ask(f"high-{k}", arrival=0.05 + 0.08 * k, output=10, priority=REALTIME) for k in range(30)]
    day = Watched(house.build(), integrity=0.2)
    day.run(low + high)
    assert max(day.waits(REALTIME)) <= HEAD_BOUND
    assert day.worst_wait <= HEAD_BOUND
    assert day.scheduler.stats.preemptions > 10, "batch must have been in the way"
    assert {request.finish for request in day.ends.values()} == {Finish.LENGTH}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_burst_of_realtime_clears_the_house_at_once(overlap):
    """Room is made for several at a time: n of them wait for about n / 8 rounds, not for n."""
    house = House(rows=32, blocks=1000, step_tokens=1024, overlap=overlap, policy=PriorityClasses(promote_after=None))
    low = [ask(f"low-{k}", output=200, priority=BATCH) for k in range(32)]
    high = [ask(f"high-{k}", arrival=0.1, output=10, priority=REALTIME) for k in range(24)]
    day = Watched(house.build())
    day.run(low + high)
    assert max(day.waits(REALTIME)) <= 2 * 24 // 8 + HEAD_BOUND


def test_batch_progresses_under_endless_realtime_but_takes_an_eighth_of_the_rows_at_most():
    house = House(rows=16, blocks=2000, policy=PriorityClasses(promote_after=0.5))
    high = [ask(f"high-{k}", arrival=0.004 * k, output=25, priority=REALTIME) for k in range(900)]
    low = [ask(f"low-{k}", arrival=0.1, output=10, priority=BATCH) for k in range(12)]
    day = Watched(house.build(), integrity=0.0)
    day.run(high + low)
    last_high = max(day.ends[client.requests[0].id].metrics.finished for client in high)
    done_meanwhile = [c for c in low if day.ends[c.requests[0].id].metrics.finished < last_high]
    assert len(done_meanwhile) == len(low), "the low class starves"
    assert day.most_promoted == house.rows // 8


def test_classes_are_served_in_order():
    house = House(rows=1, blocks=400, overlap=False, policy=PriorityClasses(promote_after=None))
    first = ask("first", output=30, priority=REALTIME)
    classes = {"batch": BATCH, "api": API, "rt": REALTIME}
    rest = [
        ask(f"{name}-{k}", 5, 5, arrival=0.001 * (k + 1), priority=priority)
        for name, priority in classes.items()
        for k in range(2)
    ]
    day = Watched(house.build())
    day.run([first, *rest])
    order = sorted(day.began, key=day.began.__getitem__)
    assert order == ["first", "rt-0", "rt-1", "api-0", "api-1", "batch-0", "batch-1"]


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_runs_past_a_deadline_by_more_than_a_step(overlap):
    mix = dataclasses.replace(CALM, deadline=0.7)
    house = House(rows=8, blocks=120, overlap=overlap)
    engine = house.build()
    longest = 0.0

    class Longest:
        def seconds(self, facts):
            nonlocal longest
            seconds = STEP_TIME.seconds(facts)
            longest = max(longest, seconds)
            return seconds

    engine.runner.step_time = Longest()
    day = Day(engine, seed=5).run(clients(5, 600, mix))
    late = [r for r in day.ends.values() if r.finish is Finish.DEADLINE]
    assert len(late) > 50
    in_flight = 2 if overlap else 1  # the step under way, and with overlap the one launched behind it
    for request in day.ends.values():
        if request.deadline is not None:
            assert request.metrics.finished <= request.deadline + in_flight * longest + 1e-9
            assert all(time <= request.deadline + in_flight * longest for time in request.metrics.token_times)
    assert all("deadline" in request.error for request in late)


def test_a_full_queue_refuses_with_a_sentence_and_goes_on():
    house = House(rows=2, max_queued_requests=5)
    engine = house.build()
    day = Day(engine)
    for k in range(5):
        assert day._ask(ask(f"in-{k}"))
    with pytest.raises(QueueFull, match=r"5 requests are waiting, the limit is 5.*max_queued_requests"):
        engine.add(ask("out").requests[0])
    assert engine.scheduler.stats.rejected == 1
    day.run([ask(f"later-{k}", arrival=1.0) for k in range(20)])
    assert len(day.ends) == 25 and day.rejected > 0
    assert "out" not in day.ends
