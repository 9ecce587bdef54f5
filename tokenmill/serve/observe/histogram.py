"""FastHistogram: a Prometheus histogram for what happens per token, where a lock and a loop over buckets would show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class FastHistogram(Collector):
    """For one thread: values are noted on the event loop, and that is where somebody asks for them."""

    def __init__(self, name: str, what: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name, self._what, self._bounds = name, what, bounds
        self._names = [*map(str, bounds), "+Inf"]
        self._counts = [0] * len(self._names)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterable[Metric]:
        buckets = list(zip(self._names, map(float, accumulate(self._counts))))
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)
