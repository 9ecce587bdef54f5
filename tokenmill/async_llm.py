"""AsyncLLM: the streaming twin of LLM for asyncio. One thread runs the engine; tasks await their answers."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.build import Progress, build
from tokenmill.errors import TokenmillError
from tokenmill.front import Follow, Front, Message, Prompt
from tokenmill.outputs import RequestOutput
from tokenmill.params import SamplingParams

Command = Callable[[], None]


class AsyncLLM:
    """Many requests at once, each an async iterator of its answer so far. Leaving an iterator cancels its request."""

    def __init__(self, model: str = "default", *, progress: Progress | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_options(model=model, **options)
        self._built = build(self.config, progress)
        self._front = Front(self._built, self.config.seed)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._mail: dict[str, _Mailbox] = {}  # touched by the engine thread only
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._loop, name="tokenmill-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Stream one answer. Raises InvalidRequest or QueueFull before the first output."""
        params = sampling_params or SamplingParams()
        async for output in self._follow(lambda: self._front.prepare(prompt, params, **options)):
            yield output

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answer to a conversation."""
        params = sampling_params or SamplingParams()
        front = self._front
        async for output in self._follow(lambda: front.prepare(front.chat_ids(messages), params, **options)):
            yield output

    async def reset_prefix_cache(self) -> None:
        await self._call(self._front.engine.reset_prefix_cache)

    def plan_lines(self) -> list[str]:
        return self._built.report

    def shutdown(self) -> None:
        """Stop the engine thread; requests still running end with an error."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join()

    async def _follow(self, prepare: Callable[[], Follow]) -> AsyncIterator[RequestOutput]:
        mailbox = _Mailbox(asyncio.get_running_loop())

        def start() -> Follow:
            follow = prepare()
            self._front.submit(follow)
            self._mail[follow.id] = mailbox
            return follow

        follow = await self._call(start)
        try:
            while True:
                output = await mailbox.take()
                yield output
                if output.finished:
                    return
        finally:
            if self._thread.is_alive():
                self._commands.put(lambda: self._drop(follow))

    async def _call(self, command: Callable[[], Any]) -> Any:
        """Run something on the engine thread and await its result."""
        if self._error is not None or not self._thread.is_alive():
            raise TokenmillError(f"the engine has stopped: {self._error or 'it was shut down'}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                value = command()
            except Exception as error:
                _tell(loop, answer, error=error)
            else:
                _tell(loop, answer, value=value)

        self._commands.put(run)
        return await answer

    def _drop(self, follow: Follow) -> None:
        if self._mail.pop(follow.id, None) is not None and not follow.finished:
            self._front.cancel(follow)

    def _loop(self) -> None:
        try:
            while True:
                command: Command | None
                if self._front.engine.has_work:
                    with contextlib.suppress(queue.Empty):
                        while True:
                            command = self._commands.get_nowait()
                            if command is None:
                                return
                            command()
                else:  # idle: sleep until somebody asks
                    command = self._commands.get()
                    if command is None:
                        return
                    command()
                    continue
                for follow in self._front.step():
                    if follow.id in self._mail:
                        self._mail[follow.id].put(follow.output())
                    if follow.finished:
                        self._mail.pop(follow.id, None)
        except Exception as error:  # a bug: say it to everybody who waits rather than leave them hanging
            self._error = error
            raise
        finally:
            cause = self._error or TokenmillError("the engine was shut down")
            for mailbox in self._mail.values():
                mailbox.fail(TokenmillError(f"the engine has stopped: {cause}"))
            self._built.engine.close()


class _Mailbox:
    """Holds only the newest output: outputs are cumulative, so a slow reader costs no memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived = asyncio.Event()
        self._newest: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        self._newest = output
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            output, self._newest = self._newest, None
            if output is not None:
                return output
            if self._error is not None:
                raise self._error

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and its tasks with it
            self._loop.call_soon_threadsafe(self._arrived.set)


def _tell(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any], value: Any = None, error: Exception | None = None
) -> None:
    def deliver() -> None:
        if answer.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(deliver)
