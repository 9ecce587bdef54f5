"""Processor: the input (prompts become requests) and output (tokens become text) of every way to use an engine."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import countOf
from typing import Any, Protocol, cast

import numpy as np

from tokenmill.engine.beams import Beams
from tokenmill.engine.request import API, BATCH, REALTIME, Finish, Module, Request
from tokenmill.engine.scheduler import Delta
from tokenmill.engine.step import POOLINGS
from tokenmill.errors import InvalidRequest
from tokenmill.model.chat_template import render
from tokenmill.model.infill import NO_INFILL
from tokenmill.model.marked_text import MARK, MOST_MODULES, Marks, Piece, Spans, encode_pieces, is_marked
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.params import SamplingParams
from tokenmill.request_state import RequestState, SequenceState
from tokenmill.sampling.grammar import check_grammar

# Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}; with "suffix", the text between the two is asked for.
# A mapping's prompt may be a list of parts: texts or lists of token ids, or mappings with either as "text" or
# "prompt_token_ids"; with "cache_module": true such a mapping is a module.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

PRIORITIES = {"realtime": REALTIME, "api": API, "batch": BATCH}
FEW = 2048  # tokens
NO_ANSWER = SamplingParams(detokenize=False)  # of requests that ask for a vector: nothing is sampled


class Encoded(dict[str, Any]):
    """A prompt with its token ids, which `Processor.encode` has checked: that is not done twice."""


class EngineVerbs(Protocol):
    """What a processor does with an engine, be it in this process or in another."""

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, id: str, why: Finish = Finish.CANCELLED) -> None: ...

    def step(self) -> list[Delta]: ...

    def reset_prefix_cache(self, cache_salt: str | None = None) -> None: ...


class Processor:
    """Checks what users ask for, keeps their requests' states, and decodes text. Owned by the engine's thread."""

    def __init__(
        self,
        engine: EngineVerbs,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_ids: tuple[int, ...],  # where the tokenizer has none
        max_len: int,
        *,
        seed: int,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.vocab_size, self.max_len = vocab_size, max_len
        self._eos_ids = tuple(tokenizer.eos_ids if tokenizer else ()) or eos_ids
        self._seeds = random.Random(seed)
        self._states: dict[str, SequenceState] = {}  # by request id; siblings stay until all have ended
        self._count = 0

    # -- in -------------------------------------------------------------------------------------------------

    def submit(self, state: RequestState) -> None:
        """Hand a prepared request to the engine. Raises QueueFull, and then nothing has happened."""
        if state.id in self._states:
            raise InvalidRequest(f"request id {state.id!r} is already running; choose another")
        now = self.engine.clock()
        for sequence in state.sequences:
            sequence.request.arrival = sequence.request.metrics.arrival = now
            if state.timeout is not None:
                sequence.request.deadline = now + state.timeout
        self.engine.add(state.leader)
        for sequence in state.sequences:
            self._states[sequence.request.id] = sequence

    def cancel(self, state: RequestState) -> None:
        """End a request now; if it was running it is finished on return, and no later step mentions it."""
        for sequence in state.sequences:
            if self._states.get(sequence.request.id) is sequence:
                del self._states[sequence.request.id]
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
        pooling: str | None = None,
        pushes: bool = False,
        keep: bool = False,
        continues: str | None = None,
        adapter: str = "",
    ) -> RequestState:
        """Check a prompt and its parameters and make requests of them; with `pooling`, one that asks for a vector of
        the prompt instead of an answer. With `keep` the ended request's keys and values stay under its id, until
        `drop_held`, for a prompt that `continues` its tokens. With `pushes` a server says that it has ended when
        another engine has its blocks. `adapter`: the name of a loaded LoRA adapter. Raises InvalidRequest."""
        spans: Spans = []
        if isinstance(prompt, Mapping) and not isinstance(prompt, Encoded) and type(prompt.get("prompt")) is list:
            prompt = self._of_parts(prompt["prompt"])
        if isinstance(prompt, Encoded):
            spans = prompt.get("modules", spans)
        text, ids = self._prompt_ids(prompt)
        params = self._checked_params(params, len(ids))
        infill = self.tokenizer.infill if self.tokenizer is not None else None
        if infill is not None and isinstance(prompt, Mapping) and prompt.get("suffix") and not params.ignore_eos:
            # The answer also ends where the model says that the suffix begins.
            params = replace(params, stop_token_ids=[*params.stop_ids, *infill.ends])
        if timeout is not None:
            _check_timeout(timeout)
        if cache_salt != "":
            check_salt(cache_salt)
        if not isinstance(adapter, str):
            raise InvalidRequest(f"adapter is {_shown(adapter)}; it must be the name of one")
        if pooling is not None and pooling not in POOLINGS:
            raise InvalidRequest(f"pooling is {pooling!r:.60}; it must be one of {', '.join(POOLINGS)}")
        request_id = self._new_id() if request_id is None else _checked_id(request_id)
        room, priority = self.max_len - len(ids), _priority(priority)
        end_ids = () if params.ignore_eos else self._eos_ids
        stop_ids = frozenset([*params.stop_ids, *end_ids])
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        requests = [
            Request(
                request_id if index == 0 else f"{request_id}/{index}",
                ids,
                params,
                max_tokens=min(params.max_tokens or room, room) if pooling is None else 0,
                seed=(seed + index * 0x9E3779B97F4A7C15) & (2**63 - 1),
                stop_ids=stop_ids,
                priority=priority,
                salt=cache_salt,
                pooling=pooling,
                pushes=pushes,
                keep=keep,
                continues=continues,
                adapter=adapter,
                modules=[Module(first, end) for first, end in spans],
            )
            for index in range(1 if params.beam_width else params.num_sequences)
        ]
        requests[0].followers = requests[1:]
        if params.beam_width:
            requests[0].beams = Beams(requests[0])
        return RequestState(text, ids, params, requests, self.tokenizer, end_ids, timeout)

    def check_params(self, params: SamplingParams) -> None:
        """Whatever the prompt is. Touches no state. Raises InvalidRequest."""
        self._checked_params(params, 0)

    def encode(self, prompt: Prompt) -> Encoded:
        """The same prompt with its token ids. Touches no state, so any thread may call it."""
        if isinstance(prompt, Mapping) and type(prompt.get("prompt")) is list:
            return self._of_parts(prompt["prompt"])
        text, ids = self._prompt_ids(prompt)
        suffix = prompt.get("suffix") if isinstance(prompt, Mapping) else None
        return Encoded(prompt=text, prompt_token_ids=ids, suffix=suffix)

    def chat_ids(
        self,
        messages: Sequence[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> list[int]:
        """The token ids of a conversation in the model's chat format."""
        return self._prompt_ids(self.chat_prompt(messages, chat_template, add_generation_prompt, **more))[1]

    def chat_prompt(
        self,
        messages: Sequence[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        marks: Marks | None = None,
        **more: Any,
    ) -> Prompt:
        """The same with its modules; marks: those that have been taken out of the messages already."""
        tokenizer = self._need_tokenizer("a chat")
        if marks is None:
            marks = Marks()
            messages = [marks.of_message(one) for one in messages] if isinstance(messages, list | tuple) else messages
        text = render(
            chat_template or tokenizer.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **more,
        )
        # The template writes special tokens itself; a bounded encode is enough to see that a text is too long.
        if not marks.texts:
            return tokenizer.encode(text, add_special_tokens=False, max_tokens=self.max_len)
        return self._encoded(None, *encode_pieces(tokenizer, marks.pieces(text), self.max_len, False))

    def _of_parts(self, parts: list[Any]) -> Encoded:
        """A prompt of texts, of which some are modules."""
        if _all_whole(parts):
            return self._encoded(None, parts, [])
        pieces: list[Piece] = []
        for part in parts:
            body = part.get("text", part.get("prompt_token_ids")) if isinstance(part, Mapping) else part
            if not isinstance(body, str) and not (isinstance(body, list) and _all_whole(body)):
                raise InvalidRequest(f"a part of a prompt is {_shown(part)}; it must have text or token ids")
            pieces.append((body, is_marked(part)))
        if sum(marked for _, marked in pieces) > MOST_MODULES:
            raise InvalidRequest(f"the prompt has over {MOST_MODULES} parts marked with {MARK}; mark fewer")
        texts = [body for body, _ in pieces if isinstance(body, str)]
        tokenizer = self._need_tokenizer("a prompt with text") if texts else None
        text = "".join(texts) if len(texts) == len(pieces) else None
        return self._encoded(text, *encode_pieces(tokenizer, pieces, self.max_len, True))

    def _encoded(self, text: str | None, ids: list[int], spans: Spans) -> Encoded:
        self._prompt_ids(ids)  # checked
        return Encoded(prompt=text, prompt_token_ids=ids, modules=spans)

    def _new_id(self) -> str:
        while True:
            self._count += 1
            if (name := f"r{self._count}") not in self._states:
                return name

    def _infill_ids(self, before: Any, suffix: Any) -> list[int]:
        tokenizer = self._need_tokenizer("a suffix")
        if not isinstance(suffix, str):
            raise InvalidRequest(f"suffix is {_shown(suffix)}; it must be text")
        if tokenizer.infill is None:
            raise InvalidRequest(NO_INFILL)
        if not isinstance(before, str):
            before = self._prompt_ids(before)[1]
        return tokenizer.infill.prompt(tokenizer, before, suffix, self.max_len)

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Encoded):
            return prompt["prompt"], prompt["prompt_token_ids"]
        if isinstance(prompt, Mapping):
            if prompt.get("suffix"):
                before = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
                ids = self._infill_ids(before, prompt["suffix"])
                prompt = {"prompt": prompt.get("prompt"), "prompt_token_ids": ids}
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
        elif (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, bytes | bytearray)
            and (len(prompt) >= self.max_len or _all_whole(prompt))  # one that is too long is not looked through
        ):
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

    def step(self) -> list[RequestState]:
        """Run the engine's next step; returns the requests that moved."""
        return self.take_in(self.engine.step())

    def take_in(self, deltas: list[Delta]) -> list[RequestState]:
        moved: dict[RequestState, None] = {}  # a set that keeps the order
        for delta in deltas:
            sequence = self._states.get(delta.request.id)
            if sequence is None or sequence.finish is not None:
                continue  # ended earlier, by a stop string
            stopped = sequence.take_in(delta)
            if stopped:
                self.engine.cancel(delta.request.id, Finish.STOP)
            state = sequence.request_state
            moved[state] = None
            if (stopped or delta.finished) and state.finished:
                for sibling in state.sequences:  # only now are its ids free: siblings of an ended one may still run
                    del self._states[sibling.request.id]
        return list(moved)


def _priority(value: str | int) -> int:
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    if isinstance(value, int) and not isinstance(value, bool) and REALTIME <= value <= BATCH:
        return value
    raise InvalidRequest(f"priority is {value!r}; it must be one of {', '.join(PRIORITIES)} (or 0, 1, 2)")


def _check_timeout(timeout: Any) -> None:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise InvalidRequest(f"timeout is {timeout!r}; it must be a positive number of seconds")


def check_salt(salt: Any) -> None:
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
