"""RouterMetrics: what the router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tokenmill.serve.router.fleet import Fleet

_QUICK = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_SLOW = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0)


class RouterMetrics:
    def __init__(self, fleet: Fleet) -> None:
        self._registry = registry = CollectorRegistry()
        self._fleet = fleet

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"tokenmill_router_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tokenmill_router_{name}", what, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests that were answered, by replica and status", "replica", "status")
        self.retries = counter("retries", "Requests that were sent again, by reason", "reason")
        self.resumed = counter("resumed_streams", "Streams that went on elsewhere in the middle")
        self.continued = counter("continued_streams", "Streams with which a client came back, by an event's id")
        self.cancelled = counter("cancelled", "Requests whose client left")
        self.prompt = counter("prompt_tokens", "Tokens of prompts whose identities are known", "replica")
        self.expected = counter("expected_cached_tokens", "Of these, believed to be cached there", "replica")
        self.cached = counter("cached_tokens", "Of prompts of streams, that were cached", "replica")
        self.decision = histogram("decision_seconds", "To choose a replica", _QUICK)
        self.probe = histogram("probe_seconds", "To learn a prompt's identities", _SLOW)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("tokenmill_router_replica_open", "Takes work", labels=["replica", "state"])
        load = GaugeMetricFamily("tokenmill_router_replica_load_seconds", "Work that it has", labels=["replica"])
        active = GaugeMetricFamily("tokenmill_router_replica_requests", "On their way there", labels=["replica"])
        for one in self._fleet.replicas:
            up.add_metric([one.url, one.state], float(one.open))
            load.add_metric([one.url], one.load)
            active.add_metric([one.url], len(one.bookings))
        yield from (up, load, active)

    def text(self) -> bytes:
        return generate_latest(self._registry)
