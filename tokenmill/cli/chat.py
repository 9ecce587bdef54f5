"""`tokenmill chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenmill.cli import options, slash
from tokenmill.cli.answer import StreamedAnswer, stream_answer
from tokenmill.cli.conversation import Conversation
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.lines import LineReader
from tokenmill.cli.terminal import note
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill import LLM


@with_engine_options("chat")
def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: options.System = None,
    verbose: options.Verbose = False,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = options.DEFAULT_TEMPERATURE,
    top_p: options.TopP = options.DEFAULT_TOP_P,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    *,
    engine: EngineSettings,
) -> None:
    """Talk with a model; /help lists what can be typed besides messages."""
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)
    with options.opened_llm(model, verbose, **engine) as llm:
        Chat(llm, Conversation(params, system), verbose).loop(LineReader())


class Chat:
    """A model, the conversation with it, and what is known about its answers."""

    def __init__(self, llm: LLM, conversation: Conversation, verbose: bool = False) -> None:
        self.llm = llm
        self.conversation = conversation
        self.verbose = verbose
        self.last: StreamedAnswer | None = None
        self.total_tokens = 0
        self._attempt = 0  # how often the last message was answered again

    def loop(self, reader: LineReader) -> None:
        """Read and answer until the input ends; an error is told, and the conversation goes on."""
        if reader.interactive:
            note("(/help lists the commands, Ctrl-D leaves)")
        while True:
            try:
                self.take(reader.read())
            except EOFError:
                return
            except TokenmillError as error:
                note(f"error: {error}")

    def take(self, line: str) -> None:
        if line.startswith("/"):
            slash.obey(self, line)
        elif line:
            self._attempt = 0
            self._answer(line)

    def regenerate(self) -> None:
        """Answer the last message again, with other randomness where there is any."""
        turns = self.conversation.turns
        if len(turns) < 2 or turns[-1]["role"] != "assistant" or turns[-2]["role"] != "user":
            raise InvalidRequest("there is no answer to regenerate yet; write a message first")
        if self.conversation.params.greedy:
            note("(temperature is 0, so the answer stays the same; try: /set temperature 0.7)")
        *earlier, question, answer = turns
        self.conversation.turns = list(earlier)
        self._attempt += 1
        try:
            self._answer(question["content"])
        finally:
            if len(self.conversation.turns) == len(earlier):  # stopped or failed before its first word
                self.conversation.turns = [*earlier, question, answer]

    def _answer(self, message: str) -> None:
        """Stream an answer to a message; if not a word of it came, the message is taken back."""
        conversation = self.conversation
        conversation.say("user", message)
        answer = StreamedAnswer()
        try:
            answer = stream_answer(self.llm, conversation.messages(), self._params())
        finally:
            if answer.text:
                conversation.say("assistant", answer.text)
            else:
                conversation.turns.pop()
        self.last = answer
        self.total_tokens += answer.tokens
        self._comment(answer)

    def _params(self) -> SamplingParams:
        params = self.conversation.params
        if params.seed is None or not self._attempt:
            return params
        return replace(params, seed=params.seed + self._attempt)

    def _comment(self, answer: StreamedAnswer) -> None:
        if answer.interrupted:
            note("(stopped)")
        elif answer.cut_short:
            note(answer.cut("/set max_tokens"))
        if self.verbose:
            note(f"({answer.speed()})")
