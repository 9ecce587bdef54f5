"""A stand-in for LLM that answers from a script, so that the command line is tested without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any


class StubLLM:
    """Answers each prompt with the next scripted answer, word by word, and remembers what it was asked."""

    def __init__(self, *answers: str | Exception, between: Callable[[], None] | None = None) -> None:
        self.answers = list(answers) or ["Paris is the capital."]
        self.between = between  # called after each word
        self.asked: list[tuple[Any, Any]] = []
        self.opened_with: dict[str, Any] = {}
        self.cancelled = 0
        self.shut_down = 0
        self.stop_reason: str | None = None  # of every answer
        self.error: str | None = None  # what goes wrong at the end of each answer

    def open(self, model: str, **settings: Any) -> StubLLM:
        self.opened_with = {"model": model, **settings}
        return self

    def stream(self, prompt: Any, params: Any) -> Iterator[Any]:
        self.asked.append((prompt, params))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        words = answer.split(" ")
        finished = False
        try:
            for count in range(1, len(words) + 1):
                finished = count == len(words)
                completion = SimpleNamespace(
                    text=" ".join(words[:count]),
                    token_ids=list(range(count)),
                    finish_reason=self.reason(count, params) if finished else None,
                    stop_reason=self.stop_reason,
                )
                error = self.error if finished else None
                yield SimpleNamespace(outputs=[completion], prompt_token_ids=[1, 2, 3], finished=finished, error=error)
                if self.between:
                    self.between()
        finally:
            self.cancelled += not finished

    def reason(self, count: int, params: Any) -> str:
        return "length" if count == params.max_tokens else "stop"

    def plan_lines(self) -> list[str]:
        return ["plan: 7 blocks because of the test"]

    def __enter__(self) -> StubLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shut_down += 1
