"""Nothing that the engine may decide changes a token: overlap, cache, chunks, blocks, memory, rows, drafts."""

import dataclasses

import pytest
from harness import Day, House
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_clients import CALM, clients

from tokenmill.engine.scheduler.policy import Fcfs
from tokenmill.kv.eviction import EVICTION

PLAIN = House(rows=64, step_tokens=4096, blocks=4000, overlap=False, prefix_caching=False)
CROWD = dataclasses.replace(CALM, deadline=0.0, gap=0.002)

HOUSES = {
    "one_behind": dataclasses.replace(PLAIN, overlap=True),
    "prefix_cache": dataclasses.replace(PLAIN, prefix_caching=True),
    "chunks_of_16": dataclasses.replace(PLAIN, rows=16, step_tokens=16),
    "blocks_of_16": dataclasses.replace(PLAIN, block_size=16),
    "blocks_of_32": dataclasses.replace(PLAIN, block_size=32),
    "tiny_memory": dataclasses.replace(PLAIN, blocks=24),
    "one_row": dataclasses.replace(PLAIN, rows=1),
    "two_stages": dataclasses.replace(PLAIN, stages=2),
    "three_stages": dataclasses.replace(PLAIN, stages=3, step_tokens=100, prefix_caching=True),
    "first_come": dataclasses.replace(PLAIN, policy=Fcfs()),
    **{
        f"evicts_by_{name}": dataclasses.replace(PLAIN, blocks=40, prefix_caching=True, eviction=name)
        for name in ("lfu", "cost", "learned")
    },
    "all_together": House(rows=16, step_tokens=16, blocks=40, overlap=True, prefix_caching=True),
    "all_together_in_stages": House(rows=16, step_tokens=16, blocks=40, prefix_caching=True, stages=4),
}


def transcript(house, seed, count=60, drafts=0.0, mix=CROWD):
    return Day(house.build(), seed=seed, drafts=drafts, integrity=0.1).run(clients(seed, count, mix)).transcript()


@pytest.mark.parametrize("name", HOUSES)
@pytest.mark.parametrize("drafts", [0.0, 0.5])
def test_a_switch_changes_no_token(name, drafts):
    for seed in (1, 2, 3):
        assert transcript(HOUSES[name], seed, drafts=drafts) == transcript(PLAIN, seed)


houses = st.builds(
    House,
    rows=st.sampled_from([1, 2, 5, 64]),
    step_tokens=st.sampled_from([64, 100, 4096]),
    blocks=st.integers(0, 60),  # beyond what the longest request needs
    block_size=st.sampled_from([8, 16, 32]),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    eviction=st.sampled_from(EVICTION),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
    policy=st.sampled_from([None, Fcfs()]),
    stages=st.sampled_from([1, 1, 2, 3, 4]),
)


@settings(max_examples=150, deadline=None)
@given(house=houses, seed=st.integers(0, 2**32), drafts=st.sampled_from([0.0, 0.3, 1.0]), burst=st.booleans())
def test_any_house_gives_the_solo_answer(house, seed, drafts, burst):
    """Day.run judges every request against what it would say alone."""
    longest = CROWD.prefix_tokens + CROWD.tail_tokens + CROWD.output_tokens
    house = dataclasses.replace(house, blocks=house.blocks + -(-longest // house.block_size))
    mix = dataclasses.replace(CROWD, gap=0.0 if burst else 0.01, beams=0.15, several=0.15, prompt_logprobs=0.2)
    Day(house.build(), seed=seed, drafts=drafts, integrity=0.2).run(clients(seed, 16, mix))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([8, 16]))
def test_a_warm_cache_gives_the_tokens_of_a_cold_one(seed, size):
    house = House(block_size=size, blocks=400)
    engine = house.build()
    cold = Day(engine, seed=seed).run(clients(seed, 12, CROWD)).transcript()
    hits = engine.scheduler.kv.stats.hit
    warm = Day(engine, seed=seed + 1).run(clients(seed, 12, CROWD)).transcript()
    assert warm == cold
    assert engine.scheduler.kv.stats.hit > hits
