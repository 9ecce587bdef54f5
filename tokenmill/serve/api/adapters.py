"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while the server runs."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import PlainTextResponse, Response

from tokenmill.model.adapters.files import CONFIG, WEIGHTS
from tokenmill.serve.api.schemas import LoadAdapterRequest, UnloadAdapterRequest
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.request_context import RequestContext


async def load(context: RequestContext, body: LoadAdapterRequest) -> Response:
    """From a folder below --lora-dir only."""
    server, name = context.server, body.lora_name
    root = _allowed(context)
    if not 0 < len(name) <= 200 or not name.isprintable() or name in server.names():
        raise HttpError(
            400, f"lora_name is {name!r:.100}; it must be a name that no model has", "invalid_value", "lora_name"
        )
    folder = _inside(root, body.lora_path)
    known = server.service.adapters.known.get(name)
    if known is not None and not body.load_inplace:
        raise HttpError(
            400,
            f"the adapter {name!r} has already been loaded; unload it first, or set load_inplace",
            "invalid_value",
            "lora_name",
        )
    await server.service.adapters.load(name, folder)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.", headers=context.headers())


async def unload(context: RequestContext, body: UnloadAdapterRequest) -> Response:
    """Requests that run with it go on."""
    _allowed(context)
    adapters, name = context.server.service.adapters, body.lora_name
    if name not in adapters.known:
        raise HttpError(404, f"there is no adapter {name!r:.100}", "model_not_found", "lora_name")
    adapters.unload(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=context.headers())


def _allowed(context: RequestContext) -> Path:
    """The folder that adapters may be in. Raises HttpError 403."""
    settings = context.server.settings
    if settings.lora_dir is None:
        raise HttpError(
            403, "adapters are not loaded by requests here; start the server with --lora-dir FOLDER", "not_allowed"
        )
    if settings.keys is not None and not context.tenant.limits.operator:
        raise HttpError(403, "your key may not load or unload adapters; an operator's may", "not_allowed")
    return settings.lora_dir.resolve()


def _inside(root: Path, asked: str) -> Path:
    """The folder, if it and its files are below the one that is allowed, whatever links there are."""
    try:
        folder = (root / asked).resolve()
        inside = all(one.resolve().is_relative_to(root) for one in (folder, folder / CONFIG, folder / WEIGHTS))
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside or folder == root:
        raise HttpError(
            403,
            f"lora_path is {asked!r:.100}; it must be a folder below the server's --lora-dir",
            "not_allowed",
            "lora_path",
        )
    return folder
