"""Items of the Responses API: as clients send them, as they are kept, and as messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill.serve.api.chat_messages import MOST_MESSAGES, Messages, normal_messages, text_of
from tokenmill.serve.storage.stored_responses import StoredResponse, StoredResponses

Item = dict[str, Any]
_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


def referenced(given: str | list[Item], stored: StoredResponses, tenant: str) -> dict[str, StoredResponse]:
    """By their ids, the stored responses that items of an input refer to."""
    found: dict[str, StoredResponse] = {}
    for item in given[:MOST_MESSAGES] if not isinstance(given, str) else ():  # more are refused below
        response = _response_of(item) if item.get("type") == "item_reference" else None
        if response is not None and response not in found and (kept := stored.get(tenant, response)) is not None:
            found[response] = kept
    return found


def resolved(given: str | list[Item], found: Mapping[str, StoredResponse], most: int) -> list[Item]:
    """An input as items; those of stored responses stand in the place of references to them, `most` bytes in all.
    Raises InvalidRequest."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if len(given) > MOST_MESSAGES:
        raise InvalidRequest(f"input has {len(given)} items; at most {MOST_MESSAGES} are allowed")
    known: dict[str, dict[str, Item]] = {}  # the items of each response, read once however often they are named
    sizes: dict[str, int] = {}
    items, size = [], 0
    for number, item in enumerate(given):
        if item.get("type") == "item_reference":
            item = _referenced(f"input[{number}]", item, found, known)
            if (id := item["id"]) not in sizes:
                sizes[id] = len(msgspec.json.encode(item))
            if (size := size + sizes[id]) > most:
                raise InvalidRequest(f"input refers to more than {most} bytes of stored items; refer to fewer")
        items.append(item)
    return items


def checked_items(given: Sequence[Item], response: str) -> list[Item]:
    """The items with ids, and contents in one form. Raises InvalidRequest."""
    name = response.removeprefix("resp_")
    return [_checked(f"input[{number}]", item, f"{name}_i{number}") for number, item in enumerate(given)]


def _checked(where: str, item: Mapping[str, Any], name: str) -> Item:
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _PREFIX:
        raise InvalidRequest(
            f"{where} is of type {kind!r:.60}; it may be message, function_call, function_call_output or item_reference"
        )
    id = item.get("id")
    kept = {**item, "type": kind, "id": id if isinstance(id, str) and id else f"{_PREFIX[kind]}_{name}"}
    if kind == "message":
        said = "output_text" if item.get("role") == "assistant" else "input_text"
        part: Item = {"type": said, "text": text_of(where, item.get("content"))}
        if said == "output_text":
            part["annotations"] = []
        kept["content"] = [part]
    elif kind == "function_call_output" and not isinstance(item.get("output"), str):
        kept["output"] = text_of(where, item.get("output"))
    kept["status"] = "completed"
    return kept


def _response_of(reference: Mapping[str, Any]) -> str | None:
    """Ids of items name the response that they belong to."""
    id = reference.get("id")
    of = id.split("_", 3) if isinstance(id, str) else []
    return f"resp_{of[1]}" if len(of) == 3 else None


def _referenced(
    where: str, item: Mapping[str, Any], found: Mapping[str, StoredResponse], known: dict[str, dict[str, Item]]
) -> Item:
    response, id = _response_of(item), item.get("id")
    if response is not None and response in found:
        if response not in known:
            kept = found[response]
            known[response] = {each["id"]: each for part in (kept.made, kept.given) for each in items_of(part)}
        if id in known[response]:
            return known[response][id]
    raise InvalidRequest(f"{where} refers to {id!r:.100}, which is no item of a stored response; send the item itself")


def items_of(kept: bytes) -> list[Item]:
    items: list[Item] = msgspec.json.decode(kept)
    return items


def history(chain: Sequence[StoredResponse]) -> list[Item]:
    """What was said in these responses, input and output."""
    return [item for stored in chain for part in (stored.given, stored.made) for item in items_of(part)]


def messages_of(instructions: str | None, items: Sequence[Item]) -> Messages:
    """Raises InvalidRequest."""
    messages: Messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        _add(messages, item)
    return normal_messages(messages)


def _add(messages: Messages, item: Item) -> None:
    if item["type"] == "message":
        messages.append({"role": item.get("role"), "content": item["content"]})
    elif item["type"] == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    else:
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]})
