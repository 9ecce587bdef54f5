"""`tokenmill bench cpu --scaling`: speed against threads, and the cost of a token against the length of the context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.bench import cpu
from tokenmill.bench.cpu import Column, ContenderFigures, Setup, Tell
from tokenmill.bench.peers import Contender
from tokenmill.bench.plot import Series, chart
from tokenmill.errors import ConfigError

TIMED = 16  # tokens whose time makes the figure at a context length


@dataclass(frozen=True)
class Scaling:
    """Medians, by contender: against threads, and against tokens of context."""

    threads: dict[int, list[ContenderFigures]]
    contexts: dict[int, dict[str, tuple[float, float]]]  # context -> label -> prefill tok/s, decode ms per token

    def as_dict(self) -> dict[str, Any]:
        by_threads = {threads: [row.as_dict() for row in rows] for threads, rows in self.threads.items()}
        return {"threads": by_threads, "contexts": self.contexts}


def scaling(setup: Setup, who: list[Contender], contexts: tuple[int, ...], tell: Tell) -> Scaling:
    if min(contexts) < 2 * TIMED:
        raise ConfigError(f"the shortest context is {min(contexts)} tokens; it must be {2 * TIMED} or more")
    by_threads: dict[int, list[ContenderFigures]] = {}
    for threads in _thread_counts(setup.threads):
        tell(f"threads: {threads}")
        by_threads[threads] = cpu.compare(replace(setup, threads=threads), who, tell)
    return Scaling(by_threads, _against_context(setup, who, contexts, tell))


def draw(results: Scaling, columns: list[Column], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for column in (column for column in columns if column.more_is_better):
        lines: dict[str, list[tuple[float, float]]] = {}
        for threads, rows in results.threads.items():
            for row in rows:
                middle = row.median(column)
                if middle is not None:
                    lines.setdefault(row.contender.label, []).append((threads, middle))
        path = folder / f"cpu_threads_{column.key}.svg"
        written.append(_write(path, column.title, "threads", lines, logarithmic=False))
    for index, (key, title) in enumerate((("prefill", "prefill tok/s"), ("decode", "ms per decoded token"))):
        lines = {}
        for context, figures in results.contexts.items():
            for label, pair in figures.items():
                lines.setdefault(label, []).append((context, pair[index]))
        path = folder / f"cpu_context_{key}.svg"
        written.append(_write(path, title, "tokens of context", lines, logarithmic=True))
    return written


def _write(
    path: Path, title: str, below: str, lines: dict[str, list[tuple[float, float]]], *, logarithmic: bool
) -> Path:
    drawn = [Series(label, points) for label, points in lines.items()]
    path.write_text(chart(title, below, drawn, logarithmic=logarithmic))
    return path


def _thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return counts if most == 1 else [*counts, most]


def _against_context(
    setup: Setup, who: list[Contender], contexts: tuple[int, ...], tell: Tell
) -> dict[int, dict[str, tuple[float, float]]]:
    """One visit per length and contender: shortest lengths first, all contenders at each of them."""
    rows = cpu.prepare(setup, who, tell)
    figures: dict[int, dict[str, tuple[float, float]]] = {context: {} for context in contexts}
    workers = cpu.Workers()
    try:
        for row in cpu.standing(rows):
            with cpu.whose_turn(row, workers, tell):
                workers[row.contender] = cpu.start(setup, row)
                cpu.load(setup, row, workers[row.contender], 1, max(contexts))
        for context in contexts:
            for row in cpu.standing(rows):
                with cpu.whose_turn(row, workers, tell):
                    worker = workers[row.contender]
                    length = context - TIMED
                    warm, timed = cpu.prompts(setup, 2, length, "context")
                    cpu.single(setup, worker, warm[: cpu.COLD_PROMPT], TIMED)
                    prefill, decode = cpu.speeds(length, cpu.single(setup, worker, timed, TIMED).times)
                    figures[context][row.contender.label] = prefill, 1e3 / decode
                    tell(f"context {context}  {row.contender.label}: {prefill:.0f} tok/s, {1e3 / decode:.1f} ms")
    finally:
        cpu.close(workers)
    return figures
