"""Speculation: asks the proposers before each step, and gives requests the drafts that are worth verifying."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tokenmill.engine.request import Request
from tokenmill.engine.speculation.budget import admit
from tokenmill.engine.speculation.calibration import Calibration, Floats, RequestRecord
from tokenmill.engine.speculation.device_budget import SETTLE, DeviceBudget
from tokenmill.engine.speculation.grammar_forced import GrammarProposer
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.engine.speculation.proposer import MAX_DRAFTS, Draft, Proposer
from tokenmill.engine.step import ON_DEVICE, Step, StepResult
from tokenmill.sampling.grammar import Constraint
from tokenmill.step_time import Facts, FittedStepTime

log = logging.getLogger("tokenmill.engine")

FEW = 4  # rows: with more, a GPU would wait for a host that asks about each
ASKING_SHARE = 0.1  # of a step, that asking may take beside it; so many turns later it is tried again
ASK_AGAIN = 512
CHECKED_PER_TURN = 32  # drafts that grammars are asked about: masks take the engine's own time
MANY = 32  # rows: with so many, those for which nothing was found are asked about less often


@dataclass
class DraftStats:
    """Of one proposer."""

    drafted: int = 0  # tokens that steps verified
    accepted: int = 0  # and that held
    steps: int = 0  # rows of steps that verified any


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
        self.stats: dict[str, DraftStats] = {}
        # Models of its own: pace learns gaps between tokens, in which a CPU also asks proposers and makes text (a
        # quarter more than the step, with the default model), and what asking costs is weighed apart here. Prompts are
        # not learned: beside them no drafts are verified.
        self.time = FittedStepTime(per_token=per_token)
        self.drafting_time = FittedStepTime(per_token=per_token)  # of steps at whose end the device drafts
        self.drafting = False  # whether the next step has the device draft for the one after it
        self.budget: DeviceBudget | None = None  # of what it drafts
        self._drafter: int | None = None  # number of the proposer that does
        self._asks_host = False  # whether others than grammars are asked by the host
        self._drafting_steps: deque[int] = deque(maxlen=8)  # numbers of the newest steps at whose end it did
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
            self.budget = self.budget or DeviceBudget(proposer.on_device, self.time, self.drafting_time)
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
            self.drafting = self._watching = self._on = False
        return idle

    def propose(self, requests: Sequence[Request]) -> None:
        """Set `drafts` of requests that decode, before each step: tokens for the positions from `num_tokens` on.

        `num_tokens` counts tokens that launched steps will sample (`pending`) and that nobody on the host knows yet:
        a proposer guesses these first, and they are left out of `drafts`. The first `unsure` drafts only bridge what
        may have been accepted meanwhile; the rest is verified.
        """
        self._watching = True
        if self.coming:
            self._take_in_proposers()
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
        found = [
            [] if one.on_device else self._ask(one, [request for request, _ in asked], MAX_DRAFTS + ahead)
            for one in self.proposers
        ]
        if self._failed:
            self._drop_failed()
            return
        least = float(self.budget.chances.sum()) if self.budget is not None and self.drafting else 0.0
        chosen, chances = [], []
        for index, (request, record) in enumerate(asked):
            best = self._best(request, record, [drafts[index] if drafts else None for drafts in found])
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
        rows = len(requests)
        length = budget.turn(rows, self._max_tokens) if rows <= self.most_rows else 0
        self.drafting = length > 0
        constrained = [one for one in requests if one.grammar is not None]
        if rows <= FEW and self._asks_host:
            self._ask_beside(requests)
        elif constrained:  # what a grammar leaves no choice about saves whole steps
            self._propose(constrained, rows)
        if not length:
            return
        newest = set(self._drafting_steps)
        for request in requests:
            if request.last_step in newest and request.grammar is None and not request.drafts:
                request.drafts = [ON_DEVICE] * (request.unsure + length)

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
            self._drafting_steps.append(step.number)
        if self.budget is None:
            if len(self._asked_steps) > MANY:  # steps that failed
                self._asked_steps.clear()
            self._asked_steps[step.number] = self._on

    def committed(self, step: Step, result: StepResult, seconds: float) -> None:
        """A step was computed, in so many seconds."""
        asked = self._asked_steps.pop(step.number, self._on)
        if not (self._watching or step.drafts or step.drafting):
            return
        if len(step.rows) == len(step.drafts) + step.num_singles:
            if self.budget is None:
                self._weigh(step, result, asked, seconds)
            if step.drafting:
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
        verified, held = [], []  # of the device's own: what it proposed is known to be this only now
        for request, start, samples, tokens in zip(step.requests, step.starts, step.samples, result.tokens):
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
            if source == self._drafter:
                verified.append(samples - 1)
                held.append(after)
        if self.budget is not None and verified:
            self.budget.count(verified, held)

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

    def _take_in_proposers(self) -> None:
        for one in [one for one in self.coming if one.done()]:
            self.coming.remove(one)
            if (error := one.exception()) is None:
                self.add(one.result())
            else:
                log.warning("a proposer of drafts is missing: %s", error)

    def _ask(self, proposer: Proposer, requests: Sequence[Request], length: int) -> Sequence[Draft | None]:
        try:
            return proposer.propose(requests, length)
        except Exception as error:  # a proposer may fail in its own way: that costs its drafts, and no answer
            log.warning("drafts of %s are not used any more: %s", proposer.name, error)
            self._failed.append(proposer)
            return [None] * len(requests)

    def _drop_failed(self) -> None:
        left = [one for one in self.proposers if one not in self._failed]
        if any(one.on_device for one in self._failed):
            self.budget = None
        self._failed, self.proposers, self._calibrations = [], [], []
        self._drafter, self._asks_host = None, False
        self.drafting = False
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

    def _best(
        self, request: Request, record: _Record, drafts: Sequence[Draft | None]
    ) -> tuple[Draft, int, Floats] | None:
        """The draft from which most is to be expected, who made it, and the chances of what a step could verify."""
        best: tuple[Draft, int, Floats] | None = None
        for index, draft in enumerate(drafts):
            if draft is None:
                continue
            chances = self._calibrations[index].chances(draft, record.own[index])
            if record.probes[index] is None:
                record.probes[index] = len(request.tokens), draft
            chances = chances[request.pending + request.unsure :]
            is_better = len(chances) and (best is None or chances.sum() > best[2].sum())
            if is_better and (request.grammar is None or request.grammar.may_begin(draft.tokens)):
                best = draft, index, chances
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
