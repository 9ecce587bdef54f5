"""One replica of a cluster, as a process: told what to serve in a line on its standard input, gone when that closes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.errors import TokenmillError
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.observe.logs import set_up_logs
from tokenmill.serve.server import serve
from tokenmill.serve.settings import HttpSettings, ServeSettings

FAILED = 2


def main() -> int:
    given = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_leave_when_closed, daemon=True).start()
    set_up_logs("json", given["log_level"])
    http = _http(given["http"])
    settings = ServeSettings(**given["serve"] | {"command": tuple(given["serve"].get("command", ()))})
    try:
        service = Service(EngineConfig(**given["config"]), settings)
        asyncio.run(serve(service, http, on_ready=lambda url: _say("ready", url)))
    except TokenmillError as error:
        _say("failed", str(error))
        return FAILED
    return 0


def _http(given: dict[str, Any]) -> HttpSettings:
    paths = {name: Path(given[name]) for name in ("keys", "journal") if given.get(name)}
    if (text := given.pop("keys_text", None)) is not None:  # the file is on the router's machine
        descriptor, name = tempfile.mkstemp(prefix="tokenmill-keys-")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        paths["keys"] = Path(name)
    tuples = {name: tuple(given.get(name, ())) for name in ("names", "origins", "hosts")}
    return HttpSettings(**given | paths | tuples)


def _say(word: str, what: str) -> None:
    print(json.dumps({word: what}), flush=True)


def _leave_when_closed() -> None:
    """Whoever started us is gone. Our engine sees our end in the same way."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
