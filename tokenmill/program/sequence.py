"""Sequence: a program's state on the engine's side. Its operations run one after the other, on the engine's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.model.chat_template import render_for
from tokenmill.model.detokenizer import IncrementalDetokenizer
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import CompletionOutput, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.processor import Message
from tokenmill.program.chat import turn_texts
from tokenmill.program.expressions import Gen, Select
from tokenmill.program.operations import Choose, Generate, OpenTurn, Operation, Usage, Variable

# Of calls that are made for the keys and values of their prompts: one token is sampled, and dropped.
_READ = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


class Held:
    """Keys and values that stay while somebody may continue from them."""

    def __init__(self, id: str, drop: Callable[[str], None]) -> None:
        self.id, self._drop, self._users = id, drop, 1

    def share(self) -> Held:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._drop(self.id)


@dataclass(eq=False)
class Call:
    """One request. `told` hears of every output; the last one is finished."""

    prompt: list[int]
    params: SamplingParams
    told: Callable[[RequestOutput], None]
    failed: Callable[[Exception], None]
    continues: str | None = None  # id of the request that it begins as; its own keys and values stay, too


@dataclass(frozen=True)
class Mark:
    """What a sequence holds at one moment."""

    tokens: list[int]
    unread: str
    text: str
    messages: list[Message]
    is_chat: bool
    turn: tuple[str, str, int] | None


class Backend(Protocol):
    """Whoever answers calls. All of it is called on the thread that answers, but for `changed`."""

    tokenizer: Tokenizer
    usage: Usage

    def submit(self, call: Call) -> None: ...

    def cancel(self, call: Call) -> None: ...

    def drop(self, held: str) -> None:
        """Nobody will continue this request."""
        ...

    def changed(self) -> None:
        """Wake those who wait for results."""
        ...


class TokenSequence:
    """Tokens that were read, text that was not yet, and what is still to be done."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.tokens: list[int] = []
        self.unread = ""  # text behind the tokens
        self.text = ""  # all of it
        self.error: Exception | None = None
        self.idle = True  # nothing is left to be done
        self.taken = 0  # times that something was asked for
        self._messages: list[Message] = []
        self._is_chat = False
        self._turn: tuple[str, str, int] | None = None  # role, text that closes it, where its content begins
        self._held: Held | None = None
        self._kept: dict[str, Held] = {}  # by calls that have ended; nobody continues from them yet
        self._operations: deque[Callable[[], None]] = deque()
        self._waiting = False  # for calls, or for the sequence that it was forked from
        self._calls: list[Call] = []
        self._children: list[TokenSequence] = []  # that will be forked from it
        self._closed = False

    # -- what can be asked for ------------------------------------------------------------------------------

    def await_parent(self) -> None:
        """It will be forked from another one. Before anything else."""
        self._waiting, self.idle = True, False

    def child(self) -> TokenSequence:
        made = TokenSequence(self.backend)
        made.await_parent()
        return made

    def settle(self) -> None:
        """What was appended is text already."""

    def append(self, operations: Sequence[Operation]) -> None:
        self._take()
        self._operations.extend(lambda one=one: self._do(one) for one in operations)  # type: ignore[misc]
        self.advance()

    def fork(self, children: list[TokenSequence]) -> None:
        """They begin as this sequence, once it has come so far."""
        self._take()
        if self.error is not None:
            for child in children:
                child.fail(self.error)
            self.idle = True
            return
        self._children += children
        self._operations.append(lambda: self._when_read(lambda: self._fork_to(children)))
        self.advance()

    def _take(self) -> None:
        """In this order: whoever waits for the end of all that was asked for looks at both, at any time."""
        self.idle = False
        self.taken += 1

    def advance(self) -> None:
        """Do what can be done now."""
        while self._operations and not self._waiting and self.error is None and not self._closed:
            operation = self._operations.popleft()
            try:
                operation()
            except Exception as error:
                self.fail(error)
        self.idle = not self._operations and not self._waiting
        self.backend.changed()

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self._end(error)

    def mark(self) -> Mark:
        """As it is now, where nothing is left to be done."""
        return Mark(self.tokens, self.unread, self.text, list(self._messages), self._is_chat, self._turn)

    def go_back(self, mark: Mark) -> None:
        """To where it was: what was asked since then was refused. Keys and values are computed again."""
        if self._closed:
            return
        self._end(TokenmillError("it went back"))
        self.error = None
        self.tokens, self.unread, self.text = mark.tokens, mark.unread, mark.text
        self._messages, self._is_chat, self._turn = list(mark.messages), mark.is_chat, mark.turn

    def close(self) -> None:
        """Give back everything; results stay."""
        self._closed = True
        self._end(TokenmillError("the program has ended"))

    def _end(self, why: Exception) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            self.backend.cancel(call)
        self._operations.clear()
        self._waiting, self.idle = False, True
        self._hold(None)
        for one in list(self._kept):
            self._kept.pop(one).release()
        children, self._children = self._children, []
        for child in children:
            child._waiting = False
            child.fail(why)
        self.backend.changed()

    # -- operations -----------------------------------------------------------------------------------------

    def _do(self, operation: Operation) -> None:
        if isinstance(operation, str):
            self._write(operation)
        elif isinstance(operation, Generate):
            self._generate(operation.part, operation.into)
        elif isinstance(operation, Choose):
            encode, part = self.backend.tokenizer.encode, operation.part
            texts = [encode(choice, add_special_tokens=False) for choice in part.choices]  # on the thread that asks
            self._when_read(lambda: self._select(part, texts, operation.into))
        elif isinstance(operation, OpenTurn):
            self._open_turn(operation.role)
        else:
            self._close_turn()

    def _write(self, text: str) -> None:
        self.unread += text
        self.text += text

    def _open_turn(self, role: str) -> None:
        if (self.tokens or self.unread) and not self._is_chat:
            raise InvalidRequest(f"a turn of role {role!r} follows text that is no turn; begin a chat with a turn")
        opening, closing = turn_texts(partial(render_for, self.backend.tokenizer), self._messages, role)
        self._is_chat = True
        self._write(opening)
        self._turn = role, closing, len(self.text)

    def _close_turn(self) -> None:
        assert self._turn is not None
        (role, closing, began), self._turn = self._turn, None
        self._messages.append({"role": role, "content": self.text[began:]})
        self._write(closing)

    def _generate(self, part: Gen, variable: Variable) -> None:
        def told(output: RequestOutput) -> None:
            completion = output.outputs[0]
            variable.text = completion.text
            if output.finished:
                self._take_in(output.prompt_token_ids, completion, part.params)
                self._done(variable, finish_reason=completion.finish_reason, output=output)
            self.backend.changed()

        self._call(self._all_tokens(), part.params, told)

    def _select(self, part: Select, texts: list[list[int]], variable: Variable) -> None:
        """Behind tokens that were read."""
        if not self.tokens:
            raise InvalidRequest(
                "select finds the likeliest text behind another one, and there is none; append it first"
            )
        params = replace(_READ, prompt_logprobs=0, prompt_logprobs_start=len(self.tokens))
        scores: dict[int, float] = {}
        held: dict[int, str] = {}

        def told(number: int, output: RequestOutput) -> None:
            if not output.finished:
                return
            assert output.prompt_logprobs is not None
            found = [next(iter(one.values())).logprob for one in output.prompt_logprobs[len(self.tokens) :] if one]
            scores[number] = sum(found) / (len(found) if part.normalized else 1)
            held[number] = output.request_id
            if len(scores) < len(texts):
                self._waiting = True
                return
            best = max(scores, key=lambda one: (scores[one], -one))
            for one, id in held.items():
                if one != best:
                    self._kept.pop(id).release()
            self._hold(held[best])
            self.tokens = [*self.tokens, *texts[best]]
            variable.text = part.choices[best]
            self.text += variable.text
            self._done(variable, scores=dict(zip(part.choices, (scores[one] for one in range(len(texts))))))

        for number, tokens in enumerate(texts):
            self._call([*self.tokens, *tokens], params, lambda output, n=number: told(n, output))  # type: ignore[misc]

    def _when_read(self, then: Callable[[], None]) -> None:
        """Once keys and values of all tokens are there, so that whoever continues computes none of them."""
        tokens = self._all_tokens()
        if tokens == self.tokens and (self._held is not None or not tokens):
            then()
            return

        def told(output: RequestOutput) -> None:
            if output.finished:
                self.tokens, self.unread = tokens, ""
                self._hold(output.request_id)
                then()

        self._call(tokens, _READ, told)

    def _fork_to(self, children: list[TokenSequence]) -> None:
        for child in children:
            self._children.remove(child)
            if child._closed or child.error is not None:
                continue
            child.tokens, child.unread, child.text = list(self.tokens), self.unread, self.text
            child._messages, child._is_chat, child._turn = list(self._messages), self._is_chat, self._turn
            child._held = None if self._held is None else self._held.share()
            child._waiting = False
            child.advance()

    # -- calls ----------------------------------------------------------------------------------------------

    def _all_tokens(self) -> list[int]:
        if not self.unread:
            return self.tokens
        first = not self.tokens and not self._is_chat  # a chat template writes the special tokens itself
        return [*self.tokens, *self.backend.tokenizer.encode(self.unread, add_special_tokens=first)]

    def _call(self, prompt: list[int], params: SamplingParams, told: Callable[[RequestOutput], None]) -> None:
        def hear(output: RequestOutput) -> None:
            if call not in self._calls:  # it was cancelled
                return
            if output.error is not None:
                self.fail(TokenmillError(output.error))
                return
            if output.finished:
                self._calls.remove(call)
                self._kept[output.request_id] = Held(output.request_id, self.backend.drop)
                self._waiting = bool(self._calls)
                self._count(output)
            try:
                told(output)
            except Exception as error:
                self.fail(error)
            if output.finished:
                self.advance()

        call = Call(prompt, params, hear, self.fail, None if self._held is None else self._held.id)
        self._calls.append(call)
        self._waiting = True
        self.backend.submit(call)

    def _count(self, output: RequestOutput) -> None:
        usage, cached = self.backend.usage, 0 if output.metrics is None else output.num_cached_tokens
        usage.calls += 1
        usage.prompt_tokens += len(output.prompt_token_ids)
        usage.computed_tokens += len(output.prompt_token_ids) - cached
        usage.output_tokens += len(output.outputs[0].token_ids)

    def _take_in(self, prompt: list[int], completion: CompletionOutput, params: SamplingParams) -> None:
        """The answer becomes part of the sequence: tokens as far as they are its text, without what ended it."""
        tokens, rest = completion.token_ids, ""
        tokenizer = self.backend.tokenizer
        if isinstance(completion.stop_reason, str) and completion.finish_reason == "stop":
            tokens, rest = _tokens_of(tokenizer, prompt, tokens, completion.text, params.skip_special_tokens)
        elif tokens and completion.finish_reason == "stop" and tokens[-1] in (*tokenizer.eos_ids, *params.stop_ids):
            tokens = tokens[:-1]
        self.tokens, self.unread = [*prompt, *tokens], rest
        self.text += completion.text

    def _hold(self, id: str | None) -> None:
        """Go on from a call that has ended, or from nothing."""
        before, self._held = self._held, None if id is None else self._kept.pop(id)
        if before is not None:
            before.release()

    def _done(self, variable: Variable, **meta: Any) -> None:
        if (output := meta.get("output")) is not None:
            self._hold(output.request_id)
        variable.meta, variable.done = meta, True
        self.backend.changed()


def _tokens_of(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], text: str, skip_special: bool
) -> tuple[list[int], str]:
    """The leading tokens that are the beginning of a text which a stop string cut, and the rest of the text."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special)
    said, kept, length = "", 0, 0
    for number, token in enumerate(tokens):
        piece = detokenizer.push([token])
        said += piece
        if not text.startswith(said):
            break
        if piece:  # a token that ends in the middle of a character belongs to the next one
            kept, length = number + 1, len(said)
    return tokens[:kept], text[length:]
