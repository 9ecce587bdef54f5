"""Slots against a model that remembers everything, and a tier that many threads use at once."""

import random

from fake_memory import SIZE, FakeMemory, get, name, put, summed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.queued import ThreadBell
from tokenmill.kv.tiers.slots import Slots

NAMES = [name(number) for number in range(12)]


class SlotsModel(RuleBasedStateMachine):
    @initialize(count=st.integers(0, 8))
    def open(self, count):
        self.slots, self.count, self.now = Slots(count), count, 0.0
        self.written = {}  # slot -> identity, as long as nobody writes to it again
        self.held, self.order = {}, []  # identity -> (slot, salt); least recently used first
        self.writers, self.readers, self.leases = [], [], {}

    def forget(self, identity):
        if identity in self.held:
            del self.held[identity]
            self.order.remove(identity)
            self.leases.pop(identity, None)

    @rule(salt=st.sampled_from(["", "a", "b"]))
    def take(self, salt):
        busy = {identity for identity, _ in self.readers} | {one for one, t in self.leases.items() if t > self.now}
        free = self.slots.num_free
        slot = self.slots.take(salt, self.now)
        own = [one for one in self.order if self.held[one][1] == salt]
        over = salt and len(own) >= max(1, self.count // 2)
        candidates = [one for one in (own if over else self.order) if one not in busy]
        if free and not over:
            assert slot is not None
        elif candidates:
            assert slot == self.held[candidates[0]][0], "the least recently used leaves"
            self.forget(candidates[0])
        else:
            assert slot is None
        if slot is not None:
            assert slot not in [s for s, _ in self.writers] and slot not in [s for _, s in self.readers]
            self.written.pop(slot, None)
            self.writers.append((slot, salt))

    @precondition(lambda self: self.writers)
    @rule(identity=st.sampled_from(NAMES), keep=st.booleans())
    def written_to(self, identity, keep):
        slot, salt = self.writers.pop(0)
        if not keep:
            self.slots.give_back(slot)
            return
        self.slots.keep(identity, salt, slot)
        if identity not in self.held:
            self.held[identity] = slot, salt
            self.order.append(identity)
            self.written[slot] = identity

    @rule(identity=st.sampled_from(NAMES))
    def use(self, identity):
        slot = self.slots.use(identity)
        assert slot == (self.held[identity][0] if identity in self.held else None)
        if slot is not None:
            self.readers.append((identity, slot))
            self.order.remove(identity)
            self.order.append(identity)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def done(self, data):
        identity, slot = data.draw(st.sampled_from(self.readers))
        assert self.written.get(slot) == identity, "somebody wrote to what was read"
        self.readers.remove((identity, slot))
        self.slots.done(identity, slot)

    @rule(identity=st.sampled_from(NAMES), seconds=st.integers(1, 3))
    def lease(self, identity, seconds):
        assert self.slots.lease(identity, self.now + seconds) == (identity in self.held)
        if identity in self.held:
            self.leases[identity] = max(self.leases.get(identity, 0), self.now + seconds)

    @rule()
    def later(self):
        self.now += 1

    @rule(identity=st.sampled_from(NAMES))
    def drop(self, identity):
        assert self.slots.drop(identity) == (self.held[identity][0] if identity in self.held else None)
        self.forget(identity)

    @rule(salt=st.sampled_from([None, "", "a", "b"]))
    def drop_salt(self, salt):
        gone = [one for one in self.order if salt is None or self.held[one][1] == salt]
        assert sorted(self.slots.drop_salt(salt)) == sorted(self.held[one][0] for one in gone)
        for one in gone:
            self.forget(one)

    @invariant()
    def books_agree(self):
        self.slots.check()
        assert [one in self.slots for one in NAMES] == [one in self.held for one in NAMES]
        assert self.slots.num_leased(self.now) == sum(until > self.now for until in self.leases.values())


SlotsModel.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSlotsAgainstModel = SlotsModel.TestCase


def test_a_small_tier_under_many_reads_and_writes_holds_what_it_says():
    memory = FakeMemory()
    tier = HostTier(memory, 10 * SIZE, summed, ThreadBell())
    rng = random.Random(2)
    for _ in range(300):
        numbers = [rng.randrange(40) for _ in range(rng.randrange(1, 6))]
        if rng.random() < 0.5:
            put(tier, memory, list(dict.fromkeys(numbers)), rng.choice(["", "a"]))
        elif rng.random() < 0.1:
            tier.discard([name(number) for number in numbers])
        else:
            get(tier, memory, list(dict.fromkeys(numbers)))  # compares
        with tier.lock:
            tier.slots.check()
    assert tier.slots.evicted > 20
    tier.close()


def test_a_flipped_bit_in_memory_is_a_miss():
    memory = FakeMemory()
    tier = HostTier(memory, 10 * SIZE, summed, ThreadBell())
    put(tier, memory, range(4))
    with tier.lock:
        slot = tier.slots.use(name(2))
        tier.slots.done(name(2), slot)
    tier.slot(slot)[17] ^= 1
    done = get(tier, memory, range(4))
    assert done.arrived == 2 and "damaged" in done.failure and not tier.lookup([name(2)])
    tier.close()


def test_a_full_queue_refuses_and_nothing_is_held():
    memory = FakeMemory()
    tier = HostTier(memory, 10 * SIZE, summed, ThreadBell())
    tier.most_waiting = 3
    memory.go.clear()
    tickets = [tier.write([name(number)], [number], "") for number in range(5)]
    assert [ticket is None for ticket in tickets] == [False] * 3 + [True] * 2
    memory.go.set()
    tier.close()
    assert tier.write([name(9)], [9], "") is None
    assert len(tier.poll()) == 3, "every ticket ends, also those that were cut short"
