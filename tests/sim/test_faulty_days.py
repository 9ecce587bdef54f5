"""Days full of faults: every request ends exactly once, with its tokens or with an error that names the cause."""

import random

import pytest
from harness import HEAD_BOUND, Day, House
from sim_clients import POISON, ROUGH, clients

from tokenmill.engine.request import Finish
from tokenmill.engine.runner.simulated import Faults

CLIENTS = 10_000


def house_of(seed: int) -> House:
    """Every seed is another house: small and large pools, sync and one-behind, with and without a cache."""
    rng = random.Random(seed)
    return House(
        rows=rng.choice([8, 16, 32]),
        step_tokens=rng.choice([48, 128, 256]),
        blocks=rng.choice([100, 160, 400]),
        overlap=seed % 4 != 0,
        prefix_caching=seed % 5 != 0,
        watermark=rng.choice([0.0, 0.01, 0.05]),
        max_queued_requests=rng.choice([100, 100_000]),
    )


EVERY_TIME = {4, 5}  # in step, and one behind without a cache; the other days when there is time


@pytest.mark.parametrize(
    "seed", [seed if seed in EVERY_TIME else pytest.param(seed, marks=pytest.mark.slow) for seed in range(20)]
)
def test_faulty_days(seed):
    faults = Faults(fail_at_launch=0.01, fail_at_wait=0.02, slow=0.02, min_gap=10, poisoned_tokens=POISON, seed=seed)
    day = Day(house_of(seed).build(faults), seed=seed, drafts=0.1, storm=0.001, integrity=0.005)
    day.run(clients(seed, CLIENTS, ROUGH))
    finishes = {request.finish for request in day.ends.values()}
    assert finishes == {Finish.STOP, Finish.LENGTH, Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR}
    assert day.scheduler.stats.failed_steps > 50 and day.scheduler.stats.preemptions > 100
    assert day.idle_checks > 20
    assert day.worst_wait <= HEAD_BOUND


@pytest.mark.parametrize("seed", [21, 22, pytest.param(23, marks=pytest.mark.slow)])
def test_days_on_which_all_memory_is_lost_again_and_again(seed):
    """As when a rank of a group is killed: everybody starts over from the tokens that are known, and says the same."""
    rare = {"fail_at_wait": 0.005, "fail_at_launch": 0.005, "min_gap": 10}
    faults = Faults(lose_memory=0.03, poisoned_tokens=POISON, seed=seed, **rare)
    day = Day(house_of(seed).build(faults), seed=seed, drafts=0.1, storm=0.001, integrity=0.02)
    day.run(clients(seed, 1500, ROUGH))
    assert day.scheduler.stats.failed_steps > 50 and day.idle_checks > 2
    finishes = {request.finish for request in day.ends.values()}
    assert finishes == {Finish.STOP, Finish.LENGTH, Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR}
