"""Service: what the HTTP layer talks to. Requests go in, streams of answers come out, whatever the engine does."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.request import Finish, Request
from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.params import SamplingParams
from tokenmill.processor import NO_ANSWER, Processor, Prompt
from tokenmill.request_state import RequestState
from tokenmill.serve.engine import wire
from tokenmill.serve.engine.startup import StartupProgress
from tokenmill.serve.engine_client.adapters import RemoteAdapters
from tokenmill.serve.engine_client.admission import AdmissionControl, Backlog, CircuitBreaker, Unavailable
from tokenmill.serve.engine_client.cache_feed import CacheFeed
from tokenmill.serve.engine_client.events import EngineEvent, EventBus, RequestEvent, StatsEvent, StepEvent
from tokenmill.serve.engine_client.prompts import Prompts
from tokenmill.serve.engine_client.remote_engine import EngineLoss, RemoteEngine
from tokenmill.serve.engine_client.remote_model import Progress, load_tokenizer
from tokenmill.serve.engine_client.resume import ResumedSequence
from tokenmill.serve.engine_client.stats import ServiceCounters, ServiceStats
from tokenmill.serve.engine_client.streams import Dispatcher, Stream, StreamState
from tokenmill.serve.engine_client.supervisor import Supervisor
from tokenmill.serve.engine_client.text_pool import TextPool
from tokenmill.serve.settings import ServeSettings
from tokenmill.step_time import Facts


class Service:
    """One model behind one supervised engine process. Everything runs on the event loop that called `start`.

    service = Service(EngineConfig(), ServeSettings())
    await service.start()
    stream = await service.submit("The mill", SamplingParams())   # raises before anything is streamed
    async for output in stream: ...                               # RequestOutput, cumulative, newest only
    """

    facts: wire.EngineReady  # vocabulary, lengths, model name, report lines; there after `start`

    def __init__(
        self, config: EngineConfig, settings: ServeSettings | None = None, degrade: Service | None = None
    ) -> None:
        """`degrade` is a second service (a smaller model) that `route` names while this one cannot answer.
        Whoever made it starts and stops it."""
        self.config = config
        self.settings = settings or ServeSettings()
        self.degrade = degrade
        self.tokenizer: Tokenizer | None = None
        self.texts = TextPool()
        self._supervisor = Supervisor(config, self.settings, self)
        self._remote = RemoteEngine()
        self._remote.on_work = lambda: self._supervisor.expect_work(True)
        self.adapters = RemoteAdapters()
        self._remote.adapter_key = self.adapters.key_of
        self.prompts = Prompts(self.texts, self.adapters, self.check_open, self.check_started)
        self._modules = self.settings.lora_modules if config.enable_lora else ()  # to be loaded before all requests
        self._admission = AdmissionControl(self.settings)
        self._breaker = CircuitBreaker(self.settings)
        self._counters = ServiceCounters()
        self._dispatcher = Dispatcher(self._remote, self._ended, self._least_seconds)
        self._active = self._dispatcher.active
        self.cache_feed = CacheFeed()
        self._events = EventBus()
        self.subscribe = self._events.subscribe
        self._views: list[asyncio.Future[wire.EngineSnapshot | None]] = []
        self._state = "starting"
        self._changed = asyncio.Event()  # a request ended
        self.startup = StartupProgress()
        self._last_step = 0.0
        self._failures_in_a_row = 0  # engines in a row that were lost without having said anything
        self._load: tuple[float, Backlog] = (float("-inf"), Backlog())
        self._probe: str | None = None  # the request that the half-open breaker let in

    # -- life -----------------------------------------------------------------------------------------------

    async def start(self, progress: Progress | None = None) -> None:
        """Start the engine and return when it is ready. Raises ConfigError or ModelError with its own sentence."""
        self.startup.progress = progress
        if not self.config.skip_tokenizer_init:
            self.tokenizer = await asyncio.to_thread(load_tokenizer, self.config, self.startup.report)
        await self._supervisor.start()
        for number, (name, path) in enumerate(self._modules):
            if name in (self.facts.model, self.config.model):
                raise ConfigError(f"the adapter {name!r:.100} has the name of the model; give it another one")
            self.startup.report(number, len(self._modules), "loading adapters")
            await self.adapters.load(name, Path(path).expanduser().resolve())
        if self._modules:
            self._modules = ()
            if self._send is not None:  # else the next engine opens
                self._open()

    def set_engine_niceness(self, niceness: int) -> None:
        """For a front that has taken precedence; before `start`."""
        self._supervisor.niceness = niceness

    async def drain(self, seconds: float) -> int:
        """Accept nothing more and wait for what runs. Returns how many requests had to be handed back unfinished:
        their streams end with finish_reason "error" and an error that says that the server is going away."""
        self._state = "draining"
        deadline = self._remote.clock() + seconds
        while self._active and (left := deadline - self._remote.clock()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        why = "the server is shutting down and did not finish this; send it again"
        handed_back = len(self._active)
        self._remote.end_all(Finish.ERROR, why)
        self._dispatcher.deliver()
        return handed_back

    async def stop(self) -> None:
        """End the engine process and every stream. Safe to call twice, and without a start."""
        self._state = "stopped"
        self.texts.close()
        await self._supervisor.stop()
        self._remote.end_all(Finish.ERROR, "the server was stopped")
        self._dispatcher.deliver()

    def ready(self) -> bool:
        """Whether a request would be worked on now: an engine is up, idle or completing steps; the breaker is shut."""
        now = self._remote.clock()
        silent = self._remote.sequences and now - self._last_step > self.settings.hang_seconds / 2
        return self._state == "ready" and not silent and self._breaker.state(now) != "open"

    def live(self) -> bool:
        """Whether this process does its work: the supervisor runs. False means: restart the whole server."""
        return self._state in ("starting", "stopped") or self._supervisor.alive

    def route(self) -> Service:
        """This service, or the degrade service while this one is not ready and that one is."""
        if self.degrade is not None and not self.ready() and self.degrade.ready() and self._state != "draining":
            return self.degrade
        return self

    def and_degrade(self) -> list[Service]:
        """This service, and behind it the one that `route` may name instead."""
        return [self] if self.degrade is None else [self, self.degrade]

    # -- requests -------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        resumed: Sequence[ResumedSequence | None] | None = None,
        **options: Any,
    ) -> Stream:
        """Accept a request; `options` are those of `Processor.prepare`, and `resumed` is what its sequences have said
        elsewhere. Raises before anything runs: InvalidRequest (400), Overloaded (429) and Unavailable (503), the last
        two with `.retry_after` in seconds (admission.py)."""
        return (await self._accept([prompt], params, request_id, options, resumed))[0]

    async def embed(
        self, prompts: Sequence[Prompt], pooling: str = "mean", *, request_id: str | None = None, **options: Any
    ) -> list[Stream]:
        """Accept all of these prompts or none, and ask for a vector of unit length of each: when its stream has ended
        well, `stream.request_state.leader.pooled`. Raises like `submit`, and has its options."""
        return await self._accept(prompts, NO_ANSWER, request_id, options | {"pooling": pooling})

    async def _accept(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request_id: str | None,
        options: dict[str, Any],
        resumed: Sequence[ResumedSequence | None] | None = None,
    ) -> list[Stream]:
        began = self._remote.clock()
        try:
            self.check_open()
            request_states, first = [], request_id or uuid.uuid4().hex
            for number, prompt in enumerate(prompts):
                id = f"{first}-{number}" if number else first
                request_states.append(await self.prompts.prepare(prompt, params, resumed, request_id=id, **options))
            self.check_open()  # again: that may have taken its time
            for request_state in request_states:
                if request_state.timeout is not None:
                    request_state.timeout = max(0.0, request_state.timeout - (self._remote.clock() - began))
            return self._admit(request_states)
        except TokenmillError:
            self._counters.refused += 1
            raise

    def _admit(self, request_states: list[RequestState]) -> list[Stream]:
        remote, now = self._remote, self._remote.clock()
        tokens = sum(len(request_state.prompt_ids) for request_state in request_states)
        sequences = sum(len(request_state.sequences) for request_state in request_states)
        self._admission.check(remote.queued, remote.queued_tokens, tokens, sequences, self._current_load)
        timeout = request_states[0].timeout
        if timeout is not None and remote.sequences:  # one that is idle must try: what it takes may be less by now
            ahead = remote.tokens_before(request_states[0].leader.priority, self.config.policy)
            self._admission.check_deadline(ahead, tokens, timeout, self._current_load)
        was_half_open = self._breaker.state(now) == "half_open"
        wait = self._breaker.admit(now)
        if wait is not None:
            raise Unavailable("the engine failed repeatedly and is being restarted; try again later", wait)
        try:
            streams = [self._dispatcher.open(one, self._supervisor.generation) for one in request_states]
        except TokenmillError:
            self._breaker.probe_ended()
            raise
        self._probe = request_states[0].id if was_half_open else self._probe
        self._counters.accepted += len(request_states)
        for request_state in request_states:
            leader = request_state.leader
            self._events.emit(RequestEvent(request_state.id, "accepted", now, leader.prompt_len, leader.priority))
        return streams

    def cancel(self, request_id: str) -> bool:
        """End a request; its stream gets a last output with finish_reason "cancelled". False: there is none."""
        state = self._active.get(request_id)
        if state is not None:
            self._dispatcher.drop(state)
        return state is not None

    def drop_held(self, request_id: str) -> None:
        """Nobody will continue what a request that was to be kept left behind in the engine."""
        self._remote.drop_held(request_id)

    def reset_prefix_cache(self, cache_salt: str) -> None:
        """Forget what was cached for requests with this salt, before any that is submitted after this."""
        for one in self.and_degrade():
            one._remote.reset_prefix_cache(cache_salt)

    # -- to watch -------------------------------------------------------------------------------------------

    def stats(self) -> ServiceStats:
        return self._counters.stats(
            state=self._state,
            breaker=self._breaker.state(self._remote.clock()),
            generation=self._supervisor.generation,
            active=len(self._active),
            queued=self._remote.queued,
            queued_tokens=self._remote.queued_tokens,
            drain_seconds=self._admission.drain_seconds(self._current_load()),
        )

    def seconds_ahead(self) -> float:
        """Until a prompt that came now would begin to be read, as far as one can tell."""
        return self._admission.prefill_seconds(self._remote.queued_tokens) or 0.0

    def seconds_per_token(self) -> float | None:
        """Of a prompt, in full steps; None: nothing measured yet."""
        tokens = self._admission.max_step_tokens
        seconds = self._admission.prefill_seconds(tokens)
        return None if seconds is None else seconds / tokens

    async def view(self, timeout: float = 2.0) -> wire.EngineSnapshot | None:
        """The inside of the engine (every block, every request); None where it does not answer in time."""
        if self._state in ("starting", "stopped") or self._send is None:
            return None
        answer: asyncio.Future[wire.EngineSnapshot | None] = asyncio.get_running_loop().create_future()
        self._views.append(answer)
        self._send(wire.Ping(view=True))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            return None

    def request_of(self, key: int) -> str | None:
        """The request id behind a key of a view."""
        sequence = self._remote.sequences.get(key)
        return None if sequence is None else sequence.request.id

    def leaders(self) -> list[Request]:
        """The first sequence of every request that is not finished."""
        return [state.request_state.leader for state in self._active.values()]

    # -- what the supervisor tells ----------------------------------------------------------------------------

    _send: Callable[[wire.ToEngine], None] | None = None
    _processor: Processor  # there once an engine has told its facts

    def engine_loading(self, message: wire.Loading) -> None:
        if self._state in ("starting", "restarting"):
            self.startup.report(message.done, message.total, message.what)

    def engine_ready(self, facts: wire.EngineReady, send: Callable[[wire.ToEngine], None]) -> None:
        self.facts = self.prompts.facts = facts
        self._admission.max_step_tokens = facts.max_step_tokens
        if self._state == "starting":
            vocabulary = facts.vocab_size, facts.eos_ids
            self._processor = Processor(self._remote, self.tokenizer, *vocabulary, facts.max_len, seed=self.config.seed)
            self._dispatcher.processor = self.prompts.processor = self._processor
        if self._state != "starting" or not self._modules:
            self._open()
        self._last_step = self._remote.clock()
        self._send = send
        self._events.emit(EngineEvent("ready", self._last_step, generation=self._supervisor.generation))
        self.adapters.attach(send)
        self._remote.attach(send)
        self._dispatcher.deliver()  # who could not go on there
        self.cache_feed.attach(send)

    def engine_stepped(self, message: wire.StepDone) -> None:
        for admitted in message.admitted:
            begun = self._remote.sequences.get(admitted.key)
            if begun is not None and begun is begun.group[0]:  # the others fork its prompt
                self._admission.learn_prompt(begun.request.prompt_len, admitted.cached_tokens + admitted.module_tokens)
        lag = self._remote.take_in(message)
        self._last_step = now = self._remote.clock()
        tokens = sum(len(update.tokens) for update in message.updates)
        if tokens or any(update.pooled for update in message.updates):
            self._failures_in_a_row = 0
        facts = Facts(message.decodes, prefill_tokens=message.prefill_tokens, prefill_pairs=message.prefill_pairs)
        self._admission.learn_step(facts, message.seconds)
        self._dispatcher.deliver(message.at)
        did = message.seconds, message.decodes, message.prefill_tokens
        self._events.emit(StepEvent(message.number, now - lag, lag, *did, tokens))

    def engine_heartbeat(self, message: wire.Heartbeat) -> None:
        self._counters.engine = message.stats
        if message.view is not None:
            views, self._views = self._views, []
            for view in views:
                if not view.done():
                    view.set_result(message.view)
        self._events.emit(StatsEvent(self._remote.clock(), message.stats))

    def engine_cache_changed(self, message: wire.CacheChange) -> None:
        self.cache_feed.take(message)

    def engine_loaded_adapter(self, message: wire.AdapterLoaded) -> None:
        self.adapters.loaded(message)

    def engine_lost(self, loss: EngineLoss) -> float:
        now = self._remote.clock()
        self._send = None
        self.cache_feed.lost()
        self.adapters.lost()
        if self._state == "ready":
            self._state = "restarting"
        self.startup.lost()
        self._counters.count_lost_engine()
        self._failures_in_a_row += 1
        self._events.emit(EngineEvent("died", now, loss.cause, self._supervisor.generation))
        self._remote.lose(loss)
        if self._breaker.failed(now):
            self._events.emit(EngineEvent("breaker_open", now, loss.cause, self._supervisor.generation))
        if self._failures_in_a_row >= self.settings.give_up_after:
            self._failures_in_a_row = 0
            why = f"the engine failed {self.settings.give_up_after} times in a row: {loss.cause}"
            self._remote.end_all(Finish.ERROR, why)
        self._dispatcher.deliver()
        if self._failures_in_a_row <= 1:
            return 0.0
        doubled = 2.0 ** min(self._failures_in_a_row - 2, 16)
        return min(self.settings.backoff_seconds * doubled, self.settings.backoff_most)

    # -- inside -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """From now on requests are accepted."""
        if self._state in ("starting", "restarting"):
            self._state = "ready"
        self.startup.ready()

    def _ended(self, state: StreamState) -> None:
        """A request has ended: count it, and learn from it."""
        request_state = state.request_state
        now, leader = self._remote.clock(), request_state.leader
        reason = str(request_state.sequences[0].finish)
        output = sum(sequence.num_tokens for sequence in request_state.sequences)
        self._counters.close(reason, leader.prompt_len, output, leader.metrics.reused_tokens)
        if reason in (Finish.STOP, Finish.LENGTH):
            if leader.pooling is None:
                self._admission.learn_answer(leader.num_output)
            if self._breaker.succeeded(now):
                self._events.emit(EngineEvent("breaker_closed", now, generation=self._supervisor.generation))
        if self._probe == request_state.id:
            self._probe = None
            self._breaker.probe_ended()
        restarts = self._supervisor.generation - state.generation
        self._events.emit(RequestEvent.finished(request_state.id, leader, now, reason, output, restarts))
        self._changed.set()
        if not self._remote.sequences:  # an engine with nothing to do may be silent
            self._supervisor.expect_work(False)
            if self._remote.has_work:  # no step will bring it: ends that the end of this one brought about
                asyncio.get_running_loop().call_soon(self._dispatcher.deliver)

    def _least_seconds(self, request: Request) -> float | None:
        """Until its first token, of an engine that did nothing else; None: it has one, or nothing was measured yet."""
        unread = self._remote.unread_tokens(request)
        if unread is None:
            unread = self._admission.uncached_tokens(request.prompt_len)
        return self._admission.prefill_seconds(unread) if unread else None

    def check_open(self) -> None:
        if self._state in ("draining", "stopped"):
            raise Unavailable("the server is shutting down; try another one, or this one later", 5.0)
        self.check_started()
        now = self._remote.clock()
        if self._breaker.state(now) == "open":
            wait = self._breaker.admit(now) or 1.0
            raise Unavailable("the engine failed repeatedly and is being restarted; try again later", wait)

    def check_started(self) -> None:
        if self._state == "starting":
            raise Unavailable(f"the server is starting ({self.startup.now}); try again later", 5.0)

    def _current_load(self) -> Backlog:
        """Computed anew a few times per second at most: a storm of refusals must not cost more than the work."""
        now = self._remote.clock()
        if now - self._load[0] > 0.1:
            sequences = self._remote.sequences.values()
            expected = self._admission.expected_output
            output = sum(expected(sequence.request.num_output, sequence.request.max_tokens) for sequence in sequences)
            rows = min(len(sequences), self.facts.max_rows) if sequences else 1
            self._load = now, Backlog(self._remote.queued_tokens, output, max(1, rows))
        return self._load[1]
