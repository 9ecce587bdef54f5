"""Two machines with a network between them, as far as one kernel can be two: an engine and its second stage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from far_ranks import SECRET, Rank, wait_until
from rank_groups import answers, no_logprobs, opened
from tiny import write_tiny

MODEL: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}

ENGINE = """
import json, sys
sys.path[:0] = {paths!r}
from rank_groups import answers, group_of, no_logprobs, opened
from tokenmill.engine.ranks import machines
machines.PATIENCE = 2.0
far = dict(rank_listen="0.0.0.0:7200", rank_secret_file={secret!r}, skip_tokenizer_init=True)
with opened({model!r}, parallel={parallel!r}, **far) as llm:
    for line in sys.stdin:
        said = no_logprobs(answers(llm))
        print(json.dumps([said, llm._built.engine.scheduler.stats.failed_steps]), flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str, str]]:
    """Two of them, and the address of the first."""
    if not sys.platform.startswith("linux") or os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = f"tm{os.getpid()}a", f"tm{os.getpid()}b"
    host = f"10.213.{os.getpid() % 250}."
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for number, name in enumerate(names, 1):
                ip("link", "set", name, "netns", name)
                ip("-n", name, "addr", "add", f"{host}{number}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield (*names, f"{host}1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["pp2", "tp2"])
def test_two_machines_say_what_one_says_and_the_network_between_them_may_go_and_come(
    machines: tuple[str, str, str], tmp_path: Path, parallel: str
) -> None:
    near, far, host = machines
    model = write_tiny(tmp_path / "model", **MODEL)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    with opened(model, skip_tokenizer_init=True) as llm:
        wanted = json.loads(json.dumps(no_logprobs(answers(llm))))
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "model"), str(Path(__file__).parents[1])]
    code = ENGINE.format(paths=paths, secret=str(secret), model=model, parallel=parallel)
    command = ["ip", "netns", "exec", near, sys.executable, "-c", code]
    log = tmp_path / "log"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes["stderr"] = log.open("w")
    rank = Rank(7200, secret, host=host, prefix=("ip", "netns", "exec", far))
    try:
        with subprocess.Popen(command, **pipes) as engine:
            assert engine.stdin is not None and engine.stdout is not None

            def ask() -> None:
                engine.stdin.write("\n")
                engine.stdin.flush()

            def answer() -> tuple[list[object], int]:
                return tuple(json.loads(engine.stdout.readline()))

            try:
                ask()
                assert answer() == (wanted, 0)
                for _ in range(2):
                    ask()
                time.sleep(0.1)
                ip("-n", near, "link", "set", near, "down")  # nobody is told: only nothing comes any more
                wait_until(lambda: "nothing was heard of it for 2 s" in log.read_text(), "that was noticed")
                ip("-n", near, "link", "set", near, "up")
                for _ in range(2):
                    assert answer()[0] == wanted
                ask()
                said, failed = answer()
                assert said == wanted and failed > 0
                engine.stdin.close()
                assert engine.wait(240) == 0
            finally:
                engine.kill()
    finally:
        assert rank.end() == 0
    assert sum("has rank 1 of the engine" in line for line in rank.lines) >= 2
