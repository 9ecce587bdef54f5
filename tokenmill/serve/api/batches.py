"""/v1/files and /v1/batches: many requests in one file, answered in the background."""

from __future__ import annotations

import asyncio
import email
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.serve.api.schemas import BatchRequest
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.batch_runner import SendRequest, about
from tokenmill.serve.http.paging import listing, ordered, page
from tokenmill.serve.http.request_body import read_body
from tokenmill.serve.http.request_context import RequestContext, json_response
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.http.tenants import Tenant
from tokenmill.serve.storage.jobs import Job, JobStore
from tokenmill.serve.storage.journal import JournalFull

MOST_LINES = 50_000
MOST_JOBS = 10_000  # files and batches of one tenant
_MOST_FIELDS = 16  # of a form
_LONGEST_HEAD = 8192  # bytes of a form's field
_LONGEST_NAME = 255
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
Endpoint = Callable[[Request], Awaitable[Response]]


def local_sender(app: FastAPI, endpoints: dict[str, Endpoint]) -> SendRequest:
    """Lets batches ask the same handlers that clients ask."""

    async def ask(job: Job, path: str, body: bytes) -> tuple[int, float | None, bytes]:
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()  # a batch does not leave
            raise AssertionError

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "app": app}
        if (trace := about(job).get("trace")) is not None:  # that the batch was made in
            scope["headers"] = [(b"traceparent", trace.encode())]
        scope |= {"server": ("batch", 0), "tokenmill.owner": job.owner, "tokenmill.batch": job.id}
        request = Request(scope, receive)
        response = await endpoints[path](request)
        wait = response.headers.get("retry-after")
        return response.status_code, None if wait is None else float(wait), bytes(response.body)

    return ask


# -- files ----------------------------------------------------------------------------------------------------


async def upload(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Upload a file of requests, one JSON object per line."""
    tenant.enter()
    try:
        body = await read_body(request, server.settings)
    finally:
        tenant.leave(0)
    fields = await asyncio.to_thread(_form_fields, request.headers.get("content-type", ""), body)
    content, name = fields.get("file", (None, None))
    purpose = (fields.get("purpose", (b"", None))[0] or b"").decode("utf-8", "replace")
    if content is None or purpose != "batch":
        raise InvalidRequest("send multipart/form-data with a file and purpose=batch; no other purpose is known")
    noted = msgspec.json.encode({"kind": "file", "filename": name or "batch.jsonl", "purpose": purpose})
    store = server.batches.store
    _check_room(server, tenant, len(content))
    job = store.create(f"file-{uuid.uuid4().hex}", [content], noted, tenant.name)
    store.end(job.id)
    await _kept(store, job)
    return json_response(_file(job.id, len(content), job))


def _form_fields(content_type: str, body: bytes) -> dict[str, tuple[bytes, str | None]]:
    """The fields of a form: name -> (content, file name). Contents are taken as they are, down to the byte."""
    found = re.fullmatch(r"multipart/form-data\s*;.*?\bboundary=(?:\"([^\"]+)\"|([^\s;\"]+)).*", content_type, re.I)
    if found is None:
        return {}
    delimiter = f"\r\n--{found[1] or found[2]}".encode("latin-1", "replace")
    fields = {}
    for part in (b"\r\n" + body).split(delimiter, _MOST_FIELDS + 1)[1:]:
        head, blank, content = part.partition(b"\r\n\r\n")
        if not blank or len(head) > _LONGEST_HEAD:
            continue  # what follows the last field, or nothing that a form has
        said = email.message_from_bytes(head.strip())
        name = said.get_param("name", header="content-disposition")
        if isinstance(name, str):
            fields[name] = (content, _file_name(said.get_filename()))
    return fields


def _file_name(given: str | None) -> str | None:
    """As clients say it, without the folders; it is only ever told, and names no file here."""
    name = (given or "").encode("utf-8", "replace").decode().replace("\\", "/").rpartition("/")[2]
    return name[:_LONGEST_NAME] or None


def _check_room(server: ServerState, tenant: Tenant, size: int) -> None:
    """Raises HttpError where a tenant would keep too much."""
    store, most = server.batches.store, server.settings.max_stored_bytes
    if store.counts[tenant.name] >= MOST_JOBS or store.stored[tenant.name] + size > most:
        raise HttpError(
            413,
            f"files and batches may have {most} bytes and there may be {MOST_JOBS} of them; delete some first",
            "storage_full",
        )


async def _kept(store: JobStore, job: Job) -> None:
    """Nobody is told of a job that is not on the disk. Raises JournalFull, and then it is forgotten."""
    try:
        await store.flushed()
    except JournalFull:
        store.forget(job.id)
        raise


async def list_files(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Your files."""
    found = ordered(request, jobs_of(server, tenant, "file"), "desc")
    if (purpose := request.query_params.get("purpose")) not in (None, "batch"):
        raise InvalidRequest(f"purpose is {str(purpose)[:60]!r}; files are for batches")
    jobs, more = page(request, found, lambda job: job.id, 10_000, 10_000)
    return json_response({"object": "list", **listing([_file(job.id, len(job.items[0]), job) for job in jobs], more)})


async def one_file(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """What is known of a file."""
    id = request.path_params["name"]
    job, content = _content(server, tenant, id)
    return json_response(_file(id, len(content), job))


async def file_content(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """The content of a file."""
    _, content = _content(server, tenant, request.path_params["name"])
    # Never shown by a browser as a page of this server: the content is whatever somebody uploaded.
    return Response(content, media_type="application/octet-stream", headers={"content-disposition": "attachment"})


async def delete_file(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Delete a file, or a batch by its output file."""
    id = request.path_params["name"]
    job, _ = _content(server, tenant, id)
    if job.how is None:
        raise InvalidRequest(f"{id!r} belongs to a batch that still runs; cancel it first")
    server.batches.store.remove(job.id)
    return json_response({"id": id, "object": "file", "deleted": True})


def _content(server: ServerState, tenant: Tenant, id: str) -> tuple[Job, bytes]:
    """A file by its id: an uploaded one, or the answers of a batch."""
    for ending, wanted in (("-output", True), ("-errors", False)):
        if id.startswith("file-batch_") and id.endswith(ending):
            job = job_of(server, tenant, id.removeprefix("file-").removesuffix(ending), "batch")
            lines = [answer for _, (ok, answer) in sorted(job.answers.items()) if ok is wanted]
            return job, b"".join(line + b"\n" for line in lines)
    job = job_of(server, tenant, id, "file")
    return job, job.items[0]


def _file(id: str, size: int, job: Job) -> dict[str, Any]:
    noted = about(job)
    return {
        "id": id,
        "object": "file",
        "bytes": size,
        "created_at": int(job.created),
        "filename": noted.get("filename", f"{id}.jsonl"),
        "purpose": noted.get("purpose", "batch_output"),
        "status": "processed",
    }


# -- batches --------------------------------------------------------------------------------------------------


async def create_batch(context: RequestContext, body: BatchRequest) -> Response:
    server = context.server
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint is {body.endpoint[:60]!r}; it may be {', '.join(ENDPOINTS)}")
    source = job_of(server, context.tenant, body.input_file_id, "file")
    items = await asyncio.to_thread(_items, source.items[0], body.endpoint)
    noted = {"kind": "batch", **msgspec.to_builtins(body)}
    return context.answer(_batch(await begin_batch(context, f"batch_{uuid.uuid4().hex}", items, noted)))


async def begin_batch(context: RequestContext, id: str, items: list[bytes], noted: dict[str, Any]) -> Job:
    """Have a batch worked on; `noted` has its kind and endpoint. Raises HttpError and JournalFull."""
    server = context.server
    _check_room(server, context.tenant, sum(map(len, items)))
    if context.record.trace is not None:
        noted = {**noted, "trace": context.record.trace.header}
    job = server.batches.store.create(id, items, msgspec.json.encode(noted), owner=context.tenant.name)
    await _kept(server.batches.store, job)
    if job.how is None:  # nobody was told of it, but it can be found, and cancelled
        server.batches.begin(job)
    return job


def _items(content: bytes, endpoint: str) -> list[bytes]:
    """The lines of an input file, checked. Raises HttpError that names the first wrong one."""
    lines = [line for line in content.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MOST_LINES:
        raise InvalidRequest(f"the file has {len(lines)} lines; there may be 1 to {MOST_LINES}")
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            asked = msgspec.json.decode(line)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"line {number} of the file is no JSON") from None
        if not isinstance(asked, dict) or not isinstance(asked.get("body"), dict):
            raise InvalidRequest(f"line {number} of the file needs custom_id, method, url and body")
        id = asked.get("custom_id")
        if not isinstance(id, str) or id in seen:
            raise InvalidRequest(f"line {number} of the file needs a custom_id of its own")
        seen.add(id)
        if asked.get("url", endpoint) != endpoint or asked["body"].get("stream"):
            raise InvalidRequest(f"line {number} of the file must ask {endpoint}, without stream")
    return lines


async def list_batches(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Your batches, the newest first."""
    jobs, more = page(request, jobs_of(server, tenant, "batch")[::-1], lambda job: job.id)
    return json_response({"object": "list", **listing([_batch(job) for job in jobs], more)})


async def one_batch(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """How far a batch has come."""
    return json_response(_batch(job_of(server, tenant, request.path_params["name"], "batch")))


async def cancel_batch(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """End a batch; the answers that it has are kept."""
    job = job_of(server, tenant, request.path_params["name"], "batch")
    await server.batches.cancel(job)
    return json_response(_batch(job))


def jobs_of(server: ServerState, tenant: Tenant, kind: str) -> list[Job]:
    """Oldest first."""
    jobs = [job for job in server.batches.store.jobs.values() if job.owner == tenant.name]
    return [job for job in jobs if about(job)["kind"] == kind]


def job_of(server: ServerState, tenant: Tenant, id: str, kind: str) -> Job:
    job = server.batches.store.jobs.get(id)
    if job is None or job.owner != tenant.name or about(job)["kind"] != kind:
        raise HttpError(404, f"there is no {kind} {id[:100]!r}", "not_found")
    return job


def _batch(job: Job) -> dict[str, Any]:
    noted = about(job)
    ended = None if job.ended is None else int(job.ended)
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": noted["endpoint"],
        "errors": None,
        "input_file_id": noted["input_file_id"],
        "completion_window": noted.get("completion_window") or "24h",
        "status": job.how or "in_progress",
        "output_file_id": f"file-{job.id}-output" if job.how and len(job.answers) > job.failed else None,
        "error_file_id": f"file-{job.id}-errors" if job.how and job.failed else None,
        "created_at": int(job.created),
        "in_progress_at": int(job.created),
        "completed_at": ended if job.how == "completed" else None,
        "cancelled_at": ended if job.how == "cancelled" else None,
        "request_counts": {
            "total": len(job.items),
            "completed": len(job.answers) - job.failed,
            "failed": job.failed,
        },
        "metadata": noted.get("metadata"),
    }
