"""POST /v1/responses: OpenAI's newer API, for text and function calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.outputs import RequestOutput
from tokenmill.request_state import RequestState
from tokenmill.serve.api.chat_messages import Messages
from tokenmill.serve.api.content_blocks import BlockChange, ContentBlock, ContentBlocks
from tokenmill.serve.api.output_format import DeltaTracker, encoded, token_logprobs, usage_of
from tokenmill.serve.api.request_tools import RequestTools
from tokenmill.serve.api.response_items import checked_items, history, messages_of, referenced, resolved
from tokenmill.serve.api.sampling_params import check_logprobs, make_params, single_structured, structured_from_format
from tokenmill.serve.api.schemas import ResponsesRequest
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.errors import GONE, HttpError, unsupported
from tokenmill.serve.http.request_context import RequestContext, SelfClosingResponse, logged_http_error
from tokenmill.serve.http.sse import SSEEncoder, SSEResponse, event
from tokenmill.serve.storage.stored_responses import StoredResponse

_WITH_LOGPROBS = "message.output_text.logprobs"


async def respond(context: RequestContext, body: ResponsesRequest) -> Response:
    _refuse_unsupported(context, body)
    tools = RequestTools(context, body.tools, body.tool_choice, body.parallel_tool_calls)
    params = make_params(
        body.max_output_tokens,
        body.top_k,
        temperature=body.temperature,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        logprobs=_logprobs(body),
        structured=single_structured(structured_from_format(body.text.format if body.text else None), tools.structured)
        or tools.restriction,
    )
    builder = _ResponseBuilder(context, body, tools)
    stream = await context.submit(await builder.prompt(), params, body)
    if body.background:
        return builder.run_in_background(stream)
    if body.stream:
        return SSEResponse(context, _ResponseEncoder(context, body, stream, builder), last=b"", named=True)
    [output] = await context.all_outputs([stream])
    return context.answer(await builder.finished(output))


def _refuse_unsupported(context: RequestContext, body: ResponsesRequest) -> None:
    kept = context.server.responses
    if body.conversation is not None:
        raise unsupported("conversation is set, but there are none here; use previous_response_id")
    if body.previous_response_id is not None and not kept.on:
        raise unsupported("previous_response_id is set, but this server stores no responses; send the whole input")
    if body.background:
        if body.store is False or not kept.on:
            raise unsupported("background is true, but the response is not stored; let it be")
        if body.stream or context.request.scope.get("tokenmill.batch"):
            raise unsupported(
                "background is true, which neither goes with stream nor in a batch; ask for the response later"
            )
    if body.truncation not in (None, "disabled"):
        raise unsupported(
            f"truncation is {body.truncation[:60]!r}; inputs are never cut here, so it may be 'disabled' only"
        )
    for wanted in body.include or []:
        if wanted != _WITH_LOGPROBS:
            raise unsupported(f"include has {wanted[:60]!r}; it may have {_WITH_LOGPROBS!r} only")
    if body.text is not None and body.text.verbosity is not None:
        context.ignored.append("text.verbosity")


class _ResponseBuilder:
    """A response in the making: what it is asked, and how it is told and stored when it is there."""

    def __init__(self, context: RequestContext, body: ResponsesRequest, tools: RequestTools) -> None:
        self._context = context
        self._body = body
        self._tools = tools
        self._kept = context.server.responses
        self._begun = False  # it is stored already
        self.id = f"resp_{context.id}"
        self._stored: StoredResponse | None = None  # None: it is not

    async def prompt(self) -> list[int]:
        """The token ids of the conversation. Raises HttpError and InvalidRequest."""
        body, tenant = self._body, self._context.tenant.name
        chain = self._kept.chain(tenant, body.previous_response_id)
        for stored in chain:
            if stored.status not in ("completed", "incomplete"):
                raise HttpError(
                    400,
                    f"previous_response_id leads to {stored.id!r}, which is {stored.status}; choose another",
                    "invalid_value",
                    "previous_response_id",
                )
        most = self._context.server.settings.max_body_bytes
        if (size := sum(len(one.given) + len(one.made) for one in chain)) > most:
            raise HttpError(
                400,
                f"previous_response_id leads to {size} bytes of conversation; at most {most} are read",
                "invalid_value",
                "previous_response_id",
            )
        found = referenced(body.input, self._kept, tenant)

        def read() -> tuple[Messages, bytes]:
            items = checked_items(resolved(body.input, found, most), self.id)
            return messages_of(body.instructions, [*history(chain), *items]), msgspec.json.encode(items)

        messages, kept = await (asyncio.to_thread(read) if chain or found else self._context.in_thread(read))
        if self._kept.on and body.store is not False:
            self._stored = StoredResponse(self.id, body.previous_response_id, kept)
        return await self._tools.prompt(messages)

    def blocks(self) -> ContentBlocks:
        return ContentBlocks(self._tools.parser())

    def told(self, items: Sequence[Any], output: RequestOutput | None) -> dict[str, Any]:
        told = _response(self._context, self._body, items, output)
        return told | {"store": self._stored is not None}

    async def finished(self, output: RequestOutput) -> msgspec.Raw:
        """The whole response, kept where it is to be."""
        one = output.outputs[0]

        def made() -> tuple[list[ContentBlock], list[msgspec.Raw]]:
            blocks, logprobs = self.blocks(), _logprobs_json(self._context, self._body, one.token_ids, one.logprobs)
            for _ in blocks.feed(one.text, last=True, logprobs=logprobs):
                pass
            return blocks.all, [encoded(_item(self._context, block)) for block in blocks.all]

        # With log-probabilities these can be very many entries, for which others should not wait.
        blocks, items = made() if one.logprobs is None else await asyncio.to_thread(made)
        return self.keep(blocks, self.told(items, output))

    def keep(self, blocks: Sequence[ContentBlock], told: dict[str, Any]) -> msgspec.Raw:
        response, stored, tenant = encoded(told), self._stored, self._context.tenant.name
        if self._begun and self._kept.get(tenant, self.id) is None:
            stored = None  # it was deleted, or had to give way
        if stored is not None:
            plain = [_item(self._context, ContentBlock(one.index, one.text, one.name, one.id)) for one in blocks]
            stored.made, stored.response, stored.status = msgspec.json.encode(plain), bytes(response), told["status"]
            self._kept.keep(tenant, stored)
        return response

    def run_in_background(self, stream: Stream) -> Response:
        """Answer at once, and make the response when nobody waits for it."""
        assert self._stored is not None
        self._stored.in_background, self._stored.cancel = True, self._context.cancel
        begun = self.keep([], self.told([], None))
        self._begun = True
        self._kept.make(self._stored, self._finish(stream))
        return SelfClosingResponse(bytes(begun), 200, self._context.headers(), "application/json")

    async def _finish(self, stream: Stream) -> None:
        status, context, stored = GONE, self._context, self._stored
        assert stored is not None
        try:
            await self.finished(context.record_output(await stream.last()))
            status = 200
        except Exception as problem:
            error = context.problem = logged_http_error(problem, context.id)
            status = error.status
            ended = (
                {"status": "cancelled"}
                if error.code == "cancelled"
                else {
                    "status": "failed",
                    "error": {"code": "server_error", "message": error.message},
                }
            )
            self.keep([], self.told([], None) | ended)
        finally:
            stored.cancel = stored.task = None  # what is kept for hours must not hold the call with all that it asked
            context.close(status)


def _logprobs(body: ResponsesRequest) -> int | None:
    top = body.top_logprobs
    check_logprobs("top_logprobs", top)
    return (top or 0) if top or _WITH_LOGPROBS in (body.include or []) else None


def _logprobs_json(
    context: RequestContext, body: ResponsesRequest, tokens: list[int], tables: Any
) -> list[msgspec.Raw]:
    return [] if tables is None else token_logprobs(tokens, tables, body.top_logprobs or 0, context.service.tokenizer)


def _response(
    context: RequestContext, body: ResponsesRequest, items: Sequence[Any], output: RequestOutput | None
) -> dict[str, Any]:
    cut = output is not None and output.outputs[0].finish_reason == "length"
    status = "in_progress" if output is None else "incomplete" if cut else "completed"
    return {
        "id": f"resp_{context.id}",
        "object": "response",
        "created_at": context.created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": context.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": None,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _format_json(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None if output is None else _usage(output),
        "user": None,
    }


def _format_json(body: ResponsesRequest) -> Any:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return {"type": "text"}
    return {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    usage = usage_of([output])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _item(context: RequestContext, block: ContentBlock, status: str = "completed") -> dict[str, Any]:
    if block.name is None:
        content = [_part(block)] if status == "completed" else []
        id = f"msg_{context.id}_{block.index}"
        return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}
    return {
        "id": f"fc_{context.id}_{block.index}",
        "type": "function_call",
        "status": status,
        "call_id": block.id,
        "name": block.name,
        "arguments": block.text,
    }


def _part(block: ContentBlock) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


class _ResponseEncoder(SSEEncoder):
    """The events of a response, numbered."""

    def __init__(
        self, context: RequestContext, body: ResponsesRequest, stream: Stream, builder: _ResponseBuilder
    ) -> None:
        self.streams = [stream]
        self._context = context
        self._body = body
        self._builder = builder
        self._blocks, self._tracker = builder.blocks(), DeltaTracker(1)
        self._last: RequestOutput | None = None

    def start(self) -> bytes:
        begun = self._builder.told([], None)
        return self.event("response.created", response=begun) + self.event("response.in_progress", response=begun)

    def update(self, number: int, state: RequestState) -> bytes:
        if self.ends(number, state):
            self._last = self._context.record_output(state.output())
        return b"".join(
            self.change(change)
            for delta in self._tracker.take(state)
            for change in self._blocks.feed(
                delta.text,
                delta.finish is not None,
                _logprobs_json(self._context, self._body, delta.token_ids, delta.logprobs),
            )
        )

    def finish(self) -> bytes:
        items = [_item(self._context, block) for block in self._blocks.all]
        ended = self._builder.told(items, self._last)
        return self.event(f"response.{ended['status']}", response=self._builder.keep(self._blocks.all, ended))

    def event(self, kind: str, **content: Any) -> bytes:
        self.numbered += 1
        return event({"type": kind, "sequence_number": self.numbered - 1, **content}, kind)

    def change(self, change: BlockChange) -> bytes:
        block = change.block
        at: dict[str, Any] = {"output_index": block.index, "item_id": _item(self._context, block)["id"]}
        return self._text(change, at) if block.name is None else self._call_of(change, at)

    def _text(self, change: BlockChange, at: dict[str, Any]) -> bytes:
        block, inside = change.block, {**at, "content_index": 0}
        if change.what == "open":
            item = _item(self._context, block, "in_progress")
            return self.event("response.output_item.added", output_index=block.index, item=item) + self.event(
                "response.content_part.added", **inside, part=_part(ContentBlock(block.index))
            )
        if change.what == "grow":
            return self.event("response.output_text.delta", **inside, delta=change.text, logprobs=change.logprobs)
        return (
            self.event("response.output_text.done", **inside, text=block.text, logprobs=block.logprobs)
            + self.event("response.content_part.done", **inside, part=_part(block))
            + self._done(block)
        )

    def _call_of(self, change: BlockChange, at: dict[str, Any]) -> bytes:
        block = change.block
        if change.what == "open":
            item = _item(self._context, ContentBlock(block.index, name=block.name, id=block.id), "in_progress")
            return self.event("response.output_item.added", output_index=block.index, item=item)
        if change.what == "grow":
            return self.event("response.function_call_arguments.delta", **at, delta=change.text)
        done = self.event("response.function_call_arguments.done", **at, name=block.name, arguments=block.text)
        return done + self._done(block)

    def _done(self, block: ContentBlock) -> bytes:
        return self.event("response.output_item.done", output_index=block.index, item=_item(self._context, block))
