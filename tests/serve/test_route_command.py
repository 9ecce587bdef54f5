"""`tokenmill route` as a program: it says where it is, finishes what runs when told to leave, refuses in a sentence."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest
from cluster import FakeReplica, client, fakes, free_port, routed
from sim_service import eventually, run
from typer.testing import CliRunner

from tokenmill.cli.app import app


class SlowReplica(FakeReplica):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__(answer=(200, {}, {"said": 1}))
        self.came, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/v1/completions":
            self.came.set()
            await self.go.wait()
        await super().__call__(scope, receive, send)


def test_a_router_that_is_told_to_leave_finishes_what_runs() -> None:
    async def main() -> None:
        slow = SlowReplica()
        async with fakes(slow) as [inner], client() as http:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tokenmill", "route", "--port", "0", "--replica", inner),
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stderr is not None
            url = ""
            while not url:
                line = (await process.stderr.readline()).decode()
                assert line, "it ended"
                if found := re.match(r"tokenmill routes to 1 replicas at (\S+)", line):
                    url = found[1]
            ask = asyncio.create_task(http.post(f"{url}/v1/completions", json={"prompt": [5]}))
            await slow.came.wait()
            process.send_signal(signal.SIGTERM)
            while b"draining" not in await process.stderr.readline():
                pass
            assert process.returncode is None
            slow.go.set()
            assert (await ask).json() == {"said": 1}
            assert await process.wait() == 0

    run(main())


@pytest.mark.parametrize(
    "words, why",
    [
        ([], "name each server with --replica"),
        (["--replica", "http://a", "--policy", "magic"], "cache, round-robin, least-loaded"),
        (["--replica", "http://a", "--prefill", "http://b"], "http://READS:8002=http://ANSWERS:8001"),
        (["--replica", "http://a", "--cluster-secret", "{short}"], "it needs 16 or more"),
        (["--replica", "http://a", "--cluster-secret", "{none}"], "cannot be read"),
        (["--replica", "http://a", "--log-level", "loud"], "--log-level"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    words = [word.format(short=tmp_path / "short", none=tmp_path / "none") for word in words]
    result = CliRunner().invoke(app, ["route", *words])
    assert result.exit_code == 2 and why in " ".join(result.output.split()), result.output


def test_a_replica_that_is_not_up_yet_is_not_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with routed([url], ready=0) as (app, _):
            await eventually(lambda: app.fleet.replicas[0].state == "lost")
        assert f"replica {url} is not there yet: " in caplog.text and "is lost" not in caplog.text

    run(main())
