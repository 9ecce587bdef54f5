"""What is told of eviction: which policy, what it finds, what LRU would have found."""

import msgspec
import pytest

pytest.importorskip("prometheus_client")

from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams
from tokenmill.serve.engine import wire
from tokenmill.serve.engine.introspection import stats_of
from tokenmill.serve.observe.metrics import _eviction

PARAMS = SamplingParams(temperature=0, max_tokens=4)


def after_some_turns(eviction):
    """Ten users ask twice each, and a cache of 40 blocks does not hold them all."""
    clock = SimulatedClock()
    scheduler = Scheduler(Limits(2, 128), KVManager(40, 8, eviction=eviction))
    engine = Engine(scheduler, SimulatedRunner(40, 8, clock), overlap=False, clock=clock)
    for turn in range(2):
        for user in range(10):
            for again in range(2):
                tokens = [user + 2] * (40 + 8 * turn)
                engine.add(Request(f"{turn}.{user}.{again}", tokens, PARAMS, max_tokens=4, seed=1, arrival=clock()))
                while engine.scheduler.has_work:
                    engine.step()
    return engine


@pytest.mark.parametrize("eviction", ["lfu", "cost", "learned"])
def test_an_engine_reports_its_policy_and_what_it_finds(eviction):
    stats = stats_of(after_some_turns(eviction))
    name, found, shadow, takeovers = stats.eviction
    assert name == eviction and found >= 80 and stats.evicted_blocks > 0 and takeovers == 0
    assert (shadow > 0) == (eviction == "learned")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=wire.EngineStats) == stats


def test_lru_has_nothing_to_compare():
    assert stats_of(after_some_turns("lru")).eviction is None


def test_metrics_have_the_policy_as_a_label():
    samples = {one.name: one for family in _eviction("learned", 30, 20, 1) for one in family.samples}
    told = {name: one.value for name, one in samples.items()}
    assert told == {
        "tokenmill_eviction_found_blocks_total": 30,
        "tokenmill_eviction_shadow_found_blocks_total": 20,
        "tokenmill_eviction_takeovers_total": 1,
    }
    assert all(one.labels == {"policy": "learned"} for one in samples.values())
