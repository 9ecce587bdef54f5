"""Supervisor: starts the engine process, notices when it is dead or hung, and starts another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, ModelError, TokenmillError
from tokenmill.serve.engine import wire
from tokenmill.serve.engine.in_flight import InFlightFile
from tokenmill.serve.engine.main import EngineArgs
from tokenmill.serve.engine_client.remote_engine import CRASH_WEIGHT, KILL_WEIGHT, EngineLoss
from tokenmill.serve.settings import ServeSettings

log = logging.getLogger("tokenmill.serve")

LATE_MESSAGE_SECONDS = 0.2  # seconds that a dead engine's last messages may take to arrive
GRACE = 2.0  # seconds for an engine that was asked to stop
TICKS = 10  # looks at a busy engine per hang_seconds


class Owner(Protocol):
    """Whom the supervisor tells. Called on the event loop."""

    def engine_loading(self, message: wire.Loading) -> None: ...

    def engine_ready(self, facts: wire.EngineReady, send: Callable[[wire.ToEngine], None]) -> None: ...

    def engine_stepped(self, message: wire.StepDone) -> None: ...

    def engine_heartbeat(self, message: wire.Heartbeat) -> None: ...

    def engine_cache_changed(self, message: wire.CacheChange) -> None: ...

    def engine_loaded_adapter(self, message: wire.AdapterLoaded) -> None: ...

    def engine_lost(self, loss: EngineLoss) -> float:
        """The engine is gone. Returns the seconds to wait before the next one is started."""
        ...


class StartFailed(TokenmillError):
    """The engine process ended before it was ready."""


class Supervisor:
    """Owns the engine process. One task runs engines one after the other; `expect_work` arms the watchdog."""

    def __init__(self, config: EngineConfig, settings: ServeSettings, owner: Owner) -> None:
        self.generation = 0
        self.pid: int | None = None  # of the engine that is up
        self.niceness: int | None = None  # of engines, if it is not to be the front's
        self._config = config
        self._settings = settings
        self._owner = owner
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # made private (0700)
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Event()
        self._progress = 0  # messages that show that the engine is getting somewhere
        self._stopping = False

    async def start(self) -> None:
        """Returns when the first engine is ready; raises what it died of otherwise."""
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-")
        self._context = zmq.asyncio.Context()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready), name="tokenmill-supervisor")
        try:
            await ready
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the engine and forget everything about it."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def expect_work(self, busy: bool) -> None:
        """While the engine has work it has to show progress; an idle one may be silent."""
        if busy:
            self._busy.set()
        else:
            self._busy.clear()

    async def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            while True:
                loss, error = await self._one_engine(ready)
                if not ready.done():
                    ready.set_exception(error or StartFailed(loss.cause))
                    return
                log.error("the engine is gone: %s", loss.cause)
                await asyncio.sleep(self._owner.engine_lost(loss))
        except Exception as error:  # a bug of ours: say so where somebody waits, and be found dead by live()
            log.exception("the supervisor failed")
            if not ready.done():
                ready.set_exception(error)
            raise

    async def _one_engine(self, ready: asyncio.Future[None]) -> tuple[EngineLoss, Exception | None]:
        assert self._folder is not None and self._context is not None
        self.generation += 1
        folder = Path(self._folder.name)
        address, in_flight_file = f"ipc://{folder}/{self.generation}", folder / f"in-flight-{self.generation}"
        InFlightFile.create(in_flight_file)
        # A socket per engine: nothing that an old one said can be taken for the word of the new one.
        socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        socket.sndhwm = 0  # a send never waits: what is queued for the engine was admitted
        socket.bind(address)
        args = EngineArgs(
            address, str(in_flight_file), self._settings.beat_seconds, asdict(self._config), self.niceness
        )
        engine = _Process(self._settings.command or (sys.executable, "-m", "tokenmill.serve.engine.main"))
        fatal: list[wire.Fatal] = []
        tasks: list[asyncio.Task[str | None]] = []
        try:
            await engine.start(args)
            reader = asyncio.create_task(self._listen(socket, ready, fatal))
            exit = asyncio.create_task(engine.wait())
            tasks = [reader, exit, asyncio.create_task(self._watch_for_hangs())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = None  # of our own; else the way it ended tells
            if tasks[2] in done:
                reason = f"the engine hung: {tasks[2].result()}"
            elif reader in done:  # it spoke what we do not understand
                reason = f"{type(reader.exception()).__name__}: {reader.exception()}"
            if reason is not None:
                await engine.kill()
            await exit
            if not fatal and not reader.done():
                await asyncio.wait([reader], timeout=LATE_MESSAGE_SECONDS)
            in_flight = tuple(InFlightFile.read(in_flight_file))
            return _loss_of(engine, reason, fatal, in_flight), _to_raise(fatal)
        finally:
            self.pid = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._stopping and engine.running:
                _send_nowait(socket, wire.Stop())
                await engine.end_within(GRACE)
            else:
                await engine.kill()
            socket.close(linger=0)
            for file in (in_flight_file, folder / str(self.generation)):
                file.unlink(missing_ok=True)

    async def _listen(
        self, socket: zmq.asyncio.Socket, ready: asyncio.Future[None], fatal: list[wire.Fatal]
    ) -> str | None:
        while True:
            message = wire.decode_from_engine(await socket.recv())
            self._progress += 1
            match message:
                case wire.StepDone():
                    self._owner.engine_stepped(message)
                case wire.Heartbeat():
                    self._owner.engine_heartbeat(message)
                case wire.CacheChange():
                    self._owner.engine_cache_changed(message)
                case wire.AdapterLoaded():
                    self._owner.engine_loaded_adapter(message)
                case wire.Loading():
                    self._owner.engine_loading(message)
                case wire.EngineReady():
                    if message.version != wire.VERSION:
                        raise StartFailed(
                            f"the engine speaks version {message.version} of the wire, the front {wire.VERSION}; "
                            "tokenmill was replaced while it ran, so restart the server"
                        )
                    # The next engine must hold what was accepted under this one's lengths.
                    self._config = replace(self._config, max_model_len=message.max_len)
                    self.pid = message.pid
                    self._owner.engine_ready(message, lambda one: _send_nowait(socket, one))
                    if not ready.done():
                        ready.set_result(None)
                case wire.Fatal():
                    fatal.append(message)

    async def _watch_for_hangs(self) -> str | None:
        """Returns when the engine made no progress for too long, though it had something to do."""
        while True:
            if self.pid is not None:
                await self._busy.wait()  # no clock ticks while idle
            patience = self._settings.hang_seconds if self.pid is not None else self._settings.start_seconds
            tick, quiet, seen = min(patience / TICKS, 1.0), 0.0, self._progress
            while quiet < patience:
                before = time.monotonic()
                await asyncio.sleep(tick)
                if self._progress != seen or (self.pid is not None and not self._busy.is_set()):
                    break
                # Time in which this process did not run itself (stopped, suspended, starved) proves nothing.
                quiet += tick if time.monotonic() - before < 2 * tick + 0.05 else 0.0
            else:
                what = "completed no step" if self.pid is not None else "said nothing while loading"
                return f"it {what} for {patience:g} s"


class _Process:
    """An engine process in a group of its own, so that a terminal's Ctrl-C is not for it. Not in a session of its own:
    Linux shares the cores between sessions first, and then precedence within one would mean nothing."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._errors: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=20)

    async def start(self, args: EngineArgs) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stderr is not None
        self._process.stdin.write(args.line())
        self._errors = asyncio.create_task(self._pass_on(self._process.stderr))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    @property
    def last_line(self) -> str:
        """What it complained of last."""
        return next((line.strip() for line in reversed(self._lines) if line.strip()), "")

    async def wait(self) -> str | None:
        assert self._process is not None
        await self._process.wait()
        if self._errors is not None:
            await asyncio.wait([self._errors], timeout=LATE_MESSAGE_SECONDS)
        return None

    async def kill(self) -> None:
        """End it, with a traceback of where it was if it is able to write one."""
        if self.running:
            self._signal(signal.SIGABRT)
        await self.end_within(0.5)

    async def end_within(self, seconds: float) -> None:
        """It was told to leave; see that it does."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
        if process.returncode is None:
            self._signal(signal.SIGKILL)
        await process.wait()
        if self._errors is not None:
            self._errors.cancel()
        if process.stdin is not None:
            process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        """To it and whatever it started."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def _pass_on(self, stream: asyncio.StreamReader) -> None:
        line = b"..."
        while line:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the buffer; what is left of it is the next line
                line = b"...\n"
            self._lines.append(line.decode(errors="replace"))
            sys.stderr.write(self._lines[-1])


def _send_nowait(socket: zmq.asyncio.Socket, message: wire.ToEngine) -> None:
    """A send that fails was to an engine that is gone, and its successor will get everything anew."""
    with contextlib.suppress(zmq.ZMQError):
        asyncio.ensure_future(socket.send(wire.encode(message))).add_done_callback(_ignore_failure)


def _ignore_failure(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()  # what nobody asks for is written into the log


def _loss_of(engine: _Process, reason: str | None, fatal: list[wire.Fatal], in_flight: tuple[int, ...]) -> EngineLoss:
    said, weight = f" ({engine.last_line})" if engine.last_line else "", CRASH_WEIGHT
    if reason is not None:
        cause = reason
    elif fatal:
        cause = f"{fatal[0].kind}: {fatal[0].text}"
    elif engine.code == -signal.SIGKILL:
        cause, weight = "the engine process was killed from outside, or by the kernel for memory", KILL_WEIGHT
    elif engine.code is not None and engine.code < 0:
        cause = f"the engine process died of {_signal_name(-engine.code)}{said}"
    else:
        cause = f"the engine process ended with status {engine.code}{said}"
    return EngineLoss(cause, weight, in_flight)


def _to_raise(fatal: list[wire.Fatal]) -> Exception | None:
    """An error of the engine's build, as the same error here."""
    kinds: dict[str, type[TokenmillError]] = {"ConfigError": ConfigError, "ModelError": ModelError}
    if not fatal:
        return None
    word = fatal[0]
    return kinds[word.kind](word.text) if word.kind in kinds else StartFailed(f"{word.kind}: {word.text}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
