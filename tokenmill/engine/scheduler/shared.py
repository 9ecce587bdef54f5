"""SharedPrefixFinder: which decoding rows begin with the same blocks, kept up to date from step to step."""

from __future__ import annotations

from collections import Counter

from tokenmill.engine.request import Request
from tokenmill.engine.step import SharedPrefix

MIN_ROWS = 4
MIN_TOKENS = 256
MIN_SAVED = 8192  # keys that need not be read again in each layer; below, the extra kernel costs more than it saves
NEWS_PER_SEARCH = 8  # a search is due when one row of so many is news


class SharedPrefixFinder:
    """Finds the group of rows for which reading their common beginning once saves most.

    While the rows stay the same nothing is computed. Rows that come are compared with the group's blocks, rows that go
    leave it, and only when enough has changed the group is searched for again.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._singles: list[Request] = []  # as of the last step
        self._found: SharedPrefix | None = None
        self._blocks: list[int] = []  # of the group's common beginning
        # row -> its list of blocks, and whether it is a member. A request has one list from admission to release, and
        # it only ever grows, so the list itself proves that what was found out about it still holds.
        self._known: dict[int, tuple[list[int], bool]] = {}
        self._news = 0  # rows that joined or left the group's surroundings since the last search

    def find(self, singles: list[Request], starts: list[int], admitted: bool) -> SharedPrefix | None:
        """`starts`: the position that each single computes; `admitted`: whether requests got rows in this step."""
        if not admitted and singles == self._singles:
            return self._found
        self._singles = singles
        self._update(singles, starts)
        if self._news * NEWS_PER_SEARCH >= len(singles):
            self._search(singles, starts)
        members = tuple(index for index, request in enumerate(singles) if self._known[request.row][1])
        tokens = len(self._blocks) * self._block_size
        self._found = SharedPrefix(tokens, members) if _pays(len(members), tokens) else None
        return self._found

    def _update(self, singles: list[Request], starts: list[int]) -> None:
        before, self._known = self._known, {}
        stayed = 0
        for request, start in zip(singles, starts, strict=True):
            entry = before.get(request.row)
            if entry is None or entry[0] is not request.blocks:
                entry = request.blocks, self._is_member(request.blocks, start)
                self._news += not entry[1]
            else:
                stayed += entry[1]
            self._known[request.row] = entry
        self._news += sum(member for _, member in before.values()) - stayed

    def _search(self, singles: list[Request], starts: list[int]) -> None:
        """Find the best group anew: at growing depths, by the block that most rows have there."""
        self._news, self._blocks, best = 0, [], 0
        deep = [request.blocks[: start // self._block_size] for request, start in zip(singles, starts, strict=True)]
        depth = -(-MIN_TOKENS // self._block_size)
        while len(deep := [blocks for blocks in deep if len(blocks) >= depth]) >= MIN_ROWS:
            block, rows = Counter([blocks[depth - 1] for blocks in deep]).most_common(1)[0]
            if rows < MIN_ROWS:
                break
            common = _common_beginning([blocks for blocks in deep if blocks[depth - 1] == block])
            if (rows - 1) * len(common) > best:
                best, self._blocks = (rows - 1) * len(common), common
            depth = max(2 * depth, len(common) + 1)
        for request, start in zip(singles, starts, strict=True):
            self._known[request.row] = request.blocks, self._is_member(request.blocks, start)

    def _is_member(self, blocks: list[int], start: int) -> bool:
        count = len(self._blocks)
        return 0 < count * self._block_size <= start and blocks[:count] == self._blocks


def _common_beginning(lists: list[list[int]]) -> list[int]:
    """What the smallest and the largest list have in common, all lists between them have in common, too."""
    low, high = min(lists), max(lists)
    count = next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
    return low[:count]


def _pays(rows: int, tokens: int) -> bool:
    return rows >= MIN_ROWS and tokens >= MIN_TOKENS and (rows - 1) * tokens >= MIN_SAVED
