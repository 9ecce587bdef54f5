"""What a router believes of a replica's cache is what was true, whatever becomes of the events on their way."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.kv.events import CacheLog
from tokenmill.kv.prefix import PrefixIndex
from tokenmill.routing.block_index import BlockIndex, leading
from tokenmill.routing.cache_view import MOST_AHEAD, CacheEvent, CacheSnapshot, CacheView

names = st.integers(0, 30).map(lambda number: b"%016d" % number)
changes = st.lists(st.tuples(st.sets(names, max_size=5), st.sets(names, max_size=5)), max_size=30)


def history(lives):
    """Events of several lives of an engine, and what was there after each: {(epoch, sequence): set}."""
    events, truth = [], {}
    for epoch, life in enumerate(lives, 1):
        held = set()
        truth[epoch, 0] = set()
        for number, (stored, evicted) in enumerate(life, 1):
            evicted &= held
            stored -= held | evicted
            held = (held - evicted) | stored
            events.append(CacheEvent(epoch, number, tuple(stored), tuple(evicted)))
            truth[epoch, number] = set(held)
    return events, truth


@settings(max_examples=200, deadline=None)
@given(lives=st.lists(changes, min_size=1, max_size=3), data=st.data())
def test_events_and_snapshots_in_any_order_with_gaps_tell_the_truth(lives, data):
    events, truth = history(lives)
    known = BlockIndex(10_000)
    view = CacheView(3, known)
    known.add(1, [b"%016d" % 0])  # another replica's, which is none of its business
    snapshots = [CacheSnapshot(*at, tuple(held)) for at, held in truth.items()]
    arriving = data.draw(st.lists(st.sampled_from([*events, *snapshots]), max_size=60)) if events else []
    newest = (0, 0)
    for one in arriving:
        newest = max(newest, (one.epoch, one.sequence))
        current = view.take(one) if isinstance(one, CacheEvent) else view.reset(one)
        assert set(known.identities(3)) == truth.get((view.epoch, view.sequence), set())
        assert current == ((view.epoch, view.sequence) == newest and view.epoch > 0)
    last = max(truth)
    assert view.reset(CacheSnapshot(*last, tuple(truth[last])))  # what is asked for after a gap
    assert set(known.identities(3)) == truth[last]
    assert known.identities(1) == [b"%016d" % 0]


@given(changes)
def test_events_in_order_need_no_snapshot_but_the_first(life):
    events, truth = history([life])
    known = BlockIndex(10_000)
    view = CacheView(0, known)
    assert not view.is_current
    view.reset(CacheSnapshot(1, 0))
    assert all(view.take(event) for event in events)
    assert set(known.identities(0)) == truth[max(truth)]


def test_what_waits_behind_a_gap_is_bounded():
    view = CacheView(0, BlockIndex(10_000))
    view.reset(CacheSnapshot(1, 0))
    for number in range(2, 4 * MOST_AHEAD):
        assert not view.take(CacheEvent(1, number, (b"%016d" % number,)))
    assert len(view._ahead) <= MOST_AHEAD


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), st.integers(0, 3), st.lists(names, max_size=8))),
    st.lists(names, max_size=6),
    st.integers(1, 12),
)
def test_the_index_is_a_set_per_replica_of_bounded_size(does, chain, limit):
    index, sets = BlockIndex(limit), {number: {} for number in range(4)}
    for what, number, identities in does:
        own = sets[number]
        if what == "add":
            index.add(number, identities)
            for one in identities:
                own.pop(one, None)
                own[one] = None
            for one in list(own)[: max(0, len(own) - limit)]:
                del own[one]
        elif what == "remove":
            index.remove(number, identities)
            for one in identities:
                own.pop(one, None)
        else:
            index.clear(number)
            own.clear()
    assert {number: index.identities(number) for number in sets} == {number: list(own) for number, own in sets.items()}
    assert len(index) == len(set().union(*sets.values()))
    found = {}
    for mask, depth in leading((index,), chain, 0b1111):
        found |= {number: depth for number in range(4) if mask >> number & 1}
    for number, own in sets.items():
        assert found.get(number, 0) == next((at for at, one in enumerate(chain) if one not in own), len(chain))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.booleans()), max_size=40), st.integers(1, 7))
def test_the_log_of_a_prefix_index_tells_what_changed(does, every):
    """Whoever applies all that it tells, whenever they look, has what the index has."""
    index, held = PrefixIndex(), set()
    index.publish(b"before", 99)
    held.update(index.identities())
    index.log = CacheLog()
    for turn, (name, block, publish) in enumerate(does):
        if publish:
            index.publish(b"%d" % name, block)
        else:
            index.forget(block)
        if turn % every == 0:
            stored, evicted = index.log.take()
            assert not held & set(stored) and held >= set(evicted)
            held = (held | set(stored)) - set(evicted)
    stored, evicted = index.log.take()
    assert (held | set(stored)) - set(evicted) == set(index.identities()) and not index.log
