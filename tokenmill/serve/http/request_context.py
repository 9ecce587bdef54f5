"""RequestContext: one request of a client from its head to the end of its answer; ends whatever still runs for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from tokenmill.engine.request import Metrics
from tokenmill.errors import InvalidRequest
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.processor import Prompt
from tokenmill.request_state import RequestState
from tokenmill.serve.engine_client.resume import ResumedSequence
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.engine_client.text_pool import LONG
from tokenmill.serve.errors import GONE, HttpError, Shape, openai_shape
from tokenmill.serve.http.access_log import AccessRecord
from tokenmill.serve.http.asked_by_router import answer_router
from tokenmill.serve.http.continued import Continued
from tokenmill.serve.http.error_mapping import http_error_of
from tokenmill.serve.http.request_body import RequestBody, read_request
from tokenmill.serve.http.routed import Probed, Progress, Route, progress_of, route_of
from tokenmill.serve.http.routed_streams import RoutedStream
from tokenmill.serve.http.server_state import ServerState, server_of
from tokenmill.serve.http.tenants import Tenant

SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of a request's prompts, where the router names one

V = TypeVar("V")
P = ParamSpec("P")
Handler = Callable[["RequestContext", Any], Awaitable[Response]]
Reader = Callable[[ServerState, Request, Tenant], Awaitable[Response]]


class RequestOptions(Protocol):
    """What a client may say, in every endpoint that generates, about how its request is scheduled."""

    priority: str | int | None
    deadline_ms: float | None
    cache_salt: str | None


class RequestContext:
    """A request of a tenant that has been let in. Somebody must `close` it; that ends whatever still runs for it."""

    def __init__(
        self, server: ServerState, request: Request, tenant: Tenant, shape: Shape, record: AccessRecord
    ) -> None:
        self.server = server
        self.request = request
        self.tenant = tenant
        self.shape = shape
        self.record = record
        self.id = record.id
        self.route: Route | None = request.scope.get("tokenmill.route")
        self.progress: Progress | None = None  # what a router says that was sent already
        self.continued: Continued | None = None  # where the client itself says so
        self.problem: HttpError | None = None  # what the client was told of
        self.said: list[dict[str, Any]] = []  # prompts and answers, where the log wants them
        self.created = int(time.time()) if self.route is None else self.route.created
        self.service = server.service.route()
        self.adapter = ""  # the name of a LoRA adapter
        self.ignored: list[str] = []
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.metrics: Metrics | None = None  # when things happened to the first prompt
        self.finish: str | None = None
        self.on_cancel: Callable[[], object] = lambda: None  # ends what runs beside streams
        self._streams: list[Stream] = []
        self._sequences = 0  # of all streams
        # A router's own questions are not the client's: they count nowhere.
        self._open = self.route is None or not (self.route.probe or self.route.prefill)
        if self._open:
            tenant.enter()
            tenant.open_requests.add(self.id)

    @property
    def model(self) -> str:
        return self.adapter or self.server.name_of(self.service)

    def ask_for(self, model: str | None) -> None:
        """The model or adapter that the client names. Raises HttpError 404, and Unavailable while nobody can tell."""
        if model is None or model in self.server.names():
            return
        if model not in self.server.adapters_of(self.tenant):
            self.server.service.check_started()
            raise self.server.no_model(model)
        self.adapter, self.service = model, self.server.service  # another model has no such adapter

    async def submit(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Stream:
        """Hand a prompt to the engine. Raises what `Service.submit` raises."""
        await answer_router(self, prompt, options)
        if self.record.trace is not None:
            self.record.trace.asked(params, self.model)
        number = len(self._streams)
        resumed: list[ResumedSequence | None] | None = None
        if self.route is not None and params.seed is None:
            params = replace(params, seed=(self.route.seed + number * SEED_STEP) & (2**63 - 1))
        scheduling = self.scheduling(options)
        if self.continued is not None:
            resumed = [*await self.continued.go_on(self, prompt, params, options, scheduling)]
        elif getattr(options, "resume_token_ids", None) is not None:
            why = "resume_token_ids says what was sent of a stream; send the id of its last event as Last-Event-ID, too"
            raise HttpError(400, why, "invalid_value", "resume_token_ids")
        elif self.progress is not None:
            said = self.progress.sequences
            resumed = [said.get(self._sequences + index) for index in range(params.num_sequences)]
        self._sequences += params.num_sequences
        name = f"{self._engine_id}-{number}" if number else self._engine_id
        stream = await self.service.submit(prompt, params, request_id=name, resumed=resumed, **scheduling)
        self._streams.append(stream)
        return stream

    @property
    def _engine_id(self) -> str:
        return self.id if self.route is None else self.route.name

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        scheduling: dict[str, Any],
        *,
        counts: bool = False,
        **more: Any,
    ) -> tuple[RequestState, RequestOutput]:
        """An answer of which the client is not told. counts: its tenant has used these tokens, whatever comes of it."""
        number = len(self._streams)
        id = f"{self._engine_id}-{number}-{name}"
        stream = await self.service.submit(prompt, params, request_id=id, **more, **scheduling)
        self._streams.append(stream)
        try:
            async with self.cancel_on_disconnect(self.request.receive):
                output = await stream.last()
        finally:
            self._streams.remove(stream)
            if counts:
                self.prompt_tokens += len(stream.request_state.prompt_ids)
                self.output_tokens += sum(one.num_tokens for one in stream.request_state.sequences)
        return stream.request_state, output

    async def embed(self, prompts: Sequence[Prompt], pooling: str, options: RequestOptions) -> list[Stream]:
        """Ask the engine for vectors of prompts. Raises what `Service.embed` raises."""
        await answer_router(self, prompts[0], options)
        self._streams = await self.service.embed(
            prompts, pooling, request_id=self._engine_id, **self.scheduling(options)
        )
        return self._streams

    def scheduling(self, options: RequestOptions) -> dict[str, Any]:
        """What `Service.submit` is to know of how a request is scheduled."""
        return {
            "priority": self.tenant.priority(options.priority),
            "timeout": _deadline_seconds(options.deadline_ms),
            "cache_salt": self.tenant.salt(options.cache_salt),
            "adapter": self.adapter,
        }

    async def in_thread(self, run: Callable[P, V], *args: P.args, **options: P.kwargs) -> V:
        """Do something with what the client sent, in a thread where that was much."""
        if self.request.scope.get("tokenmill.size", 0) <= LONG:
            return run(*args, **options)
        return await asyncio.to_thread(run, *args, **options)

    def note_sent(self) -> None:
        """What the streams brought was written to the socket."""
        for stream in self._streams:
            if stream.made is not None:
                self.server.metrics.token_to_socket.observe(time.monotonic() - stream.made)
                stream.made = None

    def record_output(self, output: RequestOutput) -> RequestOutput:
        """Note what became of an answer. Raises HttpError if it has failed."""
        self.metrics = self.metrics or output.metrics
        if self.server.settings.log_prompts:
            self.said.append(_spelled_out(output, self.service.tokenizer))
        reasons = [str(one.finish_reason) for one in output.outputs]
        self.finish = next((reason for reason in reasons if reason not in ("stop", "length")), reasons[0])
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        self.output_tokens += sum(len(one.token_ids) for one in output.outputs)
        if output.error is not None or self.finish not in ("stop", "length"):
            raise self.failure(output)
        return output

    async def all_outputs(self, streams: list[Stream]) -> list[RequestOutput]:
        """The complete answers. A client that leaves ends them."""
        async with self.cancel_on_disconnect(self.request.receive):
            return [self.record_output(await stream.last()) for stream in streams]

    @contextlib.asynccontextmanager
    async def cancel_on_disconnect(
        self, receive: Receive, gone: Callable[[], object] | None = None
    ) -> AsyncIterator[None]:
        """Cancel what runs, or do what `gone` does, as soon as the client is gone; its streams then end by
        themselves."""
        watch = asyncio.create_task(self._watch(receive, gone or self.cancel))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive, gone: Callable[[], object]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    def cancel(self) -> None:
        self.on_cancel()
        for stream in self._streams:
            self.service.cancel(stream.request_id)

    def enter_routed(self) -> RoutedStream | None:
        """The streams of this request, where they are a router's, so that they may outlive it."""
        if self.route is None:
            return None
        streams, service = list(self._streams), self.service

        def give_up() -> None:
            for stream in streams:
                service.cancel(stream.request_id)

        one = RoutedStream(self.tenant.name, self.id, self.route.name, streams, give_up)
        self.server.routed.enter(one)
        return one

    def leave_routed(self, one: RoutedStream) -> bool:
        """Its router is gone. Returns whether the streams are kept, which are this request's no more."""
        if not self.server.routed.leave(one):
            return False
        self._streams = []
        return True

    def close(self, status: int) -> None:
        """The answer has been sent, or will not be."""
        if not self._open:
            return
        self._open = False
        self.cancel()
        self.tenant.leave(self.prompt_tokens + self.output_tokens)
        self.tenant.open_requests.discard(self.id)
        if self.service is not self.server.service:
            self.server.metrics.degraded.inc()
        self.server.metrics.tenant_used(self.tenant.name, self.prompt_tokens, self.output_tokens)
        times = self.metrics or Metrics()
        told = {
            "tenant": self.tenant.name or None,
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue": _rounded(times.queue_seconds),
            "ttft": _rounded(times.ttft),
            "tpot": _rounded(times.tpot),
            "ignored": self.ignored or None,
            "model": self.model,
            "said": self.said or None,
        }
        self.record.end(status, told, self.problem)

    def headers(self) -> dict[str, str]:
        headers = self.record.headers()
        if self.ignored:
            headers["x-tokenmill-ignored"] = ", ".join(self.ignored)
        if self.service is not self.server.service:
            headers["x-tokenmill-degraded"] = ascii(self.model)[1:-1]
        return headers

    def answer(self, content: Any) -> Response:
        return json_response(content, 200, self.headers())

    def failure(self, output: RequestOutput) -> HttpError:
        """What its client is told of an answer that has failed."""
        said = output.error
        if self.finish == "cancelled" and said is None:
            return HttpError(GONE, "the request was cancelled", "cancelled")
        if self.finish == "deadline":
            return HttpError(504, said or "the deadline passed before the answer was complete", "deadline_exceeded")
        if self.service.stats().state in ("draining", "stopped"):
            return HttpError(503, said or "the server is shutting down", "unavailable", retry_after=5.0)
        if said is not None and any(one.at_fault for one in self._streams if one.request_id == output.request_id):
            return HttpError(400, said, "invalid_value", "response_format")
        return HttpError(500, said or f"the answer ended with {self.finish}", "engine_error")


def endpoint(
    kind: type[RequestBody], handler: Handler, shape: Shape = openai_shape
) -> Callable[[Request], Awaitable[Response]]:
    """An HTTP handler: lets the client in, reads its request, and turns what goes wrong into a sentence."""

    async def handle(request: Request) -> Response:
        server = server_of(request)
        record, context = AccessRecord(server, request), None
        try:
            if (route := route_of(request, server.settings)) is not None:
                record.id = route.id
                request.scope["tokenmill.route"], request.scope["tokenmill.state_bytes"] = route, route.state
            context = RequestContext(server, request, server.tenant_of(request), shape, record)
            body, context.ignored = await read_request(request, kind, server.settings)
            if (state := request.scope.get("tokenmill.state")) is not None:
                context.progress = progress = progress_of(state)
                if progress.sent:
                    context.continued = Continued(progress, server.routed.find(context.id, context.tenant.name))
            context.ask_for(getattr(body, "model", None))
            response = await handler(context, body)
        except Probed as probed:
            return json_response(probed.prompted)
        except Exception as problem:
            error = logged_http_error(problem, record.id)
            if context is not None:
                context.problem = error
                context.close(error.status)
            else:
                record.end(error.status, error=error)
            return error_response(error, shape, record.headers())
        except BaseException:
            if context is not None:
                context.close(GONE)
            raise
        if not isinstance(response, SelfClosingResponse):
            context.close(response.status_code)
        return response

    handle.__name__, handle.__doc__ = handler.__name__, kind.__doc__
    return handle


def reader(handler: Reader, shape: Shape = openai_shape) -> Callable[[Request], Awaitable[Response]]:
    """An HTTP handler for what needs no engine; whoever has a key may ask."""

    async def handle(request: Request) -> Response:
        server = server_of(request)
        record, error = AccessRecord(server, request), None
        try:
            tenant = server.tenant_of(request)
            response = await handler(server, request, tenant)
            response.headers.update(record.headers())
        except Exception as problem:
            error = logged_http_error(problem, record.id)
            response = error_response(error, shape, record.headers())
        except BaseException:
            record.end(GONE)
            raise
        record.end(response.status_code, error=error)
        return response

    handle.__name__, handle.__doc__ = handler.__name__, handler.__doc__
    return handle


class SelfClosingResponse(Response):
    """A response that closes its request context itself."""


def logged_http_error(problem: Exception, id: str) -> HttpError:
    error = http_error_of(problem, id)
    if error.status == 500:
        bug = not isinstance(problem, HttpError)
        logging.getLogger("tokenmill.serve").error("%s", problem, exc_info=problem if bug else None, extra={"id": id})
    return error


def error_response(error: HttpError, shape: Shape, headers: dict[str, str]) -> Response:
    return json_response(shape(error), error.status, headers | error.headers())


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _spelled_out(output: RequestOutput, tokenizer: Tokenizer | None) -> dict[str, Any]:
    prompt = output.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    return {"prompt": prompt, "answers": [one.text for one in output.outputs]}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _deadline_seconds(deadline_ms: float | None) -> float | None:
    if deadline_ms is None:
        return None
    if not 0 < deadline_ms <= 86_400_000:
        raise InvalidRequest(f"deadline_ms is {deadline_ms}; it must be above 0 and at most a day (86400000)")
    return deadline_ms / 1000
