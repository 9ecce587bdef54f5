"""On-policy text: a model writes questions and answers itself, and answers about these, from its own chat template."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenmill.draft.prompts import FOLLOW_UPS, INSTRUCTIONS, OPENINGS
from tokenmill.errors import ConfigError, ModelError, TokenmillError
from tokenmill.llm import LLM
from tokenmill.model.chat_template import render
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.params import SamplingParams

SENTINELS = "THE-QUESTION", "ITS-ANSWER", "ANOTHER-ONE"  # what is said, while the template is rendered
QUESTION_TOKENS = (4, 200)  # shorter ones are dropped, longer ones cut
OPENING_TOKENS = 32  # of texts without questions, for as many different beginnings
ANSWER_TOKENS = 384
PASSAGE_TOKENS = (16, 200)  # of an answer that another question is about: shorter ones are left, longer ones cut
PASSAGES = (1, 1, 3)  # that a question is about, of every three
ANSWER_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of every four answers
QUESTION_TEMPERATURES = (1.0, 0.8, 1.0, 0.7, 1.0)
OPENED = 0.7  # of the questions begin with words from a list
FOLLOWING, ASKED = 0.25, 0.25  # of texts about others: second turns, and others' questions behind passages
ROUND = 8192  # texts that are written together; the last of them run in ever smaller batches
TYPICAL_TOKENS = 250  # of a question and its answer, for the size of the first round
LOOP = 24  # tokens that come a third time: from there on an answer goes in circles, which needs no trained drafter

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
        rest = {one.name: getattr(self, one.name)[first:last] for one in fields(self)[2:]}
        return Texts(self.tokens[begin:end], self.starts[first : last + 1] - begin, **rest)

    def answer_counts(self, vocab: int) -> torch.Tensor:  # [vocab] int64
        """How often each token stands in the answers."""
        place = torch.arange(len(self.tokens)) - self.starts[:-1].repeat_interleave(self.starts.diff())
        first, last = (self.answers[:, side].repeat_interleave(self.starts.diff()) for side in (0, 1))
        return torch.bincount(self.tokens[(place >= first) & (place < last)].long(), minlength=vocab)

    def save(self, path: Path, fingerprint: str) -> None:
        tensors = {one.name: getattr(self, one.name).contiguous() for one in fields(self)}
        save_file(tensors, path, {"texts": json.dumps({"fingerprint": fingerprint})})

    @classmethod
    def load(cls, path: Path, spec: DecoderSpec, fingerprint: str) -> Texts:
        """Texts that `save` has written for the same model."""
        try:
            with safe_open(path, framework="pt") as file:
                known = json.loads((file.metadata() or {})["texts"])
                texts = cls(**{one.name: file.get_tensor(one.name) for one in fields(cls)})
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path} holds no generated texts ({error}); remove it, and they are made anew") from None
        if known.get("fingerprint") != fingerprint or int(texts.tokens.max()) >= spec.vocab_size:
            raise ModelError(f"the texts in {path} were written by another model; name another file, or remove it")
        return texts


@dataclass(frozen=True)
class Frame:
    """What stands around the texts: tokens before the question, between it and the answer, and before another one."""

    before: list[int]
    between: list[int]  # empty: the answer goes on where the question stops
    again: list[int] = field(default_factory=list)  # empty: there is only one question


def frame_of(tokenizer: Tokenizer | None, spec: DecoderSpec) -> Frame:
    """Of the chat template; a model without one goes on from a text's beginning."""
    if tokenizer is not None and tokenizer.chat_template:
        question, answer, other = SENTINELS
        before, found, between = _rendered(tokenizer, [question]).partition(question)
        if found:
            _, _, talk = _rendered(tokenizer, [question, answer, other]).partition(answer)
            again = talk.partition(other)[0] if other in talk else ""
            parts = (before, between, again)
            return Frame(*(tokenizer.encode(part, add_special_tokens=False) for part in parts))
    begin = [tokenizer.bos_id if tokenizer is not None else None, spec.bos_id, *spec.eos_ids, 0]
    return Frame([next(token for token in begin if token is not None)], [])


def _rendered(tokenizer: Tokenizer, said: Sequence[str]) -> str:
    """By the user and the model, in turns; empty where the template refuses so many."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(said)]
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    try:
        return render(tokenizer.chat_template, messages, bos_token=bos, eos_token=eos)
    except TokenmillError:
        if len(said) == 1:
            raise
        return ""


@dataclass(frozen=True)
class Prompts:
    """In tokens; empty for a model that does not chat."""

    openings: list[list[int]]
    instructions: list[list[int]]  # with what separates them from a passage
    follow_ups: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Prompts:
        if tokenizer is None or not tokenizer.chat_template:
            return cls([], [], [])
        texts = (OPENINGS, [f"{one}\n\n" for one in INSTRUCTIONS], FOLLOW_UPS)
        return cls(*([tokenizer.encode(one, add_special_tokens=False) for one in some] for some in texts))


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
    writer = _Writer(llm, frame_of(tokenizer, spec), seed, max_len, Prompts.of(tokenizer))
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
    def __init__(self, llm: LLM, frame: Frame, seed: int, max_len: int, prompts: Prompts) -> None:
        self._llm, self._frame, self._random = llm, frame, random.Random(seed)
        room = max_len - len(frame.before) - len(frame.between)
        self._question_tokens = min(QUESTION_TOKENS[1] if frame.between else OPENING_TOKENS, room // 3)
        self._answer_tokens = min(ANSWER_TOKENS, room - self._question_tokens)
        if self._question_tokens < QUESTION_TOKENS[0]:
            raise ConfigError(f"max_model_len is {max_len}, too short for a question and an answer; raise it")
        self._max_len, self._room, least = max_len, room, PASSAGE_TOKENS[0]
        chats = bool(frame.between)
        self._openings = [one for one in prompts.openings if chats and 2 * len(one) <= self._question_tokens]
        self._instructions = [one for one in prompts.instructions if chats and len(one) + least <= room // 2]
        self._follow_ups = prompts.follow_ups if chats and frame.again else []

    def write(self, count: int) -> Iterator[_Row]:
        """About so many texts; every third is about others, or goes on after one."""
        about = count // 3 if self._instructions else 0
        asked = list(self._answered(self._questions(count - about)))
        told = list(self._answered(self._about(asked, about)))
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

    def _about(self, rows: list[_Row], count: int) -> Iterator[tuple[list[int], int, int]]:
        """Nothing in these questions counts as written: the passages were, but behind another beginning."""
        rows = [row for row in rows if row.answer[1] - row.answer[0] > PASSAGE_TOKENS[0]]
        if not rows:
            return
        before, between = self._frame.before, self._frame.between
        for index in range(count):
            row = self._random.choice(rows)
            kind = self._random.random()
            if kind < FOLLOWING and self._follow_ups and (prompt := self._second_turn(row)):
                yield prompt, len(prompt), len(prompt)
                continue
            others = [row, *self._random.choices(rows, k=PASSAGES[index % len(PASSAGES)] - 1)]
            self._random.shuffle(others)
            texts = [one.tokens[slice(*one.answer)][:-1][: PASSAGE_TOKENS[1]] for one in others]  # without their end
            question = row.tokens[slice(*row.question)] if kind > 1 - ASKED else []  # which one of them answers
            instruction = [] if question else self._instructions[index % len(self._instructions)]
            passage = [token for text in texts for token in text][: self._room // 2 - len(instruction) - len(question)]
            asked = [*instruction, *passage, *question]
            if len(passage) >= PASSAGE_TOKENS[0]:
                end = len(before) + len(asked)
                yield [*before, *asked, *between], end, end

    def _second_turn(self, row: _Row) -> list[int]:
        """A question, its answer, and another question; empty where there is no room for it."""
        again = [*self._frame.again, *self._random.choice(self._follow_ups), *self._frame.between]
        talk = [*row.tokens[: row.answer[1] - 1], *again]
        return talk if len(talk) + self._answer_tokens <= self._max_len else []

    def _questions(self, count: int) -> Iterator[tuple[list[int], int, int]]:
        """Prompts for answers, and where what is written of their questions begins and ends."""
        before, between = self._frame.before, self._frame.between
        params = [
            self._params(QUESTION_TEMPERATURES[index % len(QUESTION_TEMPERATURES)], self._question_tokens)
            for index in range(count)
        ]
        begun = [
            [*before, *self._random.choice(self._openings)]
            if self._openings and self._random.random() < OPENED
            else before
            for _ in range(count)
        ]
        for begin, question in zip(begun, self._generate(begun, params, without_end=True), strict=True):
            question = question[: loop_start(question)]
            if len(begin) - len(before) + len(question) >= QUESTION_TOKENS[0]:
                yield [*begin, *question, *between], len(begin), len(begin) + len(question)

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
