"""BlockPool against a model that counts references the slow way."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.kv.pool import BlockPool


class PoolModel(RuleBasedStateMachine):
    """Holdings are lists of blocks, as requests have them; parked ones wait for their step."""

    @initialize(size=st.integers(1, 12))
    def open(self, size):
        self.evicted = []
        self.pool = BlockPool(size, on_evict=self.evicted.append)
        self.size = size
        self.holdings = []
        self.parked = []  # (fence, blocks)
        self.content = set()
        self.lru = []  # free blocks with content, in the order they became free
        self.settled = 0

    def references(self):
        return Counter(block for blocks in [*self.holdings, *(held for _, held in self.parked)] for block in blocks)

    def free(self):
        return set(range(self.size)) - set(self.references())

    def dropped(self, blocks):
        """`blocks` have just lost a reference each, last block first."""
        left = self.references()
        for block in reversed(blocks):
            if block in self.content and not left[block] and block not in self.lru:
                self.lru.append(block)

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def take(self, data):
        free, empty = self.free(), self.free() - self.content
        self.evicted.clear()
        block = self.pool.take()
        assert block in free, "a block was given away twice"
        if empty:
            assert block in empty, "content was evicted while an empty block was free"
        else:
            assert block == self.lru.pop(0), "the least recently used content goes first"
            assert self.evicted == [block]
            self.content.discard(block)
        if self.holdings and data.draw(st.booleans()):
            data.draw(st.sampled_from(self.holdings)).append(block)
        else:
            self.holdings.append([block])

    @precondition(lambda self: not self.free())
    @rule()
    def take_from_nothing(self):
        with pytest.raises(RuntimeError, match="empty"):
            self.pool.take()

    @precondition(lambda self: self.references() or self.content)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(sorted(set(self.references()) | self.content)))
        self.pool.share([block])
        self.lru = [other for other in self.lru if other != block]
        self.holdings.append([block])

    @precondition(lambda self: self.free() - self.content)
    @rule(data=st.data())
    def share_what_is_empty(self, data):
        with pytest.raises(RuntimeError, match="free and empty"):
            self.pool.share([data.draw(st.sampled_from(sorted(self.free() - self.content)))])

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), ahead=st.integers(-1, 3))
    def release(self, data, ahead):
        blocks = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        self.pool.release(blocks, fence=self.settled + ahead)
        if ahead > 0:
            self.parked.append((self.settled + ahead, blocks))
        else:
            self.dropped(blocks)

    @rule(ahead=st.integers(0, 3))
    def settle(self, ahead):
        self.settled += ahead
        self.pool.settle(self.settled)
        due = [blocks for fence, blocks in self.parked if fence <= self.settled]
        for blocks in due:
            self.parked.remove(next(entry for entry in self.parked if entry[1] is blocks))
            self.dropped(blocks)

    @precondition(lambda self: self.references())
    @rule(data=st.data())
    def learn(self, data):
        block = data.draw(st.sampled_from(sorted(self.references())))
        self.pool.mark_content(block, True)
        self.content.add(block)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data):
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.mark_content(block, False)
        self.content.discard(block)
        self.lru = [other for other in self.lru if other != block]

    @invariant()
    def books_agree(self):
        assert self.pool.num_free == len(self.free())
        assert self.pool.num_fenced == sum(len(blocks) for _, blocks in self.parked)
        assert self.pool.references == [self.references()[block] for block in range(self.size)]
        assert {block for block in range(self.size) if self.pool.has_content[block]} == self.content
        self.pool.check_integrity(self.holdings)

    @invariant()
    def a_lost_holder_is_noticed(self):
        if self.holdings:
            with pytest.raises(AssertionError, match="disagree"):
                self.pool.check_integrity(self.holdings[1:])


PoolModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolModel.TestCase


def test_a_block_behind_a_fence_is_not_given_away():
    pool = BlockPool(1)
    block = pool.take()
    pool.release([block], fence=7)
    pool.settle(6)
    assert pool.num_free == 0 and pool.num_fenced == 1
    pool.settle(7)
    assert pool.take() == block


def test_a_block_released_twice_is_noticed():
    pool = BlockPool(2)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)
