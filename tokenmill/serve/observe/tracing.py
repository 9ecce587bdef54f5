"""Tracing: OpenTelemetry spans of requests, sent with OTLP over HTTP. Imported only where an endpoint is given.

A request is a server span; what the engine did with it are its children `queue`, `prefill` and `decode`, made when it
has ended from the times that it carries, so that nothing is traced per token. Names follow the conventions for HTTP and
for generative AI where these have one. No text of a prompt or an answer is in any of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request

from tokenmill import __version__
from tokenmill.params import SamplingParams
from tokenmill.serve.engine_client.events import EngineEvent, Event, RequestEvent
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.errors import GONE, HttpError
from tokenmill.serve.observe.logs import LONGEST_PATH

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
_SETTINGS = {  # of a request: ours -> the convention's
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}
_USED = {  # in a request's record: ours -> the convention's
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "ttft": "gen_ai.response.time_to_first_chunk",
    "tenant": "tokenmill.tenant",
}
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Traces the requests of a server and of the services behind it. A collector that is gone or slow costs spans,
    which are dropped when too many wait, and never a request."""

    def __init__(self, processor: SpanProcessor, services: Sequence[Service], ratio: float = 1.0) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create({"service.name": "tokenmill", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tokenmill", __version__)
        self._open: dict[str, Trace] = {}
        self._leave = [service.subscribe(self._listen) for service in services]

    @classmethod
    def over_http(cls, endpoint: str, services: Sequence[Service], ratio: float = 1.0) -> Tracing:
        """`endpoint` is a collector's address, with or without /v1/traces."""
        address = endpoint.rstrip("/")
        address += "" if address.endswith("/v1/traces") else "/v1/traces"
        return cls(BatchSpanProcessor(OTLPSpanExporter(address, timeout=5)), services, ratio)

    def begin(self, request: Request, id: str, route: str) -> Trace:
        """The trace of a request, a continuation of the one that its `traceparent` names."""
        known = {name: value for name in ("traceparent", "tracestate") if (value := request.headers.get(name))}
        found = not {"route", "tokenmill.owner"}.isdisjoint(request.scope)  # else names would be a client's to make
        span = self._tracer.start_span(
            f"{request.method} {route}" if found else request.method,
            _propagator.extract(known),
            SpanKind.SERVER,
            {
                "http.request.method": request.method,
                "url.path": request.scope["path"][:LONGEST_PATH],
                "url.scheme": request.scope.get("scheme", "http"),
                "tokenmill.request.id": id,
            },
        )
        if found:
            span.set_attribute("http.route", route)
        if route in _OPERATIONS:
            span.set_attributes({"gen_ai.operation.name": _OPERATIONS[route], "gen_ai.provider.name": "tokenmill"})
        trace = Trace(self, span, id)
        if span.is_recording():
            self._open[id] = trace
        return trace

    def forget(self, id: str) -> None:
        self._open.pop(id, None)

    def close(self) -> None:
        """Send what is left; takes a few seconds where nobody takes it."""
        for leave in self._leave:
            leave()
        self._provider.shutdown()

    def child(self, trace: Trace, name: str, begin: float, end: float, facts: dict[str, Any]) -> None:
        """A span of the past, from times of the monotonic clock."""
        started = trace.moment(begin)
        span = self._tracer.start_span(name, set_span_in_context(trace.span), attributes=facts, start_time=started)
        span.end(max(started, trace.moment(end)))

    def _listen(self, event: Event) -> None:
        match event:
            case RequestEvent(kind="finished"):
                if trace := self._open.get(event.id.partition("-")[0]):
                    trace.worked(event)
            case EngineEvent():
                said = {"tokenmill.engine.generation": event.generation, "tokenmill.engine.cause": event.text}
                for trace in self._open.values():
                    trace.span.add_event(f"engine {event.kind.replace('_', ' ')}", said)
            case _:
                pass


class Trace:
    def __init__(self, tracing: Tracing, span: Any, id: str) -> None:
        context = span.get_span_context()
        self.span = span
        self.id = f"{context.trace_id:032x}"
        self.header = f"00-{self.id}-{context.span_id:016x}-{context.trace_flags:02x}"  # as in `traceparent`
        self._tracing = tracing
        self._request_id = id
        self._epoch = time.time_ns() - time.monotonic_ns()

    def moment(self, at: float) -> int:
        """A time of the monotonic clock as nanoseconds since the epoch."""
        return self._epoch + int(at * 1e9)

    def asked(self, params: SamplingParams, model: str) -> None:
        """What the client wants, once it is known."""
        given = {name: getattr(params, ours) for ours, name in _SETTINGS.items()}
        self.span.set_attributes({name: value for name, value in given.items() if value is not None})
        self.span.set_attribute("gen_ai.request.model", model)

    def worked(self, event: RequestEvent) -> None:
        """The engine is done with a prompt of this request: where the time went."""
        facts = {"tokenmill.prompt.id": event.id}
        arrived = event.at - event.seconds
        started = event.at if event.queue_seconds is None else arrived + event.queue_seconds
        self._tracing.child(self, "queue", arrived, started, facts)
        if event.queue_seconds is None:
            return
        spoke = event.at if event.ttft is None else arrived + event.ttft
        prompt = {
            "gen_ai.usage.input_tokens": event.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
        }
        self._tracing.child(self, "prefill", started, spoke, facts | prompt)
        if event.ttft is not None:
            said = {
                "gen_ai.usage.output_tokens": event.output_tokens,
                "gen_ai.response.finish_reasons": [str(event.reason)],
                "tokenmill.engine.restarts": event.restarts,
            }
            self._tracing.child(self, "decode", spoke, event.at, facts | said)

    def end(self, status: int, told: dict[str, Any], error: HttpError | None) -> None:
        self._tracing.forget(self._request_id)
        span = self.span
        span.set_attribute("http.response.status_code", status)
        used = {name: told[ours] for ours, name in _USED.items() if told.get(ours) is not None}
        span.set_attributes(used)
        if told.get("finish") is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [told["finish"]])
        if status == GONE:
            span.add_event("client left")
        elif error is not None:
            self._note(error)
        span.end()

    def _note(self, error: HttpError) -> None:
        """A client's mistake is an event; only a fault of ours makes the span an error."""
        kind = error.code or str(error.status)
        facts: dict[str, Any] = {"exception.type": kind}
        if error.param is not None:
            facts["tokenmill.param"] = error.param
        if error.status >= 500:  # the sentences of other refusals may quote what the client said
            facts["exception.message"] = error.message
            self.span.set_attribute("error.type", kind)
            self.span.set_status(Status(StatusCode.ERROR, error.message))
        self.span.add_event("exception", facts)
