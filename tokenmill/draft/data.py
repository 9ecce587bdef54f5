"""On-policy text: a model writes questions and answers itself, and answers about these, from its own chat template."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenmill.errors import ConfigError, ModelError, TokenmillError
from tokenmill.llm import LLM
from tokenmill.model.chat_template import render
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.params import SamplingParams

SENTINEL = "THE-QUESTION"  # stands for the user's text while the template is rendered
QUESTION_TOKENS = (4, 200)  # shorter ones are dropped, longer ones cut
OPENING_TOKENS = 32  # of texts without questions, for as many different beginnings
ANSWER_TOKENS = 384
PASSAGE_TOKENS = (16, 300)  # of an answer that another question is about: shorter ones are left, longer ones cut
ANSWER_TEMPERATURES = (0.0, 0.7, 1.0)  # of every three answers
QUESTION_TEMPERATURES = (1.0, 1.0, 1.0, 0.8)
ROUND = 8192  # texts that are written together; the last of them run in ever smaller batches
TYPICAL_TOKENS = 250  # of a question and its answer, for the size of the first round
LOOP = 24  # tokens that come a third time: from there on an answer goes in circles, which needs no trained drafter

# What is asked about a passage, which stands behind it. Every third text has one: answers quote it, and that is to be
# drafted, too.
INSTRUCTIONS = (
    "Summarize the following text in a few sentences.",
    "Rewrite the following text in simpler words.",
    "List the key points of this text.",
    "Translate the following text into German.",
    "Translate the following text into French.",
    "Translate the following text into Spanish.",
    "What is the main idea of the text below? Quote the sentences that show it.",
    "Continue the following text.",
    "Correct the spelling and grammar of this text, and change nothing else.",
    "Answer this question from the text below: what is said about its subject, and why does it matter?",
    "Write a title for this text, and repeat its first sentence.",
    "Turn the following text into a dialogue between two people.",
    "Extract all names, numbers and terms from this text.",
)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Texts:
    """Conversations one after the other, and which of their tokens the model has written."""

    tokens: torch.Tensor  # [tokens] int32
    starts: torch.Tensor  # [texts + 1] int64: where each begins
    # First token of the written question and the one behind it, in the text; equal where nothing of it was written
    questions: torch.Tensor  # [texts, 2] int64
    answers: torch.Tensor  # [texts, 2] int64
    temperatures: torch.Tensor  # [texts] float32: of the answer; 0 is greedy
    seeds: torch.Tensor  # [texts] int64: of the answer's noise

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def num_written(self) -> int:
        return int((self.questions[:, 1] - self.questions[:, 0] + self.answers[:, 1] - self.answers[:, 0]).sum())

    def part(self, first: int, last: int) -> Texts:
        begin, end = int(self.starts[first]), int(self.starts[last])
        rest = {field.name: getattr(self, field.name)[first:last] for field in fields(self)[2:]}
        return Texts(self.tokens[begin:end], self.starts[first : last + 1] - begin, **rest)

    def answer_counts(self, vocab: int) -> torch.Tensor:  # [vocab] int64
        """How often each token stands in the answers."""
        place = torch.arange(len(self.tokens)) - self.starts[:-1].repeat_interleave(self.starts.diff())
        first, last = (self.answers[:, side].repeat_interleave(self.starts.diff()) for side in (0, 1))
        return torch.bincount(self.tokens[(place >= first) & (place < last)].long(), minlength=vocab)

    def save(self, path: Path, fingerprint: str) -> None:
        tensors = {field.name: getattr(self, field.name).contiguous() for field in fields(self)}
        save_file(tensors, path, {"texts": json.dumps({"fingerprint": fingerprint})})

    @classmethod
    def load(cls, path: Path, spec: DecoderSpec, fingerprint: str) -> Texts:
        """Texts that `save` has written for the same model."""
        try:
            with safe_open(path, framework="pt") as file:
                known = json.loads((file.metadata() or {})["texts"])
                texts = cls(**{field.name: file.get_tensor(field.name) for field in fields(cls)})
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path} holds no generated texts ({error}); remove it, and they are made anew") from None
        if known.get("fingerprint") != fingerprint or int(texts.tokens.max()) >= spec.vocab_size:
            raise ModelError(f"the texts in {path} were written by another model; name another file, or remove it")
        return texts


@dataclass(frozen=True)
class Frame:
    """What stands around the texts: tokens before the question, and between question and answer."""

    before: list[int]
    between: list[int]  # empty: the answer goes on where the question stops


def frame_of(tokenizer: Tokenizer | None, spec: DecoderSpec) -> Frame:
    """Of the chat template; a model without one goes on from a text's beginning."""
    if tokenizer is not None and tokenizer.chat_template:
        text = render(
            tokenizer.chat_template,
            [{"role": "user", "content": SENTINEL}],
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )
        before, found, between = text.partition(SENTINEL)
        if found:
            return Frame(*(tokenizer.encode(part, add_special_tokens=False) for part in (before, between)))
    begin = [tokenizer.bos_id if tokenizer is not None else None, spec.bos_id, *spec.eos_ids, 0]
    return Frame([next(token for token in begin if token is not None)], [])


def instructions_of(tokenizer: Tokenizer | None) -> list[list[int]]:
    """In tokens, with what separates them from a passage; none of a model that does not chat."""
    if tokenizer is None or not tokenizer.chat_template:
        return []
    return [tokenizer.encode(f"{one}\n\n", add_special_tokens=False) for one in INSTRUCTIONS]


def write_texts(
    llm: LLM,
    spec: DecoderSpec,
    tokens: int,
    seed: int,
    max_len: int,
    tell: Tell,
    minutes: float | None = None,  # no round begins that would end later
) -> Texts:
    """At least so many tokens of questions and answers, in rounds."""
    began = time.monotonic()
    tokenizer = llm.get_tokenizer()
    writer = _Writer(llm, frame_of(tokenizer, spec), seed, max_len, instructions_of(tokenizer))
    rows: list[_Row] = []
    written, typical = 0, TYPICAL_TOKENS
    while written < tokens:
        wanted = min(ROUND, max(16, -(-(tokens - written) // typical)))
        made = [row for row in writer.write(wanted) if row.answer[1] - row.answer[0] > 1]
        if not made:
            raise TokenmillError(f"of {wanted} texts the model has ended all at once; there is nothing to train on")
        rows += made
        written += sum(row.num_written for row in made)
        typical = max(1, written // len(rows))
        passed = time.monotonic() - began
        tell(f"{len(rows)} texts, {written} of {tokens} tokens, {written / passed:.0f} tokens/s")
        if minutes is not None and passed * (1 + wanted / len(rows)) > 60 * minutes:
            break
    return _joined(rows)


def draft_vocabulary(texts: Texts, spec: DecoderSpec, ends: Sequence[int], size: int) -> torch.Tensor:  # [size] int32
    """The most frequent tokens of the answers, and those that end them, in the order of their ids."""
    counts = texts.answer_counts(spec.vocab_size)
    counts[list(ends)] += int(counts.sum()) + 1
    best = counts.argsort(descending=True, stable=True)[: min(size, spec.vocab_size)]
    return best.sort().values.int()


@dataclass(frozen=True)
class _Row:
    tokens: list[int]
    question: tuple[int, int]
    answer: tuple[int, int]
    temperature: float
    seed: int

    @property
    def num_written(self) -> int:
        return self.question[1] - self.question[0] + self.answer[1] - self.answer[0]


class _Writer:
    def __init__(
        self,
        llm: LLM,
        frame: Frame,
        seed: int,
        max_len: int,
        instructions: list[list[int]],  # about passages; none: no text has a passage
    ) -> None:
        self._llm, self._frame, self._random = llm, frame, random.Random(seed)
        room = max_len - len(frame.before) - len(frame.between)
        self._question_tokens = min(QUESTION_TOKENS[1] if frame.between else OPENING_TOKENS, room // 3)
        self._answer_tokens = min(ANSWER_TOKENS, room - self._question_tokens)
        if self._question_tokens < QUESTION_TOKENS[0]:
            raise ConfigError(f"max_model_len is {max_len}, too short for a question and an answer; raise it")
        self._max_len, self._room, least = max_len, room, PASSAGE_TOKENS[0]
        self._instructions = [one for one in instructions if len(one) + least <= room // 2] if frame.between else []

    def write(self, count: int) -> Iterator[_Row]:
        """About so many texts; every third is about the answer of another."""
        about = count // 3 if self._instructions else 0
        asked = list(self._answered(self._questions(count - about)))
        passages = [passage for row in asked if len(passage := self._passage(row)) >= PASSAGE_TOKENS[0]]
        told = list(self._answered(self._about(passages, about))) if passages else []
        for index, row in enumerate(asked):
            yield row
            if index % 2 and index // 2 < len(told):
                yield told[index // 2]
        yield from told[len(asked) // 2 :]

    def _answered(self, prompts: Iterable[tuple[list[int], int, int]]) -> Iterator[_Row]:
        """Prompts, each with where its written question begins and ends."""
        prompts = list(prompts)
        params = [
            self._params(
                ANSWER_TEMPERATURES[index % len(ANSWER_TEMPERATURES)],
                min(self._answer_tokens, self._max_len - len(ids)),
            )
            for index, (ids, _, _) in enumerate(prompts)
        ]
        answers = self._generate([ids for ids, _, _ in prompts], params)
        for (ids, begin, end), one, answer in zip(prompts, params, answers, strict=True):
            answer = answer[: loop_start(answer)]
            span = (len(ids), len(ids) + len(answer))
            assert one.seed is not None
            yield _Row(ids + answer, (begin, end), span, one.temperature, one.seed)

    def _passage(self, row: _Row) -> list[int]:
        """An answer, but for the token that may have ended it."""
        return row.tokens[row.answer[0] : row.answer[1] - 1][: PASSAGE_TOKENS[1]]

    def _about(self, passages: list[list[int]], count: int) -> Iterator[tuple[list[int], int, int]]:
        """Nothing in these questions counts as written: the passages were, but behind another beginning."""
        before, between = self._frame.before, self._frame.between
        for index in range(count):
            instruction = self._instructions[index % len(self._instructions)]
            passage = passages[self._random.randrange(len(passages))][: self._room // 2 - len(instruction)]
            end = len(before) + len(instruction) + len(passage)
            yield [*before, *instruction, *passage, *between], end, end

    def _questions(self, count: int) -> Iterator[tuple[list[int], int, int]]:
        """Prompts for answers, and where their questions begin and end."""
        before, between = self._frame.before, self._frame.between
        params = [
            self._params(QUESTION_TEMPERATURES[index % len(QUESTION_TEMPERATURES)], self._question_tokens)
            for index in range(count)
        ]
        for question in self._generate([before] * count, params, without_end=True):
            question = question[: loop_start(question)]
            if len(question) >= QUESTION_TOKENS[0]:
                yield [*before, *question, *between], len(before), len(before) + len(question)

    def _params(self, temperature: float, max_tokens: int) -> SamplingParams:
        seed = self._random.getrandbits(62)
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, detokenize=False)

    def _generate(
        self, prompts: list[list[int]], params: list[SamplingParams], without_end: bool = False
    ) -> list[list[int]]:
        found = []
        for output in self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
            answer = output.outputs[0]
            tokens = list(answer.token_ids) if answer.finish_reason != "error" else []
            found.append(tokens[:-1] if without_end and answer.finish_reason == "stop" else tokens)
        return found


def loop_start(tokens: Sequence[int]) -> int:
    """Where a text begins to say the same for the third time; its length where it never does."""
    words = np.asarray(tokens, dtype=np.int32).tobytes()
    once: set[bytes] = set()
    twice: set[bytes] = set()
    for first in range(len(tokens) - LOOP + 1):
        window = words[4 * first : 4 * (first + LOOP)]
        if window in twice:
            return first
        (twice if window in once else once).add(window)
    return len(tokens)


def _joined(rows: list[_Row]) -> Texts:
    lengths = torch.tensor([0, *(len(row.tokens) for row in rows)])
    return Texts(
        tokens=torch.from_numpy(np.concatenate([np.asarray(row.tokens, dtype=np.int32) for row in rows])),
        starts=lengths.cumsum(0),
        questions=torch.tensor([row.question for row in rows]),
        answers=torch.tensor([row.answer for row in rows]),
        temperatures=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        seeds=torch.tensor([row.seed for row in rows]),
    )
