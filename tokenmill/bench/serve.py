"""`tokenmill bench serve`: load on an OpenAI-compatible server, and whether every answer is the one it should be."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.bench.serve_client import Answer, Connection, Exchange, Place, read
from tokenmill.errors import TokenmillError

# Words that nearly every vocabulary has as one token, so that a prompt's length is known without a tokenizer.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body"
)
_FILES = 64  # that are no connections

Report = Callable[[int, int, str], None]  # done, in all, what


@dataclass(frozen=True)
class Load:
    """What is asked, and how much of it at once."""

    requests: int
    streams: int  # at once; with a rate: at most
    rate: float | None = None  # requests per second, at random times (open loop); None: a new one when one ends
    prompt_tokens: int = 128
    max_tokens: int = 128
    model: str | None = None
    ignore_eos: bool = True
    timeout: float = 600.0  # seconds per request
    seed: int = 0


@dataclass
class Check:
    """Answers under load against the answers that the same prompts got alone."""

    equal: int = 0
    lost: int = 0  # failed, or without an end
    mixed_up: int = 0  # another request's answer
    different: int = 0


@dataclass
class Result:
    """A load, and what came of it."""

    seconds: float
    answers: list[Answer]
    check: Check | None = None
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.answers)


def prompts_of(load: Load) -> list[str]:
    """Random words, no two prompts alike, the same for the same seed."""
    dice, words = random.Random(load.seed), WORDS.split()
    return [" ".join(dice.choices(words, k=load.prompt_tokens)) for _ in range(load.requests)]


async def drive(place: Place, load: Load, tell: Report, what: str = "answers") -> Result:
    """Put the load on the server. Nothing is parsed before the last answer has ended."""
    _allow_files(min(load.streams, load.requests) + _FILES)
    asked = [place.post("/v1/completions", _body(load, prompt)) for prompt in prompts_of(load)]
    found: list[Exchange | None] = [None] * len(asked)
    idle: list[Connection] = []
    gate = asyncio.Semaphore(load.streams)
    done = 0

    async def ask(number: int) -> None:
        nonlocal done
        connection = idle.pop() if idle else Connection(place)
        try:
            found[number] = await connection.ask(asked[number], load.timeout)
        finally:
            idle.append(connection)
            gate.release()
        done += 1
        tell(done, len(asked), what)

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as tasks:
            for number, start in enumerate(_starts(load)):
                if start is not None:
                    await asyncio.sleep(max(0.0, began + start - time.perf_counter()))
                await gate.acquire()
                tasks.create_task(ask(number))
    finally:
        for connection in idle:
            connection.close()
    seconds = time.perf_counter() - began
    answers = [read(exchange) for exchange in found if exchange is not None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    return Result(seconds, answers, errors=errors)


async def alone(place: Place, load: Load, tell: Report) -> list[str]:
    """The answer to each prompt when nothing else runs. Raises what the server said if one fails."""
    result = await drive(place, Load(**{**load.__dict__, "streams": 1, "rate": None}), tell, "answers alone")
    for answer in result.answers:
        if answer.error is not None:
            raise TokenmillError(f"an answer failed when it was asked for alone ({answer.error}): {answer.message}")
    return [answer.text for answer in result.answers]


def compare(answers: list[Answer], expected: list[str]) -> Check:
    """Sort answers by what became of them."""
    check, whose = Check(), Counter(expected)
    for answer, right in zip(answers, expected, strict=True):
        if answer.error is not None:
            check.lost += 1
        elif answer.text == right:
            check.equal += 1
        elif whose[answer.text]:
            check.mixed_up += 1
        else:
            check.different += 1
    return check


@contextlib.contextmanager
def started_server(model: str, options: dict[str, Any], seconds: float = 600.0) -> Iterator[str]:
    """`tokenmill serve` in processes of its own, until the end of the block; yields its address."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", "0", "--log-level", "warning", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    before: Any = None
    if threading.current_thread() is threading.main_thread():  # who is told to leave does not leave the server behind
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield _address(process, seconds)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _address(process: subprocess.Popen[str], seconds: float) -> str:
    """Where a server that has just been started listens; its stderr is read on in the background."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    said: list[str] = []

    def follow() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if match := re.match(r"tokenmill serves .* at (\S+)$", line):
                found.put(match[1])
        found.put(None)

    threading.Thread(target=follow, daemon=True).start()
    try:
        url = found.get(timeout=seconds)
    except queue.Empty:
        url = None
    if url is None:
        raise TokenmillError(f"the server did not start: {''.join(said[-3:]).strip() or 'it said nothing'}")
    return url


def _body(load: Load, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.model is not None:
        body["model"] = load.model
    if load.ignore_eos:
        body["ignore_eos"] = True
    return body


def _starts(load: Load) -> Iterator[float | None]:
    """When each request is sent, in seconds; None: as soon as there is a stream for it."""
    dice, at = random.Random(load.seed + 1), 0.0
    for _ in range(load.requests):
        yield None if load.rate is None else at
        at += dice.expovariate(load.rate) if load.rate is not None else 0.0


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
