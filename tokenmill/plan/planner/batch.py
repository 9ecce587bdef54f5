"""How long a batch of requests takes that are all there at the beginning: step by step, as the scheduler deals."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.plan.solve.roofline import CostModel, step_load


@dataclass(frozen=True)
class Room:
    """What an engine has to work with."""

    max_rows: int
    max_step_tokens: int
    kv_tokens: int


@dataclass(frozen=True)
class Batch:
    seconds: float
    steps: int
    most_rows: int


@dataclass(slots=True)
class _Row:
    prompt: int
    left: int  # tokens to generate
    computed: int = 0


def run_batch(cost: CostModel, requests: Sequence[tuple[int, int]], room: Room) -> Batch:
    """Every request is (prompt tokens, tokens to generate). Decodes first, then prompts, in the order given.

    Nothing is preempted: a request enters when all it will ever need is free. An engine admits sooner and preempts
    later; where memory is that short, this is a little slower than it.
    """
    waiting = deque(_Row(prompt, output) for prompt, output in requests)
    running: list[_Row] = []
    reserved = steps = most = 0
    seconds = 0.0
    while waiting or running:
        budget = room.max_step_tokens
        decodes: list[int] = []
        chunks: list[tuple[int, int, int]] = []
        for row in running:
            if row.computed >= row.prompt:
                row.computed += 1
                row.left -= 1
                decodes.append(row.computed)
        budget -= len(decodes)
        for row in running:
            if row.computed < row.prompt and budget > 0:
                budget -= _read(row, budget, chunks)
        while waiting and budget > 0 and len(running) < room.max_rows:
            need = waiting[0].prompt + waiting[0].left
            if running and reserved + need > room.kv_tokens:
                break
            row = waiting.popleft()
            reserved += need
            running.append(row)
            budget -= _read(row, budget, chunks)
        seconds += cost.seconds(step_load(cost.shape, decodes, chunks))
        steps += 1
        most = max(most, len(running))
        reserved -= sum(row.computed + 1 for row in running if row.left == 0)  # the last token is never computed
        running = [row for row in running if row.left > 0]
    return Batch(seconds, steps, most)


def _read(row: _Row, budget: int, chunks: list[tuple[int, int, int]]) -> int:
    """Read on in a row's prompt; the chunk that ends it samples the first token."""
    count = min(row.prompt - row.computed, budget)
    ends = row.computed + count == row.prompt
    chunks.append((row.computed, count, int(ends)))
    row.computed += count
    row.left -= ends
    return count
