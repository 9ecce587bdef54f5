"""SessionCall: the steps of one call on a state of a session, and what is told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, replace
from typing import Any, ParamSpec

from tokenmill.errors import InvalidRequest
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import CompletionOutput, LogprobTable
from tokenmill.program.operations import Choose, Generate, OpenTurn, Operation, Usage, Variable
from tokenmill.serve.api.output_format import finite
from tokenmill.serve.api.session_steps import Drop, Fork, Step
from tokenmill.serve.engine_client.sessions import MOST_STATES, Session, Sessions, State
from tokenmill.serve.errors import HttpError

P = ParamSpec("P")
Tell = Callable[[dict[str, Any]], None]


class SessionCall:
    """Checked when it is made: what is refused then has changed nothing. What other calls change meanwhile is looked at
    again as it comes to it; what was done before the step that is refused stays. Raises HttpError and InvalidRequest.
    """

    def __init__(self, sessions: Sessions, session: Session, state: State, steps: list[Step]) -> None:
        self._sessions, self._session, self._state = sessions, session, state
        self._steps = steps
        self.usage = Usage()  # of this call
        self._check_idle()
        if state.sequence.error is not None:
            why = str(state.sequence.error)
            raise HttpError(409, f"state {state.name!r} has ended: {why}; go on from another one", "state_ended")
        self._check_texts(state.backend.tokenizer)
        self._check_names()
        self._check_behind_text()
        state.backend.check_adapter()

    def _check_idle(self) -> None:
        if self._state.busy:
            name = self._state.name
            raise HttpError(409, f"state {name!r} is at work on another call; wait for it, or fork", "state_busy")

    def _check_open(self) -> None:
        if self._session.ended is not None:
            raise HttpError(410, f"the session has ended: {self._session.ended}; open another one", "session_ended")

    async def run(self, tell: Tell | None = None) -> dict[str, Any]:
        """Everything, and what is told at the end. `tell` hears of results as they come. Cancelling ends the state."""
        self._check_idle()  # again: another one may have begun meanwhile
        session, state = self._session, self._state
        await self._check_params()
        self._check_idle()
        self._check_open()
        if session.states.get(state.name) is not state:
            raise HttpError(404, f"state {state.name!r} was dropped meanwhile", "state_not_found", "state")
        sequence, before = state.sequence, replace(state.backend.usage)
        text, tokens = len(sequence.text), len(sequence.tokens)
        state.busy, state.backend.streaming = True, tell is not None
        session.running += 1
        try:
            told = [one for piece in _pieces(self._steps) for one in await self._do(piece, tell)]
        except asyncio.CancelledError:
            sequence.fail(HttpError(409, "the client left while a call was at work on it", "state_ended"))
            raise
        finally:
            state.busy = False
            session.running -= 1
            self._sessions.count(session, state)
            if session.ended is not None:  # what a thread handed on meanwhile
                sequence.close()
            else:
                self._sessions.renew(session)
            self.usage = Usage(
                **{name: value - getattr(before, name) for name, value in asdict(state.backend.usage).items()}
            )
        return {
            "id": session.id,
            "object": "session.call",
            "state": state.name,
            "results": told,
            "text": sequence.text[text:],
            "token_ids": sequence.tokens[tokens:],
            "usage": usage_of(self.usage),
        }

    def _check_texts(self, tokenizer: Tokenizer) -> None:
        """What is absurdly long is not made tokens at all."""
        most, bound = self._session.service.facts.max_len, tokenizer.bound
        for text in _texts(self._steps):
            if len(text) > most and bound is not None and not bound.may_fit(text, most):
                raise InvalidRequest(
                    f"do has a text of {len(text)} characters, but the model reads {most} tokens at most"
                )

    def _check_behind_text(self) -> None:
        """A model says nothing behind nothing."""
        sequence = self._state.sequence
        there = bool(sequence.tokens or sequence.unread)
        for step in self._steps:
            if isinstance(step, Generate | Choose) and not there:
                name = "gen" if isinstance(step, Generate) else "select"
                raise InvalidRequest(f"do has a {name} behind no text, and a model goes on from one; append it first")
            there |= isinstance(step, OpenTurn) or (isinstance(step, str) and step != "")

    async def _check_params(self) -> None:
        """Before anything is done, what would be refused of the last step only."""
        asked = [step.part.params for step in self._steps if isinstance(step, Generate)]
        if asked:
            await self._session.service.prompts.check_params(asked)

    def _check_names(self) -> None:
        known, size = set(self._session.states), len(self._state.sequence.tokens)
        more = sum(len(step) for step in self._steps if isinstance(step, str))
        for step in self._steps:
            if isinstance(step, Fork):
                _check_new(known, step)
                known |= set(step.names)
                more += len(step.names) * size
            elif isinstance(step, Drop):
                for name in step.names:
                    if name not in known or name == self._state.name:
                        raise InvalidRequest(f"drop names {name!r}, which is no other state of this session")
                    if (found := self._session.states.get(name)) is not None and found.busy:
                        raise HttpError(409, f"state {name!r} is at work on another call", "state_busy")
                known -= set(step.names)
        # One that asks for nothing, or makes room, is never refused for want of it.
        if self._steps and not any(isinstance(step, Drop) for step in self._steps):
            self._check_room(more)

    def _check_room(self, more: int) -> None:
        self._sessions.count(self._session, self._state)
        self._sessions.check_room(self._session, more)

    async def _do(self, piece: list[Step], tell: Tell | None) -> list[dict[str, Any]]:
        """Other calls have changed the session since this one was checked."""
        if isinstance(piece[0], Fork):
            await self._fork(piece[0])
        elif isinstance(piece[0], Drop):
            self._drop(piece[0])
        else:
            return await self._ask(piece, tell)
        return []

    async def _ask(self, piece: list[Step], tell: Tell | None) -> list[dict[str, Any]]:
        """What is refused after all leaves the state as it was before this piece."""
        sequence = self._state.sequence
        before = sequence.mark()
        try:
            return await self._ask_all(piece, tell)
        except (InvalidRequest, HttpError) as error:
            if sequence.error is error and (isinstance(error, InvalidRequest) or error.code == "model_not_found"):
                sequence.go_back(before)
            raise

    async def _ask_all(self, piece: list[Step], tell: Tell | None) -> list[dict[str, Any]]:
        sequence, last, said = self._state.sequence, piece[-1], 0
        operations: list[Operation] = [one for one in piece if not isinstance(one, Fork | Drop)]
        self._check_room(sum(len(one) for one in operations if isinstance(one, str)))
        await self._hand_on(sum(map(len, _texts(piece))) + len(sequence.unread), sequence.append, operations)
        if not isinstance(last, Generate | Choose):
            await self._wait(lambda: None)
            return []

        def hear() -> None:
            nonlocal said
            if tell is not None and (more := last.into.text[said:]):
                tell({"name": last.part.name, "delta": more})
                said += len(more)

        await self._wait(hear)
        found = _result(last.into, last)
        hear()
        if tell is not None:
            tell({"result": found})
        return [found]

    async def _hand_on(self, size: int, work: Callable[P, None], *args: P.args, **options: P.kwargs) -> None:
        """To where texts of this size are made tokens."""
        handed = asyncio.ensure_future(self._session.service.texts.run(size, work, *args, **options))
        try:
            await asyncio.shield(handed)
        except asyncio.CancelledError:
            await asyncio.wait([handed])  # what it hands on has to be cancelled, too
            raise

    async def _wait(self, hear: Callable[[], None]) -> None:
        """For all that was handed on. Raises what ended it."""
        moved, sequence = self._state.backend.moved, self._state.sequence
        while not self._over():
            hear()
            moved.clear()
            if not self._over():
                await moved.wait()
        self._check_open()
        if sequence.error is not None:
            raise sequence.error

    def _over(self) -> bool:
        sequence = self._state.sequence
        return sequence.idle or sequence.error is not None or self._session.ended is not None

    async def _fork(self, fork: Fork) -> None:
        """What is unread is read first: then it is known how much there is to hold, and nothing comes between."""
        session, sequence = self._session, self._state.sequence
        await self._hand_on(len(sequence.unread), sequence.fork, [])
        await self._wait(lambda: None)
        _check_new(session.states.keys(), fork)
        self._check_room(len(fork.names) * self._state.size)
        self._sessions.check_states(session.tenant, len(fork.names))
        children = [self._sessions.add(session, name) for name in fork.names]
        for child in children:
            child.sequence.await_parent()
        sequence.fork([child.sequence for child in children])
        for child in children:
            self._sessions.count(session, child)

    def _drop(self, drop: Drop) -> None:
        states = self._session.states
        for name in drop.names:
            if (found := states.get(name)) is None or found.busy:
                raise HttpError(409, f"state {name!r} is gone or at work on another call", "state_busy")
        for name in drop.names:
            self._sessions.drop(self._session, states[name])


def _check_new(known: Set[str], fork: Fork) -> None:
    if taken := known & set(fork.names):
        raise InvalidRequest(f"fork names {min(taken)!r}, and there is a state of this name; choose another")
    if len(known) + len(fork.names) > MOST_STATES:
        count = len(known) + len(fork.names)
        raise InvalidRequest(f"fork would make {count} states; a session has {MOST_STATES} at most")


def usage_of(usage: Usage) -> dict[str, int]:
    return asdict(usage) | {"saved_tokens": usage.saved_tokens}


def _pieces(steps: list[Step]) -> Iterator[list[Step]]:
    """Each ends with what there is to wait for; texts in between are handed on together with what follows."""
    piece: list[Step] = []
    for step in steps:
        if isinstance(step, Fork | Drop):
            if piece:
                yield piece
            yield [step]
            piece = []
            continue
        piece.append(step)
        if isinstance(step, Generate | Choose):
            yield piece
            piece = []
    if piece:
        yield piece


def _texts(steps: list[Step]) -> Iterator[str]:
    for step in steps:
        if isinstance(step, str):
            yield step
        elif isinstance(step, Choose):
            yield from step.part.choices
        elif isinstance(step, OpenTurn):
            yield step.role


def _result(variable: Variable, step: Generate | Choose) -> dict[str, Any]:
    told: dict[str, Any] = {"name": step.part.name, "text": variable.text}
    if isinstance(step, Choose):
        scores = variable.meta["scores"]
        return told | {"scores": {choice: finite(score) for choice, score in scores.items()}}
    completion: CompletionOutput = variable.meta["output"].outputs[0]
    return told | {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
        "logprobs": None if completion.logprobs is None else [_table(one) for one in completion.logprobs],
    }


def _table(table: LogprobTable) -> list[dict[str, Any]]:
    return [
        {"id": id, "logprob": finite(one.logprob), "rank": one.rank, "token": one.decoded_token}
        for id, one in table.items()
    ]
