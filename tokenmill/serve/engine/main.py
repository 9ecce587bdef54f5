"""The engine process: takes messages from the front, turns the loop, and tells what came of it.

Started by the supervisor with one line of JSON on its standard input, which stays open: when it closes, the front
is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from tokenmill.collector import collector_paused
from tokenmill.config import EngineConfig
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Finish, Module, Request
from tokenmill.engine.scheduler import Delta
from tokenmill.engine.step import Loss, Pending, Runner, Step, num_decodes, parts_of
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.kv.events import CacheLog
from tokenmill.serve.engine import process_limits, wire
from tokenmill.serve.engine.in_flight import InFlightFile
from tokenmill.serve.engine.introspection import stats_of, view_of
from tokenmill.serve.engine.pushed_last import PushedLast
from tokenmill.serve.engine.startup import STARTING
from tokenmill.step_time import facts_of

if TYPE_CHECKING:
    from tokenmill.engine.build import Built

UNLIMITED = 2**31 - 1
MOST_MESSAGES = 256  # taken between two steps: a storm of them must not stop those who run
_PR_SET_PDEATHSIG = 1

Builder = Callable[[EngineConfig, Callable[[int, int, str], None]], "LoadedEngine"]


@dataclass(frozen=True)
class LoadedEngine:
    """A built engine, and what the front has to know of it."""

    engine: Engine
    ready: wire.EngineReady


@dataclass(frozen=True)
class EngineArgs:
    """What the supervisor writes to the engine's standard input."""

    address: str  # of the front's socket
    in_flight: str  # path of the InFlightFile
    beat_seconds: float
    config: dict[str, Any]  # an EngineConfig
    niceness: int | None = None  # of the threads that compute, if the front has taken precedence

    def line(self) -> bytes:
        return json.dumps(self.__dict__).encode() + b"\n"


def main(build: Builder | None = None) -> int:
    """Serve until told to stop. Another `build` may stand in for the real one."""
    faulthandler.enable()  # a crash, and the supervisor's SIGABRT to a hung engine, leave a traceback
    _die_with_parent()
    source = sys.stdin.fileno()
    args = EngineArgs(**json.loads(_read_line(source)))
    threading.Thread(target=_leave_when_closed, args=(source,), daemon=True).start()
    context = zmq.Context(io_threads=1)
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.connect(args.address)
    if args.niceness is not None:  # only now: the thread that carries messages keeps the front's
        process_limits.restore_priority(args.niceness)
    try:
        # The front bounds the queue; what it accepted and resubmits after a restart must fit.
        config = replace(EngineConfig(**args.config), max_queued_requests=UNLIMITED, max_queued_tokens=UNLIMITED)
        with collector_paused():
            loaded = (build or build_engine)(config, _ProgressReporter(socket))
        gc.freeze()  # what was loaded stays: a full collection would hold every answer up for a tenth of a second
        socket.send(wire.encode(loaded.ready))
        EngineLoop(loaded, socket, InFlightFile(Path(args.in_flight)), args.beat_seconds).run()
        return 0
    except Exception as error:
        if not isinstance(error, TokenmillError):  # whose sentence is enough, and the front says it
            traceback.print_exc()
        text = str(error).strip() or "no message"
        socket.send(wire.encode(wire.Fatal(type(error).__name__, text)))
        return 1
    finally:
        socket.close(linger=1000)
        context.term()


def build_engine(config: EngineConfig, tell: Callable[[int, int, str], None]) -> LoadedEngine:
    """The real engine; torch is imported here."""
    tell(0, 0, STARTING)
    from tokenmill.engine.build import build

    # The front reads the tokenizer itself.
    built = build(replace(config, skip_tokenizer_init=True), tell)
    return LoadedEngine(built.engine, ready_message(built))


def ready_message(built: Built) -> wire.EngineReady:
    settings, kv = built.settings, built.engine.scheduler.parts[0].kv
    return wire.EngineReady(
        version=wire.VERSION,
        pid=os.getpid(),
        vocab_size=built.spec.vocab_size,
        max_len=settings.max_len,
        eos_ids=tuple(built.spec.eos_ids),
        max_rows=settings.max_rows,
        max_step_tokens=settings.max_step_tokens,
        model=built.files.name,
        report=built.report,
        block_size=kv.block_size,
        pruning="" if kv.pruning is None else kv.pruning.name,
    )


class EngineLoop:
    """Messages, then a step, then what it brought; asleep in the socket when there is nothing to do."""

    def __init__(
        self, loaded: LoadedEngine, socket: zmq.Socket[bytes], in_flight: InFlightFile, beat_seconds: float
    ) -> None:
        self.engine = engine = loaded.engine
        self._socket = socket
        self._runner = engine.runner = _InFlightRunner(engine.runner, in_flight)
        self._beat_seconds = beat_seconds
        self._indices = [part.kv.index for part in engine.scheduler.parts]
        self._pushed = PushedLast(engine.scheduler.transfers)
        self._unadmitted: dict[int, Request] = {}  # by key: those that have been in no step yet
        self._steps = 0
        self._last_heartbeat = 0.0
        self._idle_reported = True  # the front knows that there is nothing to do

    def run(self) -> None:
        while self._handle_messages():
            if self.engine.has_work:
                self._run_step()
            elif self._pushed.held:
                self._pushed.wait(self.engine)
                self._tell_pushed()
        self.engine.close()

    def _run_step(self) -> None:
        self._runner.begin_turn()
        began = time.monotonic()
        deltas = self.engine.step()
        self._steps += 1
        self._idle_reported = False
        now = time.monotonic()
        admitted = self._newly_admitted() if self._unadmitted else []
        updates = [self._update(delta) for delta in self._pushed.hold_back(deltas)]
        did, pairs = self._runner.composition, self._runner.prefill_pairs
        self._send(wire.StepDone(self._steps, now, now - began, *did, updates, admitted, pairs))
        self._tell_cache()
        if now - self._last_heartbeat >= self._beat_seconds:
            self._send_heartbeat()

    def _tell_pushed(self) -> None:
        if updates := [self._update(delta) for delta in self._pushed.hold_back([])]:
            self._send(wire.StepDone(self._steps, time.monotonic(), 0.0, 0, 0, updates))

    def _follow_cache(self, follow: bool) -> None:
        for index in self._indices:
            index.log = CacheLog() if follow else None
        if follow:
            there = dict.fromkeys(identity for index in self._indices for identity in index.identities())
            self._send(wire.CacheChange(b"".join(there), b"", whole=True))

    def _tell_cache(self) -> None:
        """What the last step or wipe changed in the prefix caches, where somebody follows them."""
        for index in self._indices:
            if log := index.log:
                stored, evicted = log.take()
                if len(self._indices) > 1:  # another group may have it still
                    evicted = [one for one in evicted if all(other.block_of(one) is None for other in self._indices)]
                self._send(wire.CacheChange(b"".join(stored), b"".join(evicted)))

    def _newly_admitted(self) -> list[wire.Admitted]:
        """Those whom the step launched in this turn is the first of."""
        admitted = []
        for key in self._unadmitted.keys() & self._runner.launched:
            metrics = self._unadmitted.pop(key).metrics
            admitted.append(wire.Admitted(key, metrics.first_scheduled, metrics.cached_tokens, metrics.module_tokens))
        return admitted

    def _update(self, delta: Delta) -> wire.SequenceUpdate:
        request = delta.request
        update = wire.SequenceUpdate(int(request.id), delta.tokens)
        if delta.logprobs:
            update.logprobs = delta.logprobs
        if delta.finished:
            update.finish = None if request.finish is None else str(request.finish)
            update.error = request.error
            update.pooled = request.pooled or None
            update.request_fault = request.grammar is not None and request.grammar.error is not None
            self._unadmitted.pop(update.key, None)
        if request.prompt_logprobs and request.num_output == len(delta.tokens):
            update.prompt_logprobs = request.prompt_logprobs
        return update

    def _handle_messages(self) -> bool:
        """Do what was asked for until now; sleep while there is nothing else to do. False: stop."""
        for _ in range(MOST_MESSAGES):
            idle = not (self.engine.has_work or self._pushed.held)
            if idle and not self._idle_reported:
                self._idle_reported = True
                self._send_heartbeat()
            try:
                data = self._socket.recv(0 if idle else zmq.NOBLOCK)
            except zmq.Again:
                return True
            message = wire.decode_to_engine(data)
            match message:
                case wire.Submit():
                    self._submit(message)
                case wire.Cancel():
                    self._unadmitted.pop(message.key, None)
                    self.engine.cancel(str(message.key), Finish(message.why))
                case wire.Drop():
                    self.engine.drop_held(str(message.key))
                case wire.Ping():
                    self._send_heartbeat(message.view)
                case wire.ResetPrefixCache():
                    self.engine.reset_prefix_cache(message.salt)
                    self._tell_cache()
                case wire.FollowCache():
                    self._follow_cache(message.follow)
                case wire.LoadAdapter():
                    self._load_adapter(message)
                case wire.UnloadAdapter():
                    with contextlib.suppress(InvalidRequest):  # it never came to be loaded
                        self.engine.unload_adapter(message.name)
                case wire.Stop():
                    return False
        return True

    def _load_adapter(self, message: wire.LoadAdapter) -> None:
        def tell(key: str | None, error: str | None) -> None:
            self._send(wire.AdapterLoaded(message.number, message.name, key, error))

        path = Path(message.path)
        try:
            if not message.known:
                self.engine.load_adapter_later(message.name, path, tell)
                return
            key = self.engine.load_adapter(message.name, path)
            if key != message.known:
                self.engine.unload_adapter(message.name)
                tell(None, f"the adapter in {message.path!r} has changed since it was loaded; load it again")
            else:
                tell(key, None)
        except InvalidRequest as error:
            tell(None, str(error))

    def _submit(self, message: wire.Submit) -> None:
        # A grammar may crash while it is compiled.
        self._runner.note_in_flight([sequence.key for sequence in message.sequences])
        try:
            requests = self._requests(message)
            together = len(requests) > 1 and not any(sequence.output for sequence in message.sequences)
            if together:
                requests[0].followers = requests[1:]
            for request in requests[:1] if together else requests:
                self.engine.add(request)
        except Exception as error:  # one request's trouble is no other's
            request_fault = isinstance(error, InvalidRequest)
            if not request_fault:
                traceback.print_exc()
            text = str(error) if request_fault else f"{type(error).__name__}: {error}"
            updates = [
                wire.SequenceUpdate(sequence.key, [], finish=str(Finish.ERROR), error=text, request_fault=request_fault)
                for sequence in message.sequences
            ]
            now = time.monotonic()
            self._send(wire.StepDone(self._steps, now, 0.0, 0, 0, updates))
            return
        self._runner.note_in_flight([])
        for request in requests:
            self._unadmitted[int(request.id)] = request

    def _requests(self, message: wire.Submit) -> list[Request]:
        now = self.engine.clock()
        requests = []
        for sequence in message.sequences:
            request = Request(
                str(sequence.key),
                message.prompt,
                message.params,
                max_tokens=message.max_tokens,
                seed=sequence.seed,
                stop_ids=frozenset(message.stop_ids),
                priority=message.priority,
                arrival=now - message.waited,
                deadline=None if message.deadline_in is None else now + message.deadline_in,
                salt=message.salt,
                adapter=message.adapter,
                pooling=message.pooling,
                pushes=message.pushes,
                keep=message.keep,
                continues=None if message.continues is None else str(message.continues),
                modules=[Module(first, end) for first, end in message.modules],
            )
            request.tokens += sequence.output
            requests.append(request)
        return requests

    def _send_heartbeat(self, view: bool = False) -> None:
        self._last_heartbeat = time.monotonic()
        stats = stats_of(self.engine)
        seen = view_of(self.engine) if view else None
        self._send(wire.Heartbeat(stats, seen))

    def _send(self, message: wire.FromEngine) -> None:
        self._socket.send(wire.encode(message))


class _InFlightRunner:
    """A runner that writes down who is in flight before it launches a step, and what the step is made of."""

    def __init__(self, runner: Runner, in_flight: InFlightFile) -> None:
        self._inner = runner
        self._in_flight = in_flight
        # A step is launched while the one before it runs; and what a commit breaks on was in the newest of them.
        self._newest: deque[list[int]] = deque(maxlen=2)
        self.begin_turn()

    def begin_turn(self) -> None:
        """A turn of the loop launches one step at most; these are of that one."""
        self.composition = (0, 0)  # decodes, tokens of prompts
        self.prefill_pairs: float = 0
        self.launched: list[int] = []  # keys

    def note_in_flight(self, more: list[int]) -> None:
        """Write down who is in flight, and whom else a crash would have to do with."""
        self._in_flight.write([*(key for keys in self._newest for key in keys), *more])

    def launch(self, step: Step) -> Pending:
        parts = parts_of(step)
        requests = [request for part in parts for request in part.requests]
        self.launched = [int(request.id) for request in requests if not request.is_module]
        asking = [int(request.id.partition("/")[0]) for request in requests if request.is_module]
        self._newest.append(self.launched + asking)
        self.note_in_flight([])
        all_decodes = prompt_tokens = 0
        for part in parts:
            decodes = num_decodes(part)  # with drafts, too: these are no tokens of prompts
            all_decodes += decodes
            if decodes < len(part.counts):
                prompt_tokens += sum(part.counts[decodes:])
                self.prefill_pairs += facts_of(part).prefill_pairs
        self.composition = (all_decodes, prompt_tokens)
        return self._inner.launch(step)

    def reset(self) -> Loss | None:
        return self._inner.reset()

    def close(self) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ProgressReporter:
    """Passes on how far loading has come, not more often than anybody looks. Any thread may call it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._last = 0.0
        self._what = ""
        self._lock = threading.Lock()  # a socket is for one thread at a time

    def __call__(self, done: int, total: int, what: str) -> None:
        with self._lock:
            now = time.monotonic()
            if what != self._what or now - self._last >= 0.1 or 0 < total <= done:
                self._what, self._last = what, now
                self._socket.send(wire.encode(wire.Loading(done, total, what)))


def _die_with_parent() -> None:
    """On Linux the kernel ends us with the front, even where no thread of ours would get to notice."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _read_line(source: int) -> bytes:
    """Straight from the descriptor: a thread that sleeps in a buffered file breaks the interpreter's exit."""
    data = b""
    while not data.endswith(b"\n") and (more := os.read(source, 65536)):
        data += more
    return data


def _leave_when_closed(source: int) -> None:
    while os.read(source, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
