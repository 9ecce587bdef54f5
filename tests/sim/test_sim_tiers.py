"""Blocks that move between the device and tiers, with every kind of trouble: tokens stay, nothing leaks or hangs."""

import random
from dataclasses import replace

import pytest
from harness import Day, House
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sim_clients import CALM, POISON, ROUGH, Client, clients
from sim_tier import SimulatedBell, SimulatedTier, Troubles

from tokenmill.engine.request import Finish, Request
from tokenmill.engine.runner.simulated import STEP_TIME, Faults
from tokenmill.kv.transfers import Tier, Transfers
from tokenmill.params import SamplingParams

BLOCK_BYTES = 1000
FAST = Troubles(seconds=1e-4)


def with_tiers(house, tiers, faults=None, step_time=STEP_TIME, seed=0):
    """An engine with tiers of so many blocks and troubles; the last of several takes only what is used again."""
    engine = house.build(faults)
    sims = [
        SimulatedTier(f"tier{number}", engine.runner, engine.clock, room, troubles, seed + number)
        for number, (room, troubles) in enumerate(tiers)
    ]
    kv = engine.scheduler.kv
    kv.transfers = Transfers(
        kv,
        [Tier(one, on_second_use=number > 0) for number, one in enumerate(sims)],
        BLOCK_BYTES,
        SimulatedBell(engine.clock, sims),
        engine.clock,
        step_time,
    )
    return engine, sims


class TieredDay(Day):
    """A day that is over when its transfers are, too."""

    def _check_idle(self):
        transfers = self.scheduler.kv.transfers
        for _ in range(1000):
            if not transfers.under_way:
                break
            transfers.wait(2000.0)
            self.scheduler.take_in_transfers()
        assert not transfers.under_way and not transfers.fetches
        assert all(tier.waiting == 0 and not tier._writing for tier in transfers.tiers)
        super()._check_idle()


def conversation(rng, number, turns, gap, salt="", prompt=60, output=12):
    """The same user comes again with what was said and more; answers are told apart by the house's own model."""
    asks, text = [], [rng.randrange(400) for _ in range(prompt)]
    for turn in range(turns):
        request = Request(
            f"{number}.{turn}/0", list(text), SamplingParams(temperature=0, max_tokens=output), max_tokens=output,
            seed=0, arrival=gap * turn + number * 1e-3, salt=salt,
        )  # fmt: skip
        asks.append(Client(request.arrival, [request]))
        text += [rng.randrange(400) for _ in range(40)]
    return asks


def turns(users=20, times=4, salts=1, seed=1):
    rng = random.Random(seed)
    return [ask for user in range(users) for ask in conversation(rng, user, times, 10.0, f"s{user % salts}")]


def forget_on_the_device(kv):
    """As if everything had been evicted; tiers are told nothing."""
    for block in kv.index.blocks():
        kv.index.forget(block)
        kv.pool.mark_content(block, False)


SMALL = House(rows=8, step_tokens=64, blocks=60, block_size=8)


def test_what_a_tier_holds_is_not_computed_again():
    """Conversations of five times the device's memory: every turn but the first finds what came before it."""
    computed = {}
    for room in (0, 10_000):
        engine, _ = with_tiers(SMALL, [(room, FAST)])
        TieredDay(engine).run(turns())
        computed[room] = engine.scheduler.stats.tokens
    asks = turns()
    fresh = sum(60 + 11 if ".0/" in ask.requests[0].id else 40 + 8 + 11 for ask in asks)
    assert computed[10_000] <= fresh  # the last block of what was known is incomplete, so up to 7 and a token again
    assert computed[10_000] < 0.6 * computed[0]


@pytest.mark.parametrize("eviction", ["lfu", "cost", "learned"])
def test_every_eviction_knows_what_came_from_a_tier(eviction):
    """The day checks the books of the policy, and the answers."""
    engine, (tier,) = with_tiers(replace(SMALL, eviction=eviction), [(10_000, FAST)])
    TieredDay(engine).run(turns())
    assert tier.events["read"] > 0 and engine.scheduler.kv.stats.evicted_blocks > 0
    assert engine.scheduler.kv.eviction.stats.hits > 0


def test_a_request_waits_parked_and_others_go_on_meanwhile():
    engine, (tier,) = with_tiers(SMALL, [(1000, Troubles(seconds=0.0))])
    day = TieredDay(engine)
    day.run(turns(users=8, times=1))
    forget_on_the_device(engine.scheduler.kv)
    tier.troubles = Troubles(seconds=0.0, slow=0.0, stuck=1.0)
    first, other = turns(users=1, times=1)[0].requests[0], Request(
        "x/0", list(range(400, 420)), SamplingParams(temperature=0, max_tokens=3), max_tokens=3, seed=0
    )  # fmt: skip
    first.id = "again/0"
    engine.add(first)
    engine.add(other)
    while not other.finished:
        engine.step()
    assert first.waits_for is not None and first.waits_for.value == "transfer" and not first.blocks
    engine.scheduler.check_integrity()
    while not first.finished:  # it is told late, so the request goes on without
        engine.step()
    assert engine.clock.now < 100 and engine.scheduler.kv.transfers.under_way
    assert first.output == day.ends["0.0/0"].output
    assert engine.scheduler.kv.transfers.tiers[0].stats.late == 1


@pytest.mark.parametrize("why", ["cancel", "deadline"])
def test_whoever_leaves_while_blocks_are_on_their_way_leaves_nothing_behind(why):
    engine, (tier,) = with_tiers(SMALL, [(1000, Troubles(seconds=0.0))])
    day = TieredDay(engine)
    day.run(turns(users=8, times=1))
    forget_on_the_device(engine.scheduler.kv)
    tier.troubles = Troubles(seconds=0.4)
    again = turns(users=1, times=1)[0].requests[0]
    again.id, again.deadline = "again/0", engine.clock.now + 0.01 if why == "deadline" else None
    engine.add(again)
    engine.step()
    assert again.waits_for is not None
    if why == "cancel":
        engine.cancel("again/0")
    while not again.finished:
        engine.step()
    assert again.finish is (Finish.CANCELLED if why == "cancel" else Finish.DEADLINE)
    day._check_idle()


def test_what_several_wait_for_is_read_once():
    engine, (tier,) = with_tiers(House(rows=40, step_tokens=256, blocks=400, block_size=8), [(1000, FAST)])
    prefix = list(range(160))
    params = SamplingParams(temperature=0, max_tokens=3)
    first = Request("first/0", [*prefix, 1], params, max_tokens=3, seed=0)
    TieredDay(engine).run([Client(0.0, [first])])
    forget_on_the_device(engine.scheduler.kv)
    tier.troubles, before = Troubles(seconds=0.05), engine.scheduler.stats.tokens
    crowd = [Request(f"{n}/0", [*prefix, 2 + n], params, max_tokens=3, seed=0) for n in range(32)]
    TieredDay(engine).run(Client(engine.clock.now, [request]) for request in crowd)
    assert tier.events["read"] == 160 // 8
    assert engine.scheduler.stats.tokens - before == 32 * 3


def test_nobody_waits_for_blocks_of_a_copy_that_hangs():
    """They come free some day; until then who runs takes blocks from others."""
    house = House(rows=6, step_tokens=64, blocks=24, block_size=8, watermark=0.0)
    params = SamplingParams(max_tokens=100, temperature=0)
    engine, _ = with_tiers(house, [(1000, Troubles(seconds=0.0, stuck=1.0))])
    for number in range(6):
        prompt = [number * 40 + k for k in range(24)]
        engine.add(Request(f"{number}/0", prompt, params, max_tokens=100, seed=0))
    while engine.scheduler.requests:
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.clock.now < 30 and engine.scheduler.kv.transfers.under_way
    assert engine.scheduler.stats.preemptions > 0


def test_slow_tiers_are_left_alone():
    """A tier slower than the device computes is asked until that is known, and then no more."""
    engine, (tier,) = with_tiers(SMALL, [(10_000, Troubles(seconds=2.0))])
    TieredDay(engine).run(turns(times=6))
    stats = engine.scheduler.kv.transfers.tiers[0].stats
    assert stats.spared > 10 * stats.read
    assert tier.events["read"] > 0


def test_a_preempted_request_comes_back_from_a_tier_or_computes_again_whichever_is_cheaper():
    """Little memory and long answers. A fast tier is read from, a slow one is not; one in between sees both."""
    house = House(rows=12, step_tokens=64, blocks=70, block_size=8, watermark=0.0)
    params = SamplingParams(max_tokens=90, temperature=0)
    seen = {}
    for name, seconds in (("fast", 1e-7), ("between", 3.2e-4), ("slow", 1.0)):
        rng = random.Random(3)
        prompts = [[rng.randrange(400) for _ in range(40)] for _ in range(24)]
        crowd = [Request(f"{n}/0", prompt, params, max_tokens=90, seed=0) for n, prompt in enumerate(prompts)]
        engine, _ = with_tiers(house, [(10_000, Troubles(seconds=0.0, per_block=seconds))])
        TieredDay(engine).run(Client(0.0, [request]) for request in crowd)
        assert engine.scheduler.stats.preemptions > 10
        seen[name] = engine.scheduler.kv.transfers.swapped, engine.scheduler.kv.transfers.recomputed
    assert seen["fast"][0] > 10 > 4 * seen["fast"][1], seen  # few, where a write was refused
    assert seen["between"][0] > 2 and seen["between"][1] > 2, seen
    assert seen["slow"][1] > seen["slow"][0], seen


def test_what_is_used_a_second_time_goes_to_the_second_tier():
    engine, (first, second) = with_tiers(SMALL, [(10_000, FAST), (10_000, FAST)])
    once = turns(users=6, times=1)
    day = TieredDay(engine)
    day.run(once)
    assert first.store and not second.store
    later = [client for client in turns(users=3, times=2) if ".1/" in client.requests[0].id]
    for client in later:
        client.arrival = engine.clock.now + 1.0
    day2 = TieredDay(engine)
    day2.run(later)
    assert 0 < len(second.store) <= 3 * (60 // 8)


def test_a_forgotten_salt_is_not_found_anywhere():
    engine, tiers = with_tiers(SMALL, [(10_000, FAST), (10_000, FAST)])
    TieredDay(engine).run(turns(salts=2))
    assert {salt for tier in tiers for salt, _ in tier.store.values()} == {"s0", "s1"}
    engine.reset_prefix_cache("s0")
    assert {salt for tier in tiers for salt, _ in tier.store.values()} == {"s1"}
    engine.reset_prefix_cache()
    assert not any(tier.store for tier in tiers)


def test_what_is_withdrawn_on_its_way_never_arrives():
    engine, (tier,) = with_tiers(SMALL, [(1000, Troubles(seconds=0.0))])
    TieredDay(engine).run(turns(users=8, times=1))
    kv = engine.scheduler.kv
    forget_on_the_device(kv)
    tier.troubles = Troubles(seconds=0.2)
    again = turns(users=1, times=1)[0].requests[0]
    again.id = "again/0"
    engine.add(again)
    engine.step()
    assert kv.transfers.under_way
    engine.reset_prefix_cache()
    while kv.transfers.under_way:
        engine.clock.wait_until(engine.clock.now + 1)
        engine.scheduler.take_in_transfers()
    assert len(kv.index) == 0 and not again.finished
    while not again.finished:
        engine.step()


TROUBLES = st.builds(
    Troubles,
    fail=st.sampled_from([0.0, 0.1, 0.6]),
    torn=st.sampled_from([0.0, 0.1, 0.6]),
    slow=st.sampled_from([0.0, 0.2]),
    stuck=st.sampled_from([0.0, 0.02]),
    seconds=st.sampled_from([0.0, 1e-3, 3e-2]),
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a day shrinks to nothing smaller that fails, for minutes
)
@given(
    seed=st.integers(0, 10_000),
    tiers=st.lists(st.tuples(st.sampled_from([0, 10, 100, 10_000]), TROUBLES), min_size=1, max_size=3),
    blocks=st.sampled_from([40, 70, 200]),
    overlap=st.booleans(),
    rough=st.booleans(),
)
def test_troubled_tiers_change_no_token_and_leak_nothing(seed, tiers, blocks, overlap, rough):
    house = House(rows=12, step_tokens=64, blocks=blocks, block_size=8, overlap=overlap, watermark=0.02)
    faults = Faults(fail_at_launch=0.01, fail_at_wait=0.02, min_gap=10, poisoned_tokens=POISON, seed=seed)
    engine, _ = with_tiers(house, tiers, faults if rough else None, seed=seed)
    day = TieredDay(engine, seed=seed, drafts=0.1 if rough else 0.0, storm=0.002 if rough else 0.0, integrity=0.1)
    crowd = [*clients(seed, 120, ROUGH if rough else CALM), *turns(users=8, times=4, salts=2, seed=seed)]
    day.run(crowd)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_a_faulty_day_with_tiers(seed):
    """Every failure of steps and of transfers at once, for thousands of clients."""
    faults = Faults(fail_at_launch=0.01, fail_at_wait=0.02, slow=0.02, min_gap=10, poisoned_tokens=POISON, seed=seed)
    troubles = Troubles(fail=0.05, torn=0.05, slow=0.05, stuck=0.001, seconds=3e-3)
    house = House(rows=16, step_tokens=128, blocks=120, block_size=8, overlap=seed % 4 != 0)
    engine, tiers = with_tiers(house, [(300, troubles), (1000, troubles)], faults, seed=seed)
    day = TieredDay(engine, seed=seed, drafts=0.1, storm=0.001, integrity=0.01)
    day.run(clients(seed, 3000, ROUGH))
    for event in ("read", "written", "failed", "torn"):
        assert tiers[0].events[event] > 10, tiers[0].events
    assert engine.scheduler.kv.transfers.swapped > 0
