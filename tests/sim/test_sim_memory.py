"""What paging promises: little waste, no fragmentation, every shared prefix stored and computed once."""

import random

import pytest
from harness import Day, House
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_clients import Client

from tokenmill.engine.request import Request
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams


def client(id, prompt, output, n=1, arrival=0.0, salt=""):
    params = SamplingParams(temperature=1, max_tokens=output, n=n)
    requests = [
        Request(f"{id}/{k}", prompt, params, max_tokens=output, seed=17 * k + 1, arrival=arrival, salt=salt)
        for k in range(n)
    ]
    requests[0].followers = requests[1:]
    return Client(arrival, requests)


def tokens(rng, count):
    return [rng.randrange(1000) for _ in range(count)]


class Weighed(Day):
    """Notes after every step how many blocks are in use, and how many slots of them hold no token."""

    def __post_init__(self):
        super().__post_init__()
        self.wasted = self.held = self.most_blocks = 0

    def step(self):
        deltas = super().step()
        pool, size = self.scheduler.kv.pool, self.scheduler.kv.block_size
        running = self.scheduler.running
        self.held += sum(len(request.blocks) for request in running) * size
        self.wasted += sum(len(request.blocks) * size - request.num_tokens for request in running)
        self.most_blocks = max(self.most_blocks, pool.num_blocks - pool.num_free)
        return deltas


def test_paging_wastes_under_4_percent_of_a_mixed_load():
    """Nothing but the end of a last block is ever held without a token to put there."""
    rng = random.Random(1)
    crowd = [
        client(str(k), tokens(rng, rng.randrange(20, 800)), rng.randrange(20, 300), arrival=0.02 * k)
        for k in range(150)
    ]
    day = Weighed(House(rows=64, step_tokens=512, blocks=1200, block_size=16).build(), integrity=0.0)
    day.run(crowd)
    waste = day.wasted / day.held
    reserved = sum(800 + 300 - len(c.requests[0].tokens) for c in crowd) / (1100 * len(crowd))
    assert 0 < waste < 0.04 < reserved


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(4, 60))
def test_fragmentation_never_refuses_what_fits(seed, blocks):
    """After any history of odd sizes coming and going, exactly what is free can be had."""
    rng = random.Random(seed)
    kv, held = KVManager(blocks, 8), []
    for number in range(60):
        if held and rng.random() < 0.5:
            kv.release(held.pop(rng.randrange(len(held))), fence=0)
        one = Request(str(number), tokens(rng, rng.randrange(1, 100)), SamplingParams(), max_tokens=1, seed=0)
        hits = kv.match(one)
        fits = kv.needed(hits, len(one.tokens)) <= kv.pool.num_free
        kv.admit(one, hits)
        assert (kv.grow(one, len(one.tokens)) is not None) == fits
        held.append(one)
    free = kv.pool.num_free
    last = Request("last", [0] * (free * 8 + 1), SamplingParams(), max_tokens=1, seed=0)
    assert kv.grow(last, free * 8 + 1) is None
    assert len(kv.grow(last, free * 8)) == free
    assert kv.pool.num_free == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_n_8_stores_and_computes_the_prompt_once(overlap):
    prompt, output, size, n = 100, 20, 8, 8
    house = House(rows=16, step_tokens=256, blocks=400, block_size=size, overlap=overlap, prefix_caching=False)
    day = Weighed(house.build(), integrity=1.0)
    day.run([client("one", tokens(random.Random(3), prompt), output, n=n)])
    shared = (prompt - 1) // size
    own = -(-(prompt + output - 1) // size) - shared
    assert day.most_blocks <= shared + n * own
    assert day.scheduler.stats.tokens == prompt + (n - 1) + n * (output - 1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step_tokens", [48, 64, 4096])
def test_a_prefix_that_arrives_32_times_at_once_is_computed_once(overlap, step_tokens):
    rng = random.Random(4)
    prefix, tail, output, count = tokens(rng, 160), 10, 5, 32
    house = House(rows=48, step_tokens=step_tokens, blocks=1000, overlap=overlap)
    day = Weighed(house.build(), integrity=0.1)
    day.run([client(str(k), prefix + tokens(rng, tail), output) for k in range(count)])
    assert day.scheduler.stats.tokens == 160 + count * (tail + output - 1)
    cached = sorted(request.metrics.cached_tokens for request in day.ends.values())
    assert cached == [0] + [160] * (count - 1)
    own = -(-(160 + tail + output) // 8) - 160 // 8
    assert day.most_blocks <= 160 // 8 + count * own


def test_a_second_request_prefills_only_its_tail_and_another_tenant_everything():
    rng = random.Random(5)
    prefix = tokens(rng, 160)
    asks = [
        client("first", prefix + tokens(rng, 10), 1, salt="a"),
        client("second", prefix + tokens(rng, 10), 1, arrival=1.0, salt="a"),
        client("stranger", prefix + tokens(rng, 10), 1, arrival=2.0, salt="b"),
    ]
    day = Day(House(blocks=400).build())
    day.run(asks)
    cached = {id: request.metrics.cached_tokens for id, request in day.ends.items()}
    assert cached == {"first/0": 0, "second/0": 160, "stranger/0": 0}
    first, second, stranger = (day.ends[f"{name}/0"].metrics.ttft for name in ("first", "second", "stranger"))
    assert second < first == pytest.approx(stranger)
