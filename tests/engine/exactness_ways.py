"""Ways to run the same requests that must not change an answer; for tests and for scripts/exactness_matrix.py.

A subject says how weights and keys are stored. For each subject, every way has to give the answers of the plain one:
one request at a time, its whole prompt at once, nothing cached. float64 makes rounding differences between batch shapes
(about 1e-15) far smaller than any gap between logits, so equal means equal. Where a path promises equal bits it is
compared in its own float32, log-probabilities included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.step import Pending, Step
from tokenmill.errors import StepFailed
from tokenmill.outputs import CompletionOutput, RequestOutput
from tokenmill.request_state import RequestState
from tokenmill.sampling import grammar

DATA = Path(__file__).parent.parent / "weights" / "data"
MODEL: dict[str, Any] = {  # rows are whole groups of 32
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FIRST, VOCAB = 3, 64  # tokens of prompts; the smallest vocabulary here has 64
MIXED = "int4-g32-zeros,layers.0.qkv=int8,layers.0.o=w8a8,layers.1.gate_up=fp8,lm_head=int8"

Request = tuple[list[int], SamplingParams]
Said = list[tuple[int, float]]  # tokens with their log-probabilities
Answer = tuple[Said, str | None]  # what a sequence said, and how it ended


@dataclass(frozen=True)
class Subject:
    """How weights and keys are stored and computed with."""

    options: dict[str, Any] = field(default_factory=dict)
    fixture: str | None = None  # a checkpoint of tests/weights/data; None: random weights
    dtype: str = "float64"
    bits: bool = False  # log-probabilities have to be equal bit by bit, too

    def open(self, model: str, **options: Any) -> LLM:
        source = {"model": str(DATA / self.fixture)} if self.fixture else {"model": model, "load_format": "dummy"}
        settings: dict[str, Any] = {"max_num_seqs": 4, "block_size": 16, "max_model_len": 64, "overlap": False}
        settings |= {"enable_prefix_caching": False, "skip_tokenizer_init": True, "device": "cpu", "dtype": self.dtype}
        return LLM(**source | settings | self.options | options)


WEIGHTS = ("int8", "int4-g32", "int4-g32-zeros", "w8a8", "fp8")
FIXTURES = ("w4a16_group", "w8a8_static", "mixed", "awq")
CACHES = ("int8", "fp8", "int4")
PACKED = Subject(dtype="float32", bits=True)
# Weights in each form, caches in each form, checkpoints of public tools as they are stored, and some of each together.
QUANTIZED: dict[str, Subject] = {
    **{form: Subject({"quantization": form}) for form in WEIGHTS},
    "a form per layer": Subject({"quantization": MIXED}),
    **{f"{name}, as stored": Subject(fixture=name) for name in FIXTURES},
    **{f"kv {form}": Subject({"kv_cache_dtype": form}) for form in CACHES},
    "int4-g32 + kv int8": Subject({"quantization": "int4-g32", "kv_cache_dtype": "int8"}),
    "w8a8 + kv fp8": Subject({"quantization": "w8a8", "kv_cache_dtype": "fp8"}),
    "fp8 + kv int4": Subject({"quantization": "fp8", "kv_cache_dtype": "int4"}),
    "a form per layer + kv int8": Subject({"quantization": MIXED, "kv_cache_dtype": "int8"}),
    "mixed, as stored + kv fp8": Subject({"kv_cache_dtype": "fp8"}, fixture="mixed"),
    "packed int8": replace(PACKED, options={"quantization": "int8"}),
    "packed int4-g32-zeros": replace(PACKED, options={"quantization": "int4-g32-zeros"}),
    "packed w4a16_group, as stored": replace(PACKED, fixture="w4a16_group"),
    "packed int4-g32 + kv int8": replace(PACKED, options={"quantization": "int4-g32", "kv_cache_dtype": "int8"}),
}


@dataclass(frozen=True)
class Way:
    """Settings, requests that make them matter, and a count that proves that they did."""

    options: dict[str, Any]
    requests: Callable[[Random], list[Request]]
    proof: str
    blocks: int | None = None  # of KV memory
    run: Callable[[LLM, list[Request], list[list[Answer]]], list[RequestOutput]] | None = None


class Watch:
    """Counts what happens in an engine's steps, and breaks those it is told to."""

    def __init__(self, llm: LLM) -> None:
        engine = llm._processor.engine
        assert isinstance(engine, Engine)
        self.engine = engine
        self.steps = self.together = self.chunks = self.copies = self.drafted = self.masked = 0
        self.broken: set[int] = set()  # steps from now on
        self._launch, engine.runner.launch = engine.runner.launch, self.launch  # type: ignore[method-assign]

    def launch(self, step: Step) -> Pending:
        self.steps += 1
        self.together += len(step.rows) > 1
        self.chunks += step.samples.count(0)
        self.copies += len(step.moves)
        self.drafted += sum(len(drafts) for drafts in step.drafts.values())
        self.masked += len(step.masks)
        if self.steps in self.broken:
            raise StepFailed("broken by the test")
        return self._launch(step)

    def counts(self) -> dict[str, int]:
        stats, cache = self.engine.scheduler.stats, self.engine.scheduler.kv.stats
        return {
            "rows that ran together": self.together, "parts of prompts": self.chunks, "blocks copied": self.copies,
            "drafts verified": self.drafted, "masks": self.masked, "tokens from the cache": cache.hit,
            "preemptions": stats.preemptions, "failed steps": stats.failed_steps,
        }  # fmt: skip


def write_model(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


# -- requests ---------------------------------------------------------------------------------------------------


def prompts(random: Random, count: int) -> list[list[int]]:
    """Some of them share beginnings."""
    shared = [random.randrange(FIRST, VOCAB) for _ in range(random.randrange(20, 34))]
    own = [[random.randrange(FIRST, VOCAB) for _ in range(random.randrange(1, 14))] for _ in range(count)]
    return [shared[: random.choice([0, len(shared) // 2, len(shared), len(shared)])] + tail for tail in own]


def several(random: Random, count: int = 5, least: int = 1, **fixed: Any) -> list[Request]:
    """Greedy and seeded, with every filter and penalty."""
    found = []
    for prompt in prompts(random, count):
        drawn: dict[str, Any] = {
            "temperature": random.choice([0.0, 0.0, 0.7, 1.3]), "top_k": random.choice([0, 0, 5]),
            "top_p": random.choice([1.0, 0.8]), "min_p": random.choice([0.0, 0.05]),
            "repetition_penalty": random.choice([1.0, 1.2]), "presence_penalty": random.choice([0.0, 0.5]),
            "frequency_penalty": random.choice([0.0, 0.5]), "logit_bias": random.choice([None, {5: 3.0, 9: -100.0}]),
            "seed": random.randrange(2**32), "max_tokens": random.randrange(least, 14),
            "ignore_eos": random.random() < 0.5, "stop_token_ids": random.choice([None, [7, 8]]),
        }  # fmt: skip
        found.append((prompt, SamplingParams(**{**drawn, "logprobs": 0, "detokenize": False, **fixed})))
    return found


def forks(random: Random) -> list[Request]:
    return several(random, 3, n=random.randrange(2, 4)) + several(random, 1)


def beams(random: Random) -> list[Request]:
    drawn = [(prompt, random.randrange(2, 5)) for prompt in prompts(random, 2)]
    fixed: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "detokenize": False}
    return [(prompt, SamplingParams(beam_width=width, n=width, **fixed)) for prompt, width in drawn]


def long_answers(random: Random) -> list[Request]:
    return several(random, 6, least=13, ignore_eos=True, stop_token_ids=None)


def structured(random: Random) -> list[Request]:
    form = {"structured": {"regex": "x"}, "logit_bias": None, "ignore_eos": True}
    return several(random, 3, least=13, **form) + several(random, 1)


# -- ways that need more than settings ----------------------------------------------------------------------------


def in_steps(
    llm: LLM, requests: list[Request], between: Callable[[int, list[RequestState]], None]
) -> list[RequestOutput]:
    """Like `generate`, with something done after every step."""
    processor = llm._processor
    states = [processor.prepare(prompt, params) for prompt, params in requests]
    for state in states:
        processor.submit(state)
    step = 0
    while not all(state.finished for state in states):
        processor.step()
        step += 1
        between(step, states)
    return [state.output() for state in states]


def with_drafts(llm: LLM, requests: list[Request], expected: list[list[Answer]]) -> list[RequestOutput]:
    """An oracle proposes how an answer goes on; every other time it is wrong somewhere."""
    random = Random(len(requests))

    def propose(step: int, states: list[RequestState]) -> None:
        for state, answers in zip(states, expected, strict=True):
            request = state.leader
            if request.finished or request.in_flight or random.random() < 0.3:
                continue
            guess = [token for token, _ in answers[0][0][request.num_output :][: random.randrange(1, 5)]]
            if random.random() < 0.5:
                guess.insert(random.randrange(len(guess) + 1), FIRST)
            request.drafts = guess

    return in_steps(llm, requests, propose)


def with_trouble(llm: LLM, requests: list[Request], expected: list[list[Answer]]) -> list[RequestOutput]:
    """Steps fail, and others who came with the same prompts go away in the middle of their answers."""
    processor, watch = llm._processor, _watch_of(llm)
    leaving = [processor.prepare(prompt, params) for prompt, params in requests[::2]]
    for state in leaving:
        processor.submit(state)
    watch.broken = {watch.steps + 3, watch.steps + 9}

    def leave(step: int, states: list[RequestState]) -> None:
        if leaving and step % 3 == 2:
            processor.cancel(leaving.pop())

    return in_steps(llm, requests, leave)


SMALL: dict[str, Any] = {"max_num_seqs": 8, "block_size": 8, "enable_prefix_caching": True}
WAYS: dict[str, Way] = {
    "batch": Way({"max_num_seqs": 16, "overlap": True}, several, "rows that ran together"),
    "prefix cache": Way(
        {"max_num_seqs": 8, "enable_prefix_caching": True, "overlap": True}, several, "tokens from the cache"
    ),
    "chunked prefill": Way({"max_num_seqs": 8, "max_num_batched_tokens": 16}, several, "parts of prompts"),
    "n > 1": Way({"max_num_seqs": 16, "enable_prefix_caching": True}, forks, "blocks copied"),
    "beams": Way({"max_num_seqs": 12, "enable_prefix_caching": True, "overlap": True}, beams, "blocks copied"),
    "preemption": Way(SMALL, long_answers, "preemptions", blocks=12),
    "drafts": Way(SMALL, several, "drafts verified", run=with_drafts),
    "structured output": Way({"max_num_seqs": 8, "max_num_batched_tokens": 24, "overlap": True}, structured, "masks"),
    "aborts, failed steps": Way(SMALL | {"overlap": True}, several, "failed steps", run=with_trouble),
}


# -- running and comparing ------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How the answers of one mix compare with those of the plain way."""

    answers: int = 0
    differ: list[int] = field(default_factory=list)  # requests with other tokens, or another end
    other_bits: list[int] = field(default_factory=list)  # requests with other log-probabilities
    largest: float = 0.0  # difference of log-probabilities, as far as the tokens are equal
    happened: int = 0  # how often what the way is named for did


class Engines:
    """The engines of one subject: the plain one, and those of the ways as they are needed."""

    def __init__(self, subject: Subject, model: str, plain: Subject | None = None) -> None:
        """plain: whose answers count; None: the subject's own, in the plain way."""
        self.subject, self.model = subject, model
        self.plain = (plain or subject).open(model)
        self._expected: dict[tuple[str, int], tuple[list[Request], list[list[Answer]]]] = {}  # by mix
        self._of: dict[str, LLM] = {}

    def of(self, name: str) -> LLM:
        if name not in self._of:
            way, options = WAYS[name], dict(WAYS[name].options)
            if way.blocks is not None:
                settings = self.plain._built.settings
                token_bytes = settings.memory.kv // (settings.num_blocks * settings.block_size)
                options["kv_cache_memory"] = way.blocks * options["block_size"] * token_bytes
            self._of[name] = self.subject.open(self.model, **options)
            _WATCHES[id(self._of[name])] = Watch(self._of[name])
        return self._of[name]

    def compare(self, name: str, seed: int) -> Outcome:
        """Run one random mix in this way, and in the plain one."""
        way, llm = WAYS[name], self.of(name)
        watch, outcome = _watch_of(llm), Outcome()
        before = watch.counts()[way.proof]
        with _matchers():
            requests, expected = self._plain(way, seed)
            for _ in range(2 if way.proof == "tokens from the cache" else 1):  # cold, then warm
                if way.run is not None:
                    outputs = way.run(llm, requests, expected)
                else:
                    outputs = llm.generate([p for p, _ in requests], [params for _, params in requests], use_tqdm=False)
                self._judge(outcome, _answers(outputs), expected)
                watch.engine.scheduler.check_integrity()
        outcome.happened = watch.counts()[way.proof] - before
        llm.reset_prefix_cache()
        return outcome

    def close(self) -> None:
        for llm in (self.plain, *self._of.values()):
            _WATCHES.pop(id(llm), None)
            llm.shutdown()

    def _plain(self, way: Way, seed: int) -> tuple[list[Request], list[list[Answer]]]:
        key = way.requests.__name__, seed
        if key not in self._expected:
            requests = way.requests(Random(f"{key}"))
            alone = [self.plain.generate([prompt], params, use_tqdm=False) for prompt, params in requests]
            self._expected[key] = requests, [_answers(outputs)[0] for outputs in alone]
        return self._expected[key]

    def _judge(self, outcome: Outcome, found: list[list[Answer]], expected: list[list[Answer]]) -> None:
        outcome.answers += len(expected)
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if _without_logprobs(mine) != _without_logprobs(theirs):
                outcome.differ.append(index)
            if mine != theirs:
                outcome.other_bits.append(index)
            for (said, _), (wanted, _) in zip(mine, theirs, strict=True):
                for (token, logprob), (other, its_logprob) in zip(said, wanted):
                    if token != other:
                        break
                    outcome.largest = max(outcome.largest, abs(logprob - its_logprob))


def _answers(outputs: list[RequestOutput]) -> list[list[Answer]]:
    errors = [output.error for output in outputs if output.error]
    assert not errors, errors
    return [[(_said(one), one.finish_reason) for one in output.outputs] for output in outputs]


def _said(one: CompletionOutput) -> Said:
    tables = one.logprobs or [{}] * len(one.token_ids)  # beams have none
    return [(t, table[t].logprob if table else 0.0) for t, table in zip(one.token_ids, tables, strict=True)]


def _without_logprobs(answers: list[Answer]) -> list[tuple[list[int], str | None]]:
    return [([token for token, _ in said], finish) for said, finish in answers]


_WATCHES: dict[int, Watch] = {}  # by engine


def _watch_of(llm: LLM) -> Watch:
    return _WATCHES[id(llm)]


class Matcher:
    """A grammar of 12 tokens that needs no tokenizer: of every token, a fifth of the vocabulary may follow."""

    def __init__(self) -> None:
        self.said = 0

    def allowed(self) -> Any:
        return np.arange(4096) % 5 == self.said % 5

    def compute_bitmask(self) -> bytes:
        return np.packbits(self.allowed(), bitorder="little").tobytes()

    def consume_token(self, token: int) -> bool:
        fits = bool(self.allowed()[token])
        self.said += 1
        return fits

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def compute_ff_tokens(self) -> list[int]:
        return []

    def deep_copy(self) -> Matcher:
        return copy(self)

    def is_stopped(self) -> bool:
        return self.said == 12

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


@contextmanager
def _matchers() -> Iterator[None]:
    with patch.object(grammar.Grammars, "_matcher", lambda self, text: Matcher()):
        yield
