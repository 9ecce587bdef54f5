"""One served tiny model for all HTTP tests of a test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_models import write_model
from http_server import Server
from page_tab import browser, open_tab  # noqa: F401 (fixtures)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("served") / "tiny-chat")


@pytest.fixture(scope="session")
def server(chat_model: str) -> Iterator[Server]:
    server = Server.start(chat_model)
    yield server
    assert server.stop() == 0
