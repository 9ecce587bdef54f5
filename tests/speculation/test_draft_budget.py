"""Which drafts are worth a step: by their chances, by what a token more costs, and by what was learned of both."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.engine.speculation.budget import WORTHWHILE, admit
from tokenmill.engine.speculation.calibration import Calibration, RequestRecord
from tokenmill.engine.speculation.proposer import MAX_DRAFTS, Draft


def costing(per_token: float):  # type: ignore[no-untyped-def]
    return lambda tokens: 1 + per_token * (tokens - 1)


def chain(chance: float, length: int = 8) -> np.ndarray:
    return np.cumprod(np.full(length, chance))


def test_length_follows_from_chances_and_cost() -> None:
    free = admit([chain(0.9)], 1, 100, costing(0.0))
    cheap, dear = admit([chain(0.9)], 1, 100, costing(0.1)), admit([chain(0.9)], 1, 100, costing(0.5))
    assert free == [8] and 8 >= cheap[0] > dear[0] > 0
    assert admit([chain(0.9)], 1, 100, costing(0.95)) == [0]
    assert admit([chain(0.05)], 1, 100, costing(0.1)) == [0]


def test_rows_with_better_drafts_get_more_of_them() -> None:
    counts = admit([chain(0.95), chain(0.3), chain(0.7)], 16, 100, costing(0.04))
    assert counts[0] > counts[2] > counts[1]


def test_a_full_step_has_no_room() -> None:
    assert admit([chain(0.9)] * 3, 3, 4, costing(0.0)) == [2, 1, 1]
    assert admit([chain(0.9)] * 3, 3, 0, costing(0.0)) == [0, 0, 0]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(1, 16)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(0, 40),
)
def test_no_other_number_of_drafts_promises_more(rows: list[tuple[float, int]], cost: float, most: int) -> None:
    chances = [chain(*row) for row in rows]
    counts = admit(chances, len(rows), most, costing(cost))

    def rate(total: int) -> float:
        best = np.sort(np.concatenate(chances))[::-1][:total]
        return float((len(rows) + best.sum()) / (1 + cost * (len(rows) + total - 1)))

    assert sum(counts) <= most
    rates = [rate(total) for total in range(min(most, sum(map(len, chances))) + 1)]
    chosen = rates[sum(counts)]
    assert chosen >= max(rates) - 1e-9 or (sum(counts) == 0 and max(rates) < WORTHWHILE * rates[0])


class Hopeful:
    name, kinds = "hopeful", 3

    def prior(self, kind: int, depth: int) -> float:
        return 0.9


def test_chances_become_what_is_counted_by_kind_and_depth() -> None:
    calibration, random = Calibration(Hopeful()), Random(0)  # type: ignore[arg-type]
    rates = {0: (0.8, 0.5), 1: (0.2, 0.2)}
    for _ in range(300):
        for kind, (first, then) in rates.items():
            held = 0
            while held < 4 and random.random() < (then if held else first):
                held += 1
            calibration.count([kind] * 4, held, RequestRecord())
    likely = calibration.chances(Draft([1, 2, 3], [0] * 3), RequestRecord())
    assert likely == pytest.approx([0.8, 0.4, 0.2], abs=0.1)
    assert calibration.chances(Draft([1], [1]), RequestRecord())[0] == pytest.approx(0.2, abs=0.08)
    assert calibration.chances(Draft([1], [2]), RequestRecord())[0] == pytest.approx(0.9)  # nothing was counted
    assert len(calibration.chances(Draft([1] * 20, [0] * 20), RequestRecord())) == 20 > MAX_DRAFTS


def test_a_request_whose_drafts_fail_is_not_judged_by_the_others() -> None:
    calibration, unlucky, lucky = Calibration(Hopeful()), RequestRecord(), RequestRecord()  # type: ignore[arg-type]
    for _ in range(30):
        calibration.count([0] * 8, 0, unlucky)
        calibration.count([0] * 8, 8, lucky)
    draft = Draft([1, 2, 3], [0] * 3)
    assert calibration.chances(draft, unlucky)[0] < 0.3 < 0.8 < calibration.chances(draft, lucky)[2]


def test_drafts_over_everything_that_is_on_its_way_have_chances() -> None:
    """Steps that are launched may each have as many drafts as a step verifies: a draft begins behind all of them."""
    length = 5 * MAX_DRAFTS
    calibration = Calibration(Hopeful())  # type: ignore[arg-type]
    chances = calibration.chances(Draft([1] * length, [0] * length), RequestRecord())
    assert len(chances) == length and (np.diff(chances) <= 0).all() and chances[-1] >= 0
