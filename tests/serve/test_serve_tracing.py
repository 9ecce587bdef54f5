"""Spans of requests: what they say, whom they belong to, how they are sent, and that they cost nothing when off."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sim_engine import POISON
from sim_service import eventually, opened, run, strike

from tokenmill.errors import ConfigError
from tokenmill.serve.app import create_app
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.http.api_keys import add_key
from tokenmill.serve.observe.tracing import Tracing
from tokenmill.serve.settings import HttpSettings

PATH = "/v1/completions"
CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{CALLER}-00f067aa0ba902b7-01"


def body(prompt: Any, tokens: int = 6, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


class Traced:
    """The application of a service, whose spans are kept in memory."""

    def __init__(self, service: Service, ratio: float = 1.0, **settings: Any) -> None:
        self._memory = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._memory), [service], ratio)
        self.app = create_app(service, HttpSettings(**settings), self.tracing)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._memory.get_finished_spans())

    def server_span(self) -> ReadableSpan:
        [span] = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return span

    def children(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.spans if span.kind is not SpanKind.SERVER}


def events_of(span: ReadableSpan) -> dict[str, dict[str, Any]]:
    return {event.name: dict(event.attributes or {}) for event in span.events}


def test_a_request_is_a_span_with_its_phases() -> None:
    async def main() -> None:
        async with opened({"step": 0.01}) as service:
            traced = Traced(service)
            answer = await traced.client.post(PATH, json=body([1, 2, 3], seed=7), headers={"traceparent": PARENT})
            assert answer.status_code == 200
            server, children = traced.server_span(), traced.children()
            assert server.name == f"POST {PATH}" and children.keys() == {"queue", "prefill", "decode"}
            context, parent = server.context, server.parent
            assert f"{context.trace_id:032x}" == CALLER and parent is not None and parent.is_remote
            assert answer.headers["traceresponse"] == f"00-{CALLER}-{context.span_id:016x}-01"
            said = server.attributes or {}
            assert said["gen_ai.operation.name"] == "text_completion" and said["gen_ai.request.model"] == "sim"
            assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.seed"]) == (6, 7)
            assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 6)
            assert said["gen_ai.response.finish_reasons"] == ("length",)
            assert said["http.response.status_code"] == 200 and said["http.route"] == PATH
            assert said["tokenmill.request.id"] == answer.headers["x-request-id"]
            assert server.status.status_code is StatusCode.UNSET and not server.events
            queue, prefill, decode = (children[name] for name in ("queue", "prefill", "decode"))
            for child in (queue, prefill, decode):
                assert child.parent is not None and child.parent.span_id == context.span_id
                assert server.start_time - 5e6 <= child.start_time <= child.end_time <= server.end_time + 5e6
            assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
            assert decode.end_time - decode.start_time >= 4 * 0.01 * 1e9  # five steps after the first token
            assert (prefill.attributes or {})["gen_ai.usage.input_tokens"] == 3
            assert (decode.attributes or {})["gen_ai.usage.output_tokens"] == 6
            assert not traced.tracing._open

    run(main())


def test_streams_and_lists_of_prompts() -> None:
    async def main() -> None:
        async with opened() as service:
            traced = Traced(service)
            asked = body([[1, 2], [3, 4, 5]], stream=True)
            assert (await traced.client.post(PATH, json=asked)).status_code == 200
            prompts = {(span.attributes or {})["tokenmill.prompt.id"] for span in traced.spans if span.name == "decode"}
            assert len(prompts) == 2
            assert (traced.server_span().attributes or {})["gen_ai.usage.input_tokens"] == 5

    run(main())


def test_a_wrong_request_is_an_event_and_no_error() -> None:
    async def main() -> None:
        async with opened() as service:
            traced = Traced(service)
            await traced.client.post(PATH, json=body([1], temprature="a secret"))
            span = traced.server_span()
            assert events_of(span) == {
                "exception": {"exception.type": "unknown_parameter", "tokenmill.param": "temprature"}
            }
            assert span.status.status_code is StatusCode.UNSET and not traced.children()
            assert "secret" not in span.to_json()

    run(main())


def test_a_refused_key_is_an_event(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "alice", {})

    async def main() -> None:
        async with opened() as service:
            traced = Traced(service, keys=tmp_path / "keys.json")
            assert (await traced.client.get("/v1/models")).status_code == 401
            assert events_of(traced.server_span())["exception"]["exception.type"] == "missing_api_key"

    run(main())


def test_a_path_that_leads_nowhere_names_no_span() -> None:
    async def main() -> None:
        async with opened() as service:
            traced = Traced(service)
            assert (await traced.client.get("/nowhere/" + "x" * 5000)).status_code == 404
            span = traced.server_span()
            said = span.attributes or {}
            assert span.name == "GET" and "http.route" not in said and len(str(said["url.path"])) == 200

    run(main())


def test_a_failure_is_an_error_with_its_cause() -> None:
    async def main() -> None:
        async with opened({"crash": POISON}) as service:
            traced = Traced(service)
            assert (await traced.client.post(PATH, json=body([1, POISON]))).status_code == 500
            span = traced.server_span()
            assert span.status.status_code is StatusCode.ERROR and "SIGSEGV" in str(span.status.description)
            assert (span.attributes or {})["error.type"] == "engine_error"
            assert "engine died" in events_of(span) and "engine ready" in events_of(span)

    run(main())


def test_an_engine_restart_is_an_event_of_who_lived_through_it() -> None:
    async def main() -> None:
        async with opened({"step": 0.01}) as service:
            traced = Traced(service)
            asking = asyncio.create_task(traced.client.post(PATH, json=body([1, 2], 60)))
            await eventually(lambda: service.stats().engine.running == 1)
            await strike(service, signal.SIGKILL)
            assert (await asking).status_code == 200
            span = traced.server_span()
            assert "killed" in events_of(span)["engine died"]["tokenmill.engine.cause"]
            assert span.status.status_code is StatusCode.UNSET
            assert (traced.children()["decode"].attributes or {})["tokenmill.engine.restarts"] == 1

    run(main())


def test_who_samples() -> None:
    """The caller decides; where there is none, the ratio. An id is told either way."""

    async def main() -> None:
        async with opened() as service:
            traced = Traced(service, ratio=0.0)
            answer = await traced.client.post(PATH, json=body([1]))
            sampled = int(answer.headers["traceresponse"][-2:], 16) & 1
            assert not sampled and not traced.spans
            await traced.client.post(PATH, json=body([1]), headers={"traceparent": PARENT.replace("-01", "-00")})
            assert not traced.spans and not traced.tracing._open
            await traced.client.post(PATH, json=body([1]), headers={"traceparent": PARENT})
            assert len(traced.spans) == 4

    run(main())


@pytest.mark.parametrize(
    "header", ["", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", PARENT + "\u00e9" * 4000]
)
def test_a_wrong_traceparent_begins_a_new_trace(header: str) -> None:
    async def main() -> None:
        async with opened() as service:
            traced = Traced(service)
            sent = {"traceparent": header.encode("latin-1")}
            assert (await traced.client.post(PATH, json=body([1]), headers=sent)).status_code == 200
            assert traced.server_span().parent is None

    run(main())


def test_a_batch_goes_on_with_the_trace_it_was_made_in() -> None:
    line = {"custom_id": "a", "method": "POST", "url": PATH, "body": body([1, 2])}

    async def main() -> None:
        async with opened() as service:
            traced = Traced(service)
            form = {"files": {"file": ("in.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
            file = (await traced.client.post("/v1/files", **form)).json()  # type: ignore[arg-type]
            asked = {"input_file_id": file["id"], "endpoint": PATH}
            made = await traced.client.post("/v1/batches", json=asked, headers={"traceparent": PARENT})
            assert made.status_code == 200

            def answers() -> list[ReadableSpan]:
                return [span for span in traced.spans if span.name == f"POST {PATH}"]

            await eventually(answers)
            [span] = answers()
            assert f"{span.context.trace_id:032x}" == CALLER

    run(main())


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A tiny receiver of OTLP over HTTP."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf":
                received.append(ExportTraceServiceRequest.FromString(content))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()


def test_spans_reach_a_collector_and_the_log_names_the_trace(chat_model: str) -> None:
    with collector() as (endpoint, received):
        server = Server.start(chat_model, "--otlp-endpoint", endpoint, "--log-format", "json")
        chat = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3, "stream": True}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, headers={"traceparent": PARENT})
        assert answer.status_code == 200
        assert server.stop() == 0  # which sends what is left
        spans = {
            span.name: span
            for request in received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }
        assert spans.keys() == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
        assert {span.trace_id.hex() for span in spans.values()} == {CALLER}
        facts = received[0].resource_spans[0].resource.attributes
        assert {one.key: one.value.string_value for one in facts}["service.name"] == "tokenmill"
        assert "secret" not in str(received)
        lines = [json.loads(line) for line in server.lines if line.startswith("{")]
        [told] = [line for line in lines if line["message"] == "POST /v1/chat/completions"]
        assert told["trace_id"] == CALLER


def test_a_collector_that_is_gone_costs_no_request(chat_model: str) -> None:
    server = Server.start(chat_model, "--otlp-endpoint", "http://127.0.0.1:9")
    asked = {"prompt": "x", "max_tokens": 2}
    answers = [httpx.post(f"{server.url}{PATH}", json=asked, timeout=60) for _ in range(5)]
    assert all(answer.status_code == 200 for answer in answers)
    assert min(answer.elapsed.total_seconds() for answer in answers) < 5  # one of them met a machine that was not busy
    assert server.stop() == 0


def test_nothing_is_imported_when_off() -> None:
    code = (
        "import sys; from tokenmill.serve import app, server; from tokenmill.serve.settings import HttpSettings\n"
        "from tokenmill.serve.engine_client.service import Service; from tokenmill.config import EngineConfig\n"
        "made = app.create_app(Service(EngineConfig()), HttpSettings())\n"
        "assert made.state.server.tracing is None\n"
        # The interface alone may be there: FastAPI brings it.
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf', "
        "'tokenmill.serve.observe.tracing')\n"
        "assert not [name for name in sys.modules if name.startswith(heavy)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_are_checked() -> None:
    for wrong in ({"otlp_endpoint": "localhost:4318"}, {"trace_ratio": 1.5}):
        with pytest.raises(ConfigError):
            HttpSettings(**wrong)
