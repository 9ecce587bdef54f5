"""LengthPredictor: how long answers will be, learned from those that ended; quantiles that hold what they say."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterator

from tokenmill.engine.request import Finish, Request

TABLES = 4096  # that are kept: salts are made up by whoever asks
WINDOW = 512  # lengths that a table remembers: what the server saw long ago is forgotten
ENOUGH = 16  # lengths that make a table worth asking
FINE, COARSE = 0.1, 0.7  # widths of the classes of prompt length, as logarithms: 10 % and a factor of two
MEDIAN, HIGH = 0.5, 0.9  # the quantiles that are promised and checked
STIFFNESS = 0.005  # how far one answer moves the level that is asked for: coverage is right within some hundreds


class Recent:
    """The last values seen, in the order of their size."""

    __slots__ = ("_order", "_size", "values")

    def __init__(self, size: int = WINDOW) -> None:
        self.values: list[float] = []
        self._order: deque[float] = deque()
        self._size = size

    def add(self, value: float) -> None:
        if len(self._order) == self._size:
            del self.values[bisect_left(self.values, self._order.popleft())]
        self._order.append(value)
        insort(self.values, value)

    def quantile(self, level: float, above: float = -1.0) -> float | None:
        """Of the values beyond `above`; None where too few are known."""
        first = bisect_right(self.values, above)
        count = len(self.values) - first
        if count < ENOUGH:
            return None
        return self.values[first + min(count - 1, max(0, math.ceil(level * count) - 1))]

    def rank(self, value: float) -> float:
        """The share of known values below this one; a half while too little is known."""
        if len(self.values) < ENOUGH:
            return 0.5
        return (bisect_left(self.values, value) + bisect_right(self.values, value)) / (2 * len(self.values))


class LengthPredictor:
    """Tables of recent answer lengths, from the particular to the general; the first that knows enough answers.

    What tells requests apart is cheap and known at arrival: whose they are (the cache salt, one per tenant), how long
    the prompt is, the limit that was asked for, greedy or not. A level is moved until as many answers as promised stay
    below the prediction (adaptive conformal inference), so a quantile is right on average whatever the load is.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, Recent] = {}
        self._levels = {MEDIAN: MEDIAN, HIGH: HIGH}  # what is asked of the tables for what is promised
        self._promised: dict[str, dict[float, float]] = {}  # request id -> quantile -> tokens, as of its arrival
        self._kept = {MEDIAN: 0, HIGH: 0}
        self.learned = 0

    def promise(self, request: Request) -> None:
        """Remember what is predicted at arrival, to be judged when the answer is there."""
        if request.id not in self._promised and request.num_output == 0:
            self._promised[request.id] = {level: self.total(request, level) for level in self._levels}

    def promised(self, request: Request, level: float) -> float:
        """Output tokens in all, as predicted at arrival."""
        known = self._promised.get(request.id)
        return known[level] if known is not None else self.total(request, level)

    def total(self, request: Request, level: float = MEDIAN) -> float:
        """Output tokens in all, given how many there are already: as many as `level` of such answers do not exceed."""
        asked, output = self._levels.get(level, level), request.num_output
        for key in _keys(request):
            table = self._tables.get(key)
            found = table.quantile(asked, output) if table is not None else None
            if found is not None:
                return min(found, request.max_tokens)
        return min(max(1.5 * output, 128.0), request.max_tokens)  # nobody knows

    def learn(self, request: Request) -> None:
        """It ended. Only ends of its own making say how long such answers are."""
        promised = self._promised.pop(request.id, None)
        if request.finish not in (Finish.STOP, Finish.LENGTH) or request.pooling is not None:
            return
        length = request.num_output
        if promised is not None and self._tables:
            self.learned += 1
            for level, tokens in promised.items():
                self._kept[level] += length <= tokens
                moved = self._levels[level] + STIFFNESS * (level - (length <= tokens))
                self._levels[level] = min(max(moved, 0.02), 0.98)
        for key in _keys(request):
            table = self._tables.pop(key, None) or Recent()
            table.add(length)
            self._tables[key] = table  # last: the first is the one that learned nothing for longest
        while len(self._tables) > TABLES:
            del self._tables[next(iter(self._tables))]

    def coverage(self, level: float) -> float:
        """The share of answers that stayed within what was promised at their arrival; `level` if all is well."""
        return self._kept[level] / self.learned if self.learned else math.nan


def _keys(request: Request) -> Iterator[Hashable]:
    """From the particular to the general. But for the salt there are few: a logarithm has few values."""
    size = math.log(max(request.prompt_len, 1))
    limit = request.params.max_tokens
    asked = -1 if limit is None else int(math.log2(max(limit, 1)))
    fine = int(size / FINE)
    yield request.salt, fine, asked, request.params.greedy
    yield fine, asked
    yield int(size / COARSE), asked, "coarse"
    yield "all"
