"""BatchRunner: works on jobs of many requests in the background, and goes on with them after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tokenmill.serve.engine_client.text_pool import LONG
from tokenmill.serve.errors import HttpError, openai_shape
from tokenmill.serve.http import large_json
from tokenmill.serve.storage.jobs import Job, JobStore
from tokenmill.serve.storage.journal import JournalFull

log = logging.getLogger("tokenmill.serve")

PARALLEL = 16  # requests of one batch at a time: the others of its class must also get their turn
MOST = 256  # requests of all batches together
WINDOW = 24 * 3600.0  # seconds after which a batch does not try any longer
RETRY_STATUSES = (429, 503)  # the server has no room for it now
_PATIENCE = 5.0  # seconds, where the server does not say
_NO_ROOM = msgspec.json.encode(
    openai_shape(HttpError(413, "there is no room to keep this answer; delete files and batches", "storage_full"))
)

# (job, endpoint, body) -> (status, seconds to wait or None, body)
SendRequest = Callable[[Job, str, bytes], Awaitable[tuple[int, float | None, bytes]]]


class BatchRunner:
    """`ask` answers one request as if a client of that job's tenant had sent it. Of answers beyond `most_bytes` that a
    tenant keeps, only that there was no room for them is kept."""

    def __init__(
        self, store: JobStore, ask: SendRequest, clock: Callable[[], float] = time.time, most_bytes: float = math.inf
    ) -> None:
        self.store = store
        self._ask = ask
        self._clock = clock
        self._most_bytes = most_bytes
        self._room = asyncio.Semaphore(MOST)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Go on with what an earlier process left."""
        for job in self.store.unfinished():
            if about(job)["kind"] == "file":  # a process died before it was complete, and nobody was told of it
                self.store.forget(job.id)
            else:
                self.begin(job)

    def begin(self, job: Job) -> None:
        task = asyncio.get_running_loop().create_task(self._work(job))
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._left(job, task))

    def _left(self, job: Job, task: asyncio.Task[None]) -> None:
        self._tasks.pop(job.id, None)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("batch %s stops", job.id, exc_info=problem)

    async def cancel(self, job: Job) -> None:
        """End a job; what it has by now is kept. Raises JournalFull where the disk does not know that it ended."""
        await self._leave(job.id)
        if job.how is None:
            self.store.end(job.id, "cancelled")
        await self.store.flushed()  # also for whoever asks again because this failed

    async def stop(self) -> None:
        """Leave everything as it is for the next process."""
        for id in list(self._tasks):
            await self._leave(id)

    async def _leave(self, id: str) -> None:
        task = self._tasks.get(id)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _work(self, job: Job) -> None:
        endpoint = about(job)["endpoint"]
        todo = list(job.open_items())
        todo.reverse()  # so that popping takes the first

        async def worker() -> None:
            while todo:
                index, item = todo.pop()
                await self._answer(job, endpoint, index, item)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(PARALLEL, len(todo))):
                    group.create_task(worker())
            await self.store.flushed()  # the answers; that it ended, a restart would find out without asking anything
            self.store.end(job.id)
            log.info("batch completed", extra={"batch": job.id, "items": len(job.items), "failed": job.failed})
        except* JournalFull as full:  # it stays unfinished, for a restart with room on the disk
            log.error("batch %s stops: %s", job.id, full.exceptions[0])

    async def _answer(self, job: Job, endpoint: str, index: int, item: bytes) -> None:
        id_of_item, body = _unpacked(item) if len(item) <= LONG else await asyncio.to_thread(_unpacked, item)
        while True:
            async with self._room:
                status, wait, said = await self._ask(job, endpoint, body)
            if status not in RETRY_STATUSES or self._clock() > job.created + WINDOW:
                break
            await asyncio.sleep(_PATIENCE if wait is None else wait)
        if self.store.stored[job.owner] + len(said) > self._most_bytes:
            status, said = 413, _NO_ROOM
        id = f"batch_req_{uuid.uuid4().hex}"
        response = {"status_code": status, "request_id": id, "body": msgspec.Raw(said)}
        line = {"id": id, "custom_id": id_of_item, "response": response, "error": None}
        self.store.answer(job.id, index, msgspec.json.encode(line), status == 200)


def _unpacked(item: bytes) -> tuple[str, bytes]:
    """A line of a batch: its custom id, and the request."""
    asked: dict[str, Any] = large_json.decode(item)
    return asked["custom_id"], msgspec.json.encode({"priority": "batch", **asked["body"]})


def about(job: Job) -> dict[str, Any]:
    """What was noted about a job when it was made."""
    noted: dict[str, Any] = msgspec.json.decode(job.about)
    return noted
