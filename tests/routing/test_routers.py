"""Routers choose what they promise: nobody who is closed, no queue that is too long, the soonest first token."""

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.kv.prefix import IdentityChains
from tokenmill.routing.cache_view import CacheSnapshot
from tokenmill.routing.routers import POLICIES, Ask, CacheAware, NobodyOpen, RandomChoice, policy_named

BLOCK = 16


@dataclass
class Fake:
    number: int
    load: float = 0.0
    open: bool = True
    seconds_per_token: float = 1e-3


def chain_of(*tokens):
    found = []
    IdentityChains(BLOCK).extend(found, "", tokens, len(tokens) // BLOCK)
    return found


def prompt(document, length=320):
    source = random.Random(document)
    return [source.randrange(1000) for _ in range(length)]


replicas = st.lists(
    st.builds(Fake, st.just(0), st.floats(0, 30), st.booleans(), st.floats(1e-5, 1e-2)), min_size=1, max_size=12
).map(lambda found: [Fake(number, one.load, one.open, one.seconds_per_token) for number, one in enumerate(found)])
asks = st.builds(
    lambda document, known, session: Ask(320, chain_of(*prompt(document)) if known else (), session),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([b"", b"a", b"b"]),
)


@settings(max_examples=200, deadline=None)
@given(
    found=replicas,
    coming=st.lists(asks, max_size=12),
    policy=st.sampled_from([*POLICIES, "random"]),
    seed=st.integers(0, 5),
    imbalance=st.sampled_from([0.0, 1.0, math.inf]),
)
def test_nobody_closed_or_too_far_behind_is_chosen_and_a_seed_decides(found, coming, policy, seed, imbalance):
    def build():
        if policy == "cache":
            return CacheAware(seed, block_size=BLOCK, imbalance=imbalance)
        return RandomChoice(seed) if policy == "random" else policy_named(policy, seed)

    one, other = build(), build()
    for ask in coming:
        if not any(replica.open for replica in found):
            with pytest.raises(NobodyOpen):
                one.choose(ask, found)
            continue
        choice = one.choose(ask, found)
        assert choice == other.choose(ask, found)
        chosen = found[choice.number]
        assert chosen.open and 0 <= choice.found <= ask.tokens
        if policy == "cache":
            assert chosen.load <= min(each.load for each in found if each.open) + imbalance
        chosen.load += ask.tokens * chosen.seconds_per_token


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.0, 2.0), st.integers(2, 5))
def test_the_imbalance_of_what_is_sent_is_bounded(documents, bound, count):
    """However much they want to be together: no queue exceeds the shortest by more than the bound and one."""
    router, found = CacheAware(block_size=BLOCK, imbalance=bound), [Fake(number) for number in range(count)]
    for document in documents:
        choice = router.choose(Ask(320, chain_of(*prompt(document))), found)
        found[choice.number].load += 0.32
        loads = [one.load for one in found]
        assert max(loads) - min(loads) <= bound + 0.32 + 1e-9


def test_the_first_token_decides_in_seconds():
    """A cached prompt is worth waiting for as long as it takes to compute, and no longer."""
    router = CacheAware(block_size=BLOCK)
    tokens = prompt(1)
    router.view(0).reset(CacheSnapshot(1, 0, tuple(chain_of(*tokens))))
    ask = Ask(len(tokens) + 1, chain_of(*tokens))
    slow, fast = Fake(0, load=0.3), Fake(1)
    assert router.choose(ask, [slow, fast]).number == 0
    slow.load = 0.4  # 320 tokens take 0.32 s
    assert CacheAware.choose(fresh(router), ask, [slow, fast]).number == 1
    fast.seconds_per_token = 1e-2
    assert CacheAware.choose(fresh(router), ask, [slow, fast]).number == 0


def fresh(router):
    """The same knowledge, without what was assumed since."""
    for number in range(8):
        router.assumed.clear(number)
    return router


def test_half_of_a_prompt_near_beats_all_of_it_far():
    router, tokens = CacheAware(block_size=BLOCK), prompt(1)
    chain = chain_of(*tokens)
    router.view(0).reset(CacheSnapshot(1, 0, tuple(chain)))
    router.view(1).reset(CacheSnapshot(1, 0, tuple(chain[: len(chain) // 2])))
    choice = router.choose(Ask(320, chain), [Fake(0, load=0.2), Fake(1), Fake(2)])
    assert (choice.number, choice.found) == (1, 160)


def test_over_a_quick_link_caches_of_others_count():
    """What can be fetched need not be computed: then the shorter queue wins."""
    tokens = prompt(1)
    for link, expected in ((math.inf, 0), (1e-5, 1)):
        router = CacheAware(block_size=BLOCK, link_seconds_per_token=link)
        router.view(0).reset(CacheSnapshot(1, 0, tuple(chain_of(*tokens))))
        assert router.choose(Ask(320, chain_of(*tokens)), [Fake(0, load=0.1), Fake(1)]).number == expected


def test_sessions_of_which_nothing_is_known_stay_where_they_are():
    """Two routers that know nothing agree; and when a replica leaves, only its own sessions move."""
    sessions = [b"session %d" % number for number in range(200)]
    found = [Fake(number) for number in range(5)]
    homes = {one: CacheAware(3).choose(Ask(100, (), one), found).number for one in sessions}
    assert homes == {one: CacheAware(3).choose(Ask(100, (), one), found).number for one in sessions}
    assert all(20 <= list(homes.values()).count(number) <= 60 for number in range(5))
    found[2].open = False
    for one, home in homes.items():
        now = CacheAware(3).choose(Ask(100, (), one), found).number
        assert now == home if home != 2 else now != 2


def test_a_session_leaves_a_home_that_is_busy_for_longer_than_its_prompt():
    found = [Fake(number) for number in range(4)]
    home = CacheAware().choose(Ask(100, (), b"session"), found).number
    found[home].load = 0.05
    assert CacheAware().choose(Ask(100, (), b"session"), found).number == home
    found[home].load = 0.2
    assert CacheAware().choose(Ask(100, (), b"session"), found).number != home


def test_what_a_replica_evicted_is_no_longer_assumed():
    router, chain = CacheAware(block_size=BLOCK), chain_of(*prompt(1))
    view = router.view(0)
    view.reset(CacheSnapshot(1, 0))
    router.assumed.add(0, chain)
    router.known.add(0, chain)
    view.reset(CacheSnapshot(2, 0))  # it was started anew
    assert router.choose(Ask(320, chain), [Fake(0, load=0.001), Fake(1)]).number == 1


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="cache, round-robin, least-loaded"):
        policy_named("magic")
