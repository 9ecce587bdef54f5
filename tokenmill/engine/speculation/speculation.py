"""Speculation: asks the proposers before each step, and gives requests the drafts that are worth verifying."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tokenmill.engine.request import Request
from tokenmill.engine.speculation.budget import admit
from tokenmill.engine.speculation.calibration import Calibration, Floats, RequestRecord
from tokenmill.engine.speculation.device_budget import SETTLE, DeviceBudget
from tokenmill.engine.speculation.grammar_forced import GrammarProposer
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.engine.speculation.proposer import (
    MAX_DRAFTS,
    Draft,
    DraftsOnDevice,
    KeepsUp,
    Proposer,
    WritesAhead,
    in_background,
)
from tokenmill.engine.step import DRAFTED, NODES, ON_DEVICE, ON_TREE, Step, StepResult
from tokenmill.errors import ModelError
from tokenmill.sampling.grammar import Constraint
from tokenmill.step_time import Facts, FittedStepTime

log = logging.getLogger("tokenmill.engine")

FEW = 4  # rows: with more, a GPU would wait for a host that asks about each
ASKING_SHARE = 0.3  # of a step, that asking may take beside it; so many turns later it is tried again
ASK_AGAIN = 512
CHECKED_PER_TURN = 32  # drafts that grammars are asked about: masks take the engine's own time
MANY = 32  # rows: with so many, those for which nothing was found are asked about less often
# Times that a device's drafts were verified and not one held: its head is another model's, or what it computes is no
# number, which nobody sees who only hears of what held
NEVER_HELD = 2048
SHORT = 8  # an engine's first steps with requests that decode: proposers that take a while to load are made behind them
ENOUGH = 2.5  # tokens that a draft is expected to bring, with which no other proposer is asked: heads take their time


@dataclass
class DraftStats:
    """Of one proposer."""

    drafted: int = 0  # tokens that steps verified
    accepted: int = 0  # and that held
    steps: int = 0  # rows of steps that verified any


_Found = tuple[Draft, int, Floats]  # who made it, and the chances of what a step could verify


@dataclass
class _Record:
    """What is remembered of a running request."""

    salt: str  # of the request
    own: list[RequestRecord]  # by proposer
    probes: list[tuple[int, Draft] | None]  # by proposer: a draft that was made at this length, until it is judged
    sources: dict[int, int] = field(default_factory=dict)  # start of a launched step's row -> who proposed its drafts
    due: int = 0  # the turn in which it is asked about again


class Speculation:
    """One budget for all requests and proposers: chain lengths, and no drafts at all, follow from it."""

    def __init__(self, max_tokens: int, per_token: float, proposers: Sequence[Proposer] = ()) -> None:
        self.proposers: list[Proposer] = []
        self.coming: list[Future[Proposer]] = []  # proposers that are still being made
        self.later: list[Callable[[], Proposer]] = []  # and those that are not made in the first steps
        self._steps = 0  # with requests that decode
        self.stats: dict[str, DraftStats] = {}
        # Models of its own: pace learns gaps between tokens, in which a CPU also asks proposers and makes text (a
        # quarter more than the step, with the default model), and what asking costs is weighed apart here. Prompts are
        # not learned: beside them no drafts are verified.
        self.time = FittedStepTime(per_token=per_token)
        self.drafting_time = FittedStepTime(per_token=per_token)  # of steps at whose end the device drafts
        self.tree_time = FittedStepTime(per_token=per_token)  # of those that verify and draft trees
        self.tree_rows = 0  # up to so many rows may do that
        self.tree = False  # whether they do in the next step
        self.drafting = False  # whether the next step has the device draft for the one after it
        self.budget: DeviceBudget | None = None  # of what it drafts
        self.room_ahead = 0  # positions behind a step's last one where that leaves keys and values
        self._drafter: int | None = None  # number of the proposer that does
        self._drafts: DraftsOnDevice | None = None  # the same, where something can go wrong
        self._keeps_up: KeepsUp | None = None  # and where it reads what steps compute
        self._read: dict[int, int] = {}  # launched steps: tokens that were read for them
        self._reading = 0  # for the next one
        self._asks_host = False  # whether others than grammars are asked by the host
        # Numbers of the newest steps at whose end it did, and whether it drafted trees
        self._drafting_steps: deque[tuple[int, bool]] = deque(maxlen=8)
        self._asked_steps: dict[int, bool] = {}  # launched steps: whether proposers were asked for them
        self._plain_steps: dict[int, int] = {}  # by the logarithm of their rows: timed steps without drafts
        self.payoff = Payoff()
        self.most_rows = max_tokens  # with more rows than this nothing is proposed
        # A device computes while proposers are asked: then the clock tells if it waits for them. Steps without drafts
        # are timed first.
        self.beside = False
        self._on = False  # whether proposers were asked for the newest step
        self._asking = 0.0  # seconds that this takes
        self._chances_to_ask = 0  # turns in which a GPU's host could
        self._max_tokens = max_tokens  # of a step that only decodes
        self._calibrations: list[Calibration] = []
        self._records: dict[str, _Record] = {}
        self._watching = True  # whether steps are timed
        self._turn = 0
        self._failed: list[Proposer] = []
        self._left_to_check = 0  # drafts in this turn
        for one in proposers:
            self.add(one)

    def add(self, proposer: Proposer) -> None:
        self.proposers.append(proposer)
        self.stats.setdefault(proposer.name, DraftStats())
        self._calibrations.append(Calibration(proposer))
        if proposer.on_device:
            self._drafter = len(self.proposers) - 1
            self._drafts = proposer if isinstance(proposer, DraftsOnDevice) else None
            self._keeps_up = proposer if isinstance(proposer, KeepsUp) else None
            self.room_ahead = proposer.room_ahead if isinstance(proposer, WritesAhead) else 0
            self.budget = self.budget or DeviceBudget(proposer.on_device, self.time, self.drafting_time, self.tree_time)
        elif not isinstance(proposer, GrammarProposer):
            self._asks_host = True
        self._records.clear()

    def rests(self, rows: int, constrained: bool) -> bool:
        """Whether nothing is proposed while so many requests run, with grammars or without: then nobody need find out
        which of them decode.
        """
        idle = rows > self.most_rows
        if self.budget is not None and rows > FEW and not constrained:
            idle |= 2 * rows > self._max_tokens or self.budget.rests(rows)
        if idle:
            self.drafting = self.tree = self._watching = self._on = False
        return idle

    def propose(self, requests: Sequence[Request]) -> None:
        """Set `drafts` of requests that decode, before each step: tokens for the positions from `num_tokens` on.

        `num_tokens` counts tokens that launched steps will sample (`pending`) and that nobody on the host knows yet:
        a proposer guesses these first, and they are left out of `drafts`. The first `unsure` drafts only bridge what
        may have been accepted meanwhile; the rest is verified.
        """
        self._watching = True
        self._steps += bool(requests)
        if self.coming or (self.later and self._steps > SHORT):
            self._take_in_proposers()
        if self._failed:
            self._drop_failed()
        if not self.proposers or not requests:
            return
        rows = len(requests)
        if self.budget is not None:
            self._propose_on_device(requests, self.budget)
            return
        settled = not self.beside or self._plain_steps.get(rows.bit_length(), 0) >= SETTLE
        self._on = settled and rows <= self.most_rows and self.payoff.on(rows)
        if not self._on:
            return
        began = time.perf_counter()
        self._propose(requests, rows)
        self._asked(time.perf_counter() - began)

    def _propose(self, requests: Sequence[Request], rows: int) -> None:
        """rows: of the step, which may have more than these requests."""
        self._turn += 1
        self._left_to_check = CHECKED_PER_TURN
        asked: list[tuple[Request, _Record]] = []
        for request in requests:
            record = self._record(request)
            self._judge(request, record)
            if record.due <= self._turn or (request.grammar is not None and request.grammar.forced):
                asked.append((request, record))
        if not asked:
            return
        ahead = max(request.pending + request.unsure for request, _ in asked)
        found: list[_Found | None] = [None] * len(asked)
        for index, one in enumerate(self.proposers):
            open_ = [i for i, best in enumerate(found) if best is None or best[2].sum() < ENOUGH]
            if one.on_device or not open_:
                continue
            drafts = self._ask(one, [asked[i][0] for i in open_], MAX_DRAFTS + ahead)
            for i, draft in zip(open_, drafts, strict=True):
                found[i] = self._better(*asked[i], index, draft, found[i])
        if self._failed:
            self._drop_failed()
            return
        least = self.budget.expects if self.budget is not None and self.drafting else 0.0
        chosen, chances = [], []
        for (request, record), best in zip(asked, found, strict=True):
            if best is not None and best[2].sum() > least:
                chosen.append((request, record, *best[:2]))
                chances.append(best[2])
            elif len(requests) >= MANY:
                record.due = self._turn + len(requests) // MANY
        times = self.drafting_time if self.drafting else self.time
        counts = admit(chances, rows, self._max_tokens - rows, times.decoding)
        for (request, record, draft, source), count in zip(chosen, counts, strict=True):
            if count and request.grammar is not None:
                count = self._check(request.grammar, draft.tokens[:count])
            if count:
                request.drafts = draft.tokens[request.pending : request.pending + request.unsure + count]
                record.sources[request.num_tokens - 1] = source

    def _propose_on_device(self, requests: Sequence[Request], budget: DeviceBudget) -> None:
        """Of few rows the others are asked first. What they have no better draft for verifies what the device drafted;
        only its number is known here, so not under a grammar.
        """
        if self._drafts is not None and self._drafts.failure is not None:
            self._fails(self._drafts, self._drafts.failure)
            self._drop_failed()
            return
        rows = len(requests)
        branches = rows <= self.tree_rows and not any(
            one.grammar is not None or one.params.shapes_logits for one in requests
        )
        length = budget.turn(rows, self._max_tokens, branches) if rows <= self.most_rows else 0
        self.drafting = length > 0
        self.tree = self.drafting and budget.tree
        constrained = [one for one in requests if one.grammar is not None]
        if rows <= FEW and self._asks_host:
            self._ask_beside(requests)
        elif constrained:  # what a grammar leaves no choice about saves whole steps
            self._propose(constrained, rows)
        if not length:
            return
        keeps_up = self._catch_up(requests)
        newest = dict(self._drafting_steps)
        for request in requests:
            if keeps_up is not None and not keeps_up.follows(request):
                continue
            if request.last_step in newest and request.grammar is None and not request.drafts:
                kind = ON_TREE if self.tree and newest[request.last_step] else ON_DEVICE
                request.drafts = [kind] * (request.unsure + length)

    def _catch_up(self, requests: Sequence[Request]) -> KeepsUp | None:
        if self._keeps_up is not None:
            try:
                self._reading = self._keeps_up.catch_up(requests)
            except Exception as error:
                self._fails(self._keeps_up, error)
                self._drop_failed()
        return self._keeps_up

    def _ask_beside(self, requests: Sequence[Request]) -> None:
        """Ask on the host, while a GPU computes a step: where that takes long beside it, the next step would wait."""
        self._chances_to_ask += 1
        step = float(self.time.decoding(np.array([len(requests)]))[0])
        if self._asking > ASKING_SHARE * step and self._chances_to_ask % ASK_AGAIN:
            return
        began = time.perf_counter()
        self._propose(requests, len(requests))
        self._asked(time.perf_counter() - began)

    def _asked(self, took: float) -> None:
        self._asking += 0.1 * (min(took, 4 * self._asking) - self._asking) if self._asking else took

    def launched(self, step: Step) -> None:
        """A step is on its way."""
        if step.drafting:
            self._drafting_steps.append((step.number, step.tree))
        if self._keeps_up is not None:
            self._keeps_up.launched(step)
            if self._reading:
                self._read[step.number], self._reading = self._reading, 0
        if self.budget is None:
            if len(self._asked_steps) > MANY:  # steps that failed
                self._asked_steps.clear()
            self._asked_steps[step.number] = self._on

    def committed(self, step: Step, result: StepResult, seconds: float) -> None:
        """A step was computed, in so many seconds."""
        asked = self._asked_steps.pop(step.number, self._on)
        read = self._read.pop(step.number, 0)
        if self._keeps_up is not None and step.drafting:
            self._keeps_up.committed(step, result)
        if not (self._watching or step.drafts or step.drafting):
            return
        if len(step.rows) == len(step.drafts) + step.num_singles:
            if self.budget is None:
                self._weigh(step, result, asked, seconds)
            if step.tree:
                self.tree_time.learn(Facts(decode_rows=len(step.rows) * (1 + NODES)), seconds)
            elif step.drafting and read > step.num_tokens:
                pass  # a beginning is read once, for many steps
            elif step.drafting:
                self.drafting_time.learn(Facts(decode_rows=step.num_tokens), seconds)
            elif step.drafts or not (step.slack if self.budget is not None else asked and self.beside):
                self.time.learn(Facts(decode_rows=step.num_tokens), seconds)
                if not step.drafts:
                    size = len(step.rows).bit_length()
                    self._plain_steps[size] = self._plain_steps.get(size, 0) + 1
        if step.drafts:
            self._count(step, result)

    def _count(self, step: Step, result: StepResult) -> None:
        """Which drafts held."""
        trees: list[int] = []  # drafts that held
        verified, held = [], []  # of the device's own: what it proposed is known to be this only now
        rows = zip(step.requests, step.rows, step.starts, step.samples, result.tokens)
        for request, row, start, samples, tokens in rows:
            if samples < 2 or request.finish is not None:  # of those that ended it is not known any more who proposed
                continue
            record = self._records.get(request.id)
            source = self._drafter if record is None else record.sources.pop(start, self._drafter)
            if source is None:  # who proposed it is gone
                continue
            stats, after = self.stats[self.proposers[source].name], max(0, len(tokens) - 1)
            stats.steps += 1
            stats.drafted += samples - 1
            stats.accepted += after
            if source != self._drafter:
                continue
            if step.tree and samples == 1 + DRAFTED and step.drafts[row][-1] == ON_TREE:
                trees.append(after)
            else:
                verified.append(samples - 1)
                held.append(after)
        if self.budget is not None and verified:
            self.budget.count(verified, held)
        if self.budget is not None and trees:
            self.budget.count_trees(trees)
        if self._drafter is not None and not self._failed:
            drafter = self.proposers[self._drafter]
            stats = self.stats[drafter.name]
            if stats.steps >= NEVER_HELD and not stats.accepted:
                self._fails(drafter, ModelError(f"none of {stats.drafted} was what the model said"))

    def _weigh(self, step: Step, result: StepResult, asked: bool, seconds: float) -> None:
        """Whether the step's drafts were worth their time, and that of proposing them."""
        rows = len(step.rows)
        if not asked:
            self.payoff.rested(rows)
            return
        plain = float(self.time.decoding(np.array([rows]))[0])
        taken = seconds if self.beside else float(self.time.decoding(np.array([step.num_tokens]))[0]) + self._asking
        self.payoff.learn(rows, sum(map(len, result.tokens)) / rows, taken / plain)

    def ended(self, request: Request) -> None:
        self._records.pop(request.id, None)
        for one in self.proposers:
            one.ended(request)

    def forget(self, salt: str | None = None) -> None:
        """Nothing that was read of any text, or of those with this cache salt, may be used any more."""
        for id in [id for id, record in self._records.items() if salt is None or record.salt == salt]:
            del self._records[id]
        for one in self.proposers:
            one.forget(salt)

    def reset(self) -> None:
        """Launched steps have failed."""
        self._read.clear()
        self._reading = 0
        if self._keeps_up is not None:
            self._keeps_up.reset()

    def _take_in_proposers(self) -> None:
        self.coming += map(in_background, self.later)
        self.later.clear()
        for one in [one for one in self.coming if one.done()]:
            self.coming.remove(one)
            if (error := one.exception()) is None:
                self.add(one.result())
            else:
                self.misses(error)

    def misses(self, error: BaseException) -> None:
        """A proposer could not be made: there are fewer drafts."""
        log.warning("a proposer of drafts is missing: %s", error)

    def _ask(self, proposer: Proposer, requests: Sequence[Request], length: int) -> Sequence[Draft | None]:
        try:
            return proposer.propose(requests, length)
        except Exception as error:  # a proposer may fail in its own way: that costs its drafts, and no answer
            self._fails(proposer, error)
            return [None] * len(requests)

    def _fails(self, proposer: Proposer, error: Exception) -> None:
        log.warning("drafts of %s are not used any more: %s", proposer.name, error)
        self._failed.append(proposer)

    def _drop_failed(self) -> None:
        left = [one for one in self.proposers if one not in self._failed]
        if any(one.on_device for one in self._failed):
            self.budget, self._drafts, self._keeps_up, self.room_ahead = None, None, None, 0
        self._failed, self.proposers, self._calibrations = [], [], []
        self._drafter, self._asks_host = None, False
        self.drafting = self.tree = False
        self._records.clear()
        for one in left:
            self.add(one)

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request.id)
        if record is None:
            number = len(self.proposers)
            record = _Record(request.salt, [RequestRecord() for _ in range(number)], [None] * number)
            self._records[request.id] = record
        return record

    def _better(
        self, request: Request, record: _Record, index: int, draft: Draft | None, best: _Found | None
    ) -> _Found | None:
        """The draft of this proposer, if more is to be expected from it than from the best one so far."""
        if draft is None:
            return best
        chances = self._calibrations[index].chances(draft, record.own[index])
        if record.probes[index] is None:
            record.probes[index] = len(request.tokens), draft
        chances = chances[request.pending + request.unsure :]
        is_better = len(chances) and (best is None or chances.sum() > best[2].sum())
        if is_better and (request.grammar is None or request.grammar.may_begin(draft.tokens)):
            return draft, index, chances
        return best

    def _check(self, grammar: Constraint, tokens: list[int]) -> int:
        """How many of these may be verified: as many as there are masks for."""
        known = len(grammar.masks_behind(tokens))
        checked = grammar.check(tokens[: known + self._left_to_check])
        self._left_to_check -= checked - known
        return checked

    def _judge(self, request: Request, record: _Record) -> None:
        """Compare older drafts, verified or not, with what was sampled."""
        for index, probe in enumerate(record.probes):
            if probe is None:
                continue
            base, draft = probe
            tokens = draft.tokens[:MAX_DRAFTS]
            said = request.tokens[base : base + len(tokens)]
            held = next((n for n, (one, other) in enumerate(zip(said, tokens)) if one != other), len(said))
            if held < len(said) or held == len(tokens):
                self._calibrations[index].count(draft.kinds[: len(tokens)], held, record.own[index])
                record.probes[index] = None
