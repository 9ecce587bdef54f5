"""Takes the pictures of the page that the docs show, from a real server with the default model in a real Chromium."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

STREAMS = 16
SENTENCE = "The mill stands at the bend of the river, and its stones turn day and night to grind the wheat. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    server, url = start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chosen.chromium, chromium_sandbox=os.geteuid() != 0)
            chat_light(browser, url, chosen.out / "page-chat-light.png")
            chat_dark(browser, url, chosen.out / "page-chat-dark.png")
            phone(browser, url, chosen.out / "page-phone.png")
            live(browser, url, chosen.out)
            browser.close()
    finally:
        server.terminate()
        server.wait(60)


def start() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "tokenmill", "serve", "--port", "0", "--drain-seconds", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    found: list[str] = []

    def read() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            if match := re.match(r"tokenmill serves \S+ at (\S+)", line):
                found.append(match[1])

    threading.Thread(target=read, daemon=True).start()
    while not found and server.poll() is None:
        time.sleep(0.1)
    if not found:
        raise SystemExit("the server did not start; try `tokenmill serve`")
    return server, found[0]


def opened(browser: Browser, url: str, width: int, height: int, **more: Any) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=2, **more)
    page.goto(url)
    page.locator("#status[data-state=ready]").wait_for()
    page.get_by_text("tokens of conversation").wait_for()
    return page


def fill(page: Page, **settings: str) -> None:
    """Settings, by the names of their fields."""
    hidden = not page.locator("#settings").is_visible()
    if hidden:
        page.click("#show-settings")
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    if hidden:
        page.click("#hide-settings")


def ask(page: Page, text: str) -> None:
    answers = page.locator(".answer:not(.busy)")
    before = answers.count()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    answers.nth(before).wait_for(timeout=120_000)


def take(page: Page, file: Path, **more: Any) -> None:
    page.wait_for_timeout(150)
    page.screenshot(path=file, **more)
    print(f"{file.name}: {file.stat().st_size // 1000} kB", flush=True)


def chat_light(browser: Browser, url: str, file: Path) -> None:
    page = opened(browser, url, 1280, 800, color_scheme="light")
    fill(page, temperature="0", system="You are a helpful assistant who answers briefly.")
    ask(page, "Name three rivers in France as a list.")
    ask(page, "Write a short Python function that adds two numbers.")
    take(page, file)
    page.close()


def chat_dark(browser: Browser, url: str, file: Path) -> None:
    page = opened(browser, url, 1280, 800, color_scheme="dark")
    fill(page, temperature="0.7", seed="5", max_tokens="120")
    page.click("#probabilities")
    ask(page, "How does a watermill work?")
    token = page.locator(".token.shade-4").nth(1)
    token.scroll_into_view_if_needed()
    token.hover()
    take(page, file)
    page.close()


def phone(browser: Browser, url: str, file: Path) -> None:
    page = opened(browser, url, 375, 740, color_scheme="light", is_mobile=True, has_touch=True)
    fill(page, temperature="0", max_tokens="90")
    ask(page, "How does a watermill work?")
    take(page, file)
    page.close()


def live(browser: Browser, url: str, folder: Path) -> None:
    page = opened(browser, url, 1280, 800, color_scheme="light")
    page.goto(f"{url}/#live")
    load(url)
    page.locator("#running", has_text=re.compile(f"^{STREAMS}$")).wait_for(timeout=120_000)
    page.wait_for_timeout(7000)
    take(page, folder / "page-live-light.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(500)
    take(page, folder / "page-live-dark.png", full_page=True)
    page.close()
    small = opened(browser, url, 375, 740, color_scheme="dark", is_mobile=True, has_touch=True)
    small.goto(f"{url}/#live")
    small.locator("#rows tr").first.wait_for()
    take(small, folder / "page-live-phone.png")
    small.close()


def load(url: str) -> None:
    """Streams that begin one after the other; some share the beginning of their prompts. They end with the server."""
    for number in range(STREAMS):
        threading.Thread(target=one_stream, args=(url, number), daemon=True).start()
        time.sleep(0.4)


def one_stream(url: str, number: int) -> None:
    prompt = f"Story {number % 4}. " + SENTENCE * (3 + 2 * (number % 7)) + f"Go on in the manner of writer {number}."
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request).read()


if __name__ == "__main__":
    main()
