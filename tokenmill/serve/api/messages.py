"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.outputs import RequestOutput
from tokenmill.request_state import RequestState
from tokenmill.serve.api.chat_messages import Messages, normal_messages, text_of
from tokenmill.serve.api.content_blocks import BlockChange, ContentBlock, ContentBlocks
from tokenmill.serve.api.output_format import DeltaTracker
from tokenmill.serve.api.request_tools import RequestTools
from tokenmill.serve.api.sampling_params import make_params, single_structured, structured_from_format
from tokenmill.serve.api.schemas import HOTTEST_ANTHROPIC, CountRequest, MessagesRequest
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.errors import unsupported
from tokenmill.serve.http.request_context import RequestContext
from tokenmill.serve.http.sse import SSEEncoder, SSEResponse, event

_PING = event({"type": "ping"}, "ping")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def message(context: RequestContext, body: MessagesRequest) -> Response:
    if body.thinking is not None and body.thinking.get("type") != "disabled":
        raise unsupported("thinking is set, but this model does not think aloud; leave it out")
    if body.output_config is not None and body.output_config.effort is not None:
        context.ignored.append("output_config.effort")
    parallel = not (body.tool_choice or {}).get("disable_parallel_tool_use")
    tools = RequestTools(context, _tools(body.tools), _choice(body.tool_choice), parallel)
    params = make_params(
        body.max_tokens,
        body.top_k,
        hottest=HOTTEST_ANTHROPIC,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop_sequences,
        structured=single_structured(
            structured_from_format(body.output_config.format if body.output_config else None), tools.structured
        )
        or tools.restriction,
    )
    stream = await context.submit(await _prompt(context, tools, body.system, body.messages), params, body)
    if body.stream:
        return SSEResponse(context, _MessageEncoder(context, stream, tools), last=b"", named=True)
    [output] = await context.all_outputs([stream])
    blocks = ContentBlocks(tools.parser())
    for _ in blocks.feed(output.outputs[0].text, last=True):
        pass
    told = _message(context, [_block(block) for block in blocks.all])
    return context.answer(told | _ending(output, blocks) | {"usage": _usage(output)})


async def count(context: RequestContext, body: CountRequest) -> Response:
    ids = await _prompt(context, RequestTools(context, _tools(body.tools)), body.system, body.messages)
    return context.answer({"input_tokens": len(ids)})


async def _prompt(
    context: RequestContext, tools: RequestTools, system: Any, given: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The conversation's token ids. A last message of the assistant is the beginning of the answer."""
    messages = await context.in_thread(_conversation, system, given)
    beginning = ""
    if len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        beginning = messages.pop()["content"]
    ids = await tools.prompt(messages)
    tokenizer = context.service.tokenizer
    if not beginning or tokenizer is None:
        return ids
    most = context.service.facts.max_len
    return ids + await context.service.texts.run(len(beginning), tokenizer.encode, beginning, False, most)


def _conversation(system: Any, given: Sequence[Mapping[str, Any]]) -> Messages:
    messages: Messages = []
    if system:
        messages.append({"role": "system", "content": text_of("system", system)})
    for number, one in enumerate(given):
        messages += _messages(f"messages[{number}]", one)
    return normal_messages(messages)


def _messages(where: str, message: Mapping[str, Any]) -> Messages:
    """One message of Anthropic's as one or several of the usual kind: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: Messages = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "tool_result":
            text = text_of(where, part.get("content"))
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        else:
            texts.append(text_of(where, [part]))
    own: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or calls or not results else results


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for number, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise InvalidRequest(f"tools[{number}] is of type {tool['type']!r:.60}; only your own tools can be offered")
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in tools
    ]


def _choice(choice: dict[str, Any] | None) -> Any:
    kind = None if choice is None else choice.get("type")
    if kind is None:
        return None
    if kind == "tool" and choice is not None:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest(f"tool_choice has the type {kind!r:.60}; it may be auto, any, tool or none")
    return _CHOICES[kind]


def _message(context: RequestContext, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{context.id}",
        "type": "message",
        "role": "assistant",
        "model": context.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _ending(output: RequestOutput, blocks: ContentBlocks) -> dict[str, Any]:
    one = output.outputs[0]
    if isinstance(one.stop_reason, str) and one.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": one.stop_reason}
    reason = "max_tokens" if one.finish_reason == "length" else "tool_use" if blocks.called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """What came from the cache is not counted among the input tokens."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": sum(len(one.token_ids) for one in output.outputs),
    }


def _block(block: ContentBlock) -> dict[str, Any]:
    if block.name is None:
        return {"type": "text", "text": block.text}
    try:
        given = json.loads(block.text or "{}")
    except (ValueError, RecursionError):  # cut off by max_tokens, or nothing but brackets
        given = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given if isinstance(given, dict) else {}}


class _MessageEncoder(SSEEncoder):
    def __init__(self, context: RequestContext, stream: Stream, tools: RequestTools) -> None:
        self.streams = [stream]
        self._context = context
        self._blocks, self._tracker = ContentBlocks(tools.parser()), DeltaTracker(1)
        self._begun = False

    def update(self, number: int, state: RequestState) -> bytes:
        if self.ends(number, state):
            self._context.record_output(state.output())
        told = [
            _change(change)
            for delta in self._tracker.take(state)
            for change in self._blocks.feed(delta.text, delta.finish is not None)
        ]
        if not self._begun:  # not before the first token: then it is known what the cache supplied
            self._begun = True
            start = _message(self._context, []) | {"usage": _usage(state.output())}
            told.insert(0, event({"type": "message_start", "message": start}, "message_start") + _PING)
        return b"".join(told)

    def finish(self) -> bytes:
        output = self.streams[0].request_state.output()
        ending = {"type": "message_delta", "delta": _ending(output, self._blocks), "usage": _usage(output)}
        return event(ending, "message_delta") + event({"type": "message_stop"}, "message_stop")


def _change(change: BlockChange) -> bytes:
    block = change.block
    if change.what == "open":
        content = (
            {"type": "text", "text": ""}
            if block.name is None
            else _block(ContentBlock(0, name=block.name, id=block.id))
        )
        told = {"type": "content_block_start", "index": block.index, "content_block": content}
    elif change.what == "grow":
        if block.name is None:
            delta = {"type": "text_delta", "text": change.text}
        else:
            delta = {"type": "input_json_delta", "partial_json": change.text}
        told = {"type": "content_block_delta", "index": block.index, "delta": delta}
    else:
        told = {"type": "content_block_stop", "index": block.index}
    return event(told, str(told["type"]))
