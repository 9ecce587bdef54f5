"""GET /metrics: what the service counts, in Prometheus' words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill import __version__
from tokenmill.engine.request import Finish
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.events import EngineEvent, Event, RequestEvent, StepEvent
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.errors import GONE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LAG = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.01, 0.02, 0.05, 0.1, 1)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
# Series that are there before anything happens: what appears with its first event looks to rate() as if it had not.
_REFUSALS = (
    ("429", "overloaded"),
    ("429", "deadline_too_close"),
    ("429", "rate_limit_exceeded"),
    ("429", "concurrency_limit_exceeded"),
    ("503", "unavailable"),
    ("400", "invalid_value"),
    ("500", "engine_error"),
    ("500", "internal_error"),
    ("504", "deadline_exceeded"),
)
_ENGINE_EVENTS = ("ready", "died", "breaker_open", "breaker_closed")


class ServerMetrics:
    """Histograms are filled as things happen; counters and gauges are read from the service when somebody asks."""

    def __init__(self, service: Service, routes: Collection[str]) -> None:
        """`routes` are counted by their names, and all others as one."""
        self._routes = frozenset(routes)
        self.registry = CollectorRegistry()
        self._by_tenant = CollectorRegistry()  # who the tenants are is not for everybody
        self.registry.register(_StatsCollector(service))
        ProcessCollector(registry=self.registry)  # of the front: process_resident_memory_bytes, process_open_fds, ...

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tokenmill_{name}", what, registry=self.registry, buckets=buckets)

        def counter(
            name: str, what: str, labels: Sequence[str] = (), registry: CollectorRegistry | None = None
        ) -> Counter:
            return Counter(f"tokenmill_{name}", what, labels, registry=registry or self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _LONG)
        self._gap = FastHistogram(
            "tokenmill_inter_token_seconds", "Between two tokens of a request", _SHORT, registry=self.registry
        )
        self.token_to_socket = FastHistogram(
            "tokenmill_token_to_socket_seconds",
            "From the end of a step in the engine until its token of a stream was written",
            _LAG,
            registry=self.registry,
        )
        self._queue = histogram("queue_seconds", "Arrival to first step", _LONG)
        self._step = histogram("step_seconds", "One turn of the engine's loop", _SHORT)
        self._lag = histogram("delivery_seconds", "From the engine's sending of tokens to the front", _LAG)
        self._batch = histogram("step_tokens", "Tokens computed in a step", _TOKENS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._output = histogram("request_output_tokens", "Output tokens of a request", _TOKENS)
        self._http = counter("http_requests", "Requests by route and status", ["route", "status"])
        self._errors = counter("http_errors", "Refused and failed requests by cause", ["status", "code"])
        self._prefilled = counter("prefilled_tokens", "Prompt tokens computed, as it happens")
        self._generated = counter("generated_tokens", "Output tokens computed, as it happens")
        self._tenant = counter("tenant_tokens", "Tokens by tenant", ["tenant", "kind"], self._by_tenant)
        self._engine = counter("engine_events", "What happened to the engine process", ["kind"])
        self.degraded = counter("degraded_requests", "Requests that the degrade model answered")
        self._sessions = counter("sessions_ended", "Sessions of programs by how they ended", ["how"])
        for how in ("closed", "lease"):
            self._sessions.labels(how)
        for status, code in _REFUSALS:
            self._errors.labels(status, code)
        for kind in _ENGINE_EVENTS:
            self._engine.labels(kind)
        self.leave = service.subscribe(self._listen)

    def http_ended(self, route: str, status: int, code: str | None = None) -> None:
        """`code` is the error's, one of those that our own code names: labels must not be a client's to make."""
        self._http.labels(route if route in self._routes else "other", str(status)).inc()
        if status >= 400 and status != GONE:
            self._errors.labels(str(status), code or "none").inc()

    def count_sessions(self, count: Callable[[], float]) -> None:
        Gauge("tokenmill_sessions_open", "Sessions of programs that are open", registry=self.registry).set_function(
            count
        )

    def session_ended(self, how: str) -> None:
        self._sessions.labels(how).inc()

    def tenant_used(self, tenant: str, prompt: int, output: int) -> None:
        self._tenant.labels(tenant, "prompt").inc(prompt)
        self._tenant.labels(tenant, "output").inc(output)

    def text(self, tenants: bool = True) -> bytes:
        return generate_latest(self.registry) + (generate_latest(self._by_tenant) if tenants else b"")

    def _listen(self, event: Event) -> None:
        match event:
            case StepEvent():
                self._step.observe(event.seconds)
                self._lag.observe(max(0.0, event.lag))
                self._prefilled.inc(event.prefill_tokens)
                self._generated.inc(event.tokens)
                if computed := event.decodes + event.prefill_tokens:
                    self._batch.observe(computed)
            case RequestEvent(kind="finished"):
                self._prompt.observe(event.prompt_tokens)
                self._output.observe(event.output_tokens)
                if event.ttft is not None:
                    self._ttft.observe(event.ttft)
                if event.queue_seconds is not None:
                    self._queue.observe(event.queue_seconds)
                self._gap.observe_all(event.token_gaps)
            case EngineEvent():
                self._engine.labels(event.kind).inc()
            case _:
                pass


class _StatsCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        stats = self._service.stats()
        engine = stats.engine
        gauges = {
            "requests_active": ("Requests accepted and not finished", stats.active),
            "requests_running": ("Sequences in the engine's batch", engine.running),
            "requests_queued": ("Sequences that the engine has not begun", stats.queued),
            "queued_tokens": ("Prompt tokens that the engine has not begun", stats.queued_tokens),
            "drain_seconds": ("Predicted time to finish what was accepted", stats.drain_seconds or 0.0),
            "kv_blocks": ("Blocks of the KV pool", engine.blocks),
            "kv_blocks_free": ("Blocks without content", engine.free_blocks),
            "kv_blocks_cached": ("Free blocks whose content may be found again", engine.cached_blocks),
            "engine_memory_bytes": ("Resident memory of the engine process", engine.memory),
            "engine_device_memory_bytes": ("Memory held on the device", engine.device_memory),
            "ready": ("1: a request would be worked on now", float(self._service.ready())),
            "breaker_open": ("1: new requests are refused", float(stats.breaker == "open")),
        }
        counters = {
            "requests_accepted": ("Requests let in", stats.accepted),
            "requests_refused": ("Requests not let in", stats.refused),
            "prompt_tokens": ("Prompt tokens of finished requests", stats.prompt_tokens),
            "output_tokens": ("Output tokens of finished requests", stats.output_tokens),
            "cached_tokens": ("Prompt tokens that the prefix cache supplied", stats.cached_tokens),
            "prefix_cache_queried_tokens": ("Prompt tokens looked up in the prefix cache", stats.cache_queried),
            "prefix_cache_hit_tokens": ("Prompt tokens found in the prefix cache", stats.cache_hit),
            "module_tokens": ("Prompt tokens copied from modules", engine.module_placed),
            "preemptions": ("Requests that had to give up their blocks", stats.preemptions),
            "evictions": ("Cached blocks given up", stats.evicted_blocks),
            "failed_steps": ("Steps that did not complete", stats.failed_steps),
            "kernels_compiled_after_ready": (
                "Launches that waited for a GPU kernel to be compiled or loaded, since this engine process is ready",
                engine.late_kernels,
            ),
            "engine_restarts": ("Engine processes started anew", stats.restarts),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"tokenmill_{name}", what, value=value)
        for name, (what, count) in counters.items():
            yield CounterMetricFamily(f"tokenmill_{name}", what, value=count)
        if engine.adapters is not None:
            yield from _adapters(*engine.adapters, engine.awaiting_adapters)
        if engine.eviction is not None:
            yield from _eviction(*engine.eviction)
        drafted = CounterMetricFamily(
            "tokenmill_draft_tokens", "Drafts verified, since this engine process started", labels=["proposer"]
        )
        accepted = CounterMetricFamily("tokenmill_draft_tokens_accepted", "Drafts that held", labels=["proposer"])
        verified = CounterMetricFamily(
            "tokenmill_draft_rows", "Rows of steps that verified drafts", labels=["proposer"]
        )
        for name, figures in engine.drafts.items():
            for family, figure in zip((drafted, accepted, verified), figures, strict=True):
                family.add_metric([name], figure)
        yield from (drafted, accepted, verified)
        yield from _tiers(engine)
        yield from _experts(engine)
        yield from _streamed(engine.streamed)
        finished = CounterMetricFamily("tokenmill_requests_finished", "Requests by how they ended", labels=["reason"])
        for reason, count in (dict.fromkeys(map(str, Finish), 0) | stats.finished).items():
            finished.add_metric([reason], count)
        yield finished
        stage = GaugeMetricFamily(
            "tokenmill_start_progress", "Share done of what makes the engine ready; none: it is", labels=["stage"]
        )
        if (now := self._service.startup.now) is not None:
            stage.add_metric([now.name], min(1.0, now.done / now.total) if now.total else 0.0)
        yield stage
        build = GaugeMetricFamily("tokenmill_build_info", "What runs here", labels=["version", "model"])
        model = self._service.facts.model if hasattr(self._service, "facts") else ""  # not before it is loaded
        build.add_metric([__version__, model], 1)
        yield build


def _adapters(known: int, resident: int, loads: int, evictions: int, waiting: int) -> Iterable[Metric]:
    yield GaugeMetricFamily("tokenmill_adapters", "LoRA adapters that requests may name", value=known)
    yield GaugeMetricFamily("tokenmill_adapters_on_device", "LoRA adapters on the device", value=resident)
    yield GaugeMetricFamily("tokenmill_adapter_requests_waiting", "Requests whose adapter is not there", value=waiting)
    since = "since this engine process started"
    yield CounterMetricFamily("tokenmill_adapter_loads", f"LoRA adapters brought to the device, {since}", value=loads)
    yield CounterMetricFamily("tokenmill_adapter_evictions", f"LoRA adapters that made room, {since}", value=evictions)


def _eviction(policy: str, found: int, shadow: int, takeovers: int) -> Iterable[Metric]:
    """How an eviction policy other than LRU does, and what LRU would have done, since this engine process started."""
    for name, what, count in (
        ("eviction_found_blocks", "Cached blocks without a user that newcomers found", found),
        ("eviction_shadow_found_blocks", "Those that LRU would have had (only a learned policy asks)", shadow),
        ("eviction_takeovers", "Times that LRU took over from a learned policy, because it finds more", takeovers),
    ):
        family = CounterMetricFamily(f"tokenmill_{name}", what, labels=["policy"])
        family.add_metric([policy], count)
        yield family


def _experts(engine: wire.EngineStats) -> Iterable[Metric]:
    """Of a mixture whose experts are divided or limited: nobody counts those of others."""
    if not engine.experts:
        return
    chosen = CounterMetricFamily(
        "tokenmill_expert_chosen", "Tokens that chose an expert, over all layers", labels=["expert"]
    )
    for expert, count in enumerate(engine.experts):
        chosen.add_metric([str(expert)], count)
    yield chosen
    yield CounterMetricFamily(
        "tokenmill_expert_dropped", "Choices beyond an expert's capacity", value=engine.experts_dropped
    )


def _tiers(engine: wire.EngineStats) -> Iterable[Metric]:
    """KV in host memory and on disk."""
    counters = [
        CounterMetricFamily(f"tokenmill_kv_tier_{name}", f"{what}, since this engine process started", labels=["tier"])
        for name, what in (
            ("read_bytes", "KV brought to the device"),
            ("written_bytes", "KV brought from the device"),
            ("failed_blocks", "Blocks that did not arrive or were not kept"),
            ("refused_blocks", "Blocks not written because too much was waiting"),
            ("spared_blocks", "Blocks computed again because that was expected to be faster than reading them"),
        )
    ]
    gauges = [
        GaugeMetricFamily(f"tokenmill_kv_tier_{name}_blocks", what, labels=["tier"])
        for name, what in (
            ("waiting", "Blocks under way"),
            ("held", "Blocks that the tier holds"),
            ("room", "Blocks that the tier has room for; 0: another engine's"),
        )
    ]
    bandwidth = GaugeMetricFamily(
        "tokenmill_kv_tier_read_bytes_per_second", "Bandwidth of reads of late", labels=["tier"]
    )
    for name, tier in engine.tiers.items():
        size = engine.block_bytes
        figures = (tier.read * size, tier.written * size, tier.failed, tier.refused, tier.spared)
        for family, figure in zip(counters, figures, strict=True):
            family.add_metric([name], figure)
        for gauge, figure in zip(gauges, (tier.waiting, tier.held, tier.room), strict=True):
            gauge.add_metric([name], figure)
        bandwidth.add_metric([name], tier.bandwidth)
    yield from (*counters, *gauges, bandwidth)
    yield CounterMetricFamily(
        "tokenmill_requests_swapped", "Preempted requests whose KV was read back from a tier", value=engine.swapped
    )


def _streamed(report: wire.StreamedReport | None) -> Iterable[Metric]:
    """Layers or experts that do not fit on the device; where all do, no figures."""
    if report is None:
        return
    for name, what, value in (
        ("bytes", "Bytes of weights brought to the device", report.nbytes),
        ("layers", "Layers brought to the device", report.layers),
        ("stalls", "Layers that a step of a CPU waited for, or for experts of", report.stalls),
        ("stall_seconds", "Seconds that steps of a CPU waited for weights", report.stall_seconds),
        ("overlap_seconds", "Seconds of reading in which a CPU computed something", report.overlap_seconds),
    ):
        yield CounterMetricFamily(f"tokenmill_streamed_{name}", f"{what}, since this engine started", value)
    if (cached := report.experts) is None:
        return
    yield GaugeMetricFamily("tokenmill_expert_slots", "Experts of every layer that are on the device", cached.slots)
    yield GaugeMetricFamily("tokenmill_layer_experts", "Experts that a layer has", cached.of)
    for name, what, value in (
        ("hits", "Chosen experts that had a slot", cached.hits),
        ("misses", "Chosen experts that were waited for", cached.misses),
        ("foreseen", "Chosen experts that were brought, or on their way, because they were foreseen", cached.foreseen),
        ("wasted", "Experts that were foreseen, and left unused", cached.wasted),
    ):
        yield CounterMetricFamily(f"tokenmill_expert_{name}", f"{what}, since this engine started", value)


class FastHistogram(Collector):
    """For what happens per token, where a lock and a loop over buckets would show.

    For one thread: values are noted on the event loop, and that is where somebody asks for them.
    """

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
