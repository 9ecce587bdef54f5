"""Climbs the ladder: an engine per rung, figures from each, and every answer held against the bottom's."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tokenmill.bench.ladder import LadderPlan, Rung
from tokenmill.bench.peers.host import CHECKOUT, WorkerFailed, WorkerProcess
from tokenmill.bench.stats import spread

Ask = tuple[str | list[int], int]
Report = Callable[[int, int, str], None]
Asked = Callable[[str, dict[str, Any], dict[str, Any], str, Report], dict[str, Any]]

# Gaps in log-probability under which another token is a near tie: what rounding in this precision can turn around.
NEAR = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
NEAR_BOUNDED = 0.5  # where weights or keys are rounded on purpose
PASSING = 24  # tokens of the longest answer of a warm-up: on its way a batch ends through all its sizes


@dataclass
class Exactness:
    equal: int = 0
    near: int = 0
    different: int = 0
    unjudged: int = 0  # not equal, and no time to ask how near
    worst: float = 0.0  # largest gap in log-probability at a first difference
    first: int | None = None  # earliest position of a difference

    @property
    def compared(self) -> int:
        return self.equal + self.near + self.different + self.unjudged

    @property
    def text(self) -> str:
        if not self.compared:
            return "-"
        kinds = ("equal", "near", "different", "unjudged")
        counts = {name: getattr(self, name) for name in kinds}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


@dataclass
class RungResult:
    """What came of one rung. Times in seconds."""

    rung: Rung
    error: str | None = None
    single: bool = False  # one request after the other
    ran: int = 0  # requests, of those asked; tokens per second are over these
    asked: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    ttft: dict[str, float | None] = field(default_factory=dict)
    itl: dict[str, float | None] = field(default_factory=dict)  # between tokens
    e2e: dict[str, float | None] = field(default_factory=dict)
    steps: int = 0
    recomputed: int = 0
    kv: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    exactness: Exactness = field(default_factory=Exactness)
    report: list[str] = field(default_factory=list)
    answers: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)  # index -> prompt, tokens

    @property
    def whole(self) -> bool:
        return self.ran == self.asked

    def as_data(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("rung", "answers", "exactness")}
        return {**vars(self.rung), **own, "exactness": vars(self.exactness)}


def climb(
    model: str,
    plan: LadderPlan,
    rungs: Sequence[Rung],
    asks: list[Ask],
    warm: list[Ask],
    *,
    limit: float,
    repeats: int,
    dtype: str,
    report: Report,
    keep: Callable[[list[RungResult]], None] = lambda rows: None,
) -> list[RungResult]:
    """Measure the rungs from the bottom up. `limit`: seconds after which a rung begins no further request.

    `keep` is called after each rung. On a GPU one process serves all rungs, where memory is counted by the device.
    """
    rows: list[RungResult] = []
    with workers(shared=plan.device == "cuda") as asked:
        for number, rung in enumerate(rungs, 1):
            options = plan.settings(rung.name)
            row = RungResult(rung, single=options["max_num_seqs"] == 1, asked=len(asks))
            below = next((row.seconds for row in reversed(rows) if row.error is None), limit)
            title = f"{number}/{len(rungs)} {rung.title}, about {min(below, limit):.0f} s or less"
            question = {
                "asks": asks,
                "warm": _warm_up(plan.device, options, warm, row.single),
                "limit": limit,
                "single": row.single,
                "repeats": 1 if row.single else repeats,
            }
            report(0, len(asks), title)
            try:
                _take_in(row, asked(model, options, question, title, report), asks)
            except WorkerFailed as failure:
                row.error = str(failure)
            rows.append(row)
            keep(rows)
        _compare(model, plan, rows, dtype, limit, report, asked)
    return rows


def _warm_up(device: str, options: dict[str, Any], warm: list[Ask], single: bool) -> list[Ask]:
    """What is asked before the clock runs: whatever is compiled or recorded at first use is not a rung's cost."""
    if single or device != "cuda":
        return [(prompt, min(tokens, 4)) for prompt, tokens in warm[: 1 if single else 4]]
    if options.get("cuda_graphs") is False:
        return [(prompt, 2 + index % PASSING) for index, (prompt, _) in enumerate(warm)]
    return warm  # sizes are recorded as they come up, so the work is like the one that is timed


def _take_in(row: RungResult, found: dict[str, Any], asks: list[Ask]) -> None:
    answers = found["answers"]
    row.ran, tokens = len(answers), sum(len(one["tokens"]) for one in answers)
    row.tokens_per_second = tokens / found["seconds"]
    row.seconds = found["seconds"]
    row.ttft = spread([one["ttft"] for one in answers])
    row.itl = spread([gap for one in answers for gap in one["gaps"]])
    row.e2e = spread([one["e2e"] for one in answers])
    if row.single and not row.whole:
        row.ttft, row.e2e = _one_by_one(answers, [tokens for _, tokens in asks], row.tokens_per_second)
    row.steps, row.recomputed = found["steps"], found["recomputed"]
    row.kv, row.memory, row.report = found["kv"], found["memory"], found["report"]
    row.answers = {one["index"]: (one["prompt"], one["tokens"]) for one in answers}


def _one_by_one(
    answers: list[dict[str, Any]], lengths: list[int], speed: float
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Times to first and to last token, had all requests run one after the other as fast as those that did."""
    starts = [0.0, *(one["e2e"] for one in answers)]
    first = sum(one["ttft"] - start for one, start in zip(answers, starts)) / len(answers)
    ends = [ended / speed for ended in accumulate(lengths)]
    return spread([start + first for start in [0.0, *ends[:-1]]]), spread(ends)


def first_differences(rows: Sequence[RungResult]) -> list[tuple[RungResult, int, int | None]]:
    """Of every answer but the first to a request: where it leaves that one, of the lowest rung (None: nowhere)."""
    reference: dict[int, list[int]] = {}
    found: list[tuple[RungResult, int, int | None]] = []
    for row in rows:
        for index, (_, tokens) in row.answers.items():
            if index not in reference:
                reference[index] = tokens
                continue
            known = reference[index]
            shorter = min(len(known), len(tokens)) if len(known) != len(tokens) else None
            at = next((at for at, pair in enumerate(zip(known, tokens)) if pair[0] != pair[1]), shorter)
            found.append((row, index, at))
    return found


def _compare(
    model: str, plan: LadderPlan, rows: list[RungResult], dtype: str, limit: float, report: Report, asked: Asked
) -> None:
    """Count equal answers, and ask the bottom's settings how near the others were."""
    lowest: dict[int, tuple[list[int], list[int]]] = {}
    for row in reversed(rows):
        lowest |= row.answers
    found = first_differences(rows)
    cases, places = [], []
    for row, index, at in found:
        if at is None:
            row.exactness.equal += 1
            continue
        prompt, known = lowest[index]
        if at in (len(known), len(row.answers[index][1])):  # one ends where the other goes on: no near tie
            row.exactness.different += 1
            row.exactness.first = at if row.exactness.first is None else min(row.exactness.first, at)
            continue
        cases.append(([*prompt, *known[:at]], known[at], row.answers[index][1][at]))
        places.append((row, at))
    if not cases:
        return
    unique = {json.dumps(case): case for case in cases}
    settings = plan.base | {"kv_cache": True}
    options = {name: value for name, value in settings.items() if value is not None}
    question = {"judge": list(unique.values()), "limit": limit}
    gaps = asked(model, options, question, "how near the differences are", report)["gaps"]
    by_case = dict(zip(unique, gaps))  # the judge may have had no time for the last
    near = NEAR[dtype]
    for case, (row, at) in zip(cases, places):
        counts, gap = row.exactness, by_case.get(json.dumps(case))
        counts.first = at if counts.first is None else min(counts.first, at)
        if gap is None:
            counts.unjudged += 1
            continue
        counts.worst = max(counts.worst, gap)
        if gap <= (max(near, NEAR_BOUNDED) if plan.rounds(row.rung.name) else near):
            counts.near += 1
        else:
            counts.different += 1


class RungWorker(WorkerProcess):
    """A process in which rungs are measured: a running `ladder_worker`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tokenmill.bench.ladder_worker"]
        super().__init__(command, {"PYTHONPATH": os.pathsep.join([CHECKOUT, *sys.path])})

    def ask(
        self, model: str, options: dict[str, Any], question: dict[str, Any], title: str, report: Report
    ) -> dict[str, Any]:
        self.send({"model": model, "options": options, **question})
        while "found" not in (said := self.receive()):
            report(said["done"], said["of"], title if said["what"] is None else said["what"])
        return dict(said["found"])


@contextlib.contextmanager
def workers(shared: bool) -> Iterator[Asked]:
    """A function that asks a worker. `shared`: the same one every time, until it fails, where a start costs much."""
    alive: list[RungWorker] = []

    def ask(*question: Any) -> dict[str, Any]:
        if not alive:
            alive.append(RungWorker())
        ended = True
        try:
            found = alive[0].ask(*question)
            ended = not shared
            return found
        finally:
            if ended:
                alive.pop().close()

    try:
        yield ask
    finally:
        for worker in alive:
            worker.close()
