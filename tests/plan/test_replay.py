"""Replays of block traces: nobody beats the optimum, and learned eviction closes the gap without falling below LRU."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.kv.eviction import EVICTION
from tokenmill.plan.demand.traces import read_trace
from tokenmill.plan.demand.workload import fixed
from tokenmill.plan.replay.judge import judge
from tokenmill.plan.replay.optimum import optimum
from tokenmill.plan.replay.replay import BlockTrace, replay
from tokenmill.plan.replay.traces import MADE, block_trace, in_smaller_blocks, made_trace

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
MOONCAKE = DATA / "mooncake_conversation_trace.jsonl"


def best_by_trying(trace, capacity):
    """Most blocks found by any evictions at all, leaf first or not."""

    @cache
    def most(number, held):
        if number == len(trace):
            return 0
        blocks = trace[number]
        hits = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
        room = capacity - len(blocks)
        others = sorted(held.difference(blocks))
        kept = [frozenset(others)] if len(others) <= room else subsets(others, room)
        return hits + max(most(number + 1, one.union(blocks)) for one in kept)

    return most(0, frozenset())


def subsets(items, size):
    if not size:
        return [frozenset()]
    if len(items) <= size:
        return [frozenset(items)]
    return [one | {items[0]} for one in subsets(items[1:], size - 1)] + subsets(items[1:], size)


def tree_trace(data, requests):
    """Requests that begin alike: each goes on from a block of an earlier one."""
    trace, serial = [], 0
    for _ in range(requests):
        start = data.draw(st.sampled_from([(), *trace])) if trace else ()
        start = start[: data.draw(st.integers(0, len(start)))]
        more = data.draw(st.integers(0 if start else 1, 3))
        trace.append(start + tuple(range(serial, serial + more)))
        serial += more
    return trace


@settings(max_examples=60, deadline=None)
@given(data=st.data(), requests=st.integers(2, 8))
def test_the_optimum_is_what_no_order_of_evictions_betters(data, requests):
    trace = tree_trace(data, requests)
    most = max(map(len, trace))
    capacity = data.draw(st.integers(most, most + 3))
    assert sum(optimum(trace, capacity)) == best_by_trying(trace, capacity)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), requests=st.integers(2, 25), room=st.integers(1, 8))
def test_no_policy_finds_more_than_the_optimum(data, requests, room):
    trace = BlockTrace("random", tuple(tree_trace(data, requests)), block_size=16)
    blocks = max(map(len, trace.prompts)) + room
    best = sum(optimum(trace.prompts, blocks - 1))
    for name in EVICTION:
        assert sum(replay(trace, blocks, name).found) <= best


@pytest.mark.parametrize("name", MADE)
def test_on_made_traces_learned_stays_within_a_hundredth_of_lru_and_all_below_the_optimum(name):
    trace = made_trace(name)
    names = EVICTION if name == "chats" else ("lru", "learned")
    found = judge(trace, 300 if name == "agents" else 1000, names)
    assert all(share <= found.optimum for share in found.share.values())
    assert found.share["learned"] >= 0.99 * found.share["lru"]
    if name == "loop":
        assert found.share["lru"] == 0 and found.closed("learned") > 0.5, "an LRU finds nothing in a loop"


def test_lru_takes_over_where_it_finds_more():
    found = replay(made_trace("recent"), 300, "learned")
    assert found.takeovers > 0


def test_the_same_trace_gives_the_same_hits():
    one, two = made_trace("scans", seed=3), made_trace("scans", seed=3)
    assert one == two != made_trace("scans", seed=4)
    one, two = (BlockTrace("part", trace.prompts[:1500], trace.answers[:1500]) for trace in (one, two))
    assert replay(one, 200, "learned").found == replay(two, 200, "learned").found


@pytest.mark.parametrize("name", EVICTION)
def test_a_request_that_does_not_fit_finds_nothing_and_disturbs_nobody(name):
    """`replay` proves the integrity of pool, index and policy at its end."""
    trace = BlockTrace("wide", ((1, 2), (3, 4, 5, 6, 7), (1, 2)), block_size=16)
    assert replay(trace, 4, name).found == (0, 0, 2)


def test_smaller_blocks_find_the_same_tokens_where_everything_fits():
    trace = made_trace("agents")
    trace = BlockTrace("part", trace.prompts[:200], trace.answers[:200], 512)
    small = in_smaller_blocks(trace, 128)
    assert 4 * sum(replay(trace, 20_000, "learned").found) == sum(replay(small, 80_000, "learned").found)
    with pytest.raises(ConfigError, match="blocks of 512 tokens cannot be divided into blocks of 100"):
        in_smaller_blocks(trace, 100)


def test_traces_that_say_nothing_of_beginnings_are_refused():
    with pytest.raises(ConfigError, match="has no prefix hashes"):
        block_trace(fixed("alike", 3, 100, 10))
    with pytest.raises(ConfigError, match="there is no made trace 'walks'; it may be one of chats, agents"):
        made_trace("walks")


@pytest.mark.skipif(not MOONCAKE.is_file(), reason="the Mooncake trace is not here")
@pytest.mark.parametrize("blocks", [2500, 3000, 4000])
def test_learned_closes_almost_a_third_of_the_gap_between_lru_and_the_optimum(blocks):
    """Learned on the first half of the trace, judged on the second, where the gap is a quarter of all blocks."""
    found = judge(block_trace(read_trace(MOONCAKE)), blocks, ("lru", "learned"), half=True)
    assert found.optimum - found.share["lru"] > 0.2
    assert found.closed("learned") >= 0.3
