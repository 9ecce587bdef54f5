"""Resuming: a request that another server had begun goes on here, behind the tokens that were sent there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.engine.request import Finish
from tokenmill.engine.scheduler import Delta
from tokenmill.errors import InvalidRequest
from tokenmill.request_state import RequestState
from tokenmill.sampling.records import TokenLogprobs


class ResumedSequence(msgspec.Struct, array_like=True):
    """What one sequence has said, or what is new of it."""

    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish: str | None = None  # a Finish, of one that has ended

    def extend(self, more: ResumedSequence) -> None:
        self.tokens += more.tokens
        if more.logprobs:
            self.logprobs = [*(self.logprobs or []), *more.logprobs]
        self.finish = self.finish or more.finish


def resume(state: RequestState, said: Sequence[ResumedSequence | None], vocab_size: int) -> None:
    """Bring a prepared request to where it was: the noise of what follows is a function of seed and position alone."""
    for sequence, one in zip(state.sequences, said, strict=True):
        if one is None:
            continue
        request = sequence.request
        if len(one.tokens) > request.max_tokens or not all(0 <= token < vocab_size for token in one.tokens):
            raise InvalidRequest("a stream cannot be resumed: its tokens are not this model's, or too many")
        if one.finish is not None and one.finish not in set(Finish):
            raise InvalidRequest(f"a stream cannot be resumed: it ended with {one.finish[:60]!r}, which is unknown")
        request.tokens = [*request.tokens, *one.tokens]
        logprobs = one.logprobs or []
        request.logprobs += logprobs
        request.cumulative_logprob += sum(each.logprob for each in logprobs)
        request.finish = None if one.finish is None else Finish(one.finish)
        sequence.take_in(Delta(request, one.tokens, logprobs, one.finish is not None))
