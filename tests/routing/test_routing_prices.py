"""Measured speeds of replicas: equal machines count as equal, others as what they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.routing.prices import EVEN, evened
from tokenmill.routing.routers import Ask, CacheAware

SECONDS = st.floats(1e-6, 1.0)


@given(st.dictionaries(st.integers(0, 30), st.none() | SECONDS, max_size=20))
def test_everybody_has_the_middle_or_what_was_measured(measured: dict[int, float | None]) -> None:
    found, known = evened(measured), [one for one in measured.values() if one is not None]
    assert found.keys() == (measured.keys() if known else set())
    kept = {number for number, one in measured.items() if found and found[number] == one}
    others = {found[number] for number in found.keys() - kept}
    assert len(others) <= 1 and all(min(known) / 1.001 <= one <= max(known) * 1.001 for one in others)


@given(st.lists(SECONDS, min_size=1, max_size=9))
def test_it_does_not_matter_in_which_order_they_are_asked(seconds: list[float]) -> None:
    found = evened(dict(enumerate(seconds)))
    assert found == evened(dict(reversed(list(enumerate(seconds)))))


def test_noise_is_evened_and_another_kind_of_machine_is_not() -> None:
    found = evened({0: 1.0, 1: 1.2, 2: None, 3: 0.9, 4: 4.0})
    assert found[0] == found[1] == found[2] == found[3] and found[4] == 4.0
    assert evened({0: 1.0, 1: 2.0}) == pytest.approx(dict.fromkeys((0, 1), 2**0.5))
    assert evened({0: 1.0, 1: 1.1 * EVEN**2}) == {0: 1.0, 1: 1.1 * EVEN**2}


def test_a_conversation_does_not_leave_its_cache_for_a_tenth() -> None:
    """Its server has a little more to do than the other, and was measured to be a little slower."""
    chain, router = [b"%016d" % number for number in range(10)], CacheAware(sticky=False)

    def chosen(prices: dict[int, float]) -> int:
        one = SimpleNamespace(number=0, open=True, load=600 * prices[0], seconds_per_token=prices[0])
        other = SimpleNamespace(number=1, open=True, load=512 * prices[1], seconds_per_token=prices[1])
        return router.choose(Ask(400, chain), [one, other]).number

    router.known.add(0, chain)
    router._assume = False
    measured = {0: 1.1e-3, 1: 0.85e-3}
    assert chosen(measured) == 1 and chosen(evened(measured)) == 0
