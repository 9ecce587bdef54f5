"""Shortest-first in a simulated house: order is all that changes."""

import pytest
from harness import Day, House
from sim_clients import CALM, clients

from tokenmill.engine.scheduler.policy import ShortestFirst


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blocks", [60, 400])
def test_every_request_says_what_it_says_alone(seed, blocks):
    """The day compares every answer with the one it would have had alone; forks, beams and drafts are among them."""
    policy = ShortestFirst(patience=0.5)
    day = Day(House(rows=6, blocks=blocks, policy=policy).build(), seed=seed, drafts=0.2).run(clients(seed, 80, CALM))
    assert len(day.ends) >= 80 and policy.predictor.learned > 20
