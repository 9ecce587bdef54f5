"""Climbs the ladder: a process per rung, figures from each, and every answer held against the bottom's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenmill
from tokenmill.bench.ladder import Plan, Rung
from tokenmill.bench.stats import spread

Report = Callable[[int, int, str], None]
Ask = tuple[str | list[int], int]

# Gaps in log-probability under which another token is a near tie: what rounding in this precision can turn around.
NEAR = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
NEAR_BOUNDED = 0.5  # where weights or keys are rounded on purpose
REASON_LINES = 3  # of a dead worker's log


@dataclass
class Exactness:
    """Answers against those of the lowest rung that gave them."""

    equal: int = 0
    near: int = 0
    different: int = 0
    worst: float = 0.0  # largest gap in log-probability at a first difference
    first: int | None = None  # earliest position of a difference

    @property
    def compared(self) -> int:
        return self.equal + self.near + self.different

    @property
    def text(self) -> str:
        if not self.compared:
            return "-"
        counts = {"equal": self.equal, "near": self.near, "different": self.different}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


@dataclass
class Row:
    """What came of one rung. Times in seconds."""

    rung: Rung
    error: str | None = None
    share: float = 1.0  # of the requests that ran; the figures are scaled to all of them
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

    def as_data(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("rung", "answers", "exactness")}
        return {**vars(self.rung), **own, "exactness": vars(self.exactness)}


class WorkerFailed(Exception):
    """A rung could not be measured; the message says why."""


def climb(
    model: str,
    plan: Plan,
    rungs: Sequence[Rung],
    asks: list[Ask],
    warm: list[Ask],
    *,
    limit: float,
    repeats: int,
    dtype: str,
    report: Report,
) -> list[Row]:
    """Measure the rungs from the bottom up. `limit`: seconds for a rung that serves one request at a time."""
    rows: list[Row] = []
    for number, rung in enumerate(rungs, 1):
        options = plan.settings(rung.name)
        single = options["max_num_seqs"] == 1
        # Batches record and compile for sizes that only come up when the work is like the one that is timed.
        whole_warm = plan.device == "cuda" and not single
        below = next((row.seconds for row in reversed(rows) if row.error is None), limit)
        title = f"{number}/{len(rungs)} {rung.title}, about {min(below, limit) if single else below:.0f} s or less"
        question = {
            "asks": asks,
            "warm": warm if whole_warm else [(prompt, min(tokens, 4)) for prompt, tokens in warm[: 1 if single else 4]],
            "limit": limit if single else None,
            "repeats": 1 if single else repeats,
        }
        row = Row(rung)
        report(0, len(asks), title)
        try:
            _take_in(row, _asked(model, options, question, title, report), asks)
        except WorkerFailed as failure:
            row.error = str(failure)
        rows.append(row)
    _compare(model, plan, rows, dtype, report)
    return rows


def _take_in(row: Row, found: dict[str, Any], asks: list[Ask]) -> None:
    answers = found["answers"]
    tokens, share = sum(len(one["tokens"]) for one in answers), len(answers) / len(asks)
    row.share = share
    row.tokens_per_second = tokens / found["seconds"]
    row.seconds = sum(tokens for _, tokens in asks) / row.tokens_per_second
    row.ttft = spread([one["ttft"] for one in answers])
    row.itl = spread([gap for one in answers for gap in one["gaps"]])
    row.e2e = spread([one["e2e"] for one in answers])
    if share < 1:
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


def first_differences(rows: Sequence[Row]) -> list[tuple[Row, int, int | None]]:
    """Of every answer but the first to a request: where it leaves that one, of the lowest rung (None: nowhere)."""
    reference: dict[int, list[int]] = {}
    found: list[tuple[Row, int, int | None]] = []
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


def _compare(model: str, plan: Plan, rows: list[Row], dtype: str, report: Report) -> None:
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
    gaps = _asked(model, options, {"judge": list(unique.values())}, "how near the differences are", report)["gaps"]
    by_case = dict(zip(unique, gaps, strict=True))
    near = NEAR[dtype]
    for case, (row, at) in zip(cases, places):
        counts, gap = row.exactness, by_case[json.dumps(case)]
        counts.worst = max(counts.worst, gap)
        counts.first = at if counts.first is None else min(counts.first, at)
        if gap <= (max(near, NEAR_BOUNDED) if plan.rounds(row.rung.name) else near):
            counts.near += 1
        else:
            counts.different += 1


def _asked(model: str, options: dict[str, Any], question: dict[str, Any], title: str, report: Report) -> dict[str, Any]:
    """One worker's answer."""
    root = str(Path(tokenmill.__file__).parents[1])  # a checkout need not be installed
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill.bench.ladder_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])},
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps({"model": model, "options": options, **question}).encode())
                process.stdin.close()
            for line in process.stdout:
                said = json.loads(line)
                if "found" in said:
                    return dict(said["found"])
                if "error" in said:
                    raise WorkerFailed(said["error"])
                report(said["done"], said["of"], title if said["what"] is None else said["what"])
            code = process.wait()
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-REASON_LINES:]
            raise WorkerFailed(f"the process ended with code {code}" + (f" ({' | '.join(last)})" if last else ""))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
