"""POST /v1/responses: OpenAI's newer API, for text and function calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.outputs import RequestOutput
from tokenmill.serve.api.chat_messages import Messages
from tokenmill.serve.api.content_blocks import Block, Blocks, Change
from tokenmill.serve.api.output_format import Cutter, encoded, token_logprobs, usage_of
from tokenmill.serve.api.request_tools import Toolbox
from tokenmill.serve.api.response_items import checked_items, history, messages_of, referenced, resolved
from tokenmill.serve.api.sampling_params import format_form, make_params, one_form
from tokenmill.serve.api.schemas import ResponsesRequest
from tokenmill.serve.engine_client.stream import Stream
from tokenmill.serve.errors import GONE, HttpError
from tokenmill.serve.http.call import Call, Lasting, told_error
from tokenmill.serve.http.sse import EventStream, event
from tokenmill.serve.storage.stored_responses import Stored

_WITH_LOGPROBS = "message.output_text.logprobs"
MOST_TOP_LOGPROBS = 20


async def respond(call: Call, body: ResponsesRequest) -> Response:
    _refuse_unsupported(call, body)
    toolbox = Toolbox(call, body.tools, body.tool_choice, body.parallel_tool_calls)
    params = make_params(
        body.max_output_tokens,
        body.top_k,
        temperature=body.temperature,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        logprobs=_logprobs(body),
        structured=one_form(format_form(body.text.format if body.text else None), toolbox.form) or toolbox.restriction,
    )
    draft = _Draft(call, body, toolbox)
    stream = await call.submit(await draft.prompt(), params, body)
    if body.background:
        return draft.go_on_alone(stream)
    if body.stream:
        return EventStream(call, _Teller(call, body, stream, draft), last=b"", named=True)
    [output] = await call.whole([stream])
    return call.answer(await draft.finished(output))


def _refuse_unsupported(call: Call, body: ResponsesRequest) -> None:
    kept = call.site.responses
    if body.conversation is not None:
        raise HttpError(
            400, "conversation is set, but there are none here; use previous_response_id", "unsupported", "conversation"
        )
    if body.previous_response_id is not None and not kept.on:
        raise HttpError(
            400, "previous_response_id is set, but this server stores no responses; send the whole input",
            "unsupported", "previous_response_id",
        )  # fmt: skip
    if body.background:
        if body.store is False or not kept.on:
            raise HttpError(
                400, "background is true, but the response is not stored; let it be", "unsupported", "background"
            )
        if body.stream or call.request.scope.get("tokenmill.batch"):
            raise HttpError(
                400, "background is true, which neither goes with stream nor in a batch; ask for the response later",
                "unsupported", "background",
            )  # fmt: skip
    if body.truncation not in (None, "disabled"):
        raise HttpError(
            400, f"truncation is {body.truncation[:60]!r}; inputs are never cut here, so it may be 'disabled' only",
            "unsupported", "truncation",
        )  # fmt: skip
    for wanted in body.include or []:
        if wanted != _WITH_LOGPROBS:
            raise HttpError(
                400, f"include has {wanted[:60]!r}; it may have {_WITH_LOGPROBS!r} only", "unsupported", "include"
            )
    if body.text is not None and body.text.verbosity is not None:
        call.ignored.append("text.verbosity")


class _Draft:
    """A response in the making: what it is asked, and how it is told and stored when it is there."""

    def __init__(self, call: Call, body: ResponsesRequest, toolbox: Toolbox) -> None:
        self._call = call
        self._body = body
        self._toolbox = toolbox
        self._kept = call.site.responses
        self._begun = False  # it is stored already
        self.id = f"resp_{call.id}"
        self._stored: Stored | None = None  # None: it is not

    async def prompt(self) -> list[int]:
        """The token ids of the conversation. Raises HttpError and InvalidRequest."""
        body, tenant = self._body, self._call.tenant.name
        chain = self._kept.chain(tenant, body.previous_response_id)
        for stored in chain:
            if stored.status not in ("completed", "incomplete"):
                raise HttpError(
                    400, f"previous_response_id leads to {stored.id!r}, which is {stored.status}; choose another",
                    "invalid_value", "previous_response_id",
                )  # fmt: skip
        most = self._call.site.settings.max_body_bytes
        if (size := sum(len(one.given) + len(one.made) for one in chain)) > most:
            raise HttpError(
                400, f"previous_response_id leads to {size} bytes of conversation; at most {most} are read",
                "invalid_value", "previous_response_id",
            )  # fmt: skip
        found = referenced(body.input, self._kept, tenant)

        def read() -> tuple[Messages, bytes]:
            items = checked_items(resolved(body.input, found, most), self.id)
            return messages_of(body.instructions, [*history(chain), *items]), msgspec.json.encode(items)

        messages, kept = await (asyncio.to_thread(read) if chain or found else self._call.aside(read))
        if self._kept.on and body.store is not False:
            self._stored = Stored(self.id, body.previous_response_id, kept)
        return await self._toolbox.prompt(messages)

    def blocks(self) -> Blocks:
        return Blocks(self._toolbox.parser())

    def told(self, items: Sequence[Any], output: RequestOutput | None) -> dict[str, Any]:
        told = _response(self._call, self._body, items, output)
        return told | {"store": self._stored is not None}

    async def finished(self, output: RequestOutput) -> msgspec.Raw:
        """The whole response, kept where it is to be."""
        one = output.outputs[0]

        def made() -> tuple[list[Block], list[msgspec.Raw]]:
            blocks, logprobs = self.blocks(), _told_logprobs(self._call, self._body, one.token_ids, one.logprobs)
            for _ in blocks.feed(one.text, last=True, logprobs=logprobs):
                pass
            return blocks.all, [encoded(_item(self._call, block)) for block in blocks.all]

        # With log-probabilities these can be very many entries, for which others should not wait.
        blocks, items = made() if one.logprobs is None else await asyncio.to_thread(made)
        return self.keep(blocks, self.told(items, output))

    def keep(self, blocks: Sequence[Block], told: dict[str, Any]) -> msgspec.Raw:
        response, stored, tenant = encoded(told), self._stored, self._call.tenant.name
        if self._begun and self._kept.get(tenant, self.id) is None:
            stored = None  # it was deleted, or had to give way
        if stored is not None:
            plain = [_item(self._call, Block(one.index, one.text, one.name, one.id)) for one in blocks]
            stored.made, stored.response, stored.status = msgspec.json.encode(plain), bytes(response), told["status"]
            self._kept.keep(tenant, stored)
        return response

    def go_on_alone(self, stream: Stream) -> Response:
        """Answer at once, and make the response when nobody waits for it."""
        assert self._stored is not None
        self._stored.in_background, self._stored.cancel = True, self._call.cancel
        begun = self.keep([], self.told([], None))
        self._begun = True
        self._kept.make(self._stored, self._finish(stream))
        return Lasting(bytes(begun), 200, self._call.headers(), "application/json")

    async def _finish(self, stream: Stream) -> None:
        status, call, stored = GONE, self._call, self._stored
        assert stored is not None
        try:
            await self.finished(call.saw(await stream.last()))
            status = 200
        except Exception as problem:
            error = call.problem = told_error(problem, call.id)
            status = error.status
            ended = {"status": "cancelled"} if error.code == "cancelled" else {
                "status": "failed", "error": {"code": "server_error", "message": error.message},
            }  # fmt: skip
            self.keep([], self.told([], None) | ended)
        finally:
            stored.cancel = stored.task = None  # what is kept for hours must not hold the call with all that it asked
            call.close(status)


def _logprobs(body: ResponsesRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MOST_TOP_LOGPROBS:
        raise HttpError(
            400, f"top_logprobs is {top}; it must be from 0 to {MOST_TOP_LOGPROBS}", "invalid_value", "top_logprobs"
        )
    return (top or 0) if top or _WITH_LOGPROBS in (body.include or []) else None


def _told_logprobs(call: Call, body: ResponsesRequest, tokens: list[int], tables: Any) -> list[msgspec.Raw]:
    return [] if tables is None else token_logprobs(tokens, tables, body.top_logprobs or 0, call.service.tokenizer)


def _response(call: Call, body: ResponsesRequest, items: Sequence[Any], output: RequestOutput | None) -> dict[str, Any]:
    cut = output is not None and output.outputs[0].finish_reason == "length"
    status = "in_progress" if output is None else "incomplete" if cut else "completed"
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": call.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": None,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _told_format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None if output is None else _usage(output),
        "user": None,
    }


def _told_format(body: ResponsesRequest) -> Any:
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


def _item(call: Call, block: Block, status: str = "completed") -> dict[str, Any]:
    """A block as an output item."""
    if block.name is None:
        content = [_part(block)] if status == "completed" else []
        id = f"msg_{call.id}_{block.index}"
        return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}
    return {
        "id": f"fc_{call.id}_{block.index}",
        "type": "function_call",
        "status": status,
        "call_id": block.id,
        "name": block.name,
        "arguments": block.text,
    }


def _part(block: Block) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


class _Teller:
    """The events of a response, numbered."""

    def __init__(self, call: Call, body: ResponsesRequest, stream: Stream, draft: _Draft) -> None:
        self.streams = [stream]
        self._call = call
        self._body = body
        self._draft = draft
        self._blocks, self._cutter = draft.blocks(), Cutter(1)
        self._last: RequestOutput | None = None
        self._count = 0

    def begin(self) -> bytes:
        begun = self._draft.told([], None)
        return self.tell("response.created", response=begun) + self.tell("response.in_progress", response=begun)

    def news(self, number: int) -> bytes:
        follow = self.streams[number].follow
        if follow.finished:
            self._last = self._call.saw(follow.output())
        return b"".join(
            self.change(change)
            for delta in self._cutter.take(follow)
            for change in self._blocks.feed(
                delta.text,
                delta.finish is not None,
                _told_logprobs(self._call, self._body, delta.token_ids, delta.logprobs),
            )
        )

    def end(self) -> bytes:
        items = [_item(self._call, block) for block in self._blocks.all]
        ended = self._draft.told(items, self._last)
        return self.tell(f"response.{ended['status']}", response=self._draft.keep(self._blocks.all, ended))

    def tell(self, kind: str, **content: Any) -> bytes:
        self._count += 1
        return event({"type": kind, "sequence_number": self._count - 1, **content}, kind)

    def change(self, change: Change) -> bytes:
        block = change.block
        at: dict[str, Any] = {"output_index": block.index, "item_id": _item(self._call, block)["id"]}
        return self._text(change, at) if block.name is None else self._call_of(change, at)

    def _text(self, change: Change, at: dict[str, Any]) -> bytes:
        block, inside = change.block, {**at, "content_index": 0}
        if change.what == "open":
            item = _item(self._call, block, "in_progress")
            return self.tell("response.output_item.added", output_index=block.index, item=item) + self.tell(
                "response.content_part.added", **inside, part=_part(Block(block.index))
            )
        if change.what == "grow":
            return self.tell("response.output_text.delta", **inside, delta=change.text, logprobs=change.logprobs)
        return (
            self.tell("response.output_text.done", **inside, text=block.text, logprobs=block.logprobs)
            + self.tell("response.content_part.done", **inside, part=_part(block))
            + self._done(block)
        )

    def _call_of(self, change: Change, at: dict[str, Any]) -> bytes:
        block = change.block
        if change.what == "open":
            item = _item(self._call, Block(block.index, name=block.name, id=block.id), "in_progress")
            return self.tell("response.output_item.added", output_index=block.index, item=item)
        if change.what == "grow":
            return self.tell("response.function_call_arguments.delta", **at, delta=change.text)
        done = self.tell("response.function_call_arguments.done", **at, name=block.name, arguments=block.text)
        return done + self._done(block)

    def _done(self, block: Block) -> bytes:
        return self.tell("response.output_item.done", output_index=block.index, item=_item(self._call, block))
