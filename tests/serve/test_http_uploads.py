"""Files and batches of clients that mean no good: odd forms, odd names, too much, and for ever."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import simulated
from sim_service import eventually, run

from tokenmill.serve.api.batches import _form_fields
from tokenmill.serve.http import batch_runner
from tokenmill.serve.http.api_keys import add_key
from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import Journal

PATH = "/v1/completions"


def body(prompt: list[int], tokens: int = 2, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def form(content: bytes, name: bytes = b'filename="in.jsonl"', boundary: bytes = b"b") -> bytes:
    head = b'content-disposition: form-data; name="file"; ' + name + b"\r\ncontent-type: text/plain\r\n\r\n"
    purpose = b'content-disposition: form-data; name="purpose"\r\n\r\nbatch'
    return b"--%b\r\n%b%b\r\n--%b\r\n%b\r\n--%b--\r\n" % (boundary, head, content, boundary, purpose, boundary)


@pytest.mark.parametrize("content", [b"", b"a\nb\r\nc\r\n", b"\xff\x00--b\r\n", b"x\r\n\r\n--", b"quoted=3Dprintable"])
def test_files_are_kept_to_the_byte(content: bytes) -> None:
    fields = _form_fields('multipart/form-data; charset=utf-8; boundary="b"', form(content))
    assert fields["file"] == (content, "in.jsonl") and fields["purpose"][0] == b"batch"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (b'filename="../../etc/passwd"', "passwd"),
        (b'filename="C:\\\\a\\\\b.jsonl"', "b.jsonl"),
        (b'filename="/"', None),
        (b'filename=""', None),
        (b'filename="' + b"n" * 1000 + b'"', "n" * 255),
    ],
)
def test_names_of_files_are_names(said: bytes, name: str | None) -> None:
    assert _form_fields("multipart/form-data; boundary=b", form(b"x", said))["file"][1] == name


def nested(levels: int) -> bytes:
    return b"".join(b"--b\r\ncontent-type: multipart/mixed; boundary=b%d\r\n\r\n" % n for n in range(levels))


@pytest.mark.parametrize(
    "sent",
    [
        nested(20_000),
        b"--b\r\n" + b"x: y\r\n" * 200_000,
        b"--b\r\n\r\n" * 200_000,
        form(b"x", b"filename*=utf-8''%ff%fe%00"),
        form(b"x", b'filename="\xff\xfe"'),
        form(b"x", b'filename="=?utf-8?q?=FF=0A?="'),
        b"",
        b"\x00" * 1_000_000,
    ],
    ids=range(8),
)
def test_forms_that_are_none(sent: bytes) -> None:
    async def main() -> None:
        async with simulated() as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            began = time.process_time()  # the server runs in this process
            answer = await client.post("/v1/files", content=sent, headers=headers)
            assert answer.status_code in (200, 400), answer.text
            assert time.process_time() - began < 3
            assert (await client.get("/v1/files")).status_code == 200

    run(main())


def test_a_tenant_keeps_so_much_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        http = {"max_stored_bytes": 10_000, "journal": tmp_path / "journal"}
        async with simulated(http=http) as (_, url), httpx.AsyncClient(base_url=url) as client:

            async def upload() -> httpx.Response:
                headers = {"content-type": "multipart/form-data; boundary=b"}
                return await client.post("/v1/files", content=form(b"x" * 4000), headers=headers)

            first, second = await upload(), await upload()
            assert first.status_code == second.status_code == 200
            third = await upload()
            assert third.status_code == 413 and third.json()["error"]["code"] == "storage_full"
            shown = await client.get(f"/v1/files/{first.json()['id']}/content")
            assert shown.headers["content-disposition"] == "attachment" and shown.content == b"x" * 4000
            assert (await client.delete(f"/v1/files/{first.json()['id']}")).status_code == 200
            assert (await upload()).status_code == 200

    run(main())
    shutil.copy(tmp_path / "journal", tmp_path / "copy")
    store = JobStore(Journal(tmp_path / "copy"))  # what counts is what is there, also after a restart
    assert store.counts[""] == 2 and 8000 < store.stored[""] < 9000


def test_a_batch_does_not_try_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for which there will never be room ends with the refusal when the batch's time is over."""
    monkeypatch.setattr(batch_runner, "_PATIENCE", 0.01)

    async def main() -> None:
        tries, now = 0, 1000.0
        store = JobStore(clock=lambda: 1000.0)

        async def ask(*_: Any) -> tuple[int, float | None, bytes]:
            nonlocal tries, now
            tries, now = tries + 1, now + batch_runner.WINDOW / 3
            return 429, None, b'{"error": {}}'

        several = batch_runner.BatchRunner(store, ask, clock=lambda: now)
        item = json.dumps({"custom_id": "a", "body": {}}).encode()
        job = store.create("batch_1", [item], b'{"kind": "batch", "endpoint": "/v1/completions"}')
        several.begin(job)
        await eventually(lambda: job.how)
        assert tries == 4 and job.failed == 1

    run(main())


def test_answers_of_a_batch_count_against_the_room() -> None:
    async def main() -> None:
        lines = [
            {"custom_id": str(n), "url": PATH, "body": body([n + 1], 300, return_token_ids=True)} for n in range(8)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        async with simulated(http={"max_stored_bytes": 8_000}) as (_, url), httpx.AsyncClient(base_url=url) as client:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            file = (await client.post("/v1/files", content=form(content), headers=headers)).json()["id"]
            batch = (await client.post("/v1/batches", json={"input_file_id": file, "endpoint": PATH})).json()
            while batch["status"] == "in_progress":
                await asyncio.sleep(0.05)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
            counts = batch["request_counts"]
            assert counts["completed"] > 0 and counts["failed"] > 0 and sum(counts.values()) == 16
            errors = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines()
            told = [json.loads(line)["response"] for line in errors]
            assert {(one["status_code"], one["body"]["error"]["code"]) for one in told} == {(413, "storage_full")}
            assert (await client.post(PATH, json=body([1], 2))).status_code == 200

    run(main())


def test_urls_in_batch_files_lead_nowhere_else() -> None:
    async def main() -> None:
        async with simulated() as (_, url), httpx.AsyncClient(base_url=url) as client:
            for path in (
                "/v1/files",
                "/v1/completions/../files",
                "http://10.0.0.1/v1/completions",
                "/v1/completions?x",
            ):
                line = json.dumps({"custom_id": "a", "url": path, "body": body([1])}).encode()
                headers = {"content-type": "multipart/form-data; boundary=b"}
                file = (await client.post("/v1/files", content=form(line), headers=headers)).json()["id"]
                for endpoint in (PATH, path):
                    asked = {"input_file_id": file, "endpoint": endpoint}
                    assert (await client.post("/v1/batches", json=asked)).status_code == 400
            for id in ("..%2f..%2fetc%2fpasswd", "file-batch_..-output", "batch_x%00", "%2e%2e"):
                assert (await client.get(f"/v1/files/{id}/content")).status_code == 404

    run(main())


def test_uploads_count_against_the_limits(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "alice", {"requests_per_minute": 2})

    async def main() -> None:
        async with (
            simulated(http={"keys": tmp_path / "keys.json"}) as (_, url),
            httpx.AsyncClient(base_url=url) as client,
        ):
            headers = {"content-type": "multipart/form-data; boundary=b", "authorization": f"Bearer {key}"}
            several = [await client.post("/v1/files", content=form(b"x"), headers=headers) for _ in range(3)]
            assert [one.status_code for one in several] == [200, 200, 429]

    run(main())
