"""Policies of eviction: only what nobody uses goes, children before parents, and books that agree through any life."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_kv_manager import Sequence

from tokenmill.config import OPTIONS
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.errors import ConfigError
from tokenmill.kv.eviction import EVICTION, policy_for
from tokenmill.kv.eviction.density import BINS, CLASSES, EDGES, EPOCHS, HitDensity, densities
from tokenmill.kv.eviction.policy import EvictionStats
from tokenmill.kv.eviction.shadow import ShadowLru
from tokenmill.kv.manager import KVManager

OTHERS = [name for name in EVICTION if name != "lru"]


class Life(RuleBasedStateMachine):
    """Sequences of two tenants come, grow, fork, leave, fail and are forgotten, under some policy."""

    SIZE = 2

    @initialize(name=st.sampled_from(OTHERS), blocks=st.integers(6, 20), learned=st.booleans())
    def open(self, name, blocks, learned):
        self.kv = KVManager(blocks, self.SIZE, eviction=name)
        if name == "learned":  # as after a long time: epochs are short, the table is made, LRU has let go
            policy = self.kv.eviction
            policy.shadow.leads = not learned
            policy._epoch_blocks = policy._rebuild_every = policy._next_tick = policy._epochs_until_rebuild = 1
            policy._most_ghosts = 5
        self.alive, self.step = [], 0
        victim = self.kv.eviction.victim

        def judged(oldest):
            policy, pool = self.kv.eviction, self.kv.pool
            free = {b for b in range(blocks) if pool.has_content[b] and not pool.references[b]}
            kids = list(policy.kids)
            block = victim(oldest)
            assert block in free, "a block that somebody uses, or an empty one, was evicted"
            if any(not kids[b] for b in free):  # else somebody uses what follows on all of them
                assert not kids[block], "a parent went before its children"
            return block

        self.kv.eviction.victim = judged

    def compute(self, one, upto):
        self.step += 1
        one.last_step, one.num_computed = self.step, upto
        self.kv.publish(one)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), salt=st.sampled_from("ab"), later=st.booleans())
    def come(self, tokens, salt, later):
        """Who is computed `later` may find that somebody else has published the same: its own blocks stay unknown."""
        one = Sequence(tokens, salt)
        one.prompt_len = len(tokens)
        hits = self.kv.match(one)
        if self.kv.needed(hits, len(tokens)) <= self.kv.pool.num_free:
            self.kv.admit(one, hits)
            assert self.kv.grow(one, len(tokens)) is not None, "needed() promised that it fits"
            self.alive.append(one)
            if not later:
                self.compute(one, len(tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), token=st.integers(0, 1))
    def say(self, data, token):
        one = data.draw(st.sampled_from(self.alive))
        if self.kv.grow(one, len(one.tokens) + 1) is not None:
            one.tokens.append(token)
            self.compute(one, len(one.tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), part=st.integers(1, 3))
    def catch_up(self, data, part):
        """Another chunk."""
        one = data.draw(st.sampled_from(self.alive))
        self.compute(one, min(len(one.tokens), one.num_computed + part * self.SIZE))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.alive))
        if self.kv.pool.num_free and parent.num_computed:
            child = Sequence(parent.tokens[: parent.num_computed], parent.salt)
            child.prompt_len = parent.prompt_len
            self.kv.fork(parent, child, parent.num_computed)
            self.alive.append(child)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), ahead=st.integers(0, 1))
    def leave(self, data, ahead):
        one = data.draw(st.sampled_from(self.alive))
        self.alive.remove(one)
        self.kv.release(one, fence=one.last_step + ahead)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def forget(self, data):
        self.kv.forget(data.draw(st.sampled_from(self.alive)))

    @rule()
    def settle(self):
        self.kv.settle(self.step)

    @rule()
    def fail(self):
        self.step += 1
        lost = {block for _, block in self.kv._unproven}
        for one in [one for one in self.alive if lost.intersection(one.blocks)]:
            self.alive.remove(one)
            self.kv.release(one, fence=self.step)
        self.kv.void(self.step)

    @rule(salt=st.sampled_from([None, "a", "b"]))
    def reset(self, salt):
        self.kv.reset_prefix_cache(salt)

    @invariant()
    def books_agree(self):
        """Which includes the policy's: free and cached without cached children is exactly what may be chosen."""
        self.kv.check_integrity(self.alive)
        pool = self.kv.pool
        used = sum(map(bool, pool.references))
        cached = sum(has and not held for has, held in zip(pool.has_content, pool.references))
        assert used + pool.num_free == pool.num_blocks and cached == sum(self.kv.eviction.is_free)


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase


def test_the_setting_has_the_policies_there_are():
    assert OPTIONS["eviction"].choices == EVICTION
    with pytest.raises(ConfigError, match="there is no eviction 'fifo'; it may be one of lru, lfu, cost, learned"):
        KVManager(4, 4, eviction="fifo")
    assert (
        policy_for("lru", 4, 4) is None and KVManager(4, 4, prefix_caching=False, eviction="learned").eviction is None
    )


def visit(kv, tokens):
    """A sequence comes, is computed, and leaves; how many of its blocks were found."""
    one = Sequence(list(tokens))
    one.prompt_len = len(one.tokens)
    hits = kv.match(one)
    kv.admit(one, hits)
    assert kv.grow(one, len(one.tokens)) is not None
    one.num_computed = len(one.tokens)
    kv.publish(one)
    kv.release(one, 0)
    return len(hits)


@pytest.mark.parametrize("name", ["lfu", "cost"])
def test_what_was_found_often_outlives_a_scan_and_then_ages(name):
    kv = KVManager(8, 4, eviction=name)
    often = range(9)
    for _ in range(4):
        visit(kv, often)
    for number in range(4):
        visit(kv, range(100 * number + 100, 100 * number + 109))
    assert visit(kv, often) == 2, "more than fits came since, but nothing of it twice"
    for number in range(40):
        visit(kv, range(1000 * number + 1000, 1000 * number + 1009))
    assert visit(kv, often) == 0, "old fame does not last forever"


def test_what_costs_more_to_compute_stays_longer():
    kept = {}
    for name in ("lfu", "cost"):
        kv = KVManager(64, 4096, eviction=name)
        long = range(20 * 4096 + 1)
        visit(kv, long)
        for number in range(20):
            visit(kv, range(2 * 10**6 + 10**4 * number, 2 * 10**6 + 10**4 * number + 4097))
        visit(kv, range(10**7, 10**7 + 30 * 4096 + 1))
        kept[name] = visit(kv, long)
    assert kept["cost"] > kept["lfu"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_index_of_a_class_is_that_of_the_best_moment_to_give_up(seed):
    """Against trying every moment, for one class at a time."""
    source = np.random.default_rng(seed)
    exposure = source.uniform(1e5, 1e6, (2, BINS))
    rates = 10 ** source.uniform(-5, -0.5, (2, BINS))
    found = densities(exposure * rates, exposure)
    overall = (exposure * rates).sum(axis=0) / exposure.sum(axis=0)
    rates = (exposure * rates + 64 * overall) / (exposure + 64)
    width = np.diff(EDGES)
    for kind in range(2):
        for age in range(BINS):
            alive, hits, time, best = 1.0, 0.0, 0.0, 0.0
            for at in range(age, BINS):
                came = alive * -np.expm1(-rates[kind, at] * width[at])
                hits, time, alive = hits + came, time + came / rates[kind, at], alive - came
                best = max(best, hits / time)
            assert found[kind, age] == pytest.approx(best, rel=1e-3)


def test_densities_learn_who_comes_back_and_when():
    """One class comes back 20 epochs later, half of another at once, a third never."""
    density, source = HitDensity(), random.Random(0)
    back, soon, never = 3, 5, 7
    due = []
    for epoch in range(400):
        for kind, count in ((back, 10), (soon, 10), (never, 10)):
            for _ in range(count):
                density.enter(kind)
                if kind == back:
                    due.append((epoch + 20, kind, epoch))
                elif kind == soon and source.random() < 0.5:
                    due.append((epoch + 1, kind, epoch))
        for entry in [entry for entry in due if entry[0] <= epoch]:
            due.remove(entry)
            density.found(*entry[1:])
            density.leave(*entry[1:])
        density.tick()
        if epoch % 10 == 9:
            density.rebuild(0, CLASSES)
    table = np.array(density.table)
    by_age = {low: at for at, low in enumerate(EDGES[:-1])}
    assert table[soon, 0] > table[back, 0] > 2 * table[never, 0]
    assert table[back, by_age[16]] > 2 * table[back, 0], "it is worth most shortly before"
    assert table[soon, by_age[16]] < 0.1 * table[soon, 0], "who did not come at once does not come"


def test_a_shadow_knows_what_lru_would_have():
    """Against LRU itself, while blocks of one size come back at random: at most an epoch's part is wrong."""
    source, size = random.Random(1), 64
    density, shadow = HitDensity(), ShadowLru(size, EvictionStats())
    lru, since, told, real = [], {}, 0.0, 0
    for turn in range(4000):
        block = min(int(source.expovariate(0.012)), 400)
        if block in since:
            told += shadow.has(since[block])
            density.leave(0, since[block])
        if block in lru:
            real += 1
            lru.remove(block)
        lru = [*lru, block][-size:]
        since[block] = density.epoch
        density.enter(0)
        if turn % 4 == 3:
            density.tick()
            shadow.tick(density)
    assert told == pytest.approx(real, rel=0.05) and 1000 < real < 3500


@pytest.mark.parametrize("released_first", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_a_child_goes_before_a_parent_that_another_request_computed_and_left_longer_ago(name, released_first):
    """Two that begin alike are computed side by side; the longer one's end goes on from the shorter one's blocks."""
    kv = KVManager(8, 4, eviction=name)
    short, long = Sequence(list(range(8))), Sequence(list(range(12)))
    for one in (short, long):
        one.prompt_len = len(one.tokens)
        kv.admit(one, [])
        kv.grow(one, len(one.tokens))
    parents, child = list(short.blocks), long.blocks[2]
    for one in (short, long):
        one.num_computed = len(one.tokens)
        if one is long and released_first:
            kv.release(short, 0)
        kv.publish(one)
        kv.check_integrity([short, long])
    kv.release(short, 0)
    kv.release(long, 0)
    kv.check_integrity([])
    evicted = []
    kv.pool._on_evict = lambda block: (evicted.append(block), kv._evicted(block))
    for _ in range(8):
        kv.pool.take()
    assert evicted == [child, *reversed(parents)]


def test_what_is_used_again_is_counted_once():
    kv = KVManager(64, 4, eviction="learned")
    for _ in range(5):
        visit(kv, range(41))
        visit(kv, range(100, 121))
    assert sum(kv.eviction.density.totals) == sum(kv.eviction.is_free) == 15
    kv.reset_prefix_cache()
    assert sum(kv.eviction.density.totals) == 0
    kv.check_integrity([])


def test_lru_takes_over_when_it_would_find_more_and_later_lets_go():
    kv = KVManager(160, 4, eviction="learned")
    shadow, stats = kv.eviction.shadow, kv.eviction.stats
    density = kv.eviction.density
    assert shadow.leads
    stats.evictions = 10_000
    shadow.tick(density)
    assert not shadow.leads
    shadow.count(hits=100, shadow_hits=10)
    shadow.count(hits=0, shadow_hits=10)
    assert not shadow.leads, "as many as a 16th of the pool may be lost; gains are not saved up"
    shadow.count(hits=0, shadow_hits=1)
    assert shadow.leads and stats.takeovers == 1
    pauses = []
    for _ in range(3):
        before = stats.evictions
        while shadow.leads:
            stats.evictions += 10
            shadow.tick(density)
        pauses.append(stats.evictions - before)
        shadow.count(hits=0, shadow_hits=11)
    assert pauses == [320, 640, 1280], "who fails again waits twice as long"


def test_ghosts_are_bounded_and_blocks_between_them_count_as_known():
    kv = KVManager(64, 16, eviction="learned")
    policy = kv.eviction
    policy._most_ghosts = 8
    visit(kv, range(63 * 16))
    counts = Counter()
    for number in range(40):
        visit(kv, range(10_000 * (number + 1), 10_000 * (number + 1) + 62 * 16))
        counts[len(policy._ghosts) + len(policy._old_ghosts)] += 1
    assert max(counts) <= 16
    policy._most_ghosts = 1000
    visit(kv, range(63 * 16))
    for number in range(3):
        visit(kv, range(10**7 * (number + 1), 10**7 * (number + 1) + 62 * 16))
    assert visit(kv, range(63 * 16)) == 0
    assert {policy._hits[b] for b in range(64) if policy._serial[b]} >= {1}, "its second use was not seen as one"


def test_a_scheduler_takes_any_policy():
    for name in EVICTION:
        assert Scheduler(Limits(4, 64), KVManager(16, 8, eviction=name)).kv.pool.num_free == 16
    assert EDGES[-1] == EPOCHS
