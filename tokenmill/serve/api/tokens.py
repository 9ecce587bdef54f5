"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.serve.api.chat_messages import normal_messages, template_input
from tokenmill.serve.api.schemas import DetokenizeRequest, TokenizeRequest
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.request_context import RequestContext, json_response
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.http.tenants import Tenant

MOST_TOKENS = 1_000_000  # that are made text at once


async def list_models(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """The models that are served."""
    return json_response({"object": "list", "data": _models(server, tenant)})


async def one_model(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """One model by its name."""
    name = request.path_params["name"]
    found = next((model for model in _models(server, tenant) if model["id"] == name), None)
    if found is None and name in server.names():
        found = _models(server, tenant)[0]
    if found is None:
        raise server.no_model(name)
    return json_response(found)


def _models(server: ServerState, tenant: Tenant) -> list[dict[str, Any]]:
    names = [(name, server.service) for name in server.settings.names] or [
        (server.name_of(server.service), server.service)
    ]
    names += [(server.name_of(service), service) for service in server.service.and_degrade()[1:]]
    found = [_model(name, service, server.started) for name, service in names]
    known, parent = server.service.adapters.known, server.name_of(server.service)
    return found + [
        _model(name, server.service, known[name].created) | {"parent": parent} for name in server.adapters_of(tenant)
    ]


def _model(name: str, service: Service, created: float) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "tokenmill",
        "max_model_len": service.facts.max_len if hasattr(service, "facts") else None,
    }


async def tokenize(context: RequestContext, body: TokenizeRequest) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "give either prompt or messages", "invalid_value", "prompt")
    tokenizer = context.service.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this server has no tokenizer; send token ids")
    if body.messages is not None:
        messages = await context.in_thread(normal_messages, body.messages)
        shown, options = await context.in_thread(template_input, messages, None, "none", tokenizer.chat_template)
        ids = await context.service.prompts.chat_ids(shown, add_generation_prompt=body.add_generation_prompt, **options)
    else:
        text, most = body.prompt or "", context.service.facts.max_len if hasattr(context.service, "facts") else None
        ids = await context.service.texts.run(len(text), tokenizer.encode, text, body.add_special_tokens, most)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": context.service.facts.max_len, "tokens": ids}
    if body.return_token_strs:
        told["token_strs"] = await context.service.texts.run(
            len(ids), lambda: [tokenizer.id_to_token(id) for id in ids]
        )
    return context.answer(told)


async def detokenize(context: RequestContext, body: DetokenizeRequest) -> Response:
    tokenizer = context.service.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this server has no tokenizer")
    return context.answer({"prompt": await context.service.texts.run(len(body.tokens), _text_of, tokenizer, body)})


def _text_of(tokenizer: Tokenizer, body: DetokenizeRequest) -> str:
    size = tokenizer.vocab_size
    if len(body.tokens) > MOST_TOKENS:
        raise InvalidRequest(f"tokens has {len(body.tokens)} entries; at most {MOST_TOKENS} are allowed")
    for id in body.tokens:
        if type(id) is not int or not 0 <= id < size:
            raise InvalidRequest(f"tokens has {id!r:.60}; each must be a token id from 0 to {size - 1}")
    return tokenizer.decode(body.tokens, body.skip_special_tokens)
