"""StateBackend: answers the calls of one state of a session, through a Service."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import RequestOutput
from tokenmill.program.operations import Usage
from tokenmill.program.sequence import Call
from tokenmill.serve.engine_client.admission import Overloaded, Unavailable
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.errors import HttpError

PATIENCE = 60.0  # seconds that a call waits for room, or for an engine that is being restarted
_PAUSE = 0.5


class StateBackend:
    """All of it runs on the event loop, but for `submit` and `changed`: a long text is made tokens in a thread."""

    def __init__(self, service: Service, options: dict[str, Any]) -> None:
        if service.tokenizer is None:
            raise InvalidRequest("sessions need a tokenizer, and this server has none; send token ids to completions")
        self.tokenizer: Tokenizer = service.tokenizer
        self.usage = Usage()
        self.streaming = False  # whether anybody wants to hear of answers before they end
        self.moved = asyncio.Event()  # something has changed
        self._service, self._options = service, options
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Call, asyncio.Task[None] | None] = {}  # None: it is about to be asked for

    def check_adapter(self) -> None:
        """Raises HttpError where what the session asks for was unloaded."""
        name = self._options.get("adapter", "")
        if name and name not in self._service.adapters.known:
            raise HttpError(
                404,
                f"the adapter {name[:100]!r} of this session is not loaded any more; load it again, or open a session "
                "with another model",
                "model_not_found",
                "model",
            )

    def submit(self, call: Call) -> None:
        self._tasks[call] = None
        self._loop.call_soon_threadsafe(self._start, call)

    def cancel(self, call: Call) -> None:
        if (task := self._tasks.pop(call, None)) is not None:
            task.cancel()

    def drop(self, held: str) -> None:
        self._service.drop_held(held)

    def changed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self.moved.set)

    def _start(self, call: Call) -> None:
        if call in self._tasks:  # else it was cancelled meanwhile
            self._tasks[call] = self._loop.create_task(self._answer(call))

    async def _answer(self, call: Call) -> None:
        stream, over = None, False
        try:
            stream = await self._submit(call)
            if self.streaming:
                async for output in stream:
                    over = output.finished
                    self._tell(call, stream, output)
            else:
                output = await stream.last()
                over = True
                self._tell(call, stream, output)
        except Exception as error:
            known = isinstance(error, TokenmillError | HttpError)
            call.failed(error if known else TokenmillError(str(error)))
        finally:
            self._tasks.pop(call, None)
            if stream is not None:
                await stream.aclose()
                if not over:  # it may have ended just now
                    self._service.drop_held(stream.request_id)

    def _tell(self, call: Call, stream: Stream, output: RequestOutput) -> None:
        if output.error is not None:
            self.check_adapter()  # that is why
            if stream.at_fault:
                raise InvalidRequest(output.error)
        call.told(output)

    async def _submit(self, call: Call) -> Stream:
        """The state cannot be asked again by somebody who was refused in the middle of it, so this waits instead."""
        deadline = self._loop.time() + PATIENCE
        prompt = {"prompt_token_ids": call.prompt}
        while True:
            self.check_adapter()
            try:
                return await self._service.submit(
                    prompt, call.params, keep=True, continues=call.continues, **self._options
                )
            except (Overloaded, Unavailable) as error:
                hopeless = self._service.stats().state in ("draining", "stopped")
                if hopeless or self._loop.time() > deadline or getattr(error, "code", "overloaded") != "overloaded":
                    raise
            await asyncio.sleep(_PAUSE)
