"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.serve.api.chat_messages import normal_messages, template_input
from tokenmill.serve.api.schemas import DetokenizeRequest, TokenizeRequest
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.call import Call, json_response
from tokenmill.serve.http.server_state import Site
from tokenmill.serve.http.tenants import Tenant

MOST_TOKENS = 1_000_000  # that are made text at once


async def list_models(site: Site, request: Request, tenant: Tenant) -> Response:
    """The models that are served."""
    return json_response({"object": "list", "data": _models(site)})


async def one_model(site: Site, request: Request, tenant: Tenant) -> Response:
    """One model by its name."""
    name = request.path_params["name"]
    found = next((model for model in _models(site) if model["id"] == name), None)
    if found is None and name in site.names():
        found = _models(site)[0]
    if found is None:
        raise site.no_model(name)
    return json_response(found)


def _models(site: Site) -> list[dict[str, Any]]:
    services = [site.service] if site.service.degrade is None else [site.service, site.service.degrade]
    names = [(name, site.service) for name in site.settings.names] or [(site.name_of(site.service), site.service)]
    names += [(site.name_of(service), service) for service in services[1:]]
    return [
        {
            "id": name,
            "object": "model",
            "created": int(site.started),
            "owned_by": "tokenmill",
            "max_model_len": service.facts.max_len if hasattr(service, "facts") else None,
        }
        for name, service in names
    ]


async def tokenize(call: Call, body: TokenizeRequest) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "give either prompt or messages", "invalid_value", "prompt")
    tokenizer = call.service.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this server has no tokenizer; send token ids")
    if body.messages is not None:
        messages = await call.aside(normal_messages, body.messages)
        shown, options = await call.aside(template_input, messages, None, "none", tokenizer.chat_template)
        ids = await call.service.chat_ids(shown, add_generation_prompt=body.add_generation_prompt, **options)
    else:
        text, most = body.prompt or "", call.service.facts.max_len if hasattr(call.service, "facts") else None
        ids = await call.service.texts.run(len(text), tokenizer.encode, text, body.add_special_tokens, most)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": call.service.facts.max_len, "tokens": ids}
    if body.return_token_strs:
        told["token_strs"] = await call.service.texts.run(len(ids), lambda: [tokenizer.id_to_token(id) for id in ids])
    return call.answer(told)


async def detokenize(call: Call, body: DetokenizeRequest) -> Response:
    tokenizer = call.service.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this server has no tokenizer")
    return call.answer({"prompt": await call.service.texts.run(len(body.tokens), _text_of, tokenizer, body)})


def _text_of(tokenizer: Tokenizer, body: DetokenizeRequest) -> str:
    size = tokenizer.vocab_size
    if len(body.tokens) > MOST_TOKENS:
        raise HttpError(
            400, f"tokens has {len(body.tokens)} entries; at most {MOST_TOKENS} are allowed", "invalid_value", "tokens"
        )
    for id in body.tokens:
        if type(id) is not int or not 0 <= id < size:
            raise HttpError(
                400, f"tokens has {id!r:.60}; each must be a token id from 0 to {size - 1}", "invalid_value", "tokens"
            )
    return tokenizer.decode(body.tokens, body.skip_special_tokens)
