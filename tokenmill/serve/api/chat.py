"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.model.marked_text import Marks
from tokenmill.outputs import CompletionOutput
from tokenmill.serve.api.chat_messages import normal_messages
from tokenmill.serve.api.output_format import ChoicesEncoder, OutputDelta, encoded, token_logprobs, usage_of
from tokenmill.serve.api.request_tools import RequestTools
from tokenmill.serve.api.sampling_params import check_logprobs, sampling_params
from tokenmill.serve.api.schemas import ChatRequest
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.request_context import RequestContext
from tokenmill.serve.http.sse import SSEResponse
from tokenmill.serve.tool_calls.parsers import CallDelta, ToolCallParser, ToolDelta, parse


async def chat(context: RequestContext, body: ChatRequest) -> Response:
    tools = RequestTools(context, body.tools, body.tool_choice, body.parallel_tool_calls)
    params = sampling_params(body, _max_tokens(body), tools.structured, tools.restriction, logprobs=_logprobs(body))
    if body.modalities not in (None, ["text"]):
        raise HttpError(400, "modalities may be ['text'] only: this model writes text", "invalid_value", "modalities")
    marks = Marks()
    messages = await context.in_thread(normal_messages, body.messages, marks)
    prompt = await tools.marked_prompt(messages, body.chat_template_kwargs, marks)
    stream = await context.submit(prompt, params, body)
    if body.stream:
        return SSEResponse(context, _ChatEncoder(context, body, stream, tools, params.n))
    [output] = await context.all_outputs([stream])

    def choices() -> list[msgspec.Raw]:
        return [encoded(_choice(context, body, one, tools.parser())) for one in output.outputs]

    # With log-probabilities these can be hundreds of thousands of entries, for which others should not wait.
    told = choices() if params.logprobs is None else await asyncio.to_thread(choices)
    return context.answer(_head(context, "chat.completion") | {"choices": told, "usage": usage_of([output])})


def chat_finish(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def _max_tokens(body: ChatRequest) -> int | None:
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


def _logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    check_logprobs("top_logprobs", top)
    if top and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs to be true", "invalid_value", "top_logprobs")
    return (top or 0) if body.logprobs else None


def _head(context: RequestContext, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{context.id}",
        "object": kind,
        "created": context.created,
        "model": context.model,
        "system_fingerprint": None,
        "service_tier": None,
    }


def _choice(
    context: RequestContext, body: ChatRequest, one: CompletionOutput, parser: ToolCallParser | None
) -> dict[str, Any]:
    content, calls = (one.text, []) if parser is None else parse(parser, one.text)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
    return ({"token_ids": one.token_ids} if body.return_token_ids else {}) | {
        "index": one.index,
        "message": message,
        "logprobs": _logprobs_json(context, body, one.token_ids, one.logprobs),
        "finish_reason": chat_finish(one.finish_reason, bool(calls)),
        "stop_reason": one.stop_reason,
    }


def _logprobs_json(context: RequestContext, body: ChatRequest, tokens: list[int], tables: Any) -> dict[str, Any] | None:
    if tables is None:
        return None
    return {
        "content": token_logprobs(tokens, tables, body.top_logprobs or 0, context.service.tokenizer),
        "refusal": None,
    }


class _ChatEncoder(ChoicesEncoder):
    def __init__(self, context: RequestContext, body: ChatRequest, stream: Stream, tools: RequestTools, n: int) -> None:
        super().__init__(context, body, [stream], n, _head(context, "chat.completion.chunk"))
        self._body = body
        self._choices = [_ChoiceEncoder(tools.parser(), bool(body.return_token_ids)) for _ in range(n)]

    def choices(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        logprobs = _logprobs_json(self._context, self._body, delta.token_ids, delta.logprobs)
        return self._choices[delta.index].encode(delta, logprobs)


class _ChoiceEncoder:
    """One choice of a stream: remembers what was said of it already."""

    def __init__(self, parser: ToolCallParser | None, with_ids: bool) -> None:
        self._parser = parser
        self._with_ids = with_ids
        self._began = False
        self._called = False

    def encode(self, delta: OutputDelta, logprobs: Any) -> list[dict[str, Any]]:
        """The choices of the chunks that tell this delta."""
        parts = self._parts(delta)
        said = []
        if not self._began:
            self._began = True
            said.append(_chunk(delta.index, {"role": "assistant", "content": "", "refusal": None}))
        if parts.content or (logprobs is not None and not parts.calls):
            said.append(_chunk(delta.index, {"content": parts.content}, logprobs))
            logprobs = None
        for part in parts.calls:
            self._called = True
            said.append(_chunk(delta.index, {"tool_calls": [_call_json(part)]}, logprobs))
            logprobs = None
        if delta.finish is not None:
            last = _chunk(delta.index, {}, logprobs, chat_finish(delta.finish, self._called))
            said.append(last | {"stop_reason": delta.stop})
        if self._with_ids and delta.token_ids:
            said = said or [_chunk(delta.index, {})]
            said[-1]["token_ids"] = delta.token_ids
        return said

    def _parts(self, delta: OutputDelta) -> ToolDelta:
        if self._parser is None:
            return ToolDelta(delta.text)
        found = self._parser.feed(delta.text)
        if delta.finish is None:
            return found
        rest = self._parser.finish()
        return ToolDelta(found.content + rest.content, [*found.calls, *rest.calls])


def _chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _call_json(part: CallDelta) -> dict[str, Any]:
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
