"""A split whose parts are killed at random moments, its router included: no request is lost, no token is another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import PATIENCE, Told, continued, free_port
from http_server import OPTIONS

from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")]

CLIENTS, KILLS, OUTPUT = 8, 24, 40


class Part:
    """A server or the router: a group of processes at one address, killed with all that it has started."""

    def __init__(self, command: str, *options: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._command = [sys.executable, "-m", "tokenmill", command, *options, "--port", str(port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def texts() -> list[list[int]]:
    source = random.Random(4)
    return [[source.randrange(1, 250) for _ in range(source.randrange(200, 500))] for _ in range(24)]


@contextlib.contextmanager
def parts(model: str, folder: Path) -> Iterator[dict[str, Part]]:
    secret, port = folder / "secret", free_port()
    secret.write_text("a secret of these servers, long enough")
    known = ("--kv-secret-file", str(secret))
    found: dict[str, Part] = {}
    try:
        listens = ("--kv-host-memory", "50000000", "--kv-listen", f"127.0.0.1:{port}")
        found["decodes"] = Part("serve", model, *OPTIONS, *listens, *known)
        found["prefills"] = Part("serve", model, *OPTIONS, "--kv-push-to", f"127.0.0.1:{port}", *known)
        found["other"] = Part("serve", model, *OPTIONS)
        urls = {name: one.url for name, one in found.items()}
        replicas = [word for name in ("decodes", "other") for word in ("--replica", urls[name])]
        pair = f"{urls['prefills']}={urls['decodes']}"
        found["router"] = Part("route", *replicas, "--prefill", pair, "--prefill-tokens", "64")
        yield found
    finally:
        for one in found.values():
            one.kill()


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_when_any_part_of_a_split_is_killed(chat_model: str, tmp_path: Path, seed: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    asked = [{"prompt_token_ids": one} for one in texts()]
    with LLM(chat_model, load_format="dummy", dtype="float64", device="cpu", max_num_seqs=16) as llm:
        wanted = [list(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)]  # type: ignore[arg-type]

    async def main(found: dict[str, Part]) -> None:
        source, router, over = random.Random(seed), found["router"].url, False
        done, again = 0, 0

        async def ready(http: httpx.AsyncClient, name: str) -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return (await http.get(f"{found[name].url}/health/ready", timeout=5)).status_code == 200
            return False

        async def all_ready(http: httpx.AsyncClient) -> None:
            until = time.monotonic() + PATIENCE
            while not all([await ready(http, name) for name in found]):
                assert time.monotonic() < until, "a part did not come back"
                await asyncio.sleep(0.1)

        async def answer(http: httpx.AsyncClient, number: int) -> Told:
            """A client comes back with the id of its last event, as docs/scaling.md says, until it has the answer."""
            nonlocal again
            told = await continued(http, [router], texts()[number], temperature=0, max_tokens=OUTPUT)
            assert told.error is None and len(told.ids) == 1, told
            again += told.connections - 1
            return told

        async def client(http: httpx.AsyncClient, first: int) -> None:
            nonlocal done
            number = first
            while not over:
                told = await answer(http, number % len(wanted))
                assert told.tokens == wanted[number % len(wanted)], f"request {number}"
                number, done = number + CLIENTS, done + 1

        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            await all_ready(http)
            clients = [asyncio.create_task(client(http, first)) for first in range(CLIENTS)]
            killed: list[str] = []
            for _ in range(KILLS):
                await asyncio.sleep(source.uniform(0.0, 1.5))
                killed.append(source.choice(list(found)))
                found[killed[-1]].kill()
                found[killed[-1]].start()
                assert not any(one.done() for one in clients), [one for one in clients if one.done()]
                await all_ready(http)
            over = True
            await asyncio.gather(*clients)
            print(json.dumps({"answers": done, "came back": again, "killed": killed}))
            assert done >= CLIENTS and set(killed) == set(found)

    with parts(chat_model, tmp_path) as found:
        asyncio.run(asyncio.wait_for(main(found), 900))
