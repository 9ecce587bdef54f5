"""SimulatedRunner: executes steps on a shadow of the KV memory in simulated time, with faults drawn from a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.engine.step import Admission, Loss, Pending, Step, StepResult
from tokenmill.errors import StepFailed
from tokenmill.kv.pruning import Pruning
from tokenmill.sampling.records import TokenLogprobs
from tokenmill.step_time import LinearStepTime, StepTimeModel, facts_of

ROOT = 0x5EED  # what the first position of every sequence is hashed with
_MASK = (1 << 64) - 1
STEP_TIME = LinearStepTime(2e-3, 2.1e-5, 0.0, 2e-5, 0.0)  # of a device that nobody says more of


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
    """What may go wrong, as probabilities per step, and tokens that always break their step."""

    fail_at_launch: float = 0.0
    fail_at_wait: float = 0.0
    lose_memory: float = 0.0  # a step fails, and no row, key or value outlives the reset
    slow: float = 0.0
    slow_factor: float = 50.0
    min_gap: int = 0  # steps between random failures: a device that fails at every step is dead, not faulty
    poisoned_tokens: frozenset[int] = frozenset()  # a row that computes one of these breaks the step
    seed: int = 0
    random: random.Random = field(init=False)
    _calm: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def strike(self, probability: float) -> bool:
        """Whether a random failure happens now."""
        if self._calm or self.random.random() >= probability:
            return False
        self._calm = self.min_gap
        return True

    def pass_step(self) -> None:
        self._calm = max(0, self._calm - 1)


MOVES = -1  # stands for moves of blocks among rows
NO_DRAFT = -1  # stands where nothing was proposed; no token is equal to it
Spans = list[tuple[int, int]]  # of each row of a step: its first position, and how many tokens it computes


@dataclass(slots=True)
class _Row:
    """What the device keeps for a row."""

    tokens: list[int]
    read: list[int]  # what the first stage knows of them; with one stage the same list
    table: list[int]  # block ids
    seed: int
    forbidden: list[int]  # stop ids, not to be sampled before position `forbidden_until`
    forbidden_until: int
    width: int  # best candidates wanted (beams)
    pruned: int = 0  # tokens that have no slot in the table
    pooled: list[float] = field(default_factory=lambda: [0.0, 0.0])  # how many tokens were pooled, and their sum


class SimulatedRunner:
    """A stand-in device. The next token is a hash of all tokens before it, read back through the block table:
    a block that is freed too early, shared wrongly or not copied changes the tokens or is caught at once.

    With several stages a step passes one after the other, each of which takes steps in their order; the last one
    samples, and the first reads nothing but tokens that a step has brought.

    A failed step leaves garbage where it was to write, and so does every step launched behind it.
    What the scheduler did wrong is kept in `violations`, because the engine survives any exception of a runner.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: SimulatedClock,
        *,
        vocab: int = 1000,
        step_time: StepTimeModel = STEP_TIME,
        faults: Faults | None = None,
        stages: Sequence[float] = (1.0,),  # the share of a step's time that each takes
        pruning: Pruning | None = None,
    ) -> None:
        self.block_size, self._pruning = block_size, pruning
        self.clock = clock
        self.vocab = vocab
        self.step_time = step_time
        self.faults = faults or Faults()
        self.launched = 0
        self.violations: list[str] = []
        self._memory = [0] * (num_blocks * block_size)  # per slot: hash of the tokens up to and with it
        self._placed: dict[int, int] = {}  # what was copied from modules, by slot: no token before it says it
        self._rows: dict[int, _Row] = {}
        self._in_flight: deque[_SimulatedPending] = deque()
        self._broken = False  # a launched step failed and nobody has reset the device since
        self._lost = False  # and its memory is gone
        self._shares = stages
        self._free_at = [0.0] * len(stages)
        self.busy = [0.0] * len(stages)  # seconds that each stage has computed

    def launch(self, step: Step) -> Pending:
        self.launched += 1
        faults = self.faults
        faults.pass_step()
        self._apply_changes(step)
        spans = self._spans(step)
        self._check_fences(step, spans)
        self._check_sets(step)
        awaited = {request.id for request, samples in zip(step.requests, step.samples) if samples}
        if faults.strike(faults.fail_at_launch):
            self._scribble(step, spans)
            raise StepFailed(f"injected failure at the launch of step {step.number}")
        seconds = self.step_time.seconds(facts_of(step))
        if faults.slow and faults.random.random() < faults.slow:
            seconds *= faults.slow_factor
        done_at = self._pass_stages(seconds)
        result, error = StepResult(tokens=[]), self._why_it_fails(step, spans)
        if error is None:
            result = self._run(step, spans)
        else:
            self._broken = True
            self._scribble(step, spans)
        pending = _SimulatedPending(self, done_at, result, error, self._blocks_read(step, spans), awaited)
        self._in_flight.append(pending)
        return pending

    def reset(self) -> Loss | None:
        self._in_flight.clear()
        self._broken = False
        if not self._lost:
            return None
        self._lost = False
        self._rows.clear()
        self._memory = [-self.launched] * len(self._memory)
        self._placed.clear()
        return Loss(0.75)

    def close(self) -> None: ...

    def landed(self, pending: _SimulatedPending) -> None:
        """A launched step was waited for; it reads no block any more."""
        self.clock.wait_until(pending.done_at)
        if pending.error is not None:
            raise StepFailed(pending.error)
        if not self._in_flight or self._in_flight.popleft() is not pending:
            self._violation("steps are waited for in another order than they were launched")

    def _pass_stages(self, seconds: float) -> float:
        """When the last stage will be done with a step that takes so long in all."""
        done_at = self.clock.now
        for stage, share in enumerate(self._shares):
            done_at = self._free_at[stage] = max(done_at, self._free_at[stage]) + share * seconds
            self.busy[stage] += share * seconds
        return done_at

    def _why_it_fails(self, step: Step, spans: Spans) -> str | None:
        if self._broken:
            return f"step {step.number} was launched behind a failed step"
        poison = self.faults.poisoned_tokens
        if poison:
            for row, (start, count) in zip(step.rows, spans, strict=True):
                if not poison.isdisjoint(self._rows[row].tokens[start : start + count]):
                    return f"row {row} holds a poisoned token"
        if self.faults.strike(self.faults.fail_at_wait):
            return f"injected failure of step {step.number}"
        if self.faults.lose_memory and self.faults.strike(self.faults.lose_memory):
            self._lost = True
            return f"injected failure of step {step.number}, and of all memory"
        return None

    def _run(self, step: Step, spans: Spans) -> StepResult:
        result = StepResult(tokens=[])
        hashes: list[list[int]] = [[] for _ in step.rows]
        order = sorted(range(len(step.rows)), key=step.starts.__getitem__)  # a prefix is written before its sharer
        for index in order:
            row = self._rows[step.rows[index]]
            start, count = spans[index]
            if step.samples[index]:  # after the tokens that it knows come those that are proposed
                verified = self._verified(step, index, start)
                row.tokens[start + count - step.samples[index] + 1 :] = verified
                row.read[start + count - step.samples[index] + 1 :] = verified
            hashes[index] = self._compute(row, start, count)
        for index, number in enumerate(step.rows):
            row = self._rows[number]
            self._check_history(row, sum(spans[index]))
            result.tokens.append(self._sample(step, index, row, hashes[index], result))
            if number in step.prompt_logprobs:
                first, last = step.starts[index], step.starts[index] + step.counts[index]
                following = row.tokens[first + 1 : min(last + 1, step.prompt_logprobs[number][1])]
                result.prompt_logprobs[index] = [TokenLogprobs(token, -1.0, 1, []) for token in following]
            if number in step.pooling:
                self._pool(step, index, row, result)
        return result

    def _pool(self, step: Step, index: int, row: _Row, result: StepResult) -> None:
        pooling, prompt_len = step.pooling[step.rows[index]]
        end = step.starts[index] + step.counts[index]
        read = row.tokens[step.starts[index] if pooling == "mean" else end - 1 : end]
        row.pooled = [row.pooled[0] + len(read), row.pooled[1] + sum(read)]
        if end == prompt_len:
            result.pooled[index] = row.pooled

    def _spans(self, step: Step) -> Spans:
        """Where each row really starts, and how many tokens it computes: a row with slack is as long as it is here."""
        spans = []
        for number, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            slack = step.slack.get(number)
            if slack is not None:
                first, start = start, len(self._rows[number].tokens) - 1
                if not first <= start <= first + slack and not self._broken:
                    self._violation(f"row {number} starts at {start}, which is not within {first} + {slack}")
            spans.append((start, count))
        return spans

    def _verified(self, step: Step, index: int, start: int) -> list[int]:
        """The proposed tokens at the row's own positions; NO_DRAFT where there is none."""
        drafts = step.drafts.get(step.rows[index], [])
        first = start - step.starts[index]
        wanted = drafts[first : first + max(0, step.samples[index] - 1)]
        return wanted + [NO_DRAFT] * (max(0, step.samples[index] - 1) - len(wanted))

    def _compute(self, row: _Row, start: int, count: int) -> list[int]:
        """Write the hash of every position, each from the one before it as the block table finds it."""
        memory, size, table, tokens, first = self._memory, self.block_size, row.table, row.read, start - row.pruned
        past = ROOT
        if start:
            past = memory[table[(first - 1) // size] * size + (first - 1) % size]
        hashes = []
        for place in range(first, first + count):
            past = mix(past, tokens[place + row.pruned])
            memory[table[place // size] * size + place % size] = past
            hashes.append(past)
            if self._placed:
                self._keep_placed(table[place // size] * size + place % size, None)
        return hashes

    def _apply_changes(self, step: Step) -> None:
        for admission in step.admissions:
            self._rows[admission.row] = _row(admission, len(self._shares) > 1)
        for number, first, blocks in step.blocks:
            self._rows[number].table[first:] = blocks
        for number, position, token in step.chosen:
            self._rows[number].tokens[position] = token
        for number, position, token in step.told:
            row = self._rows[number]
            if row.read is row.tokens or row.tokens[position] != token:
                self._violation(f"row {number} is told {token} at {position}")
            row.read[position:] = [token]
        for number in step.rows:
            self._rows[number].pruned = step.pruned.get(number, 0)
        size = self.block_size
        for compaction in step.compactions:
            whole = self._memory[compaction.sources[-1] * size + size - 1]
            for number, block in enumerate(compaction.targets):
                self._memory[block * size : (block + 1) * size] = [mix(whole, number)] * size
        for move in step.moves:
            there, here = move.source * size, move.target * size
            self._memory[here : here + size] = self._memory[there : there + size]
            for at in range(size) if self._placed else ():
                self._keep_placed(here + at, self._placed.get(there + at))
        for one in step.placements:
            row, source = self._rows[one.row], one.source
            for position in range(one.first, one.first + one.count):
                there = one.blocks[source // size] * size + source % size
                here = self._slot(row, position)
                self._memory[here] = self._placed[here] = mix(self._memory[there], one.first)
                source += 1

    def _scribble(self, step: Step, spans: Spans) -> None:
        """Nobody may read what a failed step was to write."""
        size = self.block_size
        for number, (start, count) in zip(step.rows, spans, strict=True):
            table = self._rows[number].table
            for place in range(start - self._rows[number].pruned, start - self._rows[number].pruned + count):
                self._memory[table[place // size] * size + place % size] = -step.number
        for block in _moved_to(step):
            self._memory[block * size : (block + 1) * size] = [-step.number] * size
        for one in step.placements:
            for position in range(one.first, one.first + one.count):
                self._memory[self._slot(self._rows[one.row], position)] = -step.number

    def _sample(self, step: Step, index: int, row: _Row, hashes: list[int], result: StepResult) -> list[int]:
        """Choose at the last `samples` positions; drafts hold as long as they equal what would have been chosen."""
        samples = step.samples[index]
        if not samples:
            return []
        end = len(row.tokens)
        drafts = row.tokens[end - samples + 1 :]
        held: list[int] = []
        for number in range(samples):
            value, position = hashes[len(hashes) - samples + number], end - samples + 1 + number
            forbidden = row.forbidden if position < row.forbidden_until else []
            held.append(ranked_tokens(value, row.seed, 1, self.vocab, forbidden)[0])
            if number < len(drafts) and drafts[number] != held[-1]:
                break
        if row.width:
            top = beam_candidates(hashes[-1], row.width, self.vocab)
            result.logprobs[index] = [TokenLogprobs(held[0], top[0][1], 1, top)]
        del row.tokens[end - len(drafts) :]
        row.tokens += held
        return held

    def _keep_placed(self, slot: int, value: int | None) -> None:
        if value is None:
            self._placed.pop(slot, None)
        else:
            self._placed[slot] = value

    def _check_history(self, row: _Row, context: int) -> None:
        """One earlier position at random must still hold what this row's tokens say."""
        position = int(self.faults.random.random() * context)
        if row.pruned:
            self._check_pruned_history(row, position)
            return
        past = self._memory[self._slot(row, position - 1)] if position else ROOT
        slot = self._slot(row, position)
        if self._memory[slot] != (self._placed.get(slot) or mix(past, row.tokens[position])):
            self._violation(f"a row reads foreign memory at position {position} of {context}")

    def _check_pruned_history(self, row: _Row, position: int) -> None:
        """The same where a row has survivors of segments: they must be those of its own text."""
        pruning, size = self._pruning, self.block_size
        assert pruning is not None
        first, place, end, number = pruning.first_raw(row.pruned), position, position, -1
        if position >= first:
            place -= row.pruned
        elif position >= pruning.sinks:
            if not pruning.kept:
                return
            segment, within = divmod(position - pruning.sinks, pruning.segment)
            within = within * pruning.kept // pruning.segment
            place, number = pruning.sinks + segment * pruning.kept + within, within // size
            end = pruning.sinks + (segment + 1) * pruning.segment - 1
        expected = ROOT
        for token in row.tokens[: end + 1]:
            expected = mix(expected, token)
        if number >= 0:
            expected = mix(expected, number)
        if self._memory[row.table[place // size] * size + place % size] != expected:
            self._violation(f"a pruned row reads foreign memory for position {position}")

    def _check_sets(self, step: Step) -> None:
        """With stages, nobody is in a step while a token of it is on its way: the first stage could not know that."""
        if len(self._shares) == 1:
            return
        for pending in self._in_flight:
            if not pending.awaited.isdisjoint(request.id for request in step.requests):
                self._violation(f"step {step.number} has requests whose tokens a launched step has yet to sample")

    def _check_fences(self, step: Step, spans: Spans) -> None:
        """A block that starts a new life must not be one that a step in flight still reads.

        A row whose drafts are in flight may write again where they stood.
        """
        if not self._in_flight:
            return
        size = self.block_size
        fresh = {MOVES: set(_moved_to(step))}
        for number, (start, count) in zip(step.rows, spans, strict=True):
            place = start - self._rows[number].pruned
            first, last = -(-place // size), (place + count - 1) // size  # blocks whose first slot is written
            fresh[number] = set(self._rows[number].table[first : last + 1]) if first <= last else set()
        for one in step.placements:
            table, end = self._rows[one.row].table, one.first + one.count - 1
            fresh[one.row] |= set(table[-(-one.first // size) : end // size + 1])
        written_at_all = set().union(*fresh.values())
        for pending in self._in_flight:
            for reader, blocks in pending.reads.items():
                if blocks.isdisjoint(written_at_all):
                    continue
                for writer, written in fresh.items():
                    own = reader == writer and writer in step.slack
                    if not own and not written.isdisjoint(blocks):
                        self._violation(f"step {step.number} writes {written & blocks}, which a launched step reads")

    def _blocks_read(self, step: Step, spans: Spans) -> dict[int, set[int]]:
        blocks = {MOVES: {move.source for move in step.moves}}
        blocks[MOVES].update(block for one in step.placements for block in one.blocks)
        blocks[MOVES].update(block for one in step.compactions for block in one.sources)
        for number, (start, count) in zip(step.rows, spans, strict=True):
            row = self._rows[number]
            blocks[number] = set(row.table[: (start + count - 1 - row.pruned) // self.block_size + 1])
        return blocks

    def _slot(self, row: _Row, position: int) -> int:
        return row.table[position // self.block_size] * self.block_size + position % self.block_size

    def _violation(self, what: str) -> None:
        self.violations.append(what)
        raise AssertionError(what)


def _moved_to(step: Step) -> list[int]:
    return [move.target for move in step.moves] + [block for one in step.compactions for block in one.targets]


@dataclass(slots=True)
class _SimulatedPending:
    runner: SimulatedRunner
    done_at: float
    result: StepResult
    error: str | None
    reads: dict[int, set[int]]  # blocks, by row
    awaited: set[str]  # requests that it samples from

    def wait(self) -> StepResult:
        self.runner.landed(self)
        return self.result


def _row(admission: Admission, staged: bool) -> _Row:
    params, tokens = admission.params, list(admission.tokens)
    return _Row(
        tokens=tokens,
        read=list(tokens) if staged else tokens,
        table=[],
        seed=0 if params.greedy else admission.seed,
        forbidden=admission.stop_ids,
        forbidden_until=admission.prompt_len + params.min_tokens,
        width=2 * params.beam_width + len(admission.stop_ids) if params.beam_width else 0,
    )


def ranked_tokens(value: int, seed: int, width: int, vocab: int, forbidden: list[int]) -> list[int]:
    """The `width` best tokens to follow a sequence whose last hash is `value`."""
    value = mix(value, seed)
    ranked: list[int] = []
    while len(ranked) < width:
        value = mix(value, 1)
        token = value % vocab
        if token not in ranked and token not in forbidden:
            ranked.append(token)
    return ranked


def beam_candidates(value: int, width: int, vocab: int) -> list[tuple[int, float]]:
    """The best (token, logprob) to follow; logprobs differ from sequence to sequence, so beams overtake each other."""
    tokens = ranked_tokens(value, 0, width, vocab, [])
    slope = 0.05 + (value % 64) / 256
    return [(token, -slope * (place + 1)) for place, token in enumerate(tokens)]


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers."""
    x = (a * 0x9E3779B97F4A7C15 + b + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
