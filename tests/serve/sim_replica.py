"""`tokenmill serve` around a simulated engine, as a process that may be killed. Its arguments are one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import sim_service

from tokenmill.serve.observe.logs import set_up_logs
from tokenmill.serve.server import serve
from tokenmill.serve.settings import HttpSettings


def main(plan: dict[str, Any], http: dict[str, Any], settings: dict[str, Any]) -> None:
    set_up_logs("json", "info")
    service = sim_service.make(plan, **settings)
    if isinstance(http.get("keys"), str):
        http["keys"] = Path(http["keys"])
    asyncio.run(serve(service, HttpSettings(**http), on_ready=lambda url: print(f"ready {url}", flush=True)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
