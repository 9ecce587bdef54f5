"""/v1/files and /v1/batches: many requests in one file, answered in the background."""

from __future__ import annotations

import asyncio
import email
import email.policy
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.serve.batches import Ask, about
from tokenmill.serve.call import Call, json_response
from tokenmill.serve.errors import HttpError
from tokenmill.serve.jobs import Job
from tokenmill.serve.reading import read_body
from tokenmill.serve.schemas import BatchRequest
from tokenmill.serve.site import Site
from tokenmill.serve.tenants import Tenant

MOST_LINES = 50_000
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
Endpoint = Callable[[Request], Awaitable[Response]]


def asker(app: FastAPI, endpoints: dict[str, Endpoint]) -> Ask:
    """Lets batches ask the same handlers that clients ask."""

    async def ask(owner: str, path: str, body: bytes) -> tuple[int, float | None, bytes]:
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()  # a batch does not leave
            raise AssertionError

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "app": app}
        request = Request(scope | {"server": ("batch", 0), "tokenmill.owner": owner}, receive)
        response = await endpoints[path](request)
        wait = response.headers.get("retry-after")
        return response.status_code, None if wait is None else float(wait), bytes(response.body)

    return ask


# -- files ----------------------------------------------------------------------------------------------------


async def upload(site: Site, request: Request, tenant: Tenant) -> Response:
    """Upload a file of requests, one JSON object per line."""
    body = await read_body(request, site.settings)
    fields = await asyncio.to_thread(_form_fields, request.headers.get("content-type", ""), body)
    content, name = fields.get("file", (None, None))
    purpose = (fields.get("purpose", (b"", None))[0] or b"").decode("utf-8", "replace")
    if content is None or purpose != "batch":
        raise HttpError(
            400, "send multipart/form-data with a file and purpose=batch; no other purpose is known", "invalid_value"
        )
    noted = msgspec.json.encode({"kind": "file", "filename": name or "batch.jsonl", "purpose": purpose})
    store = site.batches.store
    job = store.create(f"file-{uuid.uuid4().hex}", [content], noted, tenant.name)
    store.end(job.id)
    return json_response(_file(job.id, len(content), job))


def _form_fields(content_type: str, body: bytes) -> dict[str, tuple[bytes, str | None]]:
    """The fields of a form: name -> (content, file name)."""
    if not content_type.lower().startswith("multipart/form-data"):
        return {}
    head = f"content-type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    fields = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        content = part.get_payload(decode=True)
        name = part.get_param("name", header="content-disposition")
        if isinstance(content, bytes) and isinstance(name, str):
            fields[name] = (content, part.get_filename())
    return fields


async def list_files(site: Site, request: Request, tenant: Tenant) -> Response:
    """Your files."""
    jobs = [job for job in _jobs(site, tenant) if about(job)["kind"] == "file"]
    return json_response({"object": "list", "data": [_file(j.id, len(j.items[0]), j) for j in jobs], "has_more": False})


async def one_file(site: Site, request: Request, tenant: Tenant) -> Response:
    """What is known of a file."""
    id = request.path_params["name"]
    job, content = _content(site, tenant, id)
    return json_response(_file(id, len(content), job))


async def file_content(site: Site, request: Request, tenant: Tenant) -> Response:
    """The content of a file."""
    _, content = _content(site, tenant, request.path_params["name"])
    return Response(content, media_type="application/octet-stream")


async def delete_file(site: Site, request: Request, tenant: Tenant) -> Response:
    """Delete a file, or a batch by its output file."""
    id = request.path_params["name"]
    job, _ = _content(site, tenant, id)
    if job.how is None:
        raise HttpError(400, f"{id!r} belongs to a batch that still runs; cancel it first", "invalid_value")
    site.batches.store.remove(job.id)
    return json_response({"id": id, "object": "file", "deleted": True})


def _content(site: Site, tenant: Tenant, id: str) -> tuple[Job, bytes]:
    """A file by its id: an uploaded one, or the answers of a batch."""
    for ending, wanted in (("-output", True), ("-errors", False)):
        if id.startswith("file-batch_") and id.endswith(ending):
            job = _job(site, tenant, id.removeprefix("file-").removesuffix(ending), "batch")
            lines = [answer for _, (ok, answer) in sorted(job.answers.items()) if ok is wanted]
            return job, b"".join(line + b"\n" for line in lines)
    job = _job(site, tenant, id, "file")
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


async def create_batch(call: Call, body: BatchRequest) -> Response:
    site = call.site
    if body.endpoint not in ENDPOINTS:
        raise HttpError(
            400, f"endpoint is {body.endpoint[:60]!r}; it may be {', '.join(ENDPOINTS)}", "invalid_value", "endpoint"
        )
    source = _job(site, call.tenant, body.input_file_id, "file")
    items = await asyncio.to_thread(_items, source.items[0], body.endpoint)
    noted = {"kind": "batch", **msgspec.to_builtins(body)}
    job = site.batches.store.create(
        f"batch_{uuid.uuid4().hex}", items, msgspec.json.encode(noted), owner=call.tenant.name
    )
    site.batches.begin(job)
    return call.answer(_batch(job))


def _items(content: bytes, endpoint: str) -> list[bytes]:
    """The lines of an input file, checked. Raises HttpError that names the first wrong one."""
    lines = [line for line in content.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MOST_LINES:
        raise HttpError(400, f"the file has {len(lines)} lines; there may be 1 to {MOST_LINES}", "invalid_value")
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            asked = msgspec.json.decode(line)
        except (ValueError, RecursionError):
            raise HttpError(400, f"line {number} of the file is no JSON", "invalid_value") from None
        if not isinstance(asked, dict) or not isinstance(asked.get("body"), dict):
            raise HttpError(400, f"line {number} of the file needs custom_id, method, url and body", "invalid_value")
        id = asked.get("custom_id")
        if not isinstance(id, str) or id in seen:
            raise HttpError(400, f"line {number} of the file needs a custom_id of its own", "invalid_value")
        seen.add(id)
        if asked.get("url", endpoint) != endpoint or asked["body"].get("stream"):
            raise HttpError(400, f"line {number} of the file must ask {endpoint}, without stream", "invalid_value")
    return lines


async def list_batches(site: Site, request: Request, tenant: Tenant) -> Response:
    """Your batches, the newest first."""
    jobs = [job for job in _jobs(site, tenant) if about(job)["kind"] == "batch"]
    return json_response({"object": "list", "data": [_batch(job) for job in reversed(jobs)], "has_more": False})


async def one_batch(site: Site, request: Request, tenant: Tenant) -> Response:
    """How far a batch has come."""
    return json_response(_batch(_job(site, tenant, request.path_params["name"], "batch")))


async def cancel_batch(site: Site, request: Request, tenant: Tenant) -> Response:
    """End a batch; the answers that it has are kept."""
    job = _job(site, tenant, request.path_params["name"], "batch")
    await site.batches.cancel(job)
    return json_response(_batch(job))


def _jobs(site: Site, tenant: Tenant) -> list[Job]:
    return [job for job in site.batches.store.jobs.values() if job.owner == tenant.name]


def _job(site: Site, tenant: Tenant, id: str, kind: str) -> Job:
    job = site.batches.store.jobs.get(id)
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
