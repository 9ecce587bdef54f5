"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from array import array
from typing import Any

from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.serve.api.completions import prompts_of
from tokenmill.serve.api.schemas import EmbeddingRequest
from tokenmill.serve.http.request_context import RequestContext


async def embed(context: RequestContext, body: EmbeddingRequest) -> Response:
    format = body.encoding_format or "float"
    if format not in ("float", "base64"):
        raise InvalidRequest(f"encoding_format is {format[:60]!r}; it may be float or base64")
    streams = await context.embed(prompts_of(body.input, "input"), body.pooling or "mean", body)
    await context.all_outputs(streams)
    vectors = [stream.request_state.leader.pooled for stream in streams]
    if body.dimensions is not None:
        vectors = [_shortened(vector, body.dimensions) for vector in vectors]
    told: list[Any] = vectors
    if format == "base64":
        told = [base64.b64encode(array("f", vector).tobytes()).decode() for vector in vectors]
    data = [{"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(told)]
    used = {"prompt_tokens": context.prompt_tokens, "total_tokens": context.prompt_tokens}
    return context.answer({"object": "list", "data": data, "model": context.model, "usage": used})


def _shortened(vector: list[float], dimensions: int) -> list[float]:
    """The first numbers, again of unit length."""
    if not 1 <= dimensions <= len(vector):
        raise InvalidRequest(f"dimensions is {dimensions}; it must be from 1 to {len(vector)}")
    kept = vector[:dimensions]
    length = sum(value * value for value in kept) ** 0.5 or 1.0
    return [value / length for value in kept]
