"""Parts of messages marked with `cache_module`: copied to wherever they stand, and told in usage and metrics."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_server import Server

DOCUMENTS = [f"Document {n}. " + "The wheel turns, the stones grind. "[n:] * 4 for n in range(3)]


def ask(server: Server, content: Any, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)


def content(order: list[int], marked: bool = True) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "Read: "}]
    parts += [{"type": "text", "text": DOCUMENTS[n], "cache_module": marked} for n in order]
    return [*parts, {"type": "text", "text": "What turns?"}]


def placed_in_all(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=600).text
    [line] = [one for one in text.splitlines() if one.startswith("tokenmill_module_tokens_total")]
    return float(line.split()[-1])


def test_marked_parts_are_copied_in_any_order_and_usage_says_so(server: Server) -> None:
    asked = {"cache_salt": "modules"}
    told = [ask(server, content(order), **asked).json() for order in ([0, 1, 2], [2, 0, 1], [2, 0, 1])]
    usages = [one["usage"]["prompt_tokens_details"] for one in told]
    assert usages[0]["module_tokens"] == usages[1]["module_tokens"] > 200
    assert usages[1]["cached_tokens"] >= usages[1]["module_tokens"]
    assert told[1]["choices"][0]["message"]["content"] == told[2]["choices"][0]["message"]["content"]
    plain = ask(server, content([2, 0, 1], marked=False), **asked).json()
    assert "module_tokens" not in plain["usage"]["prompt_tokens_details"]
    assert plain["usage"]["prompt_tokens"] >= told[1]["usage"]["prompt_tokens"] - 3, "the same text, cut otherwise"


def test_streams_tell_it_too_and_metrics_count(server: Server) -> None:
    streamed = ask(
        server, content([1, 0, 2]), stream=True, stream_options={"include_usage": True}, cache_salt="streamed"
    )
    assert '"module_tokens":' in streamed.text and streamed.text.rstrip().endswith("[DONE]")
    assert placed_in_all(server) > 200


def test_a_tenant_has_its_own_modules(server: Server) -> None:
    before = placed_in_all(server)
    usage = ask(server, content([0, 1]), cache_salt="somebody else").json()["usage"]["prompt_tokens_details"]
    assert usage["module_tokens"] == placed_in_all(server) - before, "computed for this one, and then copied"


@pytest.mark.parametrize("mark", ["yes", 2, [True]])
def test_a_mark_that_is_none_is_refused(server: Server, mark: Any) -> None:
    refused = ask(server, [{"type": "text", "text": "Hi", "cache_module": mark}])
    assert refused.status_code == 400 and "cache_module" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_mark_that_is_misspelt_is_refused(server: Server, path: str) -> None:
    for name, status in (("cache_modul", 400), ("Cache_Module", 400), ("cache_modules", 400), ("cache_control", 200)):
        parts = [{"type": "text", "text": "Hi", name: True}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        answer = httpx.post(server.url + path, json=body, timeout=600)
        assert answer.status_code == status, answer.text
        assert status == 200 or "did you mean 'cache_module'?" in answer.text


def test_a_mark_where_there_are_no_modules_is_refused(server: Server) -> None:
    for mark, status in ((True, 400), (False, 200)):
        parts = [{"type": "text", "text": "Hi", "cache_module": mark}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=600)
        assert answer.status_code == status, answer.text
        assert mark is False or "only messages of /v1/chat/completions" in answer.text


def test_words_that_look_like_a_stand_in_are_words(server: Server) -> None:
    odd = "module-000000000000000000000000-0."
    parts = [{"type": "text", "text": odd}, *content([0]), {"type": "text", "text": odd}]
    answer = ask(server, parts)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens_details"]["module_tokens"] > 50
