"""What a simulated run says of its users: the promised share of gaps counts, as where a server is measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.bench.figures import Answer
from tokenmill.plan.demand.slo import Slo, parse_slo
from tokenmill.plan.simulator.replica import SimulatedJob
from tokenmill.plan.simulator.result import SimulationResult


def outcome_of(*requests, refused=0):
    """Requests that arrived at 0, as lists of their tokens' times."""
    outcome = SimulationResult(seconds=10.0, refused=refused)
    for number, times in enumerate(requests):
        outcome.add(SimulatedJob(number, 0.0, [], 5, len(times), times=list(times)))
    return outcome


# 20 gaps, 2 of which are late: 90 % are in time.
STUTTERS = [0.1 * number for number in range(19)] + [3.0, 5.0]


@pytest.mark.parametrize("share, good", [(50, 1), (90, 1), (91, 0), (95, 0)])
def test_the_promised_share_of_gaps_decides(share, good):
    found = outcome_of(STUTTERS).figures(parse_slo(f"ttft=1s,itl=150ms,p={share}"))
    assert found["good_share"] == good and found["goodput"] == good / 10


def test_a_late_first_token_is_never_good():
    assert outcome_of([1.5, 1.6], [0.5, 0.6]).figures(Slo(1.0, 0.2, 0.9))["good_share"] == 0.5


def test_who_is_refused_got_nothing():
    assert outcome_of([0.1], refused=3).figures(Slo(1.0, 0.2))["good_share"] == 0.25


@given(
    # Quarters of a second: no gap is so near the bound that four bytes could not tell.
    times=st.lists(st.integers(1, 400), min_size=1, max_size=40).map(lambda all: sorted(one / 4 for one in all)),
    ttft=st.integers(0, 400).map(lambda all: all / 4 + 0.1),
    itl=st.integers(0, 40).map(lambda all: all / 4 + 0.1),
    share=st.floats(0.01, 0.999),
)
def test_a_server_that_is_measured_is_judged_alike(times, ttft, itl, share):
    promise = Slo(ttft, itl, share)
    seen = Answer(times[-1], times=times).within(promise)
    assert outcome_of(times).figures(promise)["good_share"] == seen
