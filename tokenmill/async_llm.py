"""AsyncLLM: the streaming twin of LLM for asyncio. One thread runs the engine; tasks await their answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenmill.config import EngineConfig
from tokenmill.engine.build import build
from tokenmill.engine.checkpoints import Progress
from tokenmill.errors import TokenmillError
from tokenmill.loading_bar import loading_bar
from tokenmill.lora import Adapters
from tokenmill.outputs import RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.processor import Message, Processor, Prompt, check_salt
from tokenmill.request_state import RequestState


class AsyncLLM:
    """Many requests at once, each an async iterator of its answer so far. Leaving an iterator cancels its request."""

    def __init__(self, model: str = "default", *, progress: Progress | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_options(model=model, **options)
        with loading_bar(progress) as tell:
            self._built = build(self.config, tell)
        built, spec = self._built, self._built.spec
        self._processor = Processor(
            built.engine, built.tokenizer, spec.vocab_size, spec.eos_ids, built.settings.max_len, seed=self.config.seed
        )
        self._adapters = Adapters(built.engine)
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None: stop
        self._mail: dict[str, Receiver] = {}  # touched by the engine thread only
        self._door = threading.Lock()  # held to put a command, so that none enters after the last was answered
        self._stopped: str | None = None  # why
        self._thread = threading.Thread(target=self._loop, name="tokenmill-engine", daemon=True)
        self._thread.start()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream one answer. Raises InvalidRequest or QueueFull before the first output."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._stream(lambda: self._processor.encode(prompt), params, options)

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to a conversation."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._stream(lambda: self._processor.chat_prompt(messages), params, options)

    async def reset_prefix_cache(self, cache_salt: str | None = None) -> None:
        """Forget all cached prefixes and recent answers, or those with this salt; running requests are not touched."""
        if cache_salt is not None:
            check_salt(cache_salt)
        await self._call(lambda: self._processor.engine.reset_prefix_cache(cache_salt))

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read a LoRA adapter from the folder that PEFT saved it in; requests may name it from then on."""
        await self._call(lambda: self._adapters.load(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Nobody may name it any more; requests that run with it are not touched."""
        await self._call(lambda: self._adapters.unload(name))

    def plan_lines(self) -> list[str]:
        return self._built.report

    def shutdown(self) -> None:
        """Stop the engine thread; requests still running end with an error."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join()

    def run_on_engine(self, work: Callable[[], None], answer: Callable[[Any, Exception | None], None]) -> None:
        """Have the engine's thread do something between two steps, and say there what came of it: an error, too, where
        the engine stops before. Any thread may ask."""
        self._put(_Command(work, answer))

    def deliver(self, state: RequestState, receiver: Receiver | None) -> None:
        """Who hears of a request's outputs from now on; None: nobody. On the engine's thread."""
        if receiver is None:
            self._mail.pop(state.id, None)
        else:
            self._mail[state.id] = receiver

    async def _stream(
        self, encode: Callable[[], Prompt], params: SamplingParams, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt = await asyncio.to_thread(encode)  # a long text must hold up neither the engine nor the event loop
        mailbox = _Mailbox(asyncio.get_running_loop())
        started: list[RequestState] = []

        def start() -> None:
            (adapter,) = self._adapters.names(options.pop("lora_request", None), options.pop("adapter", ""), 1)
            state = self._processor.prepare(prompt, params, adapter=adapter, **options)
            self._processor.submit(state)
            self.deliver(state, mailbox)
            started.append(state)

        def drop() -> None:
            for state in started:
                if self._mail.get(state.id) is mailbox:
                    del self._mail[state.id]
                self._processor.cancel(state)

        finished = False
        try:
            await self._call(start)
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:  # the reader left, perhaps before its request had begun: `drop` comes after `start`
                with contextlib.suppress(TokenmillError):
                    self._put(_Command(drop))

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Run something on the engine thread and await its result."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._put(_Command(work, lambda value, error: _tell(loop, answer, value, error)))
        return await answer

    def _put(self, command: _Command) -> None:
        with self._door:
            if self._stopped is not None:
                raise TokenmillError(self._stopped)
            self._commands.put(command)

    def _loop(self) -> None:
        cause = "it was shut down"
        try:
            while self._obey():
                for state in self._processor.step():
                    if state.id in self._mail:
                        self._mail[state.id].put(state.output())
                    if state.finished:
                        self._mail.pop(state.id, None)
        except BaseException as error:  # a bug: say it to everybody who waits rather than leave them hanging
            cause = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._stop(f"the engine has stopped ({cause}); make a new one")

    def _obey(self) -> bool:
        """Run what was asked for until now; sleep while there is nothing else to do. False: stop."""
        # What is asked for meanwhile waits for the next step: a storm of commands must not stop those who run.
        for _ in range(max(1, self._commands.qsize())):
            try:
                command = self._commands.get(block=not self._processor.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()
        return True

    def _stop(self, why: str) -> None:
        """Let nobody in any more, and tell everybody who waits."""
        with self._door:
            self._stopped = why
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None and command.answer is not None:
                    command.answer(None, TokenmillError(why))
        for mailbox in list(self._mail.values()):  # programs cancel what else they asked for
            mailbox.fail(TokenmillError(why))
        self._built.engine.close()


class Receiver(Protocol):
    """Hears of a request's outputs, on the engine's thread."""

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True)
class _Command:
    """Work for the engine thread, and whom to tell the outcome; where nobody asked, an error is the engine's own."""

    work: Callable[[], Any]
    answer: Callable[[Any, Exception | None], None] | None = None

    def run(self) -> None:
        if self.answer is None:
            self.work()
            return
        try:
            value = self.work()
        except Exception as error:
            self.answer(None, error)
        else:
            self.answer(value, None)


class _Mailbox:
    """Holds only the newest output: outputs are cumulative, so a slow reader costs no memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived = asyncio.Event()
        self._newest: deque[RequestOutput] = deque(maxlen=1)  # filled by one thread and emptied by another
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        self._newest.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        while True:
            self._arrived.clear()  # before looking: what arrives after the look wakes us again
            with contextlib.suppress(IndexError):
                return self._newest.popleft()
            if self._error is not None:
                raise self._error
            await self._arrived.wait()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and its tasks with it
            self._loop.call_soon_threadsafe(self._arrived.set)


def _tell(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    def deliver() -> None:
        if answer.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(deliver)
