"""The page's files over HTTP: types, ETags, and headers that let nothing come from elsewhere."""

from __future__ import annotations

import re

import httpx
import pytest
from http_server import Server

from tokenmill.serve.api.page import FOLDER

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.mark.parametrize("file", sorted(file.name for file in FOLDER.iterdir() if file.suffix in TYPES))
def test_each_file_has_its_type_and_is_asked_for_again_with_its_tag(server: Server, file: str) -> None:
    first = httpx.get(f"{server.url}/page/{file}")
    assert first.status_code == 200 and first.content == (FOLDER / file).read_bytes()
    assert first.headers["content-type"] == f"{TYPES[FOLDER.joinpath(file).suffix]}; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache" and first.headers["x-content-type-options"] == "nosniff"
    tag = first.headers["etag"]
    for known in (tag, f'W/{tag}, "other"'):
        again = httpx.get(f"{server.url}/page/{file}", headers={"if-none-match": known})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
    assert httpx.get(f"{server.url}/page/{file}", headers={"if-none-match": '"other"'}).status_code == 200


def test_the_policy_lets_nothing_in_from_elsewhere(server: Server) -> None:
    page = httpx.get(server.url, headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert page.headers["referrer-policy"] == "no-referrer"


def test_a_terminal_gets_words_and_a_browser_the_page(server: Server) -> None:
    words, page = httpx.get(server.url), httpx.get(server.url, headers=BROWSER)
    assert words.headers["content-type"].startswith("text/plain") and "/openapi.json" in words.text
    assert page.text.startswith("<!doctype html>")
    assert words.headers["vary"] == page.headers["vary"] == "accept"
    head = httpx.head(server.url, headers=BROWSER)
    assert head.status_code == 200 and not head.content and int(head.headers["content-length"]) == len(page.content)


def test_only_the_page_s_own_files_are_there(server: Server) -> None:
    for path in ("/page/", "/page/nothing.js", "/page/../pages.py", "/page/%2e%2e/pages.py", "/page/style.css/"):
        assert httpx.get(server.url + path).status_code == 404, path


def test_the_page_is_small_and_refers_to_nothing_outside() -> None:
    files = [file for file in FOLDER.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 100_000
    for file in files:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", text), file.name
        assert "innerHTML" not in text and "outerHTML" not in text and "insertAdjacentHTML" not in text, file.name
    linked = set(re.findall(r'(?:href|src)="/page/([^"]+)"', (FOLDER / "index.html").read_text()))
    imported = {name for file in files for name in re.findall(r'from "\./([\w.]+)"', file.read_text())}
    assert linked | imported == {file.name for file in files} - {"index.html"}
