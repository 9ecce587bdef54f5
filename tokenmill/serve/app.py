"""The HTTP application: which endpoints there are, and how errors outside of them are told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

# FastAPI only routes here and writes /openapi.json: bodies are read and checked by http/request_body.py with msgspec.
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response

from tokenmill import __version__
from tokenmill.errors import ConfigError, pip_install
from tokenmill.serve.api import (
    adapters,
    batches,
    cluster,
    health,
    message_batches,
    prefix_cache,
    responses_by_id,
    schemas,
    sessions,
    tokens,
)
from tokenmill.serve.api.chat import chat
from tokenmill.serve.api.completions import complete
from tokenmill.serve.api.embeddings import embed
from tokenmill.serve.api.messages import count, message
from tokenmill.serve.api.page import add_pages
from tokenmill.serve.api.responses import respond
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.engine_client.sessions import Sessions
from tokenmill.serve.errors import HttpError, Shape, anthropic_shape, openai_shape, shape_at
from tokenmill.serve.http.access_log import AccessRecord
from tokenmill.serve.http.api_keys import ApiKeys
from tokenmill.serve.http.batch_runner import BatchRunner
from tokenmill.serve.http.origin_guard import OriginGuard
from tokenmill.serve.http.request_body import RequestBody
from tokenmill.serve.http.request_context import Handler, Reader, endpoint, error_response, reader
from tokenmill.serve.http.server_state import ServerState, server_of
from tokenmill.serve.observe.metrics import ServerMetrics
from tokenmill.serve.settings import HttpSettings
from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import Journal
from tokenmill.serve.storage.stored_responses import StoredResponses

if TYPE_CHECKING:
    from tokenmill.serve.observe.tracing import Tracing

_POSTS: tuple[tuple[str, type[RequestBody], Handler, Shape], ...] = (
    ("/v1/chat/completions", schemas.ChatRequest, chat, openai_shape),
    ("/v1/completions", schemas.CompletionRequest, complete, openai_shape),
    ("/v1/responses", schemas.ResponsesRequest, respond, openai_shape),
    ("/v1/messages", schemas.MessagesRequest, message, anthropic_shape),
    ("/v1/messages/count_tokens", schemas.CountRequest, count, anthropic_shape),
    ("/v1/messages/batches", schemas.MessageBatchRequest, message_batches.create_batch, anthropic_shape),
    ("/v1/embeddings", schemas.EmbeddingRequest, embed, openai_shape),
    ("/v1/batches", schemas.BatchRequest, batches.create_batch, openai_shape),
    ("/v1/sessions", schemas.SessionRequest, sessions.open_session, openai_shape),
    ("/v1/sessions/{name}", schemas.SessionCallRequest, sessions.call, openai_shape),
    ("/tokenize", schemas.TokenizeRequest, tokens.tokenize, openai_shape),
    ("/detokenize", schemas.DetokenizeRequest, tokens.detokenize, openai_shape),
    ("/v1/load_lora_adapter", schemas.LoadAdapterRequest, adapters.load, openai_shape),
    ("/v1/unload_lora_adapter", schemas.UnloadAdapterRequest, adapters.unload, openai_shape),
    ("/reset_prefix_cache", schemas.ResetPrefixCacheRequest, prefix_cache.reset, openai_shape),
)

_READS: tuple[tuple[str, str, Reader], ...] = (
    ("/v1/models", "GET", tokens.list_models),
    ("/v1/models/{name:path}", "GET", tokens.one_model),
    ("/v1/files", "POST", batches.upload),
    ("/v1/files", "GET", batches.list_files),
    ("/v1/files/{name}", "GET", batches.one_file),
    ("/v1/files/{name}", "DELETE", batches.delete_file),
    ("/v1/files/{name}/content", "GET", batches.file_content),
    ("/v1/batches", "GET", batches.list_batches),
    ("/v1/batches/{name}", "GET", batches.one_batch),
    ("/v1/batches/{name}/cancel", "POST", batches.cancel_batch),
    ("/v1/messages/batches", "GET", message_batches.list_batches),
    ("/v1/messages/batches/{name}", "GET", message_batches.one_batch),
    ("/v1/messages/batches/{name}", "DELETE", message_batches.delete_batch),
    ("/v1/messages/batches/{name}/cancel", "POST", message_batches.cancel_batch),
    ("/v1/messages/batches/{name}/results", "GET", message_batches.results),
    ("/v1/sessions/{name}", "GET", sessions.one_session),
    ("/v1/sessions/{name}", "DELETE", sessions.close_session),
    ("/v1/responses/{name}", "GET", responses_by_id.one_response),
    ("/v1/responses/{name}", "DELETE", responses_by_id.delete_response),
    ("/v1/responses/{name}/cancel", "POST", responses_by_id.cancel_response),
    ("/v1/responses/{name}/input_items", "GET", responses_by_id.input_items),
)


def create_app(service: Service, settings: HttpSettings, tracing: Tracing | None = None) -> FastAPI:
    """The application around a service, which somebody else starts and stops. `tracing` overrides the settings."""
    app = FastAPI(title="tokenmill", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    posts = {path: endpoint(kind, handler, shape) for path, kind, handler, shape in _POSTS}
    store = JobStore(None if settings.journal is None else Journal(settings.journal))
    runner = BatchRunner(store, batches.local_sender(app, posts), most_bytes=settings.max_stored_bytes)
    responses = StoredResponses(settings.max_responses_bytes, settings.response_seconds)
    tracing = tracing or _tracing(service, settings)
    metrics = ServerMetrics(service, [one[0] for one in _POSTS] + [one[0] for one in _READS])
    kept = Sessions(settings.max_sessions, settings.max_session_tokens, metrics.session_ended)
    metrics.count_sessions(lambda: len(kept))
    app.state.server = ServerState(service, settings, ApiKeys(settings.keys), metrics, runner, responses, kept, tracing)
    for path, kind, _, _ in _POSTS:
        _add(app, path, "POST", posts[path], kind)
    for path, method, read_handler in _READS:
        _add(app, path, method, reader(read_handler, shape_at(path)))
    for path, read in (
        ("/health", health.ready),
        ("/health/live", health.live),
        ("/health/ready", health.ready),
        ("/metrics", health.metrics),
        ("/cluster/events", cluster.events),
        ("/cluster/streams/{name}", cluster.stream),
    ):
        _add(app, path, "GET", read)
    _add(app, "/cluster/cancel", "POST", cluster.cancel)
    add_pages(app)
    app.add_exception_handler(HTTPException, _not_here)
    app.add_exception_handler(Exception, _broken)
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(OriginGuard, settings=settings)  # the last one added is the first one asked
    return app


def _tracing(service: Service, settings: HttpSettings) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    try:
        from tokenmill.serve.observe.tracing import Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(f"tracing needs the package {error.name}; {pip_install('otel')}") from None
    return Tracing.over_http(settings.otlp_endpoint, service.and_degrade(), settings.trace_ratio)


def _add(
    app: FastAPI,
    path: str,
    method: str,
    handler: Callable[[Request], Awaitable[Response]],
    kind: type[RequestBody] | None = None,
) -> None:
    parameters = [*([_NAME] if "{name" in path else []), *_QUERIES.get((path, method), ())]
    extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if kind is not None:
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if (path, method) == ("/v1/files", "POST"):
        extra["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    extra["responses"] = {"default": {"description": "An error, in the shape of the API that was asked"}}
    app.add_api_route(
        path,
        handler,
        methods=[method],
        openapi_extra=extra,
        response_model=None,
        operation_id=f"{method} {path}",
        summary=(handler.__doc__ or "").strip(),
        description="",
    )
    # Handlers take the request as it is, so FastAPI describes them and no more: its own way to call them reads their
    # source code first, and the first request at each endpoint would wait for that (10 ms).
    route = app.router.routes[-1]
    assert isinstance(route, Route) and route.path == path
    route.app = request_response(handler)


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}


def _query(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_AFTER, _ORDER = _query("after", type="string"), _query("order", enum=["asc", "desc"])
_QUERIES: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("/v1/files", "GET"): (
        _AFTER,
        _ORDER,
        _query("limit", type="integer", minimum=1, maximum=10_000),
        _query("purpose", const="batch"),
    ),
    ("/v1/batches", "GET"): (_AFTER, _query("limit", type="integer", minimum=1, maximum=100)),
    ("/v1/responses/{name}/input_items", "GET"): (
        _AFTER,
        _ORDER,
        _query("limit", type="integer", minimum=1, maximum=100),
    ),
    ("/v1/messages/batches", "GET"): (
        _query("after_id", type="string"),
        _query("before_id", type="string"),
        _query("limit", type="integer", minimum=1, maximum=1000),
    ),
}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _description(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        made.setdefault("components", {}).setdefault("schemas", {}).update(
            schemas.components([kind for _, kind, *_ in _POSTS])
        )
        app.openapi_schema = made
    return app.openapi_schema


async def _not_here(request: Request, problem: Exception) -> Response:
    found = cast(HTTPException, problem)
    if found.status_code == 405:
        message = f"{request.scope['path'][:200]} does not take {request.method}"
    elif found.status_code == 404:
        message = f"there is nothing at {request.scope['path'][:200]!r}; /openapi.json lists what there is"
    else:
        message = str(found.detail)
    error = HttpError(found.status_code, message, "not_found" if found.status_code == 404 else None)
    record = AccessRecord(server_of(request), request)
    record.end(error.status, error=error)
    return error_response(error, _shape_of(request), record.headers() | dict(found.headers or {}))


async def _broken(request: Request, problem: Exception) -> Response:
    error = HttpError(500, "something went wrong on the server; its log says more", "internal_error")
    return error_response(error, _shape_of(request), {})


def _shape_of(request: Request) -> Shape:
    # Not request.url, of which a client's Host is a part.
    return shape_at(request.scope["path"])
