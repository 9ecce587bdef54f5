"""WaitingQueue against a list that is sorted anew for every question."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.engine.request import Request
from tokenmill.engine.scheduler.policy import Fcfs, PriorityClasses, WaitingQueue
from tokenmill.params import SamplingParams


class QueueModel(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from([Fcfs(), PriorityClasses(None), PriorityClasses(10.0)]))
    def open(self, policy):
        self.policy = policy
        self.queue = WaitingQueue(policy)
        self.inside = []  # in the order of pushing
        self.outside = []
        self.born = 0

    def order(self, now, may_promote):
        """Only the front of a lane may rise: it has waited longest."""
        lanes = {}
        for place, request in enumerate(self.inside):
            lanes.setdefault(self.policy.lane(request), []).append((request.arrival, place, request))
        heads = []
        for lane, entries in lanes.items():
            arrival, place, request = min(entries, key=lambda entry: entry[:2])
            risen = lane
            if may_promote and self.policy.promote_after:
                risen = max(0, lane - int((now - arrival) // self.policy.promote_after))
            heads.append((risen, arrival, place, request))
        return sorted(heads, key=lambda entry: entry[:3])

    @rule(priority=st.integers(0, 2), arrival=st.integers(0, 30), length=st.integers(1, 9))
    def push_new(self, priority, arrival, length):
        self.born += 1
        request = Request(
            str(self.born), [1] * length, SamplingParams(), max_tokens=4, seed=0, priority=priority, arrival=arrival
        )
        self.queue.push(request)
        self.inside.append(request)

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def push_again(self, data):
        request = data.draw(st.sampled_from(self.outside))
        self.outside.remove(request)
        request.tokens.append(2)  # preempted with a token more
        self.queue.push(request)
        self.inside.append(request)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def remove(self, data):
        request = data.draw(st.sampled_from(self.inside))
        self.inside.remove(request)
        self.outside.append(request)
        self.queue.remove(request)

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def remove_what_is_not_there(self, data):
        self.queue.remove(data.draw(st.sampled_from(self.outside)))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def grow_inside(self, data):
        """A token of a launched step reaches a request that waits again; its place does not change."""
        data.draw(st.sampled_from(self.inside)).tokens.append(3)

    @rule(now=st.integers(30, 60), may_promote=st.booleans())
    def look(self, now, may_promote):
        heads = self.order(now, may_promote)
        expected = (heads[0][0], heads[0][3]) if heads else None
        assert self.queue.head(now, may_promote) == expected

    @rule(now=st.integers(30, 60), may_promote=st.booleans(), count=st.integers(0, 5))
    def look_further(self, now, may_promote, count):
        expected, everybody = [], list(self.inside)
        while len(expected) < count and self.inside:
            lane, *_, request = self.order(now, may_promote and not expected)[0]
            expected.append((lane, request))
            self.inside.remove(request)
        self.inside = everybody
        assert self.queue.first(count, now, may_promote) == expected

    @invariant()
    def books_agree(self):
        assert len(self.queue) == len(self.inside)
        assert {request.id for request in self.queue} == {request.id for request in self.inside}
        assert all(request in self.queue for request in self.inside)
        assert not any(request in self.queue for request in self.outside)

    @invariant()
    def an_empty_queue_holds_no_tokens(self):
        if not self.inside:
            assert self.queue.num_tokens == 0


QueueModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueueAgainstModel = QueueModel.TestCase
