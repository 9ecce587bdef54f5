"""One line per request, which tells what happened, gives nothing away and cannot be forged; who sees which metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server, simulated
from sim_service import run

from tokenmill.serve.http.api_keys import add_key, hash_of
from tokenmill.serve.observe.logs import JsonLines, PlainLines

PATH = "/v1/completions"


def body(prompt: list[int], tokens: int = 2, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


class Heard(logging.Handler):
    """What the server logs, as it would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: list[str] = []
        self.json: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.plain.append(PlainLines().format(record))
        line = JsonLines().format(record)
        assert line.isascii() and "\n" not in line
        self.json.append(json.loads(line))


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("tokenmill.serve.access")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


FORGED = "/v1/models/x%0A12:00:00 info POST /admin%1b%5b2J%e2%80%a8%c2%9b status=200"


def test_a_line_stays_a_line(heard: Heard) -> None:
    async def main() -> None:
        async with simulated() as (_, url), httpx.AsyncClient(base_url=url) as client:
            await client.get(FORGED)
            await client.get("/v1/models/" + "y" * 5000)

    run(main())
    assert len(heard.plain) == 2
    for line in heard.plain:
        assert "\n" not in line and line.isprintable() and len(line) < 600
    assert "\\n12:00:00" in heard.plain[0] and heard.json[0]["status"] == 404


def test_a_host_is_no_part_of_the_path(heard: Heard) -> None:
    async def main() -> None:
        async with simulated(http={"hosts": ("*",)}) as (_, url), httpx.AsyncClient(base_url=url) as client:
            poisoned = {"host": "x/v1/messages?a="}
            refused = await client.get("/v1/nothing", headers=poisoned)
            assert refused.status_code == 404 and "/v1/nothing" in refused.json()["error"]["message"]
            await client.post(PATH, json=body([1]), headers=poisoned)
            counted = (await client.get("/metrics")).text
            assert f'tokenmill_http_requests_total{{route="{PATH}",status="200"}} 1.0' in counted

    run(main())
    assert heard.json[-1]["message"] == f"POST {PATH}"


def test_the_line_of_a_request(tmp_path: Path, heard: Heard) -> None:
    key = add_key(tmp_path / "keys.json", "alice", {})
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    async def main() -> None:
        async with simulated(http={"keys": tmp_path / "keys.json"}) as (_, url):
            async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
                answer = await client.post(PATH, json=body([1, 2, 3], 5), headers={"traceparent": parent})
                heard.json[-1]["asked"] = answer.headers["x-request-id"]
                await client.post(PATH, json=body([1], top_p=7))
            async with httpx.AsyncClient(base_url=url) as client:
                await client.post(PATH, json=body([1]))

    run(main())
    right, wrong, keyless = heard.json
    assert right["id"] == right["asked"] and right["status"] == 200 and right["finish"] == "length"
    assert right["tenant"] == "alice" and right["client"] == "127.0.0.1"
    assert right["key"] in hash_of(key) and len(right["key"]) == 12
    assert right["trace_id"] == parent.split("-")[1]
    assert (right["prompt_tokens"], right["cached_tokens"], right["output_tokens"]) == (3, 0, 5)
    assert 0 <= right["queue"] <= right["ttft"] <= right["seconds"] and right["tpot"] > 0
    assert wrong["code"] == "invalid_value" and wrong["key"] == right["key"] and keyless["code"] == "missing_api_key"
    assert key not in json.dumps(heard.json) and not {"said", "prompt"} & right.keys()


def test_prompts_are_in_the_log_only_where_that_was_asked_for(chat_model: str) -> None:
    for options, there in (([], False), (["--log-prompts"], True)):
        server = Server.start(chat_model, "--log-format", "json", *options)
        chat = {"messages": [{"role": "user", "content": "a secret mill"}], "max_tokens": 3}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
        assert server.stop() == 0
        [line] = [json.loads(line) for line in server.lines if '"POST /v1/chat/completions"' in line]
        assert ("a secret mill" in json.dumps(line)) is there
        if there:
            assert line["said"][0]["answers"] == [answer["choices"][0]["message"]["content"]]


def test_only_operators_see_who_the_tenants_are(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, operator = add_key(file, "alice", {}), add_key(file, "prometheus", {"operator": True})

    async def main() -> None:
        async with simulated(http={"keys": file}) as (_, url), httpx.AsyncClient(base_url=url) as client:

            def bearer(key: str) -> dict[str, str]:
                return {"authorization": f"Bearer {key}"}

            await client.post(PATH, json=body([1, 2]), headers=bearer(alice))
            for headers, seen in (({}, False), (bearer(alice), False), (bearer(operator), True)):
                told = await client.get("/metrics", headers=headers)
                assert told.status_code == 200 and "tokenmill_requests_active" in told.text
                assert ("alice" in told.text) is seen
            assert (await client.get("/metrics", headers=bearer("tm-wrong"))).status_code == 401

    run(main())
