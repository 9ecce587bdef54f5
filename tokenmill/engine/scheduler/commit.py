"""Commits: what a step's results do to its requests, and what its failure does."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan

from tokenmill.engine.beams import Beams
from tokenmill.engine.request import Finish, Request, Wait
from tokenmill.engine.scheduler.batching import Batching
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.engine.scheduler.lifecycle import FINISHED, PARKED, RUNNING, Delta, Lifecycle
from tokenmill.engine.step import NOT_FINITE, Loss, Step, StepResult
from tokenmill.sampling.records import TokenLogprobs

_NO_LOGPROBS: list[TokenLogprobs] = []


class Commits:
    """Tokens are appended until one ends the request; what is NaN is tried again; beams advance when a round is in."""

    def __init__(self, life: Lifecycle, isolation: Isolation, batching: Batching) -> None:
        self.life, self.isolation, self.batching = life, isolation, batching
        self.kv = life.kv

    def commit(self, step: Step, result: StepResult, now: float) -> list[Delta]:
        """Take in what a step produced. Steps are committed in the order they were launched."""
        deltas, self.life.events = self.life.events, []
        rounds: dict[str, Beams] = {}
        number, block_size, quiet = step.number, self.kv.block_size, not self.isolation.cases
        rows = zip(step.requests, step.samples, result.tokens, strict=True)
        for index, (request, samples, tokens) in enumerate(rows):
            request.in_flight -= 1
            if samples:
                request.pending -= 1
                request.unsure -= samples - 1
            if request.state is FINISHED or number <= request.void_until:
                continue
            if not quiet:
                self._seen_working(request, step.starts[index] + step.counts[index])
            if index in result.prompt_logprobs:
                known = request.scored_from + len(request.prompt_logprobs) - step.starts[index] - 1
                request.prompt_logprobs += result.prompt_logprobs[index][max(0, known) :]
                if any(isnan(one.logprob) for one in result.prompt_logprobs[index]):
                    self._not_finite(request, now)
                    continue
            if index in result.pooled:
                if isnan(sum(result.pooled[index])):
                    self._not_finite(request, now)
                else:
                    request.pooled = result.pooled[index]
                    self.life.finish(request, Finish.STOP, now)
                continue
            if not samples:
                continue
            logprobs = result.logprobs.get(index, _NO_LOGPROBS)
            if request.beams is not None:
                if -1 in tokens and self._tries_again(request):
                    continue  # its round waits for it
                rounds[request.beams.leader.id] = request.beams
                request.beams.collect(request, tokens, logprobs)
                continue
            if samples > 1 and request.state is RUNNING:  # drafts: as many as the device found right are computed, too
                request.num_computed += len(tokens) - 1
            if request.grammar is not None:
                request.waits_for = None
            deltas.append(self._append(request, tokens, logprobs, now))
            if len(request.tokens) % block_size < len(tokens) and request.state is RUNNING:  # a block became full
                self.kv.publish(request)
        for beams in rounds.values():
            self._advance_beams(beams, now, deltas)
        self.kv.settle(step.number)
        return deltas

    def _seen_working(self, request: Request, position: int) -> None:
        if self.isolation.seen_working(request, position) and request.state is RUNNING:  # back to its class
            self.life.change_lane(request, self.life.policy.lane(request))

    def fail(self, steps: Iterable[Step], cause: str, now: float, loss: Loss | None = None) -> list[Delta]:
        """These launched steps are void: their requests start over from the tokens they have.

        After a loss that is so for everybody who runs, and nothing that was computed before can be found any more.
        """
        weight = 1 if loss is None else loss.weight
        involved: dict[str, Request] = {}
        numbers: list[int] = []
        admitted: set[int] = set()
        for step in steps:
            numbers.append(step.number)
            admitted.update(one.row for one in step.admissions)
            for request, sampled in zip(step.requests, step.samples, strict=True):
                request.in_flight -= 1
                request.pending -= sampled > 0
                request.unsure -= max(0, sampled - 1)
                if request.waits_for is not Wait.ADAPTER:  # it is queued again when it has a slot
                    request.waits_for = None
                involved[request.id] = request
        for request in [one for one in self.life.running if one.row in admitted and one.id not in involved]:
            self.life.preempt(request)  # it may stand on what these steps were to fill, and nobody knows of its row
        self.life.stats.failed_steps += 1
        for request in involved.values():
            if request.finished:
                continue
            if request.state is RUNNING:
                self.life.preempt(request)
            elif _waits_for_nobody(request):
                self.life.queue(request)
            if not weight or request.id in self.batching.done:  # padding breaks nothing
                self.isolation.noted(request)
            elif self.isolation.failed(request, len(involved) > 1, weight):
                failures = self.isolation.failures(request)
                request.error = f"this request failed {failures} times, the last ones alone: {cause}"
                self.life.finish(request, Finish.ERROR, now)
        if numbers:
            self.life.held.void(min(numbers))
            self.kv.void(max(numbers))
        if loss is not None:
            self.life.lose_slots()
            for request in list(self.life.running):
                self.life.preempt(request)
            self.life.held.forget()
            self.kv.lose_memory()
        events, self.life.events = self.life.events, []
        return events

    def _append(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs], now: float) -> Delta:
        """Add sampled tokens until one ends the request."""
        kept, known, times, grammar = 0, request.tokens, request.metrics.token_times, request.grammar
        for token in tokens:
            if token < 0:
                self._not_finite(request, now, report=False)
                break
            kept += 1
            known.append(token)
            times.append(now)
            num_output = len(known) - request.prompt_len
            stops = token in request.stop_ids and num_output > request.params.min_tokens
            if stops or num_output >= request.max_tokens:
                why = Finish.STOP if stops else Finish.LENGTH
                if self.batching.is_continuous or not self.batching.keeps(request, why):
                    self.life.finish(request, why, now, report=False)
                break
            if grammar is not None and not grammar.consume(token):
                break
        if grammar is not None and kept and request.state is not FINISHED:
            self.end_with_grammar(request, now, report=False)
            if request.state is not FINISHED:
                grammar.start_mask()
        if logprobs:
            logprobs = logprobs[:kept]
            request.logprobs += logprobs
            request.cumulative_logprob += sum(one.logprob for one in logprobs)
        if kept < len(tokens):
            tokens = tokens[:kept]
        return Delta(request, tokens, logprobs, request.state is FINISHED)

    def end_with_grammar(self, request: Request, now: float, report: bool = True) -> None:
        assert request.grammar is not None
        if request.grammar.error is not None:
            request.error = request.grammar.error
            self.life.finish(request, Finish.ERROR, now, report)
        elif request.grammar.complete:
            self.life.finish(request, Finish.STOP, now, report)

    def _not_finite(self, request: Request, now: float, report: bool = True) -> None:
        if not self._tries_again(request):
            request.error = NOT_FINITE
            self.life.finish(request, Finish.ERROR, now, report)

    def _tries_again(self, request: Request) -> bool:
        """Its logits were NaN. Others may have filled the blocks it started on, so it tries once on its own; and
        then once in float32, where the runner can."""
        self.kv.forget(request)
        on_its_own = not request.started_on_others or request.avoids_cache
        if on_its_own and (request.in_float32 or not self.life.limits.float32_retry):
            return False
        request.avoids_cache = True
        request.in_float32 |= on_its_own
        request.void_until = request.last_step
        if request.waits_for is not Wait.ADAPTER:
            request.waits_for = None
        if request.state is RUNNING:
            self.life.preempt(request)
        elif _waits_for_nobody(request):
            self.life.queue(request)
        return True

    def _advance_beams(self, beams: Beams, now: float, deltas: list[Delta]) -> None:
        """When every beam of a round is in: survivors go on, dropped ones start over as forks of survivors."""
        turn = beams.advance(now)
        if turn is None:
            return
        if turn.finish is not None:
            self.life.finish(beams.leader, turn.finish, now, report=False)
            deltas.append(Delta(beams.leader, finished=True))
            return
        self.life.take_turn(beams, turn)


def _waits_for_nobody(request: Request) -> bool:
    """A beam that was preempted while its step was out."""
    return request.state is PARKED and request.waits_for is not Wait.ADAPTER
