"""What is new in an answer since the last look, and how usage and log-probabilities are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import CompletionOutput, LogprobTable, RequestOutput
from tokenmill.serve.stream import Stream

LEAST = -9999.0  # a log-probability of minus infinity, which JSON cannot say


@dataclass(slots=True)
class Delta:
    """What one sequence said since the last time."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobTable] | None
    finish: str | None
    stop: str | int | None


class Cutter:
    """Cuts cumulative outputs into deltas; with `tokens`, also where a token has no text yet."""

    def __init__(self, n: int, tokens: bool = False) -> None:
        self._by_token = tokens
        self._characters = [0] * n
        self._tokens = [0] * n
        self._ended = [False] * n

    def take(self, output: RequestOutput) -> list[Delta]:
        deltas = []
        for one in output.outputs:
            if not self._ended[one.index] and (delta := self._cut(one)) is not None:
                deltas.append(delta)
        return deltas

    def _cut(self, one: CompletionOutput) -> Delta | None:
        index, before = one.index, self._tokens[one.index]
        text = one.text[self._characters[index] :]
        news = len(one.token_ids) > before and (self._by_token or one.logprobs is not None)
        if not text and not news and one.finish_reason is None:
            return None  # a part of a character, or of what may become a stop string
        logprobs = None if one.logprobs is None else one.logprobs[before:]
        self._characters[index] = len(one.text)
        self._tokens[index] = len(one.token_ids)
        self._ended[index] = one.finish_reason is not None
        return Delta(index, text, one.token_ids[before:], logprobs, one.finish_reason, one.stop_reason)


async def merged(streams: list[Stream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several streams as they come, with the number of their stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waits = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                number, output = waits.pop(wait), wait.result()
                yield number, output
                if not output.finished:
                    waits[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for wait in waits:
            wait.cancel()


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage."""
    prompt = cached = said = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.num_cached_tokens
        said += sum(len(one.token_ids) for one in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def token_logprobs(
    tokens: list[int], tables: list[LogprobTable], top: int, tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """One entry per token, as the chat and responses APIs have them."""
    found = []
    for token, table in zip(tokens, tables):
        entry = _entry(token, table, tokenizer)
        entry["top_logprobs"] = [_entry(best, table, tokenizer) for best in best_of(table, top)]
        found.append(entry)
    return found


def best_of(table: LogprobTable, top: int) -> list[int]:
    """The `top` likeliest tokens of a position."""
    ranked = sorted((one.rank, token) for token, one in table.items() if one.rank is not None and one.rank <= top)
    return [token for _, token in ranked[:top]]


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _entry(token: int, table: LogprobTable, tokenizer: Tokenizer | None) -> dict[str, Any]:
    one = table[token]
    said = None if tokenizer is None else list(tokenizer.pieces.bytes_of(token))
    return {"token": one.decoded_token or "", "logprob": finite(one.logprob), "bytes": said}
