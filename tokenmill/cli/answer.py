"""Streams one answer to stdout, lets Ctrl-C stop it, and says how fast it was."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from tokenmill.cli.terminal import write
from tokenmill.errors import TokenmillError
from tokenmill.outputs import MODEL_LENGTH

if TYPE_CHECKING:
    from tokenmill import LLM, SamplingParams

Prompt = str | list[dict[str, Any]]  # text as it is, or messages for the chat template


@dataclass(frozen=True)
class StreamedAnswer:
    """What came back, and the times as the person at the terminal felt them."""

    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    interrupted: bool = False
    error: str | None = None

    @property
    def cut_short(self) -> bool:
        return self.finish_reason == "length"

    def cut(self, setting: str) -> str:
        """What to say of an answer that was cut short; `setting` is what allows more tokens."""
        if self.stop_reason == MODEL_LENGTH:
            return (
                f"(stopped after {self.tokens} tokens: prompt and answer together may have "
                f"{self.prompt_tokens + self.tokens}; --max-model-len allows more, up to what the model was made for)"
            )
        return f"(stopped after {self.tokens} tokens; {setting} allows more, up to the model's length)"

    def speed(self) -> str:
        text = f"{self.prompt_tokens} prompt tokens, first token after {self.first_token_s:.2f} s; {self.tokens} tokens"
        seconds = self.total_s - self.first_token_s
        if self.tokens > 1 and seconds > 0:
            text += f", then {(self.tokens - 1) / seconds:.1f} tokens/s"
        return text


def stream_answer(llm: LLM, prompt: Prompt, params: SamplingParams) -> StreamedAnswer:
    """Write the answer to stdout as it comes; Ctrl-C ends it early, and the engine stays usable."""
    answer = StreamedAnswer()
    started = time.monotonic()
    with _interrupt_flag() as interrupted:
        stream = llm.stream(prompt, params)
        try:
            for output in stream:
                now = time.monotonic() - started
                completion = output.outputs[0]
                write(completion.text[len(answer.text) :])
                tokens = len(completion.token_ids)
                answer = StreamedAnswer(
                    text=completion.text,
                    prompt_tokens=len(output.prompt_token_ids),
                    tokens=tokens,
                    first_token_s=answer.first_token_s or (now if tokens else 0.0),
                    total_s=now,
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                    interrupted=interrupted(),
                    error=output.error,
                )
                if answer.interrupted:
                    break
        finally:
            stream.close()  # cancels the request if it is not finished
    if not answer.text.endswith("\n"):
        write("\n")
    if answer.error is not None:
        raise TokenmillError(answer.error)
    return answer


@contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C only raises a flag, because a step of the engine must not be cut in two; the second is real."""
    hits = 0

    def hit(number: int, frame: FrameType | None) -> None:
        nonlocal hits
        hits += 1
        if hits > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hit)
    try:
        yield lambda: hits > 0
    finally:
        signal.signal(signal.SIGINT, before)
