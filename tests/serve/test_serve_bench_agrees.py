"""The figures of `bench serve` are those of a client that shares no code with it, on the same server and load."""

from __future__ import annotations

import heapq
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paced_server
import pytest
from http_server import Server
from paced_server import GAP

from tokenmill.bench.figures import of_point
from tokenmill.bench.serve import Load, drive
from tokenmill.bench.serve_client import ServerAddress, run
from tokenmill.bench.workloads import Ask, Mix
from tokenmill.plan.demand.workload import fixed

WITHIN = 0.05
PAIRS, EVERY, APART = 10, 0.8, 0.1  # seconds
NAMES = ("throughput", "ttft", "itl", "e2e")
USERS, TURNS, TOKENS = 8, 3, 12  # of the closed loop


@pytest.fixture(scope="module")
def url(default_model: str) -> Iterator[str]:
    server = Server.start(default_model, "--load-format", "auto", "--dtype", "auto", "--name", "default")
    yield server.url
    assert server.stop() == 0


@pytest.fixture
def paced() -> Iterator[str]:
    server = subprocess.Popen([sys.executable, paced_server.__file__], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    server.terminate()
    server.wait(30)


class Meter:
    """The independent client, in a process of its own."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("openai_meter.py")), url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, load: Load, **more: Any) -> None:
        assert self._process.stdin is not None
        prompts = [ask.prompt for ask in load.asks]
        question = {"prompts": prompts, "max_tokens": load.asks[0].max_tokens, "streams": load.streams} | more
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


def ours(url: str, load: Load) -> dict[str, float]:
    found = of_point([run(drive(ServerAddress(url), load))])
    assert not found["errors"] and found["completed"] == len(load.asks)
    return figures(found)


def figures(found: dict[str, Any]) -> dict[str, float]:
    return {"throughput": found["output_tokens_per_second"]} | {name: found[name]["mean"] for name in NAMES[1:]}


def pairs(url: str, meter: Meter, seed: int, same: bool) -> dict[str, float]:
    """Our figures over the other client's. Both send requests at the same moments, so that each pair meets the same
    server. Who is a little earlier, and gets into a step that the other has to wait for, takes turns. The same
    prompts for both, unless the server would remember them.
    """
    asks = Mix(fixed("pairs", 2 * PAIRS, 96, 24)).asks(seed)
    mine = [EVERY * number + APART * (number % 2) for number in range(PAIRS)]
    other = [EVERY * number + APART * (1 - number % 2) for number in range(PAIRS)]
    load = Load([replace(ask, at=at) for ask, at in zip(asks[:PAIRS], mine)], PAIRS, "default")
    start = time.perf_counter() + 0.5
    meter.ask(replace(load, asks=asks[:PAIRS] if same else asks[PAIRS:]), at=other, start=start)
    time.sleep(max(0.0, start - time.perf_counter()))
    found, told = ours(url, load), meter.answer()
    return {name: found[name] / told[name] for name in NAMES}


def check_pairs(url: str, same: bool) -> None:
    """Where a round was disturbed by what else runs on the machine, the median of three counts."""
    meter = Meter(url)
    warm = Load(Mix(fixed("warm", 4, 96, 8)).asks(0), 2, "default")
    meter.ask(warm)
    meter.answer()
    ours(url, warm)
    rounds = [pairs(url, meter, 1, same)]
    if any(abs(ratio - 1) > WITHIN for ratio in rounds[0].values()):
        rounds += [pairs(url, meter, seed, same) for seed in (2, 3)]
    meter.close()
    for name in NAMES:
        assert statistics.median(one[name] for one in rounds) == pytest.approx(1, abs=WITHIN), (name, rounds)


def test_an_open_loop_agrees_with_openais_client(paced: str) -> None:
    check_pairs(paced, same=True)


@pytest.mark.slow  # an engine's times depend on what else the cores have to do, and on a busy machine by more than 5 %
def test_an_open_loop_agrees_on_a_real_server(url: str) -> None:
    check_pairs(url, same=False)


def commanded(url: str) -> dict[str, float]:
    """What the command itself says of a closed loop."""
    words = f"--streams {USERS} --requests {TURNS * USERS} --input 8 --output {TOKENS} --seed 0 --warmup {USERS}"
    command = [sys.executable, "-m", "tokenmill", "bench", "serve", "--url", url, *words.split(), "--json", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True)
    (found,) = json.loads(done.stdout)["points"]
    assert found["completed"] == TURNS * USERS and not found["errors"]
    return figures(found)


def reckoned(asks: list[Ask]) -> dict[str, float]:
    """What is true of it: each user sends the next prompt when the answer to the one before has ended."""
    free = [0.0] * USERS
    for ask in asks:
        heapq.heapreplace(free, free[0] + paced_server.first(ask.prompt) + GAP * (TOKENS - 1))
    mean = statistics.fmean(paced_server.first(ask.prompt) for ask in asks)
    return {
        "throughput": TOKENS * len(asks) / max(free),
        "ttft": mean,
        "itl": GAP,
        "e2e": mean + GAP * (TOKENS - 1),
    }


def test_a_closed_loop_agrees_with_openais_client_and_with_the_clock(paced: str) -> None:
    """In turns, against a server that computes nothing: one that does would be another one for each of them, as each
    takes its share of the cores. Where a turn was disturbed, the median of three counts.
    """
    load, meter = Load(Mix(fixed("paced", TURNS * USERS, 8, TOKENS)).asks(0), USERS), Meter(paced)
    meter.ask(replace(load, asks=load.asks[:USERS]))  # opens its connections
    meter.answer()
    right = reckoned(load.asks)
    rounds: list[dict[str, tuple[float, float]]] = []  # ours over the other client's, and over what is true
    while len(rounds) < 3 and not (len(rounds) == 1 and agree(rounds)):
        meter.ask(load)
        told = meter.answer()
        found = commanded(paced)
        rounds.append({name: (found[name] / told[name], found[name] / right[name]) for name in right})
    meter.close()
    assert agree(rounds), rounds


def agree(rounds: list[dict[str, tuple[float, float]]]) -> bool:
    """Whether every figure's middle ratios are within bounds."""
    middle = [statistics.median(one[name][side] for one in rounds) for name in rounds[0] for side in (0, 1)]
    return all(abs(ratio - 1) <= WITHIN for ratio in middle)
