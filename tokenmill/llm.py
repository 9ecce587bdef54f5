"""LLM: the offline API. Prompts in, answers out, in the calling thread."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.build import build
from tokenmill.engine.checkpoints import Progress
from tokenmill.errors import InvalidRequest, QueueFull, TokenmillError
from tokenmill.loading_bar import loading_bar
from tokenmill.lora import Adapters, LoRARequest
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.processor import NO_ANSWER, Message, Processor, Prompt, check_salt
from tokenmill.request_state import RequestState


class LLM:
    """A model, ready to answer. Settings are those of EngineConfig; what is left unset is solved (see plan_lines).

    In two lines:

        llm = LLM()                                  # the default model
        llm.generate("The mill turns", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str = "default", *, progress: Progress | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_options(model=model, **options)
        with loading_bar(progress) as tell:
            built = build(self.config, tell)
        self._built = built
        spec, max_len = built.spec, built.settings.max_len
        self._processor = Processor(
            built.engine, built.tokenizer, spec.vocab_size, spec.eos_ids, max_len, seed=self.config.seed
        )
        self._adapters = Adapters(built.engine)
        self._closed = False
        self._driver: int | None = None  # the thread that turns its loop for programs, while it does

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: str | int = "api",
        timeout: float | None = None,
        cache_salt: str = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Answer prompts, in their order. All are checked before any runs.

        A prompt is text, a list of token ids, or {"prompt_token_ids": [...]}; or {"prompt": [...]} of parts, of which
        {"text": ..., "cache_module": True} are modules. `adapter` names a LoRA adapter that `load_adapter` has read; a
        `lora_request` (one, or one per prompt) brings it along. A request that fails on the way has finish_reason
        "error" and says why in .error; the others are not touched.
        """
        self._check_open()
        several = _as_list(prompts)
        params = _params_for(several, sampling_params)
        options: dict[str, Any] = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt}
        with _full_collections_rare():
            adapters = self._adapters.names(lora_request, adapter, len(several))
            triples = zip(several, params, adapters, strict=True)
            prepare = self._processor.prepare
            states = self._run([prepare(prompt, one, adapter=its, **options) for prompt, one, its in triples], use_tqdm)
            return [state.output() for state in states]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling: str = "mean",
        **options: Any,  # as of `generate`
    ) -> list[EmbeddingRequestOutput]:
        """A vector of unit length per prompt, from its last hidden states: of all tokens ("mean") or of the "last"."""
        self._check_open()
        options = self._with_adapter(options) | {"pooling": pooling}
        states = [self._processor.prepare(prompt, NO_ANSWER, **options) for prompt in _as_list(prompts)]
        return [
            EmbeddingRequestOutput(one.id, one.prompt_ids, EmbeddingOutput(one.leader.pooled), error=one.leader.error)
            for one in self._run(states, use_tqdm)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations, in the model's chat format."""
        self._check_open()
        several = [messages] if _is_conversation(messages) else list(messages)
        prompts = [
            self._processor.chat_prompt(conversation, chat_template, add_generation_prompt)  # type: ignore[arg-type]
            for conversation in several
        ]
        return self.generate(prompts, sampling_params, use_tqdm, **options)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer: encode, decode, chat_template."""
        self._check_there()
        return self._processor.tokenizer

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt or conversation bit by bit: each output is the whole answer so far. Closing it cancels."""
        self._check_open()
        if _is_conversation(prompt):
            prompt = self._processor.chat_prompt(prompt)  # type: ignore[arg-type]
        options = self._with_adapter(options)
        state = self._processor.prepare(prompt, sampling_params or SamplingParams(), **options)  # type: ignore[arg-type]
        return self._stream(state)

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids that `chat` would send for these messages."""
        self._check_there()
        return self._processor.chat_ids(messages, **options)

    def reset_prefix_cache(self, cache_salt: str | None = None) -> None:
        """Forget all cached prefixes and recent answers, or those with this salt; running requests are not touched."""
        self._check_open()
        if cache_salt is not None:
            check_salt(cache_salt)
        self._processor.engine.reset_prefix_cache(cache_salt)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read a LoRA adapter from the folder that PEFT saved it in; requests may name it from then on. Those that run
        under this name go on with the weights that they began with."""
        self._check_open()
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Nobody may name it any more; requests that run with it are not touched."""
        self._check_open()
        self._adapters.unload(name)

    def plan_lines(self) -> list[str]:
        """What was chosen for this machine and model, and why."""
        self._check_there()
        return self._built.report

    @property
    def slower(self) -> str | None:
        """Why the fastest kernels of the device have no part in this, where they could have one, and what to do."""
        return self._built.slower

    def shutdown(self) -> None:
        """Free the device. The object cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._built.engine.close()
            del self._built, self._processor, self._adapters

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _stream(self, state: RequestState) -> Generator[RequestOutput, None, None]:
        self._check_open()
        self._processor.submit(state)
        ended = False
        try:
            while not ended:
                self._check_open()
                if state.finished or state in self._step():  # others may have run it to its end meanwhile
                    output = state.output()
                    ended = output.finished
                    yield output
        finally:
            if not self._closed:
                self._processor.cancel(state)

    def _run(self, states: list[RequestState], use_tqdm: bool) -> list[RequestState]:
        """All of them to their ends."""
        bar = _progress_bar(len(states)) if use_tqdm else None
        try:
            waiting, left = deque(states), set(states)
            while left:
                done = {state for state in self._step(waiting) if state.finished}  # perhaps an open stream's, too
                if bar is not None and done:
                    bar.update(len(done & left))
                left -= done
        except BaseException:
            if not self._closed:
                for state in states:
                    self._processor.cancel(state)
            raise
        finally:
            if bar is not None:
                bar.close()
        return states

    def _step(self, waiting: deque[RequestState] | None = None) -> list[RequestState]:
        """Hand in as many waiting requests as the queue holds, and run the engine's next step."""
        try:
            with _interrupts_held_back():
                while waiting:
                    try:
                        self._processor.submit(waiting[0])
                    except QueueFull:  # bounded on purpose: the rest follows as it drains
                        break
                    waiting.popleft()
                return self._processor.step()
        except _TornStep:
            self.shutdown()
            raise KeyboardInterrupt from None

    def _with_adapter(self, options: dict[str, Any]) -> dict[str, Any]:
        """A request's options, with the name of its adapter in place of a lora_request."""
        (name,) = self._adapters.names(options.pop("lora_request", None), options.get("adapter", ""), 1)
        return options | {"adapter": name}

    def _check_there(self) -> None:
        if self._closed:
            raise TokenmillError("this LLM was shut down; make a new one")

    def _check_open(self) -> None:
        """For what only one thread may do."""
        self._check_there()
        if self._driver not in (None, threading.get_ident()):
            raise TokenmillError(
                "this LLM runs programs, on another thread; inside of a program ask its state, elsewhere an AsyncLLM"
            )


class _TornStep(BaseException):
    """An insistent user ended a step in the middle: nobody knows what it left undone."""


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits for the end of a step, which would otherwise leave memory behind that nobody filled or freed."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # it arrives elsewhere, or whoever handles it knows better
        return
    hits = 0

    def hit(number: int, frame: FrameType | None) -> None:
        nonlocal hits
        hits += 1
        if hits > 2:
            raise _TornStep

    signal.signal(signal.SIGINT, hit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if hits:
        raise KeyboardInterrupt


@contextmanager
def _full_collections_rare() -> Iterator[None]:
    """Thousands of prompts are many new objects, for which the collector would look through the whole process again
    and again while the device waits.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], max(before[2], 1000))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes):
        if prompts and all(type(token) is int for token in prompts):
            return [prompts]  # type: ignore[list-item]
        return list(prompts)  # type: ignore[arg-type]
    return [prompts]


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, list | tuple):
        raise InvalidRequest(f"sampling_params is a {type(params).__name__}; give SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise InvalidRequest(f"{len(prompts)} prompts came with {len(params)} sampling_params; give one, or as many")
    return list(params)


def _is_conversation(value: Any) -> bool:
    """A list of messages, as opposed to text, token ids or a list of conversations."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and hasattr(value[0], "keys")


def _progress_bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="requests", unit="req", dynamic_ncols=True, disable=None)  # None: only at a terminal
