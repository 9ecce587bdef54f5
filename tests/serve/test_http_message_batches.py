"""Anthropic's own client makes batches of messages, follows them and reads their results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from http_server import Server

from tokenmill.serve.http.api_keys import add_key

MODEL = "tiny-chat"


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return client_of(server)


def client_of(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def params(number: int, tokens: int = 8) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"mill {number}"}]
    return {"model": MODEL, "max_tokens": tokens, "messages": messages, "temperature": 0}


def requests(count: int, tokens: int = 8) -> list[dict[str, Any]]:
    return [{"custom_id": f"item-{number}", "params": params(number, tokens)} for number in range(count)]


def ended(client: anthropic.Anthropic, id: str) -> Any:
    for _ in range(1200):
        batch = client.messages.batches.retrieve(id)
        if batch.processing_status == "ended":
            return batch
        assert batch.results_url is None and batch.request_counts.succeeded == 0
        time.sleep(0.05)
    raise AssertionError("it does not end")


def test_a_batch_gives_what_its_messages_give(client: anthropic.Anthropic) -> None:
    wrong = {"custom_id": "wrong", "params": params(0) | {"top_p": 9}}
    made = client.messages.batches.create(requests=[*requests(12), wrong])
    assert made.type == "message_batch" and made.request_counts.processing == 13
    assert (made.expires_at - made.created_at).total_seconds() == pytest.approx(86400)
    with pytest.raises(anthropic.AnthropicError, match="results_url"):
        client.messages.batches.results(client.messages.batches.create(requests=requests(40, 500)).id)
    batch = ended(client, made.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.canceled, counts.processing) == (12, 1, 0, 0)
    assert batch.ended_at >= batch.created_at and batch.cancel_initiated_at is None
    results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert results.keys() == {*(f"item-{number}" for number in range(12)), "wrong"}
    alone = client.messages.create(
        model=MODEL, max_tokens=8, messages=params(7)["messages"], extra_body={"temperature": 0}
    )
    assert results["item-7"].type == "succeeded" and results["item-7"].message.content == alone.content
    assert results["wrong"].type == "errored" and "top_p" in results["wrong"].error.error.message
    assert results["wrong"].error.error.type == "invalid_request_error"
    for one in client.messages.batches.list():
        if one.processing_status == "in_progress":
            client.messages.batches.cancel(one.id)


def test_batches_are_listed_in_pages_newest_first_and_deleted(client: anthropic.Anthropic) -> None:
    made = [client.messages.batches.create(requests=requests(1)).id for _ in range(5)]
    for id in made:
        ended(client, id)
    listed = [batch.id for batch in client.messages.batches.list(limit=2)]  # the client turns the pages
    assert listed[:5] == made[::-1]
    before = client.messages.batches.list(before_id=made[1], limit=2)
    assert [batch.id for batch in before.data] == [made[3], made[2]] and before.has_more
    assert client.messages.batches.delete(made[0]).type == "message_batch_deleted"
    for ask in (client.messages.batches.retrieve, client.messages.batches.cancel, client.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError, match="there is no message batch"):
            ask(made[0])
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.messages.batches.list(limit=1001)


def test_a_batch_can_be_cancelled(client: anthropic.Anthropic, server: Server) -> None:
    made = client.messages.batches.create(requests=requests(300, 200))
    with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
        client.messages.batches.delete(made.id)
    early = httpx.get(f"{server.url}/v1/messages/batches/{made.id}/results")
    assert early.status_code == 400 and early.json()["error"]["type"] == "invalid_request_error"
    batch = client.messages.batches.cancel(made.id)
    assert batch.processing_status == "ended" and batch.cancel_initiated_at is not None
    counts = batch.request_counts
    assert counts.canceled > 0 and counts.canceled + counts.succeeded == 300
    kinds = [one.result.type for one in client.messages.batches.results(batch.id)]
    assert kinds.count("canceled") == counts.canceled and len(kinds) == 300
    assert client.messages.batches.cancel(made.id) == batch


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "there may be 1 to"),
        ([{"custom_id": "a b", "params": {}}], "custom_id"),
        ([{"custom_id": "a", "params": {}}] * 2, "custom_id"),
        ([{"custom_id": "a" * 65, "params": {}}], "custom_id"),
        ([{"custom_id": "a", "params": {"stream": True}}], "stream"),
        ([{"custom_id": "a"}], "params"),
        ([{"custom_id": "a", "params": 3}], "params"),
        ([{"custom_id": "a", "params": {}, "more": 1}], "more"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_wrong_batches_are_refused(client: anthropic.Anthropic, wrong: list[Any], said: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said):
        client.messages.batches.create(requests=wrong)


def test_openai_batches_and_these_do_not_mix(client: anthropic.Anthropic, server: Server) -> None:
    made = client.messages.batches.create(requests=requests(1))
    assert httpx.get(f"{server.url}/v1/batches/{made.id}").status_code == 404
    assert made.id not in httpx.get(f"{server.url}/v1/batches").text
    assert made.id not in httpx.get(f"{server.url}/v1/files").text
    ended(client, made.id)


def test_a_batch_survives_its_server_and_is_its_tenants_own(chat_model: str, tmp_path: Path) -> None:
    keys, journal = tmp_path / "keys.json", str(tmp_path / "journal")
    secrets = [add_key(keys, tenant, {}) for tenant in ("alice", "bob")]
    first = Server.start(chat_model, "--journal", journal, "--keys", str(keys))
    made = client_of(first, secrets[0]).messages.batches.create(requests=requests(30, 60))
    first.process.kill()
    first.process.wait()
    second = Server.start(chat_model, "--journal", journal, "--keys", str(keys))
    try:
        alice, bob = (client_of(second, key) for key in secrets)
        batch = ended(alice, made.id)
        assert batch.request_counts.succeeded == 30
        names = sorted(one.custom_id for one in alice.messages.batches.results(made.id))
        assert names == sorted(f"item-{number}" for number in range(30))
        for ask in (bob.messages.batches.retrieve, bob.messages.batches.results, bob.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                ask(made.id)
        assert list(bob.messages.batches.list()) == []
    finally:
        assert second.stop() == 0
