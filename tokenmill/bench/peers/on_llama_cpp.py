"""Drives llama.cpp for the comparison, through its C API: batches of several sequences, as its server composes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any

FORMATS = {"q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "f16": "LLAMA_FTYPE_MOSTLY_F16"}
STEP_TOKENS = 2048  # the most that one call takes in; its own default


def prepare(source: Path, variant: str, folder: Path) -> Path:
    """The file itself, or one that llama.cpp's own quantizer made of it."""
    if variant == "as is":
        return source
    target = folder / f"llama.cpp-{variant}.gguf"
    if not target.exists():
        llama = import_module("llama_cpp")
        params = llama.llama_model_quantize_default_params()
        params.ftype = getattr(llama, FORMATS[variant])
        params.allow_requantize = True
        part = target.with_suffix(".part")
        if llama.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp could not quantize {source} to {variant}")
        part.rename(target)
    return target


class PeerEngine:
    def __init__(self, model: str, variant: str, threads: int, rows: int, length: int) -> None:
        llama = self._llama = import_module("llama_cpp")
        self._numpy = import_module("numpy")
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * length, rows
        params.n_batch = STEP_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no room for {rows} x {length} tokens")
        self._batch = llama.llama_batch_init(STEP_TOKENS, 0, 1)
        self.version = f"llama-cpp-python {llama.__version__}"

    def __del__(self) -> None:
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def single(self, prompt: list[int], new: int, clock: Callable[[], Any]) -> tuple[list[int], list[Any]]:
        times: list[Any] = []
        return self._generate([prompt], new, lambda: times.append(clock()))[0], times

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        return self._generate(prompts, new, lambda: None)

    def _generate(self, prompts: list[list[int]], new: int, came: Callable[[], object]) -> list[list[int]]:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), False)
        answers = [[token] for token in self._read(prompts)]
        came()
        for step in range(new - 1):
            last = [(answer[-1], len(prompt) + step, row) for row, (prompt, answer) in enumerate(zip(prompts, answers))]
            for answer, token in zip(answers, self._decode(last, range(len(last)))):
                answer.append(token)
            came()
        return answers

    def _read(self, prompts: list[list[int]]) -> list[int]:
        """Take in the prompts, as many whole ones per call as it holds; returns the first token of each answer."""
        first: list[int] = []
        waiting: list[tuple[int, int, int]] = []
        ends: list[int] = []
        for row, prompt in enumerate(prompts):
            if waiting and len(waiting) + len(prompt) > STEP_TOKENS:
                first += self._decode(waiting, ends)
                waiting, ends = [], []
            for place, token in enumerate(prompt):
                if len(waiting) == STEP_TOKENS:  # a prompt longer than a call
                    self._decode(waiting, ())
                    waiting = []
                waiting.append((token, place, row))
            ends.append(len(waiting) - 1)
        return first + self._decode(waiting, ends)

    def _decode(self, entries: list[tuple[int, int, int]], ends: Collection[int]) -> list[int]:
        """One call with (token, position, sequence) entries; returns the likeliest next token after each of `ends`."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, place, row) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, place, 1
            batch.seq_id[index][0] = row
            batch.logits[index] = index in ends
        if self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed on {len(entries)} tokens")
        return [self._likeliest(index) for index in ends]

    def _likeliest(self, index: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, index)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())
