"""Continued: a request whose client has the beginning of its stream already, by the id of the last event that it got.

What the stream had said is known from its router, from a stream that runs here without one, or from the client; else it
is computed anew, which gives the same tokens, and nobody is told of them. A checksum in the id shows that they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tokenmill.engine.request import Finish
from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.processor import Prompt
from tokenmill.request_state import RequestState
from tokenmill.serve.engine_client.resume import ResumedSequence
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.event_ids import Mark, Position, digest_of, position_of
from tokenmill.serve.http.routed import Progress
from tokenmill.serve.http.routed_streams import RoutedStream

if TYPE_CHECKING:
    from tokenmill.serve.http.request_context import RequestContext

Said = list[ResumedSequence]


class Continued:
    """`replays` are, per prompt, the request as the client saw it before and after the step of its last event."""

    def __init__(self, progress: Progress, running: RoutedStream | None) -> None:
        """Raises InvalidRequest where the id of the last event is none."""
        self.position: Position = position_of(progress.sent)
        self.replays: list[tuple[RequestState, RequestState]] = []
        self._progress = progress
        self._running = running
        self._said: list[list[int]] = []

    async def go_on(
        self, context: RequestContext, prompt: Prompt, params: SamplingParams, options: Any, scheduling: dict[str, Any]
    ) -> Said:
        """All that is known of the next prompt's sequences: at least as much as the client has. Raises HttpError."""
        first, count = len(self._said), params.num_sequences
        after = self.position.after[first : first + count]
        if len(after) < count:
            raise _other()
        fresh = await context.service.prompts.prepare(prompt, params, **scheduling)
        ids, number = fresh.prompt_ids, len(self.replays)
        claimed = getattr(options, "resume_token_ids", None)
        said = self._of_router(first, count)
        if said is None and self._running is not None:
            said = self._running.said(number, ids)
        if said is None and claimed is not None:
            said = _claimed(claimed[first : first + count], after, fresh, params)
        if said is None or not all(map(_reaches, said, after)):
            said = await self._anew(context, prompt, params, after, fresh, scheduling)
        self._said += [one.tokens[: mark.tokens] for one, mark in zip(said, after)]
        if not all(map(_reaches, said, after)) or (
            len(self._said) == len(self.position.after) and digest_of(self._said) != self.position.digest
        ):
            raise _different()
        states = []
        for marks in (self.position.before[first : first + count], after):
            cut = [_cut(one, mark) for one, mark in zip(said, marks)]
            states.append(await context.service.prompts.prepare(prompt, params, cut, **scheduling))
        self.replays.append((states[0], states[1]))
        return said

    def check_complete(self) -> None:
        """All prompts are there. Raises HttpError."""
        if len(self._said) != len(self.position.after):
            raise _other()

    def _of_router(self, first: int, count: int) -> Said | None:
        known = self._progress.sequences
        if not known:
            return None
        return [known.get(index, ResumedSequence()) for index in range(first, first + count)]

    async def _anew(
        self,
        context: RequestContext,
        prompt: Prompt,
        params: SamplingParams,
        after: Sequence[Mark],
        fresh: RequestState,
        scheduling: dict[str, Any],
    ) -> Said:
        most = max(mark.tokens for mark in after)
        if not most:
            return [ResumedSequence(finish=str(Finish.STOP) if mark.ended else None) for mark in after]
        short = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        state, output = await context.complete(prompt, short, "anew", scheduling, counts=True)
        if output.error is not None or any(one.finish not in (Finish.STOP, Finish.LENGTH) for one in state.sequences):
            context.finish = next((str(one.finish) for one in state.sequences), None)
            raise context.failure(output)
        said = []
        for one, whole in zip(state.sequences, fresh.sequences):
            tokens, finish = one.tokens_from(0), one.finish
            if finish is Finish.LENGTH and len(tokens) < whole.request.max_tokens:
                finish = None  # only here
            logprobs = one.request.logprobs[: len(tokens)] if params.logprobs is not None else None
            said.append(ResumedSequence(tokens, logprobs, finish and str(finish)))
        return said


def _claimed(
    claimed: Sequence[list[int]], after: Sequence[Mark], fresh: RequestState, params: SamplingParams
) -> Said | None:
    """What the client says that it has; of one that has ended it cannot say why, and log-probabilities it has not."""
    if params.logprobs is not None or any(mark.ended for mark in after) or len(claimed) < len(after):
        return None
    for one in claimed:
        if not all(type(token) is int and 0 <= token < 2**31 for token in one):
            raise InvalidRequest("resume_token_ids must be a list of token ids per choice")
    said = [ResumedSequence(list(tokens[: mark.tokens])) for tokens, mark in zip(claimed, after)]
    for known, whole in zip(said, fresh.sequences):
        if len(known.tokens) >= whole.request.max_tokens or not whole.request.stop_ids.isdisjoint(known.tokens):
            return None  # it has ended with them, so there is nothing to go on with
    return said


def _reaches(said: ResumedSequence, mark: Mark) -> bool:
    return len(said.tokens) >= mark.tokens and (said.finish is not None or not mark.ended)


def _cut(said: ResumedSequence, mark: Mark) -> ResumedSequence | None:
    if not mark.tokens and not mark.ended:
        return None
    logprobs = None if said.logprobs is None else said.logprobs[: mark.tokens]
    return ResumedSequence(said.tokens[: mark.tokens], logprobs, said.finish if mark.ended else None)


def _other() -> InvalidRequest:
    return InvalidRequest(
        "the stream of this Last-Event-ID had another number of answers than this request asks for; send the request "
        "as it was"
    )


def _different() -> HttpError:
    return HttpError(
        409,
        "the answer cannot go on behind this Last-Event-ID: what was sent is not there any more, and computed anew it "
        "came out otherwise, because the request is another one or its numbers were rounded in another way; ask again "
        "without Last-Event-ID",
        "cannot_continue",
    )
