"""RemoteEngine: the front's side of an engine in another process. Keeps every request, so that the engine may die.

A `RemoteSequence` is a sequence as the front knows it: prompt, and the tokens that arrived. That is all a new engine
needs to go on with it, because the noise of sampling is a function of (seed, position) and penalties are counted from
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenmill.engine.request import BATCH, Finish, Request, State
from tokenmill.engine.scheduler import Delta
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.errors import InvalidRequest
from tokenmill.serve.engine import wire

# A kill from outside is rarely a request's fault, but may be (memory).
CRASH_WEIGHT, KILL_WEIGHT = 1.0, 0.5
_WELL = (Finish.STOP, Finish.LENGTH)
CRASHES, CRASHES_ALONE = 2, 1  # at the same spot, before a request is run alone, and then before it ends with an error


class RemoteSequence:
    __slots__ = ("adapter_key", "admitted", "group", "key", "read_at", "request", "sent")

    def __init__(self, key: int, request: Request, group: list[RemoteSequence]) -> None:
        self.key = key
        self.request = request
        self.group = group  # its siblings and itself, leader first; as long as none said anything they travel together
        self.sent = False  # to the engine that runs now
        self.admitted = False  # the engine has begun with it
        self.adapter_key: str | None = None  # of its adapter's weights, as last sent; "": unclear, None: never sent
        self.read_at = 0  # once admitted: what `_prefilled` will be when all of its prompt may have been read


@dataclass(frozen=True)
class EngineLoss:
    cause: str
    weight: float = CRASH_WEIGHT
    in_flight: tuple[int, ...] = ()  # keys


class RemoteEngine:
    """The verbs that `Processor` uses of an engine, plus what the supervisor tells: `attach`, `lose`, `take_in`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.sequences: dict[int, RemoteSequence] = {}
        self.queued = 0  # sequences that the engine has not begun
        self.queued_by_class = [0] * (BATCH + 1)  # tokens of their prompts, once per group
        self.at_fault: set[str] = set()  # ids of requests that ended with an error of their own making; to be emptied
        self.on_work: Callable[[], None] = lambda: None  # called when there is something for the engine to do
        self.adapter_key: Callable[[str], str | None] = lambda name: None  # what a name stands for now; "": unclear
        self._keys: dict[str, int] = {}  # request id -> key
        self._held: dict[str, int] = {}  # of ended requests whose keys and values stay in the engine: id -> key
        self._last_key = 0
        self._send: Callable[[wire.ToEngine], None] | None = None  # None: no engine
        self._deltas: list[Delta] = []
        self._offset: float | None = None  # our clock minus the engine's
        self._prefilled = 0  # prompt tokens in the steps of all engines
        self._isolation = Isolation(CRASHES, CRASHES_ALONE)  # its first suspect has the engine to itself

    # -- the verbs of an engine -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self._deltas)

    def add(self, request: Request) -> None:
        if request.beams is not None:
            raise InvalidRequest("beam search is not served; leave beam_width unset, or use the offline API")
        group: list[RemoteSequence] = []
        for one in [request, *request.followers]:
            self._last_key += 1
            group.append(RemoteSequence(self._last_key, one, group))
        for sequence in group:
            self.sequences[sequence.key] = sequence
            self._keys[sequence.request.id] = sequence.key
            self._count_queued(sequence, 1)
        if self._send is not None and not self._isolation.suspects:
            self._submit(group)
        self.on_work()

    def cancel(self, id: str, why: Finish = Finish.CANCELLED) -> None:
        key = self._keys.get(id)
        if key is not None:
            self.end(self.sequences[key], why, report=False)

    def drop_held(self, id: str) -> None:
        """Nobody will continue what the request of this id left behind, if it did."""
        if (key := self._held.pop(id, None)) is not None:
            self._drop(key)

    def step(self) -> list[Delta]:
        """What arrived since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reset_prefix_cache(self, cache_salt: str | None = None) -> None:
        if self._send is not None:  # else the next engine begins with none
            self._send(wire.ResetPrefixCache(cache_salt))

    # -- what is still to be read -----------------------------------------------------------------------------

    @property
    def queued_tokens(self) -> int:
        return sum(self.queued_by_class)

    def tokens_before(self, priority: int, policy: str) -> int:
        """Prompt tokens that the engine reads before it begins with a newcomer of this class."""
        first = {"fcfs": BATCH + 1, "priority": priority + 1, "sjf": priority}[policy]  # classes
        return sum(self.queued_by_class[:first])

    def unread_tokens(self, request: Request) -> int | None:
        """How many tokens of its prompt are to be computed before its first token, at least: whatever was computed of
        prompts since the engine began with it may have been its own. None: the engine has not begun."""
        key = self._keys.get(request.id)
        if key is None or request.num_output:
            return 0
        sequence = self.sequences[key]
        return max(0, sequence.read_at - self._prefilled) if sequence.admitted else None

    # -- what the supervisor tells ----------------------------------------------------------------------------

    def attach(self, send: Callable[[wire.ToEngine], None]) -> None:
        """An engine is ready: everything unfinished goes on there."""
        self._send = send
        self._offset = None
        self._send_unsent()
        if self.sequences:
            self.on_work()

    def lose(self, loss: EngineLoss) -> None:
        """The engine is gone. Who was in flight at the same spot too often is run alone, and ends with an error if the
        engine dies with it again."""
        self._send = None
        self._held.clear()  # whoever continues one of them is computed anew
        for sequence in self.sequences.values():
            sequence.sent = False
            if sequence.admitted and not sequence.request.num_output:  # it is read anew, from the start
                sequence.admitted = False
                sequence.request.state = State.WAITING
                self._count_queued(sequence, 1)
        in_company = not self._isolation.suspects
        for key in dict.fromkeys(loss.in_flight):  # who was in two launched steps is named twice, and blamed once
            named = self.sequences.get(key)
            if named is not None and self._isolation.failed(named.request, in_company, loss.weight):
                self._isolation = Isolation(CRASHES, CRASHES_ALONE)  # it is found: nobody else is under suspicion now
                why = f"this request ended the engine again when it ran alone: {loss.cause}"
                self.end(named, Finish.ERROR, why)

    def take_in(self, message: wire.StepDone) -> float:
        """Turn what a step brought into deltas; returns how long the message was on its way, beyond the quickest."""
        now = self.clock()
        apart = now - message.at
        self._offset = apart if self._offset is None else min(self._offset, apart)
        at = message.at + self._offset
        for admitted in message.admitted:
            if (begun := self.sequences.get(admitted.key)) is not None:
                self._note_admitted(begun, admitted)
        self._prefilled += message.prefill_tokens  # those who begin in this step have their share of it
        for update in message.updates:
            sequence = self.sequences.get(update.key)
            if sequence is not None:  # else it was cancelled meanwhile
                self._apply_update(sequence, update, at)
        return apart - self._offset

    def end(self, sequence: RemoteSequence, why: Finish, error: str | None = None, report: bool = True) -> None:
        """Finish a sequence from this side."""
        request = sequence.request
        request.error = request.error or error
        if sequence.sent and self._send is not None:
            self._send(wire.Cancel(sequence.key, str(why)))
            if request.keep and why not in _WELL:  # it may have ended well there, and nobody here hears of that
                self._drop(sequence.key)
        self._finish(sequence, why)
        if report:
            self._deltas.append(Delta(request, finished=True))

    def end_all(self, why: Finish, error: str) -> int:
        """Finish everything; returns how many sequences that were."""
        ending = list(self.sequences.values())
        for sequence in ending:
            if sequence.key in self.sequences:
                self.end(sequence, why, error)
        return len(ending)

    # -- inside -------------------------------------------------------------------------------------------------

    def _apply_update(self, sequence: RemoteSequence, update: wire.SequenceUpdate, at: float) -> None:
        request = sequence.request
        if update.prompt_logprobs is not None:
            request.prompt_logprobs = update.prompt_logprobs
        logprobs = update.logprobs or []
        if update.tokens:
            request.tokens += update.tokens
            request.metrics.token_times += [at] * len(update.tokens)
            if logprobs:
                request.logprobs += logprobs
                request.cumulative_logprob += sum(one.logprob for one in logprobs)
        if update.finish is not None:
            request.error = update.error
            request.pooled = update.pooled or []
            if update.request_fault:
                self.at_fault.add(request.id)
            request.metrics.finished = at
            self._finish(sequence, Finish(update.finish))
        self._deltas.append(Delta(request, update.tokens, logprobs, update.finish is not None))
        # The token that it was lost at is there.
        looked_at = update.tokens and self._isolation.cases
        if looked_at and self._isolation.seen_working(request, len(request.tokens) - 1):
            self._release_suspect(sequence)

    def _note_admitted(self, sequence: RemoteSequence, admitted: wire.Admitted) -> None:
        request, metrics = sequence.request, sequence.request.metrics
        self._count_admitted(sequence)
        request.state = State.RUNNING
        spared = admitted.cached_tokens + admitted.module_tokens
        sequence.read_at = self._prefilled + request.prompt_len - spared
        if metrics.first_scheduled is None:
            if admitted.scheduled is not None and self._offset is not None:
                metrics.first_scheduled = admitted.scheduled + self._offset
            metrics.cached_tokens, metrics.module_tokens = admitted.cached_tokens, admitted.module_tokens

    def _count_admitted(self, sequence: RemoteSequence) -> None:
        """It no longer waits to be let in."""
        if not sequence.admitted:
            sequence.admitted = True
            self._count_queued(sequence, -1)

    def _count_queued(self, sequence: RemoteSequence, by: int) -> None:
        self.queued += by
        if sequence is sequence.group[0]:
            self.queued_by_class[sequence.request.priority] += by * sequence.request.prompt_len

    def _finish(self, sequence: RemoteSequence, why: Finish) -> None:
        request = sequence.request
        self._count_admitted(sequence)
        request.state = State.FINISHED
        request.finish = why
        if request.keep and why in _WELL:
            self._held[request.id] = sequence.key
        if request.metrics.finished is None:
            request.metrics.finished = self.clock()
        del self.sequences[sequence.key]
        if self._keys.get(request.id) == sequence.key:
            del self._keys[request.id]
        if self._isolation.cases:
            suspect = self._isolation.is_suspect(request)
            self._isolation.forget(request)
            if suspect:
                self._send_unsent()

    def _release_suspect(self, sequence: RemoteSequence) -> None:
        """It got past the point where engines died with it."""
        if self._isolation.suspects and sequence.key in self.sequences:  # the next one must have the engine to itself
            self._withdraw(sequence)
        self._send_unsent()

    def _withdraw(self, sequence: RemoteSequence) -> None:
        """Take a sequence off the engine without ending it. What the engine still says of it goes to its old key."""
        if self._send is not None:
            self._send(wire.Cancel(sequence.key, str(Finish.CANCELLED)))
            if sequence.request.keep:
                self._drop(sequence.key)
        del self.sequences[sequence.key]
        self._last_key += 1
        sequence.key = self._last_key
        sequence.sent = False
        self.sequences[sequence.key] = sequence
        self._keys[sequence.request.id] = sequence.key

    def _drop(self, key: int) -> None:
        if self._send is not None:
            self._send(wire.Drop(key))

    def _send_unsent(self) -> None:
        """Give the engine the next suspect, or everybody."""
        if self._send is None:
            return
        self._end_replaced()
        if self._isolation.suspects:  # on a fresh engine, or behind another trial: nobody else is there to be blamed
            suspect = self.sequences[self._keys[self._isolation.suspects[0].id]]
            if not suspect.sent:
                self._submit([suspect])
            return
        seen: set[int] = set()
        for sequence in list(self.sequences.values()):
            if sequence.sent or sequence.key in seen:
                continue
            group = [one for one in sequence.group if one.key in self.sequences and not one.sent]
            seen.update(one.key for one in group)
            if any(one.request.num_output for one in group):
                for one in group:
                    self._submit([one])
            else:
                self._submit(group)

    def _end_replaced(self) -> None:
        """Nobody who has begun with some weights goes on with others. (Of a name that is gone the engine tells.)"""
        for sequence in list(self.sequences.values()):
            request, began_with = sequence.request, sequence.adapter_key
            if sequence.sent or began_with is None or not request.num_output or sequence.key not in self.sequences:
                continue
            now = self.adapter_key(request.adapter)
            if now is not None and (not now or now != began_with):
                why = "its adapter was replaced and the engine that had the old one is gone; send it again"
                self.end(sequence, Finish.ERROR, why)

    def _submit(self, group: list[RemoteSequence]) -> None:
        """Send sequences that share prompt and parameters."""
        assert self._send is not None
        request, now = group[0].request, self.clock()
        params = request.params
        if params.prompt_logprobs is not None and (request.num_output or group[0] is not group[0].group[0]):
            params = replace(params, prompt_logprobs=None)  # they are here, or with its leader
        self._send(
            wire.Submit(
                sequences=[wire.SubmittedSequence(one.key, one.request.seed, one.request.output) for one in group],
                prompt=request.tokens[: request.prompt_len],
                params=params,
                max_tokens=request.max_tokens,
                stop_ids=sorted(request.stop_ids),
                priority=request.priority,
                waited=now - request.arrival,
                deadline_in=None if request.deadline is None else request.deadline - now,
                salt=request.salt,
                pooling=request.pooling,
                pushes=request.pushes,
                keep=request.keep,
                continues=None if request.continues is None else self._held.get(request.continues),
                adapter=request.adapter,
                modules=[(one.first, one.end) for one in request.modules],
            )
        )
        for one in group:
            one.sent = True
            if request.adapter:
                one.adapter_key = self.adapter_key(request.adapter) or ""
