"""Speculation: asks the proposers before each step, and gives requests the drafts that are worth verifying."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tokenmill.engine.request import Request
from tokenmill.engine.speculation.budget import admit
from tokenmill.engine.speculation.calibration import Calibration, Floats, RequestRecord
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.engine.speculation.proposer import MAX_DRAFTS, Draft, Proposer
from tokenmill.engine.step import DRAFTED, ON_DEVICE, Step, StepResult
from tokenmill.sampling.grammar import Constraint
from tokenmill.step_time import Facts, FittedStepTime

log = logging.getLogger("tokenmill.engine")

TRY_AGAIN, TRIES = 512, 12  # of so many turns this many are tried, whatever is known
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
    drafted: int = 0  # number of the newest step at whose end the device drafted for it


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
        self._drafter: int | None = None  # number of the proposer that does
        self.payoff = Payoff()
        self.most_rows = max_tokens  # with more rows than this nothing is proposed
        self.beside = False  # a device computes while proposers are asked: then steps' times tell if it waits for them
        self._on = False  # whether proposers were asked for the newest step
        self._asking = 0.0  # seconds that this takes
        self._max_tokens = max_tokens  # of a step that only decodes
        self._calibrations: list[Calibration] = []
        self._records: dict[str, _Record] = {}
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
        self._records.clear()

    def propose(self, requests: Sequence[Request]) -> None:
        """Set `drafts` of requests that decode, before each step: tokens for the positions from `num_tokens` on.

        `num_tokens` counts tokens that launched steps will sample (`pending`) and that nobody on the host knows yet:
        a proposer guesses these first, and they are left out of `drafts`. The first `unsure` drafts only bridge what
        may have been accepted meanwhile; the rest is verified.
        """
        if self.coming:
            self._take_in_proposers()
        if not self.proposers:
            return
        self._on = len(requests) <= self.most_rows and self.payoff.on(len(requests))
        if not self._on:
            self.drafting = False
            return
        began = time.perf_counter()
        self._propose(requests)
        took = time.perf_counter() - began
        self._asking += 0.1 * (min(took, 4 * self._asking) - self._asking) if self._asking else took

    def _propose(self, requests: Sequence[Request]) -> None:
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
        self.drafting = self._drafter is not None and self._pays_to_draft(self._drafter, asked, len(requests))
        ahead = max(request.pending + request.unsure for request, _ in asked)
        found = [self._ask(one, [request for request, _ in asked], MAX_DRAFTS + ahead) for one in self.proposers]
        if self._failed:
            self._drop_failed()
            return
        chosen, chances = [], []
        for index, (request, record) in enumerate(asked):
            best = self._best(request, record, [drafts[index] for drafts in found])
            if best is not None:
                chosen.append((request, record, *best[:2]))
                chances.append(best[2])
            elif len(requests) >= MANY:
                record.due = self._turn + len(requests) // MANY
        times = self.drafting_time if self.drafting else self.time
        counts = admit(chances, len(requests), self._max_tokens - len(requests), times.decoding)
        for (request, record, draft, source), count in zip(chosen, counts, strict=True):
            if count and request.grammar is not None:
                count = self._check(request.grammar, draft.tokens[:count])
            if count and source == self._drafter:
                request.drafts = [ON_DEVICE] * (request.unsure + count)
            elif count:
                request.drafts = draft.tokens[request.pending : request.pending + request.unsure + count]
            if count:
                record.sources[request.num_tokens - 1] = source

    def launched(self, step: Step) -> None:
        """A step is on its way at whose end the device drafts."""
        for request in step.requests:
            if (record := self._records.get(request.id)) is not None:
                record.drafted = step.number

    def committed(self, step: Step, result: StepResult, seconds: float) -> None:
        """A step was computed, in so many seconds."""
        if len(step.rows) == len(step.drafts) + step.num_singles:
            self._weigh(step, result)
            times = self.drafting_time if step.drafting else self.time
            times.learn(Facts(decode_rows=step.num_tokens), seconds)
        if not step.drafts:
            return
        for request, start, samples, tokens in zip(step.requests, step.starts, step.samples, result.tokens):
            record = self._records.get(request.id)
            if samples > 1 and record is not None:
                source, held = record.sources.pop(start, 0), max(0, len(tokens) - 1)
                stats = self.stats[self.proposers[source].name]
                stats.steps += 1
                stats.drafted += samples - 1
                stats.accepted += held
                if self.proposers[source].on_device:  # what it proposed is known to be this only now
                    self._calibrations[source].count([0] * (samples - 1), held, record.own[source])

    def _weigh(self, step: Step, result: StepResult) -> None:
        """Whether the step's drafts were worth their time, and that of proposing them."""
        rows = len(step.rows)
        if not self._on:
            self.payoff.rested(rows)
            return
        plain = float(self.time.decoding(np.array([rows]))[0])
        times = self.drafting_time if step.drafting else self.time
        taken = float(times.decoding(np.array([step.num_tokens]))[0]) + (0.0 if self.beside else self._asking)
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
        self._failed, self.proposers, self._calibrations, self._drafter = [], [], [], None
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
            if index == self._drafter:
                if not self.drafting or record.drafted != request.last_step:
                    continue
            else:
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

    def _pays_to_draft(self, drafter: int, asked: Sequence[tuple[Request, _Record]], rows: int) -> bool:
        """Whether steps that verify the device's drafts, and draft, bring more tokens per second than plain ones.

        Now and then it is tried all the same: what was measured long ago may have changed.
        """
        if not self.time.knows_decoding:
            return False  # what drafts have to beat
        if self._turn % TRY_AGAIN < TRIES:
            return True
        draft = Draft([ON_DEVICE] * DRAFTED, [0] * DRAFTED)
        chances = [self._calibrations[drafter].chances(draft, record.own[drafter]) for _, record in asked]
        without = float(self.time.decoding(np.array([rows]))[0])
        return any(admit(chances, rows, self._max_tokens - rows, self.drafting_time.decoding, without))

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
