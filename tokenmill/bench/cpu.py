"""`tokenmill bench cpu`: this engine and others on the same CPU, with the same prompts, in one interleaved run.

A round starts every contender anew for its cold start and its single streams, then takes the columns of many requests
one by one; whoever's turn it is not waits frozen. What else happens on the machine thus falls on all of them alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.bench.peers import AS_IS, KINDS, Contender
from tokenmill.bench.peers.host import SERVE, PeerWorker, WorkerFailed

COLD_PROMPT = 16  # tokens of the prompt that a new process answers first
SINGLES = 3  # timed single streams per round
PREPARING = 3600.0  # seconds for making another form of the weights, once

Tell = Callable[[str], None]
Workers = dict[Contender, PeerWorker]


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    more_is_better: bool = True
    per_round: int = 1  # figures


PREFILL = Column("prefill", "prefill tok/s", per_round=SINGLES)
DECODE = Column("decode", "decode tok/s", per_round=SINGLES)
COLD = Column("cold", "cold start s", more_is_better=False)
PEAK = Column("peak", "peak MB (single)", more_is_better=False)
# Per second of the time that cores spent: what the engine itself costs, where other programs have the cores, too.
PREFILL_CPU = Column("prefill_cpu", "prefill tok/CPU s", per_round=SINGLES)
DECODE_CPU = Column("decode_cpu", "decode tok/CPU s", per_round=SINGLES)
COLD_CPU = Column("cold_cpu", "cold start CPU s", more_is_better=False)


def batch_column(requests: int) -> Column:
    return Column(f"batch{requests}", f"{requests} requests, out tok/s")


def batch_cpu_column(requests: int) -> Column:
    return Column(f"batch{requests}_cpu", f"{requests} requests, out tok/CPU s")


@dataclass(frozen=True)
class Setup:
    """What is compared, and how."""

    model: Path  # a .gguf file
    vocab: int
    forms: Path  # folder that keeps other forms of the weights between runs
    pythons: dict[str, str]  # by engine: the Python of its environment
    threads: int
    rounds: int = 3
    prompt: int = 128  # tokens
    new: int = 128
    requests: tuple[int, ...] = (16, 64)
    timeout: float = 900.0  # seconds per question
    serve: Path = SERVE
    form: str = ""  # of the weights in `model`, such as Q4_1

    @property
    def length(self) -> int:
        """The longest prompt with its answer."""
        return max(self.prompt, COLD_PROMPT) + self.new

    @property
    def columns(self) -> list[Column]:
        return [PREFILL, DECODE, *map(batch_column, self.requests), COLD, PEAK]

    @property
    def cpu_columns(self) -> list[Column]:
        return [PREFILL_CPU, DECODE_CPU, *map(batch_cpu_column, self.requests), COLD_CPU]


@dataclass
class ContenderFigures:
    """What was measured of one contender: by column, a figure per round (of single streams: several)."""

    contender: Contender
    form: str = ""  # of weights that are taken as they are
    model: str = ""  # the file that it reads
    version: str = ""
    figures: dict[str, list[float]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)  # its first answer: shows who computes the same
    failure: str | None = None

    @property
    def title(self) -> str:
        return f"{self.contender.label} ({self.form})" if self.form else self.contender.label

    def add(self, column: Column, value: float) -> None:
        self.figures.setdefault(column.key, []).append(value)

    def median(self, column: Column) -> float | None:
        figures = self.figures.get(column.key)
        return statistics.median(figures) if figures else None

    def as_dict(self) -> dict[str, Any]:
        return {"label": self.contender.label, **asdict(self)}


def compare(
    setup: Setup, who: list[Contender], tell: Tell, keep: Callable[[list[ContenderFigures]], None] = lambda rows: None
) -> list[ContenderFigures]:
    """The table's rows. A contender that fails keeps what it has, with the reason, and the others go on.

    `keep` is called with what there is after each round: a run takes long, and may be ended before its time.
    """
    rows = prepare(setup, who, tell)
    for number in range(setup.rounds):
        _round(setup, rows, number, tell)
        keep(rows)
    return rows


def prepare(setup: Setup, who: list[Contender], tell: Tell) -> list[ContenderFigures]:
    """Have every contender make its form of the weights, if it has not before."""
    rows = [ContenderFigures(contender, setup.form if contender.variant == AS_IS else "") for contender in who]
    setup.forms.mkdir(parents=True, exist_ok=True)
    for row in rows:
        workers = Workers()
        try:
            with whose_turn(row, workers, tell):
                worker = workers[row.contender] = start(setup, row)
                question = {"source": str(setup.model), "variant": row.contender.variant, "folder": str(setup.forms)}
                row.model = worker.ask("prepare", PREPARING, **question)["model"]
                tell(f"{row.contender.label}: reads {row.model}")
        finally:
            close(workers)
    return rows


def prompts(setup: Setup, count: int, length: int, *key: object) -> list[list[int]]:
    """Random ids, the same for every contender and never the same twice, so that no prefix cache helps anybody."""
    dice = random.Random(repr((length, *key)))
    margin = setup.vocab // 20  # special tokens lie at the ends of vocabularies
    return [[dice.randrange(margin, setup.vocab - margin) for _ in range(length)] for _ in range(count)]


def start(setup: Setup, row: ContenderFigures) -> PeerWorker:
    name = row.contender.name
    return PeerWorker(setup.pythons[name], KINDS[name].driver, setup.threads, name=name, serve=setup.serve)


def load(setup: Setup, row: ContenderFigures, worker: PeerWorker, requests: int, length: int) -> None:
    settings = {"variant": row.contender.variant, "threads": setup.threads, "rows": requests, "length": length}
    row.version = worker.ask("load", setup.timeout, model=row.model, **settings)["version"]


@dataclass(frozen=True)
class Single:
    """One request: its tokens, and the seconds from its start to each of them, by the clock and of the CPU."""

    tokens: list[int]
    times: list[float]
    cpu: list[float]
    spent: float  # seconds of the CPU since the process began


def single(setup: Setup, worker: PeerWorker, prompt: list[int], new: int) -> Single:
    answer = worker.ask("single", setup.timeout, prompt=prompt, new=new)
    if {len(answer[name]) for name in ("tokens", "times", "cpu")} != {new}:
        raise WorkerFailed(f"single: {new} tokens were asked for and {len(answer['tokens'])} came")
    return Single(answer["tokens"], answer["times"], answer["cpu"], answer["spent"])


def speeds(prompt: int, times: list[float]) -> tuple[float, float]:
    """Tokens per second until the first token of the answer, and from there on."""
    return prompt / times[0], (len(times) - 1) / (times[-1] - times[0])


def standing(rows: list[ContenderFigures]) -> list[ContenderFigures]:
    return [row for row in rows if row.failure is None]


@contextmanager
def whose_turn(row: ContenderFigures, workers: Workers, tell: Tell) -> Iterator[None]:
    """Runs one contender while the others are frozen. If it fails, it is over with it, but not with the others."""
    worker = workers.get(row.contender)
    if worker is not None:
        worker.thaw()
    try:
        yield
    except WorkerFailed as failure:
        row.failure = str(failure)
        tell(f"{row.contender.label}: {row.failure}")
    worker = workers.get(row.contender)
    if worker is None:
        return
    if row.failure is None:
        worker.freeze()
    else:
        workers.pop(row.contender).close()


def close(workers: Workers) -> None:
    for worker in workers.values():
        worker.close()
    workers.clear()


def _round(setup: Setup, rows: list[ContenderFigures], number: int, tell: Tell) -> None:
    workers = Workers()
    told = f"round {number + 1}/{setup.rounds}  "
    try:
        for row in standing(rows):
            with whose_turn(row, workers, tell):
                workers[row.contender] = start(setup, row)
                _singles(setup, row, workers[row.contender], number)
                tell(told + _latest(row, [COLD, PREFILL, DECODE, PEAK]))
        for requests in setup.requests:
            for row in standing(rows):
                with whose_turn(row, workers, tell):
                    _batch(setup, row, workers[row.contender], number, requests)
                    tell(told + _latest(row, [batch_column(requests)]))
    finally:
        close(workers)


def _singles(setup: Setup, row: ContenderFigures, worker: PeerWorker, number: int) -> None:
    """Cold start, prefill, decode and peak memory of a process that serves one request at a time."""
    load(setup, row, worker, 1, setup.length)
    first = single(setup, worker, prompts(setup, 1, COLD_PROMPT, "cold", number)[0], 1)
    row.add(COLD, time.perf_counter() - worker.started)
    row.add(COLD_CPU, first.spent)
    several = prompts(setup, 1 + SINGLES, setup.prompt, "single", number)
    single(setup, worker, several.pop(), setup.new)  # not timed: caches fill, decode steps are recorded
    for prompt in several:
        timed = single(setup, worker, prompt, setup.new)
        row.tokens = row.tokens or timed.tokens
        for columns, times in (((PREFILL, DECODE), timed.times), ((PREFILL_CPU, DECODE_CPU), timed.cpu)):
            for column, speed in zip(columns, speeds(len(prompt), times)):
                row.add(column, speed)
    row.add(PEAK, worker.ask("peak", setup.timeout)["bytes"] / 1e6)


def _batch(setup: Setup, row: ContenderFigures, worker: PeerWorker, number: int, requests: int) -> None:
    """Many requests at once: what comes out per second, the time for reading the prompts included."""
    load(setup, row, worker, requests, setup.length)
    warm = prompts(setup, requests, COLD_PROMPT, "warm", number, requests)
    worker.ask("batch", setup.timeout, prompts=warm, new=min(setup.new, 4))
    several = prompts(setup, requests, setup.prompt, "batch", number, requests)
    answer = worker.ask("batch", setup.timeout, prompts=several, new=setup.new)
    if [len(tokens) for tokens in answer["tokens"]] != [setup.new] * requests:
        raise WorkerFailed(f"batch: {requests} answers of {setup.new} tokens were asked for, and did not come")
    row.add(batch_column(requests), requests * setup.new / answer["seconds"])
    row.add(batch_cpu_column(requests), requests * setup.new / answer["cpu"])


def _latest(row: ContenderFigures, columns: list[Column]) -> str:
    medians = [(one.title, statistics.median(row.figures[one.key][-one.per_round :])) for one in columns]
    return f"{row.contender.label}: " + ", ".join(f"{title} {middle:.4g}" for title, middle in medians)
