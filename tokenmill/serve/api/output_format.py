"""What is new in an answer since the last look, and how usage and log-probabilities are told."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import LogprobTable, RequestOutput
from tokenmill.request_state import RequestState
from tokenmill.serve.api.schemas import Sampling
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.http.request_context import RequestContext
from tokenmill.serve.http.sse import DONE, SSEEncoder, event

_encode = msgspec.json.Encoder().encode
LEAST = -9999.0  # a log-probability of minus infinity, which JSON cannot say


@dataclass(slots=True)
class OutputDelta:
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobTable] | None
    finish: str | None
    stop: str | int | None


class DeltaTracker:
    """Cuts what came of an answer into deltas; with `tokens`, also where a token has no text yet."""

    def __init__(self, n: int, tokens: bool = False) -> None:
        self._by_token = tokens
        self._characters = [0] * n
        self._tokens = [0] * n
        self._ended = [False] * n

    def take(self, state: RequestState) -> list[OutputDelta]:
        """What is new in every sequence since the last time."""
        deltas = []
        for index, one in enumerate(state.sequences):
            if self._ended[index]:
                continue
            before, characters, tables = self._tokens[index], self._characters[index], one.logprobs
            news = one.num_tokens > before and (self._by_token or tables is not None)
            if len(one.text) == characters and not news and one.finish is None:
                continue  # a part of a character, or of what may become a stop string
            self._characters[index] = len(one.text)
            self._tokens[index] = one.num_tokens
            logprobs = None if tables is None else tables[before:]
            finish = stop = None
            if one.finish is not None:
                self._ended[index], finish, stop = True, str(one.finish), one.stop_reason
            deltas.append(OutputDelta(index, one.text[characters:], one.tokens_from(before), logprobs, finish, stop))
        return deltas


class ChoicesEncoder(SSEEncoder):
    """The events of OpenAI's chats and completions: chunks that each tell of one choice, and at the end the usage."""

    def __init__(
        self, context: RequestContext, body: Sampling, streams: list[Stream], n: int, head: dict[str, Any]
    ) -> None:
        self.streams = streams
        self._context = context
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._head = head
        # Chunks differ in nothing but their one choice: the rest is encoded once.
        self._before = b'data: %b,"choices":[' % _encode(head | ({"usage": None} if self._with_usage else {}))[:-1]
        self._trackers = [DeltaTracker(n, bool(body.return_token_ids)) for _ in streams]
        self._last: dict[int, RequestOutput] = {}

    @abstractmethod
    def choices(self, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """What there is to tell of a delta of this stream, a chunk each."""

    def update(self, number: int, state: RequestState) -> bytes:
        if self.ends(number, state):
            self._last[number] = self._context.record_output(state.output())
        told = [one for delta in self._trackers[number].take(state) for one in self.choices(number, delta)]
        return b"".join([b"%b%b]}\n\n" % (self._before, _encode(choice)) for choice in told])

    def finish(self) -> bytes:
        if not self._with_usage:
            return DONE
        return event(self._head | {"choices": [], "usage": usage_of(self._last.values())}) + DONE


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage."""
    prompt = cached = placed = said = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.num_cached_tokens
        placed += output.num_module_tokens
        said += sum(len(one.token_ids) for one in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": cached} | ({"module_tokens": placed} if placed else {}),
    }


def token_logprobs(
    tokens: list[int], tables: list[LogprobTable], top: int, tokenizer: Tokenizer | None
) -> list[msgspec.Raw]:
    """One entry per token, as the chat and responses APIs have them. Written at once: of what is kept as objects there
    can be millions, and the garbage collector stops everybody to go through them."""
    found = []
    for token, table in zip(tokens, tables):
        entry = _entry(token, table, tokenizer)
        entry["top_logprobs"] = [_entry(best, table, tokenizer) for best in best_of(table, top)]
        found.append(encoded(entry))
    return found


def encoded(content: Any) -> msgspec.Raw:
    """A part of an answer as JSON: where the whole is large, its parts hold others up one by one, and not at once."""
    return msgspec.Raw(_encode(content))


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
