"""POST /v1/responses: OpenAI's newer API, for text and function calls. Nothing is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.outputs import RequestOutput
from tokenmill.serve.answers import Cutter, encoded, token_logprobs, usage_of
from tokenmill.serve.blocks import Block, Blocks, Change
from tokenmill.serve.call import Call
from tokenmill.serve.chat_messages import Messages, normal_messages, text_of
from tokenmill.serve.errors import HttpError
from tokenmill.serve.sampling_of import format_form, make_params, one_form
from tokenmill.serve.schemas import ResponsesRequest
from tokenmill.serve.sse import EventStream, event
from tokenmill.serve.stream import Stream
from tokenmill.serve.toolbox import Toolbox

_WITH_LOGPROBS = "message.output_text.logprobs"
MOST_TOP_LOGPROBS = 20


async def respond(call: Call, body: ResponsesRequest) -> Response:
    _refuse_memory(body)
    toolbox = Toolbox(call, body.tools, body.tool_choice, body.parallel_tool_calls)
    params = make_params(
        body.max_output_tokens,
        body.top_k,
        temperature=body.temperature,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        logprobs=_logprobs(body),
        structured=one_form(format_form(body.text.format if body.text else None), toolbox.form),
    )
    stream = await call.submit(await toolbox.prompt(_messages(body)), params, body)
    if body.stream:
        return EventStream(call, _Teller(call, body, stream, toolbox), last=b"", named=True)
    [output] = await call.whole([stream])
    one = output.outputs[0]

    def items() -> list[msgspec.Raw]:
        blocks = Blocks(toolbox.parser())
        for _ in blocks.feed(one.text, last=True, logprobs=_told_logprobs(call, body, one.token_ids, one.logprobs)):
            pass
        return [encoded(_item(call, block)) for block in blocks.all]

    # With log-probabilities these can be very many entries, for which others should not wait.
    told = items() if one.logprobs is None else await asyncio.to_thread(items)
    return call.answer(_response(call, body, told, output))


def _refuse_memory(body: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise HttpError(
                400, f"{name} is set, but this server stores no responses; send the whole input", "unsupported", name
            )
    if body.background:
        raise HttpError(400, "background is true, but answers are not stored here; leave it out", "unsupported")
    if body.truncation not in (None, "disabled"):
        raise HttpError(
            400, f"truncation is {body.truncation[:60]!r}; inputs are never cut here, so it may be 'disabled' only",
            "unsupported", "truncation",
        )  # fmt: skip
    for wanted in body.include or []:
        if wanted != _WITH_LOGPROBS:
            raise HttpError(400, f"include has {wanted[:60]!r}; it may have {_WITH_LOGPROBS!r} only", "unsupported")


def _logprobs(body: ResponsesRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MOST_TOP_LOGPROBS:
        raise HttpError(
            400, f"top_logprobs is {top}; it must be from 0 to {MOST_TOP_LOGPROBS}", "invalid_value", "top_logprobs"
        )
    return (top or 0) if top or _WITH_LOGPROBS in (body.include or []) else None


def _messages(body: ResponsesRequest) -> Messages:
    messages: Messages = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        _add_item(messages, f"input[{number}]", item)
    return normal_messages(messages)


def _add_item(messages: Messages, where: str, item: Mapping[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": text_of(where, item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else text_of(where, output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    else:
        raise InvalidRequest(
            f"{where} is of type {kind!r:.60}; there may be message, function_call and function_call_output"
        )


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
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": call.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": None,
        "store": False,
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

    def __init__(self, call: Call, body: ResponsesRequest, stream: Stream, toolbox: Toolbox) -> None:
        self.streams = [stream]
        self._call = call
        self._body = body
        self._blocks, self._cutter = Blocks(toolbox.parser()), Cutter(1)
        self._last: RequestOutput | None = None
        self._count = 0

    def begin(self) -> bytes:
        begun = _response(self._call, self._body, [], None)
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
        ended = _response(self._call, self._body, items, self._last)
        return self.tell(f"response.{ended['status']}", response=ended)

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
