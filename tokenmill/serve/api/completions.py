"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import CompletionOutput, LogprobTable, RequestOutput
from tokenmill.processor import Prompt
from tokenmill.serve.api.output_format import ChoicesEncoder, OutputDelta, best_of, encoded, finite, usage_of
from tokenmill.serve.api.sampling_params import check_logprobs, sampling_params
from tokenmill.serve.api.schemas import CompletionRequest
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.errors import HttpError, unsupported
from tokenmill.serve.http.request_context import RequestContext
from tokenmill.serve.http.sse import SSEResponse

MOST_PROMPTS = 256


async def complete(context: RequestContext, body: CompletionRequest) -> Response:
    prompts = prompts_of(body.prompt, "prompt")
    nothing = body.max_tokens == 0  # only the prompt's own log-probabilities are wanted
    if nothing and not body.echo:
        raise InvalidRequest("max_tokens is 0; without echo there would be no answer")
    check_logprobs("logprobs", body.logprobs)
    if body.suffix and body.echo:
        raise unsupported("echo would repeat the prompt as it is around a suffix, marks and all; leave one of them out")
    if body.stream and (body.echo or body.best_of not in (None, body.n or 1)):
        raise HttpError(400, "echo and best_of cannot be streamed; leave stream out", "invalid_value", "stream")
    params = sampling_params(
        body,
        1 if nothing else body.max_tokens,
        logprobs=body.logprobs,
        best_of=body.best_of,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    asked: Sequence[Prompt] = prompts
    if body.suffix:
        asked = [{"prompt": prompt, "suffix": body.suffix} for prompt in prompts]
    streams = [await context.submit(prompt, params, body) for prompt in asked]
    if body.stream:
        return SSEResponse(context, _CompletionEncoder(context, body, streams, params.n))
    outputs = await context.all_outputs(streams)
    if nothing:
        for output in outputs:
            output.outputs = [
                CompletionOutput(one.index, "", [], None, None if one.logprobs is None else [], "length")
                for one in output.outputs
            ]

    def choices() -> list[msgspec.Raw]:
        return [
            encoded(_choice(context, body, output, one, number * params.n + one.index))
            for number, output in enumerate(outputs)
            for one in output.outputs
        ]

    # With log-probabilities these can be hundreds of thousands of entries, for which others should not wait.
    told = choices() if params.logprobs is None else await asyncio.to_thread(choices)
    return context.answer(_head(context) | {"choices": told, "usage": usage_of(outputs)})


def prompts_of(prompt: Any, name: str) -> list[str | list[int]]:
    """One prompt or several, of text or of token ids. Raises HttpError; ids are checked by the engine's front."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"{name} must be text, token ids, or a list of these")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MOST_PROMPTS:
        raise InvalidRequest(f"{name} has {len(prompt)} entries; at most {MOST_PROMPTS} are allowed")
    if not all(isinstance(one, str | list) for one in prompt):
        raise InvalidRequest(f"{name} must be text, token ids, or a list of these")
    return prompt


def _head(context: RequestContext) -> dict[str, Any]:
    return {
        "id": f"cmpl-{context.id}",
        "object": "text_completion",
        "created": context.created,
        "model": context.model,
        "system_fingerprint": None,
    }


def _choice(
    context: RequestContext, body: CompletionRequest, output: RequestOutput, one: CompletionOutput, index: int
) -> dict[str, Any]:
    tokenizer = context.service.tokenizer
    tokens, text = one.token_ids, one.text
    tables: Sequence[LogprobTable | None] | None = one.logprobs
    if body.echo:
        before = output.prompt_token_ids
        told = output.prompt if output.prompt is not None or tokenizer is None else tokenizer.decode(before, False)
        text = (told or "") + text
        tokens = [*before, *tokens]
        tables = None if tables is None else [*(output.prompt_logprobs or []), *tables]
    ids = {"token_ids": one.token_ids, "prompt_token_ids": output.prompt_token_ids} if body.return_token_ids else {}
    return ids | {
        "index": index,
        "text": text,
        "logprobs": None if tables is None else _Offsets(tokenizer).tell(tokens, tables, body.logprobs or 0),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }


class _Offsets:
    """The legacy form of log-probabilities, which wants to know where in the text each token begins."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._at = 0

    def tell(self, tokens: list[int], tables: Sequence[LogprobTable | None], top: int) -> dict[str, Any]:
        texts, offsets = [], []
        for token in tokens:
            text = self._tokenizer.decode([token], False) if self._tokenizer is not None else str(token)
            offsets.append(self._at)
            texts.append(text)
            self._at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [
                None if table is None else finite(table[token].logprob) for token, table in zip(tokens, tables)
            ],
            "top_logprobs": [None if table is None else _best(table, top) for table in tables] if top else None,
            "text_offset": offsets,
        }


def _best(table: LogprobTable, top: int) -> dict[str, float]:
    return {table[token].decoded_token or str(token): finite(table[token].logprob) for token in best_of(table, top)}


class _CompletionEncoder(ChoicesEncoder):
    def __init__(self, context: RequestContext, body: CompletionRequest, streams: list[Stream], n: int) -> None:
        super().__init__(context, body, streams, n, _head(context))
        self._n = n
        self._top = body.logprobs or 0
        self._with_ids = bool(body.return_token_ids)
        self._offsets = [_Offsets(context.service.tokenizer) for _ in range(n * len(streams))]

    def choices(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        index, logprobs = number * self._n + delta.index, None
        if delta.logprobs is not None:
            logprobs = self._offsets[index].tell(delta.token_ids, delta.logprobs, self._top)
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        if self._with_ids:
            choice["token_ids"] = delta.token_ids
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop
        return [choice]
