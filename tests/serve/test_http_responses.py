"""Stored responses: OpenAI's client asks for them again, goes on from them, and nobody else finds them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_server import Server

from tokenmill.serve.http.api_keys import add_key

MODEL = "tiny-chat"
TOOL = {"type": "function", "name": "grind", "parameters": None, "strict": None}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": 24, "temperature": 0} | more


def text_of(response: Any) -> str:
    return str(response.output_text)


def test_a_response_can_be_asked_for_again_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**asked(input="Tell me about mills.", metadata={"who": "me"}))
    assert made.store is True
    assert client.responses.retrieve(made.id) == made
    with pytest.raises(openai.BadRequestError, match="told as a whole"):
        client.responses.retrieve(made.id, stream=True)
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            ask(made.id)


def test_what_is_not_stored_cannot_be_asked_for(client: openai.OpenAI) -> None:
    made = client.responses.create(**asked(input="x", store=False))
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="there is none") as refusal:
        client.responses.create(**asked(input="x", previous_response_id=made.id))
    assert refusal.value.code == "previous_response_not_found"
    assert refusal.value.param == "previous_response_id"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on_as_if_all_of_it_was_sent(client: openai.OpenAI, streamed: bool) -> None:
    words = f"Tell me about mills and about rivers. {'Be brief. ' * 8}{streamed}"
    if streamed:
        events = list(client.responses.create(**asked(input=words, stream=True)))
        first = events[-1].response
        assert events[0].response.store is True
    else:
        first = client.responses.create(**asked(input=words))
    second = client.responses.create(**asked(input="And of wind?", previous_response_id=first.id))
    assert second.previous_response_id == first.id
    # The prompt of the first turn is found in the cache, all but what does not fill a block.
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 17
    third = client.responses.create(
        **asked(
            input=[{"role": "user", "content": "Thanks."}], previous_response_id=second.id, instructions="Be polite."
        )
    )
    said = [
        {"role": "user", "content": words},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And of wind?"},
        {"role": "assistant", "content": text_of(second)},
        {"role": "user", "content": "Thanks."},
    ]
    whole = client.responses.create(**asked(input=said, instructions="Be polite.", store=False))
    assert text_of(whole) == text_of(third) and whole.usage.input_tokens == third.usage.input_tokens
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))  # the client turns the pages
    assert [item.content[0].text for item in items] == [one["content"] for one in said]
    assert [item.role for item in items] == [one["role"] for one in said]
    newest = client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].content[0].text == "Thanks." and newest.has_more
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="which it goes on from, is gone"):
        client.responses.create(**asked(input="x", previous_response_id=third.id))


def test_calls_and_their_results_are_part_of_the_conversation(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "grind"}
    first = client.responses.create(**asked(input="Grind.", tools=[TOOL], tool_choice=choice))
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = client.responses.create(**asked(input=[result], previous_response_id=first.id, tools=[TOOL]))
    whole = client.responses.create(
        **asked(
            input=[
                {"role": "user", "content": "Grind."},
                {"type": "function_call", "call_id": call.call_id, "name": "grind", "arguments": call.arguments},
                result,
            ],
            tools=[TOOL],
        )
    )
    assert whole.usage.input_tokens == second.usage.input_tokens and text_of(whole) == text_of(second)
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]
    referred = [{"type": "item_reference", "id": call.id}, result]
    again = client.responses.create(**asked(input=[{"role": "user", "content": "Grind."}, *referred], tools=[TOOL]))
    assert again.usage.input_tokens == whole.usage.input_tokens and text_of(again) == text_of(whole)
    with pytest.raises(openai.BadRequestError, match="no item of a stored response"):
        client.responses.create(**asked(input=[{"type": "item_reference", "id": "msg_1_0"}]))


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "nobody"}])
def test_wrong_pages_are_refused(client: openai.OpenAI, server: Server, query: dict[str, Any]) -> None:
    made = client.responses.create(**asked(input="x"))
    answer = httpx.get(f"{server.url}/v1/responses/{made.id}/input_items", params=query)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(query))


def settled(client: openai.OpenAI, id: str) -> Any:
    for _ in range(600):
        found = client.responses.retrieve(id)
        if found.status != "in_progress":
            return found
        time.sleep(0.02)
    raise AssertionError("it does not end")


def test_a_response_can_be_made_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(**asked(input="Tell me.", background=True))
    assert begun.status == "in_progress" and begun.background and begun.output == []
    ended = settled(client, begun.id)
    plain = client.responses.create(**asked(input="Tell me."))
    assert ended.status == plain.status and text_of(ended) == text_of(plain)
    assert client.responses.create(**asked(input="More.", previous_response_id=ended.id)).status == plain.status
    assert client.responses.cancel(ended.id) == ended  # too late
    with pytest.raises(openai.BadRequestError, match="not asked for with background"):
        client.responses.cancel(plain.id)
    for wrong in ({"store": False}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="background is true"):
            client.responses.create(**asked(input="x", background=True, **wrong))


def test_a_response_in_the_background_can_be_cancelled_and_deleted(client: openai.OpenAI, server: Server) -> None:
    long: dict[str, Any] = {"input": "x", "max_output_tokens": 1900, "background": True}
    first, second = (client.responses.create(**asked(**long)) for _ in range(2))
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        client.responses.create(**asked(input="x", previous_response_id=first.id))
    cancelled = client.responses.cancel(first.id)
    assert cancelled.status == "cancelled" and client.responses.retrieve(first.id) == cancelled
    client.responses.delete(second.id)
    for _ in range(200):
        if httpx.get(f"{server.url}/health/ready").json()["active"] == 0:
            break
        time.sleep(0.02)
    else:
        raise AssertionError("it still runs")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def engines_of(server: Server) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=False)
    return [int(one) for one in found.stdout.split()]


def test_tenants_are_apart_and_responses_outlive_the_engine(chat_model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secrets = [add_key(keys, tenant, {}) for tenant in ("alice", "bob")]
    server = Server.start(chat_model, "--keys", str(keys))
    try:
        alice, bob = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=9) for key in secrets)
        made = alice.responses.create(**asked(input="Tell me about mills."))
        for ask in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError, match="there is none"):
            bob.responses.create(**asked(input="x", previous_response_id=made.id))
        with pytest.raises(openai.BadRequestError, match="no item of a stored response"):
            bob.responses.create(**asked(input=[{"type": "item_reference", "id": made.output[0].id}]))
        before = alice.responses.create(**asked(input="More.", previous_response_id=made.id))
        for engine in engines_of(server):
            os.kill(engine, signal.SIGKILL)
        after = alice.responses.create(**asked(input="More.", previous_response_id=made.id))
        assert text_of(after) == text_of(before) and alice.responses.retrieve(made.id) == made
    finally:
        server.stop()


def test_storing_can_be_turned_off(chat_model: str) -> None:
    server = Server.start(chat_model, "--max-responses-mb", "0")
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        made = client.responses.create(**asked(input="x"))
        assert made.store is False
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            client.responses.create(**asked(input="x", previous_response_id=made.id))
        with pytest.raises(openai.BadRequestError, match="background is true"):
            client.responses.create(**asked(input="x", background=True))
    finally:
        assert server.stop() == 0
