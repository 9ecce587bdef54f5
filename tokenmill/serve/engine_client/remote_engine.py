"""RemoteEngine: the front's side of an engine in another process. Keeps every request, so that the engine may die.

A `Mirror` is a sequence as the front knows it: prompt, and the tokens that arrived. That is all a new engine needs to
go on with it, because the noise of sampling is a function of (seed, position) and penalties are counted from tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tokenmill.engine.request import Finish, Request, State
from tokenmill.engine.scheduler import Delta
from tokenmill.errors import InvalidRequest
from tokenmill.serve.engine import wire

# A crash weighs 2, a kill from outside 1: the latter is rarely a request's fault, but may be (memory).
CRASH, KILL = 2, 1
SUSPECT = 4  # found at the same spot in this much trouble, a request is tried alone
GUILTY = 2  # and with this much more while alone, it is given up


class Mirror:
    """One sequence, and its record with the engines it has lived through."""

    __slots__ = ("failed_at", "group", "key", "opened", "request", "restarts", "sent", "suspicion", "trouble_alone")

    def __init__(self, key: int, request: Request, group: list[Mirror]) -> None:
        self.key = key
        self.request = request
        self.group = group  # its siblings and itself, leader first; as long as none was let in they travel together
        self.sent = False  # to the engine that runs now
        self.opened = False  # an engine has let it in
        self.restarts = 0
        self.failed_at = -1  # tokens it had when an engine last died with it
        self.suspicion = 0
        self.trouble_alone = 0


@dataclass(frozen=True)
class Loss:
    """How an engine ended."""

    cause: str
    weight: int = CRASH
    in_flight: tuple[int, ...] = ()  # keys


class RemoteEngine:
    """The verbs that `Front` uses of an engine, plus what the supervisor tells: `attach`, `lose`, `take_in`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.mirrors: dict[int, Mirror] = {}
        self.queued = 0  # sequences that no engine has let in yet
        self.queued_tokens = 0  # their prompts, once per group
        self.at_fault: set[str] = set()  # ids of requests that ended with an error of their own making; to be emptied
        self.on_work: Callable[[], None] = lambda: None  # called when there is something for the engine to do
        self._keys: dict[str, int] = {}  # request id -> key
        self._last_key = 0
        self._send: Callable[[wire.ToEngine], None] | None = None  # None: no engine
        self._deltas: list[Delta] = []
        self._offset: float | None = None  # our clock minus the engine's
        self._suspects: deque[Mirror] = deque()  # to be tried alone
        self._alone: Mirror | None = None

    # -- the verbs of an engine -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.mirrors or self._deltas)

    def add(self, request: Request) -> None:
        if request.beams is not None:
            raise InvalidRequest("beam search is not served; leave beam_width unset, or use the offline API")
        group: list[Mirror] = []
        for one in [request, *request.followers]:
            self._last_key += 1
            group.append(Mirror(self._last_key, one, group))
        for mirror in group:
            self.mirrors[mirror.key] = mirror
            self._keys[mirror.request.id] = mirror.key
        self.queued += len(group)
        self.queued_tokens += request.prompt_len
        if self._send is not None and self._alone is None:
            self._submit(group)
        self.on_work()

    def cancel(self, id: str, why: Finish = Finish.CANCELLED) -> None:
        key = self._keys.get(id)
        if key is not None:
            self.end(self.mirrors[key], why, report=False)

    def step(self) -> list[Delta]:
        """What arrived since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reset_prefix_cache(self) -> None:
        if self._send is not None:
            self._send(wire.Forget())

    # -- what the supervisor tells ----------------------------------------------------------------------------

    def attach(self, send: Callable[[wire.ToEngine], None]) -> None:
        """An engine is ready: everything unfinished goes on there."""
        self._send = send
        self._offset = None
        self._go_on()
        if self.mirrors:
            self.on_work()

    def lose(self, loss: Loss) -> None:
        """The engine is gone. Who was in flight at the same spot too often is tried alone, and then convicted."""
        self._send = None
        # A request that was in two launched steps is named twice, and blamed once.
        involved = [self.mirrors[key] for key in dict.fromkeys(loss.in_flight) if key in self.mirrors]
        for mirror in self.mirrors.values():
            mirror.restarts += mirror.sent
            mirror.sent = False
        alone = self._alone
        if alone is not None:
            if alone in involved:
                alone.trouble_alone += loss.weight
            if alone.trouble_alone >= GUILTY:
                self._convict(alone, loss.cause)
            return
        for mirror in involved:
            progress = len(mirror.request.tokens)
            if progress > mirror.failed_at:
                mirror.suspicion = 0
            mirror.failed_at = progress
            mirror.suspicion += loss.weight
            if mirror.suspicion >= SUSPECT and mirror not in self._suspects:
                self._suspects.append(mirror)

    def take_in(self, message: wire.Stepped) -> float:
        """Turn what a step brought into deltas; returns how long the message was on its way, beyond the quickest."""
        now = self.clock()
        apart = now - message.at
        self._offset = apart if self._offset is None else min(self._offset, apart)
        at = message.at + self._offset
        for piece in message.pieces:
            mirror = self.mirrors.get(piece.key)
            if mirror is not None:  # else it was cancelled meanwhile
                self._add_piece(mirror, piece, at)
        return apart - self._offset

    def end(self, mirror: Mirror, why: Finish, error: str | None = None, report: bool = True) -> None:
        """Finish a sequence from this side."""
        request = mirror.request
        request.error = request.error or error
        if mirror.sent and self._send is not None:
            self._send(wire.Cancel(mirror.key, str(why)))
        self._finish(mirror, why)
        if report:
            self._deltas.append(Delta(request, finished=True))

    def end_all(self, why: Finish, error: str) -> int:
        """Finish everything; returns how many sequences that were."""
        ending = list(self.mirrors.values())
        for mirror in ending:
            if mirror.key in self.mirrors:
                self.end(mirror, why, error)
        return len(ending)

    def waiting(self) -> Iterator[Mirror]:
        """Sequences that no engine has let in yet, in the order they came."""
        return (mirror for mirror in self.mirrors.values() if not mirror.opened)

    # -- inside -------------------------------------------------------------------------------------------------

    def _add_piece(self, mirror: Mirror, piece: wire.Piece, at: float) -> None:
        request = mirror.request
        if piece.opening is not None:
            self._open(mirror, piece.opening)
        logprobs = wire.unscored(piece.logprobs) if piece.logprobs else []
        if piece.tokens:
            request.tokens += piece.tokens
            request.metrics.token_times += [at] * len(piece.tokens)
            if logprobs:
                request.logprobs += logprobs
                request.cumulative_logprob += sum(one.logprob for one in logprobs)
        if piece.finish is not None:
            request.error = piece.error
            if piece.fault:
                self.at_fault.add(request.id)
            request.metrics.finished = at
            self._finish(mirror, Finish(piece.finish))
        self._deltas.append(Delta(request, piece.tokens, logprobs, piece.finish is not None))
        if mirror is self._alone and piece.tokens:  # a finished one was released with its end
            self._acquit(mirror)

    def _open(self, mirror: Mirror, opening: wire.Opening) -> None:
        request, metrics = mirror.request, mirror.request.metrics
        self._count_out(mirror)
        request.state = State.RUNNING
        if metrics.first_scheduled is None:
            if opening.scheduled is not None and self._offset is not None:
                metrics.first_scheduled = opening.scheduled + self._offset
            metrics.cached_tokens = opening.cached_tokens
        if opening.prompt_logprobs is not None:
            request.prompt_logprobs = wire.unscored(opening.prompt_logprobs)

    def _count_out(self, mirror: Mirror) -> None:
        """It no longer waits to be let in."""
        if not mirror.opened:
            mirror.opened = True
            self.queued -= 1
            if mirror is mirror.group[0]:
                self.queued_tokens -= mirror.request.prompt_len

    def _finish(self, mirror: Mirror, why: Finish) -> None:
        request = mirror.request
        self._count_out(mirror)
        request.state = State.FINISHED
        request.finish = why
        if request.metrics.finished is None:
            request.metrics.finished = self.clock()
        del self.mirrors[mirror.key]
        if self._keys.get(request.id) == mirror.key:
            del self._keys[request.id]
        if mirror in self._suspects:
            self._suspects.remove(mirror)
        if mirror is self._alone:
            self._alone = None
            self._go_on()

    def _convict(self, mirror: Mirror, cause: str) -> None:
        for other in self.mirrors.values():  # the culprit is found: nobody else is under suspicion any more
            other.suspicion = 0
        self._suspects.clear()
        self.end(mirror, Finish.ERROR, f"this request ended the engine again when it ran alone: {cause}")

    def _acquit(self, mirror: Mirror) -> None:
        """It got past the point where engines died with it."""
        mirror.suspicion = mirror.trouble_alone = 0
        if self._suspects and mirror.key in self.mirrors:  # the next one must have the engine to itself
            self._withdraw(mirror)
        self._alone = None
        self._go_on()

    def _withdraw(self, mirror: Mirror) -> None:
        """Take a sequence off the engine without ending it. What the engine still says of it goes to its old key."""
        if self._send is not None:
            self._send(wire.Cancel(mirror.key, str(Finish.CANCELLED)))
        del self.mirrors[mirror.key]
        self._last_key += 1
        mirror.key = self._last_key
        mirror.sent = False
        self.mirrors[mirror.key] = mirror
        self._keys[mirror.request.id] = mirror.key

    def _go_on(self) -> None:
        """Give the engine the next suspect, or everybody."""
        if self._send is None:
            return
        if self._alone is None and self._suspects:
            self._alone = self._suspects.popleft()
            self._alone.trouble_alone = 0
        if self._alone is not None:  # on a fresh engine, or behind another trial: nobody else is there to be blamed
            if not self._alone.sent:
                self._submit([self._alone])
            return
        seen: set[int] = set()
        for mirror in list(self.mirrors.values()):
            if mirror.sent or mirror.key in seen:
                continue
            group = [one for one in mirror.group if one.key in self.mirrors and not one.sent]
            seen.update(one.key for one in group)
            if any(one.request.num_output or one.opened for one in group):
                for one in group:
                    self._submit([one])
            else:
                self._submit(group)

    def _submit(self, group: Iterable[Mirror]) -> None:
        """Send sequences that share prompt and parameters."""
        assert self._send is not None
        group = list(group)
        request, now = group[0].request, self.clock()
        params = request.params
        if params.prompt_logprobs is not None and (group[0].opened or group[0] is not group[0].group[0]):
            params = replace(params, prompt_logprobs=None)  # they are here, or with its leader
        self._send(
            wire.Submit(
                sequences=[wire.Sequence(one.key, one.request.seed, one.request.output) for one in group],
                prompt=request.tokens[: request.prompt_len],
                params=params,
                max_tokens=request.max_tokens,
                stop_ids=sorted(request.stop_ids),
                priority=request.priority,
                waited=now - request.arrival,
                deadline_in=None if request.deadline is None else request.deadline - now,
                salt=request.salt,
            )
        )
        for one in group:
            one.sent = True
