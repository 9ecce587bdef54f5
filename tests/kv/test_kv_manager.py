"""KVManager and PrefixIndex: what is found is what was computed, for that tenant, by a step that is done."""

import hashlib
import struct
import sys
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.kv.manager import KVManager
from tokenmill.kv.moves import Move
from tokenmill.kv.prefix import IdentityChains, PrefixIndex, root_identity


@dataclass(eq=False)
class Sequence:
    tokens: list
    salt: str = ""
    adapter_key: str = ""
    blocks: list = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    pruned: int = 0
    identities: list = field(default_factory=list)
    last_step: int = 0
    num_exact: int = sys.maxsize
    in_float32: bool = False


def start(kv, tokens, salt="", step=0):
    """Admit a sequence, compute all of it in `step`, and publish it."""
    one = Sequence(list(tokens), salt)
    kv.admit(one, kv.match(one))
    assert kv.grow(one, len(tokens)) is not None
    one.last_step, one.num_computed = step, len(tokens)
    kv.publish(one)
    return one


def chain(tokens, size, salt=""):
    names, parent = [], root_identity(salt)
    for first in range(0, len(tokens) - size + 1, size):
        words = struct.pack(f"<{size}I", *tokens[first : first + size])
        parent = hashlib.blake2b(parent + words, digest_size=16).digest()
        names.append(parent)
    return names


token_lists = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=24), st.sampled_from(["", "other"])), max_size=8))
def test_chains_of_sequences_that_begin_alike_are_those_of_each_alone(sequences):
    chains = IdentityChains(4)
    for tokens, salt in sequences:
        names = []
        for count in {len(tokens) // 8, len(tokens) // 4}:  # in one go, and continued
            chains.extend(names, salt, tokens, max(count, len(names)))
        assert names == chain(tokens, 4, salt)[: len(names)]


@given(tokens=token_lists, data=st.data())
def test_an_identity_depends_on_every_token_before_it(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] ^= data.draw(st.integers(1, 2**32 - 1))
    for number, (one, two) in enumerate(zip(chain(tokens, 4), chain(other, 4))):
        assert (one == two) == (number < at // 4)


@given(salt=st.text(max_size=5), other=st.text(max_size=5), adapter=st.text(max_size=3), second=st.text(max_size=3))
def test_tenants_and_adapters_have_different_roots(salt, other, adapter, second):
    assert (root_identity(salt, adapter) == root_identity(other, second)) == ((salt, adapter) == (other, second))


def test_another_tenant_gets_no_hit():
    kv = KVManager(16, 4)
    mine = start(kv, range(13), "mine")
    assert kv.match(Sequence(list(range(13)), "mine")) == mine.blocks[:3]
    assert kv.match(Sequence(list(range(13)), "theirs")) == []
    start(kv, range(13), "theirs")
    assert kv.stats.hit == 0


def test_at_least_one_token_is_left_to_compute():
    kv = KVManager(16, 4)
    start(kv, range(12))
    assert len(kv.match(Sequence(list(range(12))))) == 2
    assert len(kv.match(Sequence(list(range(13))))) == 3


def test_without_prefix_caching_nothing_is_found():
    kv = KVManager(16, 4, prefix_caching=False)
    start(kv, range(13))
    assert kv.match(Sequence(list(range(13)))) == [] and len(kv.index) == 0


def test_what_a_void_step_was_to_fill_is_not_found_even_if_its_request_is_gone():
    kv = KVManager(16, 4)
    done = start(kv, range(9), step=1)
    kv.settle(1)
    lost = start(kv, range(17), step=2)
    kv.release(lost, fence=2)
    assert len(kv.match(Sequence(list(range(17))))) == 4, "a launched step's blocks can be shared at once"
    kv.void(2)
    assert kv.match(Sequence(list(range(17)))) == done.blocks[:2]
    kv.check_integrity([done])
    assert kv.pool.num_free == 13


def test_what_a_committed_step_filled_survives_a_later_failure():
    kv = KVManager(16, 4)
    start(kv, range(9), step=1)
    kv.settle(1)
    kv.void(2)
    assert len(kv.match(Sequence(list(range(9))))) == 2


def test_the_beginning_of_a_sequence_outlives_its_end():
    kv = KVManager(5, 4)
    gone = start(kv, range(17))
    kv.release(gone, fence=0)
    start(kv, range(100, 109))  # takes the empty block, then two with content
    assert len(kv.match(Sequence(list(range(17))))) == 2
    assert kv.stats.evicted_blocks == 2


def test_reset_forgets_content_but_takes_nothing_away():
    kv = KVManager(8, 4)
    one = start(kv, range(13))
    kv.reset_prefix_cache()
    assert kv.match(Sequence(list(range(13)))) == []
    assert len(one.blocks) == 4 and kv.pool.num_free == 4
    kv.check_integrity([one])


def test_one_salt_is_forgotten_alone():
    kv = KVManager(16, 4)
    some = [start(kv, range(13), salt) for salt in ("a", "b", "")]
    kv.release(some[0], fence=0)
    kv.reset_prefix_cache("a")
    assert [len(kv.match(Sequence(list(range(13)), salt))) for salt in ("a", "b", "")] == [0, 3, 3]
    kv.reset_prefix_cache("")
    assert [len(kv.match(Sequence(list(range(13)), salt))) for salt in ("a", "b", "")] == [0, 3, 0]
    kv.check_integrity(some[1:])


def test_to_wipe_a_salt_costs_nothing_of_what_others_have():
    """Any tenant may ask for it as often as it likes, and steps wait meanwhile."""

    class Watched(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Watched.compared += 1
            return str.__eq__(self, other)

    index = PrefixIndex()
    for block in range(1000):
        index.publish(b"%d" % block, block, Watched("others"))
    index.publish(b"mine", 1000, "mine")
    Watched.compared = 0
    assert index.blocks("mine") == [1000] and index.blocks("nobody's") == []
    assert Watched.compared < 10
    assert index.forget(1000) and not index.blocks("mine") and len(index.blocks("others")) == len(index) == 1000


@given(length=st.integers(1, 30), shared=st.integers(0, 30), size=st.sampled_from([2, 4, 8]))
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(length, shared, size):
    shared = min(shared, length)
    kv = KVManager(32, size)
    parent = start(kv, range(length))
    child = Sequence(list(range(length)))
    before = kv.pool.num_free
    copies = kv.fork(parent, child, shared)
    whole = shared // size
    assert child.blocks[:whole] == parent.blocks[:whole]
    assert child.num_computed == shared
    if shared % size:
        assert copies == [Move(parent.blocks[whole], child.blocks[whole])] and child.blocks[whole] not in parent.blocks
    else:
        assert copies == [] and len(child.blocks) == whole
    assert before - kv.pool.num_free == len(copies)
    kv.check_integrity([parent, child])
    kv.release(parent, fence=0)
    kv.check_integrity([child])
    assert all(kv.pool.references[block] == 1 for block in child.blocks)


def test_growth_that_does_not_fit_takes_nothing():
    kv = KVManager(4, 4)
    one = start(kv, range(10))
    assert kv.grow(one, 17) is None and len(one.blocks) == 3 and kv.pool.num_free == 1
    assert kv.grow(one, 16) == [one.blocks[-1]]


def test_the_first_block_to_be_published_stays():
    index = PrefixIndex()
    assert index.publish(b"a", 1) and not index.publish(b"a", 2) and not index.publish(b"b", 1)
    assert index.find_leading([b"a", b"b"]) == [1]
    assert index.forget(1) and not index.forget(1)
    assert index.find_leading([b"a"]) == [] and index.blocks() == []


class ManagerModel(RuleBasedStateMachine):
    """Sequences of two tenants come, grow, fork, leave and fail; every hit must hold what was asked for."""

    SIZE = 2

    @initialize(caching=st.booleans(), blocks=st.integers(6, 20))
    def open(self, caching, blocks):
        self.kv = KVManager(blocks, self.SIZE, caching)
        self.alive = []
        self.step = 0
        self.written = {}  # block -> (salt, all tokens up to its end), as launched steps leave it

    def compute(self, one, upto):
        """A step writes the positions up to `upto`."""
        self.step += 1
        one.last_step, one.num_computed = self.step, upto
        for number in range(upto // self.SIZE):
            text = (one.salt, tuple(one.tokens[: (number + 1) * self.SIZE]))
            held = self.written.get(one.blocks[number])
            assert number >= one.num_published or held == text, "a published block holds something else"
            self.written[one.blocks[number]] = text
        self.kv.publish(one)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), salt=st.sampled_from("ab"))
    def come(self, tokens, salt):
        one = Sequence(tokens, salt)
        hits = self.kv.match(one)
        for number, block in enumerate(hits):
            wanted = (salt, tuple(tokens[: (number + 1) * self.SIZE]))
            assert self.written[block] == wanted, "a foreign prefix was found"
        if self.kv.needed(hits, len(tokens)) > self.kv.pool.num_free:
            return
        self.kv.admit(one, hits)
        assert self.kv.grow(one, len(tokens)) is not None, "needed() promised that it fits"
        self.alive.append(one)
        self.compute(one, len(tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), token=st.integers(0, 1))
    def say(self, data, token):
        one = data.draw(st.sampled_from(self.alive))
        if self.kv.grow(one, len(one.tokens) + 1) is not None:
            one.tokens.append(token)
            self.compute(one, len(one.tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.alive))
        if self.kv.pool.num_free:
            child = Sequence(list(parent.tokens), parent.salt)
            self.kv.fork(parent, child, parent.num_computed)
            self.alive.append(child)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), ahead=st.integers(0, 1))
    def leave(self, data, ahead):
        one = data.draw(st.sampled_from(self.alive))
        self.alive.remove(one)
        self.kv.release(one, fence=one.last_step + ahead)

    @rule()
    def settle(self):
        self.kv.settle(self.step)

    @rule()
    def fail(self):
        """All launched steps are void, so everybody who was in one starts over."""
        self.step += 1
        void = [one for one in self.alive if one.last_step > self.kv.pool.settled]
        lost = {block for _, block in self.kv._unproven}
        for one in [one for one in self.alive if one in void or lost.intersection(one.blocks)]:
            self.alive.remove(one)
            self.kv.release(one, fence=self.step)
        self.kv.void(self.step)
        for block in lost:
            self.written[block] = None
        assert not lost.intersection(self.kv.index.blocks())

    @rule()
    def reset(self):
        self.kv.reset_prefix_cache()
        assert len(self.kv.index) == 0

    @rule(salt=st.sampled_from(["", "a", "b"]))
    def reset_one(self, salt):
        before = set(self.kv.index.blocks()) - set(self.kv.index.blocks(salt))
        self.kv.reset_prefix_cache(salt)
        assert set(self.kv.index.blocks()) == before

    @invariant()
    def books_agree(self):
        self.kv.check_integrity(self.alive)


ManagerModel.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestManagerAgainstModel = ManagerModel.TestCase
