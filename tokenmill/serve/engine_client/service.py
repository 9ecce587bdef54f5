"""Service: what the HTTP layer talks to. Requests go in, streams of answers come out, whatever the engine does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.request import Finish, Request
from tokenmill.errors import TokenmillError
from tokenmill.follow import Follow
from tokenmill.front import Front, Message, Prompt
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.params import SamplingParams
from tokenmill.serve.engine import wire
from tokenmill.serve.engine.startup import Stages
from tokenmill.serve.engine_client.admission import Admission, Breaker, Load, Unavailable
from tokenmill.serve.engine_client.dispatcher import Desk
from tokenmill.serve.engine_client.embeddings import Embeddings
from tokenmill.serve.engine_client.events import BeatEvent, Broadcast, EngineEvent, Event, RequestEvent, StepEvent
from tokenmill.serve.engine_client.remote_engine import Loss, RemoteEngine
from tokenmill.serve.engine_client.remote_model import Progress, ServedElsewhere, load_tokenizer
from tokenmill.serve.engine_client.stats import Books, ServiceStats
from tokenmill.serve.engine_client.stream import Stream, Ticket
from tokenmill.serve.engine_client.supervisor import Supervisor
from tokenmill.serve.engine_client.text_pool import SHORT, TextWork, size_of
from tokenmill.serve.settings import ServeSettings

__all__ = ["Service", "ServiceStats", "Stream"]


class Service:
    """One model behind one supervised engine process. Everything runs on the event loop that called `start`.

    service = Service(EngineConfig(), ServeSettings())
    await service.start()
    stream = await service.submit("The mill", SamplingParams())   # raises before anything is streamed
    async for output in stream: ...                               # RequestOutput, cumulative, newest only
    """

    facts: wire.Hello  # vocabulary, lengths, model name, report lines; there after `start`

    def __init__(
        self, config: EngineConfig, settings: ServeSettings | None = None, degrade: Service | None = None
    ) -> None:
        """`degrade` is a second service (a smaller model) that `route` names while this one cannot answer.
        Whoever made it starts and stops it."""
        self.config = config
        self.settings = settings or ServeSettings()
        self.degrade = degrade
        self.tokenizer: Tokenizer | None = None
        self.texts = TextWork()
        self._supervisor = Supervisor(config, self.settings, self)
        self._remote = RemoteEngine()
        self._remote.on_work = lambda: self._supervisor.expect_work(True)
        self._embeddings = Embeddings()
        self._embeddings.on_left = self._rest
        self._admission = Admission(self.settings)
        self._breaker = Breaker(self.settings)
        self._books = Books()
        self._desk = Desk(self._remote, self._ended)
        self._tickets = self._desk.tickets
        self._broadcast = Broadcast()
        self._views: list[asyncio.Future[wire.View | None]] = []
        self._state = "starting"
        self._changed = asyncio.Event()  # a request ended
        self.stages = Stages()
        self._last_step = 0.0
        self._fruitless = 0  # engines in a row that were lost without having said anything
        self._load: tuple[float, Load] = (float("-inf"), Load())
        self._probe: str | None = None  # the request that the half-open breaker let in

    # -- life -----------------------------------------------------------------------------------------------

    async def start(self, progress: Progress | None = None) -> None:
        """Start the engine and return when it is ready. Raises ConfigError or ModelError with its own sentence."""
        self.stages.progress = progress
        if not self.config.skip_tokenizer_init:
            self.tokenizer = await asyncio.to_thread(load_tokenizer, self.config, self.stages.report)
        await self._supervisor.start()

    def set_engine_niceness(self, niceness: int) -> None:
        """For a front that has taken precedence; before `start`."""
        self._supervisor.niceness = niceness

    async def drain(self, seconds: float) -> int:
        """Accept nothing more and wait for what runs. Returns how many requests had to be handed back unfinished:
        their streams end with finish_reason "error" and an error that says that the server is going away."""
        self._state = "draining"
        deadline = self._remote.clock() + seconds
        while (self._tickets or self._embeddings.pending) and (left := deadline - self._remote.clock()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        why = "the server is shutting down and did not finish this; send it again"
        handed_back = len(self._tickets) + self._embeddings.end_all(why)
        self._remote.end_all(Finish.ERROR, why)
        self._desk.deliver()
        return handed_back

    async def stop(self) -> None:
        """End the engine process and every stream. Safe to call twice, and without a start."""
        self._state = "stopped"
        self.texts.close()
        await self._supervisor.stop()
        self._remote.end_all(Finish.ERROR, "the server was stopped")
        self._embeddings.end_all("the server was stopped")
        self._desk.deliver()

    def ready(self) -> bool:
        """Whether a request would be worked on now: an engine is up, idle or completing steps; the breaker is shut."""
        now = self._remote.clock()
        working = self._remote.mirrors or self._embeddings.pending
        silent = working and now - self._last_step > self.settings.hang_seconds / 2
        return self._state == "ready" and not silent and self._breaker.state(now) != "open"

    def live(self) -> bool:
        """Whether this process does its work: the supervisor runs. False means: restart the whole server."""
        return self._state in ("starting", "stopped") or self._supervisor.alive

    def route(self) -> Service:
        """This service, or the degrade service while this one is not ready and that one is."""
        if self.degrade is not None and not self.ready() and self.degrade.ready() and self._state != "draining":
            return self.degrade
        return self

    # -- requests -------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: str | int = "api",
        timeout: float | None = None,
        cache_salt: str = "",
    ) -> Stream:
        """Accept a request. Raises before anything runs: InvalidRequest (400), Overloaded (429) and
        Unavailable (503), the last two with `.retry_after` in seconds (see tokenmill.serve.engine_client.admission)."""
        try:
            self._check_open()
            prompt = await self.texts.run(size_of(prompt), self._front.encode, prompt)
            follow = self._front.prepare(
                prompt, params, request_id=request_id, priority=priority, timeout=timeout, cache_salt=cache_salt
            )
            return self._accept(follow)
        except TokenmillError:
            self._books.refused += 1
            raise

    def _accept(self, follow: Follow) -> Stream:
        self._check_open()  # again: tokenizing may have taken its time
        remote, now = self._remote, self._remote.clock()
        self._admission.check(
            remote.queued,
            remote.queued_tokens,
            len(follow.prompt_ids),
            len(follow.sequences),
            follow.timeout,
            self._current_load,
        )
        was_half_open = self._breaker.state(now) == "half_open"
        wait = self._breaker.admit(now)
        if wait is not None:
            raise Unavailable("the engine failed repeatedly and is being restarted; try again later", wait)
        try:
            stream = self._desk.open(follow, self._supervisor.generation)
        except TokenmillError:
            self._breaker.probe_ended()
            raise
        self._probe = follow.id if was_half_open else self._probe
        self._books.accepted += 1
        leader = follow.leader
        self._broadcast.emit(RequestEvent(follow.id, "accepted", now, leader.prompt_len, leader.priority))
        return stream

    def cancel(self, request_id: str) -> bool:
        """End a request; its stream gets a last output with finish_reason "cancelled". False: there is none."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._desk.drop(ticket)
        return ticket is not None

    async def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, checked against the model's length. Raises InvalidRequest."""
        self._check_started()
        encoded = await self.texts.run(size_of(prompt), self._front.encode, prompt)
        ids: list[int] = encoded["prompt_token_ids"]
        return ids

    async def chat_ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a conversation; options are those of Front.chat_ids (chat_template, tools, ...)."""
        self._check_started()
        size = max(SHORT + 1, sum(size_of(one.get("content")) for one in messages))  # templates may take their time
        return await self.texts.run(size, self._front.chat_ids, messages, **options)

    async def embed(self, prompts: Sequence[Prompt], pooling: str = "mean") -> list[list[float]]:
        """One vector of unit length per prompt; pooling is mean or last. Raises like `submit`."""
        self._check_open()
        several = [await self.encode(prompt) for prompt in prompts]
        waiting = self._remote.queued_tokens + self._embeddings.queued_tokens
        queued = self._remote.queued + self._embeddings.pending
        self._admission.check(queued, waiting, sum(map(len, several)), len(several), None, self._current_load)
        self._supervisor.expect_work(True)
        answers = [self._embeddings.ask(ids, pooling) for ids in several]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:  # where one failed, or nobody waits any more, the others are in vain
                answer.cancel()

    # -- to watch -------------------------------------------------------------------------------------------

    def stats(self) -> ServiceStats:
        """Counters and gauges; asks nobody."""
        return self._books.stats(
            state=self._state,
            breaker=self._breaker.state(self._remote.clock()),
            generation=self._supervisor.generation,
            active=len(self._tickets),
            queued=self._remote.queued,
            queued_tokens=self._remote.queued_tokens,
            drain_seconds=self._admission.drain_seconds(self._current_load()),
        )

    def events(self, limit: int = 1024) -> AsyncIterator[Event]:
        """Everything that happens from now on. A reader that lags more than `limit` events loses the oldest."""
        return self._broadcast.events(limit)

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event, on the event loop; for metrics. Returns what unsubscribes it."""
        return self._broadcast.subscribe(listener)

    async def view(self, timeout: float = 2.0) -> wire.View | None:
        """The inside of the engine (every block, every request); None where it does not answer in time."""
        if self._state in ("starting", "stopped") or self._post is None:
            return None
        answer: asyncio.Future[wire.View | None] = asyncio.get_running_loop().create_future()
        self._views.append(answer)
        self._post(wire.Ping(view=True))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            return None

    def request_of(self, key: int) -> str | None:
        """The request id behind a key of a view."""
        mirror = self._remote.mirrors.get(key)
        return None if mirror is None else mirror.request.id

    def leaders(self) -> list[Request]:
        """The first sequence of every request that is not finished."""
        return [ticket.follow.leader for ticket in self._tickets.values()]

    def reset_prefix_cache(self) -> None:
        self._remote.reset_prefix_cache()

    # -- what the supervisor tells ----------------------------------------------------------------------------

    _post: Callable[[wire.ToEngine], None] | None = None

    def engine_loading(self, message: wire.Loading) -> None:
        if self._state in ("starting", "restarting"):
            self.stages.report(message.done, message.total, message.what)

    def engine_ready(self, hello: wire.Hello, send: Callable[[wire.ToEngine], None]) -> None:
        self.facts = hello
        self._admission.max_step_tokens = hello.max_step_tokens
        if self._state == "starting":
            self._desk.front = Front(ServedElsewhere.by(hello, self._remote, self.tokenizer), self.config.seed)
        if self._state in ("starting", "restarting"):
            self._state = "ready"
        self.stages.ready()
        self._last_step = self._remote.clock()
        self._post = send
        self._broadcast.emit(EngineEvent("ready", self._last_step, generation=self._supervisor.generation))
        self._remote.attach(send)
        self._embeddings.attach(send)

    def engine_said(self, message: wire.Stepped | wire.Beat | wire.Embedded) -> None:
        match message:
            case wire.Stepped():
                self._stepped(message)
            case wire.Beat():
                self._beaten(message)
            case wire.Embedded():
                self._last_step, self._fruitless = self._remote.clock(), 0
                self._embeddings.take_in(message)
                self._rest()

    def engine_lost(self, loss: Loss) -> float:
        now = self._remote.clock()
        self._post = None
        if self._state == "ready":
            self._state = "restarting"
        self.stages.lost()
        self._books.lose_engine()
        self._fruitless += 1
        self._broadcast.emit(EngineEvent("died", now, loss.cause, self._supervisor.generation))
        self._remote.lose(loss)
        self._embeddings.lose(loss.cause)
        if self._breaker.failed(now):
            self._broadcast.emit(EngineEvent("breaker_open", now, loss.cause, self._supervisor.generation))
        if self._fruitless >= self.settings.give_up_after:
            self._fruitless = 0
            why = f"the engine failed {self.settings.give_up_after} times in a row: {loss.cause}"
            self._remote.end_all(Finish.ERROR, why)
            self._embeddings.end_all(why)
        self._desk.deliver()
        if self._fruitless <= 1:
            return 0.0
        return min(self.settings.backoff_seconds * 2.0 ** min(self._fruitless - 2, 16), self.settings.backoff_most)

    # -- inside -------------------------------------------------------------------------------------------------

    def _stepped(self, message: wire.Stepped) -> None:
        lag = self._remote.take_in(message)
        self._last_step = now = self._remote.clock()
        tokens = sum(len(piece.tokens) for piece in message.pieces)
        if tokens:
            self._fruitless = 0
        self._admission.learn_step(message.decodes, message.prefill_tokens, message.seconds)
        self._desk.deliver(message.at)
        self._broadcast.emit(StepEvent.of(message, now, lag, tokens))

    def _beaten(self, message: wire.Beat) -> None:
        self._books.engine = message.stats
        if message.view is not None:
            views, self._views = self._views, []
            for view in views:
                if not view.done():
                    view.set_result(message.view)
        self._drop_hopeless()
        self._broadcast.emit(BeatEvent(self._remote.clock(), message.stats))

    @property
    def _front(self) -> Front:
        return self._desk.front

    def _rest(self) -> None:
        """Something ended. An engine with nothing to do may be silent."""
        self._changed.set()
        if not self._remote.mirrors and not self._embeddings.pending:
            self._supervisor.expect_work(False)

    def _drop_hopeless(self) -> None:
        """Deadlines that can no longer be met even by an engine that did nothing else."""
        now = self._remote.clock()
        for mirror in [one for one in self._remote.waiting() if one.request.deadline is not None]:
            least = self._admission.prefill_seconds(mirror.request.prompt_len)
            if least is not None and mirror.request.deadline is not None and now + least > mirror.request.deadline:
                why = f"its first token would take {least:.3g} s or more, past its deadline"
                self._remote.end(mirror, Finish.DEADLINE, why)
        self._desk.deliver()

    def _ended(self, ticket: Ticket) -> None:
        """A request has ended: count it, and learn from it."""
        follow = ticket.follow
        now, leader = self._remote.clock(), follow.leader
        reason = str(follow.sequences[0].finish)
        output = sum(sequence.num_tokens for sequence in follow.sequences)
        self._books.close(reason, leader.prompt_len, output, leader.metrics.cached_tokens)
        if reason in (Finish.STOP, Finish.LENGTH):
            self._admission.learn_answer(leader.num_output)
            if self._breaker.succeeded(now):
                self._broadcast.emit(EngineEvent("breaker_closed", now, generation=self._supervisor.generation))
        if self._probe == follow.id:
            self._probe = None
            self._breaker.probe_ended()
        restarts = self._supervisor.generation - ticket.generation
        self._broadcast.emit(RequestEvent.finished(follow.id, leader, now, reason, output, restarts))
        self._rest()

    def _check_open(self) -> None:
        if self._state in ("draining", "stopped"):
            raise Unavailable("the server is shutting down; try another one, or this one later", 5.0)
        self._check_started()
        now = self._remote.clock()
        if self._breaker.state(now) == "open":
            wait = self._breaker.admit(now) or 1.0
            raise Unavailable("the engine failed repeatedly and is being restarted; try again later", wait)

    def _check_started(self) -> None:
        if self._state == "starting":
            raise Unavailable(f"the server is starting ({self.stages.now}); try again later", 5.0)

    def _current_load(self) -> Load:
        """Computed anew a few times per second at most: a storm of refusals must not cost more than the work."""
        now = self._remote.clock()
        if now - self._load[0] > 0.1:
            mirrors = self._remote.mirrors.values()
            expected = self._admission.expected_output
            output = sum(expected(mirror.request.num_output, mirror.request.max_tokens) for mirror in mirrors)
            rows = min(len(mirrors), self.facts.max_rows) if mirrors else 1
            self._load = now, Load(self._remote.queued_tokens, output, max(1, rows))
        return self._load[1]
