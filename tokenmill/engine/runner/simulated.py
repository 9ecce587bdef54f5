"""SimulatedRunner: executes steps on a shadow of the KV memory in simulated time, with faults drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.engine.step import Pending, Step, StepResult, TokenLogprobs
from tokenmill.errors import StepFailed

_MASK = (1 << 64) - 1


class SimulatedClock:
    """Time that moves only when somebody waits."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass
class Faults:
    """What may go wrong, as probabilities per step, and requests that always break their step."""

    fail_at_launch: float = 0.0
    fail_at_wait: float = 0.0
    slow: float = 0.0
    slow_factor: float = 50.0
    poisoned_tokens: frozenset[int] = frozenset()  # a row that computes one of these breaks the step
    seed: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)


def linear_cost(base: float = 0.002, per_token: float = 2e-5, per_row: float = 1e-6) -> Callable[[Step], float]:
    """A step's seconds: weights once, then tokens, then rows."""
    return lambda step: base + per_token * step.num_tokens + per_row * len(step.rows)


class SimulatedRunner:
    """A stand-in device. The next token is a hash of all tokens before it, read back through the block table:
    a block that is freed too early, shared wrongly or not copied changes the tokens or is caught at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: SimulatedClock,
        *,
        vocab: int = 1000,
        cost: Callable[[Step], float] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.block_size = block_size
        self.clock = clock
        self.vocab = vocab
        self.cost = cost or linear_cost()
        self.faults = faults or Faults()
        self.launched = 0
        self._memory = [0] * (num_blocks * block_size)  # per slot: hash of the tokens up to and with it
        self._tokens: dict[int, list[int]] = {}  # row -> tokens
        self._tables: dict[int, list[int]] = {}  # row -> blocks
        self._seeds: dict[int, int] = {}
        self._stops: dict[int, tuple[list[int], int]] = {}  # row -> stop ids and the length before which they are forbidden
        self._widths: dict[int, int] = {}  # row -> best candidates wanted (beams)
        self._free_at = 0.0

    def launch(self, step: Step) -> Pending:
        self.launched += 1
        if self.faults.random.random() < self.faults.fail_at_launch:
            raise StepFailed(f"injected failure at the launch of step {step.number}")
        seconds = self.cost(step)
        if self.faults.random.random() < self.faults.slow:
            seconds *= self.faults.slow_factor
        self._free_at = max(self._free_at, self.clock.now) + seconds
        error = None
        if self.faults.random.random() < self.faults.fail_at_wait:
            error = f"injected failure of step {step.number}"
        try:
            result = self._run(step)
        except StepFailed as failure:
            result, error = StepResult(tokens=[]), str(failure)
        return _SimulatedPending(self.clock, self._free_at, result, error)

    def reset(self) -> None:
        """Nothing to drop: a step's work is done when it is launched."""

    def close(self) -> None: ...

    def _run(self, step: Step) -> StepResult:
        self._apply_changes(step)
        result = StepResult(tokens=[])
        hashes: list[list[int]] = [[] for _ in step.rows]
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            if self.faults.poisoned_tokens.intersection(self._tokens[row][start : start + count]):
                raise StepFailed(f"row {row} holds a poisoned token")
        order = sorted(range(len(step.rows)), key=lambda i: step.starts[i])  # a prefix is written before its sharer
        for index in order:
            row, start = step.rows[index], step.starts[index]
            drafts = step.drafts.get(row, [])
            known = self._tokens[row]
            if drafts:
                known[start + step.counts[index] - len(drafts) :] = drafts
            for position in range(start, start + step.counts[index]):
                past = self._memory[self._slot(row, position - 1)] if position else self._root(row)
                value = _mix(past, known[position])
                self._memory[self._slot(row, position)] = value
                hashes[index].append(value)
        for index, row in enumerate(step.rows):
            self._check_history(row, step.starts[index] + step.counts[index])
            result.tokens.append(self._sample(step, index, row, hashes[index], result))
        return result

    def _apply_changes(self, step: Step) -> None:
        for admission in step.admissions:
            self._tokens[admission.row] = list(admission.tokens)
            self._tables[admission.row] = []
            self._seeds[admission.row] = 0 if admission.params.greedy else admission.seed
            until = admission.prompt_len + admission.params.min_tokens
            self._stops[admission.row] = (admission.stop_ids, until)
            width = admission.params.beam_width
            self._widths[admission.row] = 2 * width + len(admission.stop_ids) if width else 0
        for row, first, blocks in step.blocks:
            table = self._tables[row]
            table[first:] = blocks
        for row, position, token in step.chosen:
            self._tokens[row][position] = token
        size = self.block_size
        for source, target in step.copies:
            self._memory[target * size : (target + 1) * size] = self._memory[source * size : (source + 1) * size]

    def _sample(self, step: Step, index: int, row: int, hashes: list[int], result: StepResult) -> list[int]:
        """Choose at the last `samples` positions; drafts hold as long as they equal what would have been chosen."""
        samples = step.samples[index]
        if not samples:
            return []
        tokens = self._tokens[row]
        end = step.starts[index] + step.counts[index]
        drafts = step.drafts.get(row, [])
        held: list[int] = []
        for number in range(samples):
            candidates = self._ranked(row, hashes[len(hashes) - samples + number], end - samples + 1 + number)
            held.append(candidates[0])
            if number < len(drafts) and drafts[number] != candidates[0]:
                break
        if self._widths[row]:
            ranked = self._ranked(row, hashes[-1], end)[: self._widths[row]]
            top = [(token, -0.1 * (place + 1)) for place, token in enumerate(ranked)]
            result.logprobs[index] = [TokenLogprobs(held[0], -0.1, 1, top)]
        del tokens[end - len(drafts) :]
        tokens += held
        return held

    def _ranked(self, row: int, value: int, position: int) -> list[int]:
        value = _mix(value, self._seeds[row])
        forbidden, until = self._stops[row]
        ranked: list[int] = []
        while len(ranked) < max(1, self._widths[row]):
            value = _mix(value, 1)
            token = value % self.vocab
            if token not in ranked and not (token in forbidden and position < until):
                ranked.append(token)
        return ranked

    def _check_history(self, row: int, context: int) -> None:
        """One earlier position at random must still hold what this row's tokens say."""
        position = self.faults.random.randrange(context)
        past = self._memory[self._slot(row, position - 1)] if position else self._root(row)
        if self._memory[self._slot(row, position)] != _mix(past, self._tokens[row][position]):
            raise AssertionError(f"row {row} reads foreign memory at position {position} of {context}")

    def _slot(self, row: int, position: int) -> int:
        return self._tables[row][position // self.block_size] * self.block_size + position % self.block_size

    def _root(self, row: int) -> int:
        return 0x5EED


@dataclass
class _SimulatedPending:
    clock: SimulatedClock
    done_at: float
    result: StepResult
    error: str | None

    def wait(self) -> StepResult:
        self.clock.wait_until(self.done_at)
        if self.error is not None:
            raise StepFailed(self.error)
        return self.result


def _mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers."""
    x = (a * 0x9E3779B97F4A7C15 + b + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
