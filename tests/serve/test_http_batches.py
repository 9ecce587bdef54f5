"""Batches are answered in the background as their requests would be alone, and survive the server."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from http_server import Server

from tokenmill.serve.http.batch_runner import BatchRunner
from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import Journal


def lines(count: int, tokens: int = 8) -> bytes:
    bodies = [{"prompt": f"mill {n}", "max_tokens": tokens, "temperature": 0, "ignore_eos": True} for n in range(count)]
    asked = [
        {"custom_id": f"item-{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, asked)).encode()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def submitted(client: openai.OpenAI, content: bytes) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def ended(client: openai.OpenAI, id: str) -> Any:
    for _ in range(1200):
        batch = client.batches.retrieve(id)
        if batch.status != "in_progress":
            return batch
        time.sleep(0.05)
    raise AssertionError("it does not end")


def test_a_batch_gives_what_its_requests_give(server: Server) -> None:
    client = client_of(server)
    wrong = {"custom_id": "wrong", "url": "/v1/completions", "body": {"prompt": "x", "top_p": 9}}
    content = lines(20) + b"\n\n" + json.dumps(wrong).encode() + b"\n"
    batch = ended(client, submitted(client, content).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (21, 20, 1)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).read().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"item-{n}" for n in range(20)]
    alone = client.completions.create(
        model="tiny-chat", prompt="mill 7", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answers[7]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    [error] = [json.loads(line) for line in client.files.content(batch.error_file_id).read().splitlines()]
    assert error["response"]["status_code"] == 400 and "top_p" in error["response"]["body"]["error"]["message"]
    assert batch.id in [one.id for one in client.batches.list()]
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)


def test_a_batch_gives_vectors(server: Server) -> None:
    client = client_of(server)
    asked = [{"custom_id": text, "url": "/v1/embeddings", "body": {"input": text}} for text in ("a mill", "a river")]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, asked)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    batch = ended(client, batch.id)
    assert batch.request_counts.completed == 2
    for line in client.files.content(batch.output_file_id).read().splitlines():
        answer = json.loads(line)
        alone = client.embeddings.create(model="tiny-chat", input=answer["custom_id"], encoding_format="float")
        found = answer["response"]["body"]["data"][0]["embedding"]
        assert found == pytest.approx(alone.data[0].embedding, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b'{"custom_id": 3, "body": {}}', lines(1) + b"\n" + lines(1), b'{"body": {"stream": 1}}'],
)
def test_a_wrong_file_is_refused(server: Server, content: bytes) -> None:
    with pytest.raises(openai.BadRequestError):
        submitted(client_of(server), content)
    plain = httpx.post(f"{server.url}/v1/files", content=content)
    assert plain.status_code == 400


def test_a_batch_survives_the_death_of_its_server(chat_model: str, tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    first = Server.start(chat_model, "--journal", journal)
    client = client_of(first)
    batch = submitted(client, lines(60, tokens=60))
    for _ in range(2000):
        if client.batches.retrieve(batch.id).request_counts.completed > 5:
            break
        time.sleep(0.005)
    first.process.kill()
    first.process.wait()
    with Path(journal).open("ab") as file:  # what a crash of the machine may add: a torn record, zeros
        file.write(struct.pack("<II", 1000, 77) + b"torn" + bytes(100))
    second = Server.start(chat_model, "--journal", journal)
    assert "was damaged" in "".join(second.lines) and Path(journal + ".torn-1").exists()
    try:
        client = client_of(second)
        again = ended(client, batch.id)
        assert again.status == "completed" and again.request_counts.completed == 60
        answers = [json.loads(line) for line in client.files.content(again.output_file_id).read().splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"item-{n}" for n in range(60)]
    finally:
        assert second.stop() == 0


def test_a_batch_can_be_cancelled(server: Server) -> None:
    client = client_of(server)
    batch = submitted(client, lines(500, tokens=200))
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelled" and cancelled.request_counts.completed < 500
    for _ in range(200):
        if httpx.get(f"{server.url}/health/ready").json()["active"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError("its requests still run")


def test_a_file_whose_upload_a_crash_cut_short_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    noted = msgspec.json.encode({"kind": "file", "filename": "a.jsonl", "purpose": "batch"})
    with Journal(path) as journal:
        JobStore(journal).create("file-1", [b"{}"], noted)

    async def main() -> None:
        async def ask(*_: object) -> tuple[int, float | None, bytes]:
            raise AssertionError("there is nothing to ask")

        with Journal(path) as journal:
            batches = BatchRunner(JobStore(journal), ask)
            batches.start()
            assert not batches.store.jobs and not batches._tasks

    asyncio.run(main())


def test_a_batch_that_cannot_go_on_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def ask(*_: object) -> tuple[int, float | None, bytes]:
            raise KeyError("/v1/of/another/version")

        batches = BatchRunner(JobStore(), ask)
        noted = msgspec.json.encode({"kind": "batch", "endpoint": "/v1/of/another/version"})
        batches.begin(batches.store.create("b", [b'{"custom_id": "1", "body": {}}'], noted))
        while batches._tasks:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert "batch b stops" in caplog.text and "/v1/of/another/version" in caplog.text
