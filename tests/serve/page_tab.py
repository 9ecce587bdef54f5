"""A tab of a real Chromium for the page's tests, and the fixtures that open and check it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 740}
CLIPBOARD = ["clipboard-read", "clipboard-write"]
WATCH = "window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.violatedDirective))"


@pytest.fixture(scope="module")  # not longer: while it is there, no other test can run an event loop in this thread
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium was found; apt-get install chromium")
    with driver.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=os.geteuid() != 0)
        yield browser
        browser.close()


class Tab:
    """A page whose requests to the model can be added to, and whose complaints are kept."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESK, "permissions": CLIPBOARD, **options})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.more: dict[str, Any] = {}  # added to the body of each chat request
        self.bodies: list[dict[str, Any]] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.add_init_script(WATCH)
        self.page.route("**/v1/chat/completions", self._add)
        self.page.goto(url)
        self.page.locator("#status[data-state=ready]").wait_for()

    def _add(self, route: Any) -> None:
        self.bodies.append(json.loads(route.request.post_data))
        route.continue_(post_data=json.dumps(self.bodies[-1] | self.more))

    def say(self, text: str, **more: Any) -> Any:
        """Send a message; returns its answer, which may still stream."""
        self.more = more
        number = self.page.locator(".answer").count()
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        return self.page.locator(".answer").nth(number)

    def ask(self, text: str, **more: Any) -> Any:
        number = self.page.locator(".answer").count()
        answer = self.say(text, **more)
        self.page.locator(f".log > li:nth-child({2 * number + 2}):not(.busy)").wait_for()
        return answer

    def violations(self) -> list[str]:
        return self.page.evaluate("window.violations")


@pytest.fixture
def open_tab(browser: Any, server: Server) -> Iterator[Callable[..., Tab]]:
    """Opens a page; whatever is opened must end without a complaint and without a violation of the policy."""
    tabs: list[Tab] = []

    def open_one(path: str = "/", url: str = "", **options: Any) -> Tab:
        tabs.append(Tab(browser, (url or server.url) + path, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        found = (tab.violations(), tab.complaints)
        tab.context.close()
        assert found == ([], [])


def until(condition: Callable[[], bool], times: int = 200) -> None:
    for _ in range(times):
        if condition():
            return
    raise AssertionError("it did not come to pass")
