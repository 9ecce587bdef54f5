"""/v1/messages/batches: Anthropic's batches of messages, on the same jobs as OpenAI's."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.serve.api.batches import MOST_LINES, begin_batch, job_of, jobs_of
from tokenmill.serve.api.schemas import MessageBatchRequest
from tokenmill.serve.errors import HttpError, anthropic_shape
from tokenmill.serve.http.batch_runner import RETRY_STATUSES, WINDOW
from tokenmill.serve.http.paging import listing, page
from tokenmill.serve.http.request_context import RequestContext, json_response
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.http.tenants import Tenant
from tokenmill.serve.storage.jobs import Job

ENDPOINT = "/v1/messages"
KIND = "message batch"
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KINDS = ("processing", "succeeded", "errored", "canceled", "expired")


async def create_batch(context: RequestContext, body: MessageBatchRequest) -> Response:
    if not 1 <= len(body.requests) <= MOST_LINES:
        number = len(body.requests)
        raise InvalidRequest(f"requests has {number} entries; there may be 1 to {MOST_LINES}")
    seen: set[str] = set()
    for number, one in enumerate(body.requests):
        if not _CUSTOM_ID.fullmatch(one.custom_id) or one.custom_id in seen:
            raise HttpError(
                400,
                f"requests[{number}] has the custom_id {one.custom_id[:70]!r}; each needs its own, of 1 to 64 letters, "
                "digits, _ and -",
                "invalid_value",
                "requests",
            )
        seen.add(one.custom_id)
        if one.params.get("stream"):
            raise HttpError(400, f"requests[{number}] has stream; in a batch nothing is", "invalid_value", "requests")
    items = [msgspec.json.encode({"custom_id": one.custom_id, "body": one.params}) for one in body.requests]
    job = await begin_batch(context, f"msgbatch_{uuid.uuid4().hex}", items, {"kind": KIND, "endpoint": ENDPOINT})
    return context.answer(_batch(job))


async def list_batches(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Your message batches, the newest first."""
    jobs = jobs_of(server, tenant, KIND)[::-1]
    shown, more = page(request, jobs, lambda job: job.id, most=1000, after="after_id", before="before_id")
    return json_response(listing([_batch(job) for job in shown], more))


async def one_batch(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """How far a message batch has come."""
    return json_response(_batch(job_of(server, tenant, request.path_params["name"], KIND)))


async def cancel_batch(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """End a message batch; the answers that it has are kept."""
    job = job_of(server, tenant, request.path_params["name"], KIND)
    await server.batches.cancel(job)
    return json_response(_batch(job))


async def delete_batch(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Delete a message batch that has ended."""
    job = job_of(server, tenant, request.path_params["name"], KIND)
    if job.how is None:
        raise InvalidRequest(f"{job.id!r} still runs; cancel it first")
    server.batches.store.remove(job.id)
    return json_response({"id": job.id, "type": "message_batch_deleted"})


async def results(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """The answers of a message batch that has ended, one JSON object per line."""
    job = job_of(server, tenant, request.path_params["name"], KIND)
    if job.how is None:
        raise InvalidRequest(f"{job.id!r} still runs; its results are there when it has ended")
    lines = await asyncio.to_thread(lambda: [msgspec.json.encode(line) + b"\n" for line in _results(job)])
    return Response(b"".join(lines), media_type="application/x-jsonl", headers={"content-disposition": "attachment"})


class _Answer(msgspec.Struct):
    """What `Batches` notes of an answer, as far as it matters here."""

    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Answer


_read_line = msgspec.json.Decoder(_Line).decode


def _results(job: Job) -> Iterator[dict[str, Any]]:
    for index, item in enumerate(job.items):
        answered = job.answers.get(index)
        if answered is None:
            yield {"custom_id": msgspec.json.decode(item)["custom_id"], "result": {"type": "canceled"}}
        else:
            line = _read_line(answered[1])
            yield {"custom_id": line.custom_id, "result": _result(line.response)}


def _result(answer: _Answer) -> dict[str, Any]:
    kind = _kind(answer.status_code)
    if kind == "succeeded":
        return {"type": kind, "message": answer.body}
    if kind == "expired":
        return {"type": kind}
    error = msgspec.json.decode(answer.body)
    if error.get("type") != "error":  # told by the batch itself, which is everybody's
        error = anthropic_shape(HttpError(answer.status_code, error["error"]["message"]))
    return {"type": kind, "error": {"request_id": None, **error}}


def _kind(status: int) -> str:
    return "succeeded" if status == 200 else "expired" if status in RETRY_STATUSES else "errored"


def _batch(job: Job) -> dict[str, Any]:
    ended, counts = job.how is not None, Counter[str]()
    if ended:  # before that, all are told as processing
        # Those that are long need not be read for it.
        answers = job.answers.values()
        counts.update("succeeded" if ok else _kind(_read_line(said).response.status_code) for ok, said in answers)
        counts["canceled"] = len(job.items) - len(job.answers)
    else:
        counts["processing"] = len(job.items)
    return {
        "id": job.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "in_progress",
        "request_counts": {kind: counts[kind] for kind in _KINDS},
        "created_at": _time(job.created),
        "expires_at": _time(job.created + WINDOW),
        "ended_at": _time(job.ended),
        "cancel_initiated_at": _time(job.ended) if job.how == "cancelled" else None,
        "archived_at": None,
        # Without a host: clients know how they reach this server, and it does not.
        "results_url": f"/v1/messages/batches/{job.id}/results" if ended else None,
    }


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
