"""The page in a real Chromium, against a real server: it streams, stops, shows, and lets nothing in."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_server import Server
from page_tab import Tab, until

from tokenmill.serve.http.api_keys import add_key

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect


def test_an_answer_streams_and_tells_its_times(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    answer = tab.say("hello", ignore_eos=True, max_tokens=400)
    expect(tab.page.locator("#stop")).to_be_visible()
    sizes = set()
    while "busy" in (answer.get_attribute("class") or ""):
        sizes.add(len(answer.locator(".text").inner_text()))
    assert len(sizes) > 3  # it grew while it came
    expect(answer.locator(".meta")).to_contain_text("400 tokens")
    for part in ("tokens/s", "first token", "prompt ", "cut at the token limit"):
        expect(answer.locator(".meta")).to_contain_text(part)
    expect(tab.page.locator("#send")).to_be_visible()
    expect(tab.page.locator("#prompt")).to_be_focused()


def test_stop_and_escape_end_an_answer_on_the_server_too(open_tab: Callable[..., Tab], server: Server) -> None:
    tab = open_tab()
    for how in (lambda: tab.page.click("#stop"), lambda: tab.page.keyboard.press("Escape")):
        answer = tab.say("go on", ignore_eos=True, max_tokens=1900)
        expect(answer.locator(".text")).not_to_be_empty()
        how()
        expect(answer.locator(".meta")).to_contain_text("stopped")
        until(lambda: json.loads(tab.context.request.get(f"{server.url}/health/ready").text())["active"] == 0)


def test_regenerate_copy_new_chat_and_reload(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    answer = tab.ask("pick", choice=["mill"])
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert tab.page.evaluate("navigator.clipboard.readText()") == "mill"
    tab.more = {"choice": ["stone"]}
    answer.get_by_role("button", name="Regenerate").click()
    expect(tab.page.locator(".answer .text")).to_have_text("stone")
    tab.ask("again", choice=["wheat"])
    assert [one["content"] for one in tab.bodies[-1]["messages"]] == ["pick", "stone", "again"]
    expect(tab.page.get_by_role("button", name="Regenerate")).to_have_count(1)
    tab.page.reload()
    expect(tab.page.locator(".answer .text")).to_have_text(["stone", "wheat"])
    other = tab.context.new_page()  # history belongs to the tab
    other.goto(tab.page.url)
    expect(other.locator(".answer")).to_have_count(0)
    tab.page.click("#new")
    expect(tab.page.locator(".log li")).to_have_count(0)
    expect(tab.page.locator("#welcome")).to_be_visible()
    tab.page.reload()
    expect(tab.page.locator(".log li")).to_have_count(0)


def test_settings_are_sent_and_empty_ones_are_not(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 5, "seed": 3}
    values |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    for name, value in values.items():
        tab.page.fill(f"#{name}", str(value))
    tab.page.fill("#system", "Be brief.")
    first = tab.ask("hello").locator(".text").inner_text()
    assert values.items() <= tab.bodies[-1].items()
    assert tab.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.page.locator(".answer:not(.busy) .text")).to_have_text(first)  # the seed is the same
    for name in [*values, "system"]:
        tab.page.fill(f"#{name}", "")
    tab.ask("hello", max_tokens=3)
    assert not values.keys() & tab.bodies[-1].keys()
    assert tab.bodies[-1]["messages"][0]["role"] == "user"


def test_probabilities_are_shown_by_pointer_and_by_keyboard(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    page, card = tab.page, tab.page.locator(".card")
    page.click("#probabilities")
    answer = tab.ask("pick", choice=["grinding"])
    tokens = answer.locator(".token:not(.unsaid)")  # bytes are tokens here
    expect(tokens).to_have_text(list("grinding"))
    page.mouse.move(5, 5)
    tokens.first.hover()
    expect(card).to_be_visible()
    expect(card.locator(".chosen span")).to_have_text("g")
    shares = [float(text.rstrip(" %").lstrip("<")) for text in card.locator("b").all_inner_texts()]
    assert shares[:5] == sorted(shares[:5], reverse=True) and 0 < sum(shares) <= 100.1
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()
    answer.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.first).to_be_focused()
    expect(card).to_be_visible()
    for key, letter in (("ArrowRight", "r"), ("ArrowRight", "i"), ("ArrowLeft", "r"), ("Home", "g")):
        page.keyboard.press(key)
        expect(card.locator(".chosen span")).to_have_text(letter)
    expect(tokens.first).to_have_attribute("aria-label", re.compile("^g, .*%$"))
    tints = "[...document.querySelectorAll('.token:not(.unsaid)')].map(e => getComputedStyle(e).backgroundColor)"
    assert set(page.evaluate(tints)) != {"rgba(0, 0, 0, 0)"}
    page.click("#probabilities")
    assert set(page.evaluate(tints)) == {"rgba(0, 0, 0, 0)"}


def test_tokens_spell_the_answer(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.page.click("#probabilities")
    answer = tab.ask("pick", choice=["größe 🌾\nof  the\tmill "])  # bytes are tokens here: no token is a character
    said = answer.locator(".token:not(.unsaid)")
    shown = tab.page.evaluate("document.querySelector('.tokens').textContent")
    assert shown.startswith("größe 🌾\nof  the\tmill ") and said.count() > 10
    assert "�" not in shown


def test_what_a_model_writes_is_never_html(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    evil = "<img src=x onerror=alert(1)> **b** <script>alert(2)</script> [a](javascript:alert(3)) ![i](http://x/y.png)"
    for scored in (False, True):
        answer = tab.ask("x" * 20 + evil, choice=[evil])
        text = answer.locator(".text")
        assert text.locator("img, script, a, iframe").count() == 0
        assert "<img src=x onerror=alert(1)>" in text.inner_text() and "<script>" in text.inner_text()
        if not scored:
            assert text.locator("strong").inner_text() == "b"
            tab.page.click("#probabilities")
    assert "<img" in tab.page.locator(".asked .text").first.inner_text()
    with pytest.raises(playwright.Error, match="TrustedHTML"):
        tab.page.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert tab.page.evaluate("window.violations.splice(0)") == ["require-trusted-types-for"]
    tab.complaints.clear()  # Chromium tells of that one


def test_the_server_s_sentence_is_shown_and_asking_again_works(open_tab: Callable[..., Tab], server: Server) -> None:
    tab = open_tab()
    answer = tab.ask("hello", top_p=7)
    body = json.dumps(tab.bodies[-1] | {"top_p": 7})
    said = tab.context.request.post(f"{server.url}/v1/chat/completions", data=body).json()["error"]["message"]
    assert "top_p" in said
    expect(answer.locator(".problem")).to_have_text(said)
    tab.more = {"choice": ["mill"]}
    answer.get_by_role("button", name="Try again").click()
    expect(tab.page.locator(".answer .text")).to_have_text("mill")
    tab.ask("next", choice=["stone"])
    assert [one["role"] for one in tab.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert [text for text in tab.complaints if "400" not in text] == []
    tab.complaints.clear()  # Chromium tells of each refused request


def test_the_live_view_counts_a_running_request_and_shows_its_blocks(open_tab: Callable[..., Tab]) -> None:
    tab, live = open_tab(), open_tab("/#live").page
    expect(live.locator("#pool-free")).not_to_have_text("-")
    answer = tab.say("a long story " * 8, ignore_eos=True, max_tokens=1900)
    expect(live.locator("#running")).to_have_text("1")
    expect(live.locator("#rows tr")).to_have_count(1)
    expect(live.locator("#rows tr td").nth(1)).to_have_text("decode")
    assert int(live.locator("#pool-used").inner_text().replace(",", "")) > 0
    assert "used" in (live.locator("#pool").get_attribute("aria-label") or "")
    drawn = "id => { const c = document.getElementById(id); return new Set(new Uint32Array("
    drawn += "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size }"
    assert min(live.evaluate(drawn, one) for one in ("pool", "steps", "rates")) >= 3  # colours
    tab.page.click("#stop")
    expect(answer.locator(".meta")).to_contain_text("stopped")
    expect(live.locator("#running")).to_have_text("0")
    expect(live.locator("#pool-used")).to_have_text("0")
    assert int(live.locator("#pool-cached").inner_text().replace(",", "")) > 0
    for name in ("ttft-p50", "ttft-p99", "itl-p50", "itl-p90"):
        assert float(live.locator(f"#{name}").inner_text().replace(",", "")) > 0
    live.locator("#steps").hover()
    expect(live.locator("#steps-caption")).to_contain_text("decode row")


def test_a_lost_engine_and_a_lost_server_are_lived_through(browser: Any, chat_model: str) -> None:
    own = Server.start(chat_model)
    tab, watcher = Tab(browser, own.url), Tab(browser, f"{own.url}/#live")
    live = watcher.page
    try:
        answer = tab.say("hello", ignore_eos=True, max_tokens=600)
        expect(answer.locator(".text")).not_to_be_empty()
        os.kill(psutil.Process(own.process.pid).children()[0].pid, signal.SIGKILL)
        expect(live.locator("#restarts")).to_have_text("1", timeout=30_000)
        expect(answer.locator(".meta")).to_contain_text("600 tokens", timeout=60_000)
        expect(live.locator("#status")).to_have_attribute("data-state", "ready")
        assert tab.complaints == watcher.complaints == []
        assert own.stop() == 0
        expect(live.locator("#status")).to_have_attribute("data-state", "offline", timeout=15_000)
        expect(live.locator("#live-notice")).to_be_visible()
        expect(tab.ask("hello").locator(".problem")).to_contain_text("cannot be reached")
        own = Server.start(chat_model, "--port", own.url.rpartition(":")[2])
        expect(live.locator("#status")).to_have_attribute("data-state", "ready", timeout=15_000)
        expect(live.locator("#live-notice")).to_be_hidden()
    finally:
        tab.context.close()
        watcher.context.close()
        own.stop()


def test_a_server_with_keys_asks_for_one(browser: Any, chat_model: str, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "alice", {})
    own = Server.start(chat_model, "--keys", str(tmp_path / "keys.json"))
    tab = Tab(browser, own.url)
    page = tab.page
    try:
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("tm-wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_have_text("this API key is not known here; check it")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(tab.ask("pick", choice=["mill"]).locator(".text")).to_have_text("mill")
        page.click("#to-live")
        expect(page.locator("#pool-free")).not_to_have_text("-")
        page.reload()
        expect(page.locator("#pool-free")).not_to_have_text("-")  # the key lives as long as the tab
        other = page.context.new_page()
        other.goto(own.url)
        expect(other.locator("#key-form")).to_be_visible()
    finally:
        tab.context.close()
        own.stop()
