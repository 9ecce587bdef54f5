"""Front: turns prompts into requests, and what the engine commits into text. Shared by every way of using an engine."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import countOf
from typing import Any, Protocol, cast

import numpy as np

from tokenmill.engine.beams import Beams
from tokenmill.engine.request import API, BATCH, REALTIME, Finish, Request
from tokenmill.engine.scheduler import Delta
from tokenmill.errors import InvalidRequest
from tokenmill.model.chat_template import render
from tokenmill.model.detokenizer import IncrementalDetokenizer, StopStrings
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import CompletionOutput, Logprob, LogprobTable, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.sampling.grammar import check_grammar
from tokenmill.sampling.records import TokenLogprobs

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}
Message = Mapping[str, Any]

PRIORITIES = {"realtime": REALTIME, "api": API, "batch": BATCH}
FEW = 2048  # tokens


class EngineVerbs(Protocol):
    """What a front does with an engine, be it in this process or in another."""

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, id: str, why: Finish = Finish.CANCELLED) -> None: ...

    def step(self) -> list[Delta]: ...

    def reset_prefix_cache(self) -> None: ...


class Vocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...


class Lengths(Protocol):
    @property
    def max_len(self) -> int: ...


class Served(Protocol):
    """A ready engine and what its front needs to know of it."""

    @property
    def engine(self) -> EngineVerbs: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def spec(self) -> Vocabulary: ...

    @property
    def settings(self) -> Lengths: ...


class Front:
    """Checks what users ask for, follows their requests, and decodes text. Owned by the thread that owns the engine."""

    def __init__(self, built: Served, seed: int) -> None:
        self.engine = built.engine
        self.tokenizer = built.tokenizer
        self.vocab_size = built.spec.vocab_size
        self.max_len = built.settings.max_len
        self._eos_ids = tuple(self.tokenizer.eos_ids if self.tokenizer else ()) or built.spec.eos_ids
        self._seeds = random.Random(seed)
        self._following: dict[str, _Sequence] = {}  # by request id; siblings stay until all have ended
        self._count = 0

    # -- in -------------------------------------------------------------------------------------------------

    def submit(self, follow: Follow) -> None:
        """Hand a prepared request to the engine. Raises QueueFull, and then nothing has happened."""
        if follow.id in self._following:
            raise InvalidRequest(f"request id {follow.id!r} is already running; choose another")
        now = self.engine.clock()
        for sequence in follow.sequences:
            sequence.request.arrival = sequence.request.metrics.arrival = now
            if follow.timeout is not None:
                sequence.request.deadline = now + follow.timeout
        self.engine.add(follow.leader)
        for sequence in follow.sequences:
            self._following[sequence.request.id] = sequence

    def cancel(self, follow: Follow) -> None:
        """End a request now; if it was running it is finished on return, and no later step mentions it."""
        for sequence in follow.sequences:
            if self._following.get(sequence.request.id) is sequence:
                del self._following[sequence.request.id]
                self.engine.cancel(sequence.request.id)
                sequence.finish = sequence.finish or Finish.CANCELLED

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: str | int = "api",
        timeout: float | None = None,
        cache_salt: str = "",
    ) -> Follow:
        """Check a prompt and its parameters and make requests of them. Raises InvalidRequest."""
        text, ids = self._prompt_ids(prompt)
        params = self._checked_params(params, len(ids))
        _check_timeout(timeout)
        _check_salt(cache_salt)
        request_id = self._new_id() if request_id is None else _checked_id(request_id)
        room = self.max_len - len(ids)
        stop_ids = frozenset([*params.stop_ids, *(() if params.ignore_eos else self._eos_ids)])
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        requests = [
            Request(
                request_id if index == 0 else f"{request_id}/{index}",
                ids,
                params,
                max_tokens=min(params.max_tokens or room, room),
                seed=(seed + index * 0x9E3779B97F4A7C15) & (2**63 - 1),
                stop_ids=stop_ids,
                priority=_priority(priority),
                salt=cache_salt,
            )
            for index in range(1 if params.beam_width else params.num_sequences)
        ]
        requests[0].followers = requests[1:]
        if params.beam_width:
            requests[0].beams = Beams(requests[0])
        end_ids = () if params.ignore_eos else self._eos_ids
        return Follow(text, ids, params, requests, self.tokenizer, end_ids, timeout)

    def encode(self, prompt: Prompt) -> Prompt:
        """The same prompt with its token ids. Touches no state, so any thread may call it."""
        text, ids = self._prompt_ids(prompt)
        return {"prompt": text, "prompt_token_ids": ids}

    def chat_ids(
        self,
        messages: Sequence[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> list[int]:
        """The token ids of a conversation in the model's chat format."""
        tokenizer = self._need_tokenizer("a chat")
        text = render(
            chat_template or tokenizer.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **more,
        )
        # The template writes special tokens itself; a bounded encode is enough to see that a text is too long.
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=self.max_len)

    def _new_id(self) -> str:
        while True:
            self._count += 1
            if (name := f"r{self._count}") not in self._following:
                return name

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                given = prompt.get("prompt")
                return (given if isinstance(given, str) else None), self._prompt_ids(prompt["prompt_token_ids"])[1]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise InvalidRequest(
                    f"a prompt mapping needs 'prompt' or 'prompt_token_ids'; this one has {sorted(map(str, prompt))}"
                )
        text: str | None = None
        if isinstance(prompt, str):
            text = prompt
            ids = self._need_tokenizer("a text prompt").encode(prompt, max_tokens=self.max_len)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) and _all_whole(prompt):
            ids = list(cast(Sequence[int], prompt))
        else:
            raise InvalidRequest(f"a prompt must be text or a list of token ids, not {_shown(prompt)}")
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if len(ids) >= self.max_len:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens or more, but prompt and answer together may have {self.max_len}; "
                "shorten it, or raise max_model_len"
            )
        if not _all_below(ids, self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        return text, ids

    def _checked_params(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """A copy of the parameters, so that what the user does with theirs later does not reach a running request."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {_shown(params)}")
        params = copy.copy(params)
        params.check()  # a field may have been set since it was made
        for name, tokens in (("stop_token_ids", params.stop_ids), ("logit_bias", list(params.logit_bias or {}))):
            for token in tokens:
                if token >= self.vocab_size:
                    raise InvalidRequest(f"{name} names token {token}, outside the vocabulary of {self.vocab_size}")
        if params.min_tokens > self.max_len - prompt_len:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens} but after the prompt there is room for {self.max_len - prompt_len}"
            )
        width = 2 * (params.beam_width or 0) + len(params.stop_ids) + len(self._eos_ids)
        if params.beam_width and width > self.vocab_size:
            raise InvalidRequest(f"beam_width {params.beam_width} is too wide for a vocabulary of {self.vocab_size}")
        if params.beam_width and (params.stop_strings or params.logprobs is not None):
            raise InvalidRequest(
                "beam search stops on token ids only and returns no logprobs; leave stop and logprobs unset"
            )
        if params.structured is not None:
            check_grammar(params.structured)
        if params.stop_strings:
            self._need_tokenizer("a stop string")
        if params.bad_words:
            tokenizer = self._need_tokenizer("bad_words")
            spelled = [form for word in params.bad_words for form in (word.lstrip(), " " + word.lstrip())]
            encoded = [tokenizer.encode(form, add_special_tokens=False) for form in dict.fromkeys(spelled)]
            params.bad_words_ids = [word for word in encoded if word]
        return params

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer, but skip_tokenizer_init is set; give prompt_token_ids")
        return self.tokenizer

    # -- out ------------------------------------------------------------------------------------------------

    def step(self) -> list[Follow]:
        """Run the engine's next step; returns the requests that moved."""
        return self.take_in(self.engine.step())

    def take_in(self, deltas: list[Delta]) -> list[Follow]:
        moved: dict[Follow, None] = {}  # a set that keeps the order
        for delta in deltas:
            sequence = self._following.get(delta.request.id)
            if sequence is None or sequence.finish is not None:
                continue  # ended earlier, by a stop string
            stopped = sequence.take_in(delta)
            if stopped:
                self.engine.cancel(delta.request.id, Finish.STOP)
            follow = sequence.follow
            moved[follow] = None
            if (stopped or delta.finished) and follow.finished:
                for sibling in follow.sequences:  # only now are its ids free: siblings of an ended one may still run
                    del self._following[sibling.request.id]
        return list(moved)


class Follow:
    """One user request on its way: its sequences, and their text so far."""

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        requests: list[Request],
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        timeout: float | None,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.timeout = timeout
        self.leader = requests[0]
        self.tokenizer = tokenizer if params.detokenize else None
        self.eos_ids = eos_ids
        self.sequences = [_Sequence(self, request, params) for request in requests]
        self._prompt_tables: list[LogprobTable] = []

    @property
    def id(self) -> str:
        return self.leader.id

    @property
    def finished(self) -> bool:
        if len(self.sequences) == 1:  # asked several times per token: a generator would show
            return self.sequences[0].finish is not None
        return all(sequence.finish is not None for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The request as far as it has come."""
        error = next((s.request.error for s in self.sequences if s.request.error), None)
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=self._beam_outputs() if self.leader.beams is not None else self._outputs(),
            finished=self.finished,
            metrics=self.leader.metrics,
            prompt_logprobs=self._prompt_logprobs(),
            error=error,
        )

    def _outputs(self) -> list[CompletionOutput]:
        outputs = [sequence.output(index) for index, sequence in enumerate(self.sequences)]
        if self.params.best_of is None or self.params.best_of == self.params.n:
            return outputs
        if not self.finished:
            return outputs[: self.params.n]
        best = sorted(outputs, key=_badness)[: self.params.n]
        for index, output in enumerate(best):
            output.index = index
            output.logprobs = output.logprobs if self.params.logprobs is not None else None
        return best

    def _beam_outputs(self) -> list[CompletionOutput]:
        assert self.leader.beams is not None
        finish = self.sequences[0].finish
        if finish is None or finish in (Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR):
            return [CompletionOutput(0, "", [], finish_reason=finish and str(finish))]
        return [
            CompletionOutput(
                index=index,
                text=self.tokenizer.decode(beam.tokens, self.params.skip_special_tokens) if self.tokenizer else "",
                token_ids=beam.tokens,
                cumulative_logprob=beam.cumulative_logprob,
                finish_reason=str(Finish.STOP if beam.finished_by_stop else Finish.LENGTH),
            )
            for index, beam in enumerate(self.leader.beams.group.results()[: self.params.n])
        ]

    def _prompt_logprobs(self) -> list[LogprobTable | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        known = self.leader.prompt_logprobs
        if len(self._prompt_tables) != len(known):  # built once: a stream of outputs would pay for it each time
            self._prompt_tables = [_table(one, self.tokenizer) for one in known]
        return [None, *self._prompt_tables]


class _Sequence:
    """One sequence's tokens and text so far."""

    def __init__(self, follow: Follow, request: Request, params: SamplingParams) -> None:
        self.follow = follow
        self.request = request
        self.finish: Finish | None = None
        self.text = ""
        self.num_tokens = 0  # taken in; a stop string may end the sequence before the engine does
        self._tokenizer = follow.tokenizer
        self.logprobs: list[LogprobTable] | None = None if params.logprobs is None else []  # as many as tokens taken in
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)

    def take_in(self, delta: Delta) -> bool:
        """Returns whether a stop string ended the sequence."""
        if self._tokenizer is None or self.request.beams is not None:
            self.num_tokens += len(delta.tokens)
        else:
            self._decode(delta.tokens)
        if self.logprobs is not None:
            taken = self.num_tokens - len(self.logprobs)
            self.logprobs += [_table(one, self._tokenizer) for one in delta.logprobs[:taken]]
        if self._stops.match is not None:
            self.finish = Finish.STOP
            return not delta.finished
        if delta.finished:
            self.finish = self.request.finish
            if self._detokenizer is not None:
                self.text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return False

    def output(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.tokens_from(0),
            cumulative_logprob=self.request.cumulative_logprob if self.request.logprobs else None,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=None if self.finish is None else str(self.finish),
            stop_reason=self.stop_reason,
        )

    def tokens_from(self, first: int) -> list[int]:
        """The tokens taken in, without the first ones."""
        start = self.request.prompt_len
        return self.request.tokens[start + first : start + self.num_tokens]

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the id of the stop token; None where an end token or the end of a grammar did it."""
        if self._stops.match is not None:
            return self._stops.match
        if self.finish is not Finish.STOP or not self.num_tokens:
            return None
        [last] = self.tokens_from(self.num_tokens - 1)
        return last if last in self.request.stop_ids and last not in self.follow.eos_ids else None

    def _decode(self, tokens: list[int]) -> None:
        if self._detokenizer is None:
            assert self._tokenizer is not None
            prompt = self.request.tokens[: self.request.prompt_len]
            skip = self.request.params.skip_special_tokens
            self._detokenizer = IncrementalDetokenizer(self._tokenizer, prompt, skip)
        for token in tokens:
            self.num_tokens += 1
            text = self._detokenizer.push([token])
            # No part of a stop string may lie in the first min_tokens tokens.
            self.text += text if self.num_tokens <= self.request.params.min_tokens else self._stops.push(text)
            if self._stops.match is not None:
                return


def _badness(output: CompletionOutput) -> tuple[bool, float]:
    """Orders the sequences of best_of: those that were cut off last, then by mean log-probability."""
    whole = output.finish_reason in (Finish.STOP, Finish.LENGTH) and bool(output.token_ids)
    return not whole, -(output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))


def _table(one: TokenLogprobs, tokenizer: Tokenizer | None) -> LogprobTable:
    """The chosen token and the best ones, as people know it from other engines."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.decode([token], False) if tokenizer is not None else None)

    table = {token: entry(token, logprob, place + 1) for place, (token, logprob) in enumerate(one.top)}
    table.setdefault(one.token, entry(one.token, one.logprob, one.rank))
    return table


def _priority(value: str | int) -> int:
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    if isinstance(value, int) and not isinstance(value, bool) and REALTIME <= value <= BATCH:
        return value
    raise InvalidRequest(f"priority is {value!r}; it must be one of {', '.join(PRIORITIES)} (or 0, 1, 2)")


def _check_timeout(timeout: Any) -> None:
    if timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0):
        return
    raise InvalidRequest(f"timeout is {timeout!r}; it must be a positive number of seconds")


def _check_salt(salt: Any) -> None:
    try:
        if isinstance(salt, str):
            salt.encode()
            return
    except UnicodeError:
        pass
    raise InvalidRequest(f"cache_salt is {_shown(salt)}; it must be text")


def _checked_id(id: Any) -> str:
    """The sequences of a request are named after it, with a slash: without it in ids they cannot clash."""
    if not isinstance(id, str) or not id or "/" in id:
        raise InvalidRequest(f"request_id is {_shown(id)}; it must be a non-empty string without '/'")
    return id


def _all_whole(tokens: Sequence[Any]) -> bool:
    return countOf(map(type, tokens), int) == len(tokens)


def _all_below(tokens: list[int], limit: int) -> bool:
    """Whether every token is in [0, limit)."""
    if len(tokens) < FEW:  # numpy takes longer to begin than this takes
        return min(tokens) >= 0 and max(tokens) < limit
    try:
        return int(np.frombuffer(array("I", tokens), dtype=np.uintc).max()) < limit
    except OverflowError:  # negative, or far too large
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
