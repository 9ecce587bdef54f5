"""The figures of `bench serve` are those of a client that shares no code with it, on the same server and load."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_server import Server

from tokenmill.bench.figures import of_point
from tokenmill.bench.serve import Load, drive
from tokenmill.bench.serve_client import Place, run
from tokenmill.bench.workloads import Mix
from tokenmill.plan.workload import fixed

WITHIN = 0.05
PAIRS, EVERY, APART = 12, 1.0, 0.1  # seconds
NAMES = ("throughput", "ttft", "itl")


@pytest.fixture(scope="module")
def url(default_model: str) -> Iterator[str]:
    server = Server.start(default_model, "--load-format", "auto", "--dtype", "auto", "--name", "default")
    yield server.url
    assert server.stop() == 0


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


@pytest.fixture
def meter(url: str) -> Iterator[Meter]:
    meter = Meter(url)
    yield meter
    meter.close()


def ours(url: str, load: Load) -> dict[str, float]:
    found = of_point([run(drive(Place(url), load))])
    assert not found["errors"] and found["completed"] == len(load.asks)
    return {
        "throughput": found["output_tokens_per_second"],
        "ttft": found["ttft"]["mean"],
        "itl": found["itl"]["mean"],
    }


def test_figures_agree_with_openais_client(url: str, meter: Meter) -> None:
    """Both send a request at the same moments, so that each pair meets the same server. Who is a little earlier, and may
    get into a step that the other has to wait for, takes turns.
    """
    mix = Mix(fixed("pairs", 2 * PAIRS, 96, 24))
    warm = Load(mix.warm_up(4, 0), 2, "default")
    meter.ask(warm)
    meter.answer()
    ours(url, warm)
    early = [EVERY * number for number in range(PAIRS)]
    mine = [at + APART * (number % 2) for number, at in enumerate(early)]
    other = [at + APART * (1 - number % 2) for number, at in enumerate(early)]
    asks = mix.asks(1)
    load = Load([replace(ask, at=at) for ask, at in zip(asks[:PAIRS], mine)], PAIRS, "default")
    start = time.perf_counter() + 0.5
    meter.ask(replace(load, asks=asks[PAIRS:]), at=other, start=start)
    time.sleep(max(0.0, start - time.perf_counter()))
    found = ours(url, load)
    told = meter.answer()
    print(found, told)
    for name in NAMES:
        assert found[name] == pytest.approx(told[name], rel=WITHIN), (name, found, told)


@pytest.mark.slow
def test_a_closed_loop_in_turns_agrees_with_openais_client(url: str, meter: Meter) -> None:
    """The same load by the one and by the other, in turns; the median of the rounds' ratios counts."""
    mix = Mix(fixed("rounds", 32, 64, 48))
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(-1, 10):  # the first warms up
        figures = {}
        for turn in (0, 1) if number % 2 else (1, 0):
            load = Load(mix.asks(10 + 2 * number + turn), 16, "default")
            if turn:
                figures[1] = ours(url, load)
            else:
                meter.ask(load)
                figures[0] = meter.answer()
        for name in NAMES if number >= 0 else ():
            ratios[name].append(figures[1][name] / figures[0][name])
    for name, values in ratios.items():
        assert statistics.median(values) == pytest.approx(1, abs=WITHIN), (name, values)
